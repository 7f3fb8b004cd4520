"""Operators for experience that is kept in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.data.parquet import ParquetWriter


class WriteParquet:
    """for_each, batch -> the same: writes its rows to Parquet files, <policy id>-<number>.parquet.

    A saved plan has the rows that no file has yet; when the plan stops they are written.

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

    def stop(self) -> None:
        """Write what is left."""
        self._writer.flush()

    def state_dict(self) -> dict[str, Any]:
        return self._writer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._writer.load_state_dict(state)

    def __repr__(self) -> str:
        return f"WriteParquet({str(self._writer.folder)!r})"
