"""MixInReplayBuffer: draws of new and old rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data import SampleBatch
from flowrl.replay import MixInReplayBuffer


def rows(first, count):
    numbers = np.arange(first, first + count, dtype=np.float32)
    return SampleBatch(obs=numbers[:, None], new_obs=numbers[:, None], rewards=numbers)


@settings(max_examples=60)
@given(
    replay_ratio=st.sampled_from([0.0, 0.25, 0.5, 0.7]),
    work=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=12),
    size=st.integers(1, 10),
)
def test_each_new_row_is_drawn_once(replay_ratio, work, size):
    buffer = MixInReplayBuffer(40, replay_ratio=replay_ratio, seed=0)
    stored = next_new = 0
    new_due = 0.0
    for count, draws in work:
        buffer.add(rows(stored, count))
        stored += count
        oldest = max(0, stored - 40)
        next_new = max(next_new, oldest)
        for _ in range(draws):
            new_due += size * (1 - replay_ratio)
            due = int(new_due + 1e-9)
            new_due -= due
            new = min(due, stored - next_new)
            drawn = buffer.sample(size)["rewards"].astype(int)
            assert drawn[:new].tolist() == list(range(next_new, next_new + new))
            old_stop = next_new
            if next_new == oldest:  # no old rows
                old_stop = next_new + new if new else stored
            assert ((drawn[new:] >= oldest) & (drawn[new:] < old_stop)).all()
            assert len(drawn) == size
            next_new += new


def test_replay_ratio_of_one_draws_uniformly():
    buffer = MixInReplayBuffer(20, replay_ratio=1.0, seed=0)
    buffer.add(rows(0, 20))
    counts = np.bincount(buffer.sample(4_000)["rewards"].astype(int), minlength=20)
    assert ((counts - 200) ** 2 / 200).sum() < 43.8  # p = 0.001 (19 degrees of freedom)


def test_fractions_of_new_rows_carry_over():
    buffer = MixInReplayBuffer(1_000, replay_ratio=0.7, seed=0)
    buffer.add(rows(0, 500))
    buffer.sample(5)  # no old rows yet
    drawn = np.concatenate([buffer.sample(5)["rewards"] for _ in range(99)])
    assert drawn.max() == 149  # 0.3 of 500 were new


def test_restored_buffer_continues_identically():
    original, restored = (MixInReplayBuffer(50, replay_ratio=0.4, seed=seed) for seed in (0, 1))
    original.add(rows(0, 30))
    original.sample(7)
    restored.load_state_dict(original.state_dict())
    np.testing.assert_array_equal(original.sample(9)["rewards"], restored.sample(9)["rewards"])
    with pytest.raises(ValueError, match="replay_ratio must be a number from 0 to 1"):
        MixInReplayBuffer(10, replay_ratio=1.5)
