"""The saved states of a WorkerSet's workers: check them, and send them to the remote workers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from flowrl.iter import ray_health
from flowrl.iter.ray_runtime import death_errors
from flowrl.iter.recovery import ConstructorError
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.weight_sync import resume_worker
from flowrl.state_schema import Fields, Natural, check_state

log = logging.getLogger("flowrl")

_STATE: Fields = {
    "local": dict[str, Any], "remote": list[dict[str, Any] | None], "started": bool,
    "restart_counts": list[Natural], "num_configured": Natural,
    "env_steps_by_worker": dict[int, Natural], "env_steps_of_removed_workers": Natural,
}  # fmt: skip


def highest(counts: Sequence[int], others: Sequence[int]) -> list[int]:
    """Return the higher one of two numbers at each index."""
    return [max(pair) for pair in zip_longest(counts, others, fillvalue=0)]


def check_worker_states(
    state: dict[str, Any], local_worker: RolloutWorker, num_configured: int
) -> None:
    """Check that a state can be loaded.

    Args:
        state: the state of a WorkerSet.
        local_worker: the local worker; the remote ones are configured as it is.
        num_configured: configured number of remote workers.

    Raises:
        KeyError, ValueError: the state is damaged, or belongs to another set of workers.
    """
    check_state(state, _STATE, "workers")
    if state["num_configured"] != num_configured:
        raise ValueError(
            f"the state has {state['num_configured']} configured workers, this set {num_configured}"
        )
    for worker_state in (state["local"], *state["remote"]):
        if worker_state is not None:
            local_worker.check_sampling_state(worker_state)
    if len(state["restart_counts"]) < len(state["remote"]):
        raise ValueError("workers/restart_counts: must have an entry for each worker")


def send_states(workers: Any, states: list[dict[str, Any] | None]) -> int:
    """Send loaded states to the remote workers, and wait.

    Workers that have died are replaced, if the settings allow it; otherwise the plan reports them
    at its next pull.

    Args:
        workers: the WorkerSet.
        states: state of each remote worker; None for one that is new.

    Returns:
        number of episodes that could not be resumed.
    """
    loaded = {index: state for index, state in enumerate(states) if state is not None}
    refs = {index: _send_state(workers, index, state) for index, state in loaded.items()}
    restarted = 0
    for index, state in loaded.items():
        restarts = _restarted_episodes(index, refs[index])
        steps = dict(workers.env_steps_by_worker), workers.env_steps_of_removed_workers
        for _ in range(workers.config.recovery.max_identical_deaths):
            if restarts is not None or not workers.replace(index):
                break
            restarts = _restarted_episodes(index, _send_state(workers, index, state))
        # the new worker continues to count
        workers.env_steps_by_worker, workers.env_steps_of_removed_workers = steps
        restarted += restarts or 0
    if restarted:
        log.warning("%d episodes of remote workers could not be resumed", restarted)
    return restarted


def _send_state(workers: Any, index: int, state: dict[str, Any]) -> Any:
    """Send a loaded state to a remote worker; return the ref of `_restarted_episodes`."""
    worker = workers.remote_workers()[index]
    payload = workers.take_weights(index)
    if RolloutWorker.versions_in(state) != workers.weight_sync.versions():
        workers.weight_sync.forget(index)  # its next request carries the newest weights
    return worker.apply.remote(resume_worker, payload, state)


def _restarted_episodes(index: int, ref: Any) -> int | None:
    """Return the reply to a state: the number of episodes that begin again; None if the worker has
    died."""
    died: tuple[type[Exception], ...] = (*death_errors(), ConstructorError)
    try:
        return int(ray_health.get(ref))
    except died as error:
        log.warning("worker %d has died (%s)", index + 1, type(error).__name__)
        return None


def env_steps_in(state: dict[str, Any]) -> int:
    """Return the number of env steps of all workers in the state of a WorkerSet, including removed
    workers. For a worker without a state, it is the number that the plan counted."""
    steps = int(state["env_steps_of_removed_workers"])
    for index, worker in enumerate(state["remote"] or [state["local"]]):
        counted = state["env_steps_by_worker"].get(index, 0)
        steps += counted if worker is None else RolloutWorker.env_steps_in(worker)
    return steps
