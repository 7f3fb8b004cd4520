"""Learner thread: equality to TrainOneStep, errors, stopping, checkpoints."""

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from flowrl.algorithms.a2c import A2C, A2CConfig
from flowrl.data import SampleBatch
from flowrl.iter import LocalIterator
from flowrl.learners.learner import PolicyUpdate
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
from flowrl.state_schema import StateError
from flowrl.trainer.plan_settings import plan_config
from tests.learner_threads import held_batches, learner_of

ROOT = Path(__file__).parents[2]


def a2c_config(**settings):
    base = {"env": "CartPole-v1", "seed": 3, "rollout_fragment_length": 16, "grad_clip": None}
    return A2CConfig(**{**base, "model": {"fcnet_hiddens": [8]}, **settings})


class ThreadedA2C(A2C):
    """A2C with a learner thread."""

    @staticmethod
    def execution_plan(workers, config):
        learner = LearnerThread(workers, queue_size=2)
        batches = ParallelRollouts(workers, mode="async").combine(ConcatBatches(32))
        branches = [batches.for_each(Enqueue(learner)), Dequeue(learner)]
        trained = Concurrently(branches, mode="async", output_indexes=[1])
        return StandardMetricsReporting(trained, workers, config)


def weights(algorithm):
    return algorithm.workers.local_worker().policy.get_weights()


def num_learner_threads():
    return sum(thread.name == "flowrl-learner" for thread in threading.enumerate())


def sample_batches(algorithm, count):
    return ParallelRollouts(algorithm.workers).take(count)


@pytest.mark.parametrize("passes", [1, 3])
def test_learner_thread_equals_train_one_step(passes):
    with a2c_config().build() as plain, a2c_config().build() as other:
        batches = sample_batches(plain, 4)
        sample_batches(other, 1)
        learner = LearnerThread(other.workers, num_sgd_iter=passes)
        feed = LocalIterator(batches).for_each(Enqueue(learner))
        plan = Concurrently([feed, Dequeue(learner)], mode="async", output_indexes=[1])
        items = plan.take(4)
        plan.stop()
        step = TrainOneStep(plain.workers, num_sgd_iter=1, sgd_minibatch_size=0)
        LocalIterator([batch for batch in batches for _ in range(passes)]).for_each(step).take(99)
        assert [batch for batch, _ in items] == batches
        for name, weight in weights(plain).items():
            np.testing.assert_array_equal(weight, weights(other)[name])
        counters = plan.metrics.counters
        assert counters["num_env_steps_trained"] == sum(batch.count for batch in batches)
        assert counters["num_agent_steps_trained/default_policy"] == 64
        assert PlanMetrics.of(plan.metrics).trainers["LearnerThread"].learn.count == 4


def test_minibatch_buffer_cycles_and_restores():
    a, b, c = (SampleBatch({"obs": np.zeros(1)}) for _ in range(3))
    buffer = MinibatchBuffer(size=2, num_passes=2)
    buffer.put(a)
    buffer.put(b)

    def taken(buffer):
        """Return the next three batches by name, and whether each is in its last pass."""
        names = {id(a): "a", id(b): "b", id(c): "c"}
        return [(names[id(batch)], is_last) for batch, is_last in (buffer.get() for _ in range(3))]

    assert taken(buffer) == [("a", False), ("b", False), ("a", True)]
    buffer.put(c)
    for _ in range(3):  # undone passes change nothing
        before = buffer.state_dict()
        buffer.put_back(*buffer.get())
        assert buffer.state_dict() == before
    state = buffer.state_dict()
    other = MinibatchBuffer(size=2, num_passes=2)
    other.load_state_dict(state)
    for restored in (buffer, other):
        assert taken(restored) == [("b", True), ("c", False), ("c", True)]
        assert not len(restored)
    for invalid in ({"size": 0}, {"num_passes": 0}, {"size": True}):
        with pytest.raises(ValueError, match="must be an int of at least 1"):
            MinibatchBuffer(**invalid)


