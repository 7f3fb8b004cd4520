"""What nobody was seen to read is not shipped, and is there all the same."""

import pickle

import numpy as np
import pytest
import torch

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.data import SampleBatch
from flowrl.data.indexed_columns import IndexedColumn
from flowrl.data.lazy_columns import LazyColumn
from flowrl.policies import ViewRequirement
from flowrl.sampling import RolloutWorker, WorkerSet

from .fakes import CountEnv


def worker(policy=PPOTorchPolicy, **config):
    return RolloutWorker(
        lambda context: CountEnv(3), policy, {"rollout_fragment_length": 32, "seed": 1, **config}
    )


def test_the_trial_finds_what_is_read_and_changes_nothing():
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


class Dropping(PPOTorchPolicy):
    """Draws random numbers and has a buffer that every forward pass changes."""

    def make_model(self):
        model = super().make_model()
        model.register_buffer("passes", torch.zeros(1))
        return model

    def loss(self, batch):
        self.model.passes += 1
        self.rng.random(), torch.rand(1)
        return super().loss(batch)


def test_models_and_random_streams_are_as_before():
    w = worker(Dropping)
    batch = w.sample()
    state, random = w.policy.get_state(), torch.get_rng_state()
    assert w.policy.columns_read(batch) is not None
    assert w.policy.model.passes == 0
    assert str(state) == str(w.policy.get_state())
    assert torch.equal(random, torch.get_rng_state())


class Failing(PPOTorchPolicy):
    def loss(self, batch):
        raise RuntimeError("not today")


def test_a_loss_that_cannot_be_tried_gets_everything():
    w = worker(Failing)
    assert w.policy.columns_read(w.sample()) is None


class Late(PPOTorchPolicy):
    """Reads a column only later on."""

    def loss(self, batch):
        if self.version > 100:
            self.stats["odd"] = batch["vf_preds"].mean()
        return super().loss(batch)


def sets(policy, envs=1, **config):
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


def first_of(workers):
    (batch,) = next(iter(workers.parallel_iterator().batch_across_shards().take(1)))
    return batch


def test_what_is_left_behind_is_fetched_when_it_is_asked_for(ray_session, caplog):
    workers = sets(Late)
    batch = first_of(workers)
    stored = dict(batch.stored())
    assert isinstance(stored["vf_preds"], IndexedColumn) and stored["vf_preds"].is_lazy
    assert isinstance(stored["infos"], IndexedColumn) and stored["infos"].is_lazy
    assert not stored["infos"].nbytes > batch.count * 9
    for name in ("rewards", "terminateds", "advantages"):
        assert isinstance(stored[name], np.ndarray)
    # rows, joins and repr do not fetch
    both = SampleBatch.concat_samples([batch[:100], batch[200:300]])
    assert "not read yet" in repr(both)
    assert both.is_lazy("infos")
    assert not caplog.records
    assert [info["n"] for info in both["infos"][:5]] == [1, 2, 3, 1, 2]
    assert both["vf_preds"].shape == (200,)
    told = [record.getMessage() for record in caplog.records]
    assert any("column 'infos' is fetched from its worker" in text for text in told)
    assert np.allclose(batch["advantages"] + batch["vf_preds"], batch["value_targets"], atol=1e-5)
    workers.stop()
    assert batch["infos"][0] == {"n": 1}  # it was fetched before


def on_an_actor(policy, **config):
    """A worker as it is on an actor, where Ray runs, but in this process."""
    return RolloutWorker(
        lambda context: CountEnv(3),
        policy,
        {"rollout_fragment_length": 20_000, "seed": 1, **config},
        worker_index=1,
        num_workers=1,
    )


def test_what_a_setting_asks_for_is_shipped(ray_session):
    batch = on_an_actor(Late, collect_infos=True).sample()
    assert not batch.is_lazy("infos")
    assert batch.is_lazy("vf_preds")


class Asking(PPOTorchPolicy):
    def __init__(self, *args):
        super().__init__(*args)
        self.view_requirements["vf_preds"] = ViewRequirement()


def test_a_policy_that_asks_for_a_column(ray_session):
    assert not on_an_actor(Asking).sample().is_lazy("vf_preds")


def test_a_column_of_a_worker_that_is_gone():
    column = LazyColumn("x", lambda: np.zeros(100_000), (100_000,), np.dtype(float))
    moved = pickle.loads(pickle.dumps(column.to_reference(lambda value: 7, _gone)))
    assert len(moved) == 100_000
    with pytest.raises(RuntimeError, match="column 'x' is stored on a worker that is gone"):
        moved.array()


def _gone(reference):
    raise KeyError(reference)


def test_small_columns_travel_along():
    column = LazyColumn("x", lambda: np.arange(5), (5,), np.dtype(int))
    moved = pickle.loads(pickle.dumps(column.to_reference(None, None)))
    assert moved.array().tolist() == [0, 1, 2, 3, 4]
    objects = np.array([{}, {"a": 1}], object)
    column = LazyColumn("infos", lambda: objects, (2,), objects.dtype)
    moved = pickle.loads(pickle.dumps(column.to_reference(None, None)))
    assert moved.array().tolist() == [{}, {"a": 1}]


def test_a_pickle_without_a_worker_has_everything():
    batch = pickle.loads(pickle.dumps(worker().sample()))
    assert [info["n"] for info in batch["infos"][:3]] == [1, 2, 3]
