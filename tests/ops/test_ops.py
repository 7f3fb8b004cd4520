"""Unit tests of rollout, training and reporting operators."""

import copy
import itertools
import json
import pickle
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CConfig, A2CTorchPolicy
from flowrl.algorithms.ppo import PPOConfig
from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.data.serialization import ArrayStore, decode, encode
from flowrl.envs import make_multi_agent
from flowrl.iter import (
    LocalIterator,
    ParallelIterator,
    Source,
    _get_shared_metrics,
    metrics_scope,
)
from flowrl.iter.metrics import MetricsContext
from flowrl.learners.learner import PolicyUpdate
from flowrl.ops import (
    AggregateBatches,
    ApplyGradients,
    AsyncGradients,
    BatchRef,
    BroadcastUpdateLearnerWeights,
    ComputeGradients,
    ConcatBatches,
    Concurrently,
    CountRollouts,
    LearnerThread,
    MixInReplay,
    ParallelRollouts,
    Record,
    SelectExperiences,
    StandardizeFields,
    StandardMetricsReporting,
    TrainOneStep,
    TrainOnWorkers,
    UpdateTargetNetwork,
    record_training,
)
from flowrl.ops.plan_metrics import MAX_EPISODES, PlanMetrics, record_updates
from flowrl.ops.report import CollectMetrics
from flowrl.policies import PolicySpec
from flowrl.sampling import WorkerSet
from flowrl.sampling.worker_config import WorkerConfig
from flowrl.state_schema import StateError

from ..sampling.fakes import CountEnv, ObservedValue


def make_workers(num_workers):
    config = {"rollout_fragment_length": 10, "num_envs_per_worker": 2}
    return WorkerSet(lambda context: CountEnv(), ObservedValue, config, num_workers=num_workers)


@pytest.fixture
def workers(num_workers):
    with make_workers(num_workers) as worker_set:
        yield worker_set


@pytest.fixture
def local_workers():
    """Workers in process, for what does not depend on actors."""
    with make_workers(0) as worker_set:
        yield worker_set


def rows(n):
    return SampleBatch(x=np.arange(n, dtype=np.float32))


def test_raw_rollouts_cannot_be_reported():
    worker_set = WorkerSet("CartPole-v1", A2CTorchPolicy, {})
    rollouts = ParallelRollouts(worker_set, mode="raw")
    with pytest.raises(TypeError, match=r"got a ParallelIterator: chain gather_sync\(\) or "):
        StandardMetricsReporting(rollouts, worker_set, {})
    with pytest.raises(TypeError, match="a list of items, it returned a SampleBatch"):
        next(ParallelRollouts(worker_set).combine(lambda batch: batch))
    worker_set.stop()


def test_bulk_sync_concatenates_a_fragment_of_every_worker(workers):
    rollouts = ParallelRollouts(workers, mode="bulk_sync")
    batch = next(rollouts)
    shards = max(1, workers.num_workers)
    assert batch.count == 20 * shards
    assert [source.shard for source in batch.sources] == list(range(shards))
    assert rollouts.metrics.counters["num_env_steps_sampled"] == 20 * shards
    assert rollouts.metrics.counters["num_agent_steps_sampled"] == 20 * shards
    assert len(PlanMetrics.of(rollouts.metrics).new_episodes) == 6 * shards


@pytest.mark.slow_on_actors
def test_async_returns_fragments(workers):
    rollouts = ParallelRollouts(workers, mode="async")
    batches = rollouts.take(4)
    assert [batch.count for batch in batches] == [20] * 4
    assert all(len(batch.sources) == 1 for batch in batches)


@pytest.mark.slow_on_actors
def test_explain_shows_the_share_of_time_that_workers_sample(workers):
    rollouts = ParallelRollouts(workers, mode="async")
    shards = max(1, workers.num_workers)
    deadline = time.monotonic() + 60  # workers report once per second
    text = f"on {shards} shard{'s' if shards > 1 else ''}: RolloutWorker"
    while text not in rollouts.explain() and time.monotonic() < deadline:
        next(rollouts)
    assert text in rollouts.explain()
    (by_shard,) = (row["shards"] for row in rollouts.stats() if "shards" in row)
    for (row,) in by_shard.values():
        assert row["stage"] == "RolloutWorker" and 0 < row["busy"] <= 1


@pytest.mark.parametrize("mode", ["bulk_sync", "raw"])
def test_rollouts_of_a_config_are_refused(mode):
    with pytest.raises(TypeError, match=r"takes a WorkerSet, .*, got a A2CConfig"):
        ParallelRollouts(A2CConfig(), mode=mode)


@pytest.mark.slow_on_actors
def test_raw_mode_returns_the_parallel_iterator(workers):
    raw = ParallelRollouts(workers, mode="raw")
    assert isinstance(raw, ParallelIterator)
    counts = raw.for_each(lambda batch: batch.count)
    assert counts.gather_sync().take(2) == [20, 20]


