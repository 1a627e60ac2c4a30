"""③ advantage: which rollouts of a pool a learner takes, how they count, and why others are excluded."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hacpo_kit.common.seeds import derive_seed
from hacpo_kit.config import Config
from hacpo_kit.records import Pool, Rollout

if TYPE_CHECKING:
    from hacpo_kit.models.agents import Agent

STD_GUARD = 1e-6  # added to the standard deviation of a group
Tokens = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and response
Groups = Mapping[Hashable, Mapping[str, Sequence[float]]]  # rewards by problem and agent


# ── which peer rollouts ──────────────────────────────────────────────────────────────────────────────────────────


def peer_groups(rewards: Groups, learner: str, *, rule: str = "rescue", balance: bool = True) -> dict[Hashable, str]:
    """Return the peer whose group the learner takes, for each problem on which all own rollouts fail (GRAFT, SGT).

    A rollout succeeds with a reward of at least 1. "rescue": the peer's group is mixed; "rescue_any": it may also succeed
    entirely. Of several peers the one with most successes is taken, ties by name. `balance`: with m, the smallest number of
    such problems over all agents, a learner keeps the m problems with most successes, and those equal to the m-th.

    Raises ValueError for another rule.

    >>> peer_groups({"p": {"A": [0, 0], "B": [1, 0]}, "q": {"A": [1, 0], "B": [0, 0]}}, "A")
    {'p': 'B'}
    """
    if rule not in ("rescue", "rescue_any"):
        raise ValueError(f"rule={rule!r}: use 'rescue' or 'rescue_any'")
    candidates = _rescues(rewards, learner, rule)
    least = 0
    if balance:
        agents = dict.fromkeys(name for group in rewards.values() for name in group)
        smallest = min((len(_rescues(rewards, name, rule)) for name in agents), default=0)
        if not smallest:
            return {}
        least = sorted((successes for _, successes in candidates.values()), reverse=True)[smallest - 1]
    return {problem: source for problem, (source, successes) in candidates.items() if successes >= least}


def _rescues(rewards: Groups, learner: str, rule: str) -> dict[Hashable, tuple[str, int]]:
    """Return the best peer and its successes, for each problem on which the learner fails and the rule accepts a peer."""
    found = {}
    for problem, group in rewards.items():
        count = {name: sum(r >= 1 for r in group[name]) for name in sorted(group)}
        eligible = {
            name: successes
            for name, successes in count.items()
            if name != learner and 1 <= successes < len(group[name]) + (rule == "rescue_any")
        }
        if group.get(learner) and count[learner] == 0 and eligible:
            source = max(eligible, key=eligible.__getitem__)  # the first by name among equal ones
            found[problem] = source, eligible[source]
    return found


def rescued_problems(pool: Pool, learner: str, config: Config) -> dict[Hashable, str]:
    """Return the peer whose group the learner takes, by problem; empty unless `share` is a rescue."""
    if not config.share.startswith("rescue"):
        return {}
    return peer_groups(rewards_by_problem(pool), learner, rule=config.share, balance=config.share == "rescue")


def rewards_by_problem(pool: Pool) -> dict[str, dict[str, list[float]]]:
    """Return the rewards of each agent for each problem, without unscorable rollouts."""
    rewards: dict[str, dict[str, list[float]]] = {p.id: {} for p in pool.problems}
    for r in pool:
        if r.reward is not None:
            rewards[r.problem].setdefault(r.source, []).append(r.reward)
    return rewards


def shared_rollouts(pool: Pool, learner: str, config: Config) -> list[int]:
    """Return the positions in the pool of the learner's own rollouts and of the peer rollouts that it takes.

    With the gated objective a peer's group replaces the learner's failed group.
    """
    rescued = rescued_problems(pool, learner, config)
    replaced = rescued if config.peer_update == "gated" else {}

    def takes(r: Rollout) -> bool:
        if r.source == learner:
            return r.problem not in replaced
        return config.share == "all" or rescued.get(r.problem) == r.source

    # sorted by the source's name: neither sums nor mini-batches depend on the order of the agents
    return sorted((i for i, r in enumerate(pool) if takes(r)), key=lambda i: pool.rollouts[i].source)


def drawn_peers(rollouts: Sequence[Rollout], learner: str, config: Config, *, seed: int) -> list[int]:
    """Return the rows of own rollouts, and of the peer rollouts that are drawn uniformly: at most `max_peer` for a problem.

    With the negative log-likelihood one correct peer rollout is drawn for each problem.
    """
    rows: dict[str, list[int]] = {}
    for row, r in enumerate(rollouts):
        if r.source != learner and (config.peer_update != "nll" or r.reward >= 1):
            rows.setdefault(r.problem, []).append(row)
    most = 1 if config.peer_update == "nll" else config.max_peer or len(rollouts)
    drawn = {row for row, r in enumerate(rollouts) if r.source == learner}
    for problem, candidates in rows.items():
        order = np.random.default_rng(derive_seed("peers", seed, learner, problem)).permutation(len(candidates))
        drawn |= {candidates[k] for k in order[:most]}
    return sorted(drawn)


# ── how they count ───────────────────────────────────────────────────────────────────────────────────────────────


def source_advantages(rewards: Float[Tensor, "rollout"]) -> Float[Tensor, "rollout"]:
    """Return the group-relative advantages of one agent's rollouts for one problem; equal rewards give 0.

    >>> source_advantages(torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))
    tensor([ 1.5000, -0.5000, -0.5000, -0.5000], dtype=torch.float64)
    """
    # the rounding of equal rewards is not a difference
    if len(rewards) < 2 or rewards.max() - rewards.min() <= 8 * torch.finfo(rewards.dtype).eps * rewards.abs().max():
        return torch.zeros_like(rewards)
    # A = (R − mean) / (std + 1e-6)
    return (rewards - rewards.mean()) / (rewards.std(correction=1) + STD_GUARD)


def gate(ratio: Float[Tensor, "rollout"], floor: float) -> Float[Tensor, "rollout"]:
    """Return the weight of a peer rollout, from the ratio s of learner to source before the step's first update (GRAFT).

    >>> gate(torch.tensor([0.5, 0.9, 1.2]), floor=0.8)
    tensor([0.0000, 0.9000, 1.0000])
    """
    # w = 1[s > floor] · min(s, 1)
    return torch.where(ratio > floor, ratio.clamp(max=1.0), 0.0)


def diagnostics(ratio: Float[Tensor, "rollout"], weights: Float[Tensor, "rollout"]) -> dict[str, float]:
    """Return how far a learner is from a source: effective sample share of the weights, k3 and χ² of learner and source.

    >>> diagnostics(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0]))
    {'effective_sample_share': 0.5, 'k3': 0.0, 'chi2': 0.0}
    """
    squares = len(weights) * weights.square().sum()
    return {
        "effective_sample_share": float(weights.sum() ** 2 / squares) if squares > 0 else 0.0,  # (Σw)² / (N·Σw²)
        "k3": float((ratio - 1 - ratio.log()).mean()),
        "chi2": float((ratio - 1).square().mean()),
    }


# ── what the learner can use ─────────────────────────────────────────────────────────────────────────────────────


def comparable_rollouts(
    pool: Pool, learner: str, capability: Mapping[str, float], config: Config
) -> tuple[list[int], dict[str, int]]:
    """Return the positions of the shared rollouts whose rewards the learner can compare, and the excluded ones by reason.

    Reasons: "unscorable" (no reward), "no_capability" (the learner had no reward in the whole window, so that no ω exists).
    """
    shared = shared_rollouts(pool, learner, config)
    scored = [i for i in shared if pool.rollouts[i].reward is not None]
    replaced = sum(r.source == learner for r in pool) - sum(pool.rollouts[i].source == learner for i in shared)
    counts = {"unscorable": len(shared) - len(scored), "replaced": replaced}
    excluded = {reason: count for reason, count in counts.items() if count}
    needs_ratio = config.discrepancy or (config.capability_baseline and config.cross_baseline == "learner")
    has_peers = config.share != "none" and len(pool.agents) > 1 and config.peer_update in ("hacpo", "own")
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