def test_saved_minibatches_may_exceed_a_smaller_buffer():
    with a2c_config().build() as algorithm:
        batches = sample_batches(algorithm, 3)
        saved = LearnerThread(algorithm.workers, num_sgd_iter=2, minibatch_buffer_size=4)
        for batch in batches:
            saved._minibatches.put(batch)
        learner = LearnerThread(algorithm.workers, num_sgd_iter=2, minibatch_buffer_size=2)
        learner.load_state_dict(saved.state_dict())
        learner.inqueue.put(batches[0])
        with Dequeue(learner) as stream:
            assert [len(item) for item in stream.take(4)] == [2] * 4
            assert stream.metrics.counters["num_env_steps_trained"] == 4 * batches[0].count


def test_queues_of_a_learner_thread_stand_for_it():
    before = num_learner_threads()
    with a2c_config().build() as algorithm:
        batches = sample_batches(algorithm, 2)
        learner = LearnerThread(algorithm.workers)
        learner.start()  # plans of RLlib start it
        feed = LocalIterator(batches).for_each(Enqueue(learner.inqueue))
        trained = Dequeue(learner.outqueue, check=learner.is_alive)
        with Concurrently([feed, trained], mode="async", output_indexes=[1]) as stream:
            assert [batch.count for batch, _ in stream.take(2)] == [b.count for b in batches]
            assert stream.metrics.counters["num_env_steps_trained"] == 2 * batches[0].count
            assert num_learner_threads() == before + 1
        assert num_learner_threads() == before


def test_state_is_loaded_into_a_thread_that_runs():
    with a2c_config().build() as algorithm:
        batches = sample_batches(algorithm, 3)
        saved = LearnerThread(algorithm.workers, queue_size=2)
        for batch in batches[:2]:
            saved.inqueue.put(batch)
        learner = LearnerThread(algorithm.workers, queue_size=2)
        learner.start()
        learner.load_state_dict(saved.state_dict())
        feed = LocalIterator(batches[2:]).for_each(Enqueue(learner.inqueue))
        trained = Dequeue(learner.outqueue)
        with Concurrently([feed, trained], mode="async", output_indexes=[1]) as stream:
            assert [batch.count for batch, _ in stream.take(3)] == [b.count for b in batches]


def test_the_other_queue_of_a_learner_thread_is_rejected():
    with a2c_config().build() as algorithm:
        learner = LearnerThread(algorithm.workers)
        with pytest.raises(ValueError, match="puts its results into this queue"):
            Enqueue(learner.outqueue)
        with pytest.raises(ValueError, match="takes its batches from this queue"):
            Dequeue(learner.inqueue)


@pytest.mark.slow_on_actors
def test_plan_with_learner_thread_trains_and_stops(num_workers):
    before = num_learner_threads()
    with ThreadedA2C(a2c_config(num_workers=num_workers)) as algorithm:
        algorithm.plan.explain()
        assert num_learner_threads() == before  # building starts nothing
        for _ in range(6):
            result = algorithm.train()
        assert num_learner_threads() == before + 1
        stats = result["learners"]["default_policy"]
        assert np.isfinite(stats["total_loss"])
        assert 0 <= stats["policy_lag_mean"] <= stats["policy_lag_max"] <= 8
        stages = algorithm.plan.stats()
        assert any("learner_idle" in stage for stage in stages), stages
        queued = sum(batch.count for batch in held_batches(learner_of(algorithm)))
        sampled, trained = result["num_env_steps_sampled"], result["num_env_steps_trained"]
        assert trained == 6 * 32
        assert 0 <= sampled - trained - queued < 64  # rows not yet concatenated to a batch
    assert num_learner_threads() == before


def test_error_of_the_thread_is_raised_and_the_plan_continues():
    with ThreadedA2C(a2c_config()) as algorithm:
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


@pytest.mark.parametrize("item", [None, [1], {"obs": 1}])
def test_item_that_is_no_batch_is_named(item):
    with a2c_config().build() as algorithm:
        learner = LearnerThread(algorithm.workers)
        learner.inqueue.put(item)
        with Dequeue(learner) as stream, pytest.raises(TypeError, match="a learner takes batches"):
            next(stream)


