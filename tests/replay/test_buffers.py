"""Replay buffers against a plain list of transitions; draws against their distributions."""

import copy
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data import SampleBatch
from flowrl.data.indexed_columns import NextRows
from flowrl.replay import PrioritizedReplayBuffer, ReplayBuffer, ReservoirReplayBuffer, sum_tree
from flowrl.replay.sum_tree import SumTree


class Stream:
    """Fragments as a sampler makes them, from episodes of drawn lengths. An observation says
    which one it is: [episode, step]."""

    def __init__(self, envs, lengths, truncated=False, nested=False):
        self.lengths = iter(lengths)
        self.envs = [self._new(i) for i in range(envs)]
        self.episodes = envs
        self.truncated, self.nested = truncated, nested
        self.rows = []  # (episode, step, reward, done) of every row there was, in order

    def _new(self, episode):
        return [episode, 0, next(self.lengths, 5)]

    def fragment(self, steps, kind="windows"):
        columns = {n: [] for n in ("obs", "new_obs", "rewards", "dones", "eps_id", "t")}
        for env in range(len(self.envs)):
            for _ in range(steps):
                episode, step, length = self.envs[env]
                done = step + 1 == length
                row = ([episode, step], [episode, step + 1], episode + step / 8, done)
                for name, value in zip(columns, (*row, episode, step), strict=True):
                    columns[name].append(value)
                self.rows.append((episode, step, episode + step / 8, done))
                self.envs[env][1] += 1
                if done:
                    self.envs[env] = self._new(self.episodes)
                    self.episodes += 1
        dones = np.array(columns.pop("dones"))
        batch = SampleBatch(
            {
                n: np.array(c, np.float32 if n in ("obs", "rewards") else None)
                for n, c in columns.items()
            }
        )
        batch["new_obs"] = batch["new_obs"].astype(np.float32)
        flags = (np.zeros_like(dones), dones) if self.truncated else (dones, np.zeros_like(dones))
        batch["terminateds"], batch["truncateds"] = flags
        batch["agent_index"] = np.zeros(batch.count, np.int64)
        if kind == "windows":
            return self._with_windows(batch, dones, steps)
        if kind == "shuffled":
            return batch.take_rows(np.random.default_rng(0).permutation(batch.count))
        if self.nested:
            for name in ("obs", "new_obs"):
                batch[name] = {"a": batch[name], "b": (batch[name][:, 0].copy(),)}
        return batch

    @staticmethod
    def _with_windows(batch, dones, steps):
        cuts = dones.copy()
        cuts[steps - 1 :: steps] = True
        cuts = np.flatnonzero(cuts)
        base = np.concatenate([batch["obs"], batch["new_obs"][cuts]])
        made = SampleBatch.unchecked({**dict(batch.stored()), "obs": base[: batch.count]})
        dict.__setitem__(made, "new_obs", NextRows(base, batch.count, cuts))
        return made


def leaf(observations):
    if isinstance(observations, dict):
        np.testing.assert_array_equal(observations["b"][0], observations["a"][:, 0])
        return observations["a"]
    return observations


def check_rows(drawn, there, n_step, gamma):
    """Each drawn row is what its trajectory says, as far as that is still there."""
    known = {(episode, step): (reward, done) for episode, step, reward, done in there}
    for i in range(drawn.count):
        episode, step = leaf(drawn["obs"])[i]
        assert (drawn["eps_id"][i], drawn["t"][i]) == (episode, step)
        assert (episode, step) in known
        total, k = 0.0, 0
        while k < n_step and (episode, step + k) in known:
            reward, done = known[episode, step + k]
            total += gamma**k * reward
            k += 1
            if done:
                break
        np.testing.assert_allclose(drawn["rewards"][i], total, rtol=1e-6)
        assert leaf(drawn["new_obs"])[i].tolist() == [episode, step + k]
        assert drawn["dones"][i] == done
        if n_step > 1:
            assert drawn["n_steps"][i] == k


