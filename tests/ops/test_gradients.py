"""Gradients that are computed separately and applied together equal one update on all rows."""

import numpy as np
import optree
import pytest

from flowrl.algorithms.a2c import A2CConfig, A2CTorchPolicy
from flowrl.algorithms.appo import APPOConfig, APPOTorchPolicy
from flowrl.algorithms.dqn import DQNConfig, DQNTorchPolicy
from flowrl.data import SampleBatch
from flowrl.iter import MetricsContext, Source, metrics_scope
from flowrl.learners.decentralized import LearnOnWorker
from flowrl.ops import (
    ApplyGradients,
    AsyncGradients,
    AverageGradients,
    ComputeGradients,
    Gradients,
    ParallelRollouts,
    TrainOneStep,
)
from flowrl.ops.gradients import ComputeGradientsOnWorker
from flowrl.ops.rollout import DropStale
from flowrl.sampling import WorkerSet


def make(num_workers=0, **settings):
    settings = {"seed": 0, "rollout_fragment_length": 32, "grad_clip": None, **settings}
    config = A2CConfig(env="CartPole-v1", num_workers=num_workers, **settings)
    return WorkerSet("CartPole-v1", A2CTorchPolicy, config, num_workers=num_workers)


@pytest.fixture(autouse=True)
def metrics():
    with metrics_scope(MetricsContext()) as context:
        yield context


def weights(workers):
    return workers.local_worker().policy.get_weights()


@pytest.mark.parametrize("operator", [ComputeGradientsOnWorker(), LearnOnWorker(1, 0, None)])
def test_remote_workers_do_not_train_policies_with_target_networks(operator):
    settings = {"env": "CartPole-v1", "seed": 0}
    for policy_class, config in ((APPOTorchPolicy, APPOConfig), (DQNTorchPolicy, DQNConfig)):
        with WorkerSet("CartPole-v1", policy_class, config(**settings), num_workers=0) as workers:
            local, remote = workers.local_worker(), workers.new_worker(1)
            batch = local.sample()
            operator.bound_to(local)(batch)
            message = f"is a {policy_class.__name__}, which has a target network"
            with pytest.raises(TypeError, match=message):
                operator.bound_to(remote)(batch)
            remote.stop()


def test_average_gradient_equals_gradient_of_all_rows():
    """Parts of different sizes are weighted by their rows."""
    with make() as workers, make() as reference:
        batch = ParallelRollouts(reference).take(1)[0]
        TrainOneStep(reference)(batch)
        compute = ComputeGradients(workers)
        before = weights(workers)
        parts = [compute(part) for part in (batch[:5], batch[5:20], batch[20:])]
        for name, weight in weights(workers).items():
            np.testing.assert_array_equal(weight, before[name])
        average = AverageGradients()(parts)
        assert (average.env_steps(), average.rows) == (32, {"default_policy": 32})
        applied, info = ApplyGradients(workers)(average)
        assert applied is average
        policy_info = info["default_policy"]
        assert policy_info["num_agent_steps_trained"] == 32
        losses = [part.stats["default_policy"]["total_loss"] for part in parts]
        assert policy_info["learner_stats"]["total_loss"] == pytest.approx(
            np.average(losses, weights=[5, 15, 12])
        )
        for name, weight in weights(reference).items():
            np.testing.assert_allclose(weights(workers)[name], weight, rtol=1e-5, atol=1e-6)


def test_masked_rows_have_no_weight_in_an_average():
    with make() as workers:
        batch = next(ParallelRollouts(workers))
        masked = batch.with_columns(loss_mask=np.arange(32) % 8 == 0)
        compute = ComputeGradients(workers)
        average = AverageGradients()([compute(masked[:8]), compute(masked[8:])])
        whole = compute(masked)
        _, info = ApplyGradients(workers)(average)
    assert average.rows == whole.rows == {"default_policy": 4}
    assert info["default_policy"]["num_agent_steps_trained"] == average.agent_steps() == 32
    gradients = [one.by_policy["default_policy"] for one in (average, whole)]
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-6)


def test_equal_parts_are_averaged_equally():
    items = [Gradients({"p": np.array([v])}, {"p": 4}, {"p": {"a": v}}, 4) for v in (2.0, 4.0)]
    average = AverageGradients()(items)
    assert average.by_policy["p"].tolist() == [3.0]
    assert (average.stats, average.rows, average.num_env_steps) == ({"p": {"a": 3.0}}, {"p": 8}, 8)
    other_policy = Gradients({"q": np.array([5.0])}, {"q": 2}, {"q": {}}, 2)
    assert AverageGradients()([*items, other_policy]).by_policy["q"].tolist() == [5.0]


