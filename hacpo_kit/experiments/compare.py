"""Methods beside each other: curves, tables and differences from the tidy frame of many runs, with intervals over seeds.

Seeds are what is independent here. Agents of one run are averaged first, then mean and interval are taken over seeds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from hacpo_kit.config import METHODS, Config, did_you_mean

if TYPE_CHECKING:
    from pandas.io.formats.style import Styler

ABLATIONS = ("no_capability_baseline", "no_discrepancy", "alpha=0", "delta_step=0", "no_clip")
MEAN = "mean of agents"  # stands where an agent's name stands
BEFORE = "before training"  # stands where a method's name stands
NEEDED = ("run", "step", "agent", "metric", "value", "rollouts", "agents", "method", "seed", "steps", "finished")
# settings that every method has; where they differ between methods, it is not only the methods that are compared
SHARED = (
    "prompts_per_step", "n", "temperature", "max_new_tokens", "minibatch", "lr", "warmup", "beta1", "beta2", "adam_eps",
    "weight_decay", "max_grad_norm", "beta", "steps",
)  # fmt: skip
RUN = ["agents", "method", "seed", "run"]


def load(runs: str | Path) -> pd.DataFrame:
    """The tidy frame of a Parquet file or of a folder of runs; a relative path may start at the repository's root.

    What could not be read stands in `.attrs["notes"]`, which Parquet keeps. Raises FileNotFoundError for a path that does
    not exist.
    """
    from hacpo_kit.experiments.sweeps import read_runs

    project = Path(__file__).resolve().parents[2]
    found = [p for p in (Path(runs), project / runs) if p.exists()]
    if not found:
        raise FileNotFoundError(f"no folder of runs and no Parquet file {str(runs)!r}, neither here nor in the project")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frame = read_runs(found[0])
    # as notes they reach the page, where a warning would be lost once the table is stored
    frame.attrs["notes"] = frame.attrs.get("notes", []) + [
        f"Not all could be read: {w.message}." for w in caught if w.category is UserWarning
    ]
    return frame


# ── which runs can be compared ───────────────────────────────────────────────────────────────────────────────────


def usable(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The runs that can be compared, and a sentence for all that was left out or told apart.

    Unfinished runs and repeats of a seed are left out. Runs of one method with other settings than the method's own become a
    method of their own, "hacpo · alpha=3.0", and so do runs whose settings changed on the way, "hacpo · lr=1e-05 from step 4".
    Every function below starts with this; on its own result it changes nothing.
    Raises ValueError for a missing column, and if nothing is left.
    """
    for column in NEEDED:
        if column not in frame:
            raise ValueError(f"no column {column!r}{did_you_mean(column, frame.columns)}; read runs with hk.read_runs")
    runs = frame.drop_duplicates("run").set_index("run")
    notes = list(frame.attrs.get("notes", []))
    if unfinished := sorted(map(str, runs.index[~runs["finished"].astype(bool)])):
        notes.append(f"{_count(unfinished, 'unfinished run')} left out: {', '.join(unfinished)}.")
    runs = runs[runs["finished"].astype(bool)]
    if runs.empty:
        raise ValueError(f"there is no finished run to compare ({len(unfinished)} unfinished)")
    labels, told = _variants(runs)
    runs = runs.assign(method=labels)
    repeats = runs[runs[["agents", "method", "seed"]].astype(str).duplicated()]
    if len(repeats):
        names = sorted(map(str, repeats.index))
        notes.append(f"{_count(names, 'repeat')} of a seed left out: {', '.join(names)}.")
    runs = runs.drop(repeats.index)
    out = frame[frame["run"].isin(runs.index)]
    methods = pd.Categorical(out["run"].astype(str).map(runs["method"].rename(str)), categories=_order(runs["method"]))
    out = out.assign(method=methods)
    out.attrs = {}  # said once
    return out, notes + told + _unequal_settings(runs)


