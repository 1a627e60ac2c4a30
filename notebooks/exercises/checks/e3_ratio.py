"""E3: the importance ratio (E3a) and the mask of a padded batch (E3b)."""

from collections.abc import Sequence

import torch
from judge import Case
from torch import Tensor

from checks.catalogue import make_exercise
from hacpo_kit.models.passes import align
from hacpo_kit.objective import sequence_ratio

t = torch.tensor

# ── E3a: importance ratio ────────────────────────────────────────────────────────────────────────────────────────


def padded(rows: Sequence[Sequence[float]], fill: float = 0.0, left: bool = False) -> tuple[Tensor, Tensor]:
    """Return rows of log-probabilities as one padded tensor, and their mask."""
    width = max(map(len, rows))
    slices = [slice(width - len(row), width) if left else slice(len(row)) for row in rows]
    logp, mask = torch.full((len(rows), width), fill), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        logp[i, slices[i]], mask[i, slices[i]] = t(row), True
    return logp, mask


B_ANSWERS = [[-1.0, -2.0, -1.5], [-0.4, -1.0]]  # answers of B under A: means -1.5 and -0.7
LONG_AND_SHORT = [[-1.0 + 0.01 * (i % 3) for i in range(60)], [-0.9, -1.3]]


def _means(logp: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logp, 0.0).sum(-1) / mask.sum(-1)


importance_ratio = make_exercise(
    "E3a",
    sequence_ratio,
    [
        Case("B's two answers under A: 3 tokens, and 2 tokens in a row of 3", (*padded(B_ANSWERS), t([-1.0, -0.6]))),
        Case("the same with -9 as padding", (*padded(B_ANSWERS, fill=-9.0), t([-1.0, -0.6]))),
        Case("the same with NaN as padding", (*padded(B_ANSWERS, fill=torch.nan), t([-1.0, -0.6]))),
        Case("the same, padded on the left", (*padded(B_ANSWERS, fill=-9.0, left=True), t([-1.0, -0.6]))),
        Case("60 tokens and 2 tokens, both with a ratio close to 1", (*padded(LONG_AND_SHORT), t([-1.0, -1.1]))),
    ],
    {
        "padded_length": [
            lambda p, m, q: (torch.where(m, p, 0.0).sum(-1) / p.shape[-1] - q).exp(),
            lambda p, m, q: ((p * m).sum(-1) / p.shape[-1] - q).exp(),
        ],
        "mask_unused": lambda p, m, q: (p.mean(-1) - q).exp(),
        "sum": [
            lambda p, m, q: (torch.where(m, p, 0.0).sum(-1) - q).exp(),
            lambda p, m, q: ((p * m).sum(-1) - q).exp(),
            lambda p, m, q: (torch.where(m, p, 0.0).sum(-1) - q * m.sum(-1)).exp(),
            lambda p, m, q: ((p * m).sum(-1) - q * m.sum(-1)).exp(),
        ],
        "inverted": lambda p, m, q: (q - _means(p, m)).exp(),
        "no_exp": lambda p, m, q: _means(p, m) - q,
        "mean_of_probabilities": lambda p, m, q: torch.where(m, (p - q[:, None]).exp(), 0.0).sum(-1) / m.sum(-1),
        "mean_over_batch": lambda p, m, q: (torch.where(m, p, 0.0).sum(-1) / m.sum() - q).exp(),
        "nan_from_padding": lambda p, m, q: ((p * m).sum(-1) / m.sum(-1) - q).exp(),
        "first_tokens": lambda p, m, q: torch.stack(
            [(row[:n].mean() - s).exp() for row, n, s in zip(p, m.sum(-1).tolist(), q, strict=True)]
        ),
        "without_source": lambda p, m, q: _means(p, m).exp(),
        "detached": [
            lambda p, m, q: sequence_ratio(p, m, q).detach(),
            lambda p, m, q: sequence_ratio(p.detach(), m, q),
        ],
    },
    gradient=0,
)

# ── E3b: the mask ────────────────────────────────────────────────────────────────────────────────────────────────


def mask_from_lengths(ids: Tensor, lengths: Sequence[int], end_id: int) -> Tensor:
    responses = [row[:n] for row, n in zip(ids.tolist(), lengths, strict=True)]
    return align([[]] * len(responses), responses, end_id)[2]


def _until(ids: Tensor, lengths: Sequence[int], shift: int) -> Tensor:
    return torch.arange(ids.shape[1]) < t(lengths)[:, None] + shift


response_mask = make_exercise(
    "E3b",
    mask_from_lengths,
    [
        Case("5, 7 and the end token 2, then padding with 2", (t([[5, 7, 2, 2, 2], [5, 7, 8, 9, 2]]), [3, 5], 2)),
        Case("an answer that reached the length limit: no end token", (t([[5, 7, 8], [5, 2, 2]]), [3, 2], 2)),
        Case("an answer that has only its end token", (t([[2, 2, 2], [5, 7, 2]]), [1, 3], 2)),
        Case("a model with two end tokens: this answer ended with 3", (t([[5, 3, 2, 2], [5, 7, 8, 2]]), [2, 4], 2)),
    ],
    {
        "from_ids": lambda ids, lengths, end: ids != end,
        "up_to_first_end": lambda ids, lengths, end: (ids == end).cumsum(1) - (ids == end).long() == 0,
        "one_too_few": lambda ids, lengths, end: _until(ids, lengths, -1),
        "one_too_many": lambda ids, lengths, end: _until(ids, lengths, 1),
        "padded_on_the_left": lambda ids, lengths, end: _until(ids, lengths, 0).flip(1),
        "all_true": lambda ids, lengths, end: torch.ones_like(ids, dtype=torch.bool),
    },
)