def test_failed_batch_is_dropped_once():
    with a2c_config().build() as algorithm:
        (batch,) = sample_batches(algorithm, 1)
        learner = LearnerThread(algorithm.workers, num_sgd_iter=3, minibatch_buffer_size=2)
        policy = algorithm.get_policy()
        policy.learn_on_minibatches = lambda *args: 1 / 0
        learner.inqueue.put(batch)
        with Dequeue(learner) as stream:
            with pytest.raises(ZeroDivisionError):
                next(stream)
            assert stream.metrics.counters["num_env_steps_dropped"] == batch.count
            assert held_batches(learner) == []


def test_thread_that_ended_with_an_error_is_started_again(monkeypatch):
    with a2c_config().build() as algorithm:
        (batch,) = sample_batches(algorithm, 1)
        learner = LearnerThread(algorithm.workers)
        monkeypatch.setattr(learner, "_step", lambda: 1 / 0)
        monkeypatch.setattr("threading.excepthook", lambda arguments: None)
        learner.start()
        learner._thread.join(60)
        assert not learner.is_alive()
        monkeypatch.undo()
        learner.inqueue.put(batch)
        with Dequeue(learner) as stream:
            assert next(stream)[0].count == batch.count


LARGE = """
import os
import numpy as np
from flowrl import A2CConfig
from flowrl.iter import LocalIterator
from flowrl.ops import Dequeue, LearnerThread, ParallelRollouts

model = {"fcnet_hiddens": [400, 300], "matrix_products": "torch"}
config = A2CConfig(env="CartPole-v1", train_batch_size=256, model=model, seed=0)
with config.build() as algorithm:
    (batch,) = ParallelRollouts(algorithm.workers).take(1)
    learner = LearnerThread(algorithm.workers)
    learner.inqueue.put(batch)
    before = len(os.listdir("/proc/self/task"))
    with Dequeue(learner) as stream:
        next(stream)
        print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_thread_multiplies_matrices_without_other_threads():
    """MKL's limit belongs to each thread."""
    env = {**os.environ, "OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}
    command = [sys.executable, "-c", LARGE]
    process = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=100, check=True
    )
    assert process.stdout == "1\n"  # the learner thread itself


def test_full_queue_of_a_learner_that_was_not_started_is_an_error():
    with a2c_config().build() as algorithm:
        batches = sample_batches(algorithm, 1)
        learner = LearnerThread(algorithm.workers, queue_size=1)
        stream = LocalIterator(batches * 3).for_each(Enqueue(learner))
        next(stream)
        with pytest.raises(RuntimeError, match="its learner thread does not run"):
            next(stream)


def test_restore_stops_the_learner_thread(tmp_path):
    with ThreadedA2C(a2c_config()) as algorithm:
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


def test_restarted_learner_waits_for_an_update_that_outlasts_stop(monkeypatch):
    monkeypatch.setattr("flowrl.learners.thread.JOIN_TIMEOUT_S", 0.05)
    with a2c_config().build() as algorithm:
        (batch,) = sample_batches(algorithm, 1)
        policy, running, finish = algorithm.get_policy(), threading.Event(), threading.Event()
        learn = policy.learn_on_minibatches

        def slow(*args):
            running.set()
            finish.wait(10)
            return learn(*args)

        policy.learn_on_minibatches = slow
        learner = LearnerThread(algorithm.workers)
        learner.inqueue.put(batch)
        learner.start()
        assert running.wait(10)
        learner.stop()
        threading.Timer(0.2, finish.set).start()
        learner.start()
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("flowrl-learner") == 1
        assert finish.is_set()
        learner.stop()