@pytest.mark.parametrize("mode", ["raw", "bulk_sync"])
@pytest.mark.parametrize(
    "option", [{"num_async": 2}, {"by_reference": True}, {"max_policy_lag": 1}]
)
def test_options_of_the_async_mode_are_rejected_in_other_modes(local_workers, mode, option):
    with pytest.raises(ValueError, match=f'{next(iter(option))} is for mode="async"'):
        ParallelRollouts(local_workers, mode=mode, **option)
    with pytest.raises(TypeError, match="num_asinc"):
        ParallelRollouts(local_workers, mode=mode, num_asinc=2)


def test_state_of_reports_is_a_copy():
    with WorkerSet(
        "CartPole-v1", A2CTorchPolicy, {"rollout_fragment_length": 10, "seed": 1}
    ) as workers:
        collect = CollectMetrics(workers, 100)
        rollouts = ParallelRollouts(workers).for_each(TrainOneStep(workers))
        with rollouts.for_each(collect) as reports:
            reports.take(6)
            state = collect.state_dict()
            saved = copy.deepcopy(state)
            reports.take(2)
    assert state == saved
    assert state["window"]
    collect.load_state_dict(state)
    assert collect.state_dict()["window"] == saved["window"]


def test_wrong_arguments_name_the_operator(local_workers):
    rollouts = ParallelRollouts(local_workers)
    with pytest.raises(TypeError, match=r"takes \(stream, workers, config\).*got a dict"):
        StandardMetricsReporting(rollouts, {}, local_workers)
    report = StandardMetricsReporting(ParallelRollouts(local_workers), local_workers, {})
    both = Concurrently([report, rollouts], mode="round_robin")
    with pytest.raises(ValueError, match=r"Reporting chained at .*test_ops.py:\d+: a plan has one"):
        StandardMetricsReporting(both, local_workers, {})
    with pytest.raises(TypeError, match="AggregateBatches takes a LocalIterator, got 3"):
        AggregateBatches(3)


def test_unknown_mode_is_rejected(local_workers):
    with pytest.raises(ValueError, match="bulk_sync"):
        ParallelRollouts(local_workers, mode="sync")


def test_workers_sample_with_the_newest_weights(workers):
    rollouts = ParallelRollouts(workers, mode="bulk_sync")
    train = rollouts.for_each(TrainOneStep(workers))
    for _ in range(3):
        version = workers.local_worker().policy.version
        batch, info = next(train)
        assert {source.tags["weights_versions"]["default_policy"] for source in batch.sources} == {
            version
        }
        assert info["default_policy"]["num_agent_steps_trained"] == batch.count
    assert train.metrics.counters["num_env_steps_trained"] == 3 * batch.count


def test_concat_batches_collects_the_minimum_size():
    concat = ConcatBatches(5)
    assert concat(rows(3)) == []
    assert concat(SampleBatch()) == []
    (joined,) = concat(rows(4))
    assert joined.count == 7
    assert concat(rows(1)) == []
    multi_agent = MultiAgentBatch({"a": rows(2), "b": rows(2)}, env_steps=2)
    assert ConcatBatches(4, count_steps_by="agent_steps")(multi_agent)[0].env_steps() == 2
    assert ConcatBatches(4, count_steps_by="env_steps")(multi_agent) == []
    with pytest.raises(ValueError, match="count_steps_by"):
        ConcatBatches(4, count_steps_by="steps")
    with pytest.raises(ValueError, match="min_batch_size"):
        ConcatBatches(0)


def test_batches_that_do_not_fit_together_are_dropped():
    concat = ConcatBatches(4)
    concat(rows(2))
    with pytest.raises(ValueError, match="dimension"):
        concat(SampleBatch(x=np.zeros((2, 7), np.float32)))
    assert concat(rows(2)) == []
    assert concat(rows(2))[0].count == 4
    with pytest.raises(TypeError, match="positional arguments"):
        ConcatBatches(4, "env_steps", [])


def test_saved_batches_keep_their_sources():
    batch = rows(2)
    batch.sources = (Source(3, tags={"weights_versions": {"default_policy": 7}}),)
    concat, restored = ConcatBatches(4), ConcatBatches(4)
    concat(batch)
    mix, restored_mix = MixInReplay(2, 1.0), MixInReplay(2, 1.0)
    mix(batch)
    arrays = ArrayStore()
    tree = encode([concat.state_dict(), mix.state_dict()], "", arrays)
    state, mixed = decode(json.loads(json.dumps(tree)), arrays, bytes(arrays.packed))
    restored.load_state_dict(state)
    restored_mix.load_state_dict(mixed)
    (joined,) = restored(rows(2))
    for replayed in (joined, restored_mix(rows(2))[1]):
        (source,) = replayed.sources
        assert (source.shard, source.tags) == (3, {"weights_versions": {"default_policy": 7}})


