"""Algorithms: their settings and losses, one module each, such as `flowrl.algorithms.ppo`."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from flowrl.errors import ConfigError

if TYPE_CHECKING:
    from flowrl.trainer.algorithm import Algorithm
    from flowrl.trainer.config import AlgorithmConfig

__all__ = ["Algorithm", "AlgorithmConfig", "ConfigError"]


def __getattr__(name: str) -> Any:
    if name == "Algorithm":
        from flowrl.trainer.algorithm import Algorithm

        return Algorithm
    if name == "AlgorithmConfig":
        from flowrl.trainer.config import AlgorithmConfig

        return AlgorithmConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if "ray.tune" in sys.modules:  # register the algorithms for tune.run("PPO", config=config)
    importlib.import_module("flowrl.tune")
