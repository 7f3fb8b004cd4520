"""Operators for experience that is kept in files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.data import DEFAULT_POLICY_ID, MultiAgentBatch, SampleBatch
from flowrl.iter import LocalIterator, Stage, _get_shared_metrics
from flowrl.iter.errors import note_origin, operator_error
from flowrl.offline.minari import MinariDataset
from flowrl.offline.parquet import (
    OfflineDataError,
    ParquetWriter,
    parquet_files,
    policy_of,
    read_parquet,
)
from flowrl.seeding import random_stream, restore_stream, stream_state

if TYPE_CHECKING:
    from flowrl.sampling.worker_set import WorkerSet

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


class ReadParquet(LocalIterator[SampleBatch]):
    """Batches of recorded rows, without end: every file's rows once per pass, files and the rows of
    each in random order. One file is in memory at a time.

    Rows count as `num_env_steps_sampled`, passes as `num_passes_over_data`.

    Args:
        workers: the WorkerSet, whose policy the rows must fit.
        folder: of Parquet files as WriteParquet and the setting `output` leave them, or one file.
        batch_size: rows of a batch.
        columns: that the rows must have.
        policy_id: whose rows; files of others are left out. The plan's policy of that name learns
            from them, or the only one that it has; batches name it if it is not the default one.
        prepare: rows of a file, in the order in which they were recorded -> the rows to be given.
        seed: of the order; None takes the machine's entropy.

    Raises (when pulled):
        OfflineDataError: there are no files, or none of this policy; one cannot be read, lacks a
            column, or has rows of other spaces.
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
        shelf = ParquetShelf(folder, policy_id)
        stage = ReadStage("ReadParquet", shelf, workers, batch_size, columns, prepare, seed)
        super().__init__(stage, f"ReadParquet({str(folder)!r})")
        self.stage.title = self.name


class ReadMinari(LocalIterator[SampleBatch]):
    """Batches of rows of a Minari data set (extra minari), as ReadParquet gives those of files:
    some 50,000 rows are in memory at a time.

    Actions are turned into what the policy would have given: those within bounds into [-1, 1]
    (`normalize_actions`), numbers counted from 0.

    Args:
        dataset_id: such as "mujoco/halfcheetah/expert-v0"; downloaded if it is not there.
        workers, batch_size, columns, policy_id, prepare, seed: see ReadParquet.

    Raises (when pulled):
        OfflineDataError: the extra is missing; there is no such data set; it lacks a column, or is
            of other spaces.
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
        shelf = MinariShelf(dataset_id, policy_id)
        stage = ReadStage("ReadMinari", shelf, workers, batch_size, columns, prepare, seed)
        super().__init__(stage, f"ReadMinari({dataset_id!r})")
        self.stage.title = self.name


class ParquetShelf:
    """Where the rows of Parquet files are found."""

    def __init__(self, folder: Path | str, policy_id: str):
        self.folder, self.policy_id = folder, policy_id

    def parts(self) -> list[Any]:
        """What is read at once, in an order that stays."""
        return list(parquet_files(self.folder))

    def read(self, part: Any) -> SampleBatch:
        """The rows of a part; none if they are another policy's."""
        policy_id, rows = read_parquet(part)
        return rows if policy_id == self.policy_id else SampleBatch()

    def others(self) -> str:
        """Whose rows there are, for a message."""
        found = sorted({policy_of(part) for part in self.parts()})
        there = ", ".join(map(repr, found))
        return f", only of {there}: say which: policy_id, or the setting input_policy_id"

    def fitted(self, rows: SampleBatch, policy: Any) -> SampleBatch:
        """The rows as the policy would have recorded them."""
        return rows

    def told(self, part: Any) -> str:
        """Its name in messages."""
        return str(part)

    def __str__(self) -> str:
        return str(self.folder)


class MinariShelf:
    """Where the rows of a Minari data set are found."""

    def __init__(self, dataset_id: str, policy_id: str):
        self.dataset_id, self.policy_id = dataset_id, policy_id
        self._dataset: MinariDataset | None = None

    @property
    def dataset(self) -> MinariDataset:
        """The data set, once it is asked for."""
        if self._dataset is None:
            self._dataset = MinariDataset(self.dataset_id)
        return self._dataset

    def parts(self) -> list[Any]:
        """See ParquetShelf."""
        return self.dataset.parts()

    def read(self, part: Any) -> SampleBatch:
        """See ParquetShelf."""
        return self.dataset.read(part)

    def others(self) -> str:
        """See ParquetShelf."""
        return ""

    def fitted(self, rows: SampleBatch, policy: Any) -> SampleBatch:
        """See ParquetShelf: with actions as the policy gives them."""
        own = self.dataset.action_space
        if own != policy.action_space:
            raise OfflineDataError(
                f"{self}: its actions are of {own}, the policy's of {policy.action_space}"
            )
        return rows.with_columns(actions=policy.actions_from_env(rows["actions"]))

    def told(self, part: Any) -> str:
        """See ParquetShelf."""
        return f"{self}, episodes {part[0]} to {part[-1]}"

    def __str__(self) -> str:
        return f"minari:{self.dataset_id}"


