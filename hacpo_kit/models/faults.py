"""Errors that name agent, rollouts and remedy: numbers that are not finite, and too little memory."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hacpo_kit.common.faults import with_fault
from hacpo_kit.records import Batch, Pool, Rollout, rollout_names

if TYPE_CHECKING:
    from hacpo_kit.models.engines.base import Policy


def check_logps(agent: Policy, rollouts: Sequence[Rollout], logps: Sequence[np.ndarray | None]) -> None:
    """Raise FloatingPointError, with the rollouts, unless every known log-probability is finite."""
    bad = [r for r, values in zip(rollouts, logps, strict=True) if values is not None and not np.isfinite(values).all()]
    if bad:
        error = f"agent {agent.name!r}: log-probabilities of {len(bad)} rollouts are not finite ({rollout_names(bad)})"
        details = [{"prompt": agent.decode(r.prompt_ids), "engine_logps": r.engine_logps} for r in bad]
        raise with_fault(FloatingPointError(error), agent.name, bad, details)


def invalid_reward(error: Exception, pool: Pool, position: int) -> Exception:
    """Return the error of a reward function with the rollout at this position of the pool."""
    rollout = pool.rollouts[position]
    problem = pool.problem(rollout.problem)
    details = {"prompt": problem.prompt_text, "gold": problem.gold}
    message = f"agent {rollout.source!r}, {rollout_names([rollout])}: {error}"
    return with_fault(ValueError(message), rollout.source, [rollout], [details])


def not_finite(agent: Policy, batch: Batch, rows: Sequence[int], m: int, name: str) -> Exception:
    """Return the error that `name`, such as the ratio, is not finite for these rows of the mini-batch after m updates."""
    part = batch.part(rows)
    with torch.no_grad():
        logps, _ = agent.logprobs(part.prompt_ids, part.response_ids, temperature=batch.pool.temperature)
    details = [
        {
            "prompt": batch.pool.problem(r.problem).prompt_text, "gold": batch.pool.problem(r.problem).gold,
            "advantage": part.advantages[k].item(), "weight": part.weights[k].item(), "own": part.own[k].item(),
            "source_mean_logp": part.source_mean_logp[k].item(), "learner_token_ids": part.response_ids[k],
            "learner_logps": logps[k, : len(part.response_ids[k])].cpu().numpy(),
        }
        for k, r in enumerate(part.rollouts)
    ]  # fmt: skip
    error = FloatingPointError(
        f"agent {agent.name!r}, mini-batch {m}: the {name} of {len(rows)} rollouts is not finite "
        f"({rollout_names(part.rollouts)}); the weights are as before this mini-batch"
    )
    return with_fault(error, agent.name, part.rollouts, details, minibatch=m)


# ── out of memory ────────────────────────────────────────────────────────────────────────────────────────────────


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
    fewer = (
        f"set microbatch_tokens={max(1, tokens // 2)} (now {tokens})" if rows > 1 else "set a smaller max_new_tokens"
    )
    if torch.is_grad_enabled():
        fewer += ", or load the agent with gradient_checkpointing=True or offload=True"
    return memory_advice(agent, f"{work} {rows} rollouts, {rows * width:,} padded tokens", fewer)
