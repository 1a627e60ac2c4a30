"""What travels between the stages: rollouts, the pool all agents share, a learner's batch, the statistics of an update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from hacpo_kit.tasks.problems import Problem
from hacpo_kit.tasks.verifier import last_box, same_text

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Rollout:
    """One answer: its text, the source's own tokens, and the source's log-probability of each of them."""

    problem: str  # id of the problem
    source: str  # name of the agent that wrote it
    sample: int  # 0 … n−1 within problem and source
    text: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # as sampled, with the end token if it ended by itself
    logps: Float[np.ndarray, "token"]  # log π_source of each token, at the sampling temperature
    ended: bool  # False: cut at the length limit
    hazard: str = ""  # why the text cannot be exchanged: "lossy_text" or "control_token"
    reward: float | None = None  # None: not scored, or not scorable
    status: str = "unscored"
    engine_logps: Float[np.ndarray, "token"] | None = None  # as the engine that sampled reports them; a diagnostic

    def mean_logp(self, count_eos: bool = True) -> float:
        """Mean log-probability over the rollout's own tokens (nats per token); NaN if no token is counted."""
        counted = self.logps if count_eos or not self.ended else self.logps[:-1]
        return float(np.mean(counted, dtype=np.float64)) if len(counted) else float("nan")

    def scored(self, reward: float | None, status: str) -> Rollout:
        """A copy with a reward and a status."""
        return replace(self, reward=reward, status=status)


def named(rollouts: Sequence[Rollout]) -> str:
    """The first eight rollouts by problem, source and sample, for an error."""
    return "; ".join(f"{r.problem} by {r.source} #{r.sample}" for r in rollouts[:8])


@dataclass(frozen=True, eq=False, repr=False)
class Pool:
    """All rollouts of all agents on the same problems; every learner builds its own view of it."""

    rollouts: tuple[Rollout, ...]
    problems: tuple[Problem, ...]
    agents: tuple[str, ...]
    n: int  # rollouts per agent and problem
    temperature: float = 1.0
    updates: Mapping[str, int] = field(default_factory=dict)  # how many each agent had made when it wrote

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
        """The problem with this id."""
        return self._problems[id]

    @cached_property
    def _problems(self) -> dict[str, Problem]:
        return {p.id: p for p in self.problems}

    @property
    def informative_problem(self) -> int:
        """Position of the first problem on which rewards differ, since on others nothing is learned; 0 if there is none."""
        rewards: dict[str, set[float | None]] = {}
        for r in self.rollouts:
            rewards.setdefault(r.problem, set()).add(r.reward)
        return next((i for i, p in enumerate(self.problems) if len(rewards[p.id]) > 1), 0)

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(r.token_ids) for r in self.rollouts)

    def with_rewards(self, rewards: Sequence[float | None], statuses: Sequence[str]) -> Pool:
        """A copy with a reward and a status for every rollout; the reward None means that it cannot be scored.

        Raises ValueError for lengths that disagree, and for a reward that is not finite (the rollout is named).
        """
        if not len(rewards) == len(statuses) == len(self.rollouts):
            raise ValueError(f"{len(self.rollouts)} rollouts, {len(rewards)} rewards, {len(statuses)} statuses")
        given = zip(self.rollouts, rewards, strict=True)
        bad = [r for r, v in given if v is not None and not np.isfinite(v)]
        if bad:
            raise ValueError(f"rewards of {len(bad)} rollouts are not finite ({named(bad)}); None: not scorable")
        scored = zip(self.rollouts, rewards, statuses, strict=True)
        return replace(self, rollouts=tuple(r.scored(v, s) for r, v, s in scored))

    def restricted_to(self, source: str) -> Pool:
        """The part of the pool that one agent wrote."""
        return replace(self, rollouts=tuple(self.by_source[source]), agents=(source,))

    def check_complete(self) -> None:
        """Raises ValueError, naming problem and agent, unless every agent answered every problem n times."""
        counts = Counter((r.problem, r.source) for r in self.rollouts)
        for problem in self.problems:
            for agent in self.agents:
                if (have := counts[problem.id, agent]) != self.n:
                    raise ValueError(f"problem {problem.id!r} has {have} rollouts of agent {agent!r}, need {self.n}")

    def distinct(self) -> pd.DataFrame:
        """How many different texts and different boxed answers each agent gave to each problem.

        An answer without a box counts as the answer "(none)".
        """
        frame = self.to_frame()
        frame["answer"] = [last_box(text) or "(none)" for text in frame["text"]]
        columns = {"texts": ("text", "nunique"), "answers": ("answer", "nunique"), "rollouts": ("text", "size")}
        return frame.groupby(["problem", "source"], sort=False).agg(**columns).reset_index()

    def metrics(self, agent: str) -> dict[str, float]:
        """What one agent's rollouts look like; names as in `METRICS`."""
        mine = self.by_source[agent]
        scored = [r.reward for r in mine if r.reward is not None]
        statuses = Counter(r.status for r in mine)
        answers: dict[
            str, set[str]
        ] = {}  # as `distinct` has them, without a table, which takes longer than the rest together
        for r in mine:
            answers.setdefault(r.problem, set()).add(last_box(r.text) or "(none)")
        equal = _equal_reward_share(mine)
        out = {
            "reward": float(np.mean(scored)) if scored else None,
            "length": float(np.mean([len(r.token_ids) for r in mine])),
            "share_hazard": float(np.mean([bool(r.hazard) for r in mine])),
            "share_cut": float(np.mean([not r.ended for r in mine])),
            "share_disputed": float(np.mean([disputed(r.text, self.problem(r.problem).gold, r.status) for r in mine])),
            "distinct_answers": float(np.mean([len(some) for some in answers.values()])),
            "equal_reward_prompts": equal,
            **{f"status_{status}": count / len(mine) for status, count in sorted(statuses.items())},
            **engine_gap(mine),
        }
        return {name: value for name, value in out.items() if value is not None}

    def to_frame(self) -> pd.DataFrame:
        """One row a rollout: problem, prompt, gold, source, sample, text, reward, status, length, mean_logp, ended, hazard."""
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
    r"""Whether a verdict differs from a second opinion: is the boxed answer the same text as the gold?

    Paid though the texts differ, as 0.5 for 1/2, is what the verifier is for. Not paid though they are equal deserves a look.

    >>> disputed(r"\boxed{0.5}", r"\frac{1}{2}", "correct"), disputed(r"\boxed{7}", "7", "correct")
    (True, False)
    """
    return status != "unscored" and (status == "correct") != same_text(last_box(text), gold)


