"""Build the policies of a worker: class, settings and spaces of each."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium import spaces

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.data.sample_batch import AgentID
from flowrl.envs.multi_agent_vector_env import MultiAgentVectorEnv
from flowrl.errors import ConfigError, add_note
from flowrl.policies.config import PolicyConfig
from flowrl.policies.policy import Policy
from flowrl.policies.policy_spec import PolicyMapping, PolicySpec
from flowrl.sampling.worker_config import WORKER_SETTINGS
from flowrl.seeding import derive_seed
from flowrl.setting_aliases import canonical_names

log = logging.getLogger("flowrl")


def build_policy_map(
    specs: Mapping[str, PolicySpec],
    default_class: type[Policy] | None,
    config: Mapping[str, Any] | PolicyConfig,
    envs: MultiAgentVectorEnv,
    mapping: PolicyMapping,
    num_gpus: float | None,
) -> dict[str, Policy]:
    """Return the policies by id.

    Args:
        specs: policy id -> PolicySpec.
        default_class: class of the policies whose spec names none.
        config: the run's settings, a mapping or a record.
        envs: its agents' spaces are used where a spec has none.
        mapping: from agents to policies.
        num_gpus: GPUs of the process. 0: the policies use the CPU. Above 0: `device="cuda:3"` means
            the first GPU if the process has no GPU of that index. None: `device` is kept.

    Raises:
        ConfigError: a policy has no class, or its settings are invalid.
    """
    policies = {}
    for policy_id, spec in specs.items():
        observation_space, action_space = _spaces_for(policy_id, spec, envs, mapping, len(specs))
        try:
            policy_class, settings = policy_class_and_config(policy_id, spec, default_class, config)
            if num_gpus is not None:
                settings = _with_device(settings, num_gpus)
            policies[policy_id] = policy_class(observation_space, action_space, settings)
        except ConfigError as error:
            if len(specs) > 1:
                add_note(error, f"in the settings of policy {policy_id!r}")
            raise
    return policies


def _spaces_for(
    policy_id: str,
    spec: PolicySpec,
    envs: MultiAgentVectorEnv,
    mapping: PolicyMapping,
    num_policies: int,
) -> tuple[spaces.Space, spaces.Space]:
    """Return observation and action space: the spec's, or those of an agent that is mapped to the
    policy."""
    if spec.observation_space is not None and spec.action_space is not None:
        return spec.observation_space, spec.action_space
    agents = list(envs.possible_agents)
    mapped = []
    if num_policies == 1:
        mapped = agents
    else:
        # there is no episode yet, and the worker is incomplete
        expected: tuple[type[Exception], ...] = (Exception,) if mapping.takes_context else ()
        try:
            mapped = [agent for agent in agents if mapping(agent) == policy_id]
        except expected:
            _warn_of_guess(policy_id, spec, envs, agents)
    agent = (mapped or agents or [None])[0]
    observation_space, action_space = spec.observation_space, spec.action_space
    if observation_space is None:
        observation_space = envs.observation_space(agent)
    return observation_space, envs.action_space(agent) if action_space is None else action_space


def _warn_of_guess(
    policy_id: str, spec: PolicySpec, envs: MultiAgentVectorEnv, agents: Sequence[AgentID]
) -> None:
    """Log a warning if a policy gets spaces of the first agent that other agents do not have."""
    for agent in agents[1:]:
        with contextlib.suppress(ConfigError):  # the environment does not define its spaces
            is_same = (
                spec.observation_space is not None
                or envs.observation_space(agent) == envs.observation_space(agents[0])
            ) and (
                spec.action_space is not None
                or envs.action_space(agent) == envs.action_space(agents[0])
            )
            if not is_same:
                log.warning(
                    "the policy %r has the spaces of the agent %r, because policy_mapping_fn needs "
                    "an episode. If it acts for agents with other spaces, set observation_space "
                    "and action_space in its PolicySpec",
                    policy_id, agents[0],
                )  # fmt: skip
                return


def policy_class_and_config(
    policy_id: str, spec: PolicySpec, default_class: type[Policy] | None, config: Any
) -> tuple[type[Policy], Any]:
    """Return a policy's class and settings; the spec's settings override the run's.

    Raises:
        ConfigError: there is no class, or the spec's config is invalid.
    """
    policy_class, seed = spec.policy_class, config.get("seed")
    overrides = {} if spec.config is None else spec.config
    if not isinstance(overrides, (Mapping, PolicyConfig)):
        raise ConfigError(f"policies: config of {policy_id!r} must be a mapping, got {overrides!r}")
    foreign = []
    if isinstance(overrides, Mapping):
        foreign = sorted(set(overrides) & {*WORKER_SETTINGS, "multiagent", "total_timesteps"})
    if foreign:
        raise ConfigError(
            f"policies: {foreign[0]!r} in the config of {policy_id!r} is a setting of the run, not "
            "of a policy"
        )
    if isinstance(overrides, PolicyConfig):
        policy_class = policy_class or getattr(overrides, "policy_class", None) or default_class
        total = config.get("total_timesteps")
        config = overrides
        overrides = {} if config.seed is None else {"seed": config.seed}
        if total is not None:  # the run's total_timesteps applies to all policies
            overrides["total_timesteps"] = total
    policy_class = policy_class or default_class
    if policy_class is None:
        raise ConfigError(f"policies: {policy_id!r} needs a policy_class")
    if not (isinstance(policy_class, type) and issubclass(policy_class, Policy)):
        raise ConfigError(
            f"policies: policy_class of {policy_id!r} must be a subclass of Policy, got "
            f"{policy_class!r}"
        )
    if policy_id != DEFAULT_POLICY_ID and "seed" not in overrides:
        overrides = {**overrides, "seed": derive_seed(seed, "policy", policy_id)}
    if isinstance(config, policy_class.config_class):
        return policy_class, config.updated(**overrides) if overrides else config
    return policy_class, {**_policy_settings(policy_class, config), **overrides}


def _policy_settings(policy_class: type[Policy], config: Any) -> dict[str, Any]:
    """Return the settings of `config` that the policy's record has.

    From another class's record, only explicitly set values are used, so that the policy keeps its
    own defaults.
    """
    known = policy_class.config_class.model_fields
    if isinstance(config, PolicyConfig):
        return dict(policy_class.config_from(config).explicit_settings())
    return {
        name: value
        for name, value in canonical_names(dict(config)).items()
        if name in known or name not in {*WORKER_SETTINGS, "multiagent"}
    }


def _with_device(settings: Any, num_gpus: float) -> Any:
    """Return a policy's settings, a record or a mapping, for a process with `num_gpus` GPUs."""
    device, _, index = str(settings.get("device", "auto")).partition(":")
    if not num_gpus:
        device = "cpu"
    elif not index.isdecimal() or int(index) < num_gpus:
        return settings
    is_record = isinstance(settings, PolicyConfig)
    return settings.updated(device=device) if is_record else {**settings, "device": device}
