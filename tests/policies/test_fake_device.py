"""The emulated device refuses what a GPU refuses."""

import numpy as np
import pytest
import torch

from .fake_device import DeviceTensor, fake_device


@pytest.fixture(autouse=True)
def device():
    with fake_device():
        yield


def on_device(*shape):
    return torch.ones(shape).to("cuda")


def test_tensors_are_created_and_moved():
    created = [
        torch.zeros(3, device="cuda"),
        torch.arange(3, device=torch.device("cuda")),
        torch.ones(3).to("cuda"),
        torch.nn.Linear(2, 3).to("cuda").weight,
        on_device(3) + 1,
        torch.ones(2).to(on_device(2)),
    ]
    for tensor in created:
        assert isinstance(tensor, DeviceTensor)
        assert tensor.device.type == "cuda"
    for tensor in (on_device(2).cpu(), on_device(2).to("cpu"), on_device(2).to(torch.ones(2))):
        assert type(tensor) is torch.Tensor


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: a + b,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: b[a.long()],
        lambda a, b: b.__setitem__(a > 0, 0.0),
        lambda a, b: a.__setitem__(torch.tensor([0, 1]), b),
        lambda a, b: torch.where(a > 0, b, b),
        lambda a, b: torch.add(a, a, out=b),
    ],
)
def test_tensors_of_two_devices_are_not_mixed(call):
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        call(on_device(2), torch.ones(2))


@pytest.mark.parametrize("states", [False, True])
def test_inputs_of_recurrent_layers_are_on_the_device(states):
    lstm, row = torch.nn.LSTM(3, 4).to("cuda"), torch.zeros(2, 1, 3)
    state = (torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))
    with pytest.raises(RuntimeError, match="one device"):
        lstm(row.to("cuda"), state) if states else lstm(row)


@pytest.mark.parametrize("convert", [torch.Tensor.numpy, np.asarray, np.from_dlpack])
def test_tensors_are_not_converted_to_arrays(convert):
    with pytest.raises(TypeError, match="call cpu"):
        convert(on_device(2))


def test_numbers_indices_and_copies_are_allowed():
    tensor = on_device(3)
    assert (tensor * torch.tensor(2.0)).sum().item() == 6
    assert tensor[torch.tensor([0, 2])].tolist() == [1, 1]
    tensor[:2] = torch.zeros(2)
    tensor.copy_(torch.full((3,), 5.0))
    assert tensor.tolist() == [5, 5, 5]
