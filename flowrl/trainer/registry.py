"""Algorithm classes by name. The shipped ones are imported on first use."""

from __future__ import annotations

from typing import Any

from flowrl.errors import ConfigError
from flowrl.setting_aliases import setting_hint
from flowrl.setting_values import nearest
from flowrl.settings import import_object

# name -> class, or the import path of a shipped class
_ALGORITHMS: dict[str, Any] = {
    "PPO": "flowrl.algorithms.ppo:PPO",
    "A2C": "flowrl.algorithms.a2c:A2C",
    "A3C": "flowrl.algorithms.a3c:A3C",
    "IMPALA": "flowrl.algorithms.impala:IMPALA",
    "APPO": "flowrl.algorithms.appo:APPO",
    "APEX": "flowrl.algorithms.apex:APEX",
    "DDPPO": "flowrl.algorithms.ddppo:DDPPO",
    "DQN": "flowrl.algorithms.dqn:DQN",
    "R2D2": "flowrl.algorithms.r2d2:R2D2",
    "CQL": "flowrl.algorithms.cql:CQL",
    "SAC": "flowrl.algorithms.sac:SAC",
    "SimpleQ": "flowrl.algorithms.simple_q:SimpleQ",
    "TD3": "flowrl.algorithms.td3:TD3",
    "BC": "flowrl.algorithms.marwil:BC",
    "MARWIL": "flowrl.algorithms.marwil:MARWIL",
    "DDPG": "flowrl.algorithms.td3:DDPG",
}


def algorithm_names() -> list[str]:
    """Return the names of all registered algorithms."""
    return list(_ALGORITHMS)


def algorithm_path(name: str) -> str:
    """Return the import path "module:Class" of a registered algorithm."""
    return _path_of(_ALGORITHMS[name])


def _path_of(algorithm: Any) -> str:
    """Return the import path of a class, which may be given as its path."""
    if isinstance(algorithm, str):
        return algorithm
    return f"{algorithm.__module__}:{algorithm.__qualname__}"


def register_algorithm(name: str, algorithm: type) -> None:
    """Register an Algorithm class under a name, for `flowrl train --run=`.

    For Ray Tune, use `flowrl.tune.trainable(algorithm)`.

    Raises:
        ConfigError: the name belongs to another class; upper and lower case are the same.
    """
    known = next((other for other in _ALGORITHMS if other.lower() == name.lower()), name)
    registered = _path_of(_ALGORITHMS.get(known, algorithm))
    if registered != _path_of(algorithm):
        raise ConfigError(
            f"register_algorithm: {name!r} is already registered for {registered}; upper and lower "
            "case are the same"
        )
    _ALGORITHMS[known] = algorithm


def algorithm_class(name: str) -> Any:
    """Return the Algorithm class registered under a name, ignoring case.

    Raises:
        ConfigError: the name is not registered; the message suggests the nearest name.
    """
    by_lowercase_name = {registered.lower(): registered for registered in _ALGORITHMS}
    registered = by_lowercase_name.get(name.lower()) if isinstance(name, str) else None
    if registered is None:
        hint = nearest(str(name), algorithm_names())
        raise ConfigError(f"unknown algorithm {name!r}.{hint} Known: {', '.join(_ALGORITHMS)}")
    algorithm = _ALGORITHMS[registered]
    return import_object(algorithm) if isinstance(algorithm, str) else algorithm


def algorithms_with(name: str) -> str:
    """Return a sentence about the algorithms that have a setting, with a space before it, or "".

    Args:
        name: the setting; also its name in another library.
    """
    fields = {n: algorithm_class(n).config_class.model_fields for n in algorithm_names()}
    owners = [n for n, settings in fields.items() if name in settings]
    if owners:
        return f" It is a setting of {', '.join(owners)}."
    owners = [n for n, settings in fields.items() if setting_hint(name, settings)]
    return f" Only {', '.join(owners)} have such a setting." if owners else ""
