"""The gradient of a learner's objective, divided into parts that add up: which source contributes how much."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
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

KL = "kl"  # the part of the KL to the initial policy, if beta > 0


class PartGradient(NamedTuple):
    """The gradient of one part of the objective; a step along it increases the objective."""

    gradient: Float[Tensor, "parameter"]  # all trainable parameters in one row, in float32 or float64
    rollouts: int
    clipped: int  # rollouts without a gradient because of clipping (token level: for at least one token)


def gradient_parts(
    agent: Agent, batch: Batch, config: Config, *, updates_made: int = 0, by: str = "source"
) -> pd.DataFrame:
    """Return how much each source contributes to a learner's gradient at its present weights, one row per part.

    The whole batch counts as one mini-batch, after `updates_made` updates of the step. Rows: "own", the peers by name, and
    "kl" if beta > 0; by="sign" divides each source by the sign of the advantage: "+", "-", "0".

    Columns: rollouts, clipped (rollouts); norm (ℓ2); cosine_own, cosine_total (with the gradient of the own rollouts, of all
    rollouts); share (inner product with the whole gradient, divided by its squared norm; shares add up to 1). A cosine or
    share with a zero gradient is NaN. `attrs["norm"]` is the norm of the whole gradient.

    Changes neither weights, optimiser nor random state. Needs one float32 copy of the parameters per part.

    Raises ValueError for another `by`, and otherwise as `part_gradients`.
    """
    import pandas as pd

    if by not in ("source", "sign"):
        raise ValueError(f"by={by!r}: use 'source' or 'sign'")
    signs = torch.where(batch.advantages < 0, 1, torch.where(batch.advantages > 0, 0, 2)).tolist()  # "+", "-", "0"
    rows = zip(batch.own.tolist(), batch.rollouts, signs, strict=True)
    labels = [(not own, r.source, sign if by == "sign" else 0) for own, r, sign in rows]
    parts = part_gradients(agent, batch, config, labels, updates_made=updates_made)
    order = sorted(label for label in parts if label != KL) + [KL] * (KL in parts)
    names = [(KL, "") if label == KL else (label[1] if label[0] else "own", "+-0"[label[2]]) for label in order]
    own = np.array([label != KL and not label[0] for label in order])
    gradients = [parts[label].gradient for label in order]
    # inner products of all pairs of parts; sums of parts follow from them
    products = np.array([[_dot(a, b) for b in gradients] for a in gradients])
    norms, with_total, total = np.sqrt(np.diag(products)), products.sum(1), products.sum()
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN
        columns = {
            "rollouts": [parts[label].rollouts for label in order],
            "clipped": [parts[label].clipped for label in order],
            "norm": norms,
            "cosine_own": products[:, own].sum(1) / (norms * np.sqrt(products[np.ix_(own, own)].sum())),
            "cosine_total": with_total / (norms * np.sqrt(total)),
            "share": with_total / total,
        }
    index = pd.MultiIndex.from_tuples(names, names=["part", "sign"])
    frame = pd.DataFrame(columns, index=index if by == "sign" else index.droplevel("sign"))
    frame.attrs["norm"] = float(np.sqrt(total))
    return frame


def part_gradients(
    agent: Agent, batch: Batch, config: Config, labels: Sequence[Hashable], *, updates_made: int = 0
) -> Mapping[Hashable, PartGradient]:
    """Return the gradient of each part of a batch; `labels` has the part of every rollout.

    A part's objective is the sum over its rollouts, divided by the size of the whole batch, so that the parts add up to the
    gradient of an update. With beta > 0 the KL of the own rollouts is the part "kl".

    Raises ValueError for a batch of another learner or without rollouts, for a wrong number of labels, for peer rollouts
    with a token-level ratio, and for beta > 0 after updates without it; FloatingPointError for a gradient that is not finite.
    """
    check_batch(agent, batch, config)
    if not len(batch):
        raise ValueError(f"the batch of agent {agent.name!r} has no rollouts; excluded are {dict(batch.excluded)}")
    if len(labels) != len(batch):
        raise ValueError(f"{len(labels)} labels for {len(batch)} rollouts; give one label per rollout")
    if config.beta > 0 and agent.reference is None and agent.updates:
        raise ValueError(
            f"agent {agent.name!r} has made {agent.updates} updates without beta; the KL needs its initial policy"
        )
    rows_of: dict[Hashable, list[int]] = {}
    for row, label in enumerate(labels):
        rows_of.setdefault(label, []).append(row)
    own_count, parts, of_kl = int(batch.own.sum()), {}, 0.0
    for label, rows in rows_of.items():
        gradient, clipped = 0.0, 0
        for micro in microbatches(*batch.tokens(rows), config.microbatch_tokens):
            with torch.enable_grad(), agent.on_device("weights", "reference"):
                # before its first update an agent is its own reference, with a KL of 0
                objective, _, hit, kl = objective_of(agent, batch, [rows[i] for i in micro], updates_made, config)
                gradient += _gradient(agent, objective.sum() / len(batch), keep=kl is not None)
                if kl is not None:
                    of_kl += _gradient(agent, -config.beta * kl.sum() / own_count)
            clipped += int(hit.sum())
        parts[label] = PartGradient(gradient, len(rows), clipped)
    if config.beta > 0:
        parts[KL] = PartGradient(torch.zeros_like(gradient) + of_kl, own_count, 0)
    if bad := [label for label, part in parts.items() if not part.gradient.isfinite().all()]:
        raise FloatingPointError(f"agent {agent.name!r}: the gradients of the parts {bad} are not finite")
    return parts


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of two gradients; NaN if one of them is zero.

    >>> cosine(torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0]))
    0.6
    """
    norms = (_dot(a, a) * _dot(b, b)) ** 0.5
    return _dot(a, b) / norms if norms > 0 else float("nan")


def _dot(a: Tensor, b: Tensor) -> float:
    """Return the inner product in float64, since a sum of millions of float32 terms is inexact; in pieces, to save memory."""
    return sum(float(x.double() @ y.double()) for x, y in zip(a.split(2**22), b.split(2**22), strict=True))


def _gradient(agent: Agent, objective: Tensor, *, keep: bool = False) -> Tensor:
    """Return ∇ objective over all trainable parameters, without touching the optimiser's `p.grad`."""
    parameters = [p for p in agent.model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(objective, parameters, retain_graph=keep, materialize_grads=True, allow_unused=True)
    return torch.cat([g.flatten().to(torch.promote_types(g.dtype, torch.float32)) for g in gradients])
