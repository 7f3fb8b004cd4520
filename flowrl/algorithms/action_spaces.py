"""The error for an algorithm that does not support an action space."""

from __future__ import annotations

from gymnasium import spaces

from flowrl.errors import ConfigError


def wrong_action_space(algorithm: str, supported: str, space: spaces.Space) -> ConfigError:
    """Return an error that names algorithms for the space.

    Args:
        algorithm: name of the algorithm.
        supported: the spaces that it supports.
        space: the action space.
    """
    others = "PPO"
    if isinstance(space, spaces.Box) and space.dtype.kind != "f":
        return ConfigError(
            f"{algorithm} is for {supported} actions, not {space}: describe the integers by "
            "another space, Discrete or MultiDiscrete, in the environment"
        )
    if algorithm == "CQL":
        others = "BC or MARWIL"
    elif isinstance(space, spaces.Box) and space.is_bounded() and space.dtype.kind == "f":
        others = "PPO, SAC or TD3"
    elif isinstance(space, spaces.Discrete):
        others = "PPO, DQN or SAC"
    return ConfigError(f"{algorithm} is for {supported} actions, not {space}: use {others}")