def test_train_batch_waits_for_a_second_round_after_lost_steps():
    class FailsOnce(CountEnv):
        num_steps = 0

        def step(self, action):
            FailsOnce.num_steps += 1
            if FailsOnce.num_steps == 8:
                raise OSError("the simulator is gone")
            return super().step(action)

    config = {"rollout_fragment_length": 10, "max_num_env_restarts": 1}
    workers = WorkerSet(lambda context: FailsOnce(), ObservedValue, config)
    batches = ParallelRollouts(workers).combine(ConcatBatches(10))
    counts = [batch.count for batch in batches.take(2)]
    workers.stop()
    assert 10 < counts[0] < 20
    assert counts[1] == 10


def test_select_experiences_keeps_rows_of_the_policies():
    multi_agent = MultiAgentBatch({"a": rows(2), "b": rows(3)}, env_steps=3)
    assert list(SelectExperiences(["b"])(multi_agent).policy_batches) == ["b"]
    batch = rows(2)
    assert SelectExperiences(["b"])(batch) is batch
    with pytest.raises(TypeError, match="collection"):
        SelectExperiences("b")
    with pytest.raises(ValueError, match="policy_ids is empty, so no rows would be kept"):
        SelectExperiences([])


def test_standardize_fields_needs_fields():
    with pytest.raises(ValueError, match="fields is empty, so nothing would be standardized"):
        StandardizeFields([])


def test_standardize_fields_does_not_change_its_input():
    batch = rows(5)
    standardized = StandardizeFields(["x"])(batch)
    assert abs(standardized["x"].mean()) < 1e-6
    assert abs(standardized["x"].std() - 1) < 1e-6
    assert batch["x"][4] == 4
    constant = SampleBatch(x=np.ones(3, np.float32))
    assert StandardizeFields(["x"])(constant)["x"].tolist() == [0, 0, 0]
    multi_agent = MultiAgentBatch({"a": rows(3)}, 3)
    assert abs(StandardizeFields(["x"])(multi_agent)["a"]["x"].mean()) < 1e-6


def test_only_the_given_policies_learn():
    workers = WorkerSet(lambda c: CountEnv(), ObservedValue)
    train = TrainOneStep(workers)
    with metrics_scope(MetricsContext()) as metrics:
        with pytest.raises(ValueError, match="policies is empty, so nothing would be trained"):
            TrainOneStep(workers, policies=[])
        with pytest.raises(KeyError, match=r"unknown policies \['other'\]"):
            TrainOneStep(workers, policies=["other"])(rows(4))
        assert metrics.counters["num_agent_steps_trained"] == 0
        _, info = train(rows(4))
        assert info["default_policy"]["learner_stats"] == {"rows": 4.0}
        assert PlanMetrics.of(metrics).trainers["TrainOneStep"].learn.count == 1
        with pytest.raises(KeyError, match="ghost"):
            train(MultiAgentBatch({"ghost": rows(1)}, 1))


class CannotLearn(ObservedValue):
    def learn_on_batch(self, batch):
        raise FloatingPointError("not finite")


def test_error_of_a_policy_names_it_and_those_that_have_learned():
    policies = {"a": PolicySpec(ObservedValue), "b": PolicySpec(CannotLearn)}
    settings = {"policies": policies, "policy_mapping_fn": lambda *args, **kwargs: "a"}
    workers = WorkerSet(lambda c: CountEnv(), None, WorkerConfig(**settings))
    batch = MultiAgentBatch({"a": rows(2), "b": rows(2)}, 2)
    with metrics_scope(MetricsContext()), pytest.raises(FloatingPointError) as error:
        TrainOneStep(workers)(batch)
    note = "raised while policy 'b' learned; the policies ['a'] had learned from this batch before"
    assert note in error.value.__notes__


def test_two_training_operators_report_separately():
    workers = WorkerSet(lambda c: CountEnv(), ObservedValue)
    first, second = TrainOneStep(workers), TrainOneStep(workers)
    with metrics_scope(MetricsContext()) as metrics:
        for train, size in ((first, 4), (second, 2), (first, 3)):
            train(rows(size))
        trainers = PlanMetrics.of(metrics).trainers
        assert {name: trainer.learn.count for name, trainer in trainers.items()} == {
            "TrainOneStep": 2,
            "TrainOneStep#2": 1,
        }
        result = CollectMetrics(workers)(None)
        totals = result["trainers"].values()
        assert [total["num_env_steps_trained"] for total in totals] == [7, 2]
        assert [total["learners"]["default_policy"]["rows"] for total in totals] == [3.0, 2.0]
        assert "learn_time_ms" not in result["timers"]
        for name in ("TrainOneStep", "TrainOneStep#2"):
            assert f"learn_time_ms/{name}" in result["timers"]


