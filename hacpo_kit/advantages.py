"""③ advantage: capability, capability ratio and capability-aware advantage (eqs. 6-10)."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hacpo_kit.common.seeds import derive_seed
from hacpo_kit.config import Config
from hacpo_kit.records import Batch, Pool, Rollout
from hacpo_kit.sharing import (
    STD_GUARD,
    comparable_rollouts,
    drawn_peers,
    encode_for,
    solved_prompts,
    source_advantages,
)

if TYPE_CHECKING:
    from hacpo_kit.models.agents import Agent

FLOOR = 1e-8  # smallest P̂ in a ratio; prevents division by zero for an agent whose mean reward is 0
OMEGA_MIN, OMEGA_MAX = 0.1, 10.0


# ── capability ───────────────────────────────────────────────────────────────────────────────────────────────────


def capability_ratio(capability: Mapping[str, float], numerator: str, denominator: str) -> float:
    """Return ω(numerator, denominator) = P̂(numerator) / P̂(denominator), clipped to [0.1, 10] (eq. 9).

    Raises KeyError for an agent without a capability, ValueError for a capability that is not finite.

    >>> capability_ratio({"strong": 0.5, "weak": 0.25}, "strong", "weak")
    2.0
    """
    above, below = (_finite_capability(capability, name) for name in (numerator, denominator))
    # ω = max(P̂, 1e-8) / max(P̂, 1e-8), clipped
    return min(max(max(above, FLOOR) / max(below, FLOOR), OMEGA_MIN), OMEGA_MAX)


def _finite_capability(capability: Mapping[str, float], name: str) -> float:
    if name not in list(capability):
        raise KeyError(f"no capability for agent {name!r}; there are {', '.join(map(repr, capability)) or 'none'}")
    value = float(capability[name])  # `Capability` raises KeyError, with the reason, for an agent without rewards
    if not math.isfinite(value):
        raise ValueError(f"the capability of agent {name!r} is {value}; it must be a finite number")
    return value


@dataclass(frozen=True)
class Capability(Mapping[str, float]):
    """P̂ of every agent: the mean of its mean rewards over the last `window` steps (eq. 8); a mapping name → P̂.

    >>> c = Capability(window=2).with_step({"A": 0.2}).with_step({"A": 0.4}).with_step({"A": 0.8})
    >>> round(c["A"], 6)
    0.6
    """

    window: int = 5
    history: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)  # per step; None: no reward

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(f"window={self.window}: it must be at least 1 step")

    def observe(self, pool: Pool) -> Capability:
        """Return the capability after the step of this pool; rollouts without a reward do not count.

        Raises ValueError if the pool is not scored yet.
        """
        _check_scored(pool)
        means: dict[str, float | None] = {}
        for name, rollouts in pool.by_source.items():
            rewards = [r.reward for r in rollouts if r.reward is not None]
            means[name] = sum(rewards) / len(rewards) if rewards else None
            if rewards and means[name] < 0:
                warnings.warn(
                    f"the mean reward of agent {name!r} is negative and counts as {FLOOR} in ω, which compares positive "
                    "means; add a constant to the rewards",
                    stacklevel=2,
                )
        return self.with_step(means)

    def with_step(self, means: Mapping[str, float | None]) -> Capability:
        """Return the capability after one more step with these mean rewards (None: no scorable rollout)."""
        steps = max(map(len, self.history.values()), default=0)
        history = {name: self.history.get(name, (None,) * steps) for name in {**self.history, **means}}
        return replace(self, history={name: (*past, means.get(name)) for name, past in history.items()})

    def __getitem__(self, name: str) -> float:
        if name not in self.history:
            names = ", ".join(map(repr, self.history)) or "none"
            raise KeyError(f"agent {name!r} was never observed; there are {names}")
        recent = [v for v in self.history[name][-self.window :] if v is not None]
        if not recent:
            raise KeyError(f"agent {name!r} had no scorable rollout in the last {self.window} steps; check the golds")
        return sum(recent) / len(recent)

    def __iter__(self) -> Iterator[str]:
        return iter(self.history)

    def __len__(self) -> int:
        return len(self.history)

    def ratio(self, numerator: str, denominator: str) -> float:
        """Return ω(numerator, denominator), clipped to [0.1, 10]."""
        return capability_ratio(self, numerator, denominator)

    def at(self, step: int) -> Capability:
        """Return the capability after the first `step` steps."""
        return replace(self, history={name: past[:step] for name, past in self.history.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types; `Capability(**d)` restores it."""
        return {"window": self.window, "history": {name: list(past) for name, past in self.history.items()}}


