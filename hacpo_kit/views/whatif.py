"""What other settings would have made of recorded experience: advantages, weights and clips again, without a model.

The rollouts and their log-probabilities stay as they were recorded. Other settings would also have moved the weights
otherwise, and with them everything later: this shows one step, all else equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from hacpo_kit.advantages import capability_ratio, group_advantages, solved_prompts
from hacpo_kit.config import Config
from hacpo_kit.objective import lower_bound, sequence_objective
from hacpo_kit.runs.experience import Experience

if TYPE_CHECKING:
    import pandas as pd

# the settings that only weigh what was sampled and scored; any other would have changed the record itself
WEIGHING = (
    "window", "capability_baseline", "binary_guard", "cross_baseline", "discrepancy", "exclude_solved", "sources",
    "peer_update", "alpha", "delta", "delta_step", "eps_low", "eps_high",
)  # fmt: skip
NAMES = ("method",)  # says nothing by itself


@dataclass(frozen=True, eq=False)
class WhatIf:
    """One learner's rollouts as some settings weigh them; arrays have one entry for each rollout that it used."""

    learner: str
    config: Config
    updates_made: int | None  # all rollouts judged after so many updates; None: each in its own mini-batch
    capability: dict[str, float]  # P̂ of each agent
    row: Int[np.ndarray, "rollout"]  # row in `Experience.of_learner(learner)`
    names: tuple[str, ...]  # of the sources: the learner, then the others by name
    of: Int[np.ndarray, "rollout"]  # place of its source in `names`
    own: Bool[np.ndarray, "rollout"]
    minibatch: Int[np.ndarray, "rollout"]  # m when it was used
    reward: Float[np.ndarray, "rollout"]
    ratio: Float[np.ndarray, "rollout"]
    advantage: Float[np.ndarray, "rollout"]
    weight: Float[np.ndarray, "rollout"]  # ω(source, learner), 1 for own rollouts
    lower: Float[np.ndarray, "rollout"]  # lower bound of the band that judged it
    clipped: Bool[np.ndarray, "rollout"]
    pull: Float[np.ndarray, "rollout"]  # ∂ objective / ∂ mean_t log π, were |A| = 1; negative where A < 0

    @property
    def coefficient(self) -> Float[np.ndarray, "rollout"]:
        """∂ objective / ∂ mean_t log π of each rollout: how hard, and which way, its text pulls at the learner.

        In the band it is s^(1+α)·ω·A for a peer rollout and s·A for an own one; where the clip is active it is 0.
        """
        return self.pull * np.abs(self.advantage)

    @property
    def source(self) -> np.ndarray:
        """Name of each rollout's source."""
        return np.array(self.names, object)[self.of]

    def to_frame(self) -> pd.DataFrame:
        """One row a rollout, with the columns of this record."""
        import pandas as pd

        names = ("source", "own", "minibatch", "reward", "ratio", "advantage", "weight", "lower", "clipped")
        frame = pd.DataFrame({name: getattr(self, name) for name in names}, index=self.row)
        return frame.assign(coefficient=self.coefficient)

    def shares(self) -> pd.DataFrame:
        """Each source's share of Σ|∂ objective / ∂ mean_t log π|: `up` from A > 0, `down` from A < 0; all add up to 1.

        It is the source's share of the gradient if every rollout's ∇ mean_t log π is as long and points its own way; what
        the gradients really add up to, only the model can say (`gradients.gradient_parts`). All 0 without any gradient.
        """
        import pandas as pd

        c, count = self.coefficient.astype(np.float64), len(self.names)
        parts = {
            way: np.bincount(self.of, np.clip(sign * c, 0, None), count) for way, sign in (("up", 1), ("down", -1))
        }
        total = np.abs(c).sum()
        frame = pd.DataFrame(parts, index=pd.Index(self.names, name="source"))
        return frame / total if total > 0 else frame * 0.0

    def clip_fractions(self) -> pd.DataFrame:
        """Share of the rollouts without gradient by mini-batch: own, and peer ones too low or too high; NaN: none there."""
        import pandas as pd

        low, high = self.clipped & (self.ratio < 1), self.clipped & (self.ratio > 1)
        columns = {"own": (self.clipped, self.own), "peer low": (low, ~self.own), "peer high": (high, ~self.own)}
        count = int(self.minibatch.max(initial=-1)) + 1
        out = {}
        for name, (hit, whose) in columns.items():
            of = np.bincount(self.minibatch[whose], minlength=count)
            with np.errstate(invalid="ignore"):
                out[name] = np.bincount(self.minibatch[whose & hit], minlength=count) / of
        return pd.DataFrame(out, index=pd.RangeIndex(count, name="m"))


