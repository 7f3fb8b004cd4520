"""EnvRecord: what the environments at an index have done; saved states of RestartingEnvs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowrl.state_schema import Fields, Natural, check_state


class History(NamedTuple):
    """The part of an EnvRecord that continues in another process; see EnvRecord."""

    num_created: int = 0
    has_reset: bool = False
    has_finished: bool = False


NEW = History()


@dataclass(slots=True)
class EnvRecord:
    """What the environments at an index have done since the first one was created.

    Attributes:
        num_created: how often it was created; selects its seeds.
        has_reset: whether a reset succeeded.
        has_finished: whether an episode or a fragment was completed.
        seeded: whether the present environment was reset with a seed.
        failures: consecutive failures.
        late_failures: consecutive failures after LATE_STEPS steps of an episode.
        failed_step: step of the episode at the last failure.
        recovered: whether a fragment was completed since the last failure.
        reset: seed of the episode's reset, and the states of the random generator and of a wrapper
            before it; None if the episode cannot be repeated.
        unlogged_steps: steps of the episode before those in the log of actions.
    """

    num_created: int = 0
    has_reset: bool = False
    has_finished: bool = False
    seeded: bool = False
    failures: int = 0
    late_failures: int = 0
    failed_step: int = 0
    recovered: bool = False
    reset: Any = None
    unlogged_steps: int = 0


_STATE: Fields = {"envs": list[dict[str, Any]], "num_restarts": Natural}
_ENV_STATE: Fields = {
    "num_created": Natural,
    "has_reset": bool,
    "has_finished": bool,
    "seeded": bool,
    "failures": Natural,
    "late_failures": Natural,
    "failed_step": Natural,
    "recovered": bool,
    "reset": Any,
    "unlogged_steps": Natural,
    "actions": list[Any],
    "env_state": Any,
}


def check_restarting_envs_state(state: dict[str, Any], num_envs: int) -> None:
    """Raise StateError or ValueError if a state is not one of `num_envs` environments."""
    check_state(state, _STATE, "environments")
    for index, env_state in enumerate(state["envs"]):
        check_state(env_state, _ENV_STATE, f"environments/envs/{index}")
    if len(state["envs"]) != num_envs:
        raise ValueError(f"the state has {len(state['envs'])} environments, expected {num_envs}")


def state_of(record: EnvRecord, actions: list[Any], env_state: Any) -> dict[str, Any]:
    """Return the state of one environment.

    Args:
        record: its record.
        actions: the logged actions of its episode, packed.
        env_state: its own state, from `get_env_state`.
    """
    fields = {name: getattr(record, name) for name in EnvRecord.__slots__}  # asdict() copies them
    return {**fields, "actions": actions, "env_state": env_state}


def record_of(state: dict[str, Any]) -> EnvRecord:
    """Return the record in the state of one environment."""
    return EnvRecord(**{name: state[name] for name in EnvRecord.__slots__})


def split_state(state: dict[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """Return the state of each environment alone, with num_restarts 0.

    Raises:
        ValueError: the state has another number of environments.
    """
    check_restarting_envs_state(state, num_envs)
    return [{"envs": [env_state], "num_restarts": 0} for env_state in state["envs"]]


def state_without_episode(num_created: int) -> dict[str, Any]:
    """Return the state of an environment that must start a new episode.

    Args:
        num_created: how often it was created.
    """
    record = EnvRecord(num_created, has_reset=True, has_finished=True)
    return {"envs": [state_of(record, [], None)], "num_restarts": 0}


def merged_state(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of all environments from the states of each alone."""
    return {
        "envs": [env_state for state in states for env_state in state["envs"]],
        "num_restarts": sum(state["num_restarts"] for state in states),
    }
