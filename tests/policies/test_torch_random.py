"""torch's random numbers in a block of code."""

import pytest
import torch
from torch import nn

from flowrl.policies.torch_random import torch_seed


def test_seed_of_a_block_repeats_and_does_not_change_other_numbers():
    before = torch.random.get_rng_state()
    with torch_seed(7):
        first = torch.rand(3)
    with torch_seed(7):
        again = torch.rand(3)
    with torch_seed(8):
        other = torch.rand(3)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_numbers_are_those_of_manual_seed():
    with torch_seed(2**63 - 1):
        layer = nn.Linear(3, 2)
    with torch.random.fork_rng():
        torch.manual_seed(2**63 - 1)
        expected = nn.Linear(3, 2)
    assert torch.equal(layer.weight, expected.weight)


def test_error_in_a_block_restores_the_generator():
    before = torch.random.get_rng_state()
    with pytest.raises(TypeError), torch_seed(1):
        torch.rand("three")
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.gpu
def test_generators_of_gpus_are_seeded_and_restored():
    torch.rand(1, device="cuda")
    before = torch.cuda.get_rng_state()
    with torch_seed(7):
        first = torch.rand(3, device="cuda")
    with torch_seed(7):
        again = torch.rand(3, device="cuda")
    assert torch.equal(first, again)
    assert torch.equal(torch.cuda.get_rng_state(), before)
