"""Memory on the device: what agents will need in each phase of a run, estimated before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from hacpo_kit.config import Config
from hacpo_kit.models.base import BaseAgent
from hacpo_kit.models.measure import (
    kept_bytes,
    meta_agent,
    parameter_count,
    sampling_bytes,
    scoring_bytes,
    update_bytes,
)
from hacpo_kit.models.sources import built_in_sets, read_config, unique_names

if TYPE_CHECKING:
    import pandas as pd

    from hacpo_kit.models.agents import Agent

PHASES = ("load", "rollout", "score", "update")
RESERVE = 0.6 * 2**30  # bytes of a CUDA context and the workspaces of its libraries
MARGIN = 0.9  # the share of a device's memory that tensors can use; the rest is fragmented
META_OPTIONS = ("dtype", "lora", "gradient_checkpointing")  # options of `load_agent` that change a pass


@dataclass(frozen=True)
class Phase:
    """Peak bytes on the device while one agent is in one phase."""

    agent: str
    phase: str  # one of PHASES
    weights: int = 0
    optimizer: int = 0  # moments, and float32 masters of half-precision weights
    reference: int = 0  # the frozen copy for the KL
    cache: int = 0  # keys and values while sampling; with vLLM everything that its engine allocates
    work: int = 0  # gradients, activations, logits
    others: int = 0  # what the other agents keep on the device

    @property
    def total(self) -> int:
        """The sum of all parts (bytes)."""
        return sum(getattr(self, part) for part in PARTS)


PARTS = tuple(f.name for f in fields(Phase) if f.name not in ("agent", "phase"))


@dataclass(frozen=True, repr=False)
class Estimate:
    """What each agent needs in each phase, whether it fits, and which settings make a phase smaller that does not."""

    phases: tuple[Phase, ...]
    parameters: Mapping[str, int]  # by agent
    kept: Mapping[str, int]  # bytes of weights, optimiser and reference by agent, as in a checkpoint
    offload: bool
    device_memory: int  # bytes
    advice: tuple[str, ...]

    def __repr__(self) -> str:
        largest = max(self.phases, key=lambda p: p.total)
        fits = "fits" if self.fits else "does not fit"
        peak = f"at most {format_bytes(largest.total)}, {largest.phase} of {largest.agent!r}"
        return f"Estimate({fits} in {format_bytes(self.device_memory)}: {peak})"

    @property
    def fits(self) -> bool:
        """Whether every phase fits in the usable memory."""
        return all(p.total <= usable(self.device_memory) for p in self.phases)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per agent and phase: the parts and their total in GiB, and whether it fits."""
        import pandas as pd

        rows = [
            {"agent": p.agent, "phase": p.phase, **{part: getattr(p, part) / 2**30 for part in (*PARTS, "total")}}
            | {"fits": p.total <= usable(self.device_memory)}
            for p in self.phases
        ]
        return pd.DataFrame(rows).set_index(["agent", "phase"])


def format_bytes(size: float) -> str:
    """Return bytes as text.

    >>> format_bytes(1.5 * 2**30), format_bytes(84 * 2**20)
    ('1.5 GiB', '84 MiB')
    """
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def usable(device_memory: float) -> float:
    """Return how much of a device's memory tensors can use (bytes)."""
    return MARGIN * device_memory - RESERVE


def estimate(
    agents: str | Path | Agent | Sequence[str | Path | Agent] | Mapping[str, Any],
    config: Config | None = None,
    *,
    prompt_tokens: int = 256,
    device: str | None = None,
    device_memory: int | None = None,
    **loading: Any,
) -> Estimate:
    """Estimate the device memory that agents need with a config in each phase, from their `config.json` alone.

    The toolkit's own passes run on PyTorch's meta device, where tensors have shapes but no data, and the bytes that are
    alive at the same time are counted. The attention is assumed to be fused, as transformers' default is.

    `agents`: names, sets, folders, hub ids, loaded agents, or a mapping from names to transformers configs. Prompts have
    `prompt_tokens` tokens, responses `max_new_tokens`. `device_memory` (bytes) defaults to the device's; with a size but no
    `device` it is a GPU's. `loading`: options of `load_agent`: dtype, lora, gradient_checkpointing, offload, engine,
    engine_options, revision, trust_remote_code.

    Raises ValueError for a model that cannot be created, OSError for one that cannot be loaded, TypeError for other options,
    ModuleNotFoundError for `lora` without peft.
    """
    device = device or ("cuda" if torch.cuda.is_available() or device_memory is not None else "cpu")
    if device_memory is None:
        device_memory = _total_memory(device)
    trust = {name: loading.pop(name) for name in ("revision", "trust_remote_code") if name in loading}
    models = {
        name: source.model.config if isinstance(source, BaseAgent) else read_config(source, **trust)
        if isinstance(source, str | Path) else source
        for name, source in _named(agents).items()
    }  # fmt: skip
    known = (*META_OPTIONS, "offload", "engine", "engine_options")
    if unknown := sorted(set(loading) - set(known)):
        raise TypeError(f"estimate() has no option {unknown[0]!r}; it takes {', '.join(known)}")
    options = {name: loading[name] for name in META_OPTIONS if name in loading}
    metas = {name: meta_agent(model, **options) for name, model in models.items()}
    plan = Plan(config or Config(), prompt_tokens, device, device_memory, metas, loading)
    phases = tuple(plan.phase(name, phase) for name in models for phase in PHASES)
    advice = tuple(plan.advice(p) for p in phases if p.total > usable(device_memory))
    kept = {name: sum(parts.values()) for name, parts in plan.kept.items()}
    parameters = {name: parameter_count(meta) for name, meta in metas.items()}
    return Estimate(phases, parameters, kept, plan.offload, device_memory, advice)


