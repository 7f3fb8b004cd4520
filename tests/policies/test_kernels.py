"""The registry of accelerated kernels."""

import pytest

from flowrl.policies import TorchPolicy
from flowrl.policies.learning.kernels.registry import _KERNELS
from flowrl.settings import imported


@pytest.mark.parametrize("name", _KERNELS)
def test_registry_names_existing_classes_and_methods(name):
    policy_class = imported(":".join(name.rsplit(".", 1)))
    assert issubclass(policy_class, TorchPolicy)
    for method in _KERNELS[name].methods:
        assert callable(getattr(policy_class, method))
