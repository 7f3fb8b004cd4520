"""ReplayBuffer, compared with a list of transitions."""

import copy
import gc
import pickle
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data import SampleBatch
from flowrl.replay import (
    MixInReplayBuffer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReservoirReplayBuffer,
)
from tests.replay.streams import FragmentStream, array_of, check_rows, chi_square


@settings(max_examples=60)
@given(
    envs=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 9), min_size=20, max_size=20),
    fragments=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 1)), min_size=1, max_size=12),
    capacity=st.integers(1, 40),
    n_step=st.integers(1, 4),
    kind=st.sampled_from(["indexed", "plain", "shuffled", "nested"]),
    truncated=st.booleans(),
)
def test_drawn_rows_follow_their_trajectories(
    envs, lengths, fragments, capacity, n_step, kind, truncated
):
    stream = FragmentStream(envs, lengths, truncated, kind == "nested")
    buffer = ReplayBuffer(capacity, n_step=n_step, gamma=0.9, seed=0)
    for steps, draws in fragments:
        buffer.add(stream.fragment(steps, kind))
        assert len(buffer) == min(capacity, len(stream.rows))
        if not draws:
            continue
        drawn = buffer.sample(30)
        ids = drawn["batch_indexes"]
        assert ids.max() < buffer.num_added
        assert ids.min() >= buffer.num_added - len(buffer)
        if kind != "shuffled":  # shuffled rows are stored in order of time
            check_rows(drawn, stream.rows[-len(buffer) :], n_step, 0.9)
            rows = np.array([(e, t) for e, t, _, _ in stream.rows])[ids]
            np.testing.assert_array_equal(array_of(drawn["obs"]), rows)
        elif n_step == 1:
            check_rows(drawn, stream.rows, 1, 0.9)
    # each observation is stored once
    ring = buffer.state_dict()["ring"]
    next_slots = ring["successors"]["next_slots"]
    final_slots = next_slots[next_slots >= capacity]
    assert len(set(final_slots.tolist())) == len(final_slots)
    assert final_slots.max(initial=0) < 2 * capacity
    assert buffer._ring._successors.num_free == capacity - len(final_slots)
    if kind in ("indexed", "plain", "nested"):
        stored = {(e, t) for e, t, _, _ in stream.rows[-len(buffer) :]}
        assert len(final_slots) == len({(e, t + 1) for e, t in stored} - stored)


def test_n_step_returns_match_hand_computed_values():
    """Three rewards 1, 2, 4 and an end; gamma 1/2."""
    batch = SampleBatch(
        obs=np.arange(5.0),
        new_obs=np.arange(1.0, 6.0),
        rewards=np.array([1.0, 2.0, 4.0, 8.0, 16.0], np.float32),
        terminateds=np.array([False, False, True, False, False]),
        truncateds=np.zeros(5, bool),
        eps_id=np.array([0, 0, 0, 1, 1]),
        t=np.array([0, 1, 2, 0, 1]),
    )
    buffer = ReplayBuffer(10, n_step=3, gamma=0.5, seed=0)
    buffer.add(batch)
    drawn = buffer.sample(200)
    expected = {  # row: return, next observation, steps, terminated
        0: (1 + 1 + 1, 3.0, 3, True),
        1: (2 + 2, 3.0, 2, True),
        2: (4, 3.0, 1, True),
        3: (8 + 8, 5.0, 2, False),
        4: (16, 5.0, 1, False),
    }
    assert set(drawn["batch_indexes"]) == set(expected)
    names = ("rewards", "new_obs", "n_steps", "terminateds")
    columns = drawn.columns(["batch_indexes", *names])
    for row, *values in zip(*columns, strict=True):
        assert tuple(values) == expected[int(row)]


