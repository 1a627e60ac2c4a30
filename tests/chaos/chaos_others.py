"""A killed notebook kernel, sweep, verifier process and Ray worker: each resumes and ends as an undisturbed run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from chaos_runs import differences

from hacpo_kit.common.files import read_lines, write_json

SMALL = {"steps": 6, "prompts_per_step": 4, "n": 4, "minibatch": 16, "test_size": 6, "eval_every": 2, "save_every": 2}
SECONDS = 600  # the commands take about twenty on a quiet machine


def command(*arguments: str) -> subprocess.Popen:
    """Start a hacpo-kit command; return its process."""
    code = "from hacpo_kit.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


def until(what: Callable[[], Any], process: subprocess.Popen) -> None:
    """Wait until a condition is true; raises RuntimeError if the process ends first, and after a time limit."""
    end = time.monotonic() + SECONDS
    while not what():
        if process.poll() is not None:
            raise RuntimeError(f"it ended before it was killed: {process.stdout.read()}")
        if time.monotonic() > end:
            raise RuntimeError("it did not get there")
        time.sleep(0.02)


def lines(folder: Path) -> int:
    """Return the number of lines of metrics."""
    return len(read_lines(folder / "metrics.jsonl"))


def gone(processes: list[psutil.Process]) -> bool:
    """Return whether all processes have ended."""
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def _experiment(work: Path, name: str) -> subprocess.Popen:
    parameters = [part for key, value in (SMALL | {"seed": 1}).items() for part in ("-p", key, str(value))]
    return command("run", "06_experiment", *parameters, "--name", name, "--out", str(work), "--quiet")


def _finish(process: subprocess.Popen) -> list[str]:
    printed, _ = process.communicate(timeout=SECONDS)
    return [f"exit status {process.returncode}: {printed[-800:]}"] if process.returncode else []


def undisturbed(work: Path) -> Path:
    """Return the folder of an experiment that is not killed."""
    if not (work / "whole.html").exists() and (faults := _finish(_experiment(work, "whole"))):
        raise RuntimeError(faults[0])
    return work / "whole"


def kernel(work: Path) -> dict[str, Any]:
    """`hacpo-kit run` whose kernel is killed reports it in one line, and the same command resumes the run."""
    whole, folder = undisturbed(work), work / "kernel"
    process = _experiment(work, "kernel")
    until(lambda: lines(folder) >= 4, process)
    (victim,) = (p for p in psutil.Process(process.pid).children() if "ipykernel" in " ".join(p.cmdline()))
    victim.kill()
    printed, _ = process.communicate(timeout=SECONDS)
    reported = process.returncode == 2 and "the same command resumes" in printed
    faults = [] if reported else [f"{process.returncode}: {printed}"]
    before = lines(folder)
    faults += _finish(_experiment(work, "kernel")) + differences(folder, whole, same_process=False)
    return {"killed_after_step": before - 1, "printed": printed.strip().splitlines()[-1:], "faults": faults}


def sweep(work: Path) -> dict[str, Any]:
    """`hacpo-kit sweep` that is killed leaves no kernel; the same command skips finished runs and resumes the others."""
    whole, folder = undisturbed(work), work / "sweep"
    write_json(
        work / "grid.yaml", {"common": {**SMALL, "steps": 1, "seed": 0}, "grids": [{}, {"steps": [6], "seed": [1]}]}
    )
    arguments = ("sweep", str(work / "grid.yaml"), "--out", str(folder), "--keep-checkpoints", "last")
    process = command(*arguments)

    def run() -> Path:
        return next((p.parent for p in folder.glob("*seed1*/run.json")), folder / "none")

    until(lambda: lines(run()) >= 4, process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    end = time.monotonic() + 30
    while not gone(children) and time.monotonic() < end:
        time.sleep(0.05)
    faults = [] if gone(children) else ["a process outlives the sweep"]
    before, first = lines(run()), next(p for p in folder.glob("*.html") if "seed1" not in p.name).stat().st_mtime_ns
    faults += _finish(command(*arguments)) + differences(run(), whole, same_process=False)
    if next(p for p in folder.glob("*.html") if "seed1" not in p.name).stat().st_mtime_ns != first:
        faults.append("a finished run was repeated")
    return {"killed_after_step": before - 1, "faults": faults}


# ── runs whose helpers are killed ────────────────────────────────────────────────────────────────────────────────

SCRIPT = """
import sys, hacpo_kit as hk
config = hk.Config(prompts_per_step=4, n=4, minibatch=16)
given = hk.load_problems("arithmetic", split="train", size=50)
# golds that are not plain integers, so that every answer needs the verifier's processes
problems = hk.load_problems([{"id": p.id, "prompt": p.prompt, "gold": f"\\\\frac{{{2 * int(p.gold)}}}{{2}}"} for p in given])
agents = hk.load_agents("tiny-model-pair", device="cpu", **({"workers": "ray", "threads": 1} if sys.argv[2] == "ray" else {}))
hk.train(agents, problems, config, 6, out=sys.argv[1], save_every=2, progress="off",
         callbacks=[lambda result: print("made", result.metrics["step"], flush=True)])
