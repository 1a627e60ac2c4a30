"""JSON files that are complete or absent, JSON lines that survive a stop, and locks. Loads without torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


def check_name(name: str, purpose: str) -> str:
    """Return a name that becomes a file name; raises ValueError if it has slashes, would be hidden, or is too long."""
    if not re.fullmatch(r"\w[\w.+=-]*", name) or len(name.encode()) > 200:  # file systems limit bytes, not letters
        raise ValueError(
            f"name {name!r}: it becomes {purpose}, so use letters, digits and . _ - + = only, up to 200 bytes, and begin with a "
            "letter or digit"
        )
    return name


# ── whole files ──────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name for a file or folder; it becomes `path` when the block ends and is removed if the block fails."""
    temporary, aside = _temporary(path), _temporary(path)
    try:
        yield temporary
        if path.is_dir():  # a folder cannot be replaced in one step
            path.replace(aside)
        temporary.replace(path)
    except BaseException:
        _remove(temporary)
        raise
    _remove(aside)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the file's name to the error of a full disk, which has none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_text(path: Path, text: str) -> None:
    """Write a text; a reader finds the old file or the new one, never a part."""
    with _named(path), replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, content: Any) -> None:
    """Write JSON; a reader finds the old file or the new one, never a part."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raises ValueError, with the file's name, for any other content."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that a killed process left behind; only the holder of the folder's lock may do this."""
    for path in folder.glob(".*.tmp"):
        if re.search(r"\.[0-9a-f]{8}\.tmp$", path.name):
            _remove(path)


def remove_folder(folder: Path) -> None:
    """Remove a folder; a reader finds all of it or nothing."""
    _remove(folder.replace(_temporary(folder)))


@contextlib.contextmanager
def locked(file: Path, what: str) -> Iterator[None]:
    """Hold a lock file while the block runs, so that no other process does the same work.

    The lock belongs to the process: it is free again when the process ends, also when it is killed.

    Raises ValueError at once if another process holds the lock.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(file).acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"another process is working on {what} (it holds {file}); wait until it ends, or choose another name"
        ) from None
    with lock:
        yield


# ── JSON lines ───────────────────────────────────────────────────────────────────────────────────────────────────


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON lines; raises OSError with the file's name, for example on a full disk.

    After an error the file may end with a part of a line, which `read_lines` ignores.
    """
    text = _as_lines(rows)
    with _named(path), path.open("a", encoding="utf-8") as file:
        file.write(text)


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines; a reader finds the old file or the new one."""
    write_text(path, _as_lines(rows))


def _as_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete JSON lines of a file, without a last line that a stop has cut; empty if there is no file.

    Raises ValueError, with file and line number, for a line that is not a JSON object.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {path} is not JSON ({error})") from None
        if not isinstance(rows[-1], dict):
            raise ValueError(f"line {number} of {path} is not a JSON object: {line[:80]}")
    return rows


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of steps, as `read_lines`; raises ValueError for a line without a step number."""
    rows = read_lines(path)
    for row in rows:
        if type(row.get("step")) is not int:
            raise ValueError(f"{path} has a line without a whole number as step: {str(row)[:80]}; remove that line")
    return rows
