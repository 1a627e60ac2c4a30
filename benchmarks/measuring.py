"""What several benchmarks share: the parts of a step, the memory of a process, and what stands beside every measurement."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hacpo_kit.saving import versions

PARTS = ("rollout", "scoring", "reward", "advantage", "update")  # of a step; its metrics call them seconds_…


def surroundings(*packages: str) -> dict[str, Any]:
    """Load, cores, machine and versions, those of further packages included."""
    return {
        "load_average": [round(x, 1) for x in os.getloadavg()], "cores": os.cpu_count(), "machine": platform.machine(),
        "versions": {**versions(), **{name: version(name) for name in packages}},
    }  # fmt: skip


def memory(which: str) -> int:
    """Bytes of this process (Linux): VmRSS now, VmHWM at most, without what its parent had before it started."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))
