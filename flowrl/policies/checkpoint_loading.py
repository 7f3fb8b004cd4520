"""What a checkpoint says of a policy besides its state: class, spaces and settings, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from flowrl.data.checkpoint import CheckpointError, read_checkpoint
from flowrl.policies.config import PolicyConfig
from flowrl.policies.policy_spec import PolicySpec
from flowrl.settings import ConfigError, Settings, imported, nearest

if TYPE_CHECKING:
    from flowrl.policies.policy import Policy

_CODE = "__code__"
_SETTINGS, _SPEC, _SPACE = "__settings__", "__policy_spec__", "__space__"
_TUPLE, _SET = "__tuple__", "__set__"


def describe(policy: Policy) -> dict[str, Any]:
    """A policy's class, spaces and settings as JSON.

    Settings that are code are kept as a path, where they can be imported; what cannot be kept is
    named in `left_out`.
    """
    kept, left_out = {}, []
    for name, value in policy.config.items():
        try:
            kept[name] = _plain(value)
        except TypeError:
            left_out.append(name)
    own = type(policy).config_class
    return {
        "class": _path(type(policy)),
        "config_class": None if type(policy.config) is own else _path(type(policy.config)),
        "observation_space": _space(policy.observation_space),
        "action_space": _space(policy.action_space),
        "config": kept,
        "left_out": left_out,
    }


def _merged(saved: Any, changes: Any, trust: bool) -> dict[str, Any]:
    """Saved settings with some changed; nested ones change only what they name."""
    made = {}
    for name, value in {**saved, **dict(changes)}.items():
        if name not in changes:
            made[name] = _coded(value, trust)
        elif isinstance(value, dict) and isinstance(saved.get(name), dict):
            made[name] = _merged(saved[name].get("values", saved[name]), value, trust)
        else:
            made[name] = value
    return made


def _space(space: spaces.Space) -> dict[str, Any] | None:
    try:
        return space_to_json(space)
    except TypeError:
        return None


def trusted(path: str, trust: bool | str) -> Any:
    """What lies at "module:name", if it is flowrl's own, or code from elsewhere is trusted.

    Args:
        trust: all code, none, or that of one module.

    Raises:
        CheckpointError: it is from elsewhere, and not to be trusted.
        ImportError, AttributeError: it is not there.
    """
    wanted = path.split(":")[0] == trust if isinstance(trust, str) else trust
    if not wanted and not path.startswith("flowrl."):
        raise CheckpointError(
            f"it names the code {path!r}: give trust=True if that may be imported (or import its "
            "class, and call from_checkpoint() of that one)"
        )
    return imported(path)


def config_to_json(config: Settings) -> tuple[dict[str, Any], list[str]]:
    """Settings as JSON, and the names of those that are code without an import path."""
    kept, left_out = {}, []
    for name, value in config.items():
        try:
            kept[name] = _plain(value)
        except TypeError:
            left_out.append(name)
    return {_SETTINGS: _path(type(config)), "values": kept}, left_out


def config_from_json(saved: dict[str, Any], changes: dict[str, Any], trust: bool | str) -> Any:
    """The settings that `config_to_json` gave, with some that are others.

    Raises:
        CheckpointError: code in them is not trusted, or cannot be imported.
        ConfigError: a change is none of a setting.
    """
    try:
        cls = trusted(saved[_SETTINGS], trust)
        values = {
            name: _coded(value, trust)
            for name, value in saved["values"].items()
            if name not in changes and name in cls.model_fields
        }
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"its settings cannot be made again: {error}") from error
    made = cls(**values)
    return made.updated(**changes) if changes else made


def policy_from_checkpoint(
    wanted: type[Policy], path: Path | str, policy_id: str | None, changes: Any, trust: bool
) -> Policy:
    """See Policy.from_checkpoint."""
    if not isinstance(changes or {}, Mapping):
        raise ConfigError(f"from_checkpoint: config is a mapping of changes, got {changes!r}")
    state, manifest = read_checkpoint(path, "worker")
    told, states = manifest.get("policies") or {}, state["worker"]["policies"]
    if not told:
        raise CheckpointError(f"{path}: it was written before checkpoints described their policies")
    if policy_id is None:
        if len(told) > 1:
            raise CheckpointError(f"{path}: it has the policies {sorted(told)}: say which one")
        (policy_id,) = told
    if policy_id not in told:
        raise CheckpointError(f"{path}: it has no policy {policy_id!r}, only {sorted(told)}")
    about = told[policy_id]
    try:
        policy_class = _class_of(about["class"], wanted, trust)
        own = about["config_class"]
        config_class: Any = (
            trusted(own, trust) if own else getattr(policy_class, "config_class", None)
        )
        for found, base in ((policy_class, _policy()), (config_class, PolicyConfig)):
            if not (isinstance(found, type) and issubclass(found, base)):
                raise TypeError(f"{found!r} is no {base.__name__}")
        if not issubclass(policy_class, wanted):
            raise TypeError(f"it is a {policy_class.__name__}, not a {wanted.__name__}")
        own_spaces = [space_from_json(about[f"{kind}_space"]) for kind in ("observation", "action")]
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (ImportError, AttributeError, TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path}: policy {policy_id!r} cannot be made from what is there: {error} (import its "
            "class, and call from_checkpoint() of that one)"
        ) from error
    try:
        settings = _merged(about["config"], changes or {}, trust)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: a setting of policy {policy_id!r} cannot be imported: {error}; give another "
            "by config=…"
        ) from error
    known = config_class.model_fields
    unknown = [str(name) for name in changes or {} if name not in known]
    if unknown:
        hint = nearest(unknown[0], list(known))
        raise ConfigError(f"from_checkpoint: unknown setting {unknown[0]!r}.{hint}")
    policy: Policy = policy_class(
        *own_spaces, config_class(**{k: v for k, v in settings.items() if k in known})
    )
    try:
        policy.set_state(states[policy_id])
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path}: the state of policy {policy_id!r} does not fit it: {error}"
            + (f" (settings that were left out: {about['left_out']})" if about["left_out"] else "")
        ) from error
    return policy


def _class_of(path: str, wanted: type[Policy], trust: bool) -> Any:
    """The class of a path; the one that is asked for, if it has the same name and the path leads
    nowhere here (a script's classes are in `__main__`)."""
    if path in (_path(wanted), f"__main__:{wanted.__qualname__}"):
        return wanted
    try:
        return trusted(path, trust)
    except (ImportError, AttributeError):
        if path.partition(":")[2] != wanted.__qualname__:
            raise
        return wanted


def _policy() -> type[Policy]:
    from flowrl.policies.policy import Policy

    return Policy


def _path(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def _plain(value: Any) -> Any:
    """A setting as JSON.

    Raises:
        TypeError: it is code that cannot be imported, or an object.
    """
    if isinstance(value, Settings):
        plain = {name: _plain(part) for name, part in value.items()}
        return {_SETTINGS: _path(type(value)), "values": plain}
    if isinstance(value, PolicySpec):
        return {_SPEC: {field: _plain(getattr(value, field)) for field in _FIELDS}}
    if isinstance(value, spaces.Space):
        return {_SPACE: space_to_json(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(part) for part in value]}
    if isinstance(value, (set, frozenset)):
        return {_SET: sorted(_plain(part) for part in value)}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(part) for key, part in value.items()}
    path = _path(value) if hasattr(value, "__qualname__") else ""
    try:
        if not path or imported(path) is not value:
            raise TypeError(f"{value!r} is no setting that can be saved")
    except (ImportError, AttributeError) as error:
        raise TypeError(f"{value!r} cannot be imported") from error
    return {_CODE: path}


_FIELDS = ("policy_class", "observation_space", "action_space", "config")


def _coded(value: Any, trust: bool | str) -> Any:
    if isinstance(value, list):
        return [_coded(part, trust) for part in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_CODE}:
        return trusted(value[_CODE], trust)
    if set(value) == {_SETTINGS, "values"}:
        return config_from_json(value, {}, trust)
    if set(value) == {_SPEC}:
        return PolicySpec(**{name: _coded(part, trust) for name, part in value[_SPEC].items()})
    if set(value) == {_SPACE}:
        return space_from_json(value[_SPACE])
    if set(value) == {_TUPLE}:
        return tuple(_coded(part, trust) for part in value[_TUPLE])
    if set(value) == {_SET}:
        return {_coded(part, trust) for part in value[_SET]}
    return {key: _coded(part, trust) for key, part in value.items()}


# -- spaces ----------------------------------------------------------------------------------------


def space_to_json(space: spaces.Space) -> dict[str, Any]:
    """A space as JSON.

    Raises:
        TypeError: it is none of gymnasium's fundamental spaces, or a Dict or Tuple of those.
    """
    if isinstance(space, spaces.Dict):
        return {"Dict": {key: space_to_json(part) for key, part in space.items()}}
    if isinstance(space, spaces.Tuple):
        return {"Tuple": [space_to_json(part) for part in space]}
    if isinstance(space, spaces.Discrete):
        return {"Discrete": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"MultiDiscrete": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, spaces.MultiBinary):
        return {"MultiBinary": list(space.shape)}
    if isinstance(space, spaces.Box):
        bounds = [_bound(bound) for bound in (space.low, space.high)]
        return {"Box": bounds, "shape": list(space.shape), "dtype": str(space.dtype)}
    raise TypeError(f"{space} cannot be saved")


def _bound(bound: np.ndarray) -> Any:
    """One number if they are all the same; strings, as JSON knows no infinity."""
    first = str(bound.flat[0]) if bound.size else "0"
    if bound.size and (bound == bound.flat[0]).all():
        return first
    return [str(number) for number in bound.reshape(-1)]


def space_from_json(saved: dict[str, Any]) -> spaces.Space:
    """What `space_to_json` gave, as a space again."""
    if "Dict" in saved:
        return spaces.Dict({key: space_from_json(part) for key, part in saved["Dict"].items()})
    if "Tuple" in saved:
        return spaces.Tuple([space_from_json(part) for part in saved["Tuple"]])
    if "Discrete" in saved:
        return spaces.Discrete(saved["Discrete"], start=saved["start"])
    if "MultiDiscrete" in saved:
        return spaces.MultiDiscrete(saved["MultiDiscrete"], start=saved["start"])
    if "MultiBinary" in saved:
        return spaces.MultiBinary(saved["MultiBinary"])
    dtype: Any = np.dtype(saved["dtype"])
    shape = tuple(saved["shape"])
    low, high = (_bound_from(bound, shape, dtype) for bound in saved["Box"])
    return spaces.Box(low, high, shape, dtype.type)


def _bound_from(bound: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if isinstance(bound, str):
        return np.full(shape, dtype.type(bound), dtype)
    return np.array([dtype.type(number) for number in bound], dtype).reshape(shape)
