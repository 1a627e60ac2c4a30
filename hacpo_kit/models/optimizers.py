"""AdamW for weights of any precision: half-precision ones move through float32 copies, so that no small step is lost."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


class MasterAdamW(torch.optim.AdamW):
    """AdamW that keeps a float32 master copy of every half-precision parameter and adds its gradients up in float32.

    bfloat16 has 8 significant bits: next to a weight of 0.05 a step of 1e-6 rounds to nothing, while the master copy
    collects it. Parameters that are float32 or float64 are their own masters, and nothing differs from AdamW.
    A bf16 parameter takes 2 bytes, its gradient 2, and 16 bytes here: master, summed gradient, two moments.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], **settings):
        self.parameters = [p for p in parameters if p.requires_grad]
        half = (torch.bfloat16, torch.float16)
        self.masters = [nn.Parameter(p.detach().float()) if p.dtype in half else p for p in self.parameters]
        # one tensor after the other, as on a CPU: all at once would need another copy of all masters on a GPU
        super().__init__(self.masters, **{"foreach": False, **settings})

    def __getstate__(self):  # what AdamW copies of itself, and ours
        return {**super().__getstate__(), "parameters": self.parameters, "masters": self.masters}

    @property
    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if m is not p]

    def collect(self) -> None:
        """Moves the gradients of a backward pass to the masters, where those of the next pass are added in float32."""
        for p, master in self._pairs:
            if p.grad is not None:
                gradient = p.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                p.grad = None

    def zero_gradients(self) -> None:
        """Gives every master a gradient of 0: without one AdamW would leave it, and its moments, alone."""
        for master in self.masters:
            master.grad = torch.zeros_like(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of masters and parameters."""
        super().zero_grad(set_to_none)
        for p, _ in self._pairs:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One update of the masters; each half-precision parameter becomes its master, rounded."""
        super().step()
        for p, master in self._pairs:
            p.copy_(master)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    def tensors(self) -> dict[str, Tensor]:
        """Everything to go on from, by name: the moments, and the masters of half-precision parameters."""
        state = self.state_dict()["state"]
        out = {f"{index}.{name}": value for index, slots in state.items() for name, value in slots.items()}
        out |= {f"{i}.master": m for i, m in enumerate(self.masters) if m is not self.parameters[i]}
        return {name: value.detach().cpu().contiguous() for name, value in out.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts back what `tensors` gave; the settings of the groups come from the config, before every update.

        Warns where float32 masters are missing, as in runs of earlier versions: they then begin as the weights, rounded.
        """
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            index, name = key.split(".")
            if name != "master":
                state.setdefault(int(index), {})[name] = value
        self.load_state_dict({"state": state, "param_groups": self.state_dict()["param_groups"]})
        missing = [
            i for i, m in enumerate(self.masters) if m is not self.parameters[i] and f"{i}.master" not in tensors
        ]
        if missing:
            warnings.warn(
                f"the stored optimiser lacks the float32 masters of {len(missing)} half-precision weights; they begin as the "
                "stored weights, so that what had been rounded off is lost",
                stacklevel=2,
            )
        with torch.no_grad():
            for i, master in enumerate(self.masters):
                if f"{i}.master" in tensors:
                    master.copy_(tensors[f"{i}.master"])
