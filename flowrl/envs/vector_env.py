"""How many copies of an environment are stepped at once.

A stepper writes what a step gives straight into the collector's arrays. Whatever the underlying
vector environment does at an episode's end, a stepper says the same things: the observation to act
on next, the final observation of every episode that ended, which rows were real steps (an
environment in NEXT_STEP mode spends one call per episode on the reset), and which environments
broke and were made anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol, cast

import gymnasium as gym
import numpy as np
import optree
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from flowrl.envs.multi_agent import is_multi_agent
from flowrl.envs.registry import EnvContext, EnvCreator, env_id_of, with_horizon
from flowrl.envs.restarting_envs import EnvSlots, close_quietly
from flowrl.envs.validation import ObservationCheck, check_reward
from flowrl.seeding import derive_seed
from flowrl.settings import ConfigError

VectorizationMode = Literal["flowrl", "sync", "async", "vector_entry_point", "envpool"]


class Stepper(Protocol):
    """N environments stepped together."""

    num_envs: int
    observation_space: spaces.Space
    action_space: spaces.Space

    @property
    def num_restarts(self) -> int:
        """Environments made in the place of broken ones."""
        return 0

    def reset(self, observations: Any) -> None:
        """Start all episodes; write the first observations [N, …]."""

    def step(
        self, actions: Any, observations: Any, rewards: Any, terminateds: Any, truncateds: Any
    ) -> Step:
        """Step every environment with actions [N, …].

        Writes the observations to act on next [N, …], the rewards [N] and, where true, the flags
        [N] (the caller gives them false). Arrays, or lists of N.
        """

    def settle(self, slots: Any) -> None:
        """These environments got through a fragment: earlier failures are forgotten."""

    def get_state(self) -> dict[str, Any] | None:
        """How each environment came to be where it is; None where that is not known."""

    def set_state(self, state: dict[str, Any] | None, observations: Any) -> list[int]:
        """Go on where other environments were, which had these observations [N, …]: all that can;
        the others begin episodes, whose first observations are written.

        Returns:
            those that begin anew.
        """

    def close(self) -> None:
        """Close the environments."""


class Step:
    """What a step says besides the arrays.

    ended: indices of the environments whose episode ended.
    final: their final observations.
    skipped: env indices whose row is no step but a reset.
    failed: env indices whose step raised, with the error; their next observation starts an
        episode of a new environment.
    infos: one dict per environment.
    """

    __slots__ = ("ended", "failed", "final", "infos", "skipped")

    def __init__(self) -> None:
        self.ended: Any = []
        self.final: Any = []
        self.skipped: Any = ()
        self.failed: list[tuple[int, Exception]] = []
        self.infos: Sequence[dict[str, Any]] = []


class DirectStepper:
    """flowrl's own vectoriser: calls `env.step` of each environment and resets it at once.

    An environment that raises costs its own episode: it is made anew, the others go on.
    """

    def __init__(self, slots: EnvSlots):
        self._slots = slots
        self.num_envs = len(slots.envs)
        self.observation_space = slots.at(0).observation_space
        self.action_space = slots.at(0).action_space
        self.check = ObservationCheck(self.observation_space)
        self._unchecked = [True] * self.num_envs
        self._shape = self.observation_space.shape or None
        # what needs no look at its shape and dtype: numbers of a Discrete space
        self._plain = (int, np.integer) if self.check.is_array else ()
        discrete = isinstance(self.action_space, spaces.Discrete)
        self._range = (
            (int(self.action_space.start), int(self.action_space.start + self.action_space.n))
            if discrete
            else None
        )

    @property
    def envs(self) -> list[Any]:
        """The environments."""
        return self._slots.envs

    @property
    def num_restarts(self) -> int:
        return self._slots.num_restarts

    def reset(self, observations: Any) -> None:
        for i in range(self.num_envs):
            observations[i] = self._start(i)

    def _start(self, index: int) -> Any:
        """A first observation, of this environment or of the one that replaces it."""
        observation, _ = self._slots.reset(index)
        env = self._slots.at(index)
        spaces_of = env.observation_space, env.action_space
        if self._unchecked[index]:
            if spaces_of != (self.observation_space, self.action_space):
                raise ConfigError(
                    f"env: sub-environment {index} has the spaces {spaces_of}, sub-environment 0 "
                    f"has {(self.observation_space, self.action_space)}"
                )
            self.check.first(observation)
        return observation

    def step(
        self, actions: Any, observations: Any, rewards: Any, terminateds: Any, truncateds: Any
    ) -> Step:
        result = Step()
        infos: list[dict[str, Any]] = []
        ended, final, unchecked = [], [], self._unchecked
        shape, dtype, plain = self._shape, self.check.dtype, self._plain
        # Python scalars: environments check and use them faster than numpy's
        given = actions.tolist() if getattr(actions, "ndim", 0) == 1 else actions
        if self._range is not None:
            low, end = self._range
            if min(given) < low or max(given) >= end:
                raise _out_of_range(given, low, end)
            kept = given
        else:  # an environment may write into its action
            kept = given.copy() if isinstance(given, np.ndarray) else copy.deepcopy(given)
        for journal, action in zip(self._slots.journals, kept, strict=False):
            journal.append(action)
        for i, env in enumerate(self._slots.envs):
            try:
                observation, reward, terminated, truncated, info = env.step(given[i])
                if unchecked[i]:
                    self._check_step(observation, reward, terminated, truncated)
                    unchecked[i] = False
                elif shape is None:
                    if not isinstance(observation, plain):
                        self.check.first(observation)
                elif getattr(observation, "shape", None) != shape or observation.dtype != dtype:
                    self.check.first(observation)  # numpy would broadcast and cast it
                rewards[i] = reward
            except ConfigError as error:
                error.add_note(f"raised by sub-environment {i}")
                raise
            except Exception as error:
                self._slots.blame(i, error, "by step()")
                result.failed.append((i, error))
                unchecked[i] = True
                infos.append({})
                rewards[i] = 0.0
                observations[i] = self._start(i)
                continue
            infos.append(info.copy() if info else info)  # an environment may keep one dict
            if terminated or truncated:
                terminateds[i] = terminated
                truncateds[i] = truncated
                ended.append(i)
                final.append(self.check.taken(observation))
                self._slots.settle((i,))
                observation = self._start(i)
            observations[i] = observation
        result.ended, result.final, result.infos = ended, final, infos
        return result

    def restart(self, index: int, error: Exception) -> Any:
        """Environment `index` gave what cannot be used: make it anew; its first observation."""
        self._slots.blame(index, error, "by step()")
        self._unchecked[index] = True
        return self._start(index)

    def settle(self, slots: Any) -> None:
        self._slots.settle(slots)

    def get_state(self) -> dict[str, Any] | None:
        return self._slots.get_state()

    def set_state(self, state: dict[str, Any] | None, observations: Any) -> list[int]:
        if state is None:
            raise ValueError("it has no state of environments")
        self._slots.set_state(state)
        anew = []

        def matches(kept: Any, given: Any) -> bool:
            # what is not finite, or outside the space, may have been repaired
            repaired = self.check.is_array and self.check.repaired(np.asarray(given))
            return same(kept, given) or (self.check.is_array and same(kept, repaired))

        for i in range(self.num_envs):
            self._unchecked[i] = True
            if not self._slots.replay(i, state, partial(matches, observations[i])):
                observations[i] = self._start(i)
                anew.append(i)
        return anew

    def _check_step(self, observation: Any, reward: Any, *flags: Any) -> None:
        """Of the first step of every environment: numpy would broadcast and cast what does not
        fit."""
        self.check.first(observation)
        for flag in flags:
            if not isinstance(flag, (bool, np.bool_)):
                raise ConfigError(f"env: terminated and truncated are bools, step() gave {flag!r}")
        check_reward(reward)

    def close(self) -> None:
        self._slots.close()


def same(mine: Any, yours: Any) -> bool:
    """Whether two observations are the same, number for number."""
    if not isinstance(mine, (dict, tuple, list)):
        kept, given = np.asarray(mine), np.asarray(yours)
        if kept.dtype != given.dtype:  # it was stored as its space says
            given = given.astype(kept.dtype)
        return np.array_equal(kept, given, equal_nan=_floats(kept))
    one: Any = optree.tree_flatten(mine)  # type: ignore[arg-type]
    two: Any = optree.tree_flatten(yours)
    return bool(one[1] == two[1]) and all(map(same, one[0], two[0]))


def _floats(array: Any) -> bool:
    return np.asarray(array).dtype.kind == "f"


def _out_of_range(actions: Any, low: int, end: int) -> ValueError:
    odd = next(i for i, action in enumerate(actions) if not low <= action < end)
    return ValueError(
        f"the policy gave the action {actions[odd]!r} for sub-environment {odd}, which takes "
        f"{low} … {end - 1}"
    )


class VectorStepper:
    """A gymnasium VectorEnv, in whichever autoreset mode it is.

    Raises:
        ConfigError: the environment does not say its mode in `metadata["autoreset_mode"]`.
    """

    num_restarts = 0

    def __init__(
        self, env: VectorEnv, seed: int | None, make: Callable[[], VectorEnv] | None = None
    ):
        self.env = env
        self._make = make
        self._broken = False
        self.num_envs = env.num_envs
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.check = ObservationCheck(self.observation_space)
        self._seed = seed
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise ConfigError(
                f"env: {type(env).__name__} does not say how it resets: set "
                'metadata["autoreset_mode"] to a gymnasium.vector.AutoresetMode'
            )
        self.mode = mode
        self._resetting: np.ndarray = np.zeros(self.num_envs, bool)
        self._resets = 0  # by runs that went on from a checkpoint, which begin episodes anew

    def reset(self, observations: Any) -> None:
        if self._broken and self._make is not None:  # it may not survive an error of its own
            close_quietly(self.env, 0)
            self.env = self._make()
        self._broken = False
        purpose = ("resumed", self._resets) if self._resets else ()
        seed: Any = derive_seed(self._seed, "env", *purpose)
        if self._seed is not None and isinstance(self.env, (SyncVectorEnv, AsyncVectorEnv)):
            seed = [derive_seed(self._seed, "env", i, *purpose) for i in range(self.num_envs)]
        first, _ = self.env.reset() if seed is None else self.env.reset(seed=seed)
        observations[:] = self._each(first)
        self._seed = None
        self._resetting[:] = False

    def _each(self, observations: Any) -> Any:
        """By environment: the array, or a list where observations are nested."""
        if self.check.is_array:
            return observations
        return list(iterate(self.env.observation_space, observations))

    def step(
        self, actions: Any, observations: Any, rewards: Any, terminateds: Any, truncateds: Any
    ) -> Step:
        result = Step()
        given: Any = actions
        if isinstance(actions, list):
            room: Any = create_empty_array(self.action_space, self.num_envs)
            given = concatenate(self.action_space, actions, room)
        self._broken = True
        after, rewards[:], terminateds[:], truncateds[:], infos = self.env.step(given)
        self._broken = False
        after = self._each(after)
        done = np.logical_or(terminateds, truncateds)
        if done.any():
            ended = result.ended = np.flatnonzero(done)
            same_step = self.mode is AutoresetMode.SAME_STEP
            if self.check.is_array and not same_step:
                result.final = after[ended]
            else:
                last = infos["final_obs"] if same_step else after
                result.final = [self.check.taken(last[i]) for i in ended]
        if self.mode is AutoresetMode.DISABLED and len(result.ended):
            after, _ = self.env.reset(options={"reset_mask": done})
            after = self._each(after)
        if self.mode is AutoresetMode.NEXT_STEP:
            if self._resetting.any():
                result.skipped = np.flatnonzero(self._resetting)
            self._resetting = done
        observations[:] = after
        result.infos = _Infos(infos, self.num_envs, set(map(int, result.ended))) if infos else []
        return result

    def settle(self, slots: Any) -> None:
        pass

    def get_state(self) -> dict[str, Any] | None:
        return {"resets": self._resets}

    def set_state(self, state: dict[str, Any] | None, observations: Any) -> list[int]:
        self._resets = 0 if state is None else state["resets"] + 1
        self.reset(observations)
        return list(range(self.num_envs))

    def close(self) -> None:
        self.env.close()


_FINAL = ("final_obs", "_final_obs", "final_info", "_final_info")


class _Infos(Sequence[dict[str, Any]]):
    """A vector environment's infos by environment, taken apart when they are read."""

    def __init__(self, infos: dict[str, Any], num_envs: int, ended: set[int]):
        self._infos = {k: v for k, v in infos.items() if k not in _FINAL}
        self._num_envs = num_envs
        # of an episode that ended in SAME_STEP mode the infos of its own last step
        self._ended = ended if "final_info" in infos else set()
        self._final = infos.get("final_info")

    def __len__(self) -> int:
        return self._num_envs

    def __getitem__(self, index: Any) -> Any:
        if index in self._ended and isinstance(self._final, dict):
            return _info_of(self._final, index)
        return _info_of(self._infos, index)


