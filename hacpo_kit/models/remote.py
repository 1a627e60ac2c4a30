"""Agents in workers: each model is in a process of its own, on this machine or another."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from hacpo_kit.models.agents import Agent
from hacpo_kit.models.base import BaseAgent, WorkerLost
from hacpo_kit.models.worker import Reply, pack, unpack
from hacpo_kit.records import Pool


class Disconnected(Exception):
    """Raised by a link whose worker has ended, with the reason."""


class Link(Protocol):
    """The connection to one worker."""

    def send(self, method: str, request: bytes) -> Any:
        """Start a method of `Worker` and return a ticket."""

    def receive(self, ticket: Any) -> bytes:
        """Wait for the reply. Raises Disconnected."""


class RemoteAgent(BaseAgent):
    """An agent whose model is in a worker. Every verb accepts it; `submit` runs functions on its model.

    `sent` and `received` count bytes. `lost` is the reason why its worker has ended; empty while it runs.
    """

    def __init__(self, start: Callable[[], Link], load: Callable[..., Agent], source: Any, options: Mapping[str, Any]):
        """Begin to load `source` in a worker that `start` creates; `wait` waits until it is loaded.

        `options` are those of `load`, with the agent's name.
        """
        self.name, self._start, self._load = options["name"], start, (load, source, options)
        self.sent = self.received = 0
        self.engine = types.SimpleNamespace(sample=_sample_remotely)
        self.begin_loading()

    def begin_loading(self) -> None:
        """Load the agent as it was at first, in a new worker if its own is lost; `wait` waits until it is loaded."""
        if "_link" not in vars(self) or self.lost:
            self.lost, self._link = "", self._start()
        load, source, options = self._load
        self._loading = self._send("load", load, (source,), {**options, "name": self.name})

    def wait(self) -> None:
        """Wait until the agent is loaded; raises what loading raised in the worker."""
        vars(self).update(self._loading.result())

    def submit(self, function: Callable, *args: Any, bar=None, **settings: Any) -> RemoteCall:
        """Start `function(agent, …)` in the worker; `result()` waits for it. The bar stays here.

        Raises ValueError for a function among the settings, which would not run in this process.
        """
        if callbacks := [name for name, value in settings.items() if callable(value)]:
            raise ValueError(
                f"agent {self.name!r} is in a worker, where {callbacks[0]}= cannot reach this process; load the agent "
                "without workers="
            )
        return self._send("call", function, args, settings)

    def _send(self, method: str, function: Callable, args: Sequence[Any], settings: Mapping[str, Any]) -> RemoteCall:
        request = pack((function, args, settings))
        self.sent += len(request)
        ticket = None if self.lost else self._link.send(method, request)
        return RemoteCall(self, ticket, [argument for argument in args if isinstance(argument, Pool)])

    def receive(self, ticket: Any, pools: Sequence[Pool]) -> Reply:
        """Wait for a reply and take over the agent's counters. Raises WorkerLost if the worker has ended."""
        try:
            if self.lost:
                raise Disconnected(self.lost)
            content = self._link.receive(ticket)
        except Disconnected as error:
            self.lost = str(error)
            raise WorkerLost(
                f"the worker of agent {self.name!r} has ended ({self.lost}); what the agent has learned since the last "
                "checkpoint is lost. Load the agents again, or train with out=, which replaces the worker and resumes from "
                "the last checkpoint"
            ) from None
        self.received += len(content)
        reply = unpack(content, pools)
        vars(self).update(reply.counters)
        return reply

    def __getattr__(self, name: str):
        if name.startswith("__") or "device" not in vars(self):
            raise AttributeError(name)
        raise AttributeError(f"agent {self.name!r} has no .{name} in this process: {_IN_WORKER}")

    def on_device(self, *parts: str) -> contextlib.AbstractContextManager:
        """As `Agent.on_device`; the worker moves its parts itself."""
        return contextlib.nullcontext()

    def logprobs(self, prompts, responses, *, temperature: float = 1.0):
        """As `Agent.logprobs`, without gradients. Raises RuntimeError unless gradients are disabled (torch.no_grad)."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"log-probabilities of agent {self.name!r} have no gradient in this process; use torch.no_grad(), or a "
                f"local agent: {_IN_WORKER}"
            )
        return self.submit(_logprobs, prompts, responses, temperature=temperature).result()

    def save(self, folder: str | Path) -> Path:
        """As `Agent.save`, to a folder that the worker's machine shares with this one."""
        folder = Path(folder).absolute()
        self.submit(Agent.save, folder).result()
        check_visible(self, folder)
        return folder


_IN_WORKER = "its model is in a worker. To inspect it, call agent.save(folder) and hk.load_agent(folder)"
_REGISTRY: dict[Any, Any] = {}  # of warnings from workers, so that the filter "once per place" works


class RemoteCall:
    """A call that runs in a worker."""

    def __init__(self, agent: RemoteAgent, ticket: Any, pools: Sequence[Pool]):
        self.agent, self.ticket, self.pools = agent, ticket, pools

    def cancel(self) -> bool:
        """Return False: the call has started."""
        return False

    def result(self) -> Any:
        """Wait for the value. Warnings and errors of the worker are raised here; errors get the agent's name."""
        value, error, messages, _ = self.agent.receive(self.ticket, self.pools)
        for message, category, filename, line in messages:
            warnings.warn_explicit(message, category, filename, line, registry=_REGISTRY)
        if error is None:
            return value
        fault, where = error
        if fault.args and isinstance(fault.args[0], str) and repr(self.agent.name) not in fault.args[0]:
            fault.args = (f"agent {self.agent.name!r}: {fault.args[0]}", *fault.args[1:])
        fault.add_note(f"raised in the worker of agent {self.agent.name!r}:\n{where}")
        raise fault


def _sample_remotely(agent: RemoteAgent, prompts: Sequence[Sequence[int]], **settings: Any) -> list:
    return agent.submit(_sample, prompts, **settings).result()


def _sample(agent: Agent, prompts: Sequence[Sequence[int]], **settings: Any) -> list:
    with agent.on_device("engine"):
        return agent.engine.sample(agent, prompts, **settings)


@torch.no_grad()
def _logprobs(agent: Agent, prompts, responses, *, temperature: float) -> tuple[torch.Tensor, ...]:
    with agent.on_device("weights"):
        return tuple(tensor.cpu() for tensor in agent.logprobs(prompts, responses, temperature=temperature))


def check_visible(agent: BaseAgent, folder: Path) -> None:
    """Raise OSError unless this process sees what the agent saved to the folder."""
    if not (folder / "config.json").exists():
        raise OSError(
            f"agent {agent.name!r} was saved to {folder} on {agent.host}, which is not visible from this process: use a folder "
            "that all machines share"
        )


def restart_workers(agents: Sequence[BaseAgent], *, lost_only: bool) -> dict[str, str]:
    """Start new workers for lost ones, and without `lost_only` load all remote agents again; return the reasons by agent."""
    reasons = {agent.name: agent.lost for agent in agents if agent.lost}
    remote = [a for a in agents if isinstance(a, RemoteAgent) and (a.lost or not lost_only)]
    for agent in remote:
        agent.begin_loading()
    for agent in remote:
        agent.wait()
    return reasons
