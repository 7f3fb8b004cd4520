"""GymnasiumVectorEnv: a gymnasium VectorEnv behind flowrl's VectorEnv interface."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium.vector
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from flowrl.envs.restarting_envs import close_quietly
from flowrl.envs.validation import ObservationCheck, copied_info, space_of, unwrapped
from flowrl.envs.vector_env import StartInfos, VectorStep
from flowrl.errors import ConfigError, add_note
from flowrl.seeding import derive_seed


class GymnasiumVectorEnv:
    """A gymnasium VectorEnv with any autoreset mode.

    Args:
        env: the vector environment.
        seed: of the first reset; None does not seed.
        make_env: recreates the vector environment after an error; None resets it instead.
        make_restored: (number of restores) -> a new vector environment, for those that are seeded
            only by their creation; None resets this one, with another seed.

    Attributes:
        env: the vector environment.
        autoreset_mode: its gymnasium.vector.AutoresetMode.
        resets_in_next_step: whether an episode's end costs a call of `step` that only resets.

    Raises:
        ConfigError: `metadata["autoreset_mode"]` is missing.
    """

    num_restarts = 0
    reset_s = 0.0

    def __init__(
        self,
        env: gymnasium.vector.VectorEnv,
        seed: int | None,
        make_env: Callable[[], gymnasium.vector.VectorEnv] | None = None,
        make_restored: Callable[[int], gymnasium.vector.VectorEnv] | None = None,
    ):
        self.env = env
        self._make_env, self._make_restored = make_env, make_restored
        if isinstance(env, SyncVectorEnv) and len(set(map(unwrapped, env.envs))) < len(env.envs):
            raise ConfigError(
                "env: several sub-environments are the same environment: create each one inside of "
                "its function"
            )
        self._failed = False
        self.num_envs = env.num_envs
        self.observation_space = space_of(env, "single_observation_space")
        self.action_space = space_of(env, "single_action_space")
        # not that of `env`: EnvPool's is the space of a single environment
        self._batch_space = batch_space(self.observation_space, self.num_envs)
        self._check = ObservationCheck(self.observation_space)
        self._batch_check = ObservationCheck(self._batch_space)
        self._shape = (self.num_envs, *(self.observation_space.shape or ()))
        self._seed = seed
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise ConfigError(
                f"env: {type(env).__name__} does not define how it resets: set "
                'metadata["autoreset_mode"] to a gymnasium.vector.AutoresetMode'
            )
        self.autoreset_mode = mode
        self.resets_in_next_step = mode is AutoresetMode.NEXT_STEP
        self._resetting: Any = ()  # environments that the next step only resets
        self._num_restores = 0  # each restored run starts episodes with other seeds
        self._num_recreated = 0  # so does each environment that replaces a failed one
        self._is_seeded = False

    @property
    def envs(self) -> list[Any]:
        """The vector environment."""
        return [self.env]

    def reset(self, observations: Any) -> StartInfos:
        if self._failed and self._make_env is not None:  # it may be unusable after an error
            close_quietly(self.env, "the vector environment")
            self.env = self._make_env()
            self._num_recreated, self._is_seeded = self._num_recreated + 1, False
        self._failed = True  # until the first observations are written
        purpose: tuple[Any, ...] = ("resumed", self._num_restores) if self._num_restores else ()
        purpose += ("restart", self._num_recreated) if self._num_recreated else ()
        base = None if self._is_seeded else self._seed
        seed: Any = derive_seed(base, "env", *purpose)
        if base is not None and isinstance(self.env, (SyncVectorEnv, AsyncVectorEnv)):
            seed = [derive_seed(base, "env", i, *purpose) for i in range(self.num_envs)]
        elif seed is not None:
            seed %= 2**31 - self.num_envs  # some add the index and take 32-bit integers only
        settings = {} if seed is None else {"seed": seed}
        first, infos = self._call("reset", **settings)
        observations[:] = self._by_env(first)
        self._is_seeded = True
        self._resetting = ()
        self._failed = False
        return _StartInfos(copied_info(infos), self.num_envs, range(self.num_envs))

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the vector environment; its errors get a note."""
        try:
            return getattr(self.env, method)(*args, **kwargs)
        except Exception as error:
            name = type(self.env).__name__
            add_note(error, f"raised by {method}() of an environment in a {name}")
            raise

    def _by_env(self, observations: Any) -> Any:
        """Return observations indexed by environment: the array, or a list of nested ones.

        Raises:
            ConfigError: an array has another shape, which numpy might broadcast, or a dtype that
                cannot be cast to the space's, such as floats for integers; or the structure
                differs.
        """
        if self._check.is_array:
            if getattr(observations, "shape", None) != self._shape:
                shape = getattr(observations, "shape", None)
                kind = type(observations).__name__ if shape is None else f"an array of {shape}"
                raise ConfigError(
                    f"env: the {type(self.env).__name__} returned {kind} as observations, expected "
                    f"an array of shape {self._shape}"
                )
            if not np.can_cast(observations.dtype, self._check.dtype, "same_kind"):
                raise ConfigError(
                    f"env: the {type(self.env).__name__} returned observations of type "
                    f"{observations.dtype}, expected {self._check.dtype}"
                )
            return observations
        self._check_nested(self._batch_check, observations, f"for {self.num_envs} environments")
        return list(iterate(self._batch_space, observations))

    def _check_nested(self, check: ObservationCheck, observation: Any, which: str) -> None:
        """Raise ConfigError if an observation does not fit the space of a check."""
        try:
            check.check_structure(observation)
        except ConfigError as error:
            add_note(error, f"returned by the {type(self.env).__name__}, {which}")
            raise

    def _one_per_env(self, name: str, values: Any, kinds: str) -> np.ndarray:
        """Return values of the sub-environments as an array.

        Args:
            name: of the values, in messages.
            values: one per environment.
            kinds: numpy's characters of the kinds of dtypes that are valid.

        Raises:
            ConfigError: another number of values, or another kind of values.
        """
        array = np.asarray(values)
        if array.shape != (self.num_envs,) or array.dtype.kind not in kinds:
            raise ConfigError(
                f"env: step() of the {type(self.env).__name__} returned {values!r:.60} as {name}, "
                f"expected an array of {self.num_envs} {'numbers' if 'f' in kinds else 'bools'}"
            )
        return array

    def step(
        self, actions: Any, observations: Any, rewards: Any, terminateds: Any, truncateds: Any
    ) -> VectorStep:
        result = VectorStep()
        env_actions: Any = actions
        if isinstance(actions, list):
            out: Any = create_empty_array(self.action_space, self.num_envs)
            env_actions = concatenate(self.action_space, actions, out)
        self._failed = True  # until the step is complete
        stepped, new_rewards, new_terminateds, new_truncateds, infos = self._call(
            "step", env_actions
        )
        rewards[:] = self._one_per_env("rewards", new_rewards, "fiub")
        terminateds[:] = self._one_per_env("terminateds", new_terminateds, "biu")
        truncateds[:] = self._one_per_env("truncateds", new_truncateds, "biu")
        if not isinstance(infos, dict):
            raise ConfigError(
                f"env: step() of the {type(self.env).__name__} returned infos as a "
                f"{type(infos).__name__}, expected a dict: remove the wrapper DictInfoToList"
            )
        next_obs = self._by_env(stepped)
        done = np.logical_or(terminateds, truncateds)
        (ended,) = done.nonzero()
        if len(ended):
            result.ended = ended
            same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
            if same_step and "final_obs" not in infos:
                raise ConfigError(
                    f"env: step() of the {type(self.env).__name__} returned no "
                    'infos["final_obs"], the last observations of episodes, which AutoresetMode.'
                    "SAME_STEP requires"
                )
            if self._check.is_array and not same_step:
                result.final = next_obs[ended]
            else:
                final = infos["final_obs"] if same_step else next_obs
                for i in ended if same_step else ():
                    self._check_nested(self._check, final[i], 'as infos["final_obs"]')
                result.final = [self._check.copy(final[i]) for i in ended]
        started, start_infos = ended, None
        if self.autoreset_mode is AutoresetMode.DISABLED and len(result.ended):
            reset, start_infos = self._call("reset", options={"reset_mask": done})
            next_obs, start_infos = self._by_env(reset), copied_info(start_infos)
        if self.resets_in_next_step:
            started = result.skipped = self._resetting
            self._resetting = ended
        observations[:] = next_obs
        if infos:
            by_env = _Infos(infos, self.num_envs, set(map(int, result.ended)))
            result.infos = by_env
            start_infos = by_env.infos if start_infos is None else start_infos
        if len(started) and start_infos is not None:
            result.start_infos = _StartInfos(start_infos, self.num_envs, started)
        self._failed = False
        return result

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        return [fn(self.env)]

    def mark_healthy(self, indices: Iterable[int]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"num_restores": self._num_restores}

    def load_state_dict(self, state: dict[str, Any], observations: Any) -> StartInfos:
        self._num_restores = state["num_restores"] + 1
        self._num_recreated, self._is_seeded = 0, False
        if self._make_restored is not None and self._num_restores:
            close_quietly(self.env, "the vector environment")
            self._failed = True  # it is closed, if its replacement cannot be created
            self.env = self._make_restored(self._num_restores)
            self._failed = False
        return self.reset(observations)

    def close(self) -> None:
        close_quietly(self.env, "the vector environment")


