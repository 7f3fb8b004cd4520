"""Environments: names and creators, and how many copies of one are stepped at once.

A stepper writes what a step gives straight into the collector's arrays. Whatever the underlying
vector environment does at an episode's end, a stepper says the same three things: the observation
to act on next, the final observation of every episode that ended, and which rows were real steps
(an environment in NEXT_STEP mode spends one call per episode on the reset).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from flowrl.policies.config import ConfigError, nearest
from flowrl.seeding import derive_seed

VectorizationMode = Literal["flowrl", "sync", "async", "vector_entry_point"]
EnvCreator = Callable[["EnvContext"], Any]

_CREATORS: dict[str, EnvCreator] = {}

log = logging.getLogger("flowrl")


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


class Stepper(Protocol):
    """N environments stepped together."""

    num_envs: int
    observation_space: spaces.Space
    action_space: spaces.Space

    def reset(self, observations: np.ndarray) -> None:
        """Start all episodes; write the first observations [N, …]."""

    def step(
        self,
        actions: np.ndarray,
        observations: np.ndarray,
        rewards: np.ndarray,
        terminateds: np.ndarray,
        truncateds: np.ndarray,
    ) -> Step:
        """Step every environment with actions [N, …].

        Writes the observations to act on next [N, …], the rewards [N] and, where true, the flags
        [N] (the caller gives them false).
        """

    def close(self) -> None:
        """Close the environments."""


class Step:
    """What a step says besides the arrays.

    ended: indices of the environments whose episode ended.
    final: their final observations.
    skipped: env indices whose row is no step but a reset.
    infos: one dict per environment.
    """

    __slots__ = ("ended", "final", "infos", "skipped")

    def __init__(self) -> None:
        self.ended: Any = []
        self.final: Any = []
        self.skipped: Any = ()
        self.infos: list[dict[str, Any]] = []


class DirectStepper:
    """flowrl's own vectoriser: calls `env.step` of each environment and resets it at once.

    Args:
        make: environment number i.
        num_envs: how many.
        seed: each environment's first reset gets a seed derived from it; None for none.
    """

    def __init__(self, make: Callable[[int], gym.Env], num_envs: int, seed: int | None):
        self.envs = [make(0)]
        self.num_envs = num_envs
        self.observation_space = self.envs[0].observation_space
        self.action_space = self.envs[0].action_space
        self._make = make
        self._seed = seed
        self._checked = False

    def reset(self, observations: np.ndarray) -> None:
        for i in range(len(self.envs), self.num_envs):
            self.envs.append(self._make(i))
            spaces_of = self.envs[i].observation_space, self.envs[i].action_space
            if spaces_of != (self.observation_space, self.action_space):
                raise ConfigError(
                    f"env: sub-environment {i} has the spaces {spaces_of}, sub-environment 0 has "
                    f"{(self.observation_space, self.action_space)}"
                )
        self._checked = False
        for i, env in enumerate(self.envs):
            try:
                observation, _ = env.reset(seed=derive_seed(self._seed, "env", i))
                self._check_observation(observation)
                observations[i] = observation
            except Exception as error:
                error.add_note(f"raised by reset() of sub-environment {i}")
                raise
        self._seed = None  # a later reset continues the environments' own random streams

    def step(
        self,
        actions: np.ndarray,
        observations: np.ndarray,
        rewards: np.ndarray,
        terminateds: np.ndarray,
        truncateds: np.ndarray,
    ) -> Step:
        result = Step()
        infos, ended, final = result.infos, [], []
        # Python scalars: environments check and use them faster than numpy's
        given = actions.tolist() if actions.ndim == 1 else actions
        i = 0
        try:
            for i, env in enumerate(self.envs):
                observation, reward, terminated, truncated, info = env.step(given[i])
                if not self._checked:
                    self._check_step(observation, reward, terminated, truncated)
                infos.append(info)
                rewards[i] = reward
                if terminated or truncated:
                    terminateds[i] = terminated
                    truncateds[i] = truncated
                    ended.append(i)
                    final.append(np.array(observation))
                    observation, _ = env.reset()
                observations[i] = observation
        except Exception as error:
            error.add_note(f"raised by sub-environment {i}")
            raise
        result.ended, result.final = ended, final
        self._checked = True
        return result

    def _check_observation(self, observation: Any) -> None:
        """Once per reset of all: numpy would broadcast and cast what does not fit."""
        space, array = self.observation_space, np.asarray(observation)
        dtype: Any = space.dtype
        if array.shape != space.shape or not np.can_cast(array.dtype, dtype, "same_kind"):
            raise ConfigError(
                f"env: an observation does not fit the space {space}: it has shape {array.shape} "
                f"and dtype {array.dtype}"
            )

    def _check_step(self, observation: Any, reward: Any, *flags: Any) -> None:
        """Of the first step of every environment."""
        self._check_observation(observation)
        for flag in flags:
            if not isinstance(flag, (bool, np.bool_)):
                raise ConfigError(f"env: terminated and truncated are bools, step() gave {flag!r}")
        if isinstance(reward, str) or np.ndim(reward) != 0:
            raise ConfigError(f"env: the reward is one number, step() gave {reward!r}")

    def close(self) -> None:
        for i, env in enumerate(self.envs):
            try:
                env.close()
            except Exception as error:
                log.warning("close() of sub-environment %d raised %r", i, error)


class VectorStepper:
    """A gymnasium VectorEnv, in whichever autoreset mode it is.

    Raises:
        ConfigError: the environment does not say its mode in `metadata["autoreset_mode"]`.
    """

    def __init__(self, env: VectorEnv, seed: int | None):
        self.env = env
        self.num_envs = env.num_envs
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self._seed = seed
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise ConfigError(
                f"env: {type(env).__name__} does not say how it resets: set "
                'metadata["autoreset_mode"] to a gymnasium.vector.AutoresetMode'
            )
        self.mode = mode
        self._resetting: np.ndarray = np.zeros(self.num_envs, bool)

    def reset(self, observations: np.ndarray) -> None:
        seed: Any = derive_seed(self._seed, "env")
        if self._seed is not None and isinstance(self.env, (SyncVectorEnv, AsyncVectorEnv)):
            seed = [derive_seed(self._seed, "env", i) for i in range(self.num_envs)]
        observations[:], _ = self.env.reset(seed=seed)
        self._seed = None
        self._resetting[:] = False

    def step(
        self,
        actions: np.ndarray,
        observations: np.ndarray,
        rewards: np.ndarray,
        terminateds: np.ndarray,
        truncateds: np.ndarray,
    ) -> Step:
        result = Step()
        after, rewards[:], terminateds[:], truncateds[:], infos = self.env.step(actions)
        done = terminateds | truncateds
        if done.any():
            ended = result.ended = np.flatnonzero(done)
            same_step = self.mode is AutoresetMode.SAME_STEP
            result.final = [infos["final_obs"][i] for i in ended] if same_step else after[ended]
        if self.mode is AutoresetMode.DISABLED and len(result.ended):
            after, _ = self.env.reset(options={"reset_mask": done})
        if self.mode is AutoresetMode.NEXT_STEP:
            if self._resetting.any():
                result.skipped = np.flatnonzero(self._resetting)
            self._resetting = done
        observations[:] = after
        result.infos = [_info_of(infos, i) for i in range(self.num_envs)] if infos else []
        return result

    def close(self) -> None:
        self.env.close()


def _info_of(infos: dict[str, Any], index: int) -> dict[str, Any]:
    """One environment's part of a vector environment's infos."""
    return {
        key: _info_of(value, index) if isinstance(value, dict) else value[index]
        for key, value in infos.items()
        if not key.startswith("_") and infos.get(f"_{key}", np.ones(index + 1, bool))[index]
    }


def make_stepper(
    creator: EnvCreator,
    env_config: dict[str, Any],
    num_envs: int,
    worker_index: int = 0,
    num_workers: int = 0,
    seed: int | None = None,
    vectorization_mode: VectorizationMode = "flowrl",
) -> Stepper:
    """`num_envs` environments of one worker behind a stepper.

    Raises:
        ConfigError: the creator gives no gymnasium environment, or has no vectorised form.
    """

    def make(vector_index: int) -> Any:
        try:
            return creator(EnvContext(env_config, worker_index, vector_index, num_workers))
        except Exception as error:
            error.add_note(f"while making sub-environment {vector_index} of worker {worker_index}")
            raise

    seed = derive_seed(seed, "worker", worker_index)
    if vectorization_mode == "vector_entry_point":
        env_id = creator.args[0] if isinstance(creator, partial) else None
        if not isinstance(env_id, str):
            raise ConfigError('vectorization_mode="vector_entry_point" needs an env id')
        try:
            vector = gym.make_vec(
                env_id, num_envs, vectorization_mode="vector_entry_point", **env_config
            )
        except gym.error.Error as error:
            raise ConfigError(f"env: {env_id!r} has no vector entry point: {error}") from error
        return VectorStepper(vector, seed)
    if vectorization_mode in ("sync", "async"):
        makers = [partial(make, i) for i in range(num_envs)]
        if vectorization_mode == "sync":
            return VectorStepper(SyncVectorEnv(makers), seed)
        return VectorStepper(AsyncVectorEnv(makers), seed)
    first = make(0)
    if isinstance(first, VectorEnv):
        return VectorStepper(first, seed)
    if not isinstance(first, gym.Env):
        raise ConfigError(
            f"env: the creator gave a {type(first).__name__}, not a gymnasium Env or VectorEnv"
        )
    made = [first]
    return DirectStepper(lambda i: made.pop() if made else make(i), num_envs, seed)
