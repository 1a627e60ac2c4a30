"""Agents in workers: each model is in a process of its own, on this machine or another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hacpo_kit.models.agents import Agent
from hacpo_kit.models.base import BaseAgent, WorkerLost
from hacpo_kit.models.worker import pack, pools_in, unpack
from hacpo_kit.records import Pool

_REGISTRY: dict[Any, Any] = {}  # of warnings from workers, so that the filter "once per place" works


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
        self.link = start()
        self.begin_loading()

    def begin_loading(self) -> None:
        """Load the agent as it was at first, in a new worker if its own is lost; `wait` waits until it is loaded."""
        if self.lost:
            self.lost, self.link = "", self._start()
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
        return RemoteCall(self, None if self.lost else self.link.send(method, request), pools_in(args))

    def receive(self, ticket: Any) -> bytes:
        """Wait for a reply. Raises WorkerLost if the worker has ended."""
        try:
            if self.lost:
                raise Disconnected(self.lost)
            content = self.link.receive(ticket)
        except Disconnected as error:
            self.lost = str(error)
            raise WorkerLost(
                f"the worker of agent {self.name!r} has ended ({self.lost}); what the agent has learned since the last "
                "checkpoint is lost. Load the agents again, or train with out=, which replaces the worker and resumes from "
                "the last checkpoint"
            ) from None
        self.received += len(content)
        return content

    def __getattr__(self, name: str):
        if name.startswith("__") or "device" not in vars(self):
            raise AttributeError(name)
        raise AttributeError(
            f"agent {self.name!r} has no .{name} in this process: its model is in a worker. To inspect it, call "
            "agent.save(folder) and hk.load_agent(folder)"
        )

    def save(self, folder: str | Path) -> Path:
        """As `Agent.save`, to a folder that the worker's machine shares with this one."""
        folder = Path(folder).absolute()
        self.submit(Agent.save, folder).result()
        check_visible(self, folder)
        return folder


@dataclass(frozen=True)
class RemoteCall:
    """A call that runs in a worker; its reply refers to `pools` by position."""

    agent: RemoteAgent
    ticket: Any
    pools: Sequence[Pool]

    def result(self) -> Any:
        """Wait for the value. Warnings and errors of the worker are raised here; errors get its traceback as a note."""
        value, error, messages, counters = unpack(self.agent.receive(self.ticket), self.pools)
        vars(self.agent).update(counters)
        for message, category, filename, line in messages:
            warnings.warn_explicit(message, category, filename, line, registry=_REGISTRY)
        if error is not None:
            fault, where = error
            fault.add_note(f"raised in the worker of agent {self.agent.name!r}:\n{where}")
            raise fault
        return value


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