_FINAL_KEYS = ("final_obs", "_final_obs", "final_info", "_final_info")


class _Infos(Sequence[dict[str, Any]]):
    """Info dicts of a vector environment, one per sub-environment, extracted on access.

    Attributes:
        infos: a copy of the infos, without those of the last step of an episode.
    """

    def __init__(self, infos: dict[str, Any], num_envs: int, ended: set[int]):
        self.infos = copied_info({k: v for k, v in infos.items() if k not in _FINAL_KEYS})
        self._num_envs = num_envs
        # in SAME_STEP mode the infos of an episode's last step are in final_info
        self._ended = ended if "final_info" in infos else set()
        self._final_infos = copied_info(infos.get("final_info"))

    def __len__(self) -> int:
        return self._num_envs

    def __getitem__(self, index: Any) -> Any:
        index = range(self._num_envs)[index]  # an IndexError ends an iteration
        if index in self._ended and isinstance(self._final_infos, dict):
            return _info_of(self._final_infos, index, self._num_envs)
        return _info_of(self.infos, index, self._num_envs)


class _StartInfos(Mapping[int, dict[str, Any]]):
    """Infos of the environments that were reset, by index, extracted on access.

    Args:
        infos: of the vector environment; anything but a dict counts as no infos.
        num_envs: number of environments.
        indices: of the environments that were reset.
    """

    def __init__(self, infos: Any, num_envs: int, indices: Collection[int]):
        self._infos = infos if isinstance(infos, dict) else {}
        self._num_envs, self._indices = num_envs, indices

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index not in self._indices:
            raise KeyError(index)
        return _info_of(self._infos, index, self._num_envs)

    def __iter__(self) -> Iterator[int]:
        return map(int, self._indices)

    def __len__(self) -> int:
        return len(self._indices)


def _info_of(infos: dict[str, Any], index: int, num_envs: int) -> dict[str, Any]:
    """Return the infos of one environment. A value without one element per environment is returned
    as a whole for each environment."""
    found = {}
    for key, value in infos.items():
        has_value: Any = infos.get(f"_{key}")
        is_mask = isinstance(has_value, np.ndarray) and has_value.shape == (num_envs,)
        if str(key).startswith("_") or (is_mask and not has_value[index]):
            continue
        if isinstance(value, dict):
            value = _info_of(value, index, num_envs)
        elif isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim):
            value = value[index] if len(value) == num_envs else value
        found[key] = value
    return found
