"""A sweep: all runs of a grid, several at once, each in a process of its own; `sweep.json` has their parameters and status."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tqdm.auto import tqdm

from hacpo_kit.common.console import Interrupt
from hacpo_kit.common.files import locked, read_json, read_steps, remove_folder, write_json
from hacpo_kit.config import check, whole_number
from hacpo_kit.experiments import worker
from hacpo_kit.experiments.grids import Grid, read_grid
from hacpo_kit.runs.checkpoints import checkpoints

if TYPE_CHECKING:
    import pandas as pd

MAY_CHANGE = ("steps", "save_every", "microbatch_tokens", "workers")  # a run resumes with another value of these


def sweep(
    grid: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    jobs: int = 1,
    retries: int = 2,
    threads: int | None = None,
    keep_checkpoints: str = "last",
    quiet: bool = False,
) -> pd.DataFrame:
    """Run all experiments of a grid, `jobs` at once, each in a process of its own; the same call resumes a stopped sweep.

    `grid` is a YAML file or a mapping as in `grids.read_grid`. Each run writes notebook, HTML page and run folder to `out`
    (default: reports/runs/ and the name of the grid); `sweep.json` has the parameters and the status of every run. Finished
    runs are skipped. A failed run writes `NAME.error.txt`, and the other runs continue. A kernel that cannot start is tried
    again, `retries` times. Ctrl-C ends the runs after their current step, with a checkpoint; a second Ctrl-C ends them at
    once. `threads` per run (default: OMP_NUM_THREADS, else 1) do not depend on `jobs`, so the results do not either.
    `keep_checkpoints` of finished runs: "last" or "none".

    Returns one row per run: status ("finished", "failed", "stopped", "waiting"), seconds, tries, error. Raises ValueError
    for a faulty grid, and if runs in `out` have other parameters; then nothing has started.
    """
    jobs, retries = whole_number("jobs", jobs, 1), whole_number("retries", retries, 0)
    threads = None if threads is None else whole_number("threads", threads, 1)
    check("keep_checkpoints", keep_checkpoints, Literal["last", "none"])
    plan = read_grid(grid)
    folder = default_folder(plan) if out is None else Path(out)
    with locked(folder / ".sweep.lock", what=f"sweep {folder}"):
        runs = _Sweep(plan, folder, retries, threads, keep_checkpoints)
        with Interrupt("stopping: the runs end after their current step") as interrupt:
            runs.run_all(jobs, interrupt, quiet)
    return runs.to_frame()


def default_folder(plan: Grid) -> Path:
    """Return the folder of a sweep that is given none."""
    return Path("reports") / "runs" / plan.name


class _Sweep:
    """The runs of a grid in their folder, and the processes that run them."""

    def __init__(self, plan: Grid, folder: Path, retries: int, threads: int | None, keep_checkpoints: str):
        self.plan, self.folder, self.threads, self.keep_checkpoints = plan, folder, threads, keep_checkpoints
        self.tries, self.processes = retries + 1, {}  # name → process and its start
        states, self.recorded = run_states(plan, folder), read_record(folder)
        self.entries: dict[str, dict[str, Any]] = {}
        for name, experiment in plan.runs.items():
            status = "finished" if states[name] == "finished" else "waiting"
            entry = {"seconds": 0.0, "tries": 0} | self.recorded.get(name, {})
            self.entries[name] = entry | {"status": status, "error": "", "parameters": experiment.parameters}
            if status == "finished":
                self._tidy(name)
        self.write()

    def write(self) -> None:
        """Write sweep.json; runs of an earlier, larger grid stay in it."""
        runs = {**self.recorded, **self.entries}
        write_json(
            self.folder / "sweep.json", {"name": self.plan.name, "notebook": self.plan.notebook.name, "runs": runs}
        )

    def run_all(self, jobs: int, interrupt: Interrupt, quiet: bool) -> None:
        """Run what is not finished; after Ctrl-C start no run and wait until the running ones have saved."""
        waiting, stopping = [name for name, entry in self.entries.items() if entry["status"] == "waiting"], False
        before = len(self.entries) - len(waiting)
        bar = tqdm(total=len(self.entries), initial=before, desc=self.plan.name, unit="run", disable=quiet)
        try:
            while self.processes or (waiting and not interrupt.pressed):
                if interrupt.pressed and not stopping:
                    stopping = True
                    for process, _ in self.processes.values():
                        worker.send(process, "stop")
                while waiting and len(self.processes) < jobs and not interrupt.pressed:
                    self._start(waiting.pop(0))
                for name in [name for name, (process, _) in self.processes.items() if process.poll() is not None]:
                    self._end(name, stopping)
                    if not quiet:
                        entry = self.entries[name]
                        bar.write(f"{name}: {entry['status']} after {entry['seconds']:.0f} s {entry['error']}")
                    bar.update()
                time.sleep(0.05)
        finally:
            bar.close()
            self._kill_all()

    def _start(self, name: str) -> None:
        parameters = {key: value for key, value in self.plan.runs[name].given.items() if key != "out"}
        task = {"notebook": str(self.plan.notebook), "parameters": parameters, "name": name, "out": str(self.folder)}
        with self._log(name).open("wb") as log:
            process = worker.start({**task, "tries": self.tries}, log, self.threads)
        self.processes[name] = process, time.monotonic()
        self.entries[name]["status"] = "running"
        self.entries[name]["tries"] += 1
        self.write()

    def _end(self, name: str, stopping: bool) -> None:
        """Record how the process of a run has ended."""
        entry, (process, started) = self.entries[name], self.processes.pop(name)
        process.stdin.close()
        entry["seconds"] = round(entry["seconds"] + time.monotonic() - started, 3)
        step, log = last_step(self.folder / name), self._log(name)
        if process.returncode == 0 and step >= self.plan.runs[name].steps:
            entry["status"] = "finished"
        elif stopping:
            entry["status"] = "stopped"
            log.unlink(missing_ok=True)
        else:
            entry["status"], entry["error"] = "failed", _reason(log, process.returncode, step)
            with log.open("a", encoding="utf-8") as file:
                file.write(f"\n{name}: {entry['error']}\n")
            log.replace(self.folder / f"{name}.error.txt")
        self.write()
        if entry["status"] == "finished":
            self._tidy(name)

    def _tidy(self, name: str) -> None:
        """Remove what a finished run no longer needs."""
        for path in (self._log(name), self.folder / f"{name}.error.txt"):
            path.unlink(missing_ok=True)
        found = checkpoints(self.folder / name)
        for checkpoint in found if self.keep_checkpoints == "none" else found[:-1]:
            remove_folder(checkpoint)

    def _kill_all(self) -> None:
        """End all processes at once: a worker whose pipe closes kills its kernel."""
        for process, _ in self.processes.values():
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for name, (process, _) in list(self.processes.items()):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._end(name, stopping=True)

    def _log(self, name: str) -> Path:
        return self.folder / f".{name}.log"

    def to_frame(self) -> pd.DataFrame:
        """Return one row per run."""
        import pandas as pd

        table = pd.DataFrame.from_dict(self.entries, orient="index").rename_axis("run")
        return table[["status", "seconds", "tries", "error"]]


def _reason(log: Path, code: int, step: int) -> str:
    """Return in one line why a run failed."""
    if code < 0:
        return f"ended by signal {-code}" + (" (out of memory?)" if code == -9 else "")
    if code == 0:
        return f"the notebook ended after step {step}, before its last step"
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else f"exit status {code}"


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
        run, now = folder / name, experiment.parameters
        before = recorded.get(name, {}).get("parameters", {}) if run.exists() else {}
        changed = [k for k in now if k not in MAY_CHANGE and before.get(k, now[k]) != now[k]]
        if changed or last_step(run) > experiment.steps:
            changes = [f"{k}: {before.get(k)!r} → {now[k]!r}" for k in changed or ["steps"]]
            different.append(f"{name} ({', '.join(changes)})")
        found = checkpoints(run)
        states[name] = f"resumes after step {int(found[-1].name.removeprefix('step-'))}" if found else "new"
        files = [run.with_name(f"{name}.{ending}") for ending in ("ipynb", "html")]
        ended = recorded.get(name, {}).get("status") == "finished" and before.get("steps") == experiment.steps
        if ended and all(map(Path.exists, files)):
            states[name] = "finished"
    if different:
        raise ValueError(
            f"{len(different)} runs in {folder} have other parameters than the grid: {'; '.join(different[:3])}; "
            "give the grid another name or another folder"
        )
    return states
