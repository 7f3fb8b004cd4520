"""A custom `training_step` trains like the plan."""

import gc
import weakref

import numpy as np
import pytest

from flowrl.algorithms.a2c import A2C, A2CConfig, A2CTorchPolicy
from flowrl.data import MultiAgentBatch
from flowrl.envs import make_multi_agent
from flowrl.ops import (
    ResultDict,
    multi_gpu_train_one_step,
    synchronous_parallel_sample,
    train_one_step,
)
from flowrl.ops.training_step import MAX_STEPS_WITHOUT_SAMPLES
from flowrl.policies import ConfigError
from flowrl.sampling import WorkerSet
from flowrl.trainer.algorithm import Algorithm
from flowrl.trainer.config import AlgorithmConfig
from tests.comparisons import without_times

SETTINGS = {"env": "CartPole-v1", "rollout_fragment_length": 20, "train_batch_size": 70, "seed": 3}


class CustomStep(A2C):
    def training_step(self) -> ResultDict:
        train_batch = synchronous_parallel_sample(
            worker_set=self.workers, max_env_steps=self.config["train_batch_size"]
        )
        train_results = train_one_step(self, train_batch)
        self.workers.sync_weights()
        return train_results


def weights(algorithm):
    return algorithm.get_policy().get_weights()


def test_worker_set_that_sampled_without_a_plan_is_freed():
    workers = WorkerSet("CartPole-v1", A2CTorchPolicy, {})
    synchronous_parallel_sample(worker_set=workers)
    workers.stop()
    freed = weakref.ref(workers)
    del workers
    gc.collect()
    assert freed() is None


def test_steps_that_are_not_counted_are_reported_once(caplog):
    class Uncounted(CustomStep):
        counts = False

        def training_step(self):
            if self.counts:
                return super().training_step()
            return train_one_step(self, self.workers.local_worker().sample())

    class Counted(Uncounted):
        counts = True

    for algorithm_class in (Uncounted, Counted):
        with algorithm_class(**SETTINGS) as algorithm:
            for _ in range(MAX_STEPS_WITHOUT_SAMPLES + 2):
                algorithm.train()
    (message,) = [text for text in caplog.messages if "no env steps were counted" in text]
    assert message.startswith("Uncounted.training_step() was called 20 times")


@pytest.mark.slow_on_actors
def test_training_step_equals_the_plan(num_workers):
    """Reports and weights of A2C's plan and of the custom step are equal bit for bit."""
    config = A2CConfig(**SETTINGS, num_workers=num_workers)
    runs = []
    for algorithm_class in (A2C, CustomStep):
        with algorithm_class(config.updated(plan="a2c")) as algorithm:
            results = [without_times(algorithm.train()) for _ in range(4)]
            runs.append((results, weights(algorithm)))
    (plan_results, plan_weights), (step_results, step_weights) = runs
    np.testing.assert_equal(plan_results, step_results)
    last = plan_results[-1]
    assert last["num_env_steps_trained"] == last["timesteps_total"]
    assert int(last["timesteps_total"]) >= 4 * 70
    for name in plan_weights:
        np.testing.assert_array_equal(plan_weights[name], step_weights[name])


def test_training_step_is_a_stage_of_the_plan():
    with CustomStep(A2CConfig(**SETTINGS)) as algorithm:
        assert "CustomStep.training_step\n" in algorithm.plan.explain()
        info = algorithm.training_step()  # called directly
        assert set(info["default_policy"]) == {"learner_stats", "num_agent_steps_trained"}
        assert algorithm.plan.metrics.counters["num_env_steps_trained"] >= 70


def test_default_training_step_equals_a2c():
    class Plain(Algorithm):
        policy_class = A2CTorchPolicy

    config = AlgorithmConfig(**SETTINGS)
    with Plain(config) as plain, A2CConfig(**SETTINGS).build() as a2c:
        plain.train()
        a2c.train()
        plain_weights, a2c_weights = weights(plain), weights(a2c)
        for name in plain_weights:
            np.testing.assert_array_equal(plain_weights[name], a2c_weights[name])


def test_run_resumes_from_its_checkpoint(tmp_path):
    config = A2CConfig(**SETTINGS)
    with CustomStep(config) as original:
        original.train()
        original.save(tmp_path / "c")
        original.train()
        expected = original.train()["timesteps_total"]
    with CustomStep(config) as resumed:
        resumed.restore(tmp_path / "c")
        resumed.train()
        assert resumed.train()["timesteps_total"] == expected
        assert resumed.iteration == 3


def test_additional_results_of_training_step_are_in_info():
    class ReportsRows(CustomStep):
        def training_step(self):
            batch = synchronous_parallel_sample(worker_set=self.workers)
            return {"rows": batch.env_steps(), **multi_gpu_train_one_step(self, batch)}

    with ReportsRows(A2CConfig(**SETTINGS)) as algorithm:
        result = algorithm.train()
    assert result["info"]["rows"] == 20
    assert set(result["info"]["learner"]) == {"default_policy"}


@pytest.mark.slow_on_actors
def test_parallel_sample_concatenates_or_lists_fragments(num_workers):
    config = AlgorithmConfig(
        env=make_multi_agent("CartPole-v1"),
        env_config={"num_agents": 2},
        rollout_fragment_length=10,
        num_workers=num_workers,
        policies={"a", "b"},
        policy_mapping_fn=lambda agent_id, *args, **kwargs: "ab"[agent_id],
        seed=0,
    )

    class Two(Algorithm):
        policy_class = A2CTorchPolicy

    with Two(config) as algorithm:
        per_round = 10 * max(1, num_workers)
        workers = algorithm.workers
        batch = synchronous_parallel_sample(worker_set=workers, max_agent_steps=2 * per_round + 1)
        assert isinstance(batch, MultiAgentBatch)
        assert batch.agent_steps() > 2 * per_round
        assert batch.env_steps() % per_round == 0
        batches = synchronous_parallel_sample(worker_set=workers, max_env_steps=25, concat=False)
        num_rounds = 3 if per_round == 10 else 2
        assert [batch.env_steps() for batch in batches] == [per_round] * num_rounds
        info = train_one_step(algorithm, batch, policies_to_train=["b"])
        assert set(info) == {"b"}
        assert info["b"]["num_agent_steps_trained"] == batch["b"].count
        with pytest.raises(KeyError, match="ghost"):
            train_one_step(algorithm, batch, policies_to_train=["ghost"])
        for limits in ({"max_env_steps": 1, "max_agent_steps": 1}, {"max_env_steps": 0}):
            with pytest.raises(ValueError, match="synchronous_parallel_sample"):
                synchronous_parallel_sample(worker_set=workers, **limits)


def test_wrong_return_value_is_rejected_and_the_run_can_continue():
    class ReturnsListOnce(CustomStep):
        returns_list = True

        def training_step(self):
            info = super().training_step()
            if self.returns_list:
                self.returns_list = False
                return list(info)
            return info

    with ReturnsListOnce(A2CConfig(**SETTINGS)) as algorithm:
        with pytest.raises(TypeError, match=r"ListOnce.training_step\(\) must return a dict"):
            algorithm.train()
        assert algorithm.train()["training_iteration"] == 1

    class Both(CustomStep):
        execution_plan = staticmethod(lambda workers, config: None)

    with pytest.raises(ConfigError, match="a training_step and an execution_plan"):
        Both(A2CConfig(**SETTINGS))
