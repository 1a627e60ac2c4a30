"""Low-rank adapters (LoRA) by peft: a small part of an agent learns, its base weights stay and are the KL's reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def check_extra() -> None:
    """Raises ModuleNotFoundError, naming the extra, without peft."""
    try:
        import peft  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("LoRA needs peft: pip install 'hacpo_kit[lora]'") from error


def add_adapter(model, settings: Mapping[str, Any], *, seed: int):
    """The model with trainable LoRA adapters; `settings` are those of peft's LoraConfig, such as r and lora_alpha.

    Adapters are float32 whatever the model computes in, so that small steps are kept. `seed` fixes their first values.
    Raises ModuleNotFoundError without peft, ValueError for settings that peft refuses.
    """
    check_extra()
    from peft import LoraConfig, get_peft_model

    settings = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", **settings}
    if settings.get("lora_dropout"):
        raise ValueError("lora_dropout: scores of one rollout would differ from call to call; leave it at 0")
    try:
        config = LoraConfig(task_type="CAUSAL_LM", **settings)
        with torch.random.fork_rng([]):  # they are made on the CPU
            torch.manual_seed(seed)
            return get_peft_model(model, config).eval()
    except (TypeError, ValueError) as error:
        raise ValueError(f"lora={dict(settings)}: {error}") from error


def has_adapter(model) -> bool:
    """Whether this is a model with adapters."""
    return hasattr(model, "peft_config")


def adapter_tensors(model) -> dict[str, Tensor]:
    """The adapters alone, exactly as they are."""
    return {n: p.detach().cpu().contiguous() for n, p in model.named_parameters() if p.requires_grad}


def load_adapter(model, tensors: Mapping[str, Tensor]) -> None:
    """Puts adapters back; raises KeyError unless `tensors` are those of such adapters."""
    mine = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if set(mine) != set(tensors):
        raise KeyError(f"adapters differ: {sorted(set(mine) ^ set(tensors))[:4]}")
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.copy_(tensors[name])


def merged_state(model) -> dict[str, Tensor]:
    """State of the plain model with the adapters added in; the model itself stays as it is, to the bit."""
    # W + ΔW in float32, rounded once to the model's precision; merging in place and back would change W
    deltas = {
        id(module.base_layer.weight): sum(module.get_delta_weight(a).float() for a in module.active_adapters)
        for module in model.modules()
        if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer")
    }
    base = model.get_base_model()
    state = {}
    for name, value in base.state_dict(keep_vars=True).items():
        if "lora_" not in name:
            delta = deltas.get(id(value))
            plain = value if delta is None else (value.float() + delta).to(value.dtype)
            state[name.replace(".base_layer.", ".")] = plain.detach()
    return state
