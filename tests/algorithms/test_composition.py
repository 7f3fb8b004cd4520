"""PPO and DQN in one plan: each with its own; with policies that do not learn; watched; saved."""

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
from flowrl.trainer.plan_files import load_plan

PPO = PPOConfig(train_batch_size=64, sgd_minibatch_size=32, num_sgd_iter=2, gamma=0.9, lr=1e-3)
DQN = DQNConfig(learning_starts=32, replay_buffer_capacity=500, training_intensity=2, lr=2e-3)


class Lean(Policy):
    """A heuristic: it pushes to where the pole leans."""

    def compute_actions(self, obs_batch, explore=True):
        return (obs_batch[:, 2] > 0).astype(np.int64), [], {}


def config_of(policies, mapping, **settings):
    given = {
        "plan": "ppo_dqn",
        "env_config": {"num_agents": 4, "episode_steps": 50},
        "min_sample_timesteps_per_iteration": 128,
        "seed": 0,
        **settings,
    }
    return (
        load_plan("ppo_dqn")
        .config.updated(policies=policies, policy_mapping_fn=mapping, **given)
        .updated(num_envs_per_worker=2)
    )


def two(**settings):
    policies = {"ppo": PolicySpec(config=PPO), "dqn": PolicySpec(config=DQN)}
    return config_of(policies, load_plan("ppo_dqn").config.policy_mapping_fn, **settings)


