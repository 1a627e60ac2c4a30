"""The console or notebook of this process: is a person there, progress, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tqdm.auto import tqdm


def unattended() -> bool:
    """Return True in a kernel whose client takes no input, such as papermill and nbconvert."""
    with contextlib.suppress(Exception):
        return not get_ipython().kernel._allow_stdin  # type: ignore[name-defined]
    return False


def progress_mode(progress: str) -> str:
    """Return "bar", "lines" or "off"; "auto" means HACPO_KIT_PROGRESS, or a bar unless the notebook is unattended.

    Raises ValueError for another word.
    """
    if progress not in ("auto", "bar", "lines", "off"):
        raise ValueError(f"progress={progress!r}: use 'auto', 'bar', 'lines' or 'off'")
    if progress == "auto":
        return os.environ.get("HACPO_KIT_PROGRESS") or ("lines" if unattended() else "bar")
    return progress


@contextlib.contextmanager
def step_progress(mode: str, steps: int, done: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that reports the metrics of one step, as a bar or as at most twenty lines per run."""
    bar = tqdm(total=steps, initial=done, desc="train", unit="step", disable=mode != "bar")
    interval = max(1, steps // 20)

    def report(line: Mapping[str, Any]) -> None:
        rewards = ", ".join(f"{n} {v['reward']:.2f}" for n, v in line["agents"].items() if v.get("reward") is not None)
        bar.set_postfix_str(rewards, refresh=False)
        bar.update(1)
        if mode == "lines" and (line["step"] % interval == 0 or line["step"] == steps):
            print(f"step {line['step']}/{steps}: mean reward {rewards}", flush=True)

    with bar:
        yield report


class Interrupt:
    """Ctrl-C requests a stop after the current step; a second Ctrl-C interrupts at once.

    Only the main thread receives signals. In another thread nothing changes.
    """

    pressed = False

    def __init__(self, message: str = "stopping after this step"):
        self.message = message

    def __enter__(self) -> Interrupt:
        self.previous = None
        if threading.current_thread() is threading.main_thread():
            self.previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, signum, frame) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        print(f"\n{self.message} (press Ctrl-C again to stop at once)", file=sys.stderr, flush=True)

    def __exit__(self, *_) -> None:
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)
