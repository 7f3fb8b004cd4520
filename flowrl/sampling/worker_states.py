"""Collect the sampling states of a WorkerSet's remote workers, and send loaded states to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from flowrl.iter import ray_health
from flowrl.iter.ray_runtime import death_errors
from flowrl.iter.recovery import ConstructorError
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.weight_sync import restart_worker, resume_worker

log = logging.getLogger("flowrl")
STATE_TIMEOUT_S = 15.0  # limit for the remote workers to return their states


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


class RemoteStates:
    """Collects the sampling states of remote workers.

    A worker returns its state after the fragments that were requested before. A worker that does
    not answer in time is not waited for again until it has answered.

    Args:
        timeout_s: limit for all workers to answer.
    """

    def __init__(self, timeout_s: float = STATE_TIMEOUT_S):
        self._timeout_s = timeout_s
        self._late: list[tuple[Any, Any]] = []  # (actor, ref of its state) without an answer

    def collect(self, actors: Sequence[Any]) -> list[dict[str, Any] | None]:
        """Return the sampling state of each worker; None for one that does not return it."""
        import ray

        self._late = [pair for pair in self._late if not ray.wait([pair[1]], timeout=0)[0]]
        hanging = [actor for actor, _ in self._late]
        refs = [
            None
            if any(actor is late for late in hanging)
            else actor.apply.remote(RolloutWorker.sampling_state_dict)
            for actor in actors
        ]
        states: list[dict[str, Any] | None] = []
        deadline = time.monotonic() + self._timeout_s
        for number, (actor, ref) in enumerate(zip(actors, refs, strict=True), start=1):
            state, problem = None, "it has not answered an earlier request either"
            if ref is not None:
                try:
                    state = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
                except ray.exceptions.GetTimeoutError:
                    self._late.append((actor, ref))
                    problem = (
                        f"no answer in {self._timeout_s:g} s; if it hangs, sample_timeout_s "
                        "replaces it"
                    )
                except Exception as error:
                    problem = repr(error)
            states.append(state)
            if state is None:
                log.warning(
                    "worker %d returned no state; resuming from this checkpoint starts new "
                    "episodes there (%s)", number, problem,
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