def _variants(runs: pd.DataFrame) -> tuple[pd.Series, list[str]]:
    """Method names that tell runs of a method with different settings apart."""
    settings = [c for c in Config.model_fields if c in runs and c not in ("method", "seed")]
    settings = [c for c in settings if runs[c].nunique() > 1]
    labels, notes = runs["method"].astype(str), []
    changed = runs["changed"].astype(object).fillna("") if "changed" in runs else {}  # earlier tables lack it
    fresh = [run for run, how in changed.items() if how and f" · {how}" not in labels[run]]
    for run in fresh:
        labels[run] += f" · {changed[run]}"
    if fresh:
        notes.append(
            f"Settings changed within {_count(fresh, 'run')}, which stand apart: {', '.join(map(str, fresh))}."
        )
    for (agents, method), group in runs.groupby(["agents", labels], observed=True):
        own = Config.from_dict({"method": method, **METHODS.get(method.split(" · ")[0], {})})
        usual = {**{name: getattr(own, name) for name in settings}, "steps": group["steps"].max()}
        several = [name for name in usual if group[name].astype(str).nunique() > 1]
        if not several:
            continue
        for run, row in group.iterrows():
            labels[run] = " · ".join([method, *(f"{k}={row[k]}" for k in several if str(row[k]) != str(usual[k]))])
        names = ", ".join(_order(labels[group.index]))
        notes.append(f"{method} was run on {agents} with several values of {', '.join(several)}: {names}.")
    return labels, notes


def _order(methods: pd.Series) -> list[str]:
    """Methods as the package lists them, then all others by name."""
    present = set(map(str, methods))
    return [m for m in METHODS if m in present] + sorted(present - set(METHODS))


def _unequal_settings(runs: pd.DataFrame) -> list[str]:
    """A sentence for every setting that differs between the methods of a set although all methods have it."""
    notes = []
    plain = runs[~runs["method"].str.contains(" · ", regex=False)]  # what a label tells needs no second sentence
    for agents, group in plain.groupby("agents", observed=True):
        for name in (s for s in SHARED if s in group and group[s].astype(str).nunique() > 1):
            each = group.groupby("method", sort=False)[name].unique()
            values = "; ".join(f"{m}: {', '.join(map(str, v))}" for m, v in each.items())
            notes.append(f"On {agents} the methods differ in {name} too ({values}).")
    return notes


