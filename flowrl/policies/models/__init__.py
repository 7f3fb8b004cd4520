"""Models: networks that map a policy's views to distribution inputs and values."""

from flowrl.policies.models.base import ModelV2
from flowrl.policies.models.catalog import make_model, register_model
from flowrl.policies.models.fcnet import FullyConnectedNetwork
from flowrl.policies.models.module_model import ModuleModel
from flowrl.policies.models.recurrent import RecurrentNetwork

__all__ = [
    "FullyConnectedNetwork",
    "ModelV2",
    "ModuleModel",
    "RecurrentNetwork",
    "make_model",
    "register_model",
]
