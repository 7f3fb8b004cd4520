"""EnvSlots: environments that are made when they are needed, and anew when they break.

They write a journal of the episode that each is in: how it was reset, and the actions since. A
checkpoint has it, and who goes on from there plays the episode again up to where it was.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from flowrl.data.serialization import can_be_saved
from flowrl.seeding import derive_seed, restore_stream
from flowrl.settings import ConfigError

log = logging.getLogger("flowrl")

LONGEST_JOURNAL = 50_000  # actions of one episode; longer ones are not played again


class EnvSlots:
    """Environments that are made when they are needed, and anew when they break.

    Args:
        make: environment number i.
        num_envs: how many.
        seed: each environment's first reset gets a seed derived from it; None for none.
        max_restarts: of one environment in a row, without an episode or a fragment in between that
            it got through; then its error is raised.
        on_made: told of every environment that was made.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        num_envs: int,
        seed: int | None,
        max_restarts: int,
        on_made: Callable[[int, Any], None] | None = None,
    ):
        self.num_restarts = 0
        self._on_made = on_made
        self._make = make
        self._seed = seed
        self._max_restarts = max_restarts
        self._failures = [0] * num_envs
        self._made = [0] * num_envs  # environments so far, of each number
        self._seeded = [False] * num_envs
        self.envs: list[Any] = [None] * num_envs
        # of the episode that each is in: the seed of its reset, or the random stream before it
        self._began: list[Any] = [None] * num_envs
        self.journals: list[list[Any]] = [[] for _ in range(num_envs)]
        self.at(0)

    def at(self, index: int) -> Any:
        """Environment number `index`, made if it is not there."""
        while self.envs[index] is None:
            try:
                self.envs[index] = self._make(index)
            except ConfigError:
                raise
            except Exception as error:
                self.blame(index, error, "while being made")
                continue
            if self.envs[index] is None:
                raise ConfigError("env: the creator gave None: does it return the environment?")
            self._made[index] += 1
            if self._on_made is not None:
                self._on_made(index, self.envs[index])
        return self.envs[index]

    def reset(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Start an episode; an environment that cannot is made anew."""
        while True:
            env, seed = self.at(index), None
            if not self._seeded[index]:
                purpose = ("restart", self._made[index]) if self._made[index] > 1 else ()
                seed = derive_seed(self._seed, "env", index, *purpose)
                self._seeded[index] = True
            rng = None if seed is not None else generator_of(env)
            self._began[index] = seed, None if rng is None else rng.bit_generator.state
            self.journals[index] = []
            try:
                observation, info = env.reset() if seed is None else env.reset(seed=seed)
                return observation, info
            except ConfigError:
                raise
            except Exception as error:
                self.blame(index, error, "by reset()")

    def blame(self, index: int, error: Exception, where: str) -> None:
        """Environment `index` broke: close it, so that it is made anew.

        Raises:
            error: it has done so too often.
        """
        if isinstance(error, ValueError) and "values to unpack" in str(error):
            raise ConfigError(
                f"env: sub-environment {index}: reset() gives (observation, info), step() gives "
                f"(observation, reward, terminated, truncated, info): {error}"
            ) from error
        self._failures[index] += 1
        self.num_restarts += 1
        if self._failures[index] > self._max_restarts:
            times = self._failures[index]
            error.add_note(
                f"raised {where} of sub-environment {index}, which failed {times} times in a row"
                if times > 1
                else f"raised {where} of sub-environment {index}"
            )
            self._failures[index] = 0
            self._drop(index)
            raise error
        log.warning(
            "sub-environment %d raised %r %s: it is made anew (%d of at most %d times in a row), "
            "what its episode gave since the last fragment is dropped",
            index, error, where, self._failures[index], self._max_restarts,
        )  # fmt: skip
        self._drop(index)

    def _drop(self, index: int) -> None:
        env, self.envs[index] = self.envs[index], None
        self._seeded[index] = False
        close_quietly(env, index)

    def settle(self, slots: Any) -> None:
        for index in slots:
            self._failures[index] = 0
            if len(self.journals[index]) > LONGEST_JOURNAL:
                self._began[index], self.journals[index] = None, []

    # -- state -------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """How the environments came to be where they are."""
        return {
            "began": list(self._began),
            "journals": [packed(journal) for journal in self.journals],
            "own": [own_state(env) for env in self.envs],
            "made": list(self._made),
            "seeded": list(self._seeded),
            "failures": list(self._failures),
            "restarts": self.num_restarts,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """New environments, which go on with the random streams of those that were saved."""
        if len(state["began"]) != len(self.envs):
            raise ValueError(f"a state of {len(state['began'])} environments, not {len(self.envs)}")
        for index, env in enumerate(self.envs):
            close_quietly(env, index)
            self.envs[index] = None
        self._made, self._failures = [0] * len(self.envs), list(state["failures"])
        self.num_restarts = state["restarts"]
        for index in range(len(self.envs)):
            self.at(index)
        self._made, self._seeded = list(state["made"]), list(state["seeded"])

    def replay(self, index: int, state: dict[str, Any], matches: Callable[[Any], bool]) -> bool:
        """Bring environment `index` to where it was saved: by its own state, or by playing its
        episode again, which must end in an observation that matches.

        Returns:
            False where that was not possible; its episode is to begin anew.
        """
        env, own, began = self.envs[index], state["own"][index], state["began"][index]
        try:
            if own is not None:
                env.reset()  # wrappers want it before the first step
                self._began[index], self.journals[index] = None, []
                return take_own_state(env, own)
            if began is None:
                return False
            seed, stream = began
            if stream is not None:
                rng = generator_of(env)
                if rng is None:  # it is made at the first reset
                    env.reset(seed=derive_seed(self._seed, "env", index))
                    rng = generator_of(env)
                if rng is None:
                    return False
                restore_stream(rng, stream)
            observation, _ = env.reset() if seed is None else env.reset(seed=seed)
            journal = unpacked(state["journals"][index])
            for action in journal:
                observation, *_ = env.step(copy.deepcopy(action))  # it may write into it
        except Exception as error:
            log.warning("sub-environment %d could not play its episode again: %r", index, error)
            return False
        self._began[index], self.journals[index] = began, journal
        return matches(observation)

    def close(self) -> None:
        for index, env in enumerate(self.envs):
            close_quietly(env, index)


def generator_of(env: Any) -> np.random.Generator | None:
    """The random generator of an environment, if it has made one."""
    own = getattr(getattr(env, "unwrapped", env), "__dict__", {})
    for name in ("_np_random", "np_random"):
        if isinstance(own.get(name), np.random.Generator):
            return own[name]
    return None


def _with_state(env: Any) -> tuple[Any, list[Any]]:
    """The layer of an environment that can say its state, and take it, and the limits of time
    around it; None where there is none, or something around it that may know more."""
    limits: list[Any] = []
    while env is not None:
        methods: list[Any] = [getattr(env, name, None) for name in ("get_state", "set_state")]
        if all(callable(method) for method in methods):
            with contextlib.suppress(TypeError, ValueError):
                inspect.signature(methods[0]).bind()
                inspect.signature(methods[1]).bind(None)
                return env, limits
            return None, limits
        if isinstance(env, TimeLimit):
            limits.append(env)
        elif not isinstance(env, (OrderEnforcing, PassiveEnvChecker)):
            return None, limits
        env = env.env
    return None, limits


def own_state(env: Any) -> dict[str, Any] | None:
    """What an environment says of itself, its random stream, and how far limits of time are; None
    where it does not, or cannot be saved."""
    layer, limits = _with_state(env)
    if layer is None:
        return None
    rng = generator_of(env)
    state = {
        "state": layer.get_state(),
        "stream": None if rng is None else rng.bit_generator.state,
        "elapsed": [limit._elapsed_steps for limit in limits],
    }
    return copy.deepcopy(state) if can_be_saved(state) else None


def take_own_state(env: Any, state: dict[str, Any]) -> bool:
    """Set an environment to what `own_state` gave; False where it is another kind."""
    layer, limits = _with_state(env)
    if layer is None or len(limits) != len(state["elapsed"]):
        return False
    layer.set_state(state["state"])
    for limit, elapsed in zip(limits, state["elapsed"], strict=True):
        limit._elapsed_steps = elapsed
    rng = generator_of(env)
    if rng is not None and state["stream"] is not None:
        restore_stream(rng, state["stream"])
    return True


def packed(journal: list[Any]) -> list[Any]:
    """Actions as columns: runs of those with the same structure, each the first one and an array
    per leaf."""
    runs: list[Any] = []
    structure = None
    for action in journal:
        leaves, spec = optree.tree_flatten(action)
        about = (spec, [(type(leaf), np.shape(leaf), np.asarray(leaf).dtype) for leaf in leaves])
        if about != structure:
            structure = about
            runs.append([action, [[] for _ in leaves]])
        for column, leaf in zip(runs[-1][1], leaves, strict=True):
            column.append(leaf)
    return [[first, [np.array(column) for column in columns]] for first, columns in runs]


def unpacked(runs: list[Any]) -> list[Any]:
    """What `packed` gave, as actions again."""
    journal = []
    for first, columns in runs:
        leaves, spec = optree.tree_flatten(first)
        plain = [
            isinstance(leaf, (bool, int, float)) and not isinstance(leaf, np.generic)
            for leaf in leaves
        ]
        values = [c.tolist() if p else list(c) for c, p in zip(columns, plain, strict=True)]
        journal += [optree.tree_unflatten(spec, row) for row in zip(*values, strict=True)]
    return journal


def close_quietly(env: Any, index: int) -> None:
    try:
        if env is not None:
            env.close()
    except Exception as error:
        log.warning("close() of sub-environment %d raised %r", index, error)
