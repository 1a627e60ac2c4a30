"""Checkpoints: safetensors and JSON only, written under a temporary name and renamed."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hacpo_kit.advantages import Capability
from hacpo_kit.common.files import read_json, remove_folder, remove_leftovers, replacing, write_json
from hacpo_kit.models.agents import Agent, run_on_each
from hacpo_kit.models.lora import adapter_tensors, has_adapter, load_adapter
from hacpo_kit.models.optimizers import MasterAdamW
from hacpo_kit.models.remote import check_visible
from hacpo_kit.models.sources import without_progress_bars
from hacpo_kit.runs.run import State

KEEP = 2  # checkpoints of a run that are kept: the newest, and one before it in case the newest is damaged


# ── one checkpoint ───────────────────────────────────────────────────────────────────────────────────────────────


def save(folder: str | Path, agents: Sequence[Agent], state: State) -> Path:
    """Write a checkpoint: every agent as a Hugging Face folder, optimisers, random generators and the run's state.

    It appears under its name when it is complete, with the SHA-256 of each file, which `restore` checks.

    Raises OSError, or an error of safetensors or tokenizers, if it cannot be written; ValueError if the folder holds other
    files, FloatingPointError for weights that are not finite.
    """
    folder = Path(folder).absolute()  # workers may have another working directory
    if folder.exists() and not (folder / "state.json").exists() and (folder.is_file() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty and not a checkpoint; choose another folder")
    with replacing(folder) as temporary:
        temporary.mkdir(parents=True)
        entries = run_on_each(agents, _save_agent, temporary)
        for agent in agents:
            check_visible(agent, temporary / "agents" / agent.name)
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        content = {
            **state.totals,
            "position": state.position,
            "capability": state.capability.to_dict(),
            "agents": entries,
            "random": _random_states(),
            "files": {path.relative_to(temporary).as_posix(): _file_digest(path) for path in files},
        }
        write_json(temporary / "state.json", {**content, "sha256": _digest(content)})
    return folder


def restore(folder: str | Path, agents: Sequence[Agent]) -> State:
    """Restore agents and random generators from a checkpoint, and return the run's state.

    Raises FileNotFoundError for a folder without a checkpoint, OSError, with the file's name, if a file is damaged or
    missing (nothing has changed then), ValueError if it holds other agents.
    """
    folder = Path(folder)
    if not (folder / "state.json").exists():
        raise FileNotFoundError(f"{folder} is not a checkpoint: state.json is missing")
    stored = read_state(folder)
    names = [entry["name"] for entry in stored["agents"]]
    if names != [agent.name for agent in agents]:
        raise ValueError(f"checkpoint {folder} holds agents {names}, not {[agent.name for agent in agents]}")
    run_on_each(agents, _restore_agent, folder.absolute(), {entry["name"]: entry for entry in stored["agents"]})
    _restore_random(stored["random"])
    past = {name: tuple(rewards) for name, rewards in stored["capability"]["history"].items()}
    capability = Capability(stored["capability"]["window"], past)
    scalars = {name: stored[name] for name in ("step", "position", "rollouts", "tokens", "seconds")}
    return State(capability=capability, **scalars)


def read_state(folder: Path) -> dict[str, Any]:
    """Return the content of state.json after checking the digest of every file of the checkpoint.

    Raises OSError, with the file's name, for a damaged or missing file.
    """
    try:
        stored = read_json(folder / "state.json")
    except ValueError as fault:
        raise OSError(f"{folder / 'state.json'} is damaged ({fault})") from None
    if stored.pop("sha256", None) != _digest(stored):
        raise OSError(f"{folder / 'state.json'} is damaged: its checksum is wrong")
    for name, digest in stored["files"].items():
        if _file_digest(folder / name) != digest:
            raise OSError(f"{folder / name} is damaged: its checksum is wrong")
    return stored


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _random_states() -> dict[str, Any]:
    """Return the states of the global random generators as JSON types; reward functions and callbacks may use them."""
    generator = np.random.get_state(legacy=False)  # noqa: NPY002
    generator["state"]["key"] = generator["state"]["key"].tolist()
    return {"torch": torch.get_rng_state().tolist(), "numpy": generator, "python": random.getstate()}


def _restore_random(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    np.random.set_state(states["numpy"])  # noqa: NPY002
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))


# ── one agent ────────────────────────────────────────────────────────────────────────────────────────────────────


def _save_agent(agent: Agent, folder: Path) -> dict[str, Any]:
    """Write one agent's files and return its entry in state.json; runs where the agent's model is."""
    bad = [name for name, weights in agent.model.named_parameters() if not weights.isfinite().all()]
    if bad:
        raise FloatingPointError(
            f"agent {agent.name!r} has weights that are not finite ({len(bad)} tensors, the first {bad[0]}) and is not saved; "
            "earlier checkpoints are unchanged. Try a lower lr or weight_decay"
        )
    agent.save(folder / "agents" / agent.name)
    if agent.reference is not None:
        with without_progress_bars():
            agent.reference.save_pretrained(folder / "references" / agent.name)
    # the agent's folder has merged weights, from which adapters cannot be recovered exactly
    if has_adapter(agent.model):
        (folder / "adapters").mkdir(exist_ok=True)
        save_file(adapter_tensors(agent.model), folder / "adapters" / f"{agent.name}.safetensors")
    tensors = {} if agent.optimizer is None else agent.optimizer.tensors()
    (folder / "optimizers").mkdir(exist_ok=True)
    save_file(tensors, folder / "optimizers" / f"{agent.name}.safetensors")
    return {"name": agent.name, "updates": agent.updates, "steps": agent.steps}


def _restore_agent(agent: Agent, folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore one agent from a checkpoint; runs where the agent's model is."""
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
    """Load weights in place, by from_pretrained, which handles shards and tied weights."""
    with without_progress_bars():
        loaded = type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True)
    model.load_state_dict(loaded.state_dict())


