"""EpisodeReturns: returns and lengths of the episodes that end in fragments."""

from __future__ import annotations

import numpy as np

from flowrl.sampling.episode import EpisodeMetrics
from flowrl.sampling.episode_callbacks import EpisodeCallbacks
from flowrl.sampling.segments import Event, Segments


class EpisodeReturns:
    """Sums the rewards of episodes over fragments.

    Attributes:
        so_far: sum of rewards of each running episode in earlier fragments, [N].
    """

    def __init__(self, num_envs: int):
        self.so_far = np.zeros(num_envs)

    def end_fragment(
        self, segments: Segments, rewards: np.ndarray, callbacks: EpisodeCallbacks | None
    ) -> list[EpisodeMetrics]:
        """Return metrics of the episodes that ended, in the order of time.

        Args:
            segments: the segments of the fragment, sorted by lane and row, none empty.
            rewards: unscaled rewards [rows, N].
            callbacks: has the custom metrics of the episodes.
        """
        if not len(segments):
            return []
        if segments.is_whole_fragment:
            self.so_far[segments.first_t == 0] = 0.0
            self.so_far += rewards.sum(0, dtype=np.float64)
            return []
        rows, lanes = rewards.shape
        values = np.zeros(lanes * rows + 1)  # lane after lane
        values[:-1].reshape(lanes, rows)[:] = rewards.T
        at = segments.lanes * rows
        begins_and_ends = np.stack([at + segments.begins, at + segments.ends], 1).reshape(-1)
        sums = np.add.reduceat(values, begins_and_ends)[::2]
        continued = segments.first_t > 0
        sums[continued] += self.so_far[segments.lanes[continued]]
        is_open = segments.events == Event.OPEN
        self.so_far[segments.lanes] = 0.0
        self.so_far[segments.lanes[is_open]] = sums[is_open]
        (ended,) = (~is_open).nonzero()
        if not len(ended):
            return []
        ended = ended[np.argsort(segments.ends[ended], kind="stable")]
        lengths = segments.first_t + segments.lengths
        columns = sums, lengths, segments.lanes, segments.episode_ids
        return [
            EpisodeMetrics(total, length, env)
            if callbacks is None
            else EpisodeMetrics(total, length, env, None, *callbacks.take_metrics(episode_id))
            for total, length, env, episode_id in zip(
                *(column[ended].tolist() for column in columns), strict=True
            )
        ]
