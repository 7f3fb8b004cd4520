"""PPO and DQN in one plan: separate settings, policies that do not learn, checkpoints, errors."""

import numpy as np
import pytest

from flowrl.algorithms.dqn import DQNConfig
from flowrl.algorithms.ppo import PPOConfig, PPOTorchPolicy
from flowrl.ops import (
    ConcatBatches,
    Concurrently,
    ParallelRollouts,
    Replay,
    SelectExperiences,
    StandardMetricsReporting,
    StoreToReplayBuffer,
    TrainOneStep,
    UpdateReplayPriorities,
    UpdateTargetNetwork,
)
from flowrl.policies import ConfigError, Policy, PolicySpec
from flowrl.trainer.algorithm import Algorithm
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.plan_settings import plan_config

PPO = PPOConfig(train_batch_size=64, sgd_minibatch_size=32, num_sgd_iter=2, gamma=0.9, lr=1e-3)
DQN = DQNConfig(learning_starts=32, replay_buffer_capacity=500, training_intensity=2, lr=2e-3)


class Lean(Policy):
    """A heuristic that pushes the cart in the direction in which the pole leans."""

    def compute_actions(self, obs_batch, explore=True):
        return (obs_batch[:, 2] > 0).astype(np.int64), [], {}


def config_of(policies, mapping, **settings):
    defaults = {
        "plan": "ppo_dqn",
        "env_config": {"num_agents": 4, "episode_steps": 50},
        "min_sample_timesteps_per_iteration": 128,
        "seed": 0,
        **settings,
    }
    return (
        plan_config("ppo_dqn")
        .updated(policies=policies, policy_mapping_fn=mapping, **defaults)
        .updated(num_envs_per_worker=2)
    )


def ppo_and_dqn(**settings):
    policies = {"ppo": PolicySpec(config=PPO), "dqn": PolicySpec(config=DQN)}
    return config_of(policies, plan_config("ppo_dqn").policy_mapping_fn, **settings)


def branches(workers, config):
    """Build the branches of the plan `ppo_dqn`."""
    ppo, dqn = config.for_policy("ppo"), config.for_policy("dqn")
    buffer = dqn.replay_buffer(["dqn"])
    rollouts_for_ppo, rollouts_for_dqn = ParallelRollouts(workers, mode="bulk_sync").duplicate(2)
    train_ppo = (
        rollouts_for_ppo.for_each(SelectExperiences(["ppo"]))
        .combine(ConcatBatches(ppo.train_batch_size, count_steps_by="agent_steps"))
        .for_each(TrainOneStep(workers, policies=["ppo"]))
    )
    store = rollouts_for_dqn.for_each(SelectExperiences(["dqn"])).for_each(
        StoreToReplayBuffer(local_buffer=buffer)
    )
    train_dqn = (
        Replay(local_buffer=buffer)
        .for_each(TrainOneStep(workers, policies=["dqn"]))
        .for_each(UpdateReplayPriorities(local_buffer=buffer))
        .for_each(UpdateTargetNetwork(workers, dqn.target_network_update_freq, policies=["dqn"]))
    )
    return train_ppo, store, train_dqn


def weights(algorithm, policy_id):
    return algorithm.get_policy(policy_id).get_weights()


def changed(before, after):
    return any((before[name] != after[name]).any() for name in before)


def test_each_policy_has_its_own_settings_and_metrics():
    with ppo_and_dqn().build(plan="ppo_dqn") as algorithm:
        result = [algorithm.train() for _ in range(3)][-1]
        for policy_id, config in (("ppo", PPO), ("dqn", DQN)):
            policy_config = algorithm.get_policy(policy_id).config
            assert (policy_config.gamma, policy_config.lr) == (config.gamma, config.lr)
            assert policy_config.seed is not None
        learners = result["learners"]
        assert {"policy_loss", "kl"} <= set(learners["ppo"])
        assert {"mean_q", "mean_td_error"} <= set(learners["dqn"])
        counters = algorithm.plan.metrics.counters
        for policy_id, stats in learners.items():
            trained = counters[f"num_agent_steps_trained/{policy_id}"]
            assert stats["num_agent_steps_trained_lifetime"] == trained
        stored = counters["num_agent_steps_stored/dqn"]
        ratio = learners["dqn"]["num_agent_steps_trained_lifetime"] / (stored - 32)
        assert 1.5 < ratio <= 2
        assert set(result["policy_reward_mean"]) == {"ppo", "dqn"}
        plan = algorithm.plan.explain()
        assert "duplicate" in plan
        assert "SelectExperiences" in plan


def test_checkpoint_contains_both_branches(tmp_path):
    with (
        ppo_and_dqn().build(plan="ppo_dqn") as algorithm,
        ppo_and_dqn(seed=5).build(plan="ppo_dqn") as other,
    ):
        for _ in range(2):
            algorithm.train()
        other.restore(algorithm.save(tmp_path / "c"))
        for policy_id in ("ppo", "dqn"):
            assert not changed(weights(algorithm, policy_id), weights(other, policy_id))
        assert algorithm.plan.metrics.counters == other.plan.metrics.counters
        first, second = algorithm.train(), other.train()
        assert first["timesteps_total"] == second["timesteps_total"]
        for policy_id in ("ppo", "dqn"):
            trained = [
                result["learners"][policy_id]["num_agent_steps_trained_lifetime"]
                for result in (first, second)
            ]
            assert trained[0] == trained[1]


