"""EnvFactory: create the environments of a worker from its settings."""

from __future__ import annotations

import copy
import functools
import logging
import re
import secrets
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import gymnasium as gym
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from flowrl.envs.atari import (
    AtariSettings,
    check_env_config,
    for_envpool,
    for_vector_entry_point,
    is_atari,
    is_unprocessed,
)
from flowrl.envs.call_limits import NO_LIMITS, CallLimits
from flowrl.envs.env_record import NEW, History
from flowrl.envs.gymnasium_vector_env import GymnasiumVectorEnv
from flowrl.envs.multi_agent import is_multi_agent
from flowrl.envs.multi_agent_vector_env import DirectMultiAgentVectorEnv
from flowrl.envs.pettingzoo import wrap_pettingzoo
from flowrl.envs.process_vector_env import ProcessVectorEnv
from flowrl.envs.registry import (
    EnvContext,
    EnvCreator,
    apply_horizon,
    creator_name,
    ensure_registered,
    env_id_of,
)
from flowrl.envs.restarting_envs import RestartingEnvs
from flowrl.envs.single_agent_adapter import SingleAgentAdapter
from flowrl.envs.vector_env import DirectVectorEnv, VectorEnv
from flowrl.errors import ConfigError, add_note, check_installed, install_hint
from flowrl.seeding import derive_seed

log = logging.getLogger("flowrl")

VectorizationMode = Literal["flowrl", "sync", "async", "vector_entry_point", "envpool"]


