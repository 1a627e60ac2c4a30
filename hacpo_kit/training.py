"""The loop around the four verbs: step, train, resume."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from hacpo_kit.advantages import Capability, advantage
from hacpo_kit.common.console import unattended
from hacpo_kit.common.faults import keep_faults
from hacpo_kit.common.files import Lines, locked, read_steps, remove_leftovers, truncate_lines, write_json
from hacpo_kit.common.timing import divide_time, timed
from hacpo_kit.config import Config, whole_number
from hacpo_kit.models.agents import Agent, as_list, check_names, each, load_agent
from hacpo_kit.models.remote import WorkerLost, load_in_workers
from hacpo_kit.records import Batch, Pool, StepResult, StepStats
from hacpo_kit.rewards import boxed_math, reward
from hacpo_kit.rollouts import Sampling, sample_pool
from hacpo_kit.runs.changes import FILE as CHANGES
from hacpo_kit.runs.changes import FIXED, check_change, record_change, replay, requested_config
from hacpo_kit.runs.checkpoints import State, checkpoints, read_record, restore_newest, save_checkpoint, versions
from hacpo_kit.runs.evaluation import evaluate
from hacpo_kit.runs.experience import Experience, drop_after, path_of
from hacpo_kit.tasks.loading import load_problems
from hacpo_kit.tasks.problems import Problems
from hacpo_kit.updates import update

if TYPE_CHECKING:
    import pandas as pd

    from hacpo_kit.tasks.problems import Problem


LOSSES = 3  # of workers in one step, after which the run ends


def step(
    agents: Agent | Sequence[Agent],
    problems: Sequence[Problem],
    capability: Capability,
    config: Config,
    *,
    reward_function: Callable = boxed_math,
    progress: bool = False,
) -> StepResult:
    """One step for all agents: ① rollout → ② reward → ③ advantage → ④ update.

    No learner's batch depends on a model, so the order of the agents does not matter.
    """
    agents = as_list(agents)
    pool = sample_pool(agents, problems, Sampling.of(config), progress=progress)
    timings = dict(pool.seconds)
    with timed(timings, "seconds_reward"):
        pool = reward(pool, reward_function)
    capability = capability.observe(pool)
    start = time.perf_counter()
    learned = each(agents, _learn, pool, capability, config)
    timings |= divide_time(time.perf_counter() - start, [times for *_, times in learned])
    names = [agent.name for agent in agents]
    batches, stats = ({name: parts[i] for name, parts in zip(names, learned, strict=True)} for i in (0, 1))
    known = [name for name in names if name in capability]  # without a scorable rollout there is no capability
    metrics = {
        **timings,
        "omega": {a: {b: capability.ratio(a, b) for b in known if b != a} for a in known},
        "agents": {
            n: {
                **({"capability": capability[n]} if n in known else {}),
                **pool.metrics(n),
                **stats[n].metrics(),
                **({"solved_prompts": batches[n].solved_prompts / len(pool.problems)} if config.exclude_solved else {}),
            }
            for n in names
        },
    }
    return StepResult(pool, capability, batches, stats, metrics, config)


def _learn(
    agent: Agent, pool: Pool, capability: Capability, config: Config
) -> tuple[Batch, StepStats, dict[str, float]]:
    """③ and ④ of one learner, and their times."""
    times: dict[str, float] = {}
    with timed(times, "seconds_advantage"):
        batch = advantage(pool, agent, capability, config)
    with timed(times, "seconds_update"):
        stats = update(agent, batch, config)
    return batch, stats, times


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """What `train` returns: the agents are trained in place, the history is one entry a step (step 0: before training)."""

    agents: Sequence[Agent]
    config: Config  # the settings of the next step, were there one: those of the start and every change since
    history: tuple[dict[str, Any], ...]
    state: State
    folder: Path | None
    stopped: bool  # ended before its last step, by Ctrl-C or a callback
    last: StepResult | None

    def __repr__(self) -> str:
        names = ", ".join(repr(a.name) for a in self.agents)
        where = f", in {str(self.folder)!r}" if self.folder else ""
        return f"Run({self.config.method}: {self.state.step} steps of {names}{', stopped' * self.stopped}{where})"

    @property
    def capability(self) -> Capability:
        """Capability after the last step."""
        return self.state.capability

    def to_frame(self) -> pd.DataFrame:
        """One row a step and agent, with the metrics as columns."""
        return history_frame(self.history)


def history_frame(history: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Metric lines as a table: one row a step and agent."""
    import pandas as pd

    shared = [{k: v for k, v in line.items() if k not in ("agents", "omega")} for line in history]
    rows = [
        {**common, "agent": name, **values}
        for common, line in zip(shared, history, strict=True)
        for name, values in line["agents"].items()
    ]
    return pd.DataFrame(rows)


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
) -> Run:
    """Trains the agents in place for `steps` steps; with `out`, records everything there and goes on from there.

    Writes metrics.jsonl (one line a step), samples.jsonl (rollouts with reward and advantage), config.json, run.json,
    checkpoints, and every `record_every` steps (0: never) the step's whole experience, which `widgets.explorer` opens.
    Evaluates on `test` before training, every `eval_every` steps and at the end, and on each further set
    of `tests` before training and at the end (metrics `avg@1/<name>`). Saves every `save_every` steps and at the end; with
    `save_first` also before the first step. Ctrl-C ends the run cleanly after the current step, a second one at once.

    A callback is called after every step. If it returns True, the run ends there. If it returns a Config, such as
    `result.config.replace(lr=1e-5)`, the next step uses that; `changes` does the same before the first step of this call.
    Every change is a line of changes.jsonl and saves a checkpoint; a resumed run gets its changes back from there.
    `progress`: "bar", "lines", "off", or "auto" (lines where nobody watches, as under papermill).

    A number that is not finite ends the run before the optimiser moves with it; the error names the rollouts, and the
    folder faults/ keeps them. A disk that takes nothing ends no run: what it cannot take is told, lines wait in memory, and
    the last good checkpoint stays; only a checkpoint at the end that cannot be written is an OSError.

    A lost worker is replaced, where there is `out`: all agents go back to the last checkpoint, and the run goes on from
    there as a resumed one does. A warning says so.

    Raises ValueError if `out` holds a run with other settings, agents, problems or reward function, and for an interval
    below 1; and for a change of what a run is, such as its method or seed (`changes.FIXED`). Raises WorkerLost if a worker
    is lost without `out`, or time and again in the same step.
    """
    counts = {"steps": steps, "eval_every": eval_every, "eval_k": eval_k, "save_every": save_every}
    steps, eval_every, eval_k, save_every = (whole_number(name, value, least=1) for name, value in counts.items())
    record_every = whole_number("record_every", record_every, least=0)
    agents = as_list(agents)
    with Interrupt() as watch:
        losses, changes = Counter(), dict(changes or {})
        while True:
            try:
                return _train(
                    agents, problems, config, steps, out, test, tests, eval_every, eval_k, save_every, samples, save_first,
                    record_every, reward_function, callbacks, changes, progress, watch,
                )  # fmt: skip
            except WorkerLost as lost:
                if out is None:
                    raise
                _replace_workers(Path(out), agents, lost, losses)


