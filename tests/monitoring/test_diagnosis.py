"""The diagnosis of a run names its operator, cause, share and remedy.

The benchmark `benchmarks/diagnosis.py` plants 20 faults in runs with workers.
"""

import time

import gymnasium as gym
import numpy as np
import pytest

from flowrl import DQN, PPO, A2CConfig, PPOConfig
from flowrl.iter.gather import Gather
from flowrl.iter.stage import walk
from flowrl.monitoring.activity import Activity, activity_between, operator_name, take_snapshot
from flowrl.monitoring.diagnosis import Diagnosis, diagnose
from flowrl.monitoring.plan_facts import PlanFacts, ReplayFacts, TrainingFacts, facts_of
from flowrl.ops import ConcatBatches, ParallelRollouts, StandardMetricsReporting, TrainOneStep
from flowrl.sampling.callbacks import DefaultCallbacks, callback_seconds
from flowrl.trainer.runs.activity_log import ActivityLog, read_activities
from tests.monitoring.fakes import SMALL, activity, stage, worker


def facts(**values):
    defaults = {
        "num_cores": 2, "num_workers": 2, "num_envs": 4, "steps_in_turn": True, "num_threads": 1,
        "callbacks": "MyCallbacks", "samples": True, "horizon": None, "minibatch_size": 128,
        "num_passes": 1, "settings": (),
        "queue_size": None, "replay": None,
    }  # fmt: skip
    return PlanFacts(**{**defaults, **values})


def first(activity, facts):
    return diagnose(activity, facts).findings[0]


WAITING = stage("sampling", "gather_sync", waiting=0.9)
TWO_WORKERS = [worker(1), worker(2)]


def test_largest_part_of_sampling_is_named():
    found = first(activity(WAITING, workers=TWO_WORKERS), facts())
    assert found.cause == "inference"
    assert found.share == pytest.approx(0.9)
    assert found.text.startswith(
        "Sampling limits this run (90% of the time): computing actions takes 44% of the workers' "
        "time."
    )
    seconds = {"sample_s": 9.0, "env_step_s": 8.0, "reset_s": 5.0}
    found = first(activity(WAITING, workers=[worker(seconds=seconds)]), facts())
    assert (found.cause, found.operator) == ("reset", "env.reset")


def test_nothing_limits_a_run_whose_workers_start():
    idle = [worker(1, period_s=100.0, seconds={"sample_s": 2.0, "inference_s": 1.0})]
    starting = activity(stage("sampling", "gather_async"), workers=idle)
    found = diagnose(starting, facts(num_workers=1, queue_size=16)).findings
    assert (found[0].cause, found[1].cause) == ("idle", "inference")
    assert found[1].share < 0.2
    assert f"the largest share of the time is {found[1].share:.0%} (" in found[0].text


@pytest.mark.parametrize(
    ("num_workers", "cpu_s", "remedy"),
    [(1, 9.0, "add workers"), (2, 9.0, "use a machine with more cores"), (2, 1.0, "add workers")],
)
def test_remedy_depends_on_the_processors_in_use(num_workers, cpu_s, remedy):
    workers = [worker(usage={"cpu_s": cpu_s})]
    found = first(activity(WAITING, workers=workers), facts(num_workers=num_workers))
    assert remedy in found.text
    seconds = {"sample_s": 9.0, "env_step_s": 8.0}
    workers = [worker(usage={"cpu_s": cpu_s}, seconds=seconds)]
    found = first(activity(WAITING, workers=workers), facts(num_workers=num_workers))
    assert ('vectorization_mode="async"' in found.text) == (cpu_s < 2.0)


@pytest.mark.parametrize(
    ("values", "cause", "part"),
    [
        ({"callback_s": {"on_episode_step": 6.0}}, "callback", "MyCallbacks.on_episode_step"),
        ({"operator_s": {"slow (chained at p.py:3)": 20.0}}, "operator", "slow (chained at p.py"),
        ({"seconds": {"sample_s": 9.0, "postprocess_s": 7.0}}, "postprocessing", "postproc"),
        ({"seconds": {"sample_s": 9.0, "collection_s": 7.0}}, "collection", "storing rows"),
    ],
)
def test_slowest_part_of_sampling_is_named(values, cause, part):
    found = first(activity(WAITING, workers=[worker(**values)]), facts())
    assert found.cause == cause
    assert part in found.text


