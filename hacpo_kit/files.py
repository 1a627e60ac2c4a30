"""JSON files that are whole or not there, lines that survive a stop, and locks; needs no torch, so it loads at once."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Writes JSON so that a reader finds the old file or the new one, never half of one."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text so that a reader finds the old file or the new one, never half of one."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to; the file takes its real name when the block ends, and is gone if the block fails."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends JSON lines; a line cut by a stop is dropped again by `truncate_lines`."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete JSON lines of a file; a last line without a line end was cut by a stop and does not count.

    Raises ValueError, naming file and line, for a line that is no JSON.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").split("\n")[:-1], start=1):
        try:
            rows += [json.loads(line)] if line else []
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {path} is no JSON ({error})") from None
    return rows


def truncate_lines(path: Path, step: int) -> list[dict[str, Any]]:
    """Drops what a stopped run wrote after its last checkpoint; those steps are made again."""
    rows = [row for row in read_lines(path) if row["step"] <= step]
    if path.exists():
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return rows


@contextlib.contextmanager
def locked(file: Path | None, what: str):
    """Holds a lock file while the block runs, so that no other process does the same; None locks nothing.

    Raises ValueError if somebody else holds it; the lock of a killed process is free.
    """
    if file is None:
        yield
        return
    import fcntl

    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = file.open("a")
    except OSError as error:
        raise OSError(f"{file.parent} cannot be written: {error}") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is at work on {what}; wait for it, or choose another name") from None
        yield
