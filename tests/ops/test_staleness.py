"""StalenessLimit: sampling waits for training."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.iter import MetricsContext, metrics_scope
from flowrl.ops import StalenessLimit


@settings(max_examples=200)
@given(
    workers=st.integers(1, 5),
    num_async=st.integers(1, 3),
    fragment=st.integers(1, 7),
    uneven=st.booleans(),
    fragments_per_batch=st.floats(1, 4),
    batches=st.integers(0, 4),
    seed=st.integers(0, 10_000),
)
def test_no_fragment_exceeds_the_limit(
    workers, num_async, fragment, uneven, fragments_per_batch, batches, seed
):
    """Simulate workers of different speeds and a learner, in random order."""
    rng = np.random.default_rng(seed)
    size = math.ceil(fragment * fragments_per_batch)
    limit = StalenessLimit(size, batches, fragment)
    with metrics_scope(MetricsContext()) as metrics:
        counters = metrics.counters
        flight, idle = [], [worker for worker in range(workers) for _ in range(num_async)]
        pending, queue, trained, lags = [], [], 0, []

        class Fragment:
            def __init__(self, version):
                self.version = version
                self.steps = int(rng.integers(1, fragment + 1)) if uneven else fragment

            def env_steps(self):
                return self.steps

        speeds = rng.uniform(0.01, 1, workers)
        while len(lags) < 60:
            idle_before = len(idle)
            while idle and limit.may_request(len(flight), flight[0][1] if flight else None):
                flight.append((idle.pop(), limit.progress(), trained))
            moves = [("answer", i) for i in range(len(flight))] + ["train"] * bool(queue)
            assert moves, f"deadlock: {idle_before} workers wait"
            rates = np.array([1.0 if m == "train" else speeds[flight[m[1]][0]] for m in moves])
            move = moves[rng.choice(len(moves), p=rates / rates.sum())]
            if move == "train":
                batch = queue.pop(0)
                lags += [trained - item.version for item in batch]
                trained += 1
                counters["num_env_steps_trained"] += sum(item.steps for item in batch)
                continue
            worker, progress, version = flight.pop(move[1])
            item = Fragment(version)
            limit.received(progress, item)
            counters["num_env_steps_sampled"] += item.steps
            idle.append(worker)
            pending.append(item)
            if sum(item.steps for item in pending) >= size:
                queue.append(pending)
                pending = []
    assert max(lags) <= batches


def test_limit_of_a_resumed_run_starts_with_its_counters():
    limit = StalenessLimit(5, 1, 5)
    with metrics_scope(MetricsContext()) as metrics:
        metrics.counters["num_env_steps_sampled"] = 105
        metrics.counters["num_env_steps_trained"] = 90
        metrics.counters["num_env_steps_dropped"] = 10
        assert limit.progress() == 100
        assert limit.may_request(0, None)
        assert not limit.may_request(1, 100)
        assert not limit.may_request(2, 100)
        assert metrics.counters["num_sampling_waits"] == 1
        metrics.counters["num_env_steps_trained"] = 95
        assert not limit.may_request(1, 100)  # the oldest request in flight blocks
        assert limit.may_request(1, 105)


@pytest.mark.parametrize("numbers", [(0, 5), (5, -1), (True, 5), (2.5, 5), (5, 5, 0)])
def test_invalid_limits_are_rejected(numbers):
    with pytest.raises(ValueError, match="must be an int of at least"):
        StalenessLimit(*numbers)
