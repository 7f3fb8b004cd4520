"""Learners beside the plan: what one gives is what TrainOneStep gives; errors, ends, saves."""

import threading
import time

import numpy as np
import pytest

from flowrl.algorithms.a2c import A2C, A2CConfig
from flowrl.data import SampleBatch
from flowrl.iter import LocalIterator
from flowrl.ops import (
    ConcatBatches,
    Concurrently,
    Dequeue,
    Enqueue,
    LearnerThread,
    MinibatchBuffer,
    ParallelRollouts,
    StandardMetricsReporting,
    TrainOneStep,
)
from flowrl.ops.plan_metrics import PlanMetrics


def config(**settings):
    base = {"env": "CartPole-v1", "seed": 3, "rollout_fragment_length": 16, "grad_clip": None}
    return A2CConfig(**{**base, "model": {"fcnet_hiddens": [8]}, **settings})


class Beside(A2C):
    """A2C with its learner in a thread."""

    @staticmethod
    def execution_plan(workers, config):
        learner = LearnerThread(workers, queue_size=2)
        batches = ParallelRollouts(workers, mode="async").combine(ConcatBatches(32))
        both = [batches.for_each(Enqueue(learner)), Dequeue(learner)]
        trained = Concurrently(both, mode="async", output_indexes=[1])
        return StandardMetricsReporting(trained, workers, config)


def learner_of(algorithm):
    from flowrl.iter.stage import walk

    return next(s.learner for s in walk(algorithm.plan.stage) if getattr(s, "learner", None))


def weights(algorithm):
    return algorithm.workers.local_worker().policy.get_weights()


def threads():
    return sum(thread.name == "flowrl-learner" for thread in threading.enumerate())


def batches(algorithm, count):
    return ParallelRollouts(algorithm.workers).take(count)


@pytest.mark.parametrize("passes", [1, 3])
def test_it_learns_what_one_step_would(passes):
    with config().build() as plain, config().build() as other:
        given = batches(plain, 4)
        batches(other, 1)
        learner = LearnerThread(other.workers, num_sgd_iter=passes)
        feed = LocalIterator(given).for_each(Enqueue(learner))
        plan = Concurrently([feed, Dequeue(learner)], mode="async", output_indexes=[1])
        done = plan.take(4)
        plan.stop()
        step = TrainOneStep(plain.workers, num_sgd_iter=1, sgd_minibatch_size=0)
        LocalIterator([batch for batch in given for _ in range(passes)]).for_each(step).take(99)
        assert [batch for batch, _ in done] == given
        for name, weight in weights(plain).items():
            np.testing.assert_array_equal(weight, weights(other)[name])
        counters = plan.metrics.counters
        assert counters["num_env_steps_trained"] == sum(batch.count for batch in given)
        assert counters["num_agent_steps_trained/default_policy"] == 64
        assert PlanMetrics.of(plan.metrics).trainers["LearnerThread"].learn.count == 4


def test_minibatches_in_turn():
    buffer = MinibatchBuffer(size=2, num_passes=2)
    assert not buffer.is_full()
    buffer.put("a")
    buffer.put("b")
    assert buffer.is_full()
    assert [buffer.get() for _ in range(3)] == [("a", False), ("b", False), ("a", True)]
    buffer.put("c")
    state = buffer.state_dict()
    other = MinibatchBuffer(size=2, num_passes=2)
    other.load_state_dict(state)
    for one in (buffer, other):
        assert [one.get() for _ in range(3)] == [("b", True), ("c", False), ("c", True)]
        assert not len(one)
    for wrong in ({"size": 0}, {"num_passes": 0}, {"size": True}):
        with pytest.raises(ValueError, match="must be an int from 1"):
            MinibatchBuffer(**wrong)


def test_a_run(num_workers):
    before = threads()
    with Beside(config(num_workers=num_workers)) as algorithm:
        algorithm.plan.explain()
        assert threads() == before  # building starts nothing
        for _ in range(6):
            result = algorithm.train()
        assert threads() == before + 1
        told = result["learners"]["default_policy"]
        assert np.isfinite(told["total_loss"])
        assert 0 <= told["policy_lag_mean"] <= told["policy_lag_max"] <= 8
        stats = {one["stage"]: one for one in algorithm.plan.stats()}
        assert any("learner_idle" in one for one in stats.values()), stats
        held = sum(batch.count for batch in learner_of(algorithm).batches())
        sampled, trained = result["num_env_steps_sampled"], result["num_env_steps_trained"]
        assert trained == 6 * 32
        assert 0 <= sampled - trained - held < 64  # waits to be joined
    assert threads() == before


def test_its_error_is_raised_in_the_plan_which_goes_on():
    with Beside(config()) as algorithm:
        algorithm.train()
        policy, calls = algorithm.get_policy(), []
        learn = policy.learn_on_minibatches

        def fail_once(*args):
            calls.append(args)
            if len(calls) == 1:
                raise ArithmeticError("diverged")
            return learn(*args)

        with algorithm.workers.local_worker().lock:
            policy.learn_on_minibatches = fail_once
        with pytest.raises(ArithmeticError, match="diverged") as caught:
            [algorithm.train() for _ in range(8)]
        notes = "".join(caught.value.__notes__)
        assert "raised in the learner thread, on a SampleBatch" in notes
        assert "Dequeue" in notes
        assert "fail_once" in {frame.name for frame in caught.traceback}
        dropped = algorithm.plan.metrics.counters["num_env_steps_dropped"]
        assert dropped == 32
        assert algorithm.train()["num_env_steps_trained"] >= 64


