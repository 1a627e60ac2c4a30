"""How an agent samples: transformers (the default) or vLLM (optional).

An engine is anything with `sample(agent, prompts, *, temperature, max_new_tokens, seed)`, which returns one `Answer` to
each prompt. One that keeps a copy of the weights compares `agent.weights_version` before it samples.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

ENGINES = ("transformers", "vllm")


class Answer(NamedTuple):
    """What an engine sampled: tokens, the end token included, and whether the answer ended by itself."""

    ids: tuple[int, ...]
    ended: bool
    logps: Float[np.ndarray, "token"] | None = (
        None  # as the engine computed them (nats), to be compared with the trainer's
    )


def until_end(ids: list[int], end_ids: set[int]) -> Answer:
    """The answer up to its first end token, which it keeps; padding behind it may be the same token."""
    for position, token in enumerate(ids):
        if token in end_ids:
            return Answer(tuple(ids[: position + 1]), True)
    return Answer(tuple(ids), False)
