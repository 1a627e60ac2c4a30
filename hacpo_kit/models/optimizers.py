"""AdamW for weights of any precision: half-precision weights are updated through float32 copies, which keep small steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


class MasterAdamW(torch.optim.AdamW):
    """AdamW with a float32 master copy of every half-precision parameter, whose gradients are accumulated in float32.

    bfloat16 has 8 significant bits: a step of 1e-6 on a weight of 0.05 is rounded away, but the master keeps it. Parameters
    in float32 or float64 are their own masters, as in AdamW. A bfloat16 parameter needs 2 bytes, its gradient 2, and 16
    bytes here: master, accumulated gradient, two moments.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], **settings):
        self.parameters = [p for p in parameters if p.requires_grad]
        half = (torch.bfloat16, torch.float16)
        self.masters = [nn.Parameter(p.detach().float()) if p.dtype in half else p for p in self.parameters]
        # foreach=False: on a GPU, foreach needs another copy of all masters
        super().__init__(self.masters, **{"foreach": False, **settings})

    def __getstate__(self):  # for copies of the optimiser
        return {**super().__getstate__(), "parameters": self.parameters, "masters": self.masters}

    @property
    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if m is not p]

    def collect(self) -> None:
        """Add the gradients of a backward pass to those of the masters, in float32, and clear them."""
        for p, master in self._pairs:
            if p.grad is not None:
                gradient = p.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                p.grad = None

    def zero_gradients(self) -> None:
        """Set every master's gradient to 0, so that AdamW updates its moments; without a gradient it would skip the master."""
        for master in self.masters:
            master.grad = torch.zeros_like(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of masters and parameters."""
        super().zero_grad(set_to_none)
        for p, _ in self._pairs:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters, and set each half-precision parameter to its rounded master."""
        super().step()
        for p, master in self._pairs:
            p.copy_(master)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments and the masters of half-precision parameters by name, as a checkpoint stores them."""
        state = self.state_dict()["state"]
        out = {f"{index}.{name}": value for index, slots in state.items() for name, value in slots.items()}
        out |= {f"{i}.master": m for i, m in enumerate(self.masters) if m is not self.parameters[i]}
        return {name: value.detach().cpu().contiguous() for name, value in out.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned; the groups' settings come from the config before every update.

        Raises KeyError if the masters of half-precision parameters are missing.
        """
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            index, name = key.split(".")
            if name != "master":
                state.setdefault(int(index), {})[name] = value
        self.load_state_dict({"state": state, "param_groups": self.state_dict()["param_groups"]})
        with torch.no_grad():
            for i, master in enumerate(self.masters):
                if master is not self.parameters[i]:
                    master.copy_(tensors[f"{i}.master"])
