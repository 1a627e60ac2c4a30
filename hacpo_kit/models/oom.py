"""Out of memory: errors that name the agent, the work and the setting to change."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hacpo_kit.models.engines.base import Policy


@contextlib.contextmanager
def memory_advice(agent: Policy, work: str, remedy: str) -> Iterator[None]:
    """Turn an out-of-memory error inside the block into a MemoryError with agent, work and remedy, and free its tensors."""
    try:
        yield
        return
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0]
        traceback.clear_frames(error.__traceback__)  # the frames would keep the activations alive
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise MemoryError(
        f"agent {agent.name!r} ran out of memory on {agent.device}, {work} ({reason}); {remedy}. "
        "Resume the run from its last checkpoint: hk.resume(folder, changes={…}) for settings, loading={…} for agents"
    ) from None


def pass_memory_advice(
    agent: Policy, work: str, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], tokens: int
) -> contextlib.AbstractContextManager[None]:
    """As `memory_advice`, for one pass over these rows; `tokens` is the present `microbatch_tokens`."""
    rows, width = len(prompts), max(map(len, prompts)) + max(map(len, responses))
    if rows > 1:
        steps = [f"set microbatch_tokens={max(1, tokens // 2)} (now {tokens})"]
    else:
        steps = ["a single rollout needs a smaller max_new_tokens"]
    if torch.is_grad_enabled():
        if not agent.model.is_gradient_checkpointing:
            steps.append("load the agent with gradient_checkpointing=True")
        if agent.offload is None:
            steps.append("or with offload=True, if other agents share the device")
    return memory_advice(agent, f"{work} {rows} rollouts, {rows * width:,} padded tokens", ", ".join(steps))
