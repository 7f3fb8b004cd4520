"""Environments by name: the registry, the context passed to creators, and time limits."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import TimeLimit

from flowrl.envs.time_limit import get_max_steps, set_max_steps
from flowrl.settings import ConfigError, imported, nearest

EnvCreator = Callable[["EnvContext"], Any]

NO_ENV_MESSAGE = (
    "env: only the spaces of recorded experience are set, there is no environment to sample or to "
    'evaluate in: set env, or evaluation_config={"env": ...}'
)

_IMPORT_PATHS = (
    "module:Id names an id that the module registers with gymnasium, module:Class a class or "
    "function of the module"
)

_CREATORS: dict[str, EnvCreator] = {}
# environments whose arguments import no code
_KNOWN_ENTRY_POINTS = ("gymnasium.envs.", "ale_py.")


class SpacesOnlyEnv(gym.Env):
    """A placeholder with the spaces of recorded experience; it cannot be stepped.

    Args:
        observation_space, action_space: of the agent.
        context: ignored; makes `partial(SpacesOnlyEnv, ...)` an env creator.
    """

    def __init__(self, observation_space: Any, action_space: Any, context: Any = None):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, **_: Any) -> Any:
        """Raise ConfigError: there is no environment."""
        raise ConfigError(NO_ENV_MESSAGE)

    def step(self, action: Any) -> Any:
        """Raise ConfigError: there is no environment."""
        raise ConfigError(NO_ENV_MESSAGE)


class EnvContext(dict[str, Any]):
    """The `env_config` passed to an env creator, with the indices of worker and environment.

    Attributes:
        worker_index: 0 for the local worker, 1 ... num_workers on actors.
        vector_index: index of the environment within its worker, from 0.
        num_workers: number of workers on actors.
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
    """Register an env creator: the setting `env=name` then calls `creator(env_context)`.

    Raises:
        ConfigError: the name is not a string, or the creator is not callable.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"register_env: the name is a string, got {name!r}")
    if not callable(creator):
        raise ConfigError(f"register_env({name!r}): the creator must be callable, got {creator!r}")
    _CREATORS[name] = creator


def _make_by_id(env_id: str, context: EnvContext) -> gym.Env:
    try:
        return gym.make(env_id, disable_env_checker=True, **context)
    except TypeError as error:
        if "unexpected keyword" in str(error) or "required positional" in str(error):
            raise ConfigError(f"env_config: {env_id} does not accept it: {error}") from error
        raise


def _make_class(cls: type, context: EnvContext) -> Any:
    try:
        signature = inspect.signature(cls)
    except ValueError:  # some classes have none
        return cls(**context)
    try:
        signature.bind(**context)
    except TypeError as error:
        raise ConfigError(
            f"env_config: {cls.__name__}{signature} does not accept it: {error}"
        ) from None
    return cls(**context)


def _copy_env(env: Any, context: EnvContext) -> Any:
    if context:
        raise ConfigError(
            f"env_config: {env} exists already and takes no arguments: pass its class or its id"
        )
    try:
        return copy.deepcopy(env)
    except Exception as error:
        raise ConfigError(
            f"env: {env} cannot be copied: {error}: pass its class, its id, or a function that "
            "creates it"
        ) from error


def _creator_of_import(path: str) -> EnvCreator:
    """Return the creator of "module:Id", an id of gymnasium, or "module:name", a class or function.

    Raises:
        ConfigError: the module cannot be imported, or has no such environment.
    """
    module, _, name = path.partition(":")
    try:
        import_module(module)
        with suppress(gym.error.Error):
            gym.spec(name)
            return partial(_make_by_id, path)
        found = imported(path)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"env: cannot find {path!r}: {error} ({_IMPORT_PATHS})") from error
    except AttributeError:
        found = None
    if not callable(found):
        raise ConfigError(
            f"env: cannot find {path!r}: {module} neither registers the id {name!r} nor has a "
            f"class or function {name!r} ({_IMPORT_PATHS})"
        )
    return env_creator_for(found)


def env_creator_for(env: Any) -> EnvCreator:
    """Return the creator of an environment.

    Args:
        env: a gymnasium env id, a registered name, an import path "module:name" of a class or
            creator, a class (called with `env_config` as keyword arguments), a creator, which is
            returned as it is, or an environment, of which each sub-environment is a copy.

    Raises:
        ConfigError: the name is unknown; the message suggests the nearest one.
    """
    if isinstance(env, str):
        if env in _CREATORS:
            return _CREATORS[env]
        if ":" in env:
            return _creator_of_import(env)
        try:
            gym.spec(env)
        except gym.error.Error as error:
            if env.startswith("ALE/"):
                raise ConfigError(
                    f"env: {env} is an Atari environment: pip install ale-py, and name it as "
                    f"ale_py:{env}"
                ) from error
            hint = nearest(env, [*_CREATORS, *gym.registry]) or (
                " Name a class or function as module:Class, or register a custom environment with "
                "flowrl.envs.register_env(name, creator), for example in the plan file."
            )
            raise ConfigError(f"env: unknown environment {env!r}.{hint}") from error
        except (ImportError, ValueError) as error:
            raise ConfigError(f"env: cannot find {env!r}: {error}") from error
        return partial(_make_by_id, env)
    if isinstance(env, type):
        return partial(_make_class, env)
    if hasattr(env, "reset") and (hasattr(env, "step") or hasattr(env, "agent_iter")):
        return partial(_copy_env, env)
    if callable(env):
        return env
    raise ConfigError(f"env: expected an env id, a class, a creator or an environment, got {env!r}")


def check_registered(env: str, env_config: dict[str, Any]) -> None:
    """Check that creating an environment named in a file imports nothing that the file chooses.

    Args:
        env: a name of `register_env`, or an id of gymnasium's registry.
        env_config: its arguments in the file.

    Raises:
        ConfigError: it is an id "module:Id", which imports the module; or there are arguments and
            the environment is from another package, which may import what an argument names.
    """
    if env in _CREATORS:
        return
    if ":" in env:
        raise ConfigError(env)
    with suppress(gym.error.Error):  # unknown ids are reported elsewhere
        entry_point = str(gym.spec(env).entry_point)
        if env_config and not entry_point.startswith(_KNOWN_ENTRY_POINTS):
            raise ConfigError(f"{env} with the env_config {env_config}")


def env_id_of(creator: EnvCreator) -> str | None:
    """Return the gymnasium id that a creator makes, or None if it does not use `gym.make`."""
    if isinstance(creator, partial) and creator.func is _make_by_id:
        return str(creator.args[0])
    return None


def apply_horizon(env: gym.Env, horizon: int | None, soft: bool) -> gym.Env:
    """Limit the episodes of an environment to `horizon` steps.

    Existing limits (gymnasium's TimeLimit wrapper, `spec.max_episode_steps`) are set to the
    horizon. A soft horizon does not end episodes: it only removes shorter TimeLimits.

    Returns:
        the environment, wrapped in a TimeLimit if it needs one.
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
            set_max_steps(limit, horizon)
        elif get_max_steps(limit) < horizon:
            set_max_steps(limit, sys.maxsize)
    if soft:
        return env
    if not limits:
        env = TimeLimit(env, horizon)
    spec = env.unwrapped.spec
    if spec is not None:
        spec.max_episode_steps = horizon
    return env