@pytest.mark.parametrize("envs", [1, 2])
@pytest.mark.parametrize("fragments", [[(0, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 3), (3, 4)]])
def test_n_step_returns_do_not_cross_an_end_within_an_episode(envs, fragments):
    """A lost life is the end of a trajectory, but not of the episode."""
    buffer = ReplayBuffer(20, n_step=3, gamma=0.5, seed=0)
    for first, end in fragments:
        t = np.tile(np.arange(first, end), envs)
        episodes = np.repeat(np.arange(envs), end - first)
        buffer.add(
            SampleBatch(
                obs=10.0 * episodes + t,
                new_obs=10.0 * episodes + t + 1,
                rewards=np.ones(len(t), np.float32),
                terminateds=t == 1,
                truncateds=np.zeros(len(t), bool),
                eps_id=episodes,
                t=t,
            )
        )
    drawn = buffer.sample(200)
    names = ("obs", "rewards", "new_obs", "n_steps", "terminateds")
    expected = {
        0: (1.5, 2, 2, True),
        1: (1, 2, 1, True),
        2: (1.5, 4, 2, False),
        3: (1, 4, 1, False),
    }
    for obs, reward, new_obs, *rest in zip(*drawn.columns(list(names)), strict=True):
        episode, step = divmod(int(obs), 10)
        assert (reward, new_obs - 10 * episode, *rest) == expected[step]


def test_rows_without_episode_ids_are_not_linked():
    rows = SampleBatch(
        obs=np.arange(4.0), new_obs=np.arange(1.0, 5.0), rewards=np.ones(4, np.float32)
    )
    buffer = ReplayBuffer(8, seed=0)
    buffer.add(rows)
    drawn = buffer.sample(20)
    np.testing.assert_array_equal(drawn["new_obs"], drawn["obs"] + 1)


def test_draws_are_uniform():
    stream = FragmentStream(2, [7] * 100)
    buffer = ReplayBuffer(50, seed=0)
    for _ in range(10):
        buffer.add(stream.fragment(5))
    counts = np.bincount(buffer.sample(20_000)["batch_indexes"] - 50, minlength=50)
    assert chi_square(counts, np.full(50, 400.0)) < 97  # p = 1 / 20,000 (49 degrees of freedom)


# -- trajectories ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["indexed", "plain"])
def test_n_steps_span_fragments_despite_normalization_and_missing_steps(kind):
    """Running normalization scales each fragment; other agents act in between."""
    stream = FragmentStream(1, [1000])
    buffer = ReplayBuffer(100, n_step=5, seed=0, links="consecutive")
    for i in range(10):
        fragment = stream.fragment(4, kind)
        scale = np.float32(1 + i / 1000)
        scaled = fragment.with_columns(
            obs=fragment["obs"] * scale, new_obs=fragment["new_obs"] * scale
        )
        buffer.add(scaled)
    drawn = buffer.sample(500)
    assert set(drawn["n_steps"][drawn["t"] < 36]) == {5}
    turns = ReplayBuffer(100, n_step=5, seed=0)
    for _ in range(10):
        fragment = stream.fragment(4, kind)
        turns.add(fragment.with_columns(t=2 * fragment["t"]))
    drawn = turns.sample(500)
    assert set(drawn["n_steps"][drawn["t"] < drawn["t"].max() - 10]) == {5}


def rows_of_an_episode(t, obs, new_obs):
    """Return rows of one episode at steps t, whose rewards are the steps."""
    flags = np.zeros(len(t), bool)
    return SampleBatch(
        obs=obs,
        new_obs=new_obs,
        rewards=t.astype(np.float32),
        terminateds=flags,
        truncateds=flags,
        eps_id=np.zeros(len(t), np.int64),
        t=t,
    )


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("num_parts", [1, 6])
def test_drawn_rows_have_the_stored_next_observations(n_step, num_parts):
    """The next observations are not those of the following rows, as after relabeling."""
    buffer = ReplayBuffer(100, n_step=n_step, seed=0)
    for t in np.split(np.arange(6), num_parts):
        buffer.add(rows_of_an_episode(t, t, t + 100))
        buffer.sample(1)
    drawn = buffer.sample(500)
    np.testing.assert_array_equal(drawn["new_obs"], drawn["obs"] + 100)
    np.testing.assert_array_equal(drawn["rewards"], drawn["t"])


