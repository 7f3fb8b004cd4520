"""for_each as Ray tasks: fn(item) for several items at a time, in other processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from flowrl.iter.errors import OnError, Retry, note_origin
from flowrl.iter.stage import NOT_READY, Source, Stage, sources_to_list, sources_from_list
from flowrl.iter.unary_stages import _DROPPED, Mapped
from flowrl.iter.waiting import ready_refs, wait_for_any

NO_BOUND = 1000  # tasks in flight where the user set no bound: a stream may have no end


class _Item(NamedTuple):
    item: Any
    sources: tuple[Source, ...]
    tries: int = 0


class ForEachConcurrent(Mapped):
    """fn(item) as a Ray task per item, results in the order in which they are done.

    fn runs on a copy in another process: what it keeps is lost, and it has no metrics context.

    Args:
        max_concurrency: tasks in flight; 0 sets no bound of its own (NO_BOUND).
        resources: of a task, as for `ray.remote` (`num_cpus`, `num_gpus`, `resources`, …).
    """

    kind = "for_each"

    def __init__(
        self,
        parent: Stage,
        fn: Callable[[Any], Any],
        max_concurrency: int,
        resources: dict[str, Any] | None,
        on_error: OnError = "raise",
    ):
        super().__init__(parent, fn, on_error)
        if max_concurrency < 0:
            raise ValueError(f"for_each: max_concurrency must be >= 0, got {max_concurrency}")
        self.max_concurrency = max_concurrency or NO_BOUND
        self._resources = dict(resources or {})
        self._task: Any = None
        self._flight: dict[Any, _Item] = {}
        self._again: deque[_Item] = deque()  # to be put in flight
        self._done: deque[Any] = deque()
        self._ended = False
        self._emitted: tuple[Source, ...] = ()

    def _submit(self, item: _Item) -> None:
        import ray

        if self._task is None:
            function: Any = ray.remote(_call)
            self._shipped = ray.put(self.fn)
            self._task = function.options(max_retries=0, **self._resources)
        self._flight[self._task.remote(self._shipped, item.item)] = item

    def _fill(self, block: bool) -> None:
        """Put items in flight, as many as there are and may be."""
        while True:
            while self._again:
                self._submit(self._again[0])
                self._again.popleft()  # not lost if it could not be submitted
            if self._ended or len(self._flight) >= self.max_concurrency:
                return
            try:
                item = self._pull_up(block and not self._flight)
            except StopIteration:
                self._ended = True
                return
            if item is NOT_READY:
                return
            self._again.append(_Item(item, self.parents[0].sources))

    def pull(self, block: bool) -> Any:
        import ray

        while True:
            self._fill(block)
            if not self._flight:
                if self._ended:
                    raise StopIteration
                return NOT_READY
            if not self._done:
                refs = list(self._flight)
                self._done.extend(ready_refs(refs))
                if not self._done:
                    full = self._ended or len(refs) >= self.max_concurrency
                    if not block or (not full and self.parents[0].can_wait()):
                        return NOT_READY
                    started = time.perf_counter()
                    wait_for_any(refs)
                    self.waited_s += time.perf_counter() - started
                    self._done.extend(ready_refs(refs))
            ref = self._done.popleft()
            item = self._flight.pop(ref)
            try:
                result = ray.get(ref)
            except BaseException as error:
                cause = getattr(error, "cause", None)  # a RayTaskError's
                raised = cause if isinstance(cause, Exception) else error
                tries = self.on_error.times if isinstance(self.on_error, Retry) else 0
                if item.tries < tries and isinstance(raised, Exception):
                    self._again.append(_Item(item.item, item.sources, item.tries + 1))
                    continue
                note_origin(raised, self, item.item)
                if self._give_up(raised, item.item) is _DROPPED:
                    continue
            self._emitted = item.sources
            self.items += 1
            return result

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._emitted

    def waits(self) -> list[Any]:
        full = self._ended or len(self._flight) >= self.max_concurrency
        return list(self._flight) + ([] if full else self.parents[0].waits())

    def can_wait(self) -> bool:
        return True

    def label(self) -> str:
        return f"{super().label()[:-1]}, max_concurrency={self.max_concurrency})"

    def extra_stats(self) -> dict[str, Any]:
        return {**super().extra_stats(), "in_flight": len(self._flight)}

    def state_dict(self) -> dict[str, Any]:
        """Items in flight are saved as items: they are computed again."""
        waiting = [*self._flight.values(), *self._again]
        in_flight = [[one.item, sources_to_list(one.sources), one.tries] for one in waiting]
        return {**super().state_dict(), "in_flight": in_flight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._again = deque(
            _Item(item, sources_from_list(sources), tries)
            for item, sources, tries in state["in_flight"]
        )

    def stop(self) -> None:
        super().stop()
        if self._flight:
            import ray

            for ref in self._flight if ray.is_initialized() else ():
                ray.cancel(ref, force=True)
        self._flight.clear()
        self._done.clear()


def _call(fn: Callable[[Any], Any], item: Any) -> Any:
    return fn(item)
