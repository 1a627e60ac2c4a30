"""④ update: mini-batches → objective → one optimiser step each. The only place that changes a model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hacpo_kit.common.seeds import derive_seed
from hacpo_kit.config import Config
from hacpo_kit.models.agents import Agent
from hacpo_kit.models.faults import memory_advice, not_finite, pass_memory_advice
from hacpo_kit.models.passes import microbatches
from hacpo_kit.objective import (
    LossOutput,
    TokenTerms,
    hacpo_loss,
    kl_to_reference,
    lower_bound,
    sequence_ratio,
    token_mean,
    token_terms,
)
from hacpo_kit.records import Batch, MiniBatch, StepStats
from hacpo_kit.sharing import gate


def update(
    agent: Agent, batch: Batch, config: Config, *, before: Callable[[int, Batch], None] | None = None
) -> StepStats:
    """Train one learner on its batch, one optimiser update per mini-batch, and return what each update computed.

    The result does not depend on the order in which agents are updated. `before(m, part)` is called before each optimiser
    update with its mini-batch, for example to measure `gradients.gradient_parts(agent, part, config, updates_made=m)`.

    Raises ValueError for a batch of another learner, and for peer rollouts with a token-level ratio. Raises
    FloatingPointError, with the rollouts in its attribute `fault`, if a ratio, objective, KL or gradient is not finite: the
    optimiser has then made no step for this mini-batch, and its steps for earlier ones remain.
    """
    check_batch(agent, batch, config)
    return agent.submit(_update, batch, config, before=before).result()


def _update(
    agent: Agent, batch: Batch, config: Config, *, before: Callable[[int, Batch], None] | None = None
) -> StepStats:
    """Do the work of `update`, in the process that has the model."""
    sources = tuple(r.source for r in batch.pool)
    if not len(batch):
        warnings.warn(f"agent {agent.name!r} has no rollouts to train on: {dict(batch.excluded)}", stacklevel=3)
        return StepStats(agent.name, (), batch.excluded, sources, agent.transfer_costs())
    seed = derive_seed("order", config.seed, agent.name, agent.updates)
    done = []
    with agent.on_device("weights", "optimizer", "reference"):
        batch, of_peers = weighted_peers(agent, batch, config)
        parts = [batch.part(rows) for rows in minibatches(batch.own, config, seed=seed)]
        _warn_if_range_closes(agent, parts, config)
        old = _old_logps(agent, parts, config, of_peers)
        for m, part in enumerate(parts):
            if before is not None:
                before(m, part)
            done.append(_one_update(agent, part, m, config, old))
    agent.steps += 1
    return StepStats(agent.name, tuple(done), batch.excluded, sources, agent.transfer_costs())


def check_batch(agent: Agent, batch: Batch, config: Config) -> None:
    """Raise ValueError for a batch of another learner, and for peer rollouts with a token-level ratio."""
    if batch.learner != agent.name:
        raise ValueError(f"this is the batch of {batch.learner!r}, not of {agent.name!r}")
    if config.ratio == "token" and config.share == "none" and not batch.own.all():
        raise ValueError(
            "share='none' cannot use the peer rollouts of this batch; build the batch with the config of this update"
        )


def minibatches(own: Bool[Tensor, "rollout"], config: Config, *, seed: int) -> list[list[int]]:
    """Return shuffled rows in mini-batches of nearly equal size, at most `config.minibatch` rollouts each.

    With `equal_updates` this limit grows with the share of peer rollouts, and their number stays as without peers. With the
    negative log-likelihood the mini-batches are those without peers, among which peer rollouts are distributed.
    """
    size = math.ceil(config.minibatch / config.updates_factor)
    if config.equal_updates and own.any():
        count_alone = math.ceil(int(own.sum()) / size)
        size = math.ceil(len(own) / count_alone)
    shuffled = torch.randperm(len(own), generator=torch.Generator().manual_seed(seed)).tolist()
    own_rows, peer_rows = [i for i in shuffled if own[i]], [i for i in shuffled if not own[i]]
    if config.peer_update == "nll" and own_rows:
        parts = _split(own_rows, math.ceil(len(own_rows) / size))
        return [[*rows, *peers] for rows, peers in zip(parts, _split(peer_rows, len(parts)), strict=True)]
    groups = [own_rows, peer_rows] if config.minibatch_order == "own_first" else [shuffled]
    return [rows for group in groups if group for rows in _split(group, math.ceil(len(group) / size))]


def _split(rows: list[int], count: int) -> list[list[int]]:
    # nearly equal sizes: a small remainder would make a full optimiser step on few rollouts
    return [part.tolist() for part in np.array_split(np.array(rows, int), count)]


@torch.no_grad()
def weighted_peers(agent: Agent, batch: Batch, config: Config) -> tuple[Batch, dict[int, Tensor]]:
    """Return the batch with the gate's weights and without masked peer rollouts, and the learner's log-probabilities of them.

    Both depend on the ratio s of learner to source before the step's first update. The log-probabilities, by position in the
    pool, are those of the learner's old policy. Excluded: "below_floor" (gated), "masked" (A < 0 and −log s > mask_negative).
    """
    gated, masks = config.peer_update == "gated", config.mask_negative < math.inf
    rows = [i for i in range(len(batch)) if not batch.own[i] and (gated or (masks and batch.advantages[i] < 0))]
    if not rows:
        return batch, {}
    s, old = torch.ones(len(batch)), {}
    for micro in _passes(agent, batch, rows, config):
        ids = batch.tokens(micro)
        with pass_memory_advice(agent, "scoring", *ids, config.microbatch_tokens):
            logp, mask = agent.logprobs(*ids, temperature=batch.pool.temperature)
        means = batch.source_mean_logp[micro].to(logp.device, logp.dtype)
        s[micro] = sequence_ratio(logp, mask, means).cpu().float()
        old |= {batch.index[i]: row[: len(ids[1][k])] for k, (i, row) in enumerate(zip(micro, logp, strict=True))}
    masked = ~batch.own & (batch.advantages < 0) & (-s.log() > config.mask_negative)
    weights = torch.where(batch.own, batch.weights, gate(s, config.floor)) if gated else batch.weights
    dropped = {"masked": masked, "below_floor": ~batch.own & ~masked & (weights == 0) & gated}
    kept = [i for i in range(len(batch)) if not any(hit[i] for hit in dropped.values())]
    excluded = {**batch.excluded, **{reason: int(hit.sum()) for reason, hit in dropped.items() if hit.any()}}
    return replace(replace(batch, weights=weights).part(kept), excluded=excluded), old


# ── one update ───────────────────────────────────────────────────────────────────────────────────────────────────


def _one_update(agent: Agent, batch: Batch, m: int, config: Config, old: Mapping[int, Tensor] | None) -> MiniBatch:
    """Make one optimiser step on a mini-batch, the one after m updates of the step."""
    remedy = "load it with offload=True or lora=True"
    with memory_advice(agent, f"mini-batch {m}: creating the master weights or the KL reference", remedy):
        optimizer = agent.prepare_update(config)
    optimizer.zero_grad(set_to_none=True)
    certain, doubtful = _by_gradient(agent, batch, m, config)
    results = PassResult(*torch.zeros(4, len(batch), dtype=torch.float64))
    try:
        with torch.no_grad():
            for rows in _passes(agent, batch, doubtful, config):
                results.put(rows, _one_pass(agent, batch, rows, m, config, old))
        active = certain + [i for i in doubtful if not results.clipped[i] and batch.advantages[i] != 0]
        for rows in _passes(agent, batch, active, config):
            results.put(rows, _one_pass(agent, batch, rows, m, config, old))
            optimizer.collect()
        if not active:
            optimizer.zero_gradients()  # the moments decay as with any gradient
        grad_norm = float(torch.nn.utils.clip_grad_norm_(optimizer.masters, config.max_grad_norm))
        if not math.isfinite(grad_norm):
            raise not_finite(agent, batch, _bad_gradients(agent, batch, active, m, config, old), m, "gradient")
        with memory_advice(agent, f"mini-batch {m}: the optimiser's step, which may be incomplete", remedy):
            optimizer.step()
    finally:
        optimizer.zero_grad(set_to_none=True)
    agent.updates += 1
    agent.weights_version += 1
    own_count = int(batch.own.sum())
    kl = sum(results.kl.tolist()) / own_count if config.beta > 0 and own_count else None
    return MiniBatch(
        updates_made=m,
        lower=lower_bound(m, config),
        index=np.array(batch.index),
        own=batch.own.numpy(),
        ratio=results.ratio.numpy().astype(np.float32),
        clipped=results.clipped.numpy().astype(bool),
        advantages=batch.advantages.numpy(),
        weights=batch.weights.numpy(),
        loss=-sum(results.objective.tolist()) / len(batch) + config.beta * (kl or 0),
        grad_norm=grad_norm,
        lr=optimizer.param_groups[0]["lr"],
        kl=kl,
    )


class PassResult(NamedTuple):
    """What a forward pass computes for each rollout."""

    objective: Float[Tensor, "rollout"]
    ratio: Float[Tensor, "rollout"]
    clipped: Bool[Tensor, "rollout"]
    kl: Float[Tensor, "rollout"] | None  # 0 for peer rollouts; None without β or without own rollouts

    def put(self, rows: Sequence[int], result: PassResult) -> None:
        """Store the result of a pass over some rows."""
        for values, part in zip(self, result, strict=True):
            if part is not None:
                values[rows] = part.detach().to("cpu", values.dtype)


def _one_pass(
    agent: Agent, batch: Batch, rows: list[int], m: int, config: Config, old: Mapping[int, Tensor] | None
) -> PassResult:
    """Compute the objective of some rows of a mini-batch and, where gradients are enabled, its gradient."""
    work = f"mini-batch {m} (weights unchanged): pass over"
    with pass_memory_advice(agent, work, *batch.tokens(rows), config.microbatch_tokens):
        result = objective_of(agent, batch, rows, m, config, old)
        _check_finite(agent, batch, rows, m, result)
        if torch.is_grad_enabled():
            # loss = −1/N · Σ objective + β/N_own · Σ KL over the whole mini-batch, so that accumulation changes nothing
            loss = -result.objective.sum() / len(batch)
            if result.kl is not None:
                loss = loss + config.beta * result.kl.sum() / int(batch.own.sum())
            loss.backward()
    return result


def objective_of(
    agent: Agent,
    batch: Batch,
    rows: Sequence[int],
    updates_made: int,
    config: Config,
    old: Mapping[int, Tensor] | None = None,
) -> PassResult:
    """Return objective, ratio, clip and KL of some rollouts of a batch at the agent's weights (eqs. 11-14, 47-53).

    `old` maps positions in the pool to own log-probabilities that replace the recorded ones; a missing one is that of this
    pass.
    """
    prompts, responses = batch.tokens(rows)
    logp, mask = agent.logprobs(prompts, responses, temperature=batch.pool.temperature)
    at = dict(device=logp.device, dtype=logp.dtype)
    own_rows = [k for k, i in enumerate(rows) if batch.own[i]]
    if old is not None or config.ratio == "token":
        old_logp = logp.detach().clone()  # in the shape of logp, so that means over both are rounded in the same way
        for k, i in enumerate(rows):
            values = _recorded(batch, i) if old is None else old.get(batch.index[i])
            if values is not None:
                old_logp[k, : len(values)] = values.to(**at)
    columns = (batch.source_mean_logp, batch.advantages, batch.weights)
    source_mean_logp, advantages, weights = (values[rows].to(**at) for values in columns)
    own = batch.own[rows].to(logp.device)
    if config.ratio == "token":
        terms = token_terms(logp, old_logp, mask, advantages, config)
        out = _of_tokens(terms, logp, mask, source_mean_logp, weights, own, batch, config)
    else:
        if old is not None:
            source_mean_logp[own_rows] = token_mean(old_logp, mask)[own_rows]
        out = hacpo_loss(logp, mask, source_mean_logp, advantages, weights, own, updates_made, config)
    kl = None
    if config.beta > 0 and own_rows:
        reference = agent.reference_logprobs(
            [prompts[k] for k in own_rows], [responses[k] for k in own_rows], temperature=batch.pool.temperature
        )
        width = reference.shape[1]
        kl = logp.new_zeros(len(rows))
        kl[own_rows] = kl_to_reference(logp[own_rows, :width], reference, mask[own_rows, :width])
    return PassResult(out.objective, out.ratio, out.clipped, kl)


def _of_tokens(
    terms: TokenTerms,
    logp: Tensor,
    mask: Tensor,
    source_mean_logp: Tensor,
    weights: Tensor,
    own: Tensor,
    batch: Batch,
    config: Config,
) -> LossOutput:
    """Return the token-level objective of some rows, so that the loss is −1/N · Σ objective over the mini-batch.

    Policy rollouts are averaged as `loss_mean` says; peer rollouts with a negative log-likelihood over their own tokens.
    """
    likelihood = ~own & (config.peer_update == "nll")
    kinds = (batch.own, ~batch.own) if config.peer_update == "nll" else (torch.ones_like(batch.own), ~batch.own)
    lengths = torch.tensor([len(ids) for ids in batch.response_ids])
    policy_tokens, likelihood_tokens = (int(lengths[kind].sum()) for kind in kinds)
    n, policy = len(batch), int(kinds[0].sum())
    # rollout mean: Σ_t / |o_j| / N_policy; token mean: Σ_t / T_policy
    share = (
        mask.sum(-1) * (policy / n) if config.loss_mean == "rollout" else torch.full_like(weights, policy_tokens / n)
    )
    share = torch.where(likelihood, likelihood_tokens / n, share)
    total = torch.where(likelihood, torch.where(mask, logp, 0.0).sum(-1), terms.total)
    objective = weights * total / share
    # of a peer rollout the ratio of learner to source is recorded
    s = torch.where(own, terms.ratio, (token_mean(logp, mask) - source_mean_logp).exp())
    return LossOutput(-objective.mean(), objective, s, terms.clipped & ~likelihood)


def _recorded(batch: Batch, row: int) -> Tensor | None:
    """Return the recorded log-probabilities of an own rollout; None for a peer's, which belong to other tokens."""
    return torch.from_numpy(batch.pool.rollouts[batch.index[row]].logps) if batch.own[row] else None


