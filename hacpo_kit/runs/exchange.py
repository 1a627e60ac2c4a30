"""A warning for learners that use almost no rollout of their peers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from hacpo_kit.config import Config
from hacpo_kit.records import StepStats

UNUSED_SHARE, ENOUGH = 0.9, 32  # fewer peer rollouts than ENOUGH say little


def warn_about_unused_peers(stats: Mapping[str, StepStats], config: Config) -> None:
    """Warn about each learner for which nearly all peer rollouts of a step were clipped or excluded."""
    for learner, update in stats.items():
        peers = sum(source != learner for source in update.sources)
        if (
            config.share == "all"
            and config.peer_update == "hacpo"
            and peers >= ENOUGH
            and unused_share(update) >= UNUSED_SHARE
        ):
            # no numbers, so that the same warning is shown once and not after every step
            warnings.warn(
                f"agent {learner!r} learns almost nothing from its peers: at least {UNUSED_SHARE:.0%} of their rollouts were "
                f"clipped or excluded in a step. Likely causes: delta={config.delta} is too small for models that are this "
                "different, or this agent does not end its own responses with the token that is appended to peer responses "
                "(agent.end_id); see clip_peer_low, clip_peer_high and excluded_* in the metrics",
                stacklevel=3,
            )


def unused_share(update: StepStats) -> float:
    """Return the share of a step's peer rollouts that were clipped or excluded; 0 without peers."""
    peers = sum(source != update.learner for source in update.sources)
    used = sum(int((~part.own & ~part.clipped).sum()) for part in update.minibatches)
    return 1 - used / peers if peers else 0.0
