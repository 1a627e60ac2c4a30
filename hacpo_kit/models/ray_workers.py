"""Workers on Ray: actors on the cluster of RAY_ADDRESS, or on a local cluster that ends with this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hacpo_kit.models.agents import Agent
from hacpo_kit.models.base import BaseAgent
from hacpo_kit.models.remote import Disconnected, Link, RemoteAgent
from hacpo_kit.models.worker import Worker

START_SECONDS = 300  # for a worker to get its device and process
STORE_BYTES = 256 * 2**20  # for messages, on a local cluster; Ray's default is a third of the memory


def load_in_workers(
    load: Callable[..., Agent],
    sources: Sequence[tuple[str | Path, Mapping[str, Any]]],
    workers: str,
    *,
    threads: int | None = None,
    num_gpus: float | None = None,
    start: Callable[[], Link] | None = None,
) -> list[RemoteAgent]:
    """Load agents with `load(source, **options)`, each in a worker of its own, in parallel; options need the name.

    `start` creates a link to a new worker without Ray.
    """
    if workers != "ray":
        raise ValueError(f"workers={workers!r}: use 'ray', or None for agents in this process")
    for source, _ in sources:
        if isinstance(source, BaseAgent):
            raise ValueError(
                f"agent {source.name!r} is already loaded, and weights are not sent to workers; use its name or folder"
            )
    if start is None:
        threads = threads or max(1, torch.get_num_threads() // max(1, len(sources)))
        num_gpus = gpus_per_worker(connect(), len(sources), num_gpus)
        sources = [(source, {**({} if num_gpus else {"device": "cpu"}), **options}) for source, options in sources]

        def start() -> RayLink:
            return RayLink(threads, num_gpus)

    folders = [Path(source).expanduser().absolute() for source, _ in sources]  # workers have another working directory
    agents = [
        RemoteAgent(start, load, folder if folder.is_dir() else source, options)
        for folder, (source, options) in zip(folders, sources, strict=True)
    ]
    for agent in agents:
        agent.wait()
        agent.workers = {"workers": workers, "threads": threads, "num_gpus": num_gpus}
    return agents


def connect():
    """Return Ray, connected to a cluster. Raises ModuleNotFoundError without Ray."""
    # no usage report; GPUs stay visible to workers without one; workers get the priority of this process
    for name in ("USAGE_STATS_ENABLED", "ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "worker_niceness", "SCHEDULER_EVENTS"):
        os.environ.setdefault(f"RAY_{name}", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("workers='ray' needs Ray: pip install 'hacpo_kit[ray]'", name="ray") from error
    if ray.is_initialized():
        return ray
    if address := os.environ.get("RAY_ADDRESS"):
        ray.init(address=address, logging_level="ERROR")
        return ray
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # other users of the machine cannot send functions
    ray.init(
        address="local",
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        logging_level="ERROR",
    )
    return ray


def gpus_per_worker(ray, count: int, num_gpus: float | None) -> float:
    """Return the GPUs for each of `count` workers. Raises ValueError if the cluster has fewer."""
    available = ray.cluster_resources().get("GPU", 0)
    requested = (1 if available else 0) if num_gpus is None else num_gpus
    if requested * count > available:
        raise ValueError(
            f"{count} agents need {requested:g} GPUs each, but the cluster has {available:g}: use "
            f"num_gpus={available / count:.2g} to share GPUs, or num_gpus=0 for CPUs"
        )
    return requested


class RayLink:
    """A worker as a Ray actor, which ends with its agent or with this process."""

    def __init__(self, threads: int, gpus: float):
        self.ray = connect()
        # SPREAD: first one worker per machine; CPUs are shared like those of any process
        settings = {"num_cpus": 0, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self.actor = self.ray.remote(Worker).options(**settings).remote()
        self.started = self.actor.begin.remote(threads)

    def send(self, method: str, request: bytes) -> Any:
        """Start a method of the worker."""
        return getattr(self.actor, method).remote(request)

    def receive(self, ticket: Any) -> bytes:
        """Wait for the reply. Raises Disconnected if the worker has ended, or has not started in `START_SECONDS`."""
        errors = self.ray.exceptions
        try:
            self.ray.get(self.started, timeout=START_SECONDS)
            return self.ray.get(ticket)
        except errors.GetTimeoutError:
            self.ray.kill(self.actor)
            raise Disconnected(f"it did not start within {START_SECONDS} s") from None
        except errors.RayTaskError:
            raise
        except errors.RayError as error:
            raise Disconnected(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from None
