"""Load agents: from built-in names, local folders or the hub, into this process or into workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hacpo_kit.config import did_you_mean
from hacpo_kit.models.agents import Agent
from hacpo_kit.models.base import BaseAgent, check_tokenizer, warn_about_bos
from hacpo_kit.models.engines.base import ENGINES
from hacpo_kit.models.lora import add_adapter
from hacpo_kit.models.memory import check_fits
from hacpo_kit.models.sources import (
    built_in_sets,
    is_built_in,
    locate,
    source_options,
    unique_names,
    without_progress_bars,
)

# options of `load_agent` that a run records; prompt_format and template are those of the agent
RECORDED = (
    "device", "dtype", "attention", "gradient_checkpointing", "lora", "revision", "engine", "engine_options", "offload", "stop",
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float64", "float16")


def load_agents(
    names: str | Sequence[str | Path | BaseAgent],
    *,
    workers: str | None = None,
    threads: int | None = None,
    num_gpus: float | None = None,
    prompt_format: str | Sequence[str] | Mapping[str, str] = "auto",
    **options: Any,
) -> list[BaseAgent]:
    """Load the agents of a built-in set ("tiny-model-pair"), or one per name in a list; `options` as in `load_agent`.

    `prompt_format` is one format for all agents, a list with one for each, or a mapping from names of this list to formats
    ("auto" for the others). Agents with the same name are numbered #2, #3, ….

    With workers="ray" each agent is in a process of its own, on the Ray cluster of RAY_ADDRESS or otherwise on this machine,
    with `threads` CPU threads (default: this process's threads, divided among the agents) and `num_gpus` GPUs (default: 1 if
    the cluster has GPUs); the agents work in parallel.

    Raises ValueError for an unknown set, the same Agent twice, more GPUs than the cluster has, and a loaded Agent with
    `workers`; ModuleNotFoundError without Ray.
    """
    if isinstance(names, str):
        sets = built_in_sets()
        if names not in sets:
            raise ValueError(
                f"unknown set of agents {names!r}{did_you_mean(names, sets)}; there are {', '.join(sets)}; "
                "use a list for other agents"
            )
        names = sets[names]["agents"]
    formats = _each_format(prompt_format, names)
    sources = [(name, {**options, "prompt_format": each}) for name, each in zip(names, formats, strict=True)]
    return load_each(sources, workers=workers, threads=threads, num_gpus=num_gpus)


def _each_format(prompt_format: str | Sequence[str] | Mapping[str, str], names: Sequence[Any]) -> list[str]:
    """Return the prompt format of each agent."""
    if isinstance(prompt_format, str):
        return [prompt_format] * len(names)
    if isinstance(prompt_format, Mapping):
        if unknown := set(prompt_format) - {str(name) for name in names}:
            raise ValueError(
                f"prompt_format names {sorted(unknown)}, which is not among {[str(name) for name in names]}"
            )
        return [prompt_format.get(str(name), "auto") for name in names]
    if len(prompt_format) != len(names):
        raise ValueError(f"prompt_format has {len(prompt_format)} entries for {len(names)} agents; give one for each")
    return list(prompt_format)


def load_each(
    sources: Sequence[tuple[str | Path | BaseAgent, Mapping[str, Any]]],
    *,
    workers: str | None = None,
    threads: int | None = None,
    num_gpus: float | None = None,
) -> list[BaseAgent]:
    """Load an agent from each pair of a source and its options of `load_agent`; see `load_agents`."""
    if not sources:
        raise ValueError("no agents to load")
    names = [
        source.name if isinstance(source, BaseAgent) else options.get("name") or Path(str(source)).name
        for source, options in sources
    ]
    unique = unique_names(names)
    named = [(source, {**options, "name": name}) for (source, options), name in zip(sources, unique, strict=True)]
    if workers is not None:
        from hacpo_kit.models.ray_workers import load_in_workers

        return load_in_workers(load_agent, named, workers, threads=threads, num_gpus=num_gpus)
    if threads is not None or num_gpus is not None:
        raise ValueError(
            "threads= and num_gpus= are options of workers: use workers='ray', or torch.set_num_threads and device="
        )
    agents: list[BaseAgent] = []
    for source, options in named:
        if any(source is agent for agent in agents):
            raise ValueError(f"agent {source.name!r} is listed twice; load it twice for two independent agents")
        agent = source if isinstance(source, BaseAgent) else load_agent(source, **options)
        if agent.name != options["name"]:
            agent.submit(setattr, "name", options["name"]).result()  # where the model is
            agent.name = options["name"]
        agents.append(agent)
    return agents


def load_agent(
    source: str | Path,
    *,
    name: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str = "float32",
    attention: str | None = None,
    gradient_checkpointing: bool = False,
    lora: Mapping[str, Any] | bool | None = None,
    offload: bool = False,
    prompt_format: str = "auto",
    template: Mapping[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    engine: str = "transformers",
    engine_options: Mapping[str, Any] | None = None,
    stop: str | Sequence[str] | None = None,
) -> Agent:
    """Load one agent from a built-in name, a local folder or a hub id, in this order; safetensors only.

    - `device`: default a GPU if there is one, but the CPU for built-in agents, which are too small for a GPU and give the
      same results on every machine.
    - `dtype`: the precision of the model. "bfloat16" learns through float32 master weights; "float16" only samples.
    - `attention`: an implementation of transformers ("sdpa", "eager", "flash_attention_2", …).
    - `gradient_checkpointing`: store fewer activations and recompute them in the backward pass.
    - `lora`: settings of peft's LoraConfig, or True for r = 16 on every linear layer; only the adapters learn.
    - `offload`: keep weights, optimiser, reference and the engine's memory on the device only while they are used, so that
      several agents share one device.
    - `prompt_format`, `template`, `stop`: see `Agent`.
    - `engine`: "transformers" or "vllm", the latter with `engine_options` (`hacpo_kit.models.engines.vllm.OPTIONS`).

    Raises FileNotFoundError for a folder without a model, OSError for a hub id that cannot be loaded, ValueError for an
    unusable model or option, MemoryError for a model that does not fit, ModuleNotFoundError for a missing extra.
    """
    chosen = dict(locals())
    where, is_local = locate(source)
    sampler, precision, name = _engine(engine, engine_options), _dtype(dtype), name or Path(str(source)).name
    device = device or ("cuda" if torch.cuda.is_available() and not is_built_in(source) else "cpu")
    options = source_options(source, revision, trust_remote_code)
    with without_progress_bars():
        tokenizer = _read_tokenizer(where, name, prompt_format, options)
        check_fits(where, precision, "cpu" if offload else device, **options)
        model = _read_model(where, len(tokenizer), precision, attention, options)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if lora:
        model = add_adapter(model, {} if lora is True else lora, name)
    agent = Agent(
        model if offload else model.to(device), tokenizer, name=name, offload=device if offload else None,
        prompt_format=prompt_format, template=template, engine=sampler, stop=stop,
    )  # fmt: skip
    warn_about_bos(agent)
    # absolute, so that a run finds the folder from any working directory
    agent.origin = str(Path(where).resolve()) if is_local and not is_built_in(source) else str(source)
    chosen.update(device=str(device), dtype=str(precision).removeprefix("torch."), stop=list(agent.stop) or None)
    agent.loading = {
        name: dict(chosen[name]) if isinstance(chosen[name], Mapping) else chosen[name] for name in RECORDED
    }
    return agent


def _read_tokenizer(where: str, name: str, prompt_format: str, options: dict[str, Any]):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(where, **options)
    check_tokenizer(tokenizer, name, prompt_format)
    return tokenizer


def _read_model(where: str, tokens: int, precision: torch.dtype, attention: str | None, options: dict[str, Any]):
    from transformers import AutoModelForCausalLM

    kind = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_pretrained(where, dtype=precision, use_safetensors=True, **kind, **options)
    rows = model.get_input_embeddings().num_embeddings
    if tokens > rows:
        raise ValueError(
            f"{where}: the tokenizer has {tokens} tokens, but the model has {rows} embeddings; "
            "call model.resize_token_embeddings and save the model"
        )
    return model


def _engine(name: str, options: Mapping[str, Any] | None):
    """Return the engine with its options; None for transformers."""
    if name == "vllm":
        from hacpo_kit.models.engines.vllm import VLLM

        return VLLM(**(options or {}))
    if name != "transformers":
        raise ValueError(f"unknown engine {name!r}{did_you_mean(name, ENGINES)}; there are {' and '.join(ENGINES)}")
    if options:
        raise ValueError(f"engine_options={dict(options)} need engine='vllm'; engine='transformers' has no options")
    return None


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype={dtype}: use one of {', '.join(DTYPES)} (float16 only samples)")
    return getattr(torch, name)
