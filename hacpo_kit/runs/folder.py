"""The folder of a run: started or resumed, extended after every step, saved in checkpoints."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hacpo_kit.advantages import Capability
from hacpo_kit.common.files import append_lines, locked, read_steps, remove_leftovers, write_json, write_lines
from hacpo_kit.config import Config
from hacpo_kit.models.agents import Agent
from hacpo_kit.models.base import WorkerLost
from hacpo_kit.models.remote import restart_workers
from hacpo_kit.records import StepResult
from hacpo_kit.runs.changes import FILE as CHANGES
from hacpo_kit.runs.changes import apply_changes, change_lines
from hacpo_kit.runs.checkpoints import checkpoints, restore_newest, save_checkpoint, step_of
from hacpo_kit.runs.experience import Experience, path_of, recorded_steps
from hacpo_kit.runs.record import Plan, check_same_run, read_record, store_problems
from hacpo_kit.runs.run import State

LOSSES = 3  # of workers in one step, after which the run ends


class NoFolder:
    """A run without a folder: nothing is recorded, and a lost worker ends it."""

    path = None

    def open(self, agents: Sequence[Agent], plan: Plan, config: Config) -> tuple[State, list[dict[str, Any]], Config]:
        """Return state, history and settings of a new run."""
        return State(capability=Capability(config.window)), [], config

    def add_line(self, *_: Any) -> None:
        """Do nothing."""

    add_step = add_change = save = add_line

    def replace_workers(self, agents: Sequence[Agent], lost: WorkerLost) -> None:
        """Raise the error, since there is no checkpoint to go back to."""
        raise lost


class RunFolder:
    """A run on disk; the methods are those of `NoFolder`.

    A file that cannot be written, for example on a full disk, ends the run with an OSError that names the newest checkpoint.
    """

    def __init__(self, path: Path):
        self.path, self.losses = path, Counter()
        self.metrics, self.samples, self.changes = (path / n for n in ("metrics.jsonl", "samples.jsonl", CHANGES))

    def open(self, agents: Sequence[Agent], plan: Plan, config: Config) -> tuple[State, list[dict[str, Any]], Config]:
        """Start the run, or restore its newest checkpoint; return its state, history and settings in force.

        Raises ValueError if the folder holds another run or other files, and for trained agents in a new run.
        """
        record = plan.record(agents, config)
        self._check(record, config)
        if (self.path / "run.json").exists() and (origin := read_record(self.path).get("origin")):
            record["origin"] = origin  # of a fork
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, *(self.path / name for name in ("checkpoints", "experience", "problems"))):
            remove_leftovers(folder)
        write_json(self.path / "config.json", config.to_dict())
        write_json(self.path / "run.json", record)
        store_problems(self.path, plan)
        state = restore_newest(self.path, agents)
        if state is None:
            if any(agent.updates for agent in agents):
                raise ValueError("a new run needs agents without updates; load them again")
            state = State(capability=Capability(config.window))
        history, changes = self._go_back_to(state.step)
        return state, history, apply_changes(config, changes)

    def _check(self, record: Mapping[str, Any], config: Config) -> None:
        """Raise ValueError if this run cannot use the folder."""
        if not (self.path / "run.json").exists():
            names = {p.name for p in self.path.glob("*") if not p.name.endswith(".tmp")}
            if names - {"config.json", ".lock"}:
                raise ValueError(f"{self.path} is not empty and holds no run; choose another folder")
            return
        check_same_run(self.path, record, config)
        if checkpoints(self.path):
            return
        done = max((line["step"] for line in read_steps(self.metrics)), default=0)
        # checkpoints/ exists while the first checkpoint is written
        if done >= read_record(self.path)["steps"] and not (self.path / "checkpoints").exists():
            raise ValueError(
                f"{self.path} has recorded all its {done} steps and has no checkpoint, so it cannot resume; choose another "
                "folder, or remove this one to train again"
            )
        if done:
            warnings.warn(
                f"{self.path} has no checkpoint: it restarts, and its {done} steps are repeated", stacklevel=5
            )

    def _go_back_to(self, step: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Remove what was recorded after a step, since it is recorded again; return lines of metrics and of changes."""
        files = (self.metrics, self.samples, self.changes)
        kept = [[line for line in read_steps(path) if line["step"] <= step] for path in files]
        for path, lines in zip(files, kept, strict=True):
            if path.exists():
                write_lines(path, lines)
        for later in (recorded for recorded in recorded_steps(self.path) if recorded > step):
            path_of(self.path, later).unlink()
        history, _, changes = kept
        return history, changes

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        with self._writing():
            append_lines(self.metrics, [line])

    def add_step(self, result: StepResult, agents: Sequence[Agent], plan: Plan) -> None:
        """Append a few rollouts of a step to samples.jsonl, and record its experience if that is due."""
        step = result.metrics["step"]
        with self._writing():
            append_lines(self.samples, sample_rows(result, plan.samples))
            if plan.record_every and step % plan.record_every == 0:
                Experience.of_step(result, agents, step).save(path_of(self.path, step))

    def add_change(self, step: int, config: Config, wanted: Config) -> None:
        """Append changes of settings to changes.jsonl."""
        with self._writing():
            append_lines(self.changes, change_lines(step, config, wanted))

    def save(self, agents: Sequence[Agent], state: State) -> None:
        """Save a checkpoint."""
        with self._writing():
            save_checkpoint(self.path, agents, state)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # safetensors and tokenizers have exceptions of their own for a full disk
            if not isinstance(error, OSError) and "os error" not in str(error):
                raise
            saved = checkpoints(self.path)
            newest = f"its newest checkpoint, {saved[-1].name}" if saved else "its start, since it has no checkpoint"
            message = f"{error}; run {self.path} stops here. When this is repaired, the same call resumes from {newest}"
            raise OSError(message) from error

    def replace_workers(self, agents: Sequence[Agent], lost: WorkerLost) -> None:
        """Load agents whose worker is lost in new workers; without a checkpoint, load all agents again.

        Raises WorkerLost if the same step has lost a worker too often.
        """
        step = 1 + max((line["step"] for line in read_steps(self.metrics)), default=-1)
        self.losses[step] += 1
        if self.losses[step] == LOSSES:
            raise WorkerLost(
                f"a worker was lost {LOSSES} times in step {step}, the last time: {lost}. The same call with "
                f"out={str(self.path)!r} resumes from the newest checkpoint"
            ) from lost
        saved = checkpoints(self.path)
        reasons = restart_workers(agents, lost_only=bool(saved))
        names = ", ".join(f"{name!r} ({reason})" for name, reason in reasons.items())
        warnings.warn(
            f"step {step} lost the worker of agent {names}; it has a new worker, and the run resumes after step "
            f"{step_of(saved[-1]) if saved else 0}",
            stacklevel=3,
        )


