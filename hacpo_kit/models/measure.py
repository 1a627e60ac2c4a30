"""Memory of the toolkit's own passes, measured without data: on PyTorch's meta device tensors have shapes but no values."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hacpo_kit.config import Config
from hacpo_kit.models.agents import Agent
from hacpo_kit.models.lora import add_adapter
from hacpo_kit.models.offload import size

ATTENTION = "hacpo_kit_shapes"  # the name of `_attend` in transformers


def meta_agent(
    config: Any,
    *,
    dtype: str | torch.dtype = "float32",
    lora: Mapping[str, Any] | bool | None = None,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
) -> Agent:
    """Return an agent of a transformers config on the meta device; its tokenizer has only what passes need."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, _mask)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=getattr(torch, str(dtype).removeprefix("torch.")),
            attn_implementation=ATTENTION,
            trust_remote_code=trust_remote_code,
        )
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            model = add_adapter(model, {} if lora is True else lora, "meta")
    return Agent(model, SimpleNamespace(eos_token_id=0, pad_token_id=0, chat_template=None), name="meta")


def parameter_count(agent: Agent) -> int:
    """Return the number of parameters; tied ones count once."""
    return sum(p.numel() for p in agent.model.parameters())


def kept_bytes(agent: Agent, config: Config) -> dict[str, int]:
    """Return the bytes that an agent keeps between steps after its first update: weights, optimizer and reference."""
    if agent.optimizer is None:
        optimizer = agent.prepare_update(config)
        optimizer.zero_gradients()
        optimizer.step()  # creates the moments
        optimizer.zero_grad()
    return {part: size(agent, part) for part in ("weights", "optimizer", "reference")}


def sampling_bytes(agent: Agent, rows: int, prompt: int, response: int, prompts: int) -> tuple[int, int]:
    """Return the bytes of keys and values after `rows` responses to `prompts` different prompts, and of everything else."""
    model, last = agent.model, {"use_cache": True, "logits_to_keep": 1}
    ids = torch.zeros(rows, prompt + response - 1, dtype=torch.long, device="meta")
    with torch.no_grad():
        with Peak() as first_pass:
            model(ids[:prompts, :prompt], attention_mask=torch.ones_like(ids[:prompts, :prompt]), **last)
        cache = model(ids[:, 1:], **last).past_key_values
        with Peak() as last_pass:
            model(ids[:, :1], attention_mask=torch.ones_like(ids), past_key_values=cache, **last)
    kept = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    growing = kept // (2 * len(cache.layers))  # one layer's old keys, while the longer ones are written
    # after the pass: logits in float32 (a copy in half precision), noise, and the log-softmax's temporary
    scores = (3 + agent.half_precision) * 4 * rows * model.config.get_text_config().vocab_size
    return kept, max(first_pass.most, last_pass.most + growing, kept + scores) - kept


def scoring_bytes(agent: Agent, rows: int, prompt: int, response: int, config: Config) -> int:
    """Return the peak bytes while the log-probabilities of `rows` rollouts are computed."""
    with torch.no_grad(), Peak() as peak:
        agent.logprobs(*_different(rows, prompt, response), temperature=config.temperature)
    return peak.most


def update_bytes(agent: Agent, rows: int, prompt: int, response: int, config: Config) -> int:
    """Return the peak bytes of an update besides what the agent keeps: gradients, activations, logits, optimiser step."""
    kept_bytes(agent, config)
    optimizer, ids = agent.prepare_update(config), _different(rows, prompt, response)
    with Peak() as peak:
        optimizer.zero_gradients()  # as after a first micro-batch
        logp, mask = agent.logprobs(*ids, temperature=config.temperature)
        loss = (logp * mask).sum()
        if config.beta > 0:
            loss = loss + (agent.reference_logprobs(*ids, temperature=config.temperature) - logp).exp().sum()
        loss.backward()
        del logp, loss
        optimizer.collect()
        torch.nn.utils.clip_grad_norm_(optimizer.masters, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return peak.most


def _different(rows: int, prompt: int, response: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts and responses of these lengths; no two rows are equal, since equal rows are computed once."""
    return [[row] * prompt for row in range(rows)], [[0] * response] * rows


class Peak(TorchDispatchMode):
    """Follows every tensor created inside a block until it is freed; `most` is the peak of their bytes."""

    def __init__(self):
        super().__init__()
        self.alive: dict[int, int] = {}  # storage → bytes; storages from before the block count as 0
        self.now = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            self._follow(leaf, counted=False)
        out = function(*args, **kwargs)
        for leaf in tree_leaves(out):
            self._follow(leaf, counted=True)
        if function is torch.ops.aten.logsumexp.default:  # it allocates exp(x − max)
            self.most = max(self.most, self.now + args[0].nbytes)
        return out

    def _follow(self, leaf: Any, counted: bool) -> None:
        if not isinstance(leaf, Tensor):
            return
        storage = leaf.untyped_storage()  # shared by views
        key = id(storage)
        if key not in self.alive:
            self.alive[key] = storage.nbytes() if counted else 0
            self.now += self.alive[key]
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self.alive.pop(key)


def _attend(module, query, key, value, attention_mask, **_):
    """Attention for transformers with the memory of a fused kernel, whose keys and values are repeated for grouped heads."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) if groups > 1 else tensor for tensor in (key, value))
    bias = None if attention_mask is None else attention_mask.to(query.dtype).expand(-1, query.shape[1], -1, -1)
    out, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True)
    return out.transpose(1, 2), None


def _mask(batch_size: int, q_length: int, kv_length: int, **_):
    return torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
