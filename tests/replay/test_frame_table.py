"""FrameTable: replay buffers of stacked frames, compared with the frames that each row shows."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data import SampleBatch
from flowrl.data.indexed_columns import NOTHING, IndexedColumn
from flowrl.replay import PrioritizedReplayBuffer, ReplayBuffer, ReservoirReplayBuffer
from flowrl.replay.buffers import MAX_PENDING_BATCHES
from tests.replay.streams import FragmentStream, check_stacks, with_stacks


def num_frames(table):
    return table._end - table._num_released


def check_uses(table):
    """Check that exactly the frames that rows have are stored, each counted rightly."""
    used, counts = np.unique(table.positions[table.positions != NOTHING], return_counts=True)
    assert num_frames(table) == len(used)
    np.testing.assert_array_equal(table._uses[used], counts)
    assert table._uses.sum() == counts.sum()
    released = table._released[: table._num_released]
    assert len(set(released.tolist()) | set(used.tolist())) == len(released) + len(used)


@settings(max_examples=60)
@given(
    envs=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 9), min_size=20, max_size=20),
    fragments=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    capacity=st.integers(1, 40),
    k=st.integers(2, 4),
    n_step=st.integers(1, 3),
    kinds=st.lists(st.sampled_from(["stacked", "separate", "arrays"]), min_size=12, max_size=12),
    draws=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_drawn_stacks_are_the_last_frames(
    envs, lengths, fragments, capacity, k, n_step, kinds, draws
):
    stream = FragmentStream(envs, lengths)
    buffer = ReplayBuffer(capacity, n_step=n_step, seed=0)
    for steps, kind, draw in zip(fragments, kinds, draws, strict=False):
        buffer.add(with_stacks(stream.fragment(steps), k, kind))
        if draw:  # otherwise, several batches are stored at once
            check_stacks(buffer.sample(30), k)
    check_stacks(buffer.sample(30), k)
    table = buffer._ring._frames
    if kinds[0] == "arrays":  # the first batch decides how observations are stored
        assert table is None
        return
    check_uses(table)
    restored = ReplayBuffer(capacity, n_step=n_step, seed=1)
    restored.load_state_dict(buffer.state_dict())
    check_uses(restored._ring._frames)
    for _ in range(2):
        one, other = buffer.sample(20), restored.sample(20)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
        fragment = with_stacks(stream.fragment(3), k)
        buffer.add(fragment)
        restored.add(fragment)


@settings(max_examples=40)
@given(
    envs=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 9), min_size=20, max_size=20),
    fragments=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    capacity=st.integers(1, 40),
    k=st.integers(2, 4),
)
def test_each_frame_is_stored_once(envs, lengths, fragments, capacity, k):
    stream = FragmentStream(envs, lengths)
    buffer = ReplayBuffer(capacity, seed=0)
    for steps in fragments:
        buffer.add(with_stacks(stream.fragment(steps), k))
    buffer.sample(1)
    shown = {
        (episode, max(step + i, 0))
        for episode, step, _, _ in stream.rows[-capacity:]
        for i in range(1 - k, 2)
    }
    if envs == 1 or len(stream.rows) <= capacity:
        assert num_frames(buffer._ring._frames) == len(shown)
    else:
        # the frames before a row may be those of a row that was overwritten when it was stored
        assert num_frames(buffer._ring._frames) <= len(shown) + envs * (k - 1)


def test_batches_whose_observations_were_read_are_stored_with_others():
    stream = FragmentStream(1, [7] * 100)
    buffer = ReplayBuffer(200, seed=0)
    buffer.add(with_stacks(stream.fragment(5), 3))
    for i in range(6):
        parts = [with_stacks(stream.fragment(5), 3) for _ in range(2)]
        batch = SampleBatch.concat_samples(parts)
        if i % 2:
            np.asarray(batch["obs"])  # joins the frames of the parts, only of this column
        buffer.add(batch)
    assert len(buffer._pending) > 1  # both kinds are stored at once
    check_stacks(buffer.sample(300), 3)
    check_uses(buffer._ring._frames)


def test_memory_is_that_of_the_frames():
    """25,600 steps of four environments in fragments of 16, in a buffer of 10,000 rows."""
    stream = FragmentStream(4, [500] * 400)
    buffer = ReplayBuffer(10_000, seed=0)
    for _ in range(400):
        buffer.add(with_stacks(stream.fragment(16), 4))
    buffer.sample(1)
    frames = buffer._ring._frames
    assert len(buffer) == 10_000
    assert 10_000 < num_frames(frames) < 10_000 * 1.02
    # slots that were ever written: a write of the pending batches has the frames before and after
    # each of their four trajectories twice, until they are linked
    assert frames._end < num_frames(frames) + MAX_PENDING_BATCHES * 4 * 4


@pytest.mark.parametrize("kind", [ReservoirReplayBuffer, PrioritizedReplayBuffer])
def test_stacks_of_other_buffers(kind):
    stream = FragmentStream(2, [7] * 100)
    buffer = kind(30, seed=0)
    for _ in range(20):
        buffer.add(with_stacks(stream.fragment(5), 3))
        check_stacks(buffer.sample(20), 3)
    check_uses(buffer._ring._frames)


def test_error_while_rows_are_replaced_changes_no_row(monkeypatch):
    stream = FragmentStream(2, [7] * 100)
    buffer = ReservoirReplayBuffer(8, seed=0)
    for _ in range(4):
        buffer.add(with_stacks(stream.fragment(5), 3))
    buffer.sample(1)
    before = buffer._ring.columns["rewards"][0].copy()
    monkeypatch.setattr(buffer._ring._frames, "reserve", lambda count: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        buffer.add(with_stacks(stream.fragment(40), 3))
    np.testing.assert_array_equal(buffer._ring.columns["rewards"][0], before)


def test_stacks_without_other_columns():
    def batch(first):
        index = np.stack([np.arange(4), np.arange(1, 5)], 1)
        base = np.arange(first, first + 6, dtype=np.float32)[:, None]
        obs, new_obs = IndexedColumn(base, index), IndexedColumn(base, index + 1)
        return SampleBatch.unchecked({"obs": obs, "new_obs": new_obs})

    buffer = ReplayBuffer(10, seed=0)
    for first in (0, 10):
        buffer.add(batch(first))
    restored = ReplayBuffer(10, seed=0)
    restored.load_state_dict(buffer.state_dict())
    for each in (buffer, restored):
        each.add(batch(20))  # replaces the two oldest rows
        drawn = {tuple(stack) for stack in each.sample(500)["obs"][:, :, 0].tolist()}
        expected = [(first + i, first + i + 1) for first in (0, 10, 20) for i in range(4)]
        assert sorted(drawn) == expected[2:]


def test_stacks_of_sequences():
    stream = FragmentStream(1, [7] * 100)
    buffer = ReplayBuffer(60, storage_unit="sequences", max_seq_len=4, burn_in=2, seed=0)
    for _ in range(20):
        fragment = with_stacks(stream.fragment(8), 3)
        buffer.add(fragment)
        check_stacks(buffer.sample(5), 3)
    check_uses(buffer._ring._frames)


def test_stacks_in_files(tmp_path):
    stream = FragmentStream(2, [7] * 100)
    buffer = ReplayBuffer(40, directory=tmp_path, seed=0)
    for _ in range(10):
        buffer.add(with_stacks(stream.fragment(6), 4))
    check_stacks(buffer.sample(50), 4)
    copied = pickle.loads(pickle.dumps(buffer))
    check_stacks(copied.sample(50), 4)
    check_uses(copied._ring._frames)


def test_missing_frames_are_zeros():
    """Without `eps_id`, rows are not linked."""
    base = np.arange(1.0, 4.0)
    columns = {
        "obs": IndexedColumn(base, np.array([[NOTHING, 0], [0, 1]])),
        "new_obs": IndexedColumn(base, np.array([[0, 1], [1, 2]])),
    }
    buffer = ReplayBuffer(4, seed=0)
    buffer.add(SampleBatch.unchecked({**columns, "rewards": np.array([0.0, 1.0], np.float32)}))
    drawn = buffer.sample(20)
    second = drawn["rewards"].astype(int)
    assert {0, 1} == set(second.tolist())
    np.testing.assert_array_equal(drawn["obs"], np.array([[0, 1], [1, 2]])[second])
    np.testing.assert_array_equal(drawn["new_obs"], np.array([[1, 2], [2, 3]])[second])
    assert num_frames(buffer._ring._frames) == 3


def test_frames_that_normalization_changed_are_kept():
    """The next observation of a fragment's last row may differ from the next fragment's first."""
    stream = FragmentStream(1, [100])
    buffer = ReplayBuffer(100, seed=0)
    first, second = (with_stacks(stream.fragment(4), 3) for _ in range(2))
    scaled = {
        name: IndexedColumn(second_base, dict.__getitem__(second, name).index)
        for second_base in [dict.__getitem__(second, "obs").base * np.float32(1.5)]
        for name in ("obs", "new_obs")
    }
    buffer.add(first)
    buffer.add(SampleBatch.unchecked({**dict(second.stored()), **scaled}))
    drawn = buffer.sample(100)
    expected = np.where(drawn["t"] < 4, 1.0, 1.5)[:, None] * np.maximum(
        drawn["t"][:, None] + np.arange(-2, 1), 0
    )
    np.testing.assert_array_equal(drawn["obs"][:, :, 1], expected)
    check_uses(buffer._ring._frames)


def test_other_stacks_are_rejected():
    stream = FragmentStream(1, [100])
    buffer = ReplayBuffer(10)
    buffer.add(with_stacks(stream.fragment(2), 3))
    with pytest.raises(ValueError, match=r"column 'obs' has rows of float32 \[4, 2\]"):
        buffer.add(with_stacks(stream.fragment(2), 4))


def test_each_frame_is_stored_once_although_concatenated_rows_were_read():
    stream = FragmentStream(2, [7] * 100)
    batch = SampleBatch.concat_samples([with_stacks(stream.fragment(10), 3) for _ in range(2)])
    buffer = ReplayBuffer(100, seed=0)
    buffer.add(batch)
    read = SampleBatch.concat_samples([with_stacks(stream.fragment(10), 3) for _ in range(2)])
    assert read["obs"].shape[0] == 40
    buffer.add(read)
    assert buffer.sample(10)["obs"].shape[0] == 10
    frames = buffer._ring._frames
    num_frames = frames._end - frames._num_released
    assert num_frames < 80 + 40  # a row has one frame, an episode up to two further ones
