"""① rollout: every agent samples n rollouts for every problem and scores them with its own log-probabilities."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm

from hacpo_kit.common.seeds import derive_seed
from hacpo_kit.common.timing import divide_time, timed
from hacpo_kit.config import Config
from hacpo_kit.models.agents import Agent, as_list, run_on_each
from hacpo_kit.models.engines import transformers as transformers_engine
from hacpo_kit.models.engines.base import Answer
from hacpo_kit.models.faults import check_logps, memory_advice, pass_memory_advice
from hacpo_kit.models.passes import microbatches
from hacpo_kit.records import Pool, Rollout, engine_gap

if TYPE_CHECKING:
    from hacpo_kit.tasks.problems import Problem

# Largest mean distance between engine and trainer log-probabilities that rounding explains (nats). Measured with vLLM on a
# CPU: float32 4e-7 (built-in agents) and 1e-5 (SmolLM2-135M); bf16 0.05 (SmolLM2-135M).
ENGINE_GAP, ENGINE_GAP_HALF = 1e-3, 0.2
# The default engine samples with the agent's own model, so its log-probabilities equal the trainer's up to rounding. They
# are kept if every CHECK_EVERY-th rollout, scored, has a mean log-probability that differs by at most SAME_LOGP (nats).
# Measured: 1e-6. SAME_LOGP is a hundredth of the own clipping range.
CHECK_EVERY, SAME_LOGP = 16, 1e-5


@dataclass(frozen=True)
class Sampling:
    """The parameters of sampling and scoring."""

    n: int = 8  # rollouts per agent and problem
    temperature: float = 1.0  # 0: greedy
    max_new_tokens: int = 32
    seed: Any = 0
    batch_size: int = 256  # rollouts sampled at once
    scoring_tokens: int = 32768  # padded tokens in one scoring pass

    @classmethod
    def of(cls, config: Config) -> Sampling:
        """Return the parameters that training uses."""
        return cls(
            config.rollouts_per_prompt, config.temperature, config.max_new_tokens, config.seed, config.rollout_batch,
            config.microbatch_tokens,
        )  # fmt: skip


def rollout(
    agents: Agent | Sequence[Agent],
    problems: Sequence[Problem],
    n: int = 8,
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 32,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool = True,
    **unsupported: Any,
) -> Pool:
    """Sample n rollouts per agent and problem, score them, and return them in one pool.

    A scored rollout has the log-probability of each of its tokens (nats). The same agents (name, weights, `updates`),
    problems, `seed` and `batch_size` (rollouts sampled at once) give the same rollouts.

    Raises ValueError for temperature 0, for top_p and top_k, for agents or problems of the same name, and for a prompt that
    does not fit in the model's context. Warns if many rollouts are cut at `max_new_tokens`.
    """
    for name, value in unsupported.items():
        if name not in ("top_p", "top_k"):
            raise TypeError(f"rollout() got an unexpected keyword argument {name!r}")
        raise ValueError(
            f"{name}={value}: importance ratios need samples of the full distribution, whose log-probabilities scoring "
            f"computes; omit {name}"
        )
    return sample_pool(agents, problems, Sampling(n, temperature, max_new_tokens, seed, batch_size), progress=progress)


def sample_pool(
    agents: Agent | Sequence[Agent], problems: Sequence[Problem], sampling: Sampling, *, progress: bool = True
) -> Pool:
    """Do the work of `rollout`, with the parameters in one object."""
    agents, problems = as_list(agents), list(problems)
    check_request(agents, problems, sampling)
    if not 0 < sampling.temperature < math.inf:
        raise ValueError(
            f"temperature={sampling.temperature}: training needs a temperature above 0; "
            "for greedy responses use evaluate(temperature=0)"
        )
    total, start = len(agents) * len(problems) * sampling.n, time.perf_counter()
    with tqdm(total=total, desc="rollout", unit="rollout", disable=not progress, leave=None) as bar:
        parts = run_on_each(agents, _rollouts_of_agent, problems, sampling, bar=bar)
    seconds = divide_time(time.perf_counter() - start, [times for _, times in parts])
    rollouts = tuple(rollout for part, _ in parts for rollout in part)
    updates = {agent.name: agent.updates for agent in agents}
    return Pool(rollouts, tuple(problems), tuple(updates), sampling.n, sampling.temperature, updates, seconds)


def check_request(agents: Sequence[Agent], problems: Sequence[Problem], sampling: Sampling) -> None:
    """Raise ValueError if there is nothing to sample, or if two agents or two problems have the same name."""
    if not agents or not problems or sampling.n < 1:
        raise ValueError(f"need agents, problems and n ≥ 1; got {len(agents)}, {len(problems)} and n={sampling.n}")
    for name in ("max_new_tokens", "batch_size"):
        if getattr(sampling, name) < 1:
            raise ValueError(f"{name}={getattr(sampling, name)}: it must be at least 1")
    for kind, names in (("agents", [a.name for a in agents]), ("problems", [p.id for p in problems])):
        if len(set(names)) < len(names):
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"{kind} with the same name: {', '.join(map(repr, repeated))}")


def _rollouts_of_agent(
    agent: Agent, problems: Sequence[Problem], sampling: Sampling, bar: tqdm | None = None
) -> tuple[list[Rollout], dict[str, float]]:
    """Return one agent's scored rollouts, and the time that sampling and scoring took."""
    seconds: dict[str, float] = {}
    with timed(seconds, "seconds_rollout"):
        rollouts = sample(agent, problems, sampling, bar)
    with timed(seconds, "seconds_scoring"):
        rollouts = _score_new(agent, rollouts, sampling)
    _warn(agent, rollouts, sampling.max_new_tokens)
    return rollouts, seconds


