"""A device that is not the CPU, for a machine that has none: tensors lie "on" it, their numbers come from the CPU's kernels.

torch lets Python be the backend of a device. Every operator of this one takes what its tensors stand for, asks the CPU, and
puts the result back on the device. As on a GPU, operators refuse host tensors beside device tensors, unless they are
single numbers or indices. What would make the host wait for a GPU (numbers and masks that are read, copies to the host) is
counted in `waits`.

Importing this changes torch for the whole process: do it in one of its own.
"""

from collections import Counter
from functools import partial

import torch
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "simulated"
MAY_MIX = {"copy_", "_copy_from", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_"}
waits: Counter[str] = Counter()
_meant: dict[int, torch.Tensor] = {}  # address of a device tensor's storage → the CPU tensor that it stands for


class _Module(_DummyBackendModule):
    """What torch.simulated would be."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:  # asked for by gradient checkpointing
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend(NAME, backend_module=_Module())


class OnDevice(torch.Tensor):
    """A tensor on the device; shallow copies of it, as autograd makes them, share its storage and so its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(numbers: torch.Tensor) -> torch.Tensor:
        out = torch._C._acc.create_empty_tensor(numbers.shape, numbers.dtype)
        out.__class__ = OnDevice
        _meant[out.untyped_storage()._cdata] = numbers
        return out


def on_device(x) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == NAME


def _operator(op, *args, **settings):
    """What every operator does on this device."""
    name = op._schema.name.removeprefix("aten::")
    given: list[torch.Tensor] = []
    host_args = [_on_host(x, given) for x in args]
    host_settings = {k: _on_host(x, given) for k, x in settings.items()}
    _check_mixture(name, given)
    to_host = name == "_to_copy" and torch.device(settings.get("device") or NAME).type == "cpu"
    masks = "index" in name and any(x.dtype == torch.bool for x in given[1:])
    if name in ("_local_scalar_dense", "equal", "nonzero", "masked_select") or masks or to_host:
        waits[name] += 1
    if name == "_copy_from":  # between devices, whichever way
        waits[name] += not on_device(args[1])
        host_args[1].copy_(host_args[0])
        return args[1]
    if name in ("view", "_unsafe_view"):  # the wrapper does not know strides
        return OnDevice.of(host_args[0].reshape(host_args[1]))
    out = op(*host_args, **host_settings)
    if to_host:
        return out
    if any(a.alias_info and a.alias_info.is_write for a in op._schema.arguments[: len(args)]):  # in place
        return args[0] if op._schema.returns else None
    return _back(out)


def _on_host(x, given: list[torch.Tensor]):
    """An argument as the CPU takes it; every tensor is noted in `given`."""
    if isinstance(x, torch.Tensor):
        given.append(x)
        return _meant[x.untyped_storage()._cdata] if on_device(x) else x
    if isinstance(x, (list, tuple)):
        return [_on_host(y, given) for y in x]
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _back(x):
    if isinstance(x, torch.Tensor):
        return OnDevice.of(x)
    return type(x)(map(_back, x)) if isinstance(x, (list, tuple)) else x


def _check_mixture(name: str, tensors: list[torch.Tensor]) -> None:
    host = [tuple(x.shape) for x in tensors if not on_device(x) and x.dim()]
    if host and name not in MAY_MIX and any(map(on_device, tensors)):
        raise RuntimeError(f"{name}: host tensors of shape {host} beside tensors on the device")


_everything = torch.library.Library("_", "IMPL")
_everything.fallback(_operator, "PrivateUse1")
# operators that have one kernel for all devices would not ask the fallback
_shared = torch.library.Library("aten", "IMPL")
for full in torch._C._dispatch_get_all_op_names():
    has = partial(torch._C._dispatch_has_kernel_for_dispatch_key, full)
    if full.startswith("aten::") and has("CompositeExplicitAutograd") and not has("PrivateUse1"):
        base, _, overload = full.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        _shared.impl(full.removeprefix("aten::"), partial(_operator, op), "PrivateUse1")


def move(agent) -> None:
    """Puts an agent's model on the device; the generator of its engine stays on the host, as its numbers do."""
    agent.model.to(NAME)
    agent.model.tie_weights()  # a new Parameter for each name: on a GPU they stay tied by themselves
    agent.model.set_attn_implementation("eager")


class HostGenerator:
    """Stands in for torch.Generator in an engine: device operators draw from the host's."""

    def __new__(cls, device="cpu"):
        return torch._C.Generator("cpu")
