"""Gradients computed in one place and applied in another: what one update of all rows would do."""

import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CConfig, A2CTorchPolicy
from flowrl.data import SampleBatch
from flowrl.iter import MetricsContext, Source, metrics_scope
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


def test_the_average_is_that_of_all_rows():
    """Parts of different sizes, whose rows are weighted alike, against one update."""
    with make() as workers, make() as plain:
        batch = ParallelRollouts(plain).take(1)[0]
        TrainOneStep(plain)(batch)
        compute = ComputeGradients(workers)
        before = weights(workers)
        parts = [compute(part) for part in (batch[:5], batch[5:20], batch[20:])]
        for name, weight in weights(workers).items():
            np.testing.assert_array_equal(weight, before[name])
        average = AverageGradients()(parts)
        assert (average.env_steps(), average.rows) == (32, {"default_policy": 32})
        given, info = ApplyGradients(workers)(average)
        assert given is average
        told = info["default_policy"]
        assert told["num_agent_steps_trained"] == 32
        losses = [one.stats["default_policy"]["total_loss"] for one in parts]
        assert told["learner_stats"]["total_loss"] == pytest.approx(
            np.average(losses, weights=[5, 15, 12])
        )
        for name, weight in weights(plain).items():
            np.testing.assert_allclose(weights(workers)[name], weight, rtol=1e-5, atol=1e-6)


def test_the_mean_of_equal_parts_is_their_mean():
    items = [Gradients({"p": np.array([v])}, {"p": 4}, {"p": {"a": v}}, 4) for v in (2.0, 4.0)]
    made = AverageGradients()(items)
    assert made.by_policy["p"].tolist() == [3.0]
    assert (made.stats, made.rows, made.count) == ({"p": {"a": 3.0}}, {"p": 8}, 8)
    one_more = Gradients({"q": np.array([5.0])}, {"q": 2}, {"q": {}}, 2)
    assert AverageGradients()([*items, one_more]).by_policy["q"].tolist() == [5.0]


@pytest.mark.slow_on_actors
def test_in_a_plan_over_workers(num_workers):
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


def test_only_the_sources_get_new_weights():
    with make(2) as workers:
        sent = [workers.weights_for(i) for i in range(2)]
        assert all(payload is not None for payload in sent)
        batch = SampleBatch.concat_samples([workers.local_worker().sample()])
        compute, apply = ComputeGradients(workers), ApplyGradients(workers, update_all=False)
        made = compute(batch)
        made.sources = (Source(1),)
        apply(made)
        assert workers.weights_for(0) is None
        assert workers.weights_for(1) is not None
        assert workers.weights_for(1) is None
        made.sources = (Source(0),)
        apply(made)
        assert workers.weights_for(1) is None
        _, versions, *_ = workers.weights_for(0)
        assert versions == workers.weight_sync.versions()


@pytest.mark.slow
def test_gradients_in_lockstep_are_those_of_a2c(ray_session):
    """Two workers' gradients at the same weights add up to the gradient of their joined rows."""
    with make(2) as workers, make(2) as other:
        there = (
            workers.parallel_iterator().for_each(ComputeGradientsOnWorker()).batch_across_shards()
        )
        apart = next(there)
        (joined,) = ParallelRollouts(other, mode="bulk_sync").take(1)
        whole = ComputeGradients(other)(joined)
        mean = sum(one.by_policy["default_policy"] for one in apart) / 2
        np.testing.assert_allclose(mean, whole.by_policy["default_policy"], rtol=1e-5, atol=1e-6)
        assert [one.rows["default_policy"] for one in apart] == [32, 32]


@pytest.mark.slow_on_actors
def test_gradients_as_they_come(num_workers, metrics):
    with make(num_workers) as workers:
        plan = AsyncGradients(workers).for_each(ApplyGradients(workers, update_all=False))
        before = weights(workers)
        done = plan.take(6)
        counters = plan.metrics.counters
        assert counters["num_env_steps_sampled"] == counters["num_env_steps_trained"] == 6 * 32
        assert counters["num_agent_steps_sampled/default_policy"] == 6 * 32
        for gradients, info in done:
            assert [source.worker < max(num_workers, 1) for source in gradients.sources] == [True]
            assert np.isfinite(info["default_policy"]["learner_stats"]["total_loss"])
        lags = [i["default_policy"]["learner_stats"]["policy_lag_max"] for _, i in done]
        assert max(lags) <= max(num_workers - 1, 0) * 3
        assert any((weight != before[n]).any() for n, weight in weights(workers).items())
        assert workers.local_worker().policy.version == 6


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


def test_a_worker_whose_gradients_are_dropped_gets_new_weights(ray_session):
    with make(2) as workers:
        for index in range(2):
            assert workers.weights_for(index) is not None
        workers.update_only([])
        policy = workers.local_worker().policy
        policy.set_weights(policy.get_weights())  # a new version
        stale = Gradients({}, {}, {}, 8)
        stale.sources = (Source(1, tags={"weights_versions": {"default_policy": 0}}),)
        assert not DropStale(workers, 0)(stale)
        assert workers.weights_for(0) is None
        assert workers.weights_for(1) is not None


def test_gradients_that_are_not_finite_are_left_out_if_that_is_asked_for():
    with make(on_nonfinite_update="skip") as workers, make() as strict:
        (batch,) = ParallelRollouts(strict).take(1)
        odd = batch.with_columns(advantages=np.full(32, np.nan, np.float32))
        before = weights(workers)
        ApplyGradients(workers)(ComputeGradients(workers)(odd))
        assert workers.local_worker().policy.num_skipped_updates == 1
        for name, weight in weights(workers).items():
            np.testing.assert_array_equal(weight, before[name])
        with pytest.raises(FloatingPointError):
            ComputeGradients(strict)(odd)


def test_what_cannot_be_done():
    with make() as workers:
        with pytest.raises(TypeError, match="takes Gradients, got SampleBatch"):
            ApplyGradients(workers)(SampleBatch())
        with pytest.raises(TypeError, match="takes a list of Gradients"):
            AverageGradients()(Gradients({}, {}, {}, 0))
        with pytest.raises(KeyError, match="unknown policies"):
            ApplyGradients(workers)(Gradients({"x": 1}, {"x": 1}, {"x": {}}, 1))
        with pytest.raises(TypeError, match="policies is a collection"):
            ComputeGradients(workers, policies="p")
        with pytest.raises(TypeError, match="policies is a collection"):
            ApplyGradients(workers, policies="p")
        with pytest.raises(TypeError, match="policies is a collection"):
            AsyncGradients(workers, policies="p")
        with pytest.raises(ValueError, match="max_policy_lag is a whole number from 0, got -1"):
            AsyncGradients(workers, max_policy_lag=-1)
        with pytest.raises(ValueError, match="num_async must be an int >= 1"):
            AsyncGradients(workers, num_async=0)
    with make(output="x") as workers, pytest.raises(ValueError, match="output: AsyncGradients"):
        AsyncGradients(workers)
