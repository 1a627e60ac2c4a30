"""The agents of an export: where their models are, their chat templates, and the lengths of their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo_kit.models.sources import built_in_sets, locate
from hacpo_kit.tasks.problems import Problem

DEFAULT_PROMPT_TOKENS = 1024  # the paper's limit, for models that are not on this machine


@dataclass(frozen=True)
class Member:
    """One agent. The last two fields need its tokenizer, which is not loaded from the hub."""

    name: str
    path: str  # an absolute folder or a hub id
    local: bool
    template_options: Mapping[str, Any]
    plain_template: str | None = None  # chat template that gives the tokens of a plain prompt
    prompt_tokens: int = 0  # of its longest prompt


def load_members(
    agents: str | Sequence[str | Path | Mapping[str, Any]], problems: Sequence[Problem], template: Mapping[str, Any]
) -> list[Member]:
    """Return the members of a built-in set, or of sources as `load_agent` takes them, or of records of a run.json.

    `template` has keywords for the chat templates. Raises ValueError for agents that the recipe cannot load or that have the
    same name, FileNotFoundError for a folder without a model.
    """
    if isinstance(agents, str):
        agents = built_in_sets().get(agents, {"agents": [agents]})["agents"]
    records = [agent if isinstance(agent, Mapping) else {"origin": agent} for agent in agents]
    members = [_load_member(record, problems, template) for record in records]
    names = [member.name for member in members]
    if not names:
        raise ValueError("no agents given")
    if len({name.casefold() for name in names}) < len(names):
        raise ValueError(f"agents need different names, which are names of folders in verl: {', '.join(names)}")
    return members


def _load_member(record: Mapping[str, Any], problems: Sequence[Problem], template: Mapping[str, Any]) -> Member:
    origin, prompt_format = record["origin"], record.get("prompt_format")
    name = record.get("name") or Path(str(origin)).name
    if origin is None:
        raise ValueError(f"agent {name!r} has no folder; save it with agent.save(folder), and give the folder")
    if loaded_with := [option for option in ("lora", "revision") if record.get(option)]:
        raise ValueError(
            f"agent {name!r} was loaded with {' and '.join(loaded_with)}, which the recipe does not support: it trains all "
            "weights of a folder or hub id; save the agent with agent.save(folder), and give the folder"
        )
    path, local = locate(origin)
    options = {**(record.get("template") or {}), **template}
    if not local:
        if prompt_format == "plain":
            raise ValueError(f"agent {name!r} uses plain prompts, which need its tokenizer; give its folder")
        return Member(name, path, local, options)
    from transformers import AutoTokenizer

    tokenizer, plain = AutoTokenizer.from_pretrained(path, trust_remote_code=False), None
    if prompt_format == "plain" or (prompt_format is None and not tokenizer.chat_template):
        if chats := [p.id for p in problems if not isinstance(p.prompt, str)]:
            raise ValueError(f"agent {name!r} has no chat template, but problem {chats[0]!r} is a list of messages")
        plain = plain_template(tokenizer)
    how = {"tokenize": False, "add_generation_prompt": True, **({"chat_template": plain} if plain else options)}
    texts = [tokenizer.apply_chat_template(chat_messages(p), **how) for p in problems]
    lengths = map(len, tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
    return Member(name, str(Path(path).resolve()), local, options, plain, max(lengths))


def plain_template(tokenizer) -> str:
    """Return a chat template that gives the text of the messages only, after the BOS token if the tokenizer adds one.

    The recipe always applies a chat template. With this one it encodes a prompt as an agent with plain prompts does here.
    """
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    return "{{ bos_token }}" * adds_bos + "{% for message in messages %}{{ message.content }}{% endfor %}"


def chat_messages(problem: Problem) -> list[dict[str, str]]:
    """Return the prompt as messages; raises ValueError if they contain more than role and content."""
    if isinstance(problem.prompt, str):
        return [{"role": "user", "content": problem.prompt}]
    if more := {key for message in problem.prompt for key in message} - {"role", "content"}:
        raise ValueError(
            f"problem {problem.id!r}: the recipe reads role and content of a message only, not {sorted(more)}"
        )
    return [{"role": m["role"], "content": m["content"]} for m in problem.prompt]


def prompt_limit(members: Sequence[Member], requested: int | None) -> int:
    """Return the longest prompt that verl accepts (tokens); raises ValueError if a prompt is longer than requested."""
    measured = max(member.prompt_tokens for member in members)
    if requested is not None and requested < measured:
        raise ValueError(f"max_prompt_tokens={requested}, but the longest prompt has {measured} tokens")
    return requested or (measured if all(m.local for m in members) else max(measured, DEFAULT_PROMPT_TOKENS))
