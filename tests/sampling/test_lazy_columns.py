"""Columns that the loss does not read stay on the worker and are fetched on access."""

import pickle

import numpy as np
import pytest
import torch

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.data import SampleBatch
from flowrl.data.indexed_columns import IndexedColumn
from flowrl.data.lazy_columns import LazyColumn
from flowrl.policies import ViewRequirement
from flowrl.policies.learning.tracked_batch import TrackedBatch
from flowrl.sampling import RolloutWorker, WorkerSet

from .fakes import CountEnv


def worker(policy=PPOTorchPolicy, **config):
    return RolloutWorker(
        lambda context: CountEnv(3), policy, {"rollout_fragment_length": 32, "seed": 1, **config}
    )


def test_columns_read_are_detected_without_side_effects():
    w = worker()
    batch = w.sample()
    before, random = w.policy.get_state(), torch.get_rng_state()
    read = w.policy.columns_read(batch)
    assert read == {
        "obs",
        "actions",
        "action_logp",
        "advantages",
        "value_targets",
        "action_dist_inputs",  # for the KL after the last pass
    }
    after = w.policy.get_state()
    assert str(before) == str(after)
    assert torch.equal(random, torch.get_rng_state())


def test_columns_read_are_the_same_in_microbatches():
    read = [w.policy.columns_read(w.sample()) for w in (worker(), worker(microbatch_size=8))]
    assert read[1] - {"seq_lens"} == read[0]


def test_reads_of_parts_of_a_batch_are_recorded():
    batch = TrackedBatch(SampleBatch(a=np.arange(8), b=np.arange(8), c=np.arange(8)))
    first, second, nested = batch[:4], batch[4:], batch[:4][:2]
    assert batch.read <= {"seq_lens"}
    first["a"], second["b"]
    assert batch.read - {"seq_lens"} == {"a", "b"}
    nested["c"]
    assert batch.read - {"seq_lens"} == {"a", "b", "c"}


class StochasticLoss(PPOTorchPolicy):
    """Draws random numbers and has a buffer that every forward pass changes."""

    def make_model(self):
        model = super().make_model()
        model.register_buffer("passes", torch.zeros(1))
        return model

    def loss(self, batch):
        self.model.passes += 1
        self.rng.random(), torch.rand(1)
        return super().loss(batch)


def test_detection_restores_models_and_random_streams():
    w = worker(StochasticLoss)
    batch = w.sample()
    state, random = w.policy.get_state(), torch.get_rng_state()
    assert w.policy.columns_read(batch) is not None
    assert w.policy.model.passes == 0
    assert str(state) == str(w.policy.get_state())
    assert torch.equal(random, torch.get_rng_state())


class FailingLoss(PPOTorchPolicy):
    def loss(self, batch):
        raise RuntimeError("not today")


def test_all_columns_are_shipped_if_the_loss_fails():
    w = worker(FailingLoss)
    assert w.policy.columns_read(w.sample()) is None


class ReadsLate(PPOTorchPolicy):
    """Reads another column after 100 updates."""

    def loss(self, batch):
        if self.version > 100:
            self.stats["late"] = batch["vf_preds"].mean()
        return super().loss(batch)


def worker_set(policy, envs=1, **config):
    return WorkerSet(
        lambda context: CountEnv(3),
        policy,
        {
            "rollout_fragment_length": 20_000,
            "num_envs_per_worker": envs,
            "num_workers": 1,
            "seed": 1,
            **config,
        },
    )


def is_lazy_column(batch, name):
    column = dict(batch.stored())[name]
    return isinstance(column, IndexedColumn) and column.is_lazy


def first_batch(workers):
    (batch,) = next(iter(workers.parallel_iterator().batch_across_shards().take(1)))
    return batch


@pytest.mark.slow
def test_unread_columns_are_fetched_on_access(ray_session, caplog):
    workers = worker_set(ReadsLate)
    batch = first_batch(workers)
    stored = dict(batch.stored())
    assert is_lazy_column(batch, "vf_preds")
    assert is_lazy_column(batch, "infos")
    assert not stored["infos"].nbytes > batch.count * 9
    for name in ("rewards", "terminateds", "advantages"):
        assert isinstance(stored[name], np.ndarray)
    # slicing, concatenation and repr do not fetch
    joined = SampleBatch.concat_samples([batch[:100], batch[200:300]])
    assert "not read yet" in repr(joined)
    assert is_lazy_column(joined, "infos")
    assert not caplog.records
    assert [info["n"] for info in joined["infos"][:5]] == [1, 2, 3, 1, 2]
    assert joined["vf_preds"].shape == (200,)
    messages = [record.getMessage() for record in caplog.records]
    assert any("column 'infos' is fetched from its worker" in text for text in messages)
    assert np.allclose(batch["advantages"] + batch["vf_preds"], batch["value_targets"], atol=1e-5)
    workers.stop()
    assert batch["infos"][0] == {"n": 1}  # fetched before


def actor_like_worker(policy, **config):
    """A worker in this process that ships columns as on an actor; Ray must run."""
    return RolloutWorker(
        lambda context: CountEnv(3),
        policy,
        {"rollout_fragment_length": 20_000, "seed": 1, **config},
        worker_index=1,
        num_workers=1,
    )


def test_collect_infos_ships_infos(ray_session):
    batch = actor_like_worker(ReadsLate, collect_infos=True).sample()
    assert not is_lazy_column(batch, "infos")
    assert is_lazy_column(batch, "vf_preds")


class ViewOfValues(PPOTorchPolicy):
    def __init__(self, *args):
        super().__init__(*args)
        self.view_requirements["vf_preds"] = ViewRequirement()


def test_columns_of_views_are_shipped(ray_session):
    assert not is_lazy_column(actor_like_worker(ViewOfValues).sample(), "vf_preds")


def test_column_of_a_dead_worker_raises():
    column = LazyColumn("x", lambda: np.zeros(100_000), (100_000,), np.dtype(float))
    moved = pickle.loads(pickle.dumps(column.to_reference(lambda value: 7, _raise)))
    assert len(moved) == 100_000
    with pytest.raises(RuntimeError, match="column 'x' is stored on a worker that is gone"):
        moved.array()


def _raise(reference):
    raise KeyError(reference)


def test_small_columns_are_shipped():
    column = LazyColumn("x", lambda: np.arange(5), (5,), np.dtype(int))
    moved = pickle.loads(pickle.dumps(column.to_reference(None, None)))
    assert moved.array().tolist() == [0, 1, 2, 3, 4]
    objects = np.array([{}, {"a": 1}], object)
    column = LazyColumn("infos", lambda: objects, (2,), objects.dtype)
    moved = pickle.loads(pickle.dumps(column.to_reference(None, None)))
    assert moved.array().tolist() == [{}, {"a": 1}]


def test_pickle_in_process_contains_all_columns():
    batch = pickle.loads(pickle.dumps(worker().sample()))
    assert [info["n"] for info in batch["infos"][:3]] == [1, 2, 3]


def test_learning_fetches_no_column_that_the_loss_does_not_read(ray_session):
    worker = actor_like_worker(PPOTorchPolicy, train_batch_size=20_000)
    batch = worker.sample()
    lazy = [name for name in batch if batch.is_lazy(name)]
    assert "vf_preds" in lazy
    worker.policy.learn_on_minibatches(batch, 1, 10_000)
    assert [name for name in batch if batch.is_lazy(name)] == lazy
