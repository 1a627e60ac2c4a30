"""② reward: a verifier pays each answer, on worker processes that can be killed.

Statuses: correct (1.0), wrong (0.0), no_answer (0.0: no usable box), timeout (0.0), error (None: the verifier or the
user's function failed), unscorable (None: the gold is at fault). None is not a reward of 0: such a rollout is left out
of the advantages and counted. Time limits need neither signals nor asyncio, so they hold in any thread, in Jupyter and
under papermill.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hacpo_kit.tasks.verifier import MAX_CHARS, integer, last_box

if TYPE_CHECKING:
    from hacpo_kit.records import Pool, Rollout

WORKER_SCRIPT = Path(__file__).with_name("tasks") / "verifier.py"
MEMORY_LIMIT = 2**30  # bytes of resident memory; a worker beyond it is replaced
START_LIMIT = 120.0  # seconds for a worker to import math-verify; never part of an item's time
POLL = 0.05  # seconds between two looks at a busy worker's memory and at the caller's wish to stop


@dataclass(frozen=True)
class Verdict:
    """What one answer earns: reward (None: not scorable), status, and for the rare statuses a line that says why.

    >>> Verdict(1.0, "correct")
    Verdict(reward=1.0, status='correct', detail='')
    """

    reward: float | None
    status: str
    detail: str = ""


def boxed_math(response: str, gold: str, *, timeout: float = 5.0) -> Verdict:
    r"""Verdict on the last `\boxed{...}` of a response, mathematically compared with the gold.

    An unusable gold is unscorable whatever the response says. `timeout` is in seconds of work on this item.

    >>> boxed_math(r"It is \boxed{\frac{1}{2}}.", "0.5")
    Verdict(reward=1.0, status='correct', detail='')
    """
    return score([(response, gold)], timeout=timeout)[0]


def score(
    pairs: Sequence[tuple[str, str]],
    *,
    fn: Callable = boxed_math,
    timeout: float = 5.0,
    workers: int | None = None,
    progress: bool = False,
) -> list[Verdict]:
    r"""Verdicts on many (response, gold) pairs, in their order; equal pairs are verified once.

    `fn(response, gold)` may be any callable that returns a number, a bool or a Verdict; it then runs in this process
    without a time limit, a reward above 0 counts as correct, and an exception gives status error. `timeout` is in
    seconds per item, from when a worker begins it; `workers` defaults to min(4, cpu count).

    Raises ValueError, with the index of the item, for a reward that is not a finite number; TypeError for a pair that
    is not text (a gold of None is unscorable); RuntimeError if no worker can start.

    >>> [v.status for v in score([(r"\boxed{7}", "7"), (r"\boxed{5}", "7"), ("7?", "7"), (r"\boxed{7}", "")])]
    ['correct', 'wrong', 'no_answer', 'unscorable']
    """
    if not callable(fn):
        raise TypeError(f"the reward function must be callable, as in fn(response, gold); got {fn!r}")
    pairs = list(pairs)
    _check(pairs, timeout, workers)
    if fn is not boxed_math:
        return [_call(fn, response, gold, index) for index, (response, gold) in enumerate(pairs)]
    keys = [(last_box(response), gold) for response, gold in pairs]
    known = {key: _at_once(*key) for key in dict.fromkeys(keys)}
    todo = [key for key, verdict in known.items() if verdict is None]
    if todo:
        workers = workers or min(4, os.cpu_count() or 1)
        known.update(_verify(todo, timeout, workers, progress))
    return [known[key] for key in keys]


def _check(pairs: list, timeout: float, workers: int | None) -> None:
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout={timeout}: give a positive number of seconds")
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers}: at least one is needed")
    for index, (response, gold) in enumerate(pairs):
        if not isinstance(response, str) or not isinstance(gold, str | None):
            raise TypeError(
                f"item {index}: response and gold must be text, not {type(response).__name__} and {type(gold).__name__}"
            )


def _call(fn: Callable, response: str, gold: str, index: int) -> Verdict:
    """A user's reward function on one item."""
    try:
        given = fn(response, gold)
    except Exception as fault:
        return Verdict(None, "error", f"{type(fault).__name__}: {fault}")
    reward = given.reward if isinstance(given, Verdict) else given
    if isinstance(given, Verdict) and reward is None:
        return given
    try:
        if isinstance(reward, str | bytes):
            raise TypeError
        number = float(reward)
        problem = "; a reward must be finite" if not math.isfinite(number) else ""
    except (TypeError, ValueError, OverflowError, RuntimeError):
        problem = ", not a number or a Verdict"
    if problem:
        error = ValueError(f"item {index}: the reward function returned {repr(given)[:80]}{problem}")
        error.item = index
        raise error
    # the plain number, also of a Verdict: numpy's and torch's scalars are no JSON
    return (
        replace(given, reward=number)
        if isinstance(given, Verdict)
        else Verdict(number, "correct" if number > 0 else "wrong")
    )


