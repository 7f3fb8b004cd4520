"""Algorithms by name: their classes are imported when they are asked for."""

from __future__ import annotations

from typing import Any

from flowrl.settings import ConfigError, imported, nearest

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
    """The names that there are."""
    return list(_ALGORITHMS)


def register_algorithm(name: str, algorithm: type) -> None:
    """Give an Algorithm class of one's own a name, for `flowrl train --run=` and Tune.

    Raises:
        ConfigError: the name is taken by another class.
    """
    known = _ALGORITHMS.get(name, algorithm)
    if known is not algorithm:
        raise ConfigError(f"register_algorithm: {name!r} is taken by {known}")
    _ALGORITHMS[name] = algorithm


def algorithm_class(name: str) -> Any:
    """The Algorithm class of a name, in capitals or not.

    Raises:
        ConfigError: there is none; the nearest is offered.
    """
    by_lower = {known.lower(): known for known in _ALGORITHMS}
    known = by_lower.get(name.lower()) if isinstance(name, str) else None
    if known is None:
        hint = nearest(str(name), algorithm_names())
        raise ConfigError(f"unknown algorithm {name!r}.{hint} Known: {', '.join(_ALGORITHMS)}")
    found = _ALGORITHMS[known]
    return imported(found) if isinstance(found, str) else found