@settings(max_examples=60, deadline=None)
@given(
    envs=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 9), min_size=20, max_size=20),
    fragments=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 1)), min_size=1, max_size=12),
    capacity=st.integers(1, 40),
    n_step=st.integers(1, 4),
    kind=st.sampled_from(["windows", "plain", "shuffled", "nested"]),
    truncated=st.booleans(),
)
def test_rows_are_those_of_their_trajectories(
    envs, lengths, fragments, capacity, n_step, kind, truncated
):
    stream = Stream(envs, lengths, truncated, kind == "nested")
    buffer = ReplayBuffer(capacity, n_step=n_step, gamma=0.9, seed=0)
    for steps, draws in fragments:
        buffer.add(stream.fragment(steps, kind))
        assert len(buffer) == min(capacity, len(stream.rows))
        if not draws:
            continue
        drawn = buffer.sample(30)
        numbers = drawn["batch_indexes"]
        assert numbers.max() < buffer.num_added
        assert numbers.min() >= buffer.num_added - len(buffer)
        if kind != "shuffled":  # those are stored in order of time
            check_rows(drawn, stream.rows[-len(buffer) :], n_step, 0.9)
            rows = np.array([(e, t) for e, t, _, _ in stream.rows])[numbers]
            np.testing.assert_array_equal(leaf(drawn["obs"]), rows)
        else:
            check_rows(drawn, stream.rows, 1, 0.9) if n_step == 1 else None
    # each observation is stored once
    buffer.sample(1)
    ring = buffer._ring
    following = ring._following[: ring.rows]
    spare = following[following >= capacity]
    assert len(set(spare.tolist())) == len(spare)
    free = ring._spare[: ring._num_spare].tolist()
    assert sorted(free + spare.tolist()) == list(range(capacity, 2 * capacity))
    if kind in ("windows", "plain", "nested"):
        there = {(e, t) for e, t, _, _ in stream.rows[-len(buffer) :]}
        led_to = {(e, t + 1) for e, t in there} - there
        assert len(spare) == len(led_to)


def test_hand_computed_steps():
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
    expected = {  # row: return, what it led to, steps, terminated
        0: (1 + 1 + 1, 3.0, 3, True),
        1: (2 + 2, 3.0, 2, True),
        2: (4, 3.0, 1, True),
        3: (8 + 8, 5.0, 2, False),
        4: (16, 5.0, 1, False),
    }
    assert set(drawn["batch_indexes"]) == set(expected)
    for row, *told in zip(
        drawn["batch_indexes"],
        drawn["rewards"],
        drawn["new_obs"],
        drawn["n_steps"],
        drawn["terminateds"],
        strict=True,
    ):
        assert tuple(told) == expected[int(row)]


def test_rows_without_trajectories_stand_alone():
    rows = SampleBatch(
        obs=np.arange(4.0), new_obs=np.arange(1.0, 5.0), rewards=np.ones(4, np.float32)
    )
    buffer = ReplayBuffer(8, n_step=3, seed=0)
    buffer.add(rows)
    drawn = buffer.sample(20)
    np.testing.assert_array_equal(drawn["new_obs"], drawn["obs"] + 1)
    assert set(drawn["n_steps"]) == {1}


def test_draws_are_uniform():
    stream = Stream(2, [7] * 100)
    buffer = ReplayBuffer(50, seed=0)
    for _ in range(10):
        buffer.add(stream.fragment(5))
    counts = np.bincount(buffer.sample(20_000)["batch_indexes"] - 50, minlength=50)
    assert chi_square(counts, np.full(50, 400.0)) < 97  # 1 in 20,000 by chance (49 degrees)


def chi_square(counts, expected):
    return ((counts - expected) ** 2 / expected).sum()


# -- priorities ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 700),
    seed=st.integers(0, 1000),
    updates=st.lists(st.tuples(st.integers(0, 699), st.integers(0, 699)), max_size=6),
    roots=st.sampled_from([1, 8, sum_tree.ROOTS]),
)
def test_a_sum_tree_is_its_leaves(size, seed, updates, roots):
    """Of three levels, two and one."""
    rng = np.random.default_rng(seed)
    with mock.patch.object(sum_tree, "ROOTS", roots):
        tree, plain = SumTree(size), np.zeros(size)
    for i, (a, b) in enumerate(updates):
        start, stop = sorted((a % size, b % size))
        if i % 2:
            tree.fill(start, stop + 1, i)
            plain[start : stop + 1] = i
        else:
            leaves = rng.integers(0, size, 9)
            weights = rng.random(9) * (rng.random(9) < 0.7)
            tree.set(leaves, weights)
            for leaf_, weight in zip(leaves, weights, strict=True):
                plain[leaf_] = weight
    np.testing.assert_array_equal(tree.leaves, plain)
    assert tree.total() == pytest.approx(plain.sum(), rel=1e-12)
    if not plain.any():
        with pytest.raises(ValueError, match="all 0"):
            tree.draw(1, rng)
        return
    drawn, weights = tree.draw(64, rng)
    np.testing.assert_array_equal(weights, plain[drawn])
    assert (plain[drawn] > 0).all()
    # one from each of 64 equal parts of the running sum
    ends = plain.cumsum()
    part = plain.sum() / 64
    low, high = ends[drawn] - plain[drawn], ends[drawn]
    at = np.arange(64) * part
    assert (low <= at + part * (1 + 1e-9)).all()
    assert (high >= at * (1 - 1e-9)).all()


