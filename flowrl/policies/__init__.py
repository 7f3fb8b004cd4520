"""Policies: acting, models, action distributions, exploration, returns, filters, schedules.

Names that need torch are imported on first access.
"""

from importlib import import_module
from typing import Any

from flowrl.errors import ConfigError
from flowrl.policies.config import ExplorationConfig, ModelConfig, PolicyConfig
from flowrl.policies.policy import Policy
from flowrl.policies.policy_runner import PolicyRunner
from flowrl.policies.policy_spec import PolicySpec
from flowrl.policies.views import ViewRequirement, ViewRequirements

__all__ = [
    "ConfigError",
    "ExplorationConfig",
    "ModelConfig",
    "ModelV2",
    "Policy",
    "PolicyConfig",
    "PolicyRunner",
    "PolicySpec",
    "RecurrentNetwork",
    "TorchPolicy",
    "ViewRequirement",
    "ViewRequirements",
    "build_tf_policy",
    "build_torch_policy",
    "register_model",
]


_WITH_TORCH = {
    "ModelV2": "flowrl.policies.models",
    "RecurrentNetwork": "flowrl.policies.models",
    "TorchPolicy": "flowrl.policies.torch_policy",
    "build_tf_policy": "flowrl.policies.build",
    "build_torch_policy": "flowrl.policies.build",
    "register_model": "flowrl.policies.models",
}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