def _at_once(answer: str | None, gold: str | None) -> Verdict | None:
    """The verdict that needs no worker: plain integers, and texts that nobody should try to read."""
    if gold is None or not gold.strip():
        return Verdict(None, "unscorable", "the gold is empty")
    if len(gold) > MAX_CHARS:
        return Verdict(None, "unscorable", f"the gold has {len(gold)} characters, the limit is {MAX_CHARS}")
    right = integer(gold.strip())
    if answer is not None and len(answer) > MAX_CHARS:
        # Not "wrong", since nothing is compared, and not an error either, since the fault is the model's and must not
        # go unpaid: a box that long is not an answer. The worker still looks whether the gold is usable.
        verdict = Verdict(0.0, "no_answer", f"the box has {len(answer)} characters, the limit is {MAX_CHARS}")
        return verdict if right is not None else None
    if right is None:
        return None
    if answer is None:
        return Verdict(0.0, "no_answer")
    left = integer(answer)
    if left is None:
        return None
    return Verdict(1.0, "correct") if left == right else Verdict(0.0, "wrong")


# ---------------------------------------------------------------------------------------------- on the workers


def _verify(keys: list[tuple], timeout: float, workers: int, progress: bool) -> dict[tuple, Verdict]:
    """Verdicts by (answer, gold): a few threads, each of which takes the next item to the next free worker."""
    waiting, done, stop, faults = deque(keys), {}, threading.Event(), []

    def feed() -> None:
        try:
            while (key := _next(waiting)) is not None:
                done[key] = _solve(key, timeout, workers, stop)
        except _Stopped:  # the caller does not want the rest
            pass
        except BaseException as fault:  # raised again in the caller's thread
            faults.append(fault)
            stop.set()

    threads = [threading.Thread(target=feed, daemon=True) for _ in range(min(workers, len(keys)))]
    try:
        for thread in threads:
            thread.start()
        _wait(threads, done, len(keys), progress)
    finally:
        stop.set()  # after an interrupt: busy workers are killed within a poll, so no late answer is ever read
    if faults:
        raise faults[0]
    return done


def _solve(key: tuple, timeout: float, workers: int, stop: threading.Event) -> Verdict:
    """The verdict on one item; if somebody kills its worker, which is not the item's fault, another one tries once more."""
    for _ in range(2):
        try:
            with _pool().worker(workers, stop) as worker:
                return worker.solve(*key, timeout, stop)
        except _Killed as death:
            told = f"the verifier process died: {death}"
    return Verdict(None, "error", told)


def _next(waiting: deque) -> tuple | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _wait(threads: list[threading.Thread], done: dict, total: int, progress: bool) -> None:
    shown = time.monotonic()
    for thread in threads:
        while thread.is_alive():
            thread.join(1.0)  # in slices: a wait without limit would hold back a keyboard interrupt on some systems
            if progress and time.monotonic() - shown > 2.0:
                print(f"verified {len(done)} of {total} answers", file=sys.stderr, flush=True)
                shown = time.monotonic()


class _Stopped(Exception):
    """The caller of `score` was interrupted."""


class _Dead(Exception):
    """The worker ended or was ended while it worked; the message says how."""


class _Killed(_Dead):
    """Somebody else ended it: a user, or a system that runs out of memory."""


