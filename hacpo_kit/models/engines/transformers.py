"""The default engine: samples from the agent's own transformers model, token by token, from the full distribution.

Unlike `generate` it processes a repeated prompt once, removes finished responses from the batch, and keeps the
log-probability of each sampled token, which saves half the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hacpo_kit.models.engines.base import Answer, until_end
from hacpo_kit.models.templates import before_stop
from hacpo_kit.objective import token_logprobs

if TYPE_CHECKING:
    from hacpo_kit.models.engines.base import Policy

FINISHED_SHARE = 1 / 8  # finished responses leave the batch at this share, since copying the rest costs about one step


def neutral_generation_config(agent: Policy):
    """Return generation settings with end and padding tokens alone, without a checkpoint's sampling defaults."""
    from transformers import GenerationConfig

    return GenerationConfig(eos_token_id=sorted(agent.end_ids), pad_token_id=agent.pad_id)


@torch.no_grad()
def sample(
    agent: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> list[Answer]:
    """Return one answer per prompt with its log-probabilities under logits / T (nats); T = 0 is greedy, with those at T = 1.

    The noise comes from a separate generator, so that answers depend neither on other threads nor on earlier draws.
    """
    generator = torch.Generator(agent.device).manual_seed(seed)
    end = torch.tensor(sorted(agent.end_ids), device=agent.device)
    tokens = torch.full((len(prompts), max_new_tokens), agent.pad_id, device=agent.device)
    logps = torch.zeros(tokens.shape, device=agent.device)
    open_rows = torch.arange(len(prompts), device=agent.device)  # index of each row's answer
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=agent.device)
    lengths: dict[int, int] = {}  # of the answers that a stop string ended
    logits, attention, past = _read(agent, prompts)
    for t in range(max_new_tokens):
        noise = _noise(logits, open_rows, len(prompts), generator) if temperature > 0 else None
        token, logp = _draw(logits, temperature, noise)
        tokens[open_rows, t] = torch.where(ended, agent.pad_id, token)
        logps[open_rows, t] = logp.float()
        ended = ended | torch.isin(token, end)
        if agent.stop:
            for row in (~ended).nonzero().flatten().tolist():
                place = int(open_rows[row])
                if _stops(agent, tokens[place, : t + 1].tolist()):
                    ended[row], lengths[place] = True, t + 1
        finished = int(ended.sum())
        if t == max_new_tokens - 1 or finished == len(ended):
            break
        if finished >= FINISHED_SHARE * len(ended):
            stay = (~ended).nonzero().squeeze(-1)
            past.reorder_cache(stay)
            token, attention, open_rows, ended = (x[stay] for x in (token, attention, open_rows, ended))
        attention = torch.cat([attention, attention.new_ones(len(token), 1)], dim=-1)
        logits = _forward(agent, token[:, None], attention, past).logits[:, -1]
    answers = [
        Answer(tuple(ids[: lengths[place]]), True) if place in lengths else until_end(ids, agent.end_ids)
        for place, ids in enumerate(tokens.tolist())
    ]
    return [a._replace(logps=row[: len(a.ids)].copy()) for a, row in zip(answers, logps.cpu().numpy(), strict=True)]


def _stops(agent: Policy, ids: list[int]) -> bool:
    """Return whether the last tokens contain a stop string; each of its bytes is at most one token."""
    last = ids[-1 - max(len(string.encode()) for string in agent.stop) :]
    text = agent.tokenizer.decode(last, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return before_stop(text, agent.stop) is not None


def _read(agent: Policy, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, object]:
    """Return logits of the first tokens, attention mask and cache, from one pass over the distinct prompts."""
    distinct = list(dict.fromkeys(map(tuple, prompts)))
    width = max(map(len, distinct))
    ids = torch.full((len(distinct), width), agent.pad_id, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row, prompt in enumerate(distinct):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention[row, width - len(prompt) :] = 1
    attention = attention.to(agent.device)
    out = _forward(agent, ids.to(agent.device), attention, None)
    place = {prompt: row for row, prompt in enumerate(distinct)}
    rows = torch.tensor([place[tuple(prompt)] for prompt in prompts], device=agent.device)
    out.past_key_values.reorder_cache(rows)
    return out.logits[rows, -1], attention[rows], out.past_key_values


def _forward(agent: Policy, ids: Tensor, attention: Tensor, past):
    """Run one pass; positions skip the padding on the left."""
    positions = (attention.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return agent.model(
        input_ids=ids,
        attention_mask=attention,
        position_ids=positions,
        past_key_values=past,
        use_cache=True,
        logits_to_keep=1,
    )


def _noise(logits: Tensor, rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return Gumbel noise of the open rows, drawn for all rows, so that no answer depends on when another one ends."""
    noise = torch.empty(count, logits.shape[-1], device=logits.device).exponential_(generator=generator)
    return (noise if len(rows) == count else noise[rows]).log_().neg_()


def _draw(logits: Tensor, temperature: float, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a token per row and its log-probability: argmax(logits / T + Gumbel noise) samples softmax(logits / T)."""
    if noise is None:
        token = logits.argmax(-1)
    else:
        token = noise.add_(logits if temperature == 1 else logits.float() / temperature).argmax(-1)
    return token, token_logprobs(logits, token, temperature=temperature or 1.0)
