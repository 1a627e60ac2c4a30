"""① rollout: every agent answers every problem n times; the log-probabilities of its answers are the trainer's."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm

from hacpo_kit.common.faults import with_fault
from hacpo_kit.common.seeds import derive_seed
from hacpo_kit.models.agents import Agent, as_list, each, microbatches
from hacpo_kit.models.engines import Answer
from hacpo_kit.models.engines import transformers as transformers_engine
from hacpo_kit.models.memory import out_of_memory, smaller_passes, told
from hacpo_kit.records import Pool, Rollout, engine_gap, named

if TYPE_CHECKING:
    from hacpo_kit.tasks.problems import Problem

# Mean distance of an engine's log-probs from the trainer's up to which it is rounding (nats). Measured with vLLM on a CPU:
# float32 4e-7 (built-in agents) and 1e-5 (SmolLM2-135M); bf16 0.05 (SmolLM2-135M: logits near 20 are rounded by 0.06).
GAP, GAP_IN_HALF = 1e-3, 0.2
# The default engine samples from the agent's own model, so its log-probs are the trainer's but for the order of sums. Mean
# log-probs of a rollout that differ by at most this (nats; measured: 1e-6) count as the same: a hundredth of the own clip.
SAME = 1e-5
LOOKED_AT = 16  # one in so many rollouts is scored to find out


def rollout(
    agents: Agent | Sequence[Agent],
    problems: Sequence[Problem],
    n: int = 8,
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 32,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    batch_size: int = 256,
    scoring_tokens: int = 32768,
    progress: bool = True,
    timings: dict[str, float] | None = None,
) -> Pool:
    """Samples n answers per agent and problem and scores them: text, tokens, log-probabilities (nats), all in one pool.

    The same agents (name, weights, `updates`), problems, seed and `batch_size` give the same answers; `batch_size`
    rollouts are sampled at once.

    Raises ValueError for T = 0, top_p < 1 or top_k > 0 (the scorer knows no cut distribution), duplicate agent names or
    problem ids, and prompts that do not fit. Warns if answers were cut at the length limit.
    """
    agents = as_list(agents)
    problems = list(problems)
    check_request(agents, problems, n, max_new_tokens, batch_size)
    _check_distribution(temperature, top_p, top_k)
    how = {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed, "batch_size": batch_size}
    total = len(agents) * len(problems) * n
    start = time.perf_counter()
    with tqdm(total=total, desc="rollout", unit="rollout", disable=not progress, leave=None) as bar:
        written = each(agents, _answers, problems, n, how, scoring_tokens, bar=bar)
    divide_time(timings, time.perf_counter() - start, [times for _, times in written])
    rollouts = tuple(r for mine, _ in written for r in mine)
    updates = {agent.name: agent.updates for agent in agents}
    return Pool(rollouts, tuple(problems), tuple(updates), n, temperature, updates)


def _answers(
    agent: Agent,
    problems: Sequence[Problem],
    n: int,
    how: Mapping[str, Any],
    scoring_tokens: int,
    bar: tqdm | None = None,
) -> tuple[list[Rollout], dict[str, float]]:
    """One agent's part of a pool, and its times."""
    times: dict[str, float] = {}
    with timed(times, "seconds_rollout"):
        mine = sample(agent, problems, n, **how, bar=bar)
    with timed(times, "seconds_scoring"):
        mine = _score_new(agent, mine, temperature=how["temperature"], tokens=scoring_tokens)
    _warn_if_cut(agent, mine, how["max_new_tokens"])
    _warn_if_engine_differs(agent, mine)
    return mine, times


def sample(
    agent: Agent,
    problems: Sequence[Problem],
    n: int,
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int = 0,
    batch_size: int = 256,
    bar: tqdm | None = None,
) -> list[Rollout]:
    """n unscored answers to each problem (their log-probs are NaN); temperature 0 is greedy."""
    how = {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed, "batch_size": batch_size}
    out: list[Rollout] = []
    for batch in sample_batches(agent, problems, n, **how):
        out += batch
        if bar is not None:
            bar.update(len(batch))
    return out


