"""A CUDA device without hardware: its tensors compute on the CPU, but torch treats them as remote.

As on a GPU, they have no `numpy()` before `cpu()`, and operations refuse to mix them with tensors
of the CPU, except single numbers, indices and copies. So code for GPUs runs on any machine.
A graph calls its function again, and refuses operations that wait for the GPU.
"""

from __future__ import annotations

import contextlib
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

DEVICE, CPU = torch.device("cuda"), torch.device("cpu")

_FORBIDDEN = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}
_WAITING = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__float__,
            torch.Tensor.__int__, torch.Tensor.nonzero}  # fmt: skip
_MIXING = {torch.Tensor.copy_, torch.Tensor.to, torch._has_compatible_shallow_copy_type}


class DeviceTensor(torch.Tensor):
    """A tensor on the device."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:
            return DEVICE
        if FakeGraph.is_running and (func in _WAITING or _target(func, args, kwargs) == CPU):
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        if func in _FORBIDDEN:
            raise TypeError("can't convert a CUDA tensor to numpy: call cpu() first")
        if _target(func, args, kwargs) == CPU:
            return args[0].as_subclass(torch.Tensor).clone()
        mixed = [] if func in _MIXING else _on_cpu(_operands(func, args, kwargs))
        if mixed:
            raise RuntimeError(
                f"{func}: expected all tensors on one device, got one of shape "
                f"{list(mixed[0].shape)} on the CPU"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return _on_device(func(*_without_device(args), **_without_device(kwargs)))


class FakeGraph:
    """Takes the place of CudaGraph."""

    is_running = False
    captures = 0

    def __init__(self, stream, warm_up, function):
        warm_up()
        FakeGraph.captures += 1
        self._function, self.outputs = function, None

    def replay(self):
        FakeGraph.is_running = True
        try:
            outputs = self._function()
        finally:
            FakeGraph.is_running = False
        if self.outputs is None:
            self.outputs = outputs
        else:
            self.outputs.copy_(outputs)


class _Device(TorchFunctionMode):
    """Creates tensors on the device, and moves tensors of the CPU there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        target = _target(func, args, kwargs)
        copies = func in (torch.Tensor.to, torch.as_tensor, torch.tensor) and target == DEVICE
        if FakeGraph.is_running and copies:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        is_on_device = any(issubclass(kind, DeviceTensor) for kind in types)
        if is_on_device or func in (torch.device, torch._C._nn._parse_to):
            return func(*args, **kwargs)
        result = func(*_without_device(args), **_without_device(kwargs))
        if target is None or target == CPU:
            return result
        return _on_device(result.clone() if func is torch.Tensor.to else result)


def _operands(func, args, kwargs):
    """Return the arguments of a call that must be on one device."""
    if func in (torch._VF.lstm, torch._VF.gru) and isinstance(args[1], torch.Tensor):
        return args[0], args[2:], kwargs  # without the numbers of sequences per step
    if func is torch.Tensor.__getitem__:
        return args[0]
    if func is torch.Tensor.__setitem__ and not _tensors(args[1]):
        return args[0]  # a copy
    if func is torch.Tensor.__setitem__:
        return args[0], args[2]
    return args, kwargs


def _mapped(fn, values):
    """Return nested values with fn applied to each leaf; faster than torch's function."""
    kind = type(values)
    if kind is tuple or kind is list:
        return kind([_mapped(fn, value) for value in values])
    if kind is dict:
        return {key: _mapped(fn, value) for key, value in values.items()}
    if isinstance(values, (tuple, list, dict)):  # such as a named tuple
        return pytree.tree_map(fn, values)
    return fn(values)


def _tensors(values):
    found = []
    _mapped(lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, values)
    return found


def _on_cpu(values):
    """Return the tensors of the CPU, without single numbers."""
    return [t for t in _tensors(values) if not isinstance(t, DeviceTensor) and t.dim()]


def _target(func, args, kwargs):
    """Return the device that a call names; None if it names none."""
    if func is torch.Tensor.cpu:
        return CPU
    device = kwargs.get("device")
    if device is None and func is torch.Tensor.to:
        device = next((a for a in args[1:] if isinstance(a, (str, torch.device))), None)
        if len(args) > 1 and isinstance(args[1], torch.Tensor):
            device = args[1].device
    return None if device is None else torch.device(device)


def _without_device(values):
    def replaced(value):
        is_device = isinstance(value, torch.device) or (
            isinstance(value, str) and value == DEVICE.type
        )
        return CPU if is_device else value

    return _mapped(replaced, values)


def _on_device(result):
    return _mapped(lambda t: t.as_subclass(DeviceTensor) if type(t) is torch.Tensor else t, result)


@contextlib.contextmanager
def fake_device():
    """Let torch have the device."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # Module.to() keeps its parameters
    try:
        with fake_graphs(), _Device():
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@contextlib.contextmanager
def fake_graphs():
    """Let FakeGraph take the place of CudaGraph."""
    users = "learning.captured_update", "acting_models"
    with contextlib.ExitStack() as stack:
        for module in users:
            stack.enter_context(patch(f"flowrl.policies.{module}.CudaGraph", FakeGraph))
        yield