# ── passes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _by_gradient(agent: Agent, batch: Batch, m: int, config: Config) -> tuple[list[int], list[int]]:
    """Return the rows that get a backward pass at once, and those for which a forward pass, a third of the work, decides it.

    Without a KL a rollout contributes no gradient if its advantage is 0 or its ratio is clipped, as for half of the peer
    rollouts or more and, after the first mini-batch, for half of the own. A token-level clip leaves the gradient of other
    tokens. In half precision an own ratio is exact only in the passes that computed the old log-probabilities.
    """
    of_tokens = config.ratio == "token"
    unclipped = m == 0 or agent.half_precision or of_tokens
    certain, doubtful = [], []
    for i in range(len(batch)):
        contributes = (config.beta > 0 and bool(batch.own[i])) or (unclipped and bool(batch.advantages[i] != 0))
        (certain if (batch.own[i] or of_tokens) and contributes else doubtful).append(i)
    return certain, doubtful


def _passes(agent: Agent, batch: Batch, rows: list[int], config: Config) -> Iterator[list[int]]:
    """Yield the rows in groups that are computed together; in half precision own and peer rollouts separately."""
    groups = [rows]
    if agent.half_precision:
        groups = [[i for i in rows if batch.own[i]], [i for i in rows if not batch.own[i]]]
    for group in filter(None, groups):
        for micro in microbatches(*batch.tokens(group), config.microbatch_tokens):
            yield [group[i] for i in micro]


