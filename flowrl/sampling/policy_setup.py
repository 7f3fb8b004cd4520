"""Which class and which settings each policy of a worker has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.policies.config import PolicyConfig
from flowrl.policies.policy import Policy
from flowrl.policies.policy_spec import PolicySpec
from flowrl.seeding import derive_seed
from flowrl.settings import ConfigError

# Settings in a plain mapping that are the worker's or the set's, not the policy's.
WORKER_SETTINGS = {
    "address",
    "batch_mode",
    "callbacks_class",
    "collect_infos",
    "count_steps_by",
    "custom_resources_per_worker",
    "delay_between_worker_restarts_s",
    "env_config",
    "horizon",
    "max_num_env_restarts",
    "max_num_worker_restarts",
    "multiagent",
    "no_done_at_end",
    "num_cpus_per_worker",
    "num_envs_per_worker",
    "num_gpus_per_worker",
    "num_threads_per_process",
    "num_workers",
    "on_invalid_step",
    "placement_strategy",
    "policies",
    "policies_to_train",
    "policy_mapping_fn",
    "recreate_failed_workers",
    "rollout_fragment_length",
    "sample_async",
    "sample_collector",
    "sample_timeout_s",
    "soft_horizon",
    "train_batch_size",
    "vectorization_mode",
}


def policy_class_and_config(
    policy_id: str, spec: PolicySpec, default: type[Policy] | None, given: Any
) -> tuple[type[Policy], Any]:
    """A policy's class and settings: the spec's over the run's.

    Raises:
        ConfigError: there is no class.
    """
    policy_class, seed = spec.policy_class, given.get("seed")
    own = {} if spec.config is None else spec.config
    if not isinstance(own, (Mapping, PolicyConfig)):
        raise ConfigError(f"policies: the config of {policy_id!r} is a mapping, got {own!r}")
    foreign = sorted(set(own) & WORKER_SETTINGS) if isinstance(own, Mapping) else []
    if foreign:
        raise ConfigError(
            f"policies: {foreign[0]!r} of {policy_id!r} is the run's setting, not a policy's"
        )
    if isinstance(own, PolicyConfig):
        policy_class = policy_class or getattr(own, "policy_class", None) or default
        given, own = own, {} if own.seed is None else {"seed": own.seed}
    policy_class = policy_class or default
    if policy_class is None:
        raise ConfigError(f"policies: {policy_id!r} needs a policy_class")
    if not (isinstance(policy_class, type) and issubclass(policy_class, Policy)):
        raise ConfigError(
            f"policies: the policy_class of {policy_id!r} is a subclass of Policy, got "
            f"{policy_class!r}"
        )
    if policy_id != DEFAULT_POLICY_ID and "seed" not in own:
        own = {**own, "seed": derive_seed(seed, "policy", policy_id)}
    if isinstance(given, policy_class.config_class):
        return policy_class, given.updated(**own) if own else given
    return policy_class, {**_for_policy(policy_class, given), **own}


def _for_policy(policy_class: type[Policy], given: Any) -> dict[str, Any]:
    """The settings that the policy's record takes; of another record those that were set, so that
    the policy's own defaults go before that one's."""
    known = policy_class.config_class.model_fields
    if isinstance(given, PolicyConfig):
        return dict(policy_class.settings_of(given).chosen())
    return {k: v for k, v in given.items() if k in known or k not in WORKER_SETTINGS}
