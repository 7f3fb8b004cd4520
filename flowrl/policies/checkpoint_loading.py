"""Load a policy from a checkpoint, which stores class, spaces and settings besides the state."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from gymnasium import spaces

from flowrl.data.checkpoint import DAMAGED, CheckpointError, read_checkpoint, resolve_checkpoint
from flowrl.errors import ConfigError
from flowrl.policies.code_references import (
    PLAN_MODULE,
    POLICY_CLASS,
    SETTINGS_CLASS,
    CodeResolver,
    code_path,
)
from flowrl.policies.config import PolicyConfig
from flowrl.policies.devices import on_available_device
from flowrl.policies.json_codec import (
    changed_values,
    is_given,
    missing_settings_error,
    space_from_json,
    space_to_json,
    values_to_json,
)


class LoadablePolicy(Protocol):
    """The part of a policy that checkpoints describe and restore; see Policy."""

    config_class: ClassVar[type[PolicyConfig]]
    observation_space: spaces.Space
    action_space: spaces.Space
    config: Any

    def __init__(
        self, observation_space: spaces.Space, action_space: spaces.Space, config: Any
    ) -> None: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


# settings of an algorithm that its policies do not use; they may name code of the user
_NOT_OF_POLICIES = (
    "env", "env_config", "evaluation_config", "plan", "policies", "policy_mapping_fn",
    "policies_to_train", "callbacks_class", "sample_collector",
)  # fmt: skip

P = TypeVar("P", bound=LoadablePolicy)


def describe_policy(policy: LoadablePolicy) -> dict[str, Any]:
    """Return a policy's class, spaces and settings as JSON.

    The names of settings that cannot be stored are listed under `left_out`.
    """
    values, left_out = values_to_json(policy.config)
    policy_class, config_class = type(policy), type(policy.config)
    is_default = config_class is policy_class.config_class
    return {
        "class": code_path(policy_class),
        "config_class": None if is_default else code_path(config_class),
        "observation_space": _space_or_none(policy.observation_space),
        "action_space": _space_or_none(policy.action_space),
        "config": values,
        "left_out": left_out,
    }


def _space_or_none(space: spaces.Space) -> dict[str, Any] | None:
    try:
        return space_to_json(space)
    except TypeError:
        return None


def policy_from_checkpoint(
    base: type[P],
    path: Path | str,
    policy_id: str | None,
    changes: Mapping[str, Any] | None,
    trust: bool,
) -> P:
    """Create a policy from a checkpoint. See Policy.from_checkpoint.

    Args:
        base: the class whose `from_checkpoint` is called; the policy is an instance of it.
        path: a checkpoint, or a run directory (its newest checkpoint).
        policy_id: id of the policy; None for the only one.
        changes: settings that replace saved ones.
        trust: import code outside flowrl that the checkpoint names.
    """
    if not isinstance(changes or {}, Mapping):
        raise ConfigError(f"from_checkpoint: config must be a mapping of changes, got {changes!r}")
    changes = changes or {}
    path = resolve_checkpoint(path)
    resolver = CodeResolver(trust, _known_classes(base))
    state, manifest = read_checkpoint(path, "worker")
    policy_id = _choose_policy(path, manifest.get("policies") or {}, policy_id)
    description = manifest["policies"][policy_id]
    parts = _import_parts(path, policy_id, description, base, resolver)
    try:
        saved = {n: v for n, v in description["config"].items() if n not in _NOT_OF_POLICIES}
        missing = [name for name in description["left_out"] if not is_given(changes, name)]
        missing = [name for name in missing if name not in _NOT_OF_POLICIES]
        if missing:
            raise missing_settings_error(missing)
        settings = changed_values(parts.config_class, saved, changes, resolver)
    except ConfigError as error:
        raise ConfigError(f"from_checkpoint: {error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (ImportError, *DAMAGED) as error:
        raise CheckpointError(
            f"{path}: a setting of policy {policy_id!r} cannot be restored: {error}; replace it "
            "with config=…"
        ) from error
    fields = parts.config_class.model_fields
    unknown = [str(name) for name in changes if name not in fields]
    if unknown:
        hint = parts.config_class.hint(unknown[0])
        raise ConfigError(f"from_checkpoint: unknown setting {unknown[0]!r}.{hint}")
    config = parts.config_class(**settings)
    if "device" not in changes:
        config = on_available_device(config)
    policy: P = parts.policy_class(parts.observation_space, parts.action_space, config)
    try:
        policy.set_state(state["worker"]["policies"][policy_id])
    except ConfigError as error:  # of a setting
        raise ConfigError(f"from_checkpoint: {error}") from error
    except DAMAGED as error:
        raise CheckpointError(
            f"{path}: the state of policy {policy_id!r} does not fit the policy: {error}"
        ) from error
    return policy


def _choose_policy(path: Path | str, descriptions: Mapping[str, Any], policy_id: str | None) -> str:
    if not isinstance(descriptions, Mapping) or not descriptions:
        raise CheckpointError(f"{path}: its manifest describes no policies")
    if policy_id is None:
        if len(descriptions) > 1:
            raise CheckpointError(
                f"{path}: it has the policies {sorted(descriptions)}: pass a policy_id"
            )
        (policy_id,) = descriptions
    if policy_id not in descriptions:
        raise CheckpointError(
            f"{path}: it has no policy {policy_id!r}, only {sorted(descriptions)}"
        )
    return policy_id


class _PolicyParts(NamedTuple):
    policy_class: Any
    config_class: Any
    observation_space: spaces.Space
    action_space: spaces.Space


def _known_classes(base: Any) -> dict[str, Any]:
    """Return import path -> class of the class that `from_checkpoint` is called on and its config.

    A class of a script is in the module `__main__` of the process that wrote the checkpoint.
    """
    classes = [base]
    if isinstance(getattr(base, "config_class", None), type):
        classes.append(base.config_class)
    known = {code_path(cls): cls for cls in classes}
    return {**{f"__main__:{cls.__qualname__}": cls for cls in classes}, **known}


def _import_parts(
    path: Path | str,
    policy_id: str,
    description: dict[str, Any],
    base: type[P],
    resolver: CodeResolver,
) -> _PolicyParts:
    """Return the classes and spaces of a policy description."""
    try:
        for code in (description["class"], description["config_class"]):
            module, _, name = str(code).partition(":")
            is_executed = module in sys.modules or code in _known_classes(base)
            if module.startswith(PLAN_MODULE) and not is_executed:
                raise CheckpointError(
                    f"the class {name} of policy {policy_id!r} is in a plan file: use "
                    f"Algorithm.from_checkpoint(…, trust=True).get_policy({policy_id!r})"
                )
        policy_class = resolver.resolve(description["class"], POLICY_CLASS)
        config_path = description["config_class"]
        config_class: Any = (
            resolver.resolve(config_path, SETTINGS_CLASS)
            if config_path
            else getattr(policy_class, "config_class", None)
        )
        for cls, expected in ((policy_class, base), (config_class, PolicyConfig)):
            if not (isinstance(cls, type) and issubclass(cls, expected)):
                raise TypeError(f"{cls!r} is not a {expected.__name__}")
        for name in ("observation_space", "action_space"):
            if description[name] is None:
                raise CheckpointError(
                    f"the {name} of policy {policy_id!r} could not be saved: only Box, Discrete, "
                    "MultiDiscrete and MultiBinary spaces can, and Tuple and Dict spaces of them "
                    "whose keys are strings or integers. Use Algorithm.from_checkpoint(…)"
                    ".get_policy(…)"
                )
        return _PolicyParts(
            policy_class,
            config_class,
            space_from_json(description["observation_space"]),
            space_from_json(description["action_space"]),
        )
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (ImportError, *DAMAGED) as error:
        remedy = "import its class and call its from_checkpoint()"
        if isinstance(error, ImportError):
            remedy += ", or Algorithm.from_checkpoint(…, trust=True).get_policy()"
        raise CheckpointError(
            f"{path}: policy {policy_id!r} cannot be created: {error} ({remedy})"
        ) from error