def test_parts_of_a_buffer_do_not_link_rows_of_other_parts():
    """Observations repeat, and every second fragment is stored elsewhere."""
    buffer = ReplayBuffer(100, n_step=3, seed=0, links="never")
    for first in (0, 8):
        t = np.arange(first, first + 4)
        buffer.add(rows_of_an_episode(t, t % 4, (t + 1) % 4))
    drawn = buffer.sample(200)
    assert set(drawn["n_steps"][np.isin(drawn["t"], (3, 11))]) == {1}


def test_n_step_needs_the_columns_that_link_rows():
    rows = {"obs": np.zeros((4, 2)), "new_obs": np.zeros((4, 2)), "rewards": np.ones(4)}
    buffer = ReplayBuffer(10, n_step=3)
    with pytest.raises(ValueError, match=r"n_step=3 needs the columns eps_id and t"):
        buffer.add(SampleBatch(rows))
    assert len(buffer) == 0


def test_row_is_not_linked_to_an_older_row():
    """A successor that was stored earlier would be overwritten first."""

    def part(episode, first, rows, end=False):
        steps = np.arange(first, first + rows)
        obs = np.stack([np.full(rows, episode), steps], 1).astype(np.float32)
        ends = np.zeros(rows, bool)
        ends[-1] = end
        return SampleBatch(
            obs=obs,
            new_obs=obs + np.array([0, 1], np.float32),
            rewards=steps.astype(np.float32),
            terminateds=ends,
            eps_id=np.full(rows, episode),
            t=steps,
        )

    buffer = ReplayBuffer(10, seed=0, n_step=3, gamma=1.0)
    buffer.add(part(9, 0, 1, end=True))
    buffer.add(part(1, 3, 3, end=True))
    buffer.add(part(1, 0, 3))
    buffer.add(part(5, 0, 3, end=True))
    buffer.sample(1)
    buffer.add(part(7, 0, 4, end=True))
    drawn = buffer.sample(300)
    steps = drawn["new_obs"] - drawn["obs"]
    assert (steps[:, 0] == 0).all()
    np.testing.assert_array_equal(steps[:, 1], drawn["n_steps"])


# -- memory ----------------------------------------------------------------------------------------


def image_buffer():
    obs = np.random.default_rng(0).integers(0, 255, (40, 84, 84, 4), np.uint8)
    buffer = ReplayBuffer(40, seed=0)
    buffer.add(SampleBatch(obs=obs[:-1], new_obs=obs[1:], rewards=np.zeros(39, np.float32)))
    return buffer


def test_memory_of_large_outputs_is_reused_once_nothing_refers_to_it():
    buffer = image_buffer()
    first = buffer.sample(64)
    content, address = copy.deepcopy(first["obs"]), first["obs"].ctypes.data
    second = buffer.sample(64)
    assert second["obs"].ctypes.data != address
    np.testing.assert_array_equal(first["obs"], content)
    view = second["obs"][3]
    address = second["obs"].ctypes.data
    del second, first
    assert buffer.sample(64)["obs"].ctypes.data != address  # the view keeps the memory
    del view
    third, fourth = buffer.sample(64), buffer.sample(64)
    assert address in (third["obs"].ctypes.data, fourth["obs"].ctypes.data)


def test_tensors_keep_the_memory_of_large_outputs():
    buffer = image_buffer()
    tensor = torch.from_numpy(buffer.sample(64)["obs"])[3:5].flatten()
    content = tensor.clone()
    for _ in range(8):
        assert buffer.sample(64)["obs"].flags.writeable
    assert torch.equal(tensor, content)


