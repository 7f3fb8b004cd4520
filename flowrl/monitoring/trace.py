"""Trace: the spans of a run as Chrome trace events, which https://ui.perfetto.dev and
chrome://tracing show.

The rows are this process with its stages, a learner thread, and the workers with the parts of their
sampling. Arrows connect the sampling of a fragment with the training on it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.iter import LocalIterator, Source, Stage
from flowrl.monitoring.activity import kind_of, operator_name
from flowrl.ops.concurrency import DequeueStage
from flowrl.whole_files import write_whole

log = logging.getLogger("flowrl")

MIN_SPAN_S = 20e-6  # shorter pulls of a stage are left out
MAX_EVENTS = 200_000
MAX_OVERHEAD = 0.01  # maximum share of the time that recording takes
MAX_RECORD_S = 1e-4  # maximum seconds that recording one pull takes
MAX_READ_S = 1e-4  # seconds that reading the clocks takes, if nothing interrupts it
MAX_READS = 10
ARROW_S = 1e-6  # between the end of an arrow and the end of the span that it points to
BURST_S = 5e-3  # seconds of recording between two pauses; all stages pause together, so spans nest
DRIVER, LEARNER, FIRST_WORKER = 1, 2, 10  # thread ids
# part of sampling -> its name; shown one after the other, although they alternate
PARTS = {
    "env_step_s": "env.step",
    "inference_s": "inference",
    "collection_s": "storing rows",
    "postprocess_s": "postprocessing",
}


class Event(NamedTuple):
    """A span, or an end of an arrow; times in seconds since the epoch."""

    phase: str  # "X" span, "s" start of an arrow, "f" its end
    name: str
    thread: int
    begin: float
    end: float
    args: dict[str, Any] | None = None
    source: Source | None = None  # of an arrow

    @property
    def arrow(self) -> str:
        """The id of the arrow; "" for a span."""
        source = self.source
        if source is None:
            return ""
        return f"{source.origin}/{source.shard}/{source.incarnation}/{source.seq}"

    def to_json(self, start: float) -> dict[str, Any]:
        """Return the Chrome trace event; times in microseconds since the start of the trace.

        Spans with a common end, or within each other, stay so: both ends are rounded alike.
        """
        begin_ns, end_ns = (round((at - start) * 1e9) for at in (self.begin, self.end))
        event = {"ph": self.phase, "name": self.name, "cat": "flowrl", "pid": os.getpid()}
        event |= {"tid": self.thread, "ts": begin_ns / 1000}
        if self.phase == "X":
            return {**event, "dur": (end_ns - begin_ns) / 1000, "args": self.args or {}}
        event["id"] = self.arrow
        return event if self.phase == "s" else {**event, "bp": "e"}


def clock_offset() -> float:
    """Return `time.time` less `time.perf_counter`, in seconds.

    The processor may go to another process between two reads, for milliseconds; such reads are
    repeated.
    """
    reads = []
    for _ in range(MAX_READS):
        before, since_1970, after = time.perf_counter(), time.time(), time.perf_counter()
        reads.append((after - before, since_1970 - before))
        if after - before < MAX_READ_S:
            break
    return min(reads)[1]


class Tracer:
    """Records the pulls of a plan's stages, the fragments of its workers and its updates.

    Quick pulls are sampled, as for `LocalIterator.stats`. If recording takes more than MAX_OVERHEAD
    of the time, it pauses after each BURST_S. Times of workers on other machines depend on their
    clocks.

    Args:
        plan: the plan; it must have started. A plan that replaces it (`Algorithm.restore`) is not
            recorded.
        seconds: how much of the end of the run is kept.
    """

    def __init__(self, plan: LocalIterator[Any], seconds: float):
        self._plan, self._seconds = plan, seconds
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        # of each stage: its kind, the name of its spans and their arguments
        self._stages: dict[Stage, tuple[str, str, dict[str, Any]]] = {}
        self._timings: dict[tuple[int, int], dict[str, float]] = {}  # of each worker, cumulative
        self._threads = {DRIVER: "plan"}
        self._burst_s = 0.0  # spent on recording since the last pause
        self._paused_until = 0.0
        # workers use the clock of the system, which the system may adjust at any time
        self._offset = clock_offset()
        plan.trace(self._on_pull)

    def _on_pull(self, stage: Stage, started: float, seconds: float, has_item: bool) -> None:
        """Record a pull of a stage, unless recording pauses.

        Args:
            stage: the stage.
            started: time of `perf_counter`.
            seconds: duration, with the stages before it.
            has_item: whether the stage returned an item.
        """
        now = started + seconds
        if now < self._paused_until:
            return
        self._record(stage, started + self._offset, now + self._offset, has_item)
        if stage is self._plan.stage:  # spans within each other have one offset
            self._offset = clock_offset()
        # this clock also runs while other threads have the processor
        self._burst_s += min(time.perf_counter() - now, MAX_RECORD_S)
        if self._burst_s > BURST_S:
            self._paused_until = now + self._burst_s / MAX_OVERHEAD
            self._burst_s = 0.0

    def _record(self, stage: Stage, begin: float, end: float, has_item: bool) -> None:
        known = self._stages.get(stage)
        if known is None:
            known = kind_of(stage), operator_name(str(stage)), {"line": stage.line}
            self._stages[stage] = known
        kind, name, args = known
        if end - begin >= MIN_SPAN_S:
            self._events.append(Event("X", name, DRIVER, begin, end, args))
        if not has_item:
            return
        if kind == "sampling":
            for source in stage.sources:
                self._add_fragment(source)
        elif kind == "training":
            # the operator's own code is at the end of the pull, after the stages before it
            self._end_arrows(stage.sources, DRIVER, end - ARROW_S)
        elif isinstance(stage, DequeueStage) and stage.last_update is not None:
            update = stage.last_update
            self._threads[LEARNER] = "learner"
            begin, end = update.ended_at - update.learn_s, update.ended_at
            rows = {"rows": update.rows}
            self._events.append(Event("X", "update", LEARNER, begin, end, rows))
            self._end_arrows(stage.sources, LEARNER, end - ARROW_S)

    def _add_fragment(self, source: Source) -> None:
        """Record the sampling of a fragment, and its parts."""
        tags = source.tags
        if "sampled_at" not in tags:
            return
        begin, end = tags["sampled_at"]
        thread = FIRST_WORKER + source.shard
        self._threads[thread] = f"shard {source.shard}"
        args = {"env_steps": tags["env_steps"], "weights": tags["weights_versions"]}
        self._events.append(Event("X", "sample", thread, begin, end, args))
        key = source.shard, source.incarnation
        before, self._timings[key] = self._timings.get(key, {}), tags["timings"]
        for part, name in PARTS.items():
            seconds = tags["timings"].get(part, 0.0) - before.get(part, 0.0)
            end_of_part = min(begin + seconds, end)
            if before and end_of_part > begin:
                self._events.append(Event("X", name, thread, begin, end_of_part))
                begin = end_of_part
        middle = (tags["sampled_at"][0] + end) / 2
        self._events.append(Event("s", "fragment", thread, middle, middle, source=source))

    def _end_arrows(self, sources: tuple[Source, ...], thread: int, at: float) -> None:
        for source in sources:
            self._events.append(Event("f", "fragment", thread, at, at, source=source))

    def stop(self) -> None:
        """Stop recording."""
        self._plan.trace(None)

    def write(self, path: Path) -> None:
        """Write the events of the last seconds, and the arrows with both ends.

        Raises:
            OSError: the file cannot be written.
        """
        oldest = max((event.end for event in self._events), default=0.0) - self._seconds
        kept = [event for event in self._events if event.end >= oldest]
        if len(kept) == MAX_EVENTS:
            shown = max(event.end for event in kept) - min(event.begin for event in kept)
            log.warning("trace_s: %s has the last %d events, of %.1f s", path, MAX_EVENTS, shown)
        starts, ends = ({one.arrow for one in kept if one.phase == phase} for phase in "sf")
        kept = [one for one in kept if not one.arrow or one.arrow in starts & ends]
        names = [
            {"ph": "M", "name": "thread_name", "pid": os.getpid(), "tid": t, "args": {"name": name}}
            for t, name in sorted(self._threads.items())
        ]
        kept.sort(key=lambda event: (event.begin, -event.end))
        start = min((event.begin for event in kept), default=0.0)
        events = [*names, *(event.to_json(start) for event in kept)]
        trace = {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"start": datetime.fromtimestamp(start).astimezone().isoformat()},
        }
        write_whole(path, json.dumps(trace))
