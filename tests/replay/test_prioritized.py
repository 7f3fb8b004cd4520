"""Prioritized draws: the sum tree, and the distribution of draws."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data import SampleBatch
from flowrl.replay import PrioritizedReplayBuffer, sum_tree
from flowrl.replay.sum_tree import SumTree
from flowrl.state_schema import StateError
from tests.replay.streams import FragmentStream, chi_square


@settings(max_examples=60)
@given(
    size=st.integers(1, 700),
    seed=st.integers(0, 1000),
    updates=st.lists(st.tuples(st.integers(0, 699), st.integers(0, 699)), max_size=6),
    max_roots=st.sampled_from([1, 8, sum_tree.MAX_ROOTS]),
)
def test_sum_tree_matches_a_flat_array(size, seed, updates, max_roots):
    """With three levels, two and one."""
    rng = np.random.default_rng(seed)
    with mock.patch.object(sum_tree, "MAX_ROOTS", max_roots):
        tree, flat = SumTree(size), np.zeros(size)
    for i, (a, b) in enumerate(updates):
        start, stop = sorted((a % size, b % size))
        if i % 2:
            tree.fill(start, stop + 1, i)
            flat[start : stop + 1] = i
        else:
            leaves = rng.integers(0, size, 9)
            weights = rng.random(9) * (rng.random(9) < 0.7)
            tree.set(leaves, weights)
            for leaf, weight in zip(leaves, weights, strict=True):
                flat[leaf] = weight
    np.testing.assert_array_equal(tree.leaves, flat)
    assert float(tree._roots.sum()) == pytest.approx(flat.sum(), rel=1e-12)
    if not flat.any():
        with pytest.raises(ValueError, match="all weights are 0"):
            tree.draw(1, rng)
        return
    drawn, weights = tree.draw(64, rng)
    np.testing.assert_array_equal(weights, flat[drawn])
    assert (flat[drawn] > 0).all()
    # one leaf from each of 64 equal parts of the running sum
    ends = flat.cumsum()
    part = flat.sum() / 64
    low, high = ends[drawn] - flat[drawn], ends[drawn]
    part_starts = np.arange(64) * part
    assert (low <= part_starts + part * (1 + 1e-9)).all()
    assert (high >= part_starts * (1 - 1e-9)).all()


def test_draws_follow_the_priorities():
    stream = FragmentStream(1, [7] * 100)
    buffer = PrioritizedReplayBuffer(64, alpha=0.5, beta=0.7, eps=0.0, seed=0)
    buffer.add(stream.fragment(64))
    priorities = np.arange(64.0)
    buffer.update_priorities(np.arange(64), priorities)
    batches = [buffer.sample(32) for _ in range(1000)]
    ids = np.concatenate([batch["batch_indexes"] for batch in batches])
    counts = np.bincount(ids, minlength=64)
    probs = priorities**0.5 / (priorities**0.5).sum()
    assert counts[0] == 0
    # p = 1 / 20,000 (62 degrees of freedom)
    assert chi_square(counts[1:], 32_000 * probs[1:]) < 115
    for batch in batches[:20]:
        weights = (64 * probs[batch["batch_indexes"]]) ** -0.7
        np.testing.assert_allclose(batch["weights"], weights / weights.max(), rtol=1e-5)


def test_new_rows_have_the_highest_priority_so_far():
    stream = FragmentStream(1, [7] * 100)
    buffer = PrioritizedReplayBuffer(8, alpha=1.0, eps=0.5, seed=0)
    buffer.add(stream.fragment(4))
    buffer.update_priorities(np.array([1, 2]), np.array([7.0, 0.0]))
    buffer.add(stream.fragment(6))
    # rows 8 and 9 are in the slots of rows 0 and 1
    np.testing.assert_allclose(buffer.weights, [7.5, 7.5, 0.5, 1.0, 7.5, 7.5, 7.5, 7.5])
    # priorities of overwritten rows are ignored
    buffer.update_priorities(np.array([0, 1, 2]), np.array([1.0, 1.0, 2.0]))
    np.testing.assert_allclose(buffer.weights, [7.5, 7.5, 2.5, 1.0, 7.5, 7.5, 7.5, 7.5])
    # lower priorities do not change what new rows get
    buffer.add(stream.fragment(1))
    assert buffer.weights[10 % 8] == 7.5
    # of duplicates the last one counts
    buffer.update_priorities(np.array([3, 3]), np.array([1.0, 3.0]))
    assert buffer.weights[3] == 3.5


@pytest.mark.parametrize(
    ("alpha", "expected", "of_new_rows"),
    [(1.0, [4.0, 9.0, 1.0], 9.0), (0.0, [1.0, 1.0, 1.0], 1.0), (0.5, [2.0, 3.0, 1.0], 3.0)],
)
def test_changed_alpha_holds_for_stored_priorities(alpha, expected, of_new_rows):
    stream = FragmentStream(1, [7] * 100)
    buffer = PrioritizedReplayBuffer(8, alpha=0.5, eps=0.0, seed=0)
    buffer.add(stream.fragment(3))
    buffer.update_priorities(np.arange(3), np.array([4.0, 9.0, 1.0]))
    other = PrioritizedReplayBuffer(8, alpha=alpha, eps=0.0, seed=0)
    other.load_state_dict(buffer.state_dict())
    other.add(stream.fragment(1))
    np.testing.assert_allclose(other.weights, [*expected, of_new_rows])


@pytest.mark.parametrize("change", [{"alpha": 1e-300}, {"weights": np.zeros(4)}])
def test_state_whose_priorities_cannot_be_used_is_refused(change):
    buffer = PrioritizedReplayBuffer(8, seed=0)
    buffer.add(FragmentStream(1, [7] * 100).fragment(4))
    buffer.update_priorities(np.arange(4), np.array([0.0, 0.1, 0.5, 3.0]))
    other = PrioritizedReplayBuffer(8, seed=0)
    with pytest.raises(StateError, match="weights: they are all 0, or infinite"):
        other.load_state_dict({**buffer.state_dict(), **change})


def test_alpha_of_a_state_without_priorities_is_changed():
    buffer = PrioritizedReplayBuffer(8, alpha=0.0, seed=0)
    buffer.add(FragmentStream(1, [7] * 100).fragment(3))
    other = PrioritizedReplayBuffer(8, alpha=0.5, eps=0.0, seed=0)
    other.load_state_dict(buffer.state_dict())
    other.update_priorities(np.array([1]), np.array([4.0]))
    np.testing.assert_allclose(other.weights, [1.0, 2.0, 1.0])


def test_beta_interpolates_its_points():
    stream = FragmentStream(1, [7] * 100)
    buffer = PrioritizedReplayBuffer(8, beta=[(0, 0.4), (20, 1.0)])
    assert buffer.beta == 0.4
    buffer.add(stream.fragment(10))
    assert buffer.beta == pytest.approx(0.7)
    buffer.add(stream.fragment(30))
    assert buffer.beta == 1.0


def test_priorities_of_rows_that_come_from_no_buffer_are_ignored():
    buffer = PrioritizedReplayBuffer(10, alpha=1.0, eps=0.0)
    buffer.add(FragmentStream(1, [5] * 9).fragment(4))
    buffer.update_priorities(np.array([-1, 2, -1]), np.array([90.0, 3.0, 0.0]))
    buffer.update_priorities(np.array([-1]), np.array([90.0]))
    assert buffer.weights.tolist() == [1, 1, 3, 1]
    buffer.add(FragmentStream(1, [5] * 9).fragment(1))
    assert buffer.weights[4] == 3.0


@pytest.mark.parametrize("invalid", [np.nan, -1.0, np.inf])
def test_invalid_priorities_are_rejected(invalid):
    buffer = PrioritizedReplayBuffer(10)
    buffer.add(FragmentStream(1, [5] * 9).fragment(4))
    before = buffer.weights.copy()
    with pytest.raises(ValueError, match="finite and at least 0"):
        buffer.update_priorities(np.arange(3), np.array([1.0, invalid, 2.0]))
    with pytest.raises(ValueError, match="one priority per row"):
        buffer.update_priorities(np.arange(3), np.ones(2))
    with pytest.raises(ValueError, match="which has stored 4 timesteps"):
        buffer.update_priorities(np.array([4]), np.ones(1))
    with pytest.raises(ValueError, match="column that another buffer added"):
        buffer.update_priorities(np.array([-2]), np.ones(1))
    np.testing.assert_array_equal(buffer.weights, before)


@pytest.mark.parametrize("weights", [[1.0] * 3, [1.0] * 5, [1.0, 1.0, -1.0, 1.0], [[1.0] * 4]])
def test_saved_weights_must_fit_the_items(weights):
    buffer = PrioritizedReplayBuffer(8)
    obs = np.zeros((4, 1), np.float32)
    buffer.add(SampleBatch(obs=obs, new_obs=obs + 1))
    state = {**buffer.state_dict(), "weights": np.array(weights)}
    with pytest.raises(StateError, match="weights: they are not 4 numbers"):
        PrioritizedReplayBuffer(8).load_state_dict(state)


@pytest.mark.parametrize(
    "beta",
    [[0.4, 1.0], [0, 0.4, 100, 1.0], [], np.zeros((0, 2)), [(5, 0.4), (1, 1.0)], "x"],
)
def test_beta_is_a_number_or_ascending_points(beta):
    with pytest.raises(ValueError, match=r"points \[\(rows stored, value\), …\] with ascending"):
        PrioritizedReplayBuffer(10, beta=beta)


@pytest.mark.parametrize(("alpha", "priority"), [(1.0, 1.7e308), (2.0, 1e200)])
def test_priorities_whose_sum_would_overflow_are_rejected(alpha, priority):
    buffer = PrioritizedReplayBuffer(10, alpha=alpha, seed=0)
    buffer.add(FragmentStream(1, [9]).fragment(5, "plain"))
    with pytest.raises(ValueError, match=f"too large for alpha={alpha}"):
        buffer.update_priorities(np.array([0, 1]), np.array([priority, priority]))
    assert buffer.weights.tolist() == [1.0] * 5
    assert buffer.sample(3).count == 3


def test_saved_weights_whose_sum_would_overflow_are_refused():
    saved = PrioritizedReplayBuffer(1000, alpha=1.0)
    saved.add(FragmentStream(1, [600]).fragment(500, "plain"))
    saved.update_priorities(np.arange(500), np.full(500, 1e304))
    with pytest.raises(StateError, match="infinite"):
        PrioritizedReplayBuffer(1000, alpha=1.006).load_state_dict(saved.state_dict())
