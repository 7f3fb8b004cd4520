"""Filters on steps and time."""

import time

import pytest

from flowrl.iter import LocalIterator
from flowrl.ops import (
    OncePerTimeInterval,
    OncePerTimestepsElapsed,
    WaitUntilTimestepsElapsed,
    _get_shared_metrics,
)


def sampled(count, steps=10):
    """0, 1, …, each of which counts as so many env steps."""

    def count_them(i):
        _get_shared_metrics().counters["num_env_steps_sampled"] += steps
        return i

    return LocalIterator(range(count)).for_each(count_them)


def test_waiting_for_steps():
    assert list(sampled(6).filter(WaitUntilTimestepsElapsed(30))) == [2, 3, 4, 5]
    assert list(sampled(3).filter(WaitUntilTimestepsElapsed(0))) == [0, 1, 2]


def test_once_per_so_many_steps():
    assert list(sampled(10).filter(OncePerTimestepsElapsed(25))) == [0, 3, 6, 9]
    assert list(sampled(3).filter(OncePerTimestepsElapsed(0))) == [0, 1, 2]
    one, other = (sampled(10).filter(OncePerTimestepsElapsed(25)) for _ in range(2))
    assert one.take(2) == [0, 3]
    other.load_state_dict(one.state_dict())
    assert next(one) == next(other) == 6


def test_once_per_interval(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    due = OncePerTimeInterval(2.0)
    told = []
    for now[0] in (0.0, 1.0, 1.9, 2.0, 3.0, 4.5):
        told.append(due(None))
    assert told == [True, False, False, True, False, True]


@pytest.mark.parametrize("odd", [-1, float("nan"), "x", True])
def test_what_is_no_time(odd):
    for operator in (WaitUntilTimestepsElapsed, OncePerTimestepsElapsed, OncePerTimeInterval):
        with pytest.raises(ValueError, match="a number of at least 0"):
            operator(odd)