def engine_gap(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's, |Δ| over all tokens (nats); empty if no engine reported any."""
    gaps = [np.abs(r.engine_logps - r.logps) for r in rollouts if r.engine_logps is not None]
    if not gaps:
        return {}
    every = np.concatenate(gaps)
    return {"engine_gap_mean": float(every.mean(dtype=np.float64)), "engine_gap_max": float(every.max())}


def _equal_reward_share(rollouts: Sequence[Rollout]) -> float | None:
    """Share of problems whose scored rewards are all equal: they give the agent, alone, no gradient."""
    groups: dict[str, set[float]] = {}
    for r in rollouts:
        if r.reward is not None:
            groups.setdefault(r.problem, set()).add(r.reward)
    return float(np.mean([len(values) == 1 for values in groups.values()])) if groups else None


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """One learner's view of a pool: everything in the learner's own tokens, with advantages and weights."""

    learner: str
    prompt_ids: tuple[tuple[int, ...], ...]
    response_ids: tuple[tuple[int, ...], ...]
    source_mean_logp: Float[Tensor, "rollout"]
    advantages: Float[Tensor, "rollout"]
    weights: Float[Tensor, "rollout"]  # ω(source, learner), 1 for own rollouts
    own: Bool[Tensor, "rollout"]
    index: tuple[int, ...]  # position of each rollout in the pool
    pool: Pool
    excluded: Mapping[str, int] = field(default_factory=dict)  # reason → rollouts
    solved_prompts: int = 0  # problems whose advantages are zero because the learner has solved them (exclude_solved)

    def __repr__(self) -> str:
        out = f", left out {dict(self.excluded)}" if self.excluded else ""
        return f"Batch({len(self)} rollouts for {self.learner!r}, {int(self.own.sum())} of them its own{out})"

    def __len__(self) -> int:
        return len(self.index)

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts of this batch, in its order."""
        return [self.pool.rollouts[i] for i in self.index]

    def part(self, rows: Sequence[int]) -> Batch:
        """The batch of some of its rows, such as a mini-batch; what was left out stays with the whole."""
        columns = ("prompt_ids", "response_ids", "index")
        tensors = ("source_mean_logp", "advantages", "weights", "own")
        rows = list(rows)
        picked = {name: tuple(getattr(self, name)[i] for i in rows) for name in columns}
        return replace(
            self, **picked, **{name: getattr(self, name)[rows] for name in tensors}, excluded={}, solved_prompts=0
        )


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """What one optimiser update saw and did; arrays have one entry a rollout."""

    updates_made: int  # m: updates this learner had already made in this step
    lower: float  # lower bound of the band for peer rollouts
    index: np.ndarray  # position in the pool
    own: Bool[np.ndarray, "rollout"]
    ratio: Float[np.ndarray, "rollout"]
    clipped: Bool[np.ndarray, "rollout"]
    advantages: Float[np.ndarray, "rollout"]
    weights: Float[np.ndarray, "rollout"]
    loss: float
    grad_norm: float  # before scaling down to max_grad_norm
    lr: float
    kl: float | None  # nats per token, own rollouts; None without β or own rollouts

    def clip_fraction(self, who: str, side: str) -> float | None:
        """Share of own or peer rollouts that gave no gradient: ratio too "low" or too "high"; None if there are none."""
        whose = self.own if who == "own" else ~self.own
        beyond = self.ratio < 1 if side == "low" else self.ratio > 1
        # a peer ratio of exactly 1 is inside every band
        return float((self.clipped & beyond)[whose].mean()) if whose.any() else None


@dataclass(frozen=True, eq=False, repr=False)
class StepStats:
    """All mini-batches of one learner's update."""

    learner: str
    minibatches: tuple[MiniBatch, ...]
    excluded: Mapping[str, int]
    sources: tuple[str, ...]  # source of each rollout of the pool, so that index → source
    moved: Mapping[str, float] = field(default_factory=dict)  # what moving idle parts cost since the last update

    def __repr__(self) -> str:
        used = sum(len(mb.index) for mb in self.minibatches)
        return f"StepStats({self.learner!r}: {len(self.minibatches)} updates on {used} rollouts)"

    def to_frame(self) -> pd.DataFrame:
        """One row a rollout and mini-batch: updates_made, source, own, ratio, clipped, advantage, weight, lower, index."""
        import pandas as pd

        frames = [
            pd.DataFrame(
                {
                    "learner": self.learner, "updates_made": mb.updates_made, "index": mb.index,
                    "source": [self.sources[i] for i in mb.index], "own": mb.own, "ratio": mb.ratio,
                    "clipped": mb.clipped, "advantage": mb.advantages, "weight": mb.weights, "lower": mb.lower,
                }
            )
            for mb in self.minibatches
        ]  # fmt: skip
        if frames:
            return pd.concat(frames, ignore_index=True)
        # without an update: no row, but every column
        kinds = {"learner": str, "updates_made": int, "index": int, "source": str, "own": bool, "ratio": np.float32}
        kinds |= {"clipped": bool, "advantage": np.float32, "weight": np.float32, "lower": float}
        return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in kinds.items()})

    def metrics(self) -> dict[str, float]:
        """Numbers of the whole update; names as in `METRICS`."""
        if not self.minibatches:
            return {"updates": 0, **{f"excluded_{k}": v for k, v in self.excluded.items()}, **self.moved}
        mbs = self.minibatches
        columns = ("own", "ratio", "clipped", "weights")
        own, ratio, clipped, weights = (np.concatenate([getattr(mb, k) for mb in mbs]) for k in columns)
        out: dict[str, float] = {
            "updates": len(mbs),
            "rollouts_used": len(own),
            "loss": float(np.mean([mb.loss for mb in mbs])),
            "grad_norm": float(np.mean([mb.grad_norm for mb in mbs])),
            "lr": mbs[-1].lr,
        }
        if kls := [(mb.kl, mb.own.sum()) for mb in mbs if mb.kl is not None]:
            out["kl"] = float(np.average([kl for kl, _ in kls], weights=[count for _, count in kls]))
        for who, whose in (("own", own), ("peer", ~own)):
            if whose.any():
                s, hit = ratio[whose], clipped[whose]
                out |= {f"{who}_ratio_mean": s.mean(), f"{who}_ratio_min": s.min(), f"{who}_ratio_max": s.max()}
                out |= {f"clip_{who}_low": (hit & (s < 1)).mean(), f"clip_{who}_high": (hit & (s > 1)).mean()}
        if (~own).any():
            out["peer_weight"] = weights[~own].mean()
        out |= {f"excluded_{reason}": count for reason, count in self.excluded.items()}
        return {k: float(v) for k, v in {**out, **self.moved}.items()}


