"""Policies: acting, models, action distributions, exploration, returns, filters, schedules.

Names that need torch are imported on first access.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flowrl.errors import ConfigError
from flowrl.policies.config import ExplorationConfig, ModelConfig, PolicyConfig
from flowrl.policies.policy import Policy
from flowrl.policies.policy_runner import PolicyRunner
from flowrl.policies.policy_spec import PolicySpec
from flowrl.policies.views import ViewRequirement, ViewRequirements

if TYPE_CHECKING:
    from flowrl.policies.build import build_tf_policy, build_torch_policy
    from flowrl.policies.exploration import Exploration
    from flowrl.policies.models import ModelV2, RecurrentNetwork, register_model
    from flowrl.policies.torch_policy import TensorBatch, TorchPolicy

__all__ = [
    "ConfigError",
    "Exploration",
    "ExplorationConfig",
    "ModelConfig",
    "ModelV2",
    "Policy",
    "PolicyConfig",
    "PolicyRunner",
    "PolicySpec",
    "RecurrentNetwork",
    "TensorBatch",
    "TorchPolicy",
    "ViewRequirement",
    "ViewRequirements",
    "build_tf_policy",
    "build_torch_policy",
    "register_model",
]


_WITH_TORCH = {
    "Exploration": "flowrl.policies.exploration",
    "ModelV2": "flowrl.policies.models",
    "RecurrentNetwork": "flowrl.policies.models",
    "TensorBatch": "flowrl.policies.torch_policy",
    "TorchPolicy": "flowrl.policies.torch_policy",
    "build_tf_policy": "flowrl.policies.build",
    "build_torch_policy": "flowrl.policies.build",
    "register_model": "flowrl.policies.models",
}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
