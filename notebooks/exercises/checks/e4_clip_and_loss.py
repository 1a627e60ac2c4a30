"""E4: the clipping range (E4a), the objective of a peer answer (E4b) and the whole loss (E4c)."""

import math
from collections.abc import Callable, Sequence

import torch
from judge import Case
from torch import Tensor

import hacpo_kit as hk
from checks.catalogue import make_exercise
from checks.e3_ratio import padded
from hacpo_kit.objective import clip_band, hacpo_loss, sequence_ratio

t = torch.tensor

# ── E4a: the clipping range ──────────────────────────────────────────────────────────────────────────────────────

clip_range = make_exercise(
    "E4a",
    clip_band,
    [
        Case("first update of a step", (0, 0.2, 0.025)),
        Case("fifth update: m = 4", (4, 0.2, 0.025)),
        Case("a wide range, m = 10", (10, 0.8, 0.025)),
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
        "m_plus_1": lambda m, d, s: (min(1.0, 1 - d + (m + 1) * s), 1.0),
        "width": [lambda m, d, s: (max(0.0, d - m * s), 1.0), lambda m, d, s: (d - m * s, 1.0)],
        "multiplied": [
            lambda m, d, s: (min(1.0, (1 - d) * (1 + m * s)), 1.0),
            lambda m, d, s: (min(1.0, 1 - d * (1 - s) ** m), 1.0),
        ],
    },
)

# ── E4b: the peer objective ──────────────────────────────────────────────────────────────────────────────────────


def _peer(ratio: Tensor, advantages: Tensor, weights: Tensor, lower: float, alpha: float) -> Tensor:
    config = hk.Config(delta=1 - lower, delta_step=0.0, alpha=alpha)
    mask, zeros = torch.ones(len(ratio), 1, dtype=torch.bool), torch.zeros(len(ratio))
    return hacpo_loss(ratio.log()[:, None], mask, zeros, advantages, weights, zeros.bool(), 0, config).objective


ONE = torch.ones(1)
SIX_RATIOS = t([0.5, 0.5, 0.9, 1.3, 1.3, 0.95])
SIX_ANSWERS = (SIX_RATIOS, t([1.0, -1.2, -0.5, -1.5, 0.7, 0.8]), t([2.0, 2.0, 0.5, 2.0, 0.5, 0.5]))

