"""Environments by name: creators, what they are told, and time limits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import TimeLimit

from flowrl.settings import ConfigError, nearest

EnvCreator = Callable[["EnvContext"], Any]

NO_ENVIRONMENT = (
    "env: there are only the spaces of recorded experience, and no environment to sample or to "
    'evaluate in: set env, or evaluation_config={"env": …}'
)

_CREATORS: dict[str, EnvCreator] = {}


class NoEnvironment(gym.Env):
    """The spaces of recorded experience; nothing can be sampled in it.

    Args:
        observation_space, action_space: of an agent.
    """

    def __init__(self, observation_space: Any, action_space: Any, context: Any = None):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, **_: Any) -> Any:
        """Refuse.

        Raises:
            ConfigError
        """
        raise ConfigError(NO_ENVIRONMENT)

    def step(self, action: Any) -> Any:
        """Refuse, as `reset` does."""
        raise ConfigError(NO_ENVIRONMENT)


class EnvContext(dict[str, Any]):
    """The `env_config` given to an env creator, with the place that the environment is for.

    Attributes:
        worker_index: 0 in process, 1 … num_workers on actors.
        vector_index: which of the worker's environments, from 0.
        num_workers: workers on actors.
    """

    def __init__(
        self,
        env_config: dict[str, Any] | None = None,
        worker_index: int = 0,
        vector_index: int = 0,
        num_workers: int = 0,
    ):
        super().__init__(env_config or {})
        self.worker_index = worker_index
        self.vector_index = vector_index
        self.num_workers = num_workers


def register_env(name: str, creator: EnvCreator) -> None:
    """Let `env=name` mean the environment that `creator(env_context)` makes."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"register_env: the name is a string, got {name!r}")
    if not callable(creator):
        raise ConfigError(f"register_env({name!r}): the creator must be callable, got {creator!r}")
    _CREATORS[name] = creator


def _make_registered(env_id: str, context: EnvContext) -> gym.Env:
    try:
        return gym.make(env_id, disable_env_checker=True, **context)
    except TypeError as error:
        if context and "unexpected keyword" in str(error):
            raise ConfigError(f"env_config: {env_id} does not take it: {error}") from error
        raise


def _make_class(cls: type, context: EnvContext) -> Any:
    return cls(**context)


def env_creator_for(env: str | type | EnvCreator) -> EnvCreator:
    """The creator for an env id, a registered name, a class (called with `env_config` as keyword
    arguments) or a creator.

    Raises:
        ConfigError: unknown name; the nearest is offered.
    """
    if isinstance(env, str):
        if env in _CREATORS:
            return _CREATORS[env]
        try:
            gym.spec(env)
        except gym.error.Error as error:
            if ":" not in env:
                near = nearest(env, [*_CREATORS, *gym.registry])
                near = near or (
                    " One of your own is made known by flowrl.sampling.register_env(name, "
                    "creator), for example in the plan file."
                )
                raise ConfigError(f"env: unknown environment {env!r}.{near}") from error
        except (ImportError, ValueError) as error:
            raise ConfigError(f"env: cannot find {env!r}: {error}") from error
        return partial(_make_registered, env)
    if isinstance(env, type):
        return partial(_make_class, env)
    if callable(env):
        return env
    raise ConfigError(f"env: an env id, a class or a creator is needed, got {env!r}")


def env_id_of(creator: EnvCreator) -> str | None:
    """The gymnasium id that a creator makes; None where it is none's."""
    env_id = creator.args[0] if isinstance(creator, partial) and creator.args else None
    return env_id if isinstance(env_id, str) else None


def with_horizon(env: gym.Env, horizon: int | None, soft: bool) -> gym.Env:
    """The environment with its episodes limited to `horizon` steps.

    A limit of its own (gymnasium's TimeLimit, `spec.max_episode_steps`) is set to the horizon. A
    soft horizon ends no episode: it only lifts a limit that would end one before.
    """
    if horizon is None:
        return env
    limits: list[TimeLimit] = []
    layer: Any = env
    while isinstance(layer, gym.Wrapper):
        if isinstance(layer, TimeLimit):
            limits.append(layer)
        layer = layer.env
    for limit in limits:
        if not soft:
            limit._max_episode_steps = horizon
        elif limit._max_episode_steps < horizon:
            limit._max_episode_steps = sys.maxsize
    if soft:
        return env
    if not limits:
        env = TimeLimit(env, horizon)
    spec = env.unwrapped.spec
    if spec is not None:
        spec.max_episode_steps = horizon
    return env