class Replay:
    """One learner's recorded rollouts, ready to be weighed again and again.

    `Replay(experience, learner).at(config)` is what training recorded if nothing in the config is changed.

    Raises ValueError for a name that is no learner's, a learner that used no rollout, ratios that are not finite, and for
    token-level ratios.
    """

    def __init__(self, experience: Experience, learner: str | None = None):
        self.experience = experience
        if not experience.learners:
            raise ValueError("this experience has no learner: its table is empty")
        self.learner = learner = experience.learners[0] if learner is None else learner
        self.frame = experience.of_learner(learner)
        if experience.config.ratio != "sequence":
            raise ValueError(
                f"method {experience.config.method!r} clips token by token, and the record has one ratio a rollout: "
                "it cannot be weighed again"
            )
        self.used = np.flatnonzero(self.frame["minibatch"].notna())
        if not len(self.used):
            reasons = self.frame["excluded"].value_counts().to_dict()
            raise ValueError(f"agent {learner!r} used none of the {len(self.frame)} rollouts of this step: {reasons}")
        kept = self.frame.iloc[self.used]
        self.own = kept["own"].to_numpy(bool)
        others = sorted(set(kept["source"]) - {learner})
        self.names = (learner, *others)
        self.of = kept["source"].map({name: i for i, name in enumerate(self.names)}).to_numpy(np.int64)
        self.minibatch = kept["minibatch"].to_numpy(np.int64)
        self.ratio, self.reward = kept["ratio"].to_numpy(np.float32), kept["reward"].to_numpy(np.float64)
        if bad := int((~np.isfinite(self.ratio)).sum()):
            raise ValueError(
                f"{bad} importance ratios of learner {learner!r} are not finite: its weights have diverged"
            )
        scored = np.flatnonzero(self.frame["reward"].notna())
        self._groups = _Groups(self.frame.iloc[scored], learner)
        self._of_used = np.searchsorted(scored, self.used)  # the used ones are all scored
        # moving α or δ does not change the advantages: the last few stay at hand
        self._advantages = lru_cache(16)(self._advantages_now)

    def at(self, config: Config | None = None, *, updates_made: int | None = None) -> WhatIf:
        """The rollouts as `config` weighs them, by default that of the record.

        `updates_made`: all rollouts are judged by the band after so many updates; None judges each in its own mini-batch.

        Raises ValueError for settings that would have changed the record itself (named) and for `updates_made` that count
        nothing, KeyError if an agent has no capability within the window.
        """
        counts = isinstance(updates_made, (int, np.integer)) and not isinstance(updates_made, bool)
        if updates_made is not None and not (counts and updates_made >= 0):
            raise ValueError(f"updates_made={updates_made!r}: it takes a whole number of updates, 0 or more, or None")
        config = self.experience.config if config is None else config
        _check_weighing(self.experience.config, config)
        capability = replace(self.experience.capability, window=config.window)
        needed = config.sources == "all" and (config.discrepancy or config.capability_baseline)
        for name in self.names if needed and len(self.names) > 1 else ():
            capability[name]  # an agent that has none is told with the reason
        advantage = self._advantages(*(getattr(config, name) for name in _Groups.SETTINGS))[self._of_used]
        # ω(j, k) of each source, 1 for the learner itself
        peer = self.names[1:] if config.discrepancy and config.sources == "all" else ()
        omega = [capability_ratio(capability, name, self.learner) if name in peer else 1.0 for name in self.names]
        weight = np.array(omega, np.float32)[self.of]
        keep = self.own if config.sources == "own" else np.ones(len(self.own), bool)
        judged = self.minibatch if updates_made is None else np.full_like(self.minibatch, updates_made)
        lower, clipped, pull = self._judge(config, judged, advantage, weight)
        columns = {
            "row": self.used, "of": self.of, "own": self.own, "minibatch": self.minibatch, "reward": self.reward,
            "ratio": self.ratio, "advantage": advantage, "weight": weight, "lower": lower, "clipped": clipped, "pull": pull,
        }  # fmt: skip
        known = {name: capability[name] for name in capability.history if name in capability}
        kept = {name: values[keep] for name, values in columns.items()}
        return WhatIf(self.learner, config, updates_made, known, names=self.names, **kept)

    def _judge(self, config: Config, judged: np.ndarray, advantage: np.ndarray, weight: np.ndarray):
        """Band, clip and pull of every rollout, by the objective that training maximises."""
        lower, clipped = np.empty(len(judged)), np.empty(len(judged), bool)
        pull = np.empty(len(judged), np.float32)
        # the objective is proportional to |A|: with its sign alone, also a rollout with A = 0 shows how it would pull
        sign = np.where(advantage < 0, -1, 1).astype(np.float32)
        made, place = np.unique(judged, return_inverse=True)
        bounds = np.array([lower_bound(int(m), config) for m in made])
        for bound in np.unique(bounds):  # mini-batches with one band are judged together
            m = int(made[np.flatnonzero(bounds == bound)[0]])
            rows = np.flatnonzero(bounds[place] == bound)
            s = torch.from_numpy(self.ratio[rows]).requires_grad_()
            tensors = [torch.from_numpy(x[rows]) for x in (sign, weight, self.own)]
            objective, _ = sequence_objective(s, *tensors, m, config)
            (slope,) = torch.autograd.grad(objective.sum(), s)
            # ∂/∂ mean_t log π = s · ∂/∂s, since s = exp(mean_t log π − …)
            pull[rows] = (slope * s.detach()).numpy()
            with torch.no_grad():
                actual = [torch.from_numpy(x[rows]) for x in (advantage, weight, self.own)]
                clipped[rows] = sequence_objective(s, *actual, m, config)[1].numpy()
            lower[rows] = bound
        return lower, clipped, pull

    def _advantages_now(self, *settings: Any) -> np.ndarray:
        return self._groups.advantages(self.experience.capability, **dict(zip(_Groups.SETTINGS, settings, strict=True)))


