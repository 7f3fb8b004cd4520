"""Environments by name: the registry, the context passed to creators, and time limits."""

from __future__ import annotations

import copy
import inspect
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import (
    AtariPreprocessing,
    FilterObservation,
    MaxAndSkipObservation,
    TimeLimit,
)

from flowrl.envs import no_velocities
from flowrl.envs.atari import AtariSettings, has_old_form, is_atari, make_atari, register_atari
from flowrl.envs.time_limit import Horizon, get_max_steps, set_max_steps
from flowrl.errors import ConfigError, check_installed, install_hint
from flowrl.setting_values import nearest_name
from flowrl.settings import import_object

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
# first arguments of functions that receive the EnvContext even if they have a default
_CONTEXT_NAMES = ("context", "ctx", "config", "env_config", "env_context")
_VERSION = re.compile(r"-v\d+$")  # at the end of an env id
_PACKAGES_OF_MARL = ("mpe2", "pettingzoo")
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
        atari: preprocessing of Atari games that are created by their ids; None leaves it out.
    """

    def __init__(
        self,
        env_config: dict[str, Any] | None = None,
        worker_index: int = 0,
        vector_index: int = 0,
        num_workers: int = 0,
        atari: AtariSettings | None = None,
    ):
        super().__init__(env_config or {})
        self.worker_index = worker_index
        self.vector_index = vector_index
        self.num_workers = num_workers
        self.atari = atari


def register_env(name: str, creator: EnvCreator) -> None:
    """Register a class or a function under a name for the setting `env`. It is called like a class
    or a function that the setting is set to: with the EnvContext, or with `env_config` as keyword
    arguments.

    Raises:
        ConfigError: the name is not a string, or the creator is not callable.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"register_env: the name is a string, got {name!r}")
    if not callable(creator):
        raise ConfigError(f"register_env({name!r}): the creator must be callable, got {creator!r}")
    if isinstance(creator, type):
        _CREATORS[name] = partial(_make_of_class, creator)
    else:
        _CREATORS[name] = _creator_of_function(creator)


def ensure_registered(env_id: str) -> None:
    """Check that gymnasium's registry has an id; register those of known packages first.

    Raises:
        ConfigError: the id is unknown; the message suggests what to install or the nearest id.
    """
    if is_atari(env_id):
        register_atari(env_id)
    if env_id == no_velocities.ENV_ID:
        no_velocities.register()
    if env_id.startswith("MinAtar/") and env_id not in gym.registry:
        check_installed("minatar", f"env: the environment {env_id!r}", extra="minatar")
        from minatar.gym import register_envs

        register_envs()
    if env_id.startswith(("MiniGrid-", "BabyAI-")) and env_id not in gym.registry:
        check_installed("minigrid", f"env: the environment {env_id!r}", extra="minigrid")
        import minigrid

        gym.register_envs(minigrid)
    try:
        gym.spec(env_id)
    except gym.error.Error as error:
        if ":" in env_id:
            return  # creating it imports the module that registers it
        needs_extra = ""
        try:
            register_atari(f"ALE/{env_id}")
        except ConfigError:  # ale-py is not installed
            if has_old_form(env_id):
                needs_extra = f" {install_hint('An Atari game', 'atari')}."
        if env_id in gym.registry:  # a game by its old id, such as Breakout-v4
            return
        namespace = env_id.partition("/")[0] if "/" in env_id else None
        if f"ALE/{env_id}" in gym.registry:
            hint = f" Did you mean 'ALE/{env_id}'?"
        elif namespace in {None, *(spec.namespace for spec in gym.registry.values())}:
            hint = _similar_id(env_id) or needs_extra
        else:
            hint = (
                f" No imported package registers {namespace!r}: install the package, and name the "
                f'module that registers it, env="module:{env_id}".'
            )
        if not hint:
            hint = (
                " Pass the class of a custom environment itself, name it as module:Class, or "
                "register it with flowrl.envs.register_env(name, creator), for example in the plan "
                "file."
            )
        raise ConfigError(f"env: unknown environment {env_id!r}.{hint}") from error
    except (ImportError, ValueError) as error:
        raise ConfigError(f"env: cannot find {env_id!r}: {error}") from error


