"""The exercises: for each the right function (the package's own), inputs that tell mistakes apart, and the mistakes by name.

In a notebook: `checks.group_advantage(group_advantage)`. What a check does stands in judge.py, what it says of a mistake in
mistakes.yaml. Spoilers below.
"""

from __future__ import annotations

import inspect
import math
import random
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from judge import Case, Exercise, Mistake, Verdict, wrap
from torch import Tensor

import hacpo_kit as hk
from hacpo_kit.advantages import capability_ratio, group_advantages
from hacpo_kit.models.agents import align
from hacpo_kit.objective import clip_band, hacpo_loss
from hacpo_kit.objective import sequence_ratio as _ratio
from hacpo_kit.runs.evaluation import best_at
from hacpo_kit.tasks.boxes import last_box

t = torch.tensor
WORDS = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8"))


def _exercise(
    label: str,
    reference: Callable,
    cases: Sequence[Case],
    wrong: Mapping[str, Callable | list[Callable]],
    **options: Any,
) -> Exercise:
    """An exercise whose mistakes are `wrong`, by name: a wrong function or several; what is said of them is in mistakes.yaml."""
    words = WORDS[label]
    mistakes = [Mistake(name, ways, **words["mistakes"][name]) for name, ways in wrong.items()]
    return Exercise(label, reference, cases, mistakes, words["learned"], **options)


# ── E1a: the last box ────────────────────────────────────────────────────────────────────────────────────────────


def _opened(text: str) -> list[str]:
    """What follows each \\boxed{, with it."""
    return [rf"\boxed{{{rest}" for rest in text.split(r"\boxed{")[1:]]


def _unstripped(text: str) -> str | None:
    if (inside := last_box(text)) is None:
        return None
    start = text.rfind(r"\boxed{") + len(r"\boxed{")
    return text[start : text.index("}", text.index(inside, start) + len(inside))]


def _crashing(text: str) -> str | None:
    if r"\boxed{" not in text:
        raise IndexError("list index out of range")
    return last_box(text)


box = _exercise(
    "E1a",
    last_box,
    [
        Case("one box", (r"7+8=15;3+5+1=9;\boxed{95}",)),
        Case("no box", ("It is 95.",)),
        Case("two boxes: the model corrects itself", (r"\boxed{85}, no: \boxed{95}.",)),
        Case("braces inside the box", (r"So it is \boxed{\frac{1}{2}}.",)),
        Case("a closing brace behind the box", (r"\boxed{95} (from {90, 5})",)),
        Case("a number behind the box", (r"\boxed{95}, found in 2 steps",)),
        Case("spaces in the box", (r"\boxed{ 95 }",)),
        Case("an empty box", (r"\boxed{}",)),
        Case("cut off inside the last box", (r"\boxed{85}, no: \boxed{9",)),
    ],
    {
        "first_box": lambda text: last_box(_opened(text)[0]) if _opened(text) else None,
        "up_to_the_first_brace": [
            lambda text: m[-1].strip() or None if (m := re.findall(r"\\boxed\{(.*?)\}", text)) else None,
            lambda text: m[-1].strip() or None if (m := re.findall(r"\\boxed\{([^{}]*)\}", text)) else None,
        ],
        "up_to_the_last_brace": [
            lambda text: m.group(1).strip() or None if (m := re.search(r"\\boxed\{(.*)\}", text)) else None,
            lambda text: text[i + 7 : text.rfind("}")].strip() or None if (i := text.rfind(r"\boxed{")) >= 0 else None,
        ],
        "last_number": lambda text: m[-1] if (m := re.findall(r"-?\d+(?:\.\d+)?", text)) else None,
        "an_earlier_box_is_paid": lambda text: next(filter(None, map(last_box, reversed(_opened(text)))), None),
        "crash_without_a_box": _crashing,
        "empty_text_for_none": lambda text: last_box(text) or "",
        "with_the_command": lambda text: None if (b := last_box(text)) is None else rf"\boxed{{{b}}}",
        "with_its_spaces": _unstripped,
    },
)


# ── E1b: best@k ──────────────────────────────────────────────────────────────────────────────────────────────────

best_of = _exercise(
    "E1b",
    best_at,
    [
        Case("8 answers, 2 right, 3 drawn", (8, 2, 3)),
        Case("8 answers, 2 right, 1 drawn", (8, 2, 1)),
        Case("8 answers, none right, 4 drawn", (8, 0, 4)),
        Case("8 answers, 6 right, 3 drawn: fewer wrong ones than draws", (8, 6, 3)),
        Case("30 answers, 1 right, all drawn", (30, 1, 30)),
    ],
    {
        "with_replacement": lambda n, correct, k: 1 - (1 - correct / n) ** k,
        "mean_accuracy": lambda n, correct, k: correct / n,
        "k_times_the_mean": [lambda n, correct, k: min(1.0, k * correct / n), lambda n, correct, k: k * correct / n],
        "all_right": lambda n, correct, k: math.comb(correct, k) / math.comb(n, k),
        "none_right": lambda n, correct, k: math.comb(n - correct, k) / math.comb(n, k),
        "any_of_all": lambda n, correct, k: float(correct > 0),
        "exactly_one": lambda n, correct, k: correct * math.comb(n - correct, k - 1) / math.comb(n, k),
    },
)


