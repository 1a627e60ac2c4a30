"""Many runs: a grid of experiments, one process a run, and the table of all that they measured."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from hacpo_kit.common.console import Interrupt
from hacpo_kit.common.files import locked, read_steps, remove_folder, write_json
from hacpo_kit.experiments import worker
from hacpo_kit.experiments.grids import Grid, read_grid
from hacpo_kit.experiments.notebooks import Experiment, notebook_parameters
from hacpo_kit.runs.checkpoints import checkpoints

if TYPE_CHECKING:
    import pandas as pd

COUNTS = ("step", "rollouts", "tokens", "seconds")  # columns of the table, not metrics
MAY_CHANGE = ("steps", "save_every", "microbatch_tokens", "workers")  # a run goes on with another value of these
THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


# ── sweeps ───────────────────────────────────────────────────────────────────────────────────────────────────────


def sweep(
    grid: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    jobs: int = 1,
    retries: int = 2,
    threads: int | None = None,
    keep_checkpoints: str = "last",
    progress: str = "auto",
) -> pd.DataFrame:
    """Runs every experiment of a grid, `jobs` at a time, each in a process of its own; the same call goes on after a stop.

    `grid` is a YAML file or a mapping as in `grids.read_grid`. In `out` (default: reports/runs/ and the grid's name) each
    run leaves notebook, HTML and run folder; `sweep.json` has every run's parameters and status. Finished runs are
    skipped; one that fails leaves `NAME.error.txt` and the others go on; a kernel that could not start is tried again,
    `retries` times. Ctrl-C ends the runs after their step, with a checkpoint (one that is just
    starting may run on); a second one at once.

    `threads` of each run (default: as the environment has it, else 1) are the same for any `jobs`, and so are results.
    `keep_checkpoints` of a finished run: "last" or "none". `progress`: "bar", "lines", "off", or "auto".

    Returns one row a run: status ("finished", "failed", "stopped", "waiting"), seconds, tries, error. Raises ValueError
    for a faulty grid, or if `out` holds runs of the same names with other parameters; nothing has been started then.
    """
    for name, value, least in (
        ("jobs", jobs, 1),
        ("retries", retries, 0),
        ("threads", 1 if threads is None else threads, 1),
    ):
        if value < least:
            raise ValueError(f"{name}={value}: it must be at least {least}")
    if keep_checkpoints not in ("last", "none"):
        raise ValueError(f"keep_checkpoints={keep_checkpoints!r}: it takes 'last' or 'none'")
    progress = _mode(progress)  # refused before a checkpoint is tidied away
    plan = read_grid(grid)
    folder = default_folder(plan) if out is None else Path(out)
    with locked(folder / ".sweep.lock", what=f"sweep {folder}"):
        study = _Study(plan, folder, retries, keep_checkpoints, _environment(threads))
        with (
            _reporter(study, jobs, progress) as report,
            Interrupt("stopping: these runs end after their step") as watch,
        ):
            study.run_all(jobs, watch, report)
    return study.to_frame()


def default_folder(plan: Grid) -> Path:
    """Where a sweep leaves its runs if nothing else is said."""
    return Path("reports") / "runs" / plan.name


def standing(plan: Grid, folder: Path) -> dict[str, str]:
    """Where each run of a grid stands in a folder: "new", "finished", or "goes on after step k"; starts nothing.

    Raises ValueError if a run there has other parameters.
    """
    _check_same(plan, folder)
    out = {}
    for name, experiment in plan.runs.items():
        kept = checkpoints(folder / name)
        out[name] = f"goes on after step {int(kept[-1].name.removeprefix('step-'))}" if kept else "new"
        if _is_finished(folder / name, experiment):
            out[name] = "finished"
    return out


@dataclass
class _Job:
    name: str
    experiment: Experiment
    status: str = "waiting"
    seconds: float = 0.0  # of all processes that worked on it
    tries: int = 0
    error: str = ""
    retried: int = 0  # in this call
    not_before: float = 0.0  # monotonic time of the next try

    def record(self) -> dict[str, Any]:
        """What `sweep.json` says about the run."""
        known = {"status": self.status, "seconds": round(self.seconds, 3), "tries": self.tries, "error": self.error}
        return {**known, "parameters": _resolved(self.experiment)}


class _Study:
    """The runs of a grid in their folder, and the processes at work on them."""

    def __init__(self, plan: Grid, folder: Path, retries: int, keep: str, environment: Mapping[str, str]):
        states, self.recorded = standing(plan, folder), _read_record(folder)
        self.plan, self.folder, self.retries, self.keep, self.environment = plan, folder, retries, keep, environment
        self.defaults = notebook_parameters(plan.notebook)
        self.processes: dict[str, tuple[subprocess.Popen, float]] = {}
        self.jobs = {name: _Job(name, experiment) for name, experiment in plan.runs.items()}
        for name, job in self.jobs.items():
            job.seconds = self.recorded.get(name, {}).get("seconds", 0.0)
            job.tries = self.recorded.get(name, {}).get("tries", 0)
            if states[name] == "finished":
                job.status = "finished"
                self._tidy(job)
        self.write()

    def write(self) -> None:
        """Writes sweep.json; runs of an earlier, larger grid keep their entry."""
        entries = {name: {**entry, "status": _left(entry.get("status", ""))} for name, entry in self.recorded.items()}
        entries |= {name: job.record() for name, job in self.jobs.items()}
        write_json(
            self.folder / "sweep.json", {"name": self.plan.name, "notebook": self.plan.notebook.name, "runs": entries}
        )

    def run_all(self, jobs: int, watch: Interrupt, report: Callable[[_Job], None]) -> None:
        """Works through what is not finished; after Ctrl-C starts nothing more and waits for the runs to save."""
        waiting, told = [job for job in self.jobs.values() if job.status == "waiting"], False
        try:
            while self.processes or (waiting and not watch.pressed):
                if watch.pressed and not told:
                    self._tell_all()
                    told = True
                ready = [job for job in waiting if job.not_before <= time.monotonic()]
                for job in ready[: 0 if watch.pressed else jobs - len(self.processes)]:
                    waiting.remove(job)
                    self._start(job)
                for job in self._ended(watch):
                    if job.status == "waiting":
                        waiting.insert(0, job)
                    else:
                        report(job)
                time.sleep(0.05)
        finally:
            self._end_all()

    def _start(self, job: _Job) -> None:
        given = {k: v for k, v in asdict(job.experiment).items() if v != self.defaults[k]}
        task = {"notebook": str(self.plan.notebook), "parameters": given, "name": job.name, "out": str(self.folder)}
        with (self.folder / f".{job.name}.log").open("wb") as log:
            process = _launch(task, log, self.environment)
        job.status, job.tries = "running", job.tries + 1
        self.processes[job.name] = (process, time.monotonic())
        self.write()

    def _ended(self, watch: Interrupt) -> list[_Job]:
        """The jobs whose process has ended, with their new status."""
        ended = [name for name, (process, _) in self.processes.items() if process.poll() is not None]
        for name in ended:
            process, started = self.processes.pop(name)
            process.stdin.close()
            job = self.jobs[name]
            job.seconds += time.monotonic() - started
            self._judge(job, process.returncode, stopping=watch.pressed)
        if ended:
            self.write()
        return [self.jobs[name] for name in ended]

    def _judge(self, job: _Job, code: int, stopping: bool) -> None:
        log = self.folder / f".{job.name}.log"
        if code == 0 and _is_finished(self.folder / job.name, job.experiment):
            job.status, job.error = "finished", ""
            self._tidy(job)
        elif stopping and code >= 0:
            job.status = "stopped"
            log.unlink(missing_ok=True)
        elif code == worker.TRY_AGAIN and job.retried < self.retries:
            job.retried += 1
            job.status, job.not_before = "waiting", time.monotonic() + job.retried
        else:
            job.status, job.error = "failed", _reason(log, code, _last_step(self.folder / job.name))
            with log.open("a", encoding="utf-8") as file:
                file.write(f"\n{job.name}: {job.error}\n")
            log.replace(self.folder / f"{job.name}.error.txt")

    def _tidy(self, job: _Job) -> None:
        """What a finished run no longer needs."""
        for left in (f".{job.name}.log", f"{job.name}.error.txt"):
            (self.folder / left).unlink(missing_ok=True)
        found = checkpoints(self.folder / job.name)
        for checkpoint in found if self.keep == "none" else found[:-1]:
            remove_folder(checkpoint)

    def _tell_all(self) -> None:
        for process, _ in self.processes.values():
            with contextlib.suppress(BrokenPipeError):  # it has just ended
                process.stdin.write(b"stop\n")
                process.stdin.flush()

    def _end_all(self) -> None:
        """Ends what still runs, at once: a worker whose pipe ends takes its kernel with it."""
        for process, _ in self.processes.values():
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for name, (process, started) in self.processes.items():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self.jobs[name].seconds += time.monotonic() - started
            self.jobs[name].status = "stopped"
            (self.folder / f".{name}.log").unlink(missing_ok=True)
        self.processes.clear()
        self.write()

    def to_frame(self) -> pd.DataFrame:
        """One row a run."""
        import pandas as pd

        rows = [
            {"run": j.name, "status": j.status, "seconds": j.seconds, "tries": j.tries, "error": j.error}
            for j in self.jobs.values()
        ]
        return pd.DataFrame(rows).set_index("run")


def _left(status: str) -> str:
    """A run that an earlier sweep left when it was killed runs no longer."""
    return "stopped" if status == "running" else status


def _launch(task: Mapping[str, Any], log, environment: Mapping[str, str]) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-m", "hacpo_kit.experiments.worker"], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
        env=environment, start_new_session=True,  # Ctrl-C reaches the sweep alone, which tells its workers
    )  # fmt: skip
    with contextlib.suppress(BrokenPipeError):  # it could not even start: its exit status says so
        process.stdin.write(_to_json(task).encode() + b"\n")
        process.stdin.flush()
    return process


def _to_json(content: Any) -> str:
    return json.dumps(_finite(content), ensure_ascii=False, allow_nan=False)


def _finite(content: Any) -> Any:
    """JSON has no infinity; its name is read back as it."""
    if isinstance(content, Mapping):
        return {k: _finite(v) for k, v in content.items()}
    return "inf" if content == math.inf else content


def _environment(threads: int | None) -> dict[str, str]:
    """Small models beside each other are many times slower with several threads each."""
    out = dict(os.environ)
    for name in THREADS:
        out[name] = str(threads or out.get(name) or out.get("OMP_NUM_THREADS") or 1)
    return {**out, "HACPO_KIT_PROGRESS": "lines", "TOKENIZERS_PARALLELISM": "false"}


# ── what lies in the folder ──────────────────────────────────────────────────────────────────────────────────────


def _resolved(experiment: Experiment) -> dict[str, Any]:
    """Every parameter with the value that the run has: what is None takes the method's."""
    own = {k: v for k, v in experiment.parameters.items() if k != "out"}
    return _finite({**own, **dict(experiment.config())})


def _read_record(folder: Path) -> dict[str, Any]:
    path = folder / "sweep.json"
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))["runs"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}); move it away") from None


