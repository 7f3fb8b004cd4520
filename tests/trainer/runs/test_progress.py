"""The progress table: regular rows, columns within the width, the time that is left."""

import pytest

from flowrl.trainer.runs import progress, progress_rate
from flowrl.trainer.runs.progress import ProgressTable
from flowrl.trainer.runs.stop_rules import StopRules


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress_rate, "time", clock)
    return clock


def result_at(iteration, steps, **extra):
    return {
        "training_iteration": iteration,
        "timesteps_total": steps,
        "episodes_in_window": 5,
        "episode_reward_mean": 12.345,
        "episode_len_mean": 12.0,
        "policy_reward_mean": {"default_policy": 12.345},
        "learners": {"default_policy": {"policy_loss": -0.0123, "vf_loss": 3.0}},
        **extra,
    }


def play(table, clock, iterations, steps_each, seconds_each, **extra):
    for i in range(1, iterations + 1):
        clock.now += seconds_each
        table.add(result_at(i, i * steps_each, **extra))


def rows_of(capsys):
    """Return the printed lines as lists of cells."""
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_rows_are_printed_at_regular_env_steps(clock, capsys):
    table = ProgressTable(StopRules(timesteps=1_000_000), {})
    play(table, clock, iterations=400, steps_each=100, seconds_each=0.1)  # 1,000 steps/s
    table.finish(result_at(400, 40_000))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["iter", "env", "steps", "steps/s"]
    steps = [int(line.split()[1].replace(",", "")) for line in lines[1:]]
    assert steps[1:] == list(range(steps[1], 40_001, steps[2] - steps[1]))
    assert steps[2] - steps[1] in (5_000, 10_000)
    assert max(map(len, lines)) <= 80


def test_last_row_is_printed_once(clock, capsys):
    table = ProgressTable(StopRules(), {})
    play(table, clock, iterations=3, steps_each=10, seconds_each=0.1)
    table.finish()
    rows = rows_of(capsys)
    assert [row[0] for row in rows] == ["iter", "1", "3"]  # the first and the last result
    assert rows[-1][:2] == ["3", "30"]


@pytest.mark.parametrize(
    ("stop", "left"),
    [
        (StopRules(timesteps=3_000), "0:20"),  # 2,000 steps at 100 steps/s
        (StopRules(iters=15), "0:05"),  # 5 iterations of 1 s
        (StopRules(time_s=12.0), "0:02"),
        (StopRules(timesteps=3_000, iters=15, time_s=60.0), "0:05"),
        (StopRules(reward=1.0), None),
    ],
)
def test_time_left_is_that_of_the_first_limit(clock, stop, left):
    table = ProgressTable(stop, {})
    play(table, clock, iterations=10, steps_each=100, seconds_each=1.0)
    cells = table._cells(result_at(10, 1_000))
    assert cells["time left"] == (left or "")
    table.finish()


def test_columns_that_do_not_fit_are_left_out(clock, capsys):
    by_policy = {f"policy_{i}": float(i) for i in range(9)}
    table = ProgressTable(StopRules(timesteps=10_000), {})
    play(table, clock, 100, 100, 0.1, policy_reward_mean=by_policy)
    table.finish()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "policy_0" in lines[0]
    assert "policy_8" not in lines[0]
    assert "return" in lines[0]


def test_policies_with_the_names_of_columns_do_not_replace_them(clock, capsys):
    table = ProgressTable(StopRules(timesteps=10_000), {})
    cells = table._cells(result_at(1, 100, policy_reward_mean={"return": 9.0, "other": 3.0}))
    table.finish()
    assert (cells["return"], cells["other"]) == ("12.3", "3.00")


def test_line_fits_into_any_terminal(clock, monkeypatch):
    monkeypatch.setattr(progress.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "5")
    lines = []
    table = ProgressTable(StopRules(), {})
    table._live = Live(lines)
    play(table, clock, iterations=2, steps_each=100, seconds_each=1.0)
    table.finish()
    assert set(lines) == {""}


