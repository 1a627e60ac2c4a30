"""Recompute advantages, weights and clipping of recorded rollouts under other settings, without a model.

Rollouts and log-probabilities stay as recorded. Training with the other settings would also have moved the weights
differently, so later ratios and later steps would differ: a what-if changes one step and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int

from hacpo_kit.advantages import capability_ratio, group_advantages
from hacpo_kit.config import Config, whole_number
from hacpo_kit.objective import lower_bound, sequence_objective
from hacpo_kit.runs.experience import Experience
from hacpo_kit.sharing import solved_prompts

ADVANTAGE_SETTINGS = ("window", "share", "exclude_solved", "capability_baseline", "binary_guard", "cross_baseline")
# settings that act after sampling and scoring; `method` is only a name
REPLAYABLE = (
    *ADVANTAGE_SETTINGS, "method", "discrepancy", "peer_update", "alpha", "delta", "delta_step", "eps_low", "eps_high",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class WhatIf:
    """The rollouts that one learner used, as some settings weight them; every array has one entry per rollout."""

    learner: str
    config: Config
    updates_made: int | None  # clipping range after this number of updates; None: that of each rollout's mini-batch
    capability: dict[str, float]  # P̂ of each agent
    row: Int[np.ndarray, "rollout"]  # row in `Experience.of_learner(learner)`
    source: np.ndarray  # name of the agent that sampled it
    own: Bool[np.ndarray, "rollout"]
    minibatch: Int[np.ndarray, "rollout"]  # m: updates made in the step before the rollout was used
    reward: Float[np.ndarray, "rollout"]
    ratio: Float[np.ndarray, "rollout"]  # s
    advantage: Float[np.ndarray, "rollout"]  # A
    weight: Float[np.ndarray, "rollout"]  # ω(source, learner), 1 for own rollouts
    lower: Float[np.ndarray, "rollout"]  # lower bound of the peer clipping range
    clipped: Bool[np.ndarray, "rollout"]  # no gradient
    coefficient: Float[np.ndarray, "rollout"]  # ∂ objective / ∂ mean_t log π: s^(1+α)·ω·A peer, s·A own, 0 clipped

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row per rollout and one column per array."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return pd.DataFrame(arrays).set_index("row")

    def shares(self) -> pd.DataFrame:
        """Return each source's share of Σ|coefficient|: column `up` for A > 0, `down` for A < 0; all zero without gradient.

        This is the source's share of the gradient if ∇ mean_t log π has the same norm for every rollout.
        `runs.gradients.gradient_parts` measures the actual gradients, for which it needs the models.
        """
        c = pd.Series(self.coefficient.astype(np.float64))
        parts = pd.DataFrame({"up": c.clip(lower=0), "down": -c.clip(upper=0)}).groupby(self.source).sum()
        return parts.rename_axis("source") / (c.abs().sum() or 1.0)

    def clip_fractions(self) -> pd.DataFrame:
        """Return the clipped share of each mini-batch: own rollouts, and peer rollouts below and above the range.

        NaN: the mini-batch has no such rollout.
        """
        low, high = self.clipped & (self.ratio < 1), self.clipped & (self.ratio > 1)
        columns = {"own": (self.clipped, self.own), "peer low": (low, ~self.own), "peer high": (high, ~self.own)}
        table = pd.DataFrame({name: np.where(kind, hit, np.nan) for name, (hit, kind) in columns.items()})
        return table.groupby(self.minibatch).mean().rename_axis("m")


class Replay:
    """The recorded rollouts of one learner, ready to be weighted with any settings.

    `Replay(experience, learner).at()` equals what training recorded.

    Raises ValueError for an unknown learner, for a learner that used no rollout, for ratios that are not finite, and for
    token-level ratios.
    """

    def __init__(self, experience: Experience, learner: str | None = None):
        if experience.config.ratio != "sequence":
            raise ValueError(
                f"method {experience.config.method!r} clips token by token, but the record has one ratio per rollout; "
                "replay a method with ratio='sequence'"
            )
        if not experience.learners:
            raise ValueError("this experience has no learner: its table is empty")
        self.experience = experience
        self.learner = experience.learners[0] if learner is None else learner
        self.frame = experience.of_learner(self.learner)
        reasons = self.frame["excluded"]
        self.excluded = reasons[reasons != ""].value_counts().to_dict()  # reason → rollouts
        self.used = np.flatnonzero(self.frame["minibatch"].notna())
        if not len(self.used):
            which = f"none of the {len(self.frame)} rollouts of this step"
            raise ValueError(f"agent {self.learner!r} used {which}: {self.excluded}")
        rows = self.frame.iloc[self.used]
        self.source, self.own = rows["source"].to_numpy(object), rows["own"].to_numpy(bool)
        self.minibatch, self.reward = rows["minibatch"].to_numpy(np.int64), rows["reward"].to_numpy(np.float64)
        self.ratio = rows["ratio"].to_numpy(np.float32)
        if bad := int((~np.isfinite(self.ratio)).sum()):
            raise ValueError(
                f"{bad} importance ratios of learner {self.learner!r} are not finite: its weights diverged"
            )
        self._advantages = lru_cache(16)(self._compute_advantages)  # α and δ do not change the advantages

    def at(self, config: Config | None = None, *, updates_made: int | None = None) -> WhatIf:
        """Return the rollouts as `config` weights them, by default the recorded settings.

        `updates_made` applies the clipping range after this number of updates to all rollouts. None applies to each
        rollout the range of its own mini-batch.

        Raises ValueError for settings that act before the record (named) and for an invalid `updates_made`, KeyError if an
        agent has no capability within the window.
        """
        config = self.experience.config if config is None else config
        _check_replayable(self.experience.config, config)
        if updates_made is not None:
            updates_made = whole_number("updates_made", updates_made, least=0)
        capability = replace(self.experience.capability, window=config.window)
        known = {name: capability[name] for name in capability if name in capability}
        keep = self.own | (config.share != "none")
        arrays = {name: getattr(self, name)[keep] for name in ("source", "own", "minibatch", "reward", "ratio")}
        advantage = self._advantages(**{name: getattr(config, name) for name in ADVANTAGE_SETTINGS})[self.used][keep]
        # ω(j, k) of each source j; 1 for the learner k
        peers = set(arrays["source"]) - {self.learner} if config.discrepancy else set()
        omega = {self.learner: 1.0} | {j: capability_ratio(capability, j, self.learner) for j in peers}
        weight = np.array([omega.get(j, 1.0) for j in arrays["source"]], np.float32)
        m = arrays["minibatch"] if updates_made is None else np.full(keep.sum(), updates_made)
        derived = _objective(config, m, arrays["ratio"], advantage, weight, arrays["own"])
        return WhatIf(
            self.learner, config, updates_made, known, self.used[keep], advantage=advantage, weight=weight, **arrays, **derived
        )  # fmt: skip

    def _compute_advantages(self, window: int, share: str, exclude_solved: bool, **settings) -> np.ndarray:
        """Return A of every row of `frame` (eqs. 6-7); NaN for a row without a reward or from a source that is not used."""
        scored = self.frame["reward"].notna() & (self.frame["own"] | (share != "none"))
        rows, capability = self.frame[scored], replace(self.experience.capability, window=window)
        rewards, problems, names = (rows[name].tolist() for name in ("reward", "problem", "source"))
        group = group_advantages(
            torch.tensor(rewards, dtype=torch.float64), problems, names, self.learner, capability, **settings
        )
        advantages = np.full(len(self.frame), np.nan, np.float32)
        advantages[scored] = group.advantages.float().numpy()
        if exclude_solved:
            solved = solved_prompts(list(rows.itertuples()), self.learner)
            advantages[scored & self.frame["problem"].isin(solved)] = 0.0
        return advantages


def _objective(config: Config, m, ratio, advantage, weight, own) -> dict[str, np.ndarray]:
    """Return `lower`, `clipped` and `coefficient` of every rollout, from the objective that training maximises."""
    counts, place = np.unique(m, return_inverse=True)
    lower = np.array([lower_bound(int(count), config) for count in counts])[place]
    clipped, coefficient = np.empty(len(m), bool), np.empty(len(m), np.float32)
    for bound in np.unique(lower):  # mini-batches with the same clipping range are evaluated together
        rows = np.flatnonzero(lower == bound)
        s = torch.from_numpy(ratio[rows]).requires_grad_()
        tensors = [torch.from_numpy(values[rows]) for values in (advantage, weight, own)]
        objective, hit = sequence_objective(s, *tensors, int(m[rows[0]]), config)
        (slope,) = torch.autograd.grad(objective.sum(), s)
        # ∂/∂ mean_t log π = s · ∂/∂s, because s = exp(mean_t log π − constant)
        coefficient[rows], clipped[rows] = (slope * s.detach()).numpy(), hit.numpy()
    return {"lower": lower, "clipped": clipped, "coefficient": coefficient}


def _check_replayable(recorded: Config, wanted: Config) -> None:
    """Raise ValueError, naming them, for changed settings that act before the record."""
    changed = [f"{k}: {a!r} → {b!r}" for k, (a, b) in recorded.differences(wanted).items() if k not in REPLAYABLE]
    if changed:
        raise ValueError(
            f"{'; '.join(changed)} would change the recorded rollouts or mini-batches; a replay can change only "
            f"{', '.join(REPLAYABLE)}"
        )
    if wanted.share not in (recorded.share, "none"):
        raise ValueError(
            f"share={wanted.share!r}: the record has the ratios of the rollouts that share={recorded.share!r} selected only"
        )