# ── advantages ───────────────────────────────────────────────────────────────────────────────────────────────────


class GroupAdvantages(NamedTuple):
    """Advantages of one learner; baseline and standard deviation are those of the rollout's prompt."""

    advantages: Float[Tensor, "rollout"]
    baselines: Float[Tensor, "rollout"]
    joint_std: Float[Tensor, "rollout"]


def group_advantages(
    rewards: Float[Tensor, "rollout"],
    prompts: Sequence[Hashable],
    sources: Sequence[str],
    learner: str,
    capability: Mapping[str, float],
    *,
    capability_baseline: bool = True,
    binary_guard: bool = True,
    cross_baseline: str = "learner",
) -> GroupAdvantages:
    """Return the capability-aware advantage of every rollout for one learner (eqs. 6-7).

    `capability` maps each agent to its windowed P̂. With one source the result is the group-relative advantage.

    Raises ValueError for inputs of different lengths, and for rewards that are not finite or too large.

    >>> group_advantages(torch.tensor([1.0, 0, 0, 0]), ["p"] * 4, ["A"] * 4, "A", {"A": 0.25}).advantages
    tensor([ 1.5000, -0.5000, -0.5000, -0.5000])
    """
    rewards, groups = _checked_groups(rewards, prompts, sources, cross_baseline)
    guard = binary_guard and bool(((rewards == 0) | (rewards == 1)).all())
    baselines, joint_std = torch.empty_like(rewards), torch.empty_like(rewards)
    equal = torch.empty_like(rewards, dtype=torch.bool)
    for rows in groups:
        r, names = rewards[rows], [sources[i] for i in rows]
        # the rounding of equal rewards is not a difference
        equal[rows] = r.max() - r.min() <= 8 * torch.finfo(r.dtype).eps * r.abs().max()
        # σ_joint: standard deviation of all rewards of the prompt
        joint_std[rows] = r.std(correction=1) if len(rows) > 1 else 0.0
        for k in [learner] if cross_baseline == "learner" else dict.fromkeys(names):
            receivers = [i for i in rows if cross_baseline == "learner" or sources[i] == k]
            baselines[receivers] = _baseline(r, names, k, capability if capability_baseline else None, guard)
        if equal[rows[0]]:
            baselines[rows] = r.mean()

    # A = (R − μ̂) / (σ_joint + 1e-6), and 0 if all rewards of the prompt are equal
    advantages = torch.where(equal, 0.0, (rewards - baselines) / (joint_std + STD_GUARD))
    too_large = ~(advantages.isfinite() & (joint_std.isfinite() | equal))
    if too_large.any():
        rows = too_large.nonzero().flatten().tolist()
        raise ValueError(
            f"rewards of rollouts {rows} are too large: their standard deviation is not finite; scale them down"
        )
    return GroupAdvantages(advantages, baselines, torch.where(equal, 0.0, joint_std))


def _baseline(
    rewards: Tensor, sources: Sequence[str], k: str, capability: Mapping[str, float] | None, guard: bool
) -> Tensor:
    """Return the baseline of agent k for the rewards of one prompt (eq. 6)."""
    # μ̂(k) = 1/(nG) · Σ_j Σ_i ω(k, j)·R(y_i^(j))
    omega = {j: 1.0 if capability is None or j == k else capability_ratio(capability, k, j) for j in set(sources)}
    baseline = (rewards.new_tensor([omega[j] for j in sources]) * rewards).mean()
    if guard and baseline > 1 and k in sources:
        return rewards[[j == k for j in sources]].mean()  # no 0/1 reward exceeds a baseline above 1
    return baseline


def _checked_groups(rewards, prompts, sources, cross_baseline: str) -> tuple[Tensor, list[list[int]]]:
    """Return the rewards as floating point, and the rows of each prompt."""
    if not isinstance(rewards, Tensor) or not rewards.is_floating_point():
        rewards = torch.as_tensor(rewards, dtype=torch.float64)
    if rewards.ndim != 1 or not len(rewards) == len(prompts) == len(sources):
        raise ValueError(
            f"need one reward, prompt and source per rollout; got rewards {tuple(rewards.shape)}, {len(prompts)} prompts, "
            f"{len(sources)} sources"
        )
    if not rewards.isfinite().all():
        rows = (~rewards.isfinite()).nonzero().flatten().tolist()
        raise ValueError(f"rewards of rollouts {rows} are not finite; exclude unscorable rollouts before this call")
    if cross_baseline not in ("learner", "source"):
        raise ValueError(f"cross_baseline={cross_baseline!r}: it takes 'learner' or 'source'")
    groups: dict[Hashable, list[int]] = {}
    for i, prompt in enumerate(prompts.tolist() if isinstance(prompts, Tensor) else prompts):
        groups.setdefault(prompt, []).append(i)
    return rewards, list(groups.values())