def test_failed_allocation_names_the_settings():
    obs = np.zeros((1, 2), np.float32)
    row = SampleBatch(obs=obs, new_obs=obs, rewards=np.zeros(1, np.float32))
    buffer = ReplayBuffer(10)
    out_of_memory = mock.patch(
        "flowrl.replay.ring_buffer.np.empty", side_effect=MemoryError("7 TiB")
    )
    with (
        out_of_memory,
        pytest.raises(MemoryError, match=r"of 10 rows: 7 TiB\. Reduce its capacity"),
    ):
        buffer.add(row)


# -- state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [ReplayBuffer, PrioritizedReplayBuffer, MixInReplayBuffer])
@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_copied_buffer_continues_identically(make, kind):
    buffer = make(50, seed=0)
    stream = FragmentStream(2, [7] * 100)
    for _ in range(3):
        buffer.add(stream.fragment(5))
    drawn = buffer.sample(8)
    is_pickled = kind == "pickle"
    other = pickle.loads(pickle.dumps(buffer)) if is_pickled else copy.deepcopy(buffer)
    for one in (buffer, other):
        one.update_priorities(drawn["batch_indexes"], np.arange(1.0, 9.0))
    fragment = stream.fragment(5)
    for one in (buffer, other):
        one.add(fragment)
    expected, drawn = buffer.sample(100), other.sample(100)
    assert set(expected) == set(drawn)
    for name in expected:
        np.testing.assert_array_equal(array_of(expected[name]), array_of(drawn[name]))


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("links", ["consecutive", "never"])
@pytest.mark.parametrize("kind", ["state", "deepcopy", "pickle"])
@pytest.mark.parametrize("num_fragments", [0, 1])
def test_copies_link_rows_as_the_original(tmp_path, in_files, links, kind, num_fragments):
    """The observations change between two fragments, as by running normalization."""

    def new_buffer():
        directory = tmp_path if in_files else None
        return ReplayBuffer(50, n_step=3, seed=0, links=links, directory=directory)

    def add_fragment(buffer, number):
        t = np.arange(4 * number, 4 * number + 4)
        buffer.add(rows_of_an_episode(t, t + number / 2, t + 1 + number / 2))

    buffer = new_buffer()
    for number in range(num_fragments):
        add_fragment(buffer, number)
    if kind == "state":
        other = new_buffer()
        other.load_state_dict(buffer.state_dict())
    else:
        other = pickle.loads(pickle.dumps(buffer)) if kind == "pickle" else copy.deepcopy(buffer)
    for number in range(num_fragments, num_fragments + 3):
        add_fragment(other, number)
    drawn = other.sample(500)
    num_rows = 4 * (num_fragments + 3)
    steps = {int(t): int(n) for t, n in zip(drawn["t"], drawn["n_steps"], strict=True)}
    linked = num_rows if links == "consecutive" else 4  # rows
    assert steps == {t: min(3, linked - t % linked) for t in range(num_rows)}


def test_buffer_that_nothing_refers_to_is_freed_at_once():
    buffer = ReplayBuffer(50, seed=0)
    buffer.add(FragmentStream(1, [9] * 9).fragment(5))
    buffer.sample(1)
    ring = weakref.ref(buffer._ring)
    gc.disable()
    try:
        del buffer
        assert ring() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["indexed", "nested"])
@pytest.mark.parametrize("make", [ReplayBuffer, PrioritizedReplayBuffer])
def test_restored_buffer_continues_identically(make, kind, tmp_path):
    from flowrl.data.checkpoint import read_checkpoint, write_checkpoint

    stream = FragmentStream(2, [3, 9, 4, 8] * 20, nested=kind == "nested")
    buffer = make(30, n_step=3, seed=0)
    for _ in range(5):
        buffer.add(stream.fragment(4, kind))
    if make is PrioritizedReplayBuffer:
        drawn = buffer.sample(10)
        buffer.update_priorities(drawn["batch_indexes"], np.arange(10.0))
    write_checkpoint(tmp_path / "state", {"buffer": buffer.state_dict()}, {})
    state, _ = read_checkpoint(tmp_path / "state")
    restored = make(30, n_step=3, seed=5)
    restored.load_state_dict(state["buffer"])
    for _ in range(6):
        fragment = stream.fragment(3, kind)
        buffer.add(fragment)
        restored.add(fragment)
        first, second = buffer.sample(16), restored.sample(16)
        assert set(first) == set(second)
        for name in first:
            for a, b in zip(*(leaves(drawn[name]) for drawn in (first, second)), strict=True):
                np.testing.assert_array_equal(a, b)
    assert buffer.stats() == restored.stats()
    with pytest.raises(ValueError, match="capacity"):
        make(7).load_state_dict(state["buffer"])


