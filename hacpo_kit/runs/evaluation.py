"""Evaluation: avg@k and unbiased best@k of each agent on a problem set."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm

from hacpo_kit.models.agents import Agent, as_list, run_on_each
from hacpo_kit.records import Rollout
from hacpo_kit.rewards import boxed_math, score
from hacpo_kit.rollouts import Sampling, check_request, sample

if TYPE_CHECKING:
    import pandas as pd

    from hacpo_kit.tasks.problems import Problem


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The scores of each agent, and the rollouts behind them."""

    agents: dict[str, dict[str, float]]
    answers: tuple[Rollout, ...]

    def __repr__(self) -> str:
        return f"Evaluation({self.agents})"

    def to_frame(self) -> pd.DataFrame:
        """Return one row per agent: avg@k, best@k and counts."""
        import pandas as pd

        return pd.DataFrame(self.agents).T.rename_axis("agent")

    def __getitem__(self, agent: str) -> dict[str, float]:
        return self.agents[agent]


def evaluate(
    agents: Agent | Sequence[Agent],
    problems: Sequence[Problem],
    k: int = 1,
    *,
    reward_function: Callable = boxed_math,
    progress: bool = True,
    **sampling: Any,
) -> Evaluation:
    """Return each agent's mean reward (avg@k) and unbiased probability that one of k rollouts is correct (best@k).

    `sampling`: `samples` per problem (default k), `temperature` (default 0, greedy, for one sample, else 1),
    `max_new_tokens` (32), `seed` (0) and `batch_size` (512 rollouts sampled at once). A rollout is correct if its reward is
    at least 1. Unscorable rollouts are excluded and counted.

    Raises ValueError for samples < k, for several greedy samples, which would be equal, for a negative temperature, and for
    agents or problems of the same name; TypeError for an unknown option.
    """
    agents, problems = as_list(agents), list(problems)
    sampling = sampling_of(k, **sampling)
    check_request(agents, problems, sampling)
    gold = {p.id: p.gold for p in problems}
    total = len(agents) * len(problems) * sampling.n
    with tqdm(total=total, desc="evaluate", unit="rollout", disable=not progress, leave=False) as bar:
        sampled = run_on_each(agents, sample, problems, sampling, bar=bar)
    scores, answers = {}, []
    for agent, rollouts in zip(agents, sampled, strict=True):
        verdicts = score([(r.text, gold[r.problem]) for r in rollouts], fn=reward_function)
        scored = [r.scored(v.reward, v.status) for r, v in zip(rollouts, verdicts, strict=True)]
        scores[agent.name] = summary(scored, k, sampling.n)
        answers += scored
    return Evaluation(scores, tuple(answers))


def sampling_of(
    k: int,
    *,
    samples: int | None = None,
    temperature: float | None = None,
    max_new_tokens: int = 32,
    seed: int = 0,
    batch_size: int = 512,
) -> Sampling:
    """Return the parameters of an evaluation, defaults filled in as in `evaluate`; raises ValueError for invalid ones."""
    samples = k if samples is None else samples
    temperature = (0.0 if samples == 1 else 1.0) if temperature is None else temperature
    if not 1 <= k <= samples:
        raise ValueError(f"k={k}, samples={samples}: need 1 ≤ k ≤ samples")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: it must be 0 (greedy) or above")
    if temperature == 0 and samples > 1:
        raise ValueError(f"samples={samples}: greedy samples of a problem are equal; set temperature > 0 or samples=1")
    # another seed than in training, so that an evaluation does not repeat rollouts of the training
    return Sampling(samples, temperature, max_new_tokens, ("evaluation", seed), batch_size)


def best_at(n: int, correct: int, k: int) -> float:
    """Return the unbiased probability that at least one of k rollouts is correct if `correct` of n are.

    >>> best_at(4, 1, 1), best_at(4, 1, 4), best_at(4, 1, 2)
    (0.25, 1.0, 0.5)
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"need 1 ≤ k ≤ n and 0 ≤ correct ≤ n, got n={n}, correct={correct}, k={k}")
    # 1 − C(n − c, k) / C(n, k)
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def summary(answers: Sequence[Any], k: int, samples: int) -> dict[str, float]:
    """Return avg@samples, best@k and counts; reads problem, reward, status and ended of each answer."""
    rewards: dict[str, list[float]] = {}
    for a in answers:
        if a.reward is not None:
            rewards.setdefault(a.problem, []).append(a.reward)
    scored = [x for values in rewards.values() for x in values]
    best = [best_at(len(v), sum(x >= 1 for x in v), k) for v in rewards.values() if len(v) >= k]
    return {
        f"avg@{samples}": float(np.mean(scored)) if scored else math.nan,
        **({f"best@{k}": float(np.mean(best)) if best else math.nan} if k > 1 else {}),
        "problems": len({a.problem for a in answers}),
        "answers": len(answers),
        "correct": sum(x >= 1 for x in scored),
        "unscorable": len(answers) - len(scored),
        "cut": sum(not a.ended for a in answers),
        **{f"status_{s}": c for s, c in sorted(Counter(a.status for a in answers).items())},
    }
