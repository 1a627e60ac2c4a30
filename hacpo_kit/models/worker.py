"""The process that holds the model of a remote agent, and the messages between it and the leading process.

Messages carry problems, settings, pools and results, never weights.
"""

from __future__ import annotations

import io
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hacpo_kit.models.agents import Agent
from hacpo_kit.records import Pool

COUNTERS = ("updates", "steps", "weights_version")
# what the leading process knows about the agent
FACTS = (
    "name", "tokenizer", "chat", "template", "end_ids", "end_id", "stop", "max_length", "description", "origin", "loading",
    "host", "device", "dtype", "half_precision",
)  # fmt: skip


class Worker:
    """Handles requests one after the other; requests and replies are bytes."""

    agent: Agent | None = None

    def begin(self, threads: int) -> None:
        """Prepare a process that belongs to this worker alone."""
        torch.set_num_threads(threads)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C the leading process ends its workers itself

    def load(self, request: bytes) -> bytes:
        """Load the agent with the request's function, and reply with its `FACTS`."""

        def load(function: Callable, *args: Any, **settings: Any) -> dict[str, Any]:
            self.agent = function(*args, **settings)
            return {name: getattr(self.agent, name) for name in FACTS}

        return self._reply(request, load)

    def call(self, request: bytes) -> bytes:
        """Run the request's function on the agent, and reply with its result."""
        return self._reply(request, lambda function, *args, **settings: function(self.agent, *args, **settings))

    def _reply(self, request: bytes, run: Callable) -> bytes:
        """Return value, error, warnings and the agent's counters after a request."""
        value, error, pools = None, None, []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")  # the leading process filters them
            try:
                function, args, settings = unpack(request)
                pools = pools_in(args)
                value = run(function, *args, **settings)
            except Exception as fault:
                error = _picklable(fault), traceback.format_exc()
        counters = {name: getattr(self.agent, name, 0) for name in COUNTERS}
        messages = [(str(w.message), w.category, w.filename, w.lineno) for w in caught]
        return pack((value, error, messages, counters), pools)


def _picklable(fault: Exception) -> Exception:
    try:
        return pickle.loads(pickle.dumps(fault))
    except Exception:
        return RuntimeError(f"{type(fault).__name__}: {fault}")


def pools_in(args: Sequence[Any]) -> list[Pool]:
    """Return the pools among the arguments of a request; its reply refers to them by position."""
    return [argument for argument in args if isinstance(argument, Pool)]


def pack(content: Any, pools: Sequence[Pool] = ()) -> bytes:
    """Return the content as bytes. The receiver already has `pools`, so that only their positions are packed."""
    position = {id(pool): i for i, pool in enumerate(pools)}
    # Ray's pickler also packs functions that are defined in a notebook
    kind = sys.modules.get("ray.cloudpickle", pickle).Pickler
    pickler = type("Pickler", (kind,), {"persistent_id": lambda self, content: position.get(id(content))})
    out = io.BytesIO()
    pickler(out, protocol=5).dump(content)
    return out.getvalue()


def unpack(content: bytes, pools: Sequence[Pool] = ()) -> Any:
    """Return what `pack` packed."""
    unpickler = type("Unpickler", (pickle.Unpickler,), {"persistent_load": lambda self, position: pools[position]})
    return unpickler(io.BytesIO(content)).load()