@pytest.mark.slow_on_actors
def test_reports_follow_the_minimum_of_env_steps(workers):
    rollouts = ParallelRollouts(workers, mode="bulk_sync")
    config = {"min_sample_timesteps_per_iteration": 50, "metrics_num_episodes_for_smoothing": 4}
    report = StandardMetricsReporting(rollouts.for_each(TrainOneStep(workers)), workers, config)
    first, second = report.take(2)
    round_size = 20 * max(1, workers.num_workers)
    rounds = -(-50 // round_size)
    assert first["timesteps_total"] == first["timesteps_this_iter"] == rounds * round_size
    assert second["timesteps_total"] == 2 * first["timesteps_total"]
    assert first["episodes_in_window"] == 4
    assert first["episode_reward_mean"] == first["env_runners"]["episode_return_mean"] == 6.0
    assert first["policy_reward_mean"] == {"default_policy": 6.0}
    assert first["episode_len_mean"] == 3.0
    assert second["episodes_total"] == first["episodes_total"] + second["episodes_this_iter"]
    assert "rows" in second["learners"]["default_policy"]
    assert second["timers"]["learn_throughput"] > 0
    assert second["num_env_steps_trained"] == second["num_env_steps_sampled"]


def test_learn_throughput_counts_the_rows_of_all_policies(local_workers):
    updates = {name: PolicyUpdate({}, rows) for name, rows in (("a", 30), ("b", 70))}
    with metrics_scope(MetricsContext()) as metrics:
        train = TrainOneStep(local_workers)
        record_updates(metrics, train, updates, 50, 2.0)
        assert PlanMetrics.of(metrics).trainer(train).learn.mean_throughput == 50.0


def test_all_episodes_between_two_reports_are_counted(local_workers):
    with metrics_scope(MetricsContext()) as metrics:
        plan = PlanMetrics.of(metrics)
        count = CountRollouts(local_workers)
        episode = (1.0, 3, 0, None, None, None)
        source = Source(0, tags={"episodes": [episode] * 6_000})
        for _ in range(3):
            count(((source,), rows(2)))
        assert len(plan.new_episodes) == MAX_EPISODES < 18_000
        collect = CollectMetrics(local_workers)
        assert collect(None)["episodes_total"] == 18_000
        assert collect(None)["episodes_this_iter"] == 0


def test_reports_follow_the_minimum_time(monkeypatch):
    """Two reports are at least three seconds apart, when a fragment takes a second."""
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr("flowrl.ops.report.time", clock)
    workers = WorkerSet(lambda c: CountEnv(), ObservedValue, {"rollout_fragment_length": 10})
    rollouts = ParallelRollouts(workers)
    report = StandardMetricsReporting(rollouts, workers, {"min_time_s_per_iteration": 3})
    assert [next(report)["timesteps_total"] for _ in range(3)] == [30, 60, 90]


@pytest.mark.parametrize(
    ("min_steps", "min_s", "reported"), [(10, 3, [30, 60]), (50, 3, [50, 100]), (50, 1, [50, 100])]
)
def test_reports_follow_both_minima(monkeypatch, min_steps, min_s, reported):
    """A fragment of 10 env steps takes a second."""
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr("flowrl.ops.report.time", clock)
    workers = WorkerSet(lambda c: CountEnv(), ObservedValue, {"rollout_fragment_length": 10})
    config = {
        "min_sample_timesteps_per_iteration": min_steps, "min_time_s_per_iteration": min_s
    }  # fmt: skip
    report = StandardMetricsReporting(ParallelRollouts(workers), workers, config)
    assert [next(report)["timesteps_total"] for _ in reported] == reported


def test_operators_run_only_when_pulled(capsys):
    def debug_print(item):
        print("received", type(item).__name__)
        return item

    workers = WorkerSet(lambda c: CountEnv(), ObservedValue, {"rollout_fragment_length": 10})
    stream = ParallelRollouts(workers).for_each(debug_print)
    assert capsys.readouterr().out == ""
    next(stream)
    assert capsys.readouterr().out == "received SampleBatch\n"


def test_operators_outside_a_plan_need_a_metrics_scope():
    workers = WorkerSet(lambda c: CountEnv(), ObservedValue)
    with metrics_scope(MetricsContext()) as metrics:
        TrainOneStep(workers)(rows(3))
    assert metrics.counters["num_env_steps_trained"] == 3
    with pytest.raises(ValueError, match="metrics context"):
        TrainOneStep(workers)(rows(3))
    assert isinstance(ParallelRollouts(workers), LocalIterator)


def test_operators_reject_invalid_arguments():
    workers = WorkerSet(lambda c: CountEnv(), ObservedValue)
    with pytest.raises(ValueError, match="num_sgd_iter"):
        TrainOneStep(workers, num_sgd_iter=0)
    with pytest.raises(ValueError, match="sgd_minibatch_size"):
        TrainOneStep(workers, sgd_minibatch_size=-1)
    with pytest.raises(TypeError, match="policies"):
        TrainOneStep(workers, policies="ppo")
    with pytest.raises(TypeError, match="fields"):
        StandardizeFields("rewards")
    with pytest.raises(TypeError, match="policy_ids"):
        SelectExperiences(3)
    with pytest.raises(ValueError, match="min_batch_size"):
        ConcatBatches(float("nan"))
    with pytest.raises(ValueError, match=r"must be an int of at least 1, got 4\.0"):
        ConcatBatches(4.0)
    with pytest.raises(ValueError, match="max_policy_lag"):
        ParallelRollouts(workers, mode="raw", max_policy_lag=2)


def test_train_one_step_uses_the_policys_sgd_settings_by_default(local_workers, monkeypatch):
    policy = local_workers.local_worker().policy
    policy.config = policy.config.updated(num_sgd_iter=3, sgd_minibatch_size=4)
    calls = []
    monkeypatch.setattr(
        policy,
        "learn_on_minibatches",
        lambda rows, passes, size: calls.append((passes, size)) or {},
    )
    with metrics_scope(MetricsContext()):
        TrainOneStep(local_workers)(rows(10))
        TrainOneStep(local_workers)(rows(2))  # smaller than a minibatch: one update on all rows
        TrainOneStep(local_workers, num_sgd_iter=1, sgd_minibatch_size=0)(rows(10))
    assert calls == [(3, 4), (3, 2), (1, 0)]
    assert repr(TrainOneStep(local_workers)) == "TrainOneStep()"
    assert repr(TrainOneStep(local_workers, num_sgd_iter=2)) == "TrainOneStep(num_sgd_iter=2)"


def test_error_of_a_missing_return_value_names_the_cause(local_workers):
    for operator in (ConcatBatches(10), TrainOneStep(local_workers)):
        with (
            pytest.raises(TypeError, match="return"),
            metrics_scope(MetricsContext()),
        ):
            operator(None)


def test_returns_are_reported_for_a_limited_number_of_agents(local_workers, monkeypatch, caplog):
    monkeypatch.setattr("flowrl.ops.report.MAX_REPORTED_AGENTS", 3)
    collect = CollectMetrics(local_workers, 2)
    with metrics_scope(MetricsContext()) as metrics:
        plan = PlanMetrics.of(metrics)
        for agents, reported in ("ab", "ab"), ("cd", "abc"), ("ae", "ac"):
            returns = [(agent, "default_policy", 1.0) for agent in agents]
            plan.new_episodes.append((0, [2.0, 5, 0, returns, None, None]))
            assert sorted(collect(None)["agent_reward_mean"]) == list(reported)
        restored = CollectMetrics(local_workers, 2)
        restored.load_state_dict(copy.deepcopy(collect.state_dict()))
        assert sorted(restored(None)["agent_reward_mean"]) == ["a", "c"]
    assert caplog.text.count("has only the first 3 agent ids") == 1 + 1


@pytest.mark.parametrize("name", ["num_steps_sampled", "num_steps_trained"])
def test_counters_with_names_of_rllib_name_those_of_flowrl(name):
    counters = MetricsContext().counters
    expected = f"no counter {name!r}: use {name.replace('steps', 'env_steps')!r}"
    with pytest.raises(KeyError, match=expected):
        counters[name] += 1
    assert not counters
    assert counters["num_env_steps_sampled"] == counters["my_steps"] == 0
    for copied in (copy.deepcopy(counters), counters.copy(), pickle.loads(pickle.dumps(counters))):
        assert copied == {"num_env_steps_sampled": 0, "my_steps": 0}
        with pytest.raises(KeyError, match=expected):
            copied[name] += 1


def test_removed_workers_are_not_in_the_timers():
    with metrics_scope(MetricsContext()) as metrics:
        workers = WorkerSet(lambda c: CountEnv(), ObservedValue, {"num_workers": 2})
        collect = CollectMetrics(workers, 100)
        timings = PlanMetrics.of(metrics).sampler_timings
        timings |= {(0, 0): {"env_step_ms": 1.0}, (1, 0): {"env_step_ms": 0.5}}
        timings[1, 1] = {"env_step_ms": 1.5}  # the worker was replaced
        assert collect(None)["timers"]["sampler_env_step_ms"] == 3.0
        timings[2, 0] = {"env_step_ms": 9.0}
        assert collect(None)["timers"]["sampler_env_step_ms"] == 3.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mine", -1, "the counter 'mine' is -1: counters are numbers of at least 0"),
        ("mine", float("nan"), "the counter 'mine' is nan"),
        ("mine", np.ones(1), "the counter 'mine' is array"),
        ("mine", True, "the counter 'mine' is True"),
        (3, 1, "the name of a counter must be a string, got 3"),
    ],
)
def test_counters_that_cannot_be_saved_are_rejected(name, value, message):
    def count(batch):
        _get_shared_metrics().counters[name] = value
        return batch

    def plan(workers, config):
        return StandardMetricsReporting(ParallelRollouts(workers).for_each(count), workers, config)

    config = A2CConfig(env="CartPole-v1", train_batch_size=32)
    error = pytest.raises((TypeError, ValueError), match=re.escape(message))
    with config.build(plan=plan) as algorithm, error:
        algorithm.train()


