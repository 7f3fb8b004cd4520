"""RestartingEnvs: environments that are created lazily and recreated after an error.

Errors that a new environment would repeat are raised at once: errors of the first creation, and
errors in the code or the settings of the environment, such as a TypeError before its first episode.

For each environment it records how the current episode was reset, and all actions since. A
checkpoint includes both, so that a resumed run can replay the episode up to the same step.
"""

from __future__ import annotations

import copy
import logging
import re
import time
import traceback
from bdb import BdbQuit
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from flowrl.envs.env_state import (
    find_rng,
    get_env_state,
    has_whole_state,
    has_wrapper_state,
    pack_actions,
    set_env_state,
    size_of_action,
    unpack_actions,
)
from flowrl.envs.restarting_envs_state import check_restarting_envs_state
from flowrl.envs.validation import RESET_RESULTS, check_result, env_name, unwrapped
from flowrl.errors import ConfigError, add_note
from flowrl.seeding import derive_seed, restore_stream

log = logging.getLogger("flowrl")

# episodes with more actions, or more bytes of actions, are not replayed after a restore
MAX_LOGGED_ACTIONS = 50_000
MAX_LOGGED_BYTES = 8 << 20
CODE_ERRORS = (AttributeError, ImportError, NameError, SyntaxError, TypeError)
"""Errors that an environment would raise again if it has never completed a fragment."""
RESET_ERRORS = (*CODE_ERRORS, LookupError, ValueError, gym.error.Error)
"""Errors that an environment would raise again if it has never completed a reset."""
LATE_STEPS = 100  # steps of an episode after which a failure is a late one
LATE_FACTOR = 100  # times as many late failures as others are allowed
_NO_SEED = re.compile(r"reset\(\) got an unexpected keyword argument '(seed|options)'")


class History(NamedTuple):
    """What the environments at an index have done since the first one was created.

    Attributes:
        num_created: how often it was created; selects its seeds.
        has_reset: whether a reset succeeded.
        has_finished: whether an episode or a fragment was completed.
    """

    num_created: int = 0
    has_reset: bool = False
    has_finished: bool = False


NEW = History()


