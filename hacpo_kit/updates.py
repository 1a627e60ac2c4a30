"""④ update: mini-batches → loss → one optimiser step each. The only place that changes a model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hacpo_kit.common.faults import with_fault
from hacpo_kit.common.seeds import derive_seed
from hacpo_kit.config import Config
from hacpo_kit.models.agents import Agent, each, microbatches
from hacpo_kit.models.memory import out_of_memory, smaller_passes, told
from hacpo_kit.objective import clip_band, grpo_loss, hacpo_loss, kl_to_reference, lower_bound
from hacpo_kit.records import Batch, MiniBatch, StepStats, rollout_names


def update(
    agent: Agent, batch: Batch, config: Config, *, before: Callable[[int, Batch], None] | None = None
) -> StepStats:
    """Trains one learner on its batch, one optimiser update per mini-batch, and says what each update saw (eqs. 11-14, 47-53).

    The result does not depend on which other agents were updated before. `before(m, part)` is called ahead of each
    optimiser update with its mini-batch, to look on: say with `gradients.gradient_parts(agent, part, config, updates_made=m)`.

    Raises ValueError for a batch of another learner, and for peer rollouts under a token-level ratio;
    FloatingPointError, naming mini-batch and rollouts, if a ratio, loss, KL or gradient is not finite: the optimiser has
    then not moved for that mini-batch, while those before it count. The error's attribute `fault` has these rollouts.
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
        warnings.warn(f"agent {agent.name!r} has no rollout to learn from: {dict(batch.excluded)}", stacklevel=2)
        return StepStats(agent.name, (), batch.excluded, sources, agent.moved())
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
    return StepStats(agent.name, tuple(done), batch.excluded, sources, agent.moved())


def check_batch(agent: Agent, batch: Batch, config: Config) -> None:
    """Raises ValueError for a batch of another learner, and for peer rollouts under a token-level ratio."""
    if batch.learner != agent.name:
        raise ValueError(f"this batch is the view of {batch.learner!r}, not of {agent.name!r}")
    if config.ratio == "token" and not batch.own.all():
        raise ValueError(
            "ratio='token' cannot use the peer rollouts of this batch: their sources' tokens are not the learner's; "
            "build the batch with the config of this update"
        )