"""


def _script(folder: Path, how: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), how], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


def helpers(process: subprocess.Popen, mark: str) -> list[psutil.Process]:
    """Return the descendants of a process whose command line contains a mark."""
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found += [child] if mark in " ".join(child.cmdline()) else []
    return found


def _alone(work: Path) -> Path:
    folder = work / "alone"
    if not folder.exists() and (faults := _finish(_script(folder, "here"))):
        raise RuntimeError(faults[0])
    return folder


@contextlib.contextmanager
def killing(process: subprocess.Popen, mark: str, most: int, every: float) -> Iterator[list[int]]:
    """Kill a descendant of a process as soon as there is one, and again every few seconds, at most `most` times; return ids."""
    killed: list[int] = []

    def work() -> None:
        while process.poll() is None and len(killed) < most:
            for victim in helpers(process, mark)[:1]:
                with contextlib.suppress(psutil.Error):
                    victim.kill()
                    killed.append(victim.pid)
                    time.sleep(every)
            time.sleep(0.05)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield killed
    thread.join()


def verifier(work: Path) -> dict[str, Any]:
    """A run whose verifier processes are killed, idle or at work, scores every rollout as an undisturbed run."""
    whole, folder = _alone(work), work / "verifier"
    process = _script(folder, "here")
    # an answer may lose its process once, but not twice
    with killing(process, "tasks.verifier", most=4, every=4.0) as killed:
        faults = _finish(process)
    if not killed:
        faults.append("no verifier process was there to be killed")
    return {"killed": len(killed), "faults": faults + differences(folder, whole, same_process=False)}


def ray(work: Path) -> dict[str, Any]:
    """A run that loses a Ray worker replaces it and resumes from its last checkpoint by itself."""
    try:
        import ray as _  # noqa: F401
    except ModuleNotFoundError:
        return {"skipped": "Ray is not installed: make test-ray has it", "faults": []}
    whole, folder = _alone(work), work / "ray"
    process = _script(folder, "ray")
    printed: list[str] = []
    for line in process.stdout:
        printed.append(line)
        if line.strip() == "made 3" and printed.count(line) == 1:  # after the loss step 3 is repeated
            victim = helpers(process, "ray::Worker")[0]
            os.kill(victim.pid, signal.SIGKILL)
    code = process.wait(SECONDS)
    faults = (
        [f"exit status {code}: {''.join(printed)[-800:]}"] if code else differences(folder, whole, same_process=False)
    )
    if not any("lost the worker of agent" in line for line in printed):
        faults.append("the loss of the worker was not reported")
    return {"made": [int(line.split()[1]) for line in printed if line.startswith("made ")], "faults": faults}


OTHERS = {"kernel": kernel, "sweep": sweep, "verifier": verifier, "ray": ray}
