"""Settings and spaces as JSON, for checkpoints. Code is stored as an import path."""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from flowrl.data.checkpoint import DAMAGED, CheckpointError
from flowrl.errors import ConfigError
from flowrl.policies.code_references import (
    BASES,
    PLAN_MODULE,
    SETTINGS_CLASS,
    CodeResolver,
    UntrustedCodeError,
    code_path,
)
from flowrl.policies.policy_spec import PolicySpec, changed_specs, changes_specs
from flowrl.settings import Settings, import_object, within_record

# keys that mark encoded objects
_CODE = "__code__"
_SETTINGS, _SPEC, _SPACE = "__settings__", "__policy_spec__", "__space__"
_TUPLE, _ARRAY, _ITEMS = "__tuple__", "__array__", "__items__"
_SET, _FROZENSET = "__set__", "__frozenset__"
_MARKS = {_CODE, _SETTINGS, _SPEC, _SPACE, _TUPLE, _SET, _FROZENSET, _ARRAY, _ITEMS}

_MAX_BOX_SIZE = 1 << 28  # numbers in an observation or action

_SPEC_FIELDS = ("policy_class", "observation_space", "action_space", "config")


# -- settings --------------------------------------------------------------------------------------


def config_to_json(config: Settings) -> tuple[dict[str, Any], list[str]]:
    """Return settings as JSON, and the names of settings that cannot be stored.

    Those are objects, and code without an import path; a name such as `model.custom_model` is of a
    nested record. The JSON also names the settings that were set explicitly.
    """
    values, left_out = values_to_json(config)
    chosen = sorted(config.model_fields_set)
    return {_SETTINGS: code_path(type(config)), "values": values, "chosen": chosen}, left_out


def values_to_json(config: Settings) -> tuple[dict[str, Any], list[str]]:
    """Return the values of settings as JSON, and the names of settings that cannot be stored."""
    values, left_out = {}, []
    for name, value in config.items():
        if isinstance(value, Settings):
            values[name], inner = config_to_json(value)
            left_out += [f"{name}.{part}" for part in inner]
            continue
        try:
            values[name] = _encode_setting(name, value)
        except TypeError:
            left_out.append(name)
    return values, left_out


def config_from_json(
    saved: dict[str, Any], changes: Mapping[str, Any], resolver: CodeResolver
) -> Any:
    """Create settings from `config_to_json`.

    Args:
        saved: settings as JSON.
        changes: settings that replace saved ones; a mapping replaces only the settings that it
            names of a nested record.
        resolver: imports the code that the settings name.

    Raises:
        CheckpointError: code in the settings is not trusted, or cannot be imported.
        ConfigError: a change is not a valid setting.
    """
    try:
        cls = resolver.resolve(saved[_SETTINGS], SETTINGS_CLASS)
        if not (isinstance(cls, type) and issubclass(cls, Settings)):
            raise TypeError(f"{cls!r} is not a class of settings")
        changes = cls.canonical(dict(changes))
        config = cls(**changed_values(cls, saved["values"], changes, resolver))
    except CheckpointError:
        raise
    except (ImportError, *DAMAGED) as error:
        if isinstance(error, ConfigError) and changes:
            raise
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = ". Install it, or run the command in the folder that contains it"
        raise CheckpointError(f"its settings cannot be restored: {error}{hint}") from error
    # the others have the defaults of the class, which a policy may change
    config.model_fields_set.intersection_update({*saved["chosen"], *changes})
    return config


def changed_values(
    cls: type[Settings], saved: Any, changes: Mapping[str, Any], resolver: CodeResolver
) -> dict[str, Any]:
    """Decode the saved values of a class of settings and apply changes; see `config_from_json`."""
    values = dict(changes)
    for name, value in saved.items():
        if name not in cls.model_fields:
            continue
        change: Any = changes.get(name)
        if isinstance(change, Mapping) and isinstance(value, dict) and _SETTINGS in value:
            try:
                values[name] = config_from_json(value, change, resolver)
            except UntrustedCodeError as error:
                raise error.within(name) from None
            except ConfigError as error:
                raise ConfigError(within_record(name, str(error))) from None
        elif name not in changes:
            values[name] = decode_setting(name, value, resolver)
        elif name == "policies" and changes_specs(change):
            values[name] = changed_specs(decode_setting(name, value, resolver), change)
    return values


def is_given(settings: Mapping[str, Any], name: str) -> bool:
    """Return whether a mapping has a setting, such as `lr` or `model.custom_model`."""
    outer, _, inner = name.partition(".")
    if outer not in settings:
        return False
    value = settings[outer]
    return not inner or not isinstance(value, Mapping) or is_given(value, inner)


