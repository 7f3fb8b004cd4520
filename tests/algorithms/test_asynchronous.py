"""Asynchronous algorithms: settings reach their operators, staleness, reported episodes."""

import contextlib
import time

import gymnasium
import pytest

from flowrl.algorithms.a3c import A3CConfig
from flowrl.algorithms.apex import APEXConfig
from flowrl.algorithms.appo import APPOConfig
from flowrl.algorithms.ddppo import DDPPOConfig
from flowrl.algorithms.dqn import DQNConfig
from flowrl.algorithms.impala import IMPALAConfig
from flowrl.envs import make_multi_agent
from flowrl.iter import MetricsContext, metrics_scope
from flowrl.iter.stage import walk
from flowrl.ops import (
    AsyncGradients,
    CollectMetrics,
    ConcatBatches,
    MixInReplay,
    ParallelRollouts,
    StalenessLimit,
    TrainOneStep,
)
from flowrl.ops.plan_metrics import PlanMetrics
from flowrl.policies import ConfigError
from flowrl.sampling.episode import EpisodeMetrics
from tests.learner_threads import learner_of


@pytest.mark.parametrize("kind", [IMPALAConfig, APPOConfig])
def test_replay_has_the_seed_of_the_config(kind):
    config = kind(
        env="CartPole-v1", train_batch_size=8, replay_proportion=2.0, replay_buffer_num_slots=8
    )

    def draws(seed):
        with config.updated(seed=seed).build() as algorithm:
            stages = walk(algorithm.plan.stage)
            (mix,) = [s.fn for s in stages if isinstance(getattr(s, "fn", None), MixInReplay)]
            return mix.buffer.rng.random(4).tolist()

    assert draws(1) == draws(1) != draws(2)


@pytest.mark.parametrize("kind", [IMPALAConfig, APPOConfig])
def test_settings_reach_the_plan(kind):
    config = kind(
        env="CartPole-v1", max_requests_in_flight_per_worker=3, max_policy_lag=7,
        broadcast_interval=5, replay_buffer_num_slots=4, replay_proportion=0.5,
        train_batch_size=90, learner_queue_size=6, minibatch_buffer_size=2, num_sgd_iter=4,
        sgd_minibatch_size=30,
    )  # fmt: skip
    with config.build() as algorithm:
        explanation, learner = algorithm.plan.explain(), learner_of(algorithm)
    for part in (
        "gather_async(num_async=3)", "BroadcastUpdateLearnerWeights(5)", "MixInReplay(4, 0.5)",
        "ConcatBatches(min_batch_size=90", "Enqueue(maxsize=6)",
    ):  # fmt: skip
        assert part in explanation
    drops = [s.fn for s in walk(algorithm.plan.stage) if "DropStale" in repr(getattr(s, "fn", 0))]
    assert [drop.max_policy_lag for drop in drops] == [7]
    assert learner.outqueue.maxsize == 6
    assert (learner._minibatches.size, learner._minibatches.num_passes) == (2, 4)
    assert learner.learner.sgd_minibatch_size == 30
    with kind(env="CartPole-v1", num_learners=3).build() as algorithm:
        learners = learner_of(algorithm).learner
        assert (learners.num_learners, learners.use_gpus) == (3, False)
    with kind(env="CartPole-v1", num_gpus=2).build() as algorithm:
        learners = learner_of(algorithm).learner
        assert (learners.num_learners, learners.use_gpus) == (2, True)


def test_apex_inherits_the_defaults_of_dqn():
    redefined = set(vars(APEXConfig)["__annotations__"]) | {"algorithm"}
    apex, dqn = APEXConfig().to_dict(), DQNConfig().to_dict()
    inherited = set(apex) & set(dqn) - redefined
    assert {"lr", "grad_clip", "min_sample_timesteps_per_iteration"} <= inherited
    assert {name: apex[name] for name in inherited} == {name: dqn[name] for name in inherited}
    assert (apex["learner_queue_size"], apex["grad_clip"]) == (4, 10.0)


