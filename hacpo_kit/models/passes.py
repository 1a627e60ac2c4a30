"""Forward passes: rollouts sorted into micro-batches of similar length, and their tokens padded into tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

# Measured with models of 0.2 to 135 million parameters on two CPU cores: from FULL_PASS tokens on, the time of a pass is
# proportional to its tokens. A larger pass has to consist of real tokens, not padding, by this share.
FULL_PASS, REAL_SHARE = 512, 0.8


def align(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int
) -> tuple[Int[Tensor, "rollout position"], Int[Tensor, "rollout position"], Bool[Tensor, "rollout token"]]:
    """Return token ids, attention mask and response mask of rollouts whose responses all start in the same column.

    Prompts are padded on the left, responses on the right. Both masks are derived from the lengths.
    """
    left, right = max(map(len, prompts)), max(map(len, responses))
    ids = torch.tensor(
        [
            [*[pad_id] * (left - len(prompt)), *prompt, *response, *[pad_id] * (right - len(response))]
            for prompt, response in zip(prompts, responses, strict=True)
        ]
    )
    first = torch.tensor([left - len(prompt) for prompt in prompts])[:, None]
    end = torch.tensor([left + len(response) for response in responses])[:, None]
    columns = torch.arange(left + right)
    attention = (columns >= first) & (columns < end)
    return ids, attention.long(), attention[:, left:]


def microbatches(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], tokens: int
) -> Iterator[list[int]]:
    """Yield groups of rows, sorted by length, that `align` pads to at most `tokens`; a longer row is a group of its own.

    Equal rows stay together and count once, because `Agent.logprobs` computes them once. A group of at least `FULL_PASS`
    tokens ends before a row that would make more than a fifth of it padding.

    >>> list(microbatches([[1], [1], [1], [1]], [[2] * 4, [2], [2] * 3, [3]], tokens=8))
    [[1, 3], [2], [0]]
    >>> list(microbatches([[1], [1], [1]], [[2, 3], [4, 5], [2, 3]], tokens=3))
    [[0, 2], [1]]
    """
    rows = [(tuple(p), tuple(r)) for p, r in zip(prompts, responses, strict=True)]
    group: list[int] = []
    left = right = count = real = 0  # longest prompt and response, number and tokens of the distinct rows
    for i in sorted(range(len(rows)), key=lambda i: (len(rows[i][1]), len(rows[i][0]), rows[i])):
        prompt, response = rows[i]
        if not group or rows[i] != rows[group[-1]]:
            left, right, length = max(left, len(prompt)), max(right, len(response)), len(prompt) + len(response)
            padded = (count + 1) * (left + right)
            if group and (padded > tokens or (real >= FULL_PASS and real + length < REAL_SHARE * padded)):
                yield group
                group, left, right, count, real = [], len(prompt), len(response), 0, 0
            count, real = count + 1, real + length
        group.append(i)
    if group:
        yield group
