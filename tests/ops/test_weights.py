"""Operators that select which workers receive new weights, and when."""

import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.iter import MetricsContext, Source, metrics_scope
from flowrl.ops import BroadcastUpdateLearnerWeights, UpdateWorkerWeights
from flowrl.ops.replay_actors import REPLAY_ORIGIN


@pytest.fixture
def metrics():
    with metrics_scope(MetricsContext()) as context:
        yield context


@pytest.fixture
def workers(ray_session, metrics):
    config = A2CConfig(env="CartPole-v1", num_workers=3, rollout_fragment_length=8, seed=0)
    with config.build() as algorithm:
        for index in range(3):  # all workers receive the first version
            assert algorithm.workers.take_weights(index) is not None
        yield algorithm.workers


class Batch:
    """A stand-in for a batch of these workers."""

    def __init__(self, *indices, env_steps=8, origin=""):
        tags = {"env_steps": env_steps}
        self.sources = tuple(Source(i, tags=tags, origin=origin) for i in indices)


@pytest.mark.slow
def test_large_weights_are_one_object_per_version(workers, monkeypatch):
    import ray

    from flowrl.sampling import weight_sync

    monkeypatch.setattr(weight_sync, "INLINE_BYTES", 1000)
    monkeypatch.setattr(workers, "node", "here")  # as when Ray has started
    put, refs = ray.put, []
    monkeypatch.setattr(ray, "put", lambda value: refs.append(put(value)) or refs[-1])
    for _ in range(3):
        learn(workers)
        assert {workers.take_weights(index) for index in range(3)} == {refs[-1]}
    assert len(refs) == 3
    workers.sync_weights()
    assert len(refs) == 3


def learn(workers):
    policy = workers.local_worker().policy
    policy.set_weights(policy.get_weights())  # a new version


def receivers(workers):
    """Return the indices of the workers that would receive weights with their next request."""
    return [index for index in range(3) if workers.take_weights(index) is not None]


def test_all_contributors_receive_new_weights(workers, metrics):
    operator = BroadcastUpdateLearnerWeights(workers)
    learn(workers)
    batch = Batch(0, 2)
    assert operator(batch) is batch
    assert receivers(workers) == [0, 2]
    assert receivers(workers) == []
    operator(Batch(1))
    assert receivers(workers) == [1]
    assert metrics.counters["num_weight_broadcasts"] == 2


def test_weights_are_broadcast_once_per_interval(workers, metrics):
    operator = BroadcastUpdateLearnerWeights(workers, broadcast_interval=3)
    learn(workers)
    workers.weight_sync.update_only([])  # selects workers, as in a running plan
    for index in (0, 1):
        operator(Batch(index))
        assert receivers(workers) == []
    state = operator.state_dict()
    other = BroadcastUpdateLearnerWeights(workers, broadcast_interval=3)
    other.load_state_dict(state)
    other(Batch(0))
    assert receivers(workers) == [0, 1]
    assert metrics.counters["num_weight_broadcasts"] == 1


def test_replayed_rows_have_no_workers(workers):
    workers.weight_sync.update_only([])
    learn(workers)
    BroadcastUpdateLearnerWeights(workers)(Batch(0, origin=REPLAY_ORIGIN))
    assert receivers(workers) == []


def test_worker_receives_weights_after_the_maximum_delay(workers, metrics):
    operator = UpdateWorkerWeights(workers, max_weight_sync_delay=20)
    learn(workers)
    for _ in range(2):
        operator(Batch(1))
        assert receivers(workers) == []
    other = UpdateWorkerWeights(workers, 20)
    other.load_state_dict(operator.state_dict())
    other(Batch(0))
    other(Batch(1))
    assert receivers(workers) == [1]
    assert metrics.counters["num_weight_syncs"] == 1


def test_invalid_arguments_are_rejected(workers):
    with pytest.raises(ValueError, match="broadcast_interval must be an int of at least 1"):
        BroadcastUpdateLearnerWeights(workers, 0)
    with pytest.raises(ValueError, match="max_weight_sync_delay must be an int of at least 0"):
        UpdateWorkerWeights(workers, -1)


def test_workers_keep_their_weights_until_the_first_broadcast(workers):
    broadcast = BroadcastUpdateLearnerWeights(workers, broadcast_interval=3)
    sent = []
    for _ in range(6):
        workers.local_worker().policy.version += 1
        broadcast(Batch(0))
        sent.append(any(name for name in (workers.take_weights(0) or ({},))[0]))
    assert sent == [False, False, True, False, False, True]