def test_training_names_tiny_minibatches():
    training = stage("training", "TrainOneStep", busy=0.8)
    found = first(activity(training), facts(num_workers=0))
    assert found.cause == "training"
    assert "TrainOneStep takes 80% of the time" in found.text
    found = first(activity(training, stage("training", "TrainOneStep")), facts(num_workers=0))
    assert "TrainOneStep, chained at plan.py:7, takes 80%" in found.text
    found = first(activity(training), facts(num_workers=0, minibatch_size=4))
    assert found.cause == "small_minibatches"
    assert "minibatches of 4 rows" in found.text


def test_remedies_of_training_are_those_of_the_algorithm():
    training = activity(stage("training", "TrainOneStep", busy=0.8))
    ppo = facts(num_workers=0, num_passes=10)
    assert first(training, ppo).text.endswith(
        "a smaller model, larger minibatches (sgd_minibatch_size) or fewer passes (num_sgd_iter)."
    )
    replay = ReplayFacts(training_intensity=None, batch_size=256, fragment_size=1)
    drawn = stage("training", "TrainOneStep", busy=0.8, parents=[1])
    sac = facts(num_workers=0, minibatch_size=None, replay=replay)
    assert first(activity(drawn, stage("replay", "Replay", id=1)), sac).text.endswith(
        "Use a smaller model or fewer updates per env step (training_intensity)."
    )
    impala = facts(num_workers=0, minibatch_size=None, settings=("num_learners",))
    assert "or several learners (num_learners)." in first(training, impala).text
    plain = facts(num_workers=0, minibatch_size=None)
    assert first(training, plain).text.endswith("Use a smaller model.")
    stopped = activity(stage("operator", "Breakpoint", busy=0.9))
    assert all(f.operator != "Breakpoint" for f in diagnose(stopped, plain).findings)


def test_remedies_of_several_training_operators_are_their_own():
    on_policy = stage("training", "TrainOneStep", busy=0.5, id=1, line="plan.py:3")
    drawn = stage("training", "TrainOneStep", busy=0.3, id=2, parents=[3], line="plan.py:5")
    both = activity(on_policy, drawn, stage("replay", "Replay", id=3))
    replay = ReplayFacts(training_intensity=8.0, batch_size=32, fragment_size=4)
    training = {1: TrainingFacts(16, 4), 2: TrainingFacts(None, 1)}
    two = facts(num_workers=0, minibatch_size=16, num_passes=4, replay=replay, training=training)
    of_ppo, of_dqn = diagnose(both, two).findings[:2]
    assert "plan.py:3, takes 50% of the time with minibatches of 16 rows" in of_ppo.text
    assert of_dqn.text.endswith("smaller model or fewer updates per env step (training_intensity).")


def test_facts_of_each_training_operator_are_known():
    with DQN("CartPole-v1", learning_starts=32) as dqn, PPO("CartPole-v1", **SMALL) as ppo:
        for algorithm, expected in ((dqn, TrainingFacts(None, 1)), (ppo, TrainingFacts(32, 1))):
            found = facts_of(algorithm.plan, algorithm.workers, ("lr",))
            assert list(found.training.values()) == [expected]
            (stage_id,) = found.training
            stages = take_snapshot(algorithm.plan, algorithm.workers, {}, 0.0).stages
            assert stages[stage_id]["kind"] == "training"


def test_operator_in_tasks_limits_a_plan_that_waits_for_them():
    slow = stage("tasks", "Slow", waiting=0.97, blocked=0.02, parents=[1])
    rollouts = stage("rollouts", "CountRollouts", busy=0.03, id=1)
    found = first(activity(slow, rollouts), facts(num_workers=0))
    assert (found.cause, found.operator) == ("tasks", "Slow")
    assert "waits for the tasks of the operator Slow 94% of the time" in found.text
    assert "max_concurrency" in found.text
    sampling = stage("rollouts", "CountRollouts", waiting=0.96, id=1)
    assert first(activity(slow, sampling), facts(num_workers=0)).cause != "tasks"


def test_replay_actors_limit_a_plan_that_does_not_wait_for_samples():
    draws = stage("replay_actors", "Replay", waiting=0.94)
    gather = stage("sampling", "gather_async", blocked=0.84, waiting=0.02)
    idle = worker(seconds={"sample_s": 2.8, "env_step_s": 2.0})
    found = first(activity(draws, gather, workers=[idle]), facts(num_workers=1, queue_size=16))
    assert found.cause == "replay_actors"
    assert "waits for batches from the replay actors 94% of the time" in found.text
    gather = stage("sampling", "gather_async", waiting=0.9)
    found = first(activity(draws, gather, workers=[worker()]), facts(num_workers=1, queue_size=16))
    assert found.cause == "inference"