# ── sampling ─────────────────────────────────────────────────────────────────────────────────────────────────────


def sample(agent: Agent, problems: Sequence[Problem], sampling: Sampling, bar: tqdm | None = None) -> list[Rollout]:
    """Return n unscored rollouts per problem (log-probabilities NaN)."""
    rollouts: list[Rollout] = []
    for batch in sample_batches(agent, problems, sampling):
        rollouts += batch
        if bar is not None:
            bar.update(len(batch))
    return rollouts


def sample_batches(
    agent: Agent, problems: Sequence[Problem], sampling: Sampling, *, skip: int = 0
) -> Iterator[list[Rollout]]:
    """Yield the rollouts of `sample` in batches, without the first `skip` batches; batches are independent."""
    prompts = [agent.encode_problem(problem) for problem in problems]
    for problem, prompt in zip(problems, prompts, strict=True):
        if len(prompt) + sampling.max_new_tokens > agent.max_length:
            raise ValueError(
                f"problem {problem.id!r}: {len(prompt)} prompt tokens and max_new_tokens={sampling.max_new_tokens} exceed "
                f"the {agent.max_length} positions of agent {agent.name!r}; shorten one of them"
            )
    rows = [(i, k) for i in range(len(problems)) for k in range(sampling.n)]
    with agent.on_device("engine"):
        for start in range(skip * sampling.batch_size, len(rows), sampling.batch_size):
            batch = rows[start : start + sampling.batch_size]
            fewer = f"sample fewer: rollout_batch={-(-len(batch) // 2)} (batch_size without a Config, --batch)"
            remedy = fewer if len(batch) > 1 else "set a smaller max_new_tokens"
            with memory_advice(agent, f"sampling {len(batch)} rollouts at once", remedy):
                answers = agent.engine.sample(
                    agent,
                    [prompts[i] for i, _ in batch],
                    temperature=sampling.temperature,
                    max_new_tokens=sampling.max_new_tokens,
                    seed=derive_seed("rollout", sampling.seed, agent.name, agent.updates, start),
                )
            rollouts = [
                _record(agent, problems[i].id, k, prompts[i], answer)
                for (i, k), answer in zip(batch, answers, strict=True)
            ]
            check_logps(agent, rollouts, [r.engine_logps for r in rollouts])  # evaluation does not score afterwards
            yield rollouts


