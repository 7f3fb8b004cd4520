"""PolicySpec and PolicyMapping: the policies of a run, and which policy acts for which agent."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gymnasium import spaces

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.errors import ConfigError, add_note
from flowrl.setting_aliases import canonical_names
from flowrl.setting_values import nearest
from flowrl.settings import Settings, within_record


@dataclass
class PolicySpec:
    """Specification of one policy of a multi-agent run.

    Args:
        policy_class: policy class; None uses that of `config`'s algorithm, or else the run's.
        observation_space, action_space: spaces of one agent; None uses those of an agent that is
            mapped to the policy.
        config: settings that differ from the run's, as a mapping, or the complete config of
            another algorithm. A plan may read some settings from the run only: a warning at the
            start names those that have no effect here.
    """

    policy_class: Any = None
    observation_space: spaces.Space | None = None
    action_space: spaces.Space | None = None
    config: Any = None

    @classmethod
    def from_value(cls, value: Any) -> PolicySpec:
        """Convert a PolicySpec, a tuple of its arguments, a policy class or None to a PolicySpec.

        Raises:
            ConfigError: any other value.
        """
        if isinstance(value, PolicySpec):
            return value
        if value is None:
            return cls()
        if isinstance(value, (tuple, list)) and len(value) <= 4:
            return cls(*value)
        if isinstance(value, type):
            return cls(value)
        raise ConfigError(
            "policies: each value must be a PolicySpec(policy_class, observation_space, "
            f"action_space, config), got {value!r}; a mapping only changes a policy that exists, "
            "in updated() and from_checkpoint()"
        )


def specs_of(policies: Any) -> dict[str, PolicySpec]:
    """Convert the setting `policies` to PolicySpecs by id: a mapping, a collection of ids, or None
    for the default policy.

    Raises:
        ConfigError: another type, no policy, or an id that is not a string.
    """
    if policies is None:
        policies = (DEFAULT_POLICY_ID,)
    if isinstance(policies, str) or not hasattr(policies, "__iter__"):
        raise ConfigError(
            f"policies: must be a mapping from policy id to PolicySpec, got {policies!r}"
        )
    for policy_id in policies:
        if not isinstance(policy_id, str) or not policy_id:
            raise ConfigError(f"policies: an id must be a non-empty string, got {policy_id!r}")
    specs = policies if isinstance(policies, Mapping) else dict.fromkeys(policies)
    if not specs:
        raise ConfigError("policies: there must be at least one")
    return {policy_id: PolicySpec.from_value(spec) for policy_id, spec in specs.items()}


def check_policy_classes(policies: Any, default: Any, algorithm: str) -> None:
    """Check that every policy has a class.

    Args:
        policies: the setting `policies`.
        default: `policy_class` of the algorithm, or None.
        algorithm: class name of the algorithm, for the message.

    Raises:
        ConfigError: a policy has none.
    """
    for policy_id, spec in specs_of(policies).items() if default is None else ():
        if spec.policy_class is None and getattr(spec.config, "policy_class", None) is None:
            raise ConfigError(
                f"{algorithm} has no policy_class for {policy_id!r}: use an algorithm that has "
                "one, such as PPO(config), set policy_class in your subclass of Algorithm, or give "
                "each PolicySpec a policy_class"
            )


def changes_specs(policies: Any) -> bool:
    """Return whether a value of the setting `policies` changes given policies: id -> mapping."""
    return (
        isinstance(policies, Mapping)
        and bool(policies)
        and all(isinstance(change, Mapping) for change in policies.values())
    )


def changed_specs(policies: Any, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, PolicySpec]:
    """Return PolicySpecs with changes.

    Args:
        policies: the present value of the setting `policies`.
        changes: policy id -> fields of its PolicySpec to replace; a mapping for `config` changes
            only the settings that it names.

    Raises:
        ConfigError: a policy, a field or a setting is unknown, or a setting is invalid.
    """
    specs = specs_of(policies)
    for policy_id, change in changes.items():
        if policy_id not in specs:
            raise ConfigError(
                f"policies: no policy {policy_id!r}.{nearest(str(policy_id), list(specs))}"
            )
        spec, fields = specs[policy_id], dict(change)
        if unknown := fields.keys() - vars(spec).keys():
            raise ConfigError(
                f"policies.{policy_id}: no field {min(unknown, key=str)!r}: change settings with "
                f"{{{policy_id!r}: {{'config': {{…}}}}}}"
            )
        if isinstance(fields.get("config"), Mapping):
            fields["config"] = _changed_config(spec.config, fields["config"], policy_id)
        specs[policy_id] = replace(spec, **fields)
    return specs


def _changed_config(config: Any, changes: Mapping[str, Any], policy_id: str) -> Any:
    if not isinstance(config, Settings):
        merged = canonical_names(dict(config or {}))
        for name, value in canonical_names(dict(changes)).items():
            before: Any = merged.get(name)
            is_nested = isinstance(before, Mapping) and isinstance(value, Mapping)
            merged[name] = {**before, **value} if is_nested else value
        return merged
    try:
        return config.updated(**changes)
    except ConfigError as error:
        raise ConfigError(within_record(f"policies.{policy_id}.config", str(error))) from None


class PolicyMapping:
    """Map agents to policies: a function of agent id and episode that returns a policy id.

    Args:
        fn: `fn(agent_id, episode, worker, **kwargs)`; all parameters but the first are optional.
            None maps all agents to the only policy, or to the default policy.
        policy_ids: ids of the policies.
        worker: the rollout worker, passed to `fn`.

    Raises:
        ConfigError: `fn` is not a function, or is None although it is needed.
    """

    _BY_NAME = ("episode", "worker")

    def __init__(self, fn: Callable[..., str] | None, policy_ids: list[str], worker: Any = None):
        self._policy_ids = policy_ids
        self._worker = worker
        self._fn = fn
        self._args: list[str] = []
        self._keywords: list[str] = []
        if fn is None:
            if len(policy_ids) > 1 and DEFAULT_POLICY_ID not in policy_ids:
                raise ConfigError(
                    f"policy_mapping_fn: with the policies {policy_ids} a function must choose "
                    "the policy of each agent"
                )
            return
        if not callable(fn):
            raise ConfigError(f"policy_mapping_fn: must be a function, got {fn!r}")
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except ValueError:  # some builtins have no signature
            return
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        # parameters with other names receive the remaining values: first the episode, then the
        # worker
        names = [parameter.name for parameter in positional[1:3]]
        remaining = iter([name for name in self._BY_NAME if name not in names])
        self._args = [name if name in self._BY_NAME else next(remaining) for name in names]
        takes_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters)
        keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        self._keywords = [
            name
            for name in self._BY_NAME
            if name not in self._args and (takes_kwargs or name in keywords)
        ]

    @property
    def takes_context(self) -> bool:
        """Whether the function receives the episode or the worker besides the agent id."""
        return bool(self._args or self._keywords)

    def __call__(self, agent_id: Any, episode: Any = None) -> str:
        """Return the id of the policy that acts for an agent.

        Raises:
            ConfigError: the function returns an unknown policy id.
        """
        if self._fn is None:
            single = len(self._policy_ids) == 1
            return self._policy_ids[0] if single else DEFAULT_POLICY_ID
        values = {"episode": episode, "worker": self._worker}
        try:
            policy_id = self._fn(
                agent_id,
                *(values[name] for name in self._args),
                **{name: values[name] for name in self._keywords},
            )
        except Exception as error:
            add_note(error, f"raised by policy_mapping_fn for agent {agent_id!r}")
            raise
        if not isinstance(policy_id, str) or policy_id not in self._policy_ids:
            raise ConfigError(
                f"policy_mapping_fn: maps agent {agent_id!r} to {policy_id!r}; the policies "
                f"are {self._policy_ids}"
            )
        return policy_id


def is_policy_to_train(policies_to_train: Any, policy_id: str, batch: Any = None) -> bool:
    """Return whether a policy learns.

    Args:
        policies_to_train: None for all policies, a collection of policy ids, or a function
            (policy_id, batch) -> bool.
        policy_id: id of the policy.
        batch: the batch to learn from.
    """
    if policies_to_train is None:
        return True
    if callable(policies_to_train):
        return bool(policies_to_train(policy_id, batch))
    return policy_id in policies_to_train


def check_policies_exist(known: Collection[str], policy_ids: Any) -> None:
    """Check ids of policies.

    Args:
        known: ids of the policies that exist.
        policy_ids: a collection of ids, or a mapping by id.

    Raises:
        TypeError: it is something else, or an id is not a string.
        KeyError: there is no such policy.
    """
    if not isinstance(policy_ids, Collection) or not all(isinstance(i, str) for i in policy_ids):
        raise TypeError(f"a mapping or list by policy id is needed, got {policy_ids!r:.200}")
    unknown = sorted(set(policy_ids) - set(known))
    if unknown:
        raise KeyError(f"unknown policies {unknown}: there are {sorted(known)}")