def leaves(column):
    return [column["a"], *column["b"]] if isinstance(column, dict) else [column]


def test_states_are_copies_and_need_equal_capacity():
    stream = FragmentStream(1, [9] * 9)
    buffer = ReplayBuffer(20, seed=0)
    buffer.add(stream.fragment(15))
    state = buffer.state_dict()
    before = copy.deepcopy(state["ring"]["columns"]["obs"])
    for _ in range(4):
        buffer.add(stream.fragment(15))
    buffer.sample(1)
    np.testing.assert_array_equal(state["ring"]["columns"]["obs"], before)
    for capacity in (10, 15, 30):
        other = ReplayBuffer(capacity)
        with pytest.raises(ValueError, match="of capacity 20, this buffer has"):
            other.load_state_dict(state)
        assert other.num_added == 0


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"capacity": 0}, "capacity must be an int of at least 1"),
        ({"capacity": 2.5}, "capacity must be an int"),
        ({"capacity": 5, "n_step": 0}, "n_step must be an int of at least 1"),
        ({"capacity": 5, "gamma": 1.5}, "gamma must be a number from 0 to 1"),
        ({"capacity": 5, "alpha": -1.0}, "alpha, beta and eps must be finite"),
        ({"capacity": 5, "beta": []}, "alpha, beta and eps must be finite"),
        ({"capacity": 5, "alpha": "x"}, "alpha, beta and eps must be finite numbers"),
        ({"capacity": 5, "beta": "x"}, "alpha, beta and eps must be finite numbers"),
        ({"capacity": 5, "eps": None}, "alpha, beta and eps must be finite numbers"),
        ({"capacity": 5, "beta": -0.5}, "alpha, beta and eps must be finite"),
        ({"capacity": 5, "links": "all"}, "links must be one of equal, consecutive, never"),
    ],
)
def test_invalid_settings_are_rejected(arguments, match):
    with pytest.raises(ValueError, match=match):
        PrioritizedReplayBuffer(**arguments)


def test_invalid_batches_and_draws_are_rejected():
    buffer = ReplayBuffer(10)
    with pytest.raises(ValueError, match="the replay buffer is empty"):
        buffer.sample(1)
    with pytest.raises(ValueError, match="the batch lacks new_obs"):
        buffer.add(SampleBatch(obs=np.zeros(3)))
    with pytest.raises(TypeError, match="stores a SampleBatch, got dict"):
        buffer.add({"obs": np.zeros(3)})
    fragment = FragmentStream(1, [5] * 9).fragment(4)
    buffer.add(fragment)
    with pytest.raises(ValueError, match="num_items must be at least 1"):
        buffer.sample(0)
    with pytest.raises(ValueError, match="a batch without 'rewards'"):
        buffer.add(fragment.without_columns("rewards"))
    with pytest.raises(ValueError, match=r"'rewards' has rows of float32 \[2\], .* \[\]"):
        buffer.add(fragment.with_columns(rewards=np.zeros((4, 2), np.float32)))
    assert len(buffer) == 4
    buffer.add(SampleBatch())
    assert buffer.stats()["num_rows_added"] == 4


