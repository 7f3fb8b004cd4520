"""Workers get the weights that they lack, once."""

import threading

import numpy as np
import pytest

from flowrl import PPO
from flowrl.policies.filters import ObservationFilter
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


def test_workers_get_weights_that_were_loaded_with_the_version_that_they_have(trained):
    algorithm, sync = trained
    sync.take_payload(0, None, None)
    state = algorithm.get_policy().get_state()
    state["weights"] = {name: weight + 1 for name, weight in state["weights"].items()}
    algorithm.get_policy().set_state(state)
    weights, *_ = sync.take_payload(0, None, None)
    for name, weight in state["weights"].items():
        np.testing.assert_array_equal(weights["default_policy"][name], weight)
    assert not needs_weights(sync, 0)


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


def filter_updates(rows):
    """Return updates of a policy's filter with this number of rows."""
    updated = ObservationFilter((4,))
    updated.new_stats.update(np.ones((rows, 4)))
    return {"default_policy": {"observations": updated.take_new_stats()}}


@pytest.mark.parametrize("wait", [False, True])
def test_filter_updates_do_not_wait_for_an_update_of_a_learner_thread(wait):
    with PPO("CartPole-v1", normalize_observations=True, seed=1) as algorithm:
        worker = algorithm.workers.local_worker()
        sync = WeightSync(lambda: worker, {"timestep": 0})
        stats = worker.policy.observation_filter.stats
        sync.add_filter_updates(filter_updates(2), wait)
        assert stats.count == 2  # merged at once: no thread publishes weights
        sync.publish(0)
        in_update, finish = threading.Event(), threading.Event()

        def update():
            with worker.lock:
                in_update.set()
                finish.wait(20)
                sync.publish(1)

        learner = threading.Thread(target=update)
        learner.start()
        in_update.wait()
        if wait:
            finish.set()
        sync.add_filter_updates(filter_updates(3), wait)
        assert stats.count == (5 if wait else 2)
        finish.set()
        learner.join()
        assert stats.count == 5
        (_, _, filters, _) = sync.take_payload(0, None, None)
        saved = filters["default_policy"]["observations"]["count"]
        assert saved == (2 if wait else 5)
        sync.add_filter_updates(filter_updates(1), False)
        sync.unpublish()
        assert stats.count == 6
