"""Whose answers move a learner: the gradient of its objective, split into parts that add up; looks on, changes nothing."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hacpo_kit.config import Config
from hacpo_kit.models.agents import Agent
from hacpo_kit.models.passes import microbatches
from hacpo_kit.records import Batch
from hacpo_kit.updates import check_batch, objective_of

if TYPE_CHECKING:
    import pandas as pd

KL = "kl"  # the part of the KL to the initial policy, where beta > 0


class PartGradient(NamedTuple):
    """Gradient of one part of the objective, the direction that raises it."""

    gradient: Float[Tensor, "parameter"]  # all trainable parameters in a row, float32 or better
    rollouts: int
    clipped: int  # rollouts whose clip is active: no gradient (token level: some token)


def gradient_parts(
    agent: Agent, batch: Batch, config: Config, *, updates_made: int = 0, by: str = "source"
) -> pd.DataFrame:
    """Size and direction of what each source adds to a learner's gradient, at its present weights (one row a part).

    The batch counts as one mini-batch, the one after `updates_made` updates of the step. A part's objective is the sum
    over its rollouts, divided by the size of the whole batch, so that the parts add up to the gradient of an update.
    Rows: "own", then the other sources by name, then "kl" if beta > 0; with by="sign" each source once more by the sign
    of its advantages: "+", "-", "0".

    Columns: rollouts, clipped (rollouts); norm (ℓ2); cosine_own, cosine_total (with the gradient of the own rollouts, of
    all); share (inner product with the whole gradient / its squared norm: the shares add up to 1). A cosine or share is
    NaN where a gradient is zero. `attrs["norm"]` holds the norm of the whole gradient.

    Changes neither weights, nor optimiser, nor random state. Holds one float32 copy of the parameters a part.
    Raises ValueError for another `by`, and otherwise as `part_gradients`.
    """
    if by not in ("source", "sign"):
        raise ValueError(f"by={by!r}: it takes 'source' or 'sign'")
    # labels that sort into the order of the rows; own is a flag, since a partner may be called anything
    signs = ["+" if a > 0 else "-" if a < 0 else "0" for a in batch.advantages.tolist()]
    labels = [
        (not mine, r.source, ("+-0".index(sign) if by == "sign" else 0))
        for mine, r, sign in zip(batch.own.tolist(), batch.rollouts, signs, strict=True)
    ]
    parts = part_gradients(agent, batch, config, labels, updates_made=updates_made)
    penalty = parts.pop(KL, None)
    parts = dict(sorted(parts.items()))
    own = _sum([p.gradient for (peer, *_), p in parts.items() if not peer])
    names = [("own" if not peer else source, "+-0"[sign]) for peer, source, sign in parts]
    if penalty is not None:
        parts[KL], names = penalty, [*names, (KL, "")]
    return _table(names, list(parts.values()), own, by)


def part_gradients(
    agent: Agent, batch: Batch, config: Config, labels: Sequence[Hashable], *, updates_made: int = 0
) -> Mapping[Hashable, PartGradient]:
    """The gradient of each part of a batch; `labels` says for every rollout to which part it belongs.

    With beta > 0 the KL of the own rollouts is a part of its own, "kl". Otherwise as `gradient_parts`.

    Raises ValueError for a batch of another learner or without rollouts, for labels that are not one a rollout, for
    peer rollouts under a token-level ratio, and for beta > 0 after updates without; FloatingPointError if a gradient
    is not finite.
    """
    check_batch(agent, batch, config)
    if not len(batch):
        raise ValueError(f"agent {agent.name!r} has no rollout to learn from: {dict(batch.excluded)}")
    if len(labels) != len(batch):
        raise ValueError(f"{len(labels)} labels for {len(batch)} rollouts: need one a rollout")
    if config.beta > 0 and agent.reference is None and agent.updates:
        raise ValueError(f"agent {agent.name!r} has made {agent.updates} updates without beta; the KL needs its start")
    rows_of: dict[Hashable, list[int]] = {}
    for row, label in enumerate(labels):
        rows_of.setdefault(label, []).append(row)
    own_count, out, penalty = max(1, int(batch.own.sum())), {}, []
    for label, rows in rows_of.items():
        gradients, clipped = [], 0
        for micro in microbatches(*batch.tokens(rows), config.microbatch_tokens):
            with torch.enable_grad(), agent.on_device("weights", "reference"):
                # before its first update an agent is its own reference: a KL of zero
                objective, _, hit, kl = objective_of(agent, batch, [rows[i] for i in micro], updates_made, config)
                has_kl = kl is not None
                gradients = [_sum([*gradients, _flat(agent, objective.sum() / len(batch), keep=has_kl)])]
                if has_kl:
                    penalty = [_sum([*penalty, _flat(agent, -config.beta * kl.sum() / own_count)])]
            clipped += int(hit.sum())
        out[label] = PartGradient(gradients[0], len(rows), clipped)
    if config.beta > 0:
        out[KL] = PartGradient(penalty[0] if penalty else torch.zeros_like(gradients[0]), int(batch.own.sum()), 0)
    if bad := [label for label, part in out.items() if not part.gradient.isfinite().all()]:
        raise FloatingPointError(f"agent {agent.name!r}: the gradient of the parts {bad} is not finite")
    return out


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine between two gradients; NaN if one of them is zero.

    >>> cosine(torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0]))
    0.6
    """
    norms = (_dot(a, a) * _dot(b, b)) ** 0.5
    return _dot(a, b) / norms if norms > 0 else float("nan")


def _dot(a: Tensor, b: Tensor) -> float:
    """Inner product in float64, since millions of float32 terms lose digits; by pieces, to need little memory."""
    return sum(float(x.double() @ y.double()) for x, y in zip(a.split(2**22), b.split(2**22), strict=True))


def _flat(agent: Agent, objective: Tensor, *, keep: bool = False) -> Tensor:
    """∇ objective over all trainable parameters; `p.grad`, which belongs to the optimiser, is left alone."""
    parameters = [p for p in agent.model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(objective, parameters, retain_graph=keep, materialize_grads=True, allow_unused=True)
    return torch.cat([g.flatten().to(torch.promote_types(g.dtype, torch.float32)) for g in gradients])


def _sum(gradients: Sequence[Tensor]) -> Tensor | None:
    total = None
    for gradient in gradients:
        total = gradient if total is None else total + gradient
    return total


def _table(names, parts: Sequence[PartGradient], own: Tensor | None, by: str) -> pd.DataFrame:
    import pandas as pd

    total = _sum([p.gradient for p in parts])
    square = _dot(total, total)
    own = torch.zeros_like(total) if own is None else own
    rows = [
        {
            "rollouts": p.rollouts, "clipped": p.clipped, "norm": _dot(p.gradient, p.gradient) ** 0.5,
            "cosine_own": cosine(p.gradient, own), "cosine_total": cosine(p.gradient, total),
            "share": _dot(p.gradient, total) / square if square > 0 else float("nan"),
        }
        for p in parts
    ]  # fmt: skip
    index = (
        pd.Index([name for name, _ in names], name="part")
        if by == "source"
        else pd.MultiIndex.from_tuples(names, names=["part", "sign"])
    )
    frame = pd.DataFrame(rows, index=index)
    frame.attrs["norm"] = square**0.5
    return frame