def _train(
    agents, problems, config, steps, out, test, tests, eval_every, eval_k, save_every, samples, save_first, record_every,
    reward_function, callbacks, changes, progress, watch,
) -> Run:  # fmt: skip
    """As `train`, up to the end or to the first lost worker."""
    problems = _as_problems(problems)
    tests = _as_tests(tests)
    problems.batch(0, config.prompts_per_step, seed=config.seed)  # too few problems: refused before anything is written
    check_names(agents)
    folder = Path(out) if out is not None else None
    mode = _progress_mode(progress)
    state, history, last = State(capability=Capability(config.window)), [], None

    def finish_line(line: dict[str, Any], at: State) -> None:
        due = {"": test} if test is not None and (at.step % eval_every == 0 or at.step == steps) else {}
        due |= {f"/{name}": further for name, further in tests.items()} if at.step in (0, steps) else {}
        for mark, asked in due.items():
            with timed(line, "seconds_evaluation"), keep_faults(folder, at.step):
                scores = _scores(agents, asked, eval_k, config, reward_function, progress=mode == "bar")
            for name, values in scores.items():
                line["agents"].setdefault(name, {}).update({f"{m}{mark}": v for m, v in values.items()})
        history.append(line)
        if folder is not None:
            metrics.add([line])

    lines = [folder and Lines(folder / name) for name in ("metrics.jsonl", "samples.jsonl", CHANGES)]
    metrics, shown, changed = lines
    with locked(folder and folder / ".lock", what=f"run {folder}"):
        if folder is not None:
            sets, intervals = (problems, test, tests), (eval_every, eval_k, save_every)
            record = _record(agents, *sets, config, steps, *intervals, samples, record_every, reward_function)
            state, history = _open_run(folder, record, config, agents, state)
            config = replay(folder, state.step, config)
        config = _changed(config, config.replace(**changes), problems, changed, state.step)
        if changed is not None:
            changed.write()  # on record, or nothing begins: unlike a callback, nobody asks for it again after a stop
        changes.clear()  # not to be made again should a worker be lost
        started, end = time.perf_counter() - state.seconds, watch.pressed
        with _reporter(mode, steps, state.step) as report:
            if not history:
                finish_line({**state.totals, "agents": {}}, state)
            if folder is not None and save_first and not state.step:
                _save(folder, agents, state, lines)
            while state.step < steps and not end:
                drawn = problems.batch(state.position, config.prompts_per_step, seed=config.seed)
                settings = {"reward_function": reward_function, "progress": mode == "bar"}
                capability = replace(state.capability, window=config.window)  # the window may have changed
                with keep_faults(folder, state.step + 1):
                    last = step(agents, drawn, capability, config, **settings)
                state = state.after(last.capability, last.pool, time.perf_counter() - started)
                last = replace(last, metrics={**state.totals, **last.metrics})
                finish_line(last.metrics, state)
                if folder is not None:
                    shown.add(sample_table(last, state.step, samples))
                    if record_every and state.step % record_every == 0:
                        _record_experience(folder, last, agents, state.step)
                report(history[-1])
                answers = [callback(last) for callback in callbacks]  # every callback runs, then any may end the run
                before, config = config, _changed(config, requested_config(answers), problems, changed, state.step)
                # read once: what ends here has been saved
                end = any(a for a in answers if not isinstance(a, Config)) or watch.pressed
                if folder is not None and (
                    state.step % save_every == 0 or state.step == steps or end or config is not before
                ):
                    _save(folder, agents, state, lines, last=end or state.step == steps)
    stopped = state.step < steps
    if stopped and mode != "off":
        where = f"; the same call with out={str(folder)!r} goes on" if folder else "; without out= nothing was saved"
        print(f"stopped after step {state.step} of {steps}{where}")
    return Run(agents, config, tuple(history), state, folder, stopped, last)