def _record(agent: Agent, problem: str, sample: int, prompt: tuple[int, ...], answer: Answer) -> Rollout:
    ids, ended = answer.ids, answer.ended
    text, end = agent.split_end(ids) if ended else (agent.decode(ids), 0)
    body = ids[: len(ids) - end]
    hazard = ""
    # bytes that form no character, or an id without a token (padded vocabularies): the text differs from the sample
    if "�" in text or None in agent.tokenizer.convert_ids_to_tokens(list(body)):
        hazard = "lossy_text"
    elif agent.control_ids.intersection(body):
        hazard = "control_token"
    unscored = np.full(len(ids), np.nan, dtype=np.float32)
    optional = {"hazard": hazard, "engine_logps": answer.logps, "end_length": end}
    return Rollout(problem, agent.name, sample, text, prompt, ids, unscored, ended, **optional)


# ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────────


def score(agent: Agent, rollouts: Sequence[Rollout], *, temperature: float, tokens: int = 32768) -> list[Rollout]:
    """Return the rollouts with the agent's log-probabilities, computed by the function that later scores the learners.

    One pass has at most `tokens` padded tokens.

    Raises FloatingPointError, with the rollouts in its attribute `fault`, if a log-probability is not finite.
    """
    logps: list[np.ndarray | None] = [None] * len(rollouts)
    prompts, responses = [r.prompt_ids for r in rollouts], [r.token_ids for r in rollouts]
    with agent.on_device("weights"), torch.no_grad():
        for rows in microbatches(prompts, responses, tokens):
            pass_ids = [[ids[i] for i in rows] for ids in (prompts, responses)]
            with pass_memory_advice(agent, "scoring", *pass_ids, tokens):
                values = agent.logprobs(*pass_ids, temperature=temperature)[0].cpu().numpy()
            for i, row in zip(rows, values, strict=True):
                logps[i] = row[: len(responses[i])].copy()
    scored = [replace(r, logps=values) for r, values in zip(rollouts, logps, strict=True)]
    check_logps(agent, scored, [r.logps for r in scored])
    return scored


def _score_new(agent: Agent, rollouts: Sequence[Rollout], sampling: Sampling) -> list[Rollout]:
    """Score rollouts that the agent has just sampled; keep the default engine's log-probabilities where they are equal."""
    engine_logps = [r.engine_logps for r in rollouts]
    settings = {"temperature": sampling.temperature, "tokens": sampling.scoring_tokens}
    if agent.engine is transformers_engine:
        rollouts = [replace(r, engine_logps=None) for r in rollouts]  # the same model: no independent diagnostic
        finite = all(values is not None and np.isfinite(values).all() for values in engine_logps)
        if finite and agent.dtype == torch.float32:
            checked = range(0, len(rollouts), CHECK_EVERY)
            scored = dict(zip(checked, score(agent, [rollouts[i] for i in checked], **settings), strict=True))
            if max(abs(float(r.logps.mean() - engine_logps[i].mean())) for i, r in scored.items()) <= SAME_LOGP:
                return [scored.get(i) or replace(r, logps=engine_logps[i]) for i, r in enumerate(rollouts)]
    return score(agent, rollouts, **settings)


def _warn(agent: Agent, rollouts: Sequence[Rollout], max_new_tokens: int) -> None:
    """Warn, at the line that calls `rollout`, about responses cut at the limit and about an engine that differs."""
    if (share := sum(not r.ended for r in rollouts) / len(rollouts)) > 0.25:
        warnings.warn(
            f"{share:.0%} of the rollouts of agent {agent.name!r} were cut at {max_new_tokens} tokens and rarely get a "
            "reward; increase max_new_tokens, or, if they never end, check its end tokens (agent.end_ids) or load it with stop=",
            stacklevel=6,
        )
    half = agent.half_precision or "16" in str(getattr(agent.engine, "options", {}).get("dtype"))
    gap, bound = engine_gap(rollouts), ENGINE_GAP_HALF if half else ENGINE_GAP
    if gap and not gap["engine_gap_mean"] <= bound:
        warnings.warn(
            f"agent {agent.name!r}: log-probabilities of its engine differ from the trainer's by {gap['engine_gap_mean']:.2g} "
            f"nats on average and {gap['engine_gap_max']:.2g} at most (usual: a mean below {bound:g}), so the engine samples "
            "from another distribution than the one that is trained; compare their dtypes, and restart the engine with "
            "agent.engine.close()",
            stacklevel=6,
        )
