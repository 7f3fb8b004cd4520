"""A CUDA device without hardware: its tensors compute on the CPU, but torch treats them as remote.

As on a GPU, they have no `numpy()` before `cpu()`, and operations refuse to mix them with tensors
of the CPU, except single numbers, indices and copies. So code for GPUs runs on any machine.
"""

from __future__ import annotations

import contextlib

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

DEVICE, CPU = torch.device("cuda"), torch.device("cpu")

_FORBIDDEN = {torch.Tensor.numpy, torch.Tensor.__array__}
_MIXING = {
    torch.Tensor.copy_,
    torch.Tensor.__getitem__,
    torch.Tensor.__setitem__,
    torch.Tensor.to,
    torch._has_compatible_shallow_copy_type,
    torch.Tensor.data.__set__,
    torch.Tensor.grad.__set__,
    torch._VF.lstm,  # the numbers of sequences per step are on the CPU
    torch._VF.gru,
}


class DeviceTensor(torch.Tensor):
    """A tensor on the device."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:
            return DEVICE
        if func in _FORBIDDEN:
            raise TypeError("can't convert a CUDA tensor to numpy: call cpu() first")
        if _target(func, args, kwargs) == CPU:
            return args[0].as_subclass(torch.Tensor).clone()
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        mixed = [t for t in tensors if not isinstance(t, DeviceTensor) and t.dim()]
        if mixed and func not in _MIXING:
            raise RuntimeError(
                f"{func}: expected all tensors on one device, got one of shape "
                f"{list(mixed[0].shape)} on the CPU"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return _on_device(func(*_without_device(args), **_without_device(kwargs)))


class _Device(TorchFunctionMode):
    """Creates tensors on the device, and moves tensors of the CPU there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        is_on_device = any(issubclass(kind, DeviceTensor) for kind in types)
        if is_on_device or func in (torch.device, torch._C._nn._parse_to):
            return func(*args, **kwargs)
        target = _target(func, args, kwargs)
        result = func(*_without_device(args), **_without_device(kwargs))
        if target is None or target == CPU:
            return result
        return _on_device(result.clone() if func is torch.Tensor.to else result)


def _target(func, args, kwargs):
    """Return the device that a call names; None if it names none."""
    if func is torch.Tensor.cpu:
        return CPU
    device = kwargs.get("device")
    if device is None and func is torch.Tensor.to:
        device = next((a for a in args[1:] if isinstance(a, (str, torch.device))), None)
    return None if device is None else torch.device(device)


def _without_device(values):
    return pytree.tree_map(lambda v: CPU if isinstance(v, torch.device) else v, values)


def _on_device(result):
    return pytree.tree_map(
        lambda t: t.as_subclass(DeviceTensor) if type(t) is torch.Tensor else t, result
    )


@contextlib.contextmanager
def fake_device():
    """Let torch have the device."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # Module.to() keeps its parameters
    try:
        with _Device():
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
