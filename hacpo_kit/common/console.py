"""What this process knows about the console or notebook that it runs in."""

from __future__ import annotations

import contextlib


def unattended() -> bool:
    """Return True in a kernel whose client takes no input, such as papermill and nbconvert."""
    with contextlib.suppress(Exception):
        return not get_ipython().kernel._allow_stdin  # type: ignore[name-defined]
    return False