def test_draws_follow_the_priorities():
    stream = Stream(1, [7] * 100)
    buffer = PrioritizedReplayBuffer(64, alpha=0.5, beta=0.7, eps=0.0, seed=0)
    buffer.add(stream.fragment(64))
    priorities = np.arange(64.0)
    buffer.update_priorities(np.arange(64), priorities)
    drawn = [buffer.sample(32) for _ in range(1000)]
    counts = np.bincount(np.concatenate([d["batch_indexes"] for d in drawn]), minlength=64)
    chance = priorities**0.5 / (priorities**0.5).sum()
    assert counts[0] == 0
    assert chi_square(counts[1:], 32_000 * chance[1:]) < 115  # 1 in 20,000 (62 degrees)
    for one in drawn[:20]:
        weights = (64 * chance[one["batch_indexes"]]) ** -0.7
        np.testing.assert_allclose(one["weights"], weights / weights.max(), rtol=1e-5)


def test_new_rows_have_the_highest_priority_so_far():
    stream = Stream(1, [7] * 100)
    buffer = PrioritizedReplayBuffer(8, alpha=1.0, eps=0.5, seed=0)
    buffer.add(stream.fragment(4))
    buffer.update_priorities(np.array([1, 2]), np.array([7.0, 0.0]))
    buffer.add(stream.fragment(6))
    buffer.sample(1)
    # rows 8 and 9 lie where 0 and 1 were
    np.testing.assert_allclose(buffer._tree.leaves, [7.5, 7.5, 0.5, 1.0, 7.5, 7.5, 7.5, 7.5])
    # what was drawn before it was overwritten is not given to another row
    buffer.update_priorities(np.array([0, 1, 2]), np.array([1.0, 1.0, 2.0]))
    np.testing.assert_allclose(buffer._tree.leaves, [7.5, 7.5, 2.5, 1.0, 7.5, 7.5, 7.5, 7.5])
    # of a row that is named twice the last one counts
    buffer.update_priorities(np.array([3, 3]), np.array([1.0, 3.0]))
    assert buffer._tree.leaves[3] == 3.5


def test_beta_follows_its_points():
    stream = Stream(1, [7] * 100)
    buffer = PrioritizedReplayBuffer(8, beta=[(0, 0.4), (20, 1.0)])
    assert buffer.beta == 0.4
    buffer.add(stream.fragment(10))
    assert buffer.beta == pytest.approx(0.7)
    buffer.add(stream.fragment(30))
    assert buffer.beta == 1.0


# -- reservoir -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["windows", "plain", "nested"])
def test_a_reservoir_keeps_every_row_with_the_same_chance(kind):
    kept = np.zeros(60)
    for seed in range(120):
        stream = Stream(2, [7] * 100, nested=kind == "nested")
        buffer = ReservoirReplayBuffer(12, seed=seed)
        for _ in range(6):
            buffer.add(stream.fragment(5, kind))
        assert (len(buffer), buffer.num_added) == (12, 60)
        rows = {(e, t): i for i, (e, t, _, _) in enumerate(stream.rows)}
        drawn = buffer.sample(60)
        check_rows(drawn, stream.rows, 1, 0.9)
        there = buffer._ring.columns
        for e, t in zip(there["eps_id"][0][:12], there["t"][0][:12], strict=True):
            kept[rows[int(e), int(t)]] += 1
    assert chi_square(kept, np.full(60, 24.0)) < 115  # 1 in 20,000 by chance (59 degrees)


def test_a_restored_reservoir_goes_on_the_same():
    stream = Stream(1, [7] * 100)
    buffer, other = ReservoirReplayBuffer(12, seed=0), ReservoirReplayBuffer(12, seed=1)
    for _ in range(6):
        buffer.add(stream.fragment(5))
    other.load_state_dict(buffer.state_dict())
    for _ in range(3):
        fragment = stream.fragment(5)
        for one in (buffer, other):
            one.add(fragment)
        first, second = buffer.sample(20), other.sample(20)
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])
    assert buffer.stats() == other.stats()