def advantage(pool: Pool, agent: Agent, capability: Mapping[str, float], config: Config) -> Batch:
    """Return the learner's view of a scored pool: its tokens, advantages and weights ω (eqs. 6-10).

    Rollouts that this learner cannot use are excluded and counted by reason in `Batch.excluded`.

    Raises ValueError if the pool has no rewards, or lacks rollouts of an agent for a problem.
    """
    _check_scored(pool)
    if agent.name not in pool.agents:
        raise ValueError(
            f"agent {agent.name!r} has no rollouts in this pool; there are those of {', '.join(map(repr, pool.agents))}"
        )
    pool.check_complete()
    positions, excluded = comparable_rollouts(pool, agent.name, capability, config)
    rollouts = [pool.rollouts[i] for i in positions]

    # A(k)(y) of every rollout y (eqs. 6-7), or that of its source
    advantages = _advantages(rollouts, agent.name, capability, config).float()
    solved = solved_prompts(rollouts, agent.name) if config.exclude_solved else set()
    advantages[[r.problem in solved for r in rollouts]] = 0.0
    # weight ω(j, k) of a peer rollout: a stronger source counts more (eq. 10)
    omega = _peer_weights({r.source for r in rollouts} - {agent.name}, agent.name, capability, config)

    seed = derive_seed("peers", config.seed, pool.updates.get(agent.name, 0))
    drawn = drawn_peers(rollouts, agent.name, config, seed=seed)
    tokens: list = ["not_drawn"] * len(rollouts)
    for row, ids in zip(
        drawn, encode_for(agent, pool, [rollouts[row] for row in drawn], config.count_eos), strict=True
    ):
        tokens[row] = ids
    kept = [row for row, ids in enumerate(tokens) if not isinstance(ids, str)]
    own = [rollouts[row].source == agent.name for row in kept]
    means = [rollouts[row].mean_logp(config.count_eos or is_own) for row, is_own in zip(kept, own, strict=True)]
    return Batch(
        learner=agent.name,
        prompt_ids=tuple(tokens[row][0] for row in kept),
        response_ids=tuple(tokens[row][1] for row in kept),
        source_mean_logp=torch.tensor(means, dtype=torch.float32),
        advantages=advantages[kept],
        weights=torch.tensor([omega.get(rollouts[row].source, 1.0) for row in kept], dtype=torch.float32),
        own=torch.tensor(own, dtype=torch.bool),
        index=tuple(positions[row] for row in kept),
        pool=pool,
        excluded={**excluded, **Counter(reason for reason in tokens if isinstance(reason, str))},
        solved_prompts=len(solved),
    )


def _advantages(
    rollouts: Sequence[Rollout], learner: str, capability: Mapping[str, float], config: Config
) -> Float[Tensor, "rollout"]:
    """Return the advantage of every rollout of a learner's selection."""
    rewards = torch.tensor([r.reward for r in rollouts], dtype=torch.float64)
    if config.peer_update in ("hacpo", "own"):
        return group_advantages(
            rewards,
            [r.problem for r in rollouts],
            [r.source for r in rollouts],
            learner,
            capability,
            capability_baseline=config.capability_baseline,
            binary_guard=config.binary_guard,
            cross_baseline=config.cross_baseline,
        ).advantages
    groups: dict[tuple[str, str], list[int]] = {}
    for row, r in enumerate(rollouts):
        groups.setdefault((r.problem, r.source), []).append(row)
    advantages = torch.empty_like(rewards)
    for (_, source), rows in groups.items():
        likelihood = config.peer_update == "nll" and source != learner  # which has no advantage
        advantages[rows] = 1.0 if likelihood else source_advantages(rewards[rows])
    return advantages


def _peer_weights(peers: set[str], learner: str, capability: Mapping[str, float], config: Config) -> dict[str, float]:
    """Return the weight of each peer's rollouts: ω(source, learner) (eq. 10), λ, or 1 until the gate replaces it."""
    if config.peer_update == "nll":
        return dict.fromkeys(peers, config.nll_weight)
    if config.peer_update == "gated" or not config.discrepancy:
        return dict.fromkeys(peers, 1.0)
    return {source: capability_ratio(capability, source, learner) for source in peers}


def _check_scored(pool: Pool) -> None:
    if any(r.status == "unscored" for r in pool):
        raise ValueError("this pool has no rewards yet; call pool = reward(pool) first")
