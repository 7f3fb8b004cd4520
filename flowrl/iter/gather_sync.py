"""GatherSync: one item of every shard per round."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from flowrl.iter.gather import Gather
from flowrl.iter.recovery import ShardState
from flowrl.iter.shard_stream import Reply
from flowrl.iter.shards import Shards
from flowrl.iter.stage import NOT_READY
from flowrl.iter.waiting import ready_refs
from flowrl.source import Source, sources_from_list, sources_to_list
from flowrl.state_schema import Fields

SLOW_FETCH_S = 0.03  # if a round took longer to fetch, another call of Ray costs little


class GatherSync(Gather):
    """Return lists of one item per live shard, in shard order: a round.

    No request is in flight between two rounds, so changes by the consumer (new weights) reach every
    worker before its next item: the lag is 0. If a shard dies, the request is repeated in the same
    round and the items of the other shards are kept; without
    `Recovery.rounds_wait_for_replacement`, rounds leave the shard out until its replacement has
    started.

    Args:
        shards: the shards to read.
        flat: return the items of a round one at a time.
        options: see Gather.
    """

    state_fields: ClassVar[Fields] = {"round": list[list[Any]]}

    name = "batch_across_shards"

    def __init__(self, shards: Shards, flat: bool = False, **options: Any):
        if flat:
            self.name = "gather_sync"
        super().__init__(shards, **options)
        self.yields_lists = not flat
        self._flat = flat
        self._round: dict[int, tuple[Any, Source]] = {}  # shard -> item
        self._fetch_s = 0.0  # time to fetch the last round at once [s]
        # False: the items of an incomplete round are not saved; they count as lost after a restore
        self.saves_partial_rounds = True

    def pull(self, block: bool) -> Any:
        while True:
            if self._queue:
                item, source = self._queue.popleft()
                self._item_sources = (source,)
                self.items += 1
                return item
            if self._run_round(block):
                if not self._round:
                    raise self._end()
                in_order = [self._round[index] for index in sorted(self._round)]
                self._round = {}
                if self._flat:
                    self._queue.extend(in_order)
                    continue
                self._item_sources = tuple(source for _, source in in_order)
                self.items += 1
                return [item for item, _ in in_order]
            return NOT_READY

    def discard(self, condition: Callable[[Any], bool]) -> list[tuple[Any, Source]]:
        """Remove the items of the current round for which `condition(item)` is true, so that their
        shards are requested again; return the removed items."""
        indexes = [index for index, (item, _) in self._round.items() if condition(item)]
        return [self._round.pop(index) for index in indexes]

    def _run_round(self, block: bool) -> bool:
        """Request and receive items; return whether the round has one of every shard."""
        if not self.shards.remote:
            self._complete_local_round()
            return True
        if self.journal is None:
            return self._complete_round(block)
        if not self.journal.replays:
            try:
                complete = self._complete_round(block)
            except BaseException:
                self.journal.plan_log.observe(self.name, True, expected=True)
                self.journal.end(f"an item of {self.shards.name} raised an error")
                raise
            return bool(self.journal.plan_log.observe(self.name, complete, expected=True))
        self._request_missing()
        if not self.journal.plan_log.observe(self.name, True, expected=True):
            return False
        for ref in [ref for shard in self.states for ref in shard.requests]:
            index = self._in_flight[ref].shard.index
            for item in self._receive(ref):
                self._round[index] = item
        return True

    def _complete_local_round(self) -> None:
        """Receive an item of every shard of this process, in shard order."""
        for shard in self.states:
            while shard.status == "live" and shard.index not in self._round:
                self._request(shard)
                for item in self._receive(shard.requests[0]):
                    self._round[shard.index] = item

    def _complete_round(self, block: bool) -> bool:
        while True:
            missing = self._request_missing()
            if not missing and not self._in_flight:
                return True
            # in shard order, so that the first of several errors is always the same one
            refs = [ref for shard in self.states for ref in shard.requests]
            replies = self._fetch_all(refs) if block else None
            if replies is None:
                ready = set(self._wait(for_all=True) if block else ready_refs(refs) if refs else [])
                refs = [ref for ref in refs if ref in ready]
                replies = [None] * len(refs)
            for ref, reply in zip(refs, replies, strict=True):
                index = self._in_flight[ref].shard.index
                for item in self._receive(ref, reply):
                    self._round[index] = item
            if self._has_timeouts:
                self._check_timeouts()
            if not refs and not block:
                return False

    def _request_missing(self) -> list[ShardState]:
        """Send requests to the members whose item is missing; return these members."""
        missing = [shard for shard in self.prepare_members() if shard.index not in self._round]
        for shard in missing:
            if not shard.requests:
                self._request(shard)
        return missing

    def prepare_members(self) -> list[ShardState]:
        """Return the shards of the current round; between two rounds, those of the next one.

        Creates the replacements of dead shards that the round does not wait for.
        """
        if self.shards.num_membership_changes() != self._num_membership_changes:
            self._update_members()
        begins = not self._round and not self._in_flight
        live = self.live()
        for shard in live:
            if shard.recovery.rounds_wait_for_replacement:
                continue
            if shard.dead_incarnation is not None:
                self._replace(shard)
            if begins and shard.startup is not None and ready_refs([shard.startup]):
                shard.startup = None  # if it failed, so does the next request
        return [
            shard for shard in live if shard.recovery.rounds_wait_for_replacement or shard.is_ready
        ] or live

    def _fetch_all(self, refs: list[Any]) -> list[Reply | None] | None:
        """Fetch all replies in one request to Ray; return None if they must be fetched one at a
        time, because one of them raised or a deadline may come first."""
        if not refs or self._deadlines():
            return None
        started = time.perf_counter()
        try:
            requests = [self._in_flight[ref] for ref in refs]
            with self.waiting():
                return self.shards.results(requests, refs, wait_first=self._fetch_s > SLOW_FETCH_S)
        except Exception:
            return None
        finally:
            self._fetch_s = time.perf_counter() - started

    def queued(self) -> list[Source]:
        saved = self._round if self.saves_partial_rounds else {}
        return [*super().queued(), *(source for _, source in saved.values())]

    def state_dict(self) -> dict[str, Any]:
        saved = self._round if self.saves_partial_rounds else {}
        current = [[i, item, sources_to_list([source])] for i, (item, source) in saved.items()]
        return {**super().state_dict(), "round": current}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._restores_items:
            rows = state["round"]
            self._round = {i: (item, sources_from_list(row)[0]) for i, item, row in rows}