# ── the checkpoints of a run ─────────────────────────────────────────────────────────────────────────────────────


def checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = [p for p in (Path(run) / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", p.name) and p.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was saved, from its name."""
    return int(checkpoint.name.removeprefix("step-"))


def restore_newest(run: Path, agents: Sequence[Agent]) -> State | None:
    """Restore the newest checkpoint that can be read, with a warning for each damaged one; None if there is none.

    Raises ValueError if there are checkpoints and none can be read.
    """
    faults = []
    for folder in reversed(checkpoints(run)):
        if faults:
            warnings.warn(f"{faults[-1]}; going back to {folder.name}", stacklevel=3)
        try:
            return restore(folder, agents)
        except (OSError, KeyError, RuntimeError, SafetensorError) as fault:
            faults.append(f"checkpoint {folder} cannot be read ({type(fault).__name__}: {fault})")
    if faults:
        raise ValueError(f"{'; '.join(faults)}; put back a copy of one of them, or start a new run in another folder")
    return None


def save_checkpoint(run: Path, agents: Sequence[Agent], state: State) -> Path:
    """Save a run's newest checkpoint and remove the oldest ones beyond `KEEP`; raises as `save`."""
    remove_leftovers(Path(run) / "checkpoints")  # part of a checkpoint of a killed run takes space that this one needs
    damaged = [c for c in checkpoints(run) if step_of(c) > state.step]  # otherwise the run would have resumed from them
    folder = Path(run) / "checkpoints" / f"step-{state.step:06d}"
    if folder.exists() and not (folder / "state.json").exists():  # damaged, too
        remove_folder(folder)
    save(folder, agents, state)
    for checkpoint in damaged:
        remove_folder(checkpoint)
    for checkpoint in checkpoints(run)[:-KEEP]:
        remove_folder(checkpoint)
    return folder