def test_workers_that_never_wait_limit_an_asynchronous_plan():
    gather = stage("sampling", "gather_async", waiting=0.2)
    training = stage("training", "TrainOneStep", busy=0.72)
    found = first(activity(gather, training, workers=[worker()]), facts(num_workers=1))
    assert (found.cause, found.share) == ("inference", pytest.approx(0.9))
    gather = stage("sampling", "gather_sync", waiting=0.2)
    found = first(activity(gather, training, workers=[worker()]), facts(num_workers=1))
    assert found.cause == "training"


def test_operator_names_its_line():
    own = stage("operator", "Slow", busy=0.7, is_own=True)
    assert "max_concurrency" in first(activity(own), facts(num_workers=0)).text
    found = first(activity(stage("operator", "Slow", busy=0.7)), facts(num_workers=0))
    assert "max_concurrency" not in found.text
    assert (found.cause, found.line) == ("operator", "plan.py:7")
    assert "The operator Slow takes 70% of the time; it is chained at plan.py:7" in found.text


def test_replay_ratio_that_starves_sampling():
    training = stage("training", "TrainOneStep", busy=0.8, parents=[1])
    draw, store = stage("replay", "Replay", id=1), stage("store", blocked=0.97, id=2)
    replay = ReplayFacts(training_intensity=1000.0, batch_size=32, fragment_size=4)
    found = first(activity(training, draw, store), facts(num_workers=0, replay=replay))
    assert found.cause == "replay_ratio"
    assert "training_intensity=1000 starves sampling" in found.text
    assert "31.2 updates per stored row" in found.text
    assert "blocked 97%" in found.text
    assert "Lower it, or leave it out" in found.text
    on_policy = stage("training", "TrainOneStep", busy=0.8, id=3)  # of another branch
    found = first(activity(on_policy, draw, store), facts(num_workers=0, replay=replay))
    assert found.cause == "training"
    usual = ReplayFacts(training_intensity=64.0, batch_size=64, fragment_size=32)
    found = first(activity(training, draw, store), facts(num_workers=0, replay=usual))
    assert found.cause == "training"


def learner_thread(full_s, idle_s, learn_s, queue=1):
    enqueue = stage("enqueue", "Enqueue", values={"backpressure_s": full_s, "queue_size": queue})
    values = {"learn_s": learn_s, "learner_idle_s": idle_s}
    return enqueue, stage("dequeue", "Dequeue", values=values)


def test_learner_thread_whose_queue_is_full():
    of_thread = facts(queue_size=2)
    found = first(activity(*learner_thread(6.0, 0.1, 9.8), workers=TWO_WORKERS), of_thread)
    assert found.cause == "training"
    assert "the learner takes 98% of the time, its queue is full 60% of it" in found.text
    found = first(activity(*learner_thread(0.0, 9.0, 1.0), workers=TWO_WORKERS), of_thread)
    assert found.cause == "inference"
    found = first(activity(*learner_thread(1.4, 8.6, 1.2), workers=TWO_WORKERS), of_thread)
    assert found.cause == "inference"  # the learner is mostly idle
    found = first(activity(*learner_thread(4.0, 3.0, 6.0), workers=TWO_WORKERS), of_thread)
    assert found.cause == "queue_too_small"
    old = activity(*learner_thread(6.0, 0.1, 9.8, queue=100), policy_lag_mean=90.0)
    found = first(old, facts(queue_size=128))
    assert found.cause == "queue_too_large"
    assert "a policy lag of 90 updates" in found.text


def test_large_or_short_fragments_and_weights_are_named_as_causes():
    workers = [worker(num_bytes=50_000_000)]
    found = first(activity(stage("sampling", busy=0.6), workers=workers), facts())
    assert found.cause == "transfer"
    assert "Moving fragments of 5.0 MB" in found.text
    short = [worker(seconds={"sample_s": 1.0})]
    found = first(activity(WAITING, workers=short), facts())
    assert found.cause == "transfer"
    assert "Use longer fragments" in found.text
    workers = [worker(seconds={"sample_s": 1.0, "weights_s": 4.0})]
    found = first(activity(stage("sampling", waiting=0.5), workers=workers, weights_s=2), facts())
    assert found.cause == "weights"
    assert "takes 60% of the time. Send them less often (longer fragments)" in found.text
    slow = activity(stage("sampling", waiting=0.5), workers=workers, weights_s=2)
    found = first(slow, facts(settings=("broadcast_interval",)))
    assert "(broadcast_interval, longer fragments)" in found.text


def test_time_of_callbacks_between_results_is_named():
    found = first(activity(outside_s=8.0), facts(num_workers=0))
    assert found.cause == "between_results"
    assert "takes 80% of the time" in found.text
    callback_s = {"on_train_result": 7.0}
    found = first(activity(outside_s=8.0, callback_s=callback_s), facts(num_workers=0))
    assert found.text.startswith("MyCallbacks.on_train_result takes 80% of the time.")


