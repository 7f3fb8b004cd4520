"""LocalIterator: one lazy stream, consumed by one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from flowrl.iter import explain as _explain
from flowrl.iter import metrics as _metrics
from flowrl.iter.branches import Tee, TeeChild, Union
from flowrl.iter.metrics import MetricsContext
from flowrl.iter.stage import (
    NOT_READY,
    Batch,
    Combine,
    Filter,
    Flatten,
    ForEach,
    FromIterable,
    Stage,
    Transform,
    ZipWithSource,
)

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
        self._started = False

    # -- building ------------------------------------------------------------------------------

    def _then(self, stage: Stage, suffix: str) -> LocalIterator[Any]:
        return LocalIterator(stage, f"{self.name}{suffix}")

    def for_each(self, fn: Callable[[T], U]) -> LocalIterator[U]:
        """fn(item) for every item."""
        return self._then(ForEach(self.stage, fn), ".for_each()")

    def filter(self, fn: Callable[[T], bool]) -> LocalIterator[T]:
        """The items for which fn(item) is true."""
        return self._then(Filter(self.stage, fn), ".filter()")

    def batch(self, n: int) -> LocalIterator[list[T]]:
        """Lists of n items; the last may be shorter."""
        return self._then(Batch(self.stage, n), f".batch({n})")

    def flatten(self) -> LocalIterator[Any]:
        """The elements of items that are lists."""
        return self._then(Flatten(self.stage), ".flatten()")

    def combine(self, fn: Callable[[T], Iterable[U]]) -> LocalIterator[U]:
        """The elements of fn(item), a list that may be empty, for every item."""
        return self._then(Combine(self.stage, fn), ".combine()")

    def transform(self, fn: Callable[[Iterator[T]], Iterable[U]]) -> LocalIterator[U]:
        """fn(iterator of the items): for what the other operators cannot say."""
        return self._then(Transform(self.stage, fn), ".transform()")

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

    def duplicate(self, n: int, max_buffered: int = 1) -> list[LocalIterator[T]]:
        """n streams of the same items. All must be consumed.

        A child may run ahead of the slowest by `max_buffered` items, then it waits. The items
        are shared, not copied.
        """
        if n < 2:
            raise ValueError(f"duplicate(n): n must be at least 2, got {n}")
        tee = Tee(self.stage, n, max_buffered)
        return [self._then(TeeChild(tee, i), f".duplicate[{i}]") for i in range(n)]

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
        united: LocalIterator[Any] = LocalIterator(stage)
        united.name = f"LocalUnion[{', '.join(repr(b) for b in branches)}]"
        return united

    # -- running -------------------------------------------------------------------------------

    def _start(self) -> None:
        """Claim every stage: a stream read twice would give each reader half of the items."""
        stages = list(_explain.walk(self.stage))
        readers = Counter(parent for stage in stages for parent in stage.parents)
        self._claim(self.stage, self, readers)
        self._started = True

    def _claim(self, stage: Stage, owner: object, readers: Counter[Stage]) -> None:
        """Take a stage and those before it; a duplicated stream belongs to its `duplicate`."""
        if isinstance(stage, Tee):
            if stage.owner is None:
                stage.owner = stage
                self._claim(stage.parents[0], stage, readers)
            return
        if stage.owner not in (None, owner) or readers[stage] > 1:
            raise RuntimeError(
                f"{stage.shown()} (chained at {stage.line}) has two consumers, so each would "
                "miss the other's items: split the stream with duplicate() first"
            )
        stage.owner = owner
        for parent in stage.parents:
            self._claim(parent, owner, readers)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._started:
            self._start()
        token = _metrics._current.set(self.metrics)
        try:
            item = self.stage.pull(True)
        except StopIteration:
            raise
        except BaseException as error:
            self._annotate(error)
            raise
        finally:
            _metrics._current.reset(token)
        if item is NOT_READY:
            raise RuntimeError(
                f"{self!r} cannot move: every branch waits for another one. Is there a child of "
                "duplicate() that nobody consumes?"
            )
        return item

    def _annotate(self, error: BaseException) -> None:
        stage = getattr(error, "_flowrl_stage", None)
        if stage is None or getattr(error, "_flowrl_noted", False):
            return
        error._flowrl_noted = True  # type: ignore[attr-defined]
        note = f"in the plan at {_explain.path_to(self.stage, stage)}, chained at {stage.line}"
        item = getattr(error, "_flowrl_item", None)
        error.add_note(note + (f", on {item}" if item else ""))

    def take(self, n: int) -> list[T]:
        """The next n items, fewer if the stream ends."""
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

    def explain(self) -> str:
        """The plan as an indented tree. Nothing runs."""
        return _explain.explain(self.stage)

    def state_dict(self) -> dict[str, Any]:
        """Counters, and the state of every stage in the order of `explain()`."""
        stages = [stage.state_dict() for stage in _explain.walk(self.stage)]
        return {"metrics": self.metrics.state_dict(), "stages": stages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict()` of the same plan gave.

        Raises:
            ValueError: the state is of another plan.
        """
        stages = list(_explain.walk(self.stage))
        if len(stages) != len(state["stages"]):
            raise ValueError(
                f"the saved plan has {len(state['stages'])} stages, this one {len(stages)}"
            )
        self.metrics.load_state_dict(state["metrics"])
        for stage, saved in zip(stages, state["stages"], strict=True):
            stage.load_state_dict(saved)

    def stop(self) -> None:
        """Release what the plan owns: actors that it started, requests in flight."""
        for stage in _explain.walk(self.stage):
            stage.stop()

    def __enter__(self) -> LocalIterator[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @staticmethod
    def get_metrics() -> MetricsContext:
        """The context of the plan being pulled; ValueError outside a pull."""
        return _metrics.get_metrics()

    def __repr__(self) -> str:
        return self.name if self.name.startswith("Local") else f"LocalIterator[{self.name}]"


def _actor_resolver(stage: Stage) -> Callable[[tuple[Any, ...]], Any]:
    from flowrl.iter.gather import Gather

    def resolve(sources: tuple[Any, ...]) -> Any:
        if sources:
            for node in _explain.walk(stage):
                if isinstance(node, Gather):
                    return node.shards.handle(sources[-1].worker)
        raise ValueError(
            "no source actor: zip_with_source_actor() works on streams that were gathered from "
            "actors (gather_sync, gather_async)"
        )

    return resolve