@contextlib.contextmanager
def open_folder(out: str | Path | None) -> Iterator[RunFolder | NoFolder]:
    """Yield the folder of a run, locked; raises ValueError if another process uses it."""
    if out is None:
        yield NoFolder()
        return
    with locked(Path(out) / ".lock", what=f"run {out}"):
        yield RunFolder(Path(out))


def sample_rows(result: StepResult, count: int) -> list[dict[str, Any]]:
    """Return up to `count` rollouts of each agent for one problem, with reward and every learner's advantage."""
    problem = result.pool.problems[result.pool.informative_problem]
    about = {"step": result.metrics["step"], "problem": problem.id, "prompt": problem.prompt, "gold": problem.gold}
    advantages = {n: dict(zip(b.index, b.advantages.tolist(), strict=True)) for n, b in result.batches.items()}
    rows = []
    for index, r in enumerate(result.pool):
        if r.problem == problem.id and r.sample < count:
            row = {**about, "source": r.source, "text": r.text, "reward": r.reward, "status": r.status}
            of_learners = {name: values[index] for name, values in advantages.items() if index in values}
            mean = r.mean_logp()
            row |= {"length": len(r.token_ids), "mean_logp": None if math.isnan(mean) else mean}
            rows.append({**row, "advantage": of_learners})
    return rows