def test_mismatched_columns_are_rejected_before_anything_is_stored():
    fragment = FragmentStream(1, [5] * 9, nested=True).fragment(4, "nested")
    buffer = ReplayBuffer(10, seed=0)
    buffer.add(fragment)
    other = {"a": fragment["obs"]["a"], "x": fragment["obs"]["b"]}
    for columns, match in [
        ({"rewards": np.array(["x"] * 4)}, "rows of <U1"),
        ({"obs": other}, "column 'obs': its structure, shapes"),
        ({"obs": fragment["obs"]["a"]}, "column 'obs': its structure, shapes"),
    ]:
        with pytest.raises(ValueError, match=match):
            buffer.add(fragment.with_columns(**columns))
    assert buffer.num_added == 4
    sequences = fragment.with_columns(seq_lens=np.array([4]), state_in_0=np.zeros((1, 2)))
    with pytest.raises(ValueError, match="a batch of sequences"):
        ReplayBuffer(10).add(sequences)


@pytest.mark.parametrize("make", [ReplayBuffer, PrioritizedReplayBuffer, ReservoirReplayBuffer])
@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"terminateds": np.array([0, 0, 1])}, "'terminateds': expected booleans"),
        ({"eps_id": np.array(["a", "a", "b"])}, "'eps_id': expected integers"),
        ({"new_obs": np.zeros((3, 5), np.float32)}, "new_obs have another shape"),
        ({"rewards": np.zeros((3, 2), np.float32)}, "'rewards': expected numbers"),
        ({"more": {"a": [np.zeros(3)]}}, "'more': nested columns are plain dicts and tuples"),
    ],
)
def test_invalid_first_batch_leaves_the_buffer_unchanged(make, columns, match):
    buffer, batch = make(9, seed=0), FragmentStream(1, [5]).fragment(3, "plain")
    invalid = SampleBatch.unchecked(dict(batch.stored()) | columns)
    with pytest.raises(ValueError, match=match):
        buffer.add(invalid)
    assert len(buffer) == buffer.num_added == 0
    buffer.add(batch)
    assert buffer.sample(20)["obs"][:, 1].max() < 3


def test_state_of_another_kind_and_rows_without_rewards_are_rejected():
    batch = FragmentStream(1, [5]).fragment(3, "plain")
    for one, other in (
        (ReplayBuffer, PrioritizedReplayBuffer),
        (PrioritizedReplayBuffer, ReplayBuffer),
    ):
        with pytest.raises(ValueError, match=f"kind='{other.__name__}'.*prioritized_replay"):
            one(9).load_state_dict(other(9).state_dict())
    with pytest.raises(ValueError, match="no column rewards"):
        ReplayBuffer(9, n_step=2).add(batch.without_columns("rewards"))


@pytest.mark.parametrize(
    "columns", [{"rewards": np.arange(3)}, {"eps_id": np.ones(3, np.uint32)}], ids=str
)
def test_all_dtypes_of_numbers_can_be_restored(columns):
    batch = FragmentStream(1, [5]).fragment(3, "plain").with_columns(**columns)
    buffer, restored = ReplayBuffer(9, seed=0), ReplayBuffer(9, seed=0)
    buffer.add(batch)
    restored.load_state_dict(buffer.state_dict())
    (name,) = columns
    drawn = restored.sample(8)[name]
    assert drawn.dtype == columns[name].dtype
    assert drawn.tolist() == buffer.sample(8)[name].tolist()


def test_integers_are_stored_without_loss_only():
    def batch(dtype, value):
        return SampleBatch(
            obs=np.zeros((2, 1), np.float32),
            new_obs=np.zeros((2, 1), np.float32),
            actions=np.full(2, value, dtype),
        )

    buffer = ReplayBuffer(10)
    buffer.add(batch(np.int16, 3))
    buffer.add(batch(np.int8, 4))
    with pytest.raises(
        ValueError, match=r"'actions' has rows of int64 \[\], earlier batches had int16"
    ):
        buffer.add(batch(np.int64, 70_000))
    assert set(buffer.sample(50)["actions"].tolist()) == {3, 4}


