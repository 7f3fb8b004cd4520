"""SpareWorker: a Ray actor that has started, and becomes a rollout worker when one is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl.iter.ray_runtime import actor_class
from flowrl.iter.recovery import ConstructorError
from flowrl.sampling.rollout_worker import RolloutWorker


class SpareWorker(RolloutWorker):
    """A process that has imported the packages of a worker, without environments and policies.

    Args:
        arguments: keyword arguments of RolloutWorker; `become` replaces those that it takes.
    """

    def __init__(self, arguments: dict[str, Any]):
        self._arguments = arguments
        self._error: Exception | None = None  # of `become`

    def become(self, worker_index: int, restart_count: int, num_workers: int) -> None:
        """Create the environments and policies of a worker.

        If that fails, later calls of `apply` raise ConstructorError with the same message.
        """
        numbers = {
            "worker_index": worker_index,
            "restart_count": restart_count,
            "num_workers": num_workers,
        }
        try:
            super().__init__(**{**self._arguments, **numbers})
        except Exception as error:
            self._error = error
            raise

    def apply(self, fn: Callable[..., Any], *args: Any) -> Any:
        if self._error is not None:
            message = f"{type(self._error).__name__}: {self._error}"
            raise ConstructorError(message) from self._error
        return super().apply(fn, *args)


class SpareWorkers:
    """The spare processes of a WorkerSet.

    Args:
        count: number of processes.
    """

    def __init__(self, count: int):
        self._count = count
        self._actors: list[Any] = []

    def start(self, arguments: dict[str, Any]) -> None:
        """Start the missing processes; see SpareWorker."""
        while len(self._actors) < self._count:
            self._actors.append(actor_class(SpareWorker).remote(arguments))

    def take(self, worker_index: int, restart_count: int, num_workers: int) -> Any | None:
        """Return the actor of a new worker; None if there is no spare process."""
        if not self._actors:
            return None
        actor = self._actors.pop(0)
        actor.become.remote(worker_index, restart_count, num_workers)
        return actor

    def stop(self) -> None:
        """Kill the processes."""
        import ray

        while self._actors:
            ray.kill(self._actors.pop())
