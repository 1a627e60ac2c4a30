"""Chat templates: messages as text, always with the same date; what ends a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

CLOCK = "strftime_now"  # the function with which templates ask transformers for today's date
DATE = "2024-07-26"  # for templates that ask; the date that Llama 3 assumes where it cannot ask
RESPONSE = "hacpo-kit-response"  # a text that no template contains


def with_date(tokenizer, template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of the chat template; those of a template that contains today's date get a fixed one.

    Otherwise a run that resumes on another day would sample from other prompts. A run stores the keywords, and
    `template={"strftime_now": "2026-01-31"}` chooses another date.

    Raises ValueError for a date that is not written as year-month-day.
    """
    template = dict(template)
    if CLOCK in str(tokenizer.chat_template):
        template.setdefault(CLOCK, DATE)
        try:
            datetime.fromisoformat(template[CLOCK])
        except (TypeError, ValueError):
            raise ValueError(f"template={{{CLOCK!r}: {template[CLOCK]!r}}}: write a date such as {DATE!r}") from None
    return template


def render(tokenizer, messages: Sequence[Mapping[str, str]], template: Mapping[str, Any], *, prompt: bool) -> str:
    """Return messages as the text of the chat template; with `prompt`, followed by what opens a response."""
    if date := template.get(CLOCK):
        template = {**template, CLOCK: datetime.fromisoformat(date).strftime}
    # to text first: the return type of apply_chat_template(tokenize=True) depends on the version
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt, **template)


def end_of_turn(tokenizer, template: Mapping[str, Any] | None, end_ids: Sequence[int]) -> int:
    """Return the token that ends this agent's own responses, which is therefore appended to peer responses.

    `template` has the keywords of the chat template, or is None for plain prompts. `end_ids` are the tokens that end a
    response, those of the generation config first. In a chat it is the one that follows the response in the template, such
    as <end_of_turn>, which need not be the tokenizer's `eos_token`; without a chat it is the first one.
    """
    if template is not None and len(set(end_ids)) > 1:
        messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": RESPONSE}]
        try:
            text = render(tokenizer, messages, template, prompt=False)
        except Exception:  # the template's own errors: it takes no message of an assistant
            text = ""
        following = text.rpartition(RESPONSE)[2].lstrip()
        closing = [i for i in end_ids if following.startswith(tokenizer.decode([i]))]
        if RESPONSE in text and closing:
            return max(closing, key=lambda i: len(tokenizer.decode([i])))  # one token may begin with another one
    return end_ids[0]


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return one stop string or several as a tuple. Raises ValueError for an empty one, which would end every response."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"stop={stop!r}: stop strings must be texts of at least one character")
    return strings


def before_stop(text: str, stop: Sequence[str]) -> str | None:
    """Return the text before its first stop string; None if it contains none."""
    places = [place for string in stop if (place := text.find(string)) >= 0]
    return text[: min(places)] if places else None