def minibatches(own: Tensor, config: Config, *, seed: int) -> list[list[int]]:
    """Shuffled rows in mini-batches of nearly equal size, at most `config.minibatch` rollouts each.

    With `equal_updates` the limit grows with the share of peer rollouts, so that there are as many as alone.
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


def _passes(agent: Agent, batch: Batch, rows: Sequence[int], config: Config) -> Iterator[list[int]]:
    """The rows of one mini-batch in groups that are computed together; in half precision own and peer ones apart."""
    parts = [rows]
    if agent.half:
        parts = [[i for i in rows if batch.own[i]], [i for i in rows if not batch.own[i]]]
    for part in filter(None, parts):
        prompts, responses = [batch.prompt_ids[i] for i in part], [batch.response_ids[i] for i in part]
        for micro in microbatches(prompts, responses, config.microbatch_tokens):
            yield [part[i] for i in micro]


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
    parts = (_that_teach(agent, batch, rows, m, config) for m, rows in enumerate(order) if m)
    for part in (part for both in parts for part in both):
        for micro in _passes(agent, batch, part, config):
            if batch.own[micro[0]]:
                some = [[p[i] for i in micro] for p in (batch.prompt_ids, batch.response_ids)]
                with out_of_memory(agent, f"scoring {told(*some)}", smaller_passes(micro, config.microbatch_tokens)):
                    logp, _ = agent.logprobs(*some, temperature=batch.pool.temperature)
                old |= {i: row[: len(tokens)] for i, row, tokens in zip(micro, logp, some[1], strict=True)}
    return old


def _that_teach(agent: Agent, batch: Batch, rows: Sequence[int], m: int, config: Config) -> tuple[list[int], list[int]]:
    """Rows that are computed with their gradient, and rows that get a pass forward first, a third of the work.

    Advantage 0, without a KL, leaves no gradient, nor does a clipped ratio, which half of the peer rollouts or more have
    and, after the first mini-batch, half of the own. A token-level clip leaves the other tokens' gradient. In half precision
    an own ratio is only right in the pass that also had the old log-probabilities.
    """
    unclipped = m == 0 or agent.half or config.ratio == "token"
    at_once, first = [], []
    for i in rows:
        certain = config.beta > 0 or (unclipped and bool(batch.advantages[i] != 0))
        (at_once if batch.own[i] and certain else first).append(i)
    return at_once, first


def _one_update(
    agent: Agent, batch: Batch, rows: list[int], m: int, config: Config, old: Mapping[int, Tensor] | None
) -> MiniBatch:
    doing = f"mini-batch {m}: making the optimiser's masters or the KL's reference"
    with out_of_memory(agent, doing, "load it with offload=True or lora=True"):
        optimizer = agent.prepare_update(config)
    optimizer.zero_grad(set_to_none=True)
    seen: dict[int, _Seen] = {}
    own_count = int(batch.own[rows].sum())
    compute = partial(_compute, agent, batch, rows, m=m, config=config, old=old)
    try:
        teach, uncertain = _that_teach(agent, batch, rows, m, config)
        with torch.no_grad():
            for micro in _passes(agent, batch, uncertain, config):
                seen |= compute(micro)
        teach += [i for i in uncertain if not seen[i].clipped and batch.advantages[i] != 0]
        for micro in _passes(agent, batch, teach, config):
            seen |= compute(micro)
            optimizer.collect()
        if not teach:
            optimizer.zero_gradients()  # the moments go on, as with any gradient
        grad_norm = float(torch.nn.utils.clip_grad_norm_(optimizer.masters, config.max_grad_norm))
        if not np.isfinite(grad_norm):
            bad = _with_bad_gradient(agent, batch, teach, m, config, old)
            raise _not_finite(agent, batch, bad, m, "gradient")
        doing = f"mini-batch {m}: the optimiser's step, which may have moved a part of the weights"
        with out_of_memory(agent, doing, "load it with offload=True or lora=True"):
            optimizer.step()
    finally:
        optimizer.zero_grad(set_to_none=True)
    agent.updates += 1
    agent.weights_version += 1
    kl = sum(seen[i].kl for i in rows) / own_count if config.beta > 0 and own_count else None
    return MiniBatch(
        updates_made=m,
        lower=lower_bound(m, config),
        index=np.array([batch.index[i] for i in rows]),
        own=batch.own[rows].numpy(),
        ratio=np.array([seen[i].ratio for i in rows], np.float32),
        clipped=np.array([seen[i].clipped for i in rows], bool),
        advantages=batch.advantages[rows].numpy(),
        weights=batch.weights[rows].numpy(),
        loss=-sum(seen[i].objective for i in rows) / len(rows) + config.beta * (kl or 0),
        grad_norm=grad_norm,
        lr=optimizer.param_groups[0]["lr"],
        kl=kl,
    )


class _Seen(NamedTuple):
    """What a pass saw of one rollout."""

    ratio: float
    clipped: bool
    objective: float
    kl: float


def _compute(
    agent: Agent,
    batch: Batch,
    rows: Sequence[int],
    micro: list[int],
    *,
    m: int,
    config: Config,
    old: Mapping[int, Tensor] | None,
) -> dict[int, _Seen]:
    """A pass forward over a part of the mini-batch `rows` and, where gradients are on, its part of the gradient."""
    some = [[p[i] for i in micro] for p in (batch.prompt_ids, batch.response_ids)]
    doing = f"mini-batch {m}: the gradient of {told(*some)}; the weights are as before this mini-batch"
    with out_of_memory(agent, doing, partial(smaller_passes, micro, config.microbatch_tokens, agent)):
        objective, ratio, hit, kl = _micro_objective(agent, batch, micro, m, config, old)
        _check_finite(agent, batch, micro, m, objective, ratio, kl)
        if torch.is_grad_enabled():
            # divided by the mini-batch, not the micro-batch: 1×8 = 8×1
            part = -objective.sum() / len(rows)
            if kl is not None:
                part = part + config.beta * kl.sum() / max(1, int(batch.own[rows].sum()))
            part.backward()
    each_kl = iter([] if kl is None else kl.tolist())
    kls = [next(each_kl) if config.beta > 0 and batch.own[i] else 0.0 for i in micro]
    values = zip(ratio.tolist(), hit.tolist(), objective.tolist(), kls, strict=True)
    return {i: _Seen(*v) for i, v in zip(micro, values, strict=True)}


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


def _check_finite(
    agent: Agent, batch: Batch, rows: Sequence[int], m: int, objective: Tensor, ratio: Tensor, kl: Tensor | None
) -> None:
    """Raises FloatingPointError, with the rollouts, unless all that one pass computed is finite."""
    own = [i for i in rows if batch.own[i]]
    for what, values, of in (("objective", objective, rows), ("importance ratio", ratio, rows), ("KL", kl, own)):
        if values is not None and not values.isfinite().all():
            bad = [of[k] for k in (~values.isfinite()).nonzero().flatten().tolist()]
            raise _not_finite(agent, batch, bad, m, what)


def _with_bad_gradient(agent: Agent, batch: Batch, rows: list[int], m: int, config: Config, old) -> list[int]:
    """The rows that have, each alone, a gradient that is not finite; all of them if only their sum has."""
    bad = []
    for i in rows:
        agent.optimizer.zero_grad(set_to_none=True)
        objective, _, _, kl = _micro_objective(agent, batch, [i], m, config, old)
        (-objective.sum() + (0.0 if kl is None else config.beta * kl.sum())).backward()
        if not all(p.grad.isfinite().all() for p in agent.model.parameters() if p.grad is not None):
            bad.append(i)
    return bad or rows


def _not_finite(agent: Agent, batch: Batch, rows: Sequence[int], m: int, what: str) -> Exception:
    """The error that names these rows of a batch, with all that led to the number."""
    rollouts = [batch.rollouts[i] for i in rows]
    prompts, responses = [batch.prompt_ids[i] for i in rows], [batch.response_ids[i] for i in rows]
    with torch.no_grad():
        logps, _ = agent.logprobs(prompts, responses, temperature=batch.pool.temperature)
    seen = [
        {
            "prompt": batch.pool.problem(r.problem).prompt_text, "gold": batch.pool.problem(r.problem).gold,
            "advantage": batch.advantages[i].item(), "weight": batch.weights[i].item(), "own": batch.own[i].item(),
            "source_mean_logp": batch.source_mean_logp[i].item(), "learner_token_ids": responses[k],
            "learner_logps": logps[k, : len(responses[k])].cpu().numpy(),
        }
        for k, (i, r) in enumerate(zip(rows, rollouts, strict=True))
    ]  # fmt: skip
    error = FloatingPointError(
        f"agent {agent.name!r}, mini-batch {m}: the {what} of {len(rows)} rollouts is not finite ({rollout_names(rollouts)}); "
        "the weights are as before this mini-batch"
    )
    return with_fault(error, agent.name, rollouts, seen, minibatch=m)


def _warn_if_band_closes(agent: Agent, batch: Batch, order: list[list[int]], config: Config) -> None:
    """δ_step can close the band inside one step: later mini-batches then learn nothing from others."""
    if config.sources == "own" or config.peer_update == "own":
        return
    shut = [
        m
        for m, rows in enumerate(order)
        if clip_band(m, config.delta, config.delta_step)[0] >= 1 and not batch.own[rows].all()
    ]
    if shut:
        warnings.warn(
            f"agent {agent.name!r}: from mini-batch {shut[0]} of {len(order)} on the band is [1, 1] and peer rollouts teach "
            f"nothing (delta={config.delta}, delta_step={config.delta_step}); raise delta or minibatch, or lower delta_step",
            stacklevel=3,
        )