class _Worker:
    """One verifier process. It has at most one item at a time, and is killed rather than left with one unanswered."""

    numbers = itertools.count(1)

    def __init__(self, stop: threading.Event) -> None:
        # a session of its own: Ctrl-C in the terminal or the notebook does not reach it
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        self.memory = psutil.Process(self.process.pid).memory_info
        self.buffer = b""
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        try:
            hello = self._read(time.monotonic() + START_LIMIT, stop)
            if hello is None or "broken" in hello:
                raise _Dead(hello["broken"] if hello else f"not ready after {START_LIMIT:.0f} s")
        except BaseException as fault:
            self.kill()
            if isinstance(fault, _Dead) and not isinstance(fault, _Killed):
                raise RuntimeError(f"the verifier process did not start: {fault}") from None
            raise

    def solve(self, answer: str | None, gold: str, timeout: float, stop: threading.Event) -> Verdict:
        """The verdict on one item; afterwards the worker is either free again or dead. Raises _Killed, _Stopped."""
        number, deadline = next(self.numbers), time.monotonic() + timeout
        gold_read = integer(gold.strip()) is not None
        item = {"id": number, "answer": answer, "gold": gold, "timeout": timeout}
        try:
            self._write(json.dumps(item).encode("ascii") + b"\n")
            while True:
                message = self._read(deadline, stop)
                if message is None:
                    self.kill()
                    if gold_read:
                        return Verdict(0.0, "timeout", f"no result after {timeout:g} s")
                    return Verdict(None, "unscorable", f"the gold was not read within {timeout:g} s")
                if message["id"] != number:
                    raise _Dead(f"a message about item {message['id']} while item {number} was at work")
                if "status" in message:
                    if message["fatal"]:
                        self.kill()
                    return Verdict(message["reward"], message["status"], message["detail"])
                gold_read = True
        except _Dead as death:
            self.kill()
            if isinstance(death, _Killed):
                raise
            return Verdict(None, "error", f"the verifier process died: {death}")
        except BaseException:
            self.kill()
            raise

    def _write(self, line: bytes) -> None:
        try:
            view = memoryview(line)
            while view:  # the pipe is unbuffered and may take less than all
                view = view[self.process.stdin.write(view) :]
        except OSError as fault:
            raise _Killed(f"{fault}") from None  # it ended before it had the item

    def _read(self, deadline: float, stop: threading.Event) -> dict | None:
        """The next message; None when time is up. Raises _Dead, _Stopped."""
        while b"\n" not in self.buffer:
            if stop.is_set():
                raise _Stopped
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if self.selector.select(min(left, POLL)):
                chunk = os.read(self.process.stdout.fileno(), 65536)
                if not chunk:
                    code = self.process.wait()
                    raise (_Killed if code == -signal.SIGKILL else _Dead)(f"exit code {code}")
                self.buffer += chunk
            elif self.too_big():
                raise _Dead(f"more than {MEMORY_LIMIT / 2**20:.0f} MiB of memory")
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def too_big(self) -> bool:
        try:
            return self.memory().rss > MEMORY_LIMIT
        except psutil.Error:  # it has just ended: the pipe will say so
            return False

    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.selector.close()
        self.process.stdin.close()
        self.process.stdout.close()


class _Pool:
    """The worker processes of this interpreter, started when first needed and shared by its threads."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.idle: list[_Worker] = []
        self.busy = 0
        self.every: set[_Worker] = set()

    @contextlib.contextmanager
    def worker(self, limit: int, stop: threading.Event):
        """A living, free worker for one item; waits while `limit` workers are at work."""
        with self.changed:
            while self.busy >= limit:
                self.changed.wait(POLL)
                if stop.is_set():
                    raise _Stopped
            self.busy += 1
            worker = self.idle.pop() if self.idle else None
        try:
            if worker is not None and not worker.alive():  # ended while idle: no item's fault
                self._drop(worker)
                worker = None
            if worker is None:
                worker = _Worker(stop)
                self.every.add(worker)
            yield worker
        finally:
            # after the item, not before the next one: growth over many items must not be laid to an innocent one
            if worker is not None and (not worker.alive() or worker.too_big()):
                self._drop(worker)
                worker = None
            with self.changed:
                self.busy -= 1
                if worker is not None:
                    self.idle.append(worker)
                self.changed.notify()

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        self.every.discard(worker)

    def close(self) -> None:
        for worker in list(self.every):
            self._drop(worker)
        self.idle.clear()


_pools: list[_Pool] = [_Pool()]


def _pool() -> _Pool:
    return _pools[0]


def _renew_pool() -> None:
    # a forked child has copies of the parent's pipes: were it to use them, both would read each other's answers
    _pools[0] = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_pool)
atexit.register(lambda: _pool().close())


# ---------------------------------------------------------------------------------------------- the stage itself


def reward(
    pool: Pool,
    function: Callable = boxed_math,
    *,
    timeout: float = 5.0,
    workers: int | None = None,
    progress: bool = False,
) -> Pool:
    """The pool with a reward and a status for every rollout; `function` and the errors are those of `score`.

    Rollouts that cannot be scored (status unscorable or error) keep the reward None; a warning counts them.
    """
    pairs = [(r.text, pool.problem(r.problem).gold) for r in pool]
    try:
        verdicts = score(pairs, fn=function, timeout=timeout, workers=workers, progress=progress)
    except ValueError as error:
        if (item := getattr(error, "item", None)) is not None:
            _name_rollout(error, pool, pool.rollouts[item])
        raise
    unpaid = [(r, v) for r, v in zip(pool, verdicts, strict=True) if v.reward is None]
    if unpaid:
        first, why = unpaid[0]
        warnings.warn(
            f"{len(unpaid)} of {len(pool)} rollouts cannot be scored and teach nobody; the first, {first.problem!r} by "
            f"{first.source!r}: {why.status} {why.detail}".rstrip(),
            stacklevel=2,
        )
    return pool.with_rewards([v.reward for v in verdicts], [v.status for v in verdicts])


def _name_rollout(error: ValueError, pool: Pool, rollout: Rollout) -> None:
    from hacpo_kit.common.faults import with_fault
    from hacpo_kit.records import rollout_names

    problem = pool.problem(rollout.problem)
    error.args = (f"agent {rollout.source!r}, {rollout_names([rollout])}: {error}",)
    with_fault(error, rollout.source, [rollout], [{"prompt": problem.prompt_text, "gold": problem.gold}])