def test_callback_of_training_is_named():
    training = stage("training", "TrainOneStep", busy=0.8)
    slow = activity(training, callback_s={"on_learn_on_batch": 6.0})
    found = first(slow, facts(num_workers=0))
    assert (found.cause, found.operator) == ("callback", "MyCallbacks.on_learn_on_batch")


def test_callback_after_sampling_is_work_of_its_worker():
    workers = [worker(seconds={"sample_s": 1.0}, callback_s={"on_sample_end": 8.0})]
    assert workers[0].busy == pytest.approx(0.9)
    found = first(activity(workers=workers), facts(num_workers=0))
    assert (found.cause, found.operator) == ("callback", "MyCallbacks.on_sample_end")


def test_callbacks_are_subtracted_from_the_part_that_contains_them():
    seconds = {"sample_s": 9.0, "postprocess_s": 4.0, "collection_s": 5.0}
    callback_s = {"on_postprocess_trajectory": 3.5, "on_episode_step": 1.0}
    workers = [worker(seconds=seconds, callback_s=callback_s)]
    found = first(activity(WAITING, workers=workers), facts())
    assert found.cause == "collection"
    seconds = {"sample_s": 9.0, "postprocess_s": 0.0, "collection_s": 8.0}
    workers = [worker(seconds=seconds, callback_s={"on_postprocess_trajectory": 7.0})]
    found = first(activity(WAITING, workers=workers), facts())
    assert (found.cause, found.operator) == ("callback", "MyCallbacks.on_postprocess_trajectory")


def test_learning_on_workers_is_training():
    learning = [worker(operator_s={"LearnOnWorker (chained at p.py:3)": 8.0}, seconds={})]
    found = first(activity(WAITING, workers=learning), facts())
    assert found.cause == "training"
    assert "LearnOnWorker (chained at p.py:3), on the shards, takes 100%" in found.text


def test_shares_are_at_most_1():
    # fragments that are longer than the period, and everything at once
    long = worker(seconds={"sample_s": 30.0, "env_step_s": 30.0}, period_s=20.0)
    stages = stage("sampling", busy=1.0, waiting=1.0), stage("rollouts", busy=1.0)
    everything = activity(*stages, workers=[long, worker(2)], outside_s=30.0, weights_s=30.0)
    for number in (0, 2):
        for finding in diagnose(everything, facts(num_workers=number)).findings:
            assert 0 <= finding.share <= 1, finding


def test_worker_that_returns_nothing_is_named():
    silent = worker(2, fragments=0, env_steps=0, period_s=0.0)
    found = first(activity(WAITING, workers=[worker(1), silent, worker(3)]), facts())
    assert found.cause == "silent_worker"
    assert found.text.startswith(
        "Worker 2 has returned nothing for 10 s, the median of the others 10 fragments"
    )
    few = [worker(1, fragments=2), silent]  # long fragments
    idle = [worker(n, fragments=0) for n in (1, 2)]  # the plan asks for none
    restarted = [worker(1), worker(2, fragments=0, restarts=1)]
    for workers in (few, idle, restarted, [worker(1)]):
        causes = [f.cause for f in diagnose(activity(WAITING, workers=workers), facts()).findings]
        assert "silent_worker" not in causes