def _named(agents) -> dict[str, Any]:
    """Return agents and sources by the names that `load_agents` would give them."""
    if isinstance(agents, Mapping):
        return dict(agents)
    sets, listed = built_in_sets(), [agents] if isinstance(agents, str | Path | BaseAgent) else agents
    sources = [s for a in listed for s in (sets[a]["agents"] if isinstance(a, str) and a in sets else [a])]
    names = unique_names(s.name if isinstance(s, BaseAgent) else Path(str(s)).name for s in sources)
    return dict(zip(names, sources, strict=True))


@dataclass(frozen=True)
class Plan:
    """The phases of agents on one device with one config."""

    config: Config
    prompt: int  # tokens
    device: str
    device_memory: int  # bytes
    agents: Mapping[str, Agent]  # on the meta device
    loading: Mapping[str, Any]

    @property
    def offload(self) -> bool:
        """Whether agents leave the device while they are not used."""
        return bool(self.loading.get("offload"))

    @property
    def engine(self) -> int:
        """Bytes that the vLLM engine of each agent allocates."""
        if self.loading.get("engine", "transformers") != "vllm":
            return 0
        return int((self.loading.get("engine_options") or {}).get("gpu_memory_utilization", 0.3) * self.device_memory)

    @cached_property
    def kept(self) -> dict[str, dict[str, int]]:
        """The bytes that each agent keeps between steps, by part."""
        return {name: kept_bytes(agent, self.config) for name, agent in self.agents.items()}

    def rows(self, phase: str) -> int:
        """Return the number of rollouts in one pass."""
        config = self.config
        fitting = max(1, config.microbatch_tokens // (self.prompt + config.max_new_tokens))
        rows = {"rollout": config.rollout_batch, "score": fitting, "update": min(fitting, config.minibatch)}[phase]
        return min(rows, config.prompts_per_step * config.rollouts_per_prompt)

    def pass_bytes(self, name: str, phase: str) -> dict[str, int]:
        """Return the bytes that a pass needs besides what the agent keeps."""
        agent, sizes = self.agents[name], (self.rows(phase), self.prompt, self.config.max_new_tokens)
        if phase == "rollout":
            cache, work = sampling_bytes(agent, *sizes, -(-sizes[0] // self.config.rollouts_per_prompt))
            return {"cache": cache, "work": work}
        return {"work": (scoring_bytes if phase == "score" else update_bytes)(agent, *sizes, self.config)}

    def phase(self, name: str, phase: str) -> Phase:
        """Estimate one agent in one phase; without offload all agents keep everything on the device."""
        kept = self.kept[name]
        others = sum(sum(self.kept[n].values()) + self.engine for n in self.agents if n != name)
        if phase == "load" or (self.offload and phase != "update"):
            kept = {"weights": kept["weights"]}
        if phase == "rollout" and self.engine:
            kept = {} if self.offload else kept  # the engine has its own weights
            needed = {"cache": self.engine}
        else:
            needed = {} if phase == "load" else self.pass_bytes(name, phase)
            if self.engine and phase != "load" and not self.offload:
                needed = {**needed, "cache": self.engine}
        return Phase(name, phase, **kept, **needed, others=0 if self.offload else others)

    def advice(self, phase: Phase) -> str:
        """Return the settings that make a phase smaller, those with the smallest cost first."""
        loading, config = self.loading, self.config
        half = str(loading.get("dtype", "float32")).removeprefix("torch.") in ("bfloat16", "float16")
        smaller = {
            "offload=True": len(self.agents) > 1 and not self.offload,
            "dtype='bfloat16'": not half and native_bfloat16(self.device),
            f"rollout_batch below {config.rollout_batch}": phase.phase == "rollout",
            f"microbatch_tokens below {config.microbatch_tokens}": phase.phase in ("score", "update"),
            "gradient_checkpointing=True": phase.phase == "update" and not loading.get("gradient_checkpointing"),
            "lora=True": phase.phase == "update" and not loading.get("lora"),
        }
        names = [name for name, helps in smaller.items() if helps] or ["a smaller model or a larger device"]
        sizes = f"{format_bytes(phase.total)} of {format_bytes(usable(self.device_memory))}"
        return f"{phase.phase} of {phase.agent!r} needs {sizes}; use {', '.join(names)}"


def check_fits(where: str, dtype: torch.dtype, device: str | torch.device, **options: Any) -> None:
    """Raise MemoryError if a model's weights need more than the free memory of a device, without reading them."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(where, **options)
    trust = options.get("trust_remote_code", False)
    count, free = parameter_count(meta_agent(config, dtype=dtype, trust_remote_code=trust)), free_memory(device)
    if count * dtype.itemsize > free:
        half = "" if dtype.itemsize <= 2 else f"dtype='bfloat16' needs {format_bytes(2 * count)}; "
        raise MemoryError(
            f"{where} does not fit: its {count / 1e9:.2f} billion parameters need {format_bytes(count * dtype.itemsize)} in "
            f"{str(dtype).removeprefix('torch.')}, and {device} has {format_bytes(free)} free. {half}load other agents with "
            "offload=True, or use a smaller model. `hacpo-kit doctor` estimates each phase of a run"
        )


def native_bfloat16(device: str | torch.device) -> bool:
    """Return whether the device computes in bfloat16 at full speed; GPUs that this machine lacks are assumed to."""
    if torch.device(device).type == "cpu":
        return torch.cpu._is_avx512_bf16_supported()
    return not torch.cuda.is_available() or torch.cuda.get_device_properties(device).major >= 8


def free_memory(device: str | torch.device) -> int:
    """Return the free bytes of a GPU, or of this machine's main memory."""
    device = torch.device(device)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def _total_memory(device: str) -> int:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total