class ReadStage(Stage):
    """The stage of ReadParquet and ReadMinari."""

    def __init__(
        self,
        name: str,
        shelf: ParquetShelf | MinariShelf,
        workers: WorkerSet,
        batch_size: int,
        columns: Collection[str],
        prepare: Callable[[SampleBatch], SampleBatch] | None,
        seed: int | None,
    ):
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size is a whole number from 1, got {batch_size!r}")
        super().__init__()
        self.name = name
        self.shelf, self.workers, self.batch_size = shelf, workers, batch_size
        self.columns, self._prepare = columns, prepare
        self.rng = random_stream(seed, "offline")
        self._pass_began: dict[str, Any] = stream_state(self.rng)  # of the random stream
        self._parts: list[Any] = []  # that this pass has still to read
        self._read = 0  # parts of this pass
        self._rows = SampleBatch()  # of the part that is being read, in their order
        self._place = 0  # in those
        self._to_go_on_from: dict[str, Any] | None = None  # a state, whose files are not open yet

    def pull(self, block: bool) -> Any:
        try:
            batch = self._next()
        except BaseException as error:
            note_origin(error, self, None)
            raise operator_error(error) from error.__cause__
        self.items += 1
        learner = self._learner()
        counters = _get_shared_metrics().counters
        counters["num_env_steps_sampled"] += batch.count
        counters["num_agent_steps_sampled"] += batch.count
        counters[f"num_agent_steps_sampled/{learner}"] += batch.count
        self.workers.global_vars["timestep"] = counters["num_env_steps_sampled"]
        if learner == DEFAULT_POLICY_ID:
            return batch
        return MultiAgentBatch({learner: batch}, batch.count)

    def _learner(self) -> str:
        """Who learns from the rows: the policy of that name, or the only one that there is."""
        policies, own = list(self.workers.local_worker().policy_map), self.shelf.policy_id
        if own in policies:
            return own
        if len(policies) == 1:
            return policies[0]
        raise OfflineDataError(
            f"{self.shelf}: rows of policy {own!r}, the plan has only {', '.join(policies)}"
        )

    def _next(self) -> SampleBatch:
        if self._to_go_on_from is not None:
            self._go_on()
        parts, wanted = [], self.batch_size
        while wanted:
            if self._place >= self._rows.count:
                self._open_next()
            part = self._rows[self._place : self._place + wanted]
            self._place += part.count
            wanted -= part.count
            parts.append(part)
        joined: SampleBatch = parts[0] if len(parts) == 1 else SampleBatch.concat_samples(parts)
        return joined

    def _open_next(self) -> None:
        """The rows of the next part, in random order; of the first of another pass after the
        last."""
        empty = 0
        while True:
            if not self._parts:
                if self._read and empty == self._read:
                    raise OfflineDataError(
                        f"{self.shelf}: there are no rows of policy {self.shelf.policy_id!r}"
                        f"{self.shelf.others()}"
                    )
                if self._read:
                    _get_shared_metrics().counters["num_passes_over_data"] += 1
                self._begin_pass()
                empty = 0
            rows = self._load(self._parts.pop(0))
            self._read += 1
            order = self.rng.permutation(rows.count)
            self._rows, self._place = rows.take_rows(order), 0
            if rows.count:
                return
            empty += 1

    def _begin_pass(self) -> None:
        self._pass_began, self._read = stream_state(self.rng), 0
        parts = self.shelf.parts()
        self._parts = [parts[i] for i in self.rng.permutation(len(parts))]

    def _load(self, part: Any) -> SampleBatch:
        rows = self.shelf.read(part)
        if not rows.count:
            return SampleBatch()
        policy = self.workers.local_worker().policy_map[self._learner()]
        rows = self.shelf.fitted(rows, policy)
        missing = sorted(set(self.columns) - set(rows))
        if missing:
            raise OfflineDataError(
                f"{self.shelf.told(part)}: there is no column {missing[0]!r}, only "
                f"{', '.join(rows)}: it is needed to learn from"
            )
        problem = policy.misfit(rows)
        if problem is not None:
            raise OfflineDataError(
                f"{self.shelf.told(part)}: it is of other spaces than the policy: {problem}"
            )
        rows = rows.without_columns("infos") if "infos" in rows else rows
        return rows if self._prepare is None else self._prepare(rows)

    def state_dict(self) -> dict[str, Any]:
        own = {"pass_began": self._pass_began, "read": self._read, "place": self._place}
        return {**super().state_dict(), **(self._to_go_on_from or own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: files are opened when rows are asked for."""
        super().load_state_dict(state)
        self._to_go_on_from = {name: state[name] for name in ("pass_began", "read", "place")}

    def _go_on(self) -> None:
        assert self._to_go_on_from is not None
        state = self._to_go_on_from
        restore_stream(self.rng, state["pass_began"])
        self._parts, self._read, self._rows, self._place = [], 0, SampleBatch(), 0
        if state["read"]:
            self._begin_pass()
        while self._read < state["read"]:  # as it was read before
            if not self._parts:
                raise OfflineDataError(
                    f"{self.shelf}: {state['read']} files were read before this checkpoint, there "
                    f"are {self._read} now"
                )
            rows = self._load(self._parts.pop(0))
            self._read += 1
            self._rows = rows.take_rows(self.rng.permutation(rows.count))
        self._place, self._to_go_on_from = state["place"], None
