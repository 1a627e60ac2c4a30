"""The data that the four verbs exchange: rollouts, the pool of all agents, a learner's batch, statistics of updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from hacpo_kit.config import Config
from hacpo_kit.tasks.boxes import last_box, reference_answer, same_text
from hacpo_kit.tasks.problems import Problem

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Rollout:
    """One response to one problem: its text, the source's tokens, and the source's log-probability of each token."""

    problem: str  # id of the problem
    source: str  # name of the agent that sampled it
    sample: int  # 0 … n−1 within problem and source
    text: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # as sampled; includes the end token, or the stop string, if the response ended
    logps: Float[np.ndarray, "token"]  # log π_source of each token at the sampling temperature (nats)
    ended: bool  # False: cut at the length limit
    hazard: str = ""  # why the text cannot be shared: "lossy_text" or "control_token"
    reward: float | None = None  # None: not scored yet, or unscorable
    status: str = "unscored"
    engine_logps: Float[np.ndarray, "token"] | None = None  # as reported by the sampling engine; a diagnostic only
    end_length: int = 1  # tokens of the end, if the response ended: more than 1 only for a stop string

    def mean_logp(self, count_eos: bool = True) -> float:
        """Return the mean log-probability of the tokens (nats per token), or NaN if no token counts."""
        counted = self.logps if count_eos or not self.ended else self.logps[: len(self.logps) - self.end_length]
        return float(np.mean(counted, dtype=np.float64)) if len(counted) else float("nan")

    def scored(self, reward: float | None, status: str) -> Rollout:
        """Return a copy with a reward and a status."""
        return replace(self, reward=reward, status=status)


def rollout_names(rollouts: Sequence[Rollout]) -> str:
    """Return problem, source and sample of the first eight rollouts, for an error message."""
    return "; ".join(f"{r.problem} by {r.source} #{r.sample}" for r in rollouts[:8])


@dataclass(frozen=True, eq=False, repr=False)
class Pool:
    """All rollouts of all agents for the same problems. Every learner builds its own batch from it."""

    rollouts: tuple[Rollout, ...]
    problems: tuple[Problem, ...]
    agents: tuple[str, ...]
    n: int  # rollouts per agent and problem
    temperature: float = 1.0
    updates: Mapping[str, int] = field(default_factory=dict)  # updates of each agent before it sampled
    seconds: Mapping[str, float] = field(default_factory=dict)  # wall time: seconds_rollout, seconds_scoring
    stored: tuple[str, ...] = ()  # agents whose rollouts were recorded before, which may have any number of them
    discarded: Mapping[str, int] = field(
        default_factory=dict
    )  # problems, rollouts, tokens that were sampled and left out

    def __repr__(self) -> str:
        agents = ", ".join(map(repr, self.agents))
        return f"Pool({len(self)} rollouts of {agents}; {len(self.problems)} problems, n={self.n})"

    def __len__(self) -> int:
        return len(self.rollouts)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    @cached_property
    def by_source(self) -> dict[str, list[Rollout]]:
        """The rollouts of each agent."""
        groups: dict[str, list[Rollout]] = {name: [] for name in self.agents}
        for rollout in self.rollouts:
            groups[rollout.source].append(rollout)
        return groups

    def problem(self, id: str) -> Problem:
        """Return the problem with this id."""
        return self._problems[id]

    @cached_property
    def _problems(self) -> dict[str, Problem]:
        return {p.id: p for p in self.problems}

    @property
    def informative_problem(self) -> int:
        """Position of the first problem whose rewards differ; 0 if there is none."""
        rewards: dict[str, set[float | None]] = {}
        for r in self.rollouts:
            rewards.setdefault(r.problem, set()).add(r.reward)
        return next((i for i, p in enumerate(self.problems) if len(rewards[p.id]) > 1), 0)

    @property
    def sampled(self) -> int:
        """Number of rollouts that were sampled for this pool."""
        return sum(r.source not in self.stored for r in self.rollouts) + self.discarded.get("rollouts", 0)

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(r.token_ids) for r in self.rollouts) + self.discarded.get("tokens", 0)

    def with_rewards(self, rewards: Sequence[float | None], statuses: Sequence[str]) -> Pool:
        """Return a copy with a reward and a status for every rollout; the reward None marks an unscorable one.

        Raises ValueError for a wrong number of rewards or statuses, and for a reward that is not finite.
        """
        if not len(rewards) == len(statuses) == len(self.rollouts):
            raise ValueError(f"{len(self.rollouts)} rollouts, {len(rewards)} rewards, {len(statuses)} statuses")
        verdicts = list(zip(self.rollouts, rewards, statuses, strict=True))
        if bad := [r for r, reward, _ in verdicts if reward is not None and not np.isfinite(reward)]:
            raise ValueError(
                f"rewards of {len(bad)} rollouts are not finite ({rollout_names(bad)}); use None for an unscorable rollout"
            )
        return replace(self, rollouts=tuple(r.scored(reward, status) for r, reward, status in verdicts))

    def restricted_to(self, source: str) -> Pool:
        """Return the pool of one agent's rollouts."""
        return replace(self, rollouts=tuple(self.by_source[source]), agents=(source,), stored=())

    def with_mixed_rewards(self) -> Pool:
        """Return the pool of the problems on which the own rewards of some agent differ; the others are discarded."""
        rewards: dict[tuple[str, str], set[float]] = {}
        for r in self.rollouts:
            if r.reward is not None:
                rewards.setdefault((r.problem, r.source), set()).add(r.reward)
        mixed = {problem for (problem, _), different in rewards.items() if len(different) > 1}
        kept = [r for r in self.rollouts if r.problem in mixed]
        discarded = {
            "problems": len(self.problems) - len(mixed),
            "rollouts": len(self.rollouts) - len(kept),
            "tokens": sum(len(r.token_ids) for r in self.rollouts if r.problem not in mixed),
        }
        problems = tuple(p for p in self.problems if p.id in mixed)
        return replace(self, rollouts=tuple(kept), problems=problems, discarded=discarded)

    def extended(self, other: Pool) -> Pool:
        """Return the pool with the problems and rollouts of another pool of the same agents."""
        counts = Counter(self.discarded) + Counter(other.discarded)
        seconds = {name: value + other.seconds.get(name, 0.0) for name, value in self.seconds.items()}
        rollouts, problems = (*self.rollouts, *other.rollouts), (*self.problems, *other.problems)
        return replace(self, rollouts=rollouts, problems=problems, seconds=seconds, discarded=dict(counts))

    def check_complete(self) -> None:
        """Raise ValueError, with problem and agent, unless every agent has n rollouts for every problem."""
        counts = Counter((r.problem, r.source) for r in self.rollouts)
        for problem in self.problems:
            for agent in (name for name in self.agents if name not in self.stored):
                if (count := counts[problem.id, agent]) != self.n:
                    raise ValueError(f"problem {problem.id!r} has {count} rollouts of agent {agent!r}, need {self.n}")

    def distinct(self) -> pd.DataFrame:
        """Return the numbers of different texts and boxed answers per problem and agent; no box is the answer "(none)"."""
        frame = self.to_frame()
        frame["answer"] = [last_box(text) or "(none)" for text in frame["text"]]
        columns = {"texts": ("text", "nunique"), "answers": ("answer", "nunique"), "rollouts": ("text", "size")}
        return frame.groupby(["problem", "source"], sort=False).agg(**columns).reset_index()

    def metrics(self, agent: str) -> dict[str, float]:
        """Return statistics of one agent's rollouts; names as in `runs.metrics`."""
        rollouts = self.by_source[agent]
        rewards: dict[str, set[float]] = {}  # different ones of each problem
        answers: dict[str, set[str]] = {}
        for r in rollouts:
            answers.setdefault(r.problem, set()).add(last_box(r.text) or "(none)")
            if r.reward is not None:
                rewards.setdefault(r.problem, set()).add(r.reward)
        statuses = Counter(r.status for r in rollouts)
        means = {
            "reward": [r.reward for r in rollouts if r.reward is not None],
            "length": [len(r.token_ids) for r in rollouts],
            "share_hazard": [bool(r.hazard) for r in rollouts],
            "share_cut": [not r.ended for r in rollouts],
            "share_disputed": [disputed(r.text, self.problem(r.problem).gold, r.status) for r in rollouts],
            "distinct_answers": [len(different) for different in answers.values()],
            "equal_reward_prompts": [len(different) == 1 for different in rewards.values()],
            "all_fail_prompts": [max(different) < 1 for different in rewards.values()],
            "all_correct_prompts": [min(different) >= 1 for different in rewards.values()],
            # E[−log π] over sampled tokens
            "entropy": -np.concatenate([r.logps for r in rollouts], dtype=np.float64),
        }
        return {
            **{name: float(np.mean(values)) for name, values in means.items() if len(values)},
            **{f"status_{status}": count / len(rollouts) for status, count in sorted(statuses.items())},
            **engine_gap(rollouts),
        }

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row per rollout: problem, source, text, reward, status, length, mean_logp and others."""
        import pandas as pd

        rows = [
            {
                "problem": r.problem, "prompt": self.problem(r.problem).prompt, "gold": self.problem(r.problem).gold,
                "source": r.source, "sample": r.sample, "text": r.text, "reward": r.reward, "status": r.status,
                "length": len(r.token_ids), "mean_logp": r.mean_logp(), "ended": r.ended, "hazard": r.hazard,
            }
            for r in self.rollouts
        ]  # fmt: skip
        return pd.DataFrame(rows)


def disputed(text: str, gold: str, status: str) -> bool:
    r"""Return whether the verdict differs from a plain comparison of the boxed answer and the gold as texts.

    The verifier accepts 0.5 for 1/2, which is no mistake. A wrong verdict on equal texts needs a check.

    >>> disputed(r"\boxed{0.5}", r"\frac{1}{2}", "correct"), disputed(r"\boxed{7}", "7", "correct")
    (True, False)
    """
    return status != "unscored" and (status == "correct") != same_text(last_box(text), reference_answer(gold))


def engine_gap(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return mean and maximum |Δ log-probability| between engine and trainer (nats); empty without engine values."""
    gaps = [np.abs(r.engine_logps - r.logps) for r in rollouts if r.engine_logps is not None]
    if not gaps:
        return {}
    gap = np.concatenate(gaps)
    return {"engine_gap_mean": float(gap.mean(dtype=np.float64)), "engine_gap_max": float(gap.max())}


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """One learner's view of a pool: all usable rollouts in the learner's tokens, with advantages and weights."""

    learner: str
    prompt_ids: tuple[tuple[int, ...], ...]
    response_ids: tuple[tuple[int, ...], ...]
    source_mean_logp: Float[Tensor, "rollout"]
    advantages: Float[Tensor, "rollout"]
    weights: Float[Tensor, "rollout"]  # ω(source, learner); 1 for own rollouts
    own: Bool[Tensor, "rollout"]
    index: tuple[int, ...]  # position of each rollout in the pool
    pool: Pool
    excluded: Mapping[str, int] = field(default_factory=dict)  # reason → number of rollouts
    solved_prompts: int = 0  # problems whose advantages are 0 because of exclude_solved

    def __repr__(self) -> str:
        excluded = f", excluded {dict(self.excluded)}" if self.excluded else ""
        return f"Batch({len(self)} rollouts for {self.learner!r}, {int(self.own.sum())} of them own{excluded})"

    def __len__(self) -> int:
        return len(self.index)

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts of this batch, in its order."""
        return [self.pool.rollouts[i] for i in self.index]

    def tokens(self, rows: Sequence[int]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return prompts and responses of some rows, in the learner's tokens."""
        return [self.prompt_ids[i] for i in rows], [self.response_ids[i] for i in rows]

    def part(self, rows: Sequence[int]) -> Batch:
        """Return some rows as a batch, such as a mini-batch; counts of excluded rollouts stay with the whole."""
        rows = list(rows)
        columns = {
            name: tuple(getattr(self, name)[i] for i in rows) for name in ("prompt_ids", "response_ids", "index")
        }
        tensors = {name: getattr(self, name)[rows] for name in ("source_mean_logp", "advantages", "weights", "own")}
        return replace(self, **columns, **tensors, excluded={}, solved_prompts=0)


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """The inputs and results of one optimiser update; arrays have one entry per rollout."""

    updates_made: int  # m: updates of this learner earlier in the step
    lower: float  # lower bound of the clipping range of peer rollouts
    index: np.ndarray  # position in the pool
    own: Bool[np.ndarray, "rollout"]
    ratio: Float[np.ndarray, "rollout"]
    clipped: Bool[np.ndarray, "rollout"]
    advantages: Float[np.ndarray, "rollout"]
    weights: Float[np.ndarray, "rollout"]
    loss: float
    grad_norm: float  # before clipping to max_grad_norm
    lr: float
    kl: float | None  # nats per token, own rollouts; None without β or without own rollouts


