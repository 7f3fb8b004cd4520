"""GatherAsync: items of any shard as they arrive; GatherShard: the items of one shard."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any, ClassVar, Literal

from flowrl.iter.gather import Gather, RequestLimit
from flowrl.iter.journal import ReplayError
from flowrl.iter.recovery import ShardState
from flowrl.iter.shards import Shards
from flowrl.iter.stage import NOT_READY
from flowrl.iter.waiting import Waiter, ready_refs
from flowrl.setting_values import check_int
from flowrl.state_schema import Fields, Natural


class GatherAsync(Gather):
    """Return items of any shard as they arrive, with `num_async` requests in flight per shard.

    Args:
        shards: the shards to read.
        num_async: requests in flight per shard.
        next_request: see ParallelIterator.gather_async.
        limit: limits the requests in flight.
        options: see Gather.
    """

    state_fields: ClassVar[Fields] = {"requests": list[Natural] | None}

    name = "gather_async"
    is_asynchronous = True

    def __init__(
        self,
        shards: Shards,
        num_async: int = 1,
        next_request: Literal["after_item", "before_item"] = "after_item",
        limit: RequestLimit | None = None,
        **options: Any,
    ):
        check_int("num_async", num_async)
        if next_request not in ("after_item", "before_item"):
            raise ValueError(
                'gather_async: next_request must be "after_item" or "before_item", '
                f"got {next_request!r}"
            )
        super().__init__(shards, **options)
        self.title = f"{self.name}(num_async={num_async}) {shards.name}"
        self._limit = limit
        self.depends_on_sibling = limit is not None
        self._limit_reached = False
        self.num_async = num_async
        self._requests_before_item = next_request == "before_item"
        self._ready: deque[Any] = deque()
        # shards to request; a shard appears once per request that it lacks
        self._to_request: deque[ShardState] | None = None
        # requests that a shard has beyond num_async, by its index, after interrupted fetches
        self._num_extra: Counter[int] = Counter()

    def _send_requests(self) -> None:
        if self._to_request is None:
            self._to_request = deque(self.live() * self.num_async)
        for _ in range(len(self._to_request)):
            if self._limit is not None:
                oldest = next(iter(self._in_flight.values())).progress if self._in_flight else None
                self._limit_reached = not self._limit.may_request(len(self._in_flight), oldest)
                if self._limit_reached:
                    return
            shard = self._to_request.popleft()
            try:
                sent = shard.status != "live" or self._request(shard)
            except BaseException:
                self._to_request.appendleft(shard)
                raise
            if not sent:
                self._to_request.append(shard)

    def _restart_times(self) -> list[float]:
        # a dead shard is replaced when it is requested, which the limit does not allow yet
        return [] if self._limit_reached else super()._restart_times()

    def pull(self, block: bool) -> Any:
        if self.shards.num_membership_changes() != self._num_membership_changes:
            joined = self._update_members()
            for shard in joined:
                self._num_extra.pop(shard.index, None)
            if self._to_request is not None:
                self._to_request.extend(joined * self.num_async)
        while not self._queue:
            if self._has_timeouts and time.monotonic() > self._next_timeout_check:
                self._check_timeouts()  # even if other shards are always ready
            self._send_requests()
            if not self._in_flight and not self._to_request:
                raise self._end()
            if not self._in_flight and self._limit_reached:
                return NOT_READY  # another branch must run first
            ref = self._next_ready(block)
            if ref is None:
                self._check_timeouts()
                if not block:
                    return NOT_READY
                continue
            request = self._in_flight[ref]
            assert self._to_request is not None
            if self._num_extra[request.shard.index] > 0:  # it has its next request already
                self._num_extra[request.shard.index] -= 1
            else:
                self._to_request.append(request.shard)
            try:
                if self._requests_before_item:
                    self._send_requests()  # the shard works while its reply is fetched
            finally:  # receive the reply even if sending raises
                received = self._receive(ref)
                self._queue.extend(received)
                if self._limit is not None:
                    for item, _ in received:
                        self._limit.received(request.progress, item)
        item, source = self._queue.popleft()
        self._item_sources = (source,)
        self.items += 1
        return item

    def _next_ready(self, block: bool) -> Any | None:
        """Return the ref of a reply that is ready, else None; wait for one if `block`."""
        if not self.shards.remote:
            return next(iter(self._in_flight), None)
        if self.journal is None:
            return self._next_arrived(block)
        ref = None if self.journal.replays else self._next_arrived(block)
        number = 0 if ref is None else self._in_flight[ref].shard.index + 1
        number = self.journal.plan_log.observe(self.name, number)
        if not number:
            return None
        shard = self.states[number - 1] if number <= len(self.states) else None
        if shard is None or not shard.requests:
            raise ReplayError(
                f"the replay differs from the run: {self} has no request to shard {number - 1}"
            )
        return shard.requests[0]

    def _next_arrived(self, block: bool) -> Any | None:
        while self._ready:
            ref = self._ready.popleft()
            if ref in self._in_flight:  # not cancelled since
                # a shard replies in order, though its refs may become ready out of order
                return self._in_flight[ref].shard.requests[0]
        if self._in_flight and (self._others_may_be_ready or not block):
            self._ready.extend(ready_refs(list(self._in_flight)))
        if not self._ready and block:
            self._ready.extend(self._wait())
        return self._next_arrived(block) if self._ready else None

    @property
    def has_limit(self) -> bool:
        """Whether a RequestLimit limits the requests in flight."""
        return self._limit is not None

    def can_return_not_ready(self) -> bool:
        return self._limit is not None or super().can_return_not_ready()

    def blocked_by(self) -> str:
        if self._limit is None or not self._limit_reached or self._in_flight:
            return ""
        return f"{self._limit} allows the next request when more received items are trained on"

    def _on_interrupted(self, shard: ShardState) -> None:
        if self._to_request is not None and shard in self._to_request:
            self._to_request.remove(shard)
        else:
            self._num_extra[shard.index] += 1

    def _on_cancelled(self, shard: ShardState, num_requests: int) -> None:
        assert self._to_request is not None
        self._to_request.extend([shard] * num_requests)

    def state_dict(self) -> dict[str, Any]:
        requests = [request.shard.index for request in self._in_flight.values()]
        requests += [shard.index for shard in self._to_request or ()]
        return {
            **super().state_dict(),
            "requests": None if self._to_request is None else requests,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if not self.resumable or state["requests"] is None:
            return
        # in the saved order; the number of requests may have changed, and shards that had failed
        # start again
        missing = Counter({shard.index: self.num_async for shard in self.live()})
        self._to_request = deque()
        for shard in [*(self.states[i] for i in state["requests"]), *self.live() * self.num_async]:
            if missing[shard.index] > 0:
                missing[shard.index] -= 1
                self._to_request.append(shard)

    def stop(self) -> None:
        super().stop()
        self._ready.clear()
        self._num_extra.clear()


class GatherShard(GatherAsync):
    """Return the items of one shard in its order, with several requests in flight."""

    name = "shard"

    def _next_arrived(self, block: bool) -> Any | None:
        oldest = next(iter(self._in_flight), None)
        if oldest is not None and ready_refs([oldest]):
            return oldest
        if block:
            with self.waiting():
                Waiter().wait(self.waits())
        return None

    def waits(self) -> list[Any]:
        if not self.shards.remote:
            return []
        return [*list(self._in_flight)[:1], *self._deadlines()]
