"""Workers get the weights that they lack, once."""

import numpy as np
import pytest

from flowrl import PPO
from flowrl.sampling.weight_sync import WeightSync, load_weights


@pytest.fixture
def trained():
    """An algorithm, and the WeightSync of its local worker for remote workers."""
    settings = {"train_batch_size": 32, "sgd_minibatch_size": 32, "num_sgd_iter": 1, "seed": 1}
    with PPO("CartPole-v1", **settings) as algorithm:
        algorithm.train()
        yield algorithm, WeightSync(algorithm.workers.local_worker, {"timestep": 0})


def needs_weights(sync, worker):
    return sync.take_payload(worker, None, None) is not None


def test_each_worker_gets_a_version_once(trained):
    algorithm, sync = trained
    weights, versions, _, _ = sync.take_payload(0, None, None)
    assert versions == {"default_policy": algorithm.get_policy().version}
    for name, weight in algorithm.get_policy().get_weights().items():
        np.testing.assert_array_equal(weights["default_policy"][name], weight)
    assert not needs_weights(sync, 0)
    assert needs_weights(sync, 1)
    assert not needs_weights(sync, 1)
    algorithm.train()
    assert [needs_weights(sync, worker) for worker in (0, 1, 0, 1)] == [True, True, False, False]


def test_replaced_worker_gets_the_weights_again(trained):
    _, sync = trained
    for worker in (0, 1):
        sync.take_payload(worker, None, None)
    sync.forget(0)
    assert [needs_weights(sync, worker) for worker in (0, 1)] == [True, False]
    sync.invalidate()
    assert [needs_weights(sync, worker) for worker in (0, 1)] == [True, True]


def test_workers_get_the_time_of_schedules_without_new_weights(trained):
    algorithm, _ = trained
    time = {"timestep": 0}
    sync = WeightSync(algorithm.workers.local_worker, time)
    sync.take_payload(0, None, None)
    time["timestep"] = 50
    payload = sync.take_payload(0, None, None)
    assert payload == ({}, None, None, {"timestep": 50})
    assert sync.take_payload(0, None, None) is None
    sync.forget(0)
    assert sync.take_payload(0, None, None)[3] == {"timestep": 50}
    worker = algorithm.workers.local_worker()
    before = worker.policy.version
    load_weights(worker, payload)
    assert (worker.policy.timestep, worker.policy.version) == (50, before)


def test_only_selected_workers_get_a_new_version(trained):
    algorithm, sync = trained
    for worker in (0, 1):
        sync.take_payload(worker, None, None)
    algorithm.train()
    sync.update_only([1])
    assert [needs_weights(sync, worker) for worker in (0, 1, 2)] == [False, True, True]
    sync.update_also([0])
    assert needs_weights(sync, 0)
    sync.mark_synced([0, 1, 2])
    sync.update_all()
    assert not any(needs_weights(sync, worker) for worker in (0, 1, 2))


def test_published_weights_do_not_change_until_the_next_publication(trained):
    algorithm, sync = trained
    sync.publish()
    published = sync.take_payload(0, None, None)[1]
    algorithm.train()
    assert not needs_weights(sync, 0)
    sync.publish()
    assert sync.take_payload(0, None, None)[1] != published
