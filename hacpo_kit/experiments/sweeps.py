"""A sweep: all runs of a grid, several at once, each in a process of its own; `sweep.json` has their parameters and status."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import traceback
from collections.abc import Collection, Mapping
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from unittest import mock

import psutil
from pydantic import Field
from tqdm.auto import tqdm

from hacpo_kit.common.console import Interrupt
from hacpo_kit.common.files import locked, read_json, read_steps, remove_folder, write_json, write_text
from hacpo_kit.config import check, whole_number
from hacpo_kit.experiments.grids import Grid, read_grid
from hacpo_kit.experiments.notebooks import run_notebook
from hacpo_kit.runs.checkpoints import checkpoints, step_of
from hacpo_kit.runs.record import differences, listed

if TYPE_CHECKING:
    import pandas as pd

COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # in the traceback of a notebook
MAY_CHANGE = ("steps", "save_every", "microbatch_tokens", "workers")  # a run resumes with another value of these


def sweep(
    grid: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    jobs: int = 1,
    retries: int = 2,
    threads: int | None = None,
    keep_checkpoints: str = "last",
    time_limit: float | None = None,
    quiet: bool = False,
) -> pd.DataFrame:
    """Run all experiments of a grid, `jobs` at once, each in a kernel of its own; the same call resumes a stopped sweep.

    `grid` is a YAML file or a mapping as in `grids.read_grid`. Each run writes notebook, HTML page and run folder to `out`
    (default: reports/runs/ and the name of the grid); `sweep.json` has the parameters and the status of every run. Finished
    runs are skipped. A failed run writes `NAME.error.txt`, and the other runs continue. A kernel that cannot start is tried
    again, `retries` times. Ctrl-C ends the runs after their current step, with a checkpoint; a second Ctrl-C ends them at
    once. `threads` per run (default: OMP_NUM_THREADS, else 1) do not depend on `jobs`, so the results do not either.
    `keep_checkpoints` of finished runs: "last" or "none". A run that takes longer than `time_limit` (s) fails.

    Returns one row per run: status ("finished", "failed", "stopped", "waiting"), seconds, tries, error. Raises ValueError
    for a faulty grid, and if runs in `out` have other parameters; then nothing has started.
    """
    jobs, retries = whole_number("jobs", jobs, 1), whole_number("retries", retries, 0)
    threads = os.environ.get("OMP_NUM_THREADS") or 1 if threads is None else whole_number("threads", threads, 1)
    check("keep_checkpoints", keep_checkpoints, Literal["last", "none"])
    check("time_limit", time_limit, Annotated[float, Field(gt=0)] | None)
    plan = read_grid(grid)
    folder = default_folder(plan) if out is None else Path(out)
    # small models that train side by side are many times slower with several threads each
    environment = {"OMP_NUM_THREADS": str(threads), "HACPO_KIT_PROGRESS": "lines", "TOKENIZERS_PARALLELISM": "false"}
    with locked(folder / ".sweep.lock", what=f"sweep {folder}"), mock.patch.dict(os.environ, environment):
        runs = _Sweep(plan, folder, keep_checkpoints, {"tries": retries + 1, "time_limit": time_limit})
        with Interrupt("stopping: the runs end after their current step") as interrupt:
            runs.run_all(jobs, interrupt, quiet)
    return runs.to_frame()


def default_folder(plan: Grid) -> Path:
    """Return the folder of a sweep that is given none."""
    return Path("reports") / "runs" / plan.name


class _Sweep:
    """The runs of a grid in their folder. Each runs in a thread, which waits for its kernel."""

    def __init__(self, plan: Grid, folder: Path, keep_checkpoints: str, options: Mapping[str, Any]):
        self.plan, self.folder, self.keep_checkpoints = plan, folder, keep_checkpoints
        self.options = options  # of run_notebook
        states, self.recorded = run_states(plan, folder), read_record(folder)
        self.entries: dict[str, dict[str, Any]] = {}
        for name, experiment in plan.runs.items():
            status = "finished" if states[name] == "finished" else "waiting"
            entry = {"seconds": 0.0, "tries": 0} | self.recorded.get(name, {})
            self.entries[name] = entry | {"status": status, "error": "", "parameters": experiment.parameters}
            if status == "finished":
                self._tidy(name)
        self._write()

    def _write(self) -> None:
        """Write sweep.json; runs of an earlier, larger grid stay in it."""
        about = {"name": self.plan.name, "notebook": self.plan.notebook.name}
        write_json(self.folder / "sweep.json", {**about, "runs": {**self.recorded, **self.entries}})

    def run_all(self, jobs: int, interrupt: Interrupt, quiet: bool) -> None:
        """Run what is not finished; after Ctrl-C start no run and wait until the running ones have saved."""
        waiting = [name for name, entry in self.entries.items() if entry["status"] == "waiting"]
        before, running = len(self.entries) - len(waiting), {}
        bar = tqdm(total=len(self.entries), initial=before, desc=self.plan.name, unit="run", disable=quiet)
        interrupted: set[psutil.Process] = set()
        with futures.ThreadPoolExecutor(jobs) as pool, bar:
            try:
                while running or (waiting and not interrupt.pressed):
                    while waiting and len(running) < jobs and not interrupt.pressed:
                        entry = self.entries[waiting[0]]
                        entry |= {"status": "running", "tries": entry["tries"] + 1}
                        self._write()
                        running[pool.submit(self._run, waiting[0])] = waiting[0]
                        waiting.pop(0)
                    if interrupt.pressed:  # once each: a second time would end a training before its step is saved
                        interrupted |= signal_kernels(signal.SIGINT, without=interrupted)
                    for future in futures.wait(running, 0.1, futures.FIRST_COMPLETED).done:
                        name = running.pop(future)
                        self._end(name, *future.result(), stopping=interrupt.pressed)
                        if not quiet:
                            entry = self.entries[name]
                            bar.write(f"{name}: {entry['status']} after {entry['seconds']:.0f} s {entry['error']}")
                        bar.update()
            except BaseException:
                while not all(future.done() for future in running):
                    signal_kernels(signal.SIGKILL)
                    time.sleep(0.1)
                for future, name in running.items():
                    self._end(name, *future.result(), stopping=True)
                raise

    def _run(self, name: str) -> tuple[float, Exception | None]:
        """Run one notebook; return the seconds and the error."""
        parameters = {key: value for key, value in self.plan.runs[name].given.items() if key != "out"}
        start, error = time.monotonic(), None
        try:
            run_notebook(self.plan.notebook, parameters, name=name, out=self.folder, progress=False, **self.options)
        except Exception as fault:
            error = fault
        return time.monotonic() - start, error

    def _end(self, name: str, seconds: float, error: Exception | None, stopping: bool) -> None:
        """Record how a run has ended."""
        entry, step = self.entries[name], last_step(self.folder / name)
        entry["seconds"] = round(entry["seconds"] + seconds, 3)
        if error is None and step >= self.plan.runs[name].steps:
            entry["status"] = "finished"
            self._tidy(name)
        elif stopping:
            entry["status"] = "stopped"
        else:
            entry["status"], entry["error"] = "failed", _reason(error, step)
            trace = "" if error is None else COLOURS.sub("", "".join(traceback.format_exception(error)))
            write_text(self.folder / f"{name}.error.txt", f"{trace}\n{name}: {entry['error']}\n")
        self._write()

    def _tidy(self, name: str) -> None:
        """Remove what a finished run no longer needs."""
        (self.folder / f"{name}.error.txt").unlink(missing_ok=True)
        found = checkpoints(self.folder / name)
        for checkpoint in found if self.keep_checkpoints == "none" else found[:-1]:
            remove_folder(checkpoint)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per run."""
        import pandas as pd

        table = pd.DataFrame.from_dict(self.entries, orient="index").rename_axis("run")
        return table[["status", "seconds", "tries", "error"]]