def _check_same(plan: Grid, folder: Path) -> None:
    """Refuses to go on with runs that have other parameters than the grid's, from their record and from their config."""
    recorded, other = _read_record(folder), []
    for name, experiment in plan.runs.items():
        now = _resolved(experiment)
        before = dict(recorded.get(name, {}).get("parameters", {})) if (folder / name).exists() else {}
        with contextlib.suppress(
            OSError, ValueError, TypeError
        ):  # a run that cannot be read fails by itself, and says why
            before |= json.loads((folder / name / "config.json").read_text(encoding="utf-8"))
        changed = [
            f"{k}: {before[k]!r} → {now[k]!r}" for k in now if k not in MAY_CHANGE and before.get(k, now[k]) != now[k]
        ]
        if (last := _last_step(folder / name)) is not None and last > experiment.steps:
            changed.append(f"steps: it has {last}, the grid {experiment.steps}")
        if last and last == before.get("steps") != experiment.steps and not checkpoints(folder / name):
            changed.append(f"steps: it ended after {last} and kept no checkpoint to go on from")
        other += [f"{name} ({', '.join(changed)})"] if changed else []
    if other:
        more = f", and {len(other) - 3} more" if len(other) > 3 else ""
        raise ValueError(
            f"{folder} holds runs of the same names with other parameters: {'; '.join(other[:3])}{more}; "
            "give the grid another name or another folder"
        )