class RestartingEnvs:
    """N environments of any kind, created lazily and recreated after an error.

    Args:
        make_env: (index) -> environment.
        num_envs: number of environments.
        seed: base seed of each environment's first reset; None does not seed.
        max_restarts: maximum consecutive failures of one environment; the next error is raised.
            Failures after LATE_STEPS steps of an episode are counted separately, with a maximum
            that is LATE_FACTOR times as large, except timeouts and failures at the step of the
            previous failure. Completing an episode resets both counts. Completing a fragment resets
            the second one, and also the first one unless the next failure is at the same step.
            Errors of the first creation of an environment, RESET_ERRORS before its first reset has
            succeeded, CODE_ERRORS before its first episode or fragment is complete, and
            NotImplementedError are raised at once.
        on_env_created: called with the index and the environment after each creation.
        name: name of the environment until it exists, for messages.
        worker_index: for messages.
        history: of each environment, in earlier processes.
        first_index: index of the first environment among those of the worker. The functions receive
            this kind of index, and it selects the seeds.

    Attributes:
        envs: the environments; None where one is yet to be created.
        num_restarts: total number of failures.
        reset_s: seconds in `reset` of the environments.
        action_logs: actions since the last reset, by environment; empty again when a log becomes
            too long or the episode cannot be repeated.
    """

    def __init__(
        self,
        make_env: Callable[[int], Any],
        num_envs: int,
        seed: int | None,
        max_restarts: int,
        on_env_created: Callable[[int, Any], None] | None = None,
        name: str = "the environment",
        worker_index: int = 0,
        first_index: int = 0,
        history: History = NEW,
    ):
        self._name, self._worker_index, self._first_index = name, worker_index, first_index
        self.num_restarts = 0
        self.reset_s = 0.0
        self._num_logged: Counter[tuple[type, str | None]] = Counter()  # failures by kind
        self._on_env_created = on_env_created
        self._make_env = make_env
        self._seed = seed
        self._max_restarts = max_restarts
        self._failures = [0] * num_envs  # consecutive
        self._late_failures = [0] * num_envs  # consecutive, after LATE_STEPS steps of an episode
        self._failed_steps = [0] * num_envs  # of the episode, at the last failure
        self._recovered = [False] * num_envs  # completed a fragment since the last failure
        self._num_created = [history.num_created] * num_envs
        self._seeded = [False] * num_envs
        self._has_reset = [history.has_reset] * num_envs
        self._has_finished = [history.has_finished] * num_envs  # an episode or a fragment
        self.envs: list[Any] = [None] * num_envs
        self._unwrapped: list[Any] = [None] * num_envs
        self._have_wrapper_state = [False] * num_envs
        # of each episode: seed of its reset, and the states of generator and wrapper before it
        self._resets: list[Any] = [None] * num_envs
        self.action_logs: list[list[Any]] = [[] for _ in range(num_envs)]
        self._unlogged_steps = [0] * num_envs  # of the episode, before those in `action_logs`
        self.get(0)

    def history(self, index: int) -> History:
        """Return what the environments with an index have done."""
        return History(self._num_created[index], self._has_reset[index], self._has_finished[index])

    def label(self, index: int) -> str:
        """Return the name of an environment in messages."""
        return f"sub-environment {self._first_index + index}"

    def get(self, index: int) -> Any:
        """Return an environment, creating it if necessary."""
        while self.envs[index] is None:
            try:
                self.envs[index] = self._make_env(self._first_index + index)
            except ConfigError:
                raise
            except Exception as error:
                self.handle_failure(index, error, None)
                continue
            if self.envs[index] is None:
                raise ConfigError("env: the creator returned None: does it return the environment?")
            self._check_distinct(index)
            self._have_wrapper_state[index] = has_wrapper_state(self.envs[index])
            self._num_created[index] += 1
            if self._on_env_created is not None:
                self._on_env_created(self._first_index + index, self.envs[index])
        return self.envs[index]

    def _check_distinct(self, index: int) -> None:
        """Check that the creator returned another environment than for the other indices.

        Raises:
            ConfigError: it did not; steps would go to one environment and mix its episodes.
        """
        base = self._unwrapped[index] = unwrapped(self.envs[index])
        for other, env in enumerate(self._unwrapped):
            if other != index and env is base:
                raise ConfigError(
                    f"env: the creator returned the same environment for sub-environments {other} "
                    f"and {index}: create it inside of the function, or pass the environment itself"
                )

    def reset(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Start an episode; recreate the environment if its reset fails.

        Returns:
            the first observation and info.
        """
        while True:
            env, seed = self.get(index), None
            if not self._seeded[index]:
                count = self._num_created[index]
                purpose = ("restart", count) if count > 1 else ()
                seed = derive_seed(self._seed, "env", self._first_index + index, *purpose)
                self._seeded[index] = True
            rng = None if seed is not None else find_rng(env)
            rng_state = None if rng is None else rng.bit_generator.state
            wrapper_state = None
            if self._have_wrapper_state[index]:
                with suppress(Exception):  # it may need a reset; else saving raises it
                    wrapper_state = get_env_state(env)
            self._resets[index] = seed, rng_state, wrapper_state
            self.action_logs[index], self._unlogged_steps[index] = [], 0
            started = time.perf_counter()
            try:
                result = env.reset() if seed is None else env.reset(seed=seed)
                self.reset_s += time.perf_counter() - started
                check_result("reset", result, RESET_RESULTS)
                self._has_reset[index] = True
                return result
            except ConfigError:
                raise
            except Exception as error:
                if isinstance(error, TypeError) and _NO_SEED.search(str(error)):
                    raise ConfigError(
                        f"env: {env_name(env)}.reset() must accept seed= and options=, as in "
                        "`def reset(self, *, seed=None, options=None)`"
                    ) from error
                self.handle_failure(index, error, "reset")

    def handle_failure(self, index: int, error: Exception, method: str | None) -> None:
        """Close a failed environment, so that the next access recreates it.

        Args:
            index: index of the environment.
            error: the exception that it raised.
            method: its method that raised; None for its creation.

        Raises:
            error: the environment failed more often in a row than `max_restarts` allows, or never
                worked and cannot be expected to.
        """
        if isinstance(error, BdbQuit):  # the user has left the debugger
            raise error
        env = self.envs[index]
        name = self._name if env is None else env_name(env)
        call = f"the creation of {name}" if method is None else f"{name}.{method}()"
        origin = f"{call}, {self.label(index)} of worker {self._worker_index}"
        created = self._num_created[index] > 0
        permanent = (
            (isinstance(error, CODE_ERRORS) and not self._has_finished[index])
            or (isinstance(error, RESET_ERRORS) and not self._has_reset[index])
            or isinstance(error, NotImplementedError)
        )
        if permanent or not created:
            add_note(error, f"raised by {origin}")
            self._discard(index)
            raise error
        self.num_restarts += 1
        step = self._unlogged_steps[index] + len(self.action_logs[index])
        step = step if method == "step" else 0
        is_repeated, self._failed_steps[index] = step == self._failed_steps[index], step
        if self._recovered[index] and not is_repeated:
            self._failures[index] = 0
        self._recovered[index] = False
        is_late = step > LATE_STEPS and not (is_repeated or isinstance(error, TimeoutError))
        (self._late_failures if is_late else self._failures)[index] += 1
        early, late = self._failures[index], self._late_failures[index]
        if early > self._max_restarts or late > LATE_FACTOR * self._max_restarts:
            repeated = f", which failed {early + late} times in a row" if early + late > 1 else ""
            setting = f"max_num_env_restarts={self._max_restarts}"
            add_note(error, f"raised by {origin}{repeated} ({setting})")
            self._failures[index] = self._late_failures[index] = 0
            self._discard(index)
            raise error
        limit = self._max_restarts * (LATE_FACTOR if is_late else 1)
        self._log_failure(origin, error, method, limit)
        self._discard(index)

    def _log_failure(self, origin: str, error: Exception, method: str | None, limit: int) -> None:
        """Log the first error of each type and method, and once that such errors are repeated."""
        kind = type(error), method
        self._num_logged[kind] += 1
        if self._num_logged[kind] == 1:
            log.warning(
                "%s, raised %r%s: recreating the environment (at most %d times in a row) and "
                "discarding the steps of its episode since the last fragment",
                origin, error, _place(error), limit,
            )  # fmt: skip
        elif self._num_logged[kind] == 2:
            log.warning(
                "%s, raised %s again; further ones of worker %d are not logged, but counted in "
                "num_env_restarts, in an evaluation in num_faulty_episodes",
                origin, type(error).__name__, self._worker_index,
            )  # fmt: skip

    def _discard(self, index: int) -> None:
        env, self.envs[index] = self.envs[index], None
        self._seeded[index] = False
        close_quietly(env, self.label(index))

    def mark_finished(self, index: int) -> None:
        """Reset the failure counts of an environment that completed an episode."""
        self._has_finished[index] = True
        self._failures[index] = self._late_failures[index] = 0

    def mark_healthy(self, indices: Iterable[int]) -> None:
        """Note that environments completed a fragment."""
        for index in indices:
            self._has_finished[index] = self._recovered[index] = True
            self._late_failures[index] = 0
            if self._resets[index] is None or _is_too_long(self.action_logs[index]):
                self._unlogged_steps[index] += len(self.action_logs[index])
                self._resets[index], self.action_logs[index] = None, []

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what `replay` needs to bring each environment to its current step."""
        return {
            "resets": list(self._resets),
            "action_logs": [pack_actions(actions) for actions in self.action_logs],
            "env_states": [get_env_state(env) for env in self.envs],
            "num_created": list(self._num_created),
            "seeded": list(self._seeded),
            "failures": list(self._failures),
            "late_failures": list(self._late_failures),
            "failed_steps": list(self._failed_steps),
            "recovered": list(self._recovered),
            "unlogged_steps": list(self._unlogged_steps),
            "has_reset": list(self._has_reset),
            "has_finished": list(self._has_finished),
            "num_restarts": self.num_restarts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Recreate all environments with the counters of a saved state; `replay` each afterwards.

        Raises:
            ValueError: the state has another number of environments.
        """
        check_restarting_envs_state(state, len(self.envs))
        for index, env in enumerate(self.envs):
            close_quietly(env, self.label(index))
            self.envs[index] = None
        self._num_created = [0] * len(self.envs)
        self._failures, self._late_failures = list(state["failures"]), list(state["late_failures"])
        self._failed_steps, self._recovered = list(state["failed_steps"]), list(state["recovered"])
        self._has_reset, self._has_finished = list(state["has_reset"]), list(state["has_finished"])
        self.num_restarts = state["num_restarts"]
        self._unlogged_steps = [0] * len(self.envs)
        for index in range(len(self.envs)):
            self.get(index)
        self._num_created, self._seeded = list(state["num_created"]), list(state["seeded"])

    def replay(self, index: int, state: dict[str, Any], matches: Callable[[Any], bool]) -> bool:
        """Bring an environment to the step at which it was saved.

        It restores the environment's own state if that was saved; otherwise it repeats the
        recorded reset, replays the logged actions, and restores the state of a wrapper.

        Args:
            index: index of the environment.
            state: result of `state_dict()`.
            matches: gets each observation of the replayed episode in turn; its last result tells
                whether the episode has come to the observations before the checkpoint.

        Returns:
            whether it succeeded; if not, the caller must start a new episode, whose seed is that of
            a recreated environment.
        """
        if self._replay(index, state, matches):
            return True
        self._num_created[index] += 1
        self._seeded[index] = False
        return False

    def _replay(self, index: int, state: dict[str, Any], matches: Callable[[Any], bool]) -> bool:
        env, env_state = self.envs[index], state["env_states"][index]
        reset = state["resets"][index]
        try:
            actions = unpack_actions(state["action_logs"][index])
            if env_state is not None and has_whole_state(env):
                env.reset()  # wrappers require it before the first step
                if env_state["rng"] is not None:
                    self._rng_of(index)  # creates the generator that set_env_state restores
                self._resets[index], self.action_logs[index] = None, []
                self._unlogged_steps[index] = state["unlogged_steps"][index] + len(actions)
                return set_env_state(env, env_state)
            replayed = reset is not None and self._repeat_episode(index, reset, actions, matches)
            if env_state is not None:  # of a wrapper, which keeps it in the next episodes
                return set_env_state(env, env_state) and replayed
        except Exception as error:
            log.warning("%s failed to replay its episode: %r", self.label(index), error)
            return False
        return replayed

    def _repeat_episode(
        self, index: int, reset: Any, actions: list[Any], matches: Callable[[Any], bool]
    ) -> bool:
        """Repeat a reset and actions; return whether the last observation matches."""
        env, (seed, rng_state, wrapper_state) = self.envs[index], reset
        if wrapper_state is not None:
            self._first_reset(index)  # creates the generator that set_env_state restores
            if not set_env_state(env, wrapper_state):
                return False
        if rng_state is not None:
            rng = self._rng_of(index)
            if rng is None:
                return False
            restore_stream(rng, rng_state)
        observation, _ = env.reset() if seed is None else env.reset(seed=seed)
        has_matched = matches(observation)
        for action in actions:
            observation, *_ = env.step(copy.deepcopy(action))  # it may modify the action
            has_matched = matches(observation)
        self._resets[index], self.action_logs[index] = reset, actions
        return has_matched

    def _rng_of(self, index: int) -> np.random.Generator | None:
        """Return the random generator of an environment; a reset with a seed creates it if there is
        none yet. None if the environment has none."""
        if find_rng(self.envs[index]) is None:
            self._first_reset(index)
        return find_rng(self.envs[index])

    def _first_reset(self, index: int) -> None:
        """Reset an environment; wrappers require a reset before they are used."""
        self.envs[index].reset(seed=derive_seed(self._seed, "env", self._first_index + index))

    def close(self) -> None:
        """Close all environments."""
        for index, env in enumerate(self.envs):
            close_quietly(env, self.label(index))


def close_quietly(env: Any, label: str) -> None:
    """Close an environment, which may be None; log errors instead of raising them."""
    try:
        if env is not None:
            env.close()
    except Exception as error:
        log.warning("close() of %s raised %r", label, error)


def _place(error: Exception) -> str:
    """Return ` (file:line)` of the code that raised an error, or an empty string."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _is_too_long(actions: list[Any]) -> bool:
    """Return whether the actions of an episode are too many to keep them for a replay."""
    count = len(actions)
    if count > MAX_LOGGED_ACTIONS or not count or type(actions[-1]) is int:
        return count > MAX_LOGGED_ACTIONS
    some = actions[:: max(1, count // 10)]
    return count * sum(map(size_of_action, some)) / len(some) > MAX_LOGGED_BYTES