def _count(things: Sequence[Any], name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


# ── values of a metric, one row a run, agent and step ────────────────────────────────────────────────────────────


def scores(frame: pd.DataFrame, metric: str = "avg@1") -> tuple[pd.DataFrame, list[str]]:
    """Values of a metric for every run, agent and step, the agents' mean among them, and notes as in `usable`.

    Columns: agents, method, seed, run, step, agent, value, and per agent and cumulative: rollouts, tokens if given.
    A step where an agent's value is missing has no mean. Raises ValueError for a metric that no run has.
    """
    frame, notes = usable(frame)
    size = frame[frame["agent"] != ""].groupby("run", observed=True)["agent"].nunique()
    rows = frame[(frame["metric"] == metric) & (frame["agent"] != "")]
    if rows.empty:
        known = sorted(set(map(str, frame["metric"])))
        raise ValueError(f"no metric {metric!r}{did_you_mean(metric, known)}; there are {', '.join(known)}")
    if lost := int(rows["value"].isna().sum()):
        notes.append(f"{lost} values of {metric} are no numbers and count as missing.")
        rows = rows.dropna(subset="value")
    costs = [c for c in ("rollouts", "tokens") if c in rows]
    rows = rows[[*RUN, "step", "agent", "value", *costs]].astype(dict.fromkeys(("agents", "run", "agent"), str))
    rows[costs] = rows[costs].div(rows["run"].map(size.rename(str)), axis=0)
    expected = rows.groupby("agents")["agent"].nunique()
    by_step = rows.groupby([*RUN, "step", *costs], observed=True)["value"].agg(["mean", "size"]).reset_index()
    whole = by_step["size"] == by_step["agents"].map(expected)
    if len(lacking := by_step[~whole]):
        where = ", ".join(f"{r.run} at step {r.step}" for r in lacking.itertuples())
        notes.append(f"{metric} of an agent is missing, so there is no mean over agents: {where}.")
    means = by_step[whole].drop(columns="size").rename(columns={"mean": "value"}).assign(agent=MEAN)
    return pd.concat([rows, means], ignore_index=True), notes


def interval(values: pd.Series, level: str | list[str]) -> pd.DataFrame:
    """Mean and 95 % t-interval of the mean over runs, for each value of index levels; one run has no interval (NaN)."""
    from scipy.special import stdtrit  # the quantile of scipy.stats.t, which takes seconds to import

    grouped = values.groupby(level=level, observed=True)
    mean, n, std = grouped.mean(), grouped.size(), grouped.std(ddof=1)
    half = pd.Series(stdtrit(np.maximum(n - 1, 1), 0.975), n.index) * std / np.sqrt(n)
    return pd.DataFrame({"mean": mean, "low": mean - half, "high": mean + half, "runs": n})


def _over_seeds(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Mean, low, high and number of seeds of the column `value`."""
    table = interval(rows.set_index([*by, "run"])["value"], list(by))
    return table.rename(columns={"runs": "seeds"}).reset_index()


def _at(rows: pd.DataFrame, step: int | str, last: int) -> pd.DataFrame:
    """One value a run and agent: of one step, or the mean of the `last` evaluations ("end"); step 0 is not training."""
    if step != "end":
        return rows[rows["step"] == step]
    if last < 1:
        raise ValueError(f"last={last}: the end is the mean of at least one evaluation")
    trained = rows[rows["step"] > 0].sort_values("step")
    tail = trained.groupby([*RUN, "agent"], observed=True).tail(last)
    return tail.groupby([*RUN, "agent"], observed=True).agg(value=("value", "mean"), step=("step", "max")).reset_index()


def _noted(table: pd.DataFrame, notes: Sequence[str]) -> pd.DataFrame:
    table.attrs["notes"] = list(notes)
    return table


# ── curves ───────────────────────────────────────────────────────────────────────────────────────────────────────


def accuracy_curves(
    frame: pd.DataFrame, by: Sequence[str] = ("agents", "method"), x: str = "rollouts", metric: str = "avg@1"
) -> pd.DataFrame:
    """Mean of a metric over agents and seeds along training, with the 95 % t-interval over seeds of the mean over agents.

    `x`: "step", or "rollouts" or "tokens" sampled so far *per agent*: what all agents of a run sampled, divided by their
    number. That is the price of training all of them: hacpo and gspo pay the same for a step, gspo_x2 twice as much,
    although a learner in hacpo *uses* the rollouts of all n agents. Whoever wants only one of the agents pays n times as
    much with hacpo, since the others have to sample too. With "agent" in `by`, agents are not averaged.
    Columns: those of `by`, step, `x`, mean, low, high, seeds. Notes in `.attrs["notes"]`.
    """
    rows, notes = scores(frame, metric)
    if x != "step" and x not in rows:
        raise ValueError(f"x={x!r}: it must be step, rollouts or tokens, and a column of the frame")
    rows = rows[rows["agent"] != MEAN] if "agent" in by else rows[rows["agent"] == MEAN]
    table = _over_seeds(rows, [*by, "step"])
    if x != "step":  # tokens differ from seed to seed: their mean is where the point stands
        table = table.merge(rows.groupby([*by, "step"], observed=True)[x].mean().reset_index())
    return _noted(table[[*by, *dict.fromkeys(["step", x]), "mean", "low", "high", "seeds"]], notes)


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────


def final_table(frame: pd.DataFrame, metric: str = "avg@1") -> pd.DataFrame:
    """Accuracy after the last step: agents (and their mean) by method, one column a test set, and the sets' average.

    Rows: agents, agent, method, "before training" among the methods. Columns: (test set, mean | half), half the width of the
    95 % interval over seeds (NaN for one seed), and seeds. Test sets are the metrics `avg@1/<set>`; without any, `avg@1` alone.
    """
    known = [m for m in dict.fromkeys(map(str, frame["metric"])) if m.startswith(f"{metric}/")]
    parts, notes = [], []
    for name in known or [metric]:
        rows, said = scores(frame, name)
        notes += [n for n in said if n not in notes]
        # all methods of a seed start from the same agents, so a seed counts once
        before = rows[rows["step"] == 0].groupby(["agents", "agent", "seed"])["value"].mean().reset_index()
        before = before.assign(method=BEFORE, run=before["seed"].map("seed {}".format))
        parts.append(pd.concat([_at(rows, "end", 1), before]).assign(set=name.removeprefix(f"{metric}/")))
    rows = pd.concat(parts)
    sets = list(dict.fromkeys(rows["set"]))
    keys = ["agents", "agent", "method", "run"]
    values = rows.assign(method=rows["method"].astype(str)).pivot_table(index=keys, columns="set", values="value")[sets]
    if len(sets) > 1:
        values["average"] = values[sets].mean(axis=1, skipna=False)  # an average over fewer sets would be another one
    seeds = values.groupby(level=keys[:3]).size()
    table = pd.concat({name: _mean_half(values[name].dropna(), keys[:3]) for name in values}, axis=1)
    trained = seeds.index.get_level_values("method") != BEFORE
    table[("seeds", "")] = seeds.where(trained)  # all seeds start from the same agents: that is no interval over seeds
    table.loc[~trained, [(name, "half") for name in values]] = np.nan
    methods = [BEFORE, *_order(rows.loc[rows["method"] != BEFORE, "method"])]
    rank = [(a, name == MEAN, name, methods.index(m)) for a, name, m in table.index]
    return _noted(table.iloc[sorted(range(len(table)), key=rank.__getitem__)], notes)


def _mean_half(values: pd.Series, by: list[str]) -> pd.DataFrame:
    table = interval(values, by)
    return pd.DataFrame({"mean": table["mean"], "half": table["high"] - table["mean"]})


def ablation_table(
    frame: pd.DataFrame, base: str = "hacpo", early: int | None = None, last: int = 3, metric: str = "avg@1"
) -> pd.DataFrame:
    """What hacpo loses without each of its parts: accuracy early and at the end, and the paired difference to hacpo.

    Early is one step, by default the first evaluation after a quarter of the training; the end is the mean of the last
    evaluations. Columns: agents, method, when ("early" | "end"), step, mean, low, high, seeds (of the accuracy), difference,
    difference_low, difference_high, pairs. An ablation that was not run is named in `.attrs["notes"]`.
    """
    rows, notes = scores(frame, metric)
    rows = rows[(rows["agent"] == MEAN) & rows["method"].isin([base, *ABLATIONS])]
    parts = []
    for agents, group in rows.groupby("agents"):
        if absent := [m for m in (base, *ABLATIONS) if m not in set(group["method"])]:
            notes.append(f"No finished run on {agents} of: {', '.join(absent)}.")
        for when, step in (("early", quarter(group) if early is None else early), ("end", "end")):
            values = _at(group, step, last)
            here = _over_seeds(values, ["agents", "method"]).assign(when=when, step=values["step"].max())
            paired = _paired(values, base).rename(
                columns={"mean": "difference", "low": "difference_low", "high": "difference_high", "seeds": "pairs"}
            )
            parts.append(here.merge(paired.drop(columns="agent"), how="left", on=["agents", "method"]))
    columns = [
        "agents",
        "method",
        "when",
        "step",
        "mean",
        "low",
        "high",
        "seeds",
        "difference",
        "difference_low",
        "difference_high",
        "pairs",
    ]
    if not parts:
        return _noted(pd.DataFrame(columns=columns), [*notes, f"No run of {base} or of an ablation of it."])
    return _noted(pd.concat(parts, ignore_index=True)[columns], notes)


def quarter(rows: pd.DataFrame) -> int:
    """The first step that was evaluated after a quarter of the training: early, and chosen before the results are known."""
    steps = sorted(s for s in rows["step"].unique() if s > 0)
    return int(next(s for s in steps if s >= max(steps) / 4))


def targets(frame: pd.DataFrame, against: str = "gspo", share: float = 0.9, metric: str = "avg@1") -> dict[str, float]:
    """For each set of agents the accuracy at a share of the way from the start to where a method ends, mean over seeds."""
    rows, _ = scores(frame, metric)
    rows = rows[(rows["agent"] == MEAN) & (rows["method"] == against)]
    start, end = rows[rows["step"] == 0].groupby("agents")["value"].mean(), _at(rows, "end", 1)
    return (start + share * (end.groupby("agents")["value"].mean() - start)).dropna().to_dict()


def rollouts_to_reach(
    frame: pd.DataFrame, target: float | Mapping[str, float], x: str = "rollouts", metric: str = "avg@1"
) -> pd.DataFrame:
    """Rollouts per agent until the mean over agents first reaches an accuracy, by method; between evaluations a straight line.

    `target`: one accuracy, or one for each set of agents (sets without one are left out and noted). A run that does not reach
    it counts as infinitely late: `median` is over *all* seeds, and infinite if half of them or more never get there.
    Columns: agents, method, target, median, earliest, latest, reached, seeds, sampled (by the longest run).
    """
    rows, notes = scores(frame, metric)
    rows = rows[rows["agent"] == MEAN].sort_values("step")
    goals = dict.fromkeys(rows["agents"], target) if isinstance(target, int | float) else dict(target)
    if without := sorted(set(rows["agents"]) - set(goals)):
        notes.append(f"No accuracy to reach was given for {', '.join(without)}.")
    rows = rows[rows["agents"].isin(goals)]
    needed = [
        {"agents": agents, "method": method, "when": _first_reach(run[x], run["value"], goals[agents]), "end": run[x].max()}
        for (agents, method, _), run in rows.groupby(["agents", "method", "run"], observed=True)
    ]  # fmt: skip
    columns = {
        "median": ("when", "median"), "earliest": ("when", "min"), "latest": ("when", "max"),
        "reached": ("when", lambda w: int(np.isfinite(w).sum())), "seeds": ("when", "size"), "sampled": ("end", "max"),
    }  # fmt: skip
    table = pd.DataFrame(needed, columns=["agents", "method", "when", "end"])
    table["method"] = pd.Categorical(table["method"], categories=rows["method"].cat.categories)
    table = table.groupby(["agents", "method"], observed=True).agg(**columns).reset_index()
    table.insert(2, "target", table["agents"].map(goals))
    if late := int((table["seeds"] - table["reached"]).sum()):
        notes.append(f"{late} of {table['seeds'].sum()} runs never reach it; they count as infinitely late.")
    return _noted(table, notes)


def _first_reach(x: pd.Series, y: pd.Series, target: float) -> float:
    """Where a line through the points first is at the target; infinity if it never is."""
    x, y = x.to_numpy(float), y.to_numpy(float)
    there = np.flatnonzero(y >= target)
    if not len(there):
        return float("inf")
    i = there[0]
    if i == 0:
        return float(x[0])
    return float(x[i - 1] + (x[i] - x[i - 1]) * (target - y[i - 1]) / (y[i] - y[i - 1]))


# ── differences over the same seeds ──────────────────────────────────────────────────────────────────────────────


def paired_differences(
    frame: pd.DataFrame, against: str = "gspo", step: int | str = "end", last: int = 3, metric: str = "avg@1"
) -> pd.DataFrame:
    """Accuracy of every method minus that of `against`, same seed and same agents, for each agent and their mean.

    `step`: a step, or "end", the mean of the last `last` evaluations. Columns: agents, method, agent, mean, low, high (95 %
    t-interval), seeds (pairs), unpaired (seeds that only one of the two methods has, named; "" for none).
    """
    rows, notes = scores(frame, metric)
    values = _at(rows, step, last)
    if values.empty:
        raise ValueError(
            f"no run was evaluated at step {step}; there are {', '.join(map(str, sorted(set(rows['step']))))}"
        )
    parts = []
    for agents, group in values.groupby("agents"):
        ends = group.groupby("method", observed=True)["step"].unique()
        if len(set(group["step"])) > 1:
            told = "; ".join(f"{m}: {', '.join(map(str, sorted(s)))}" for m, s in ends.items())
            notes.append(f"On {agents} the runs end at different steps ({told}).")
        if against not in set(group["method"]):
            notes.append(f"No finished run of {against} on {agents}, so nothing can be compared with it there.")
            continue
        parts.append(_paired(group, against))
    columns = ["agents", "method", "agent", "mean", "low", "high", "seeds", "unpaired"]
    table = pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)
    return _noted(table, notes + _unpaired_note(table, against))


def _paired(values: pd.DataFrame, against: str) -> pd.DataFrame:
    """Differences to one method over common seeds, for one set of agents; a method without a common seed has NaN."""
    wide = values.set_index(["method", "agent", "seed"])["value"].unstack("seed")
    out = []
    for (method, agent), row in wide.iterrows():
        if method == against:
            continue
        other = wide.loc[(against, agent)] if (against, agent) in wide.index else row * np.nan
        d = row - other
        single = sorted(row.index[row.notna() ^ other.notna()])
        level = interval(d.dropna().rename_axis("seed").to_frame("d").assign(all=0).set_index("all")["d"], "all")
        found = level.iloc[0] if len(level) else {"mean": np.nan, "low": np.nan, "high": np.nan, "runs": 0}
        out.append({
            "agents": values["agents"].iloc[0], "method": method, "agent": agent,
            **{k: float(found[k]) for k in ("mean", "low", "high")}, "seeds": int(found["runs"]),
            "unpaired": ", ".join(map(str, single)),
        })  # fmt: skip
    columns = ["agents", "method", "agent", "mean", "low", "high", "seeds", "unpaired"]
    table = pd.DataFrame(out, columns=columns)
    table["method"] = pd.Categorical(table["method"], categories=values["method"].cat.categories)
    return table


def _unpaired_note(table: pd.DataFrame, against: str) -> list[str]:
    rows = table[(table["unpaired"] != "") & (table["agent"] == MEAN)] if len(table) else table
    return [
        f"{r.method} and {against} on {r.agents}: only one of them has seed {r.unpaired}; not in the difference."
        for r in rows.itertuples()
    ]


def ahead_at_half(
    frame: pd.DataFrame, method: str = "hacpo", against: str = "gspo_x2", shares: Sequence[float] = (0.25, 0.5, 1.0),
    last: int = 3, metric: str = "avg@1",
) -> pd.DataFrame:  # fmt: skip
    """Is a method ahead of another with half as many rollouts, along the way and at the end of all? Paired over seeds.

    For each share of the rollouts that `against` samples: accuracy of `method` after half that number minus accuracy of
    `against`, mean over agents, straight lines between evaluations; and in the row "end" each after all it sampled (mean of
    the last evaluations). Columns: agents, point, rollouts_method, rollouts_against (per agent), mean, low, high, seeds,
    unpaired. A point beyond what `method` sampled has no value, and a note.
    """
    rows, notes = scores(frame, metric)
    rows = rows[(rows["agent"] == MEAN) & rows["method"].isin([method, against])].sort_values("step")
    parts = []
    for agents, group in rows.groupby("agents"):
        if absent := [m for m in (method, against) if m not in set(group["method"])]:
            notes.append(f"No finished run of {' or '.join(absent)} on {agents}.")
            continue
        sampled = group.groupby("method", observed=True)["rollouts"].max()
        for share in shares:
            where = {against: share * sampled[against], method: share * sampled[against] / 2}
            if where[method] > sampled[method]:
                notes.append(f"On {agents} {method} never sampled {where[method]:.0f} rollouts per agent.")
            values = group.groupby(RUN, observed=True).apply(_value_at, where, include_groups=False)
            values = values.rename("value").reset_index().assign(agent=MEAN)
            parts.append(
                _paired(values, against).assign(point=f"{share:.0%}", **_rollout_columns(where, method, against))
            )
        ends = _paired(_at(group, "end", last), against)
        parts.append(ends.assign(point="end", **_rollout_columns(sampled, method, against)))
    columns = ["agents", "point", "rollouts_method", "rollouts_against", "mean", "low", "high", "seeds", "unpaired"]
    if not parts:
        return _noted(pd.DataFrame(columns=columns), notes)
    return _noted(pd.concat(parts, ignore_index=True)[columns], notes)


def _value_at(run: pd.DataFrame, where: Mapping[str, float]) -> float:
    """A run's accuracy after a number of rollouts, NaN beyond its last evaluation."""
    x = where[run.name[1]]
    return float(np.interp(x, run["rollouts"], run["value"], left=np.nan, right=np.nan))


def _rollout_columns(where: Mapping[str, float], method: str, against: str) -> dict[str, float]:
    return {"rollouts_method": where[method], "rollouts_against": where[against]}


def verdict(low: float, high: float, margin: float = 0.01) -> str:
    """What a 95 % interval of a difference says: ahead, not worse (by the margin), behind, or undecided.

    >>> [verdict(*x) for x in ((0.01, 0.03), (-0.005, 0.02), (-0.03, -0.01), (-0.05, 0.02))]
    ['ahead', 'not worse', 'behind', 'undecided']
    """
    if np.isnan(low) or np.isnan(high):
        return "no interval"
    if low > 0:
        return "ahead"
    if high < 0:
        return "behind" if low <= -margin else "slightly behind"
    return "not worse" if low > -margin else "undecided"


# ── what held ────────────────────────────────────────────────────────────────────────────────────────────────────


def claims(
    frame: pd.DataFrame, method: str = "hacpo", baseline: str = "gspo", doubled: str = "gspo_x2", margin: float = 0.01,
    last: int = 3, metric: str = "avg@1",
) -> pd.DataFrame:  # fmt: skip
    """What the paper claims and what its parts are for, each with what was measured, for every set of agents.

    Columns: agents, claim, mean, low, high, seeds, result: "held" or "did not hold" where the 95 % interval says so,
    else "undecided", "no interval" (one seed), "no common seed" or "not run". A claim "no worse" holds if the interval lies
    above −`margin`.
    """
    frame, _ = usable(frame)
    out = []
    for agents in sorted(map(str, frame["agents"].unique())):
        part = frame[frame["agents"].astype(str) == agents]
        rows, _ = scores(part, metric)
        early = quarter(rows)
        measured = {"last": last, "metric": metric}
        alone, at_quarter = (paired_differences(part, baseline, s, **measured) for s in ("end", early))
        half = ahead_at_half(part, method, doubled, (0.5,), **measured)
        paid = half[half["point"] == "end"].eval("rollouts_method / rollouts_against")
        share = "half" if paid.empty or round(paid.iloc[0], 2) == 0.5 else f"{paid.iloc[0]:.0%}"
        wanted = [
            (f"{method} is ahead of {baseline} early (step {early})", baseline, _row(at_quarter, method), 0.0),
            (f"{method} ends ahead of {baseline}", baseline, _row(alone, method), 0.0),
            (f"no agent ends worse than with {baseline}", baseline, _weakest(alone, method, margin), margin),
            (
                f"half way, {method} is ahead of {doubled} with half of its rollouts",
                doubled,
                _row(half, method, "point", "50%"),
                0.0,
            ),
            (
                f"{method} ends no worse than {doubled} with {share} of its rollouts",
                doubled,
                _row(half, method, "point", "end"),
                margin,
            ),
            (
                f"{method} ends ahead of naive sharing",
                "naive",
                _row(paired_differences(part, "naive", **measured), method),
                0.0,
            ),
        ]
        parts = paired_differences(part, method, **measured)
        wanted += [(f"without a part ({a}), {method} ends lower", a, _flipped(_row(parts, a)), 0.0) for a in ABLATIONS]
        seeds = rows.groupby("method", observed=True)["seed"].agg(set)
        apart = [other for other in seeds.index if method in seeds and not seeds[method] & seeds[other]]
        out += [
            {"agents": agents, "claim": text, **row, "result": "no common seed" if other in apart else _result(row, m)}
            for text, other, row, m in wanted
        ]
    return pd.DataFrame(out)


_NOT_RUN = {"mean": np.nan, "low": np.nan, "high": np.nan, "seeds": 0}


def _row(table: pd.DataFrame, method: str, column: str = "agent", value: str = MEAN) -> dict[str, float]:
    rows = table[table[column] == value]
    rows = rows[rows["method"] == method] if "method" in rows else rows
    return rows.iloc[0][list(_NOT_RUN)].to_dict() if len(rows) else _NOT_RUN


def _weakest(table: pd.DataFrame, method: str, margin: float) -> dict[str, float]:
    """The agent of whom it can be said that it is worse by the margin, or else the one whose interval reaches lowest."""
    rows = table[(table["method"] == method) & (table["agent"] != MEAN)].dropna(subset="mean")
    rows = rows.assign(ahead=~(rows["high"] < -margin)).sort_values(["ahead", "low", "mean"])
    return rows.iloc[0][list(_NOT_RUN)].to_dict() if len(rows) else _NOT_RUN


def _flipped(row: Mapping[str, float]) -> dict[str, float]:
    """The difference the other way round: what the whole has over the part."""
    return {"mean": -row["mean"], "low": -row["high"], "high": -row["low"], "seeds": row["seeds"]}


def _result(row: Mapping[str, float], margin: float) -> str:
    if row["seeds"] == 0:
        return "not run"
    said = verdict(row["low"], row["high"], margin)
    if said == "no interval":
        return said
    if row["low"] > -margin:
        return "held"
    return "did not hold" if row["high"] < -margin else "undecided"


# ── as a reader sees them ────────────────────────────────────────────────────────────────────────────────────────


def percent(mean: float, half: float = float("nan")) -> str:
    """A share as percent, with half the width of its interval if there is one.

    >>> percent(0.953, 0.0121), percent(0.953)
    ('95.3 ± 1.2', '95.3')
    """
    if np.isnan(mean):
        return "–"
    return f"{100 * mean:.1f}" + ("" if np.isnan(half) else f" ± {100 * half:.1f}")


def points(mean: float, low: float = float("nan"), high: float = float("nan")) -> str:
    """A difference in percentage points, with its interval or the word that there is none.

    >>> points(0.033, 0.01, 0.056), points(-0.02)
    ('+3.3 [+1.0, +5.6]', '−2.0 [no interval]')
    """
    if np.isnan(mean):
        return "–"
    signed = lambda v: f"{100 * v:+.1f}".replace("-", "−")  # noqa: E731
    return signed(mean) + (" [no interval]" if np.isnan(low) else f" [{signed(low)}, {signed(high)}]")


def styled(table: pd.DataFrame) -> Styler:
    """`final_table` for reading: percent, mean ± half the interval, the best method of each agent and test set bold."""
    from pandas.io.formats.style import Styler  # needs jinja2, which comes with the notebooks

    sets = [name for name in dict.fromkeys(table.columns.get_level_values(0)) if name != "seeds"]
    text = pd.DataFrame({name: [percent(m, h) for m, h in table[name][["mean", "half"]].to_numpy()] for name in sets})
    text = text.set_index(table.index)
    text["seeds"] = ["–" if np.isnan(n) else f"{n:.0f}" for n in table[("seeds", "")]]
    trained = table[table.index.get_level_values("method") != BEFORE]
    bold = pd.DataFrame("", index=text.index, columns=text.columns)
    for name in sets:
        shown = trained[name]["mean"].mul(100).round(1)
        best, least = (shown.groupby(level=["agents", "agent"]).transform(f) for f in ("max", "min"))
        chosen = shown.index[(shown == best) & (best > least)]  # nobody is the best of equals, or of one
        bold.loc[chosen, name] = "font-weight: bold"
    style = Styler(text, uuid="final", cell_ids=False, table_attributes='class="dataframe"')
    for axis in (0, 1):  # unlike a frame's own HTML, a Styler's does not escape
        style = style.format_index(escape="html", axis=axis)
    return style.format(escape="html").apply(lambda _: bold, axis=None)