def _similar_id(env_id: str) -> str:
    """Return ` Did you mean 'x'?`, or an empty string; equal versions make no ids similar."""
    names = {_VERSION.sub("", name): name for name in [*gym.registry, *_CREATORS]}
    similar = nearest_name(_VERSION.sub("", env_id), [*names])
    if similar is None:
        return ""
    same_version = similar + "".join(_VERSION.findall(env_id))
    return f" Did you mean {same_version if same_version in gym.registry else names[similar]!r}?"


def _make_by_id(env_id: str, context: EnvContext) -> gym.Env:
    ensure_registered(env_id)
    try:
        if context.atari is not None and is_atari(env_id):
            return make_atari(env_id, context.atari, **context)
        env = gym.make(env_id, disable_env_checker=True, **context)
        spec = gym.registry.get(env_id.rpartition(":")[2])
        if spec is not None and str(spec.entry_point).startswith("minigrid."):
            # a network has no use for the text of the mission
            return FilterObservation(env, ["image", "direction"])
        return env
    except TypeError as error:
        texts = "unexpected keyword", "required positional", "multiple values for"
        if any(text in str(error) for text in texts):
            raise ConfigError(
                f"env_config: {env_id} does not accept {dict(context)}: {error}. If you did "
                "not set env_config, the plan sets it, for another environment."
            ) from error
        raise


def _make_with_keywords(function: Callable[..., Any], context: EnvContext) -> Any:
    """Call a class or a function with `env_config` as keyword arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some classes have none
        return function(**context)
    try:
        signature.bind(**context)
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(f"env_config: {name}{signature} does not accept it: {error}") from None
    try:
        return function(**context)
    except TypeError as error:  # of a function to which it passes **kwargs
        unknown = re.search(r"got an unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in context:
            raise
        raise ConfigError(f"env_config: {error}") from error


def _make_of_class(env_class: type, context: EnvContext) -> Any:
    """Call a class with the context, as RLlib does, or with `env_config` as keyword arguments."""
    if _takes_context(env_class) and not context.keys() & set(_CONTEXT_NAMES):
        return env_class(context)
    return _make_with_keywords(env_class, context)


def _takes_context(function: Callable[..., Any]) -> bool:
    """Return whether the first argument has a name of the EnvContext, as RLlib's environments."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have none
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return bool(parameters) and parameters[0].kind in kinds and parameters[0].name in _CONTEXT_NAMES


