"""④ update: importance ratio, clipping range, loss (eqs. 11-14 and 47-53). Pure functions of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hacpo_kit.config import Config

# Logits that are converted to float32 at once, by kind of device: on a CPU they fit in a core's cache, a GPU is kept busy.
LOGITS_AT_ONCE = {"cpu": 2**19}
LOGITS_AT_ONCE_ELSEWHERE = 2**24


class LossOutput(NamedTuple):
    """The result of a loss function; `loss` is the negative mean of `objective`."""

    loss: Float[Tensor, ""]
    objective: Float[Tensor, "rollout"]
    ratio: Float[Tensor, "rollout"]
    clipped: Bool[Tensor, "rollout"]  # clipping leaves this rollout (token level: at least one token) without gradient


def token_logprobs(
    logits: Float[Tensor, "*position vocabulary"], ids: Int[Tensor, "*position"], *, temperature: float = 1.0
) -> Float[Tensor, "*position"]:
    """Return the log-probability of each token under softmax(logits / T), in float32 or better (nats).

    Differentiable. Forward and backward convert a part of the logits to float32 at once, so that no full copy is needed.

    >>> token_logprobs(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([0.2500])
    """
    rows = _TokenLogprobs.apply(logits.flatten(0, -2), ids.flatten(), temperature)
    return rows.view(ids.shape)


class _TokenLogprobs(torch.autograd.Function):
    """log π(y) = z_y / T − log Σ exp(z / T), and its gradient (1[y] − π) / T."""

    @staticmethod
    def forward(ctx, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        chosen, norm = (torch.empty(len(ids), dtype=wide, device=logits.device) for _ in range(2))
        for part in _parts(logits):
            z = _scaled(logits[part], wide, temperature)
            norm[part] = z.logsumexp(-1)
            chosen[part] = z.gather(-1, ids[part, None]).squeeze(-1)
        ctx.save_for_backward(logits, ids, norm)
        ctx.temperature = temperature
        return chosen - norm

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, outer: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, norm = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for part in _parts(logits):
            scale = outer[part, None] / ctx.temperature
            pi = _scaled(logits[part], norm.dtype, ctx.temperature).sub(norm[part, None]).exp_()
            gradient[part] = pi.mul_(-scale).scatter_add_(-1, ids[part, None], scale)
        return gradient, None, None


def _scaled(logits: Tensor, wide: torch.dtype, temperature: float) -> Tensor:
    logits = logits.to(wide)
    return logits if temperature == 1 else logits / temperature


def _parts(logits: Tensor) -> Iterator[slice]:
    """Yield slices of rows that are converted at once."""
    rows = max(1, LOGITS_AT_ONCE.get(logits.device.type, LOGITS_AT_ONCE_ELSEWHERE) // logits.shape[-1])
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)


def sequence_ratio(
    logp: Float[Tensor, "rollout token"],
    mask: Bool[Tensor, "rollout token"],
    source_mean_logp: Float[Tensor, "rollout"],
) -> Float[Tensor, "rollout"]:
    """Return the length-normalised importance ratio of learner to source (eq. 11); each side averages over its own tokens.

    Raises ValueError if a rollout has no tokens or the shapes disagree.

    >>> sequence_ratio(torch.tensor([[-0.2, -0.4, 9.9]]), torch.tensor([[True, True, False]]), torch.tensor([-0.3]))
    tensor([1.])
    """
    # s = exp(mean_t log π_k(y_t) − mean_t log π_j,old(y_t))
    return (token_mean(logp, mask) - _rows(source_mean_logp, logp, "source_mean_logp")).exp()


def clip_band(updates_made: int, delta: float, delta_step: float) -> tuple[float, float]:
    """Return the clipping range of peer importance ratios after `updates_made` updates in this step (eqs. 13-14).

    >>> clip_band(0, delta=0.2, delta_step=0.025), clip_band(8, delta=0.2, delta_step=0.025)
    ((0.8, 1.0), (1.0, 1.0))
    """
    # lower(m) = min(1, 1 − δ + m·δ_step)
    return min(1.0, 1.0 - delta + updates_made * delta_step), 1.0


def lower_bound(updates_made: int, config: Config) -> float:
    """Return the smallest ratio with which a peer rollout contributes a gradient for both signs of its advantage."""
    if config.peer_update == "own":
        return 1 - config.eps_low
    return clip_band(updates_made, config.delta, config.delta_step)[0]


def hacpo_loss(
    logp: Float[Tensor, "rollout token"],
    mask: Bool[Tensor, "rollout token"],
    source_mean_logp: Float[Tensor, "rollout"],
    advantages: Float[Tensor, "rollout"],
    weights: Float[Tensor, "rollout"],
    own: Bool[Tensor, "rollout"],
    updates_made: int,
    config: Config,
) -> LossOutput:
    """Return the loss of one mini-batch of own and peer rollouts (eqs. 12-14 and 47-53).

    `weights` is ω(source, learner), 1 for own rollouts; `updates_made` counts the learner's updates in this step.
    On policy the loss is close to zero although its gradient is not; the gradient norm shows progress, the loss does not.

    Raises ValueError if the shapes disagree or a rollout has no tokens.
    """
    advantages, weights = _rows(advantages, logp, "advantages"), _rows(weights, logp, "weights")
    own = _rows(own, logp, "own")
    s = sequence_ratio(logp, mask, source_mean_logp)
    objective, clipped = sequence_objective(s, advantages, weights, own, updates_made, config)
    return LossOutput(-objective.mean(), objective, s, clipped)


def sequence_objective(
    s: Float[Tensor, "rollout"],
    advantages: Float[Tensor, "rollout"],
    weights: Float[Tensor, "rollout"],
    own: Bool[Tensor, "rollout"],
    updates_made: int,
    config: Config,
) -> tuple[Float[Tensor, "rollout"], Bool[Tensor, "rollout"]]:
    """Return the objective of each rollout and whether it is clipped, from its importance ratio s (eqs. 12-14, 47-53).

    The other parameters are those of `hacpo_loss`.

    >>> half = torch.tensor([0.5])
    >>> sequence_objective(half, torch.ones(1), torch.ones(1), torch.tensor([False]), 0, Config(alpha=1, delta=0.8))
    (tensor([0.2500]), tensor([False]))
    """
    # own: min(s·A, clip(s, 1 − ε_low, 1 + ε_high)·A)
    low, high = 1 - config.eps_low, 1 + config.eps_high
    own_objective = torch.minimum(s * advantages, s.clamp(low, high) * advantages)
    own_clipped = ((s > high) & (advantages > 0)) | ((s < low) & (advantages < 0))
    if config.peer_update == "own":  # naive sharing: peer rollouts are treated like own ones
        return own_objective * weights, own_clipped

    # peer: c·sg[c]^α·ω(j,k)·A with c = clip(s, lower(m), 1); without a min, clipping stops both signs of A
    lower, upper = clip_band(updates_made, config.delta, config.delta_step)
    c = s.clamp(lower, upper)
    peer_objective = c * c.detach() ** config.alpha * weights * advantages
    peer_clipped = (s < lower) | (s > upper)
    return torch.where(own, own_objective, peer_objective), torch.where(own, own_clipped, peer_clipped)


class TokenTerms(NamedTuple):
    """The token-level objective before any mean; one entry per rollout."""

    total: Float[Tensor, "rollout"]  # sum over the rollout's tokens
    ratio: Float[Tensor, "rollout"]  # geometric mean of the token ratios
    clipped: Bool[Tensor, "rollout"]  # at least one token is clipped


def token_terms(
    logp: Float[Tensor, "rollout token"],
    old_logp: Float[Tensor, "rollout token"],
    mask: Bool[Tensor, "rollout token"],
    advantages: Float[Tensor, "rollout"],
    config: Config,
) -> TokenTerms:
    """Return Σ_t min(ρ_t·A, clip(ρ_t)·A) of each rollout, with ρ the ratio of the learner to its own old policy.

    Raises ValueError if the shapes disagree or a rollout has no tokens.
    """
    if old_logp.shape != logp.shape:
        raise ValueError(f"old_logp has shape {tuple(old_logp.shape)}, logp {tuple(logp.shape)}")
    a = _rows(advantages, logp, "advantages")[:, None]
    log_ratio = torch.where(mask, logp - old_logp, 0.0)
    r = log_ratio.exp()
    low, high = 1 - config.eps_low, 1 + config.eps_high
    total = torch.where(mask, torch.minimum(r * a, r.clamp(low, high) * a), 0.0).sum(-1)
    clipped = (((r > high) & (a > 0)) | ((r < low) & (a < 0))) & mask
    return TokenTerms(total, token_mean(log_ratio, mask).exp(), clipped.any(-1))


def grpo_loss(
    logp: Float[Tensor, "rollout token"],
    old_logp: Float[Tensor, "rollout token"],
    mask: Bool[Tensor, "rollout token"],
    advantages: Float[Tensor, "rollout"],
    config: Config,
) -> LossOutput:
    """Return the token-level clipped loss of GRPO: mean over the tokens of a rollout, then over rollouts.

    `ratio` is the geometric mean of a rollout's token ratios; `clipped` marks rollouts with at least one clipped token.

    Raises ValueError if the shapes disagree or a rollout has no tokens.
    """
    terms = token_terms(logp, old_logp, mask, advantages, config)
    objective = terms.total / mask.sum(-1)
    return LossOutput(-objective.mean(), objective, terms.ratio, terms.clipped)


def token_loss(
    logp: Float[Tensor, "rollout token"],
    old_logp: Float[Tensor, "rollout token"],
    mask: Bool[Tensor, "rollout token"],
    advantages: Float[Tensor, "rollout"],
    weights: Float[Tensor, "rollout"],
    config: Config,
) -> LossOutput:
    """Return the token-level clipped loss with one weight for each rollout and the mean over all tokens (GRAFT, eqs. 6-10).

    −Σ_j w_j Σ_t min(ρA, clip(ρ)A) / number of tokens. Rollouts with weight 0 count in the denominator.

    Raises ValueError if the shapes disagree or a rollout has no tokens.
    """
    terms = token_terms(logp, old_logp, mask, advantages, config)
    objective = _rows(weights, logp, "weights") * terms.total * (len(mask) / int(mask.sum()))
    return LossOutput(-objective.mean(), objective, terms.ratio, terms.clipped)


def nll_loss(
    logp: Float[Tensor, "rollout token"], mask: Bool[Tensor, "rollout token"], weight: float
) -> Float[Tensor, ""]:
    """Return the weighted negative log-likelihood, averaged over all tokens (SGT).

    >>> nll_loss(torch.tensor([[-1.0, -3.0]]), torch.tensor([[True, True]]), 0.1)
    tensor(0.2000)
    """
    return -weight * torch.where(mask, logp, 0.0).sum() / mask.sum()


def kl_to_reference(
    logp: Float[Tensor, "rollout token"],
    reference_logp: Float[Tensor, "rollout token"],
    mask: Bool[Tensor, "rollout token"],
) -> Float[Tensor, "rollout"]:
    """Return k3, the low-variance estimate of KL(learner ‖ reference), averaged over tokens; it is never negative.

    Its gradient in the loss is that of k3, in expectation Σ (π − π_ref)·∇log π, not that of the exact KL.
    """
    # k3 = e^d − d − 1 with d = log π_ref − log π_k
    d = torch.where(mask, reference_logp - logp, 0.0)
    return token_mean(d.exp() - d - 1, mask)


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the masked mean of each rollout. Padding, including NaN, is ignored and receives no gradient."""
    if values.ndim != 2 or values.shape != mask.shape:
        raise ValueError(
            f"logp and mask need the same shape [rollout, token], got {tuple(values.shape)} and {tuple(mask.shape)}"
        )
    lengths = mask.sum(-1)
    if (lengths == 0).any():
        raise ValueError(f"rollouts {(lengths == 0).nonzero().flatten().tolist()} have no tokens to score")
    return torch.where(mask, values, 0.0).sum(-1) / lengths


def _rows(values: Tensor, logp: Tensor, name: str) -> Tensor:
    """Return the values if they have one entry per rollout; other shapes would broadcast silently."""
    if values.shape != logp.shape[:1]:
        raise ValueError(f"{name} has shape {tuple(values.shape)}, need one value per rollout: ({logp.shape[0]},)")
    return values
