"""Processes that run the verifier. An answer that hangs, needs too much memory or crashes costs one killed process.

The limits need neither signals nor asyncio, so they hold in every thread, in Jupyter and under papermill.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

import psutil
from tqdm.auto import tqdm

from hacpo_kit.tasks.boxes import integer

COMMAND = [sys.executable, "-P", "-m", "hacpo_kit.tasks.verifier"]
PACKAGE = Path(__file__).resolve().parents[2]  # where the new process finds hacpo_kit
MEMORY_LIMIT = 2**30  # bytes of resident memory; a larger process is replaced
START_LIMIT = 120.0  # seconds to import math-verify; not part of an item's time
POLL = 0.05  # seconds between two checks of a busy process: its memory, and whether the caller was interrupted


@dataclass(frozen=True)
class Verdict:
    """The result for one response: reward (None: unscorable), status, and an explanation for the rare statuses.

    >>> Verdict(1.0, "correct")
    Verdict(reward=1.0, status='correct', detail='')
    """

    reward: float | None
    status: str
    detail: str = ""


def verify(
    items: Sequence[tuple[str | None, str]], *, timeout: float, workers: int, progress: bool = False
) -> list[Verdict]:
    """Return the verdict on each (boxed answer, gold), with up to `workers` processes at once.

    `timeout` is in seconds per item, from when a process starts it. Raises RuntimeError if no process can start.
    """
    stop = threading.Event()
    executor = ThreadPoolExecutor(min(workers, len(items)))
    futures = [executor.submit(_verify, *item, timeout, stop) for item in items]
    try:
        with tqdm(total=len(items), desc="verify", unit="answer", disable=not progress, leave=None) as bar:
            pending = set(futures)
            while pending:
                # in slices: on some systems an interrupt does not end a wait without a limit
                done, pending = wait(pending, timeout=1.0, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()  # raises the exception of its thread
                    bar.update()
        return [future.result() for future in futures]
    finally:
        stop.set()  # after an interrupt: ends busy processes, so that no late result is ever read
        executor.shutdown(wait=False, cancel_futures=True)


def _verify(answer: str | None, gold: str, timeout: float, stop: threading.Event) -> Verdict:
    """Return the verdict on one item; an item whose process was killed from outside is tried once more."""
    detail = ""
    for _ in range(2):
        process = _next_process()
        try:
            if not process.ready:
                process.start(stop)
            return process.verify(answer, gold, timeout, stop)
        except Killed as death:
            detail = str(death)
        finally:
            process.release()
    return Verdict(None, "error", f"the verifier process died: {detail}")


class Died(Exception):
    """The process ended while it worked; the message says how."""


class Killed(Died):
    """The process was killed from outside: by a user, or by a system without free memory."""


class VerifierProcess:
    """One process that runs the verifier program. It has at most one item at once."""

    numbers = itertools.count(1)

    def __init__(self):
        # in a session of its own, so that Ctrl-C in the terminal or the notebook does not reach it
        pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": DEVNULL, "bufsize": 0, "start_new_session": True}
        path = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = Popen(COMMAND, **pipes, env={**os.environ, "PYTHONPATH": path})
        self.ready = False  # whether it can take an item
        processes.add(self)

    def start(self, stop: threading.Event) -> None:
        """Wait until the process has started; raises RuntimeError if it fails, Killed, CancelledError once `stop` is set."""
        try:
            hello = self._read(time.monotonic() + START_LIMIT, stop) or {"broken": f"no reply after {START_LIMIT:g} s"}
        except Killed:
            raise
        except Died as death:
            hello = {"broken": death}
        if "broken" in hello:
            raise RuntimeError(f"the verifier process did not start: {hello['broken']}")
        self.ready = True

    def verify(self, answer: str | None, gold: str, timeout: float, stop: threading.Event) -> Verdict:
        """Return the verdict on one item; raises Killed, or CancelledError once `stop` is set."""
        self.ready, gold_read = False, integer(gold.strip()) is not None
        item = {"id": next(self.numbers), "answer": answer, "gold": gold, "timeout": timeout}
        deadline = time.monotonic() + timeout
        try:
            self._write(item)
            while (message := self._read(deadline, stop)) is not None:
                if message["id"] != item["id"]:
                    raise Died(f"a message about item {message['id']} instead of {item['id']}")
                if "status" in message:
                    self.ready = not message["fatal"]
                    return Verdict(message["reward"], message["status"], message["detail"])
                gold_read = True
        except Killed:
            raise
        except Died as death:
            return Verdict(None, "error", f"the verifier process died: {death}")
        if gold_read:
            return Verdict(0.0, "timeout", f"no result after {timeout:g} s")
        return Verdict(None, "unscorable", f"the gold was not read within {timeout:g} s")

    def release(self) -> None:
        """Keep the process for the next item, or end it if it cannot take one."""
        # memory is checked after an item and not before the next one, which did not cause the growth
        if self.ready and self.process.poll() is None and self.memory() <= MEMORY_LIMIT:
            _idle.append(self)
        else:
            self.end()

    def memory(self) -> int:
        """Return the resident memory of the process (bytes); 0 if it has ended."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.process.pid).memory_info().rss
        return 0

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        processes.discard(self)

    def _write(self, item: dict) -> None:
        line = memoryview(json.dumps(item).encode("ascii") + b"\n")
        try:
            while line:  # an unbuffered pipe may take a part only
                line = line[self.process.stdin.write(line) :]
        except OSError as fault:
            raise Killed(str(fault)) from None  # it ended before it had the item

    def _read(self, deadline: float, stop: threading.Event) -> dict | None:
        """Return the next message, or None after the deadline."""
        while not connection.wait([self.process.stdout], POLL):
            if stop.is_set():
                raise CancelledError
            if time.monotonic() > deadline:
                return None
            if self.memory() > MEMORY_LIMIT:
                raise Died(f"more than {MEMORY_LIMIT / 2**20:.0f} MiB of memory")
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            code = self.process.wait()
            raise (Killed if code == -signal.SIGKILL else Died)(f"exit code {code}")
        return json.loads(line)


processes: set[VerifierProcess] = set()  # all that were started here and have not ended
_idle: deque[VerifierProcess] = deque()


def _next_process() -> VerifierProcess:
    while _idle:
        with contextlib.suppress(IndexError):  # another thread took the last one
            process = _idle.pop()
            if process.process.poll() is None:
                return process
            process.end()  # it was killed while it was idle
    return VerifierProcess()


def close() -> None:
    """End all processes; `verify` starts new ones."""
    _idle.clear()
    for process in list(processes):
        process.end()


def _forget() -> None:
    # a forked child has copies of the parent's pipes; if it used them, both would read each other's results
    _idle.clear()
    processes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
atexit.register(close)