def _info_of(infos: dict[str, Any], index: int) -> dict[str, Any]:
    """One environment's part of a vector environment's infos."""
    return {
        key: _info_of(value, index)
        if isinstance(value, dict)
        else (value[index] if isinstance(value, (np.ndarray, list, tuple)) else value)
        for key, value in infos.items()
        if not key.startswith("_") and infos.get(f"_{key}", np.ones(index + 1, bool))[index]
    }


class WorkerEnvs:
    """What a worker's environments are, before they are stepped.

    Args:
        creator, env_config: of one environment.
        num_envs: how many the worker steps together.
        worker_index, num_workers: given to the creator.
        seed: of every environment's first episode.
        vectorization_mode: "flowrl", "sync", "async", "vector_entry_point" or "envpool".
        horizon, soft_horizon: see AlgorithmConfig.
        max_restarts, on_made: see EnvSlots.
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
        on_made: Callable[[int, Any], None] | None = None,
    ):
        self._creator = creator
        self._on_made = on_made
        self._env_config = env_config
        self.num_envs = num_envs
        self._place = worker_index, num_workers
        self._horizon = horizon, soft_horizon
        self.seed = derive_seed(seed, "worker", worker_index)
        self._mode = vectorization_mode
        self._max_restarts = max_restarts

    def make(self, vector_index: int) -> Any:
        """Environment number `vector_index`."""
        try:
            env = self._creator(self.context(vector_index))
        except Exception as error:
            worker_index = self._place[0]
            error.add_note(f"while making sub-environment {vector_index} of worker {worker_index}")
            raise
        single = isinstance(env, gym.Env) and not is_multi_agent(env)
        return with_horizon(env, *self._horizon) if single else env

    def context(self, vector_index: int) -> EnvContext:
        """What the creator is told of environment number `vector_index`."""
        worker_index, num_workers = self._place
        return EnvContext(self._env_config, worker_index, vector_index, num_workers)

    def open(self) -> Stepper | EnvSlots:
        """The environments as a stepper; those that are no gymnasium ones as they are, in slots.

        Raises:
            ConfigError: the creator gives no environment, or has no vectorised form.
        """
        if self._mode in ("vector_entry_point", "envpool"):
            return self._vectorised()
        if self._mode in ("sync", "async"):
            makers = [partial(self._make_gymnasium, i) for i in range(self.num_envs)]
            vector = partial(SyncVectorEnv if self._mode == "sync" else AsyncVectorEnv, makers)
            return VectorStepper(vector(), self.seed, vector)
        slots = EnvSlots(self.make, self.num_envs, self.seed, self._max_restarts, self._on_made)
        first = slots.at(0)
        if isinstance(first, VectorEnv):
            self._refuse_horizon()
            return VectorStepper(first, self.seed, partial(self.make, 0))
        single = isinstance(first, gym.Env) and not is_multi_agent(first)
        return DirectStepper(slots) if single else slots

    def _make_gymnasium(self, vector_index: int) -> gym.Env:
        env = self.make(vector_index)
        if not isinstance(env, gym.Env) or is_multi_agent(env):
            raise ConfigError(
                f'vectorization_mode="{self._mode}" is for gymnasium environments, the creator '
                f"gave a {type(env).__name__}"
            )
        if self._on_made is not None:
            self._on_made(vector_index, env)
        return env

    def _refuse_horizon(self) -> None:
        horizon, soft = self._horizon
        if horizon is not None and not soft:
            raise ConfigError(
                f"horizon={horizon} cannot end the episodes of an environment that is vectorised "
                "elsewhere: give the limit to that one, or use soft_horizon=True"
            )

    def _vectorised(self) -> Stepper:
        env_id = env_id_of(self._creator)
        if env_id is None:
            raise ConfigError(f'vectorization_mode="{self._mode}" needs an env id')
        self._refuse_horizon()
        if self._mode == "vector_entry_point":
            try:
                vector = gym.make_vec(
                    env_id, self.num_envs, vectorization_mode=self._mode, **self._env_config
                )
            except gym.error.Error as error:
                raise ConfigError(f"env: {env_id!r} has no vector entry point: {error}") from error
            return VectorStepper(vector, self.seed)
        try:
            import envpool
        except ImportError as error:
            raise ConfigError(
                'vectorization_mode="envpool" needs EnvPool: pip install "flowrl[envpool]"'
            ) from error
        if env_id not in envpool.list_all_envs():
            raise ConfigError(f"env: EnvPool has no environment {env_id!r}")
        settings = {"num_threads": 1, **self._env_config}
        seed = derive_seed(self.seed, "envpool")
        pool = envpool.make_gymnasium(
            env_id, num_envs=self.num_envs, seed=0 if seed is None else seed % 2**31, **settings
        )
        return VectorStepper(cast(VectorEnv, pool), None)  # it has its seed