@pytest.mark.slow_on_actors
def test_gradient_operators_train_in_a_plan(num_workers):
    with make(num_workers) as workers:
        plan = (
            ParallelRollouts(workers, mode="bulk_sync")
            .for_each(ComputeGradients(workers))
            .batch(2)
            .for_each(AverageGradients())
            .for_each(ApplyGradients(workers))
        )
        before = weights(workers)
        _, info = plan.take(2)[1]
        steps = 32 * max(num_workers, 1)
        counters = plan.metrics.counters
        assert counters["num_env_steps_trained"] == 4 * steps
        assert counters["num_agent_steps_trained/default_policy"] == 4 * steps
        assert np.isfinite(info["default_policy"]["learner_stats"]["total_loss"])
        assert any((weight != before[n]).any() for n, weight in weights(workers).items())
        assert "AverageGradients" in plan.explain()
        timers = plan.metrics.timers
        counts = [timers[name].count for name in ("sample", "compute_grads", "apply_grad")]
        assert counts == [4, 4, 2]
        assert timers["compute_grads"].mean_throughput > 0


def test_only_the_sources_of_gradients_get_new_weights():
    with make(2) as workers:
        initial = [workers.take_weights(i) for i in range(2)]
        assert all(payload is not None for payload in initial)
        batch = SampleBatch.concat_samples([workers.local_worker().sample()])
        compute, apply = ComputeGradients(workers), ApplyGradients(workers, update_all=False)
        gradients = compute(batch)
        gradients.sources = (Source(1),)
        apply(gradients)
        assert workers.take_weights(0) is None
        assert workers.take_weights(1) is not None
        assert workers.take_weights(1) is None
        gradients.sources = (Source(0),)
        apply(gradients)
        assert workers.take_weights(1) is None
        _, versions, *_ = workers.take_weights(0)
        assert versions == workers.weight_sync.versions()


@pytest.mark.slow
def test_synchronous_worker_gradients_equal_the_gradient_of_all_rows(ray_session):
    """The mean of two workers' gradients at the same weights is the gradient of all their rows."""
    with make(2) as workers, make(2) as other:
        stream = (
            workers.parallel_iterator().for_each(ComputeGradientsOnWorker()).batch_across_shards()
        )
        parts = next(stream)
        (batch,) = ParallelRollouts(other, mode="bulk_sync").take(1)
        expected = ComputeGradients(other)(batch).by_policy["default_policy"]
        mean = sum(part.by_policy["default_policy"] for part in parts) / 2
        np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-6)
        assert [part.rows["default_policy"] for part in parts] == [32, 32]


@pytest.mark.slow_on_actors
def test_async_gradients_train_and_are_counted(num_workers, metrics):
    with make(num_workers) as workers:
        plan = AsyncGradients(workers).for_each(ApplyGradients(workers, update_all=False))
        before = weights(workers)
        items = plan.take(6)
        counters = plan.metrics.counters
        assert counters["num_env_steps_sampled"] == counters["num_env_steps_trained"] == 6 * 32
        assert counters["num_agent_steps_sampled/default_policy"] == 6 * 32
        for gradients, info in items:
            assert [source.shard < max(num_workers, 1) for source in gradients.sources] == [True]
            assert np.isfinite(info["default_policy"]["learner_stats"]["total_loss"])
        lags = [i["default_policy"]["learner_stats"]["policy_lag_max"] for _, i in items]
        assert max(lags) <= max(num_workers - 1, 0) * 3
        assert any((weight != before[n]).any() for n, weight in weights(workers).items())
        assert workers.local_worker().policy.version == 6


@pytest.mark.slow
def test_stale_gradients_are_dropped_and_counted(ray_session):
    with make(2) as workers:
        plan = AsyncGradients(workers, num_async=3, max_policy_lag=0).for_each(
            ApplyGradients(workers, update_all=False)
        )
        plan.take(4)
        counters = plan.metrics.counters
        assert counters["num_env_steps_dropped"] > 0
        assert counters["num_env_steps_sampled"] == (
            counters["num_env_steps_dropped"] + counters["num_env_steps_trained"]
        )