def missing_settings_error(names: list[str]) -> CheckpointError:
    """Return the error for settings that a checkpoint does not contain."""
    return CheckpointError(
        f"it does not contain the settings {names}; pass them again: "
        f"from_checkpoint(path, config={text_of_changes(names)})"
    )


def text_of_changes(names: Iterable[str]) -> str:
    """Return a mapping that sets these settings, as text: {'env': …, 'model': {'custom_model': …}}.

    Args:
        names: names of settings, such as `env` and `model.custom_model`.
    """
    parts: dict[str, list[str]] = {}
    for name in names:
        outer, _, inner = name.partition(".")
        parts.setdefault(outer, []).extend([inner] if inner else [])
    texts = [f"{n!r}: {text_of_changes(inner) if inner else '…'}" for n, inner in parts.items()]
    return f"{{{', '.join(texts)}}}"


def encode(value: Any) -> Any:
    """Return a setting as JSON.

    Raises:
        TypeError: the value is an object, or code without an import path.
    """
    if isinstance(value, Settings):
        record, left_out = config_to_json(value)
        if left_out:
            raise TypeError(f"{left_out} cannot be stored")
        return record
    if isinstance(value, PolicySpec):
        return {_SPEC: {name: _encode_setting(name, getattr(value, name)) for name in _SPEC_FIELDS}}
    if isinstance(value, spaces.Space):
        return {_SPACE: space_to_json(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [encode(part) for part in value]
    if isinstance(value, tuple):
        return {_TUPLE: [encode(part) for part in value]}
    if isinstance(value, (set, frozenset)):
        mark = _SET if isinstance(value, set) else _FROZENSET
        parts = [encode(part) for part in value]
        try:
            return {mark: sorted(parts)}
        except TypeError:  # some are encoded as dicts
            return {mark: sorted(parts, key=json.dumps)}
    if isinstance(value, dict) and all(isinstance(k, str) and k not in _MARKS for k in value):
        return {key: _encode_setting(key, part) for key, part in value.items()}
    if isinstance(value, dict):
        return {_ITEMS: [[encode(key), encode(part)] for key, part in value.items()]}
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        data = base64.b64encode(value.tobytes()).decode()
        return {_ARRAY: data, "dtype": value.dtype.str, "shape": list(value.shape)}
    path = code_path(value) if hasattr(value, "__qualname__") else ""
    try:
        if not path or import_object(path) is not value:
            raise TypeError(f"{value!r} cannot be stored")
    except (ImportError, AttributeError) as error:
        raise TypeError(f"{value!r} cannot be imported") from error
    return {_CODE: path}


def _encode_setting(name: str, value: Any) -> Any:
    """Return a setting as JSON; for the class of a network or policy in a plan file that has been
    executed again, its path, where the newest execution has the same class."""
    is_class = isinstance(value, type) and name in ("custom_model", "policy_class")
    if is_class and value.__module__.startswith(PLAN_MODULE):
        module = sys.modules.get(value.__module__)
        newest = {} if module is None else vars(module)
        is_newest = any(one is value for one in newest.values())
        if not is_newest and isinstance(newest.get(value.__qualname__), type):
            return {_CODE: code_path(value)}
    return encode(value)


def decode_setting(
    name: str, value: Any, resolver: CodeResolver, inherited: str | None = None
) -> Any:
    """Return the value of a setting from `encode`; see `decode`.

    Args:
        name: name of the setting.
        value: its value as JSON.
        resolver: imports the code that the value names.
        inherited: see `base` of `decode`; used if the setting itself takes no class.
    """
    base = BASES.get(name, inherited)
    try:
        decoded = decode(value, resolver, base)
        if name == "custom_model" and isinstance(decoded, str) and ":" in decoded:
            return resolver.resolve(str(decoded), base)  # a path that building the model imports
        return decoded
    except UntrustedCodeError as error:
        raise error.within(name) from None


def decode(value: Any, resolver: CodeResolver, base: str | None = None) -> Any:
    """Return a value from `encode`.

    Args:
        value: the value as JSON.
        resolver: imports the code that the value names.
        base: see `CodeResolver.resolve`.

    Raises:
        CheckpointError: it is code that is not trusted.
        ImportError, AttributeError: it is code that does not exist.
    """
    if isinstance(value, list):
        return [decode(part, resolver, base) for part in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_CODE}:
        return resolver.resolve(value[_CODE], base)
    if set(value) == {_SETTINGS, "values", "chosen"}:
        return config_from_json(value, {}, resolver)
    if set(value) == {_SPEC}:
        parts = {
            name: decode_setting(name, part, resolver, base) for name, part in value[_SPEC].items()
        }
        return PolicySpec(**parts)
    if set(value) == {_SPACE}:
        return space_from_json(value[_SPACE])
    if set(value) == {_TUPLE}:
        return tuple(decode(part, resolver, base) for part in value[_TUPLE])
    if set(value) == {_ARRAY, "dtype", "shape"}:
        array = np.frombuffer(base64.b64decode(value[_ARRAY]), value["dtype"])
        return array.reshape(value["shape"]).copy()[()]  # a number if it has no dimensions
    if set(value) == {_ITEMS}:
        return {
            key: decode_setting(str(key), part, resolver, base)
            for key, part in ((decode(k, resolver), part) for k, part in value[_ITEMS])
        }
    if set(value) == {_SET}:
        return {decode(part, resolver, base) for part in value[_SET]}
    if set(value) == {_FROZENSET}:
        return frozenset(decode(part, resolver, base) for part in value[_FROZENSET])
    return {key: decode_setting(key, part, resolver, base) for key, part in value.items()}


# -- spaces ----------------------------------------------------------------------------------------


def space_to_json(space: spaces.Space) -> dict[str, Any]:
    """Return a space as JSON.

    Raises:
        TypeError: it is not a fundamental space of Gymnasium, or a Dict or Tuple of those.
    """
    if isinstance(space, spaces.Dict):
        return {"Dict": [[_key_to_json(key), space_to_json(part)] for key, part in space.items()]}
    if isinstance(space, spaces.Tuple):
        return {"Tuple": [space_to_json(part) for part in space]}
    if isinstance(space, spaces.Discrete):
        dtype = str(space.dtype)
        return {"Discrete": int(space.n), "start": int(space.start), "dtype": dtype}
    if isinstance(space, spaces.MultiDiscrete):
        start, dtype = space.start.tolist(), str(space.dtype)
        return {"MultiDiscrete": space.nvec.tolist(), "start": start, "dtype": dtype}
    if isinstance(space, spaces.MultiBinary):
        return {"MultiBinary": space.n if isinstance(space.n, int) else list(space.shape)}
    if isinstance(space, spaces.Box):
        bounds = [_bound_to_json(bound) for bound in (space.low, space.high)]
        return {"Box": bounds, "shape": list(space.shape), "dtype": str(space.dtype)}
    raise TypeError(f"{space} cannot be stored")


def _key_to_json(key: Any) -> str | int:
    if isinstance(key, (str, int)):
        return key
    raise TypeError(f"the key {key!r} of a Dict space cannot be stored: use strings or integers")


def _bound_to_json(bound: np.ndarray) -> Any:
    """Return numbers as strings (JSON has no infinity), or one string if they are all equal."""
    first = str(bound.flat[0]) if bound.size else "0"
    if bound.size and (bound == bound.flat[0]).all():
        return first
    return [str(number) for number in bound.reshape(-1)]


def space_from_json(saved: dict[str, Any]) -> spaces.Space:
    """Create a space from `space_to_json`."""
    if "Dict" in saved:
        return spaces.Dict({key: space_from_json(part) for key, part in saved["Dict"]})
    if "Tuple" in saved:
        return spaces.Tuple([space_from_json(part) for part in saved["Tuple"]])
    if "MultiBinary" in saved:
        return spaces.MultiBinary(saved["MultiBinary"])
    dtype: Any = np.dtype(saved["dtype"])
    if "Discrete" in saved:
        return spaces.Discrete(saved["Discrete"], start=saved["start"], dtype=dtype.type)
    if "MultiDiscrete" in saved:
        return spaces.MultiDiscrete(saved["MultiDiscrete"], dtype.type, start=saved["start"])
    shape = tuple(saved["shape"])
    if math.prod(shape) > _MAX_BOX_SIZE:
        raise ValueError(f"a Box of shape {list(shape)} is too large")
    low, high = (_bound_from_json(bound, shape, dtype) for bound in saved["Box"])
    return spaces.Box(low, high, shape, dtype.type)


def _bound_from_json(bound: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    def number(text: str) -> Any:
        return text == "True" if dtype.kind == "b" else dtype.type(text)

    if isinstance(bound, str):
        return np.full(shape, number(bound), dtype)
    return np.array([number(text) for text in bound], dtype).reshape(shape)
