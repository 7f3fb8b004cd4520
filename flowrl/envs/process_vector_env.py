"""ProcessVectorEnv: step environments at the same time, each in its own process.

    this process                                          process of an environment
    ProcessVectorEnv ───── action ──────────── pipe ────► DirectVectorEnv of one environment
                     ◄──── end, failure, info ─ pipe ────
                     ◄──── observation, reward ─ shared memory

An environment has the same seeds, checks, failures and checkpoints as in this process, because its
process steps it with the same classes.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import numpy as np
from gymnasium.spaces import Space
from gymnasium.vector.utils import CloudpickleWrapper

from flowrl.envs.env_process import EnvProcess, EnvProcessError, close_all, portable
from flowrl.envs.env_record import NEW, History, merged_state, split_state, state_without_episode
from flowrl.envs.restarting_envs import RestartingEnvs
from flowrl.envs.validation import ObservationCheck
from flowrl.envs.vector_env import DirectVectorEnv, StartInfos, VectorStep
from flowrl.errors import ConfigError, add_note
from flowrl.seeding import derive_seed

log = logging.getLogger("flowrl")


class ProcessVectorEnv:
    """Step gymnasium environments at the same time, each in its own process.

    If a process dies, another one replaces it, and only the episode in it is lost.

    Args:
        make_envs: (index, history) -> RestartingEnvs of the environment with this index; called in
            its process, a fork of the calling one.
        num_envs: number of environments.
        max_restarts: maximum number of processes of an environment that die in a row, without a
            complete episode or fragment in between; the next death is raised.
        drop_invalid: whether a step with invalid values is a failure, too.
        seed: base seed of the global random generators in the processes, see EnvProcess; None
            seeds them from the operating system.
        worker_index: for messages.

    Attributes:
        envs: the environments in this process: none.

    Raises:
        ConfigError: the environments have different spaces.
        EnvProcessError: a process died while it created its environment.
        Exception: the creation of an environment raised it.
    """

    resets_in_next_step = False
    reset_s = 0.0

    def __init__(
        self,
        make_envs: Callable[[int, History], RestartingEnvs],
        num_envs: int,
        max_restarts: int,
        drop_invalid: bool = False,
        seed: int | None = None,
        worker_index: int = 0,
    ):
        self.num_envs, self.envs = num_envs, list[Any]()
        self._make_envs, self._drop_invalid, self._seed = make_envs, drop_invalid, seed
        self._max_restarts, self._worker_index = max_restarts, worker_index
        self._deaths_in_a_row = [0] * num_envs
        self._has_logged_death = False
        self._to_reset: dict[int, EnvProcessError] = {}  # replaced since the last step
        self._earlier_restarts = 0  # of processes, and of environments in those that died
        self._rows: Any = None
        self._memory_file = os.memfd_create("flowrl-environments")
        self._processes: list[EnvProcess] = []
        try:
            for index in range(num_envs):
                self._processes.append(self._start(index, NEW))
            for process in self._processes:
                process.receive()
            spaces = self._call("spaces")
            self.observation_space, self.action_space = spaces[0]
            for index, others in enumerate(spaces):
                self._check_spaces(index, others)
            self._row_type = _row_type(self.observation_space)
            os.ftruncate(self._memory_file, num_envs * self._row_type.itemsize)
            self._rows = _shared_rows(self._memory_file, self._row_type)
            self._call("open", [(self._row_type,)] * num_envs)
        except BaseException:
            self.close()
            raise

    # -- processes ---------------------------------------------------------------------------------

    def _start(self, index: int, history: History) -> EnvProcess:
        """Start the process of an environment."""
        make_env = partial(
            _EnvInProcess,
            partial(self._make_envs, index, history),
            index,
            self._drop_invalid,
            self._memory_file,
        )
        seed = derive_seed(self._seed, "process", index, history.num_created)
        name = f"sub-environment {index} of worker {self._worker_index}"
        return EnvProcess(name, make_env, seed)

    def _check_spaces(self, index: int, spaces: tuple[Space, Space]) -> None:
        expected = self.observation_space, self.action_space
        if spaces != expected:
            raise ConfigError(
                f"env: sub-environment {index} has the spaces {spaces}, expected {expected}"
            )

    def _replace(self, index: int, death: EnvProcessError) -> None:
        """Replace the process of an environment.

        Raises:
            EnvProcessError: too many processes of the environment died in a row.
            Exception: the new environment cannot be created.
        """
        while True:
            self._deaths_in_a_row[index] += 1
            in_a_row = self._deaths_in_a_row[index]
            if in_a_row > self._max_restarts:
                self._deaths_in_a_row[index] = 0
                add_note(death, f"max_num_env_restarts={self._max_restarts}: it ended {in_a_row} "
                               "times in a row")  # fmt: skip
                raise death
            if not self._has_logged_death:
                self._has_logged_death = True
                log.warning(
                    "%s: starting another one (at most %d times in a row) and discarding the steps "
                    "of its episode since the last fragment; further ones are not logged, but "
                    "counted in num_env_restarts", death, self._max_restarts,
                )  # fmt: skip
            row = self._rows[index]
            self._earlier_restarts += int(row["num_restarts"]) + 1
            row["num_restarts"] = 0
            row["num_created"] += 1  # also if it dies before it is created
            history = History(*(row[name].item() for name in History._fields))
            self._processes[index].close()
            self._processes[index] = process = self._start(index, history)
            try:
                process.receive()
                process.send("spaces")
                self._check_spaces(index, process.receive())
                process.send("open", self._row_type)
                process.receive()
                return
            except EnvProcessError as another:
                death = another

    def _call_or_replace(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method as `_call_each` does; replace processes that have ended, and call again.

        Raises:
            Exception: a call raised it; see `_replace`.
        """
        results = self._call_each(method, args)
        for index in results:
            while isinstance(results[index], EnvProcessError):
                self._replace(index, results[index])
                results |= self._call_each(method, {index: args[index]})
        return results

    def _call_each(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of _EnvInProcess in several processes at the same time.

        Args:
            method: its name.
            args: index of the environment -> arguments.

        Returns:
            index -> result, or the EnvProcessError of a process that has ended.

        Raises:
            Exception: a call raised it.
        """
        deaths: dict[int, EnvProcessError] = {}
        errors: list[Exception] = []
        results: dict[int, Any] = {}
        for index, arguments in args.items():
            try:
                self._processes[index].send(method, *arguments)
            except EnvProcessError as death:
                deaths[index] = death
        for index in args:
            try:
                results[index] = deaths.get(index) or self._processes[index].receive()
            except EnvProcessError as death:
                results[index] = death
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results

    def _call(self, method: str, args: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method in all processes, and return the results.

        Args:
            method: its name.
            args: the arguments for each process; None for no arguments.

        Raises:
            EnvProcessError: a process has ended.
        """
        results = self._call_each(method, dict(enumerate(args or [()] * self.num_envs)))
        for result in results.values():
            if isinstance(result, EnvProcessError):
                raise result
        return list(results.values())

    # -- episodes ----------------------------------------------------------------------------------

    @property
    def num_restarts(self) -> int:
        """Number of failed environments that were recreated, and of processes that died."""
        current = int(self._rows["num_restarts"].sum())
        return current + self._earlier_restarts

    def reset(self, observations: Any) -> StartInfos:
        self._to_reset.clear()
        nested, infos = self._reset(range(self.num_envs))
        self._write(nested, observations)
        return infos

    def _reset(self, indices: Iterable[int]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Reset environments; return the first observations if they are nested, and the infos."""
        replies = self._call_or_replace("reset", dict.fromkeys(indices, ()))
        nested = {i: observation for i, (observation, _) in replies.items()}
        return nested, {i: info for i, (_, info) in replies.items()}

    def step(
        self, actions: Any, observations: Any, rewards: Any, terminateds: Any, truncateds: Any
    ) -> VectorStep:
        env_actions = actions.tolist() if getattr(actions, "ndim", 0) == 1 else actions
        replaced = dict(self._to_reset)
        args = {i: (action,) for i, action in enumerate(env_actions) if i not in replaced}
        replies = self._call_each("step", args)
        result = VectorStep()
        infos: list[dict[str, Any]] = [{} for _ in env_actions]
        nested, start_infos = self._reset(replaced)
        result.start_infos = start_infos
        result.failed += replaced.items()
        self._to_reset.clear()
        for i, reply in replies.items():
            if isinstance(reply, EnvProcessError):
                self._replace(i, reply)
                first, first_infos = self._reset([i])
                nested |= first
                start_infos |= first_infos
                result.failed.append((i, reply))
            elif reply is not None:
                stepped, nested[i] = reply
                infos[i] = stepped.infos[0]
                if stepped.start_infos:
                    start_infos[i] = stepped.start_infos[0]
                result.failed += [(i, error) for _, error in stepped.failed]
                if stepped.ended:
                    result.ended.append(i)
                    result.final += stepped.final
                    self._deaths_in_a_row[i] = 0
        result.infos = infos
        self._write(nested, observations)
        rewards[:] = self._rows["reward"].tolist()
        terminateds[:] = self._rows["terminated"].tolist()
        truncateds[:] = self._rows["truncated"].tolist()
        return result

    def _write(self, nested: Mapping[int, Any], observations: Any) -> None:
        """Write the observations of all environments.

        Args:
            nested: index -> observation, if observations are not arrays.
            observations: output [N, …].
        """
        if not _has_observations(self._rows):
            for index, observation in nested.items():
                observations[index] = observation
        elif isinstance(observations, np.ndarray):
            observations[:] = self._rows["observation"]
        else:  # the caller keeps the elements of a list
            observations[:] = [row.copy() for row in self._rows["observation"]]

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """See VectorEnv. A process that has ended is replaced; the next step resets its environment
        and reports the failure.

        Raises:
            EnvProcessError: fn ends the new process, too.
        """
        args = dict.fromkeys(range(self.num_envs), (CloudpickleWrapper(cast(Any, fn)),))
        results = self._call_each("call", args)
        for index, result in list(results.items()):
            if isinstance(result, EnvProcessError):
                self._replace(index, result)
                self._to_reset[index] = result
                self._call_or_replace("reset", {index: ()})  # fn may need an episode
                results |= self._call_each("call", {index: args[index]})
                if isinstance(results[index], EnvProcessError):
                    raise results[index]
        return [results[index] for index in args]

    def mark_healthy(self, indices: Iterable[int]) -> None:
        for index in (args := dict.fromkeys(indices, ())):
            self._deaths_in_a_row[index] = 0
        self._call_each("mark_healthy", args)

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        running = [index for index in range(self.num_envs) if index not in self._to_reset]
        found = self._call_each("state_dict", dict.fromkeys(running, ()))
        found |= self._to_reset
        states = [found[index] for index in range(self.num_envs)]
        for index, state in enumerate(states):
            if isinstance(state, EnvProcessError):  # the next step starts an episode
                states[index] = state_without_episode(int(self._rows["num_created"][index]))
        return {**merged_state(states), "num_restarts": self.num_restarts}

    def load_state_dict(self, state: dict[str, Any], observations: Any) -> StartInfos:
        self._to_reset.clear()
        states = split_state(state, self.num_envs)
        args = dict(enumerate(zip(states, observations, strict=True)))
        replies = self._call_or_replace("load_state_dict", args)
        self._deaths_in_a_row = [0] * self.num_envs
        self._earlier_restarts = state["num_restarts"]
        self._write({i: nested for i, (_, nested) in replies.items()}, observations)
        return {i: info for i, (info, _) in replies.items() if info is not None}

    def close(self) -> None:
        close_all(self._processes)
        self._processes, self._rows = [], None
        if self._memory_file >= 0:
            os.close(self._memory_file)
            self._memory_file = -1


class _EnvInProcess:
    """The environment of a process, and its row in the shared memory.

    Args:
        make_envs: () -> RestartingEnvs of the environment.
        index: index of the row.
        drop_invalid: see ProcessVectorEnv.
        memory_file: descriptor of the file that is the shared memory.
    """

    def __init__(
        self,
        make_envs: Callable[[], RestartingEnvs],
        index: int,
        drop_invalid: bool,
        memory_file: int,
    ):
        self._index, self._memory_file = index, memory_file
        self._envs = make_envs()
        self._env = DirectVectorEnv(self._envs, drop_invalid)

    def spaces(self) -> tuple[Space, Space]:
        """Return the spaces of observations and actions."""
        return self._env.observation_space, self._env.action_space

    def open(self, row_type: np.dtype) -> None:
        """Open the row, after the calling process has created the shared memory."""
        rows = _shared_rows(self._memory_file, row_type)
        self._row = rows[self._index : self._index + 1]
        self._is_nested = not _has_observations(rows)
        self._observations: Any = [None] if self._is_nested else self._row["observation"]
        self._clear()

    def _clear(self) -> None:
        """Set the results of a step in the row to those of a reset."""
        for name in ("reward", "terminated", "truncated"):
            self._row[name] = 0

    def _finish(self) -> Any:
        """Write the counters to the row; return the observation if it is nested."""
        self._row["num_restarts"] = self._env.num_restarts
        for name, value in self._envs.history(0)._asdict().items():
            self._row[name] = value
        return self._observations[0] if self._is_nested else None

    def reset(self) -> tuple[Any, dict[str, Any]]:
        """Start an episode; return the first observation if it is nested, and the info."""
        self._clear()
        infos = self._env.reset(self._observations)
        return self._finish(), _sendable(infos[0])

    def step(self, action: Any) -> tuple[VectorStep, Any] | None:
        """Step the environment.

        Returns:
            the result of DirectVectorEnv, and the observation if it is nested; None if the row
            contains everything.
        """
        self._clear()
        row = self._row
        actions = action[None] if isinstance(action, np.ndarray) else [action]
        result = self._env.step(
            actions, self._observations, row["reward"], row["terminated"], row["truncated"]
        )
        if not (self._is_nested or result.ended or result.failed or result.infos[0]):
            return None
        result.failed = [(index, portable(error)) for index, error in result.failed]
        result.start_infos = {i: _sendable(info) for i, info in result.start_infos.items()}
        return result, self._finish()

    def call(self, pickled: CloudpickleWrapper) -> Any:
        """Call a function with the environment."""
        return cast(Any, pickled.fn)(self._envs.get(0))

    def mark_healthy(self) -> None:
        """See VectorEnv."""
        self._env.mark_healthy([0])
        self._finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the environment."""
        return self._env.state_dict()

    def load_state_dict(
        self, state: dict[str, Any], observation: Any
    ) -> tuple[dict[str, Any] | None, Any]:
        """Bring the environment to the step at which its state was saved.

        Args:
            state: its state.
            observation: the last observation before the checkpoint.

        Returns:
            the info of the new episode that it starts instead, None if it does not; its
            observation if it is nested.
        """
        self._clear()
        self._observations[0] = observation
        restarted = self._env.load_state_dict(state, self._observations)
        return (_sendable(restarted[0]) if restarted else None), self._finish()

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _sendable(info: dict[str, Any]) -> dict[str, Any]:
    """Return the info of a reset; an empty one if it cannot be pickled, because few callbacks read
    it."""
    with suppress(Exception):
        pickle.dumps(info)
        return info
    return {}


def _row_type(space: Space) -> np.dtype:
    """Return the type of the row of an environment; without the observation if it is nested, or
    has no fixed size."""
    fields: list[Any] = [
        ("reward", np.float64),
        ("num_restarts", np.int64),
        ("num_created", np.int64),
        ("has_reset", np.bool_),
        ("has_finished", np.bool_),
        ("terminated", np.bool_),
        ("truncated", np.bool_),
    ]
    if ObservationCheck(space).is_array and np.dtype(space.dtype).itemsize:
        fields.append(("observation", space.dtype, space.shape or ()))
    return np.dtype(fields, align=True)


def _shared_rows(memory_file: int, row_type: np.dtype) -> np.ndarray:
    """Return the rows in the shared memory, one per environment."""
    return np.frombuffer(mmap.mmap(memory_file, 0), row_type)


def _has_observations(rows: np.ndarray) -> bool:
    """Return whether rows have an observation."""
    return "observation" in (rows.dtype.names or ())
