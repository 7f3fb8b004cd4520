"""Operators for experience that is kept in files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.data.parquet import ParquetWriter

log = logging.getLogger("flowrl")


class WriteParquet:
    """for_each, batch -> the same: writes its rows to Parquet files (see ParquetWriter).

    A saved plan has the rows that no file has yet; when the plan stops they are written. Who goes
    on from it writes new files, and `forget_later()` removes those that came after it.

    Args:
        folder: of the files, on the machine that runs the plan.
        rows_per_file: of a policy.
    """

    def __init__(self, folder: Path | str, rows_per_file: int = 50_000):
        self._writer = ParquetWriter(folder, rows_per_file)

    def __call__(self, batch: Any) -> Any:
        if not isinstance(batch, (SampleBatch, MultiAgentBatch)):
            raise TypeError(
                f"WriteParquet takes batches, got {type(batch).__name__}: chain it after "
                "ParallelRollouts"
            )
        self._writer.add(batch)
        return batch

    def forget_later(self) -> None:
        """Remove the files that were written after the state that this goes on from."""
        for path in self._writer.later_files():
            path.unlink()

    def stop(self) -> None:
        """Write what is left."""
        self._writer.flush()

    def state_dict(self) -> dict[str, Any]:
        return self._writer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._writer.load_state_dict(state)
        later = self._writer.later_files()
        if later:
            log.warning(
                "%d files in %s were written after this checkpoint, the first is %s: remove them "
                "if the run goes on from it", len(later), self._writer.folder, later[0].name,
            )  # fmt: skip

    def __repr__(self) -> str:
        return f"WriteParquet({str(self._writer.folder)!r})"
