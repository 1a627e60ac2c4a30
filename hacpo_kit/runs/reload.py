"""Agents and problems of a recorded run, loaded again for `resume`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from hacpo_kit.models.agents import Agent
from hacpo_kit.models.loading import load_each
from hacpo_kit.tasks.loading import load_problems
from hacpo_kit.tasks.problems import Problems

PLACEMENT = ("workers", "threads", "num_gpus")  # options of load_agents that are not options of load_agent


def reload_agents(record: Mapping[str, Any], loading: Mapping[str, Any]) -> list[Agent]:
    """Load the agents of a run again; `loading` replaces options with which they were loaded.

    Raises ValueError if an agent was made from a model in memory. Warns if there is no Ray for agents in Ray workers.
    """
    if unknown := [agent["name"] for agent in record["agents"] if agent["origin"] is None]:
        raise ValueError(f"agents {unknown} were made from models in memory and cannot be loaded again; pass agents=")
    options = {name: value for name, value in loading.items() if name not in PLACEMENT}
    placement = {**(record["workers"] or {}), **{name: loading[name] for name in PLACEMENT if name in loading}}
    sources = [(agent["origin"], {**_recorded_options(agent), **options}) for agent in record["agents"]]
    if (workers := placement.pop("workers", None)) is not None:
        try:
            return load_each(sources, workers=workers, **placement)
        except ModuleNotFoundError as error:
            warnings.warn(f"{error}; the agents are loaded in this process instead, with the same result", stacklevel=3)
    return load_each(sources)


def _recorded_options(agent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with which an agent was loaded, without a GPU that this machine does not have."""
    options = {name: value for name, value in agent.items() if name not in ("origin", "chat_template")}
    kind, _, index = options.get("device", "cpu").partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        options.pop("device")
    return options


def reload_problems(argument: str, record: Mapping[str, Any]) -> Problems:
    """Load the problems of a run again; raises ValueError, with the argument to pass, if they were made in memory."""
    if record["source"] is None:
        raise ValueError(f"the run used problems from memory, which cannot be loaded again; pass {argument}")
    return load_problems(**record["source"])
