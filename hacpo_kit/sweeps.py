"""Many runs: read a folder of them into one table."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hacpo_kit.agents import built_in_sets
from hacpo_kit.config import Config
from hacpo_kit.saving import read_lines

if TYPE_CHECKING:
    import pandas as pd

COUNTS = ("step", "rollouts", "tokens", "seconds")  # columns of the table, not metrics


# ── reading runs ─────────────────────────────────────────────────────────────────────────────────────────────────


def read_runs(folder: str | Path) -> pd.DataFrame:
    """All runs below a folder as one long table: one row for each run, step, agent and metric.

    Columns: `run` (folder, relative to `folder`), `step`, `agent` ("" for metrics of the whole run), `metric`, `value`;
    `rollouts`, `tokens` and `seconds` so far, all agents together; every setting of `Config`; `agents` (the built-in set,
    or names joined by "+"), `steps` (planned), `finished`. ω(k, j) is the metric `omega/j` of agent k. Text columns are
    categorical. A `.parquet` file that `to_parquet` wrote from such a table is read back as it was.

    Warns of runs that cannot be read, in whole or in part, by name. Raises FileNotFoundError where there is no run to
    read, ValueError for a file that is something else.
    """
    import pandas as pd

    folder = Path(folder)
    if folder.suffix == ".parquet" and folder.is_file():
        return _read_table(folder)
    if folder.name in ("run.json", "metrics.jsonl") and folder.is_file():
        folder = folder.parent
    if folder.is_file():
        raise ValueError(f"{folder} is neither a folder of runs nor a .parquet file of read_runs")
    found = sorted(path.parent for path in folder.rglob("run.json"))
    if not found:
        why = "there is no run.json in it or below" if folder.is_dir() else "there is no such folder"
        raise FileNotFoundError(
            f"{folder} holds no runs: {why}; give the folder that `hacpo-kit sweep` or `run` filled"
        )
    tables, faults = [], []
    for path in found:
        name = path.relative_to(folder).as_posix() if path != folder else path.resolve().name
        try:
            table, left = _read_run(path, name)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            faults.append(f"{name} (not read: {type(error).__name__}: {error})")
            continue
        tables.append(table)
        faults += [f"{name} ({left})"] * bool(left)
    if faults:
        warnings.warn(f"{len(faults)} of {len(found)} runs in {folder}: {'; '.join(faults)}", stacklevel=2)
    if not tables:
        raise FileNotFoundError(f"none of the {len(found)} runs in {folder} can be read: {'; '.join(faults)}")
    return pd.concat(_same_categories(tables), ignore_index=True)


def _read_run(path: Path, name: str) -> tuple[pd.DataFrame, str]:
    """One run's rows, and what of it could not be read."""
    import pandas as pd

    record = json.loads((path / "run.json").read_text(encoding="utf-8"))
    config = Config.from_dict(json.loads((path / "config.json").read_text(encoding="utf-8")))
    lines = read_lines(path / "metrics.jsonl")
    if not lines:
        raise ValueError("metrics.jsonl is missing or holds no complete line")
    torn = not (path / "metrics.jsonl").read_bytes().endswith(b"\n")
    rows = [(at, *row) for at, line in enumerate(lines) for row in _flat(line)]
    at, agents, metrics, values = zip(*rows, strict=True) if rows else ((), (), (), ())
    at = np.array(at, dtype=np.int64)
    counts = {c: np.array([line[c] for line in lines], float if c == "seconds" else np.int64)[at] for c in COUNTS}
    table = pd.DataFrame(
        {
            "run": name, "step": counts["step"], "agent": agents, "metric": metrics, "value": np.array(values, float),
            "rollouts": counts["rollouts"], "tokens": counts["tokens"], "seconds": counts["seconds"],
        }
    )  # fmt: skip
    steps = int(record["steps"])
    about = {**asdict(config), "agents": _agents_of(record), "steps": steps, "finished": lines[-1]["step"] >= steps}
    table = table.assign(**about)
    return table, "its last line was cut and is left out" if torn else ""


def _flat(line: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """(agent, metric, value) of one line of metrics.jsonl."""
    for name, value in line.items():
        if name not in (*COUNTS, "omega", "agents"):
            yield "", name, value
    for agent, ratios in line.get("omega", {}).items():
        for other, value in ratios.items():
            yield agent, f"omega/{other}", value
    for agent, values in line["agents"].items():
        for name, value in values.items():
            yield agent, name, value


def _agents_of(record: Mapping[str, Any]) -> str:
    try:
        sets = built_in_sets()
    except FileNotFoundError:
        sets = {}
    origins = [a["origin"] for a in record["agents"]]
    same = [name for name, entry in sets.items() if entry["agents"] == origins]
    return same[0] if same else "+".join(a["name"] for a in record["agents"])


def _same_categories(tables: list[pd.DataFrame]) -> list[pd.DataFrame]:
    """Text columns as categories that all tables share, or `concat` would make text of them again."""
    import pandas as pd

    for column in _text_columns():
        kind = pd.CategoricalDtype(sorted({value for table in tables for value in table[column].unique()}))
        for table in tables:
            table[column] = table[column].astype(kind)
    return tables


def _text_columns() -> list[str]:
    return ["run", "agent", "metric", "agents", *(f.name for f in fields(Config) if isinstance(f.default, str))]


def _read_table(path: Path) -> pd.DataFrame:
    import pandas as pd

    table = pd.read_parquet(path)
    if missing := [c for c in ("run", "step", "agent", "metric", "value") if c not in table]:
        raise ValueError(f"{path} is no table of read_runs: it has no column {', '.join(missing)}")
    return table
