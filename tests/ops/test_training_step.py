"""`training_step` written by hand: the same as a plan."""

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
from flowrl.policies import ConfigError
from flowrl.trainer.algorithm import Algorithm
from flowrl.trainer.config import AlgorithmConfig

SETTINGS = {"env": "CartPole-v1", "rollout_fragment_length": 20, "train_batch_size": 70, "seed": 3}


class ByHand(A2C):
    def training_step(self) -> ResultDict:
        train_batch = synchronous_parallel_sample(
            worker_set=self.workers, max_env_steps=self.config["train_batch_size"]
        )
        train_results = train_one_step(self, train_batch)
        self.workers.sync_weights()
        return train_results


def without_times(result):
    timed = ("timers", "time_this_iter_s", "time_total_s")
    return {name: value for name, value in result.items() if name not in timed}


def weights(algorithm):
    return algorithm.get_policy().get_weights()


@pytest.mark.slow_on_actors
def test_it_is_what_the_plan_does(num_workers):
    """A2C's shipped plan and the same by hand: the same reports and weights, bit for bit."""
    config = A2CConfig(**SETTINGS, num_workers=num_workers)
    told = []
    for make in (A2C, ByHand):
        with make(config.updated(plan="a2c")) as algorithm:
            results = [without_times(algorithm.train()) for _ in range(4)]
            told.append((results, weights(algorithm)))
    (one, own), (two, other) = told
    np.testing.assert_equal(one, two)
    assert one[-1]["num_env_steps_trained"] == one[-1]["timesteps_total"] >= 4 * 70
    for name in own:
        np.testing.assert_array_equal(own[name], other[name])


def test_it_is_part_of_the_plan():
    with ByHand(A2CConfig(**SETTINGS)) as algorithm:
        assert "ByHand.training_step\n" in algorithm.plan.explain()
        told = algorithm.training_step()  # by hand, too
        assert set(told["default_policy"]) == {"learner_stats", "num_agent_steps_trained"}
        assert algorithm.plan.metrics.counters["num_env_steps_trained"] >= 70


def test_an_algorithm_without_a_plan_has_a_step_of_its_own():
    class Plain(Algorithm):
        policy_class = A2CTorchPolicy

    config = AlgorithmConfig(**SETTINGS)
    with Plain(config) as plain, A2CConfig(**SETTINGS).build() as a2c:
        plain.train()
        a2c.train()
        own, other = weights(plain), weights(a2c)
        for name in own:
            np.testing.assert_array_equal(own[name], other[name])


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    config = A2CConfig(**SETTINGS)
    with ByHand(config) as one:
        one.train()
        one.save(tmp_path / "c")
        one.train()
        counted = one.train()["timesteps_total"]
    with ByHand(config) as two:
        two.restore(tmp_path / "c")
        two.train()
        assert two.train()["timesteps_total"] == counted
        assert two.iteration == 3


def test_what_else_it_tells_is_in_info():
    class Telling(ByHand):
        def training_step(self):
            batch = synchronous_parallel_sample(worker_set=self.workers)
            return {"rows": batch.env_steps(), **multi_gpu_train_one_step(self, batch)}

    with Telling(A2CConfig(**SETTINGS)) as algorithm:
        result = algorithm.train()
    assert result["info"]["rows"] == 20
    assert set(result["info"]["learner"]) == {"default_policy"}


@pytest.mark.slow_on_actors
def test_rounds_are_joined_or_listed(num_workers):
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
        each = 10 * max(1, num_workers)
        workers = algorithm.workers
        joined = synchronous_parallel_sample(worker_set=workers, max_agent_steps=2 * each + 1)
        assert isinstance(joined, MultiAgentBatch)
        assert joined.agent_steps() > 2 * each
        assert joined.env_steps() % each == 0
        listed = synchronous_parallel_sample(worker_set=workers, max_env_steps=25, concat=False)
        assert [batch.env_steps() for batch in listed] == [each] * (3 if each == 10 else 2)
        told = train_one_step(algorithm, joined, policies_to_train=["b"])
        assert set(told) == {"b"}
        assert told["b"]["num_agent_steps_trained"] == joined["b"].count
        with pytest.raises(KeyError, match="ghost"):
            train_one_step(algorithm, joined, policies_to_train=["ghost"])
        for limits in ({"max_env_steps": 1, "max_agent_steps": 1}, {"max_env_steps": 0}):
            with pytest.raises(ValueError, match="synchronous_parallel_sample"):
                synchronous_parallel_sample(worker_set=workers, **limits)


def test_mistakes_are_told_and_the_run_can_go_on():
    class Odd(ByHand):
        mistake = True

        def training_step(self):
            told = super().training_step()
            if self.mistake:
                self.mistake = False
                return list(told)
            return told

    with Odd(A2CConfig(**SETTINGS)) as algorithm:
        with pytest.raises(TypeError, match=r"Odd.training_step\(\) must return a dict"):
            algorithm.train()
        assert algorithm.train()["training_iteration"] == 1

    class Both(ByHand):
        execution_plan = staticmethod(lambda workers, config: None)

    with pytest.raises(ConfigError, match="a training_step and an execution_plan"):
        Both(A2CConfig(**SETTINGS))
