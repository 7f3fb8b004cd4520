"""Settings from files that would import or execute code, which needs the user's consent."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from flowrl.envs.registry import check_imports_no_code
from flowrl.errors import ConfigError
from flowrl.policies.config import ModelConfig
from flowrl.policies.policy_spec import specs_of
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.plan_files import is_shipped

# settings of experiment loggers that only name and describe a run
_PLAIN_LOGGER_SETTINGS = {
    "project", "name", "group", "tags", "notes", "job_type", "mode", "experiment_name", "run_name",
}  # fmt: skip


def _names_code(model: Any) -> bool:
    """Return whether a setting is a record of a network with an import path as `custom_model`."""
    return isinstance(model, ModelConfig) and ":" in str(model.custom_model or "")


def untrusted_code(config: AlgorithmConfig, passed: Collection[str] = ()) -> str | None:
    """Return a description of code that settings from a file would run; None if there is none.

    Shipped plans, registered environments and registered models are trusted. A plan file, an
    environment id "module:Id" and a model "module:Class" are not; neither are the address of a Ray
    cluster on other machines, because this process exchanges pickled objects with it, and the
    settings of experiment loggers, which can name servers and repositories. Settings that are
    code, not text, are not checked here: see `flowrl.policies.code_references`.

    Args:
        config: an AlgorithmConfig.
        passed: names of settings that the user passed, which are trusted.
    """
    plan = config.plan
    if "plan" not in passed and isinstance(plan, str) and not is_shipped(plan):
        return f"the plan file {plan}"
    evaluation = config.evaluation_config
    own_config = {} if "env_config" in passed else config.env_config
    envs = [("env", config.env, own_config)]
    if {"env", "env_config"} & evaluation.keys():
        env, env_config = config.env, evaluation.get("env_config", own_config)
        envs.append(("evaluation_config", evaluation.get("env", env), env_config))
    for name, env, env_config in envs:
        if name not in passed and isinstance(env, str):
            try:
                check_imports_no_code(env, env_config)
            except ConfigError as error:
                return f"the environment {error}"
    model: Any = getattr(config, "model", None)
    if "model" not in passed and _names_code(model):
        return f"the model {model.custom_model}"
    for policy_id in specs_of(config.policies):
        for name, value in config.for_policy(policy_id).items():
            if not {name, "policies"} & set(passed) and _names_code(value):
                return f"the model {value.custom_model}"
    if "log_config" not in passed:
        for logger, settings in config.log_config.items():
            unsafe = set(settings) - _PLAIN_LOGGER_SETTINGS
            if unsafe:
                return f"the setting {min(unsafe)!r} of {logger}"
    if "address" not in passed and config.address not in (None, "local"):
        return f"the Ray cluster {config.address} (this process exchanges pickled objects with it)"
    return None