@torch.no_grad()
def _old_logps(
    agent: Agent, parts: Sequence[Batch], config: Config, of_peers: Mapping[int, Tensor]
) -> dict[int, Tensor | None] | None:
    """Return log-probabilities of own rollouts before any update, by position in the pool, from the passes of the update.

    `of_peers` has those of peer rollouts, for the gated objective.

    In half precision a mean log-probability changes by a percent with the shape of the pass, far beyond the own clipping
    range of a few 1e-4: a ratio to the recorded values would clip rollouts for their rounding. The same pass rounds equally.
    The first mini-batch is omitted, because its own pass computes them. None where the recorded values are exact: in float32,
    and if the agent has changed since it sampled the rollouts.
    """
    if not agent.half_precision or parts[0].pool.updates.get(agent.name) != agent.updates:
        recorded = {part.index[i]: _recorded(part, i) for part in parts for i in range(len(part))} if of_peers else None
        return None if recorded is None else {**recorded, **of_peers}
    old = dict(of_peers)
    for m, part in enumerate(parts[1:], start=1):
        for group in _by_gradient(agent, part, m, config):
            for rows in _passes(agent, part, group, config):
                if part.own[rows[0]]:
                    ids = part.tokens(rows)
                    with pass_memory_advice(agent, "scoring", *ids, config.microbatch_tokens):
                        logp, _ = agent.logprobs(*ids, temperature=part.pool.temperature)
                    old |= {
                        part.index[i]: row[: len(ids[1][k])] for k, (i, row) in enumerate(zip(rows, logp, strict=True))
                    }
    return old