def test_select_experiences_selects_rows_that_are_in_the_object_store(ray_session):
    batch = MultiAgentBatch({"a": rows(2), "b": rows(3)}, 3)
    ref = SelectExperiences(["b"])(BatchRef([ray_session.put(batch), batch], 6, {"a": 4, "b": 6}))
    assert (ref.env_steps(), ref.steps_by_policy()) == (6, {"b": 6})
    assert {pid: part.count for pid, part in ref.get().policy_batches.items()} == {"b": 6}
    with pytest.raises(TypeError, match="SelectExperiences takes batches, got tuple"):
        SelectExperiences(["b"])((batch, {}))


def test_rollouts_of_another_plan_do_not_turn_schedules_back():
    workers = WorkerSet(lambda context: CountEnv(), ObservedValue, {"rollout_fragment_length": 4})
    workers.global_vars["timestep"] = 1000
    next(ParallelRollouts(workers))
    assert workers.global_vars["timestep"] == 1000
    workers.stop()


def test_values_that_operators_set_are_in_the_results():
    config = A2CConfig(env="CartPole-v1", train_batch_size=8, seed=0)

    def note(item):
        _get_shared_metrics().info["my_values"] = [1, 2]
        return item

    with config.build() as algorithm:
        workers = algorithm.workers
        trained = ParallelRollouts(workers).for_each(TrainOneStep(workers)).for_each(note)
        result = next(StandardMetricsReporting(trained, workers, algorithm.config))
    assert result["info"]["my_values"] == [1, 2]
    assert "default_policy" in result["info"]["learner"]


