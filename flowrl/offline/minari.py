"""Minari data sets as rows (https://minari.farama.org; extra minari)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import optree
from gymnasium import spaces

from flowrl.data.sample_batch import SampleBatch
from flowrl.offline.parquet import OfflineDataError

ROWS_PER_PART = 50_000


class MinariDataset:
    """A data set, read some episodes at a time.

    Args:
        dataset_id: such as "mujoco/halfcheetah/expert-v0"; downloaded if it is not there.

    Raises:
        OfflineDataError: the extra is missing; there is no such data set.
    """

    def __init__(self, dataset_id: str):
        try:
            import minari
        except ImportError as error:
            raise OfflineDataError(
                f"Minari data sets need the extra minari: pip install 'flowrl[minari]' ({error})"
            ) from error
        try:
            self._dataset: Any = minari.load_dataset(dataset_id, download=True)
        except Exception as error:  # of its storage, of the network, of ids
            raise OfflineDataError(
                f"minari:{dataset_id}: it cannot be loaded: {error} (it is downloaded if it is not "
                "on this machine; an id has a version: mujoco/halfcheetah/expert-v0)"
            ) from error
        self.dataset_id = dataset_id
        self.observation_space: spaces.Space = self._dataset.observation_space
        self.action_space: spaces.Space = self._dataset.action_space

    def parts(self) -> list[list[int]]:
        """Numbers of episodes whose rows are read at once."""
        made: list[list[int]] = []
        rows = ROWS_PER_PART
        with self._told():
            for number in map(int, self._dataset.episode_indices):
                if rows >= ROWS_PER_PART:
                    made.append([])
                    rows = 0
                made[-1].append(number)
                (data,) = self._dataset.storage.get_episode_metadata([number])
                rows += int(data["total_steps"])
        return made

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of its storage
            raise OfflineDataError(
                f"minari:{self.dataset_id}: it cannot be read: {error}"
            ) from error

    def read(self, part: list[int]) -> SampleBatch:
        """The rows of these episodes, one after another: `obs`, `new_obs`, `actions` as the
        environment took them, `rewards`, `terminateds`, `truncateds`, `eps_id`, `t` and
        `unroll_id`."""
        with self._told():
            rows = [self._rows(episode) for episode in self._episodes(part)]
        return SampleBatch.concat_samples(rows)

    def _episodes(self, part: list[int]) -> Iterator[Any]:
        yield from self._dataset.iterate_episodes(part)

    @staticmethod
    def _rows(episode: Any) -> SampleBatch:
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
