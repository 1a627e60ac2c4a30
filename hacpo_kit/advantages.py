"""③ advantage: capability window, capability ratio, capability-aware advantage (eqs. 6-10)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hacpo_kit.config import Config
from hacpo_kit.records import Batch, Pool, Rollout

if TYPE_CHECKING:
    from hacpo_kit.models.agents import Agent

FLOOR = 1e-8  # smallest P̂ in a ratio, so that an agent that never succeeds divides nothing by zero
OMEGA_MIN, OMEGA_MAX = 0.1, 10.0
STD_GUARD = 1e-6  # added to σ_joint


def capability_ratio(capability: Mapping[str, float], numerator: str, denominator: str) -> float:
    """ω(numerator, denominator) = P̂(numerator) / P̂(denominator), clipped to [0.1, 10] (eq. 9).

    Raises KeyError for an agent without a capability, ValueError for one that is not finite.

    >>> capability_ratio({"strong": 0.5, "weak": 0.25}, "strong", "weak")
    2.0
    """
    values = []
    for name in (numerator, denominator):
        if name not in capability:
            if name in list(capability):
                capability[name]  # observed, but without a reward: says so
            raise KeyError(f"no capability for agent {name!r}; there are {', '.join(map(repr, capability)) or 'none'}")
        values.append(float(capability[name]))
        if not abs(values[-1]) < float("inf"):
            raise ValueError(f"the capability of agent {name!r} is {values[-1]}, need a finite number")
    # ω = max(P̂, 1e-8) / max(P̂, 1e-8), clipped
    ratio = max(values[0], FLOOR) / max(values[1], FLOOR)
    return min(max(ratio, OMEGA_MIN), OMEGA_MAX)


@dataclass(frozen=True)
class Capability(Mapping[str, float]):
    """P̂ of every agent: mean of its mean rewards over the last `window` steps (eq. 8); a mapping name → P̂.

    >>> c = Capability(window=2).with_step({"A": 0.2}).with_step({"A": 0.4}).with_step({"A": 0.8})
    >>> round(c["A"], 6)
    0.6
    """

    window: int = 5
    history: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)  # per step; None: nothing scorable

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(f"window={self.window}: it must be at least 1 step")

    def observe(self, pool: Pool) -> Capability:
        """The capability after this pool's step; rollouts without a reward do not count.

        Raises ValueError if the pool is not scored yet.
        """
        if any(r.status == "unscored" for r in pool):
            raise ValueError("this pool has no rewards yet: call pool = reward(pool) first")
        means = {}
        for name, rollouts in pool.by_source.items():
            rewards = [r.reward for r in rollouts if r.reward is not None]
            means[name] = sum(rewards) / len(rewards) if rewards else None
            if rewards and means[name] < 0:
                warnings.warn(
                    f"the mean reward of agent {name!r} is negative: ω compares positive means, so P̂ counts as {FLOOR}; "
                    "add a constant to the rewards",
                    stacklevel=2,
                )
        return self.with_step(means)

    def with_step(self, means: Mapping[str, float | None]) -> Capability:
        """The capability after one more step with these mean rewards (None: no scorable rollout)."""
        steps = max(map(len, self.history.values()), default=0)
        history = {name: self.history.get(name, (None,) * steps) for name in {**self.history, **means}}
        return replace(self, history={name: (*past, means.get(name)) for name, past in history.items()})

    def __getitem__(self, name: str) -> float:
        if name not in self.history:
            raise KeyError(
                f"agent {name!r} was never observed; there are {', '.join(map(repr, self.history)) or 'none'}"
            )
        recent = [v for v in self.history[name][-self.window :] if v is not None]
        if not recent:
            raise KeyError(
                f"agent {name!r} had no scorable rollout in the last {self.window} steps: is the gold usable?"
            )
        return sum(recent) / len(recent)

    def __iter__(self):
        return iter(self.history)

    def __len__(self) -> int:
        return len(self.history)

    def ratio(self, numerator: str, denominator: str) -> float:
        """ω(numerator, denominator), clipped to [0.1, 10]."""
        return capability_ratio(self, numerator, denominator)

    def at(self, step: int) -> Capability:
        """The capability as it was after the first `step` steps."""
        return replace(self, history={name: past[:step] for name, past in self.history.items()})

    def to_dict(self) -> dict[str, Any]:
        """As JSON types; `Capability(**d)` restores it."""
        return {"window": self.window, "history": {name: list(past) for name, past in self.history.items()}}


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
    equal_counts: bool = True,
) -> GroupAdvantages:
    """Capability-aware advantage of every rollout, as one learner sees it (eqs. 6-7).

    `capability` maps each agent to its windowed P̂. With one source it is the plain group-relative advantage.

    Raises ValueError for rewards that are not finite or too large to compare, for lengths that disagree, and, unless
    `equal_counts=False`, where an agent has fewer answers to a prompt than another.

    >>> group_advantages(torch.tensor([1.0, 0, 0, 0]), ["p"] * 4, ["A"] * 4, "A", {"A": 0.25}).advantages
    tensor([ 1.5000, -0.5000, -0.5000, -0.5000])
    """
    if not isinstance(rewards, Tensor) or not rewards.is_floating_point():
        rewards = torch.as_tensor(rewards, dtype=torch.float64)
    prompts = prompts.tolist() if isinstance(prompts, Tensor) else prompts  # tensors are equal by identity only
    _check_group_input(rewards, prompts, sources, learner, equal_counts)
    if cross_baseline not in ("learner", "source"):
        raise ValueError(f"cross_baseline={cross_baseline!r}: it takes 'learner' or 'source'")
    names = list(dict.fromkeys(sources))
    of_source = torch.tensor([names.index(s) for s in sources], device=rewards.device)
    binary = binary_guard and bool(((rewards == 0) | (rewards == 1)).all())

    rows: dict[Hashable, list[int]] = {}
    for i, prompt in enumerate(prompts):
        rows.setdefault(prompt, []).append(i)
    baselines, joint_std = torch.empty_like(rewards), torch.empty_like(rewards)
    equal = torch.zeros(len(rewards), dtype=torch.bool, device=rewards.device)
    for group in rows.values():
        r, who = rewards[group], of_source[group]
        joint_std[group] = r.std(correction=1) if len(group) > 1 else torch.zeros_like(r)
        # float residue of an equal group must not pass for a difference
        equal[group] = (r.max() - r.min() <= 8 * torch.finfo(r.dtype).eps * r.abs().max()).expand(len(group))
        viewers = names if cross_baseline == "source" else [learner]
        for viewer in viewers:
            value = _baseline(r, who, names, viewer, capability if capability_baseline else None, binary)
            seen = torch.tensor(group)[(who == names.index(viewer)).cpu()] if cross_baseline == "source" else group
            baselines[seen] = r.mean() if bool(equal[group[0]]) else value

    # A = (R − μ̂) / (σ_joint + 1e-6); a prompt whose rewards are all equal teaches nothing
    advantages = torch.where(equal, 0.0, (rewards - baselines) / (joint_std + STD_GUARD))
    bad = ~(advantages.isfinite() & (joint_std.isfinite() | equal))
    if bad.any():
        raise ValueError(
            f"rewards of rollouts {bad.nonzero().flatten().tolist()} are too large: their spread is no finite number; "
            "give smaller ones"
        )
    return GroupAdvantages(advantages, baselines, torch.where(equal, 0.0, joint_std))


def _baseline(rewards: Tensor, who: Tensor, names: list[str], viewer: str, capability, binary: bool) -> Tensor:
    """μ̂ of one agent for one prompt: mean over all rollouts of ω(viewer, source)·R."""
    # μ̂(k) = 1/(nG) · Σ_j Σ_i ω(k,j)·R(y_i^(j))
    omega = [1.0 if capability is None or j == viewer else capability_ratio(capability, viewer, j) for j in names]
    value = (rewards.new_tensor(omega)[who] * rewards).mean()
    if binary and value > 1 and viewer in names and (mine := rewards[who == names.index(viewer)]).numel():
        return mine.mean()  # no 0/1 reward can beat a baseline above 1: fall back to the agent's own mean
    return value


def _check_group_input(rewards, prompts, sources, learner, equal_counts) -> None:
    if rewards.ndim != 1 or not len(rewards) == len(prompts) == len(sources):
        raise ValueError(
            f"need one reward, prompt and source a rollout; got rewards {tuple(rewards.shape)}, "
            f"{len(prompts)} prompts, {len(sources)} sources"
        )
    if not rewards.isfinite().all():
        bad = (~rewards.isfinite()).nonzero().flatten().tolist()
        raise ValueError(f"rewards of rollouts {bad} are not finite; leave unscorable rollouts out before this call")
    if not equal_counts:
        return
    counts: dict[Hashable, dict[str, int]] = {}
    for prompt, source in zip(prompts, sources, strict=True):
        group = counts.setdefault(prompt, {})
        group[source] = group.get(source, 0) + 1
    expected = max((c for group in counts.values() for c in group.values()), default=0)
    names = dict.fromkeys([learner, *sources])
    for prompt, group in counts.items():
        for name in names:
            if group.get(name, 0) != expected:
                raise ValueError(
                    f"prompt {prompt!r} has {group.get(name, 0)} rollouts of agent {name!r}, need {expected}"
                )


def advantage(pool: Pool, agent: Agent, capability: Capability, config: Config) -> Batch:
    """The learner's own view of a scored pool: its tokens, advantages, weights ω, own or peer (eqs. 6-10).

    Rollouts that this learner cannot use are left out and counted by reason in `Batch.excluded`.

    Raises ValueError if the pool has no rewards, or misses rollouts of an agent for a problem (named).
    """
    if any(r.status == "unscored" for r in pool):
        raise ValueError("this pool has no rewards yet: call pool = reward(pool) first")
    if agent.name not in pool.agents:
        raise ValueError(
            f"agent {agent.name!r} wrote nothing in this pool; it holds {', '.join(map(repr, pool.agents))}"
        )
    pool.check_complete()
    taught_by = pool.agents if config.sources == "all" else (agent.name,)
    usable = [i for i, r in enumerate(pool) if r.source in taught_by and r.reward is not None]
    # sources by name: neither sums nor mini-batches may depend on the order in which the agents were given
    usable.sort(key=lambda i: pool.rollouts[i].source)
    offered = sum(r.source in taught_by for r in pool)
    excluded = {"unscorable": offered - len(usable)} if offered > len(usable) else {}
    compares = config.discrepancy or (config.capability_baseline and config.cross_baseline == "learner")
    if compares and len(taught_by) > 1 and usable and agent.name not in capability:
        # without a reward in the whole window there is no P̂ to compare the others with
        excluded["no_capability"], usable = len(usable), []

    rollouts = [pool.rollouts[i] for i in usable]
    group = group_advantages(
        torch.tensor([r.reward for r in rollouts], dtype=torch.float64),
        [r.problem for r in rollouts],
        [r.source for r in rollouts],
        agent.name,
        capability,
        capability_baseline=config.capability_baseline,
        binary_guard=config.binary_guard,
        cross_baseline=config.cross_baseline,
        equal_counts=False,  # completeness was checked above; what is missing now is unscorable
    )
    advantages, solved_count = group.advantages.float(), 0
    if config.exclude_solved:
        solved = solved_prompts(rollouts, agent.name)
        advantages[[r.problem in solved for r in rollouts]] = 0.0
        solved_count = len(solved)
    # peer rollouts: A · ω(j, k), so that a stronger source counts more
    peer = {r.source for r in rollouts} - {agent.name} if config.discrepancy else set()
    omega = dict.fromkeys(taught_by, 1.0) | {s: capability.ratio(s, agent.name) for s in peer}
    kept, prompts, responses = [], [], []
    tokens = learner_tokens(pool, agent, config.count_eos)
    for row, rollout in enumerate(rollouts):
        view = tokens(rollout)
        if isinstance(view, str):
            excluded[view] = excluded.get(view, 0) + 1
            continue
        kept.append(row)
        prompts.append(view[0])
        responses.append(view[1])
    own = [rollouts[row].source == agent.name for row in kept]
    means = [rollouts[row].mean_logp(config.count_eos or mine) for row, mine in zip(kept, own, strict=True)]
    return Batch(
        learner=agent.name,
        prompt_ids=tuple(prompts),
        response_ids=tuple(responses),
        source_mean_logp=torch.tensor(means, dtype=torch.float32),
        advantages=advantages[kept],
        weights=torch.tensor([omega[rollouts[row].source] for row in kept], dtype=torch.float32),
        own=torch.tensor(own, dtype=torch.bool),
        index=tuple(usable[row] for row in kept),
        pool=pool,
        excluded=excluded,
        solved_prompts=solved_count,
    )


def solved_prompts(rollouts: Sequence[Rollout], learner: str) -> set[str]:
    """Problems whose rewards differ, but where nobody did better than the worst of the learner's own rollouts.

    Not the paper's. Alone, the learner's group would have equal rewards and give no gradient; beside worse answers of
    others it does.
    """
    groups: dict[str, list[Rollout]] = {}
    for r in rollouts:
        groups.setdefault(r.problem, []).append(r)
    solved = set()
    for problem, group in groups.items():
        rewards, mine = [r.reward for r in group], [r.reward for r in group if r.source == learner]
        if mine and min(mine) >= max(rewards) > min(rewards):
            solved.add(problem)
    return solved


def learner_tokens(pool: Pool, agent: Agent, count_eos: bool) -> Callable[[Rollout], tuple | str]:
    """A function that gives a rollout's prompt and response in the learner's tokens, or why the learner cannot use it."""
    asked = {r.problem: r.prompt_ids for r in pool if r.source == agent.name}

    @cache  # a model that has nearly learned a problem gives the same answer again and again
    def view(problem: str, text: str, ended: bool):
        return agent.view(pool.problem(problem), text, ended=ended, prompt=asked.get(problem, ()))

    def tokens(rollout: Rollout):
        if rollout.source == agent.name:
            return rollout.prompt_ids, rollout.token_ids  # own rollouts keep the sampled ids
        return rollout.hazard or view(rollout.problem, rollout.text, rollout.ended and count_eos)

    return tokens