def test_training_operators_are_numbered_in_the_order_of_the_plan():
    """Also if the second one is the first to train, as in a restored plan."""
    with A2CConfig(env="CartPole-v1", train_batch_size=8, seed=0).build() as algorithm:
        workers = algorithm.workers
        first, second = TrainOneStep(workers), TrainOneStep(workers)
        a, b = ParallelRollouts(workers).duplicate(2)
        plan = Concurrently([a.for_each(first), b.for_each(second)], output_indexes=[0, 1])
        plan.start()
        metrics = PlanMetrics.of(plan.metrics)
        with metrics_scope(plan.metrics):
            second(next(ParallelRollouts(workers)))
        assert list(metrics.trainers) == ["TrainOneStep#2"]
        plan.take(2)
        assert metrics.trainers["TrainOneStep#2"].num_env_steps_trained == 16
        assert metrics.trainers["TrainOneStep"].num_env_steps_trained == 8


@pytest.mark.slow
def test_fragments_that_were_received_but_not_returned_are_restored(ray_session):
    """The workers have sampled them, so a resumed plan would lack them."""
    config = A2CConfig(
        env="CartPole-v1",
        num_workers=2,
        num_cpus_per_worker=0,
        rollout_fragment_length=4,
        seed=0,
    )

    def plan_of(algorithm):
        shards = ParallelRollouts(algorithm.workers, mode="raw")
        return shards.gather_sync().zip_with_source().for_each(CountRollouts(algorithm.workers))

    with config.build() as algorithm:
        plan = plan_of(algorithm)
        plan.take(1)
        state = plan.state_dict(), algorithm.workers.state_dict()
        expected = plan.take(4)
    with config.build() as algorithm:
        restored = plan_of(algorithm)
        restored.load_state_dict(state[0])
        algorithm.workers.load_state_dict(state[1])
        for batch, same in zip(restored.take(4), expected, strict=True):
            np.testing.assert_array_equal(batch["obs"], same["obs"])


def test_rollouts_cannot_be_repartitioned(workers):
    with pytest.raises(ValueError, match="episodes, counters and weights belong to its workers"):
        ParallelRollouts(workers, mode="raw").repartition(2)


def test_state_between_two_reports_has_the_episodes_and_steps_of_the_next_one():
    """As in the checkpoint of a run that failed during an iteration."""

    def build():
        config = A2CConfig(env="CartPole-v1", train_batch_size=100, seed=0)
        return config.updated(min_sample_timesteps_per_iteration=300).build()

    def fail_at(number):
        def check(item):
            check.calls += 1
            if check.calls == number:
                raise OSError("disk")
            return item

        check.calls = 0
        return check

    def plan_of(algorithm, check):
        workers = algorithm.workers
        trained = ParallelRollouts(workers).combine(ConcatBatches(100))
        return StandardMetricsReporting(
            trained.for_each(TrainOneStep(workers)).for_each(check), workers, algorithm.config
        )

    with build() as algorithm:
        expected = next(plan_of(algorithm, fail_at(0)))
    with build() as algorithm:
        plan = plan_of(algorithm, fail_at(2))
        with pytest.raises(OSError, match="disk"):
            next(plan)
        state = plan.state_dict()
        restored = plan_of(algorithm, fail_at(0))
        restored.load_state_dict(state)
        result = next(restored)
    for name in ("timesteps_total", "episodes_total", "episodes_this_iter", "episode_reward_mean"):
        assert result[name] == expected[name] > 0
    (trainer,) = result["trainers"].values()
    assert trainer["num_env_steps_trained"] == 300
    state["metrics"]["records"]["PlanMetrics"]["num_new_episodes"] = -1
    again = plan_of(algorithm, fail_at(0))
    PlanMetrics.of(again.metrics)
    with pytest.raises(StateError, match="metrics/num_new_episodes"):
        again.load_state_dict(state)


