"""Training runs that are killed at random moments, resumed, and compared with an undisturbed run."""

from __future__ import annotations

import functools
import importlib
import json
import mmap
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hacpo_kit as hk
from hacpo_kit import rollouts, training
from hacpo_kit.common.files import read_lines
from hacpo_kit.runs import folder as run_folder
from hacpo_kit.runs.checkpoints import checkpoints, read_state, step_of
from hacpo_kit.runs.experience import Experience, path_of, recorded_steps

STEPS, EVERY = 6, 2
CONFIG = hk.Config(prompts_per_step=4, n=4, minibatch=16)
# phases of a run: the name in the report, and the function
PHASES = {
    "checkpoint": (run_folder, "save_checkpoint"),
    "update": (training, "update"),
    "rollout": (rollouts, "sample"),
    "evaluation": (training, "evaluate"),
    "scoring": (rollouts, "_score_new"),
    "reward": (training, "reward"),
    "lines": (run_folder, "append_lines"),
    "experience": (Experience, "save"),
}
NAMES = list(PHASES)
OTHER = "between"  # everything outside the phases: loading, advantages, callbacks


def _cell(index: int) -> property:
    """Return a property for one number of a board."""
    return property(lambda board: board.cells[index], lambda board, value: board.cells.__setitem__(index, value))


class Board:
    """Numbers in memory that a run shares with the process that kills it."""

    def __init__(self):
        self.memory = mmap.mmap(-1, 4096)
        self.cells = np.frombuffer(self.memory, dtype=np.float64)
        self.begun, self.seconds = self.cells[8 : 8 + len(NAMES)], self.cells[32 : 32 + len(NAMES)]

    phase = _cell(0)  # number of the current phase, from 1; 0: none
    saved = _cell(1)  # the last step with a checkpoint; −1: none
    first = _cell(2)  # the first step that was made; 0: none

    def clear(self) -> None:
        """Set the numbers to those before a run."""
        self.cells[:] = 0
        self.saved = -1

    @property
    def at_work_on(self) -> str:
        """Return the phase that was started and did not end."""
        return NAMES[int(self.phase) - 1] if self.phase else OTHER

    def watch(self) -> None:
        """Record every phase of a run in this process from now on."""
        for index, (where, name) in enumerate(PHASES.values()):
            setattr(where, name, self._noting(index, getattr(where, name)))
        save = run_folder.save_checkpoint

        def and_note_step(run, agents, state):
            out = save(run, agents, state)
            self.saved = state.step
            return out

        run_folder.save_checkpoint = and_note_step

    def _noting(self, index: int, function):
        @functools.wraps(function)
        def noting(*args, **settings):
            before, start = self.phase, time.perf_counter()
            self.phase = index + 1
            self.begun[index] += 1
            try:
                return function(*args, **settings)
            finally:
                self.phase = before
                self.seconds[index] += time.perf_counter() - start

        return noting