def test_a_batch_that_fails_is_dropped_once():
    with config().build() as algorithm:
        (batch,) = batches(algorithm, 1)
        learner = LearnerThread(algorithm.workers, num_sgd_iter=3, minibatch_buffer_size=2)
        policy = algorithm.get_policy()
        policy.learn_on_minibatches = lambda *args: 1 / 0
        learner.inqueue.put(batch)
        with Dequeue(learner) as stream:
            with pytest.raises(ZeroDivisionError):
                next(stream)
            assert stream.metrics.counters["num_env_steps_dropped"] == batch.count
            assert learner.batches() == []


def test_a_learner_that_nobody_starts_is_told():
    with config().build() as algorithm:
        given = batches(algorithm, 1)
        learner = LearnerThread(algorithm.workers, queue_size=1)
        stream = LocalIterator(given * 3).for_each(Enqueue(learner))
        next(stream)
        with pytest.raises(RuntimeError, match="its learner has not been started"):
            next(stream)


def test_a_restore_stops_what_was_learning(tmp_path):
    with Beside(config()) as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        for _ in range(3):
            algorithm.train()
        learner = learner_of(algorithm)
        algorithm.restore(tmp_path / "c")
        assert not learner.is_alive()
        version = algorithm.get_policy().version
        time.sleep(0.2)
        assert algorithm.get_policy().version == version
        assert algorithm.train()["training_iteration"] == 2


def test_it_takes_no_more_than_it_may_hold():
    with config().build() as algorithm:
        batch = batches(algorithm, 1)[0]
        learner = LearnerThread(algorithm.workers, queue_size=2)
        enqueue = Enqueue(learner)
        with algorithm.workers.local_worker().lock:  # it has to wait
            learner.start()
            for _ in range(2):
                assert enqueue.ready()
                enqueue(batch)
            assert not enqueue.ready()
        deadline = time.monotonic() + 30
        while not learner.outqueue.full() and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(2):  # what is done waits to be taken
            enqueue(batch)
        time.sleep(0.1)
        assert learner.outqueue.qsize() == 2
        assert not enqueue.ready()
        learner.stop()
        assert not learner.is_alive()


def test_workers_are_sent_whole_updates(ray_session):
    """What is published is what the policy was after an update, however often it learns since."""
    with config(num_workers=1).build() as algorithm:
        workers = algorithm.workers
        batch = workers.local_worker().sample()
        learner = LearnerThread(workers)
        learner.start()
        before = weights(algorithm)
        first, versions, *_ = workers.weights_for(0)
        with workers.local_worker().lock:
            workers.local_worker().policy.learn_on_batch(batch)  # not published
        assert workers.weights_for(0) is None
        for name, weight in before.items():
            np.testing.assert_array_equal(first["default_policy"][name], weight)
        learner.inqueue.put(batch)
        learner.outqueue.get(timeout=30)
        sent, newer, *_ = workers.weights_for(0)
        assert newer["default_policy"] == versions["default_policy"] + 2
        for name, weight in weights(algorithm).items():
            np.testing.assert_array_equal(sent["default_policy"][name], weight)
        learner.stop()
        workers.local_worker().policy.learn_on_batch(batch)
        assert workers.weights_for(0)[1]["default_policy"] == newer["default_policy"] + 1


def test_a_checkpoint_has_what_is_in_it(tmp_path):
    with Beside(config()) as algorithm:
        for _ in range(5):
            algorithm.train()
        algorithm.save(tmp_path / "c")
        counters = dict(algorithm.plan.metrics.counters)
    with Beside(config()) as algorithm:
        algorithm.restore(tmp_path / "c")
        held = sum(batch.count for batch in learner_of(algorithm).batches())
        at = algorithm.plan.metrics.counters
        lost = at["num_env_steps_dropped"]
        assert at["num_env_steps_trained"] == counters["num_env_steps_trained"]
        waiting = at["num_env_steps_sampled"] - lost - at["num_env_steps_trained"] - held
        assert 0 <= waiting < 32
        result = algorithm.train()
        assert result["training_iteration"] == 6
        assert result["num_env_steps_trained"] == counters["num_env_steps_trained"] + 32


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"queue_size": 0}, ValueError, "queue_size must be at least 1"),
        ({"sgd_minibatch_size": -1}, ValueError, "sgd_minibatch_size"),
        ({"num_sgd_iter": 0}, ValueError, "num_sgd_iter must be at least 1"),
        ({"minibatch_buffer_size": 0}, ValueError, "size must be an int from 1"),
        ({"policies": "x"}, TypeError, "policies is a collection"),
    ],
)
def test_bad_settings(settings, error, said):
    with config().build() as algorithm, pytest.raises(error, match=said):
        LearnerThread(algorithm.workers, **settings)


def test_what_is_no_batch_is_told_by_the_plan():
    with config().build() as algorithm:
        learner = LearnerThread(algorithm.workers)
        learner.inqueue.put(SampleBatch(obs=np.zeros((4, 4), np.float32)))
        with Dequeue(learner) as plan, pytest.raises(KeyError, match="advantages"):
            next(plan)
