"""Numbers that are not finite: the error names the rollouts that had them, and a run keeps these rollouts in a file."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hacpo_kit.common.files import write_json
from hacpo_kit.records import Rollout

FOLDER = "faults"  # in a run folder


def with_fault(
    error: Exception,
    agent: str,
    rollouts: Sequence[Rollout],
    seen: Sequence[Mapping[str, Any]],
    *,
    minibatch: int | None = None,
) -> Exception:
    """The error with an attribute `fault`, which holds the rollouts and what was `seen` of each, as JSON types.

    It outlives the way out of a worker. What is not finite is text there: "nan", "inf", "-inf".
    """
    kept = ("problem", "source", "sample", "text", "prompt_ids", "token_ids", "logps", "ended", "reward", "status")
    rows = [{**{name: getattr(r, name) for name in kept}, **more} for r, more in zip(rollouts, seen, strict=True)]
    error.fault = _plain({"agent": agent, "minibatch": minibatch, "error": str(error), "rollouts": rows})
    return error


@contextlib.contextmanager
def keep_faults(folder: Path | None, step: int) -> Iterator[None]:
    """Writes the rollouts of an error that leaves the block to faults/step-<step>-<agent>.json, and says so in the error."""
    try:
        yield
    except Exception as error:
        fault = getattr(error, "fault", None)
        if folder is None or fault is None:
            raise
        path = Path(folder) / FOLDER / f"step-{step:06d}-{fault['agent']}.json"
        try:
            path.parent.mkdir(exist_ok=True)
            write_json(path, {"step": step, **fault})
            told = f"these rollouts are in {path}"
        except OSError as disk:
            told = f"these rollouts could not be saved ({disk})"
        error.args = (f"{error.args[0]}; {told}", *error.args[1:])
        raise


def _plain(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {name: _plain(value) for name, value in content.items()}
    if isinstance(content, np.ndarray | np.generic):
        return _plain(content.tolist())
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    return str(content) if isinstance(content, float) and not math.isfinite(content) else content


__all__ = ["FOLDER", "keep_faults", "with_fault"]
