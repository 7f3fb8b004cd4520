"""Adding and removing workers while plans run."""

import contextlib
import time

import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.algorithms.a3c import A3CConfig
from flowrl.algorithms.ddppo import DDPPOConfig
from flowrl.algorithms.impala import IMPALAConfig
from flowrl.iter.errors import ShardFailedError
from flowrl.ops import ParallelRollouts
from flowrl.sampling import RolloutWorker, WorkerSet, worker_set
from flowrl.sampling.worker_states import env_steps_in

from .fakes import CountEnv, DrawEnv, Idle

pytestmark = pytest.mark.usefixtures("ray_session")

CONFIGS = {"sync": A2CConfig, "async": IMPALAConfig, "gradients": A3CConfig, "group": DDPPOConfig}


def make_config(config_class=A2CConfig, **settings):
    return config_class(
        env="CartPole-v1", **{"num_workers": 1, "rollout_fragment_length": 8, "seed": 0, **settings}
    )


def train(algorithm, iterations):
    for _ in range(iterations):
        algorithm.train()


def workers_in(stream, batches):
    return [[source.shard for source in next(stream).sources] for _ in range(batches)]


def live_shards(stream):
    return [stage["shards_live"] for stage in stream.stats() if "shards_live" in stage]


@pytest.mark.slow
def test_added_workers_join_the_next_round_with_the_newest_weights():
    with make_config().build() as algorithm:
        workers = algorithm.workers
        stream = ParallelRollouts(workers)
        assert workers_in(stream, 2) == [[0], [0]]
        policy = workers.local_worker().policy
        policy.set_weights(policy.get_weights())
        workers.add(2)
        batch = next(stream)
        assert [source.shard for source in batch.sources] == [0, 1, 2]
        assert [source.tags["weights_versions"] for source in batch.sources] == [
            {"default_policy": policy.version}
        ] * 3
        assert batch.count == 24
        assert workers.foreach_worker(lambda w: w.worker_index) == [0, 1, 2, 3]
        workers.remove(2)
        assert workers_in(stream, 2) == [[0], [0]]


@pytest.mark.slow
def test_removed_worker_gets_no_requests():
    with make_config(num_workers=2).build() as algorithm:
        workers = algorithm.workers
        stream = ParallelRollouts(workers, mode="async", num_async=2)
        while {source.shard for source in next(stream).sources} != {1}:
            pass
        workers.remove()
        assert workers_in(stream, 4) == [[0]] * 4
        workers.add()
        incarnations = set()
        while len(incarnations) < 2:
            incarnations |= {(s.shard, s.incarnation) for s in next(stream).sources}
        assert incarnations == {(0, 0), (1, 1)}
        assert stream.metrics.counters["num_shard_restarts"] == 0
        assert live_shards(stream) == [2]


@pytest.mark.slow
def test_workers_can_be_added_and_removed_before_the_first_pull():
    with make_config().build() as algorithm:
        stream = ParallelRollouts(algorithm.workers)
        algorithm.workers.add(2)
        algorithm.workers.remove()
        assert workers_in(stream, 1) == [[0, 1]]


@pytest.mark.slow
def test_selected_shards_ignore_added_workers():
    with make_config().build() as algorithm:
        rollouts = algorithm.workers.parallel_iterator()
        single, selected = rollouts.get_shard(0), rollouts.select_shards([0]).gather_sync()
        single, selected = single.zip_with_source(), selected.zip_with_source()
        next(single), next(selected)
        algorithm.workers.add()
        for stream in (single, selected):
            assert [sources[0].shard for sources, _ in stream.take(3)] == [0, 0, 0]
            assert live_shards(stream) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("plan", CONFIGS)
