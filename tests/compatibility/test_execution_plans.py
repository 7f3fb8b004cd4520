"""The examples of RLlib's documentation of execution plans (docs/reference/compatibility.md)."""

import queue

import numpy as np
import pytest

from flowrl.algorithms.a2c import A2C, A2CConfig, A2CTorchPolicy
from flowrl.algorithms.a3c import A3CConfig
from flowrl.algorithms.dqn import DQNTorchPolicy
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.envs import make_multi_agent
from flowrl.iter import LocalIterator, ParallelIterator
from flowrl.ops import (
    ApplyGradients,
    AsyncGradients,
    ComputeGradients,
    ConcatBatches,
    Concurrently,
    Dequeue,
    MultiGPUTrainOneStep,
    ParallelRollouts,
    Replay,
    ReplayActors,
    SelectExperiences,
    SimpleReplayBuffer,
    StandardizeFields,
    StandardMetricsReporting,
    StoreToReplayBuffer,
    TrainOneStep,
    TrainTFMultiGPU,
    UpdateTargetNetwork,
    _get_shared_metrics,
)
from flowrl.replay import MultiAgentReplayBuffer, ReplayBuffer
from flowrl.sampling import WorkerSet
from flowrl.trainer.algorithm import Algorithm
from flowrl.trainer.config import AlgorithmConfig

SMALL = {"env": "CartPole-v1", "train_batch_size": 40, "rollout_fragment_length": 10, "seed": 0}


def make_workers(**settings):
    config = A2CConfig(**{**SMALL, **settings})
    return WorkerSet("CartPole-v1", A2CTorchPolicy, config)


@pytest.fixture
def workers():
    with make_workers() as worker_set:
        yield worker_set


class CustomTrainer(A2C):
    """The plan is a static method that a subclass overrides."""

    @staticmethod
    def execution_plan(workers, config):
        rollouts = ParallelRollouts(workers, mode="bulk_sync")
        train_op = rollouts.combine(
            ConcatBatches(min_batch_size=config["train_batch_size"])
        ).for_each(TrainOneStep(workers))
        return StandardMetricsReporting(train_op, workers, config)


def test_train_pulls_results_from_the_plan():
    with CustomTrainer(A2CConfig(**SMALL)) as trainer:
        assert isinstance(trainer.plan, LocalIterator)
        results = [trainer.train() for _ in range(2)]
        assert [result["info"]["num_steps_trained"] for result in results] == [40, 80]
        assert next(trainer.plan)["timesteps_total"] == 120  # an infinite stream


def test_nothing_is_computed_before_the_first_result(monkeypatch):
    """The WorkerSet exists before the plan, which only defines operations."""
    monkeypatch.setattr(WorkerSet, "local_worker", lambda self: pytest.fail("created a worker"))
    with CustomTrainer(A2CConfig(**SMALL)) as trainer:
        assert trainer.workers.num_workers == 0
        assert "ParallelRollouts" in trainer.plan.explain()


def test_debug_print_is_inserted_into_the_plan(capsys, workers):
    config = A2CConfig(**SMALL)
    rollouts = ParallelRollouts(workers, mode="bulk_sync")

    def debug_print(item):
        print("I saw", type(item))
        return item

    train_op = (
        rollouts.combine(ConcatBatches(min_batch_size=config["train_batch_size"]))
        .for_each(debug_print)
        .for_each(TrainOneStep(workers))
    )
    assert capsys.readouterr().out == ""
    train_op.take(4)
    expected = "I saw <class 'flowrl.data.sample_batch.SampleBatch'>\n"
    assert capsys.readouterr().out == 4 * expected


def test_operators_are_functions_or_objects_with_state(workers):
    class CountItems:
        def __init__(self):
            self.items = 0

        def __call__(self, item):
            self.items += 1
            return self.items, item

    stream = ParallelRollouts(workers).for_each(CountItems())
    assert [number for number, _ in stream.take(3)] == [1, 2, 3]


# -- experiences -----------------------------------------------------------------------------------


@pytest.mark.slow_on_actors
def test_rollouts_are_synchronous_asynchronous_or_raw(num_workers):
    with make_workers(num_workers=num_workers) as workers:
        with ParallelRollouts(workers, mode="bulk_sync") as rounds:
            assert next(rounds).count == 10 * max(1, num_workers)  # one fragment of every worker
        with ParallelRollouts(workers, mode="async", num_async=2) as fragments:
            assert [batch.count for batch in fragments.take(3)] == [10] * 3
        raw = ParallelRollouts(workers, mode="raw")
        assert isinstance(raw, ParallelIterator)
        assert raw.for_each(lambda batch: batch.count).gather_sync().take(1) == [10]


