"""One run of a sweep, in a process of its own: takes its job from standard input, and ends when the sweep does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import threading
import traceback

FAILED, TRY_AGAIN, STOPPED = 1, 75, 130  # exit status


def main() -> None:
    """Reads one line with the job, runs its notebook, and leaves with a status; the traceback goes to standard error."""
    # a schema check of notebooks would compile the grammar of international addresses, for a second and for nothing
    sys.modules.setdefault("rfc3987_syntax", None)
    # not sys.stdin, whose lock a waiting thread would hold when Python ends
    pipe = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    job = json.loads(pipe.readline())
    threading.Thread(target=_listen, args=(pipe,), daemon=True).start()
    from hacpo_kit.experiments.notebooks import never_started, run_notebook

    try:
        run_notebook(**job, progress=False, tries=1)
    except Exception as error:
        print(_plain(traceback.format_exc()), file=sys.stderr, flush=True)
        # an earlier sweep that was killed may still hold the run for a moment
        again = never_started(error) or "another process is at work on" in str(error)
        sys.exit(TRY_AGAIN if again else FAILED)


def _listen(pipe: io.FileIO) -> None:
    """Obeys the sweep: "stop" ends the kernel after its step; the end of the pipe, also when the sweep was killed, at once.

    Not by signals: Jupyter takes those for itself, and kernels live in sessions of their own.
    """
    for line in iter(pipe.readline, b""):
        if line.strip() == b"stop" and not _signal_kernels(signal.SIGINT):
            os._exit(STOPPED)  # nothing has begun
    _signal_kernels(signal.SIGKILL)
    os._exit(STOPPED)


def _signal_kernels(which: signal.Signals) -> int:
    import psutil

    kernels = psutil.Process().children(recursive=which == signal.SIGKILL)
    for kernel in kernels:
        with contextlib.suppress(psutil.NoSuchProcess):
            kernel.send_signal(which)
    return len(kernels)


def _plain(text: str) -> str:
    """Without the colours of IPython's tracebacks."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


if __name__ == "__main__":
    main()
