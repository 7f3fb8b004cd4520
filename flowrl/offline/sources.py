"""Sources of recorded rows: a folder of Parquet files or a Minari dataset, read part by part."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flowrl.data.sample_batch import SampleBatch
from flowrl.errors import OfflineDataError
from flowrl.offline.minari import MinariDataset
from flowrl.offline.parquet import (
    parquet_files,
    read_policy_id,
    read_rows_of,
    read_run_id,
)
from flowrl.policies.policy import Policy


class OfflineSource(Protocol):
    """Rows of one policy, read in parts: one part is in memory at a time.

    `str(source)` names it in messages. Nothing is opened before the first call of `parts`.

    Attributes:
        policy_id: id of the policy that collected the rows.
    """

    policy_id: str

    def parts(self) -> list[Any]:
        """Return the parts, always in the same order."""

    def read(self, part: Any) -> SampleBatch:
        """Return the rows of a part; no rows if another policy collected them."""

    def to_policy_actions(self, rows: SampleBatch, policy: Policy) -> SampleBatch:
        """Convert actions into those that the policy would have returned.

        Raises:
            OfflineDataError: the action spaces differ.
        """

    def part_name(self, part: Any) -> str:
        """Return the unique name of a part, used in checkpoints."""

    def describe_part(self, part: Any) -> str:
        """Return the name of a part for messages."""

    def describe_other_policies(self) -> str:
        """Return a suffix for error messages: the policies whose rows were found."""


class ParquetSource:
    """The Parquet files of a folder, or one file.

    Args:
        folder: see `parquet_files`.
        policy_id: policy whose rows are read; files of other policies are skipped.
    """

    def __init__(self, folder: Path | str, policy_id: str):
        self.folder, self.policy_id = folder, policy_id

    def parts(self) -> list[Any]:
        return parquet_files(self.folder)

    def read(self, part: Any) -> SampleBatch:
        rows = read_rows_of(part, self.policy_id)
        if rows is None:
            return SampleBatch()
        return with_unique_episode_ids(rows, read_run_id(part))

    def to_policy_actions(self, rows: SampleBatch, policy: Policy) -> SampleBatch:
        return rows  # recorded as the policy returned them

    def part_name(self, part: Any) -> str:
        return str(part.name)

    def describe_part(self, part: Any) -> str:
        return str(part)

    def describe_other_policies(self) -> str:
        policy_ids = sorted({read_policy_id(path) for path in self.parts()})
        if self.policy_id in policy_ids:
            return ": the files contain no rows"
        found = ", ".join(map(repr, policy_ids))
        return f", only of {found}: set policy_id, or the setting input_policy_id"

    def __str__(self) -> str:
        return str(self.folder)


class MinariSource:
    """A Minari dataset, loaded on first use.

    Args:
        dataset_id: see MinariDataset.
        policy_id: the policy to which the rows are attributed.
    """

    def __init__(self, dataset_id: str, policy_id: str):
        self.dataset_id, self.policy_id = dataset_id, policy_id
        self._dataset: MinariDataset | None = None

    @property
    def dataset(self) -> MinariDataset:
        """The dataset, loaded on first access."""
        if self._dataset is None:
            self._dataset = MinariDataset(self.dataset_id)
        return self._dataset

    def parts(self) -> list[Any]:
        return self.dataset.parts()

    def read(self, part: Any) -> SampleBatch:
        return with_unique_episode_ids(self.dataset.read(part), self.dataset_id)

    def to_policy_actions(self, rows: SampleBatch, policy: Policy) -> SampleBatch:
        space = self.dataset.action_space
        if space != policy.action_space:
            raise OfflineDataError(
                f"{self}: its action space is {space}, the policy's is {policy.action_space}"
            )
        return rows.with_columns(actions=policy.actions_from_env(rows["actions"]))

    def part_name(self, part: Any) -> str:
        return f"episodes {part[0]} to {part[-1]}"

    def describe_part(self, part: Any) -> str:
        return f"{self}, episodes {part[0]} to {part[-1]}"

    def describe_other_policies(self) -> str:
        return ""

    def __str__(self) -> str:
        return f"minari:{self.dataset_id}"


def with_unique_episode_ids(rows: SampleBatch, run: str) -> SampleBatch:
    """Return rows whose `eps_id` differs from those of other runs and of running environments.

    Environments number episodes from 0 in every run, but a replay buffer links rows by `eps_id`.

    Args:
        rows: recorded rows.
        run: id of the run that recorded them.
    """
    if "eps_id" not in rows or rows["eps_id"].dtype.kind not in "iu":
        return rows
    digest = hashlib.blake2b(run.encode(), digest_size=8).digest()
    negative = np.int64(int.from_bytes(digest, "little", signed=True) | -(2**63))
    return rows.with_columns(eps_id=rows["eps_id"].astype(np.int64) ^ negative)