def test_problems_come_before_bottlenecks():
    slow = worker(2, seconds={"sample_s": 9.0, "env_step_s": 8.0}, env_steps=200)
    found = first(activity(WAITING, workers=[worker(1), slow, worker(3)]), facts())
    assert found.text.startswith("Worker 2 is 5.0 times slower than the median of the others")
    short = [worker(n, seconds={"sample_s": s}, period_s=0.05) for n, s in ((1, 0.01), (2, 0.04))]
    found = diagnose(activity(WAITING, workers=short), facts())
    assert "slow_worker" not in [finding.cause for finding in found.findings]
    restarted = worker(2, restarts=3)
    counters = {"num_shard_restarts": 3}
    found = first(activity(WAITING, workers=[worker(1), restarted], counters=counters), facts())
    assert found.text.startswith("Worker 2 fails repeatedly: 3 restarts in 10 s")
    both = [worker(1, restarts=1), worker(2, restarts=2)]
    found = first(activity(WAITING, workers=both, counters=counters), facts())
    assert found.text.startswith("Workers fail repeatedly: 3 restarts in 10 s")
    # another worker has restarted twice and returned nothing since
    one = [worker(1, restarts=1), worker(2)]
    found = first(activity(WAITING, workers=one, counters=counters), facts())
    assert found.text.startswith("Workers fail repeatedly: 3 restarts in 10 s")
    endless = activity(WAITING, workers=TWO_WORKERS, episodes_total=0, env_steps_total=80_000)
    assert "No episode has ended in 10,000 steps" in first(endless, facts()).text
    for other in (facts(samples=False), facts(horizon=20_000)):
        assert first(endless, other).cause == "inference"
    resumed = activity(WAITING, workers=TWO_WORKERS, episodes_total=None, env_steps_total=80_000)
    assert first(resumed, facts()).cause == "inference"
    waiting = [worker(usage={"cpu_s": 3.0, "cpu_wait_s": 6.0})]
    found = first(activity(WAITING, workers=waiting), facts(num_workers=8))
    assert found.text.startswith("8 workers share 2 cores: they wait for a processor 60% of")
    short = worker(1, period_s=0.04, usage={"cpu_s": 0.01, "cpu_wait_s": 0.02})
    long = worker(2, usage={"cpu_s": 0.1, "cpu_wait_s": 0.1})
    found = diagnose(activity(WAITING, workers=[short, long]), facts(num_workers=8)).findings
    assert "too_many_workers" not in [finding.cause for finding in found]
    found = first(activity(WAITING, workers=waiting), facts(num_threads=4))
    assert found.text.startswith("2 processes with 4 threads each compete for 2 cores")


def test_leak_needs_an_operator_and_a_growing_process():
    leak = stage("operator", "Leak", grown_bytes=80e6, is_own=True)
    found = first(activity(leak, usage={"rss_bytes_added": 90e6}), facts())
    assert found.cause == "memory"
    assert "grows by 13.5 MB/s in Leak, chained at plan.py:7" in found.text
    flowrls = stage("operator", "ConcatBatches", grown_bytes=80e6)  # collects a train batch
    assert first(activity(flowrls, usage={"rss_bytes_added": 90e6}), facts()).cause != "memory"
    causes = [
        f.cause for f in diagnose(activity(leak, usage={"rss_bytes_added": 1e6}), facts()).findings
    ]
    assert "memory" not in causes


def test_garbage_collection_names_the_callback():
    collecting = worker(usage={"gc_s": 5.0, "cpu_s": 9.0}, callback_s={"on_episode_step": 6.0})
    found = first(activity(WAITING, workers=[collecting]), facts())
    assert found.cause == "garbage_collection"
    assert "MyCallbacks.on_episode_step: does it call gc.collect()" in found.text
    collecting = worker(usage={"gc_s": 5.0, "cpu_s": 9.0})
    assert "of workers" in first(activity(WAITING, workers=[collecting]), facts()).text
    called = worker(callback_s={"on_episode_step": 0.1})
    found = first(activity(WAITING, workers=[called], usage={"gc_s": 4.0}), facts())
    assert "takes 40% of the time of this process: does code" in found.text


def test_activity_survives_json():
    one = activity(WAITING, workers=TWO_WORKERS)
    assert Activity.from_json(one.to_json()) == one


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("for_each(TrainOneStep(num_sgd_iter=10, sgd_minibatch_size=128))", "TrainOneStep"),
        ("combine(ConcatBatches(min_batch_size=4000))", "ConcatBatches"),
        ("ParallelRollouts(mode='bulk_sync')", "ParallelRollouts"),
        ("for_each(UpdateReplayPriorities)", "UpdateReplayPriorities"),
        ("for_each(<lambda>)", "<lambda>"),
        ("zip_with_source", "zip_with_source"),
        ("duplicate(2)", "duplicate"),
        ("duplicate_child[0]", "duplicate_child[0]"),
        ("union(round_robin_weights=[1.0, '*'])", "union"),
        ("batch_across_shards rollouts[workers=2]", "batch_across_shards"),
    ],
)
def test_name_of_an_operator(title, name):
    assert operator_name(title) == name


# -- real runs -------------------------------------------------------------------------------------


class SlowSteps(gym.Wrapper):
    """CartPole with slow steps."""

    def step(self, action):
        time.sleep(0.002)
        return self.env.step(action)


def train_until_measured(algorithm, count=2):
    """Train until the monitor has measured the plan `count` times; return the last result."""
    seen = []
    with algorithm:
        algorithm.train()
        algorithm.monitor.listeners.append(seen.append)
        while len(seen) < count:
            result = algorithm.train()
        result = algorithm.train()
        return result, seen, algorithm.diagnose()