def test_worker_of_dropped_gradients_gets_new_weights(ray_session):
    with make(2) as workers:
        for index in range(2):
            assert workers.take_weights(index) is not None
        workers.weight_sync.update_only([])
        policy = workers.local_worker().policy
        policy.set_weights(policy.get_weights())  # a new version
        stale = Gradients({}, {}, {}, 8)
        stale.sources = (Source(1, tags={"weights_versions": {"default_policy": 0}}),)
        assert not DropStale(workers, 0)(stale)
        assert workers.take_weights(0) is None
        assert workers.take_weights(1) is not None


def test_nonfinite_gradients_are_skipped_only_with_the_setting():
    with make(on_nonfinite_update="skip") as workers, make() as strict:
        (batch,) = ParallelRollouts(strict).take(1)
        nonfinite = batch.with_columns(advantages=np.full(32, np.nan, np.float32))
        before = weights(workers)
        _, info = ApplyGradients(workers)(ComputeGradients(workers)(nonfinite))
        assert workers.local_worker().policy.num_skipped_updates == 1
        assert info["default_policy"]["learner_stats"]["num_skipped_updates"] == 1
        for name, weight in weights(workers).items():
            np.testing.assert_array_equal(weight, before[name])
        with pytest.raises(FloatingPointError, match="not finite in it: advantages"):
            ComputeGradients(strict)(nonfinite)


def test_invalid_items_and_arguments_are_rejected():
    with make() as workers:
        with pytest.raises(TypeError, match="takes Gradients, got SampleBatch"):
            ApplyGradients(workers)(SampleBatch())
        with pytest.raises(TypeError, match="takes a list of Gradients"):
            AverageGradients()(Gradients({}, {}, {}, 0))
        with pytest.raises(KeyError, match="unknown policies"):
            ApplyGradients(workers)(Gradients({"x": 1}, {"x": 1}, {"x": {}}, 1))
        with pytest.raises(TypeError, match="policies must be a collection"):
            ComputeGradients(workers, policies="p")
        with pytest.raises(TypeError, match="policies must be a collection"):
            ApplyGradients(workers, policies="p")
        with pytest.raises(TypeError, match="policies must be a collection"):
            AsyncGradients(workers, policies="p")
        with pytest.raises(ValueError, match=r"max_policy_lag must be .*, got -1"):
            AsyncGradients(workers, max_policy_lag=-1)
        with pytest.raises(ValueError, match="num_async must be an int of at least 1"):
            AsyncGradients(workers, num_async=0)
    with make(output="x") as workers, pytest.raises(ValueError, match="output: AsyncGradients"):
        AsyncGradients(workers)


def test_gradients_without_rows_to_learn_from_are_averaged_to_zero():
    items = [Gradients({"p": np.array([0.0])}, {"p": 0}, {"p": {}}, 4) for _ in range(2)]
    average = AverageGradients()(items)
    assert (average.by_policy["p"].tolist(), average.rows) == ([0.0], {"p": 0})


def test_gradients_that_update_no_policy_do_not_count_as_training(metrics):
    workers = make(policies_to_train=[])
    batches = ParallelRollouts(workers, mode="bulk_sync").take(1)
    _, info = ApplyGradients(workers)(ComputeGradients(workers)(batches[0]))
    assert info == {}
    assert metrics.counters["num_env_steps_trained"] == 0
    workers.stop()


def test_list_of_batches_is_no_list_of_gradients():
    with pytest.raises(TypeError, match="a list with a SampleBatch: chain ComputeGradients before"):
        AverageGradients()([SampleBatch(obs=np.zeros(2))])


def test_mean_of_gradients_by_name_counts_missing_ones_as_zeros():
    parts = [
        Gradients({"p": {"w": np.ones(2), "b": None}}, {"p": 1}, {"p": {}}, 1, ()),
        Gradients({"p": {"b": np.ones(1)}}, {"p": 3}, {"p": {}}, 3, ()),
    ]
    mean = AverageGradients()(parts).by_policy["p"]
    assert {name: part.tolist() for name, part in mean.items()} == {"w": [0.25] * 2, "b": [0.75]}


@pytest.mark.parametrize("form", [list, tuple, lambda parts: {"a": {"w": parts[0]}}])
def test_mean_of_nested_gradients(form):
    parts = [form([np.full(2, value)]) for value in (1.0, 3.0)]
    gradients = [Gradients({"p": part}, {"p": 1}, {"p": {}}, 1, ()) for part in parts]
    (mean,) = optree.tree_leaves(AverageGradients()(gradients).by_policy["p"])
    assert mean.tolist() == [2.0, 2.0]
