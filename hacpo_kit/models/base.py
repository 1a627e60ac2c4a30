"""What an agent in this process and an agent in a worker have in common: name, counters and tokenizer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from hacpo_kit.models.templates import before_stop, render

if TYPE_CHECKING:
    from hacpo_kit.tasks.problems import Problem


class WorkerLost(Exception):
    """The worker of an agent has ended; what the agent has learned since the last checkpoint is lost."""


class BaseAgent:
    """An agent without its model: prompts and responses as token ids."""

    name: str
    tokenizer: Any  # of transformers
    chat: bool  # whether prompts go through the tokenizer's chat template
    template: dict[str, Any]  # keywords of the chat template
    end_ids: set[int]  # tokens that end a response
    end_id: int  # the one of them that ends the agent's own responses, and is appended to peer responses
    stop: tuple[str, ...] = ()  # strings that end a response, too
    max_length: int  # longest prompt and response together, in tokens
    description: str
    updates = 0  # optimiser updates since loading
    steps = 0  # calls of `update` since loading
    weights_version = 0  # grows with every change of the weights; an engine with a copy compares it
    origin: str | None = None  # what `load_agent` loaded, so that a run can load it again
    loading: Mapping[str, Any] = {}  # the options of `load_agent`
    workers: Mapping[str, Any] | None = None  # the options of the workers, if the agent is in one
    host = os.uname().nodename
    lost = ""  # why the agent's worker is gone; empty while it runs

    def __repr__(self) -> str:
        return f"Agent({self.name!r}: {self.description}, {self.updates} updates)"

    @property
    def control_ids(self) -> set[int]:
        """Every token that stands for no text: special tokens, also those without a role such as <|start_header_id|>."""
        added = self.tokenizer.added_tokens_decoder
        return {*self.tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}

    @property
    def pad_id(self) -> int:
        """The padding token. The model never attends to it, because masks are derived from lengths."""
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id

    def encode_prompt(self, prompt: str | Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Return the token ids of a prompt, text or chat messages, with exactly one BOS if the model uses one.

        Raises ValueError for chat messages without a chat template, and for a prompt without tokens.
        """
        if isinstance(prompt, str) and not self.chat:
            ids = self._encode_text(prompt)
        else:
            ids = self._encode_chat([{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt))
        bos = self.tokenizer.bos_token_id
        while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            ids = ids[1:]
        if not ids:
            raise ValueError(f"a prompt of agent {self.name!r} has no tokens: {prompt!r}")
        return tuple(ids)

    def encode_problem(self, problem: Problem) -> tuple[int, ...]:
        """As `encode_prompt`, for the prompt of a problem, which errors name."""
        try:
            return self.encode_prompt(problem.prompt)
        except ValueError as error:
            raise ValueError(f"problem {problem.id!r}: {error}") from error

    def _encode_text(self, text: str) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
        if ids and ids[-1] == self.tokenizer.eos_token_id and not text.endswith(self.tokenizer.eos_token):
            ids = ids[:-1]  # some tokenizers append the end token to every text
        return ids

    def _encode_chat(self, messages: list[Mapping[str, str]]) -> list[int]:
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"agent {self.name!r} has no chat template, but the prompt is a list of messages; "
                "give prompts as text, or set tokenizer.chat_template"
            )
        if messages and messages[-1].get("role") == "assistant":
            warnings.warn(
                f"agent {self.name!r}: the last message of a prompt is the assistant's, so the prompt may contain the answer; "
                "remove that message",
                stacklevel=4,
            )
        try:
            text = render(self.tokenizer, messages, self.template, prompt=True)
        except TemplateError as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(
                f"the chat template of agent {self.name!r} refuses a prompt with messages of {roles} ({error}); if it takes no "
                "system message, write that text into the first message of the user, or use prompt_format='plain'"
            ) from error
        bos = self.tokenizer.bos_token_id
        # a model whose tokenizer adds BOS was trained with it, also if the template does not contain it
        start = [bos] if bos is not None and self.tokenizer("a")["input_ids"][:1] == [bos] else []
        return [*start, *self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response exactly as sampled, with control tokens and without a clean-up of spaces."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def split_end(self, ids: Sequence[int]) -> tuple[str, int]:
        """Return the text of a response that ended, without its end, and the number of tokens of the end."""
        if not self.stop or ids[-1] in self.end_ids:
            return self.decode(ids[:-1]), 1
        whole = self.decode(ids)
        if (text := before_stop(whole, self.stop)) is None:
            return whole, 0
        end = next(k for k in range(1, len(ids) + 1) if len(self.decode(ids[:-k])) <= len(text))
        return text, end

    def view(
        self, problem: Problem, text: str, *, ended: bool, prompt: tuple[int, ...] = ()
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | str:
        """Return a peer response in this agent's tokens (prompt, response), or the reason why it is excluded.

        `prompt`: the prompt's token ids, if known, to save time.

        Reasons: "lossy_reencoding" (decoding the tokens gives another text), "control_token" (the text contains a control
        token of this agent), "empty" (no tokens), "too_long" (prompt and response exceed `max_length`; nothing is cut).
        """
        prompt = prompt or self.encode_problem(problem)
        if ended and self.stop:  # this agent ends its own responses with a text
            text, ended = text + self.stop[0], False
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if self.decode(ids) != text:
            return "lossy_reencoding"
        if self.control_ids.intersection(ids):
            return "control_token"
        ids = [*ids, self.end_id] if ended else ids
        if not ids:
            return "empty"
        return "too_long" if len(prompt) + len(ids) > self.max_length else (prompt, tuple(ids))


def check_tokenizer(tokenizer, name: str, prompt_format: str) -> None:
    """Raise ValueError for a tokenizer without an end token, or without the chat template that `prompt_format` needs."""
    if prompt_format not in ("auto", "chat", "plain"):
        raise ValueError(f"prompt_format={prompt_format!r}: use 'auto', 'chat' or 'plain'")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of agent {name!r} has no end token, so no response could end: set tokenizer.eos_token to the "
            "token that ended responses in training, and save the tokenizer to the model's folder"
        )
    if prompt_format == "chat" and not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of agent {name!r} has no chat template: use prompt_format='plain', or set "
            "tokenizer.chat_template and save the tokenizer to the model's folder"
        )


def warn_about_bos(agent: BaseAgent) -> None:
    """Warn if the tokenizer has a BOS token, but prompts do not begin with it."""
    bos, eos = agent.tokenizer.bos_token_id, agent.tokenizer.eos_token_id
    if bos in (None, eos) or agent.encode_prompt("1+1=")[0] == bos:  # GPT-2 has one token for both, and adds none
        return
    warnings.warn(
        f"the tokenizer of agent {agent.name!r} has the BOS token {agent.tokenizer.bos_token!r}, but prompts do not begin with "
        "it; if the model was trained with it, set tokenizer.add_bos_token = True, or write it into the chat template, and save "
        "the tokenizer to the model's folder",
        stacklevel=3,
    )