def test_running_plan_uses_added_workers(plan):
    config = make_config(
        CONFIGS[plan], train_batch_size=16, min_sample_timesteps_per_iteration=64,
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


@pytest.mark.slow
def test_checkpoint_includes_added_workers(tmp_path):
    with make_config(train_batch_size=16).build() as algorithm:
        algorithm.workers.add()
        algorithm.train()
        algorithm.save(tmp_path / "two")
        expected = algorithm.train()["info"]["learner"]
    with type(algorithm).from_checkpoint(tmp_path / "two") as loaded:
        assert loaded.workers.num_workers == 2
        assert loaded.train()["info"]["learner"] == expected
        loaded.workers.remove()
        loaded.save(tmp_path / "one")
        loaded.workers.add()
        loaded.restore(tmp_path / "one")
        assert loaded.workers.num_workers == 1
        loaded.train()


@pytest.mark.slow
def test_restored_algorithm_can_be_resized_before_it_starts(tmp_path):
    with make_config(num_workers=2, train_batch_size=16).build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        algorithm_class = type(algorithm)
    with algorithm_class.from_checkpoint(tmp_path / "c") as loaded:
        loaded.workers.add()
        loaded.train()
        assert len(loaded.workers.foreach_worker(lambda w: w.worker_index)) == 4
    with algorithm_class.from_checkpoint(tmp_path / "c") as loaded:
        loaded.workers.remove()
        loaded.save(tmp_path / "one")
    with algorithm_class.from_checkpoint(tmp_path / "one") as loaded:
        assert loaded.workers.num_workers == 1
        loaded.train()


@pytest.mark.slow
def test_steps_of_removed_workers_are_not_in_flight():
    with make_config(IMPALAConfig, num_workers=3, train_batch_size=16).build() as algorithm:
        for _ in range(3):
            algorithm.train()
        algorithm.workers.remove()
        algorithm.train()
        state = algorithm.state_dict()
        sampled = sum(worker["returned_steps"][0] for worker in state["sampling"]["remote"])
        workers = algorithm.workers
        counted = algorithm.plan.metrics.counters["num_env_steps_sampled"]
        present = sum(workers.env_steps_by_worker.values())
        assert counted == present + workers.env_steps_of_removed_workers
        assert workers.env_steps_of_removed_workers > 0
        assert 0 <= state["env_steps_lost"] <= sampled - present


def test_steps_of_a_worker_without_a_state_are_those_that_were_counted():
    state = {
        "local": {"returned_steps": [0, 0]},
        "remote": [{"returned_steps": [1000, 0]}, None],
        "env_steps_by_worker": {0: 900, 1: 700},
        "env_steps_of_removed_workers": 5,
    }
    assert env_steps_in(state) == 1000 + 700 + 5


@pytest.mark.slow
def test_two_streams_of_the_same_workers_both_use_added_workers():
    with make_config().build() as algorithm:
        rollouts = algorithm.workers.parallel_iterator()
        stream = rollouts.for_each(_return_one).union(rollouts.for_each(_return_two)).gather_sync()
        assert sorted(stream.take(2)) == [1, 2]
        algorithm.workers.add()
        assert sorted(stream.take(4)) == [1, 1, 2, 2]


def _return_one(batch):
    return 1


def _return_two(batch):
    return 2


@pytest.mark.parametrize("number", [0, -1, True, 1.0, "2"])
def test_invalid_number_of_workers_raises(number):
    with make_config().build() as algorithm:
        for change in (algorithm.workers.add, algorithm.workers.remove):
            with pytest.raises(ValueError, match="at least 1, got"):
                change(number)


def test_last_worker_and_local_sampling_cannot_be_resized():
    with make_config(num_workers=2).build() as algorithm:
        with pytest.raises(ValueError, match="cannot remove 2 of 2 workers: one must remain"):
            algorithm.workers.remove(2)
        assert algorithm.workers.num_workers == 2
    with make_config(num_workers=0).build() as algorithm:
        for change in (algorithm.workers.add, algorithm.workers.remove):
            with pytest.raises(ValueError, match="num_workers=0"):
                change(1)


@pytest.mark.slow
def test_removed_failed_worker_can_be_added_again():
    config = make_config(num_workers=2, max_num_worker_restarts=0)
    with config.build() as algorithm:
        algorithm.train()
        algorithm.workers.foreach_worker(_kill_second_worker)
        with pytest.raises(ShardFailedError, match="has failed"):
            train(algorithm, 50)
        assert algorithm.train()["num_healthy_workers"] == 1
        algorithm.workers.remove()
        algorithm.workers.add()
        assert algorithm.train()["num_healthy_workers"] == 2


def _kill_second_worker(worker):
    import os
    import threading

    if worker.worker_index == 2:
        threading.Timer(0.2, os._exit, [1]).start()


@pytest.mark.slow
def test_states_of_remote_workers_are_sent_again_after_an_error(ray_session, monkeypatch):
    config = {"rollout_fragment_length": 4}
    with WorkerSet(lambda context: CountEnv(9), Idle, config, num_workers=1) as workers:
        (actor,) = workers.remote_workers()
        first = ray_session.get(actor.apply.remote(RolloutWorker.sample))
        state = workers.state_dict()
    with WorkerSet(lambda context: CountEnv(9), Idle, config, num_workers=1) as workers:
        workers.load_state_dict(state)
        send_states = worker_set.send_states

        def fails(*arguments):
            monkeypatch.setattr(worker_set, "send_states", send_states)
            raise OSError("the environment cannot be created")

        monkeypatch.setattr(worker_set, "send_states", fails)
        with pytest.raises(OSError, match="cannot be created"):
            workers.remote_workers()
        (actor,) = workers.remote_workers()
        batch = ray_session.get(actor.apply.remote(RolloutWorker.sample))
    assert batch["t"][0] == first["t"][-1] + 1


def test_workers_are_stopped_although_the_local_one_fails(ray_session, monkeypatch):
    config = {"rollout_fragment_length": 4}
    workers = WorkerSet(lambda context: CountEnv(9), Idle, config, num_workers=1)
    (actor,) = workers.remote_workers()

    def stop():
        raise OSError("close() failed")

    monkeypatch.setattr(workers.local_worker(), "stop", stop)
    with pytest.raises(OSError, match="close"):
        workers.stop()
    deadline = time.monotonic() + 30
    with contextlib.suppress(ray_session.exceptions.RayActorError):
        while time.monotonic() < deadline:  # kill() returns before the actor is dead
            ray_session.get(actor.apply.remote(id))
        pytest.fail("the worker is alive")


class NotesItsEnd(CountEnv):
    """Writes a file when it is closed."""

    def __init__(self, path):
        super().__init__(9)
        self.path = path

    def close(self):
        self.path.write_text("closed")


def test_stop_closes_the_environments_of_remote_workers(tmp_path, monkeypatch):
    monkeypatch.setattr("flowrl.sampling.worker_calls.STOP_TIMEOUT_S", 60.0)

    def make_env(context):
        return NotesItsEnd(tmp_path / f"{context.worker_index}")

    with WorkerSet(make_env, Idle, {"rollout_fragment_length": 4}, num_workers=1) as workers:
        workers.foreach_worker(lambda worker: worker.sample().count)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def _sample(worker):
    batch = worker.sample()
    return batch["eps_id"].tolist(), batch["obs"][:, 0].tolist()


@pytest.mark.slow
def test_loading_a_state_into_running_workers_repeats_no_episode():
    config = {"rollout_fragment_length": 4, "seed": 1}
    with WorkerSet(lambda context: DrawEnv(2), Idle, config, num_workers=2) as workers:
        before = [workers.foreach_worker(_sample)[1:]]
        state = workers.state_dict()
        state["remote"][0] = None  # this worker did not answer
        state["restart_counts"] = [0, 2]
        workers.load_state_dict(state)
        assert workers.restart_counts == [2, 0]  # the second worker is the same one
        assert workers.state_dict()["restart_counts"] == [2, 2]
        before.append(workers.foreach_worker(_sample)[1:])
        workers.replace(1)
        assert workers.restart_counts == [2, 3]
        before.append(workers.foreach_worker(_sample)[1:])
    for worker in (0, 1):
        ids = [set(samples[worker][0]) for samples in before]
        numbers = [set(samples[worker][1]) for samples in before]
        for parts in (ids, numbers):
            assert len(set.union(*parts)) == sum(map(len, parts))


def test_state_that_does_not_fit_the_local_worker_changes_nothing():
    config = {"rollout_fragment_length": 4}
    with WorkerSet(lambda context: CountEnv(9), Idle, config, num_workers=2) as workers:
        state = workers.state_dict()
        state["remote"].append(None)
        state["local"]["num_envs"] = 3
        with pytest.raises(ValueError, match="3 environments, this worker 1"):
            workers.load_state_dict(state)
        assert workers.num_workers == 2


@pytest.mark.slow
def test_functions_are_not_called_on_workers_that_have_failed():
    with make_config(num_workers=2, max_num_worker_restarts=0).build() as algorithm:
        algorithm.train()
        algorithm.workers.foreach_worker(_kill_second_worker)
        with pytest.raises(ShardFailedError, match="has failed"):
            train(algorithm, 50)
        assert algorithm.workers.foreach_worker(lambda worker: worker.worker_index) == [0, 1]
        algorithm.workers.sync_weights()
