"""Collect the sampling states of a WorkerSet's remote workers, and send loaded states to them."""

from __future__ import annotations

import logging
import time
from typing import Any

from flowrl.iter import ray_health
from flowrl.iter.ray_runtime import death_errors
from flowrl.iter.recovery import ConstructorError
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.weight_sync import restart_worker, resume_worker

log = logging.getLogger("flowrl")
STATE_TIMEOUT_S = 60.0  # limit for a remote worker to return its state


def send_states(workers: Any, states: list[dict[str, Any] | None]) -> int:
    """Send loaded states to the remote workers, and wait.

    Workers that have died are replaced, if the settings allow it; otherwise the plan reports them
    at its next pull.

    Args:
        workers: the WorkerSet.
        states: state of each remote worker; None for one that starts anew.

    Returns:
        number of episodes that could not be resumed.
    """
    refs = [_send_state(workers, index, state) for index, state in enumerate(states)]
    restarted = 0
    for index, (ref, state) in enumerate(zip(refs, states, strict=True)):
        restarts = _restarted_episodes(index, ref)
        steps = dict(workers.env_steps_by_worker), workers.env_steps_of_removed_workers
        for _ in range(workers.config.recovery.max_identical_deaths):
            if restarts is not None or not workers.replace(index):
                break
            restarts = _restarted_episodes(index, _send_state(workers, index, state))
        if state is not None:  # the new worker continues to count
            workers.env_steps_by_worker, workers.env_steps_of_removed_workers = steps
        restarted += restarts or 0
    if restarted:
        log.warning("%d episodes of remote workers could not be resumed", restarted)
    return restarted


def _send_state(workers: Any, index: int, state: dict[str, Any] | None) -> Any:
    """Send a loaded state to a remote worker; return the ref of `_restarted_episodes`."""
    worker = workers.remote_workers()[index]
    if state is None:
        workers.weight_sync.forget(index)
        return worker.apply.remote(restart_worker)
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


def states_of_actors(actors: list[Any]) -> list[dict[str, Any] | None]:
    """Return the sampling state of each remote worker; None for one that does not return it."""
    import ray

    refs = [actor.apply.remote(RolloutWorker.sampling_state_dict) for actor in actors]
    states: list[dict[str, Any] | None] = []
    deadline = time.monotonic() + STATE_TIMEOUT_S
    for number, ref in enumerate(refs, start=1):
        try:
            states.append(ray.get(ref, timeout=max(0.0, deadline - time.monotonic())))
        except Exception as error:
            states.append(None)
            log.warning(
                "worker %d returned no state; resuming from this checkpoint starts new episodes "
                "there (%r)", number, error,
            )  # fmt: skip
    return states


def env_steps_in(state: dict[str, Any]) -> int:
    """Return the number of env steps of all workers in the state of a WorkerSet, including removed
    workers. For a worker without a state, it is the number that the plan counted."""
    steps = int(state["env_steps_of_removed_workers"])
    for index, worker in enumerate(state["remote"] or [state["local"]]):
        counted = state["env_steps_by_worker"].get(index, 0)
        steps += counted if worker is None else RolloutWorker.env_steps_in(worker)
    return steps
