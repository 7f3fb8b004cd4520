"""Algorithms: the maths and the knobs. `flowrl.algorithms.ppo`, `flowrl.algorithms.a2c`."""

import importlib
import sys
from typing import Any

from flowrl.settings import ConfigError

__all__ = ["Algorithm", "AlgorithmConfig", "ConfigError"]


def __getattr__(name: str) -> Any:
    if name == "Algorithm":
        from flowrl.trainer.algorithm import Algorithm

        return Algorithm
    if name == "AlgorithmConfig":
        from flowrl.trainer.config import AlgorithmConfig

        return AlgorithmConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if "ray.tune" in sys.modules:  # whoever has it may say tune.run("PPO", config=config)
    importlib.import_module("flowrl.tune")