def _save(folder: Path, agents: Sequence[Agent], state: State, lines: Sequence[Lines], *, last: bool = False) -> None:
    """A checkpoint, once the lines up to it are written; if the disk takes none, the run goes on with a warning.

    Raises OSError if it is the `last` one of this call, since what was learned is then in memory alone.
    """
    try:
        for file in lines:
            file.write()
        save_checkpoint(folder, agents, state)
    except OSError as fault:
        if fault.errno is None:  # not what the disk says, but that the folder cannot be the right one
            raise
        saved = checkpoints(folder)
        kept = f"the last good one is {saved[-1].name}" if saved else "there is none yet"
        told = f"the checkpoint after step {state.step} of {folder} cannot be written ({fault}); {kept}"
        if last:
            raise OSError(
                fault.errno,
                f"{told}. The agents in this process are trained, and hk.save(folder, agents, state) writes them elsewhere; "
                "the same call, once there is room, goes on from the last good checkpoint",
            ) from fault
        warnings.warn(f"{told}; the run goes on and tries again at its next checkpoint", stacklevel=4)


def _record_experience(folder: Path, result: StepResult, agents: Sequence[Agent], step: int) -> None:
    try:
        Experience.of_step(result, agents, step).save(path_of(folder, step))
    except OSError as fault:
        warnings.warn(f"step {step} is trained but not recorded: {fault}", stacklevel=4)


