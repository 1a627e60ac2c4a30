"""Several agents on one device: what an agent does not need at the moment waits in host memory."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hacpo_kit.models.memory import out_of_memory

if TYPE_CHECKING:
    from hacpo_kit.models.agents import Agent

MAKE_ROOM = "load every agent that shares the device with offload=True, or this one with dtype='bfloat16' or lora=True"
PARTS = ("weights", "optimizer", "reference", "engine")


class Offload:
    """Which parts of one agent lie on `device` at the moment; all others rest in host memory."""

    def __init__(self, device: torch.device | str):
        self.device = torch.empty(0, device=device).device  # with its index: tensors compare equal to it
        self.users = Counter()  # blocks that are using a part
        self.bytes_moved, self.seconds_moving = 0, 0.0

    @contextlib.contextmanager
    def awake(self, agent: Agent, *parts: str) -> Iterator[None]:
        """Holds the parts on the device while the block runs; the outermost block that uses one sends it back."""
        with contextlib.ExitStack() as stack:
            for part in parts:
                if part not in PARTS:
                    raise ValueError(f"agents have no part {part!r}; they have {', '.join(PARTS)}")
                stack.callback(
                    self._release, agent, part
                )  # also if bringing it fails half-way: then all of it goes back
                self.users[part] += 1
                if self.users[part] == 1 and part != "engine":  # an engine wakes by itself
                    with out_of_memory(agent, f"bringing its {part} there", MAKE_ROOM):
                        self._move(agent, part, lambda tensor: to_device(tensor, self.device))
            yield

    def _release(self, agent: Agent, part: str) -> None:
        self.users[part] -= 1
        if not self.users[part]:
            self._to_host(agent, part)

    def _to_host(self, agent: Agent, part: str) -> None:
        if part == "engine":
            if hasattr(agent.engine, "sleep"):
                agent.engine.sleep()
        else:
            self._move(agent, part, to_host)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # an engine has an allocator of its own

    def _move(self, agent: Agent, part: str, copied: Callable[[Tensor], Tensor]) -> None:
        start = time.perf_counter()
        for tensor in tensors(agent, part):
            copy = copied(tensor)
            if copy is not tensor:
                self.bytes_moved += copy.nbytes
                tensor.data = copy  # in place: who holds the tensor, such as the optimiser or a tied layer, still does
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the copies may still be under way
        self.seconds_moving += time.perf_counter() - start

    def spent(self) -> dict[str, float]:
        """Bytes moved, both ways, and the seconds this took, since the last call."""
        spent = {"bytes_moved": self.bytes_moved, "seconds_moving": self.seconds_moving}
        self.bytes_moved, self.seconds_moving = 0, 0.0
        return spent


def tensors(agent: Agent, part: str) -> Iterator[Tensor]:
    """The tensors of one part, each once; gradients go with what they belong to."""
    if part == "optimizer" and agent.optimizer is not None:
        owners = [m for p, m in zip(agent.optimizer.parameters, agent.optimizer.masters, strict=True) if m is not p]
        yield from owners
        yield from (m.grad for m in owners if m.grad is not None)
        for slots in agent.optimizer.state.values():
            yield from (value for name, value in slots.items() if name != "step")  # AdamW keeps its counter on the host
    model = {"weights": agent.model, "reference": agent.reference}.get(part)
    if model is not None:
        yield from model.parameters()
        yield from (p.grad for p in model.parameters() if p.grad is not None)
        yield from model.buffers()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, or the tensor itself if it lies there."""
    return tensor if tensor.device == device else tensor.detach().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned for the way back from a GPU, or the tensor itself if it lies there."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty_like(tensor.detach(), device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor.detach(), non_blocking=True)


def size(agent: Agent, part: str) -> int:
    """Bytes of one part."""
    return sum(t.nbytes for t in tensors(agent, part))
