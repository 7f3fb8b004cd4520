"""LocalIterator: a lazy stream that is consumed in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

from flowrl.iter import metrics as _metrics
from flowrl.iter.errors import (
    OnError,
    annotate,
    collecting,
    missing_attribute_error,
    raise_first,
    without_engine_frames,
)
from flowrl.iter.explain import FORMATS, stats_rows
from flowrl.iter.metrics import MetricsContext
from flowrl.iter.profiler import OnPull, Profiler
from flowrl.iter.stage import (
    NOT_READY,
    Stage,
    describe,
    operator_of,
    stages_by_name,
    topological_order,
    walk,
)
from flowrl.iter.stages.branches import (
    Duplicate,
    DuplicateChild,
    Union,
    WhenFull,
    close_children,
)
from flowrl.iter.stages.buffering import Batch, Shuffle
from flowrl.iter.stages.source import FromIterable
from flowrl.iter.stages.tasks import ForEachConcurrent
from flowrl.iter.stages.unary import (
    Combine,
    Filter,
    Flatten,
    ForEach,
    ForEachWithHooks,
    Tap,
    Transform,
    ZipWithSource,
)
from flowrl.iter.waiting import Waiter
from flowrl.setting_values import check_int
from flowrl.source import Source
from flowrl.state_schema import check_own_state

T = TypeVar("T")
U = TypeVar("U")


class LocalIterator(Generic[T]):
    """A lazy stream of items. Methods that chain a stage only build the plan; `next()` pulls an
    item.

    The stream stays usable after an exception in an operator: the next `next()` continues with the
    next item. A stage has one consumer; use `duplicate()` to read a stream twice.

    Args:
        stage: the last stage of the plan; or an iterable, or a callable that returns one.
        name: shown by `repr`.
    """

    def __init__(
        self,
        stage: Stage | Iterable[T] | Callable[[], Iterable[T]],
        name: str = "",
    ):
        self.stage = stage if isinstance(stage, Stage) else FromIterable(stage, name or None)
        self.name = name or str(self.stage)
        self.metrics = MetricsContext()
        self._profiler: Profiler | None = None
        self._waiter = Waiter()
        self._stopped = False

    # -- building ------------------------------------------------------------------------------

    def _chain(self, stage: Stage, suffix: str) -> LocalIterator[Any]:
        return LocalIterator(stage, f"{self.name}{suffix}")

    def for_each(
        self,
        fn: Callable[[T], U],
        max_concurrency: int = 1,
        resources: dict[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> LocalIterator[U]:
        """Apply fn(item) to every item.

        Args:
            fn: the operator. `fn._on_fetch_start()`, if defined, is called before each item is
                pulled; while `fn.ready()`, if defined, is false, nothing is pulled. Both are
                ignored if fn runs as a task.
            max_concurrency: 1 calls fn in this process; other values run it as Ray tasks on copies,
                at most this many at a time, with results in order of completion; 0 allows 1,000.
                `stop()` does not cancel tasks that were submitted.
            resources: options of each Ray task (`num_cpus`, `num_gpus`, …); if set, fn runs as a
                task even with `max_concurrency=1`. Without `num_cpus`, tasks reserve no CPU, and
                the number of running tasks is at most the number of CPUs of the cluster.
            on_error: "raise", Skip(max) or Retry(times).
        """
        if max_concurrency == 1 and resources is None:
            stage_class = ForEachWithHooks if ForEachWithHooks.has_hooks(fn) else ForEach
            return self._chain(stage_class(self.stage, fn, on_error), ".for_each()")
        stage = ForEachConcurrent(self.stage, fn, max_concurrency, resources, on_error)
        return self._chain(stage, ".for_each()")

    def filter(self, fn: Callable[[T], bool], on_error: OnError = "raise") -> LocalIterator[T]:
        """Keep the items for which fn(item) is true."""
        return self._chain(Filter(self.stage, fn, on_error), ".filter()")

    def batch(self, n: int) -> LocalIterator[list[T]]:
        """Group the items into lists of n; the last list may be shorter."""
        return self._chain(Batch(self.stage, n), f".batch({n})")

    def flatten(self: LocalIterator[list[U]]) -> LocalIterator[U]:
        """Return the elements of items that are lists."""
        return self._chain(Flatten(self.stage), ".flatten()")

    def combine(
        self, fn: Callable[[T], Iterable[U]], on_error: OnError = "raise"
    ) -> LocalIterator[U]:
        """Return the elements of fn(item), a possibly empty list, for every item."""
        return self._chain(Combine(self.stage, fn, on_error), ".combine()")

    def shuffle(self, shuffle_buffer_size: int, seed: int | None = None) -> LocalIterator[T]:
        """Return the items in random order within a sliding window.

        Args:
            shuffle_buffer_size: items in the window; 1 keeps the order.
            seed: seed of the order; None derives it from the seed of the plan.
        """
        suffix = f".shuffle(shuffle_buffer_size={shuffle_buffer_size}, seed={seed})"
        return self._chain(Shuffle(self.stage, shuffle_buffer_size, seed), suffix)

    def transform(self, fn: Callable[[Iterator[T]], Iterable[U]]) -> LocalIterator[U]:
        """Apply fn(iterator of the items) to the whole stream."""
        return self._chain(Transform(self.stage, fn), ".transform()")

    def tap(self, name: str, fn: Callable[[T], Any]) -> LocalIterator[T]:
        """Call fn(item) for every item and return the item unchanged.

        Raises:
            TypeError: `fn` has state (`state_dict`, `shared_state`), which a tap does not save.
        """
        return self._chain(Tap(self.stage, name, fn), f".tap({name})")

    def inspect(self, name: str = "") -> LocalIterator[T]:
        """Print the type and shapes of every item and return the item unchanged."""
        name = name or str(self.stage)
        return self.tap(name, lambda item: print(f"{name}: {describe(item)}"))

    def zip_with_source(self) -> LocalIterator[tuple[tuple[Source, ...], T]]:
        """Return (sources, item) for every item; `sources` is a tuple of `Source`."""
        return self._chain(ZipWithSource(self.stage), ".zip_with_source()")

    def zip_with_source_actor(self) -> LocalIterator[tuple[Any, T]]:
        """Return (actor, item) for every item; for an item of several actors, the last one.

        Raises (when pulled):
            ValueError: the stream does not come from actors.
        """
        find_actor = _actor_finder(self.stage)
        return self._chain(
            ForEach(ZipWithSource(self.stage), lambda pair: (find_actor(pair[0]), pair[1])),
            ".zip_with_source_actor()",
        )

    def duplicate(
        self,
        n: int,
        max_buffered: int = 1,
        when_full: WhenFull | Sequence[WhenFull] = "block",
    ) -> list[LocalIterator[T]]:
        """Return n streams of the same items. All of them must be consumed. If one child is stopped
        before the others are first pulled, the others return the items in their buffers, then raise
        RuntimeError.

        Every child gets a shallow copy of an item with read-only arrays, so the children do not see
        each other's in-place changes.

        Args:
            n: number of children.
            max_buffered: capacity of the buffer of each child, in items.
            when_full: policy for a child with a full buffer, one for all or one per child: "block"
                makes the other children wait for that child, "drop_oldest" and "drop_newest" drop
                one of its items, counted as `dropped`.
        """
        check_int("duplicate(n): n", n, 2)
        if not isinstance(when_full, Iterable):
            raise TypeError(
                f"duplicate: when_full must be one of {get_args(WhenFull)} or a list of them, got "
                f"{when_full!r}"
            )
        policies = [when_full] * n if isinstance(when_full, str) else list(when_full)
        stage = Duplicate(self.stage, n, max_buffered, policies)
        return [self._chain(DuplicateChild(stage, i), f".duplicate[{i}]") for i in range(n)]

    def union(
        self,
        *others: LocalIterator[U],
        deterministic: bool = False,
        round_robin_weights: Sequence[float | str] | None = None,
    ) -> LocalIterator[T | U]:
        """Return the items of this stream and of the others.

        Args:
            others: the other streams.
            deterministic: take one item of each stream in turn, and wait for a stream whose workers
                are slow; a stream that depends on another one gives up its turn until it is ready.
            round_robin_weights: items of each stream per turn; fractions accumulate; "*" takes all
                items that are ready, at most 100. Implies `deterministic`.
        """
        for other in others:
            if not isinstance(other, LocalIterator):
                raise TypeError(f"union() takes LocalIterators, got {type(other).__name__}")
        branches: list[LocalIterator[Any]] = [self, *others]
        stage = Union([b.stage for b in branches], round_robin_weights, ordered=deterministic)
        return LocalIterator(stage, f"LocalUnion[{', '.join(repr(b) for b in branches)}]")

    # -- running -------------------------------------------------------------------------------

    def start(self, seed: int | None = None) -> None:
        """Start the stages and actors of the plan; otherwise the first pull starts them.

        Args:
            seed: seed of the plan; stages without their own seed derive theirs from it. None leaves
                them unseeded.

        Raises:
            RuntimeError: a stage has two consumers, or the plan was stopped.
        """
        if self._stopped:
            raise RuntimeError(f"{self!r} was stopped: build the plan again")
        if self._profiler is not None:
            return
        # two consumers of one stage would each get a part of its items
        num_consumers = Counter(parent for stage in walk(self.stage) for parent in stage.parents)
        consumers: dict[Stage, object] = {}
        self._set_consumers(self.stage, self, num_consumers, consumers)
        for stage, consumer in consumers.items():
            stage.consumer = consumer
        self.metrics.operators = [operator_of(stage) for stage in topological_order(self.stage)]
        for name, stage in stages_by_name(self.stage).items():
            if not stage.started:  # the plan of another child of a duplicate may have started it
                stage.name, stage.journal = name, self.metrics.journal
                stage.start(None if seed is None else f"{seed}/{name}")
                stage.started = True
        self._profiler = Profiler(self.stage)

    def _set_consumers(
        self,
        stage: Stage,
        consumer: object,
        num_consumers: Counter[Stage],
        consumers: dict[Stage, object],
    ) -> None:
        """Store the consumer of a stage and of its input stages in `consumers`: `consumer`, or the
        next Duplicate downstream of a stage."""
        if isinstance(stage, Duplicate):
            if stage.consumer is None and stage not in consumers:
                consumers[stage] = stage
                self._set_consumers(stage.parents[0], stage, num_consumers, consumers)
            return
        if stage.consumer not in (None, consumer) or num_consumers[stage] > 1:
            raise RuntimeError(
                f"{stage} (chained at {stage.line}) has two consumers, so each would miss the "
                "items of the other: split the stream with duplicate() first"
            )
        consumers[stage] = consumer
        for parent in stage.parents:
            self._set_consumers(parent, consumer, num_consumers, consumers)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        profiler = self._profiler
        if profiler is None or self._stopped:
            self.start()  # raises an error if the plan was stopped
            profiler = self._profiler
            assert profiler is not None
        profiler.pulls_until_timed -= 1
        # an attribute of the module: CPython 3.11 calls its methods faster than those of a name
        token = _metrics.active_context.set(self.metrics)
        try:
            timed = not profiler.pulls_until_timed or profiler.is_late
            item = profiler.pull(True) if timed else self.stage.pull(True)
            return item if item is not NOT_READY else self._wait_for_item(profiler)
        except StopIteration:
            raise
        except BaseException as error:
            annotate(error, self.stage)
            error.with_traceback(without_engine_frames(error))
            raise
        finally:
            _metrics.active_context.reset(token)

    def _wait_for_item(self, profiler: Profiler) -> Any:
        """Pull and wait until there is an item; the only place where a plan with branches waits."""
        total_items = -1
        while True:
            self._waiter.clear()
            item = profiler.pull(True)
            if item is not NOT_READY:
                return item
            if self.metrics.journal is not None and self.metrics.journal.replays:
                continue  # the journal determines how often the plan is pulled
            waits = self.stage.waits()
            if waits:
                profiler.wait(self._waiter, waits)
                continue
            before, total_items = total_items, sum(stage.items for stage in profiler.stages)
            if total_items == before:
                blocked = [str(one) for one in profiler.stages if one.depends_on_sibling]
                reasons = [f"{one}: {why}" for one in profiler.stages if (why := one.blocked_by())]
                if reasons:
                    raise RuntimeError(f"{self!r} is blocked. {'; '.join(reasons)}")
                raise RuntimeError(
                    f"{self!r} is blocked: every branch waits for another one. Possible causes: a "
                    "child of duplicate() without a consumer, an operator that waits for another "
                    "one that is not pulled, or a replay buffer that one branch samples from and "
                    f"no branch stores into (or the reverse). Waiting: {', '.join(blocked) or '-'}"
                )

    def take(self, n: int) -> list[T]:
        """Return the next n items, fewer if the stream ends. An error discards them."""
        check_int("take(n): n", n, 0)
        items: list[T] = []
        while len(items) < n:
            try:
                items.append(next(self))
            except StopIteration:
                break
        return items

    def show(self, n: int = 20) -> None:
        """Print the next n items."""
        for item in self.take(n):
            print(item)

    def stop(self) -> None:
        """Release the resources of the plan: actors it started, requests in flight. A stopped plan
        cannot be started again. Stages that another child of `duplicate` still reads continue."""
        self._stopped = True
        errors: list[Exception] = []
        for stage in close_children(self.stage):
            with collecting(errors):
                stage.stop()
        raise_first(errors, "another stage raised {!r} while the plan was stopped")

    def __enter__(self) -> LocalIterator[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # -- inspection ----------------------------------------------------------------------------

    def explain(self, format: Literal["tree", "mermaid", "json"] = "tree") -> str:
        """Return the plan as an indented tree, a mermaid flowchart or JSON, without running it.

        A started plan includes items, time shares and queue sizes.

        Raises:
            ValueError: unknown format.
        """
        if format not in FORMATS:
            raise ValueError(f"explain(format): one of {list(FORMATS)}, got {format!r}")
        return FORMATS[format](self.stage, self._profiler)

    def stats(self) -> list[dict[str, Any]]:
        """Return one dict per stage, end first.

        Keys: `id`, `stage`, `chained_at`, `parents` (ids), `items` returned. Once the plan has
        started: `busy_s` in its own code, `waiting_s` waiting for its parents, `blocked_s` not
        pulled, and their shares of the time since the start, `busy`, `waiting`, `blocked`, which
        sum to 1 (quick pulls are sampled: estimates); `grown_bytes`, by how much the memory of the
        process has grown in its own code (an estimate, on Linux). Stages add values such as
        `queued`, `in_flight`, `skipped`, `restarts`. A gather adds `shards`: shard number (see
        Source) -> rows of the stages on it, as last reported (once per second, and at the end of
        the shard).
        """
        return stats_rows(self.stage, self._profiler)

    def trace(self, on_pull: OnPull | None) -> None:
        """Call a function after the pulls of each stage; quick pulls are sampled.

        Args:
            on_pull: (stage, start [s of `time.perf_counter`], duration [s], whether the stage
                returned an item); None ends the trace.
        """
        if on_pull is not None:
            self.start()
        if self._profiler is not None:
            self._profiler.on_pull = on_pull

    @staticmethod
    def get_metrics() -> MetricsContext:
        """Return the context of the plan being pulled; ValueError outside a pull."""
        return _metrics.get_metrics()

    def __repr__(self) -> str:
        return f"LocalIterator[{self.name}]"

    if not TYPE_CHECKING:  # type checkers report unknown names themselves

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute_error(type(self), name)

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the state of every stage by name.

        `shared` has the states of objects that several stages may use, such as replay buffers.
        `restarts` lists the stages whose position cannot be saved (transforms, generators, actors
        that sample): in a restored plan they start from the beginning. Buffered items are part of
        the state, without copying.
        """
        by_name = stages_by_name(self.stage)
        stages = {name: stage.state_dict() for name, stage in by_name.items()}
        shared = {name: part.state_dict() for name, part in _shared_states(by_name).items()}
        return {
            "metrics": self.metrics.state_dict(),  # last: the other parts may count what they lost
            "stages": stages,
            "shared": shared,
            "restarts": [name for name, stage in by_name.items() if not stage.resumable],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict()` of the same plan, before the first pull.

        Raises:
            ValueError: the state belongs to another plan; build the plan again.
            RuntimeError: the plan has started.
        """
        if self._profiler is not None:
            raise RuntimeError(
                "cannot load a state: this plan has started. Build the plan again, and load the "
                "state before the first pull"
            )
        by_name = stages_by_name(self.stage)
        if not isinstance(state, dict) or not {"metrics", "stages", "shared"} <= set(state):
            raise ValueError("this is not the result of state_dict() of a plan")
        stage_states, shared_states = state["stages"], state["shared"]
        if set(by_name) != set(stage_states):
            new, missing = set(by_name) - set(stage_states), set(stage_states) - set(by_name)
            differences = [
                f"{whose} has the stages {', '.join(sorted(names))}"
                for whose, names in (("only this plan", new), ("only the saved one", missing))
                if names
            ]
            raise ValueError(
                f"the saved state is of another plan: {'; '.join(differences)}. Restore it with "
                "the same plan, and with the same settings that add stages, such as output"
            )
        shared = _shared_states(by_name)
        if set(shared) != set(shared_states):
            raise ValueError(
                "the saved state is of another plan: stages share the states of "
                f"{sorted(shared_states)} there, and of {sorted(shared)} here"
            )
        self.metrics.check_state(state["metrics"])
        for name, stage in by_name.items():
            stage.check_state(stage_states[name])
        for name, part in shared.items():
            if hasattr(part, "state_fields"):
                check_own_state(part, shared_states[name], f"shared/{name}")
        for name, part in shared.items():
            part.load_state_dict(shared_states[name])
        self.metrics.load_state_dict(state["metrics"])
        for name, stage in by_name.items():
            stage.load_state_dict(stage_states[name])

    def __getstate__(self) -> dict[str, Any]:
        if self._profiler is not None:
            raise TypeError(f"{self!r} has started: only a plan that has not can be pickled")
        return self.__dict__


def _shared_states(by_name: Mapping[str, Stage]) -> dict[str, Any]:
    """Return the objects with shared states by the name of the first stage that uses each."""
    shared: dict[str, Any] = {}
    for name, stage in by_name.items():
        part = stage.shared_state
        if part is not None and not any(part is other for other in shared.values()):
            shared[name] = part
    return shared


def _actor_finder(stage: Stage) -> Callable[[tuple[Source, ...]], Any]:
    """Return a function that maps the sources of an item to the actor of the last one."""

    def find(sources: tuple[Source, ...]) -> Any:
        for source in sources[-1:]:
            for node in walk(stage):
                actor = node.source_actor(source)
                if actor is not None:
                    return actor
        raise ValueError(
            "no source actor: zip_with_source_actor() needs a stream that was gathered from actors "
            "(gather_sync, gather_async)"
        )

    return find
