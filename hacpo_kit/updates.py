"""④ update: mini-batches → loss → one optimiser step each. The only place that changes a model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hacpo_kit.agents import Agent, microbatches
from hacpo_kit.config import Config
from hacpo_kit.objective import clip_band, grpo_loss, hacpo_loss, kl_to_reference, lower_bound
from hacpo_kit.records import Batch, MiniBatch, StepStats, derive_seed


def update(
    agent: Agent, batch: Batch, config: Config, *, before: Callable[[int, Batch], None] | None = None
) -> StepStats:
    """Trains one learner on its batch, one optimiser update per mini-batch, and says what each update saw (eqs. 11-14, 47-53).

    The result does not depend on which other agents were updated before. `before(m, part)` is called ahead of each
    optimiser update with its mini-batch, to look on: say with `gradients.gradient_parts(agent, part, config, updates_made=m)`.

    Raises ValueError for a batch of another learner, and for foreign rollouts under a token-level ratio;
    FloatingPointError, naming mini-batch and rollouts, if a loss or gradient is not finite: the optimiser has then not
    moved for that mini-batch, while those before it count.
    """
    check_batch(agent, batch, config)
    sources = tuple(r.source for r in batch.pool)
    if not len(batch):
        warnings.warn(f"agent {agent.name!r} has no rollout to learn from: {dict(batch.left_out)}", stacklevel=2)
        return StepStats(agent.name, (), batch.left_out, sources)
    order = minibatches(batch.own, config, seed=derive_seed("order", config.seed, agent.name, agent.updates))
    _warn_if_band_closes(agent, batch, order, config)
    done = []
    for m, rows in enumerate(order):
        if before is not None:
            before(m, batch.part(rows))
        done.append(_one_update(agent, batch, rows, m, config))
    agent.steps += 1
    return StepStats(agent.name, tuple(done), batch.left_out, sources)


def check_batch(agent: Agent, batch: Batch, config: Config) -> None:
    """Raises ValueError for a batch of another learner, and for foreign rollouts under a token-level ratio."""
    if batch.learner != agent.name:
        raise ValueError(f"this batch is the view of {batch.learner!r}, not of {agent.name!r}")
    if config.ratio == "token" and not batch.own.all():
        raise ValueError(
            "ratio='token' cannot use the foreign rollouts of this batch: their sources' tokens are not the learner's; "
            "build the batch with the config of this update"
        )


def minibatches(own: Tensor, config: Config, *, seed: int) -> list[list[int]]:
    """Shuffled rows in mini-batches of nearly equal size, at most `config.minibatch` rollouts each.

    With `equal_updates` the limit grows with the share of foreign rollouts, so that there are as many as alone.
    """
    size = config.minibatch
    if config.equal_updates and own.any():
        alone = math.ceil(int(own.sum()) / size)
        size = math.ceil(len(own) / alone)
    shuffled = torch.randperm(len(own), generator=torch.Generator().manual_seed(seed)).tolist()
    parts = [shuffled]
    if config.minibatch_order == "own_first":
        parts = [[i for i in shuffled if own[i]], [i for i in shuffled if not own[i]]]
    out: list[list[int]] = []
    for part in parts:
        # equal parts: a small rest would become a full-size step on few rollouts
        count = -(-len(part) // size)
        out += [a.tolist() for a in np.array_split(part, count)] if part else []
    return out


def _one_update(agent: Agent, batch: Batch, rows: list[int], m: int, config: Config) -> MiniBatch:
    optimizer = agent.prepare_update(config)
    optimizer.zero_grad(set_to_none=True)
    ratio, clipped = np.empty(len(rows), np.float32), np.empty(len(rows), bool)
    loss, kl_sum = 0.0, 0.0
    own_count = int(batch.own[rows].sum())
    prompts, responses = [batch.prompt_ids[i] for i in rows], [batch.response_ids[i] for i in rows]
    for micro in microbatches(prompts, responses, config.microbatch_tokens):
        objective, s, hit, kl = _micro_objective(agent, batch, [rows[i] for i in micro], m, config)
        # divided by the mini-batch, not the micro-batch: 1×8 = 8×1
        part = -objective.sum() / len(rows)
        if kl is not None:
            part = part + config.beta * kl.sum() / max(1, own_count)
            kl_sum += kl.sum().item()
        _check_finite(agent, batch, [rows[i] for i in micro], m, objective)
        part.backward()
        loss += part.item()
        ratio[micro], clipped[micro] = s.detach().cpu().numpy(), hit.cpu().numpy()
    grad_norm = float(torch.nn.utils.clip_grad_norm_(agent.model.parameters(), config.max_grad_norm))
    if not np.isfinite(grad_norm):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(
            f"agent {agent.name!r}, mini-batch {m}: the gradient is not finite; the weights are as before"
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    agent.updates += 1
    return MiniBatch(
        updates_made=m,
        lower=lower_bound(m, config),
        index=np.array([batch.index[i] for i in rows]),
        own=batch.own[rows].numpy(),
        ratio=ratio,
        clipped=clipped,
        advantages=batch.advantages[rows].numpy(),
        weights=batch.weights[rows].numpy(),
        loss=loss,
        grad_norm=grad_norm,
        lr=optimizer.param_groups[0]["lr"],
        kl=kl_sum / own_count if config.beta > 0 and own_count else None,
    )


def _micro_objective(agent: Agent, batch: Batch, rows: Sequence[int], m: int, config: Config):
    """Objective, ratio and clip of some rollouts, and the KL of the own ones among them (None without β)."""
    prompts, responses = [batch.prompt_ids[i] for i in rows], [batch.response_ids[i] for i in rows]
    temperature = batch.pool.temperature
    logp, mask = agent.logprobs(prompts, responses, temperature=temperature)
    # padding columns follow the longest rollout of the micro-batch; they are masked
    at = dict(device=logp.device, dtype=logp.dtype)
    advantages, own = batch.advantages[rows].to(**at), batch.own[rows].to(logp.device)
    if config.ratio == "token":
        old = torch.zeros_like(logp)
        for k, i in enumerate(rows):
            source_logp = batch.pool.rollouts[batch.index[i]].logps
            old[k, : len(source_logp)] = torch.from_numpy(source_logp).to(**at)
        out = grpo_loss(logp, old, mask, advantages, config)
    else:
        means, weights = batch.source_mean_logp[rows].to(**at), batch.weights[rows].to(**at)
        out = hacpo_loss(logp, mask, means, advantages, weights, own, m, config)
    kl = None
    if config.beta > 0:
        with torch.no_grad():
            reference, _ = agent.logprobs(prompts, responses, temperature=temperature, model=agent.reference)
        kl = kl_to_reference(logp, reference, mask)[own]
    return out.objective, out.ratio, out.clipped, kl


def _check_finite(agent: Agent, batch: Batch, rows: Sequence[int], m: int, objective: Tensor) -> None:
    if objective.isfinite().all():
        return
    bad = [batch.rollouts[rows[i]] for i in (~objective.isfinite()).nonzero().flatten().tolist()]
    agent.optimizer.zero_grad(set_to_none=True)
    names = [f"{r.problem} by {r.source} #{r.sample}" for r in bad[:8]]
    raise FloatingPointError(
        f"agent {agent.name!r}, mini-batch {m}: the objective of {len(bad)} rollouts is not finite ({'; '.join(names)}); "
        "the weights are as before this mini-batch"
    )


def _warn_if_band_closes(agent: Agent, batch: Batch, order: list[list[int]], config: Config) -> None:
    """δ_step can close the band inside one step: later mini-batches then learn nothing from others."""
    if config.sources == "own" or config.foreign == "gspo":
        return
    shut = [
        m
        for m, rows in enumerate(order)
        if clip_band(m, config.delta, config.delta_step)[0] >= 1 and not batch.own[rows].all()
    ]
    if shut:
        warnings.warn(
            f"agent {agent.name!r}: from mini-batch {shut[0]} of {len(order)} on the band is [1, 1] and foreign rollouts teach "
            f"nothing (delta={config.delta}, delta_step={config.delta_step}); raise delta or minibatch, or lower delta_step",
            stacklevel=3,
        )