# -- state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["windows", "nested"])
@pytest.mark.parametrize("make", [ReplayBuffer, PrioritizedReplayBuffer])
def test_a_restored_buffer_goes_on_the_same(make, kind, tmp_path):
    from flowrl.data.checkpoint import read_checkpoint, write_checkpoint

    stream = Stream(2, [3, 9, 4, 8] * 20, nested=kind == "nested")
    buffer = make(30, n_step=3, seed=0)
    for _ in range(5):
        buffer.add(stream.fragment(4, kind))
    if make is PrioritizedReplayBuffer:
        drawn = buffer.sample(10)
        buffer.update_priorities(drawn["batch_indexes"], np.arange(10.0))
    write_checkpoint(tmp_path / "state", {"buffer": buffer.state_dict()}, {})
    state, _ = read_checkpoint(tmp_path / "state")
    other = make(30, n_step=3, seed=5)
    other.load_state_dict(state["buffer"])
    for _ in range(6):
        fragment = stream.fragment(3, kind)
        for one in (buffer, other):
            one.add(fragment)
        first, second = buffer.sample(16), other.sample(16)
        assert set(first) == set(second)
        for name in first:
            for a, b in zip(*(flat(d[name]) for d in (first, second)), strict=True):
                np.testing.assert_array_equal(a, b)
    assert buffer.stats() == other.stats()
    with pytest.raises(ValueError, match="capacity"):
        make(7).load_state_dict(state["buffer"])


def flat(column):
    return [column["a"], *column["b"]] if isinstance(column, dict) else [column]


def test_large_outputs_are_used_again_when_nobody_has_them():
    obs = np.random.default_rng(0).integers(0, 255, (40, 84, 84, 4), np.uint8)
    buffer = ReplayBuffer(40, seed=0)
    buffer.add(SampleBatch(obs=obs[:-1], new_obs=obs[1:], rewards=np.zeros(39, np.float32)))
    first = buffer.sample(64)
    kept, place = copy.deepcopy(first["obs"]), first["obs"].ctypes.data
    second = buffer.sample(64)
    assert second["obs"].ctypes.data != place
    np.testing.assert_array_equal(first["obs"], kept)
    view = second["obs"][3]
    place = second["obs"].ctypes.data
    del second, first
    assert buffer.sample(64)["obs"].ctypes.data != place  # a view is left
    del view
    third, fourth = buffer.sample(64), buffer.sample(64)
    assert place in (third["obs"].ctypes.data, fourth["obs"].ctypes.data)


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings_", "match"),
    [
        ({"capacity": 0}, "capacity: a whole number of at least 1"),
        ({"capacity": 2.5}, "capacity: a whole number"),
        ({"capacity": 5, "n_step": 0}, "n_step: a whole number of at least 1"),
        ({"capacity": 5, "gamma": 1.5}, "gamma: a number from 0 to 1"),
        ({"capacity": 5, "alpha": -1.0}, "alpha, beta and eps are finite"),
        ({"capacity": 5, "beta": []}, "alpha, beta and eps are finite"),
        ({"capacity": 5, "beta": -0.5}, "alpha, beta and eps are finite"),
    ],
)
def test_settings_that_cannot_be(settings_, match):
    with pytest.raises(ValueError, match=match):
        PrioritizedReplayBuffer(**settings_)


def test_what_cannot_be_stored_or_drawn():
    buffer = ReplayBuffer(10)
    with pytest.raises(ValueError, match="the buffer is empty"):
        buffer.sample(1)
    with pytest.raises(ValueError, match="without obs and new_obs"):
        buffer.add(SampleBatch(obs=np.zeros(3)))
    with pytest.raises(TypeError, match="stores a SampleBatch, got dict"):
        buffer.add({"obs": np.zeros(3)})
    fragment = Stream(1, [5] * 9).fragment(4)
    buffer.add(fragment)
    with pytest.raises(ValueError, match="num_items: at least 1"):
        buffer.sample(0)
    with pytest.raises(ValueError, match="a batch without 'rewards'"):
        buffer.add(fragment.without_columns("rewards"))
    with pytest.raises(ValueError, match=r"'rewards' has rows of float32 \[2\], .* \[\]"):
        buffer.add(fragment.with_columns(rewards=np.zeros((4, 2), np.float32)))
    assert len(buffer) == 4
    buffer.add(SampleBatch())
    assert buffer.stats()["num_rows_added"] == 4


