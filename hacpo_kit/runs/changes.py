"""Settings that change during a run: which may change, how they are recorded, and how a resumed run applies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hacpo_kit.config import Config

if TYPE_CHECKING:
    from hacpo_kit.tasks.problems import Problems

FILE = "changes.jsonl"
# These settings identify a run and its method in tables and comparisons.
FIXED = (
    "method", "share", "seed", "oversample", "capability_baseline", "binary_guard", "cross_baseline", "discrepancy",
    "exclude_solved", "ratio", "loss_mean", "peer_update", "count_eos",
    "equal_updates", "updates_factor", "dynamic_sampling", "minibatch_order",
)  # fmt: skip
CHANGEABLE = tuple(name for name in Config.model_fields if name not in FIXED)


def check_change(config: Config, wanted: Config, problems: Problems | None = None) -> dict[str, tuple[Any, Any]]:
    """Return the settings that change, with old and new value; empty if none changes.

    Raises ValueError for a setting that cannot change during a run, for beta that becomes positive, and for more prompts
    per step than there are problems.
    """
    differences = config.differences(wanted)
    if fixed := {name: values for name, values in differences.items() if name in FIXED}:
        changes = ", ".join(f"{name}: {old!r} → {new!r}" for name, (old, new) in fixed.items())
        raise ValueError(
            f"these settings cannot change during a run ({changes}); start another run with them. "
            f"Settings that can change: {', '.join(CHANGEABLE)}"
        )
    if config.beta == 0 < wanted.beta:
        raise ValueError(
            f"beta: 0 → {wanted.beta} cannot change during a run, because a run with beta=0 does not keep the initial policy, "
            "which the KL needs; start another run with beta"
        )
    if problems is not None and differences:
        problems.batch(0, wanted.prompts_per_step, seed=wanted.seed)  # raises ValueError if there are too few
    return differences


def requested_config(answers: Sequence[Any]) -> Config | None:
    """Return the Config among the answers of callbacks, if any; raises ValueError if they request different ones."""
    configs = [answer for answer in answers if isinstance(answer, Config)]
    for other in configs[1:]:
        if differences := configs[0].differences(other):
            raise ValueError(f"two callbacks returned different settings for the next step: {differences}")
    return configs[0] if configs else None


def change_lines(step: int, config: Config, wanted: Config) -> list[dict[str, Any]]:
    """Return one line of changes.jsonl for each setting that changes after `step`."""
    before, after = config.to_dict(), wanted.to_dict()  # JSON types: infinity is text
    return [
        {"step": step, "from_step": step + 1, "setting": name, "old": before[name], "new": after[name]}
        for name in config.differences(wanted)
    ]


def apply_changes(config: Config, lines: Sequence[dict[str, Any]]) -> Config:
    """Return the config after recorded changes."""
    return config.replace(**{line["setting"]: line["new"] for line in lines})


def summary(lines: Sequence[dict[str, Any]], most: int = 3) -> str:
    """Return recorded changes as one text, such as "lr=1e-05 from step 4"; "" without changes."""
    texts = [f"{line['setting']}={line['new']} from step {line['from_step']}" for line in lines]
    more = len(texts) - most
    return ", ".join([*texts[:most], *([f"{more} more changes"] if more > 0 else [])])
