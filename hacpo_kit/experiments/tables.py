"""The table of many runs: one row for each run, step, agent and metric."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacpo_kit.common.files import read_json, read_steps
from hacpo_kit.config import Config
from hacpo_kit.experiments.paths import PROJECT
from hacpo_kit.models.sources import built_in_sets
from hacpo_kit.runs import changes

if TYPE_CHECKING:
    import pandas as pd

COUNTS = ("step", "rollouts", "tokens", "seconds")  # columns of the table, not metrics
TEXT = ["run", "agent", "metric", "agents", "changed"]
TEXT += [name for name, about in Config.model_fields.items() if isinstance(about.default, str)]


def read_runs(folder: str | Path) -> pd.DataFrame:
    """Return all runs in a folder and its subfolders as one long table: a row for each run, step, agent and metric.

    Columns: `run` (its folder, relative to `folder`), `step`, `agent` ("" for metrics of the whole run), `metric`, `value`;
    the cumulative `rollouts`, `tokens` and `seconds` of all agents; every setting of `Config` at the start of the run;
    `changed` (settings that changed during training, "" for none), `agents` (a built-in set, or names joined by "+"),
    `steps` (planned), `finished`. ω(k, j) is the metric `omega/j` of agent k. Text columns are categorical.

    `folder` can also be a `.parquet` file that `to_parquet` wrote from such a table. A relative path that does not exist here
    starts at the root of the repository. Runs that cannot be read are named in a warning and in `.attrs["notes"]`. Raises
    FileNotFoundError if there is no readable run.
    """
    import pandas as pd

    folder = Path(folder) if Path(folder).exists() else PROJECT / folder
    if folder.suffix == ".parquet":
        return pd.read_parquet(folder)
    found = sorted(path.parent for path in folder.rglob("run.json"))
    if not found:
        reason = "there is no run.json in it or below" if folder.is_dir() else "the folder does not exist"
        raise FileNotFoundError(f"no runs in {folder}: {reason}; give a folder that `hacpo-kit sweep` or `run` wrote")
    tables, faults = [], []
    for path in found:
        name = path.relative_to(folder).as_posix() if path != folder else path.resolve().name
        try:
            tables.append(_read_run(path).assign(run=name))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            faults.append(f"{name} (not read: {type(error).__name__}: {error})")
            continue
        if not (path / "metrics.jsonl").read_bytes().endswith(b"\n"):
            faults.append(f"{name} (the last line of metrics.jsonl is incomplete and is excluded)")
    note = f"{len(faults)} of {len(found)} runs in {folder} could not be read completely: {'; '.join(faults)}."
    if not tables:
        raise FileNotFoundError(note)
    table = pd.concat(tables, ignore_index=True).astype(dict.fromkeys(TEXT, "category"))
    if faults:
        warnings.warn(note, stacklevel=2)
        table.attrs["notes"] = [note]
    return table


def _read_run(path: Path) -> pd.DataFrame:
    import pandas as pd

    record, config = read_json(path / "run.json"), Config.read(path / "config.json")
    lines = read_steps(path / "metrics.jsonl")
    if not lines:
        raise ValueError("metrics.jsonl is missing or holds no complete line")
    rows = [
        {"run": "", "step": line["step"], "agent": agent, "metric": metric, "value": value, **{c: line[c] for c in COUNTS[1:]}}
        for line in lines
        for agent, metric, value in _metrics(line)
    ]  # fmt: skip
    table = pd.DataFrame(rows).astype({"value": float, "seconds": float})
    last, steps = lines[-1]["step"], int(record["steps"])
    changed = changes.summary([line for line in read_steps(path / changes.FILE) if line["from_step"] <= last])
    about = {"changed": changed, "agents": _agents(record), "steps": steps, "finished": last >= steps}
    return table.assign(**dict(config), **about)


def _metrics(line: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield agent, metric and value from a line of metrics.jsonl."""
    for name, value in line.items():
        if name not in (*COUNTS, "omega", "agents"):
            yield "", name, value
    for agent, ratios in line.get("omega", {}).items():
        for other, value in ratios.items():
            yield agent, f"omega/{other}", value
    for agent, values in line["agents"].items():
        for name, value in values.items():
            yield agent, name, value


def _agents(record: Mapping[str, Any]) -> str:
    """Return the name of the built-in set that a run trained, else the names of its agents."""
    origins = [agent["origin"] for agent in record["agents"]]
    same = [name for name, entry in built_in_sets().items() if entry["agents"] == origins]
    return same[0] if same else "+".join(agent["name"] for agent in record["agents"])
