"""One run of a sweep in a process of its own: both ends of the pipe between the sweep and that process.

The sweep sends one line with the run, later perhaps "stop", which ends the run after its current step. When the pipe closes,
also because the sweep was killed, the worker kills its kernel. Signals to the worker would not do this: Jupyter handles them
itself, and kernels live in sessions of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import IO, Any

STOPPED = 130  # exit status


def start(task: Mapping[str, Any], log: IO[bytes], threads: int | None = None) -> subprocess.Popen:
    """Start a worker that calls `run_notebook(**task)` and writes its output to `log`.

    `threads`: default OMP_NUM_THREADS, else 1, because small models that train side by side are many times slower with more.
    """
    threads = threads or os.environ.get("OMP_NUM_THREADS") or 1
    environment = {"OMP_NUM_THREADS": str(threads), "HACPO_KIT_PROGRESS": "lines", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [sys.executable, "-m", "hacpo_kit.experiments.worker"], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
        env=os.environ | environment, start_new_session=True,  # Ctrl-C reaches the sweep only, which sends "stop"
    )  # fmt: skip
    send(process, json.dumps(task))
    return process


def send(process: subprocess.Popen, line: str) -> None:
    """Send a line to a worker, unless it has already ended."""
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()


def main() -> None:
    """Run the notebook that the first line of standard input describes."""
    # not sys.stdin: the listening thread would hold its lock when Python ends
    pipe = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    task = json.loads(pipe.readline())
    threading.Thread(target=_listen, args=(pipe,), daemon=True).start()
    from hacpo_kit.experiments.notebooks import run_notebook

    try:
        run_notebook(**task, progress=False)
    except Exception:
        colours = r"\x1b\[[0-9;]*m"  # in IPython's tracebacks
        sys.exit(re.sub(colours, "", traceback.format_exc()))


def _listen(pipe: IO[bytes]) -> None:
    for line in iter(pipe.readline, b""):
        if line.strip() == b"stop" and not _signal_kernels(signal.SIGINT):
            os._exit(STOPPED)  # no kernel has started
    _signal_kernels(signal.SIGKILL)
    os._exit(STOPPED)


def _signal_kernels(which: signal.Signals) -> int:
    import psutil

    kernels = psutil.Process().children(recursive=which == signal.SIGKILL)
    for kernel in kernels:
        with contextlib.suppress(psutil.NoSuchProcess):
            kernel.send_signal(which)
    return len(kernels)


if __name__ == "__main__":
    main()
