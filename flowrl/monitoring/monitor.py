"""Monitor: measure a running plan once per second, in a thread."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from flowrl.iter import LocalIterator
from flowrl.monitoring.activity import Activity, Snapshot, activity_between, take_snapshot
from flowrl.monitoring.bottleneck import Finding
from flowrl.monitoring.diagnosis import Diagnosis, diagnose
from flowrl.monitoring.plan_facts import PlanFacts, facts_of
from flowrl.sampling.worker_set import WorkerSet

INTERVAL_S = 1.0  # between two measurements
IDLE_S = 2.0  # without a pull or other work; then nothing is measured until the next pull
WINDOW_S = 10.0  # that a diagnosis is about
STALL_FACTOR = 3.0  # of the longest wait for a fragment so far, after which the plan is stalled

log = logging.getLogger("flowrl")


class Monitor:
    """Measures a plan and diagnoses it, from its first sampled or trained step on, except in pauses
    of more than IDLE_S seconds between two results.

    Args:
        plan: the plan.
        workers: its WorkerSet.
        settings: names of the algorithm's settings, for remedies.

    Attributes:
        diagnosis: of the last WINDOW_S seconds; without findings before the second measurement.
        activity: of the same seconds, except for `counters`, which are the increases since the
            previous measurement; None before the second measurement.
        listeners: functions that the thread calls with each new activity.
    """

    def __init__(self, plan: LocalIterator[Any], workers: WorkerSet, settings: Collection[str]):
        self._plan, self._workers, self._settings = plan, workers, settings
        self._facts: PlanFacts | None = None
        self._snapshots: deque[Snapshot] = deque()
        self._first: Snapshot | None = None
        self._resumed_at: float | None = None  # end of the last pause, in seconds since 1970
        self._counted: Snapshot | None = None  # whose counters the listeners know
        self._worked_at: float | None = None  # time.monotonic() when the plan last did not wait
        self._longest_wait_s = 0.0  # for a fragment
        self._result: Mapping[str, Any] = {}
        self._outside_s = 0.0
        self._outside_since: float | None = None  # None while the plan is pulled
        self._num_working = 0  # contexts of `working`
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.diagnosis = Diagnosis([])
        self.activity: Activity | None = None
        self.listeners: list[Callable[[Activity], None]] = []

    def moved_to(self, plan: LocalIterator[Any]) -> Monitor:
        """Stop, and return a monitor of another plan with the same listeners."""
        self.stop()
        other = Monitor(plan, self._workers, self._settings)
        other.listeners = self.listeners
        return other

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread is None:
            self._facts = facts_of(self._plan, self._workers, self._settings)
            self._first = self._counted = self._take_snapshot()
            # the thread must not keep an algorithm in memory that nothing else refers to
            arguments = weakref.ref(self), self._stopped
            self._thread = threading.Thread(
                target=_run, args=arguments, name="flowrl-monitor", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def pulling(self) -> Iterator[None]:
        """Note that the plan is pulled in this context."""
        if self._outside_since is not None:
            self._outside_s += time.monotonic() - self._outside_since
        self._outside_since = None
        try:
            yield
        finally:
            self._outside_since = time.monotonic()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Note that the run works outside of the plan in this context, such as on an evaluation."""
        self._num_working += 1
        try:
            yield
        finally:
            self._num_working -= 1

    @property
    def _is_idle(self) -> bool:
        since = self._outside_since
        return since is not None and not self._num_working and time.monotonic() - since > IDLE_S

    def update(self, result: Mapping[str, Any]) -> None:
        """Note the newest result of the plan, which callbacks may change afterwards."""
        self._result = {**result, "env_runners": dict(result.get("env_runners", {}))}

    def _take_snapshot(self) -> Snapshot:
        outside_s, since = self._outside_s, self._outside_since
        if since is not None:
            outside_s += time.monotonic() - since
        return take_snapshot(self._plan, self._workers, self._result, outside_s)

    def measure(self) -> None:
        """Measure the plan now; the thread does this every INTERVAL_S seconds."""
        assert self._facts is not None
        if self._is_idle:  # the diagnosis stays that of the training before
            self._snapshots.clear()
            self._first = self._resumed_at = self._worked_at = None
            return
        snapshot = self._take_snapshot()
        if not snapshot.has_steps or not self._is_measurable(snapshot):
            return
        last = self._snapshots[-1] if self._snapshots else None
        while len(self._snapshots) > 1 and self._snapshots[1].clock <= snapshot.clock - WINDOW_S:
            self._snapshots.popleft()
        self._snapshots.append(snapshot)
        if last is None:
            return
        window = activity_between(self._snapshots[0], snapshot)
        added = self._growth_bytes()
        has_sampled = not window.workers or any(worker.fragments for worker in window.workers)
        if not window.has_finished_work or not has_sampled:  # these take longer than the window
            assert self._first is not None
            window = activity_between(self._first, snapshot)
            added = 0.0  # of this longer window, it is not known
        window.usage["rss_bytes_added"] = added
        window.stalled_s = self._stalled_s(last, snapshot)
        facts = replace(self._facts, num_workers=self._workers.num_workers)  # it may change
        self.diagnosis = diagnose(window, facts)
        assert self._counted is not None
        window.counters = activity_between(self._counted, snapshot).counters  # see Activity
        self._counted = snapshot
        window.diagnosis = self.diagnosis.text
        self.activity = window
        for listener in self.listeners:
            listener(window)

    def fail(self) -> None:
        """Replace the diagnosis, after an error of `measure`."""
        text = "The plan is not measured any more: the log has the error."
        self.diagnosis = Diagnosis([Finding("not_measured", "monitor", 0.0, text)])
        if self.activity is None:
            return
        self.activity = replace(self.activity, diagnosis=text, counters={})
        for listener in self.listeners:
            with suppress(Exception):  # its error may be the one that was logged
                listener(self.activity)

    def _is_measurable(self, snapshot: Snapshot) -> bool:
        """Return whether a window may begin or end with a snapshot: after a pause, each worker must
        have returned a new fragment, because its period begins at its previous one."""
        if self._first is None:
            self._resumed_at = snapshot.time if self._resumed_at is None else self._resumed_at
            has_old = any(one["until"] < self._resumed_at for one in snapshot.workers.values())
            if has_old and snapshot.time < self._resumed_at + WINDOW_S:
                return False
            self._first = snapshot
        if not self._snapshots and self._worked_at is None:  # the plan waited for this fragment
            waited = snapshot.clock - self._first.clock
            self._longest_wait_s = max(self._longest_wait_s, waited)
        return True

    def _stalled_s(self, last: Snapshot, snapshot: Snapshot) -> float:
        """Return for how many seconds the plan has waited for a fragment; 0 if it has waited almost
        as long before."""
        recent = activity_between(last, snapshot)
        waits = any(stage.blocked < 0.5 for stage in recent.stages_of("sampling"))
        if self._worked_at is None:
            self._worked_at = last.clock
        waited = snapshot.clock - self._worked_at
        if recent.has_finished_work or not waits or self._num_working:
            self._longest_wait_s = max(self._longest_wait_s, waited)
            self._worked_at = snapshot.clock
            return 0.0
        return waited if waited > max(WINDOW_S, STALL_FACTOR * self._longest_wait_s) else 0.0

    def _growth_bytes(self) -> float:
        """Return the lasting growth of this process's memory in the window: from its lowest point
        in the first third to its lowest point in the last third."""
        memory = [snapshot.usage.get("rss_bytes", 0.0) for snapshot in self._snapshots]
        third = len(memory) // 3
        return min(memory[-third:]) - min(memory[:third]) if third else 0.0


def _run(monitor_ref: weakref.ref[Monitor], stopped: threading.Event) -> None:
    """Measure until the monitor is stopped or deleted."""
    while not stopped.wait(INTERVAL_S):
        monitor = monitor_ref()
        if monitor is None:
            return
        try:
            monitor.measure()
        except Exception:
            log.warning("the plan could not be measured; it is not measured again", exc_info=True)
            monitor.fail()
            return
        del monitor
