"""A training in a thread of its own: start, pause, stop, and change settings between steps. Nothing here is displayed."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pandas as pd

from hacpo_kit.common.files import read_steps
from hacpo_kit.config import Config, did_you_mean
from hacpo_kit.models.agents import Agent, as_list
from hacpo_kit.records import StepResult
from hacpo_kit.runs.changes import FILE as CHANGES
from hacpo_kit.runs.changes import apply_changes, change_lines, check_change, requested_config
from hacpo_kit.runs.checkpoints import checkpoints, step_of
from hacpo_kit.runs.run import Run, history_frame
from hacpo_kit.tasks.loading import load_problems
from hacpo_kit.tasks.problems import Problem, Problems
from hacpo_kit.training import train


class BackgroundTraining:
    """`train` in a thread. `pause` and `stop` end it after the current step with a checkpoint, `start` resumes it.

    The result is bit-identical to an uninterrupted run. The state lives in this process and in the run folder, so another
    process resumes from the same folder. `options` are those of `train`.

    Raises TypeError for an option that `train` does not have.
    """

    def __init__(
        self,
        agents: Agent | Sequence[Agent],
        problems: Sequence[Problem],
        config: Config,
        steps: int,
        *,
        out: str | Path,
        callbacks: Sequence[Callable[[StepResult], Any]] = (),
        **options: Any,
    ):
        known = set(inspect.signature(train).parameters) - {"changes", "progress"}
        for name in set(options) - known:
            raise TypeError(f"train has no option {name!r}{did_you_mean(name, known)}")
        self.agents, self.steps, self.folder = as_list(agents), steps, Path(out)
        self.problems = problems if isinstance(problems, Problems) else load_problems(list(problems))
        self.options, self.callbacks = {"save_first": True, **options, "progress": "off"}, tuple(callbacks)
        self.first_config = config  # settings at step 0
        self.config = config  # settings of the last step
        self.pending: dict[str, Any] = {}  # settings that change at the next step
        self.changes: list[dict[str, Any]] = []  # lines as in changes.jsonl
        self.history: list[dict[str, Any]] = []  # lines as in metrics.jsonl
        self.status = "ready"  # then running, pausing, paused, stopping, stopped, finished, failed
        self.error: BaseException | None = None
        self.run: Run | None = None  # result of the last call of train
        self.last: StepResult | None = None
        self.warnings: dict[str, tuple[str, int]] = {}  # warning without its numbers → last message, count
        self.lock = threading.RLock()  # for everything above
        self.changed = threading.Event()  # set when anything above changed
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()  # not Thread.join: an interrupt of it marks a running thread as ended
        self._idle.set()
        self._ending = False  # the training ends after the current step
        self._read_folder()

    def start(self) -> Self:
        """Start or resume the training. While it runs, only withdraw a pause or stop that has not happened yet."""
        with self._starting:
            with self.lock:
                if self.running and not self._ending:
                    self.status = "running"
                    self.changed.set()
                    return self
            self._idle.wait()
            with self.lock:
                self._read_folder()
                self._idle.clear()
                self.status, self.error, self._ending = "running", None, False
                self._thread = threading.Thread(target=self._train, name=f"train {self.folder.name}", daemon=True)
                self._thread.start()
        return self

    def pause(self) -> Self:
        """End after the current step, with a checkpoint; `start` resumes."""
        return self._request("pausing")

    def stop(self) -> Self:
        """As `pause`, but with status "stopped": the folder holds a complete run of fewer steps."""
        return self._request("stopping")

    def change(self, **settings: Any) -> Self:
        """Change settings from the next step on; the run folder records the change.

        Raises ValueError for an invalid value and for a setting that cannot change within a run, TypeError for an unknown
        setting. Then nothing changes.
        """
        with self.lock:
            wanted = self.config.replace(**{**self.pending, **settings})
            differences = check_change(self.config, wanted, self.problems)
            self.pending = {name: new for name, (_, new) in differences.items()}
        self.changed.set()
        return self

    def wait(self, timeout: float | None = None) -> Run:
        """Wait until the training ends or is paused, and return its `Run`. An interrupt ends only the waiting.

        Raises the error of the training, RuntimeError if it was not started, TimeoutError after `timeout` seconds.
        """
        if self._thread is None:
            raise RuntimeError("the training was not started: call start() first")
        if not self._idle.wait(timeout):
            raise TimeoutError(f"the training still runs after {timeout} s, in step {self.step + 1}")
        if self.error is not None:
            raise self.error
        return self.run

    @property
    def running(self) -> bool:
        """True while the training runs."""
        return not self._idle.is_set()

    @property
    def step(self) -> int:
        """The last finished step."""
        return self.history[-1]["step"] if self.history else 0

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint, from which `start` resumes; 0 without one."""
        saved = checkpoints(self.folder)
        return step_of(saved[-1]) if saved else 0

    def to_frame(self) -> pd.DataFrame:
        """Return the metrics with one row per step and agent."""
        return history_frame(self.history)

    def _request(self, status: str) -> Self:
        with self.lock:
            if self.running:
                self.status = status
        self.changed.set()
        return self

    def _read_folder(self) -> None:
        """Read what earlier calls, also of other processes, recorded up to the newest checkpoint."""
        step = self.saved_step
        self.history, self.changes = (
            [line for line in read_steps(self.folder / name) if line["step"] <= step]
            for name in ("metrics.jsonl", CHANGES)
        )
        with contextlib.suppress(ValueError, TypeError):  # the folder of another run, which train refuses
            self.config = apply_changes(self.first_config, self.changes)
        if self.status == "ready" and self.step:
            self.status = "finished" if self.step >= self.steps else "stopped"

    # ── in the thread ────────────────────────────────────────────────────────────────────────────────────────────

    def _train(self) -> None:
        try:
            with self.lock:
                changes, self.pending = self.pending, {}
                self._set_config(self.config.replace(**changes))
            with _recorded_warnings(self._warn):
                run = train(
                    self.agents, self.problems, self.first_config, self.steps, out=self.folder, changes=changes,
                    callbacks=[self._after_step, lambda _: self._ending], **self.options,
                )  # fmt: skip
            with self.lock:
                ended = "paused" if self.status == "pausing" else "stopped"
                self.run, self.config, self.status = run, run.config, ended if run.stopped else "finished"
        except BaseException as error:
            self.error, self.status = error, "failed"
        self._idle.set()
        self.changed.set()

    def _after_step(self, result: StepResult) -> Config:
        """Record a step, call the callbacks, and return the settings of the next step."""
        with self.lock:
            if not self.history:
                self.history = read_steps(self.folder / "metrics.jsonl")[:1]  # the evaluation before training
            while self.history and self.history[-1]["step"] >= result.metrics["step"]:
                self.history.pop()  # a step that is repeated after a worker was lost
            self.history.append(result.metrics)
            self.last, self.config = result, result.config
        answers = [callback(result) for callback in self.callbacks]  # they may call change, pause and stop
        with self.lock:
            config = requested_config(answers) or result.config
            if any(a for a in answers if not isinstance(a, Config)) or self.status in ("pausing", "stopping"):
                self._ending = True  # pending changes wait for the next start
            else:
                config, self.pending = config.replace(**self.pending), {}
            self._set_config(config)
        self.changed.set()
        return config

    def _set_config(self, config: Config) -> None:
        self.changes += change_lines(self.step, self.config, config)
        self.config = config

    def _warn(self, message: str) -> None:
        with self.lock:
            kind = re.sub(r"\d+", "#", message)
            self.warnings[kind] = (message, self.warnings.get(kind, ("", 0))[1] + 1)


@contextlib.contextmanager
def _recorded_warnings(record: Callable[[str], None]) -> Iterator[None]:
    """Give the warnings of this thread to `record`, because a page does not show a thread's standard error."""
    thread, original = threading.get_ident(), warnings.showwarning

    def show(message: Warning, *details: Any, **options: Any) -> None:
        if threading.get_ident() == thread:
            record(str(message))
        else:
            original(message, *details, **options)

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = original