def rows_with_goal(goal, steps, length=6, changes=0.0):
    """Return steps of an episode with a goal in the observation and in the reward."""
    t = np.arange(length)[steps]
    obs = np.stack([t + changes, np.full(len(t), goal)], 1).astype(np.float32)
    return SampleBatch(
        obs=obs,
        new_obs=obs + np.array([1, 0], np.float32),
        actions=np.zeros(len(t), np.int64),
        rewards=np.full(len(t), 10.0**goal, np.float32),
        terminateds=t == length - 1,
        truncateds=np.zeros(len(t), bool),
        eps_id=np.zeros(len(t), np.int64),
        t=t,
    )


@pytest.mark.parametrize("links", ["equal", "consecutive"])
@pytest.mark.parametrize("how", ["one batch", "interleaved", "separate batches"])
@pytest.mark.parametrize("fragments", [[slice(0, 6)], [slice(0, 3), slice(3, 6)]])
@pytest.mark.parametrize("flushes", [False, True])
def test_copies_of_an_episode_with_other_goals_stay_separate(links, how, fragments, flushes):
    buffer = ReplayBuffer(100, n_step=3, gamma=1.0, seed=0, links=links)
    for number, steps in enumerate(fragments):
        copies = [rows_with_goal(goal, steps, changes=number / 4) for goal in range(3)]
        if how == "separate batches":
            for copied in copies:
                buffer.add(copied)
                _ = flushes and buffer.sample(1)
            continue
        batch = SampleBatch.concat_samples(copies)
        if how == "interleaved":
            batch = batch.take_rows(np.arange(batch.count).reshape(3, -1).T.reshape(-1))
        buffer.add(batch)
        _ = flushes and buffer.sample(1)
    drawn = buffer.sample(2000)
    goals = drawn["obs"][:, 1]
    np.testing.assert_array_equal(drawn["new_obs"][:, 1], goals)
    np.testing.assert_allclose(drawn["rewards"], drawn["n_steps"] * 10.0**goals)
    in_one_fragment = len(fragments) == 1
    for goal, t, n in zip(goals, drawn["t"], drawn["n_steps"], strict=True):
        if in_one_fragment:
            assert n == min(3, 6 - t)
        elif goal == 0 and links == "consecutive" and how == "separate batches" and flushes:
            assert n == min(3, 6 - t)  # the copies do not take the place of the original


def part_of_an_episode(t, reward):
    t = np.array(t)
    obs, flags = t[:, None].astype(np.float32), np.zeros(len(t), bool)
    return SampleBatch(
        obs=obs,
        new_obs=obs + 1,
        rewards=np.full(len(t), reward, np.float32),
        terminateds=flags,
        truncateds=flags,
        eps_id=np.zeros(len(t), np.int64),
        t=t,
    )


@pytest.mark.parametrize("draws", [True, False])
def test_copies_with_equal_observations_do_not_take_over_links(draws):
    buffer = ReplayBuffer(50, n_step=3, gamma=1.0, seed=0)
    for t in ([0, 1], [2, 3]):
        for reward in (1, 100):  # the original, and a copy with another reward
            buffer.add(part_of_an_episode(t, reward))
            if draws:
                buffer.sample(1)
    rows = buffer.rows_by_id(list(range(8)))
    assert rows["rewards"].tolist() == [3, 3, 200, 100, 2, 1, 200, 100]
    assert rows["n_steps"].tolist() == [3, 3, 2, 1, 2, 1, 2, 1]


def test_rows_of_several_steps_are_no_single_steps():
    buffer = ReplayBuffer(50, n_step=3, gamma=1.0, seed=0)
    buffer.add(part_of_an_episode(range(9), 1).with_columns(n_steps=np.ones(9, np.int64)))
    with pytest.raises(ValueError, match=r"column n_steps.*n_step=3: draw them from a buffer with"):
        buffer.add(buffer.sample(4))