# ── E2a: group advantage ─────────────────────────────────────────────────────────────────────────────────────────


def _group_advantage(rewards: Tensor) -> Tensor:
    prompts, n = rewards.shape
    rows = [row for row in range(prompts) for _ in range(n)]
    return group_advantages(rewards.flatten(), rows, ["A"] * len(rows), "A", {"A": 1.0}).advantages.view(prompts, n)


def _standard(rewards: Tensor, *, mean=None, std=None, equal: bool = True) -> Tensor:
    """(R − mean) / (std + 1e-6) with another mean or std; `equal`: rows of equal rewards give 0."""
    mean = rewards.mean(1, keepdim=True) if mean is None else mean
    std = rewards.std(1, keepdim=True) if std is None else std
    flat = rewards.amax(1, keepdim=True) - rewards.amin(1, keepdim=True) < 1e-5
    return torch.where(flat & equal, 0.0, (rewards - mean) / (std + 1e-6))


def _both(fault: Callable[..., Tensor]) -> list[Callable]:
    """A mistake made with and without minding rows of equal rewards."""
    return [lambda r: fault(r, equal=True), lambda r: fault(r, equal=False)]


group_advantage = _exercise(
    "E2a",
    _group_advantage,
    [
        Case("one prompt, one of four answers is right", (t([[1.0, 0, 0, 0]]),)),
        Case("two prompts, an easy and a hard one", (t([[1.0, 1, 1, 0], [0.0, 0, 0, 1]]),)),
        Case("rewards between 0 and 1", (t([[0.2, 0.9, 0.4, 0.1], [0.5, 0.1, 0.7, 0.6]]),)),
        Case("the second prompt has equal rewards", (t([[1.0, 0, 0, 1], [1.0, 1, 1, 1]]),)),
        Case("seven rewards of 0.35: equal, but for the rounding of their mean", (torch.full((1, 7), 0.35),)),
    ],
    {
        "population_std": _both(lambda r, equal: _standard(r, std=r.std(1, keepdim=True, correction=0), equal=equal)),
        "whole_batch": [
            *_both(lambda r, equal: _standard(r, mean=r.mean(), std=r.std(), equal=equal)),
            *_both(lambda r, equal: _standard(r, mean=r.mean(), equal=equal)),
        ],
        "std_of_the_batch": _both(lambda r, equal: _standard(r, std=r.std(), equal=equal)),
        "per_column": [
            lambda r: torch.nan_to_num((r - r.mean(0)) / (r.std(0) + 1e-6)),
            lambda r: (r - r.mean(0)) / (r.std(0) + 1e-6),
            lambda r: (r - r.mean(0)) / r.std(0),
        ],
        "not_scaled": lambda r: r - r.mean(1, keepdim=True),
        "variance": [
            *_both(lambda r, equal: _standard(r, std=r.var(1, keepdim=True), equal=equal)),
            lambda r: (r - r.mean(1, keepdim=True)) / r.var(1, keepdim=True),
        ],
        "no_baseline": [
            *_both(lambda r, equal: _standard(r, mean=torch.zeros(1), equal=equal)),
            lambda r: r / r.std(1, keepdim=True),
        ],
        "reversed": [lambda r: -_standard(r), lambda r: -_standard(r, equal=False)],
        "leave_one_out": lambda r: _standard(r, mean=(r.sum(1, keepdim=True) - r) / (r.shape[1] - 1)),
        "nan_for_equal_rewards": lambda r: torch.where(
            r.amax(1, keepdim=True) == r.amin(1, keepdim=True),
            torch.nan,
            (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True),
        ),
        "rounding_taken_for_a_difference": [
            lambda r: _standard(r, equal=False),
            lambda r: (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-8),
            lambda r: torch.nan_to_num((r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True)),
            lambda r: torch.where((s := r.std(1, keepdim=True)) > 0, (r - r.mean(1, keepdim=True)) / s, 0.0),
            lambda r: (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True),
        ],
    },
)


# ── E2b and E2c: the two directions of ω ─────────────────────────────────────────────────────────────────────────

PAIR, TRIO = {"A": 0.5, "B": 0.25}, {"A": 0.6, "B": 0.3, "C": 0.45}
_FOUR, _SIX = ["A", "A", "B", "B"], ["A", "A", "B", "B", "C", "C"]
_GRADED = t([0.9, 0.4, 0.1, 0.8, 0.3, 0.7])


def _baseline(rewards: Tensor, sources: Sequence[str], learner: str, capability: Mapping[str, float]) -> Tensor:
    one_prompt = ["p"] * len(rewards)
    return group_advantages(rewards, one_prompt, sources, learner, capability, binary_guard=False).baselines[0]


def _omegas(sources, capability, learner: str, *, swapped: bool = False) -> Tensor:
    """ω(learner, source) of every rollout, or, swapped, ω(source, learner)."""
    pairs = [(j, learner) if swapped else (learner, j) for j in sources]
    return t([capability_ratio(capability, *pair) for pair in pairs])


def _mine(sources: Sequence[str], learner: str) -> Tensor:
    return t([j == learner for j in sources])


