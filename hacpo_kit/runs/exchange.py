"""What a learner gets from each peer: metrics of the exchange, and a warning if it is almost nothing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from hacpo_kit.config import Config
from hacpo_kit.records import Pool, StepStats
from hacpo_kit.sharing import diagnostics, peer_groups, rescued_problems, rewards_by_problem

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


def peer_metrics(pool: Pool, update: StepStats, config: Config) -> dict[str, float]:
    """Return the metrics of one learner and each of its peers; names as in `runs.metrics`."""
    learner, out = update.learner, {}
    rewards, used = rewards_by_problem(pool), update.to_frame()
    for peer in (name for name in pool.agents if name != learner):
        two = {
            problem: {name: group[name] for name in (learner, peer) if name in group}
            for problem, group in rewards.items()
        }
        out[f"rescuable/{peer}"] = len(peer_groups(two, learner, balance=False)) / len(pool.problems)
        rows = used[(used["source"] == peer) & used["ratio"].notna()]
        if len(rows):
            s, weights = (torch.tensor(rows[name].to_numpy(), dtype=torch.float64) for name in ("ratio", "weight"))
            if config.peer_update == "hacpo":
                weights = torch.where(torch.tensor(rows["clipped"].to_numpy()), 0.0, s ** (1 + config.alpha) * weights)
            out |= {f"{name}/{peer}": value for name, value in diagnostics(s, weights).items()}
    if config.share.startswith("rescue"):
        out["rescued_prompts"] = len(rescued_problems(pool, learner, config)) / len(pool.problems)
    return out
