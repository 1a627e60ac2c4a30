"""The claims of the paper and the purpose of each part of the method, next to what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import pandas as pd

from hacpo_kit.experiments.comparisons import ABLATIONS, ahead_at_half, early_step, paired_differences
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
    (one common seed) or "not run" (none).
    """
    frame, _ = usable(frame)
    rows = []
    for agents in sorted(map(str, frame["agents"].unique())):
        part = frame[frame["agents"].astype(str) == agents]
        difference = partial(paired_differences, part, last=last, metric=metric)
        early, end, parts = early_step(part, metric), difference(baseline), difference(method)
        half = ahead_at_half(part, method, doubled, (0.5,), last, metric).assign(method=method, agent=MEAN)
        midway, at_end = half[half["point"] == "50%"], half[half["point"] == "end"]
        found = [
            (f"{method} is ahead of {baseline} early (step {early})", _row(difference(baseline, early), method), 0),
            (f"{method} ends ahead of {baseline}", _row(end, method), 0),
            (f"no agent ends worse than with {baseline}", weakest(end, method, margin), margin),
            (f"half way, {method} is ahead of {doubled} with half of its rollouts", _row(midway, method), 0),
            (f"{method} ends no worse than {doubled}", _row(at_end, method), margin),
            (f"{method} ends ahead of naive sharing", _row(difference("naive"), method), 0),
            *((f"without a part ({a}), {method} ends lower", _negated(_row(parts, a)), 0) for a in ABLATIONS),
        ]  # fmt: skip
        rows += [{"agents": agents, "claim": text, **row, "result": result(row, limit)} for text, row, limit in found]
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