@pytest.mark.parametrize("odd", [np.nan, -1.0, np.inf])
def test_priorities_that_cannot_be(odd):
    buffer = PrioritizedReplayBuffer(10)
    buffer.add(Stream(1, [5] * 9).fragment(4))
    before = buffer.state_dict()["weights"]
    with pytest.raises(ValueError, match="finite and at least 0"):
        buffer.update_priorities(np.arange(3), np.array([1.0, odd, 2.0]))
    with pytest.raises(ValueError, match="one for each"):
        buffer.update_priorities(np.arange(3), np.ones(2))
    with pytest.raises(ValueError, match="of 4 that were ever stored"):
        buffer.update_priorities(np.array([4]), np.ones(1))
    np.testing.assert_array_equal(buffer.state_dict()["weights"], before)


def test_what_does_not_fit_is_told_before_anything_is_stored():
    fragment = Stream(1, [5] * 9, nested=True).fragment(4, "nested")
    buffer = ReplayBuffer(10, seed=0)
    buffer.add(fragment)
    other = {"a": fragment["obs"]["a"], "x": fragment["obs"]["b"]}
    for wrong, match in [
        ({"rewards": np.array(["x"] * 4)}, "rows of <U1"),
        ({"obs": other}, "column 'obs' is nested otherwise"),
        ({"obs": fragment["obs"]["a"]}, "column 'obs' is nested otherwise"),
    ]:
        with pytest.raises(ValueError, match=match):
            buffer.add(fragment.with_columns(**wrong))
    assert buffer.num_added == 4
    sequences = fragment.with_columns(seq_lens=np.array([4]), state_in_0=np.zeros((1, 2)))
    for one in (ReplayBuffer(10), buffer):
        with pytest.raises(ValueError, match=r"sequences|nested"):
            one.add(sequences) if one is not buffer else one.add(fragment.with_columns(obs=other))


def test_states_are_copies_and_of_one_capacity():
    stream = Stream(1, [9] * 9)
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
        with pytest.raises(ValueError, match="of capacity 20 for one of"):
            other.load_state_dict(state)
        assert other.num_added == 0


@pytest.mark.parametrize("kind", ["windows", "plain"])
def test_steps_reach_over_fragments_whatever_normalises_them(kind):
    """The next fragment's observations are scaled a little otherwise; or others act in between."""
    stream = Stream(1, [1000])
    buffer = ReplayBuffer(100, n_step=5, seed=0)
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


def test_parts_of_an_episode_out_of_order_are_not_mixed_with_others():
    """What came later but lies earlier is overwritten first: it is not what a row leads to."""

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


@pytest.mark.parametrize("make", [ReplayBuffer, PrioritizedReplayBuffer, ReservoirReplayBuffer])
@pytest.mark.parametrize(
    ("column", "match"),
    [
        ({"terminateds": np.array([0, 0, 1])}, "'terminateds': booleans"),
        ({"eps_id": np.array(["a", "a", "b"])}, "'eps_id': whole numbers"),
        ({"new_obs": np.zeros((3, 5), np.float32)}, "new_obs are of another shape"),
        ({"rewards": np.zeros((3, 2), np.float32)}, "'rewards': numbers"),
        ({"more": {"a": [np.zeros(3)]}}, "'more': nested columns are plain dicts and tuples"),
    ],
)
def test_a_first_batch_that_cannot_be_stored_leaves_nothing_behind(make, column, match):
    buffer, batch = make(9, seed=0), Stream(1, [5]).fragment(3, "plain")
    odd = SampleBatch.unchecked(dict(batch.stored()) | column)
    with pytest.raises(ValueError, match=match):
        buffer.add(odd)
    assert len(buffer) == buffer.num_added == 0
    buffer.add(batch)
    assert buffer.sample(20)["obs"][:, 1].max() < 3
    with pytest.raises(ValueError, match="kind="):
        ReplayBuffer(9, n_step=2).load_state_dict(PrioritizedReplayBuffer(9).state_dict())
    with pytest.raises(ValueError, match="without rewards"):
        ReplayBuffer(9, n_step=2).add(batch.without_columns("rewards"))


def test_more_rows_than_there_is_memory_for():
    buffer = ReplayBuffer(10)
    obs = np.zeros((1, 2), np.float32)
    row = SampleBatch(obs=obs, new_obs=obs, rewards=np.zeros(1, np.float32))
    buffer.add(row)
    buffer.sample(1)
    none = mock.patch("flowrl.replay.ring_buffer.np.empty", side_effect=MemoryError("7 TiB"))
    with none, pytest.raises(MemoryError, match=r"of 10 rows: 7 TiB\. Make its capacity"):
        buffer._ring._memory(3, row["obs"])