def sample_batches(
    agent: Agent,
    problems: Sequence[Problem],
    n: int,
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int = 0,
    batch_size: int = 256,
    skip: int = 0,
) -> Iterator[list[Rollout]]:
    """The answers of `sample`, batch by batch and without the first `skip`; no batch depends on another."""
    prompts = [agent.encode_prompt(p.prompt) for p in problems]
    for problem, prompt in zip(problems, prompts, strict=True):
        if len(prompt) + max_new_tokens > agent.max_length:
            raise ValueError(
                f"problem {problem.id!r}: {len(prompt)} prompt tokens and max_new_tokens={max_new_tokens} exceed the "
                f"{agent.max_length} positions of agent {agent.name!r}; shorten one of them"
            )
    rows = [(i, k) for i in range(len(problems)) for k in range(n)]
    with agent.awake("engine"):
        for start in range(skip * batch_size, len(rows), batch_size):
            chunk = rows[start : start + batch_size]
            doing = f"sampling {len(chunk)} answers at once"
            remedy = f"sample fewer: rollout_batch={-(-len(chunk) // 2)} (batch_size where no Config is used, --batch)"
            with out_of_memory(agent, doing, remedy if len(chunk) > 1 else "give a smaller max_new_tokens"):
                answers = agent.engine.sample(
                    agent,
                    [prompts[i] for i, _ in chunk],
                    temperature=temperature,
                    max_new_tokens=max_new_tokens,
                    seed=derive_seed("rollout", seed, agent.name, agent.updates, start),
                )
            given = zip(chunk, answers, strict=True)
            written = [_record(agent, problems[i].id, k, prompts[i], answer) for (i, k), answer in given]
            _check_finite(agent, written, [r.engine_logps for r in written])  # evaluation scores nothing afterwards
            yield written


def _record(agent: Agent, problem: str, sample: int, prompt: tuple[int, ...], answer: Answer) -> Rollout:
    ids, ended = answer.ids, answer.ended
    body = ids[:-1] if ended else ids
    text = agent.decode(body)
    hazard = ""
    # bytes that are no character, or an id without a token (padded vocabularies): the text is not what was sampled
    if "�" in text or None in agent.tokenizer.convert_ids_to_tokens(list(body)):
        hazard = "lossy_text"
    elif agent.control_ids.intersection(body):
        hazard = "control_token"
    unscored = np.full(len(ids), np.nan, dtype=np.float32)
    return Rollout(problem, agent.name, sample, text, prompt, ids, unscored, ended, hazard, engine_logps=answer.logps)


def score(agent: Agent, rollouts: Sequence[Rollout], *, temperature: float, tokens: int = 32768) -> list[Rollout]:
    """The agent's own log-probability of each of its tokens, by the function that later scores the learners.

    Raises FloatingPointError, naming the rollouts and with them in its attribute `fault`, if one is not finite.
    """
    logps: list[np.ndarray | None] = [None] * len(rollouts)
    prompts, responses = [r.prompt_ids for r in rollouts], [r.token_ids for r in rollouts]
    with agent.awake("weights"), torch.no_grad():
        for rows in microbatches(prompts, responses, tokens):
            some = [[p[i] for i in rows] for p in (prompts, responses)]
            with out_of_memory(agent, f"scoring {told(*some)}", smaller_passes(rows, tokens)):
                values = agent.logprobs(*some, temperature=temperature)[0].cpu().numpy()
            for i, row in zip(rows, values, strict=True):
                logps[i] = row[: len(responses[i])].copy()
    scored = [replace(r, logps=v) for r, v in zip(rollouts, logps, strict=True)]
    _check_finite(agent, scored, [r.logps for r in scored])
    return scored


def _check_finite(agent: Agent, rollouts: Sequence[Rollout], logps: Sequence[np.ndarray | None]) -> None:
    """Raises FloatingPointError, with the rollouts, unless every log-probability that is known is finite."""
    bad = [r for r, values in zip(rollouts, logps, strict=True) if values is not None and not np.isfinite(values).all()]
    if bad:
        told = f"agent {agent.name!r}: the log-probabilities of {len(bad)} rollouts are not finite ({named(bad)})"
        seen = [{"prompt": agent.decode(r.prompt_ids), "engine_logps": r.engine_logps} for r in bad]
        raise with_fault(FloatingPointError(told), agent.name, bad, seen)