class _Groups:
    """The prompts of a learner. Those with the same rewards from the same sources have the same advantages: worked out once."""

    SETTINGS = ("window", "sources", "capability_baseline", "binary_guard", "cross_baseline", "exclude_solved")

    def __init__(self, scored: pd.DataFrame, learner: str):
        self.learner, self.count = learner, len(scored)
        self.source, self.problem = scored["source"].to_numpy(object), scored["problem"].to_numpy(object)
        self.reward = scored["reward"].to_numpy(np.float64)
        self._layouts: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # by the setting `sources`

    def _layout(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows in the order of prompt, source and reward; one prompt for each pattern; place of every row in those."""
        problem = np.unique(self.problem[rows].astype(str), return_inverse=True)[1]
        source = np.unique(self.source[rows].astype(str), return_inverse=True)[1]
        order = np.lexsort((self.reward[rows], source, problem))
        starts = np.flatnonzero(np.diff(problem[order], prepend=-1))
        first: dict[bytes, int] = {}  # pattern → where its prompt starts among the representatives
        chosen, place, size = [], [], 0
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            part = order[start:end]
            pattern = source[part].tobytes() + self.reward[rows][part].tobytes()
            if pattern not in first:
                first[pattern] = size
                chosen.append(part)
                size += len(part)
            place.append(first[pattern] + np.arange(len(part)))
        return rows[order], rows[np.concatenate(chosen)], np.concatenate(place)

    def advantages(self, capability, *, window, sources, exclude_solved, **how) -> np.ndarray:
        """A of every scored rollout (eqs. 6-7); NaN for those whose source does not count."""
        rows = np.flatnonzero(self.source == self.learner) if sources == "own" else np.arange(self.count)
        if sources not in self._layouts:
            self._layouts[sources] = self._layout(rows)
        ordered, chosen, place = self._layouts[sources]
        reward, problem, source = self.reward[chosen], self.problem[chosen].tolist(), self.source[chosen].tolist()
        a = group_advantages(
            torch.from_numpy(reward), problem, source, self.learner, replace(capability, window=window),
            equal_counts=False, **how,
        ).advantages.float().numpy()  # fmt: skip
        if exclude_solved:
            records = [
                SimpleNamespace(problem=p, source=s, reward=r) for p, s, r in zip(problem, source, reward, strict=True)
            ]
            a = np.where(np.isin(problem, list(solved_prompts(records, self.learner))), np.float32(0), a)
        out = np.full(self.count, np.nan, np.float32)
        out[ordered] = a[place]
        return out


def _check_weighing(recorded: Config, asked: Config) -> None:
    """Raises ValueError, naming them, for changed settings that would have changed the record itself."""
    changed = recorded.differences(asked)
    other = [f"{k}: {a!r} → {b!r}" for k, (a, b) in changed.items() if k not in (*WEIGHING, *NAMES)]
    if other:
        raise ValueError(
            f"with {'; '.join(other)} other rollouts or mini-batches would have been recorded; what can be changed afterwards: "
            f"{', '.join(WEIGHING)}"
        )
    if recorded.sources == "own" and asked.sources == "all":
        raise ValueError(
            "this learner used its own rollouts only: how it would have scored the others' is not recorded"
        )


__all__ = ["WEIGHING", "Replay", "WhatIf"]
