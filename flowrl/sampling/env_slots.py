"""EnvSlots: environments that are made when they are needed, and anew when they break."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from flowrl.policies.config import ConfigError
from flowrl.seeding import derive_seed

log = logging.getLogger("flowrl")


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

    def close(self) -> None:
        for index, env in enumerate(self.envs):
            close_quietly(env, index)


def close_quietly(env: Any, index: int) -> None:
    try:
        if env is not None:
            env.close()
    except Exception as error:
        log.warning("close() of sub-environment %d raised %r", index, error)