def _replace_workers(folder: Path, agents: Sequence[Agent], lost: WorkerLost, losses: Counter[int]) -> None:
    """New workers for the lost ones; without a checkpoint, for all, so that every agent is as it was loaded.

    `losses` counts them by step; raises WorkerLost at the last one that a step may have.
    """
    step = 1 + max((line["step"] for line in read_steps(folder / "metrics.jsonl")), default=-1)
    losses[step] += 1
    if losses[step] == LOSSES:
        raise WorkerLost(
            f"{LOSSES} times a worker was lost in step {step}, at last: {lost}. The run stays as it is at its last checkpoint; "
            f"the same call with out={str(folder)!r} goes on from there"
        ) from lost
    gone = ", ".join(f"{agent.name!r} ({agent.lost})" for agent in agents if agent.remote and agent.lost)
    saved = checkpoints(folder)
    for agent in agents:
        if agent.remote and (agent.lost or not saved):
            agent.reload()
    back = int(saved[-1].name.removeprefix("step-")) if saved else 0
    warnings.warn(
        f"step {step} lost the worker of agent {gone}; it has a new one, every agent is as after step {back}, and the run goes "
        "on from there",
        stacklevel=3,
    )


def _changed(config: Config, wanted: Config | None, problems: Problems, lines: Lines | None, after: int) -> Config:
    """The settings from the next step on, their changes checked and recorded; the same object if nothing changes."""
    if wanted is None or not check_change(config, wanted, problems):
        return config
    record_change(lines, after, config, wanted)
    return wanted


def _scores(agents, test, k: int, config: Config, reward_function, progress: bool) -> dict[str, dict[str, float]]:
    """Test scores of every agent; a score that is no number, since nothing was scorable, is absent."""
    settings = dict(max_new_tokens=config.max_new_tokens, reward_function=reward_function, progress=progress)
    # as many answers at once as in training: what fits there fits here
    result = evaluate(agents, test, k, seed=config.seed, batch_size=config.rollout_batch, **settings)
    return {
        name: {m: v for m, v in values.items() if m.startswith(("avg@", "best@")) and not math.isnan(v)}
        for name, values in result.agents.items()
    }


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
    """Goes on with a run from its folder alone, to its own number of steps or to `steps`.

    Agents are loaded as they were; `loading` changes options of `load_agents` for all of them, such as device or workers.
    What the folder cannot name (problems or agents from memory, an own reward function) has to be given again.
    Raises FileNotFoundError for a folder without a run, ValueError for what has to be given.
    """
    folder = Path(folder)
    if not (folder / "run.json").exists():
        raise FileNotFoundError(f"{folder} holds no run: run.json is missing")
    record, config = read_record(folder), Config.read(folder / "config.json")
    if reward_function is None:
        if record["reward_function"] != boxed_math.__qualname__:
            raise ValueError(
                f"run {folder} used the reward function {record['reward_function']}; give reward_function="
            )
        reward_function = boxed_math
    if agents is None:
        if unknown := [a["name"] for a in record["agents"] if a["origin"] is None]:
            raise ValueError(f"agents {unknown} came from memory and cannot be loaded again; give agents=")
        agents = _load_again(record, loading or {})
    problems = _again("problems", problems, record["problems"])
    test = _again("test", test, record["test"]) if record["test"] else None
    given, described = tests or {}, record.get("tests", {})
    tests = {name: _again(f"test set {name!r}", given.get(name), about) for name, about in described.items()} | given
    kept = ("eval_every", "eval_k", "save_every", "samples", "record_every")
    options = {**{k: record[k] for k in kept if k in record}, **options}
    return train(
        agents,
        problems,
        config,
        record["steps"] if steps is None else steps,
        out=folder,
        test=test,
        tests=tests,
        reward_function=reward_function,
        **options,
    )