capability_baseline = _exercise(
    "E2b",
    _baseline,
    [
        Case("the four answers to 37+58=, learner A", (t([0.0, 1, 0, 1]), _FOUR, "A", PAIR)),
        Case("the same, learner B", (t([0.0, 1, 0, 1]), _FOUR, "B", PAIR)),
        Case("three agents, rewards between 0 and 1, learner C", (_GRADED, _SIX, "C", TRIO)),
        Case("a partner that is hardly ever right", (t([1.0, 1, 0, 1]), _FOUR, "A", {"A": 0.5, "B": 0.01})),
        Case("a partner that was never right so far", (t([1.0, 1, 0, 1]), _FOUR, "A", {"A": 0.5, "B": 0.0})),
    ],
    {
        "wrong_direction": lambda r, j, k, c: (_omegas(j, c, k, swapped=True) * r).mean(),
        "without_omega": lambda r, j, k, c: r.mean(),
        "own_rewards_only": lambda r, j, k, c: r[_mine(j, k)].mean(),
        "divided_by_G": lambda r, j, k, c: (_omegas(j, c, k) * r).sum() / _mine(j, k).sum(),
        "divided_by_the_weights": lambda r, j, k, c: (w := _omegas(j, c, k)) @ r / w.sum(),
        "a_sum": lambda r, j, k, c: (_omegas(j, c, k) * r).sum(),
        "unclipped": [
            lambda r, j, k, c: (t([c[k] / c[i] for i in j]) * r).mean(),
            lambda r, j, k, c: (t([c[k] / max(c[i], 1e-8) for i in j]) * r).mean(),
            lambda r, j, k, c: (t([c[k] / c[i] if c[i] else math.inf for i in j]) * r).mean(),
            lambda r, j, k, c: torch.nansum(t([c[k] / (c[i] or math.nan) for i in j]) * r) / len(r),
        ],
        "own_scaled_too": lambda r, j, k, c: (t([c[i] for i in j]) * r).mean(),
    },
)


def _weights(sources: Sequence[str], learner: str, capability: Mapping[str, float]) -> Tensor:
    return t([1.0 if j == learner else capability_ratio(capability, j, learner) for j in sources])


update_weights = _exercise(
    "E2c",
    _weights,
    [
        Case("the four answers to 37+58=, learner A", (_FOUR, "A", PAIR)),
        Case("the same, learner B", (_FOUR, "B", PAIR)),
        Case("three agents, learner C", (_SIX, "C", TRIO)),
        Case("a partner that was never right so far", (_FOUR, "A", {"A": 0.5, "B": 0.0})),
        Case("a learner that was never right so far", (_FOUR, "B", {"A": 0.5, "B": 0.0})),
    ],
    {
        "wrong_direction": lambda j, k, c: _omegas(j, c, k),
        "all_ones": lambda j, k, c: torch.ones(len(j)),
        "capability_itself": lambda j, k, c: t([c[i] for i in j]),
        "normalised": [
            lambda j, k, c: (w := _weights(j, k, c)) / w.mean(),
            lambda j, k, c: (w := _weights(j, k, c)) / w.sum(),
        ],
        "unclipped": [
            lambda j, k, c: t([c[i] / c[k] for i in j]),
            lambda j, k, c: t([1.0 if i == k else c[i] / max(c[k], 1e-8) for i in j]),
            lambda j, k, c: t([1.0 if i == k else max(c[i], 1e-8) / max(c[k], 1e-8) for i in j]),
        ],
    },
)


# ── E3a: importance ratio ────────────────────────────────────────────────────────────────────────────────────────


def _padded(rows: Sequence[Sequence[float]], fill: float = 0.0, left: bool = False) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    at = [slice(width - len(row), width) if left else slice(len(row)) for row in rows]
    logp, mask = torch.full((len(rows), width), fill), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        logp[i, at[i]], mask[i, at[i]] = t(row), True
    return logp, mask


_B = [[-1.0, -2.0, -1.5], [-0.4, -1.0]]  # the answers of B as A scores them: means -1.5 and -0.7
_LONG = [[-1.0 + 0.01 * (i % 3) for i in range(60)], [-0.9, -1.3]]


def _means(logp: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logp, 0.0).sum(-1) / mask.sum(-1)