def test_heuristic_policy_needs_no_change_of_the_plan():
    policies = {
        "ppo": PolicySpec(config=PPO),
        "dqn": PolicySpec(config=DQN),
        "lean": PolicySpec(policy_class=Lean),
    }
    names = ("lean", "ppo", "dqn", "dqn")
    config = config_of(policies, lambda agent_id, *args, **kwargs: names[agent_id % 4])
    with config.build(plan="ppo_dqn") as algorithm:
        result = [algorithm.train() for _ in range(3)][-1]
        counters = algorithm.plan.metrics.counters
    assert set(result["learners"]) == {"ppo", "dqn"}
    assert counters["num_agent_steps_sampled/lean"] > 0
    assert result["policy_reward_mean"]["lean"] > 0


class WithFrozen(Algorithm):
    """The plan `ppo_dqn` with an opponent that copies the PPO policy after each of its updates."""

    @staticmethod
    def execution_plan(workers, config):
        train_ppo, store, train_dqn = branches(workers, config)

        def freeze(item):
            policies = workers.local_worker().policy_map
            policies["frozen"].set_weights(policies["ppo"].get_weights())
            return item

        train_ppo = train_ppo.for_each(freeze)
        both = Concurrently([train_ppo, store, train_dqn], mode="async", output_indexes=[0, 2])
        return StandardMetricsReporting(both, workers, config)


@pytest.mark.slow_on_actors
def test_frozen_opponent_does_not_learn(num_workers):
    policies = {
        "ppo": PolicySpec(config=PPO),
        "dqn": PolicySpec(config=DQN),
        "frozen": PolicySpec(policy_class=PPOTorchPolicy, config=PPO),
    }
    names = ("frozen", "ppo", "dqn", "dqn")
    config = config_of(
        policies, lambda agent_id, *args, **kwargs: names[agent_id % 4], num_workers=num_workers
    )
    with WithFrozen(config) as algorithm:
        before = {policy_id: weights(algorithm, policy_id) for policy_id in policies}
        result = [algorithm.train() for _ in range(2)][-1]
        for policy_id in policies:
            assert changed(before[policy_id], weights(algorithm, policy_id))
        assert not changed(weights(algorithm, "ppo"), weights(algorithm, "frozen"))
    assert set(result["learners"]) == {"ppo", "dqn"}


def test_branches_are_inspected_and_pulled_directly(capsys):
    def debug_print(item):
        print("received", type(item).__name__)
        return item

    tapped = []
    algorithm = Algorithm(ppo_and_dqn())
    train_ppo, store, train_dqn = branches(algorithm.workers, algorithm.config)
    train_dqn = train_dqn.tap("trained", tapped.append).for_each(debug_print)
    both = Concurrently([train_ppo, store, train_dqn], mode="async")
    both.take(12)
    assert "received tuple" in capsys.readouterr().out
    assert len(tapped) > 0
    both.stop()
    algorithm.stop()
    algorithm = Algorithm(ppo_and_dqn())
    train_ppo, *_ = branches(algorithm.workers, algorithm.config)
    with pytest.raises(RuntimeError, match="no plan consumes it"):  # the other branch is full
        train_ppo.take(1000)
    algorithm.stop()


def test_mismatch_of_branches_and_policies_is_rejected_before_sampling():

    def plan(workers, config):
        return StandardMetricsReporting(
            ParallelRollouts(workers).for_each(TrainOneStep(workers, policies=["ppo"])),
            workers,
            config,
        )

    def misspelled(workers, config):
        rollouts = ParallelRollouts(workers).for_each(SelectExperiences(["dqm"]))
        return StandardMetricsReporting(rollouts, workers, config)

    for execution_plan, settings, match in [
        (
            plan,
            {"policies_to_train": ["ppo", "dqn"]},
            "policies_to_train names 'dqn', but the plan",
        ),
        (misspelled, {}, r"SelectExperiences.*dqm.*chained at .*test_composition.*no policy 'dqm'"),
    ]:
        kind = type("Custom", (Algorithm,), {"execution_plan": staticmethod(execution_plan)})
        with kind(ppo_and_dqn(**settings)) as algorithm:
            with pytest.raises(ValueError, match=match):
                algorithm.train()
            assert algorithm.workers._local is None
    kind = type("Custom", (Algorithm,), {"execution_plan": staticmethod(plan)})
    with kind(ppo_and_dqn(policies_to_train=["ppo"])) as algorithm:
        assert set(algorithm.train()["learners"]) == {"ppo"}


def test_invalid_compositions_are_rejected():
    with pytest.raises(ConfigError, match="no policy 'dqm'"):
        ppo_and_dqn().for_policy("dqm")
    algorithm = Algorithm(ppo_and_dqn())
    buffer = algorithm.config.for_policy("dqn").replay_buffer(["dqn"])
    unselected = ParallelRollouts(algorithm.workers).for_each(
        StoreToReplayBuffer(local_buffer=buffer)
    )
    with pytest.raises(KeyError, match=r"\['ppo'\] for a replay buffer of \['dqn'\]: select"):
        next(unselected)
    algorithm.stop()
    algorithm = Algorithm(ppo_and_dqn())
    assert not hasattr(AlgorithmConfig(policies=ppo_and_dqn().policies), "replay_buffer")
    buffer = DQN.updated(policies=ppo_and_dqn().policies).replay_buffer(["ppo"])
    rollouts_for_ppo = (
        ParallelRollouts(algorithm.workers)
        .for_each(SelectExperiences(["ppo"]))
        .for_each(StoreToReplayBuffer(local_buffer=buffer))
    )
    with pytest.raises(
        ConfigError, match="'ppo' has a PPOConfig, which does not learn from replay"
    ):
        next(rollouts_for_ppo)
    algorithm.stop()
