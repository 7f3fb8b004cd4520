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
from typing import Any

import gymnasium as gym
import numpy as np

from flowrl.envs.env_record import (
    NEW,
    EnvRecord,
    History,
    check_restarting_envs_state,
    record_of,
    state_of,
)
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
MAX_ACTION_TEXT = 200  # characters of the action in the note of an error
LATE_FACTOR = 100  # times as many late failures as others are allowed
_NO_SEED = re.compile(r"reset\(\) got an unexpected keyword argument '(seed|options)'")


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
        history: what each environment has done in earlier processes.
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
        self._records = [EnvRecord(**history._asdict()) for _ in range(num_envs)]
        self.envs: list[Any] = [None] * num_envs
        self._unwrapped: list[Any] = [None] * num_envs
        self._have_wrapper_state = [False] * num_envs
        self.action_logs: list[list[Any]] = [[] for _ in range(num_envs)]
        try:
            self.get(0)
        except BaseException:
            self.close()
            raise

    def history(self, index: int) -> History:
        """Return what the environments with an index have done."""
        record = self._records[index]
        return History(record.num_created, record.has_reset, record.has_finished)

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
            self._records[index].num_created += 1
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
        record = self._records[index]
        while True:
            env, seed = self.get(index), None
            if not record.seeded:
                count = record.num_created
                purpose = ("restart", count) if count > 1 else ()
                seed = derive_seed(self._seed, "env", self._first_index + index, *purpose)
                record.seeded = True
            rng = None if seed is not None else find_rng(env)
            rng_state = None if rng is None else rng.bit_generator.state
            wrapper_state = None
            if self._have_wrapper_state[index]:
                with suppress(Exception):  # it may need a reset; else saving raises it
                    wrapper_state = get_env_state(env, warns=False)
            record.reset = seed, rng_state, wrapper_state
            self.action_logs[index], record.unlogged_steps = [], 0
            started = time.perf_counter()
            try:
                result = env.reset() if seed is None else env.reset(seed=seed)
                self.reset_s += time.perf_counter() - started
                check_result("reset", result, RESET_RESULTS)
                record.has_reset = True
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
        record = self._records[index]
        permanent = (
            not record.num_created
            or (isinstance(error, CODE_ERRORS) and not record.has_finished)
            or (isinstance(error, RESET_ERRORS) and not record.has_reset)
            or isinstance(error, NotImplementedError)
        )
        if permanent:
            self._note(error, f"raised by {origin}", index, method)
            self._discard(index)
            raise error
        self.num_restarts += 1
        is_late = self._count_failure(index, error, method)
        early, late = record.failures, record.late_failures
        if early > self._max_restarts or late > LATE_FACTOR * self._max_restarts:
            repeated = f", which failed {early + late} times in a row" if early + late > 1 else ""
            setting = f"max_num_env_restarts={self._max_restarts}"
            self._note(error, f"raised by {origin}{repeated} ({setting})", index, method)
            record.failures = record.late_failures = 0
            self._discard(index)
            raise error
        limit = self._max_restarts * (LATE_FACTOR if is_late else 1)
        self._log_failure(origin, error, method, limit)
        self._discard(index)

    def _note(self, error: Exception, origin: str, index: int, method: str | None) -> None:
        """Add notes to an error: where it was raised, and the action of the step."""
        add_note(error, origin)
        if method == "step" and self.action_logs[index]:
            action = " ".join(repr(self.action_logs[index][-1]).split())
            add_note(error, f"the action was {action[:MAX_ACTION_TEXT]}")

    def _count_failure(self, index: int, error: Exception, method: str | None) -> bool:
        """Count a failure; return whether it is a late one."""
        record, step = self._records[index], 0
        if method == "step":
            step = record.unlogged_steps + len(self.action_logs[index])
        is_repeated, record.failed_step = step == record.failed_step, step
        if record.recovered and not is_repeated:
            record.failures = 0
        record.recovered = False
        is_late = step > LATE_STEPS and not (is_repeated or isinstance(error, TimeoutError))
        if is_late:
            record.late_failures += 1
        else:
            record.failures += 1
        return is_late

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
        self._records[index].seeded = False
        close_quietly(env, self.label(index))

    def mark_finished(self, index: int) -> None:
        """Reset the failure counts of an environment that completed an episode."""
        record = self._records[index]
        record.has_finished = True
        record.failures = record.late_failures = 0

    def mark_healthy(self, indices: Iterable[int]) -> None:
        """Note that environments completed a fragment."""
        for index in indices:
            record = self._records[index]
            record.has_finished = record.recovered = True
            record.late_failures = 0
            if record.reset is None or _is_too_long(self.action_logs[index]):
                record.unlogged_steps += len(self.action_logs[index])
                record.reset, self.action_logs[index] = None, []

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what `replay` needs to bring each environment to its current step."""
        parts = zip(self._records, self.action_logs, self.envs, strict=True)
        return {
            "envs": [
                state_of(record, pack_actions(actions), get_env_state(env))
                for record, actions, env in parts
            ],
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
        self.num_restarts = state["num_restarts"]
        self._records = [record_of(env_state) for env_state in state["envs"]]
        for index, record in enumerate(self._records):
            # errors of the first creation are raised
            num_created, record.num_created = record.num_created, 0
            self.get(index)
            record.num_created = num_created

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
        self._records[index].num_created += 1
        self._records[index].seeded = False
        return False

    def _replay(self, index: int, state: dict[str, Any], matches: Callable[[Any], bool]) -> bool:
        env, record, saved = self.envs[index], self._records[index], state["envs"][index]
        env_state, reset = saved["env_state"], saved["reset"]
        try:
            actions = unpack_actions(saved["actions"])
            if env_state is not None and has_whole_state(env):
                env.reset()  # wrappers require it before the first step
                if env_state["rng"] is not None:
                    self._rng_of(index)  # creates the generator that set_env_state restores
                record.reset, self.action_logs[index] = None, []
                record.unlogged_steps = saved["unlogged_steps"] + len(actions)
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
        self._records[index].reset, self.action_logs[index] = reset, actions
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