def _last_step(run: Path) -> int | None:
    try:
        lines = read_steps(run / "metrics.jsonl")
        return lines[-1]["step"] if lines else None
    except (OSError, ValueError):
        return None


def _is_finished(run: Path, experiment: Experiment) -> bool:
    """True if the run has all its steps, and its notebook was executed to the end and made into HTML."""
    notebook, html = run.with_name(f"{run.name}.ipynb"), run.with_name(f"{run.name}.html")
    if (_last_step(run) or 0) < experiment.steps or not notebook.exists() or not html.exists():
        return False
    try:
        about = json.loads(notebook.read_text(encoding="utf-8"))["metadata"]["papermill"]
    except (ValueError, KeyError):
        return False  # half written
    return about.get("end_time") is not None and not about.get("exception")


def _reason(log: Path, code: int, step: int | None) -> str:
    """One line that says why a run failed."""
    if code < 0:
        return f"ended by signal {-code}" + " (out of memory?)" * (code == -9)
    if code == 0:
        return f"the notebook ended after step {step}, before the last"
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else f"exit status {code}"


# ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _reporter(study: _Study, jobs: int, mode: str):
    """A function that shows one ended run: as a bar where somebody watches, else as a line."""
    total = len(study.jobs)
    before = sum(job.status == "finished" for job in study.jobs.values())
    started, ended = time.monotonic(), []
    bar = tqdm(total=total, initial=before, desc=study.plan.name, unit="run", disable=mode != "bar")
    if mode == "lines":
        print(f"{study.plan.name}: {total} runs, {before} finished before; {jobs} at a time", flush=True)

    def report(job: _Job) -> None:
        ended.append(job)
        left = total - before - len(ended)
        remaining = _duration((time.monotonic() - started) / len(ended) * left)
        bar.set_postfix_str(job.name, refresh=False)
        bar.update(1)
        text = f"{before + len(ended)}/{total} {job.name}: {job.status} after {_duration(job.seconds)}"
        text += f" ({job.error})" if job.error else ""
        if mode == "lines":
            print(text + (f"; about {remaining} left" if left else ""), flush=True)
        elif mode == "bar" and job.status != "finished":
            bar.write(text)
        if len(ended) == 1 and job.status == "finished":
            _check_disk(study.folder, job.name, left)

    with bar:
        yield report


def _mode(progress: str) -> str:
    if progress not in ("auto", "bar", "lines", "off"):
        raise ValueError(f"progress={progress!r}: it takes 'auto', 'bar', 'lines' or 'off'")
    if progress != "auto":
        return progress
    return os.environ.get("HACPO_KIT_PROGRESS") or ("bar" if sys.stderr.isatty() else "lines")


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _check_disk(folder: Path, name: str, left: int) -> None:
    """Warns while there is time if what remains will not find room."""
    kept = [*(folder / name).rglob("*"), folder / f"{name}.ipynb", folder / f"{name}.html"]
    size = sum(path.stat().st_size for path in kept if path.is_file())
    free = shutil.disk_usage(folder).free
    if size * left > free:
        warnings.warn(
            f"{left} more runs of {size / 1e6:.0f} MB each need {size * left / 1e9:.1f} GB, and {folder} has "
            f"{free / 1e9:.1f} GB; a run without checkpoints (keep_checkpoints) needs least",
            stacklevel=2,
        )
