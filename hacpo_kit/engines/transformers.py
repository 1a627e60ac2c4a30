"""The default engine: transformers' own `generate`, with every sampling field stated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hacpo_kit.agents import Agent


def neutral_generation_config(agent: Agent):
    """End and padding tokens and nothing else: no sampling default of a checkpoint may leak into a rollout."""
    from transformers import GenerationConfig

    return GenerationConfig(eos_token_id=sorted(agent.end_ids), pad_token_id=agent.pad_id)


def sample(
    agent: Agent,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    top_p: float = 1.0,
    top_k: int = 0,
) -> list[tuple[tuple[int, ...], bool]]:
    """One answer to each prompt: its tokens, end token included, and whether it ended by itself; T = 0 is greedy."""
    from transformers import GenerationConfig

    # the fields of sampling mean nothing to a greedy search, which warns about them
    chance = dict(temperature=temperature, top_p=top_p, top_k=top_k, typical_p=1.0, epsilon_cutoff=0.0, eta_cutoff=0.0)
    config = GenerationConfig(
        do_sample=temperature > 0,
        **(chance if temperature > 0 else {}),
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        min_new_tokens=0,
        eos_token_id=sorted(agent.end_ids),
        pad_token_id=agent.pad_id,
        use_cache=True,
    )
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), agent.pad_id, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention[row, width - len(prompt) :] = 1
    # generate() fills what is unset from here; neutral again, should someone have set it since the agent was made
    agent.model.generation_config = neutral_generation_config(agent)
    devices = [agent.device] if agent.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        out = agent.model.generate(
            input_ids=ids.to(agent.device), attention_mask=attention.to(agent.device), generation_config=config
        )
    return [_until_end(row, agent.end_ids) for row in out[:, width:].tolist()]


def _until_end(ids: list[int], end_ids: set[int]) -> tuple[tuple[int, ...], bool]:
    """The answer up to its first end token, which it keeps; padding behind it may be the same token."""
    for position, token in enumerate(ids):
        if token in end_ids:
            return tuple(ids[: position + 1]), True
    return tuple(ids), False