def signal_kernels(number: signal.Signals, without: Collection[psutil.Process] = ()) -> set[psutil.Process]:
    """Send a signal to the kernels that this process has started, and return them."""
    kernels = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ipykernel_launcher" in child.cmdline() and child not in without:
                child.send_signal(number)
                kernels.add(child)
    return kernels


def _reason(error: Exception | None, step: int) -> str:
    """Return in one line why a run failed."""
    if error is None:
        return f"the notebook ended after step {step}, before its last step"
    if type(error).__name__ == "PapermillExecutionError":
        return f"{error.ename}: {error.evalue}"[:300]
    return f"{type(error).__name__}: {error}"[:300]


# ── how far each run has come ────────────────────────────────────────────────────────────────────────────────────────


def read_record(folder: Path) -> dict[str, Any]:
    """Return the runs in sweep.json by name; empty if there is no such file."""
    path = folder / "sweep.json"
    return read_json(path)["runs"] if path.exists() else {}


def last_step(run: Path) -> int:
    """Return the last step in metrics.jsonl, 0 if there is none."""
    with contextlib.suppress(OSError, ValueError):
        if lines := read_steps(run / "metrics.jsonl"):
            return lines[-1]["step"]
    return 0


def run_states(plan: Grid, folder: Path) -> dict[str, str]:
    """Return the state of each run of a grid: "new", "finished", or "resumes after step k".

    A run is finished if sweep.json says so and its notebook and HTML page exist. Raises ValueError if a run in the folder
    has other parameters than the grid.
    """
    recorded, states, different = read_record(folder), {}, []
    for name, experiment in plan.runs.items():
        entry = recorded.get(name, {}) if (folder / name).exists() else {}
        before, saved = entry.get("parameters", {}), checkpoints(folder / name)
        changed = differences(before, experiment.parameters)
        fewer_steps = last_step(folder / name) > experiment.steps
        if not {*changed} <= {*MAY_CHANGE} or fewer_steps:
            different.append(f"{name} ({listed(changed)})")
        states[name] = f"resumes after step {step_of(saved[-1])}" if saved else "new"
        files = [folder / f"{name}.{ending}" for ending in ("ipynb", "html")]
        if entry.get("status") == "finished" and "steps" not in changed and all(file.exists() for file in files):
            states[name] = "finished"
    if different:
        raise ValueError(
            f"{len(different)} runs in {folder} have other parameters than the grid: {'; '.join(different[:3])}; "
            "give the grid another name or another folder"
        )
    return states
