"""Check, split and merge the saved states of RestartingEnvs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowrl.state_schema import Fields, Natural, check_state

_STATE: Fields = {
    "resets": list[Any],
    "action_logs": list[Any],
    "env_states": list[Any],
    "num_created": list[Natural],
    "seeded": list[bool],
    "failures": list[Natural],
    "late_failures": list[Natural],
    "failed_steps": list[Natural],
    "recovered": list[bool],
    "unlogged_steps": list[Natural],
    "has_reset": list[bool],
    "has_finished": list[bool],
    "num_restarts": Natural,
}
_LISTS = _STATE.keys() - {"num_restarts"}  # an element per environment


def check_restarting_envs_state(state: dict[str, Any], num_envs: int) -> None:
    """Raise StateError or ValueError if a state is not one of `num_envs` environments."""
    check_state(state, _STATE, "environments")
    saved = len(state["resets"])
    for name in _LISTS:
        if len(state[name]) != saved:
            raise ValueError(f"environments/{name}: must have {saved} entries")
    if saved != num_envs:
        raise ValueError(f"the state has {saved} environments, expected {num_envs}")


def split_state(state: dict[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """Return the state of each environment alone, with num_restarts 0.

    Raises:
        ValueError: the state has another number of environments.
    """
    check_restarting_envs_state(state, num_envs)
    return [
        {name: state[name][i : i + 1] for name in _LISTS} | {"num_restarts": 0}
        for i in range(num_envs)
    ]


def state_without_episode(num_created: int) -> dict[str, Any]:
    """Return the state of an environment that must start a new episode.

    Args:
        num_created: how often it was created.
    """
    return {
        "resets": [None], "action_logs": [[]], "env_states": [None], "num_created": [num_created],
        "seeded": [False], "failures": [0], "late_failures": [0], "failed_steps": [0],
        "recovered": [False], "unlogged_steps": [0], "has_reset": [True], "has_finished": [True],
        "num_restarts": 0,
    }  # fmt: skip


def merged_state(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of all environments from the states of each alone."""
    merged: dict[str, Any] = {
        name: [value for state in states for value in state[name]] for name in _LISTS
    }
    return merged | {"num_restarts": sum(state["num_restarts"] for state in states)}


def check_vector_env_state(state: dict[str, Any] | None) -> None:
    """Raise KeyError if a state of environments that step together lacks an entry.

    Args:
        state: result of `state_dict()` of RestartingEnvs or of GymnasiumVectorEnv, or None.
    """
    if state is None or "num_restores" in state:
        return
    for key in _STATE:
        if key not in state:
            raise KeyError(key)
