"""The live view of a run on a terminal."""

import io
import math
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flowrl.iter import LocalIterator
from flowrl.ops import Breakpoint
from flowrl.trainer.runs import live_view
from flowrl.trainer.runs.live_view import SPARKLINE, LiveView, sparkline
from flowrl.trainer.runs.progress_rate import ProgressRate
from flowrl.trainer.runs.stop_rules import StopRules
from tests.monitoring.fakes import activity, stage, worker


class FakeMonitor:
    activity = None


def result_at(steps, mean=math.nan, **values):
    return {
        "timesteps_total": steps,
        "training_iteration": steps // 100,
        "episodes_in_window": 0 if math.isnan(mean) else 10,
        "episode_reward_mean": mean,
        "episode_reward_min": mean - 1,
        "episode_reward_max": mean + 1,
        "episode_len_mean": 20.0,
        "learners": {"default_policy": {"total_loss": 0.5, "policy_loss": -0.25, "other": 3.0}},
        "num_healthy_workers": 2,
        "num_remote_worker_restarts": 1,
        **values,
    }


@pytest.fixture
def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=80, height=50)


@pytest.fixture
def view(terminal, monkeypatch):
    monkeypatch.setattr(live_view, "INTERVAL_S", 3600.0)  # the tests render
    view = LiveView(StopRules(timesteps=1000), FakeMonitor(), terminal)
    yield view
    view.finish()


def text_of(view):
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(view.render())
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    return "\n".join(line.rstrip() for line in lines)


def test_progress_returns_and_learner_are_shown(view):
    assert "waiting for the first result" in text_of(view)
    view.add(result_at(100))
    view.add(result_at(250, 12.0))
    text = text_of(view)
    assert "iteration 2, 250 env steps" in text
    assert "25%" in text
    assert "return    12.0" in text
    assert "11.0 to 13.0, length 20.0" in text
    assert "total_loss 0.500  policy_loss -0.250" in text
    assert "other" not in text


def test_operators_workers_and_the_diagnosis_are_shown(view):
    view.add(result_at(100))
    slow = stage("operator", "Slow", busy=0.5, waiting=0.25, items=30, values={"queue_size": 7})
    view._monitor.activity = activity(slow, workers=[worker(1), worker(2)], diagnosis="It is Slow.")
    lines = text_of(view).splitlines()
    (row,) = [line.split() for line in lines if line.startswith("Slow")]
    assert row == ["Slow", "3.00", "██████████▒▒▒▒▒·····", "50%", "7"]
    assert "2 workers healthy, 1 restart; busy: 90% 90%" in lines
    assert "It is Slow." in lines


def test_values_of_any_type_are_shown(view):
    view.add(result_at(100))
    shared = stage("operator", "duplicate", values={"queued": [0, 1]})
    view._monitor.activity = activity(shared, stage("operator", "x", values={"rows": "many"}))
    text = text_of(view)
    assert "[0, 1]" in text
    assert "many" in text


def test_error_in_the_view_does_not_end_the_training(terminal):
    view = LiveView(StopRules(), FakeMonitor(), terminal)
    view.add(result_at(100))
    view._monitor = None
    view.finish(result_at(200))
    assert "the view cannot be drawn: AttributeError" in terminal.file.getvalue()


def test_prints_appear_above_the_view(terminal):
    view = LiveView(StopRules(timesteps=1000), FakeMonitor(), terminal)
    view.add(result_at(100))
    print("printed by an operator")  # standard output is redirected
    view.finish()
    shown = terminal.file.getvalue()
    assert shown.index("printed by an operator") < shown.rindex("100 env steps")


def test_view_stops_for_a_breakpoint_and_at_the_end(terminal, monkeypatch):
    view = LiveView(StopRules(timesteps=1000), FakeMonitor(), terminal)
    live = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: live.append(view._live.is_started))
    LocalIterator([1]).for_each(Breakpoint()).take(1)
    assert live == [False]
    view.finish(result_at(800))
    assert "800 env steps" in terminal.file.getvalue()
    assert live_view.before_breakpoint == []
    other = LiveView(StopRules(), FakeMonitor(), terminal)
    other.finish(result_at(500))
    assert not other._live.is_started
    assert "500 env steps" in terminal.file.getvalue()


def test_view_is_updated_while_the_training_runs(terminal, monkeypatch):
    monkeypatch.setattr(live_view, "INTERVAL_S", 0.01)
    monkeypatch.setattr(live_view, "MAX_SHARE", 1.0)
    view = LiveView(StopRules(timesteps=1000), FakeMonitor(), terminal)
    view.add(result_at(700))
    until = time.monotonic() + 30
    while "700 env steps" not in terminal.file.getvalue() and time.monotonic() < until:
        time.sleep(0.01)
    assert "700 env steps" in terminal.file.getvalue()
    view.finish()


def test_many_returns_are_thinned_out(view):
    for number in range(2000):
        view.add(result_at(number, float(number)))
    assert len(view._returns) <= live_view.MAX_RETURNS
    assert view._returns == sorted(view._returns)
    assert view._returns[-1] > 1900


def test_sparkline_shows_heights():
    assert sparkline([], 5) == ""
    assert sparkline([1.0, 1.0], 5) == "▁▁"
    assert sparkline([0.0, 7.0, 14.0], 3) == "▁▅█"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert sparkline([0.0, math.nan, math.inf, 1.0], 4) == "▁█"


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300), st.integers(1, 40))
def test_sparkline_has_a_character_per_part(values, width):
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(SPARKLINE)


def test_rate_time_left_and_share(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    rate = ProgressRate(StopRules(timesteps=1000, time_s=1000.0))
    assert rate.steps_per_s() == 0
    for steps in (100, 200, 300):
        rate.add(result_at(steps))
        now[0] += 10.0
    assert rate.steps_per_s() == 10
    assert rate.seconds_left(result_at(300)) == 70
    assert rate.share_done(result_at(300)) == 0.3
    assert ProgressRate(StopRules()).share_done(result_at(300)) is None
    assert ProgressRate(StopRules()).seconds_left(result_at(300)) is None


def test_the_newest_evaluation_stays_visible(view):
    evaluation = {"episode_reward_mean": 7.5, "episodes": 10}
    view.add(result_at(100, evaluation=evaluation))
    view.add(result_at(200))
    assert "evaluation  7.50 in 10 episodes" in text_of(view)
