"""Learner actors and decentralized training: weights equal those of a single learner."""

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.algorithms.appo import APPOConfig
from flowrl.algorithms.cql import CQLConfig
from flowrl.algorithms.ddppo import DDPPO, DDPPOConfig
from flowrl.algorithms.dqn import DQNConfig
from flowrl.algorithms.impala import IMPALAConfig
from flowrl.algorithms.marwil import MARWILTorchPolicy
from flowrl.algorithms.ppo import PPO, PPOConfig, PPOTorchPolicy
from flowrl.algorithms.sac import SACConfig
from flowrl.algorithms.td3 import TD3Config
from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.envs import make_multi_agent
from flowrl.errors import ConfigError
from flowrl.iter import LocalIterator
from flowrl.iter.errors import ShardFailedError
from flowrl.iter.gather_sync import GatherSync
from flowrl.learners import actors
from flowrl.learners.actors import _merge_shares
from flowrl.learners.decentralized import LearnOnWorker, merge_updates
from flowrl.learners.learner import PolicyUpdate
from flowrl.ops import (
    ConcatBatches,
    Dequeue,
    Enqueue,
    LearnerThread,
    MultiGPUTrainOneStep,
    ParallelRollouts,
    StandardMetricsReporting,
    TrainOneStep,
    TrainOnWorkers,
    TrainTFMultiGPU,
    UpdateTargetNetwork,
)
from flowrl.policies import Policy, PolicySpec
from flowrl.policies.returns import discounted_returns
from flowrl.sampling import DefaultCallbacks
from tests.processes import kill_actor

pytestmark = pytest.mark.usefixtures("ray_session")


def make_config(kind=PPOConfig, **settings):
    base = {"env": "CartPole-v1", "seed": 1, "plan": "a2c", "model": {"fcnet_hiddens": [8]}}
    return kind(**{**base, **settings})


def weights(algorithm):
    return algorithm.workers.local_worker().policy.get_weights()


def assert_same_weights(algorithm, other, atol=1e-6):
    for name, weight in weights(algorithm).items():
        np.testing.assert_allclose(weights(other)[name], weight, atol=atol)


def train_both(config, make_local, make_distributed, count=3):
    """Train two algorithms on the same batches by different operators and compare their weights.

    Yields:
        both algorithms and the items that each of their streams returned.
    """
    with config.build(plan="a2c") as local, config.build(plan="a2c") as distributed:
        batches = ParallelRollouts(local.workers).take(count)
        ParallelRollouts(distributed.workers).take(1)
        items = []
        for algorithm, make in ((local, make_local), (distributed, make_distributed)):
            operators = make(algorithm.workers)
            stream = LocalIterator(batches)
            for operator in operators if isinstance(operators, list) else [operators]:
                stream = stream.for_each(operator)
            with stream:
                items.append(stream.take(count))
        assert_same_weights(local, distributed)
        yield local, distributed, items


