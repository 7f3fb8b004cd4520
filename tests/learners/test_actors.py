"""Processes that learn as one: the weights are those of one process, come what may."""

import os
import signal
import time

import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.algorithms.appo import APPOConfig
from flowrl.algorithms.ddppo import DDPPO, DDPPOConfig
from flowrl.algorithms.dqn import DQNConfig
from flowrl.algorithms.impala import IMPALAConfig
from flowrl.algorithms.ppo import PPOConfig
from flowrl.data import SampleBatch
from flowrl.iter import LocalIterator
from flowrl.iter.errors import ShardFailedError
from flowrl.ops import (
    Dequeue,
    Enqueue,
    LearnerThread,
    MultiGPUTrainOneStep,
    ParallelRollouts,
    TrainOneStep,
    TrainOnWorkers,
    TrainTFMultiGPU,
    UpdateTargetNetwork,
)
from flowrl.sampling import DefaultCallbacks

pytestmark = pytest.mark.usefixtures("ray_session")


def small(kind=PPOConfig, **settings):
    base = {"env": "CartPole-v1", "seed": 1, "plan": "a2c", "model": {"fcnet_hiddens": [8]}}
    return kind(**{**base, **settings})


def weights(algorithm):
    return algorithm.workers.local_worker().policy.get_weights()


def assert_same_weights(one, other, atol=1e-6):
    for name, weight in weights(one).items():
        np.testing.assert_allclose(weights(other)[name], weight, atol=atol)


def both(config, make_one, make_other, count=3):
    """Two algorithms of the same settings, which learned from the same batches by two operators."""
    with config.build(plan="a2c") as one, config.build(plan="a2c") as other:
        batches = ParallelRollouts(one.workers).take(count)
        ParallelRollouts(other.workers).take(1)
        told = []
        for algorithm, make in ((one, make_one), (other, make_other)):
            operators = make(algorithm.workers)
            stream = LocalIterator(batches)
            for operator in operators if isinstance(operators, list) else [operators]:
                stream = stream.for_each(operator)
            with stream:
                told.append(stream.take(count))
        assert_same_weights(one, other)
        yield one, other, told


