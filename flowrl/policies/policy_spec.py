"""PolicySpec: which policies there are, and who acts for whom."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gymnasium import spaces

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.settings import ConfigError, nearest

MULTIAGENT_KEYS = ("policies", "policy_mapping_fn", "policies_to_train", "count_steps_by")


@dataclass
class PolicySpec:
    """One policy of several.

    Args:
        policy_class: None for the class of `config`'s algorithm, or of the run's.
        observation_space, action_space: None for those of the agents that are mapped to it.
        config: settings that differ from the run's, as a mapping, or another algorithm's whole
            config.
    """

    policy_class: Any = None
    observation_space: spaces.Space | None = None
    action_space: spaces.Space | None = None
    config: Any = None

    @classmethod
    def of(cls, given: Any) -> PolicySpec:
        """A PolicySpec from one, from the tuple of its arguments, a policy class or None.

        Raises:
            ConfigError: anything else.
        """
        if isinstance(given, PolicySpec):
            return given
        if given is None:
            return cls()
        if isinstance(given, (tuple, list)) and len(given) <= 4:
            return cls(*given)
        if isinstance(given, type):
            return cls(given)
        raise ConfigError(
            "policies: each is a PolicySpec(policy_class, observation_space, action_space, "
            f"config), got {given!r}"
        )


def specs_of(policies: Any) -> dict[str, PolicySpec]:
    """Policy id -> PolicySpec, from a mapping or a collection of ids.

    Raises:
        ConfigError: it is neither, or an id is no string.
    """
    if isinstance(policies, str) or not hasattr(policies, "__iter__"):
        raise ConfigError(
            f"policies: a mapping from policy id to PolicySpec is needed, got {policies!r}"
        )
    given = policies if isinstance(policies, Mapping) else dict.fromkeys(policies)
    for policy_id in given:
        if not isinstance(policy_id, str) or not policy_id:
            raise ConfigError(f"policies: an id is a string, got {policy_id!r}")
    if not given:
        raise ConfigError("policies: there must be at least one")
    return {policy_id: PolicySpec.of(spec) for policy_id, spec in given.items()}


def multi_agent_settings(config: Any) -> dict[str, Any]:
    """The four multi-agent settings of a record or a mapping, which may have them under
    "multiagent".

    Raises:
        ConfigError: an unknown key under "multiagent".
    """
    nested = config.get("multiagent") or {}
    unknown = sorted(set(nested) - set(MULTIAGENT_KEYS))
    if unknown:
        near = nearest(unknown[0], list(MULTIAGENT_KEYS))
        raise ConfigError(f"multiagent: unknown setting {unknown[0]!r}.{near}")
    return {key: nested.get(key, config.get(key)) for key in MULTIAGENT_KEYS}


class PolicyMapping:
    """agent id, episode -> policy id.

    Args:
        fn: `fn(agent_id, episode, worker, **kwargs)`; it may leave out all but the first. None
            maps everybody to the only policy, or to the default one.
        policy_ids: the policies that there are.
    """

    def __init__(self, fn: Callable[..., str] | None, policy_ids: list[str], worker: Any = None):
        self._policy_ids = policy_ids
        self._worker = worker
        self._fn = fn
        self._takes_by_name = ("episode", "worker")
        self._args: list[str] = []
        self._keywords: list[str] = []
        if fn is None:
            if len(policy_ids) > 1 and DEFAULT_POLICY_ID not in policy_ids:
                raise ConfigError(
                    f"policy_mapping_fn: with the policies {policy_ids} it must say which one acts "
                    "for which agent"
                )
            return
        if not callable(fn):
            raise ConfigError(f"policy_mapping_fn: a function is needed, got {fn!r}")
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except ValueError:  # some builtins do not say
            return
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        # by their names, or else by their places: (agent_id, episode, worker)
        for place, parameter in enumerate(positional[1:3]):
            named = parameter.name in self._takes_by_name
            self._args.append(parameter.name if named else ("episode", "worker")[place])
        anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
        keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        self._keywords = [
            name
            for name in self._takes_by_name
            if name not in self._args and (anything or name in keywords)
        ]

    def __call__(self, agent_id: Any, episode: Any = None) -> str:
        """The policy's id.

        Raises:
            ConfigError: the function names a policy that there is not.
        """
        if self._fn is None:
            only = len(self._policy_ids) == 1
            return self._policy_ids[0] if only else DEFAULT_POLICY_ID
        given = {"episode": episode, "worker": self._worker}
        try:
            policy_id = self._fn(
                agent_id,
                *(given[name] for name in self._args),
                **{name: given[name] for name in self._keywords},
            )
        except Exception as error:
            error.add_note(f"raised by policy_mapping_fn for agent {agent_id!r}")
            raise
        if not isinstance(policy_id, str) or policy_id not in self._policy_ids:
            raise ConfigError(
                f"policy_mapping_fn: it maps agent {agent_id!r} to {policy_id!r}; the policies "
                f"are {self._policy_ids}"
            )
        return policy_id


def to_train(policies_to_train: Any, policy_id: str, batch: Any = None) -> bool:
    """Whether a policy is to learn: None trains all; a collection of ids; fn(policy_id, batch)."""
    if policies_to_train is None:
        return True
    if callable(policies_to_train):
        return bool(policies_to_train(policy_id, batch))
    return policy_id in policies_to_train
