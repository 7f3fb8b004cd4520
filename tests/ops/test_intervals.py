"""Filters by env steps and by time."""

import time

import numpy as np
import pytest

from flowrl.iter import LocalIterator
from flowrl.ops import (
    OncePerTimeInterval,
    OncePerTimestepsElapsed,
    WaitUntilTimestepsElapsed,
    _get_shared_metrics,
)


def sampled(count, steps=10):
    """A stream of 0, 1, … that counts `steps` sampled env steps per item."""

    def count_them(i):
        _get_shared_metrics().counters["num_env_steps_sampled"] += steps
        return i

    return LocalIterator(range(count)).for_each(count_them)


def test_filter_waits_for_env_steps():
    assert list(sampled(6).filter(WaitUntilTimestepsElapsed(30))) == [2, 3, 4, 5]
    assert list(sampled(3).filter(WaitUntilTimestepsElapsed(0))) == [0, 1, 2]


def test_filter_passes_once_per_delay_steps():
    assert list(sampled(10).filter(OncePerTimestepsElapsed(25))) == [0, 3, 6, 9]
    assert list(sampled(3).filter(OncePerTimestepsElapsed(0))) == [0, 1, 2]
    original, restored = (sampled(10).filter(OncePerTimestepsElapsed(25)) for _ in range(2))
    assert original.take(2) == [0, 3]
    restored.load_state_dict(original.state_dict())
    assert next(original) == next(restored) == 6


def test_state_of_a_filter_before_its_first_item_can_be_loaded():
    original, restored = (sampled(10).filter(OncePerTimestepsElapsed(25)) for _ in range(2))
    restored.load_state_dict(original.state_dict())
    assert next(restored) == 0


def test_filter_passes_once_per_interval(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    due = OncePerTimeInterval(2.0)
    passed = []
    for now[0] in (0.0, 1.0, 1.9, 2.0, 3.0, 4.5):
        passed.append(due(None))
    assert passed == [True, False, False, True, False, True]


@pytest.mark.parametrize("value", [-1, float("nan"), "x", True])
def test_invalid_delays_are_rejected(value):
    assert WaitUntilTimestepsElapsed(np.int64(5)).target_num_timesteps == 5
    for operator in (WaitUntilTimestepsElapsed, OncePerTimestepsElapsed, OncePerTimeInterval):
        with pytest.raises(ValueError, match="of at least 0, got"):
            operator(value)