@pytest.mark.parametrize("name", ["obs", "rewards"])
def test_infinite_values_are_restored(name):
    batch = part_of_an_episode(range(4), 1)
    column = batch[name].copy()
    column[2] = -np.inf
    buffer = ReplayBuffer(10, seed=0)
    buffer.add(batch.with_columns(**{name: column}))
    restored = ReplayBuffer(10, seed=0)
    restored.load_state_dict(buffer.state_dict())
    np.testing.assert_array_equal(restored.sample(20)[name], buffer.sample(20)[name])


def test_strings_are_not_truncated():
    buffer = ReplayBuffer(10)
    columns = {"obs": np.zeros((2, 1)), "new_obs": np.zeros((2, 1))}
    buffer.add(SampleBatch(columns, move=np.array(["up", "up"])))
    with pytest.raises(ValueError, match="column 'move' has rows of <U7"):
        buffer.add(SampleBatch(columns, move=np.array(["forward", "up"])))


def test_nested_columns_do_not_replace_arrays():
    buffer = ReplayBuffer(10)
    columns = {"obs": np.zeros((2, 1)), "new_obs": np.zeros((2, 1))}
    buffer.add(SampleBatch(columns, extra=np.zeros(2)))
    with pytest.raises(ValueError, match="column 'extra' is nested, earlier batches had arrays"):
        buffer.add(SampleBatch(columns, extra={"a": np.zeros(2)}))


def test_numbers_and_strings_do_not_replace_each_other():
    buffer = ReplayBuffer(10)
    columns = {"obs": np.zeros((2, 1)), "new_obs": np.zeros((2, 1))}
    buffer.add(SampleBatch(columns, move=np.array(["up", "up"])))
    with pytest.raises(ValueError, match="column 'move' has rows of int64"):
        buffer.add(SampleBatch(columns, move=np.array([123456, 7])))


def steps_of_an_episode(**columns):
    rows = {"obs": np.arange(4.0), "new_obs": np.arange(1.0, 5), "rewards": np.ones(4, np.float32)}
    return SampleBatch(**rows, eps_id=np.zeros(4, int), **columns)


def test_n_step_buffer_rejects_a_column_of_dones():
    batch = steps_of_an_episode(t=np.arange(4), dones=np.array([False, True, False, True]))
    with pytest.raises(ValueError, match="needs the columns terminateds and truncateds"):
        ReplayBuffer(10, n_step=2).add(batch)
    ReplayBuffer(10).add(batch)
    flags = {"terminateds": batch["dones"], "truncateds": np.zeros(4, bool)}
    buffer = ReplayBuffer(10, n_step=2, seed=0)
    buffer.add(batch.with_columns(**flags))
    drawn = buffer.sample(20)
    assert (drawn["dones"] == drawn["terminateds"]).all() and drawn["dones"].all()


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_rows_are_sorted_by_steps_of_any_integer_dtype(dtype):
    buffer = ReplayBuffer(10, n_step=4, seed=0)
    buffer.add(steps_of_an_episode(t=np.arange(4, dtype=dtype))[[3, 2, 1, 0]])
    assert set(buffer.sample(50)["n_steps"]) == {1, 2, 3, 4}


def test_saved_columns_have_all_rows():
    buffer = ReplayBuffer(8)
    buffer.add(FragmentStream(1, [9]).fragment(3, "plain"))
    state = buffer.state_dict()
    state["ring"]["columns"]["rewards"] = [np.full(1, 7.0)]
    with pytest.raises(ValueError, match="the column 'rewards' does not have 3 rows"):
        ReplayBuffer(8).load_state_dict(state)


def test_rows_without_a_whole_item_cannot_be_drawn():
    buffer = ReplayBuffer(8, storage_unit="sequences", max_seq_len=6)
    stream = FragmentStream(1, [20])
    buffer.add(stream.fragment(6, "plain"))
    buffer.sample(1)
    buffer._sequences.remove_before(1)  # as after a full disk, see test_memmap
    with pytest.raises(ValueError, match="has nothing to draw"):
        buffer.sample(1)
