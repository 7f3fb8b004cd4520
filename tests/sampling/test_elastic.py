"""Workers that join and leave while plans run."""

import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.algorithms.a3c import A3CConfig
from flowrl.algorithms.ddppo import DDPPOConfig
from flowrl.algorithms.impala import IMPALAConfig
from flowrl.iter.errors import ShardFailedError
from flowrl.ops import ParallelRollouts

pytestmark = pytest.mark.usefixtures("ray_session")

KINDS = {"sync": A2CConfig, "async": IMPALAConfig, "gradients": A3CConfig, "group": DDPPOConfig}


def make(kind=A2CConfig, **settings):
    return kind(
        env="CartPole-v1", **{"num_workers": 1, "rollout_fragment_length": 8, "seed": 0, **settings}
    )


def train_on(algorithm, iterations):
    for _ in range(iterations):
        algorithm.train()


def workers_in(stream, batches):
    return [[source.worker for source in next(stream).sources] for _ in range(batches)]


def test_whoever_joins_is_in_the_next_round_with_the_newest_weights():
    with make().build() as algorithm:
        workers = algorithm.workers
        stream = ParallelRollouts(workers)
        assert workers_in(stream, 2) == [[0], [0]]
        policy = workers.local_worker().policy
        policy.set_weights(policy.get_weights())
        workers.add(2)
        batch = next(stream)
        assert [source.worker for source in batch.sources] == [0, 1, 2]
        assert [source.tags["weights_versions"] for source in batch.sources] == [
            {"default_policy": policy.version}
        ] * 3
        assert batch.count == 24
        assert workers.foreach_worker(lambda w: w.worker_index) == [0, 1, 2, 3]
        workers.remove(2)
        assert workers_in(stream, 2) == [[0], [0]]


def test_who_leaves_is_asked_no_more_and_who_comes_back_is_another_one():
    with make(num_workers=2).build() as algorithm:
        workers = algorithm.workers
        stream = ParallelRollouts(workers, mode="async", num_async=2)
        while {source.worker for source in next(stream).sources} != {1}:
            pass
        workers.remove()
        assert workers_in(stream, 4) == [[0]] * 4
        workers.add()
        seen = set()
        while len(seen) < 2:
            seen |= {(s.worker, s.incarnation) for s in next(stream).sources}
        assert seen == {(0, 0), (1, 1)}
        assert stream.metrics.counters["num_shard_restarts"] == 0
        assert [one["shards_live"] for one in stream.stats() if "shards_live" in one] == [2]


def test_whoever_joins_and_leaves_before_the_first_pull():
    with make().build() as algorithm:
        stream = ParallelRollouts(algorithm.workers)
        algorithm.workers.add(2)
        algorithm.workers.remove()
        assert workers_in(stream, 1) == [[0, 1]]


def test_single_shards_stay_what_they_are():
    with make().build() as algorithm:
        rollouts = algorithm.workers.parallel_iterator()
        one, chosen = rollouts.get_shard(0), rollouts.select_shards([0]).gather_sync()
        one, chosen = one.zip_with_source(), chosen.zip_with_source()
        next(one), next(chosen)
        algorithm.workers.add()
        for stream in (one, chosen):
            assert [sources[0].worker for sources, _ in stream.take(3)] == [0, 0, 0]
            assert [one["shards_live"] for one in stream.stats() if "shards_live" in one] == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_running_plan_takes_them(kind):
    config = make(
        KINDS[kind], train_batch_size=16, min_sample_timesteps_per_iteration=64,
        sgd_minibatch_size=0,
    )  # fmt: skip
    with config.build() as algorithm:
        algorithm.train()
        algorithm.workers.add(2)
        for _ in range(40):
            result = algorithm.train()
            counts = algorithm.workers.foreach_worker(lambda w: w.env_steps)[1:]
            if min(counts) > 0:
                break
        assert len(counts) == 3 and min(counts) > 0
        assert result["num_healthy_workers"] == 3
        algorithm.workers.remove(2)
        result = algorithm.train()
        assert result["num_healthy_workers"] == 1
        assert result["num_remote_worker_restarts"] == 0
        assert algorithm.train()["timesteps_total"] > result["timesteps_total"]


