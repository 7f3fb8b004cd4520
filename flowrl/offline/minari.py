"""Minari datasets as SampleBatches (https://minari.farama.org; extra `minari`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import optree
from gymnasium import spaces

from flowrl.data.sample_batch import SampleBatch
from flowrl.errors import OfflineDataError, check_installed
from flowrl.offline.parquet import check_no_extension_types

ROWS_PER_PART = 50_000


class MinariDataset:
    """A Minari dataset, read in parts of about `ROWS_PER_PART` rows.

    Args:
        dataset_id: e.g. "mujoco/halfcheetah/expert-v0"; downloaded if it is not on this machine.

    Attributes:
        dataset_id: see above.
        observation_space, action_space: of the dataset's environment.

    Raises:
        ConfigError: the extra is not installed.
        OfflineDataError: the dataset cannot be loaded.
    """

    def __init__(self, dataset_id: str):
        check_installed("minari", f"minari:{dataset_id}", extra="minari")
        import minari
        from minari.storage import get_dataset_path

        try:
            if not (get_dataset_path(dataset_id) / "data").exists():
                minari.download_dataset(dataset_id)
            _check_spaces(dataset_id)
            self._dataset: Any = minari.load_dataset(dataset_id)
        except OfflineDataError:
            raise
        except Exception as error:  # storage, network and id errors have no common base class
            raise OfflineDataError(
                f"minari:{dataset_id}: cannot be loaded: {error} (datasets that are not on this "
                "machine are downloaded; an id includes a version: mujoco/halfcheetah/expert-v0)"
            ) from error
        self.dataset_id = dataset_id
        self.observation_space: spaces.Space = self._dataset.observation_space
        self.action_space: spaces.Space = self._dataset.action_space

    def parts(self) -> list[list[int]]:
        """Return the episode indices of each part."""
        parts: list[list[int]] = []
        rows = ROWS_PER_PART
        with self._read_errors():
            for index in map(int, self._dataset.episode_indices):
                if rows >= ROWS_PER_PART:
                    parts.append([])
                    rows = 0
                parts[-1].append(index)
                (metadata,) = self._dataset.storage.get_episode_metadata([index])
                rows += int(metadata["total_steps"])
        return parts

    def read(self, part: list[int]) -> SampleBatch:
        """Read the rows of episodes, concatenated.

        Args:
            part: episode indices.

        Returns:
            the columns `obs`, `new_obs`, `actions` (as passed to the environment), `rewards`,
            `terminateds`, `truncateds`, `eps_id`, `t` and `unroll_id`.

        Raises:
            OfflineDataError: the dataset cannot be read.
        """
        with self._read_errors():
            self._check_files(part)
            episodes = [_to_batch(episode) for episode in self._dataset.iterate_episodes(part)]
        return SampleBatch.concat_samples(episodes)

    def _check_files(self, part: list[int]) -> None:
        """Check the columns of the episodes' files, if they are Arrow or Parquet files.

        Raises:
            ValueError: a column has an extension type.
        """
        storage = self._dataset.storage
        if storage.FORMAT not in ("arrow", "parquet"):
            return
        import pyarrow.dataset

        for index in part:
            files = pyarrow.dataset.dataset(
                f"{storage.data_path}/{index}",
                format=storage.FORMAT,
                ignore_prefixes=["_", ".", "metadata.json"],  # as Minari reads it
            )
            for file in files.get_fragments():
                check_no_extension_types(file.physical_schema)

    @contextmanager
    def _read_errors(self) -> Iterator[None]:
        """Convert errors of the storage into OfflineDataError."""
        try:
            yield
        except Exception as error:
            raise OfflineDataError(f"minari:{self.dataset_id}: cannot be read: {error}") from error


def _check_spaces(dataset_id: str) -> None:
    """Check that the metadata contain the spaces.

    Minari creates the environment in the metadata otherwise, which imports code that the dataset
    names.

    Raises:
        OfflineDataError: a space is missing.
    """
    from minari.storage import get_dataset_path

    metadata = json.loads(
        (get_dataset_path(dataset_id) / "data" / "metadata.json").read_text(encoding="utf-8")
    )
    missing = {"observation_space", "action_space"} - set(metadata)
    if missing:
        raise OfflineDataError(
            f"minari:{dataset_id}: its metadata lacks {', '.join(sorted(missing))}: create the "
            "dataset with observation_space=… and action_space=…"
        )


def _to_batch(episode: Any) -> SampleBatch:
    count = len(episode.rewards)
    return SampleBatch(
        obs=optree.tree_map(lambda leaf: np.asarray(leaf)[:-1], episode.observations),
        new_obs=optree.tree_map(lambda leaf: np.asarray(leaf)[1:], episode.observations),
        actions=optree.tree_map(np.asarray, episode.actions),
        rewards=np.asarray(episode.rewards, np.float32),
        terminateds=np.asarray(episode.terminations, bool),
        truncateds=np.asarray(episode.truncations, bool),
        eps_id=np.full(count, episode.id),
        t=np.arange(count),
        unroll_id=np.full(count, episode.id),
    )