# ── numbers that are not finite, and a clipping range that closes ────────────────────────────────────────────────


def _check_finite(agent: Agent, batch: Batch, rows: list[int], m: int, result: PassResult) -> None:
    unknown = batch.source_mean_logp[rows].isnan().to(result.ratio.device)  # stored peers without log-probabilities
    ratio = result.ratio.masked_fill(unknown, 1.0)
    for name, values in (("objective", result.objective), ("importance ratio", ratio), ("KL", result.kl)):
        if values is not None and not values.isfinite().all():
            bad = [rows[k] for k in (~values.isfinite()).nonzero().flatten().tolist()]
            raise not_finite(agent, batch, bad, m, name)


def _bad_gradients(agent: Agent, batch: Batch, rows: list[int], *how: Any) -> list[int]:
    """Return the rows whose gradient alone is not finite, or all rows if only their sum is not."""

    def is_finite(row: int) -> bool:
        agent.optimizer.zero_grad(set_to_none=True)
        _one_pass(agent, batch, [row], *how)
        return all(p.grad.isfinite().all() for p in agent.model.parameters() if p.grad is not None)

    return [row for row in rows if not is_finite(row)] or rows


def _warn_if_range_closes(agent: Agent, parts: Sequence[Batch], config: Config) -> None:
    """Warn if δ_step closes the clipping range within one step, so that later peer rollouts contribute no gradient."""
    closed = [m for m, part in enumerate(parts) if lower_bound(m, config) >= 1 and not part.own.all()]
    if closed and config.peer_update == "hacpo":
        warnings.warn(
            f"agent {agent.name!r}: from mini-batch {closed[0]} of {len(parts)} on the clipping range is [1, 1] and peer "
            f"rollouts contribute no gradient (delta={config.delta}, delta_step={config.delta_step}); increase delta or "
            "minibatch, or decrease delta_step",
            stacklevel=4,
        )
