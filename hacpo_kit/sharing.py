"""③ advantage: which rollouts of a pool a learner takes, and why others are excluded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from hacpo_kit.config import Config
from hacpo_kit.records import Pool, Rollout

if TYPE_CHECKING:
    from hacpo_kit.models.agents import Agent

Tokens = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and response


def shared_rollouts(pool: Pool, learner: str, config: Config) -> list[int]:
    """Return the positions in the pool of the learner's own rollouts and of the peer rollouts that it takes."""
    rows = [i for i, r in enumerate(pool) if config.sources == "all" or r.source == learner]
    # sorted by the source's name: neither sums nor mini-batches depend on the order of the agents
    return sorted(rows, key=lambda i: pool.rollouts[i].source)


def comparable_rollouts(
    pool: Pool, learner: str, capability: Mapping[str, float], config: Config
) -> tuple[list[int], dict[str, int]]:
    """Return the positions of the shared rollouts whose rewards the learner can compare, and the excluded ones by reason.

    Reasons: "unscorable" (no reward), "no_capability" (the learner had no reward in the whole window, so that no ω exists).
    """
    shared = shared_rollouts(pool, learner, config)
    scored = [i for i in shared if pool.rollouts[i].reward is not None]
    excluded = {"unscorable": len(shared) - len(scored)} if len(scored) < len(shared) else {}
    needs_ratio = config.discrepancy or (config.capability_baseline and config.cross_baseline == "learner")
    has_peers = config.sources == "all" and len(pool.agents) > 1
    if scored and has_peers and needs_ratio and learner not in capability:
        return [], {**excluded, "no_capability": len(scored)}
    return scored, excluded


def encode_for(agent: Agent, pool: Pool, rollouts: Sequence[Rollout], count_eos: bool) -> list[Tokens | str]:
    """Return prompt and response of each rollout in the agent's tokens, or the reason why the agent cannot use it.

    Reasons: the rollout's `hazard` (lossy_text, control_token), and those of `Agent.view` (lossy_reencoding, control_token,
    empty, too_long).
    """
    prompts = {r.problem: r.prompt_ids for r in pool if r.source == agent.name}

    @cache  # trained agents repeat their responses
    def view(problem: str, text: str, ended: bool) -> Tokens | str:
        return agent.view(pool.problem(problem), text, ended=ended, prompt=prompts.get(problem, ()))

    return [
        (r.prompt_ids, r.token_ids)  # own rollouts keep the sampled tokens
        if r.source == agent.name
        else r.hazard or view(r.problem, r.text, r.ended and count_eos)
        for r in rollouts
    ]


def solved_prompts(rollouts: Sequence[Rollout], learner: str) -> set[str]:
    """Return the problems on which all rollouts of the learner have the best reward and a peer's rollout does not.

    Without peers such a group has equal rewards and contributes no gradient; worse peer rollouts make one. Not the paper's.
    """
    groups: dict[str, list[Rollout]] = {}
    for r in rollouts:
        groups.setdefault(r.problem, []).append(r)
    solved = set()
    for problem, group in groups.items():
        rewards, own = [r.reward for r in group], [r.reward for r in group if r.source == learner]
        if own and min(own) >= max(rewards) > min(rewards):
            solved.add(problem)
    return solved
