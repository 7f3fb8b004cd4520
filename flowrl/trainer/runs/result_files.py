"""The results of a run: result.json, progress.csv and TensorBoard events.

Each result is one record of each file. A record that cannot be written, because the disk is full,
is left out: training continues, and the file keeps whole records only.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.trainer.metric_names import logged_scalars
from flowrl.trainer.runs.formatting import FailureWarnings
from flowrl.whole_files import append_whole, write_whole

_NOT_IN_TAGS = re.compile(r"[^-/\w.]")  # characters that TensorBoard does not allow in names


class ResultFiles:
    """Write results to files in a folder.

    Args:
        folder: the run directory.
        naming: how metrics are named in progress.csv and TensorBoard: the setting `logged_names`.
    """

    def __init__(self, folder: Path, naming: str):
        self._folder, self._naming = folder, naming
        self._columns: list[str] = []
        self._events: Path | None = None
        self._warnings = FailureWarnings()

    def rewrite(self, results: list[dict[str, Any]], with_events: bool) -> None:
        """Replace result.json and progress.csv atomically by files with these results.

        Args:
            results: the results.
            with_events: also replace the TensorBoard events.

        Raises:
            OSError: a file cannot be written; it is unchanged.
        """
        write_whole(self._folder / "result.json", b"".join(map(_json_line, results)))
        rows = [logged_scalars(result, self._naming) for result in results]
        columns = list(dict.fromkeys(column for row in rows for column in row))
        write_whole(self._folder / "progress.csv", _csv_table(columns, rows))
        self._columns = columns
        if with_events:
            for file in event_files(self._folder):
                file.unlink()
            self._events = None
            for row, result in zip(rows, results, strict=True):
                self._append_event(row, result)

    def append(self, result: dict[str, Any]) -> None:
        """Append a result to each file.

        The first failure to write a file is printed, and the first success after it.
        """
        row = logged_scalars(result, self._naming)
        json_line = _json_line(result)
        self._try("result.json", lambda: append_whole(self._folder / "result.json", json_line))
        self._try("progress.csv", lambda: self._append_row(row))
        self._try("the TensorBoard events", lambda: self._append_event(row, result))

    def _try(self, name: str, write: Callable[[], None]) -> None:
        """Write a file, and report an error of the file system instead of raising it."""
        try:
            write()
        except OSError as error:
            self._warnings.failed(
                name,
                f"cannot write {name} in {self._folder}: {error.strerror}. Training continues "
                "without these results",
            )
        else:
            self._warnings.succeeded(
                name, f"{name} in {self._folder} can be written again; some results are missing"
            )

    def _append_row(self, row: dict[str, Any]) -> None:
        """Append a row to progress.csv; with new columns, write the whole file again."""
        file = self._folder / "progress.csv"
        known = set(self._columns)
        columns = [*self._columns, *(name for name in row if name not in known)]
        if columns == self._columns:
            append_whole(file, _csv_lines([[row.get(name, "") for name in columns]]))
            return
        rows: list[dict[str, Any]] = []
        if self._columns:
            rows = list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"), newline="")))
        write_whole(file, _csv_table(columns, [*rows, row]))
        self._columns = columns

    def _append_event(self, row: dict[str, Any], result: dict[str, Any]) -> None:
        """Append an event with all scalars of a result.

        tensorboardX's own SummaryWriter writes in a thread, which an error of the file system ends;
        the next events would wait for it forever.
        """
        from tensorboardX.proto.event_pb2 import Event

        now = time.time()
        event = Event(wall_time=now, step=int(result["timesteps_total"]))
        for name, value in row.items():
            if isinstance(value, (int, float)) and not math.isnan(value):
                tag = _NOT_IN_TAGS.sub("_", name).lstrip("/")
                event.summary.value.add(tag=tag, simple_value=float(value))
        data = _event_record(event.SerializeToString())
        if self._events is None:
            name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}"
            self._events = self._folder / name
        if not self._events.exists() or not self._events.stat().st_size:
            first = Event(wall_time=now, file_version="brain.Event:2")
            data = _event_record(first.SerializeToString()) + data
        append_whole(self._events, data)


def event_files(folder: Path) -> list[Path]:
    """Return the files with TensorBoard events in a folder."""
    return sorted(folder.glob("events.out.tfevents.*"))


def _json_line(result: dict[str, Any]) -> bytes:
    return json.dumps(result_to_json(result), allow_nan=False).encode() + b"\n"


def _csv_table(columns: list[str], rows: list[dict[str, Any]]) -> bytes:
    """Return a header and rows, with empty cells where a row has no value."""
    cells = [[row.get(name, "") for name in columns] for row in rows]
    return _csv_lines([columns, *cells]) if columns else b""


def _csv_lines(lines: list[list[Any]]) -> bytes:
    """Return lines of a table; NaN is an empty cell."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(["" if cell != cell else cell for cell in line] for line in lines)
    return text.getvalue().encode()


def _event_record(event: bytes) -> bytes:
    """Return an event as a record of the TFRecord format: length, data and their checksums."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(event))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, event)]
    return length + checksums[0] + event + checksums[1]


def result_to_json(value: Any, path: str = "") -> Any:
    """Return a result as JSON values, with null for NaN and infinity.

    Raises:
        TypeError: a value is not a number, string, list or dict, or a key is not a number or
            string.
    """
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (str, int, float, bool, np.generic)):
                raise TypeError(
                    f"the result has in {path.lstrip('/')!r} the key {key!r}: keys must be "
                    "strings or numbers"
                )
        return {str(key): result_to_json(inner, f"{path}/{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [result_to_json(inner, f"{path}/{i}") for i, inner in enumerate(value)]
    if isinstance(value, (np.generic, np.ndarray)):
        return result_to_json(value.tolist(), path)
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(
            f"the result has {path.lstrip('/')!r} of type {type(value).__name__}: entries "
            "must be numbers, strings, lists or dicts (float(value) converts a tensor)"
        )
    return None if isinstance(value, float) and not math.isfinite(value) else value
