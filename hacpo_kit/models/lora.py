"""Low-rank adapters (LoRA) by peft: only the adapters learn; the base weights stay and are the reference of the KL."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hacpo_kit.common.seeds import derive_seed


def add_adapter(model, settings: Mapping[str, Any], name: str):
    """Return the model with trainable LoRA adapters; `settings` are those of peft's LoraConfig, such as r and lora_alpha.

    Adapters are float32 in any model, so that small steps are not rounded away. `name` seeds their initial values.
    Raises ModuleNotFoundError without peft, ValueError for settings that peft refuses.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("LoRA needs peft: pip install 'hacpo_kit[lora]'") from error
    settings = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", **settings}
    if settings.get("lora_dropout"):
        raise ValueError("lora_dropout: the scores of a rollout would differ from call to call; set it to 0")
    generation_config = model.generation_config
    try:
        config = LoraConfig(task_type="CAUSAL_LM", **settings)
        with torch.random.fork_rng([]):  # peft creates them on the CPU
            torch.manual_seed(derive_seed("lora", name))
            model = get_peft_model(model, config).eval()
    except (TypeError, ValueError) as error:
        raise ValueError(f"lora={settings}: {error}") from error
    model.generation_config = generation_config
    return model


def has_adapter(model) -> bool:
    """Return whether the model has adapters."""
    return hasattr(model, "peft_config")


def adapter_tensors(model) -> dict[str, Tensor]:
    """Return the adapters' tensors without the base model, on the CPU."""
    from peft import get_peft_model_state_dict

    return {name: tensor.cpu().contiguous() for name, tensor in get_peft_model_state_dict(model).items()}


def load_adapter(model, tensors: Mapping[str, Tensor]) -> None:
    """Load the adapters' tensors. Raises KeyError unless they have the names of this model's adapters."""
    from peft import set_peft_model_state_dict

    if different := set(adapter_tensors(model)) ^ set(tensors):
        raise KeyError(f"stored adapters differ from those of the model: {sorted(different)[:4]}")
    set_peft_model_state_dict(model, dict(tensors))


def merged_model(model):
    """Return the model without adapter layers: the model itself, or a copy with its adapters added to the weights."""
    return copy.deepcopy(model).merge_and_unload() if has_adapter(model) else model
