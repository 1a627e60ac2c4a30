"""Errors about numbers that are not finite: they name the rollouts, and carry what led to the numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hacpo_kit.common.faults import with_fault
from hacpo_kit.models.agents import Agent
from hacpo_kit.records import Batch, Pool, Rollout, rollout_names


def check_logps(agent: Agent, rollouts: Sequence[Rollout], logps: Sequence[np.ndarray | None]) -> None:
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


def not_finite(agent: Agent, batch: Batch, rows: Sequence[int], m: int, name: str) -> Exception:
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
