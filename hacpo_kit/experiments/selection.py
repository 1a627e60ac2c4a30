"""Runs that can be compared: which are excluded, and which count as methods of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from hacpo_kit.config import METHODS, Config, did_you_mean

NEEDED = ("run", "step", "agent", "metric", "value", "rollouts", "agents", "method", "seed", "steps", "finished")
# settings that do not define a method; a comparison of methods assumes that they are equal
SHARED = (
    "prompts_per_step", "n", "temperature", "max_new_tokens", "minibatch", "lr", "warmup", "beta1", "beta2", "adam_eps",
    "weight_decay", "max_grad_norm", "beta", "steps",
)  # fmt: skip


def usable(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows of the runs that can be compared, and notes on what was excluded or renamed.

    Unfinished runs and repeats of a seed are excluded. Runs with other settings than those of their method get a method
    name of their own, such as "hacpo · alpha=3.0", and so do runs whose settings changed during training
    ("hacpo · lr=1e-05 from step 4"). A second call changes nothing.

    Raises ValueError for a missing column, and if there is no finished run.
    """
    for column in NEEDED:
        if column not in frame:
            raise ValueError(f"no column {column!r}{did_you_mean(column, frame.columns)}; read runs with hk.read_runs")
    runs, notes = frame.drop_duplicates("run").set_index("run"), list(frame.attrs.get("notes", []))
    finished = runs["finished"].astype(bool)
    if unfinished := sorted(map(str, runs.index[~finished])):
        notes.append(f"{_count(unfinished, 'unfinished run')} excluded: {', '.join(unfinished)}.")
    if not finished.any():
        raise ValueError(f"there is no finished run to compare ({len(unfinished)} unfinished)")
    runs = runs[finished]
    labels, label_notes = _method_labels(runs)
    runs = runs.assign(method=labels)
    repeats = runs.index[runs[["agents", "method", "seed"]].astype(str).duplicated()]
    if names := sorted(map(str, repeats)):
        notes.append(f"{_count(names, 'repeat')} of a seed excluded: {', '.join(names)}.")
    runs = runs.drop(repeats)
    out = frame[frame["run"].isin(runs.index)]
    method = out["run"].astype(str).map(runs["method"].rename(str))
    out = out.assign(method=pd.Categorical(method, categories=method_order(runs["method"])))
    out.attrs = {}  # the notes are returned once
    return out, notes + label_notes + _unequal_settings(runs)


def method_order(methods: pd.Series) -> list[str]:
    """Return the names of methods, first the package's own in their order, then the others by name."""
    present = set(map(str, methods))
    return [m for m in METHODS if m in present] + sorted(present - set(METHODS))


def _method_labels(runs: pd.DataFrame) -> tuple[pd.Series, list[str]]:
    """Return a method name for each run, which differs where settings differ, and notes."""
    settings = [c for c in Config.model_fields if c in runs and c not in ("method", "seed")]
    settings = [c for c in settings if runs[c].nunique() > 1]
    labels, notes = runs["method"].astype(str), []
    changes = (
        runs["changed"].astype(object).fillna("") if "changed" in runs else pd.Series("", runs.index)
    )  # not in older tables
    changed = [run for run, change in changes.items() if change and f" · {change}" not in labels[run]]
    for run in changed:
        labels[run] += f" · {changes[run]}"
    if changed:
        notes.append(f"Settings changed within {_count(changed, 'run')}: {', '.join(map(str, changed))}.")
    for (agents, method), group in runs.groupby(["agents", labels], observed=True):
        own = Config.from_dict({"method": method, **METHODS.get(method.split(" · ")[0], {})})
        usual = {**{name: getattr(own, name) for name in settings}, "steps": group["steps"].max()}
        several = [name for name in usual if group[name].astype(str).nunique() > 1]
        for run, row in group.iterrows() if several else ():
            labels[run] = " · ".join([method, *(f"{k}={row[k]}" for k in several if str(row[k]) != str(usual[k]))])
        if several:
            names = ", ".join(method_order(labels[group.index]))
            notes.append(f"{method} was run on {agents} with several values of {', '.join(several)}: {names}.")
    return labels, notes


def _unequal_settings(runs: pd.DataFrame) -> list[str]:
    """Return a note for every shared setting that differs between the methods of a set of agents."""
    notes = []
    plain = runs[~runs["method"].str.contains(" · ", regex=False)]  # other names already show the difference
    for agents, group in plain.groupby("agents", observed=True):
        for name in (s for s in SHARED if s in group and group[s].astype(str).nunique() > 1):
            each = group.groupby("method", sort=False)[name].unique()
            values = "; ".join(f"{m}: {', '.join(map(str, v))}" for m, v in each.items())
            notes.append(f"On {agents} the methods also differ in {name} ({values}).")
    return notes


def _count(things: Sequence[Any], name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"
