"""The settings of a plan for an environment."""

from __future__ import annotations

from typing import Any

from flowrl.errors import ConfigError
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.plan_files import load_plan
from flowrl.trainer.tuned_examples import tuned_example


def plan_config(plan: str, env: Any = None, tuned: bool = True) -> AlgorithmConfig:
    """Return the AlgorithmConfig of a plan for an environment.

    Args:
        plan: name of a shipped plan, or path of a plan file.
        env: the environment; None uses that of the plan.
        tuned: use the settings of the tuned example of a shipped plan for this environment, if
            there is one; False uses those of the plan alone.

    Raises:
        ConfigError: the plan cannot be loaded, or has no config.
    """
    module = load_plan(plan)
    config = getattr(module, "config", None)
    if not isinstance(config, AlgorithmConfig):
        raise ConfigError(f"plan: {plan} has no `config` that is an AlgorithmConfig")
    if env is not None:
        config = config.updated(env=env)
    example = tuned_example(plan, config.env) if tuned else None
    return config if example is None else config.updated(**example.settings)
