"""Models: from what a policy sees to distribution inputs and values."""

from flowrl.policies.models.base import ModelV2, ModuleModel
from flowrl.policies.models.catalog import make_model, register_model
from flowrl.policies.models.fcnet import FullyConnectedNetwork
from flowrl.policies.models.recurrent import RecurrentNetwork

__all__ = [
    "FullyConnectedNetwork",
    "ModelV2",
    "ModuleModel",
    "RecurrentNetwork",
    "make_model",
    "register_model",
]