def test_result_has_the_diagnosis_of_a_running_plan():
    algorithm = PPO(lambda: SlowSteps(gym.make("CartPole-v1")), **SMALL)
    result, seen, diagnosis = train_until_measured(algorithm)
    # the monitor may measure again between the result and `diagnose()`
    assert result["diagnosis"] in [one.diagnosis for one in seen]
    assert diagnosis.findings[0].cause == "env_step"
    (sampler,) = seen[-1].workers
    assert sampler.index == 0
    assert sampler.env_steps > 0
    assert seen[-1].seconds > 1.9  # two intervals of a second, which a loaded machine prolongs
    assert 0.5 < sampler.busy <= 1


def test_figures_of_an_activity_equal_those_of_stats():
    with PPO("CartPole-v1", **SMALL) as algorithm:
        algorithm.train()
        first_snapshot = algorithm.monitor._take_snapshot()
        before = algorithm.plan.stats()
        algorithm.train()
        last, after = algorithm.monitor._take_snapshot(), algorithm.plan.stats()
    between = activity_between(first_snapshot, last)
    for found, old, new in zip(between.stages, before, after, strict=True):
        assert found.items == new["items"] - old["items"]
        busy_s = found.busy * between.seconds
        assert busy_s == pytest.approx(max(new["busy_s"] - old["busy_s"], 0), abs=1e-3)
    assert between.counters["num_env_steps_sampled"] == 64
    # in process, sampling takes its share of the whole period, training included
    (sampler,) = between.workers
    assert sampler.period_s == between.seconds


@pytest.mark.slow
def test_pull_that_has_not_ended_is_measured():
    class SlowLearner(PPO.policy_class):
        def learn_on_batch(self, batch):
            time.sleep(0.1)
            return super().learn_on_batch(batch)

    slow = type("Slow", (PPO,), {"policy_class": SlowLearner})
    algorithm = slow("CartPole-v1", **(SMALL | {"num_sgd_iter": 15}))  # 3 s per iteration
    with algorithm:
        for _ in range(2):
            result = algorithm.train()
        (training,) = algorithm.monitor.activity.stages_of("training")
    assert training.busy > 0.8
    assert "TrainOneStep takes" in result["diagnosis"]


def test_static_callbacks_are_called_and_measured():
    class Static(DefaultCallbacks):
        @staticmethod
        def on_episode_step(**kwargs):
            time.sleep(0.0001)

        @classmethod
        def on_sample_end(cls, **kwargs):
            cls.called = True

    config = PPO.config_class(env="CartPole-v1", callbacks_class=Static, **SMALL)
    with config.build() as algorithm:
        algorithm.train()
        seconds = callback_seconds(algorithm.workers.local_worker().callbacks)
    assert Static.called
    assert seconds["on_episode_step"] > 0.0001 * 60


class Measured(DefaultCallbacks):
    def on_episode_step(self, **kwargs):
        time.sleep(0.001)


@pytest.mark.slow
def test_seconds_of_callbacks_resets_and_operators_are_measured():
    class SlowReset(gym.Wrapper):
        def reset(self, **options):
            time.sleep(0.01)
            return self.env.reset(**options)

    def slow(batch):
        time.sleep(0.01)
        return batch

    def plan(workers, config):
        rollouts = ParallelRollouts(workers, mode="raw").for_each(slow).gather_sync()
        train = rollouts.combine(ConcatBatches(64)).for_each(TrainOneStep(workers))
        return StandardMetricsReporting(train, workers, config)

    config = PPO.config_class(
        env=lambda: SlowReset(gym.make("CartPole-v1")), callbacks_class=Measured, **SMALL
    )
    _, seen, _ = train_until_measured(config.build(plan=plan), 3)
    (sampler,) = seen[-1].workers
    assert sampler.callback_s["on_episode_step"] >= 0.001 * sampler.env_steps * 0.9
    assert sampler.seconds["reset_s"] >= 0.01
    (title,) = sampler.operator_s
    assert title.startswith(f"slow (chained at {__file__}:")


def test_run_without_measurements_says_so():
    for settings in ({}, {"monitor": False}):
        with PPO("CartPole-v1", **SMALL, **settings) as algorithm:
            assert algorithm.diagnose().findings == []
            assert "Nothing was measured yet" in algorithm.train()["diagnosis"]
            assert (algorithm.monitor._thread is None) == ("monitor" in settings)


