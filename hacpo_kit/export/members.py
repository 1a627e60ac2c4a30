"""The agents of an export: where their models are, and their chat templates."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo_kit.models.sources import built_in_sets, locate
from hacpo_kit.models.templates import CLOCK


@dataclass(frozen=True)
class Member:
    """One agent as the recipe loads it."""

    name: str
    path: str  # an absolute folder or a hub id
    local: bool
    template_options: Mapping[str, Any]
    plain_template: str | None  # chat template that gives the tokens of a plain prompt


def load_members(agents: str | Sequence[str | Path | Mapping[str, Any]], template: Mapping[str, Any]) -> list[Member]:
    """Return the members of a built-in set, of sources as `load_agent` takes them, or of the records in a run.json.

    `template` has keywords for the chat templates. Raises ValueError for agents that the recipe cannot load or that have the
    same name, FileNotFoundError for a folder without a model.
    """
    if isinstance(agents, str):
        agents = built_in_sets().get(agents, {"agents": [agents]})["agents"]
    records = [agent if isinstance(agent, Mapping) else {"origin": agent} for agent in agents]
    members = [_load_member(record, template) for record in records]
    names = [member.name.casefold() for member in members]
    if not names:
        raise ValueError("no agents given")
    if len(set(names)) < len(names):
        raise ValueError(f"agents need different names, which are names of folders in verl: {', '.join(names)}")
    return members


def _load_member(record: Mapping[str, Any], template: Mapping[str, Any]) -> Member:
    origin, prompt_format = record["origin"], record.get("prompt_format")
    name = record.get("name") or Path(str(origin)).name
    if origin is None or record.get("lora") or record.get("revision"):
        raise ValueError(
            f"agent {name!r} has no folder, or was loaded with lora or revision; the recipe trains all weights of a folder or "
            "hub id: save the agent with agent.save(folder), and give the folder"
        )
    path, local = locate(origin)
    options = {**(record.get("template") or {}), **template}
    if record.get("stop"):
        warnings.warn(
            f"agent {name!r}: the recipe has no stop strings, so its responses end at end tokens only", stacklevel=5
        )
    if date := options.pop(CLOCK, None):
        warnings.warn(
            f"agent {name!r}: the recipe renders its chat template with today's date, not {date}", stacklevel=5
        )
    if not local and prompt_format == "plain":
        raise ValueError(f"agent {name!r} uses plain prompts, which need its tokenizer; give its folder")
    plain = None
    if local:
        from transformers import AutoTokenizer

        path = str(Path(path).resolve())
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        if prompt_format == "plain" or (prompt_format is None and not tokenizer.chat_template):
            plain = plain_template(tokenizer)
    return Member(name, path, local, options, plain)


def plain_template(tokenizer) -> str:
    """Return a chat template that gives the text of the messages only, after the BOS token if the tokenizer adds one.

    The recipe always applies a chat template. With this one it encodes a prompt as an agent with plain prompts does here.
    """
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    return "{{ bos_token }}" * adds_bos + "{% for message in messages %}{{ message.content }}{% endfor %}"