CASES = {
    "ppo": (PPOConfig, {"train_batch_size": 103, "sgd_minibatch_size": 25, "num_sgd_iter": 2,
                        "kl_coeff": 0.2, "kl_stop": 10.0}),
    "a2c": (A2CConfig, {"train_batch_size": 37, "standardize_advantages": True}),
    "lstm": (PPOConfig, {"train_batch_size": 60, "sgd_minibatch_size": 20, "num_sgd_iter": 2,
                         "standardize_advantages": False,
                         "model": {"use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 7}}),
    "burn-in": (A2CConfig, {"train_batch_size": 60, "model": {
        "use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 7, "burn_in": 4}}),
    "impala lstm": (IMPALAConfig, {"train_batch_size": 60, "rollout_fragment_length": 60, "model": {
        "use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 7}}),
    "one row": (A2CConfig, {"train_batch_size": 1}),
    "sac": (SACConfig, {"env": "Pendulum-v1", "train_batch_size": 37,
                        "rollout_fragment_length": 37}),
    "sac with a minibatch of one row": (SACConfig, {
        "env": "Pendulum-v1", "train_batch_size": 37, "rollout_fragment_length": 37,
        "sgd_minibatch_size": 12, "num_sgd_iter": 2}),
    "td3": (TD3Config, {"env": "Pendulum-v1", "train_batch_size": 37,
                        "rollout_fragment_length": 37, "numpy_gradients": False}),
    "cql": (CQLConfig, {"env": "Pendulum-v1", "train_batch_size": 37,
                        "rollout_fragment_length": 37, "num_actions": 3}),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", ["ppo", *(pytest.param(c, marks=pytest.mark.slow) for c in list(CASES)[1:])]
)
def test_two_learners_equal_one(case):
    kind, settings = CASES[case]
    config = make_config(kind, **settings)
    passes = {"num_sgd_iter": config.num_sgd_iter, "sgd_minibatch_size": config.sgd_minibatch_size}
    pairs = train_both(
        config,
        lambda workers: TrainOneStep(workers, **passes),
        lambda workers: MultiGPUTrainOneStep(workers, num_learners=2, **passes),
    )
    for local, distributed, (local_items, actor_items) in pairs:
        for (_, a), (_, b) in zip(local_items, actor_items, strict=True):
            a, b = a["default_policy"], b["default_policy"]
            assert a["num_agent_steps_trained"] == b["num_agent_steps_trained"]
            for name in ("grad_norm", "kl", "cur_kl_coeff", "entropy"):
                if name in a["learner_stats"] and "one row" not in case:
                    assert b["learner_stats"][name] == pytest.approx(
                        a["learner_stats"][name], rel=1e-3, abs=1e-6
                    )
        assert local.get_policy().version == distributed.get_policy().version
        states = [algorithm.get_policy().get_state() for algorithm in (local, distributed)]
        (adam,), (other_adam,) = (state["learner"]["optimizers"] for state in states)
        assert states[0]["learner"]["rng"] == states[1]["learner"]["rng"]
        for index, slot in adam.items():  # checkpoints of both resume alike
            np.testing.assert_allclose(other_adam[index]["exp_avg"], slot["exp_avg"], atol=1e-6)


def test_statistics_of_learners_are_weighted_by_their_rows():
    def update(loss, errors):
        return {"p": PolicyUpdate({"loss": loss}, 5, row_stats={"td_error": np.array(errors)})}

    by_learner = [update(1.0, [1.0, 2.0]), update(6.0, [3.0, 4.0, 5.0]), {"p": PolicyUpdate({}, 5)}]
    merged = _merge_shares(by_learner, [{"p": 2}, {"p": 3}, {"p": 0}])["p"]
    assert (merged.stats, merged.rows) == ({"loss": 4.0}, 5)
    assert merged.row_stats["td_error"].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("num_learners", [0, 1])
def test_running_normalization_has_all_sampled_rows(num_learners):
    settings = {"rollout_fragment_length": 50, "sgd_minibatch_size": 50, "seed": 0}
    filters = {"normalize_observations": True, "normalize_rewards": True}
    with PPO("CartPole-v1", **settings, **filters) as algorithm:
        workers, policy = algorithm.workers, algorithm.get_policy()
        train = MultiGPUTrainOneStep(workers, num_sgd_iter=1, num_learners=num_learners)
        with ParallelRollouts(workers).for_each(train) as rounds:
            for number in range(1, 4):
                next(rounds)
                assert policy.observation_filter.stats.count == 50 * number
                assert policy.reward_scaler.stats.count == 50 * number


@pytest.mark.slow
def test_target_networks_follow_updates_of_learners_on_actors():
    config = make_config(
        TD3Config, env="Pendulum-v1", rollout_fragment_length=20, train_batch_size=20
    )
    with config.build(plan="a2c") as algorithm:
        workers, policy = algorithm.workers, algorithm.get_policy()
        train = MultiGPUTrainOneStep(workers, num_learners=2, num_sgd_iter=3)
        with ParallelRollouts(workers).for_each(train) as rounds:
            for number in range(1, 4):
                next(rounds)
                assert policy.learner.num_updates == 3 * number
                assert policy.update_target()


@pytest.mark.slow
def test_three_learners_update_target_networks():
    config = make_config(DQNConfig, rollout_fragment_length=50, dueling=False, tau=0.3)

    def with_target_update(train):
        return lambda workers: [train(workers), UpdateTargetNetwork(workers, 0)]

    pairs = train_both(
        config,
        with_target_update(TrainOneStep),
        with_target_update(lambda workers: MultiGPUTrainOneStep(workers, num_learners=3)),
    )
    for local, distributed, _ in pairs:
        target, other_target = (a.get_policy().get_state()["target"] for a in (local, distributed))
        for name, weight in target.items():
            np.testing.assert_allclose(other_target[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_dead_learner_is_restarted_and_the_update_repeated(tmp_path):
    trigger = tmp_path / "trigger"

    class DiesOncePolicy(PPOTorchPolicy):
        """Kills its process in the first update after the file `trigger` appears."""

        def loss(self, batch):
            with contextlib.suppress(FileNotFoundError):
                trigger.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().loss(batch)

    class DiesOncePPO(PPO):
        policy_class = DiesOncePolicy

    config = make_config(train_batch_size=60, num_sgd_iter=2, sgd_minibatch_size=20)
    with DiesOncePPO(config) as local, DiesOncePPO(config) as distributed:
        batches = ParallelRollouts(local.workers).take(4)
        ParallelRollouts(distributed.workers).take(1)
        LocalIterator(batches).for_each(TrainOneStep(local.workers)).take(4)
        operator = MultiGPUTrainOneStep(distributed.workers, num_learners=2)
        stream = LocalIterator(batches).for_each(operator)
        stream.take(2)
        trigger.touch()
        stream.take(2)
        assert not trigger.exists()
        assert stream.metrics.counters["num_learner_restarts"] == 1
        stream.stop()
        assert_same_weights(local, distributed)


@pytest.mark.slow
def test_learners_receive_weights_set_without_a_new_version():
    with make_config().build(plan="a2c") as algorithm:
        (batch,) = ParallelRollouts(algorithm.workers).take(1)
        policy = algorithm.workers.local_worker().policy
        other = {name: weight + 1 for name, weight in policy.get_weights().items()}
        step = MultiGPUTrainOneStep(algorithm.workers, num_learners=1, sgd_minibatch_size=0)
        with LocalIterator([batch, batch]).for_each(step) as stream:
            stream.take(1)
            version = policy.version
            policy.set_weights(other)
            policy.version = version  # as after a restore
            algorithm.workers.weight_sync.invalidate()
            stream.take(1)
        for name, weight in policy.get_weights().items():
            np.testing.assert_allclose(weight, other[name], atol=0.1)


@pytest.mark.slow
def test_error_of_a_learner_is_raised_in_the_plan():
    with make_config().build() as algorithm:
        batch = SampleBatch(obs=np.zeros((4, 4), np.float32))
        operator = MultiGPUTrainOneStep(algorithm.workers, num_learners=2)
        stream = LocalIterator([batch]).for_each(operator)
        with stream, pytest.raises(KeyError, match="advantages") as caught:
            next(stream)
        assert "in learn_on_batch" in caught.value.__notes__[0]


@pytest.mark.slow
def test_update_that_is_interrupted_is_not_made(monkeypatch):
    """The actors finish it, but its batch counts as lost."""
    config = make_config(train_batch_size=60, num_sgd_iter=2, sgd_minibatch_size=20)
    with config.build(plan="a2c") as local, config.build(plan="a2c") as distributed:
        batches = ParallelRollouts(local.workers).take(3)
        ParallelRollouts(distributed.workers).take(1)
        passes = {"num_sgd_iter": 2, "sgd_minibatch_size": 20}
        step = MultiGPUTrainOneStep(distributed.workers, num_learners=2, **passes)
        get_all = actors._get_all_or_first_error

        def interrupted(refs):
            get_all(refs)
            raise KeyboardInterrupt

        with LocalIterator(batches).for_each(step) as stream:
            stream.take(1)
            monkeypatch.setattr(actors, "_get_all_or_first_error", interrupted)
            with pytest.raises(KeyboardInterrupt):
                stream.take(1)
            monkeypatch.setattr(actors, "_get_all_or_first_error", get_all)
            stream.take(1)
        stream = LocalIterator([batches[0], batches[2]])
        with stream.for_each(TrainOneStep(local.workers, **passes)) as stream:
            stream.take(2)
        assert local.get_policy().version == distributed.get_policy().version
        assert_same_weights(local, distributed)


@pytest.mark.slow
def test_learners_that_are_stopped_while_they_start_are_killed(monkeypatch):
    import ray

    with make_config().build() as algorithm:
        (batch,) = ParallelRollouts(algorithm.workers).take(1)
        group = MultiGPUTrainOneStep(algorithm.workers, num_learners=2).learner
        stopping, killed = threading.Thread(target=group.stop), []
        kill_actors = group._kill_actors

        def stop():
            stopping.start()
            while not group._stopped:
                time.sleep(0.001)

        def note_and_kill():
            killed.extend(group._actors)
            kill_actors()

        monkeypatch.setattr(group, "_check_gpus", stop)
        monkeypatch.setattr(group, "_kill_actors", note_and_kill)
        with pytest.raises(ray.exceptions.RayActorError):
            group.update(batch)
        stopping.join()
        assert group._actors == []
        assert len({repr(actor) for actor in killed}) == 2  # both threads may kill them
        for actor in killed:
            with pytest.raises(ray.exceptions.RayActorError):
                ray.get(actor.set_learning_state.remote({}))


def test_stopped_learners_leave_ray_after_the_running_update(monkeypatch):
    with make_config().build() as algorithm:
        group = MultiGPUTrainOneStep(algorithm.workers, num_learners=2).learner
        group._owns_ray = True
        updating, end_of_update, left = threading.Event(), threading.Event(), []

        def update(batch):
            updating.set()
            assert end_of_update.wait(30)
            left.append("update ended")

        monkeypatch.setattr(group, "_update", update)
        monkeypatch.setattr("flowrl.learners.actors.leave_ray", lambda: left.append("left Ray"))
        thread = threading.Thread(target=group.update, args=(None,))
        thread.start()
        assert updating.wait(30)
        stopping = threading.Thread(target=group.stop)
        stopping.start()
        stopping.join(0.2)
        assert left == []
        end_of_update.set()
        for one in (thread, stopping):
            one.join(30)
        assert left == ["update ended", "left Ray"]


@pytest.mark.slow
def test_checkpoint_is_loaded_while_a_worker_is_dead(tmp_path):
    with ddppo_config(wait_for_replaced_workers=True).build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "checkpoint")
        kill_actor(algorithm.workers.remote_workers()[0])
        algorithm.restore(tmp_path / "checkpoint")
        assert algorithm.train()["training_iteration"] == 2


@pytest.mark.slow
def test_minibatch_of_a_multi_agent_batch_is_reduced_as_in_a_local_learner():
    config = make_config(A2CConfig, train_batch_size=50)
    minibatches = {"num_sgd_iter": 1, "sgd_minibatch_size": 1000}
    with config.build() as algorithm:
        (rows,) = ParallelRollouts(algorithm.workers).take(1)
        batch = MultiAgentBatch({"default_policy": rows}, rows.count)
        for operator in (
            TrainOneStep(algorithm.workers, **minibatches),
            MultiGPUTrainOneStep(algorithm.workers, num_learners=2, **minibatches),
        ):
            with LocalIterator([batch]).for_each(operator) as stream:
                ((_, info),) = stream.take(1)
            assert np.isfinite(info["default_policy"]["learner_stats"]["total_loss"])


@pytest.mark.slow
def test_learners_follow_schedules_as_one_does():
    def train(num_learners):
        def plan(workers, config):
            rollouts = ParallelRollouts(workers, mode="bulk_sync")
            step = MultiGPUTrainOneStep(workers, num_learners=num_learners)
            train = rollouts.combine(ConcatBatches(config.train_batch_size)).for_each(step)
            return StandardMetricsReporting(train, workers, config)

        config = make_config(A2CConfig, train_batch_size=60, lr=[(0, 1e-3), (400, 0.0)])
        with config.build(plan=plan) as algorithm:
            results = [algorithm.train() for _ in range(4)]
        return [result["learners"]["default_policy"]["cur_lr"] for result in results]

    rates = train(0)
    assert rates == sorted(rates, reverse=True) != rates[::-1]
    assert train(2) == rates


@pytest.mark.slow
def test_learners_return_the_rows_of_the_whole_batch():
    config = make_config(DQNConfig, rollout_fragment_length=50, dueling=False)
    with config.build(plan="a2c") as algorithm:
        (batch,) = ParallelRollouts(algorithm.workers).take(1)
        replayed = batch.with_columns(batch_indexes=np.arange(50), weights=np.ones(50, np.float32))
        operator = MultiGPUTrainOneStep(algorithm.workers, num_learners=2)
        with LocalIterator([replayed]).for_each(operator) as stream:
            ((_, info),) = stream.take(1)
        rows = info["default_policy"]["row_stats"]
        assert rows["batch_indexes"].tolist() == list(range(50))
        assert stream.metrics.counters["num_agent_steps_replayed/default_policy"] == 50


@pytest.mark.slow
def test_learner_thread_updates_on_actors():
    config = make_config(train_batch_size=60, sgd_minibatch_size=20)
    with config.build() as local, config.build() as distributed:
        batches = ParallelRollouts(local.workers).take(3)
        ParallelRollouts(distributed.workers).take(1)
        passes = {"num_sgd_iter": 2, "sgd_minibatch_size": 20}
        LocalIterator(batches).for_each(TrainOneStep(local.workers, **passes)).take(3)
        learner = LearnerThread(distributed.workers, num_learners=2, queue_size=3, **passes)
        LocalIterator(batches).for_each(Enqueue(learner)).take(3)
        with Dequeue(learner) as stream:
            stream.take(3)
        assert_same_weights(local, distributed)
        assert "num_learners=2" in stream.explain()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [IMPALAConfig, APPOConfig])
def test_asynchronous_plans_train_with_learner_actors(kind):
    plan = kind.model_fields["plan"].default
    config = make_config(
        kind, plan=plan, num_learners=1, rollout_fragment_length=20, train_batch_size=40,
        min_sample_timesteps_per_iteration=80,
    )  # fmt: skip
    with config.build() as algorithm:
        results = [algorithm.train() for _ in range(3)]
    assert np.isfinite(results[-1]["learners"]["default_policy"]["total_loss"])
    assert results[-1]["num_env_steps_trained"] >= 120


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"num_learners": -1}, ValueError, "num_learners must be an int"),
        ({"num_gpus": 1.5}, ValueError, "num_gpus must be an int"),
        ({"num_gpus": 1, "num_learners": 1}, ValueError, "not both"),
        ({"policies": "x"}, TypeError, "policies must be a collection"),
    ],
)
@pytest.mark.parametrize("operator", [MultiGPUTrainOneStep, LearnerThread])
def test_invalid_arguments_are_rejected(settings, error, message, operator):
    with make_config().build() as algorithm, pytest.raises(error, match=message):
        operator(algorithm.workers, **settings)


def test_missing_gpus_and_microbatches_are_rejected():
    assert TrainTFMultiGPU is MultiGPUTrainOneStep
    with make_config().build() as algorithm:
        batches = ParallelRollouts(algorithm.workers).take(1)
        operator = MultiGPUTrainOneStep(algorithm.workers, num_gpus=7)
        with (
            LocalIterator(batches).for_each(operator) as stream,
            pytest.raises(RuntimeError, match=r"num_gpus=7: each learner needs a GPU.*has 0 GPUs"),
        ):
            next(stream)
    with make_config(microbatch_size=5).build() as algorithm:
        batches = ParallelRollouts(algorithm.workers).take(1)
        operator = MultiGPUTrainOneStep(algorithm.workers, num_learners=2)
        with (
            LocalIterator(batches).for_each(operator) as stream,
            pytest.raises(ValueError, match="microbatch_size"),
        ):
            next(stream)


def test_a_learner_thread_finds_missing_gpus_before_sampling():
    with IMPALAConfig(env="CartPole-v1", num_gpus=7).build() as algorithm:
        with pytest.raises(RuntimeError, match=r"num_gpus=7: each learner needs a GPU.*has 0 GPUs"):
            algorithm.train()
        assert algorithm.workers.local_worker().reply_tags() == {}


# -- decentralized training ------------------------------------------------------------------------


def ddppo_config(**settings):
    base = {
        "train_batch_size": 120,
        "sgd_minibatch_size": 20,
        "num_sgd_iter": 2,
        "plan": "ddppo",
    }
    return make_config(DDPPOConfig, **{**base, "num_workers": 2, "kl_coeff": 0.1, **settings})


def weights_of_workers(algorithm):
    return algorithm.workers.foreach_worker(lambda worker: worker.policy.get_weights())


@pytest.mark.slow
def test_workers_have_the_same_weights_after_each_round():
    with ddppo_config().build() as algorithm:
        before = weights(algorithm)
        for number in range(1, 4):
            result = algorithm.train()
            local, *remote = weights_of_workers(algorithm)
            for remote_weights in remote:
                for name, weight in local.items():
                    np.testing.assert_array_equal(remote_weights[name], weight)
            assert (
                result["num_env_steps_trained"] == result["num_env_steps_sampled"] == 120 * number
            )
            assert result["num_agent_steps_trained"] == 120 * number
        assert any((weight != before[name]).any() for name, weight in weights(algorithm).items())
        stats = result["learners"]["default_policy"]
        assert stats["policy_lag_max"] == 0
        assert np.isfinite(stats["total_loss"])


@pytest.mark.slow
def test_round_equals_one_update_on_the_rows_of_all_workers():
    """Here each worker's minibatch is its whole fragment."""
    settings = {"sgd_minibatch_size": 60, "num_sgd_iter": 1, "kl_coeff": 0.0, "grad_clip": None}
    config = ddppo_config(**settings)
    with config.build() as algorithm, config.build() as other:
        rows = ParallelRollouts(other.workers, mode="bulk_sync")
        for _ in range(2):
            algorithm.train()
            (batch,) = rows.take(1)
            step = TrainOneStep(other.workers, num_sgd_iter=1, sgd_minibatch_size=0)
            LocalIterator([batch]).for_each(step).take(1)
            assert_same_weights(other, algorithm, atol=2e-6)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_schedules_follow_env_steps(num_workers):
    config = ddppo_config(num_workers=num_workers, lr=[(0, 1e-3), (480, 0.0)])
    with config.build() as algorithm:
        rates = [algorithm.train()["learners"]["default_policy"]["cur_lr"] for _ in range(4)]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def die_after_learning(worker):
    """Make a worker die after its update, before it returns the result."""
    worker.policy.end_learning = lambda batch, stats: os.kill(os.getpid(), signal.SIGKILL)


def train_until_all_workers_learn(algorithm):
    """Train until a worker was replaced and a round has updates of all workers."""
    rounds = algorithm.plan.stage
    while not isinstance(rounds, GatherSync):
        (rounds,) = rounds.parents
    result = algorithm.train()
    while not result["num_remote_worker_restarts"] or (
        len(rounds.sources) < algorithm.workers.num_workers
    ):
        result = algorithm.train()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("index", [0, 1])
def test_group_survives_a_worker_that_dies_after_the_update(index, waits):
    config = ddppo_config(kl_coeff=0.0, wait_for_replaced_workers=waits)
    with config.build() as algorithm:
        algorithm.train()
        import ray

        dying = algorithm.workers.remote_workers()[index]
        ray.get(dying.apply.remote(die_after_learning))
        result = train_until_all_workers_learn(algorithm)
        assert result["num_remote_worker_restarts"] == 1
        counters = algorithm.plan.metrics.counters
        assert result["num_env_steps_sampled"] == (
            result["num_env_steps_trained"] + counters["num_env_steps_dropped"]
        )
        local, *remote = weights_of_workers(algorithm)
        for remote_weights in remote:
            for name, weight in local.items():
                np.testing.assert_array_equal(remote_weights[name], weight)


@pytest.mark.slow
def test_dead_worker_ends_training_without_recreation():
    with ddppo_config(recreate_failed_workers=False).build() as algorithm:
        algorithm.train()
        import ray

        ray.kill(algorithm.workers.remote_workers()[1])
        for _ in range(2):
            with pytest.raises(ShardFailedError, match="shard 1"):
                [algorithm.train() for _ in range(3)]


@pytest.mark.slow
def test_workers_with_uneven_fragments_make_equally_many_updates():
    with ddppo_config(
        batch_mode="complete_episodes", rollout_fragment_length=30
    ).build() as algorithm:
        for _ in range(3):
            result = algorithm.train()
            versions = algorithm.workers.foreach_worker(lambda worker: worker.policy.version)
            assert len(set(versions)) == 1
        assert result["num_env_steps_trained"] == result["num_env_steps_sampled"]


@pytest.mark.slow
def test_workers_without_rows_of_a_policy_take_part_in_its_updates():
    def policy_of(agent_id, episode=None, worker=None, **kwargs):
        return "a" if worker.worker_index == 1 else ("b", "c")[agent_id % 2]

    config = ddppo_config(
        env=make_multi_agent("CartPole-v1"),
        env_config={"num_agents": 2},
        policies={"a": PolicySpec(), "b": PolicySpec(), "c": PolicySpec()},
        policy_mapping_fn=policy_of,
        kl_stop=10.0,
    )
    with config.build() as algorithm:
        before = {
            pid: p.get_weights() for pid, p in algorithm.workers.local_worker().policy_map.items()
        }
        for _ in range(2):
            result = algorithm.train()
        assert set(result["learners"]) == {"a", "b", "c"}
        assert "num_group_restarts" not in result["counters"]
        counters = result["counters"]
        for policy_id, policy in algorithm.workers.local_worker().policy_map.items():
            trained = counters[f"num_agent_steps_trained/{policy_id}"]
            assert trained == counters[f"num_agent_steps_sampled/{policy_id}"] > 0
            assert any(
                (weight != before[policy_id][name]).any()
                for name, weight in policy.get_weights().items()
            )


class OnlineMARWIL(MARWILTorchPolicy):
    """Computes the returns that recorded data have."""

    def postprocess_fragment(self, fragment):
        last = np.zeros(fragment["rewards"].shape[1])
        returns = discounted_returns(fragment["rewards"], fragment["dones"], last, 0.99)
        return {"value_targets": returns.astype(np.float32)}


@pytest.mark.slow
def test_workers_without_rows_take_part_in_updates_of_marwil():
    def policy_of(agent_id, episode=None, worker=None, **kwargs):
        return "a" if worker.worker_index == 1 else ("b", "c")[agent_id % 2]

    config = ddppo_config(
        env=make_multi_agent("CartPole-v1"),
        env_config={"num_agents": 2},
        policies={policy_id: PolicySpec(OnlineMARWIL) for policy_id in "abc"},
        policy_mapping_fn=policy_of,
    )
    with config.build() as algorithm:
        result = algorithm.train()
        assert "num_group_restarts" not in result["counters"]
        assert set(result["learners"]) == {"a", "b", "c"}


def test_statistics_of_workers_are_means_over_rows():
    first = {"a": PolicyUpdate({"kl": 1.0, "cur_lr": 0.1}, rows=30, policy_lags=[0])}
    second = {
        "a": PolicyUpdate({"kl": 3.0, "cur_lr": 0.1}, rows=10, policy_lags=[2]),
        "b": PolicyUpdate({"kl": 5.0}, rows=7),
    }
    merged = merge_updates([first, second])
    assert merged["a"].stats["kl"] == pytest.approx(1.5)
    assert merged["a"].stats["cur_lr"] == 0.1
    assert (merged["a"].rows, merged["a"].policy_lags) == (40, [0, 2])
    assert (merged["b"].stats, merged["b"].rows) == ({"kl": 5.0}, 7)


@pytest.mark.slow
@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
def test_decentralized_training_resumes_from_a_checkpoint(batch_mode, tmp_path):
    config = ddppo_config(batch_mode=batch_mode)  # whole episodes: workers have unequal numbers
    with config.build() as algorithm:
        for _ in range(2):
            algorithm.train()
        algorithm.save(tmp_path / "c")
        expected = algorithm.train()
        expected_weights = weights(algorithm)
    with config.build() as algorithm:
        algorithm.restore(tmp_path / "c")
        result = algorithm.train()
        for name, weight in expected_weights.items():
            np.testing.assert_array_equal(weights(algorithm)[name], weight)
    assert result["num_env_steps_trained"] == expected["num_env_steps_trained"]
    assert result["learners"] == expected["learners"]


class DiesOnce(DefaultCallbacks):
    """Worker 2 dies once, at the end of its third fragment."""

    def on_sample_end(self, *, worker, samples, **kwargs):
        worker.fragments = getattr(worker, "fragments", 0) + 1
        if worker.worker_index == 2 and worker.fragments == 3 and not worker.restart_count:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("waits", [True, False])
def test_replaced_worker_gets_the_weights_of_the_group(waits):
    config = ddppo_config(callbacks_class=DiesOnce, wait_for_replaced_workers=waits)
    with config.build() as algorithm:
        result = train_until_all_workers_learn(algorithm)
        assert result["num_remote_worker_restarts"] == 1
        assert algorithm.plan.metrics.counters["num_group_restarts"] >= 1
        local, *remote = weights_of_workers(algorithm)
        for remote_weights in remote:
            for name, weight in local.items():
                np.testing.assert_array_equal(remote_weights[name], weight)
        trained, sampled = result["num_env_steps_trained"], result["num_env_steps_sampled"]
        assert trained == sampled - algorithm.plan.metrics.counters["num_env_steps_dropped"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_group_continues_without_dead_workers():
    """Kill all workers but one, then that one, while the others start again."""
    import ray

    with ddppo_config(num_workers=3).build() as algorithm:
        algorithm.train()
        first, *others = algorithm.workers.remote_workers()
        for worker in others:
            ray.kill(worker)
        before = algorithm.env_steps
        result = algorithm.train()
        assert result["num_env_steps_sampled"] == before + 40  # of the remaining worker
        ray.kill(first)
        result = train_until_all_workers_learn(algorithm)
        assert result["num_remote_worker_restarts"] == 3
        weights_by_worker = weights_of_workers(algorithm)
        for name, weight in weights_by_worker[0].items():
            for remote_weights in weights_by_worker[1:]:
                np.testing.assert_array_equal(remote_weights[name], weight)


def hang_after_learning(worker):
    """Make a worker hang at the end of its update."""
    worker.policy.end_learning = lambda batch, stats: time.sleep(600)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_hanging_worker_is_replaced_after_the_timeout():
    import ray

    with ddppo_config(sample_timeout_s=12.0, kl_coeff=0.0).build() as algorithm:
        train = TrainOnWorkers(algorithm.workers, sgd_minibatch_size=20, timeout_s=10.0)
        with train:
            train.take(1)
            first = algorithm.workers.remote_workers()[0]
            ray.get(first.apply.remote(hang_after_learning))
            items = train.take(3)
            counters = train.metrics.counters
        assert len(items) == 3
        assert counters["num_shard_restarts"] == 1
        assert counters["num_group_restarts"] >= 1


class HangsOnce(DefaultCallbacks):
    """Worker 2 hangs once, at the end of its third fragment."""

    fragments = 0

    def on_sample_end(self, *, worker, samples, **kwargs):
        self.fragments += 1
        if worker.worker_index == 2 and not worker.restart_count and self.fragments == 3:
            time.sleep(600)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_workers_that_wait_for_a_hanging_one_are_not_replaced():
    config = ddppo_config(num_workers=3, sample_timeout_s=8.0, callbacks_class=HangsOnce)
    with config.build() as algorithm:
        train_until_all_workers_learn(algorithm)
        assert algorithm.workers.restart_counts == [0, 1, 0]


class DiesInFirstFragment(DefaultCallbacks):
    """Worker 2 dies once, at the end of its first fragment."""

    def on_sample_end(self, *, worker, samples, **kwargs):
        if worker.worker_index == 2 and not worker.restart_count:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_worker_that_dies_before_the_first_round_joins_after_its_restart():
    """The other workers wait for it and lose no steps."""
    config = ddppo_config(callbacks_class=DiesInFirstFragment, wait_for_replaced_workers=True)
    with config.build() as algorithm:
        result = algorithm.train()
        counters = algorithm.plan.metrics.counters
        assert result["num_remote_worker_restarts"] == 1
        assert counters["num_group_restarts"] == 0
        assert counters["num_env_steps_dropped"] == 0


class ChangesItsWeights(DefaultCallbacks):
    """Changes the weights of worker 2 outside of the update."""

    def on_sample_end(self, *, worker, samples, **kwargs):
        if worker.worker_index == 2:
            policy = worker.policy
            policy.set_weights({n: w + 1 for n, w in policy.get_weights().items()})


@pytest.mark.slow
def test_different_weights_of_workers_are_an_error():
    with (
        ddppo_config(callbacks_class=ChangesItsWeights).build() as algorithm,
        pytest.raises(RuntimeError, match="weights differ"),
    ):
        [algorithm.train() for _ in range(2)]


def test_unsupported_decentralized_settings_are_rejected():
    with make_config(DDPPOConfig, output="x", plan="ddppo").build() as algorithm:
        with pytest.raises(ValueError, match="output: TrainOnWorkers keeps fragments"):
            TrainOnWorkers(algorithm.workers)
        with pytest.raises(ValueError, match="num_sgd_iter must be an int of at least 1"):
            TrainOnWorkers(algorithm.workers, num_sgd_iter=0)
    assert DDPPO.config_class is DDPPOConfig


class Scripted(Policy):
    """Has no network, so it cannot learn in several processes."""

    def compute_actions(self, obs_batch, explore=True):
        return np.zeros(len(obs_batch), np.int64), [], {}


@pytest.mark.slow
def test_scripted_opponent_does_not_keep_others_from_learning_on_actors():
    policies = {"learns": PolicySpec(), "scripted": PolicySpec(Scripted)}
    settings = {
        "env": make_multi_agent("CartPole-v1"),
        "env_config": {"num_agents": 2},
        "policies": policies,
        "policy_mapping_fn": lambda agent_id, **kwargs: sorted(policies)[agent_id % 2],
    }
    with make_config(A2CConfig, rollout_fragment_length=8, **settings).build() as algorithm:
        workers = algorithm.workers
        step = MultiGPUTrainOneStep(workers, num_learners=1, policies=["learns"])
        _, info = next(ParallelRollouts(workers).for_each(step))
        step.stop()
    assert set(info) == {"learns"}
    with ddppo_config(**settings, policies_to_train=["learns"]).build() as algorithm:
        assert set(algorithm.train()["learners"]) == {"learns"}


def test_minibatches_of_ddppo_fit_the_fragment_of_a_worker():
    settings = {"env": "CartPole-v1", "num_workers": 2, "train_batch_size": 200}
    whole = {**settings, "batch_mode": "complete_episodes"}
    with pytest.raises(ConfigError, match="sgd_minibatch_size"):
        DDPPOConfig(**whole, sgd_minibatch_size=128).check()
    DDPPOConfig(**whole, sgd_minibatch_size=64).check()
    with ddppo_config(
        num_workers=0, rollout_fragment_length=32, sgd_minibatch_size=32
    ).build() as a:
        worker = a.workers.local_worker()
        learn = LearnOnWorker(1, 32, None, a.workers.global_vars).bound_to(worker)
        (update,) = learn(worker.sample()[:20]).updates.values()
    assert update.rows == 20
