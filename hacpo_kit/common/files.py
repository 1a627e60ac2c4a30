"""JSON files that are whole or not there, lines that survive a stop, and locks; needs no torch, so it loads at once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

LONGEST_NAME = 200  # bytes: file systems take 255, and temporary files add to it


def write_json(path: Path, content: Any) -> None:
    """Writes JSON so that a reader finds the old file or the new one, never half of one."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text so that a reader finds the old file or the new one, never half of one."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises ValueError, naming the file, for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one, too
        raise ValueError(f"{path} is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no object with names and values, but {type(content).__name__}")
    return content


def check_name(name: str, what: str) -> str:
    """A name that becomes that of files; raises ValueError for one with slashes, or that would be hidden or too long."""
    if not re.fullmatch(r"\w[\w.+=-]*", name):
        raise ValueError(
            f"name {name!r}: use letters, digits and . _ - + = only, since it becomes {what}, and begin with a letter or digit"
        )
    if len(name.encode()) > LONGEST_NAME:
        raise ValueError(f"name {name[:40]!r}… has {len(name.encode())} bytes, a file name may have {LONGEST_NAME}")
    return name


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


def remove_leftovers(*folders: Path) -> None:
    """Removes what a killed process left half written under a temporary name; for who holds the lock of the folders."""
    for left in (left for folder in folders for left in Path(folder).glob(".*.tmp")):
        if re.search(r"\.[0-9a-f]{8}\.tmp$", left.name):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def remove_folder(folder: Path) -> None:
    """Removes a folder so that a reader finds all of it or none."""
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    folder.replace(aside)
    shutil.rmtree(aside)


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends JSON lines: all of them or, with an OSError that names the file (a full disk), none.

    A line cut by a kill does not count for `read_lines`; `truncate_lines` drops it.
    """
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    left = memoryview("".join(lines).encode("utf-8"))
    with path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            while left:  # a write may take less than all
                left = left[file.write(left) :]
        except OSError as fault:
            file.truncate(before)
            raise OSError(fault.errno, fault.strerror, str(path)) from None


class Lines:
    """A file of JSON lines that grows with a run; lines that cannot be written wait, and go with the next ones."""

    def __init__(self, path: Path):
        self.path, self.waiting = path, []

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends rows; warns, and keeps them, if the file cannot be written."""
        self.waiting += rows
        try:
            self.write()
        except OSError as fault:
            warnings.warn(
                f"{len(self.waiting)} lines cannot be written ({fault}); they are kept and written with the next ones",
                stacklevel=3,
            )

    def write(self) -> None:
        """Writes what waits. Raises OSError if that still cannot be."""
        if self.waiting:
            append_lines(self.path, self.waiting)
            self.waiting = []


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete JSON lines of a file; a last line without a line end was cut by a stop and does not count.

    Raises ValueError, naming file and line, for a line that is no JSON object.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").split("\n")[:-1], start=1):
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {path} is no JSON ({error})") from None
        if not isinstance(rows[-1], dict):
            raise ValueError(f"line {number} of {path} is no JSON object: {line[:80]}")
    return rows


def read_steps(path: Path) -> list[dict[str, Any]]:
    """As `read_lines`, for lines that belong to steps; raises ValueError for one that does not say to which."""
    rows = read_lines(path)
    if wrong := [row for row in rows if type(row.get("step")) is not int]:
        raise ValueError(
            f"{path} has a line without a whole number as its step: {str(wrong[0])[:80]}; remove that line"
        )
    return rows


def truncate_lines(path: Path, step: int) -> list[dict[str, Any]]:
    """Drops what a stopped run wrote after its last checkpoint; those steps are made again."""
    rows = [row for row in read_steps(path) if row["step"] <= step]
    if path.exists():
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return rows


@contextlib.contextmanager
def locked(file: Path | None, what: str):
    """Holds a lock file while the block runs, so that no other process does the same; None locks nothing.

    Raises ValueError, with the process that holds it, if somebody does; the lock of a killed process is free.
    """
    if file is None:
        yield
        return
    import fcntl

    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = file.open("a+", encoding="utf-8")
    except OSError as error:
        raise OSError(f"{file.parent} cannot be written: {error}") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is at work on {what}{_holder(handle)}; wait for it, or choose another name"
            ) from None
        # the content only says who it is; the lock itself is the operating system's, and ends with the process
        with contextlib.suppress(OSError):
            os.ftruncate(handle.fileno(), 0)
            me = {"process": os.getpid(), "host": os.uname().nodename, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            os.write(handle.fileno(), json.dumps(me).encode())
        yield


def _holder(handle) -> str:
    handle.seek(0)
    with contextlib.suppress(ValueError, KeyError, TypeError):  # it has just begun, or is of an earlier version
        who = json.loads(handle.read())
        return f" (process {who['process']} on {who['host']}, since {who['since']})"
    return ""
