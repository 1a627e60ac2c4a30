"""Settings that change within a run: which may, how its record keeps them, how a resumed run gets them back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacpo_kit.common.files import Lines, truncate_lines
from hacpo_kit.config import Config

if TYPE_CHECKING:
    from hacpo_kit.tasks.problems import Problems

FILE = "changes.jsonl"
# What a run is called and compared by. A run in which one of these changed would be neither what it was nor something new.
FIXED = (
    "method", "sources", "seed", "oversample", "capability_baseline", "binary_guard", "cross_baseline", "discrepancy",
    "exclude_solved", "ratio", "peer_update", "count_eos", "equal_updates", "minibatch_order",
)  # fmt: skip
CHANGEABLE = tuple(name for name in Config.model_fields if name not in FIXED)


def check_change(now: Config, wanted: Config, problems: Problems | None = None) -> dict[str, tuple[Any, Any]]:
    """The settings that change, with the old and the new value; empty if none does.

    Raises ValueError, naming it, for a setting that cannot change within a run, for a KL that begins after the run, and
    for more prompts a step than there are problems.
    """
    differences = now.differences(wanted)
    if fixed := [name for name in differences if name in FIXED]:
        told = ", ".join(f"{name}: {now_!r} → {new!r}" for name, (now_, new) in differences.items() if name in fixed)
        raise ValueError(
            f"these settings say what the run is and cannot change within it ({told}); start another run with them. "
            f"These can change: {', '.join(CHANGEABLE)}"
        )
    if now.beta == 0 < wanted.beta:
        raise ValueError(
            f"beta: 0 → {wanted.beta} cannot change within a run: the KL needs the initial policy, which a run with beta=0 "
            "does not keep; start another run with beta"
        )
    if problems is not None:
        problems.batch(0, wanted.prompts_per_step, seed=wanted.seed)  # raises ValueError if there are too few
    return differences


def requested_config(answers: Sequence[Any]) -> Config | None:
    """The Config among the answers of callbacks, if any; raises ValueError if they want different ones."""
    wanted = [answer for answer in answers if isinstance(answer, Config)]
    for other in wanted[1:]:
        if differences := wanted[0].differences(other):
            raise ValueError(f"two callbacks returned different settings for the next step: {differences}")
    return wanted[0] if wanted else None


def record_change(lines: Lines | None, step: int, now: Config, wanted: Config) -> None:
    """One line for each setting that changes after `step`, and so holds from the step that follows."""
    if lines is None:
        return
    before, after = now.to_dict(), wanted.to_dict()  # JSON types: infinity is text
    lines.add(
        {"step": step, "from_step": step + 1, "setting": name, "old": before[name], "new": after[name]}
        for name in now.differences(wanted)
    )


def replay(folder: Path, step: int, config: Config) -> Config:
    """The settings in force after `step`: those the run began with and its recorded changes; later ones are dropped."""
    return apply_changes(config, truncate_lines(folder / FILE, step))


def told(lines: Sequence[dict[str, Any]], most: int = 3) -> str:
    """Recorded changes in a line: "lr=1e-05 from step 4"; "" if there are none."""
    said = [f"{line['setting']}={line['new']} from step {line['from_step']}" for line in lines]
    more = len(said) - most
    return ", ".join([*said[:most], *([f"{more} more changes"] if more > 0 else [])])


def apply_changes(config: Config, lines: Sequence[dict[str, Any]]) -> Config:
    """The config after these recorded changes, in their order."""
    for line in lines:
        config = config.replace(**{line["setting"]: line["new"]})
    return config


__all__ = [
    "CHANGEABLE",
    "FILE",
    "FIXED",
    "apply_changes",
    "check_change",
    "record_change",
    "replay",
    "requested_config",
    "told",
]