importance_ratio = _exercise(
    "E3a",
    _ratio,
    [
        Case("B's two answers, as A scores them: 3 tokens, and 2 in a row of 3", (*_padded(_B), t([-1.0, -0.6]))),
        Case("the same with -9 under the padding", (*_padded(_B, fill=-9.0), t([-1.0, -0.6]))),
        Case("the same with NaN under the padding", (*_padded(_B, fill=torch.nan), t([-1.0, -0.6]))),
        Case("the same, padded on the left", (*_padded(_B, fill=-9.0, left=True), t([-1.0, -0.6]))),
        Case("60 tokens and 2, both close to what their source found", (*_padded(_LONG), t([-1.0, -1.1]))),
    ],
    {
        "padded_length": [
            lambda p, m, q: (torch.where(m, p, 0.0).sum(-1) / p.shape[-1] - q).exp(),
            lambda p, m, q: ((p * m).sum(-1) / p.shape[-1] - q).exp(),
        ],
        "padding_counted": lambda p, m, q: (p.mean(-1) - q).exp(),
        "sum": [
            lambda p, m, q: (torch.where(m, p, 0.0).sum(-1) - q).exp(),
            lambda p, m, q: ((p * m).sum(-1) - q).exp(),
            lambda p, m, q: (torch.where(m, p, 0.0).sum(-1) - q * m.sum(-1)).exp(),
            lambda p, m, q: ((p * m).sum(-1) - q * m.sum(-1)).exp(),
        ],
        "upside_down": lambda p, m, q: (q - _means(p, m)).exp(),
        "no_exp": lambda p, m, q: _means(p, m) - q,
        "mean_of_probabilities": lambda p, m, q: torch.where(m, (p - q[:, None]).exp(), 0.0).sum(-1) / m.sum(-1),
        "mean_over_the_batch": lambda p, m, q: (torch.where(m, p, 0.0).sum(-1) / m.sum() - q).exp(),
        "nan_from_the_padding": lambda p, m, q: ((p * m).sum(-1) / m.sum(-1) - q).exp(),
        "first_tokens": lambda p, m, q: torch.stack(
            [(row[:n].mean() - s).exp() for row, n, s in zip(p, m.sum(-1).tolist(), q, strict=True)]
        ),
        "source_forgotten": lambda p, m, q: _means(p, m).exp(),
        "detached": [lambda p, m, q: _ratio(p, m, q).detach(), lambda p, m, q: _ratio(p.detach(), m, q)],
    },
    gradient=0,
)


# ── E3b: which tokens are real ───────────────────────────────────────────────────────────────────────────────────


def _mask(ids: Tensor, lengths: Sequence[int], end_id: int) -> Tensor:
    responses = [row[:n] for row, n in zip(ids.tolist(), lengths, strict=True)]
    return align([[]] * len(responses), responses, end_id)[2]


def _until(ids: Tensor, lengths: Sequence[int], shift: int) -> Tensor:
    return torch.arange(ids.shape[1]) < t(lengths)[:, None] + shift


response_mask = _exercise(
    "E3b",
    _mask,
    [
        Case(
            "5, 7 and the end token 2, then padding, which is 2 as well",
            (t([[5, 7, 2, 2, 2], [5, 7, 8, 9, 2]]), [3, 5], 2),
        ),
        Case("an answer cut at the length limit: no end token", (t([[5, 7, 8], [5, 2, 2]]), [3, 2], 2)),
        Case("an answer that is nothing but its end token", (t([[2, 2, 2], [5, 7, 2]]), [1, 3], 2)),
        Case("a model with two end tokens: this answer ended with 3", (t([[5, 3, 2, 2], [5, 7, 8, 2]]), [2, 4], 2)),
    ],
    {
        "from_ids": lambda ids, lengths, end: ids != end,
        "up_to_the_first_end": lambda ids, lengths, end: (ids == end).cumsum(1) - (ids == end).long() == 0,
        "end_token_excluded": lambda ids, lengths, end: _until(ids, lengths, -1),
        "one_too_many": lambda ids, lengths, end: _until(ids, lengths, 1),
        "padded_on_the_left": lambda ids, lengths, end: _until(ids, lengths, 0).flip(1),
        "everything": lambda ids, lengths, end: torch.ones_like(ids, dtype=torch.bool),
    },
)


# ── E4a: the band ────────────────────────────────────────────────────────────────────────────────────────────────

band = _exercise(
    "E4a",
    clip_band,
    [
        Case("first update of a step", (0, 0.2, 0.025)),
        Case("fifth update: m = 4", (4, 0.2, 0.025)),
        Case("a wide band, m = 10", (10, 0.8, 0.025)),
        Case("twentieth update: m = 19", (19, 0.2, 0.025)),
    ],
    {
        "no_cap": lambda m, d, s: (1 - d + m * s, 1.0),
        "m_ignored": lambda m, d, s: (1 - d, 1.0),
        "widening": lambda m, d, s: (1 - d - m * s, 1.0),
        "symmetric": [
            lambda m, d, s: (min(1.0, 1 - d + m * s), max(1.0, 1 + d - m * s)),
            lambda m, d, s: (min(1.0, 1 - d + m * s), 1 + d),
        ],
        "one_update_ahead": lambda m, d, s: (min(1.0, 1 - d + (m + 1) * s), 1.0),
        "width_for_lower_end": [lambda m, d, s: (max(0.0, d - m * s), 1.0), lambda m, d, s: (d - m * s, 1.0)],
        "multiplied": [
            lambda m, d, s: (min(1.0, (1 - d) * (1 + m * s)), 1.0),
            lambda m, d, s: (min(1.0, 1 - d * (1 - s) ** m), 1.0),
        ],
    },
)


# ── E4b: the peer objective ───────────────────────────────────────────────────────────────────────────────────


def _peer(ratio: Tensor, advantages: Tensor, weights: Tensor, lower: float, alpha: float) -> Tensor:
    config = hk.Config(delta=1 - lower, delta_step=0.0, alpha=alpha)
    mask, zeros = torch.ones(len(ratio), 1, dtype=torch.bool), torch.zeros(len(ratio))
    return hacpo_loss(ratio.log()[:, None], mask, zeros, advantages, weights, zeros.bool(), 0, config).objective


