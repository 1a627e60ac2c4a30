"""Errors about numbers that are not finite carry the rollouts that caused them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hacpo_kit.common.files import write_json


def with_fault(
    error: Exception,
    agent: str,
    rollouts: Sequence[Any],
    details: Sequence[Mapping[str, Any]],
    *,
    minibatch: int | None = None,
) -> Exception:
    """Return the error with an attribute `fault` that holds the rollouts and their `details` as JSON types.

    A number that is not finite becomes text: "NaN", "Infinity", "-Infinity". A run writes `fault` to its folder faults/.
    """
    kept = ("problem", "source", "sample", "text", "prompt_ids", "token_ids", "logps", "ended", "reward", "status")
    rows = [{**{name: getattr(r, name) for name in kept}, **more} for r, more in zip(rollouts, details, strict=True)]
    fault = {"agent": agent, "minibatch": minibatch, "error": str(error), "rollouts": rows}
    error.fault = json.loads(json.dumps(fault, default=lambda array: array.tolist()), parse_constant=str)
    return error


@contextlib.contextmanager
def keep_faults(folder: Path | None, step: int) -> Iterator[None]:
    """Write the rollouts of an error in the block to faults/step-<step>-<agent>.json, and name the file in the error."""
    try:
        yield
    except Exception as error:
        fault = getattr(error, "fault", None)
        if folder is None or fault is None:
            raise
        path = Path(folder) / "faults" / f"step-{step:06d}-{fault['agent']}.json"
        try:
            path.parent.mkdir(exist_ok=True)
            write_json(path, {"step": step, **fault})
            outcome = f"these rollouts are in {path}"
        except OSError as disk:
            outcome = f"these rollouts could not be saved ({disk})"
        error.args = (f"{error.args[0]}; {outcome}", *error.args[1:])
        raise