def branches(workers, config):
    """The plan `ppo_dqn` up to where its branches are joined."""
    ppo, dqn = config.for_policy("ppo"), config.for_policy("dqn")
    buffer = dqn.replay_buffer(["dqn"])
    for_ppo, for_dqn = ParallelRollouts(workers, mode="bulk_sync").duplicate(2)
    train_ppo = (
        for_ppo.for_each(SelectExperiences(["ppo"]))
        .combine(ConcatBatches(ppo.train_batch_size, count_steps_by="agent_steps"))
        .for_each(TrainOneStep(workers, policies=["ppo"]))
    )
    store = for_dqn.for_each(SelectExperiences(["dqn"])).for_each(
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


def test_each_policy_has_its_own_settings_and_figures():
    with two().build(plan="ppo_dqn") as algorithm:
        result = [algorithm.train() for _ in range(3)][-1]
        for policy_id, config in (("ppo", PPO), ("dqn", DQN)):
            own = algorithm.get_policy(policy_id).config
            assert (own.gamma, own.lr) == (config.gamma, config.lr)
            assert own.seed is not None
        told = result["learners"]
        assert {"policy_loss", "kl"} <= set(told["ppo"])
        assert {"mean_q", "mean_td_error"} <= set(told["dqn"])
        counters = algorithm.plan.metrics.counters
        for policy_id, one in told.items():
            trained = counters[f"num_agent_steps_trained/{policy_id}"]
            assert one["num_agent_steps_trained_lifetime"] == trained
        stored = counters["num_agent_steps_stored/dqn"]
        ratio = told["dqn"]["num_agent_steps_trained_lifetime"] / (stored - 32)
        assert 1.5 < ratio <= 2
        assert set(result["policy_reward_mean"]) == {"ppo", "dqn"}
        plan = algorithm.plan.explain()
        assert "duplicate" in plan
        assert "SelectExperiences" in plan


def test_one_checkpoint_holds_both_branches(tmp_path):
    with two().build(plan="ppo_dqn") as algorithm, two(seed=5).build(plan="ppo_dqn") as other:
        for _ in range(2):
            algorithm.train()
        other.restore(algorithm.save(tmp_path / "c"))
        for policy_id in ("ppo", "dqn"):
            assert not changed(weights(algorithm, policy_id), weights(other, policy_id))
        kept = [a.plan.metrics.counters for a in (algorithm, other)]
        assert kept[0] == kept[1]
        first, second = algorithm.train(), other.train()
        assert first["timesteps_total"] == second["timesteps_total"]
        for policy_id in ("ppo", "dqn"):
            told = [
                r["learners"][policy_id]["num_agent_steps_trained_lifetime"]
                for r in (first, second)
            ]
            assert told[0] == told[1]


def test_a_heuristic_plays_along():
    """Not a line more in the plan: its rows are nobody's."""
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
    """An opponent that is the PPO policy as it was some time ago: four lines more."""

    @staticmethod
    def execution_plan(workers, config):
        train_ppo, store, train_dqn = branches(workers, config)

        def freeze(item):
            own = workers.local_worker().policy_map
            own["frozen"].set_weights(own["ppo"].get_weights())
            return item

        train_ppo = train_ppo.for_each(freeze)
        both = Concurrently([train_ppo, store, train_dqn], mode="async", output_indexes=[0, 2])
        return StandardMetricsReporting(both, workers, config)


@pytest.mark.slow_on_actors
def test_a_frozen_opponent(num_workers):
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


def test_branches_are_watched_and_pulled_by_hand(capsys):
    def debug_print(item):
        print("I saw", type(item).__name__)
        return item

    seen = []
    algorithm = Algorithm(two())
    train_ppo, store, train_dqn = branches(algorithm.workers, algorithm.config)
    train_dqn = train_dqn.tap("trained", seen.append).for_each(debug_print)
    both = Concurrently([train_ppo, store, train_dqn], mode="async")
    both.take(12)
    assert "I saw tuple" in capsys.readouterr().out
    assert len(seen) > 0
    both.stop()
    algorithm.stop()
    algorithm = Algorithm(two())
    train_ppo, *_ = branches(algorithm.workers, algorithm.config)
    with pytest.raises(RuntimeError, match="no plan consumes it"):  # after what the others hold
        train_ppo.take(1000)
    algorithm.stop()


def test_branches_and_policies_belong_together():
    """Known before anything is sampled."""

    def plan(workers, config):
        return StandardMetricsReporting(
            ParallelRollouts(workers).for_each(TrainOneStep(workers, policies=["ppo"])),
            workers,
            config,
        )

    def misspelt(workers, config):
        rollouts = ParallelRollouts(workers).for_each(SelectExperiences(["dqm"]))
        return StandardMetricsReporting(rollouts, workers, config)

    for own, settings, match in [
        (
            plan,
            {"policies_to_train": ["ppo", "dqn"]},
            "policies_to_train names 'dqn', but the plan",
        ),
        (misspelt, {}, r"SelectExperiences.*dqm.*chained at .*test_composition.*no policy 'dqm'"),
    ]:
        kind = type("Own", (Algorithm,), {"execution_plan": staticmethod(own)})
        with kind(two(**settings)) as algorithm:
            with pytest.raises(ValueError, match=match):
                algorithm.train()
            assert algorithm.workers._local is None
    kind = type("Own", (Algorithm,), {"execution_plan": staticmethod(plan)})
    with kind(two(policies_to_train=["ppo"])) as algorithm:
        assert set(algorithm.train()["learners"]) == {"ppo"}


def test_what_cannot_be_composed():
    with pytest.raises(ConfigError, match="no policy 'dqm'"):
        two().for_policy("dqm")
    algorithm = Algorithm(two())
    buffer = algorithm.config.for_policy("dqn").replay_buffer(["dqn"])
    unselected = ParallelRollouts(algorithm.workers).for_each(
        StoreToReplayBuffer(local_buffer=buffer)
    )
    with pytest.raises(KeyError, match=r"\['ppo'\] for a replay buffer of \['dqn'\]: select"):
        next(unselected)
    algorithm.stop()
    algorithm = Algorithm(two())
    own = AlgorithmConfig(policies=two().policies)
    assert not hasattr(own, "replay_buffer")
    buffer = DQN.updated(policies=two().policies).replay_buffer(["ppo"])
    for_ppo = (
        ParallelRollouts(algorithm.workers)
        .for_each(SelectExperiences(["ppo"]))
        .for_each(StoreToReplayBuffer(local_buffer=buffer))
    )
    with pytest.raises(
        ConfigError, match="'ppo' has a PPOConfig, which does not learn from replay"
    ):
        next(for_ppo)
    algorithm.stop()