_ONE = torch.ones(1)
_SIX_RATIOS = t([0.5, 0.5, 0.9, 1.3, 1.3, 0.95])
_SPREAD = (_SIX_RATIOS, t([1.0, -1.2, -0.5, -1.5, 0.7, 0.8]), t([2.0, 2.0, 0.5, 2.0, 0.5, 0.5]))

peer_objective = _exercise(
    "E4b",
    _peer,
    [
        Case("s = 0.9 in the band [0.8, 1], A = 1, ω = 1, α = 1", (t([0.9]), _ONE, _ONE, 0.8, 1.0)),
        Case("s = 1.3, above the band, A = −1", (t([1.3]), -_ONE, _ONE, 0.8, 1.0)),
        Case("s = 0.5, below the band, A = +1", (t([0.5]), _ONE, _ONE, 0.8, 1.0)),
        Case("six answers, α = 3", (*_SPREAD, 0.8, 3.0)),
        Case("six answers, α = 0", (*_SPREAD, 0.8, 0.0)),
    ],
    {
        "not_stopped": lambda s, a, w, low, p: s.clamp(low, 1) ** (1 + p) * w * a,
        "all_stopped": lambda s, a, w, low, p: s.detach().clamp(low, 1) ** (1 + p) * w * a,
        "the_other_stopped": lambda s, a, w, low, p: (c := s.clamp(low, 1)).detach() * c**p * w * a,
        "ratio_forgotten": [
            lambda s, a, w, low, p: s.clamp(low, 1) ** p * w * a,
            lambda s, a, w, low, p: s.clamp(low, 1).detach() ** p * w * a,
        ],
        "alpha_ignored": lambda s, a, w, low, p: s.clamp(low, 1) * w * a,
        "ppo_minimum": [
            lambda s, a, w, low, p: torch.minimum(s * a, s.clamp(low, 1) * a) * s.clamp(low, 1).detach() ** p * w,
            lambda s, a, w, low, p: torch.minimum(
                s * s.detach() ** p * a * w, (c := s.clamp(low, 1)) * c.detach() ** p * a * w
            ),
        ],
        "not_clipped": lambda s, a, w, low, p: s * s.detach() ** p * w * a,
        "clip_without_effect": lambda s, a, w, low, p: s * s.clamp(low, 1).detach() ** p * w * a,
        "symmetric_band": lambda s, a, w, low, p: (c := s.clamp(low, 2 - low)) * c.detach() ** p * w * a,
        "filtered": lambda s, a, w, low, p: torch.where((s >= low) & (s <= 1), s * s.detach() ** p * w * a, 0.0),
        "omega_upside_down": lambda s, a, w, low, p: (c := s.clamp(low, 1)) * c.detach() ** p / w * a,
        "omega_forgotten": lambda s, a, w, low, p: (c := s.clamp(low, 1)) * c.detach() ** p * a,
    },
    gradient=0,
)


# ── E4c: the whole loss ──────────────────────────────────────────────────────────────────────────────────────────


