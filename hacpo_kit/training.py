"""The loop around the four verbs: step, train, resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacpo_kit.advantages import Capability, advantage
from hacpo_kit.common.console import Interrupt, progress_mode, step_progress
from hacpo_kit.common.faults import keep_faults
from hacpo_kit.common.timing import divide_time, timed
from hacpo_kit.config import Config
from hacpo_kit.models.agents import Agent, as_list, check_names, run_on_each
from hacpo_kit.models.base import WorkerLost
from hacpo_kit.records import Batch, Pool, StepResult, StepStats
from hacpo_kit.rewards import boxed_math, reward
from hacpo_kit.rollouts import Sampling, sample_pool
from hacpo_kit.runs.changes import check_change, requested_config
from hacpo_kit.runs.evaluation import evaluate
from hacpo_kit.runs.exchange import warn_about_unused_peers
from hacpo_kit.runs.folder import NoFolder, RunFolder, open_folder
from hacpo_kit.runs.metrics import step_metrics
from hacpo_kit.runs.peers import StoredPeers, stored_peers
from hacpo_kit.runs.record import Plan, read_record, reload_agents, reload_problems
from hacpo_kit.runs.run import Run, State
from hacpo_kit.updates import update

if TYPE_CHECKING:
    from hacpo_kit.tasks.problems import Problem, Problems


SAMPLING_PARTS = 8  # with dynamic_sampling a step samples at most this many times


def step(
    agents: Agent | Sequence[Agent],
    problems: Sequence[Problem],
    capability: Capability,
    config: Config,
    *,
    reward_function: Callable = boxed_math,
    progress: bool = False,
    join: Callable[[Pool], Pool] | None = None,
    further: Callable[[int, int], Sequence[Problem]] | None = None,
) -> StepResult:
    """Do one step for all agents: ① rollout → ② reward → ③ advantage → ④ update.

    All batches are built from the same pool before any weight changes, so the order of the agents does not matter. `join` adds
    stored rollouts of other agents to the sampled ones; `further(start, count)` returns the problems after the first `start` of
    the step, which dynamic_sampling needs.

    Raises ValueError for dynamic_sampling without `further`, or with `join`.
    """
    agents = as_list(agents)

    def scored(problems: Sequence[Problem], part: int = 0) -> Pool:
        # ① every agent samples G rollouts for every problem
        sampling = Sampling.of(config)
        sampling = replace(sampling, seed=(sampling.seed, part)) if part else sampling
        pool = sample_pool(agents, problems, sampling, progress=progress)
        pool, seconds = pool if join is None else join(pool), dict(pool.seconds)
        # ② the verifier scores every rollout
        with timed(seconds, "seconds_reward"):
            return replace(reward(pool, reward_function), seconds=seconds)

    pool = _mixed_pool(scored, problems, further, join) if config.dynamic_sampling else scored(problems)
    seconds = dict(pool.seconds)
    # P̂ of every agent over the window (eq. 8)
    capability = capability.observe(pool)
    # ③ ④ every agent learns from the rollouts of all agents
    start = time.perf_counter()
    learned = run_on_each(agents, _learn, pool, capability, config)
    seconds |= divide_time(time.perf_counter() - start, [times for *_, times in learned])
    batches = {agent.name: batch for agent, (batch, _, _) in zip(agents, learned, strict=True)}
    stats = {agent.name: stats for agent, (_, stats, _) in zip(agents, learned, strict=True)}
    warn_about_unused_peers(stats, config)
    metrics = {**seconds, **step_metrics(pool, capability, config, batches, stats)}
    return StepResult(pool, capability, batches, stats, metrics, config)


def _mixed_pool(
    scored: Callable[[Sequence[Problem], int], Pool],
    problems: Sequence[Problem],
    further: Callable[[int, int], Sequence[Problem]] | None,
    join: Callable | None,
) -> Pool:
    """Return a pool in which every problem has different rewards in the own group of some agent (DAPO's dynamic sampling).

    Problems without are replaced by further ones, in at most `SAMPLING_PARTS` parts of a step. A step that finds none keeps
    its first problems.
    """
    if further is None or join is not None:
        raise ValueError("dynamic_sampling needs train() and agents that all sample: stored peers have fixed problems")
    first = scored(problems, 0)
    pool, drawn = first.with_mixed_rewards(), len(problems)
    for part in range(1, SAMPLING_PARTS):
        if not (missing := len(problems) - len(pool.problems)):
            break
        known = {p.id for p in pool.problems}
        candidates = [p for p in further(drawn, missing) if p.id not in known]
        drawn += missing
        if candidates:
            pool = pool.extended(scored(candidates, part).with_mixed_rewards())
    kept = pool if pool.problems else first
    spent = {"rollouts": pool.sampled - len(kept), "tokens": pool.tokens - sum(len(r.token_ids) for r in kept)}
    return replace(kept, seconds=pool.seconds, discarded={"problems": drawn - len(kept.problems), **spent})


def _learn(
    agent: Agent, pool: Pool, capability: Capability, config: Config
) -> tuple[Batch, StepStats, dict[str, float]]:
    """Do ③ and ④ for one learner; return also the time they took."""
    seconds: dict[str, float] = {}
    with timed(seconds, "seconds_advantage"):
        batch = advantage(pool, agent, capability, config)
    with timed(seconds, "seconds_update"):
        stats = update(agent, batch, config)
    return batch, stats, seconds


def train(
    agents: Agent | Sequence[Agent],
    problems: Sequence[Problem],
    config: Config,
    steps: int,
    *,
    out: str | Path | None = None,
    test: Sequence[Problem] | None = None,
    tests: Mapping[str, Sequence[Problem]] | None = None,
    eval_every: int = 4,
    eval_k: int = 1,
    save_every: int = 5,
    samples: int = 4,
    save_first: bool = False,
    record_every: int = 1,
    reward_function: Callable = boxed_math,
    callbacks: Sequence[Callable[[StepResult], Any]] = (),
    changes: Mapping[str, Any] | None = None,
    progress: str = "auto",
    peers: str | Path | StoredPeers | None = None,
) -> Run:
    """Train the agents in place for `steps` steps; with a run folder `out`, record everything there and resume from it.

    The folder holds config.json, run.json, metrics.jsonl (one line per step), samples.jsonl (`samples` rollouts per agent
    and step), checkpoints (every `save_every` steps and at the end; with `save_first` also before the first step), and the
    experience of every `record_every` steps (0: none), which `widgets.explorer` opens.
    `test` is evaluated before training, every `eval_every` steps and at the end; each further set of `tests` before
    training and at the end (metrics `avg@1/<name>`). Ctrl-C stops the run after the current step, a second one at once.

    A callback is called after every step. If it returns True, the run stops. If it returns a Config, such as
    `result.config.replace(lr=1e-5)`, the next step uses it; `changes` does this before the first step of this call. Changes
    are recorded in changes.jsonl, and a resumed run applies them again.
    `peers`: the folder of a finished run or a file of rollouts, from which the agents learn without their models.
    `progress`: "bar", "lines", "off", or "auto" (lines in an unattended notebook, as under papermill).

    A number that is not finite ends the run before the optimiser uses it; faults/ keeps the rollouts that the error names.
    If the disk is full, OSError ends the run, and the same call resumes it from its newest checkpoint. With `out`, the
    worker of an agent that is lost is replaced, and the run resumes from its newest checkpoint with a warning.

    Raises ValueError if `out` holds a run with other settings, agents, problems or reward function, for an interval below 1,
    and for a change of a setting that is fixed (`changes.FIXED`); WorkerLost if a worker is lost without `out`, or several
    times in the same step.
    """
    agents = as_list(agents)
    check_names(agents)
    plan = Plan(
        problems, steps, test, {} if tests is None else tests, eval_every, eval_k, save_every, samples, save_first, record_every,
        reward_function, callbacks, progress_mode(progress), stored_peers(peers),
    )  # fmt: skip
    plan.problems.batch(0, config.prompts_per_step, seed=config.seed)  # raises ValueError if there are too few
    changes = dict(changes or {})
    with Interrupt() as interrupt, open_folder(out) as folder:
        while True:
            try:
                return _train(agents, config, plan, folder, changes, interrupt)
            except WorkerLost as lost:
                folder.replace_workers(agents, lost)


def _train(
    agents: Sequence[Agent],
    config: Config,
    plan: Plan,
    folder: RunFolder | NoFolder,
    changes: dict[str, Any],
    interrupt: Interrupt,
) -> Run:
    """Do the work of `train` until the run ends or a worker is lost; empties `changes` when they are recorded."""
    state, history, config = folder.open(agents, plan, config)
    result, started = None, time.perf_counter() - state.seconds

    def change(wanted: Config) -> Config:
        if check_change(config, wanted, plan.problems):
            folder.add_change(state.step, config, wanted)
        return wanted

    def finish(line: dict[str, Any]) -> None:
        with keep_faults(folder.path, state.step):
            _evaluate(line, agents, plan, config)
        history.append(line)
        folder.add_line(line)

    # recorded before the first step, because after a stop no callback requests them again
    config = change(config.replace(**changes))
    changes.clear()
    end = interrupt.pressed
    with step_progress(plan.progress, plan.steps, state.step) as report:
        if not history:
            finish({**state.totals, "agents": {}})
        if plan.save_first and not state.step:
            folder.save(agents, state)
        while state.step < plan.steps and not end:
            problems = plan.problems.batch(state.position, config.prompts_per_step, seed=config.seed)
            capability = replace(state.capability, window=config.window)  # the window may have changed
            options = _step_options(plan, state, config)
            with keep_faults(folder.path, state.step + 1):
                result = step(agents, problems, capability, config, **options)
            state = state.after(result.capability, result.pool, time.perf_counter() - started)
            result = replace(result, metrics={**state.totals, **result.metrics})
            finish(result.metrics)
            folder.add_step(result, agents, plan)
            report(result.metrics)
            answers = [callback(result) for callback in plan.callbacks]  # all of them, before one of them ends the run
            config, before = change(requested_config(answers) or config), config
            # read once, so that a run that ends here has been saved
            end = any(a for a in answers if not isinstance(a, Config)) or interrupt.pressed or state.step == plan.steps
            if end or state.step % plan.save_every == 0 or config != before:
                folder.save(agents, state)
    stopped = state.step < plan.steps
    if stopped and plan.progress != "off":
        next_call = (
            f"the same call with out={str(folder.path)!r} resumes" if folder.path else "nothing was saved without out="
        )
        print(f"stopped after step {state.step} of {plan.steps}; {next_call}")
    return Run(agents, config, tuple(history), state, folder.path, stopped, result)


def _step_options(plan: Plan, state: State, config: Config) -> dict[str, Any]:
    """Return the options of `step` for the step after `state`."""

    def further(start: int, count: int) -> Sequence[Problem]:
        return plan.problems.batch(state.position + start, count, seed=config.seed)

    options = {"reward_function": plan.reward_function, "progress": plan.progress == "bar"}
    join = plan.peers and partial(plan.peers.join, step=state.step + 1, config=config)
    return {**options, "join": join, "further": further}


def _evaluate(line: dict[str, Any], agents: Sequence[Agent], plan: Plan, config: Config) -> None:
    """Evaluate the test sets that are due and add the scores to a line of metrics; a set without a score is omitted."""
    # as many rollouts at once as in training, which fit in memory
    sampling = {"max_new_tokens": config.max_new_tokens, "seed": config.seed, "batch_size": config.rollout_batch}
    options = {"reward_function": plan.reward_function, "progress": plan.progress == "bar"}
    for suffix, problems in plan.sets_due(line["step"]).items():
        with timed(line, "seconds_evaluation"):
            scores = evaluate(agents, problems, plan.eval_k, **options, **sampling).agents
        for name, values in scores.items():
            of_agent = line["agents"].setdefault(name, {})
            for metric, value in values.items():
                if metric.startswith(("avg@", "best@")) and not math.isnan(value):
                    of_agent[f"{metric}{suffix}"] = value


def resume(
    folder: str | Path,
    *,
    steps: int | None = None,
    problems: Problems | None = None,
    test: Problems | None = None,
    tests: Mapping[str, Problems] | None = None,
    reward_function: Callable | None = None,
    agents: Sequence[Agent] | None = None,
    loading: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Resume a run from its folder, up to its own number of steps or to `steps`.

    The agents are loaded with the same options as before; `loading` replaces options of `load_agents`, such as device or
    workers. Agents from models in memory, and an own reward function, have to be passed again. `options` are those of `train`.

    Raises FileNotFoundError for a folder without a run, ValueError for a missing argument and for a run of another version.
    """
    folder = Path(folder)
    if not (folder / "run.json").exists():
        raise FileNotFoundError(f"{folder} holds no run: run.json is missing")
    config, record = Config.read(folder / "config.json"), read_record(folder)
    if reward_function is None and record["reward_function"] != boxed_math.__qualname__:
        raise ValueError(
            f"run {folder} used reward function {record['reward_function']}; call hk.resume with reward_function="
        )
    if agents is None:
        agents = reload_agents(record, loading or {})
    problems = reload_problems(folder, record["problems"]) if problems is None else problems
    test = reload_problems(folder, record["test"]) if test is None else test
    tests = dict(tests or {})
    tests |= {name: reload_problems(folder, about) for name, about in record["tests"].items() if name not in tests}
    kept = ("eval_every", "eval_k", "save_every", "samples", "record_every")
    stored = record.get("peers") and StoredPeers(**record["peers"])
    options = {"test": test, "tests": tests, "peers": stored, **{name: record[name] for name in kept}, **options}
    steps = record["steps"] if steps is None else steps
    return train(agents, problems, config, steps, out=folder, reward_function=reward_function or boxed_math, **options)
