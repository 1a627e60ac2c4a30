"""Comparison of methods (`hk.compare`): each function takes the table of `hk.read_runs` and returns a table.

Seeds are the independent repetitions. Values are averaged over the agents of a run first, then over seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd

from hacpo_kit.config import did_you_mean
from hacpo_kit.experiments.selection import method_order, usable
from hacpo_kit.experiments.statistics import BEFORE, MEAN, over_seeds, paired, percent
from hacpo_kit.experiments.statistics import interval as interval
from hacpo_kit.experiments.statistics import points as points
from hacpo_kit.experiments.statistics import verdict as verdict
from hacpo_kit.experiments.tables import read_runs as load  # noqa: F401

ABLATIONS = ("no_capability_baseline", "no_discrepancy", "alpha=0", "delta_step=0", "no_clip")
RUN = ["agents", "method", "seed", "run"]
NOT_RUN = {"mean": np.nan, "low": np.nan, "high": np.nan, "seeds": 0}


# ── values of a metric, one row per run, agent and step ──────────────────────────────────────────────────────────────


def scores(frame: pd.DataFrame, metric: str = "avg@1") -> tuple[pd.DataFrame, list[str]]:
    """Return the values of a metric for every run, agent and step and for the agents' mean, and notes as in `usable`.

    Columns: agents, method, seed, run, step, agent, value, and the cumulative rollouts and tokens per agent. A step at
    which the value of an agent is missing has no mean. Raises ValueError for a metric that no run has.
    """
    frame, notes = usable(frame)
    of_agents = frame[frame["agent"] != ""]
    rows = of_agents[of_agents["metric"] == metric].dropna(subset="value")
    if rows.empty:
        known = sorted(set(map(str, frame["metric"])))
        raise ValueError(f"no metric {metric!r}{did_you_mean(metric, known)}; there are {', '.join(known)}")
    costs = [c for c in ("rollouts", "tokens") if c in rows]
    rows = rows[[*RUN, "step", "agent", "value", *costs]].astype(dict.fromkeys(("agents", "run", "agent"), str))
    agents_per_run = of_agents.groupby("run", observed=True)["agent"].nunique()
    rows[costs] = rows[costs].div(rows["run"].map(agents_per_run.rename(str)), axis=0)
    expected = rows.groupby("agents")["agent"].nunique()
    by_step = rows.groupby([*RUN, "step", *costs], observed=True)["value"].agg(["mean", "size"]).reset_index()
    complete = by_step["size"] == by_step["agents"].map(expected)
    if len(incomplete := by_step[~complete]):
        places = ", ".join(f"{r.run} at step {r.step}" for r in incomplete.itertuples())
        notes.append(f"{metric} of an agent is missing or NaN, so there is no mean over agents: {places}.")
    means = by_step[complete].drop(columns="size").rename(columns={"mean": "value"}).assign(agent=MEAN)
    return pd.concat([rows, means], ignore_index=True), notes


def at_step(rows: pd.DataFrame, step: int | str, last: int) -> pd.DataFrame:
    """Return one value per run and agent: that of a step, or ("end") the mean of the `last` evaluations after step 0."""
    if step != "end":
        return rows[rows["step"] == step]
    if last < 1:
        raise ValueError(f"last={last}: it must be at least 1 evaluation")
    trained = rows[rows["step"] > 0].sort_values("step")
    tail = trained.groupby([*RUN, "agent"], observed=True).tail(last)
    return tail.groupby([*RUN, "agent"], observed=True).agg(value=("value", "mean"), step=("step", "max")).reset_index()


def early_step(frame: pd.DataFrame, metric: str = "avg@1") -> int:
    """Return the first evaluated step after a quarter of the training, a choice that does not depend on the results."""
    steps = frame.loc[frame["metric"] == metric, "step"]
    return int(steps[steps >= steps.max() / 4].min())


def _not_run(rows: pd.DataFrame, methods: Sequence[str], agents: str) -> list[str]:
    missing = [method for method in methods if method not in set(rows["method"])]
    return [f"No finished run on {agents} of: {', '.join(missing)}."] if missing else []


def _table(parts: Sequence[pd.DataFrame], columns: Sequence[str], notes: Sequence[str]) -> pd.DataFrame:
    table = pd.concat(parts, ignore_index=True)[[*columns]] if parts else pd.DataFrame(columns=[*columns])
    table.attrs["notes"] = list(notes)
    return table


# ── curves and tables ────────────────────────────────────────────────────────────────────────────────────────────────


def accuracy_curves(
    frame: pd.DataFrame, by: Sequence[str] = ("agents", "method"), x: str = "rollouts", metric: str = "avg@1"
) -> pd.DataFrame:
    """Return the mean of a metric over agents and seeds along training, with its 95 % t-interval over seeds.

    `x` is "step", or "rollouts" or "tokens" *per agent*: all that the agents of a run have sampled so far, divided by the
    number of agents. This is the cost of training all agents: a step of hacpo costs as much as one of gspo, and a step of
    gspo_x2 costs twice as much. Training only one agent with hacpo costs as much as training all n, because its peers
    have to sample too. With "agent" in `by` the agents are not averaged.

    Columns: those of `by`, step, `x`, mean, low, high, seeds. Notes are in `.attrs["notes"]`.
    """
    rows, notes = scores(frame, metric)
    if x != "step" and x not in rows:
        raise ValueError(f"x={x!r}: it must be step, rollouts or tokens, and a column of the frame")
    rows = rows[rows["agent"] != MEAN] if "agent" in by else rows[rows["agent"] == MEAN]
    table = over_seeds(rows, [*by, "step"])
    if x != "step":  # tokens differ between seeds: the curve is drawn at their mean
        table = table.merge(rows.groupby([*by, "step"], observed=True)[x].mean().reset_index())
    return _table([table], [*by, *dict.fromkeys(["step", x]), "mean", "low", "high", "seeds"], notes)


def final_table(frame: pd.DataFrame, metric: str = "avg@1") -> pd.DataFrame:
    """Return the accuracy before training and after the last step on every test set, mean over seeds.

    Test sets are the metrics `avg@1/<set>` and their average, or `avg@1` alone. Columns: agents, agent, method (or "before
    training"), set, mean, low, high, seeds. A run that lacks a set has no average. Before training low and high are NaN,
    because all seeds start from the same agents.
    """
    names = [m for m in dict.fromkeys(map(str, frame["metric"])) if m.startswith(f"{metric}/")] or [metric]
    parts, notes, key = [], [], ["agents", "agent", "method"]
    for name in names:
        rows, found = scores(frame, name)
        notes += [note for note in found if note not in notes]
        start = rows[rows["step"] == 0].drop_duplicates(["agents", "agent", "seed"]).assign(method=BEFORE)
        part = pd.concat([at_step(rows, "end", 1), start]).astype({"method": str})
        parts.append(part.assign(set=name.removeprefix(f"{metric}/")))
    rows = pd.concat(parts)
    if len(names) > 1:
        average = rows.groupby([*key, "run"])["value"].agg(["mean", "size"]).reset_index()
        average = average[average["size"] == len(names)].rename(columns={"mean": "value"})
        rows = pd.concat([rows, average.assign(set="average")])
    table = over_seeds(rows, [*key, "set"])
    table.loc[table["method"] == BEFORE, ["low", "high"]] = np.nan
    order = {"agent": sorted(table["agent"].unique(), key=lambda agent: (agent == MEAN, agent)),
             "method": [BEFORE, *method_order(rows.loc[rows["method"] != BEFORE, "method"])],
             "set": list(dict.fromkeys(rows["set"]))}  # fmt: skip
    ordered = {name: pd.CategoricalDtype(values) for name, values in order.items()}
    table = table.astype(ordered).sort_values(["agents", *order]).astype(dict.fromkeys(order, str))
    return _table([table], [*key, "set", "mean", "low", "high", "seeds"], notes)


def final_text(table: pd.DataFrame) -> pd.DataFrame:
    """Return `final_table` as text, one column per test set: mean ± half the width of the 95 % interval, in percent."""
    text = table.assign(text=[percent(r.mean, r.high - r.mean) for r in table.itertuples()])
    return text.set_index(["agents", "agent", "method", "set"])["text"].unstack("set", sort=False, fill_value="–")


def targets(frame: pd.DataFrame, against: str = "gspo", share: float = 0.9, metric: str = "avg@1") -> dict[str, float]:
    """Return for each set of agents the accuracy at a share of the improvement of a method, mean over seeds."""
    rows, _ = scores(frame, metric)
    rows = rows[(rows["agent"] == MEAN) & (rows["method"] == against)]
    start, end = (r.groupby("agents")["value"].mean() for r in (rows[rows["step"] == 0], at_step(rows, "end", 1)))
    return (start + share * (end - start)).dropna().to_dict()


def rollouts_to_reach(
    frame: pd.DataFrame, target: float | Mapping[str, float], x: str = "rollouts", metric: str = "avg@1"
) -> pd.DataFrame:
    """Return how many rollouts per agent each method needs until the agents' mean first reaches an accuracy.

    `target` is one accuracy, or one for each set of agents; sets without a target are named in the notes. Between
    evaluations the accuracy is interpolated. A run that does not reach the target counts as infinity in the median over
    seeds. Columns: agents, method, target, median, earliest, latest, reached, seeds, sampled (by the longest run).
    """
    rows, notes = scores(frame, metric)
    rows = rows[rows["agent"] == MEAN].sort_values("step")
    goals = dict.fromkeys(rows["agents"], target) if isinstance(target, int | float) else dict(target)
    if without := sorted(set(rows["agents"]) - set(goals)):
        notes.append(f"No target was given for {', '.join(without)}.")
    rows = rows[rows["agents"].isin(goals)]
    needed = [
        {"agents": agents, "method": method, "needed": _first_reach(run[x], run["value"], goals[agents]), "end": run[x].max()}
        for (agents, method, _), run in rows.groupby(["agents", "method", "run"], observed=True)
    ]  # fmt: skip
    columns = {
        "median": ("needed", "median"), "earliest": ("needed", "min"), "latest": ("needed", "max"),
        "reached": ("needed", lambda x: int(np.isfinite(x).sum())), "seeds": ("needed", "size"), "sampled": ("end", "max"),
    }  # fmt: skip
    table = pd.DataFrame(needed, columns=["agents", "method", "needed", "end"])
    table["method"] = pd.Categorical(table["method"], categories=rows["method"].cat.categories)
    table = table.groupby(["agents", "method"], observed=True).agg(**columns).reset_index()
    table.insert(2, "target", table["agents"].map(goals))
    if never := int((table["seeds"] - table["reached"]).sum()):
        notes.append(f"{never} of {table['seeds'].sum()} runs never reach the target; they count as infinity.")
    return _table([table], table.columns, notes)


def _first_reach(x: pd.Series, y: pd.Series, target: float) -> float:
    """Return the x at which a line through the points first reaches the target, infinity if it never does."""
    x, y = x.to_numpy(float), y.to_numpy(float)
    if not (y >= target).any():
        return float("inf")
    first = int(np.argmax(y >= target))
    around = slice(max(first - 1, 0), first + 1)
    return float(np.interp(target, y[around], x[around]))


# ── differences over the same seeds ──────────────────────────────────────────────────────────────────────────────────


def paired_differences(
    frame: pd.DataFrame, against: str = "gspo", step: int | str = "end", last: int = 3, metric: str = "avg@1"
) -> pd.DataFrame:
    """Return the accuracy of every method minus that of `against`, paired by seed, for each agent and their mean.

    `step` is a step, or "end", the mean of the `last` evaluations. Columns: agents, method, agent, mean, low, high (95 %
    t-interval), seeds (pairs), unpaired (seeds that only one of the two methods has, "" for none). Raises ValueError for a
    step that was not evaluated.
    """
    rows, notes = scores(frame, metric)
    values, parts = at_step(rows, step, last), []
    if values.empty:
        known = ", ".join(map(str, sorted(set(rows["step"]))))
        raise ValueError(f"no run was evaluated at step {step}; there are {known}")
    for agents, group in values.groupby("agents"):
        if missing := _not_run(group, [against], agents):
            notes += missing
            continue
        parts.append(paired(group, against).assign(agents=agents))
    columns = ["agents", "method", "agent", "mean", "low", "high", "seeds", "unpaired"]
    table = _table(parts, columns, notes)
    for r in table[(table["unpaired"] != "") & (table["agent"] == MEAN)].itertuples():
        note = f"{r.method} and {against} on {r.agents}: only one of them has seed {r.unpaired}, which is excluded."
        table.attrs["notes"].append(note)
    return table


def ahead_at_half(
    frame: pd.DataFrame, method: str = "hacpo", against: str = "gspo_x2", shares: Sequence[float] = (0.25, 0.5, 1.0),
    last: int = 3, metric: str = "avg@1",
) -> pd.DataFrame:  # fmt: skip
    """Return the difference of a method to another one with twice as many rollouts, during training and at the end.

    For each share of the rollouts that `against` samples: the accuracy of `method` after half as many rollouts minus that
    of `against`, mean over agents, paired by seed, interpolated between evaluations. The row "end" compares the means of
    the `last` evaluations. Columns: agents, point, rollouts_method, rollouts_against (per agent), mean, low, high, seeds,
    unpaired. A point beyond the rollouts of `method` is NaN and named in the notes.
    """
    rows, notes = scores(frame, metric)
    rows = rows[(rows["agent"] == MEAN) & rows["method"].isin([method, against])].sort_values("step")
    columns = ["agents", "point", "rollouts_method", "rollouts_against", "mean", "low", "high", "seeds", "unpaired"]
    parts = []
    for agents, group in rows.groupby("agents"):
        if missing := _not_run(group, (method, against), agents):
            notes += missing
            continue
        sampled = group.groupby("method", observed=True)["rollouts"].max()
        points = []
        for share in shares:
            where = {against: share * sampled[against], method: share * sampled[against] / 2}
            if where[method] > sampled[method]:
                notes.append(f"On {agents} {method} never sampled {where[method]:.0f} rollouts per agent.")
            values = group.groupby(RUN, observed=True).apply(_value_at, where, include_groups=False)
            points.append((f"{share:.0%}", where, values.rename("value").reset_index().assign(agent=MEAN)))
        for point, where, values in [*points, ("end", sampled, at_step(group, "end", last))]:
            where = {"rollouts_method": where[method], "rollouts_against": where[against]}
            parts.append(paired(values, against).assign(agents=agents, point=point, **where))
    return _table(parts, columns, notes)


def _value_at(run: pd.DataFrame, where: Mapping[str, float]) -> float:
    """Return the accuracy of a run after a number of rollouts, NaN beyond its last evaluation."""
    x = where[run.name[1]]
    return float(np.interp(x, run["rollouts"], run["value"], left=np.nan, right=np.nan))


# ── the claims of the paper and the purpose of each part of the method ───────────────────────────────────────────────


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
            *((f"without a part ({a}), {method} ends lower", _row(parts, a, -1), 0) for a in ABLATIONS),
        ]  # fmt: skip
        rows += [{"agents": agents, "claim": text, **row, "result": result(row, limit)} for text, row, limit in found]
    return pd.DataFrame(rows)


def _row(table: pd.DataFrame, method: str, sign: int = 1) -> dict[str, float]:
    """Return the difference of a method, mean over agents; sign=-1: the difference in the other direction."""
    rows = table[(table["agent"] == MEAN) & (table["method"] == method)]
    if rows.empty:
        return NOT_RUN
    mean, seeds, low, high = rows.iloc[0][["mean", "seeds", "low", "high"]]
    low, high = sorted((sign * low, sign * high))
    return {"mean": sign * mean, "low": low, "high": high, "seeds": seeds}


def weakest(table: pd.DataFrame, method: str, margin: float) -> dict[str, float]:
    """Return the difference of an agent that is worse by the margin, else of the agent with the lowest lower bound."""
    rows = table[(table["method"] == method) & (table["agent"] != MEAN)].dropna(subset="mean")
    rows = rows.assign(not_worse=~(rows["high"] < -margin)).sort_values(["not_worse", "low", "mean"])
    return rows.iloc[0][list(NOT_RUN)].to_dict() if len(rows) else NOT_RUN


def result(row: Mapping[str, float], margin: float) -> str:
    """Return whether a claim holds whose difference must lie above −`margin`."""
    if row["seeds"] == 0:
        return "not run"
    if np.isnan(row["low"]):
        return "no interval"
    if row["low"] > -margin:
        return "held"
    return "did not hold" if row["high"] < -margin else "undecided"
