"""Access to the counters of gymnasium's TimeLimit, which has no public interface for them."""

from __future__ import annotations

from gymnasium.wrappers import TimeLimit


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
