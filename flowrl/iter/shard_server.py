"""What a shard does where it is: it answers orders from the chain that it serves.

A chain is the stream of one shard: the items of its worker with the recorded steps chained on; it
lives where the worker is, and is made by the first order, which carries the steps. A reply is
tagged: items, or the end of the shard; the end of a stream is never an exception.
"""

from __future__ import annotations

import glob
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from flowrl.iter.errors import strip

U = TypeVar("U")

# a LocalIterator method, its arguments, and the line where the step was chained
Step = tuple[str, tuple[Any, ...], dict[str, Any], str]

ERRORS_SKIPPED = 1000  # in a row, of a stream that is made again
BACKLOG = 10_000  # items that one partition of a `repartition` may lag behind another
STATS_EVERY_S = 1.0  # how often a shard says what its steps have done

_OURS = frozenset(glob.glob(os.path.join(os.path.dirname(__file__), "*.py")))


class Reply(NamedTuple):
    """What a shard answers: items, what the worker says about each, and whether it has ended."""

    items: list[Any]
    tags: list[dict[str, Any]]
    end: bool = False
    ticket: int | None = None  # a short name of the chain, for the requests to come
    stages: list[dict[str, Any]] | None = None  # now and then, `stats()` of the shard's steps


class ShardRequest(NamedTuple):
    """A request to a shard.

    chain: which stream; steps: how to make it, None if the worker has it; skip: items to leave
    out of a stream made again; batch_ms: collect items for so long; part: (partition, of how many)
    of a repartition; seed: of what is random in the steps.
    """

    chain: str
    steps: Sequence[Step] | None
    skip: int = 0
    batch_ms: float = 0
    part: tuple[int, int] | None = None
    seed: str | None = None


_NEXT = ShardRequest("", None)


def _bound(step: Any, worker: Any) -> Any:
    """A step's function; one with `bound_to(worker)` is told which worker it runs on."""
    bind = getattr(step, "bound_to", None)
    return bind(worker) if callable(bind) else step


