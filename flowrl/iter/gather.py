"""Gathers: the stages that bring the items of parallel shards to the driver.

Whoever serves the shards is a `Shards` object; a gather decides how many requests are in flight
and in which order replies are handed over. A reply is tagged: an item, or the end of the shard,
with what the worker says about it. A failed request raises an error that names the shard, which
is asked again at the next pull.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

from flowrl.iter.stage import NOT_READY, Source, Stage
from flowrl.iter.waiting import ready_refs, wait_for_any


class Reply(NamedTuple):
    """What a shard answers to a request: an item with tags, or the end of its stream."""

    item: Any = None
    tags: dict[str, Any] | None = None
    end: bool = False


class Shards(Protocol):
    """Who serves the shards of a ParallelIterator."""

    remote: bool

    def __len__(self) -> int: ...

    def request(self, index: int) -> Any:
        """Ask shard `index` for its next item: a Ray ref of a Reply; in process a Reply."""

    def result(self, ref: Any) -> Reply:
        """The reply of a request that is ready, or the error that the shard raised."""

    def incarnation(self, index: int) -> int:
        """How often shard `index` was restarted."""

    def handle(self, index: int) -> Any:
        """The actor that serves shard `index`."""

    def stop(self) -> None:
        """Release the shards."""


class Gather(Stage):
    """Base of the gathers: asks, counts, names the shard in errors."""

    kind = "gather"

    def __init__(self, shards: Shards, name: str):
        super().__init__()
        self.shards = shards
        self.name = name
        self.live: list[int] | None = None
        self._seq: dict[int, int] = {}
        self._sources: tuple[Source, ...] = ()

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._sources

    def _live(self) -> list[int]:
        if self.live is None:
            self.live = list(range(len(self.shards)))
        return self.live

    def _receive(self, index: int, ref: Any) -> tuple[Reply, Source | None]:
        """Take the reply of shard `index`; a StopIteration in it is an error, not an end."""
        try:
            reply = self.shards.result(ref)
        except BaseException as error:
            raise self._named(error, index) from error.__cause__
        if reply.end:
            self._live().remove(index)
            return reply, None
        seq = self._seq[index] = self._seq.get(index, -1) + 1
        return reply, Source(index, self.shards.incarnation(index), seq, reply.tags or {})

    def _named(self, error: BaseException, index: int) -> BaseException:
        if isinstance(error, StopIteration):
            error = RuntimeError(f"shard {index} raised {error!r}")
        # what the shard's own stream noted stays; the plan's path starts here
        error._flowrl_stage, error._flowrl_noted = self, False  # type: ignore[attr-defined]
        error._flowrl_item = None  # type: ignore[attr-defined]
        error.add_note(f"raised by shard {index} of {self.name}")
        return error

    def label(self) -> str:
        return f"{self.kind} {self.name}"

    def stop(self) -> None:
        self.shards.stop()


class GatherSync(Gather):
    """Lists of one item per live shard, in shard order; asks for a round when it is pulled.

    Nothing is in flight between two pulls, so what the consumer does in between (new weights)
    reaches every worker before its next item. A shard that failed is asked again for the same
    round; the items that the others gave are kept.
    """

    kind = "batch_across_shards"

    def __init__(self, shards: Shards, name: str):
        super().__init__(shards, name)
        self._refs: dict[int, Any] = {}
        self._round: dict[int, tuple[Any, Source]] = {}
        self._open = False

    def pull(self, block: bool) -> Any:
        if not self._open:
            self._open = True
            self._round = {}
        for index in list(self._live()):
            if index not in self._refs and index not in self._round:
                self._refs[index] = self.shards.request(index)
        if self.shards.remote and not block:
            waiting = list(self._refs.values())
            if len(ready_refs(waiting)) < len(waiting):
                return NOT_READY
        for index in list(self._refs):
            reply, source = self._receive(index, self._refs.pop(index))
            if source is not None:
                self._round[index] = (reply.item, source)
        self._open = False
        if not self._round:
            raise StopIteration
        in_order = [self._round[index] for index in sorted(self._round)]
        self._round = {}
        self._sources = tuple(source for _, source in in_order)
        self.items += 1
        return [item for item, _ in in_order]

    def waits(self) -> list[Any]:
        if not self.shards.remote or not self._refs:
            return []
        refs = list(self._refs.values())
        ready = set(ready_refs(refs))
        return [ref for ref in refs if ref not in ready] or refs


class GatherAsync(Gather):
    """Items of any shard as they come, `num_async` requests in flight per shard.

    A shard is asked again when the item after its last one is pulled, so the consumer has
    finished with an item before the worker that made it starts on the next (the lag in weights
    is `num_async - 1` of its own items, not more).
    """

    kind = "gather_async"

    def __init__(self, shards: Shards, name: str, num_async: int = 1):
        if num_async < 1:
            raise ValueError(f"gather_async: num_async must be at least 1, got {num_async}")
        super().__init__(shards, name)
        self.num_async = num_async
        self._flight: dict[Any, int] = {}  # request -> shard
        self._ready: deque[Any] = deque()
        self._idle: deque[int] | None = None

    def pull(self, block: bool) -> Any:
        if self._idle is None:
            self._idle = deque(list(self._live()) * self.num_async)
        while self._idle:
            index = self._idle.popleft()
            if index in self._live():
                self._flight[self.shards.request(index)] = index
        while self._flight:
            ref = self._next_ready(block)
            if ref is None:
                return NOT_READY
            index = self._flight.pop(ref)
            if index in self._live():
                try:
                    reply, source = self._receive(index, ref)
                except BaseException:
                    self._idle.append(index)
                    raise
                if source is not None:
                    self._idle.append(index)
                    self._sources = (source,)
                    self.items += 1
                    return reply.item
        raise StopIteration

    def _next_ready(self, block: bool) -> Any | None:
        if not self._ready:
            if not self.shards.remote:
                return next(iter(self._flight))
            refs = list(self._flight)
            self._ready.extend(ready_refs(refs))
            if not self._ready and block:
                wait_for_any(refs)
                self._ready.extend(ready_refs(refs))
        return self._ready.popleft() if self._ready else None

    def waits(self) -> list[Any]:
        return list(self._flight) if self.shards.remote else []

    def label(self) -> str:
        return f"{self.kind}(num_async={self.num_async}) {self.name}"