def test_env_steps_are_shown_while_no_result_arrives(monkeypatch, capsys):
    monkeypatch.setattr(progress, "MAX_INTERVAL_S", 0.0)
    counters = {"num_env_steps_sampled": 123}
    table = ProgressTable(StopRules(), counters)
    assert wait_for(lambda: "123" in capsys.readouterr().out)
    table.finish()


def wait_for(condition, seconds=10.0):
    import time

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_live_line_ends_with_a_whole_field(clock, capsys, monkeypatch):
    monkeypatch.setattr(progress.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "62")
    lines = []
    table = ProgressTable(StopRules(timesteps=10_000_000), {})
    table._live = Live(lines)
    play(table, clock, iterations=20, steps_each=100_000, seconds_each=1.0)
    table.finish()
    assert "iter 20 | env steps 2,000,000 | steps/s 100,000" in lines[-1]
    assert max(map(len, lines)) <= 56
    names = ("iter", "env steps", "steps/s", "return", "length", "policy_loss", "time left")
    for line in lines:
        for part in line.split(" | "):
            name, _, value = part.rpartition(" ")
            assert name in names
            assert value


def test_live_line_is_not_older_than_the_last_row(clock, capsys, monkeypatch):
    monkeypatch.setattr(progress.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "LIVE_INTERVAL_S", 100.0)
    lines = []
    table = ProgressTable(StopRules(), {})
    table._live = Live(lines)
    play(table, clock, iterations=7, steps_each=1_000, seconds_each=1.0)
    rows = rows_of(capsys)
    assert rows[-1][0] != "iter"
    assert lines[-1].startswith(f"iter {rows[-1][0]} |")
    table.finish()


class Live:
    """Records the live line."""

    def __init__(self, lines):
        self.update = lines.append

    def stop(self):
        pass


def test_waiting_prints_no_row_without_new_env_steps(clock, capsys, monkeypatch):
    counters = {}
    with monkeypatch.context() as patch:
        patch.setattr(progress.threading.Thread, "start", lambda thread: None)
        table = ProgressTable(StopRules(timesteps=1000), counters)
    waits = iter([False, False, False, False, True])

    def wait(seconds):
        clock.now += 20
        counters["num_env_steps_sampled"] = {1: 0, 2: 0, 3: 500, 4: 500}.get(len(rounds) + 1, 500)
        rounds.append(1)
        return next(waits)

    rounds = []
    monkeypatch.setattr(table._ended, "wait", wait)
    table._print_while_waiting()
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["iter", "env", "steps"]
    assert row.split() == ["0", "500"]


def test_the_newest_evaluation_stays_in_the_table(clock, capsys):
    table = ProgressTable(StopRules(timesteps=10_000), {}, evaluates=True)
    play(table, clock, 5, 100, 2.0)
    clock.now += 2.0
    table.add(result_at(6, 600, evaluation={"episode_reward_mean": 7.5}))
    play(table, clock, 20, 100, 2.0)
    table.finish()
    header, *rows = capsys.readouterr().out.splitlines()
    assert "evaluation" in header
    assert not any("evaluation" in row for row in rows)  # one header
    shown = ["7.5" in row for row in rows]
    assert len(shown) > 3
    assert shown == sorted(shown)
    assert (shown[0], shown[-1]) == (False, True)


@pytest.mark.parametrize("name", ["dumb", "unknown", "xterm"])
def test_first_result_has_a_row_where_no_line_below_the_table_is_drawn(monkeypatch, capsys, name):
    monkeypatch.setattr(progress.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", name)
    table = ProgressTable(StopRules(timesteps=10_000), {})
    table._live = Live([])
    table.add(result_at(1, 100))
    printed = capsys.readouterr().out
    table.finish()
    assert ("return" in printed) == (name != "xterm")
