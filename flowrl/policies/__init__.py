"""The learner: policies, models, distributions, returns, filters, schedules.

Importing a policy by name from here loads torch only where it is needed.
"""

from typing import Any

from flowrl.policies.config import ConfigError, ModelConfig, PolicyConfig
from flowrl.policies.policy import Policy
from flowrl.policies.policy_spec import PolicySpec
from flowrl.policies.view_requirement import ViewRequirement

__all__ = [
    "ConfigError",
    "ModelConfig",
    "Policy",
    "PolicyConfig",
    "PolicySpec",
    "TorchPolicy",
    "ViewRequirement",
]


def __getattr__(name: str) -> Any:
    if name == "TorchPolicy":
        from flowrl.policies.torch_policy import TorchPolicy

        return TorchPolicy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
