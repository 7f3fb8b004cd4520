"""Calls on a WorkerSet's remote workers: get states, change environments, stop them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeVar

from flowrl.iter import ray_health
from flowrl.iter.ray_runtime import death_errors
from flowrl.iter.recovery import STARTING_S, original_error
from flowrl.sampling.rollout_worker import RolloutWorker

T = TypeVar("T")
log = logging.getLogger("flowrl")
CALL_TIMEOUT_S = 15.0  # limit for the remote workers to answer a call
STOP_TIMEOUT_S = 2.0  # limit for the remote workers to close their environments
SLOW_TIMEOUT_S = 60.0  # the same for workers that have answered late


class WorkerCalls:
    """Calls functions on all remote workers, and does not wait long for one that hangs.

    Workers answer in order, after the fragments that were requested before. A worker that is late
    is not called again until it has answered; from then on it has SLOW_TIMEOUT_S. A worker that has
    neither answered nor returned a fragment has STARTING_S more, because its process may be
    starting.

    Args:
        timeout_s: limit for all workers to answer; at most 60.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = min(timeout_s, SLOW_TIMEOUT_S)
        self._late: list[tuple[Any, Any]] = []  # (actor, ref of its answer) without an answer
        self._slow: list[Any] = []  # actors that have answered late
        self._started: list[Any] = []  # actors that have answered

    def get_states(
        self, actors: Sequence[Any], sampled: Container[int]
    ) -> list[dict[str, Any] | None]:
        """Return the sampling state of each worker; None for one without an answer.

        Args:
            actors: the workers.
            sampled: indices of those that have returned a fragment, so their processes have
                started.
        """
        started = [actor for index, actor in enumerate(actors) if index in sampled]
        self._started += [actor for actor in started if not _is_in(actor, self._started)]
        warning = "returned no state; resuming from this checkpoint starts new episodes there"
        return self._call(actors, RolloutWorker.sampling_state_dict, warning, raises=False)

    def foreach_env(self, actors: Sequence[Any], fn: Callable[[Any], T]) -> list[list[T]]:
        """Return fn(environment) for each environment of each worker; an empty list for a worker
        without an answer."""
        warning = "did not call the function of foreach_env"
        results = self._call(actors, lambda worker: worker.foreach_env(fn), warning, raises=True)
        return [[] if result is None else result for result in results]

    def _call(
        self, actors: Sequence[Any], fn: Callable[..., Any], warning: str, raises: bool
    ) -> list[Any]:
        """Return fn(worker) of each worker; None for one that has died or does not answer.

        Args:
            actors: the workers.
            fn: the function.
            warning: text about a worker without an answer.
            raises: raise exceptions of the function; False: the answer is None.
        """
        import ray

        for actor, ref in list(self._late):
            if ray.wait([ref], timeout=0)[0]:
                self._late.remove((actor, ref))
                self._slow.append(actor)
        self._slow = [actor for actor in self._slow if _is_in(actor, actors)]  # not replaced
        self._started = [actor for actor in self._started if _is_in(actor, actors)]
        hanging = [actor for actor, _ in self._late]
        refs = [None if _is_in(actor, hanging) else actor.apply.remote(fn) for actor in actors]
        answers, started = [], time.monotonic()
        for number, (actor, ref) in enumerate(zip(actors, refs, strict=True), start=1):
            answer, problem = None, "it has not answered an earlier call either"
            limit = SLOW_TIMEOUT_S if _is_in(actor, self._slow) else self._timeout_s
            if not _is_in(actor, self._started):
                limit += STARTING_S
            if ref is not None:
                try:
                    left = max(0.0, started + limit - time.monotonic())
                    answer = ray.get(ref, timeout=left)
                    problem = ""
                    if not _is_in(actor, self._started):
                        self._started.append(actor)
                except ray.exceptions.GetTimeoutError:
                    self._late.append((actor, ref))
                    problem = f"no answer in {limit:g} s; if it hangs, sample_timeout_s replaces it"
                except death_errors() as error:
                    problem = repr(error)
                except Exception as error:
                    if raises:
                        is_remote = isinstance(error, ray.exceptions.RayTaskError)
                        raise (original_error(error) if is_remote else error) from None
                    problem = repr(error)
            if problem:
                log.warning("worker %d %s (%s)", number, warning, problem)
            answers.append(answer)
        return answers


def stop_workers(
    actors: Sequence[Any], spares: Any, placement: Any, num_remaining: int = 0
) -> None:
    """Let workers close their environments, which may run servers or simulators, and kill them.

    Workers that do not close them in time, because they hang or compute requests, are killed, too.

    Args:
        actors: the workers to stop.
        spares: the spare processes of the WorkerSet, which are stopped, too; None keeps them.
        placement: releases the resources.
        num_remaining: number of the set's workers that continue.
    """
    import ray

    if ray_health.is_ray_lost():
        return
    try:
        if ray.is_initialized():
            if spares is not None:
                spares.stop()
            try:
                stops = [actor.apply.remote(RolloutWorker.stop) for actor in actors]
                if stops:
                    ray.wait(stops, num_returns=len(stops), timeout=STOP_TIMEOUT_S)
            finally:
                for actor in actors:
                    ray.kill(actor)
    finally:
        placement.release(num_remaining)


def _is_in(actor: Any, actors: Sequence[Any]) -> bool:
    return any(actor is other for other in actors)
