"""What an engine gets and returns.

An engine is any object with `sample(agent, prompts, *, temperature, max_new_tokens, seed)`, which returns one `Answer` per
prompt. An engine with its own copy of the weights compares `agent.weights_version` before it samples.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float

ENGINES = ("transformers", "vllm")


class Policy(Protocol):
    """What engines and memory management need to know of an agent."""

    name: str
    model: Any  # a transformers model
    device: torch.device
    tokenizer: Any  # of transformers
    end_ids: set[int]
    stop: tuple[str, ...]  # strings that end a response
    pad_id: int
    max_length: int
    weights_version: int
    engine: Any
    optimizer: Any
    reference: Any
    offload: Any


class Answer(NamedTuple):
    """A sampled response: token ids including the end token or stop string, and whether it ended with one."""

    ids: tuple[int, ...]
    ended: bool
    logps: Float[np.ndarray, "token"] | None = None  # the engine's log-probabilities (nats)


def until_end(ids: list[int], end_ids: set[int]) -> Answer:
    """Return the answer up to and including its first end token."""
    for position, token in enumerate(ids):
        if token in end_ids:
            return Answer(tuple(ids[: position + 1]), True)
    return Answer(tuple(ids), False)
