"""Fixtures of the tests of policies."""

import pytest
import torch

from .fake_device import fake_device


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def cuda(request):
    """Let torch have a GPU: an emulated one or, marked `gpu`, a real one."""
    if request.param == "emulated":
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        with fake_device():
            yield
        return
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before
