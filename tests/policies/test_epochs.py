"""Statistics of several updates: means, and values per row."""

import numpy as np
import pytest
from gymnasium import spaces

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.data import SampleBatch
from flowrl.policies.learning.epochs import (
    check_learnable,
    concat_row_stats,
    mean_stats,
    run_epochs,
    shuffled_minibatches,
)


class SomeStats:
    """Reports `actor_loss` in every second update."""

    def __init__(self):
        self.updates = 0

    def learn_on_batch(self, batch):
        self.updates += 1
        stats = {"critic_loss": float(self.updates)}
        return stats if self.updates % 2 else {**stats, "actor_loss": 10.0 * self.updates}

    def end_epoch(self, batch, stats):
        return False

    def end_learning(self, batch, stats):
        return {}


@pytest.mark.parametrize(("rows", "actor_loss"), [(3, 20.0), (4, 30.0)])
def test_statistic_of_some_minibatches_is_their_mean(rows, actor_loss):
    batch, policy = SampleBatch(obs=np.zeros((rows, 1))), SomeStats()

    def run_epoch(batch, size):
        return [policy.learn_on_batch(batch[i : i + size]) for i in range(0, batch.count, size)]

    stats = run_epochs(policy, run_epoch, batch, 1, 1)
    assert stats == {"critic_loss": np.mean(range(1, rows + 1)), "actor_loss": actor_loss}


def test_mean_of_statistics():
    assert mean_stats([]) == {}
    assert mean_stats([{"a": 1.0}, {"b": 2.0, "a": 3.0}]) == {"a": 2.0, "b": 2.0}
    assert mean_stats([{"a": 1.0}, {"b": 2.0, "a": 3.0}], [3, 1]) == {"a": 1.5, "b": 2.0}
    assert mean_stats([{"a": 1.0}, {"a": 3.0}], [0, 0]) == {"a": 2.0}


def test_values_per_row_are_concatenated():
    assert concat_row_stats([]) == concat_row_stats([{}]) == {}
    parts = [{"td_error": np.array([1.0])}, {}, {"td_error": np.array([2.0, 3.0])}]
    assert concat_row_stats(parts)["td_error"].tolist() == [1.0, 2.0, 3.0]


def test_lengths_of_sequences_that_do_not_fit_the_rows_are_rejected():
    batch = SampleBatch(rewards=np.zeros(6), seq_lens=np.array([3, 3]))
    check_learnable(batch, "P", ())
    for lens in ([2, 3], [4, 3]):
        changed = batch.with_columns(seq_lens=np.array(lens))
        with pytest.raises(ValueError, match=f"P: seq_lens add up to {sum(lens)}, but .* 6 rows"):
            check_learnable(changed, "P", ())


def test_minibatches_without_rows_to_learn_from_are_left_out():
    mask = np.arange(20) < 5
    batch = SampleBatch(rewards=np.arange(20.0), loss_mask=mask)
    sequences = batch.with_columns(seq_lens=np.full(4, 5))
    for rows in (batch, sequences):
        for seed in range(5):
            parts = list(shuffled_minibatches(rows, 4, np.random.default_rng(seed)))
            assert all(part["loss_mask"].any() for part in parts)
            learned = np.concatenate([part["rewards"][part["loss_mask"]] for part in parts])
            assert sorted(learned) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="P: the batch has no rows to learn from, loss_mask is"):
        check_learnable(batch.with_columns(loss_mask=np.zeros(20, bool)), "P", ())


def test_microbatches_have_rows_to_learn_from():
    policy = A2CTorchPolicy(
        spaces.Box(-1, 1, (2,)), spaces.Discrete(2), {"microbatch_size": 4, "seed": 0}
    )
    batch = SampleBatch(
        obs=np.ones((20, 2), np.float32), actions=np.zeros(20, int), advantages=np.ones(20),
        value_targets=np.ones(20), loss_mask=np.arange(20) < 5,
    )  # fmt: skip
    gradient, _ = policy.compute_gradients(batch)
    whole, _ = policy.compute_gradients(batch[:5])
    np.testing.assert_allclose(gradient, whole, rtol=1e-4, atol=1e-6)