def test_apex_settings_reach_the_plan():
    config = APEXConfig(
        env="CartPole-v1", num_workers=7, max_requests_in_flight_per_worker=3,
        max_weight_sync_delay=123, learner_queue_size=5, num_replay_shards=4,
    )  # fmt: skip
    with config.build() as algorithm:
        explanation = algorithm.plan.explain()
        collect = next(
            s.fn for s in walk(algorithm.plan.stage)
            if isinstance(getattr(s, "fn", None), CollectMetrics)
        )  # fmt: skip
    for part in ("gather_async(num_async=3)", "UpdateWorkerWeights(123)", "Enqueue(maxsize=5)"):
        assert part in explanation
    assert "num_shards=4" in explanation
    assert config.replay_actors().colocated
    distributed = config.updated(replay_buffer_shards_colocated_with_driver=False)
    assert not distributed.replay_actors().colocated
    assert collect._selected_workers() == range(5, 7)
    assert config.greedy_workers(1) == range(1)
    equal = config.updated(exploration_config={"type": "EpsilonGreedy"})
    assert equal.greedy_workers(7) is None
    assert config.updated(exploration_config={"epsilon_exponent": 0}).greedy_workers(7) is None
    assert config.updated(noisy=True).greedy_workers(7) is None


def test_a3c_rejects_sgd_settings_and_drops_stale_gradients():
    for settings in ({"num_sgd_iter": 2}, {"sgd_minibatch_size": 8}):
        with pytest.raises(ConfigError, match="A3C computes one gradient per fragment"):
            A3CConfig(**settings)
    with A3CConfig(env="CartPole-v1", max_policy_lag=3).build() as algorithm:
        fns = [getattr(stage, "fn", None) for stage in walk(algorithm.plan.stage)]
    assert [fn.max_policy_lag for fn in fns if "DropStale" in repr(fn)] == [3]


def test_reported_means_cover_only_the_selected_workers():
    with A3CConfig(env="CartPole-v1", num_workers=3).build() as algorithm:
        with metrics_scope(MetricsContext()) as metrics:
            returns = [(0, 10.0), (2, 30.0), (1, 20.0), (2, 50.0)]
            for worker, value in returns:
                PlanMetrics.of(metrics).add_episodes(worker, [EpisodeMetrics(value, int(value), 0)])
            result = CollectMetrics(algorithm.workers, selected_workers=[2])(None)
        assert result["episode_reward_mean"] == 40
        assert result["episodes_in_window"] == 2
        assert result["episodes_total"] == 4
        with pytest.raises(ValueError, match="there is no worker 3"):
            CollectMetrics(algorithm.workers, selected_workers=[3])


def test_selected_workers_follow_the_number_of_workers():
    config = APEXConfig(env="CartPole-v1", num_workers=6)
    with config.build() as algorithm, metrics_scope(MetricsContext()) as metrics:
        collect = CollectMetrics(algorithm.workers, selected_workers=config.greedy_workers)
        add_episodes = PlanMetrics.of(metrics).add_episodes
        for worker in range(6):
            add_episodes(worker, [EpisodeMetrics(10.0 + worker, 10, 0)])
        assert collect(None)["episode_reward_mean"] == 14.5  # of workers 4 and 5
        algorithm.workers.remove(3)
        add_episodes(0, [EpisodeMetrics(0.0, 10, 0)])
        add_episodes(2, [EpisodeMetrics(41.0, 10, 0)])
        assert collect(None)["episode_reward_mean"] == pytest.approx((14 + 15 + 41) / 3)


class Slow(gymnasium.Wrapper):
    """An environment with slow steps."""

    def step(self, action):
        time.sleep(0.002)
        return super().step(action)


def slow_on_one(context):
    env = gymnasium.make("CartPole-v1")
    return Slow(env) if context.worker_index == 2 else env


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "max_lag"), [(IMPALAConfig, 0), (IMPALAConfig, 2), (A3CConfig, 1)]
)
def test_waiting_workers_never_exceed_the_policy_lag(ray_session, kind, max_lag):
    batch_size = {"train_batch_size": 30} if kind is IMPALAConfig else {}
    config = kind(
        env=slow_on_one, num_workers=3, rollout_fragment_length=10, seed=0, max_policy_lag=max_lag,
        stale_policy="wait", min_sample_timesteps_per_iteration=200, **batch_size,
    )  # fmt: skip
    lags = []
    with config.build() as algorithm:
        for _ in range(6):
            result = algorithm.train()
            lags.append(result["env_runners"]["policy_lag_max"])
        steps = algorithm.workers.foreach_worker(lambda worker: worker.env_steps)[1:]
    assert max(lags) <= max_lag
    assert max(lags) > 0 or not max_lag
    assert min(steps) > 0
    assert result["counters"]["num_sampling_waits"] > 0
    assert result["counters"].get("num_env_steps_dropped", 0) == 0
    assert result["num_env_steps_trained"] > 1000