def _load_again(record: Mapping[str, Any], loading: Mapping[str, Any]) -> list[Agent]:
    where = {**(record.get("workers") or {}), **loading}
    loading = {name: where.pop(name) for name in loading if name not in ("workers", "threads", "num_gpus")}
    sources = [(a["origin"], {**_usable(a), **loading}) for a in record["agents"]]
    workers = where.pop("workers", None)
    if workers is not None:
        try:
            return load_in_workers(sources, workers, **where)
        except ModuleNotFoundError as error:
            warnings.warn(f"{error}; the agents are loaded into this process, for the same result", stacklevel=3)
    return [load_agent(source, **options) for source, options in sources]


def _usable(agent: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which an agent was loaded; its device only where there is such a one."""
    options = {name: value for name, value in agent.items() if name not in ("origin", "chat_template")}
    kind, _, index = options.get("device", "cpu").partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        options.pop("device")
    return options


def _again(what: str, given: Problems | None, described: Mapping[str, Any]) -> Problems:
    if given is not None:
        return given
    if described["source"] is None:
        remedy = f"{what}=" if what.isidentifier() else "tests= with it"
        raise ValueError(f"the run's {what} came from memory and cannot be loaded again; give {remedy}")
    return load_problems(**described["source"])


def sample_table(result: StepResult, step: int, count: int) -> list[dict[str, Any]]:
    """A few rollouts of each agent with reward and every learner's advantage, on a problem whose rewards differ if any do."""
    advantages: dict[int, dict[str, float]] = {}
    for name, batch in result.batches.items():
        for index, value in zip(batch.index, batch.advantages.tolist(), strict=True):
            advantages.setdefault(index, {})[name] = value
    first = result.pool.problems[result.pool.informative_problem]
    rows, shown = [], dict.fromkeys(result.pool.agents, 0)
    for index, r in enumerate(result.pool):
        if r.problem == first.id and shown[r.source] < count:
            shown[r.source] += 1
            row = {"step": step, "problem": r.problem, "prompt": first.prompt, "gold": first.gold, "source": r.source}
            row |= {"text": r.text, "reward": r.reward, "status": r.status, "length": len(r.token_ids)}
            rows.append({**row, "mean_logp": r.mean_logp(), "advantage": advantages.get(index, {})})
    return rows


# ── run folder ───────────────────────────────────────────────────────────────────────────────────────────────────


def _as_problems(problems: Sequence[Problem]) -> Problems:
    return problems if isinstance(problems, Problems) else load_problems(list(problems))


def _as_tests(tests: Mapping[str, Sequence[Problem]] | None) -> dict[str, Problems]:
    if tests is not None and not isinstance(tests, Mapping):
        raise TypeError(f"tests must map names to problems, as in {{'sums': problems}}, not {type(tests).__name__}")
    tests = dict(tests or {})
    if bad := [name for name in tests if not isinstance(name, str) or not name.strip()]:
        raise ValueError(f"every further test set needs a name, which becomes part of a metric's name, not {bad[0]!r}")
    if empty := [name for name, problems in tests.items() if not len(problems)]:
        raise ValueError(f"test set {empty[0]!r} holds no problems")
    return {name: _as_problems(problems) for name, problems in tests.items()}


def _record(
    agents, problems, test, tests, config, steps, eval_every, eval_k, save_every, samples, record_every, reward_function
) -> dict:
    def described(p):
        if p is None:
            return None
        p = _as_problems(p)
        return {"source": p.source, "fingerprint": p.fingerprint(), "count": len(p)}

    return {
        "steps": steps, "seed": config.seed, "eval_every": eval_every, "eval_k": eval_k, "save_every": save_every,
        "samples": samples, "record_every": record_every,
        "reward_function": getattr(reward_function, "__qualname__", type(reward_function).__qualname__),
        "agents": [
            {**a.loading, "name": a.name, "origin": a.origin, "prompt_format": "chat" if a.chat else "plain",
             "template": a.template, "chat_template": _template_mark(a),
             "dtype": str(a.dtype).removeprefix("torch."), "device": str(a.device)}
            for a in agents
        ],
        "workers": next((a.workers for a in agents if a.remote), None),
        "problems": described(problems), "test": described(test),
        "tests": {name: described(further) for name, further in tests.items()}, "versions": versions(),
    }  # fmt: skip


def _template_mark(agent: Agent) -> str | None:
    """Tells chat templates apart: the checkpoint's weights meet the template of the folder that the agent came from."""
    text = agent.tokenizer.chat_template
    return hashlib.sha256(repr(text).encode()).hexdigest()[:16] if text else None


def _open_run(folder: Path, record: dict, config: Config, agents, state: State) -> tuple[State, list[dict[str, Any]]]:
    """Starts a run folder, or goes on from its last checkpoint."""
    if (folder / "run.json").exists():
        _check_same(folder, record, config)
        if not checkpoints(folder):
            _check_not_done(folder)
    elif folder.exists() and {p.name for p in folder.iterdir() if not p.name.endswith(".tmp")} - {
        "config.json",
        ".lock",
    }:
        raise ValueError(f"{folder} is not empty and holds no run; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder, folder / "checkpoints")
    for name, content in (("config.json", config.to_dict()), ("run.json", record)):
        path = folder / name
        if not path.exists() or json.loads(path.read_text(encoding="utf-8")) != content:
            write_json(path, content)
    if (restored := restore_newest(folder, agents)) is not None:
        state = restored
    elif any(agent.updates for agent in agents):
        raise ValueError("a new run needs agents as they were loaded; these have been trained: load them again")
    history = truncate_lines(folder / "metrics.jsonl", state.step)
    if missing := sorted(set(range(state.step + 1)) - {line["step"] for line in history} if state.step else ()):
        warnings.warn(
            f"{folder / 'metrics.jsonl'} lacks the steps {missing}, which the checkpoint has made", stacklevel=4
        )
    truncate_lines(folder / "samples.jsonl", state.step)
    drop_after(folder, state.step)
    return state, history


def _check_not_done(folder: Path) -> None:
    """Without a checkpoint a stopped run begins anew, with a warning; a finished one is refused, which would lose its record."""
    planned = read_record(folder)["steps"]
    done = max((line["step"] for line in read_steps(folder / "metrics.jsonl")), default=0)
    if done >= planned and not (folder / "checkpoints").exists():  # it is there while the first one is written
        raise ValueError(
            f"{folder} has all its {planned} steps on record and no checkpoint, so it cannot go on; choose another folder, or "
            "remove this one to train anew"
        )
    if done:
        warnings.warn(
            f"{folder} has no checkpoint: its {done} recorded steps are made again from step 1 on", stacklevel=5
        )


def _check_same(folder: Path, record: dict, config: Config) -> None:
    """A run goes on only as what it was; its length and its intervals may change."""
    old = read_record(folder)
    differences = Config.read(folder / "config.json").differences(config)
    memory = differences.pop("microbatch_tokens", None)  # may change, or nobody could go on after running out of memory
    changed, elsewhere = [f"{k}: {a!r} → {b!r}" for k, (a, b) in differences.items()], []
    if [a["name"] for a in old["agents"]] != [a["name"] for a in record["agents"]]:
        changed.append(f"agents: {[a['name'] for a in old['agents']]} → {[a['name'] for a in record['agents']]}")
    else:
        for a, b in zip(old["agents"], record["agents"], strict=True):
            a = {"chat_template": b["chat_template"], **a}  # not on the record of earlier versions
            # not the origin: a folder may have moved
            keys = ("prompt_format", "template", "chat_template", "dtype", "lora", "revision")
            changed += [f"{k} of {a['name']}: {a.get(k)!r} → {b.get(k)!r}" for k in keys if a.get(k) != b.get(k)]
            elsewhere += [
                f"{k} of {a['name']}: {a[k]} → {b.get(k)}"
                for k in a
                if k not in (*keys, "name", "origin") and a[k] != b.get(k)
            ]
    if old["reward_function"] != record["reward_function"]:
        changed.append(f"reward_function: {old['reward_function']} → {record['reward_function']}")
    for what in ("problems", "test"):
        before, now = ((r[what] or {}).get("fingerprint") for r in (old, record))
        if before != now:
            changed.append(f"{what}: contents differ")
    before, now = ({n: p["fingerprint"] for n, p in r.get("tests", {}).items()} for r in (old, record))
    for name in before | now:
        if before.get(name) != now.get(name):
            how = "contents differ" if name in before and name in now else "added" if name in now else "left out"
            changed.append(f"test set {name!r}: {how}")
    if changed:
        within = differences and len(changed) == len(differences) and not set(differences) & set(FIXED)
        remedy = ", or go on with it as it was and give changes={…} for settings that are to change" if within else ""
        raise ValueError(
            f"{folder} holds a run with other settings ({'; '.join(changed)}); choose another folder for this one{remedy}"
        )
    before, now = old["versions"], record["versions"]
    other = [f"{k} {before.get(k)} → {now.get(k)}" for k in {**before, **now} if before.get(k) != now.get(k)]
    other += elsewhere
    other += [f"microbatch_tokens {memory[0]} → {memory[1]}"] if memory else []
    if other:
        warnings.warn(f"{folder} was begun with other {', '.join(other)}: it does not end bit for bit", stacklevel=5)


# ── progress and stops ───────────────────────────────────────────────────────────────────────────────────────────


class Interrupt:
    """Ctrl-C asks for an end after the current step; pressed twice, it interrupts at once. Only the main thread gets signals."""

    pressed = False

    def __init__(self, told: str = "stopping after this step"):
        self.told = told

    def __enter__(self) -> Interrupt:
        self.previous = None
        if threading.current_thread() is threading.main_thread():
            self.previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, signum, frame) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        print(f"\n{self.told} (again: at once)", file=sys.stderr, flush=True)

    def __exit__(self, *_) -> None:
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)


def _progress_mode(progress: str) -> str:
    if progress not in ("auto", "bar", "lines", "off"):
        raise ValueError(f"progress={progress!r}: it takes 'auto', 'bar', 'lines' or 'off'")
    if progress == "auto":
        return os.environ.get("HACPO_KIT_PROGRESS") or ("lines" if unattended() else "bar")
    return progress


@contextlib.contextmanager
def _reporter(mode: str, steps: int, done: int):
    """A function that shows one finished step, as a bar or as at most twenty lines a run."""
    bar = tqdm(total=steps, initial=done, desc="train", unit="step", disable=mode != "bar")
    every = max(1, steps // 20)

    def report(line: dict[str, Any]) -> None:
        rewards = ", ".join(f"{n} {v['reward']:.2f}" for n, v in line["agents"].items() if v.get("reward") is not None)
        bar.set_postfix_str(rewards, refresh=False)
        bar.update(1)
        if mode == "lines" and (line["step"] % every == 0 or line["step"] == steps):
            print(f"step {line['step']}/{steps}: mean reward {rewards}", flush=True)

    with bar:
        yield report


__all__ = ["Run", "StepResult", "history_frame", "resume", "step", "train"]