def test_batches_are_concatenated_and_selected(workers):
    concatenated = ParallelRollouts(workers).combine(ConcatBatches(min_batch_size=35))
    assert next(concatenated).count == 40
    assert concatenated.metrics.timers["sample"].count == 4
    rows = SampleBatch(x=np.arange(4.0))
    batch = MultiAgentBatch({"pol1": rows, "pol2": rows, "pol3": rows}, 4)
    select = SelectExperiences(["pol1", "pol2"])
    assert list(select(batch).policy_batches) == ["pol1", "pol2"]
    assert ConcatBatches(8, count_steps_by="agent_steps")(batch)[0].agent_steps() == 12
    standardized = StandardizeFields(["x"])(rows)["x"]
    assert (standardized.mean(), standardized.std()) == pytest.approx((0, 1), abs=1e-6)


# -- training --------------------------------------------------------------------------------------


def test_training_operators_return_metrics(workers):
    train = ParallelRollouts(workers).for_each(TrainOneStep(workers))
    batch, info = next(train)
    assert isinstance(batch, SampleBatch)
    assert np.isfinite(info["default_policy"]["learner_stats"]["total_loss"])
    assert TrainTFMultiGPU is MultiGPUTrainOneStep
    train = ParallelRollouts(workers).for_each(
        TrainTFMultiGPU(workers, num_gpus=0, num_sgd_iter=2, sgd_minibatch_size=5)
    )
    assert next(train)[1]["default_policy"]["num_agent_steps_trained"] == 10


def test_gradients_are_computed_and_applied_separately(workers):
    policy = workers.local_worker().policy
    before = policy.get_weights()
    compute = ParallelRollouts(workers).for_each(ComputeGradients(workers))
    next(compute)
    for name, weight in policy.get_weights().items():
        np.testing.assert_array_equal(weight, before[name])
    apply = ParallelRollouts(workers).for_each(ComputeGradients(workers))
    next(apply.for_each(ApplyGradients(workers)))
    assert any((weight != before[name]).any() for name, weight in policy.get_weights().items())


class A3C(Algorithm):
    """The asynchronous form of the plan."""

    policy_class, config_class = A2CTorchPolicy, A3CConfig

    @staticmethod
    def execution_plan(workers, config):
        grads = AsyncGradients(workers)
        train_op = grads.for_each(ApplyGradients(workers, update_all=False))
        return StandardMetricsReporting(train_op, workers, config)


@pytest.mark.slow_on_actors
def test_a3c_applies_one_gradient_per_fragment(num_workers):
    config = A3CConfig(
        env="CartPole-v1",
        rollout_fragment_length=10,
        num_workers=num_workers,
        min_sample_timesteps_per_iteration=0,
    )
    with A3C(config) as trainer:
        results = [trainer.train() for _ in range(3)]
        timers = results[-1]["timers"]
        assert results[-1]["info"]["num_steps_trained"] == 30  # one fragment per gradient
        for name in ("grad_wait", "compute_grads", "apply_grad"):
            assert timers[f"{name}_time_ms"] > 0
        assert "update_time_ms" in timers


# -- replay and concurrency ------------------------------------------------------------------------


class WithReplay(A2C):
    """The plan of A2C with store and replay operators."""

    @staticmethod
    def execution_plan(workers, config):
        rollouts = ParallelRollouts(workers, mode="bulk_sync")
        replay_buffer = SimpleReplayBuffer(num_slots=10, seed=0)
        store_op = rollouts.for_each(StoreToReplayBuffer(local_buffer=replay_buffer))
        replay_op = (
            Replay(local_buffer=replay_buffer)
            .combine(ConcatBatches(min_batch_size=config["train_batch_size"]))
            .for_each(TrainOneStep(workers))
        )
        train_op = Concurrently([store_op, replay_op], mode="round_robin", output_indexes=[1])
        return StandardMetricsReporting(train_op, workers, config)


def test_replay_example():
    with WithReplay(A2CConfig(**SMALL, allow_off_policy=True)) as trainer:
        results = [trainer.train() for _ in range(3)]
        assert [result["info"]["num_steps_trained"] for result in results] == [40, 80, 120]
        assert results[-1]["counters"]["num_agent_steps_stored"] > 0


@pytest.mark.slow_on_actors
def test_experiences_are_stored_locally_or_on_actors(num_workers):
    def make_buffer(shard=0):
        return MultiAgentReplayBuffer(
            lambda policy_id: ReplayBuffer(1000, seed=shard), replay_batch_size=8
        )

    where = {"local_buffer": make_buffer()}
    if num_workers:
        where = {"actors": ReplayActors(make_buffer, num_shards=2, batch_rows=8, seed=0)}
    with make_workers(num_workers=num_workers) as workers:
        store = ParallelRollouts(workers).for_each(StoreToReplayBuffer(**where))
        replay = Replay(**where)
        assert next(store).count == next(store).count
        assert [batch.count for batch in replay.take(3)] == [8, 8, 8]
        store.stop()
        replay.stop()


