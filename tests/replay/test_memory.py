"""A buffer of images stores each frame once and does not grow when it is full."""

import gc
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from flowrl.data import SampleBatch
from flowrl.data.indexed_columns import IndexedColumn
from flowrl.replay import ReplayBuffer

SHAPE, ROWS, EPISODE = (84, 84, 4), 200, 500


def megabytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def fragment(number):
    """Return rows of one environment as its sampler returns them; no two frames are equal."""
    base = np.empty((ROWS + 1, *SHAPE), np.uint8)
    base[:] = np.arange(number * ROWS, (number + 1) * ROWS + 1).reshape(-1, 1, 1, 1) % 251
    steps = np.arange(number * ROWS, (number + 1) * ROWS)
    dones = steps % EPISODE == EPISODE - 1
    cuts = np.union1d(np.flatnonzero(dones), [ROWS - 1])
    base = np.concatenate([base[:ROWS], base[cuts + 1]])
    index = np.arange(1, ROWS + 1)
    index[cuts] = np.arange(ROWS, len(base))
    batch = SampleBatch(
        obs=base[:ROWS],
        rewards=np.zeros(ROWS, np.float32),
        terminateds=dones,
        truncateds=np.zeros(ROWS, bool),
        eps_id=steps // EPISODE,
        t=steps % EPISODE,
    )
    dict.__setitem__(batch, "obs", base[:ROWS])
    dict.__setitem__(batch, "new_obs", IndexedColumn(base, index))
    return batch


def stacked_fragment(number):
    """Return rows whose observations are the last four frames of 84x84 bytes; an episode has five
    fragments."""
    episode, first = divmod(number * ROWS, 5 * ROWS)
    base = np.empty((ROWS + 4, 84, 84), np.uint8)  # of three earlier steps and of the next one
    base[:] = np.arange(number * ROWS - 3, (number + 1) * ROWS + 1).reshape(-1, 1, 1) % 251
    steps = np.arange(first, first + ROWS)
    stacks = np.maximum(steps[:, None] + np.arange(-3, 1), 0) - first + 3
    next_stacks = np.maximum(steps[:, None] + np.arange(-2, 2), 0) - first + 3
    columns = {
        "obs": IndexedColumn(base, stacks),
        "new_obs": IndexedColumn(base, next_stacks),
        "rewards": np.zeros(ROWS, np.float32),
        "terminateds": steps == 5 * ROWS - 1,
        "truncateds": np.zeros(ROWS, bool),
        "eps_id": np.full(ROWS, episode),
        "t": steps,
    }
    return SampleBatch.unchecked(columns)


FRAGMENTS = {"images": (fragment, SHAPE), "stacks of frames": (stacked_fragment, (84, 84))}


def measure(capacity, kind):
    """Return the MB of a full buffer, and its growth in MB while rows are overwritten."""
    fragment, _ = FRAGMENTS[kind]
    buffer = ReplayBuffer(capacity, seed=0)
    fragment(0)
    gc.collect()
    before = megabytes()
    for number in range(capacity // ROWS):
        buffer.add(fragment(number))
    buffer.sample(32)
    gc.collect()
    full = megabytes()
    for number in range(capacity // ROWS, capacity // ROWS + 100):
        buffer.add(fragment(number))
        buffer.sample(32)
    gc.collect()
    return full - before, megabytes() - full


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", FRAGMENTS)
def test_image_buffer_stores_each_frame_once(kind):
    capacity = 100_000
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        size, growth = pool.apply(measure, (capacity, kind))
    frames = capacity * np.prod(FRAGMENTS[kind][1]) / 2**20
    assert size < 1.1 * frames
    assert growth < 0.02 * frames