def test_a_checkpoint_has_those_that_joined(tmp_path):
    with make(train_batch_size=16).build() as algorithm:
        algorithm.workers.add()
        algorithm.train()
        algorithm.save(tmp_path / "two")
        expected = algorithm.train()["info"]["learner"]
    with type(algorithm).from_checkpoint(tmp_path / "two") as again:
        assert again.workers.num_workers == 2
        assert again.train()["info"]["learner"] == expected
        again.workers.remove()
        again.save(tmp_path / "one")
        again.workers.add()
        again.restore(tmp_path / "one")
        assert again.workers.num_workers == 1
        again.train()


def test_a_loaded_algorithm_that_has_not_started_takes_them(tmp_path):
    with make(num_workers=2, train_batch_size=16).build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        kind = type(algorithm)
    with kind.from_checkpoint(tmp_path / "c") as again:
        again.workers.add()
        again.train()
        assert len(again.workers.foreach_worker(lambda w: w.worker_index)) == 4
    with kind.from_checkpoint(tmp_path / "c") as again:
        again.workers.remove()
        again.save(tmp_path / "one")
    with kind.from_checkpoint(tmp_path / "one") as again:
        assert again.workers.num_workers == 1
        again.train()


def test_steps_of_those_that_left_are_not_taken_for_some_in_flight():
    with make(IMPALAConfig, num_workers=3, train_batch_size=16).build() as algorithm:
        for _ in range(3):
            algorithm.train()
        algorithm.workers.remove()
        algorithm.train()
        sampling = algorithm.workers.get_state()
        counted = algorithm.plan.metrics.counters["num_env_steps_sampled"]
        here = sum(algorithm.workers.counted.values())
        assert counted == here + algorithm.workers.counted_gone
        assert algorithm.workers.counted_gone > 0
        made = sum(one["given_steps"][0] for one in sampling["remote"])
        assert 0 <= algorithm._in_flight(sampling) <= made - here


def test_two_chains_on_the_same_workers_both_get_them():
    with make().build() as algorithm:
        rollouts = algorithm.workers.parallel_iterator()
        both = rollouts.for_each(_one).union(rollouts.for_each(_two)).gather_sync()
        assert sorted(both.take(2)) == [1, 2]
        algorithm.workers.add()
        assert sorted(both.take(4)) == [1, 1, 2, 2]


def _one(batch):
    return 1


def _two(batch):
    return 2


@pytest.mark.parametrize("number", [0, -1, True, 1.0, "2"])
def test_how_many(number):
    with make().build() as algorithm:
        for change in (algorithm.workers.add, algorithm.workers.remove):
            with pytest.raises(ValueError, match="at least 1, got"):
                change(number)


def test_some_must_stay_and_must_have_been_there():
    with make(num_workers=2).build() as algorithm:
        with pytest.raises(ValueError, match="2 of 2 workers cannot leave: one must stay"):
            algorithm.workers.remove(2)
        assert algorithm.workers.num_workers == 2
    with make(num_workers=0).build() as algorithm:
        for change in (algorithm.workers.add, algorithm.workers.remove):
            with pytest.raises(ValueError, match="num_workers=0"):
                change(1)


def test_a_failed_worker_that_leaves_is_not_missed():
    config = make(num_workers=2, max_num_worker_restarts=0)
    with config.build() as algorithm:
        algorithm.train()
        algorithm.workers.foreach_worker(_die_as_the_second)
        with pytest.raises(ShardFailedError, match="has failed"):
            train_on(algorithm, 50)
        assert algorithm.train()["num_healthy_workers"] == 1
        algorithm.workers.remove()
        algorithm.workers.add()
        assert algorithm.train()["num_healthy_workers"] == 2


def _die_as_the_second(worker):
    import os
    import threading

    if worker.worker_index == 2:
        threading.Timer(0.2, os._exit, [1]).start()
