"""The folder of a run: started or resumed, extended after every step, saved in checkpoints."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hacpo_kit.advantages import Capability
from hacpo_kit.common.files import Lines, locked, read_steps, remove_leftovers, truncate_lines, write_json
from hacpo_kit.config import Config
from hacpo_kit.models.agents import Agent
from hacpo_kit.models.base import WorkerLost
from hacpo_kit.models.remote import restart_workers
from hacpo_kit.records import StepResult
from hacpo_kit.runs.changes import FILE as CHANGES
from hacpo_kit.runs.changes import apply_changes, change_lines
from hacpo_kit.runs.checkpoints import checkpoints, restore_newest, save_checkpoint, step_of
from hacpo_kit.runs.experience import Experience, path_of, recorded_steps
from hacpo_kit.runs.record import Plan, check_same_run, read_record
from hacpo_kit.runs.run import State

LOSSES = 3  # of workers in one step, after which the run ends


class NoFolder:
    """A run without a folder: nothing is recorded, and a lost worker ends it."""

    path = None

    def open(self, agents: Sequence[Agent], plan: Plan, config: Config) -> tuple[State, list[dict[str, Any]], Config]:
        """Return state, history and settings of a new run."""
        return State(capability=Capability(config.window)), [], config

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Do nothing."""

    def add_step(self, result: StepResult, agents: Sequence[Agent], plan: Plan) -> None:
        """Do nothing."""

    def add_change(self, step: int, config: Config, wanted: Config, *, required: bool = False) -> None:
        """Do nothing."""

    def save(self, agents: Sequence[Agent], state: State, *, last: bool = False) -> None:
        """Do nothing."""

    def replace_workers(self, agents: Sequence[Agent], lost: WorkerLost) -> None:
        """Raise the error, since there is no checkpoint to go back to."""
        raise lost


class RunFolder:
    """A run on disk; the methods are those of `NoFolder`."""

    def __init__(self, path: Path):
        self.path, self.losses = path, Counter()

    def open(self, agents: Sequence[Agent], plan: Plan, config: Config) -> tuple[State, list[dict[str, Any]], Config]:
        """Start the run, or restore its newest checkpoint; return its state, history and settings in force.

        Raises ValueError if the folder holds another run or other files, and for trained agents in a new run.
        """
        record = plan.record(agents, config)
        self._check(record, config)
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.path / "checkpoints", self.path / "experience"):
            remove_leftovers(folder)
        write_json(self.path / "config.json", config.to_dict())
        write_json(self.path / "run.json", record)
        state = restore_newest(self.path, agents)
        if state is None:
            if any(agent.updates for agent in agents):
                raise ValueError("a new run needs agents without updates; load them again")
            state = State(capability=Capability(config.window))
        self.files = [Lines(self.path / name) for name in ("metrics.jsonl", "samples.jsonl", CHANGES)]
        self.metrics, self.samples, self.changes = self.files
        history, _, changes = (truncate_lines(file.path, state.step) for file in self.files)
        for later in (step for step in recorded_steps(self.path) if step > state.step):
            path_of(self.path, later).unlink()
        missing = sorted({*range(state.step + 1)} - {line["step"] for line in history})
        if state.step and missing:
            warnings.warn(f"{self.metrics.path} lacks the steps {missing}, which the checkpoint contains", stacklevel=4)
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
        done = max((line["step"] for line in read_steps(self.path / "metrics.jsonl")), default=0)
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

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        self.metrics.add([line])

    def add_step(self, result: StepResult, agents: Sequence[Agent], plan: Plan) -> None:
        """Append a few rollouts of a step to samples.jsonl, and record its experience if that is due."""
        step = result.metrics["step"]
        self.samples.add(sample_rows(result, plan.samples))
        if plan.record_every and step % plan.record_every == 0:
            try:
                Experience.of_step(result, agents, step).save(path_of(self.path, step))
            except OSError as fault:
                warnings.warn(f"the experience of step {step} is not recorded: {fault}", stacklevel=4)

    def add_change(self, step: int, config: Config, wanted: Config, *, required: bool = False) -> None:
        """Append changes of settings to changes.jsonl; `required` raises OSError if they cannot be written."""
        self.changes.add(change_lines(step, config, wanted))
        if required:
            self.changes.write()

    def save(self, agents: Sequence[Agent], state: State, *, last: bool = False) -> None:
        """Write waiting lines and a checkpoint; if the disk does not take them, warn and continue.

        Raises OSError for the `last` checkpoint of a call, because then the trained agents exist in memory only.
        """
        try:
            for file in self.files:
                file.write()
            save_checkpoint(self.path, agents, state)
        except OSError as fault:
            if fault.errno is None:  # not the disk: a worker saved to a folder that is not visible here
                raise
            saved = checkpoints(self.path)
            kept = f"the newest one is {saved[-1].name}" if saved else "there is no other"
            message = f"the checkpoint after step {state.step} of {self.path} cannot be written ({fault}); {kept}"
            if last:
                raise OSError(
                    fault.errno,
                    f"{message}. The agents in this process are trained: hk.save(folder, agents, state) writes them to another "
                    "folder. Once there is space, the same call resumes from the newest checkpoint",
                ) from fault
            warnings.warn(f"{message}; the run continues and tries again at its next checkpoint", stacklevel=4)

    def replace_workers(self, agents: Sequence[Agent], lost: WorkerLost) -> None:
        """Load agents whose worker is lost in new workers; without a checkpoint, load all agents again.

        Raises WorkerLost if the same step has lost a worker too often.
        """
        step = 1 + max((line["step"] for line in read_steps(self.path / "metrics.jsonl")), default=-1)
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
    advantages: dict[int, dict[str, float]] = {}
    for name, batch in result.batches.items():
        for index, value in zip(batch.index, batch.advantages.tolist(), strict=True):
            advantages.setdefault(index, {})[name] = value
    problem = result.pool.problems[result.pool.informative_problem]
    rows, counts = [], Counter()
    for index, r in enumerate(result.pool):
        if r.problem == problem.id and counts[r.source] < count:
            counts[r.source] += 1
            row = {"step": result.metrics["step"], "problem": r.problem, "prompt": problem.prompt, "gold": problem.gold}
            row |= {"source": r.source, "text": r.text, "reward": r.reward, "status": r.status}
            rows.append(
                {**row, "length": len(r.token_ids), "mean_logp": r.mean_logp(), "advantage": advantages.get(index, {})}
            )
    return rows
