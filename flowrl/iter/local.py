"""LocalIterator: one lazy stream, consumed by one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar

from flowrl.iter import metrics as _metrics
from flowrl.iter.branches import Duplicate, DuplicateChild, Union, WhenFull
from flowrl.iter.buffering_stages import Batch, Shuffle
from flowrl.iter.concurrent_stages import ForEachConcurrent
from flowrl.iter.errors import OnError, annotate
from flowrl.iter.explain import FORMATS, rows
from flowrl.iter.gather import Gather
from flowrl.iter.metrics import MetricsContext
from flowrl.iter.profiler import Profiler
from flowrl.iter.source import FromIterable
from flowrl.iter.stage import NOT_READY, Stage, describe, state_names, walk
from flowrl.iter.unary_stages import (
    Combine,
    Filter,
    Flatten,
    ForEach,
    ForEachHooked,
    Mapped,
    Tap,
    Transform,
    ZipWithSource,
)
from flowrl.iter.waiting import Waiter

T = TypeVar("T")
U = TypeVar("U")


class LocalIterator(Generic[T]):
    """A lazy stream of items. Every method builds and runs nothing; `next()` pulls one item.

    An error in an operator leaves the stream usable: the next `next()` goes on with the next
    item. A stage has one consumer: use `duplicate()` to read a stream twice.

    Args:
        stage: the stage that gives the items, or an iterable, or a callable returning one.
        name: shown by `repr`.
    """

    def __init__(
        self,
        stage: Stage | Iterable[T] | Callable[[], Iterable[T]],
        name: str = "",
    ):
        self.stage = stage if isinstance(stage, Stage) else FromIterable(stage, name)
        self.name = name or self.stage.label()
        self.metrics = MetricsContext()
        self._clock: Profiler | None = None
        self._waiter = Waiter()
        self._stopped = False

    # -- building ------------------------------------------------------------------------------

    def _then(self, stage: Stage, suffix: str) -> LocalIterator[Any]:
        return LocalIterator(stage, f"{self.name}{suffix}")

    def for_each(
        self,
        fn: Callable[[T], U],
        max_concurrency: int = 1,
        resources: dict[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> LocalIterator[U]:
        """fn(item) for every item.

        Args:
            fn: the operator. If it has `_on_fetch_start()`, that is called before each item is
                fetched; if it has `ready()`, nothing is fetched while that is false.
            max_concurrency: 1 calls fn here; other numbers run it as Ray tasks on copies, so many
                at a time, results as they are done; 0 sets no bound.
            resources: of a task (`num_cpus`, `num_gpus`, …); makes it a task even for 1.
            on_error: "raise", Skip(max) or Retry(times).
        """
        if max_concurrency == 1 and resources is None:
            kind = ForEachHooked if ForEachHooked.wanted(fn) else ForEach
            return self._then(kind(self.stage, fn, on_error), ".for_each()")
        stage = ForEachConcurrent(self.stage, fn, max_concurrency, resources, on_error)
        return self._then(stage, ".for_each()")

    def filter(self, fn: Callable[[T], bool], on_error: OnError = "raise") -> LocalIterator[T]:
        """The items for which fn(item) is true."""
        return self._then(Filter(self.stage, fn, on_error), ".filter()")

    def batch(self, n: int) -> LocalIterator[list[T]]:
        """Lists of n items; the last may be shorter."""
        return self._then(Batch(self.stage, n), f".batch({n})")

    def flatten(self) -> LocalIterator[Any]:
        """The elements of items that are lists."""
        return self._then(Flatten(self.stage), ".flatten()")

    def combine(
        self, fn: Callable[[T], Iterable[U]], on_error: OnError = "raise"
    ) -> LocalIterator[U]:
        """The elements of fn(item), a list that may be empty, for every item."""
        return self._then(Combine(self.stage, fn, on_error), ".combine()")

    def shuffle(self, shuffle_buffer_size: int, seed: int | None = None) -> LocalIterator[T]:
        """The items in random order within a sliding window.

        Args:
            shuffle_buffer_size: items of the window; 1 changes nothing.
            seed: of the order; None derives one from the plan's seed.
        """
        suffix = f".shuffle(shuffle_buffer_size={shuffle_buffer_size}, seed={seed})"
        return self._then(Shuffle(self.stage, shuffle_buffer_size, seed), suffix)

    def transform(self, fn: Callable[[Iterator[T]], Iterable[U]]) -> LocalIterator[U]:
        """fn(iterator of the items): for what the other operators cannot say."""
        return self._then(Transform(self.stage, fn), ".transform()")

    def tap(self, name: str, fn: Callable[[T], Any]) -> LocalIterator[T]:
        """Every item as it is, after fn(item) has seen it."""
        return self._then(Tap(self.stage, name, fn), f".tap({name})")

    def inspect(self, name: str = "") -> LocalIterator[T]:
        """Every item as it is, after a line with its type and shapes was printed."""
        name = name or self.stage.shown()
        return self.tap(name, lambda item: print(f"{name}: {describe(item)}"))

    def zip_with_source(self) -> LocalIterator[tuple[tuple[Any, ...], T]]:
        """(sources, item): the `Source`s that each item came from."""
        return self._then(ZipWithSource(self.stage), ".zip_with_source()")

    def zip_with_source_actor(self) -> LocalIterator[tuple[Any, T]]:
        """(actor, item): the actor that each item came from; the last one if several did.

        Raises (when pulled):
            ValueError: the stream does not come from actors.
        """
        resolve = _actor_resolver(self.stage)
        return self._then(
            ForEach(ZipWithSource(self.stage), lambda pair: (resolve(pair[0]), pair[1])),
            ".zip_with_source_actor()",
        )

    def duplicate(
        self,
        n: int,
        max_buffered: int = 1,
        when_full: WhenFull | Sequence[WhenFull] = "block",
    ) -> list[LocalIterator[T]]:
        """n streams of the same items. All must be consumed.

        Every child gets a shallow copy of an item, with arrays read-only: what one changes in
        place is not seen by the others.

        Args:
            n: children.
            max_buffered: items that a child may run ahead of the slowest.
            when_full: what happens then, for all children or one word for each: "block" makes the
                others wait for it, "drop_oldest" and "drop_newest" lose one of its items, counted.
        """
        if not isinstance(n, int) or n < 2:
            raise ValueError(f"duplicate(n): n must be an int of at least 2, got {n!r}")
        policies = [when_full] * n if isinstance(when_full, str) else list(when_full)
        tee = Duplicate(self.stage, n, max_buffered, policies)
        return [self._then(DuplicateChild(tee, i), f".duplicate[{i}]") for i in range(n)]

    def union(
        self,
        *others: LocalIterator[Any],
        deterministic: bool = False,
        round_robin_weights: Sequence[float | str] | None = None,
    ) -> LocalIterator[Any]:
        """The items of this stream and the others.

        Args:
            deterministic: one item of each in turn, waiting for it.
            round_robin_weights: items of each per turn; fractions accumulate; "*" means all that
                is ready. Implies `deterministic`.
        """
        for other in others:
            if not isinstance(other, LocalIterator):
                raise TypeError(f"union() takes LocalIterators, got {type(other).__name__}")
        branches = (self, *others)
        stage = Union([b.stage for b in branches], round_robin_weights, ordered=deterministic)
        return LocalIterator(stage, f"LocalUnion[{', '.join(repr(b) for b in branches)}]")

    # -- running -------------------------------------------------------------------------------

    def start(self, seed: int | None = None) -> None:
        """Take what the plan needs: its stages, its actors. The first pull does it otherwise.

        Args:
            seed: of the plan; what is random in it and has no seed of its own is derived from it.

        Raises:
            RuntimeError: a stage has two consumers, or the plan was stopped.
        """
        if self._stopped:
            raise RuntimeError(f"{self!r} was stopped: build the plan again")
        if self._clock is not None:
            return
        # a stream read twice would give each reader half of the items
        readers = Counter(parent for stage in walk(self.stage) for parent in stage.parents)
        owners: dict[Stage, object] = {}
        self._claim(self.stage, self, readers, owners)
        for stage, owner in owners.items():
            stage.owner = owner
        named = state_names(self.stage)
        operators = {n: s.fn for n, s in named.items() if isinstance(s, Mapped)}
        self.metrics.name_operators(operators)
        for name, stage in named.items():
            if not stage.name:  # else another child of a duplicate has started it
                stage.start(None if seed is None else f"{seed}/{name}")
                stage.name = name
        self._clock = Profiler(self.stage)

    def _claim(
        self, stage: Stage, owner: object, readers: Counter[Stage], owners: dict[Stage, object]
    ) -> None:
        """Note whose a stage and those before it shall be; a duplicated stream belongs to its
        `duplicate`."""
        if isinstance(stage, Duplicate):
            if stage.owner is None and stage not in owners:
                owners[stage] = stage
                self._claim(stage.parents[0], stage, readers, owners)
            return
        if stage.owner not in (None, owner) or readers[stage] > 1:
            raise RuntimeError(
                f"{stage.shown()} (chained at {stage.line}) has two consumers, so each would "
                "miss the other's items: split the stream with duplicate() first"
            )
        owners[stage] = owner
        for parent in stage.parents:
            self._claim(parent, owner, readers, owners)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        clock = self._clock
        if clock is None or self._stopped:
            self.start()
            clock = self._clock
            assert clock is not None
        clock.next_timed -= 1
        token = _metrics._current.set(self.metrics)
        try:
            item = self.stage.pull(True) if clock.next_timed else clock.pull(True)
            return item if item is not NOT_READY else self._wait_for_item(clock)
        except StopIteration:
            raise
        except BaseException as error:
            annotate(error, self.stage)
            raise
        finally:
            _metrics._current.reset(token)

    def _wait_for_item(self, clock: Profiler) -> Any:
        """The one place where a plan with branches waits."""
        moved = -1
        while True:
            self._waiter.clear()
            item = clock.pull(True)
            if item is not NOT_READY:
                return item
            waits = self.stage.waits()
            if waits:
                clock.wait(self._waiter, waits)
                continue
            before, moved = moved, sum(stage.items for stage in clock.stages)
            if moved == before:
                raise RuntimeError(
                    f"{self!r} cannot move: every branch waits for another one. Is there a child "
                    "of duplicate() that nobody consumes, an operator that waits for one that "
                    "nobody pulls, or a replay buffer that one branch draws from and none stores "
                    f"into (or the reverse)? Waiting: {self._waiting(clock.stages)}"
                )

    @staticmethod
    def _waiting(stages: Sequence[Stage]) -> str:
        """The stages that another one has to set going."""
        return (
            ", ".join(stage.shown() for stage in stages if stage.depends_on_sibling)
            or "nobody knows"
        )

    def take(self, n: int) -> list[T]:
        """The next n items, fewer if the stream ends."""
        if n < 0:
            raise ValueError(f"take(n): n must be at least 0, got {n}")
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
        """Release what the plan owns: actors that it started, requests in flight. It does not
        start again."""
        self._stopped = True
        errors = []
        for stage in walk(self.stage):
            try:
                stage.stop()
            except Exception as error:  # the others are to be released all the same
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> LocalIterator[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # -- seeing --------------------------------------------------------------------------------

    def explain(self, format: Literal["tree", "mermaid", "json"] = "tree") -> str:
        """The plan as an indented tree, a mermaid flowchart or JSON. Nothing runs; a plan that
        has run shows items, time shares and queues, too.

        Raises:
            ValueError: another format.
        """
        if format not in FORMATS:
            raise ValueError(f"explain(format): one of {list(FORMATS)}, got {format!r}")
        return FORMATS[format](self.stage, self._clock)

    def stats(self) -> list[dict[str, Any]]:
        """One dict per stage, end first.

        `id`, `stage`, `chained_at`, `parents` (ids), `items` handed on; once the plan runs
        `busy_s` in its own code, `waiting_s` for what it pulls from, `blocked_s` not asked for
        anything, and their shares of the time since the start, `busy`, `waiting`, `blocked`,
        which sum to 1 (quick pulls are sampled: estimates); and figures of its own such as
        `queued`, `in_flight`, `skipped`, `restarts`. A gather has `shards`, too: shard -> the
        rows of its steps, as it told them last (once a second, and at its end).
        """
        return rows(self.stage, self._clock)

    @staticmethod
    def get_metrics() -> MetricsContext:
        """The context of the plan being pulled; ValueError outside a pull."""
        return _metrics.get_metrics()

    def __repr__(self) -> str:
        return f"LocalIterator[{self.name}]"

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counters, and the state of every stage by name.

        `restarts` lists the stages that cannot say where they are (transforms, foreign
        generators, actors that sample): loaded, they start again. Items held by stages are in
        the state as they are.
        """
        named = state_names(self.stage)
        return {
            "metrics": self.metrics.state_dict(),
            "stages": {name: stage.state_dict() for name, stage in named.items()},
            "restarts": [name for name, stage in named.items() if not stage.resumable],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict()` of the same plan gave, before the first pull.

        Raises:
            ValueError: the state is of another plan; nothing is changed.
            RuntimeError: the plan has started.
        """
        if self._clock is not None:
            raise RuntimeError("a plan's state is loaded before its first pull: build it again")
        named = state_names(self.stage)
        if not isinstance(state, dict) or not {"metrics", "stages"} <= set(state):
            raise ValueError("this is not what state_dict() of a plan gives")
        saved = state["stages"]
        if set(named) != set(saved):
            lacks, extra = sorted(set(named) - set(saved)), sorted(set(saved) - set(named))
            raise ValueError(
                f"the saved state is of another plan: it lacks stages {lacks} and has {extra}"
            )
        self.metrics.load_state_dict(state["metrics"])
        for name, stage in named.items():
            stage.load_state_dict(saved[name])

    def __getstate__(self) -> dict[str, Any]:
        if self._clock is not None:
            raise TypeError(f"{self!r} has started: only a plan that has not can be pickled")
        return self.__dict__


def _actor_resolver(stage: Stage) -> Callable[[tuple[Any, ...]], Any]:
    def resolve(sources: tuple[Any, ...]) -> Any:
        for source in sources[-1:]:
            for node in walk(stage):
                if isinstance(node, Gather) and node.name == source.origin:
                    return node.shards.handle(source.worker)
        raise ValueError(
            "no source actor: zip_with_source_actor() works on streams that were gathered from "
            "actors (gather_sync, gather_async)"
        )

    return resolve