def test_counters_and_values_that_are_no_python_numbers_are_measured(tmp_path):
    def count(batch):
        counters = algorithm.plan.metrics.counters
        counters["num_odd_rows"] += np.int64(1)
        return batch

    count.stats = lambda: {"last_s": None}

    def plan(workers, config):
        rollouts = ParallelRollouts(workers, mode="bulk_sync").for_each(count)
        train = rollouts.combine(ConcatBatches(64)).for_each(TrainOneStep(workers))
        return StandardMetricsReporting(train, workers, config)

    log = ActivityLog(tmp_path)
    with PPO.config_class(env="CartPole-v1", **SMALL).build(plan=plan) as algorithm:
        algorithm.train()
        algorithm.monitor.listeners.append(log.append)
        algorithm.monitor.measure()
        algorithm.train()
        algorithm.monitor.measure()
    measured = read_activities(tmp_path)
    counted = sum(one.counters["num_odd_rows"] for one in measured)
    assert counted == algorithm.plan.metrics.counters["num_odd_rows"] > 0


class Clock:
    """The module `time`, with a clock that can be put forward."""

    def __init__(self):
        self.shift = 0.0

    def monotonic(self):
        return time.monotonic() + self.shift

    def time(self):
        return time.time()


def test_pause_between_results_is_not_measured(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("flowrl.monitoring.monitor.time", clock)
    monkeypatch.setattr("flowrl.monitoring.activity.time", clock)
    with PPO("CartPole-v1", **SMALL) as algorithm:
        algorithm.train()
        monitor = algorithm.monitor
        monitor.stop()  # this test measures itself
        for _ in range(2):
            algorithm.train()
            monitor.measure()
        before = monitor.activity
        clock.shift = 100.0
        monitor.measure()
        assert monitor.activity is before
        for _ in range(3):
            algorithm.train()
            monitor.measure()
        assert monitor.activity.time > before.time
        assert monitor.activity.seconds < 50
        assert monitor.activity.outside_s < 50
        with monitor.working():
            clock.shift = 200.0
            monitor.measure()
        assert monitor.activity.outside_s > 50


class Pausing(gym.Env):
    """A step takes 0.1 ms, and one of them 4 s."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, slow_step):
        self.slow_step, self.steps = slow_step, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        time.sleep(4.0 if self.steps == self.slow_step else 0.0001)
        return np.zeros(2, np.float32), 1.0, self.steps % 20 == 0, False, {}


class SlowPausing(Pausing):
    def step(self, action):
        time.sleep(0.004)
        return super().step(action)


class PausingOperator:
    def __call__(self, batch):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 3:
            time.sleep(4.0)
        return batch


@pytest.fixture
def activities(monkeypatch):
    """A function that trains a plan with monitoring, and returns what it measured."""
    monkeypatch.setattr("flowrl.monitoring.monitor.INTERVAL_S", 0.2)
    monkeypatch.setattr("flowrl.monitoring.monitor.WINDOW_S", 1.0)

    def measure(slow_step, *operators):
        def plan(workers, config):
            batches = ParallelRollouts(workers)
            for operator in operators:
                batches = batches.for_each(operator)
            return StandardMetricsReporting(batches, workers, config)

        seen = []
        config = PPOConfig(
            env=Pausing, env_config={"slow_step": slow_step}, rollout_fragment_length=200, seed=0
        )
        with config.build(plan=plan) as algorithm:
            algorithm.monitor.listeners.append(seen.append)
            while algorithm.train()["timesteps_total"] < 2500:
                pass
        return seen

    return measure


def test_hanging_environment_is_diagnosed(activities):
    seen = activities(1500)
    assert max(one.stalled_s for one in seen) > 1.5
    texts = [one.diagnosis for one in seen if one.stalled_s]
    assert all(text.startswith("Sampling has returned nothing for") for text in texts)
    assert all(text.endswith("If an environment hangs, set env_step_timeout_s.") for text in texts)


def test_time_in_an_operator_is_no_hanging_environment(activities):
    seen = activities(None, PausingOperator())
    assert max(one.stalled_s for one in seen) < 3.0  # the operator takes 4 s


@pytest.mark.slow
def test_fragments_that_take_longer_than_the_window_are_sampling(monkeypatch):
    monkeypatch.setattr("flowrl.monitoring.monitor.INTERVAL_S", 0.1)
    monkeypatch.setattr("flowrl.monitoring.monitor.WINDOW_S", 0.5)

    def sleep(batch):
        time.sleep(0.1)
        return batch

    def plan(workers, config):
        batches = ParallelRollouts(workers).for_each(sleep)
        return StandardMetricsReporting(batches, workers, config)

    seen = []
    config = PPOConfig(
        env=SlowPausing, env_config={"slow_step": None}, rollout_fragment_length=200, seed=0
    )
    with config.build(plan=plan) as algorithm:
        algorithm.monitor.listeners.append(seen.append)
        for _ in range(5):
            algorithm.train()
    assert len(seen) > 10
    assert not any(one.stalled_s for one in seen)
    texts = [one.diagnosis for one in seen[5:]]
    wrong = [text for text in texts if "env.step takes" not in text]
    assert not wrong


def test_first_resets_are_steps_of_environments():
    class SlowReset(Pausing):
        def reset(self, *, seed=None, options=None):
            time.sleep(0.05)
            return super().reset(seed=seed, options=options)

    config = PPOConfig(env=SlowReset, env_config={"slow_step": None}, **SMALL)
    with config.build() as algorithm:
        timers = algorithm.train()["timers"]
    assert timers["sampler_env_step_s"] >= timers["sampler_reset_s"] >= 0.1


def test_workers_are_measured_after_a_pause_once_they_have_returned_fragments():
    with PPO("CartPole-v1", **SMALL) as algorithm:
        algorithm.train()
        monitor = algorithm.monitor
        monitor.stop()
        snapshot = monitor._take_snapshot()
    monitor._first = None
    (report,) = snapshot.workers.values()
    snapshot.time = report["until"] + 60.0
    assert not monitor._is_measurable(snapshot)
    report["until"] += 61.0
    assert monitor._is_measurable(snapshot)
    assert monitor._first is snapshot


def test_measuring_that_fails_is_said_in_results(caplog):
    def fail(activity):
        raise OSError("no space")

    with PPO("CartPole-v1", **SMALL) as algorithm:
        algorithm.train()
        shown = []
        algorithm.monitor.listeners += [fail, lambda activity: shown.append(activity.diagnosis)]
        while algorithm.monitor._thread.is_alive():
            result = algorithm.train()
        result = algorithm.train()
    assert result["diagnosis"] == "The plan is not measured any more: the log has the error."
    assert shown == [result["diagnosis"]]  # of the web page and of `flowrl diagnose`
    assert "no space" in caplog.text


def test_thread_of_the_monitor_ends_with_the_algorithm():
    algorithm = PPO("CartPole-v1", **SMALL)
    algorithm.train()
    thread = algorithm.monitor._thread
    assert thread.is_alive()
    algorithm.stop()
    assert not thread.is_alive()


def test_sampling_limits_at_most_all_of_the_time():
    workers = [worker(index) for index in range(1, 5)]
    gather = stage("sampling", "gather_async", waiting=0.9)
    found = first(activity(gather, workers=workers), facts(num_workers=1))
    assert found.share == 1.0


@pytest.mark.slow
def test_activities_name_workers_by_their_index_and_leave_out_failed_ones(ray_session):
    def plan(workers, config):
        rollouts = ParallelRollouts(workers, mode="raw").select_shards([1]).gather_sync()
        train = rollouts.for_each(TrainOneStep(workers))
        return StandardMetricsReporting(train, workers, config)

    config = A2CConfig(env="CartPole-v1", num_workers=2, **SMALL)
    with config.build(plan) as algorithm:
        result = algorithm.train()
        arguments = algorithm.plan, algorithm.workers, result, 0.0
        assert set(take_snapshot(*arguments).workers) == {2}
        (gather,) = [one for one in walk(algorithm.plan.stage) if isinstance(one, Gather)]
        gather.states[0].status = "failed"
        assert not take_snapshot(*arguments).workers


@pytest.mark.slow
def test_the_number_of_workers_may_change(ray_session):
    config = A2CConfig(env="CartPole-v1", num_workers=1, **SMALL)
    with config.build() as algorithm:
        algorithm.train()
        algorithm.workers.add(1)
        while algorithm.monitor.activity is None:
            algorithm.train()
        seen: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "flowrl.monitoring.monitor.diagnose",
                lambda activity, facts: seen.append(facts.num_workers) or Diagnosis([]),
            )
            while not seen:
                algorithm.train()
    assert seen[-1] == 2


def test_filter_that_drops_everything_is_named():
    rollouts = stage("rollouts", "ParallelRollouts", id=1, items=50)
    values = {"title": "filter(nothing)", "parents": [1], "items": 0, "is_own": True}
    dropping = stage("operator", "nothing", **values)
    found = first(activity(dropping, rollouts, iteration=0), facts())
    assert (found.cause, found.line) == ("dropping", "plan.py:7")
    assert found.text.startswith("filter(nothing) has dropped all 50 items")
    for change in ({"items": 1}, {"is_own": False}, {"title": "combine(nothing)"}):
        kept = activity(stage("operator", "nothing", **{**values, **change}), rollouts, iteration=0)
        assert first(kept, facts()).cause != "dropping"
    assert first(activity(dropping, rollouts, iteration=1), facts()).cause != "dropping"