# Names in metrics.jsonl. A test holds that every emitted metric stands here and every one here is emitted.
METRICS = {
    "step": "number of the step, from 1",
    "rollouts": "rollouts sampled for training so far, all agents together",
    "tokens": "tokens sampled for training so far, all agents together",
    "seconds": "wall time of the run so far, stops not counted (s)",
    "seconds_rollout": "time of this step's sampling (s)",
    "seconds_scoring": "time to compute the sources' log-probabilities (s)",
    "seconds_reward": "time to verify the answers (s)",
    "seconds_advantage": "time to build every learner's batch, re-encoding included (s)",
    "seconds_update": "time of forward, backward and optimiser, all learners (s)",
    "seconds_evaluation": "time of the evaluation after this step (s)",
    "omega": "capability ratio as used in this step: omega[k][j] = ω(k, j) = P̂(k) / P̂(j)",
    "reward": "mean verified reward of the agent's own rollouts; unscorable ones do not count",
    "capability": "P̂: mean of the agent's mean rewards over the window",
    "length": "mean length of the agent's rollouts (tokens)",
    "share_cut": "share of the agent's rollouts that were cut at the length limit",
    "share_hazard": "share of the agent's rollouts that cannot be exchanged (lossy text or control tokens)",
    "share_disputed": "share of the agent's rollouts whose verdict differs from a second opinion: boxed answer and gold as texts",
    "distinct_answers": "mean number of different boxed answers among one problem's rollouts",
    "equal_reward_prompts": "share of problems whose rewards are all equal: alone, they teach nothing",
    "status_*": "share of the agent's rollouts with this verdict: correct, wrong, no_answer, timeout, error, unscorable",
    "engine_gap_mean": "distance of the engine's log-probs from the trainer's, mean over tokens (nats; also _max); with vLLM",
    "updates": "optimiser updates of this step",
    "rollouts_used": "rollouts in the learner's mini-batches",
    "loss": "mean loss of the mini-batches; about zero on policy while its gradient is not",
    "grad_norm": "mean norm of the gradient before it is scaled down to max_grad_norm",
    "lr": "learning rate of the last update",
    "kl": "KL to the initial policy on own rollouts (nats per token); only with beta > 0",
    "own_ratio_mean": "importance ratio s of own rollouts: mean (also _min, _max)",
    "peer_ratio_mean": "importance ratio s of peer rollouts: mean (also _min, _max)",
    "clip_own_low": "share of own rollouts so low in ratio that they give no gradient (also _high); grpo: with a clipped token",
    "clip_peer_low": "share of peer rollouts below the band (also clip_peer_high)",
    "peer_weight": "mean ω(source, learner) over the peer rollouts used",
    "bytes_moved": "between device and host since the last update, both ways (bytes); only with offload",
    "seconds_moving": "time of these moves (s); only with offload",
    "solved_prompts": "share of problems that the learner solved in all its own rollouts (exclude_solved); no gradient from them",
    "excluded_*": "rollouts not used by this learner: unscorable, lossy_text, control_token, lossy_reencoding, too_long, empty",
    "avg@k": "evaluation: mean reward over k answers to each test problem (k written as its number)",
    "best@k": "evaluation: unbiased chance that at least one of k answers is right (k written as its number)",
    "avg@k/*": "the same on a further test set, by its name; before training and at the end of the run",
    "best@k/*": "the same on a further test set, by its name; before training and at the end of the run",
}
