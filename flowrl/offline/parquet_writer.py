"""ParquetWriter: collect batches and write them to Parquet files of a given number of rows."""

from __future__ import annotations

import atexit
import logging
import os
import re
import secrets
import time
from collections.abc import Collection
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import optree

from flowrl.data.sample_batch import MultiAgentBatch, SampleBatch
from flowrl.data.sequences import without_padding
from flowrl.errors import OfflineDataError
from flowrl.offline.parquet import (
    check_storable,
    import_pyarrow,
    read_run_id,
    to_json_value,
    write_parquet,
)
from flowrl.setting_values import check_int, check_path, expanded_path

log = logging.getLogger("flowrl")

_NAME = re.compile(r"(.+)-(\d{8}T\d{6}-[0-9a-f]{6})-(\d+)")  # of a file: policy, tag, number

_UNFLUSHED: dict[int, tuple[int, ParquetWriter]] = {}  # by id: process id and writer


class ParquetWriter:
    """Write batches to `<folder>/<policy id>-<timestamp and token>-<number>.parquet`.

    Remaining rows are written when the process exits. Writers never share a file. After
    `load_state_dict` a writer starts new files; `newer_files` returns those that other writers of
    the run wrote after the state was saved.

    Args:
        folder: folder of the files, created if necessary.
        rows_per_file: a file is written when a policy has this many rows, when its columns change,
            or at `flush()`.

    Raises:
        ConfigError: the extra `offline` is not installed.
        FileExistsError: the folder is a file.
        TypeError: the folder is not a path.
        ValueError: the folder is empty, or `rows_per_file` is not a positive integer.
    """

    def __init__(self, folder: Path | str, rows_per_file: int = 50_000):
        check_path("folder", folder)
        check_int("rows_per_file", rows_per_file)
        import_pyarrow()  # now, because it cannot be imported at exit
        self.folder = expanded_path(folder)
        path = self.folder.absolute()
        if path.is_file():
            raise FileExistsError(f"{path} is a file; WriteParquet needs a folder")
        self._existing_parent = next(p for p in (path, *path.parents) if p.exists())
        self.rows_per_file = rows_per_file
        self._tag = self._run = _new_tag()
        self._pending: dict[str, list[SampleBatch]] = {}  # by policy, as the next three
        self._pending_types: dict[str, Any] = {}  # of the last batch
        self._pending_rows: dict[str, int] = {}
        self._next_number: dict[str, int] = {}
        # next numbers of the writers before this one, by tag; None: no state was loaded
        self._loaded: dict[str, dict[str, int]] | None = None
        self._used = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, for example on a worker. Each copy writes files with its own names."""
        self.__dict__.update(state)
        self._tag, self._next_number = _new_tag(), {}

    def add(self, batch: SampleBatch | MultiAgentBatch) -> None:
        """Add rows; write the files that are full.

        Raises:
            OfflineDataError: a column cannot be stored in Parquet; no row is added.
            OSError: a file cannot be written; its rows stay in the writer.
        """
        import concurrent.futures.thread  # noqa: F401 - cannot be imported at exit

        new = {p: _to_write(rows) for p, rows in batch.policy_batches.items() if rows.count}
        types = {policy_id: _column_types(rows) for policy_id, rows in new.items()}
        others = {p for p in new if types[p] != self._pending_types.get(p)}
        for policy_id in others:
            check_storable(new[policy_id])
        self._used = True
        _UNFLUSHED[id(self)] = os.getpid(), self
        self._pending_types |= types
        for policy_id, rows in new.items():
            self._pending.setdefault(policy_id, []).append(rows)
            self._pending_rows[policy_id] = self._pending_rows.get(policy_id, 0) + rows.count
        for policy_id in new:
            if self._pending_rows[policy_id] >= self.rows_per_file or policy_id in others:
                self._write(policy_id, self.rows_per_file)

    def flush(self) -> None:
        """Write the remaining rows.

        Rows of a loaded state are written only if rows were added since: otherwise another writer
        may resume from the same state.
        """
        for policy_id in list(self._pending) if self._used else ():
            self._write(policy_id)
        _UNFLUSHED.pop(id(self), None)

    def flush_at_exit(self) -> None:
        """Write the remaining rows, unless the folder that held the files has been removed.

        Raises:
            FileNotFoundError: the folder has been removed.
            OfflineDataError, OSError: a file cannot be written.
        """
        if not self._existing_parent.exists():
            raise FileNotFoundError(f"{self._existing_parent} was removed")
        self.flush()

    def _write(self, policy_id: str, min_rows: int = 1) -> None:
        """Write the pending rows of a policy: a file for each run of batches with the same types.

        Args:
            policy_id: the policy.
            min_rows: the last file is written only if it has this many rows.
        """
        while pending := self._pending.get(policy_id):
            _, equal = next(groupby(pending, _column_types))
            batches = list(equal)
            num_rows = sum(batch.count for batch in batches)
            if len(batches) == len(pending) and num_rows < min_rows:
                return
            number = self._next_number.get(policy_id, 0)
            name = f"{quote(policy_id, safe='')}-{self._tag}-{number:06d}.parquet"
            rows = SampleBatch.concat_samples(batches)
            write_parquet(self.folder / name, rows, policy_id, self._run)
            self._next_number[policy_id] = number + 1
            del pending[: len(batches)]
            self._pending_rows[policy_id] -= num_rows
            if not pending:
                del self._pending[policy_id], self._pending_rows[policy_id]

    @property
    def tag(self) -> str:
        """The part of the names of its files that other writers do not have."""
        return self._tag

    def newer_files(self, tags: Collection[str] | None = None) -> list[Path]:
        """Return the files of this run that others wrote after the loaded state.

        A resumed run records their rows again.

        Args:
            tags: the tags of the writers; None for all that wrote files of this run.
        """
        if self._loaded is None:
            return []
        files = []
        for path in sorted(self.folder.glob("*.parquet")):
            name = _NAME.fullmatch(path.stem)
            if name is None:
                continue
            policy_id, tag, number = name.groups()
            if tag == self._tag or (tags is not None and tag not in tags):
                continue
            next_number = self._loaded.get(tag, {}).get(unquote(policy_id), 0)
            if int(number) >= next_number and _is_of_run(path, self._run):
                files.append(path)
        return files

    def state_dict(self) -> dict[str, Any]:
        """Return the rows that are not written yet, the run id and the next file numbers by tag."""
        pending = {policy_id: list(batches) for policy_id, batches in self._pending.items()}
        files = {**(self._loaded or {}), self._tag: dict(self._next_number)}
        return {"pending": pending, "run": self._run, "files": files}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state with new files."""
        self._pending = {
            policy_id: list(batches) for policy_id, batches in state["pending"].items()
        }
        self._pending_rows = {
            policy_id: sum(batch.count for batch in batches)
            for policy_id, batches in self._pending.items()
        }
        self._pending_types = {
            policy_id: _column_types(batches[-1])
            for policy_id, batches in self._pending.items()
            if batches
        }
        self._loaded = {tag: dict(numbers) for tag, numbers in state["files"].items()}
        self._run = state["run"]
        self._tag, self._next_number, self._used = _new_tag(), {}, False


