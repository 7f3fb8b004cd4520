"""The settings of a plan file: its `config`, and what it has tuned for single environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.settings import ConfigError
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.plan_files import load_plan


def plan_config(plan: str, env: Any = None) -> Any:
    """Return the AlgorithmConfig of a plan for an environment.

    A plan file has a `config` with settings for any environment. It may also have `tuned`, a
    mapping from environment ids to settings that are changed for these environments only.

    Args:
        plan: name of a shipped plan, or path of a plan file.
        env: the environment; None uses that of `config`.

    Raises:
        ConfigError: the plan cannot be loaded, has no config, or `tuned` is invalid.
    """
    module = load_plan(plan)
    config = getattr(module, "config", None)
    if not isinstance(config, AlgorithmConfig):
        raise ConfigError(f"plan: {plan} has no `config` that is an AlgorithmConfig")
    tuned = getattr(module, "tuned", {})
    if not isinstance(tuned, Mapping) or not all(isinstance(s, Mapping) for s in tuned.values()):
        raise ConfigError(f"plan: `tuned` of {plan} must map environment ids to settings")
    if env is not None:
        config = config.updated(env=env)
    if not isinstance(config.env, str) or config.env not in tuned:
        return config
    try:
        return config.updated(**tuned[config.env])
    except ConfigError as error:
        raise ConfigError(f"plan: `tuned` of {plan} for {config.env!r}: {error}") from None
