"""Draws of fresh and old rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data import SampleBatch
from flowrl.replay import MixInReplayBuffer


def rows(first, count):
    numbers = np.arange(first, first + count, dtype=np.float32)
    return SampleBatch(obs=numbers[:, None], new_obs=numbers[:, None], rewards=numbers)


@settings(max_examples=60, deadline=None)
@given(
    old_share=st.sampled_from([0.0, 0.25, 0.5, 0.7]),
    work=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=12),
    size=st.integers(1, 10),
)
def test_every_new_row_is_given_once(old_share, work, size):
    buffer = MixInReplayBuffer(40, replay_ratio=old_share, seed=0)
    stored = given_up_to = 0
    owed = 0.0
    for count, draws in work:
        buffer.add(rows(stored, count))
        stored += count
        oldest = max(0, stored - 40)
        given_up_to = max(given_up_to, oldest)
        for _ in range(draws):
            owed += size * (1 - old_share)
            due = int(owed + 1e-9)
            owed -= due
            fresh = min(due, stored - given_up_to)
            drawn = buffer.sample(size)["rewards"].astype(int)
            assert drawn[:fresh].tolist() == list(range(given_up_to, given_up_to + fresh))
            known = given_up_to
            if given_up_to == oldest:  # nothing is old yet
                known = given_up_to + fresh if fresh else stored
            assert ((drawn[fresh:] >= oldest) & (drawn[fresh:] < known)).all()
            assert len(drawn) == size
            given_up_to += fresh


def test_all_old_is_uniform():
    buffer = MixInReplayBuffer(20, replay_ratio=1.0, seed=0)
    buffer.add(rows(0, 20))
    counts = np.bincount(buffer.sample(4_000)["rewards"].astype(int), minlength=20)
    assert ((counts - 200) ** 2 / 200).sum() < 43.8  # chi-square, 19, 0.001


def test_shares_hold_on_average():
    buffer = MixInReplayBuffer(1_000, replay_ratio=0.7, seed=0)
    buffer.add(rows(0, 500))
    buffer.sample(5)  # before there is anything old
    drawn = np.concatenate([buffer.sample(5)["rewards"] for _ in range(99)])
    assert drawn.max() == 149  # 0.3 of 500 were new


def test_a_restored_buffer_goes_on():
    one, two = (MixInReplayBuffer(50, replay_ratio=0.4, seed=seed) for seed in (0, 1))
    one.add(rows(0, 30))
    one.sample(7)
    two.load_state_dict(one.state_dict())
    np.testing.assert_array_equal(one.sample(9)["rewards"], two.sample(9)["rewards"])
    with pytest.raises(ValueError, match="replay_ratio: a number from 0 to 1"):
        MixInReplayBuffer(10, replay_ratio=1.5)
