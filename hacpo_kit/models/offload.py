"""Offloading: several agents share one device, and what an agent does not use at the moment is in host memory."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hacpo_kit.models.faults import memory_advice

if TYPE_CHECKING:
    from hacpo_kit.models.engines.base import Policy

REMEDY = "load every agent on this device with offload=True, or this one with dtype='bfloat16' or lora=True"


class Offload:
    """Moves the parts of one agent between `device` and host memory, and counts bytes and seconds."""

    def __init__(self, device: torch.device | str):
        self.device = torch.empty(0, device=device).device  # with its index, as tensors' devices have it
        self.users = Counter()  # part → blocks that use it now
        self.bytes_moved, self.seconds_moving = 0, 0.0

    @contextlib.contextmanager
    def on_device(self, agent: Policy, *parts: str) -> Iterator[None]:
        """Keep the parts on the device inside the block; the outermost block that uses a part returns it to the host."""
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.callback(self._release, agent, part)  # before the move, which may run out of memory half-way
                self.users[part] += 1
                if self.users[part] == 1 and part != "engine":  # an engine loads its weights itself
                    with memory_advice(agent, f"moving its {part} there", REMEDY):
                        self._move(agent, part, lambda tensor: to_device(tensor, self.device))
            yield

    def _release(self, agent: Policy, part: str) -> None:
        self.users[part] -= 1
        if self.users[part]:
            return
        if part == "engine":
            if hasattr(agent.engine, "sleep"):
                agent.engine.sleep()
            return
        self._move(agent, part, to_host)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # engines have another allocator

    def _move(self, agent: Policy, part: str, copied: Callable[[Tensor], Tensor]) -> None:
        start = time.perf_counter()
        for tensor in tensors(agent, part):
            copy = copied(tensor)
            if copy is not tensor:
                self.bytes_moved += copy.nbytes
                tensor.data = copy  # in place: the optimiser and tied layers keep the same tensor
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # copies are asynchronous
        self.seconds_moving += time.perf_counter() - start

    def transfer_costs(self) -> dict[str, float]:
        """Return the bytes moved in both directions and the seconds this took, since the last call."""
        costs = {"bytes_moved": self.bytes_moved, "seconds_moving": self.seconds_moving}
        self.bytes_moved, self.seconds_moving = 0, 0.0
        return costs


def tensors(agent: Policy, part: str) -> Iterator[Tensor]:
    """Yield each tensor of a part once, with the gradients that belong to it."""
    if part == "optimizer" and agent.optimizer is not None:
        masters = [m for p, m in zip(agent.optimizer.parameters, agent.optimizer.masters, strict=True) if m is not p]
        yield from masters
        yield from (m.grad for m in masters if m.grad is not None)
        for slots in agent.optimizer.state.values():
            yield from (value for name, value in slots.items() if name != "step")  # AdamW keeps its counter on the host
    model = {"weights": agent.model, "reference": agent.reference}.get(part)
    if model is not None:
        yield from model.parameters()
        yield from (p.grad for p in model.parameters() if p.grad is not None)
        yield from model.buffers()


def size(agent: Policy, part: str) -> int:
    """Return the bytes of a part."""
    return sum(tensor.nbytes for tensor in tensors(agent, part))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device, or the tensor itself if it is there."""
    return tensor if tensor.device == device else tensor.detach().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, pinned for a GPU's copy back, or the tensor itself if it is there."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty_like(tensor.detach(), device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor.detach(), non_blocking=True)