def start(folder: Path, board: Board, *, resume: bool = False) -> int:
    """Start or resume a run in a separate process; return its id. Its output goes to a file."""
    board.clear()
    if pid := os.fork():  # torch and transformers, which take seconds to load, are shared
        return pid
    try:
        with folder.with_suffix(".log").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        _train(folder, board, resume)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _train(folder: Path, board: Board, resume: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # nothing draws from these three, but a checkpoint holds them
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    board.watch()

    def made(result) -> None:
        board.first = board.first or result.metrics["step"]

    how = {"callbacks": [made], "progress": "off"}
    if resume:
        hk.resume(folder, **how)
        return
    train, test = (hk.load_problems("arithmetic", split=s, size=k) for s, k in (("train", 50), ("test", 6)))
    agents = hk.load_agents("tiny-model-pair", device="cpu")
    hk.train(agents, train, CONFIG, STEPS, out=folder, test=test, eval_every=EVERY, save_every=EVERY, **how)


def wait(pid: int) -> int:
    """Return the exit status of a process."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(pid: int, board: Board, phase: str, entry: int, later: float) -> bool:
    """Send SIGKILL `later` seconds after the `entry`-th start of a phase; return False if the process ended before."""
    index = NAMES.index(phase)
    while board.begun[index] < entry:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        time.sleep(1e-4)
    time.sleep(later)
    os.kill(pid, signal.SIGKILL)
    return wait(pid) == -signal.SIGKILL


# ── checks of a run folder ───────────────────────────────────────────────────────────────────────────


def half_written(folder: Path) -> list[str]:
    """Return incomplete files that have the name of a complete one."""
    faults = []
    for path in (p for p in folder.rglob("*") if p.is_file() and not any(q.endswith(".tmp") for q in p.parts)):
        try:
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".jsonl":
                read_lines(path)
            elif path.suffix == ".parquet" and not (path.read_bytes()[:4] == path.read_bytes()[-4:] == b"PAR1"):
                faults.append(f"{path.name} is half a table")
        except (ValueError, OSError) as fault:
            faults.append(f"{path.relative_to(folder)}: {fault}")
    for checkpoint in checkpoints(folder):
        try:
            read_state(checkpoint)
        except OSError as fault:
            faults.append(str(fault))
    return faults


def last_saved(folder: Path) -> int:
    """Return the step of the newest checkpoint; −1 without one."""
    found = checkpoints(folder)
    return step_of(found[-1]) if found else -1


def after_the_kill(folder: Path, board: Board) -> list[str]:
    """Return the faults in the folder of a killed run before it resumes."""
    faults, newest = half_written(folder), last_saved(folder)
    # renamed but not yet recorded is complete too
    allowed = {board.saved} | ({board.saved + EVERY, EVERY} if board.at_work_on == "checkpoint" else set())
    if newest not in allowed:
        faults.append(f"the newest checkpoint is that of step {newest}, the last that was saved {board.saved:.0f}")
    steps = [line["step"] for line in read_lines(folder / "metrics.jsonl")]
    if steps[: newest + 1] != list(range(newest + 1)):
        faults.append(f"a checkpoint of step {newest} stands beside metrics of the steps {steps}")
    return faults


def differences(folder: Path, whole: Path, *, same_process: bool = True) -> list[str]:
    """Return how a finished run differs from the undisturbed one: metrics, samples, experience, weights, optimisers, files.

    The state of unused random generators is compared only between processes of one kind.
    """
    faults = half_written(folder)
    faults += [f"{path.name} was left" for path in folder.rglob(".*.tmp")]
    for name in ("metrics.jsonl", "samples.jsonl"):
        here, there = ([_without_times(row) for row in read_lines(run / name)] for run in (folder, whole))
        if here != there:
            faults.append(f"{name} differs: {len(here)} lines here, {len(there)} there")
        if not (folder / name).read_bytes().endswith(b"\n"):
            faults.append(f"{name} ends with half a line")
    if recorded_steps(folder) != recorded_steps(whole):
        faults.append(f"the experience of the steps {recorded_steps(folder)} is recorded, not {recorded_steps(whole)}")
    for step in recorded_steps(folder):
        if same_process and path_of(folder, step).read_bytes() != path_of(whole, step).read_bytes():
            faults.append(f"the experience of step {step} differs")
    here, there = (checkpoints(run)[-1:] for run in (folder, whole))
    if [c.name for c in here] != [c.name for c in there]:
        return [*faults, f"the last checkpoint is {here}, not {there}"]
    one, two = (read_state(run[0]) for run in (here, there))
    loose = ("seconds", "sha256") if same_process else ("seconds", "sha256", "random")
    faults += [f"{key} in state.json differs" for key in one if key not in (*loose, "files") and one[key] != two[key]]
    models = [name for name in two["files"] if same_process or name.endswith(".safetensors")]
    faults += [f"{name} differs" for name in models if one["files"].get(name) != two["files"][name]]
    return faults


def _without_times(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if not key.startswith("seconds")}


# ── the trials ───────────────────────────────────────────────────────────────────────────────────────────────────


def trials(count: int, work: Path, seed: int) -> dict[str, Any]:
    """Kill `count` runs, each in another phase in turn, resume them, and report the results."""
    for name in ("pandas", "pyarrow.parquet"):  # loaded once, because every run needs them
        importlib.import_module(name)
    hk.load_agents("tiny-model-pair", device="cpu")
    draw, board, whole = random.Random(seed), Board(), work / "whole"
    started = time.perf_counter()
    if wait(start(whole, board)) != 0:
        raise RuntimeError(f"the undisturbed run failed: {whole.with_suffix('.log').read_text()}")
    undisturbed = time.perf_counter() - started
    begun, seconds = board.begun.copy(), board.seconds.copy()
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        number = len(rows)
        phase = NAMES[number % len(NAMES)]
        index = NAMES.index(phase)
        entry, share = draw.randint(1, int(begun[index])), draw.random()
        folder = work / f"run-{number:03d}"
        pid = start(folder, board)
        # 0.7: a pass may be faster than the mean of the undisturbed run, and the kill would come after it
        if not kill(pid, board, phase, entry, 0.7 * share * seconds[index] / begun[index]):
            shutil.rmtree(folder)  # it had ended before the kill, and a resumed run would end at once
            continue
        row = {"aimed_at": phase, "entry": entry, "hit": board.at_work_on, "checkpoint": last_saved(folder)}
        row["metrics_until"] = max((line["step"] for line in read_lines(folder / "metrics.jsonl")), default=-1)
        faults = after_the_kill(folder, board)
        row["goes_on_by"] = "resume" if number % 2 and (folder / "run.json").exists() else "the same call"
        code = wait(start(folder, board, resume=row["goes_on_by"] == "resume"))
        if code:
            faults.append(f"it did not go on: exit status {code}; {folder.with_suffix('.log').read_text()[-500:]}")
        else:
            first = max(row["checkpoint"], 0) + 1
            if board.first != (first if first <= STEPS else 0):
                faults.append(f"it went on with step {board.first:.0f}, not {first}")
            faults += differences(folder, whole)
        rows.append({**row, "faults": faults})
        print(f"{number + 1}/{count}: killed in {row['hit']}, {'; '.join(faults) or 'the same end'}", flush=True)
    hit = {name: sum(row["hit"] == name for row in rows) for name in (*NAMES, OTHER)}
    return {
        "kills": count, "seed": seed, "same_end": sum(not row["faults"] for row in rows), "killed_in": hit,
        "undisturbed_seconds": round(undisturbed, 2), "seconds": round(time.perf_counter() - started, 1), "trials": rows,
    }  # fmt: skip


__all__ = ["differences", "last_saved", "trials"]
