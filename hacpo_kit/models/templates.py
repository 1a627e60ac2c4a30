"""Chat templates: which token ends a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RESPONSE = "hacpo-kit-response"  # a text that no template contains


def end_of_turn(tokenizer, template: Mapping[str, Any] | None, end_ids: Sequence[int]) -> int:
    """Return the token that ends this agent's own responses, which is therefore appended to peer responses.

    `template` has the keywords of the chat template, or is None for plain prompts. `end_ids` are the tokens that end a
    response, those of the generation config first. In a chat it is the one that follows the response in the template, such
    as <end_of_turn>, which need not be the tokenizer's `eos_token`; without a chat it is the first one.
    """
    if template is not None and len(set(end_ids)) > 1:
        messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": RESPONSE}]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **template)
        except Exception:  # the template's own errors: it takes no message of an assistant
            text = ""
        following = text.rpartition(RESPONSE)[2].lstrip()
        closing = [i for i in end_ids if following.startswith(tokenizer.decode([i]))]
        if RESPONSE in text and closing:
            return max(closing, key=lambda i: len(tokenizer.decode([i])))  # one token may begin with another one
    return end_ids[0]
