"""E2: advantage within a group (E2a) and the two directions of ω (E2b, E2c)."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from judge import Case
from torch import Tensor

from checks.catalogue import make_exercise
from hacpo_kit.advantages import capability_ratio, group_advantages

t = torch.tensor

# ── E2a: group advantage ─────────────────────────────────────────────────────────────────────────────────────────


def _group_advantage(rewards: Tensor) -> Tensor:
    prompts, n = rewards.shape
    rows = [row for row in range(prompts) for _ in range(n)]
    return group_advantages(rewards.flatten(), rows, ["A"] * len(rows), "A", {"A": 1.0}).advantages.view(prompts, n)


def _standard(rewards: Tensor, *, mean=None, std=None, guard: bool = True) -> Tensor:
    """Return (R − mean) / (std + 1e-6) with another mean or std; with `guard`, rows of equal rewards give 0."""
    mean = rewards.mean(1, keepdim=True) if mean is None else mean
    std = rewards.std(1, keepdim=True) if std is None else std
    equal = rewards.amax(1, keepdim=True) - rewards.amin(1, keepdim=True) < 1e-5
    return torch.where(equal & guard, 0.0, (rewards - mean) / (std + 1e-6))


def _both(mistake: Callable[..., Tensor]) -> list[Callable]:
    """Return a mistake with and without the guard for equal rewards."""
    return [lambda r: mistake(r, guard=True), lambda r: mistake(r, guard=False)]


group_advantage = make_exercise(
    "E2a",
    _group_advantage,
    [
        Case("one prompt, one of four answers is correct", (t([[1.0, 0, 0, 0]]),)),
        Case("two prompts, an easy and a hard one", (t([[1.0, 1, 1, 0], [0.0, 0, 0, 1]]),)),
        Case("rewards between 0 and 1", (t([[0.2, 0.9, 0.4, 0.1], [0.5, 0.1, 0.7, 0.6]]),)),
        Case("the second prompt has equal rewards", (t([[1.0, 0, 0, 1], [1.0, 1, 1, 1]]),)),
        Case("seven rewards of 0.35: equal, but their mean has a rounding error", (torch.full((1, 7), 0.35),)),
    ],
    {
        "population_std": _both(lambda r, guard: _standard(r, std=r.std(1, keepdim=True, correction=0), guard=guard)),
        "mean_of_batch": [
            *_both(lambda r, guard: _standard(r, mean=r.mean(), std=r.std(), guard=guard)),
            *_both(lambda r, guard: _standard(r, mean=r.mean(), guard=guard)),
        ],
        "std_of_batch": _both(lambda r, guard: _standard(r, std=r.std(), guard=guard)),
        "per_column": [
            lambda r: torch.nan_to_num((r - r.mean(0)) / (r.std(0) + 1e-6)),
            lambda r: (r - r.mean(0)) / (r.std(0) + 1e-6),
            lambda r: (r - r.mean(0)) / r.std(0),
        ],
        "no_division": lambda r: r - r.mean(1, keepdim=True),
        "variance": [
            *_both(lambda r, guard: _standard(r, std=r.var(1, keepdim=True), guard=guard)),
            lambda r: (r - r.mean(1, keepdim=True)) / r.var(1, keepdim=True),
        ],
        "no_baseline": [
            *_both(lambda r, guard: _standard(r, mean=torch.zeros(1), guard=guard)),
            lambda r: r / r.std(1, keepdim=True),
        ],
        "wrong_sign": [lambda r: -_standard(r), lambda r: -_standard(r, guard=False)],
        "leave_one_out": lambda r: _standard(r, mean=(r.sum(1, keepdim=True) - r) / (r.shape[1] - 1)),
        "nan_for_equal_rewards": lambda r: torch.where(
            r.amax(1, keepdim=True) == r.amin(1, keepdim=True),
            torch.nan,
            (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True),
        ),
        "rounding_error": [
            lambda r: _standard(r, guard=False),
            lambda r: (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-8),
            lambda r: torch.nan_to_num((r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True)),
            lambda r: torch.where((s := r.std(1, keepdim=True)) > 0, (r - r.mean(1, keepdim=True)) / s, 0.0),
            lambda r: (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True),
        ],
    },
)

# ── E2b and E2c: the two directions of ω ─────────────────────────────────────────────────────────────────────────

PAIR, TRIO = {"A": 0.5, "B": 0.25}, {"A": 0.6, "B": 0.3, "C": 0.45}
FOUR_SOURCES, SIX_SOURCES = ["A", "A", "B", "B"], ["A", "A", "B", "B", "C", "C"]
SIX_REWARDS = t([0.9, 0.4, 0.1, 0.8, 0.3, 0.7])


def baseline(rewards: Tensor, sources: Sequence[str], learner: str, capability: Mapping[str, float]) -> Tensor:
    one_prompt = ["p"] * len(rewards)
    return group_advantages(rewards, one_prompt, sources, learner, capability, binary_guard=False).baselines[0]


def _omegas(sources: Sequence[str], capability: Mapping[str, float], learner: str) -> Tensor:
    """Return ω(learner, source) of every rollout."""
    return t([capability_ratio(capability, learner, j) for j in sources])


def _own(sources: Sequence[str], learner: str) -> Tensor:
    return t([j == learner for j in sources])


capability_baseline = make_exercise(
    "E2b",
    baseline,
    [
        Case("the four answers to 37+58=, learner A", (t([0.0, 1, 0, 1]), FOUR_SOURCES, "A", PAIR)),
        Case("the same, learner B", (t([0.0, 1, 0, 1]), FOUR_SOURCES, "B", PAIR)),
        Case("three agents, rewards between 0 and 1, learner C", (SIX_REWARDS, SIX_SOURCES, "C", TRIO)),
        Case("a peer with capability 0.01", (t([1.0, 1, 0, 1]), FOUR_SOURCES, "A", {"A": 0.5, "B": 0.01})),
        Case("a peer with capability 0", (t([1.0, 1, 0, 1]), FOUR_SOURCES, "A", {"A": 0.5, "B": 0.0})),
    ],
    {
        "wrong_direction": lambda r, j, k, c: (update_weights.reference(j, k, c) * r).mean(),
        "without_omega": lambda r, j, k, c: r.mean(),
        "own_rewards_only": lambda r, j, k, c: r[_own(j, k)].mean(),
        "divided_by_G": lambda r, j, k, c: (_omegas(j, c, k) * r).sum() / _own(j, k).sum(),
        "divided_by_sum_of_omega": lambda r, j, k, c: (w := _omegas(j, c, k)) @ r / w.sum(),
        "sum": lambda r, j, k, c: (_omegas(j, c, k) * r).sum(),
        "unclipped": [
            lambda r, j, k, c: (t([c[k] / c[i] for i in j]) * r).mean(),
            lambda r, j, k, c: (t([c[k] / max(c[i], 1e-8) for i in j]) * r).mean(),
            lambda r, j, k, c: (t([c[k] / c[i] if c[i] else math.inf for i in j]) * r).mean(),
            lambda r, j, k, c: torch.nansum(t([c[k] / (c[i] or math.nan) for i in j]) * r) / len(r),
        ],
        "source_capability": lambda r, j, k, c: (t([c[i] for i in j]) * r).mean(),
    },
)


def weights(sources: Sequence[str], learner: str, capability: Mapping[str, float]) -> Tensor:
    return t([1.0 if j == learner else capability_ratio(capability, j, learner) for j in sources])


update_weights = make_exercise(
    "E2c",
    weights,
    [
        Case("the four answers to 37+58=, learner A", (FOUR_SOURCES, "A", PAIR)),
        Case("the same, learner B", (FOUR_SOURCES, "B", PAIR)),
        Case("three agents, learner C", (SIX_SOURCES, "C", TRIO)),
        Case("a peer with capability 0", (FOUR_SOURCES, "A", {"A": 0.5, "B": 0.0})),
        Case("a learner with capability 0", (FOUR_SOURCES, "B", {"A": 0.5, "B": 0.0})),
    ],
    {
        "wrong_direction": lambda j, k, c: _omegas(j, c, k),
        "all_ones": lambda j, k, c: torch.ones(len(j)),
        "source_capability": lambda j, k, c: t([c[i] for i in j]),
        "normalised": [
            lambda j, k, c: (w := weights(j, k, c)) / w.mean(),
            lambda j, k, c: (w := weights(j, k, c)) / w.sum(),
        ],
        "unclipped": [
            lambda j, k, c: t([c[i] / c[k] for i in j]),
            lambda j, k, c: t([1.0 if i == k else c[i] / max(c[k], 1e-8) for i in j]),
            lambda j, k, c: t([1.0 if i == k else max(c[i], 1e-8) / max(c[k], 1e-8) for i in j]),
        ],
    },
)
