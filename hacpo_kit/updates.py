"""④ update: mini-batches → loss → one optimiser step each. The only place that changes a model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hacpo_kit.agents import Agent, each, microbatches
from hacpo_kit.config import Config
from hacpo_kit.memory import out_of_memory, smaller_passes, told
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
    if agent.remote:
        if before is not None:
            raise ValueError(
                f"agent {agent.name!r}: before= looks at its model, which is in a worker; load it without workers="
            )
        return each([agent], update, batch, config)[0]
    sources = tuple(r.source for r in batch.pool)
    if not len(batch):
        warnings.warn(f"agent {agent.name!r} has no rollout to learn from: {dict(batch.left_out)}", stacklevel=2)
        return StepStats(agent.name, (), batch.left_out, sources, agent.moved())
    order = minibatches(batch.own, config, seed=derive_seed("order", config.seed, agent.name, agent.updates))
    _warn_if_band_closes(agent, batch, order, config)
    done = []
    with agent.awake("weights", "optimizer", "reference"):
        old = _old_logps(agent, batch, order, config)
        for m, rows in enumerate(order):
            if before is not None:
                before(m, batch.part(rows))
            done.append(_one_update(agent, batch, rows, m, config, old))
    agent.steps += 1
    return StepStats(agent.name, tuple(done), batch.left_out, sources, agent.moved())


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


def _passes(agent: Agent, batch: Batch, rows: Sequence[int], config: Config) -> Iterator[tuple[list[int], bool]]:
    """The rows of one mini-batch in groups that are computed together, and whether a group can have a gradient.

    Rows with advantage 0 and no KL have none: a pass forward gives their ratios. They are a third of the work, or more, where
    many prompts are always or never solved. In half precision own and foreign rows are apart.
    """
    teach = [bool(batch.advantages[i]) or (config.beta > 0 and bool(batch.own[i])) for i in rows]
    if not any(teach):  # the optimiser's step needs a gradient, be it 0
        teach = [True] * len(rows)
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for i, teaches in zip(rows, teach, strict=True):
        kinds.setdefault((teaches, agent.half and bool(batch.own[i])), []).append(i)
    for (teaches, _), part in sorted(kinds.items(), reverse=True):
        prompts, responses = [batch.prompt_ids[i] for i in part], [batch.response_ids[i] for i in part]
        for micro in microbatches(prompts, responses, config.microbatch_tokens):
            yield [part[i] for i in micro], teaches


@torch.no_grad()
def _old_logps(agent: Agent, batch: Batch, order: list[list[int]], config: Config) -> dict[int, Tensor] | None:
    """Log-probabilities of the own rollouts before any update, computed in the very passes of the update.

    In half precision a mean log-probability changes by a percent with the shape of the pass, far beyond the own clip of
    a few 1e-4: a ratio to the recorded values would clip rollouts for their rounding. Same pass, same rounding. Without
    the first mini-batch, whose own pass has them. None where the recorded values are right: in float32, and where the
    agent has changed since it wrote the rollouts.
    """
    if not agent.half or batch.pool.updates.get(agent.name) != agent.updates:
        return None
    old: dict[int, Tensor] = {}
    for rows in order[1:]:
        for micro, _ in _passes(agent, batch, rows, config):
            if batch.own[micro[0]]:
                some = [[p[i] for i in micro] for p in (batch.prompt_ids, batch.response_ids)]
                with out_of_memory(agent, f"scoring {told(*some)}", smaller_passes(micro, config.microbatch_tokens)):
                    logp, _ = agent.logprobs(*some, temperature=batch.pool.temperature)
                old |= {i: row[: len(tokens)] for i, row, tokens in zip(micro, logp, some[1], strict=True)}
    return old


def _one_update(
    agent: Agent, batch: Batch, rows: list[int], m: int, config: Config, old: Mapping[int, Tensor] | None
) -> MiniBatch:
    doing = f"mini-batch {m}: making the optimiser's masters or the KL's reference"
    with out_of_memory(agent, doing, "load it with offload=True or lora=True"):
        optimizer = agent.prepare_update(config)
    optimizer.zero_grad(set_to_none=True)
    seen: dict[int, tuple[float, bool]] = {}
    loss, kl_sum = 0.0, 0.0
    own_count = int(batch.own[rows].sum())
    try:
        for micro, teaches in _passes(agent, batch, rows, config):
            some = [[p[i] for i in micro] for p in (batch.prompt_ids, batch.response_ids)]
            doing = f"mini-batch {m}: the gradient of {told(*some)}; the weights are as before this mini-batch"
            passes = smaller_passes(micro, config.microbatch_tokens, agent)
            with out_of_memory(agent, doing, passes), torch.set_grad_enabled(teaches):
                objective, s, hit, kl = _micro_objective(agent, batch, micro, m, config, old)
                # divided by the mini-batch, not the micro-batch: 1×8 = 8×1
                part = -objective.sum() / len(rows)
                if kl is not None:
                    part = part + config.beta * kl.sum() / max(1, own_count)
                    kl_sum += kl.sum().item()
                _check_finite(agent, batch, micro, m, objective)
                if teaches:
                    part.backward()
                    optimizer.collect()
            loss += part.item()
            seen |= dict(zip(micro, zip(s.tolist(), hit.tolist(), strict=True), strict=True))
        grad_norm = float(torch.nn.utils.clip_grad_norm_(optimizer.masters, config.max_grad_norm))
        if not np.isfinite(grad_norm):
            raise FloatingPointError(
                f"agent {agent.name!r}, mini-batch {m}: the gradient is not finite; the weights are as before"
            )
        doing = f"mini-batch {m}: the optimiser's step, which may have moved a part of the weights"
        with out_of_memory(agent, doing, "load it with offload=True or lora=True"):
            optimizer.step()
    finally:
        optimizer.zero_grad(set_to_none=True)
    agent.updates += 1
    agent.weights_version += 1
    return MiniBatch(
        updates_made=m,
        lower=lower_bound(m, config),
        index=np.array([batch.index[i] for i in rows]),
        own=batch.own[rows].numpy(),
        ratio=np.array([seen[i][0] for i in rows], np.float32),
        clipped=np.array([seen[i][1] for i in rows], bool),
        advantages=batch.advantages[rows].numpy(),
        weights=batch.weights[rows].numpy(),
        loss=loss,
        grad_norm=grad_norm,
        lr=optimizer.param_groups[0]["lr"],
        kl=kl_sum / own_count if config.beta > 0 and own_count else None,
    )


def _micro_objective(
    agent: Agent, batch: Batch, rows: Sequence[int], m: int, config: Config, old: Mapping[int, Tensor] | None = None
):
    """Objective, ratio and clip of some rollouts, and the KL of the own ones among them (None without β).

    `old` has own log-probabilities that stand in for the recorded ones; a row that it lacks has those of this pass.
    """
    prompts, responses = [batch.prompt_ids[i] for i in rows], [batch.response_ids[i] for i in rows]
    temperature = batch.pool.temperature
    logp, mask = agent.logprobs(prompts, responses, temperature=temperature)
    # padding columns follow the longest rollout of the micro-batch; they are masked
    at = dict(device=logp.device, dtype=logp.dtype)
    advantages, own = batch.advantages[rows].to(**at), batch.own[rows].to(logp.device)
    before = {}
    if old is not None:
        # by length, not by mask: to select by a mask makes the host wait for a GPU, here for every row
        lengths = [len(tokens) for tokens in responses]
        before = {k: old.get(i, logp[k, : lengths[k]].detach()) for k, i in enumerate(rows) if batch.own[i]}
    if config.ratio == "token":
        source = torch.zeros_like(logp)
        for k, i in enumerate(rows):
            logps = before[k] if k in before else torch.from_numpy(batch.pool.rollouts[batch.index[i]].logps)
            source[k, : len(logps)] = logps.to(**at)
        out = grpo_loss(logp, source, mask, advantages, config)
    else:
        means, weights = batch.source_mean_logp[rows].to(**at), batch.weights[rows].to(**at)
        for k, logps in before.items():
            means[k] = logps.mean()
        out = hacpo_loss(logp, mask, means, advantages, weights, own, m, config)
    kl = None
    if config.beta > 0:
        mine = [k for k, i in enumerate(rows) if batch.own[i]]
        kl = logp.new_zeros(0)
        if mine:
            some = ([p[k] for k in mine] for p in (prompts, responses))
            reference = agent.reference_logprobs(*some, temperature=temperature)
            width = reference.shape[1]
            kl = kl_to_reference(logp[mine, :width], reference, mask[mine, :width])
    return out.objective, out.ratio, out.clipped, kl


def _check_finite(agent: Agent, batch: Batch, rows: Sequence[int], m: int, objective: Tensor) -> None:
    if objective.isfinite().all():
        return
    bad = [batch.rollouts[rows[i]] for i in (~objective.isfinite()).nonzero().flatten().tolist()]
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
