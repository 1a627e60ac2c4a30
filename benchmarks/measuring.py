"""Shared by benchmarks: parts of a step, memory of a process, a random reward, a description of the machine."""

from __future__ import annotations

import os
import platform
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hacpo_kit.runs.record import versions

PARTS = ("rollout", "scoring", "reward", "advantage", "update")  # of a step; its metrics call them seconds_…


def surroundings(*packages: str) -> dict[str, Any]:
    """Return load, cores, machine and versions, including those of further packages."""
    return {
        "load_average": [round(x, 1) for x in os.getloadavg()], "cores": os.cpu_count(), "machine": platform.machine(),
        "versions": {**versions(), **{name: version(name) for name in packages}},
    }  # fmt: skip


def random_reward(response: str, gold: str) -> float:
    """Return a reward of 0 or 1 that depends on the text alone."""
    return float(zlib.crc32(response.encode()) % 2)


def memory(which: str) -> int:
    """Return the bytes of this process (Linux), VmRSS (now) or VmHWM (peak), without those of its parent at its start."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))
