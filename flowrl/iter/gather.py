"""Gather, the base of the stages that bring the items of parallel shards to the driver.

A gather decides how many requests are in flight and in which order replies are returned. A shard
that has ended receives no more requests. If its code raises, the error is raised here with the name
of the shard, and the next request continues the shard. If its process dies or hangs, the shard is
replaced and the items of the other shards are kept.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, ClassVar, Protocol

from flowrl.errors import add_note
from flowrl.iter.errors import (
    OnError,
    Retry,
    ShardFailedError,
    Skip,
    check_on_error,
    is_permanent,
    note_origin,
    noting_origin,
    warn_of_skipped,
    without_stop_iteration,
)
from flowrl.iter.metrics import current_metrics
from flowrl.iter.ray_health import RayLostError, check_ray, watch_ray
from flowrl.iter.recovery import STARTING_S, PendingRequest, ShardState, is_death
from flowrl.iter.shard_stream import Reply
from flowrl.iter.shards import Shards
from flowrl.iter.stage import Stage
from flowrl.iter.waiting import Waiter, ready_refs, wait_for_all, wait_for_any
from flowrl.source import Source, sources_from_list, sources_to_list
from flowrl.state_schema import Fields, Natural

IMMEDIATE_S = 0.0001  # a wait shorter than this found a reply that was ready
TIMEOUT_CHECK_S = 0.2  # interval of the checks for hanging shards

log = logging.getLogger("flowrl")


class RequestLimit(Protocol):
    """Limits the requests that a gather has in flight."""

    def progress(self) -> Any:
        """Return the present progress of the consumer, which is stored with each request."""

    def may_request(self, in_flight: int, oldest: Any) -> bool:
        """Return whether to send another request.

        Args:
            in_flight: number of requests in flight.
            oldest: progress at the oldest request in flight; None if `in_flight` is 0.
        """

    def received(self, progress: Any, item: Any) -> None:
        """Note an item that was received, with the progress at its request."""


def check_batch_ms(method: str, batch_ms: Any) -> None:
    """Raise ValueError unless `batch_ms` is a finite number of at least 0."""
    if not isinstance(batch_ms, Real) or not 0 <= float(batch_ms) < float("inf"):
        raise ValueError(f"{method}: batch_ms must be a number of at least 0, got {batch_ms!r}")


class Gather(Stage):
    """Base of the gathers.

    Args:
        shards: the shards to read.
        batch_ms: milliseconds for which a shard collects items before it replies.
        on_error: what to do about exceptions in the code of a shard: "raise", Skip(max), or
            Retry(times), which requests the shard again. An item that failed is lost; to retry
            items, chain `for_each(fn, on_error=Retry(n))`.
    """

    state_fields: ClassVar[Fields] = {
        "skipped": Natural,
        "num_received": list[Natural],
        "errors": list[Natural],
        "ended": list[bool],
        "queue": list[list[Any]],
        "seed": int | str | None,
    }

    name = "gather"

    def __init__(
        self,
        shards: Shards,
        batch_ms: float = 0,
        on_error: OnError = "raise",
    ):
        check_batch_ms(self.name, batch_ms)
        super().__init__()
        self.title = f"{self.name} {shards.name}"
        self.shards = shards
        self.resumable = shards.replayable
        # A saved queue is restored only if the shards continue after its items. Shards that start
        # again send these items again.
        self._restores_items = shards.replayable or shards.keeps_state
        self.on_error = check_on_error(on_error)
        self.skipped = 0
        self.states = [ShardState(index, shards.recovery(index)) for index in range(len(shards))]
        self._batch_ms = batch_ms
        self._has_timeouts = any(shard.recovery.timeout_s is not None for shard in self.states)
        self._next_timeout_check = 0.0
        # (index of a shard) -> whether it waits for other shards, and may reply later
        self.waits_for_others: Callable[[int], bool] | None = None
        self._in_flight: dict[Any, PendingRequest] = {}
        self._queue: deque[tuple[Any, Source]] = deque()
        self._others_may_be_ready = True  # the last wait ended at once
        self._loaded = False
        self._num_membership_changes = shards.num_membership_changes()
        self._item_sources: tuple[Source, ...] = ()
        self._limit: RequestLimit | None = None

    def start(self, seed: str | None) -> None:
        if seed is not None and not self._loaded:
            self.shards.seed = seed
        if self.journal is not None and self.journal.replays:
            self._has_timeouts = False
        if self._batch_ms:
            self._end_journal("the number of items that batch_ms collects is not recorded")
        self.shards.start()
        if self.shards.remote:
            watch_ray()

    def source_actor(self, source: Source) -> Any:
        return self.shards.handle(source.shard) if source.origin == self.name else None

    def can_return_not_ready(self) -> bool:
        return self.shards.remote

    def live(self) -> list[ShardState]:
        """Return the shards that have neither ended nor failed nor left."""
        return [shard for shard in self.states if shard.status == "live"]

    def _update_members(self) -> list[ShardState]:
        """Note which workers have joined or left; return the states of those that have joined."""
        self._num_membership_changes = self.shards.num_membership_changes()
        self._end_journal("workers joined or left")
        joined = []
        for index, is_present in enumerate(self.shards.update_presence()):
            old = self.states[index] if index < len(self.states) else None
            if old is not None and not is_present and old.status != "left":
                for ref in old.requests:
                    del self._in_flight[ref]
                old.requests.clear()
                old.status = "left"
            elif is_present and (old is None or old.status == "left"):
                new = ShardState(index, self.shards.recovery(index))
                new.num_received = old.num_received if old is not None else 0
                self.states[index : index + 1] = [new]
                joined.append(new)
        return joined

    # -- requests and replies ------------------------------------------------------------------

    def _request(self, shard: ShardState) -> bool:
        """Send a request to a shard; return False during its back-off."""
        if shard.dead_incarnation is not None and not self._replace(shard):
            return False
        with noting_origin(self):  # an operator may be impossible to pickle
            ref = self.shards.submit(shard.index, self._batch_ms, shard.num_received, shard.errors)
        incarnation = self.shards.incarnation(shard.index)
        progress = None if self._limit is None else self._limit.progress()
        self._in_flight[ref] = PendingRequest(shard, incarnation, time.monotonic(), progress)
        shard.requests.append(ref)
        return True

    def _replace(self, shard: ShardState) -> bool:
        """Recreate a shard, unless another gather has done so; return False during its back-off."""
        if self.shards.incarnation(shard.index) == shard.dead_incarnation:
            check_ray()
            if time.monotonic() < shard.restart_at:
                return False
            incarnation, shard.dead_incarnation = shard.dead_incarnation, None
            try:
                replaced = self.shards.replace(shard.index)
            except Exception as error:
                self._handle_death(shard, incarnation, error)
                return False
            if not replaced:
                reason = self.shards.why_not_replaced(shard.index)
                self._fail_shard(shard, f"it cannot be recreated: {reason}", None)
            shard.restarts += 1
            _count("num_shard_restarts")
            if not shard.recovery.rounds_wait_for_replacement:
                shard.startup = self.shards.startup(shard.index)
                if (timeout_s := shard.recovery.timeout_s) is not None:
                    shard.startup_deadline = time.monotonic() + timeout_s + STARTING_S
        shard.dead_incarnation, shard.starting = None, True
        return True

    def _receive(self, ref: Any, reply: Reply | None = None) -> list[tuple[Any, Source]]:
        """Return the items of a reply; none if the shard has ended or must be replaced.

        Args:
            reply: the reply, if it was fetched already.
        """
        request = self._in_flight.pop(ref)
        shard = request.shard
        shard.requests.remove(ref)
        if shard.status != "live":
            return []
        try:
            if reply is None:
                reply = self.shards.result(request, ref)
        except RayLostError:
            raise
        except BaseException as error:
            if self.shards.remote and not isinstance(error, Exception):  # Ctrl-C: read it later
                self._in_flight = {ref: request, **self._in_flight}
                shard.requests.insert(0, ref)
                self._on_interrupted(shard)
                self._end_journal("a fetch was interrupted")
                raise
            if self.shards.remote and is_death(error):
                self._handle_death(shard, request.incarnation, error)
                return []
            return self._handle_error(shard, error)
        shard.last_reply_at, shard.starting = time.monotonic(), False
        shard.errors = 0
        items, tags, end, _, step_stats = reply
        if step_stats is not None:
            shard.step_stats = step_stats
        if end:
            shard.status = "ended"
        if items:
            shard.deaths = shard.identical_deaths = 0
        number = self.shards.number(shard.index)
        received = []
        for item, item_tags in zip(items, tags, strict=True):
            source = Source(number, request.incarnation, shard.num_received, item_tags, self.name)
            received.append((item, source))
            shard.newest = source
            shard.num_received += 1
        return received

    # -- failures ------------------------------------------------------------------------------

    def _handle_error(self, shard: ShardState, error: BaseException) -> list[Any]:
        """Apply the error policy to an exception in the code of a shard."""
        policy = self.on_error
        if isinstance(error, Exception):
            shard.errors += 1
            limit = policy.max if isinstance(policy, Skip) else 0
            if (limit is None or self.skipped < limit) and not is_permanent(error):
                self.skipped += 1
                warn_of_skipped(self, self.skipped, shard.errors, error)
                return []
            if isinstance(policy, Retry) and shard.errors <= policy.times:
                return []
        raise self._shard_error(error, shard)

    def _shard_error(self, error: BaseException, shard: ShardState) -> BaseException:
        error = without_stop_iteration(error)
        # keep the notes of the shard's own stream; the path in the plan starts at this stage
        vars(error).update(_flowrl_stage=self, _flowrl_noted=False, _flowrl_item=None)
        add_note(error, f"raised by {self.shards.describe(shard.index)}")
        return error

    def _handle_death(self, shard: ShardState, incarnation: int, error: BaseException) -> None:
        """Schedule the replacement of a shard that died or hangs.

        Raises:
            ShardFailedError: the shard cannot be replaced.
        """
        self._end_journal(f"{self.shards.describe(shard.index)} died or did not reply")
        if shard.dead_incarnation is not None or self.shards.incarnation(shard.index) > incarnation:
            return  # another request to the same worker has reported it
        death = _describe_death(error)
        shard.deaths += 1
        is_same = death == shard.last_death
        if _constructor_raised(error):  # its message may have an address or a port
            is_same = death.partition(":")[0] == shard.last_death.partition(":")[0]
        shard.identical_deaths = shard.identical_deaths + 1 if is_same else 1
        shard.last_death = death
        recovery = shard.recovery
        if _constructor_raised(error) and shard.newest is None:  # else it has worked before
            self._fail_shard(shard, "its constructor raised", error)
        if shard.identical_deaths >= recovery.max_identical_deaths:
            times = f"{shard.identical_deaths} times in a row with the same error"
            self._fail_shard(shard, f"it died {times}", error)
        if shard.restarts >= recovery.max_restarts:
            self._fail_shard(shard, f"it was restarted {shard.restarts} times before", error)
        backoff_s = min(recovery.backoff_s * 2 ** (shard.deaths - 1), recovery.max_backoff_s)
        shard.dead_incarnation = incarnation
        shard.restart_at = time.monotonic() + backoff_s
        where = self.shards.describe(shard.index)
        log.warning("%s died (%s): it is replaced in %.1f s", where, death, backoff_s)

    def _fail_shard(self, shard: ShardState, reason: str, error: BaseException | None) -> None:
        """Mark a shard as failed and raise ShardFailedError."""
        shard.status = "failed"
        self.shards.mark_failed(shard.index)
        _count("num_shards_failed")
        last = str(shard.last_death).rstrip(".")
        failed = ShardFailedError(
            f"{self.shards.describe(shard.index)} has failed: {reason}. Last error: {last}. "
            f"{len(self.live())} of {len(self.states)} shards remain"
        )
        note_origin(failed, self, None)
        raise failed from error

    def _check_timeouts(self) -> None:
        """Kill shards whose reply or start is overdue, unless the reply is ready but unread."""
        now = time.monotonic()
        if not self._has_timeouts or not self.shards.remote:
            return
        self._next_timeout_check = now + TIMEOUT_CHECK_S
        for shard, deadline in self._reply_deadlines():
            if now <= deadline:
                continue
            if ready_refs([shard.requests[0] if shard.requests else shard.startup]):
                shard.startup_deadline = None
                continue
            timeout_s = shard.recovery.timeout_s
            if self._waits_for_others(shard, now, timeout_s):
                shard.waited_at = now
                continue
            shard.startup = shard.startup_deadline = None
            self._on_cancelled(shard, len(shard.requests))
            for ref in shard.requests:
                del self._in_flight[ref]
            shard.requests.clear()
            self.shards.kill(shard.index)
            incarnation = self.shards.incarnation(shard.index)
            error = TimeoutError(f"no reply for {timeout_s} s")
            self._handle_death(shard, incarnation, error)

    def _waits_for_others(self, shard: ShardState, now: float, timeout_s: float | None) -> bool:
        """Return whether an overdue shard waits for others, one of which hangs or starts; for at
        most another timeout, and the time that a process may take to start."""
        if self.waits_for_others is None or timeout_s is None or not shard.requests:
            return False
        since = max(self._in_flight[shard.requests[0]].sent_at, shard.last_reply_at)
        starting = any(other.starting for other in self.states if other.status == "live")
        is_late = now > since + 2 * timeout_s + STARTING_S * starting
        return not is_late and self.waits_for_others(shard.index)

    def _end_journal(self, reason: str) -> None:
        if self.journal is not None:
            self.journal.end(reason)

    def _on_interrupted(self, shard: ShardState) -> None:
        """Handle the interruption of the fetch of a reply, which is still in flight."""

    def _on_cancelled(self, shard: ShardState, num_requests: int) -> None:
        """Handle the cancellation of the requests of a hanging shard."""

    def _reply_deadlines(self) -> list[tuple[ShardState, float]]:
        """Return the time by which each shard with a timeout must reply to its first request, or
        have started."""
        deadlines: list[tuple[ShardState, float]] = []
        for shard in self.states:
            timeout_s = shard.recovery.timeout_s
            if shard.requests and timeout_s is not None:
                sent_at = self._in_flight[shard.requests[0]].sent_at
                since = max(sent_at, shard.last_reply_at, shard.waited_at)
                deadlines.append((shard, since + timeout_s + STARTING_S * shard.starting))
            elif shard.startup is not None and shard.startup_deadline is not None:
                deadlines.append((shard, shard.startup_deadline))
        return deadlines

    def _end(self) -> BaseException:
        """Return the exception to raise when no shard is live."""
        if any(shard.status == "ended" for shard in self.states):
            return StopIteration()
        failed = ShardFailedError(
            f"all {len(self.states)} shards of {self.shards.name} have failed"
        )
        note_origin(failed, self, None)
        return failed

    # -- waiting -------------------------------------------------------------------------------

    def _deadlines(self) -> list[float]:
        """Return the times at which a back-off ends or a shard counts as hanging."""
        times = self._restart_times()
        if self._has_timeouts and self.shards.remote:
            times += [deadline for _, deadline in self._reply_deadlines()]
        return times

    def _restart_times(self) -> list[float]:
        """Return the times at which dead shards may be replaced."""
        return [
            shard.restart_at
            for shard in self.states
            if shard.dead_incarnation is not None and shard.status == "live"
        ]

    def waits(self) -> list[Any]:
        if not self.shards.remote:
            return []
        return [*self._in_flight, *self._deadlines()]

    def _wait(self, for_all: bool = False) -> list[Any]:
        """Block until one request (or all requests) in flight is answered or a deadline passes;
        return the refs that are ready."""
        started = time.perf_counter()
        times = self._deadlines()
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        refs: Sequence[Any] = list(self._in_flight)
        ready: list[Any] = []
        with self.waiting():
            if not refs:
                Waiter().wait(times)
            elif for_all:
                ready = wait_for_all(refs, timeout)
            else:
                ready = wait_for_any(refs, timeout)
        # if a reply was ready at once, others may be ready, too
        self._others_may_be_ready = time.perf_counter() - started < IMMEDIATE_S
        return ready

    # -- inspection and state ------------------------------------------------------------------

    def extra_stats(self) -> dict[str, Any]:
        statuses = [shard.status for shard in self.states]
        stats = {
            "shards_live": statuses.count("live"),
            "shards_failed": statuses.count("failed"),
            "restarts": sum(shard.restarts for shard in self.states),
            "in_flight": len(self._in_flight),
            "queued": len(self._queue),
            "skipped": self.skipped,
        }
        return {name: n for name, n in stats.items() if n or name == "shards_live"}

    def shard_stats(self) -> dict[int, list[dict[str, Any]]]:
        return {
            self.shards.number(shard.index): shard.step_stats
            for shard in self.states
            if shard.step_stats
        }

    def queued(self) -> list[Source]:
        """Return the sources of the items that were received but not returned yet."""
        return [source for _, source in self._queue]

    def state_dict(self) -> dict[str, Any]:
        """Save the position of each shard; a restored plan repeats the requests in flight."""
        return {
            "items": self.items,
            "skipped": self.skipped,
            "num_received": [shard.num_received for shard in self.states],
            "errors": [shard.errors for shard in self.states],
            "ended": [shard.status == "ended" for shard in self.states],
            "queue": [[item, sources_to_list([source])] for item, source in self._queue],
            "seed": self.shards.seed,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        super().check_state(state)
        saved, count = len(state["num_received"]), len(self.shards.update_presence())
        if self.resumable and saved != count:
            raise ValueError(f"{self}: the saved state has {saved} shards, this plan has {count}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._restores_items:
            self._queue = deque((item, sources_from_list(row)[0]) for item, row in state["queue"])
        self.skipped = state["skipped"]
        if not self.resumable:
            return
        self.items = state["items"]
        self.shards.seed, self._loaded = state["seed"], True
        self._update_members()
        for shard, num_received, errors, ended in zip(
            self.states, state["num_received"], state["errors"], state["ended"], strict=True
        ):
            shard.num_received, shard.errors = num_received, errors
            if shard.status != "left":
                shard.status = "ended" if ended else "live"

    def stop(self) -> None:
        self._in_flight.clear()
        self.shards.stop()


def _count(name: str) -> None:
    metrics = current_metrics()
    if metrics is not None:
        metrics.counters[name] += 1


def _constructor_raised(error: BaseException) -> bool:
    """Return whether an actor died in its constructor."""
    return bool(getattr(error, "actor_init_failed", False))


def _describe_death(error: BaseException) -> str:
    """Return one line for an actor that died: Ray's error, the same for equal causes."""
    from ray.exceptions import TaskCancelledError

    if isinstance(error, TaskCancelledError):  # its text contains ids
        return "a call was interrupted (KeyboardInterrupt)"
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    if not _constructor_raised(error):
        return f"{type(error).__name__}: {lines[0].strip()}"
    # the line after the traceback, whose lines are indented; notes follow
    indented = [i for i, line in enumerate(lines[:-1]) if line.startswith(" ")]
    return lines[indented[-1] + 1 if indented else -1].strip()
