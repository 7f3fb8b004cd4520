"""for_each with Ray tasks: fn(item) for several items at a time, in other processes."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from flowrl.iter import ray_health
from flowrl.iter.errors import OnError, Retry, note_origin, noting_origin
from flowrl.iter.ray_runtime import register_modules
from flowrl.iter.recovery import original_error
from flowrl.iter.stage import NOT_READY, Stage, function_title
from flowrl.iter.stages.function_stage import FunctionStage, report_lost
from flowrl.iter.waiting import ready_refs, wait_for_any
from flowrl.setting_values import check_int
from flowrl.source import Source, sources_from_list, sources_to_list
from flowrl.state_schema import Fields

MAX_TASKS = 1000  # in flight for max_concurrency=0, because a stream may be infinite


class _Task(NamedTuple):
    item: Any
    sources: tuple[Source, ...]
    retries: int = 0


class ForEachConcurrent(FunctionStage):
    """Return fn(item) computed by one Ray task per item, in order of completion.

    `fn` runs on a copy in another process: changes to it are lost, and it has no metrics context.

    Args:
        max_concurrency: maximum number of tasks in flight; 0 for MAX_TASKS.
        resources: options of a task for `ray.remote` (`num_cpus`, `num_gpus`, `resources`, …).
            Without `num_cpus`, tasks reserve no CPU, and the number of running tasks is at most the
            number of CPUs of the cluster.
    """

    state_fields: ClassVar[Fields] = {"in_flight": list[list[Any]]}

    name = "for_each"

    def __init__(
        self,
        parent: Stage,
        fn: Callable[[Any], Any],
        max_concurrency: int,
        resources: dict[str, Any] | None,
        on_error: OnError = "raise",
    ):
        super().__init__(parent, fn, on_error)
        check_int("for_each: max_concurrency", max_concurrency, 0)
        if "max_retries" in (resources or {}):
            raise ValueError(
                "for_each: resources cannot contain max_retries: use on_error=Retry(times)"
            )
        if "num_returns" in (resources or {}):
            raise ValueError(
                "for_each: resources cannot contain num_returns: a task returns one item; chain "
                "flatten() after functions that return lists"
            )
        self.max_concurrency = self._limit = max_concurrency or MAX_TASKS
        self.title = f"for_each({function_title(fn)}, max_concurrency={self.max_concurrency})"
        self._resources = dict(resources or {})
        self._remote_fn: Any = None
        self._in_flight: dict[Any, _Task] = {}
        self._to_submit: deque[_Task] = deque()
        self._done: deque[Any] = deque()
        self._ended = False
        self._item_sources: tuple[Source, ...] = ()

    def start(self, seed: str | None) -> None:
        if self.journal is not None:
            self.journal.end(f"{self} runs Ray tasks, whose order is not recorded")

    def _submit(self, task: _Task) -> None:
        """Send an item to a task; an item that cannot be serialized fails, without retries."""
        if self._remote_fn is None:
            import ray

            register_modules()
            remote_fn: Any = ray.remote(_call)
            with noting_origin(self):
                self._fn_ref = ray.put(self.fn)
                ray_health.watch_ray()
                options = dict(self._resources)
                if "num_cpus" not in options:
                    # tasks that reserve a CPU would wait forever if workers have reserved all
                    options["num_cpus"] = 0
                    num_cpus = int(ray.cluster_resources().get("CPU", 1))
                    self._limit = max(1, min(self.max_concurrency, num_cpus))
                self._remote_fn = remote_fn.options(max_retries=0, **options)
        ray_health.check_ray()
        try:
            ref = self._remote_fn.remote(self._fn_ref, task.item)
        except ray_health.RayLostError:
            raise
        except Exception as error:
            self._to_submit.popleft()
            note_origin(error, self, task.item)
            if isinstance(self.on_error, Retry):
                report_lost(task.item)
                raise
            self._skip_or_raise(error, task.item)
            return
        self._in_flight[ref] = task
        self._to_submit.popleft()  # after submitting: kept if that raises

    def _fill(self, block: bool) -> None:
        """Submit tasks until the limit is reached or no item is ready."""
        while True:
            while self._to_submit and len(self._in_flight) < self._limit:
                self._submit(self._to_submit[0])
            if self._ended or len(self._in_flight) >= self._limit:
                return
            try:
                item = self._pull_up(block and not self._in_flight)
            except StopIteration:
                self._ended = True
                return
            if item is NOT_READY:
                return
            self._to_submit.append(_Task(item, self.parents[0].sources))

    def pull(self, block: bool) -> Any:
        while True:
            self._fill(block)
            ref = self._next_done(block)
            if ref is None:
                if self._ended and not self._in_flight:
                    raise StopIteration
                return NOT_READY
            task = self._in_flight.pop(ref)
            try:
                result = ray_health.get(ref)
            except ray_health.RayLostError:
                self._in_flight[ref] = task  # a checkpoint still contains its item
                raise
            except Exception as error:
                self._retry_or_drop(error, task)
                continue
            except BaseException:  # Ctrl-C: read the result later
                self._in_flight[ref] = task
                raise
            self._item_sources = task.sources
            self.items += 1
            return result

    def _next_done(self, block: bool) -> Any:
        """Return the reference of a task that has ended; None if there is none yet."""
        if not self._done and self._in_flight:
            refs = list(self._in_flight)
            self._done.extend(ready_refs(refs))
            full = self._ended or len(refs) >= self._limit
            if not self._done and block and (full or not self.parents[0].can_return_not_ready()):
                with self.waiting():
                    wait_for_any(refs)
                self._done.extend(ready_refs(refs))
        return self._done.popleft() if self._done else None

    def _retry_or_drop(self, error: Exception, task: _Task) -> None:
        """Apply the error policy to a failed task: submit its item again, drop it, or raise."""
        import ray

        is_remote = isinstance(error, ray.exceptions.RayTaskError)
        task_error = original_error(error) if is_remote else error
        max_retries = self.on_error.times if isinstance(self.on_error, Retry) else 0
        if task.retries < max_retries:
            self._to_submit.append(_Task(task.item, task.sources, task.retries + 1))
            return
        note_origin(task_error, self, task.item)
        self._skip_or_raise(task_error, task.item)

    def holds_items(self) -> bool:
        return bool(self._in_flight or self._to_submit)

    def waits(self) -> list[Any]:
        full = self._ended or len(self._in_flight) >= self._limit
        return list(self._in_flight) + ([] if full else self.parents[0].waits())

    def can_return_not_ready(self) -> bool:
        return True

    def extra_stats(self) -> dict[str, Any]:
        return {**super().extra_stats(), "in_flight": len(self._in_flight)}

    def state_dict(self) -> dict[str, Any]:
        """Save the items of tasks in flight; a restored plan submits them again."""
        tasks = [*self._in_flight.values(), *self._to_submit]
        in_flight = [[task.item, sources_to_list(task.sources), task.retries] for task in tasks]
        return {**super().state_dict(), "in_flight": in_flight}

    def check_state(self, state: dict[str, Any]) -> None:
        super().check_state({"in_flight": [], **state})  # the saved plan may have had no tasks

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._to_submit = deque(
            _Task(item, sources_from_list(sources), retries)
            for item, sources, retries in state.get("in_flight", [])
        )

    def stop(self) -> None:
        super().stop()
        # the tasks finish: ray.cancel has ended this process, and others' tasks (Ray 2.60)
        self._in_flight.clear()
        self._done.clear()


def _call(fn: Callable[[Any], Any], item: Any) -> Any:
    result = fn(item)
    if inspect.isgenerator(result):  # Ray would return its first item only
        raise TypeError(
            "for_each(max_concurrency=…): the function returned a generator: return a list, and "
            "chain flatten()"
        )
    return result