_NO_ROWS = np.zeros(0, np.float32)
_NO_UPDATE = MiniBatch(
    0, 0.0, _NO_ROWS.astype(int), _NO_ROWS.astype(bool), _NO_ROWS, _NO_ROWS.astype(bool), _NO_ROWS, _NO_ROWS,
    loss=0.0, grad_norm=0.0, lr=0.0, kl=None,
)  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class StepStats:
    """All mini-batches of one learner's update."""

    learner: str
    minibatches: tuple[MiniBatch, ...]
    excluded: Mapping[str, int]
    sources: tuple[str, ...]  # source of each rollout of the pool: index → source
    moved: Mapping[str, float] = field(default_factory=dict)  # cost of offloading since the last update

    def __repr__(self) -> str:
        used = sum(len(mb.index) for mb in self.minibatches)
        return f"StepStats({self.learner!r}: {len(self.minibatches)} updates on {used} rollouts)"

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row per rollout: updates_made, source, own, ratio, clipped, advantage, weight, lower."""
        import pandas as pd

        frames = [
            pd.DataFrame(
                {
                    "learner": self.learner, "updates_made": mb.updates_made, "index": mb.index,
                    "source": [self.sources[i] for i in mb.index], "own": mb.own, "ratio": mb.ratio,
                    "clipped": mb.clipped, "advantage": mb.advantages, "weight": mb.weights, "lower": mb.lower,
                }
            )
            for mb in self.minibatches or [_NO_UPDATE]
        ]  # fmt: skip
        return pd.concat(frames, ignore_index=True)

    def metrics(self) -> dict[str, float]:
        """Return statistics of the whole update; names as in `runs.metrics`."""
        out: dict[str, float] = {"updates": len(self.minibatches)}
        if mbs := self.minibatches:
            own, ratio, clipped, weights = (
                np.concatenate([getattr(mb, name) for mb in mbs]) for name in ("own", "ratio", "clipped", "weights")
            )
            out |= {"rollouts_used": len(own), "loss": np.mean([mb.loss for mb in mbs])}
            out |= {"grad_norm": np.mean([mb.grad_norm for mb in mbs]), "lr": mbs[-1].lr}
            if kls := [(mb.kl, mb.own.sum()) for mb in mbs if mb.kl is not None]:
                out["kl"] = np.average([kl for kl, _ in kls], weights=[count for _, count in kls])
            known = np.isfinite(ratio)  # stored peers may have no log-probabilities
            for kind, rows in (("own", own & known), ("peer", ~own & known)):
                if rows.any():
                    s, hit = ratio[rows], clipped[rows]
                    out |= {f"{kind}_ratio_mean": s.mean(), f"{kind}_ratio_min": s.min(), f"{kind}_ratio_max": s.max()}
                    out |= {f"clip_{kind}_low": (hit & (s < 1)).mean(), f"clip_{kind}_high": (hit & (s > 1)).mean()}
            if (~own).any():
                out["peer_weight"] = weights[~own].mean()
        out |= {f"excluded_{reason}": count for reason, count in self.excluded.items()}
        return {name: float(value) for name, value in {**out, **self.moved}.items()}


@dataclass(frozen=True, eq=False, repr=False)
class StepResult:
    """Everything that one step produced."""

    pool: Pool
    capability: Mapping[str, float]  # an `advantages.Capability`
    batches: Mapping[str, Batch]
    stats: Mapping[str, StepStats]
    metrics: dict[str, Any]  # names as in `runs.metrics`
    config: Config  # the settings of this step

    def __repr__(self) -> str:
        return f"StepResult({self.pool!r}, {list(self.stats.values())!r})"
