"""E5: a bug that needs unequal micro-batches to show (E5a), and a bug to find by reading (E5b)."""

import inspect
from collections.abc import Callable, Sequence

import torch
from judge import Case
from torch import Tensor

from checks.catalogue import make_exercise
from hacpo_kit.advantages import capability_ratio

# ── E5a: gradient accumulation ───────────────────────────────────────────────────────────────────────────────────


def _whole(objective: Tensor, sizes: Sequence[int]) -> Tensor:
    return -objective.mean()  # LossOutput.loss: the negative mean over the mini-batch


EIGHT = torch.tensor([0.9, -0.3, 0.2, 1.1, -0.6, 0.4, 0.8, -1.2])

accumulate = make_exercise(
    "E5a",
    _whole,
    [
        Case("eight rollouts in one part", (EIGHT, [8])),
        Case("eight rollouts in two equal parts", (EIGHT, [4, 4])),
        Case("eight rollouts in parts of 5, 2 and 1", (EIGHT, [5, 2, 1])),
        Case("five rollouts in parts of 4 and 1", (EIGHT[:5], [4, 1])),
    ],
    {
        "mean_of_means": lambda o, sizes: -sum(part.mean() for part in o.split(sizes)) / len(sizes),
        "sum_of_means": lambda o, sizes: -sum(part.mean() for part in o.split(sizes)),
        "sum": lambda o, sizes: -o.sum(),
        "divided_by_largest": [
            lambda o, sizes: -sum(part.sum() / max(sizes) for part in o.split(sizes)),
            lambda o, sizes: -sum(part.sum() / (max(sizes) * len(sizes)) for part in o.split(sizes)),
            lambda o, sizes: -sum(part.sum() / sizes[0] for part in o.split(sizes)) / len(sizes),
        ],
        "wrong_sign": lambda o, sizes: o.mean(),
        "last_part_only": [
            lambda o, sizes: -o.split(sizes)[-1].sum() / len(o),
            lambda o, sizes: -o.split(sizes)[-1].mean(),
        ],
    },
    gradient=0,
)

# ── E5b: find the wrong line ─────────────────────────────────────────────────────────────────────────────────────


def effective_advantages(rewards, sources, learner, capability):
    """Return the effective advantages for one prompt: A(k) for own answers, ω(j, k)·A(k) for peer answers (eqs. 6, 7, 10)."""
    own = torch.tensor([j == learner for j in sources])
    omega = torch.tensor([capability_ratio(capability, learner, j) for j in sources])
    baseline = (omega * rewards).mean()
    sigma = rewards.std(correction=1)
    advantages = (rewards - baseline) / (sigma + 1e-6)
    return torch.where(own, advantages, omega * advantages)


PLANTED, REPAIRED = "omega * advantages", "advantages / omega"


def numbered(function: Callable) -> str:
    """Return the source of a function with line numbers from 1."""
    return "\n".join(f"{i:2d}  {line}" for i, line in enumerate(inspect.getsource(function).splitlines(), 1))


def _line_with_the_bug() -> int:
    return next(i for i, line in enumerate(inspect.getsource(effective_advantages).splitlines(), 1) if PLANTED in line)


which_line = make_exercise(
    "E5b",
    _line_with_the_bug,
    [Case("the function printed above")],
    {f"line_{i}": lambda i=i: i for i in range(1, 8)},
)
