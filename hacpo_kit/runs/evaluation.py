"""Evaluation: avg@k and unbiased best@k of each agent on a problem set."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tqdm.auto import tqdm

from hacpo_kit.models.agents import Agent, as_list, each
from hacpo_kit.records import Rollout
from hacpo_kit.rewards import boxed_math, score
from hacpo_kit.rollouts import Sampling, check_request, sample

if TYPE_CHECKING:
    import pandas as pd

    from hacpo_kit.tasks.problems import Problem


def best_at(n: int, correct: int, k: int) -> float:
    """Unbiased chance that at least one of k answers drawn from n is right, when `correct` of the n are.

    >>> best_at(4, 1, 1), best_at(4, 1, 4), best_at(4, 1, 2)
    (0.25, 1.0, 0.5)
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"need 1 ≤ k ≤ n and 0 ≤ correct ≤ n, got n={n}, correct={correct}, k={k}")
    # 1 − C(n − c, k) / C(n, k)
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Results per agent, with the answers they come from."""

    agents: dict[str, dict[str, float]]
    answers: tuple[Rollout, ...]

    def __repr__(self) -> str:
        return f"Evaluation({self.agents})"

    def to_frame(self) -> pd.DataFrame:
        """One row an agent: avg@k, best@k, and the counts behind them."""
        import pandas as pd

        return pd.DataFrame(self.agents).T.rename_axis("agent")

    def __getitem__(self, agent: str) -> dict[str, float]:
        return self.agents[agent]


def evaluate(
    agents: Agent | Sequence[Agent],
    problems: Sequence[Problem],
    k: int = 1,
    *,
    samples: int | None = None,
    temperature: float | None = None,
    max_new_tokens: int = 32,
    reward_function=boxed_math,
    seed: int = 0,
    batch_size: int = 512,
    progress: bool = True,
) -> Evaluation:
    """Mean reward over the answers (avg@k) and the unbiased chance that one of k is right (best@k), per agent.

    Every problem gets `samples` answers (default k). Temperature defaults to 0 (greedy) for one sample and 1 for more.
    Unscorable answers do not count and are reported. For best@k and `correct` an answer is right from a reward of 1 on.

    Raises ValueError for samples < k, several greedy samples, which would all be the same, a negative temperature, and
    duplicate agent names or problem ids.
    """
    agents = as_list(agents)
    problems = list(problems)
    samples, temperature = how_often(k, samples, temperature)
    # a seed of its own: evaluating never changes what training samples
    sampling = Sampling(samples, temperature, max_new_tokens, ("evaluation", seed), batch_size)
    check_request(agents, problems, sampling)
    results, answers = {}, []
    gold = {p.id: p.gold for p in problems}
    total = len(agents) * len(problems) * samples
    with tqdm(total=total, desc="evaluate", unit="answer", disable=not progress, leave=False) as bar:
        written = each(agents, sample, problems, sampling, bar=bar)
    for agent, mine in zip(agents, written, strict=True):
        verdicts = score([(r.text, gold[r.problem]) for r in mine], fn=reward_function)
        scored = [r.scored(v.reward, v.status) for r, v in zip(mine, verdicts, strict=True)]
        results[agent.name] = summary(scored, k, samples)
        answers += scored
    return Evaluation(results, tuple(answers))


def how_often(k: int, samples: int | None, temperature: float | None) -> tuple[int, float]:
    """Answers to each problem and temperature, filled in; raises ValueError for what makes no sense."""
    samples = k if samples is None else samples
    temperature = (0.0 if samples == 1 else 1.0) if temperature is None else temperature
    if not 1 <= k <= samples:
        raise ValueError(f"k={k}, samples={samples}: need 1 ≤ k ≤ samples")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature}: it must be 0 (greedy) or above")
    if temperature == 0 and samples > 1:
        raise ValueError(f"{samples} greedy answers to one problem are all the same; set temperature > 0 or samples=1")
    return samples, temperature


def summary(answers: Sequence[Rollout], k: int, samples: int) -> dict[str, float]:
    """avg@samples, best@k and the counts behind them; of each answer only problem, reward, status and ended are read."""
    by_problem: dict[str, list[float]] = {}
    for r in answers:
        if r.reward is not None:
            by_problem.setdefault(r.problem, []).append(r.reward)
    rewards = [x for values in by_problem.values() for x in values]
    # a reward of its full value counts as right; graded rewards below 1 do not
    chances = [best_at(len(v), sum(x >= 1 for x in v), k) for v in by_problem.values() if len(v) >= k]
    return {
        f"avg@{samples}": float(np.mean(rewards)) if rewards else float("nan"),
        **({f"best@{k}": float(np.mean(chances)) if chances else float("nan")} if k > 1 else {}),
        "problems": len({r.problem for r in answers}),
        "answers": len(answers),
        "correct": sum(x >= 1 for x in rewards),
        "unscorable": len(answers) - len(rewards),
        "cut": sum(not r.ended for r in answers),
        **{f"status_{s}": c for s, c in sorted(Counter(r.status for r in answers).items())},
    }
