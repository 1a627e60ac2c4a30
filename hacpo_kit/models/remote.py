"""Agents that live in workers: each model in a process of its own with its own device, on this machine or another, on Ray.

A `RemoteAgent` stands for such an agent here: it has the name, the tokenizer and the counters, and `agents.each` sends
functions to the model. What travels are problems, settings and pool records, never weights.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hacpo_kit.models.agents import Agent, each, load_agent
from hacpo_kit.records import Pool

START_SECONDS = 300  # a worker that has no device and no process by then will hardly get one
STORE_BYTES = 256 * 2**20  # for what travels, on a local cluster; Ray would take a third of the memory


class WorkerLost(Exception):
    """The worker of an agent has ended, and its weights since the last checkpoint are gone with it."""


class Gone(Exception):
    """What a link raises when there is no longer anybody at its other end, with the reason."""


# ── at the worker's end ──────────────────────────────────────────────────────────────────────────────────────────


class Worker:
    """The process that has the model: takes requests and gives answers, both as bytes, one after the other."""

    agent: Agent | None = None

    def begin(self, threads: int) -> None:
        """Called first, in a process that belongs to this worker alone."""
        torch.set_num_threads(threads)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that leads: it ends after its step

    def call(self, request: bytes) -> bytes:
        """Runs a function on the agent; a request without a function says which agent to load."""
        value, error, pools = None, None, []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")  # who leads has the filters
            try:
                function, args, settings = _unpack(request)
                pools = _pools(args)
                if function is None:
                    self.agent = load_agent(*args, **settings)
                    value = _facts(self.agent)
                else:
                    value = function(self.agent, *args, **settings)
            except Exception as fault:
                error = (_portable(fault), traceback.format_exc())
        told = [(str(w.message), w.category, w.filename, w.lineno) for w in caught]
        state = {} if self.agent is None else {name: getattr(self.agent, name) for name in _COUNTERS}
        return _pack((value, error, told, state), pools)


_COUNTERS = ("updates", "steps", "weights_version")


def _facts(agent: Agent) -> dict[str, Any]:
    """All that is asked of an agent outside its model."""
    kept = ("tokenizer", "chat", "template", "origin", "loading", "_stored_generation_config")
    about = {"device": agent.device, "dtype": agent.dtype, "half": agent.half, "max_length": agent.max_length}
    about |= {"text": repr(agent).rsplit(",", 1)[0].partition(": ")[2], "host": os.uname().nodename, "pid": os.getpid()}
    return {"name": agent.name, "kept": {name: getattr(agent, name) for name in kept}, "about": about}


def _portable(fault: Exception) -> Exception:
    """The exception itself, if it can travel."""
    try:
        return pickle.loads(pickle.dumps(fault))
    except Exception:
        return RuntimeError(f"{type(fault).__name__}: {fault}")


def _rename(agent: Agent, name: str) -> None:
    agent.name = name


def _sample(agent: Agent, prompts, **settings):
    return agent.engine.sample(agent, prompts, **settings)


@torch.no_grad()
def _logprobs(agent: Agent, prompts, responses, *, temperature: float):
    return tuple(t.cpu() for t in agent.logprobs(prompts, responses, temperature=temperature))


def _reference_logprobs(agent: Agent, prompts, responses, *, temperature: float):
    return agent.reference_logprobs(prompts, responses, temperature=temperature).cpu()


def _save(agent: Agent, folder: Path) -> None:
    agent.save(folder)


# ── what travels ─────────────────────────────────────────────────────────────────────────────────────────────────


def _pack(content: Any, pools: Sequence[Pool] = ()) -> bytes:
    """The content as bytes; a pool that the other end has, since it came from there, is only named."""
    place = {id(pool): i for i, pool in enumerate(pools)}
    # Ray's own pickle takes functions that were written in a notebook, too
    kind = sys.modules.get("ray.cloudpickle", pickle).Pickler
    Pickler = type("Pickler", (kind,), {"persistent_id": lambda self, thing: place.get(id(thing))})
    out = io.BytesIO()
    Pickler(out, protocol=5).dump(content)
    return out.getvalue()


def _unpack(content: bytes, pools: Sequence[Pool] = ()) -> Any:
    Unpickler = type("Unpickler", (pickle.Unpickler,), {"persistent_load": lambda self, place: pools[place]})
    return Unpickler(io.BytesIO(content)).load()


def _pools(args: Sequence[Any]) -> list[Pool]:
    return [thing for thing in args if isinstance(thing, Pool)]


# ── at this end ──────────────────────────────────────────────────────────────────────────────────────────────────


def sample(agent: RemoteAgent, prompts: Sequence[Sequence[int]], **settings: Any) -> list:
    """The engine of an agent in a worker: that of the worker."""
    return each([agent], _sample, prompts, **settings)[0]


class RemoteAgent(Agent):
    """An agent whose model is in a worker; every verb takes it, and what needs the model itself says that it is not here.

    `sent` and `received` count the bytes that travelled. `lost` is the reason why its worker is gone, "" while it lives.
    """

    remote = True
    offload = None
    engine = types.SimpleNamespace(sample=sample)

    def __init__(self, start: Callable[[], Any], source: str | Path, options: Mapping[str, Any]):
        """Begins to load `source` in a worker that `start` makes; `ready` waits for it."""
        self._start, self._request, self._name = start, _pack((None, (source,), dict(options))), None
        self._label = options.get("name") or Path(str(source)).name
        self.sent = self.received = 0
        self.reload(wait=False)

    def reload(self, *, wait: bool = True) -> None:
        """The agent as it was first loaded; in a new worker if its own is lost."""
        if "_link" not in vars(self) or self.lost:
            self.lost, self._link = "", self._start()
        self._loading = self.send(self._request)
        if wait:
            self.ready()

    def ready(self) -> None:
        """Waits until the agent is loaded; raises what `load_agent` raised there."""
        facts, self._loading = self.receive(self._loading), None
        vars(self).update(facts["kept"], _about=facts["about"])
        if self._name is None:
            self._name = facts["name"]
        elif self._name != facts["name"]:
            each([self], _rename, self._name)

    def send(self, request: bytes) -> Any:
        """Starts a request; the ticket is for `receive`."""
        self.sent += len(request)
        return None if self.lost else self._link.send(request)

    def receive(self, ticket: Any, pools: Sequence[Pool] = ()) -> Any:
        """The value of a request; its warnings are given here, and what it raised is raised here, with the agent's name."""
        name = self._name or self._label
        try:
            if self.lost:
                raise Gone(self.lost)
            answer = self._link.receive(ticket)
        except Gone as gone:
            self.lost = str(gone)
            raise WorkerLost(
                f"agent {name!r} has lost its worker ({gone}), and with it what it learned since the last checkpoint; load "
                "the agents again, or train with out=, which replaces a lost worker and goes on from the last checkpoint"
            ) from None
        self.received += len(answer)
        value, error, told, state = _unpack(answer, pools)
        vars(self).update(state)
        for message, category, filename, line in told:
            warnings.warn_explicit(message, category, filename, line, registry=_WARNED)
        if error is not None:
            fault, where = error
            if fault.args and isinstance(fault.args[0], str) and repr(name) not in fault.args[0]:
                fault.args = (f"agent {name!r}: {fault.args[0]}", *fault.args[1:])
            fault.add_note(f"raised in the worker of agent {name!r}:\n{where}")
            raise fault
        return value

    # ── what an agent has ────────────────────────────────────────────────────────────────────────────────────────

    def __repr__(self) -> str:
        return f"Agent({self.name!r}: {self._about['text']}, {self.updates} updates; in a worker)"

    def __getattr__(self, what: str):
        if what.startswith("__") or "_about" not in vars(self):
            raise AttributeError(what)
        raise AttributeError(f"agent {self.name!r} has no .{what} here: {_ELSEWHERE}")

    def __reduce__(self):
        raise TypeError(f"agent {self.name!r} cannot be copied: {_ELSEWHERE}")

    @property
    def name(self) -> str:
        """How pools, batches and metrics refer to the agent."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        each([self], _rename, name)
        self._name = name

    @property
    def device(self) -> torch.device:
        """Where the agent computes, as its worker calls it."""
        return self._about["device"]

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self._about["dtype"]

    @property
    def half(self) -> bool:
        """Whether the model computes in half precision."""
        return self._about["half"]

    @property
    def max_length(self) -> int:
        """Longest prompt and answer together that the model can read (tokens)."""
        return self._about["max_length"]

    def logprobs(self, prompts, responses, *, temperature: float = 1.0, model=None):
        """As `Agent.logprobs`, without gradients, which stay in the worker: raises RuntimeError where they are wanted."""
        if torch.is_grad_enabled() or model is not None:
            raise RuntimeError(
                f"log-probabilities of agent {self.name!r} have no gradient here (with torch.no_grad(): … gives them "
                f"without): {_ELSEWHERE}"
            )
        return each([self], _logprobs, prompts, responses, temperature=temperature)[0]

    def reference_logprobs(self, prompts, responses, *, temperature: float = 1.0):
        """As `Agent.reference_logprobs`."""
        return each([self], _reference_logprobs, prompts, responses, temperature=temperature)[0]

    def save(self, folder: str | Path) -> Path:
        """As `Agent.save`; the worker writes, so the folder has to be one that it shares with this machine."""
        each([self], _save, Path(folder).absolute())
        check_arrived(self, Path(folder))
        return Path(folder)


_WARNED: dict[Any, Any] = {}  # as a module has: a warning is told once a place, if the filters say so
_ELSEWHERE = (
    "its model is in a worker; for a look into it, load it without workers=, where it stands after agent.save(folder) "
    "as hk.load_agent(folder)"
)


def check_arrived(agent: Agent, folder: Path) -> None:
    """Raises OSError if what an agent saved is not to be seen from here."""
    if not (folder / "config.json").exists():
        where = f" on {agent._about['host']}" if agent.remote else ""
        raise OSError(
            f"agent {agent.name!r} was saved to {folder}{where}, and it is not to be seen here: use a folder that all machines "
            "share"
        )


def each_in_workers(agents: Sequence[Agent], function: Callable, args, settings, bar=None) -> list[Any]:
    """As `agents.each`: starts the function in all workers, then gathers; agents of this process work meanwhile."""
    request, pools = _pack((function, args, settings)), _pools(args)
    tickets = [agent.send(request) if agent.remote else None for agent in agents]
    values, faults = [], []
    for agent, ticket in zip(agents, tickets, strict=True):
        try:
            if agent.remote:
                values.append(agent.receive(ticket, pools))
                if bar is not None:
                    bar.update(bar.total // len(agents))
            else:
                values.append(function(agent, *args, **settings, **({} if bar is None else {"bar": bar})))
        except Exception as fault:  # the others are waited for: nobody may still be at work when the next call comes
            faults.append(fault)
    if faults:
        raise next((f for f in faults if isinstance(f, WorkerLost)), faults[0])
    return values


def load_in_workers(
    sources: Sequence[tuple[str | Path, Mapping[str, Any]]],
    workers: str,
    *,
    threads: int | None = None,
    num_gpus: float | None = None,
    start: Callable[[], Any] | None = None,
) -> list[RemoteAgent]:
    """Agents from pairs of a source and options of `load_agent`, each in a worker of its own; all load at the same time.

    `start` makes a link to a new worker in place of Ray: an object with `send`, `receive` and `stop`.
    """
    if workers != "ray":
        raise ValueError(f"workers={workers!r}: it takes 'ray', or None for agents in this process")
    for source, _ in sources:
        if isinstance(source, Agent):
            raise ValueError(
                f"agent {source.name!r} is already loaded and weights do not travel; give its name or folder in place of it"
            )
    if start is None:
        threads = threads or max(1, torch.get_num_threads() // max(1, len(sources)))
        num_gpus = _devices(_connected(), len(sources), num_gpus)
        options = {} if num_gpus else {"device": "cpu"}
        sources = [(source, {**options, **given}) for source, given in sources]

        def start() -> RayLink:
            return RayLink(threads, num_gpus)

    agents = [RemoteAgent(start, _anywhere(source), options) for source, options in sources]
    for agent in agents:
        agent.ready()
        agent.workers = {"workers": workers, "threads": threads, "num_gpus": num_gpus}
    return agents


def _anywhere(source: str | Path) -> str | Path:
    """A folder is found from any working directory."""
    path = Path(source).expanduser()
    return path.absolute() if path.is_dir() else source


# ── Ray ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _connected():
    """Ray, connected to the cluster of RAY_ADDRESS, or to a local one that ends with this process."""
    # no report to anybody; GPUs hidden only from whom they are not meant for; workers as urgent as this process
    ours = (
        "RAY_USAGE_STATS_ENABLED",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
        "RAY_worker_niceness",
        "RAY_SCHEDULER_EVENTS",
    )
    for name in ours:
        os.environ.setdefault(name, "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("workers='ray' needs Ray: pip install 'hacpo_kit[ray]'", name="ray") from error
    if ray.is_initialized():
        return ray
    if address := os.environ.get("RAY_ADDRESS"):
        ray.init(address=address, logging_level="ERROR")
        return ray
    # where Ray knows it: nobody else on this machine may send functions
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    settings = {"include_dashboard": False, "object_store_memory": STORE_BYTES, "logging_level": "ERROR"}
    for last in (False, True):  # Ray gives its own parts only seconds to start, too few where much else is running
        try:
            ray.init(address="local", num_cpus=os.cpu_count(), **settings)
            break
        except Exception as error:
            ray.shutdown()
            if last:
                raise RuntimeError(f"Ray could not start on this machine: {error}") from error
    return ray


def _devices(ray, count: int, num_gpus: float | None) -> float:
    """GPUs for each worker; raises ValueError if the cluster has fewer in all."""
    there = ray.cluster_resources().get("GPU", 0)
    wanted = (1 if there else 0) if num_gpus is None else num_gpus
    if wanted * count > there:
        raise ValueError(
            f"{count} agents want {wanted:g} GPUs each, the cluster has {there:g}: give num_gpus={there / count:.2g} to share "
            "one, or num_gpus=0 to compute on CPUs"
        )
    return wanted


class RayLink:
    """A worker as a Ray actor; it ends with its agent, or with this process."""

    def __init__(self, threads: int, gpus: float):
        self.ray = _connected()
        # one worker to a machine as long as there are machines; CPUs are shared, as by any processes
        settings = {"num_cpus": 0, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self.actor = self.ray.remote(Worker).options(**settings).remote()
        self.begun = self.actor.begin.remote(threads)

    def send(self, request: bytes) -> Any:
        """Starts a request."""
        return self.actor.call.remote(request)

    def receive(self, ticket: Any) -> bytes:
        """The answer to a request; raises Gone if the worker has ended."""
        gone = self.ray.exceptions
        try:
            if self.begun is not None:
                self.ray.get(self.begun, timeout=START_SECONDS)
                self.begun = None
            return self.ray.get(ticket)
        except gone.GetTimeoutError:
            self.stop()
            free = {k: v for k, v in self.ray.available_resources().items() if k in ("CPU", "GPU")}
            raise Gone(f"it could not start within {START_SECONDS} s; free in the cluster: {free}") from None
        except gone.RayTaskError:
            raise
        except gone.RayError as error:
            raise Gone(_reason(error)) from None

    def stop(self) -> None:
        """Ends the worker."""
        self.ray.kill(self.actor)


def _reason(error: Exception) -> str:
    """What Ray says of a worker's end, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if "exit" in line.lower() or "kill" in line.lower()), lines[0] if lines else "")
    return f"{type(error).__name__}: {said}".partition(" There are some potential root causes")[0][:300]


__all__ = ["RemoteAgent", "Worker", "WorkerLost", "load_in_workers"]
