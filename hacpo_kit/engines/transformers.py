"""The default engine: transformers' own `generate`, with every sampling field stated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hacpo_kit.engines import Answer, until_end

if TYPE_CHECKING:
    from hacpo_kit.agents import Agent


def neutral_generation_config(agent: Agent):
    """End and padding tokens and nothing else: no sampling default of a checkpoint may leak into a rollout."""
    from transformers import GenerationConfig

    return GenerationConfig(eos_token_id=sorted(agent.end_ids), pad_token_id=agent.pad_id)


class _Gumbel:
    """Turns greedy search into sampling: argmax of logits / T + Gumbel noise is a draw from softmax(logits / T).

    The noise comes from a generator of its own, so that neither other threads nor earlier draws change an answer.
    """

    def __init__(self, temperature: float, seed: int, device: torch.device):
        self.temperature = temperature
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.float() / self.temperature
        return scores - torch.empty_like(scores).exponential_(generator=self.generator).log()


def sample(
    agent: Agent,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> list[Answer]:
    """One answer to each prompt; T = 0 is greedy."""
    from transformers import GenerationConfig, LogitsProcessorList

    config = GenerationConfig(
        do_sample=False,  # chance is added to the logits
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        min_new_tokens=0,
        eos_token_id=sorted(agent.end_ids),
        pad_token_id=agent.pad_id,
        use_cache=True,
    )
    chance = LogitsProcessorList([_Gumbel(temperature, seed, agent.device)] if temperature > 0 else [])
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), agent.pad_id, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention[row, width - len(prompt) :] = 1
    # generate() fills what is unset from here; neutral again, should someone have set it since the agent was made
    agent.model.generation_config = neutral_generation_config(agent)
    with torch.no_grad():
        out = agent.model.generate(
            input_ids=ids.to(agent.device),
            attention_mask=attention.to(agent.device),
            generation_config=config,
            logits_processor=chance,
        )
    return [until_end(row, agent.end_ids) for row in out[:, width:].tolist()]