def test_waiting_continues_after_batches_that_train_no_policy():
    config = IMPALAConfig(
        env=make_multi_agent("CartPole-v1"),
        env_config={"num_agents": 2},
        policies=["a", "b"],
        policy_mapping_fn=lambda agent_id: "ab"[int(agent_id)],
        policies_to_train=[],
        rollout_fragment_length=10,
        train_batch_size=20,
        max_policy_lag=1,
        stale_policy="wait",
        min_sample_timesteps_per_iteration=200,
        seed=0,
    )
    with config.build() as algorithm:
        counters = [algorithm.train()["counters"] for _ in range(2)][-1]
    assert counters["num_env_steps_dropped"] >= 300
    assert counters["num_env_steps_trained"] == 0


def test_waiting_rejects_settings_that_break_the_limit():
    wait = {"max_policy_lag": 4, "stale_policy": "wait"}
    for settings in (
        {"replay_proportion": 0.5, "replay_buffer_num_slots": 2}, {"broadcast_interval": 2},
        {"minibatch_buffer_size": 2, "num_sgd_iter": 2}, {"sgd_minibatch_size": 10},
        {"count_steps_by": "agent_steps"},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match='stale_policy="wait" can guarantee max_policy_lag'):
            IMPALAConfig(**wait, **settings)
        IMPALAConfig(**{**wait, "stale_policy": "drop"}, **settings)
    assert IMPALAConfig(**wait, train_batch_size=50).staleness()["limit"].max_batches == 4
    two_passes = IMPALAConfig(**wait, train_batch_size=50, num_sgd_iter=2)
    assert two_passes.staleness()["limit"].max_batches == 2
    assert IMPALAConfig(max_policy_lag=4).staleness() == {"max_policy_lag": 4}
    for kind in (IMPALAConfig, APPOConfig, A3CConfig):
        with pytest.raises(ConfigError, match='stale_policy="wait" needs a max_policy_lag'):
            kind(stale_policy="wait")
    with pytest.raises(ConfigError, match="stale_policy"):
        A3CConfig(stale_policy="sleep")
    with pytest.raises(ConfigError, match='stale_policy="wait" can guarantee max_policy_lag only'):
        A3CConfig(**wait, count_steps_by="agent_steps")


def test_staleness_limit_blocks_rollouts_without_training():
    with A3CConfig(env="CartPole-v1", rollout_fragment_length=10).build() as algorithm:
        workers = algorithm.workers
        with pytest.raises(ValueError, match='limit is for mode="async"'):
            ParallelRollouts(workers, limit=StalenessLimit(5, 0))
        with pytest.raises(ValueError, match='limit is for mode="async"'):
            ParallelRollouts(workers, mode="raw", limit=StalenessLimit(5, 0))
        with pytest.raises(ValueError, match='stale_policy="wait" needs a max_policy_lag'):
            AsyncGradients(workers, stale_policy="wait")
        with pytest.raises(ValueError, match='stale_policy is "drop" or "wait"'):
            AsyncGradients(workers, stale_policy="no")
        rollouts = ParallelRollouts(workers, mode="async", limit=StalenessLimit(30, 0))
        assert [batch.count for batch in rollouts.take(3)] == [10, 10, 10]
        with pytest.raises(
            RuntimeError, match=r"StalenessLimit\(30, 0\) allows the next request when"
        ):
            next(rollouts)  # no operator trains


def test_sampling_continues_after_an_error_loses_a_fragment():

    class FailsOnce:
        calls = 0

        def __call__(self, batch):
            self.calls += 1
            if self.calls == 2:
                raise ValueError("once")
            return batch

    with A3CConfig(env="CartPole-v1", rollout_fragment_length=10).build() as algorithm:
        workers = algorithm.workers
        limit = StalenessLimit(10, 0)
        plan = (
            ParallelRollouts(workers, mode="async", limit=limit)
            .for_each(FailsOnce())
            .for_each(TrainOneStep(workers))
        )
        plan.take(1)
        with pytest.raises(ValueError, match="once"):
            next(plan)
        assert len(plan.take(4)) == 4