peer_objective = make_exercise(
    "E4b",
    _peer,
    [
        Case("s = 0.9 inside [0.8, 1], A = 1, ω = 1, α = 1", (t([0.9]), ONE, ONE, 0.8, 1.0)),
        Case("s = 1.3, above the range, A = −1", (t([1.3]), -ONE, ONE, 0.8, 1.0)),
        Case("s = 0.5, below the range, A = +1", (t([0.5]), ONE, ONE, 0.8, 1.0)),
        Case("six answers, α = 3", (*SIX_ANSWERS, 0.8, 3.0)),
        Case("six answers, α = 0", (*SIX_ANSWERS, 0.8, 0.0)),
    ],
    {
        "not_stopped": lambda s, a, w, low, p: s.clamp(low, 1) ** (1 + p) * w * a,
        "all_stopped": lambda s, a, w, low, p: s.detach().clamp(low, 1) ** (1 + p) * w * a,
        "wrong_factor_stopped": lambda s, a, w, low, p: (c := s.clamp(low, 1)).detach() * c**p * w * a,
        "ratio_missing": [
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
        "first_factor_not_clipped": lambda s, a, w, low, p: s * s.clamp(low, 1).detach() ** p * w * a,
        "symmetric_range": lambda s, a, w, low, p: (c := s.clamp(low, 2 - low)) * c.detach() ** p * w * a,
        "zero_outside": lambda s, a, w, low, p: torch.where((s >= low) & (s <= 1), s * s.detach() ** p * w * a, 0.0),
        "omega_inverted": lambda s, a, w, low, p: (c := s.clamp(low, 1)) * c.detach() ** p / w * a,
        "omega_missing": lambda s, a, w, low, p: (c := s.clamp(low, 1)) * c.detach() ** p * a,
    },
    gradient=0,
)

# ── E4c: the whole loss ──────────────────────────────────────────────────────────────────────────────────────────

CONFIG = hk.Config(alpha=2.0, delta=0.4, delta_step=0.1, eps_low=0.1, eps_high=0.2)


def _case(
    description: str,
    ratios: Sequence[float],
    advantages: Sequence[float],
    weights: Sequence[float],
    own: int,
    m: int,
) -> Case:
    """Return a case with these ratios, of which the first `own` are own rollouts; rows differ in length."""
    lengths, source = (2, 4, 3, 5, 1, 2), -1.0
    rows = [
        [source + math.log(s) + 0.1 * (2 * i - n + 1) for i in range(n)] for s, n in zip(ratios, lengths, strict=False)
    ]
    is_own = torch.arange(len(rows)) < own
    batch = (*padded(rows, fill=-7.0), torch.full((len(rows),), source), t(advantages), t(weights), is_own)
    return Case(description, (*batch, m, CONFIG))


def _own_part(s: Tensor, a: Tensor, config: hk.Config) -> Tensor:
    return torch.minimum(s * a, s.clamp(1 - config.eps_low, 1 + config.eps_high) * a)


def _peer_part(s: Tensor, a: Tensor, w: Tensor, m: int, config: hk.Config) -> Tensor:
    c = s.clamp(*clip_band(m, config.delta, config.delta_step))
    return c * c.detach() ** config.alpha * w * a


def _loss(logp, mask, source_mean_logp, advantages, weights, own, updates_made, config) -> Tensor:
    return hacpo_loss(logp, mask, source_mean_logp, advantages, weights, own, updates_made, config).loss


def _wrong_loss(own_part=None, peer_part=None, reduce=None, swap: bool = False) -> Callable[..., Tensor]:
    """Return the loss with one part replaced; parts get (s, A, ω, m, config), `reduce` gets (objective, own, mask)."""

    def wrong(logp, mask, source_mean_logp, advantages, weights, own, updates_made, config):
        s = sequence_ratio(logp, mask, source_mean_logp)
        arguments = (s, advantages, weights, updates_made, config)
        own_objective = own_part(*arguments) if own_part else _own_part(s, advantages, config)
        objective = torch.where(own ^ swap, own_objective, (peer_part or _peer_part)(*arguments))
        return reduce(objective, own, mask) if reduce else -objective.mean()

    return wrong


def _peer_with_minimum(s, a, w, m, c) -> Tensor:
    return torch.minimum(s * s.detach() ** c.alpha * w * a, _peer_part(s, a, w, m, c))


def _peer_with_inner_minimum(s, a, w, m, c) -> Tensor:
    clipped = s.clamp(*clip_band(m, c.delta, c.delta_step))
    return torch.minimum(s * a, clipped * a) * clipped.detach() ** c.alpha * w


def _peer_not_stopped(s, a, w, m, c) -> Tensor:
    return s.clamp(*clip_band(m, c.delta, c.delta_step)) ** (1 + c.alpha) * w * a


def _separate_means(objective: Tensor, own: Tensor, mask: Tensor) -> Tensor:
    return -sum(objective[part].mean() for part in (own, ~own) if part.any())


FOUR_ADVANTAGES = (1.2, -0.8, 0.5, -0.6)
MIXED = ([1.0, 0.8, 1.3, 0.85, 0.75, 1.3], [1.2, -0.8, 0.5, -0.6, 0.9, -0.7], [1.0, 1, 1, 2, 0.5, 2])

hacpo = make_exercise(
    "E4c",
    _loss,
    [
        _case("four own rollouts, some outside [0.9, 1.2]", [1.0, 0.8, 1.3, 1.3], FOUR_ADVANTAGES, [1.0] * 4, 4, 0),
        _case("four peer rollouts, range [0.6, 1]", [0.9, 0.4, 1.3, 0.7], FOUR_ADVANTAGES, [2.0, 2, 0.5, 0.5], 0, 0),
        _case("three own and three peer rollouts, m = 0", *MIXED, 3, 0),
        _case("the same, m = 2: the range is [0.8, 1]", *MIXED, 3, 2),
        _case("one own and three peer rollouts", [1.1, 0.9, 0.95, 0.7], FOUR_ADVANTAGES, [1.0, 2, 2, 0.5], 1, 1),
    ],
    {
        "wrong_sign": _wrong_loss(reduce=lambda o, own, mask: o.mean()),
        "minimum_for_all": [_wrong_loss(peer_part=_peer_with_minimum), _wrong_loss(peer_part=_peer_with_inner_minimum)],
        "no_minimum": _wrong_loss(own_part=lambda s, a, w, m, c: s.clamp(1 - c.eps_low, 1 + c.eps_high) * a),
        "own_not_clipped": _wrong_loss(own_part=lambda s, a, w, m, c: s * a),
        "all_as_own": [
            _wrong_loss(peer_part=lambda s, a, w, m, c: _own_part(s, a, c) * w),
            _wrong_loss(peer_part=lambda s, a, w, m, c: _own_part(s, a, c)),
        ],
        "all_as_peer": _wrong_loss(own_part=_peer_part),
        "own_and_peer_swapped": _wrong_loss(swap=True),
        "mean_over_tokens": _wrong_loss(reduce=lambda o, own, mask: -(o * mask.sum(-1)).sum() / mask.sum()),
        "separate_means": [
            _wrong_loss(reduce=_separate_means),
            _wrong_loss(reduce=lambda o, own, mask: _separate_means(o, own, mask) / 2),
        ],
        "sum": _wrong_loss(reduce=lambda o, own, mask: -o.sum()),
        "m_ignored": _wrong_loss(peer_part=lambda s, a, w, m, c: _peer_part(s, a, w, 0, c)),
        "not_stopped": _wrong_loss(peer_part=_peer_not_stopped),
        "omega_missing": _wrong_loss(peer_part=lambda s, a, w, m, c: _peer_part(s, a, torch.ones_like(w), m, c)),
    },
    gradient=0,
)
