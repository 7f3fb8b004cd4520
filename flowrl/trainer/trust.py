"""Settings from files that would import or execute code, which needs the user's consent."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.envs.registry import check_registered
from flowrl.policies.policy_spec import specs_of
from flowrl.settings import ConfigError
from flowrl.trainer.plan_files import is_shipped


def untrusted_code(config: Any, passed: Collection[str] = ()) -> str | None:
    """Return a description of code that settings from a file would run; None if there is none.

    Shipped plans, registered environments and registered models are trusted. A plan file, an
    environment id "module:Id" and a model "module:Class" are not; neither are the address of a Ray
    cluster, because this process exchanges pickled objects with it, and the settings of experiment
    trackers, which can name servers and repositories. Settings that are code, not
    text, are not checked here: see `flowrl.policies.code_references`.

    Args:
        config: an AlgorithmConfig.
        passed: names of settings that the user passed, which are trusted.
    """
    plan = config.plan
    if "plan" not in passed and isinstance(plan, str) and not is_shipped(plan):
        return f"the plan file {plan}"
    envs = {"env": config.env, "evaluation_config": config.evaluation_config.get("env")}
    for name, env in envs.items():
        if name not in passed and isinstance(env, str):
            try:
                check_registered(env)
            except ConfigError as error:
                return f"the environment {error}"
    if not {"model", "policies"} & set(passed):
        for policy_id in specs_of(config.policies or {DEFAULT_POLICY_ID: None}):
            custom_model = config.for_policy(policy_id).model.custom_model
            if isinstance(custom_model, str) and ":" in custom_model:
                return f"the model {custom_model}"
    if "log_config" not in passed and config.log_config:
        return f"the settings log_config={config.log_config}"
    if "address" not in passed and config.address is not None:
        return f"the Ray cluster {config.address}, which exchanges pickled objects with it"
    return None
