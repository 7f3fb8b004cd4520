"""The file activity.jsonl of a run directory: what the plan did, a line per period."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.data.json_text import json_lines
from flowrl.monitoring.activity import Activity
from flowrl.whole_files import append_whole, write_whole

FILE = "activity.jsonl"
MAX_RECORDS = 2000  # then every second record is removed, and every second one is written

log = logging.getLogger("flowrl")


class ActivityLog:
    """Append activities to the file of a run.

    The file keeps at most MAX_RECORDS records: when it is full, every second one is removed, and
    from then on half as many are written. The counters of a record that is removed or not written
    are added to the next one.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: Path):
        self._path = folder / FILE
        self._num_records = len(read_activities(folder))
        self._every = 1
        self._skipped: list[Activity] = []  # since the last record
        self._failed = False
        self._lock = threading.Lock()  # the monitor's thread appends

    def append(self, activity: Activity) -> None:
        """Write an activity if it is due; the first error of the file system is logged."""
        with self._lock:
            self._skipped.append(activity)
            if len(self._skipped) >= self._every:
                self._write()

    def close(self) -> None:
        """Write the activities since the last record as one."""
        with self._lock:
            if self._skipped:
                self._write()

    def _write(self) -> None:
        try:
            if self._num_records >= MAX_RECORDS:
                self._thin_out()
            append_whole(self._path, _line(_last_of(self._skipped)).encode())
            self._num_records += 1
            self._skipped = []
        except OSError as error:
            if not self._failed:
                log.warning("cannot write %s: %s", self._path, error.strerror)
            self._failed = True
            self._skipped = [_last_of(self._skipped)]

    def _thin_out(self) -> None:
        """Remove every second record, atomically."""
        records = read_activities(self._path.parent)
        kept = [_last_of(records[i : i + 2]) for i in range(0, len(records), 2)]
        write_whole(self._path, "".join(map(_line, kept)))
        self._num_records, self._every = len(kept), 2 * self._every


def _last_of(activities: list[Activity]) -> Activity:
    """Return the last activity, with the counters of all."""
    counters: Counter[str] = Counter()
    for activity in activities:
        counters.update(activity.counters)
    return replace(activities[-1], counters=dict(counters))


def truncate_activities(folder: Path, iteration: int) -> None:
    """Remove the activities after an iteration, which a resumed run writes again."""
    kept = [one for one in read_activities(folder) if one.iteration <= iteration]
    if (folder / FILE).exists():
        write_whole(folder / FILE, "".join(_line(one) for one in kept))


def _line(activity: Activity) -> str:
    return json.dumps(activity.to_json(), default=_to_json) + "\n"


def _to_json(value: Any) -> Any:
    """Return a number for one of numpy, and the text of anything else."""
    return value.item() if isinstance(value, np.generic) else str(value)


def read_activities(folder: Path) -> list[Activity]:
    """Return the activities of a run, the newest last; empty if there are none.

    Lines that cannot be read, such as one that is being written, are left out.
    """
    activities = []
    for value in json_lines(folder / FILE):
        with suppress(ValueError, TypeError, KeyError):
            activities.append(Activity.from_json(value))
    return activities