class ShardStream:
    """The stream of one shard, where its worker is."""

    def __init__(self, worker: Any, chain: str, steps: Sequence[Step], skip: int, seed: Any):
        from flowrl.iter.local import LocalIterator

        if not hasattr(worker, "items"):
            raise TypeError(
                f"{type(worker).__name__} has no items() that gives what the shard serves: derive "
                "it from ParallelIteratorWorker"
            )
        made_for = getattr(worker, "items_for", None)
        items = worker.items if made_for is None else partial(made_for, chain)
        stream: Any = LocalIterator(items, "shard")
        for method, args, options, line in steps:
            bound = [_bound(arg, worker) for arg in args]
            stream = getattr(stream, method)(*bound, **options)
            stream.stage.line = line
        self._stream = stream
        self._tags = getattr(worker, "reply_tags", None)
        self._stats_due = time.monotonic() + STATS_EVERY_S if steps else float("inf")
        self._error: BaseException | None = None
        self._given = 0
        self._backlog: dict[int, deque[Any]] = {}
        self._skip = skip if getattr(worker, "replayable", False) else 0
        stream.start(seed)

    def answer(self, order: ShardRequest) -> Reply:
        """The next item, or those of the next `batch_ms` milliseconds."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        items: list[Any] = []
        tags: list[dict[str, Any]] = []
        until = time.monotonic() + order.batch_ms / 1000 if order.batch_ms else 0.0
        while True:
            try:
                items.append(self._next(order))
            except StopIteration:
                return Reply(items, tags, end=True, stages=self._stream.stats()[:-1] or None)
            except BaseException as error:
                if not items:
                    raise
                self._error = error  # the items come first
                return Reply(items, tags)
            tags.append(self._tags() if self._tags is not None else {})
            now = time.monotonic()
            if not order.batch_ms or now >= until:
                if now < self._stats_due:
                    return Reply(items, tags)
                self._stats_due = now + STATS_EVERY_S
                return Reply(items, tags, stages=self._stream.stats()[:-1])

    def stop(self) -> None:
        """Release what the stream has taken."""
        self._stream.stop()

    def _skip_accepted(self) -> None:
        """Leave out what was given before; the errors in between were raised then."""
        failed = 0
        while self._skip:
            try:
                next(self._stream)
            except StopIteration:
                raise
            except Exception:
                failed += 1
                if failed > ERRORS_SKIPPED:
                    raise
            else:
                failed = 0
                self._skip -= 1

    def _next(self, order: ShardRequest) -> Any:
        self._skip_accepted()
        if order.part is None:
            return next(self._stream)
        mine, parts = order.part
        backlog = self._backlog.setdefault(mine, deque())
        while not backlog:
            part = self._given % parts
            others = self._backlog.setdefault(part, deque())
            if len(others) >= BACKLOG:
                raise RuntimeError(
                    f"repartition: partition {part} is {BACKLOG} items behind partition {mine}: "
                    "read all partitions at about the same pace"
                )
            others.append(next(self._stream))
            self._given += 1
        return backlog.popleft()


def serve(worker: Any, order: ShardRequest) -> Reply:
    """Runs where the worker is: answer an order."""
    chains = worker.__dict__.setdefault("_flowrl_chains", {})
    if order.chain not in chains:
        if order.steps is None:
            raise RuntimeError("this worker has lost its stream: it is not the one asked before")
        chains[order.chain] = ShardStream(worker, order.chain, order.steps, order.skip, order.seed)
    try:
        return chains[order.chain].answer(order)
    except BaseException as error:
        strip(error)  # the stages of the shard are not the reader's
        raise


# What actors return is a list with the fields of a Reply, and what they are asked with is mostly
# nothing: Ray takes a fifth of a millisecond longer for a class, and as long for an argument.


def serve_ticket(worker: Any, ticket: int) -> list[Any]:
    """Runs in an actor: the next item of the chain of this ticket."""
    return list(_with_traceback(worker._flowrl_tickets[ticket].answer, _NEXT))


def serve_remote(worker: Any, order: ShardRequest) -> list[Any]:
    """Runs in an actor: like `serve`, with a ticket for the requests to come."""
    reply = _with_traceback(serve, worker, order)
    chain = worker._flowrl_chains[order.chain]
    tickets = worker.__dict__.setdefault("_flowrl_tickets", [])
    if chain not in tickets:
        if None not in tickets:
            tickets.append(None)
        tickets[tickets.index(None)] = chain
    return list(reply._replace(ticket=tickets.index(chain)))


def _with_traceback(answer: Callable[..., Reply], *args: Any) -> Reply:
    """answer(*args); an error takes its traceback along as a note."""
    try:
        return answer(*args)
    except Exception as error:
        strip(error)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in _OURS]
        error.add_note("Traceback in the worker:\n" + "".join(traceback.format_list(frames)))
        raise


def forget(worker: Any, chain: str) -> None:
    """Runs where the worker is: drop a stream that nobody will read on."""
    dropped = worker.__dict__.get("_flowrl_chains", {}).pop(chain, None)
    if dropped is not None:
        dropped.stop()
    tickets = worker.__dict__.get("_flowrl_tickets", [])
    if dropped in tickets:
        tickets[tickets.index(dropped)] = None


class ParallelIteratorWorker:
    """Base of shard actors: serves the items of an iterable, or of a callable returning one.

    Args:
        item_generator: the items.
        repeat: start again at the end; needs a callable, or an iterable that can be read twice.
    """

    replayable = True  # made again, it gives the same items: those accepted before are skipped

    def __init__(self, item_generator: Any, repeat: bool = False):
        if repeat and not callable(item_generator) and iter(item_generator) is item_generator:
            raise ValueError("repeat=True needs a callable or an iterable, not an iterator")
        self._item_generator = item_generator
        self._repeat = repeat

    def items(self) -> Iterable[Any]:
        """The items of the shard."""
        made = self._item_generator
        if self._repeat:
            return _Repeated(made)
        return made() if callable(made) else made

    def apply(self, fn: Callable[..., U], *args: Any) -> U:
        """fn(this object, *args), here."""
        return fn(self, *args)

    def flowrl_next_item(self) -> list[Any]:
        """A reply with the next item of the first stream (Ray is quicker without arguments)."""
        return serve_ticket(self, 0)


class PartitionWorker(ParallelIteratorWorker):
    """Serves a partition of other shards, which have gone on when it is made again."""

    replayable = False

    def items_for(self, chain: str) -> Iterable[Any]:
        """The items for one reader, whose partitions share the other shards' streams."""
        return self._item_generator(chain)


class _Repeated:
    """The items again and again; an error in between does not end it."""

    def __init__(self, made: Any):
        self._made = made
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> _Repeated:
        return self

    def __next__(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._made() if callable(self._made) else self._made)
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
        raise StopIteration  # nothing to repeat