def test_queues_of_the_learner_are_bounded():
    with a2c_config().build() as algorithm:
        batch = sample_batches(algorithm, 1)[0]
        learner = LearnerThread(algorithm.workers, queue_size=2)
        enqueue = Enqueue(learner)
        with algorithm.workers.local_worker().lock:  # the learner cannot update
            learner.start()
            for _ in range(2):
                assert enqueue.ready()
                enqueue(batch)
            assert not enqueue.ready()
        deadline = time.monotonic() + 30
        while not learner.outqueue.full() and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(2):  # the outqueue is full, so the learner waits
            enqueue(batch)
        time.sleep(0.1)
        assert learner.outqueue.qsize() == 2
        assert not enqueue.ready()
        learner.stop()
        assert not learner.is_alive()


def test_workers_receive_only_published_weights(ray_session):
    """While the learner thread runs, workers receive the weights that it published last."""
    with a2c_config(num_workers=1).build() as algorithm:
        workers = algorithm.workers
        batch = workers.local_worker().sample()
        learner = LearnerThread(workers)
        learner.start()
        before = weights(algorithm)
        first, versions, *_ = workers.take_weights(0)
        with workers.local_worker().lock:
            workers.local_worker().policy.learn_on_batch(batch)  # not published
        assert workers.take_weights(0) is None
        for name, weight in before.items():
            np.testing.assert_array_equal(first["default_policy"][name], weight)
        learner.inqueue.put(batch)
        learner.outqueue.get(timeout=30)
        sent, newer, *_ = workers.take_weights(0)
        assert newer["default_policy"] == versions["default_policy"] + 2
        for name, weight in weights(algorithm).items():
            np.testing.assert_array_equal(sent["default_policy"][name], weight)
        learner.stop()
        workers.local_worker().policy.learn_on_batch(batch)
        assert workers.take_weights(0)[1]["default_policy"] == newer["default_policy"] + 1


def test_checkpoint_contains_the_queued_batches(tmp_path):
    with ThreadedA2C(a2c_config()) as algorithm:
        for _ in range(5):
            algorithm.train()
        algorithm.save(tmp_path / "c")
        counters = dict(algorithm.plan.metrics.counters)
    with ThreadedA2C(a2c_config()) as algorithm:
        algorithm.restore(tmp_path / "c")
        queued = sum(batch.count for batch in held_batches(learner_of(algorithm)))
        restored = algorithm.plan.metrics.counters
        dropped, trained = restored["num_env_steps_dropped"], restored["num_env_steps_trained"]
        assert trained == counters["num_env_steps_trained"]
        assert 0 <= restored["num_env_steps_sampled"] - dropped - trained - queued < 32
        result = algorithm.train()
        assert result["training_iteration"] == 6
        assert result["num_env_steps_trained"] == counters["num_env_steps_trained"] + 32


class Slow:
    """An update takes 1 s of a clock that nothing else moves.

    Args:
        now: the time [s], in a list.
        stats: called after each update.
    """

    global_vars: dict = {}

    def __init__(self, now, stats=lambda: None):
        self.now, self.stats, self.seen = now, stats, []

    def start(self):
        pass

    stop = start

    def update(self, batch):
        self.now[0] += 1.0
        self.seen.append(self.stats())
        return {}


@pytest.fixture
def now(monkeypatch):
    """The time [s] of learner threads, in a list."""
    now = [0.0]
    monkeypatch.setattr("flowrl.learners.thread.time.perf_counter", lambda: now[0])
    return now


def test_learning_time_is_that_of_all_passes(now):
    with a2c_config().build() as algorithm:
        [batch] = sample_batches(algorithm, 1)
        learner = LearnerThread(algorithm.workers, minibatch_buffer_size=2, num_sgd_iter=4)
        learner.learner = Slow(now, lambda: learner.stats()["learn_s"])
        learner.inqueue.put(batch)
        learner.start()
        result = learner.outqueue.get(timeout=60)
        learner.stop()
    assert learner.learner.seen == [1.0, 2.0, 3.0, 4.0]
    assert result.learn_s == learner.stats()["learn_s"] == 4.0