def numbers(name):
    return LocalIterator(lambda: iter(range(100)), name).for_each(lambda i: (name, i))


def test_round_robin_keeps_the_ratio():
    plan = Concurrently([numbers("a"), numbers("b")], mode="round_robin")
    assert [name for name, _ in plan.take(6)] == ["a", "b"] * 3
    plan = Concurrently(
        [numbers("a"), numbers("b")], mode="round_robin", round_robin_weights=[3, 1]
    )
    assert [name for name, _ in plan.take(8)] == ["a", "a", "a", "b"] * 2
    plan = Concurrently([numbers("a"), numbers("b")], output_indexes=[1])
    assert plan.take(3) == [("b", 0), ("b", 1), ("b", 2)]


def test_async_does_not_wait_for_a_branch():
    items = queue.Queue()
    plan = Concurrently([numbers("a"), Dequeue(items)], mode="async")
    assert plan.take(3) == [("a", 0), ("a", 1), ("a", 2)]
    items.put("b")
    assert "b" in plan.take(2)


# -- several agents --------------------------------------------------------------------------------


class TwoTrainers(Algorithm):
    """PPO and DQN train different policies of one environment."""

    @staticmethod
    def execution_plan(workers, config):
        local_replay_buffer = MultiAgentReplayBuffer(
            lambda policy_id: ReplayBuffer(50_000, seed=0),
            learning_starts=100,
            replay_batch_size=64,
        )

        def add_ppo_metrics(batch):
            metrics = _get_shared_metrics()
            metrics.counters["agent_steps_trained_PPO"] += batch.agent_steps()
            return batch

        def add_dqn_metrics(batch):
            metrics = _get_shared_metrics()
            metrics.counters["agent_steps_trained_DQN"] += batch.agent_steps()
            return batch

        rollouts = ParallelRollouts(workers, mode="bulk_sync")
        r1, r2 = rollouts.duplicate(n=2)
        dqn_store_op = r1.for_each(SelectExperiences(["dqn_policy"])).for_each(
            StoreToReplayBuffer(local_buffer=local_replay_buffer)
        )
        dqn_replay_op = (
            Replay(local_buffer=local_replay_buffer)
            .for_each(add_dqn_metrics)
            .for_each(TrainOneStep(workers, policies=["dqn_policy"]))
            .for_each(UpdateTargetNetwork(workers, target_update_freq=500, policies=["dqn_policy"]))
        )
        dqn_train_op = Concurrently(
            [dqn_store_op, dqn_replay_op], mode="round_robin", output_indexes=[1]
        )
        ppo_train_op = (
            r2.for_each(SelectExperiences(["ppo_policy"]))
            .combine(ConcatBatches(min_batch_size=100, count_steps_by="env_steps"))
            .for_each(add_ppo_metrics)
            .for_each(StandardizeFields(["advantages"]))
            .for_each(
                TrainOneStep(
                    workers, policies=["ppo_policy"], num_sgd_iter=10, sgd_minibatch_size=128
                )
            )
        )
        train_op = Concurrently([ppo_train_op, dqn_train_op], mode="async", output_indexes=[1])
        return StandardMetricsReporting(train_op, workers, config)


def test_two_trainer_example():
    config = AlgorithmConfig(
        env=make_multi_agent("CartPole-v1"),
        env_config={"num_agents": 4},
        rollout_fragment_length=50,
        multiagent={
            "policies": {
                "ppo_policy": (PPOTorchPolicy, None, None, {}),
                "dqn_policy": (DQNTorchPolicy, None, None, {"gamma": 0.95}),
            },
            "policy_mapping_fn": lambda agent_id, episode, **kwargs: (
                "ppo_policy" if agent_id % 2 == 0 else "dqn_policy"
            ),
            "policies_to_train": ["ppo_policy", "dqn_policy"],
        },
    )
    with TwoTrainers(config) as trainer:
        for _ in range(4):
            result = trainer.train()
        counters = result["counters"]
        assert counters["agent_steps_trained_DQN"] % 64 == 0
        for name, policy_id in (("PPO", "ppo_policy"), ("DQN", "dqn_policy")):
            trained = counters[f"num_agent_steps_trained/{policy_id}"]
            assert counters[f"agent_steps_trained_{name}"] == trained > 0
        assert set(result["info"]["learner"]) == {"ppo_policy", "dqn_policy"}