def _mini_batch(ratios: Sequence[float], lengths: Sequence[int], source: float = -1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Rollouts with these ratios and lengths: their tokens differ, their mean is what the ratio asks for."""
    rows = [
        [source + math.log(s) + 0.1 * (2 * i - n + 1) for i in range(n)] for s, n in zip(ratios, lengths, strict=True)
    ]  # fmt: skip
    return (*_padded(rows, fill=-7.0), torch.full((len(rows),), source))


_SETTINGS = hk.Config(alpha=2.0, delta=0.4, delta_step=0.1, eps_low=0.1, eps_high=0.2)
_OWN4, _A4 = t([True, True, True, True]), t([1.2, -0.8, 0.5, -0.6])
_MIXED = (t([1.2, -0.8, 0.5, -0.6, 0.9, -0.7]), t([1.0, 1, 1, 2, 0.5, 2]), t([True, True, True, False, False, False]))


def _own_part(s: Tensor, a: Tensor, config: hk.Config) -> Tensor:
    return torch.minimum(s * a, s.clamp(1 - config.eps_low, 1 + config.eps_high) * a)


def _peer_part(s: Tensor, a: Tensor, w: Tensor, m: int, config: hk.Config) -> Tensor:
    c = s.clamp(*clip_band(m, config.delta, config.delta_step))
    return c * c.detach() ** config.alpha * w * a


def _loss(logp, mask, source_mean_logp, advantages, weights, own, updates_made, config) -> Tensor:
    return hacpo_loss(logp, mask, source_mean_logp, advantages, weights, own, updates_made, config).loss


def _wrong_loss(own_part=None, peer_part=None, reduce=None, swap: bool = False) -> Callable[..., Tensor]:
    """The loss with one part replaced; parts see (s, A, ω, m, config), `reduce` sees (objective, own, mask)."""

    def wrong(logp, mask, source_mean_logp, advantages, weights, own, updates_made, config):
        s = _ratio(logp, mask, source_mean_logp)
        seen = (s, advantages, weights, updates_made, config)
        mine = own_part(*seen) if own_part else _own_part(s, advantages, config)
        theirs = peer_part(*seen) if peer_part else _peer_part(*seen)
        objective = torch.where(own ^ swap, mine, theirs)
        return reduce(objective, own, mask) if reduce else -objective.mean()

    return wrong


def _mean_each(objective: Tensor, own: Tensor, mask: Tensor) -> Tensor:
    return -sum(objective[part].mean() for part in (own, ~own) if part.any())


hacpo = _exercise(
    "E4c",
    _loss,
    [
        Case(
            "four own rollouts, some outside [0.9, 1.2]",
            (*_mini_batch([1.0, 0.8, 1.3, 1.3], [2, 4, 3, 5]), _A4, torch.ones(4), _OWN4, 0, _SETTINGS),
        ),
        Case(
            "four peer rollouts, band [0.6, 1], ω = 2 and 0.5",
            (*_mini_batch([0.9, 0.4, 1.3, 0.7], [2, 4, 3, 5]), _A4, t([2.0, 2, 0.5, 0.5]), ~_OWN4, 0, _SETTINGS),
        ),
        Case(
            "three own and three peer, m = 0",
            (*_mini_batch([1.0, 0.8, 1.3, 0.85, 0.75, 1.3], [2, 4, 3, 5, 1, 2]), *_MIXED, 0, _SETTINGS),
        ),
        Case(
            "the same, m = 2: the band is [0.8, 1]",
            (*_mini_batch([1.0, 0.8, 1.3, 0.85, 0.75, 1.3], [2, 4, 3, 5, 1, 2]), *_MIXED, 2, _SETTINGS),
        ),
        Case(
            "one own and three peer",
            (
                *_mini_batch([1.1, 0.9, 0.95, 0.7], [2, 4, 3, 5]),
                _A4,
                t([1.0, 2, 2, 0.5]),
                t([True, False, False, False]),
                1,
                _SETTINGS,
            ),
        ),
    ],
    {
        "ascent_not_descent": _wrong_loss(reduce=lambda o, own, mask: o.mean()),
        "minimum_for_all": [
            _wrong_loss(
                peer_part=lambda s, a, w, m, c: torch.minimum(
                    s * s.detach() ** c.alpha * w * a, _peer_part(s, a, w, m, c)
                )
            ),
            _wrong_loss(
                peer_part=lambda s, a, w, m, c: (
                    torch.minimum(s * a, (k := s.clamp(*clip_band(m, c.delta, c.delta_step))) * a)
                    * k.detach() ** c.alpha
                    * w
                )
            ),
        ],
        "no_minimum": _wrong_loss(own_part=lambda s, a, w, m, c: s.clamp(1 - c.eps_low, 1 + c.eps_high) * a),
        "own_not_clipped": _wrong_loss(own_part=lambda s, a, w, m, c: s * a),
        "all_as_own": [
            _wrong_loss(peer_part=lambda s, a, w, m, c: _own_part(s, a, c) * w),
            _wrong_loss(peer_part=lambda s, a, w, m, c: _own_part(s, a, c)),
        ],
        "all_as_peer": _wrong_loss(own_part=_peer_part),
        "own_and_peer_swapped": _wrong_loss(swap=True),
        "mean_over_tokens": _wrong_loss(reduce=lambda o, own, mask: -(o * mask.sum(-1)).sum() / mask.sum()),
        "two_means": [
            _wrong_loss(reduce=_mean_each),
            _wrong_loss(reduce=lambda o, own, mask: _mean_each(o, own, mask) / 2),
        ],
        "a_sum": _wrong_loss(reduce=lambda o, own, mask: -o.sum()),
        "m_ignored": _wrong_loss(peer_part=lambda s, a, w, m, c: _peer_part(s, a, w, 0, c)),
        "not_stopped": _wrong_loss(
            peer_part=lambda s, a, w, m, c: s.clamp(*clip_band(m, c.delta, c.delta_step)) ** (1 + c.alpha) * w * a
        ),
        "omega_forgotten": _wrong_loss(peer_part=lambda s, a, w, m, c: _peer_part(s, a, torch.ones_like(w), m, c)),
    },
    gradient=0,
)


# ── E5a: a bug that hides while parts are equal ──────────────────────────────────────────────────────────────────


def _whole(objective: Tensor, sizes: Sequence[int]) -> Tensor:
    return -objective.mean()  # as LossOutput.loss: the negative mean over the mini-batch


_EIGHT = t([0.9, -0.3, 0.2, 1.1, -0.6, 0.4, 0.8, -1.2])

accumulate = _exercise(
    "E5a",
    _whole,
    [
        Case("eight rollouts in one part", (_EIGHT, [8])),
        Case("eight in two equal parts", (_EIGHT, [4, 4])),
        Case("eight in parts of 5, 2 and 1", (_EIGHT, [5, 2, 1])),
        Case("five in parts of 4 and 1", (_EIGHT[:5], [4, 1])),
    ],
    {
        "mean_of_means": lambda o, sizes: -sum(part.mean() for part in o.split(sizes)) / len(sizes),
        "sum_of_means": lambda o, sizes: -sum(part.mean() for part in o.split(sizes)),
        "a_sum": lambda o, sizes: -o.sum(),
        "divided_by_the_largest": [
            lambda o, sizes: -sum(part.sum() / max(sizes) for part in o.split(sizes)),
            lambda o, sizes: -sum(part.sum() / (max(sizes) * len(sizes)) for part in o.split(sizes)),
            lambda o, sizes: -sum(part.sum() / sizes[0] for part in o.split(sizes)) / len(sizes),
        ],
        "sign": lambda o, sizes: o.mean(),
        "last_part_only": [
            lambda o, sizes: -o.split(sizes)[-1].sum() / len(o),
            lambda o, sizes: -o.split(sizes)[-1].mean(),
        ],
    },
    gradient=0,
)


# ── E5b: name the line ───────────────────────────────────────────────────────────────────────────────────────────


def effective_advantages(rewards, sources, learner, capability):
    """What each answer to one prompt pushes with: A(k), times ω(j, k) where another agent wrote it (eqs. 6, 7, 10)."""
    own = torch.tensor([j == learner for j in sources])
    omega = torch.tensor([capability_ratio(capability, learner, j) for j in sources])
    baseline = (omega * rewards).mean()
    sigma = rewards.std(correction=1)
    advantages = (rewards - baseline) / (sigma + 1e-6)
    return torch.where(own, advantages, omega * advantages)


PLANTED, REPAIRED = "omega * advantages", "advantages / omega"


def numbered(function: Callable) -> str:
    """The source of a function with its line numbers, from 1."""
    return "\n".join(f"{i:2d}  {line}" for i, line in enumerate(inspect.getsource(function).splitlines(), 1))


def _line_with_the_bug() -> int:
    return next(i for i, line in enumerate(inspect.getsource(effective_advantages).splitlines(), 1) if PLANTED in line)


which_line = _exercise(
    "E5b",
    _line_with_the_bug,
    [Case("the function printed above")],
    {f"line_{i}": lambda i=i: i for i in range(1, 8)},
)


# ── E6: predictions ──────────────────────────────────────────────────────────────────────────────────────────────


def clip_curves(
    ratios: Tensor, deltas: Sequence[float], delta_step: float, updates: int, seed: int = 0
) -> tuple[pd.DataFrame, Exercise]:
    """Share of peer rollouts outside the band, update by update, one curve a δ, in an order that `seed` shuffles.

    Returns the curves, named A, B, C, and the exercise that asks which of them belongs to the largest δ.
    """
    mixed = random.Random(seed).sample(list(deltas), len(deltas))
    of_letter = dict(zip("ABCDEF", mixed, strict=False))

    def share(delta: float, m: int) -> float:
        lower, upper = clip_band(m, delta, delta_step)
        return ((ratios < lower) | (ratios > upper)).float().mean().item()

    columns = {name: [share(delta, m) for m in range(updates)] for name, delta in of_letter.items()}
    curves = pd.DataFrame(columns, index=pd.RangeIndex(updates, name="update within the step, m"))
    right, asked = max(of_letter, key=of_letter.get), max(deltas)
    wrong = [
        Mistake(
            f"delta_{delta:g}",
            lambda name=name: name,
            f"curve {name} belongs to δ = {delta:g}: its band begins at {1 - delta:g} and leaves out {curves[name][0]:.0%}.",
            f"where the band of δ = {asked:g} begins: {1 - asked:g}. The wider the band, the fewer answers lie outside it.",
        )
        for name, delta in of_letter.items()
        if name != right
    ]
    learned = (
        f"Its band begins at {1 - asked:g}, so only {curves[right][0]:.0%} lie outside at m = 0; the share above 1, "
        f"{(ratios > 1).float().mean().item():.0%}, no δ can change."
    )
    return curves, Exercise("E6a", lambda: right, [Case("the three curves above")], wrong, learned)


def _closes_at(delta: float, delta_step: float) -> int:
    return next(m for m in range(10_000) if clip_band(m, delta, delta_step)[0] >= 1)


closes_at = _exercise(
    "E6b",
    _closes_at,
    [
        Case("δ = 0.25, δ_step = 0.03125", (0.25, 0.03125)),
        Case("δ = 0.75, δ_step = 0.03125", (0.75, 0.03125)),
        Case("δ = 0.75, δ_step = 0.5: not a whole number of steps", (0.75, 0.5)),
        Case("δ = 0: closed from the start", (0.0, 0.25)),
    ],
    {
        "rounded_down": lambda d, s: int(d / s),
        "not_rounded": lambda d, s: d / s,
        "one_too_late": [lambda d, s: math.ceil(d / s) + 1, lambda d, s: int(d / s) + 1],
        "one_too_early": lambda d, s: math.ceil(d / s) - 1,
        "width_mistaken": [lambda d, s: math.ceil((1 - d) / s), lambda d, s: math.ceil(1 / s)],
    },
)


# ── E7: a failing run ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Tuning:
    """A run that fails; a learner changes its settings, and the check trains with them and says what it sees."""

    label: str
    agents: str
    failing: Mapping[str, Any]
    steps: int
    goal: float  # mean avg@1 of the agents after the last step
    test_size: int = 100

    # the method and the budget of rollouts are the exercise; all else may change
    FIXED = (
        "method", "sources", "seed", "prompts_per_step", "n", "oversample", "temperature", "max_new_tokens", "ratio", "peer",
    )  # fmt: skip

    def __call__(self, answer: Callable, *, details: bool = False) -> None:
        """Trains with the settings that `answer` returns and says whether the run now learns."""
        print(self.judge(answer))
        if details and callable(answer) and not isinstance(given := self._settings(answer), Verdict):
            print(self.config(given).differences(self.config({})))

    def config(self, settings: Mapping[str, Any]) -> hk.Config:
        """The failing run's settings with some of them changed."""
        return hk.Config.preset("hacpo", **{**self.failing, **settings})

    def run(self, settings: Mapping[str, Any]) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Trains fresh agents: one row a step and agent; and one row an update, with its band and what of it was clipped."""
        updates = []

        def watch(result) -> None:
            for name, stats in result.stats.items():
                for mb in stats.minibatches:
                    clipped = float(mb.clipped[~mb.own].mean()) if (~mb.own).any() else float("nan")
                    updates.append({"agent": name, "m": mb.updates_made, "lower": mb.lower, "peer clipped": clipped})

        train, test = (
            hk.load_problems("arithmetic", split=s, size=n) for s, n in (("train", None), ("test", self.test_size))
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run is known to be bad; what matters is in the two tables
            out = hk.train(
                hk.load_agents(self.agents), train, self.config(settings), self.steps,
                test=test, eval_every=self.steps, callbacks=[watch], progress="off",
            )  # fmt: skip
        return out.to_frame(), pd.DataFrame(updates)

    def judge(self, answer: Callable) -> Verdict:
        """The verdict on a function that returns settings."""
        if not callable(answer):
            return Verdict(False, "not_a_function", f"✗ {self.label}: give the function itself, without parentheses.")
        settings = self._settings(answer)
        if isinstance(settings, Verdict):
            return settings
        history, updates = self.run(settings)
        accuracy = history.groupby("step")["avg@1"].mean().dropna()
        rewards = history.pivot(index="step", columns="agent", values="reward").dropna()
        start, end = accuracy.iloc[0], accuracy.iloc[-1]
        means = ", ".join(f"{r:.2f}" for r in rewards.mean(axis=1))
        seen = f"accuracy {start:.2f} → {end:.2f} (goal {self.goal:.2f}), mean reward {means}"
        name, told = self._diagnosis(start, end, rewards, float((updates["lower"] >= 1).mean()))
        if not name:
            return Verdict(True, "", wrap(f"✓ {self.label}: {seen}. {told}"))
        return Verdict(False, name, f"✗ {self.label}, not yet ({name}).\n{wrap(told)}\n{wrap(f'Measured: {seen}.')}")

    def _settings(self, answer: Callable) -> dict[str, Any] | Verdict:
        """What the answer returns, if a run may be made with it."""
        try:
            settings = answer()
            if not isinstance(settings, Mapping):
                told = f'return a dictionary of settings, such as {{"alpha": 1.0}}, not {type(settings).__name__}.'
                return Verdict(False, "type", f"✗ {self.label}: {told}")
            if fixed := [name for name in settings if name in self.FIXED]:
                told = (
                    f"leave {', '.join(fixed)} as it is: method and number of answers are given, how to learn is yours."
                )
                return Verdict(False, "another_budget", f"✗ {self.label}: {told}")
            if self.config(settings) == self.config({}):
                return Verdict(
                    False, "unchanged", f"✗ {self.label}: these are the settings of the failing run. Change something."
                )
        except NotImplementedError:
            return Verdict(False, "", f"… {self.label}: not solved yet.")
        except (TypeError, ValueError) as error:
            return Verdict(False, "refused", f"✗ {self.label}: hacpo_kit refuses these settings: {error}")
        return dict(settings)

    def _diagnosis(self, start: float, end: float, rewards: pd.DataFrame, closed: float) -> tuple[str, str]:
        """Name and explanation of what a run shows, "" if it is well; `rewards` by step and agent, `closed`: share of updates."""
        if end >= self.goal and not closed:
            return "", "It learns, and peer answers teach in every update."
        if end >= self.goal:
            return "band_closed", (
                f"It learns, but in {closed:.0%} of the updates the band is [1, 1]: peer answers are sampled, scored and then "
                "thrown away. Look at: δ and δ_step (E4a), and how many updates a step has."
            )
        fall = rewards.max() - rewards.iloc[-1]
        if fall.max() > 0.15:  # 128 answers a step: chance makes 0.1 at most
            name = fall.idxmax()
            return "overshoots", (
                f"The mean reward of {name} was {rewards[name].max():.2f} in step {rewards[name].idxmax()} and is "
                f"{rewards[name].iloc[-1]:.2f} at the end: the steps are so large that the learner leaves behind what it "
                "had found. Look at: lr. (A warm-up only makes the first steps smaller.)"
            )
        if end - start < 0.1:
            return "asleep", (
                "Nearly nothing is learned: the steps are too small for so few of them. (The paper's 1e-6 is for billions of "
                "parameters.) Look at: lr."
            )
        return (
            "too_slow",
            "It learns steadily, but not enough in the steps it has. Look at: lr and warmup: a little more courage.",
        )


tuning = Tuning(
    "E7",
    "tiny-model-pair",
    {"prompts_per_step": 16, "lr": 1e-3, "warmup": 0, "delta_step": 0.2, "seed": 0},
    steps=6,
    goal=0.8,
)

EXERCISES: dict[str, Exercise] = {
    e.label: e
    for e in (
        box, best_of, group_advantage, capability_baseline, update_weights, importance_ratio, response_mask, band,
        peer_objective, hacpo, accumulate, which_line, closes_at,
    )
}  # fmt: skip
