"""Time limits of environments: gymnasium's TimeLimit, whose counters have no public interface."""

from __future__ import annotations

from typing import Any

from gymnasium.wrappers import TimeLimit

from flowrl.envs.validation import STEP_RESULTS, check_result


class Horizon(TimeLimit[Any, Any]):
    """A TimeLimit that checks what `step` returns before it reads the parts."""

    def step(self, action: Any) -> Any:
        returned = self.env.step(action)
        check_result("step", returned, STEP_RESULTS)
        observation, reward, terminated, truncated, info = returned
        assert self._elapsed_steps is not None
        self._elapsed_steps += 1
        if self._elapsed_steps >= self._max_episode_steps:
            truncated = True
        return observation, reward, terminated, truncated, info


def get_max_steps(limit: TimeLimit) -> int:
    """Return the number of steps after which a TimeLimit truncates the episode."""
    return limit._max_episode_steps


def set_max_steps(limit: TimeLimit, steps: int) -> None:
    """Set the number of steps after which a TimeLimit truncates the episode."""
    limit._max_episode_steps = steps


def get_elapsed_steps(limit: TimeLimit) -> int | None:
    """Return the number of steps since the last reset; None before the first one."""
    return limit._elapsed_steps


def set_elapsed_steps(limit: TimeLimit, steps: int | None) -> None:
    """Set the number of steps since the last reset."""
    limit._elapsed_steps = steps  # type: ignore[assignment]