@pytest.mark.parametrize("slow_first", [True, False])
def test_learners_are_those_of_the_last_operator_of_the_plan(slow_first):
    def plan(workers, config):
        first, second = ParallelRollouts(workers).duplicate(2)
        slow = first.combine(ConcatBatches(64)).for_each(TrainOneStep(workers))
        fast = second.for_each(TrainOneStep(workers))
        streams = [slow, fast] if slow_first else [fast, slow]
        return StandardMetricsReporting(streams[0].union(streams[1]), workers, config)

    config = A2CConfig(env="CartPole-v1", rollout_fragment_length=8, train_batch_size=8, seed=0)
    with config.build(plan=plan) as algorithm:
        for _ in range(20):
            result = algorithm.train()
    trainers = result["trainers"]
    first, last = trainers["TrainOneStep"]["learners"], trainers["TrainOneStep#2"]["learners"]
    assert first["default_policy"]["total_loss"] != last["default_policy"]["total_loss"]
    assert (
        result["learners"]["default_policy"]["total_loss"] == last["default_policy"]["total_loss"]
    )


class Halve:
    """Trains in its own way: halves the weights."""

    chained_with = "for_each"
    trains = True
    policies = None

    def __init__(self, workers, stats):
        self.policy, self.stats = workers.local_worker().policy, stats

    def __call__(self, batch):
        weights = self.policy.get_weights()
        self.policy.set_weights({name: weight / 2 for name, weight in weights.items()})
        return record_training(self, batch, self.stats)


def test_own_training_operators_are_counted_and_reported():
    def plan(workers, config):
        trained = ParallelRollouts(workers).for_each(
            Halve(workers, {"default_policy": {"size": np.float32(0.5)}})
        )
        return StandardMetricsReporting(trained, workers, config)

    config = A2CConfig(env="CartPole-v1", rollout_fragment_length=8, num_envs_per_worker=2, seed=0)
    with config.build(plan=plan) as algorithm:
        result = algorithm.train()
    assert result["learners"]["default_policy"]["size"] == 0.5
    assert result["num_env_steps_trained"] == result["timesteps_total"] > 0
    assert list(result["trainers"]) == ["Halve"]


def test_statistics_of_all_operators_that_train_a_policy_are_reported():
    def plan(workers, config):
        rollouts = ParallelRollouts(workers).for_each(TrainOneStep(workers))
        trained = rollouts.for_each(lambda item: item[0]).for_each(
            Halve(workers, {"default_policy": {"size": 0.5, "policy_loss": 7.0}})
        )
        return StandardMetricsReporting(trained, workers, config)

    config = A2CConfig(env="CartPole-v1", rollout_fragment_length=8, num_envs_per_worker=2, seed=0)
    with config.build(plan=plan) as algorithm:
        result = algorithm.train()
    stats = result["learners"]["default_policy"]
    assert (stats["size"], stats["policy_loss"]) == (0.5, 7.0)  # the later operator's
    assert (
        stats["vf_loss"]
        == result["trainers"]["TrainOneStep"]["learners"]["default_policy"]["vf_loss"]
    )


def test_own_training_operators_without_their_attributes_are_rejected():
    with pytest.raises(TypeError, match=r"object needs the attributes trains = True and policies"):
        record_training(object(), SampleBatch(obs=np.zeros((2, 3))), {})


@pytest.mark.parametrize(
    ("stats", "error", "message"),
    [
        ({"default_policy": {"x": "text"}}, TypeError, "the statistic 'x' of type str"),
        ({"other": {}}, KeyError, "no rows of the policy 'other', only of"),
        ({"x": 1.0}, TypeError, r"stats\['x'\] is .*: give the statistics of each policy"),
        (0.5, TypeError, "stats must be a dict by policy id, got 0.5"),
    ],
)
def test_invalid_statistics_of_own_training_operators_are_rejected(stats, error, message):
    def plan(workers, config):
        trained = ParallelRollouts(workers).for_each(Halve(workers, stats))
        return StandardMetricsReporting(trained, workers, config)

    config = A2CConfig(env="CartPole-v1", rollout_fragment_length=8, seed=0)
    with config.build(plan=plan) as algorithm, pytest.raises(error, match=message):
        algorithm.train()


@pytest.mark.parametrize(
    "operator",
    [
        TrainOneStep, ComputeGradients, ApplyGradients, AsyncGradients, LearnerThread,
        BroadcastUpdateLearnerWeights, lambda workers: UpdateTargetNetwork(workers, 10),
    ],
)  # fmt: skip
def test_config_in_place_of_workers_is_rejected(operator):
    with pytest.raises(TypeError, match="takes the WorkerSet, the first argument of a plan, got a"):
        operator(PPOConfig())


def test_batches_without_rows_of_the_trained_policies_are_reported(caplog):
    batch = MultiAgentBatch({"other": SampleBatch(obs=np.zeros((3, 4), np.float32))}, 3)
    policies = {name: PolicySpec() for name in ("default_policy", "other")}
    config = A2CConfig(env=make_multi_agent("CartPole-v1"), policies=policies)
    with config.build() as algorithm:
        train = TrainOneStep(algorithm.workers, policies=["default_policy"])
        stream = LocalIterator([batch] * 12).for_each(train)
        for _ in stream:
            pass
        assert stream.metrics.counters["num_env_steps_trained"] == 0
    assert caplog.text.count("had nothing to train on in 10 batches in a row") == 1