CASES = {
    "ppo": (PPOConfig, {"train_batch_size": 103, "sgd_minibatch_size": 25, "num_sgd_iter": 2,
                        "kl_coeff": 0.2, "kl_stop": 10.0}),
    "a2c": (A2CConfig, {"train_batch_size": 37, "standardize_advantages": True}),
    "lstm": (PPOConfig, {"train_batch_size": 60, "sgd_minibatch_size": 20, "num_sgd_iter": 2,
                         "standardize_advantages": False,
                         "model": {"use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 7}}),
    "one row": (A2CConfig, {"train_batch_size": 1}),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", ["ppo", *(pytest.param(c, marks=pytest.mark.slow) for c in ("a2c", "lstm", "one row"))]
)
def test_two_learners_are_one(case):
    kind, settings = CASES[case]
    config = small(kind, **settings)
    how = {"num_sgd_iter": config.num_sgd_iter, "sgd_minibatch_size": config.sgd_minibatch_size}
    pairs = both(
        config,
        lambda workers: TrainOneStep(workers, **how),
        lambda workers: MultiGPUTrainOneStep(workers, num_learners=2, **how),
    )
    for one, other, (alone, together) in pairs:
        for (_, a), (_, b) in zip(alone, together, strict=True):
            a, b = a["default_policy"], b["default_policy"]
            assert a["num_agent_steps_trained"] == b["num_agent_steps_trained"]
            for name in ("grad_norm", "kl", "cur_kl_coeff", "entropy"):
                if name in a["learner_stats"] and case != "one row":
                    assert b["learner_stats"][name] == pytest.approx(
                        a["learner_stats"][name], rel=1e-3, abs=1e-6
                    )
        assert one.get_policy().version == other.get_policy().version
        state, same = one.get_policy().get_state(), other.get_policy().get_state()
        (adam,), (other_adam,) = (s["learner"]["optimizers"] for s in (state, same))
        for index, slot in adam.items():  # a checkpoint of either resumes
            np.testing.assert_allclose(other_adam[index]["exp_avg"], slot["exp_avg"], atol=1e-6)


@pytest.mark.slow
def test_three_learners_with_target_networks():
    config = small(DQNConfig, rollout_fragment_length=50, dueling=False, tau=0.3)

    def learned(learn):
        return lambda workers: [learn(workers), UpdateTargetNetwork(workers, 0)]

    pairs = both(
        config,
        learned(TrainOneStep),
        learned(lambda workers: MultiGPUTrainOneStep(workers, num_learners=3)),
    )
    for one, other, _ in pairs:
        mine, theirs = (a.get_policy().get_state()["target"] for a in (one, other))
        for name, weight in mine.items():
            np.testing.assert_allclose(theirs[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_learners_death_is_no_end():
    config = small(train_batch_size=60, num_sgd_iter=2, sgd_minibatch_size=20)
    with config.build() as one, config.build() as other:
        batches = ParallelRollouts(one.workers).take(4)
        ParallelRollouts(other.workers).take(1)
        LocalIterator(batches).for_each(TrainOneStep(one.workers)).take(4)
        operator = MultiGPUTrainOneStep(other.workers, num_learners=2)
        stream = LocalIterator(batches).for_each(operator)
        stream.take(2)
        import ray

        ray.kill(operator.learner._actors[1])
        stream.take(2)
        assert stream.metrics.counters["num_learner_restarts"] == 1
        stream.stop()
        assert_same_weights(one, other)


def test_learners_follow_policies_that_were_restored(tmp_path):
    """Though these have the version that the learners know."""
    with small().build(plan="a2c") as algorithm:
        (batch,) = ParallelRollouts(algorithm.workers).take(1)
        policy = algorithm.workers.local_worker().policy
        other = {name: weight + 1 for name, weight in policy.get_weights().items()}
        step = MultiGPUTrainOneStep(algorithm.workers, num_learners=1, sgd_minibatch_size=0)
        with LocalIterator([batch, batch]).for_each(step) as stream:
            stream.take(1)
            version = policy.version
            policy.set_weights(other)
            policy.version = version
            algorithm.workers.invalidate_weights()
            stream.take(1)
        for name, weight in policy.get_weights().items():
            np.testing.assert_allclose(weight, other[name], atol=0.1)


@pytest.mark.slow
def test_what_learning_raises_comes_from_the_learners():
    with small().build() as algorithm:
        batch = SampleBatch(obs=np.zeros((4, 4), np.float32))
        operator = MultiGPUTrainOneStep(algorithm.workers, num_learners=2)
        stream = LocalIterator([batch]).for_each(operator)
        with stream, pytest.raises(KeyError, match="advantages"):
            next(stream)


@pytest.mark.slow
def test_priorities_of_all_shares_come_back():
    config = small(DQNConfig, rollout_fragment_length=50, dueling=False)
    with config.build(plan="a2c") as algorithm:
        (batch,) = ParallelRollouts(algorithm.workers).take(1)
        drawn = batch.with_columns(batch_indexes=np.arange(50), weights=np.ones(50, np.float32))
        operator = MultiGPUTrainOneStep(algorithm.workers, num_learners=2)
        with LocalIterator([drawn]).for_each(operator) as stream:
            ((_, info),) = stream.take(1)
        rows = info["default_policy"]["rows"]
        assert rows["batch_indexes"].tolist() == list(range(50))
        assert stream.metrics.counters["num_agent_steps_replayed/default_policy"] == 50


@pytest.mark.slow
def test_a_learners_thread_on_actors():
    config = small(train_batch_size=60, sgd_minibatch_size=20)
    with config.build() as one, config.build() as other:
        batches = ParallelRollouts(one.workers).take(3)
        ParallelRollouts(other.workers).take(1)
        step = TrainOneStep(one.workers, num_sgd_iter=2, sgd_minibatch_size=20)
        LocalIterator(batches).for_each(step).take(3)
        how = {"num_sgd_iter": 2, "sgd_minibatch_size": 20}
        learner = LearnerThread(other.workers, num_learners=2, queue_size=3, **how)
        LocalIterator(batches).for_each(Enqueue(learner)).take(3)
        with Dequeue(learner) as stream:
            stream.take(3)
        assert_same_weights(one, other)
        assert "num_learners=2" in stream.explain()


@pytest.mark.parametrize("kind", [IMPALAConfig, APPOConfig])
def test_plans_with_learners_on_actors(kind):
    plan = kind.model_fields["plan"].default
    config = small(
        kind, plan=plan, num_learners=1, rollout_fragment_length=20, train_batch_size=40,
        min_sample_timesteps_per_iteration=80,
    )  # fmt: skip
    with config.build() as algorithm:
        results = [algorithm.train() for _ in range(3)]
    assert np.isfinite(results[-1]["learners"]["default_policy"]["total_loss"])
    assert results[-1]["num_env_steps_trained"] >= 120


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"num_learners": -1}, ValueError, "num_learners must be an int"),
        ({"num_gpus": 1.5}, ValueError, "num_gpus must be an int"),
        ({"num_gpus": 1, "num_learners": 1}, ValueError, "not both"),
        ({"policies": "x"}, TypeError, "policies is a collection"),
    ],
)
@pytest.mark.parametrize("operator", [MultiGPUTrainOneStep, LearnerThread])
def test_bad_numbers(settings, error, said, operator):
    with small().build() as algorithm, pytest.raises(error, match=said):
        operator(algorithm.workers, **settings)


def test_what_the_cluster_has_not_got():
    assert TrainTFMultiGPU is MultiGPUTrainOneStep
    with small().build() as algorithm:
        batches = ParallelRollouts(algorithm.workers).take(1)
        operator = MultiGPUTrainOneStep(algorithm.workers, num_gpus=7)
        with (
            LocalIterator(batches).for_each(operator) as stream,
            pytest.raises(RuntimeError, match=r"7 learners need a GPU each.*has 0 GPUs"),
        ):
            next(stream)
    with small(microbatch_size=5).build() as algorithm:
        batches = ParallelRollouts(algorithm.workers).take(1)
        operator = MultiGPUTrainOneStep(algorithm.workers, num_learners=2)
        with (
            LocalIterator(batches).for_each(operator) as stream,
            pytest.raises(ValueError, match="microbatch_size"),
        ):
            next(stream)


# -- workers that learn ----------------------------------------------------------------------------


def ddppo(**settings):
    base = {"train_batch_size": 120, "sgd_minibatch_size": 20, "num_sgd_iter": 2, "plan": "ddppo"}
    return small(DDPPOConfig, **{**base, "num_workers": 2, "kl_coeff": 0.1, **settings})


def everywhere(algorithm):
    return algorithm.workers.foreach_worker(lambda worker: worker.policy.get_weights())


@pytest.mark.slow
def test_all_workers_have_the_same_weights_after_each_round():
    with ddppo().build() as algorithm:
        before = weights(algorithm)
        for number in range(1, 4):
            result = algorithm.train()
            local, *remote = everywhere(algorithm)
            for one in remote:
                for name, weight in local.items():
                    np.testing.assert_array_equal(one[name], weight)
            assert (
                result["num_env_steps_trained"] == result["num_env_steps_sampled"] == 120 * number
            )
            assert result["num_agent_steps_trained"] == 120 * number
        assert any((weight != before[name]).any() for name, weight in weights(algorithm).items())
        told = result["learners"]["default_policy"]
        assert told["policy_lag_max"] == 0
        assert np.isfinite(told["total_loss"])


@pytest.mark.slow
def test_a_round_is_the_update_of_all_rows():
    """One minibatch of each worker's whole fragment is one update on the rows of both."""
    how = {"sgd_minibatch_size": 60, "num_sgd_iter": 1, "kl_coeff": 0.0, "grad_clip": None}
    with ddppo(**how).build() as algorithm, ddppo(**how).build() as other:
        rows = ParallelRollouts(other.workers, mode="bulk_sync")
        for _ in range(2):
            algorithm.train()
            (batch,) = rows.take(1)
            step = TrainOneStep(other.workers, num_sgd_iter=1, sgd_minibatch_size=0)
            LocalIterator([batch]).for_each(step).take(1)
            assert_same_weights(other, algorithm, atol=2e-6)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_schedules_follow_the_env_steps(num_workers):
    own = ddppo(num_workers=num_workers, lr=[(0, 1e-3), (480, 0.0)])
    with own.build() as algorithm:
        rates = [algorithm.train()["learners"]["default_policy"]["cur_lr"] for _ in range(4)]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def die_after_learning(worker):
    """The worker dies when it has learned, before its answer is sent."""
    worker.policy.end_learning = lambda batch, stats: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.chaos
@pytest.mark.slow
def test_a_worker_that_dies_when_the_others_are_done_is_waited_for_by_them():
    with ddppo(kl_coeff=0.0).build() as algorithm:
        algorithm.train()
        import ray

        first = algorithm.workers.remote_workers()[0]
        ray.get(first.apply.remote(die_after_learning))
        for _ in range(3):
            result = algorithm.train()
        assert result["num_remote_worker_restarts"] == 1
        counters = algorithm.plan.metrics.counters
        assert result["num_env_steps_sampled"] == (
            result["num_env_steps_trained"] + counters["num_env_steps_dropped"]
        )
        local, *remote = everywhere(algorithm)
        for one in remote:
            for name, weight in local.items():
                np.testing.assert_array_equal(one[name], weight)


@pytest.mark.chaos
@pytest.mark.slow
def test_without_recreation_it_ends_with_the_worker():
    with ddppo(recreate_failed_workers=False).build() as algorithm:
        algorithm.train()
        import ray

        ray.kill(algorithm.workers.remote_workers()[1])
        for _ in range(2):
            with pytest.raises(ShardFailedError, match="shard 1"):
                [algorithm.train() for _ in range(3)]


@pytest.mark.slow
def test_uneven_fragments_make_as_many_updates():
    with ddppo(batch_mode="complete_episodes", rollout_fragment_length=30).build() as algorithm:
        for _ in range(3):
            result = algorithm.train()
            versions = algorithm.workers.foreach_worker(lambda worker: worker.policy.version)
            assert len(set(versions)) == 1
        assert result["num_env_steps_trained"] == result["num_env_steps_sampled"]


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint(tmp_path):
    with ddppo().build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        expected = algorithm.train()
        at_end = weights(algorithm)
    with ddppo().build() as algorithm:
        algorithm.restore(tmp_path / "c")
        again = algorithm.train()
        for name, weight in at_end.items():
            np.testing.assert_array_equal(weights(algorithm)[name], weight)
    assert again["num_env_steps_trained"] == expected["num_env_steps_trained"]
    assert again["learners"] == expected["learners"]


class DiesOnce(DefaultCallbacks):
    """Worker 2 dies as it begins its third fragment, once."""

    def on_sample_end(self, *, worker, samples, **kwargs):
        worker.fragments = getattr(worker, "fragments", 0) + 1
        if worker.worker_index == 2 and worker.fragments == 3 and not worker.restart_count:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_dies_is_replaced_and_all_are_alike_again():
    with ddppo(callbacks_class=DiesOnce).build() as algorithm:
        for _ in range(5):
            result = algorithm.train()
        assert result["num_remote_worker_restarts"] == 1
        assert algorithm.plan.metrics.counters["num_group_restarts"] >= 1
        local, *remote = everywhere(algorithm)
        for one in remote:
            for name, weight in local.items():
                np.testing.assert_array_equal(one[name], weight)
        assert result["num_env_steps_trained"] == result["num_env_steps_sampled"] == 5 * 120


def hang_after_learning(worker):
    """The worker never says that it has learned, nor takes part again."""
    worker.policy.end_learning = lambda batch, stats: time.sleep(600)


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_worker_that_hangs_is_not_waited_for_for_ever():
    import ray

    with ddppo(sample_timeout_s=12.0, kl_coeff=0.0).build() as algorithm:
        train = TrainOnWorkers(algorithm.workers, sgd_minibatch_size=20, timeout_s=10.0)
        with train:
            train.take(1)
            first = algorithm.workers.remote_workers()[0]
            ray.get(first.apply.remote(hang_after_learning))
            trained = train.take(3)
            counters = train.metrics.counters
        assert len(trained) == 3
        assert counters["num_shard_restarts"] == 1
        assert counters["num_group_restarts"] >= 1


class DiesAtFirst(DefaultCallbacks):
    """Worker 2 dies as it begins its first fragment, once."""

    def on_sample_end(self, *, worker, samples, **kwargs):
        if worker.worker_index == 2 and not worker.restart_count:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_death_before_the_first_round_costs_the_others_nothing():
    """Whoever is made again comes to the group that waits for it."""
    with ddppo(callbacks_class=DiesAtFirst).build() as algorithm:
        result = algorithm.train()
        counters = algorithm.plan.metrics.counters
        assert result["num_remote_worker_restarts"] == 1
        assert counters["num_group_restarts"] == 0
        assert counters["num_env_steps_dropped"] == 0


class Apart(DefaultCallbacks):
    """Worker 2's weights are changed besides."""

    def on_sample_end(self, *, worker, samples, **kwargs):
        if worker.worker_index == 2:
            policy = worker.policy
            policy.set_weights({n: w + 1 for n, w in policy.get_weights().items()})


@pytest.mark.slow
def test_weights_that_come_apart_are_told():
    with (
        ddppo(callbacks_class=Apart).build() as algorithm,
        pytest.raises(RuntimeError, match="weights differ"),
    ):
        [algorithm.train() for _ in range(2)]


def test_what_cannot_be_done():
    with small(DDPPOConfig, output="x", plan="ddppo").build() as algorithm:
        with pytest.raises(ValueError, match="output: fragments stay"):
            TrainOnWorkers(algorithm.workers)
        with pytest.raises(ValueError, match="num_sgd_iter must be at least 1"):
            TrainOnWorkers(algorithm.workers, num_sgd_iter=0)
    assert DDPPO.config_class is DDPPOConfig