def _creator_of_function(function: Callable[..., Any]) -> EnvCreator:
    """Return a creator that calls a function with the context or with keyword arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return function
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in signature.parameters.values() if p.kind in kinds]
    required = [p for p in positional if p.default is p.empty]
    by_name = _takes_context(function)
    any_position = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    if by_name and len(required) <= 1:
        return function
    if required:
        return partial(_make_with_required_arguments, function, signature, len(required))
    if any_position and not positional:
        return function
    return partial(_make_with_keywords, function)


def _make_with_required_arguments(
    function: Callable[..., Any], signature: inspect.Signature, count: int, context: EnvContext
) -> Any:
    """Call a function with `env_config` as keyword arguments if they fit, else with the context.

    Raises:
        ConfigError: it has several required arguments, and `env_config` does not fit.
    """
    try:
        signature.bind(**context)
    except TypeError:
        if count == 1:
            return function(context)
        raise ConfigError(
            f"env: {getattr(function, '__name__', repr(function))}{signature} has "
            f"{count} required arguments, but env_config has {list(context)}: define it as "
            "make_env(context), which receives an EnvContext, or set env_config to its arguments"
        ) from None
    return _make_with_keywords(function, context)


def _check_copyable(env: Any) -> None:
    """Check that an environment is not an AsyncVectorEnv, which a failed copy would break.

    Raises:
        ConfigError: it is one, or a wrapper of one.
    """
    if isinstance(getattr(env, "unwrapped", None), gym.vector.AsyncVectorEnv):
        raise ConfigError(
            f"env: {env} cannot be copied, because its environments run in other processes: pass a "
            "function that creates it, or the environment's id with "
            'vectorization_mode="async", such as env="CartPole-v1"'
        )


def _copy_env(env: Any, context: EnvContext) -> Any:
    if context:
        raise ConfigError(
            f"env_config: {env} exists already and takes no arguments: pass its class or its id"
        )
    memo: dict[int, Any] = {}
    try:
        copied = copy.deepcopy(env, memo)
    except Exception as error:
        raise ConfigError(
            f"env: {env} cannot be copied: {error}: pass its class, its id, or a function that "
            "creates it"
        ) from error
    index = getattr(context, "worker_index", 0), getattr(context, "vector_index", 0)
    if any(index):
        _seed_generators(memo.values(), index)
    return copied


def _seed_generators(parts: Iterable[Any], index: tuple[int, int]) -> None:
    """Seed the random generators of a copy, which would draw the same numbers as those of the other
    copies: `reset(seed=…)` may not seed them.

    Args:
        parts: the objects that the copy consists of.
        index: what distinguishes it from the other copies.
    """
    for part in parts:
        if isinstance(part, np.random.Generator):
            bits = part.bit_generator
            seeds = [*part.integers(2**32, size=4).tolist(), *index]
            bits.state = type(bits)(np.random.SeedSequence(seeds)).state
        elif isinstance(part, np.random.RandomState):
            part.seed([*part.randint(2**31, size=4).tolist(), *index])
        elif isinstance(part, random.Random):
            part.seed(f"{part.random()} {index}")


def _check_methods(cls: type) -> None:
    """Check that a class has the methods of an environment.

    Raises:
        ConfigError: it does not define one.
    """
    if hasattr(cls, "__getattr__") or cls.__new__ is not object.__new__:
        return  # it may delegate them, or create something else
    for name in ("reset", "step"):
        method = getattr(cls, name, None)
        if method is None or method is getattr(gym.Env, name):
            raise ConfigError(
                f"env: the class {cls.__name__} does not define {name}(): an environment is a "
                "gymnasium.Env or a flowrl.envs.MultiAgentEnv with the methods reset() and step()"
            )


def _import_module(module: str, path: str) -> None:
    """Import the module of an environment.

    Raises:
        ConfigError: there is no such module, or its code raises an error.
    """
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _import_error(path, error) from error
        if module.partition(".")[0] in _PACKAGES_OF_MARL:
            raise ConfigError(install_hint(f"env: {path!r}", "marl")) from error
        raise ConfigError(
            f"env: cannot find {path!r}: there is no module {module!r}; start the program in the "
            f"folder that contains it ({_IMPORT_PATHS})"
        ) from error
    except Exception as error:
        raise _import_error(path, error) from error


def _import_error(path: str, error: Exception) -> ConfigError:
    """Return the error for a module whose code raises an error when it is imported."""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}, line {error.lineno}"
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}, line {frame.lineno}"
    return ConfigError(f"env: importing {path!r} failed: {type(error).__name__}: {error} ({place})")


def _creator_of_import(path: str) -> EnvCreator:
    """Return the creator of "module:Id", an id of gymnasium, or "module:name", a class, a function,
    or a name that the module passes to `register_env`.

    Raises:
        ConfigError: the module cannot be imported, or has no such environment.
    """
    module, _, name = path.partition(":")
    if "/" in module or module.endswith(".py") or not module.strip("."):
        named = module.removesuffix(".py").strip("./").replace("/", ".") or "module"
        raise ConfigError(f"env: {path!r} must name a module, not a file: {named}:{name}")
    _import_module(module, path)
    found: Any = None
    with suppress(gym.error.Error):
        gym.spec(name)
        return partial(_make_by_id, path)
    with suppress(AttributeError):
        found = import_object(path)
    if found is None and name in _CREATORS:
        return _CREATORS[name]
    if not callable(found):
        raise ConfigError(
            f"env: cannot find {path!r}: {module} neither registers the id {name!r} nor has a "
            f"class or function {name!r} ({_IMPORT_PATHS})"
        )
    return env_creator_for(found)


def env_creator_for(env: Any) -> EnvCreator:
    """Return the creator of an environment.

    Args:
        env: one of
            - a gymnasium env id or a registered name;
            - an import path "module:name" of a class or function;
            - a class, called with `env_config` as keyword arguments; or with the EnvContext if its
              first argument is named `context`, `ctx`, `config`, `env_config` or `env_context`, and
              `env_config` has no such key;
            - a function, called with the EnvContext if its first argument has one of these names or
              its only required argument is no entry of `env_config`; else with `env_config` as
              keyword arguments;
            - an environment, of which each sub-environment is a copy.

    Raises:
        ConfigError: the name is unknown (the message suggests the nearest one), the class lacks
            reset() or step(), or the environment is an AsyncVectorEnv.
    """
    if isinstance(env, str):
        if env in _CREATORS:
            return _CREATORS[env]
        if ":" in env:
            return _creator_of_import(env)
        ensure_registered(env)
        return partial(_make_by_id, env)
    if isinstance(env, type):
        _check_methods(env)
        return partial(_make_of_class, env)
    if hasattr(env, "reset") and (hasattr(env, "step") or hasattr(env, "agent_iter")):
        _check_copyable(env)
        return partial(_copy_env, env)
    if callable(env):
        return _creator_of_function(env)
    hint = ""
    if isinstance(env, ModuleType) and hasattr(env, "parallel_env"):  # a module of PettingZoo
        hint = ": pass its function parallel_env, or env for turns"
    raise ConfigError(
        f"env: expected an env id, a class, a function or an environment, got {env!r}{hint}"
    )


def check_imports_no_code(env: str, env_config: dict[str, Any]) -> None:
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


def creator_name(creator: EnvCreator) -> str:
    """Return the name of what a creator makes, for messages.

    >>> creator_name(env_creator_for("CartPole-v1"))
    'CartPole-v1'
    """
    env: Any = creator
    while isinstance(env, partial):
        env = env.args[0] if env.args else env.func
    return env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)


def apply_horizon(env: gym.Env, horizon: int | None, soft: bool) -> gym.Env:
    """Limit the episodes of an environment to `horizon` steps.

    Existing limits (gymnasium's TimeLimit wrapper, `spec.max_episode_steps`) are set to the
    horizon, or removed if a wrapper around them may take several steps at a time. A soft horizon
    does not end episodes: it only removes TimeLimits that are not longer, or that may count other
    steps.

    Returns:
        the environment, wrapped in a TimeLimit if it needs one.
    """
    if horizon is None:
        return env
    has_limit = skips = False
    layer: Any = env
    while isinstance(layer, gym.Wrapper):
        if not isinstance(layer, TimeLimit):
            skips = skips or _may_skip_steps(layer)
        elif skips or (soft and get_max_steps(layer) <= horizon):
            set_max_steps(layer, sys.maxsize)
        elif not soft:
            set_max_steps(layer, horizon)
            has_limit = True
        layer = layer.env
    if soft:
        return env
    if not has_limit:
        env = Horizon(env, horizon)
    spec = env.unwrapped.spec
    if spec is not None:
        spec.max_episode_steps = horizon
    return env


def _may_skip_steps(wrapper: gym.Wrapper) -> bool:
    """Return whether a step of a wrapper may be several steps of the environment in it."""
    kind = type(wrapper)
    is_gymnasium = kind.__module__.startswith("gymnasium.")
    return not is_gymnasium or issubclass(kind, (AtariPreprocessing, MaxAndSkipObservation))
