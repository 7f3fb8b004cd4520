"""Operators that write experience to files, and iterators that read it back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flowrl.data import DEFAULT_POLICY_ID, MultiAgentBatch, SampleBatch
from flowrl.data.columns import MISSING
from flowrl.data.item_checks import check_batch
from flowrl.errors import OfflineDataError
from flowrl.iter import LocalIterator, Stage, _get_shared_metrics
from flowrl.iter.errors import call_in_stage
from flowrl.iter.stage import describe
from flowrl.offline.parquet_writer import ParquetWriter
from flowrl.offline.recorded_rows import has_unscaled_actions, rows_for_policy
from flowrl.offline.sources import MinariSource, OfflineSource, ParquetSource
from flowrl.ops.plan_metrics import record_sampled_steps
from flowrl.sampling.worker_set import WorkerSet, check_workers
from flowrl.seeding import random_stream, restore_stream, stream_state
from flowrl.setting_values import check_int, check_path
from flowrl.state_schema import Fields, Natural, StateError

log = logging.getLogger("flowrl")


class WriteParquet:
    """for_each, batch -> the same batch: write the rows of the batch to Parquet
    files (see ParquetWriter).

    The state contains the rows that are not written yet; they are written when the plan stops. A
    resumed plan starts new files; `remove_newer_files()` deletes those newer than its checkpoint.
    `tag` is in the names of the files; no other operator has it. If a file cannot be written, its
    rows are kept for the next one, so `on_error=Retry(…)` would store them twice.

    Args:
        folder: folder of the files, on the machine that runs the plan.
        rows_per_file: rows of one policy per file.

    Raises:
        ConfigError: the extra `offline` is not installed.
        ValueError: `rows_per_file` is not an int of at least 1, or the folder is empty or a URI.
        TypeError: the folder is not a path; when called: the item is not a batch.
        OfflineDataError, OSError (when called): a file cannot be written.
    """

    state_fields: ClassVar[Fields] = {
        "pending": dict[str, list[Any]],
        "run": str,
        "files": dict[str, dict[str, Natural]],
    }

    chained_with: ClassVar[str] = "for_each"

    def __init__(self, folder: Path | str, rows_per_file: int = 50_000):
        if "://" in str(folder):
            raise ValueError(f"folder: must be a folder on this machine, got {folder}")
        self._writer = ParquetWriter(folder, rows_per_file)
        self._has_loaded = False  # a state, and no batch since then

    def __call__(self, batch: Any) -> Any:
        check_batch(batch, "WriteParquet")
        if self._has_loaded:
            self._has_loaded = False
            self._warn_of_newer_files()
        self._writer.add(batch)
        return batch

    @property
    def tag(self) -> str:
        return self._writer.tag

    def remove_newer_files(self, tags: Collection[str]) -> None:
        """Delete the files that operators with these tags wrote after the loaded state was saved.

        The training since then writes their rows again.
        """
        for path in self._writer.newer_files(tags):
            path.unlink()

    def stop(self) -> None:
        """Write the remaining rows."""
        self._writer.flush()

    def state_dict(self) -> dict[str, Any]:
        return self._writer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._writer.load_state_dict(state)
        self._has_loaded = True

    def _warn_of_newer_files(self) -> None:
        files = self._writer.newer_files()
        if files:
            log.warning(
                "%d files in %s are newer than this checkpoint, the first is %s: remove them if "
                "this run replaces the one that wrote them, because it records their rows again",
                len(files), self._writer.folder, files[0].name,
            )  # fmt: skip

    def __repr__(self) -> str:
        return f"WriteParquet({str(self._writer.folder)!r})"


class ReadParquet(LocalIterator[SampleBatch | MultiAgentBatch]):
    """An endless stream of batches of recorded rows.

    Each pass reads every row once, in random order: it shuffles the files, and the rows within each
    file. One file is in memory at a time. Counts rows as `num_env_steps_sampled` and passes as
    `num_passes_over_data`.

    Args:
        workers: the WorkerSet; the rows must fit its policy.
        folder: folder of Parquet files written by WriteParquet or the setting `output`, or one
            file.
        batch_size: rows per batch.
        columns: required columns.
        policy_id: id of the policy that collected the rows; files of other policies are skipped.
            The plan's policy with this id trains on the rows, or its only policy. Batches are
            MultiAgentBatches unless the trained policy has the default id.
        prepare: function from the rows of a file, in recorded order, to the rows to return; None
            returns the rows unchanged.
        seed: seed of the random order; None seeds from the operating system.

    Raises:
        TypeError: `columns` is a string, or `folder` is not a path.
        ValueError: `folder` is empty, or `batch_size` is not an int of at least 1.
        OfflineDataError (when pulled): there are no files, or none of this policy; a file cannot be
            read, lacks a column, or does not fit the policy's spaces.
    """

    def __init__(
        self,
        workers: WorkerSet,
        folder: Path | str,
        batch_size: int,
        *,
        columns: Collection[str] = ("obs", "actions"),
        policy_id: str = DEFAULT_POLICY_ID,
        prepare: Callable[[SampleBatch], SampleBatch] | None = None,
        seed: int | None = None,
    ):
        check_path("folder", folder)
        source = ParquetSource(folder, policy_id)
        stage = ReadStage("ReadParquet", source, workers, batch_size, columns, prepare, seed)
        super().__init__(stage, f"ReadParquet({str(folder)!r})")
        self.stage.title = self.name


class ReadMinari(LocalIterator[SampleBatch | MultiAgentBatch]):
    """An endless stream of batches of the rows of a Minari dataset (extra `minari`).

    See ReadParquet. About 50,000 rows are in memory at a time. Actions are converted to the
    policy's format: bounded Box actions are scaled to [-1, 1] (`normalize_actions`), discrete
    actions count from 0.

    Args:
        dataset_id: e.g. "mujoco/halfcheetah/expert-v0"; downloaded if it is not on this machine.
        workers, batch_size, columns, policy_id, prepare, seed: see ReadParquet.

    Raises:
        ConfigError (when pulled): the extra is not installed.
        OfflineDataError (when pulled): the dataset cannot be read, lacks a column, or does not fit
            the policy's spaces.
    """

    def __init__(
        self,
        workers: WorkerSet,
        dataset_id: str,
        batch_size: int,
        *,
        columns: Collection[str] = ("obs", "actions"),
        policy_id: str = DEFAULT_POLICY_ID,
        prepare: Callable[[SampleBatch], SampleBatch] | None = None,
        seed: int | None = None,
    ):
        source = MinariSource(dataset_id, policy_id)
        stage = ReadStage("ReadMinari", source, workers, batch_size, columns, prepare, seed)
        super().__init__(stage, f"ReadMinari({dataset_id!r})")
        self.stage.title = self.name


class ReadStage(Stage):
    """The stage of ReadParquet and ReadMinari."""

    state_fields: ClassVar[Fields] = {
        "pass_rng_state": dict[str, Any],
        "pass_parts": list[str],
        "parts_read": Natural,
        "position": Natural,
        "dropped": list[str],
    }

    def __init__(
        self,
        name: str,
        source: OfflineSource,
        workers: WorkerSet,
        batch_size: int,
        columns: Collection[str],
        prepare: Callable[[SampleBatch], SampleBatch] | None,
        seed: int | None,
    ):
        check_workers(workers, name)
        check_int("batch_size", batch_size)
        super().__init__()
        self.name = name
        self.source, self.workers, self.batch_size = source, workers, batch_size
        if isinstance(columns, str) or not isinstance(columns, Collection):
            raise TypeError(f"columns must be a list of names, got {columns!r}")
        if prepare is not None and not callable(prepare):
            raise TypeError(f"prepare must be a function or None, got {prepare!r}")
        self.columns, self._prepare = columns, prepare
        self.rng = random_stream(seed, "offline")
        self._pass_rng_state: dict[str, Any] = stream_state(self.rng)  # at the start of the pass
        # a part is read at once: a file, or a group of episodes of a Minari dataset
        self._parts: list[Any] = []  # still to read in this pass
        self._pass_parts: list[str] = []  # names of all parts of this pass
        self._pass_seed = 0  # of the orders of the parts' rows
        self._parts_read = 0  # in this pass
        self._passes_ended = 0  # in the running pull
        self._rows = SampleBatch()  # of the current part, shuffled
        self._position = 0  # in these rows
        self._loaded: dict[str, Any] | None = None  # a state that the next pull restores
        self._has_warned = False  # of actions that are not scaled
        self._has_removed_rows = False  # all of the part read last
        self._dropped: set[str] = set()  # columns that some parts lack

    def pull(self, block: bool) -> Any:
        batch = call_in_stage(self, self._next_batch)
        self.items += 1
        policy_id = self.trained_policy_id()
        agent_steps = {policy_id: batch.count}
        record_sampled_steps(_get_shared_metrics(), self.workers, batch.count, agent_steps)
        if policy_id == DEFAULT_POLICY_ID:
            return batch
        return MultiAgentBatch({policy_id: batch}, batch.count)

    def trained_policy_id(self) -> str:
        """Return the id of the policy to train: the recorded one, or the plan's only one.

        Raises:
            OfflineDataError: there are several policies, but not the one that collected the rows.
        """
        policy_ids, recorded = list(self.workers.local_worker().policy_map), self.source.policy_id
        if recorded in policy_ids:
            return recorded
        if len(policy_ids) == 1:
            return policy_ids[0]
        raise OfflineDataError(
            f"{self.source}: rows of policy {recorded!r}, the plan has only {', '.join(policy_ids)}"
        )

    def _next_batch(self) -> SampleBatch:
        if self._loaded is not None:
            self._restore_position(self._loaded)
        before, self._passes_ended = self._position_state(), 0
        try:
            batch = self._read_batch()
        except BaseException:
            self._loaded = before  # the next pull reads the same rows again
            raise
        if self._passes_ended:
            _get_shared_metrics().counters["num_passes_over_data"] += self._passes_ended
        return batch

    def _read_batch(self) -> SampleBatch:
        slices, needed = [], self.batch_size
        while needed:
            if self._position >= self._rows.count:
                self._open_next_part()
            rows = self._rows[self._position : self._position + needed]
            self._position += rows.count
            needed -= rows.count
            slices.append(rows)
        slices = [rows.without_columns(*(self._dropped & set(rows))) for rows in slices]
        if len(slices) == 1:
            return slices[0]
        # columns that some parts lack: those in MISSING have a value for missing rows, the others
        # are left out, because zeros in them would be trained on
        kept = set.intersection(*map(set, slices)) | MISSING.keys()
        lacking = set().union(*slices) - kept
        if not lacking <= self._dropped:
            self._dropped |= lacking
            log.warning(
                "%s: some files lack the columns %s, which are left out from now on",
                self.source, ", ".join(sorted(lacking)),
            )  # fmt: skip
        slices = [rows.without_columns(*lacking) for rows in slices]
        batch: SampleBatch = SampleBatch.concat_samples(slices)
        return batch

    def _open_next_part(self) -> None:
        """Load the next part that has rows; after the last one start another pass.

        Raises:
            OfflineDataError: no part has rows.
        """
        num_empty = 0
        while True:
            if not self._parts:
                if self._parts_read and num_empty == self._parts_read:
                    raise OfflineDataError(
                        f"{self.source}: `prepare` has removed all rows"
                        if self._has_removed_rows
                        else f"{self.source}: there are no rows of policy "
                        f"{self.source.policy_id!r}{self.source.describe_other_policies()}"
                    )
                self._passes_ended += bool(self._parts_read)
                self._start_pass()
                num_empty = 0
            self._load_next_part()
            if self._rows.count:
                return
            num_empty += 1

    def _start_pass(self) -> None:
        parts = self.source.parts()
        self._pass_parts, self._parts_read = list(map(self.source.part_name, parts)), 0
        self._parts = [parts[i] for i in self._draw_order()]

    def _draw_order(self) -> list[int]:
        """Draw the order of the parts of a pass, and the seed of the orders of their rows."""
        self._pass_rng_state = stream_state(self.rng)
        order: list[int] = self.rng.permutation(len(self._pass_parts)).tolist()
        self._pass_seed = int(self.rng.integers(2**63))
        return order

    def _load_next_part(self) -> None:
        """Load the rows of the next part and shuffle them."""
        rows = self._read(self._parts.pop(0))
        self._parts_read += 1
        # a seed for each part, so that a restored stream reads only the last one again
        order = np.random.default_rng((self._pass_seed, self._parts_read)).permutation(rows.count)
        self._rows, self._position = rows.take_rows(order), 0

    def _read(self, part: Any) -> SampleBatch:
        """Read the rows of a part, check and prepare them."""
        rows = self.source.read(part)
        if not rows.count:
            return SampleBatch()
        policy = self.workers.local_worker().policy_map[self.trained_policy_id()]
        rows = self.source.to_policy_actions(rows, policy)
        missing = sorted(set(self.columns) - set(rows))
        if missing:
            raise OfflineDataError(
                f"{self.source.describe_part(part)}: there is no column {missing[0]!r}, only "
                f"{', '.join(rows)}: training needs it"
            )
        try:
            rows = rows_for_policy(rows, policy)
            for name in set(self.columns) & {"rewards", "action_logp"}:
                if not np.isfinite(rows[name]).all():
                    raise OfflineDataError(f"the column {name!r} has values that are not finite")
            if not self._has_warned and has_unscaled_actions(rows, policy):
                self._has_warned = True
                log.warning(
                    "%s: actions are outside of [-1, 1], probably in the bounds of the "
                    "environment: scale them from these bounds to [-1, 1] before they are written",
                    self.source.describe_part(part),
                )  # fmt: skip
            rows = rows.without_columns("infos") if "infos" in rows else rows
            return rows if self._prepare is None else self._prepared(rows)
        except OfflineDataError as error:
            raise OfflineDataError(f"{self.source.describe_part(part)}: {error}") from None

    def _prepared(self, rows: SampleBatch) -> SampleBatch:
        assert self._prepare is not None
        prepared = self._prepare(rows)
        if not isinstance(prepared, SampleBatch):
            raise TypeError(f"prepare must return a SampleBatch, it returned {describe(prepared)}")
        self._has_removed_rows = not prepared.count
        return prepared

    def _position_state(self) -> dict[str, Any]:
        """Return the position in the data, which `_restore_position` restores."""
        return {
            "pass_rng_state": self._pass_rng_state,
            "pass_parts": list(self._pass_parts),
            "parts_read": self._parts_read,
            "position": self._position,
            "dropped": sorted(self._dropped),
        }

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **(self._loaded or self._position_state())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; its files are opened by the next pull."""
        super().load_state_dict(state)
        if state["parts_read"] > len(state["pass_parts"]):
            raise StateError(f"{self.name}/parts_read: there are {len(state['pass_parts'])} parts")
        names = ("pass_rng_state", "pass_parts", "parts_read", "position", "dropped")
        self._loaded = {name: state[name] for name in names}

    def _restore_position(self, state: dict[str, Any]) -> None:
        """Read the part of a loaded state again, and go to its position.

        Raises:
            OfflineDataError: a file that is still to be read is missing.
        """
        restore_stream(self.rng, state["pass_rng_state"])
        self._dropped = set(state["dropped"])
        self._parts, self._parts_read, self._rows, self._position = [], 0, SampleBatch(), 0
        if state["parts_read"]:
            self._pass_parts, self._parts_read = state["pass_parts"], state["parts_read"] - 1
            self._parts = self._find_parts(self._draw_order()[self._parts_read :])
            self._load_next_part()
        self._position, self._loaded = state["position"], None

    def _find_parts(self, order: list[int]) -> list[Any]:
        """Return the parts with these numbers in the list `_pass_parts`."""
        parts = {self.source.part_name(part): part for part in self.source.parts()}
        added = parts.keys() - set(self._pass_parts)
        if added:
            log.warning(
                "%s: files (or groups of episodes) were added, such as %s: they are read in the "
                "next pass",
                self.source,
                min(added),
            )
        names = [self._pass_parts[number] for number in order]
        missing = [name for name in names if name not in parts]
        if missing:
            raise OfflineDataError(
                f"{self.source}: {missing[0]} is still to be read, but there is no such file (or "
                "group of episodes) any more. To train with other data, load the policies only: "
                "restore_policies()"
            )
        return [parts[name] for name in names]