def _score_new(agent: Agent, rollouts: Sequence[Rollout], *, temperature: float, tokens: int) -> list[Rollout]:
    """As `score`, for answers that the agent has just sampled.

    In float32 the default engine has computed the same numbers: where a sixteenth of the rollouts, scored, shows that, the
    others keep them, which saves a pass over everything.
    """
    own = agent.engine is transformers_engine
    engine = [r.engine_logps for r in rollouts]
    if own:
        rollouts = [replace(r, engine_logps=None) for r in rollouts]  # the same model: no second opinion
    known = all(values is not None and np.isfinite(values).all() for values in engine)
    if own and known and agent.dtype == torch.float32:
        looked = range(0, len(rollouts), LOOKED_AT)
        some = score(agent, [rollouts[i] for i in looked], temperature=temperature, tokens=tokens)
        if max(abs(float(r.logps.mean() - engine[i].mean())) for i, r in zip(looked, some, strict=True)) <= SAME:
            scored = dict(zip(looked, some, strict=True))
            return [scored.get(i) or replace(r, logps=engine[i]) for i, r in enumerate(rollouts)]
    return score(agent, rollouts, temperature=temperature, tokens=tokens)


def _check_distribution(temperature, top_p, top_k) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(
            f"temperature={temperature}: training needs T > 0; for greedy answers use evaluate(temperature=0)"
        )
    if top_p != 1 or top_k:
        raise ValueError(
            f"top_p={top_p}, top_k={top_k}: the scorer computes probabilities of the whole distribution, so the importance "
            "ratio would be wrong; use top_p=1, top_k=0"
        )


def check_request(agents, problems, n, max_new_tokens, batch_size) -> None:
    """Raises ValueError for nothing to do, and for names that stand for two agents or two problems."""
    if not agents or not problems or n < 1:
        raise ValueError(f"need agents, problems and n ≥ 1; got {len(agents)}, {len(problems)} and n={n}")
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}={value}: it must be at least 1")
    for what, names in (("agents", [a.name for a in agents]), ("problems", [p.id for p in problems])):
        twice = sorted({x for x in names if names.count(x) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"{what} with the same name: {', '.join(map(repr, twice))}")


def _warn_if_cut(agent: Agent, rollouts: Sequence[Rollout], max_new_tokens: int) -> None:
    share = sum(not r.ended for r in rollouts) / len(rollouts)
    if share > 0.25:
        warnings.warn(
            f"{share:.0%} of the answers of agent {agent.name!r} were cut at {max_new_tokens} tokens and can hardly "
            "earn a reward; raise max_new_tokens",
            stacklevel=5,
        )


def _warn_if_engine_differs(agent: Agent, rollouts: Sequence[Rollout]) -> None:
    """Rounding differs between an engine and the trainer by far less than what these bounds allow."""
    gap = engine_gap(rollouts)
    half = agent.half or "16" in str(getattr(agent.engine, "options", {}).get("dtype"))
    bound = GAP_IN_HALF if half else GAP
    if gap and not gap["engine_gap_mean"] <= bound:
        warnings.warn(
            f"agent {agent.name!r}: the log-probs of its engine are {gap['engine_gap_mean']:.2g} nats from the trainer's on "
            f"average and {gap['engine_gap_max']:.2g} at most (usual is a mean below {bound:g}): the engine samples from another "
            "distribution than the one that learns; compare their dtype, and close the engine (agent.engine.close()) to "
            "have it start anew",
            stacklevel=5,
        )


def divide_time(timings: dict[str, float] | None, seconds: float, parts: Sequence[Mapping[str, float]]) -> None:
    """Adds wall time to timings, divided as the agents' own times are: in workers, many run at once."""
    if timings is None:
        return
    whole = sum(sum(part.values()) for part in parts)
    for name, spent in ((name, spent) for part in parts for name, spent in part.items()):
        timings[name] = timings.get(name, 0.0) + seconds * spent / whole


class timed:
    """Adds the time of a block to timings[name]."""

    def __init__(self, timings: dict[str, float] | None, name: str):
        self.timings, self.name = timings, name

    def __enter__(self):
        self.start = time.perf_counter()

    def __exit__(self, *_):
        if self.timings is not None:
            self.timings[self.name] = self.timings.get(self.name, 0.0) + time.perf_counter() - self.start