class EnvFactory:
    """Create the environments of a worker.

    Args:
        creator: EnvContext -> environment.
        env_config: settings for the creator, passed in an EnvContext.
        num_envs: number of environments that the worker steps together. If the creator returns a
            gymnasium VectorEnv, its number, or 1 to accept any number.
        worker_index, num_workers: passed to the creator; the index also selects the seeds.
        seed: base seed of the environments' first resets; None does not seed.
        vectorization_mode: "flowrl" steps environments in this process, one after the other;
            "async" each in its own process, at the same time; "sync" uses gymnasium's
            SyncVectorEnv; "vector_entry_point" and "envpool" create a vector environment from the
            env id.
        horizon, soft_horizon: see AlgorithmConfig.
        max_restarts, on_env_created: see RestartingEnvs.
        drop_invalid: whether a step with invalid values is a failure of its environment.
        atari: preprocessing of Atari games that are created by their ids; None leaves it out.
        call_limits: on the time that each call may take.

    Attributes:
        is_atari: whether the environments are preprocessed Atari games.
    """

    def __init__(
        self,
        creator: EnvCreator,
        env_config: dict[str, Any],
        num_envs: int,
        worker_index: int = 0,
        num_workers: int = 0,
        seed: int | None = None,
        vectorization_mode: VectorizationMode = "flowrl",
        horizon: int | None = None,
        soft_horizon: bool = False,
        max_restarts: int = 5,
        on_env_created: Callable[[int, Any], None] | None = None,
        drop_invalid: bool = False,
        atari: AtariSettings | None = None,
        call_limits: CallLimits = NO_LIMITS,
    ):
        self._creator = creator
        self._env_config = env_config
        self._num_envs = num_envs
        self._worker_index, self._num_workers = worker_index, num_workers
        self.set_seed(seed)
        self._mode = vectorization_mode
        self._horizon, self._soft_horizon = horizon, soft_horizon
        self._max_restarts = max_restarts
        self._on_env_created = on_env_created
        self._drop_invalid = drop_invalid
        self._atari = atari
        self._call_limits = call_limits
        self.is_atari = atari is not None and is_atari(env_id_of(creator))

    def set_seed(self, seed: int | None) -> None:
        """Set the base seed of the environments that are created from now on."""
        self._seed = derive_seed(seed, "worker", self._worker_index)

    def env_context(self, vector_index: int) -> EnvContext:
        """Return the context that the creator receives for an environment."""
        return EnvContext(
            self._env_config, self._worker_index, vector_index, self._num_workers, self._atari
        )

    def make_env(self, vector_index: int) -> Any:
        """Create one environment: PettingZoo's are wrapped, gymnasium's get the horizon.

        Raises:
            ConfigError: a package is missing, or `env_config` does not fit.
            Exception: another error of the creator.
        """
        try:
            env = wrap_pettingzoo(self._creator(self.env_context(vector_index)))
        except (ImportError, gym.error.DependencyNotInstalled) as error:
            raise missing_package_error(error) from error
        if _is_gymnasium(env):
            env = apply_horizon(env, self._horizon, self._soft_horizon)
        return self._call_limits.apply(env)

    def make_agent_envs(self) -> SingleAgentAdapter | DirectMultiAgentVectorEnv:
        """Create all environments of the worker.

        Raises:
            ConfigError: the creator returns None, an unsupported object or a VectorEnv with
                another number of environments, or the environment does not support the
                vectorization mode.
        """
        if self._mode == "async":
            vector_env = ProcessVectorEnv(
                self._make_for_process, self._num_envs, self._max_restarts, self._drop_invalid,
                self._seed, self._worker_index,
            )  # fmt: skip
            return SingleAgentAdapter(vector_env)
        if self._mode != "flowrl":
            self._check_drop()
            self._check_call_limits()
        if self._mode in ("vector_entry_point", "envpool"):
            return SingleAgentAdapter(self._make_from_id())
        if self._mode == "sync":
            env_fns = [partial(self._make_for_sync, i) for i in range(self._num_envs)]
            make = partial(SyncVectorEnv, env_fns, autoreset_mode=AutoresetMode.SAME_STEP)
            return SingleAgentAdapter(GymnasiumVectorEnv(make(), self._seed, make))
        envs = self._restarting_envs(self.make_env, self._num_envs)
        try:
            return self._in_this_process(envs)
        except BaseException:
            envs.close()
            raise

    def _in_this_process(
        self, envs: RestartingEnvs
    ) -> SingleAgentAdapter | DirectMultiAgentVectorEnv:
        """Return the environments as a vector environment, by the type of the first one."""
        first = envs.get(0)
        if self._atari is not None and not self._worker_index and is_unprocessed(first):
            _warn_of_unprocessed_frames()
        if isinstance(first, gym.vector.VectorEnv):
            self._check_horizon()
            self._check_drop()
            self._check_call_limits()
            if self._num_envs not in (1, first.num_envs):
                error = ConfigError(
                    f"num_envs_per_worker={self._num_envs}, but the creator returned a "
                    f"{type(first).__name__} of {first.num_envs} environments: set "
                    f"num_envs_per_worker={first.num_envs}"
                )
                vars(error)["num_envs"] = first.num_envs  # for evaluations
                raise error

            def make_first() -> Any:
                return self._report_created(0, self.make_env(0))

            return SingleAgentAdapter(GymnasiumVectorEnv(first, self._seed, make_first))
        if _is_gymnasium(first):
            return SingleAgentAdapter(DirectVectorEnv(envs, self._drop_invalid))
        horizon = None if self._soft_horizon else self._horizon
        return DirectMultiAgentVectorEnv(envs, horizon, self._drop_invalid)

    def _restarting_envs(
        self,
        make_env: Callable[[int], Any],
        num_envs: int,
        first_index: int = 0,
        history: History = NEW,
    ) -> RestartingEnvs:
        return RestartingEnvs(
            make_env, num_envs, self._seed, self._max_restarts, self._on_env_created,
            creator_name(self._creator), self._worker_index, first_index, history,
        )  # fmt: skip

    def _make_for_process(self, vector_index: int, history: History) -> RestartingEnvs:
        """Create the environment of a process."""
        return self._restarting_envs(self._make_gymnasium_env, 1, vector_index, history)

    def _report_created(self, vector_index: int, env: Any) -> Any:
        """Call `on_env_created`, and return the environment."""
        if self._on_env_created is not None:
            self._on_env_created(vector_index, env)
        return env

    def _make_for_sync(self, vector_index: int) -> gym.Env:
        """Create an environment of a SyncVectorEnv."""
        try:
            env = self._make_gymnasium_env(vector_index)
        except Exception as error:
            add_note(
                error,
                f"raised by the creation of {creator_name(self._creator)}, sub-environment "
                f"{vector_index} of worker {self._worker_index}",
            )
            raise
        return _CopyFinalObservation(self._report_created(vector_index, env))

    def _make_gymnasium_env(self, vector_index: int) -> gym.Env:
        """Create an environment, and check that it is one of gymnasium's."""
        env = self.make_env(vector_index)
        if not _is_gymnasium(env):
            raise ConfigError(
                f'vectorization_mode="{self._mode}" requires gymnasium environments, the creator '
                f"returned a {type(env).__name__}"
            )
        return cast(gym.Env, env)

    def _check_horizon(self) -> None:
        if self._horizon is not None and not self._soft_horizon:
            raise ConfigError(
                f"horizon={self._horizon} cannot truncate the episodes of a vector environment "
                "that is created elsewhere: set the limit there, or use soft_horizon=True, which "
                "starts new episode ids without a reset"
            )

    def _check_drop(self) -> None:
        if self._drop_invalid:
            raise ConfigError(
                'on_invalid_step="drop" recreates single environments, which a vector environment '
                'does not support: use vectorization_mode="flowrl" or on_invalid_step="replace"'
            )

    def _check_call_limits(self) -> None:
        if self._call_limits != NO_LIMITS:
            raise ConfigError(
                "env_step_timeout_s, env_reset_timeout_s: a vector environment steps all its "
                "environments in one call: use single environments with "
                'vectorization_mode="flowrl", or sample_timeout_s'
            )

    def _make_from_id(self) -> VectorEnv:
        """Create a vector environment from the env id, by gymnasium or EnvPool."""
        env_id = env_id_of(self._creator)
        if env_id is None:
            raise ConfigError(f'vectorization_mode="{self._mode}" needs an env id')
        self._check_horizon()
        if is_atari(env_id) and self._atari is None:
            raise ConfigError(
                f'atari=None leaves a game as it is, but vectorization_mode="{self._mode}" always '
                'preprocesses it: use the mode "flowrl", "sync" or "async"'
            )
        if self._mode == "vector_entry_point":
            ensure_registered(env_id)  # a worker has not registered it yet
            settings = self._with_atari(for_vector_entry_point)
            try:
                env = gym.make_vec(
                    env_id, self._num_envs, vectorization_mode=self._mode, **settings
                )
            except (ImportError, gym.error.DependencyNotInstalled) as error:
                raise missing_package_error(error) from error
            except gym.error.Error as error:
                raise ConfigError(f"env: {env_id!r} has no vector entry point: {error}") from error
            except TypeError as error:
                raise self._env_config_error(env_id, error) from error
            return GymnasiumVectorEnv(self._report_created(0, env), self._seed)
        check_installed("envpool", 'vectorization_mode="envpool"', extra="envpool")
        import envpool

        settings = {"num_threads": 1}
        if self.is_atari:
            ensure_registered(env_id)
            settings |= self._with_atari(partial(for_envpool, env_id))
            env_id = env_id.removeprefix("ALE/")
        settings |= self._env_config
        if env_id not in envpool.list_all_envs():
            raise ConfigError(f"env: EnvPool has no environment {env_id!r}")

        def make_pool(num_restores: int = 0) -> gym.vector.VectorEnv:
            seed = derive_seed(self._seed, "envpool", *([num_restores] if num_restores else ()))
            if seed is None:
                seed = secrets.randbits(31)
            try:
                pool = envpool.make_gymnasium(
                    env_id, num_envs=self._num_envs, seed=seed % 2**31, **settings
                )
            except TypeError as error:
                raise self._env_config_error(env_id, error) from error
            return cast(gym.vector.VectorEnv, self._report_created(0, pool))

        return GymnasiumVectorEnv(make_pool(), None, make_restored=make_pool)

    def _with_atari(
        self, arguments_of: Callable[[AtariSettings], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return `env_config` with the arguments that preprocess Atari games.

        Raises:
            ConfigError: `env_config` has one of these arguments.
        """
        if self._atari is None or not self.is_atari:
            return self._env_config
        arguments = arguments_of(self._atari)
        check_env_config(self._env_config, arguments)
        return {**arguments, **self._env_config}

    def _env_config_error(self, env_id: str, error: TypeError) -> ConfigError:
        return ConfigError(
            f'env_config: {env_id} with vectorization_mode="{self._mode}" does not accept '
            f"{self._env_config}: {error}"
        )


class _CopyFinalObservation(gym.Wrapper):
    """Copy the last observation of each episode.

    In SAME_STEP mode, gymnasium resets the environment before it passes this observation on, and
    the reset may overwrite it.
    """

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            observation = copy.deepcopy(observation)
        return observation, reward, terminated, truncated, info


def missing_package_error(error: Exception) -> ConfigError:
    """Return the error for an environment that needs a package that is not installed."""
    extra = re.search(r"gymnasium\[(box2d|mujoco)\]", str(error))
    if extra is not None:
        return ConfigError(install_hint("env: this environment", extra.group(1)))
    if "mujoco v2 and v3" in str(error):
        return ConfigError(
            "env: gymnasium has no MuJoCo environments of the versions 2 and 3 any more: use "
            "version 5, such as Hopper-v5"
        )
    if isinstance(error, ImportError):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        return ConfigError(
            f"env: its creation cannot import what it needs: {error} ({place}). Install it on "
            "every machine that samples or evaluates"
        )
    return ConfigError(f"env: {error}")


@functools.cache
def _warn_of_unprocessed_frames() -> None:
    log.warning(
        "env: the frames of this Atari game are not preprocessed, because the environment was not "
        'created by its id: set env="ALE/Pong-v5", or atari=None to train on frames as they are'
    )


def _is_gymnasium(env: Any) -> bool:
    return isinstance(env, gym.Env) and not is_multi_agent(env)