def test_lag_limit_that_drops_all_gradients_is_rejected():
    with pytest.raises(ConfigError, match="would drop most gradients"):
        A3CConfig(num_workers=1, max_policy_lag=0)
    assert A3CConfig(num_workers=0, max_policy_lag=0).max_policy_lag == 0  # there is no lag
    assert (
        A3CConfig(
            num_workers=1, max_policy_lag=0, max_requests_in_flight_per_worker=1
        ).max_policy_lag
        == 0
    )
    assert A3CConfig(max_policy_lag=0, stale_policy="wait").max_policy_lag == 0
    one = {"max_requests_in_flight_per_worker": 1}
    with pytest.raises(ConfigError, match=r"8 gradients are in flight, .*at least 3$"):
        A3CConfig(num_workers=8, max_policy_lag=2, **one)
    assert A3CConfig(num_workers=8, max_policy_lag=3, **one).max_policy_lag == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_learners": 1, "num_gpus": 1}, "num_learners and num_gpus: set only one"),
        ({"minibatch_buffer_size": 2}, "minibatch_buffer_size above 1 needs num_sgd_iter"),
    ],
)
def test_contradictory_settings_of_learners_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        IMPALAConfig(**settings)


class Fails:
    """Raises in the calls whose numbers are given; returns the item in the others."""

    def __init__(self, *numbers):
        self.numbers, self.calls = numbers, 0

    def __call__(self, item):
        self.calls += 1
        if self.calls in self.numbers:
            raise ValueError(f"call {self.calls}")
        return item


def limited(algorithm, chain, batch_size=10):
    """A plan that trains on rollouts with a StalenessLimit; `chain` adds operators before."""
    limit = StalenessLimit(batch_size, 0)
    rollouts = ParallelRollouts(algorithm.workers, mode="async", limit=limit)
    return chain(rollouts).for_each(TrainOneStep(algorithm.workers))


def take_despite_errors(plan, count):
    """Return the next items; errors of Fails are ignored."""
    items = []
    while len(items) < count:
        with contextlib.suppress(ValueError):
            items.append(next(plan))
    return items


@pytest.mark.parametrize(
    ("chain", "batch_size"),
    [
        (lambda rollouts: rollouts.tap("t", Fails(2, 3)), 10),
        (lambda rollouts: rollouts.batch(1).for_each(Fails(2, 3)).flatten(), 10),
        (
            lambda rollouts: (
                rollouts.zip_with_source().for_each(Fails(2, 3)).for_each(lambda pair: pair[1])
            ),
            10,
        ),
        (lambda rollouts: rollouts.for_each(SetColumns()).combine(ConcatBatches(30)), 30),
    ],
    ids=["tap", "list", "pair", "concatenation"],
)
def test_sampling_continues_after_operators_lose_fragments(chain, batch_size):
    with A3CConfig(env="CartPole-v1", rollout_fragment_length=10).build() as algorithm:
        plan = limited(algorithm, chain, batch_size)
        assert len(take_despite_errors(plan, 4)) == 4
        assert plan.metrics.counters["num_env_steps_dropped"]


class SetColumns:
    """Gives every second batch observations of another shape, which cannot be concatenated."""

    calls = 0

    def __call__(self, batch):
        self.calls += 1
        if self.calls not in (2, 5):
            return batch
        return batch.with_columns(obs=batch["obs"][:, :2])


def test_lost_fragments_are_still_counted_after_a_restore():
    def plan_of(algorithm):
        return limited(algorithm, lambda rollouts: rollouts.for_each(Fails(2)))

    with A3CConfig(env="CartPole-v1", rollout_fragment_length=10, seed=0).build() as algorithm:
        plan = plan_of(algorithm)
        assert len(plan.take(1)) == 1
        with pytest.raises(ValueError, match="call 2"):
            next(plan)
        restored = plan_of(algorithm)
        restored.load_state_dict(plan.state_dict())
        assert len(take_despite_errors(restored, 3)) == 3


def test_train_batch_size_without_effect_is_a_warning(caplog):
    A3CConfig(env="CartPole-v1", train_batch_size=1000).validate()
    assert "train_batch_size: no effect, because rollout_fragment_length is 20" in caplog.text
    caplog.clear()
    A3CConfig(env="CartPole-v1", train_batch_size=1000, rollout_fragment_length="auto").validate()
    assert not caplog.text


def test_rows_of_a_fragment_of_ddppo_fill_a_minibatch():
    with pytest.raises(ConfigError, match="with 100 rows of each worker, is smaller"):
        DDPPOConfig(rollout_fragment_length=50, num_envs_per_worker=2)
