"""Settings of the asynchronous algorithms reach their operators; whose episodes are reported."""

import pytest

from flowrl.algorithms.a3c import A3CConfig
from flowrl.algorithms.apex import APEXConfig
from flowrl.algorithms.appo import APPOConfig
from flowrl.algorithms.impala import IMPALAConfig
from flowrl.iter import MetricsContext, metrics_scope
from flowrl.iter.stage import walk
from flowrl.ops import CollectMetrics
from flowrl.policies import ConfigError
from flowrl.sampling.episode import EpisodeMetrics


def learner_of(algorithm):
    return next(s.learner for s in walk(algorithm.plan.stage) if getattr(s, "learner", None))


@pytest.mark.parametrize("kind", [IMPALAConfig, APPOConfig])
def test_what_the_plan_is_told(kind):
    config = kind(
        env="CartPole-v1", max_requests_in_flight_per_worker=3, max_policy_lag=7,
        broadcast_interval=5, replay_buffer_num_slots=4, replay_proportion=0.5,
        train_batch_size=90, learner_queue_size=6, minibatch_buffer_size=2, num_sgd_iter=4,
        sgd_minibatch_size=30,
    )  # fmt: skip
    with config.build() as algorithm:
        told, learner = algorithm.plan.explain(), learner_of(algorithm)
    for part in (
        "gather_async(num_async=3)", "BroadcastUpdateLearnerWeights(5)", "MixInReplay(4, 0.5)",
        "ConcatBatches(min_batch_size=90", "Enqueue(maxsize=6)",
    ):  # fmt: skip
        assert part in told
    drops = [s.fn for s in walk(algorithm.plan.stage) if "DropStale" in repr(getattr(s, "fn", 0))]
    assert [drop.max_policy_lag for drop in drops] == [7]
    assert learner.outqueue.maxsize == 6
    assert (learner._minibatches.size, learner._minibatches.num_passes) == (2, 4)
    assert learner.sgd_minibatch_size == 30
    with kind(env="CartPole-v1", num_learners=3).build() as algorithm:
        learners = learner_of(algorithm).learners
        assert (learners.num_learners, learners.gpus) == (3, False)
    with kind(env="CartPole-v1", num_gpus=2).build() as algorithm:
        learners = learner_of(algorithm).learners
        assert (learners.num_learners, learners.gpus) == (2, True)


def test_what_apex_is_told():
    config = APEXConfig(
        env="CartPole-v1", num_workers=7, max_requests_in_flight_per_worker=3,
        max_weight_sync_delay=123, learner_queue_size=5, num_replay_shards=4,
    )  # fmt: skip
    with config.build() as algorithm:
        told = algorithm.plan.explain()
        collect = next(
            s.fn for s in walk(algorithm.plan.stage)
            if isinstance(getattr(s, "fn", None), CollectMetrics)
        )  # fmt: skip
    for part in ("gather_async(num_async=3)", "UpdateWorkerWeights(123)", "Enqueue(maxsize=5)"):
        assert part in told
    assert "num_shards=4" in told
    assert config.replay_actors().colocated
    apart = config.updated(replay_buffer_shards_colocated_with_driver=False)
    assert not apart.replay_actors().colocated
    assert config.greedy_workers() == [5, 6]
    assert collect._selected == [5, 6]
    assert APEXConfig(env="CartPole-v1").greedy_workers() == [0]


def test_a3c_makes_one_gradient_of_a_fragment():
    for settings in ({"num_sgd_iter": 2}, {"sgd_minibatch_size": 8}):
        with pytest.raises(ConfigError, match="A3C makes one gradient of each fragment"):
            A3CConfig(**settings)
    with A3CConfig(env="CartPole-v1", max_policy_lag=3).build() as algorithm:
        fns = [getattr(stage, "fn", None) for stage in walk(algorithm.plan.stage)]
    assert [fn.max_policy_lag for fn in fns if "DropStale" in repr(fn)] == [3]


def test_only_the_chosen_workers_episodes_are_in_the_means():
    with A3CConfig(env="CartPole-v1", num_workers=3).build() as algorithm:
        with metrics_scope(MetricsContext()) as metrics:
            returns = [(0, 10.0), (2, 30.0), (1, 20.0), (2, 50.0)]
            metrics.info["new_episodes"] = [
                (worker, EpisodeMetrics(value, int(value), 0)) for worker, value in returns
            ]
            result = CollectMetrics(algorithm.workers, selected_workers=[2])(None)
        assert result["episode_reward_mean"] == 40
        assert result["episodes_in_window"] == 2
        assert result["episodes_total"] == 4
        with pytest.raises(ValueError, match="there is no worker 3"):
            CollectMetrics(algorithm.workers, selected_workers=[3])
