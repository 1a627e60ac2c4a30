"""Fork a run: a new run from a checkpoint of another one, with other settings."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hacpo_kit.common.files import read_json, read_lines, read_steps, write_json, write_lines
from hacpo_kit.config import METHODS, Config
from hacpo_kit.runs.changes import FILE as CHANGES
from hacpo_kit.runs.changes import apply_changes
from hacpo_kit.runs.checkpoints import checkpoints, step_of


def fork(run: str | Path, step: int, out: str | Path, **changes: Any) -> Path:
    """Write the folder `out` of a new run that starts from the checkpoint after `step` of a run; `hk.resume(out)` trains it.

    `changes` are settings of Config; `method` sets those that define the method. Metrics up to `step` are copied, and the
    origin is recorded in run.json.

    Raises FileNotFoundError for a folder without a run; ValueError for a step without a checkpoint, for `out` if it is not
    empty, and for settings that contradict each other; TypeError for an unknown setting.
    """
    run, out = Path(run), Path(out)
    if not (run / "run.json").exists():
        raise FileNotFoundError(f"{run} holds no run: run.json is missing")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; choose another folder")
    saved = {step_of(checkpoint): checkpoint for checkpoint in checkpoints(run)}
    if step not in saved:
        raise ValueError(
            f"{run} has no checkpoint of step {step}; it has those of {', '.join(map(str, saved)) or 'none'}"
        )
    before = apply_changes(
        Config.read(run / "config.json"), [line for line in read_lines(run / CHANGES) if line["step"] <= step]
    )
    config = _changed(before, changes)
    origin = {
        "run": str(run.resolve()),
        "step": step,
        "changes": {n: list(v) for n, v in before.differences(config).items()},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        folder = Path(temporary) / "fork"
        folder.mkdir()
        shutil.copytree(saved[step], folder / "checkpoints" / saved[step].name)
        if (run / "problems").exists():
            shutil.copytree(run / "problems", folder / "problems")
        for name in ("metrics.jsonl", "samples.jsonl"):
            write_lines(folder / name, [line for line in read_steps(run / name) if line["step"] <= step])
        write_json(folder / "config.json", config.to_dict())
        write_json(folder / "run.json", read_json(run / "run.json") | {"origin": origin})
        if out.exists():
            out.rmdir()
        folder.replace(out)
    return out


def _changed(config: Config, changes: dict[str, Any]) -> Config:
    """Return the config with changes; another method first resets the settings that define the present one."""
    method = changes.get("method", config.method)
    if method == config.method:
        return config.replace(**changes)
    own = {name: Config.model_fields[name].default for name in METHODS.get(config.method, {})}
    named = Config.preset(method)  # raises ValueError for an unknown method
    return config.replace(**{**own, **{name: getattr(named, name) for name in METHODS[method]}, **changes})