def test_time_with_a_full_queue_of_results_is_not_idle(now):
    with a2c_config().build() as algorithm:
        batches = sample_batches(algorithm, 4)
        learner = LearnerThread(algorithm.workers, queue_size=2)
        learner.learner = Slow(now)
        learner.start()
        for batch in batches:
            learner.inqueue.put(batch)
        deadline = time.monotonic() + 60
        while len(learner.learner.seen) < 2:  # two results wait, and nothing takes them
            assert time.monotonic() < deadline
            time.sleep(0.01)
        now[0] += 100.0
        results = [learner.outqueue.get(timeout=60) for _ in batches]
        learner.stop()
    assert sum(result.idle_s for result in results) == 0
    assert learner.num_steps == 4


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"queue_size": 0}, ValueError, "queue_size must be an int of at least 1"),
        ({"sgd_minibatch_size": -1}, ValueError, "sgd_minibatch_size"),
        ({"num_sgd_iter": 0}, ValueError, "num_sgd_iter must be an int of at least 1"),
        ({"minibatch_buffer_size": 0}, ValueError, "size must be an int of at least 1"),
        ({"policies": "x"}, TypeError, "policies must be a collection"),
    ],
)
def test_invalid_settings_are_rejected(settings, error, message):
    with a2c_config().build() as algorithm, pytest.raises(error, match=message):
        LearnerThread(algorithm.workers, **settings)


def test_missing_column_is_raised_in_the_plan():
    with a2c_config().build() as algorithm:
        learner = LearnerThread(algorithm.workers)
        learner.inqueue.put(SampleBatch(obs=np.zeros((4, 4), np.float32)))
        with Dequeue(learner) as plan, pytest.raises(KeyError, match="advantages"):
            next(plan)


def test_workers_get_the_weights_of_operators_beside_the_thread():
    """The thread publishes copies, which another operator of the plan must renew."""
    with a2c_config().build() as algorithm:
        workers = algorithm.workers
        batches = sample_batches(algorithm, 3)
        learner = LearnerThread(workers)
        feed = LocalIterator(batches[:1]).for_each(Enqueue(learner))
        plan = Concurrently([feed, Dequeue(learner)], mode="async", output_indexes=[1])
        plan.take(1)
        LocalIterator(batches[1:]).for_each(TrainOneStep(workers)).take(2)
        payload = workers.weight_sync.take_payload(0, None, None)
        for name, weight in weights(algorithm).items():
            np.testing.assert_array_equal(payload[0]["default_policy"][name], weight)
        assert payload[1] == {"default_policy": workers.local_worker().policy.version}
        plan.stop()


def test_dropped_algorithm_ends_its_thread():
    algorithm = plan_config("impala").updated(train_batch_size=100, num_workers=1).build()
    algorithm.train()
    thread = algorithm_thread()
    assert thread is not None
    del algorithm
    deadline = time.monotonic() + 10
    while thread.is_alive():  # during an update, the thread refers to the learner
        assert time.monotonic() < deadline
        gc.collect()
        thread.join(0.1)


def algorithm_thread():
    threads = [t for t in threading.enumerate() if t.name == "flowrl-learner"]
    return threads[-1] if threads else None


def test_queues_keep_a_running_thread():
    algorithm = A2CConfig(env="CartPole-v1", train_batch_size=32).build()
    learner = LearnerThread(algorithm.workers)
    learner.start()
    queues, thread = (learner.inqueue, learner.outqueue), learner._thread
    del learner
    gc.collect()
    queues[0].put(algorithm.workers.local_worker().sample())
    assert queues[1].get(timeout=10).updates
    queues[0].learner_thread.stop()
    assert not thread.is_alive()
    algorithm.stop()


def test_saved_update_with_missing_or_wrong_entries_is_an_error():
    update = PolicyUpdate({"loss": 1.0}, 4, policy_lags=[2], row_stats={"td_error": np.ones(4)})
    state = update.state_dict()
    again = PolicyUpdate.from_state_dict(state)
    assert (again.stats, again.rows, again.policy_lags) == (update.stats, 4, [2])
    for broken in ({**state, "rows": -1}, {n: v for n, v in state.items() if n != "stats"}):
        with pytest.raises(StateError, match="the update of a policy"):
            PolicyUpdate.from_state_dict(broken)
