"""Gathers: the stages that bring the items of parallel shards to the driver.

A gather decides how many requests are in flight and in which order replies are handed over.
End, error and failure of a shard are three things: a shard that has ended is left alone; an error
of its code is raised here, named, and the shard asked again; a shard whose process died or hangs
is replaced in place, with the others' items kept.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from flowrl.iter.errors import (
    OnError,
    Retry,
    ShardFailedError,
    Skip,
    blame,
    check_policy,
    operator_error,
)
from flowrl.iter.metrics import current_metrics
from flowrl.iter.recovery import STARTING_S, PendingRequest, ShardState, is_death
from flowrl.iter.shard_server import Reply
from flowrl.iter.shards import Shards
from flowrl.iter.stage import NOT_READY, Source, Stage, pack, unpack
from flowrl.iter.waiting import Waiter, ready_refs, wait_for_all, wait_for_any

AT_ONCE_S = 0.0001
CHECK_S = 0.2  # between two looks for shards that hang

log = logging.getLogger("flowrl")


class Gather(Stage):
    """Base of the gathers.

    Args:
        shards: who is asked.
        batch_ms: a shard collects items for so many milliseconds before it answers.
        on_error: what to do when a shard's code raises.
    """

    kind = "gather"

    def __init__(
        self,
        shards: Shards,
        batch_ms: float = 0,
        on_error: OnError = "raise",
    ):
        if not 0 <= batch_ms < float("inf"):
            raise ValueError(f"{self.kind}: batch_ms must be at least 0, got {batch_ms}")
        super().__init__()
        self.shards = shards
        self.saved = shards.replayable
        self.on_error = check_policy(on_error)
        self.skipped = 0
        self._batch_ms = batch_ms
        self.states = [ShardState(index, shards.recovery(index)) for index in range(len(shards))]
        # whether shards must answer in time
        self._limited = any(shard.recovery.timeout_s is not None for shard in self.states)
        self._next_check = 0.0
        self._flight: dict[Any, PendingRequest] = {}
        self._queue: deque[tuple[Any, Source]] = deque()
        self._poll = True
        self._loaded = False
        self._changes = shards.changes()
        self._sources: tuple[Source, ...] = ()
        self._limit: Any = None

    def start(self, seed: str | None) -> None:
        if seed is not None and not self._loaded:
            self.shards.seed = seed
        self.shards.start()

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._sources

    def can_wait(self) -> bool:
        return self.shards.remote

    def live(self) -> list[ShardState]:
        """The shards that have neither ended nor failed."""
        return [shard for shard in self.states if shard.state == "live"]

    def _follow(self) -> list[ShardState]:
        """Look who has joined and who has left; the states of those that have joined."""
        self._changes = self.shards.changes()
        joined = []
        for index, here in enumerate(self.shards.present()):
            old = self.states[index] if index < len(self.states) else None
            if old is not None and not here and old.state != "left":
                for ref in old.requests:  # what it was asked for went with it
                    del self._flight[ref]
                old.requests.clear()
                old.state = "left"
            elif here and (old is None or old.state == "left"):
                new = ShardState(index, self.shards.recovery(index))
                new.accepted = old.accepted if old is not None else 0
                self.states[index : index + 1] = [new]
                joined.append(new)
        return joined

    # -- asking and receiving ------------------------------------------------------------------

    def _ask(self, shard: ShardState) -> bool:
        """Ask a shard; False while its back-off lasts."""
        if shard.broken is not None and not self._replace(shard):
            return False
        ref = self.shards.request(shard.index, self._batch_ms, shard.accepted)
        incarnation = self.shards.incarnation(shard.index)
        mark = None if self._limit is None else self._limit.mark()
        self._flight[ref] = PendingRequest(shard, incarnation, time.monotonic(), mark)
        shard.requests.append(ref)
        return True

    def _replace(self, shard: ShardState) -> bool:
        """Have a shard made again, unless its back-off lasts, or another gather has done it."""
        if self.shards.incarnation(shard.index) == shard.broken:
            if time.monotonic() < shard.not_before:
                return False
            incarnation, shard.broken = shard.broken, None
            try:
                replaced = self.shards.replace(shard.index)
            except Exception as error:
                self._lost(shard, incarnation, error)
                return False
            if not replaced:
                self._give_up(shard, "nobody knows how to make it again (recreate=)", None)
            shard.restarts += 1
            _count("num_shard_restarts")
        shard.broken, shard.fresh = None, True
        return True

    def _receive(self, ref: Any, reply: Reply | None = None) -> list[tuple[Any, Source]]:
        """The items of a reply, fetched if it is not given; none if the shard has ended or must be
        replaced first."""
        asked = self._flight.pop(ref)
        shard = asked.shard
        shard.requests.remove(ref)
        if shard.state != "live":
            return []
        try:
            if reply is None:
                reply = self.shards.result(asked, ref)
        except BaseException as error:
            if self.shards.remote and is_death(error):
                self._lost(shard, asked.incarnation, error)
                return []
            return self._failed(shard, error)
        shard.heard, shard.fresh = time.monotonic(), False
        shard.errors = 0
        given, tags, end, _, stages = reply
        if stages is not None:
            shard.stages = stages
        if end:
            shard.state = "ended"
        if given:
            shard.deaths = 0
        items = []
        for item, tag in zip(given, tags, strict=True):
            source = Source(shard.index, asked.incarnation, shard.accepted, tag, self.name)
            items.append((item, source))
            shard.accepted += 1
        return items

    def _failed(self, shard: ShardState, error: BaseException) -> list[Any]:
        """The shard's code raised: as the policy says."""
        policy = self.on_error
        shard.errors += 1
        if isinstance(error, Exception):
            if isinstance(policy, Skip) and (policy.max is None or self.skipped < policy.max):
                self.skipped += 1
                return []
            if isinstance(policy, Retry) and shard.errors <= policy.times:
                return []
        raise self._named(error, shard) from error.__cause__

    def _named(self, error: BaseException, shard: ShardState) -> BaseException:
        error = operator_error(error)
        # what the shard's own stream noted stays; the plan's path starts here
        error._flowrl_stage, error._flowrl_noted = self, False  # type: ignore[attr-defined]
        error._flowrl_item = None  # type: ignore[attr-defined]
        error.add_note(f"raised by shard {shard.index} of {self.shards.name}")
        return error

    # -- failure -------------------------------------------------------------------------------

    def _lost(self, shard: ShardState, incarnation: int, error: BaseException) -> None:
        """A shard died or hangs: have it replaced, or give it up.

        Raises:
            ShardFailedError: it will not come back.
        """
        if shard.broken is not None or self.shards.incarnation(shard.index) > incarnation:
            return  # another request to the same dead worker said so before
        said = [line for line in str(error).splitlines() if line.strip()] or [""]
        built = not getattr(error, "actor_init_failed", False)
        what = f"{type(error).__name__}: {said[0].strip()}" if built else said[-1].strip()
        shard.deaths = shard.deaths + 1 if what == shard.death else 1
        shard.death = what
        recovery = shard.recovery
        if not built:
            self._give_up(shard, "its constructor raised", error)
        if shard.deaths >= recovery.breaker:
            self._give_up(shard, f"it died {shard.deaths} times in a row in the same way", error)
        if shard.restarts >= recovery.max_restarts:
            self._give_up(shard, f"it was restarted {shard.restarts} times before", error)
        pause = min(recovery.backoff_s * 2 ** (shard.deaths - 1), recovery.max_backoff_s)
        shard.broken = incarnation
        shard.not_before = time.monotonic() + pause
        log.warning("shard %d of %s died (%s)", shard.index, self.shards.name, what)

    def _give_up(self, shard: ShardState, why: str, error: BaseException | None) -> None:
        shard.state = "failed"
        self.shards.mark_failed(shard.index)
        _count("num_shards_failed")
        left = len(self.live())
        failed = ShardFailedError(
            f"shard {shard.index} of {self.shards.name} has failed: {why}. Last seen: "
            f"{shard.death}. {left} of {len(self.states)} shards are left; the stream goes on "
            "with them"
        )
        blame(failed, self, None)
        raise failed from error

    def _check_hanging(self) -> None:
        """Give up the shards that have not answered for too long: their answers are not there,
        not merely unread."""
        now = time.monotonic()
        if not self._limited or not self.shards.remote:
            return
        self._next_check = now + CHECK_S
        for shard, until in self._answers_due():
            if now <= until or ready_refs([shard.requests[0]]):
                continue
            limit = shard.recovery.timeout_s
            self._unanswered(shard, len(shard.requests))
            for ref in shard.requests:
                del self._flight[ref]
            shard.requests.clear()
            self.shards.kill(shard.index)
            incarnation = self.shards.incarnation(shard.index)
            self._lost(shard, incarnation, TimeoutError(f"no answer for {limit} s"))

    def _unanswered(self, shard: ShardState, requests: int) -> None:
        """Requests of a hanging shard are given up."""

    def _answers_due(self) -> list[tuple[ShardState, float]]:
        """Until when each shard with requests in flight must answer, where that is limited."""
        due = []
        for shard in self.states:
            limit = shard.recovery.timeout_s
            if shard.requests and limit is not None:
                since = max(self._flight[shard.requests[0]].at, shard.heard)
                due.append((shard, since + limit + STARTING_S * shard.fresh))
        return due

    def _end(self) -> BaseException:
        """What to raise when no shard is live."""
        if any(shard.state == "ended" for shard in self.states):
            return StopIteration()
        failed = ShardFailedError(
            f"all {len(self.states)} shards of {self.shards.name} have failed"
        )
        blame(failed, self, None)
        return failed

    # -- waiting -------------------------------------------------------------------------------

    def _deadlines(self) -> list[float]:
        """When something is due though no request is answered: a back-off ends, a shard hangs."""
        times = [
            shard.not_before
            for shard in self.states
            if shard.broken is not None and shard.state == "live"
        ]
        if self._limited and self.shards.remote:
            times += [until for _, until in self._answers_due()]
        return times

    def waits(self) -> list[Any]:
        if not self.shards.remote:
            return []
        return [*self._flight, *self._deadlines()]

    def _wait(self, for_all: bool = False) -> list[Any]:
        """Wait here: for one request in flight, or for all. Those that are ready."""
        started = time.perf_counter()
        times = self._deadlines()
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        refs, ready = list(self._flight), []
        if not refs:
            Waiter().wait(times)  # for nothing but the end of a back-off
        elif for_all:
            ready = wait_for_all(refs, timeout)
        else:
            ready = wait_for_any(refs, timeout)
        waited = time.perf_counter() - started
        self.waited_s += waited
        # an answer that was there at once is seldom alone
        self._poll = waited < AT_ONCE_S
        return ready

    # -- what it says of itself ----------------------------------------------------------------

    def label(self) -> str:
        return f"{self.kind} {self.shards.name}"

    def numbers(self) -> dict[str, Any]:
        states = [shard.state for shard in self.states]
        figures = {
            "shards_live": states.count("live"),
            "shards_failed": states.count("failed"),
            "restarts": sum(shard.restarts for shard in self.states),
            "in_flight": len(self._flight),
            "queued": len(self._queue),
            "skipped": self.skipped,
        }
        return {name: n for name, n in figures.items() if n or name == "shards_live"}

    def inside(self) -> dict[int, list[dict[str, Any]]]:
        return {shard.index: shard.stages for shard in self.states if shard.stages}

    def queued(self) -> list[Source]:
        """Provenance of the items that were received and not handed on yet."""
        return [source for _, source in self._queue]

    def state_dict(self) -> dict[str, Any]:
        """How far each shard is; requests in flight are asked again."""
        return {
            "items": self.items,
            "skipped": self.skipped,
            "accepted": [shard.accepted for shard in self.states],
            "ended": [shard.state == "ended" for shard in self.states],
            "queue": [[item, pack([source])] for item, source in self._queue],
            "seed": self.shards.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.saved:
            return
        self.items, self.skipped = state["items"], state["skipped"]
        self._queue = deque((item, unpack(source)[0]) for item, source in state["queue"])
        self.shards.seed, self._loaded = state["seed"], True
        self._follow()
        for shard, accepted, ended in zip(
            self.states, state["accepted"], state["ended"], strict=True
        ):
            shard.accepted = accepted
            if shard.state != "left":
                shard.state = "ended" if ended else "live"

    def stop(self) -> None:
        self._flight.clear()
        self.shards.stop()


class GatherSync(Gather):
    """Lists of one item per live shard, in shard order; asks for a round when it is pulled.

    Nothing is in flight between two pulls, so what the consumer does in between (new weights)
    reaches every worker before its next item: the lag is 0. A shard that failed is asked again
    for the same round; the items that the others gave are kept.

    Args:
        flat: hand over the items of a round one by one.
    """

    kind = "batch_across_shards"

    def __init__(self, shards: Shards, flat: bool = False, **options: Any):
        super().__init__(shards, **options)
        self.lists = not flat
        if flat:
            self.kind = "gather_sync"
        self._flat = flat
        self._round: dict[int, tuple[Any, Source]] = {}

    def pull(self, block: bool) -> Any:
        if self.shards.changes() != self._changes:
            self._follow()
        while True:
            if self._queue:
                item, source = self._queue.popleft()
                self._sources = (source,)
                self.items += 1
                return item
            if self._complete(block):
                if not self._round:
                    raise self._end()
                in_order = [self._round[index] for index in sorted(self._round)]
                self._round = {}
                if self._flat:
                    self._queue.extend(in_order)
                    continue
                self._sources = tuple(source for _, source in in_order)
                self.items += 1
                return [item for item, _ in in_order]
            return NOT_READY

    def forget(self, condition: Callable[[Any], bool]) -> list[tuple[Any, Source]]:
        """Let go of the items of a round that is not complete for which `condition(item)` holds:
        their shards are asked again. Those items."""
        gone = [index for index, (item, _) in self._round.items() if condition(item)]
        return [self._round.pop(index) for index in gone]

    def _complete(self, block: bool) -> bool:
        """Ask and receive until the round has an item of every live shard."""
        round_, remote = self._round, self.shards.remote
        while True:
            missing = False
            for shard in self.states:
                if shard.state == "live" and shard.index not in round_:
                    missing = True
                    if not shard.requests:
                        self._ask(shard)
            if not missing and not self._flight:
                return True
            # in shard order, so that of two errors the same one comes first
            refs = [ref for shard in self.states for ref in shard.requests]
            replies = self._fetch(refs) if remote and block else None
            if replies is None:
                replies = [None] * len(refs)
                if remote:
                    ready = self._wait(for_all=True) if block else ready_refs(refs) if refs else []
                    there = set(ready)
                    refs = [ref for ref in refs if ref in there]
            for ref, reply in zip(refs, replies, strict=False):
                index = self._flight[ref].shard.index
                for item in self._receive(ref, reply):
                    round_[index] = item
            if self._limited:
                self._check_hanging()
            if not refs and not block:
                return False

    def _fetch(self, refs: list[Any]) -> list[Reply | None] | None:
        """All replies in one request to Ray; None where they must be looked at one by one: one
        raised, or something else is due before they come."""
        if not refs or self._deadlines():
            return None
        started = time.perf_counter()
        try:
            return self.shards.results([self._flight[ref] for ref in refs], refs)
        except Exception:
            return None
        finally:
            self.waited_s += time.perf_counter() - started

    def queued(self) -> list[Source]:
        return [*super().queued(), *(source for _, source in self._round.values())]

    def state_dict(self) -> dict[str, Any]:
        begun = [[i, item, pack([source])] for i, (item, source) in self._round.items()]
        return {**super().state_dict(), "round": begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.saved:
            begun = state["round"]
            self._round = {i: (item, unpack(source)[0]) for i, item, source in begun}


class GatherAsync(Gather):
    """Items of any shard as they come, `num_async` requests in flight per shard.

    Args:
        num_async: requests in flight per shard.
        ask_again: when a shard is asked for its next item. "after": when the item after the
            handed over one is pulled; the consumer has then finished with it, and an item is at
            most `num_async - 1` items of its own shard old. "before" the item is handed over: the
            shard works meanwhile, and an item is at most `num_async` old. With `batch_ms` these
            are replies, of as many items as come in that time: `max_lag` is None.
        limit: says when enough is asked for. Its `mark()` is noted with each request; none is sent
            unless `may_ask(in_flight, oldest)`, of how many there are and the mark of the oldest
            one (None without); `received(mark, item)` is told of each item.
    """

    kind = "gather_async"

    def __init__(
        self,
        shards: Shards,
        num_async: int = 1,
        ask_again: Literal["after", "before"] = "after",
        limit: Any = None,
        **options: Any,
    ):
        if not isinstance(num_async, int) or num_async < 1:
            raise ValueError(f"gather_async: num_async must be an int >= 1, got {num_async!r}")
        if ask_again not in ("after", "before"):
            raise ValueError(f'gather_async: ask_again is "after" or "before", got {ask_again!r}')
        super().__init__(shards, **options)
        self._limit = limit
        self.leans = limit is not None
        self._held_back = False
        self.num_async = num_async
        self.max_lag = None if self._batch_ms else num_async - (ask_again == "after")
        self._before = ask_again == "before"
        self._ready: deque[Any] = deque()
        self._idle: deque[ShardState] | None = None

    def _ask_idle(self) -> None:
        if self._idle is None:
            self._idle = deque(self.live() * self.num_async)
        for _ in range(len(self._idle)):
            if self._limit is not None:
                oldest = next(iter(self._flight.values())).mark if self._flight else None
                self._held_back = not self._limit.may_ask(len(self._flight), oldest)
                if self._held_back:
                    return
            shard = self._idle.popleft()
            try:
                asked = shard.state != "live" or self._ask(shard)
            except BaseException:
                self._idle.appendleft(shard)
                raise
            if not asked:
                self._idle.append(shard)

    def pull(self, block: bool) -> Any:
        if self.shards.changes() != self._changes:
            joined = self._follow()
            if self._idle is not None:
                self._idle.extend(joined * self.num_async)
        while not self._queue:
            if self._limited and time.monotonic() > self._next_check:
                self._check_hanging()  # though others may always have something ready
            self._ask_idle()
            if not self._flight and not self._idle:
                raise self._end()
            if not self._flight and self._held_back:
                return NOT_READY  # others must go on first
            ref = self._next_ready(block)
            if ref is None:
                self._check_hanging()
                if not block:
                    return NOT_READY
                continue
            asked = self._flight[ref]
            assert self._idle is not None
            self._idle.append(asked.shard)
            try:
                if self._before:
                    self._ask_idle()  # the shard works while its answer is fetched
            finally:  # whatever asking raises, this turn is used up
                received = self._receive(ref)
                self._queue.extend(received)
                if self._limit is not None:
                    for item, _ in received:
                        self._limit.received(asked.mark, item)
        item, source = self._queue.popleft()
        self._sources = (source,)
        self.items += 1
        return item

    def _next_ready(self, block: bool) -> Any | None:
        """A request that is answered; None if there is none, after waiting if that is allowed."""
        if not self.shards.remote:
            return next(iter(self._flight), None)
        while self._ready:
            ref = self._ready.popleft()
            if ref in self._flight:  # not given up since, as those of a shard that hangs are
                # a shard answers in order, though the news of it may come out of order
                return self._flight[ref].shard.requests[0]
        if self._flight and (self._poll or not block):
            self._ready.extend(ready_refs(list(self._flight)))
        if not self._ready and block:
            self._ready.extend(self._wait())
        return self._next_ready(block) if self._ready else None

    def can_wait(self) -> bool:
        return self._limit is not None or super().can_wait()

    def _unanswered(self, shard: ShardState, requests: int) -> None:
        assert self._idle is not None
        self._idle.extend([shard] * requests)

    def state_dict(self) -> dict[str, Any]:
        turns = [asked.shard.index for asked in self._flight.values()]
        turns += [shard.index for shard in self._idle or ()]
        return {**super().state_dict(), "turns": None if self._idle is None else turns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.saved and state["turns"] is not None:
            self._idle = deque(self.states[index] for index in state["turns"])

    def label(self) -> str:
        return f"{self.kind}(num_async={self.num_async}) {self.shards.name}"

    def stop(self) -> None:
        super().stop()
        self._ready.clear()


class GatherShard(GatherAsync):
    """The items of one shard in its order, whatever is in flight."""

    kind = "shard"

    def _next_ready(self, block: bool) -> Any | None:
        oldest = next(iter(self._flight), None)
        if not self.shards.remote or (oldest is not None and ready_refs([oldest])):
            return oldest
        if block:
            started = time.perf_counter()
            Waiter().wait(self.waits())
            self.waited_s += time.perf_counter() - started
        return None

    def waits(self) -> list[Any]:
        if not self.shards.remote:
            return []
        return [*list(self._flight)[:1], *self._deadlines()]


def _count(name: str) -> None:
    metrics = current_metrics()
    if metrics is not None:
        metrics.counters[name] += 1