@atexit.register
def _flush_all_at_exit() -> None:
    """Write the rows of writers that were not flushed."""
    for process_id, writer in list(_UNFLUSHED.values()):
        if process_id != os.getpid():  # inherited by a forked process
            continue
        try:
            writer.flush_at_exit()
        except Exception as error:  # an exit handler has no caller to raise to
            log.error(
                "%s: the rows recorded last are not written: %s. If the run has a newer "
                "checkpoint, it contains them: free space and resume the run", writer.folder, error,
            )  # fmt: skip


def _is_of_run(path: Path, run: str) -> bool:
    try:
        return read_run_id(path) == run
    except OfflineDataError:  # damaged
        return False


def _new_tag() -> str:
    """Return a unique tag; tags sort by creation time."""
    return f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"


def _column_types(batch: SampleBatch) -> Any:
    """Return the columns, dtypes and shapes that must agree to concatenate two batches."""
    return {
        name: optree.tree_map(lambda leaf: (leaf.dtype, leaf.shape[1:]), column)
        for name, column in batch.stored()
        if name != "infos"
    }


def _to_write(batch: SampleBatch) -> SampleBatch:
    """Return the rows of a batch as they are kept until they are written."""
    batch = without_padding(batch)
    # the worker that stores a lazy column may be gone when the file is written
    lazy = [name for name in batch if name != "infos" and batch.is_lazy(name)]
    return _with_json_infos(batch.with_columns(**{name: batch[name] for name in lazy}))


def _with_json_infos(batch: SampleBatch) -> SampleBatch:
    """Convert infos to JSON values, which a checkpoint can hold; drop infos that were not read."""
    if "infos" not in batch or batch.is_lazy("infos"):
        return batch.without_columns("infos")
    infos = np.empty(batch.count, object)
    infos[:] = [to_json_value(info) for info in batch["infos"]]
    return batch.with_columns(infos=infos)
