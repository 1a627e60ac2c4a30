"""The claims of the paper and the purpose of each part of the method, next to what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import pandas as pd

from hacpo_kit.experiments.comparisons import ABLATIONS, ahead_at_half, early_step, paired_differences, scores
from hacpo_kit.experiments.selection import usable
from hacpo_kit.experiments.statistics import MEAN

NOT_RUN = {"mean": np.nan, "low": np.nan, "high": np.nan, "seeds": 0}


def claims(
    frame: pd.DataFrame, method: str = "hacpo", baseline: str = "gspo", doubled: str = "gspo_x2", margin: float = 0.01,
    last: int = 3, metric: str = "avg@1",
) -> pd.DataFrame:  # fmt: skip
    """Return for every set of agents each claim, the measured difference, and whether the claim holds.

    Columns: agents, claim, mean, low, high, seeds, result. A result is "held" if the 95 % interval lies above 0, or above
    −`margin` for "no worse"; "did not hold" if it lies below; else "undecided". Without an interval it is "no interval"
    (one seed), "no common seed" or "not run".
    """
    frame, _ = usable(frame)
    rows = []
    for agents in sorted(map(str, frame["agents"].unique())):
        part = frame[frame["agents"].astype(str) == agents]
        values, _ = scores(part, metric)
        early = early_step(values)
        difference = partial(paired_differences, part, last=last, metric=metric)
        end, half = difference(baseline), ahead_at_half(part, method, doubled, (0.5,), last=last, metric=metric)
        cost = half[half["point"] == "end"].eval("rollouts_method / rollouts_against")
        share = "half" if cost.empty or round(cost.iloc[0], 2) == 0.5 else f"{cost.iloc[0]:.0%}"
        midway, at_end = (half[half["point"] == point].assign(method=method, agent=MEAN) for point in ("50%", "end"))
        found = [
            (f"{method} is ahead of {baseline} early (step {early})", baseline, _row(difference(baseline, early), method), 0),
            (f"{method} ends ahead of {baseline}", baseline, _row(end, method), 0),
            (f"no agent ends worse than with {baseline}", baseline, weakest(end, method, margin), margin),
            (f"half way, {method} is ahead of {doubled} with half of its rollouts", doubled, _row(midway, method), 0),
            (f"{method} ends no worse than {doubled} with {share} of its rollouts", doubled, _row(at_end, method), margin),
            (f"{method} ends ahead of naive sharing", "naive", _row(difference("naive"), method), 0),
        ]  # fmt: skip
        parts = difference(method)
        found += [(f"without a part ({a}), {method} ends lower", a, _negated(_row(parts, a)), 0) for a in ABLATIONS]
        seeds = values.groupby("method", observed=True)["seed"].agg(set)
        apart = [other for other in seeds.index if method in seeds and not seeds[method] & seeds[other]]
        rows += [
            {
                "agents": agents,
                "claim": claim,
                **row,
                "result": "no common seed" if other in apart else result(row, limit),
            }
            for claim, other, row, limit in found
        ]
    return pd.DataFrame(rows)


def _row(table: pd.DataFrame, method: str) -> dict[str, float]:
    """Return the difference of a method, mean over agents."""
    rows = table[(table["agent"] == MEAN) & (table["method"] == method)]
    return rows.iloc[0][list(NOT_RUN)].to_dict() if len(rows) else NOT_RUN


def weakest(table: pd.DataFrame, method: str, margin: float) -> dict[str, float]:
    """Return the difference of an agent that is worse by the margin, else of the agent with the lowest lower bound."""
    rows = table[(table["method"] == method) & (table["agent"] != MEAN)].dropna(subset="mean")
    rows = rows.assign(not_worse=~(rows["high"] < -margin)).sort_values(["not_worse", "low", "mean"])
    return rows.iloc[0][list(NOT_RUN)].to_dict() if len(rows) else NOT_RUN


def _negated(row: Mapping[str, float]) -> dict[str, float]:
    """Return the difference of the whole method to an ablation from that of the ablation to the whole method."""
    return {"mean": -row["mean"], "low": -row["high"], "high": -row["low"], "seeds": row["seeds"]}


def result(row: Mapping[str, float], margin: float) -> str:
    """Return whether a claim holds whose difference must lie above −`margin`."""
    if row["seeds"] == 0:
        return "not run"
    if np.isnan(row["low"]):
        return "no interval"
    if row["low"] > -margin:
        return "held"
    return "did not hold" if row["high"] < -margin else "undecided"
