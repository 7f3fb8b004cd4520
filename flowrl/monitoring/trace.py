"""Trace: the spans of a run as Chrome trace events, which https://ui.perfetto.dev and
chrome://tracing show.

The rows are this process with its stages, a learner thread, and the workers with the parts of their
sampling. Arrows connect the sampling of a fragment with the training on it.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from flowrl.iter import LocalIterator, Source, Stage
from flowrl.monitoring.activity import kind_of, operator_name
from flowrl.ops.concurrency import DequeueStage

MIN_SPAN_S = 20e-6  # shorter pulls of a stage are left out
MAX_EVENTS = 200_000
DRIVER, LEARNER, FIRST_WORKER = 1, 2, 10  # thread ids
# part of sampling -> its name; shown one after the other, although they alternate
PARTS = {
    "env_step_s": "env.step",
    "inference_s": "inference",
    "collection_s": "storing rows",
    "postprocess_s": "postprocessing",
}


class Tracer:
    """Records the pulls of a plan's stages, the fragments of its workers and its updates.

    Quick pulls are sampled, as for `LocalIterator.stats`. Times of workers on other machines depend
    on their clocks.

    Args:
        plan: the plan; it must have started.
        seconds: how much of the end of the run is kept.
    """

    def __init__(self, plan: LocalIterator[Any], seconds: float):
        self._plan, self._seconds = plan, seconds
        self._offset = time.time() - time.perf_counter()  # of the clock of the profiler
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._kinds: dict[Stage, str] = {}
        self._timings: dict[tuple[int, int], dict[str, float]] = {}  # of each worker, cumulative
        self._items: dict[Stage, int] = {}
        self._threads = {DRIVER: "plan"}
        plan.trace(self._on_pull)

    def _on_pull(self, stage: Stage, started: float, seconds: float) -> None:
        """Record a pull of a stage.

        Args:
            stage: the stage.
            started: time of `perf_counter`.
            seconds: duration, with the stages before it.
        """
        if stage not in self._kinds:
            self._kinds[stage] = kind_of(stage)
        kind = self._kinds[stage]
        has_item = stage.items > self._items.get(stage, 0)
        self._items[stage] = stage.items
        begin = started + self._offset
        if seconds >= MIN_SPAN_S:
            self._span(operator_name(str(stage)), DRIVER, begin, seconds, line=stage.line)
        if not has_item:
            return
        if kind == "sampling":
            for source in stage.sources:
                self._add_fragment(source)
        elif kind == "training":
            self._end_arrows(stage.sources, DRIVER, begin + seconds / 2)
        elif isinstance(stage, DequeueStage) and stage.last_update is not None:
            update = stage.last_update
            self._threads[LEARNER] = "learner"
            begin = update.ended_at - update.learn_s
            self._span("update", LEARNER, begin, update.learn_s, rows=update.rows)
            self._end_arrows(stage.sources, LEARNER, begin + update.learn_s / 2)

    def _add_fragment(self, source: Source) -> None:
        """Record the sampling of a fragment, and its parts."""
        tags = source.tags
        if "sampled_at" not in tags:
            return
        begin, end = tags["sampled_at"]
        thread = FIRST_WORKER + source.worker
        self._threads[thread] = f"shard {source.worker}"
        self._span(
            "sample", thread, begin, end - begin,
            env_steps=tags["env_steps"], weights=tags["weights_versions"],
        )  # fmt: skip
        key = source.worker, source.incarnation
        before, self._timings[key] = self._timings.get(key, {}), tags["timings"]
        for part, name in PARTS.items():
            seconds = tags["timings"].get(part, 0.0) - before.get(part, 0.0)
            seconds = min(seconds, end - begin)
            if before and seconds > 0:
                self._span(name, thread, begin, seconds)
                begin += seconds
        middle = (tags["sampled_at"][0] + end) / 2
        self._event("s", "fragment", thread, middle, id=_arrow_id(source))

    def _end_arrows(self, sources: tuple[Source, ...], thread: int, at: float) -> None:
        for source in sources:
            self._event("f", "fragment", thread, at, id=_arrow_id(source), bp="e")

    def _span(self, name: str, thread: int, begin: float, seconds: float, **args: Any) -> None:
        self._event("X", name, thread, begin, dur=round(seconds * 1e6, 1), args=args)

    def _event(self, phase: str, name: str, thread: int, at: float, **values: Any) -> None:
        event = {"ph": phase, "name": name, "cat": "flowrl", "pid": os.getpid(), "tid": thread}
        self._events.append({**event, "ts": round(at * 1e6, 1), **values})

    def stop(self) -> None:
        """Stop recording."""
        self._plan.trace(None)

    def write(self, path: Path) -> None:
        """Write the events of the last seconds.

        Raises:
            OSError: the file cannot be written.
        """
        newest = max((event["ts"] for event in self._events), default=0.0)
        kept = [e for e in self._events if e["ts"] >= newest - self._seconds * 1e6]
        names = [
            {"ph": "M", "name": "thread_name", "pid": os.getpid(), "tid": t, "args": {"name": name}}
            for t, name in sorted(self._threads.items())
        ]
        events = sorted(kept, key=lambda event: (event["ts"], -event.get("dur", 0.0)))
        path.write_text(json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}))


def _arrow_id(source: Source) -> str:
    return f"{source.origin}/{source.worker}/{source.incarnation}/{source.seq}"
