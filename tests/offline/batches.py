"""Batches for the tests of offline data."""

import numpy as np

from flowrl.data import SampleBatch


def count_batch(count, start=0):
    """Rows whose actions and steps count from `start`."""
    numbers = np.arange(start, start + count)
    return SampleBatch(
        obs={"image": np.ones((count, 4, 5, 3), np.uint8) * 7, "speed": numbers * 0.5},
        actions=numbers,
        rewards=np.full(count, np.nan, np.float32),
        t=numbers,
    )