class HasPolicies:
    policies = ["mine"]

    def __call__(self, item):
        return item


@pytest.mark.parametrize("attributes", [{"policies": "default_policy"}, {"policies": 3}, {}])
def test_training_operator_of_the_user_must_name_its_policies(attributes):
    trains = type("Trains", (), {"__call__": lambda self, x: x, "trains": True, **attributes})
    with A2CConfig(env="CartPole-v1").build() as algorithm:
        stream = LocalIterator([1]).for_each(trains())
        with pytest.raises(TypeError, match="an operator with trains = True needs the attribute"):
            StandardMetricsReporting(stream, algorithm.workers, algorithm.config)


def test_attribute_policies_of_an_operator_that_does_not_train_may_be_anything():
    with A2CConfig(env="CartPole-v1").build() as algorithm:
        stream = LocalIterator([1]).for_each(HasPolicies())
        StandardMetricsReporting(stream, algorithm.workers, algorithm.config)


def test_multi_agent_batch_says_where_columns_and_methods_are():
    batch = MultiAgentBatch({"a": SampleBatch(obs=np.zeros(2))}, 2)
    with pytest.raises(AttributeError, match="policy_batches has a SampleBatch for each policy"):
        batch.with_columns(obs=1)
    with pytest.raises(KeyError, match="this is a column of the batches in policy_batches"):
        batch["obs"]
    assert not hasattr(batch, "keys")


def test_other_names_of_report_settings_are_accepted(local_workers):
    rollouts = ParallelRollouts(local_workers)
    report = StandardMetricsReporting(rollouts, local_workers, {"timesteps_per_iteration": 30})
    assert next(report)["timesteps_total"] >= 30


def test_standardizing_a_batch_without_rows_warns_of_nothing(recwarn):
    batch = SampleBatch(rewards=np.zeros(0, np.float32))
    assert StandardizeFields(["rewards"])(batch).count == 0
    assert not recwarn.list


@pytest.mark.parametrize("operator", [CountRollouts, TrainOnWorkers])
def test_config_in_place_of_the_workers_is_named(operator):
    with pytest.raises(TypeError, match="takes the WorkerSet, the first argument of a plan, got a"):
        operator(A2CConfig())


@pytest.mark.parametrize("workers", [None, "workers", [1]])
@pytest.mark.parametrize(
    "operator",
    [
        TrainOneStep,
        CountRollouts,
        CollectMetrics,
        ComputeGradients,
        lambda workers: UpdateTargetNetwork(workers, 64),
        lambda workers: BroadcastUpdateLearnerWeights(workers, 1),
    ],
)
def test_argument_that_is_no_worker_set_is_rejected_at_once(operator, workers):
    with pytest.raises(TypeError, match="takes the WorkerSet, the first argument of a plan, got a"):
        operator(workers)


def test_numpy_ints_are_counts():
    assert MixInReplay(np.int64(3), 0.5).buffer.num_slots == 3
    assert Record(np.int64(3)).items.maxlen == 3
    for arguments in ((None, 0.5), (3, None), (3, "x")):
        with pytest.raises(ValueError, match="must be"):
            MixInReplay(*arguments)


def test_policies_of_operators_are_a_collection():
    with pytest.raises(TypeError, match="policies must be a collection of names, got"):
        TrainOneStep(make_workers(0), policies=3)


def test_limit_of_rollouts_is_a_staleness_limit():
    with pytest.raises(TypeError, match="limit must be a StalenessLimit, got 3"):
        ParallelRollouts(make_workers(0), mode="async", limit=3)


def test_batch_whose_env_steps_are_0_is_not_dropped():
    batch = MultiAgentBatch({"a": SampleBatch(obs=np.zeros(4))}, 0)
    concat = ConcatBatches(4, count_steps_by="agent_steps")
    assert [b.agent_steps() for b in concat(batch)] == [4]


def test_env_steps_of_batches_without_rows_are_kept():
    """In a game of turns, a fragment may complete the row of no agent."""
    concat = ConcatBatches(5)
    assert concat(MultiAgentBatch({}, 3)) == []
    rows = SampleBatch(obs=np.zeros((1, 2), np.float32), rewards=np.zeros(1, np.float32))
    (batch,) = concat(MultiAgentBatch({"a": rows}, 2))
    assert (batch.env_steps(), batch.agent_steps()) == (5, 1)


def test_missing_target_network_is_an_error_at_the_first_item():
    with A2CConfig(env="CartPole-v1").build() as algorithm, metrics_scope(MetricsContext()):
        update = UpdateTargetNetwork(algorithm.workers, 50_000)
        with pytest.raises(TypeError, match="A2CTorchPolicy, has no target network"):
            update((None, {"default_policy": {"num_agent_steps_trained": 1}}))
