"""The trace of a run: spans, arrows and labels as Chrome trace events."""

import itertools
import json
import time
from collections import Counter
from datetime import datetime
from types import SimpleNamespace

import pytest

from flowrl import DQN, IMPALA, PPO
from flowrl.iter import LocalIterator
from flowrl.monitoring.trace import DRIVER, FIRST_WORKER, LEARNER, Tracer, clock_offset
from tests.monitoring.fakes import SMALL


@pytest.fixture(autouse=True)
def every_pull_is_timed(monkeypatch):
    """On a fast machine, quick pulls are only sampled."""
    monkeypatch.setattr("flowrl.iter.profiler.MAX_INTERVAL", 1)


def traced(algorithm, path, iterations=4):
    """Train, and return the events by phase."""
    with algorithm:
        algorithm.train()
        tracer = Tracer(algorithm.plan, 60.0)
        for _ in range(iterations):
            algorithm.train()
        tracer.stop()
        tracer.write(path / "trace.json")
    events = json.loads((path / "trace.json").read_text())["traceEvents"]
    return {phase: [e for e in events if e["ph"] == phase] for phase in "MXsf"}


def test_stages_fragments_and_arrows_are_traced(tmp_path):
    started = time.time()
    events = traced(PPO("CartPole-v1", **SMALL), tmp_path)
    names = Counter(event["name"] for event in events["X"] if event["tid"] == DRIVER)
    assert names["TrainOneStep"] == 4
    fragments = [e for e in events["X"] if e["name"] == "sample"]
    assert len(fragments) == 4
    for number, span in enumerate(fragments):
        assert span["tid"] == FIRST_WORKER
        assert span["args"]["env_steps"] == 64
        assert set(span["args"]["weights"]) == {"default_policy"}
        parts = [
            e for e in events["X"]
            if e["tid"] == FIRST_WORKER and e["name"] in ("env.step", "inference")
            and span["ts"] <= e["ts"] <= span["ts"] + span["dur"]
        ]  # fmt: skip
        assert len(parts) == (2 if number else 0)  # times are relative to the fragment before
    versions = [span["args"]["weights"]["default_policy"] for span in fragments]
    assert versions == sorted(set(versions))
    assert {e["id"] for e in events["f"]} == {e["id"] for e in events["s"]}
    for start, end in zip(events["s"], events["f"], strict=True):
        assert start["ts"] < end["ts"]
        spans = [e for e in events["X"] if e["tid"] == end["tid"]]
        around = [e for e in spans if e["ts"] <= end["ts"] < e["ts"] + e["dur"]]
        assert min(around, key=lambda e: e["dur"])["name"] == "TrainOneStep"
    trace = json.loads((tmp_path / "trace.json").read_text())
    start = datetime.fromisoformat(trace["otherData"]["start"]).timestamp()
    times = [start + event["ts"] / 1e6 for event in events["X"]]
    assert started - 1 < min(times) <= max(times) < time.time() + 1
    assert {e["args"]["name"] for e in events["M"]} == {"plan", "shard 0"}


def interval(span):
    """Return the begin and the end of a span in nanoseconds."""
    begin = round(span["ts"] * 1000)
    return begin, begin + round(span["dur"] * 1000)


@pytest.mark.parametrize("algorithm", [PPO, DQN])
def test_spans_of_a_row_follow_each_other_or_are_within_each_other(algorithm, tmp_path):
    settings = {"learning_starts": 32} if algorithm is DQN else SMALL
    events = traced(algorithm("CartPole-v1", **settings), tmp_path)
    for thread in (DRIVER, FIRST_WORKER):
        spans = [interval(e) for e in events["X"] if e["tid"] == thread]
        assert len(spans) > 8
        around = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1] <= begin:
                around.pop()
            assert not around or end <= around[-1]
            around.append(end)
    outer, inner = (
        [interval(e) for e in events["X"] if e["name"] == name]
        for name in ("TrainOneStep", "ConcatBatches" if algorithm is PPO else "Replay")
    )
    assert any(a[0] <= b[0] < b[1] <= a[1] for a in outer for b in inner)


def test_updates_of_a_learner_thread_are_traced(tmp_path):
    settings = {"train_batch_size": 64, "model": {"fcnet_hiddens": [8]}, "seed": 0}
    algorithm = IMPALA("CartPole-v1", num_workers=0, **settings)
    events = traced(algorithm, tmp_path)
    updates = [e for e in events["X"] if e["tid"] == LEARNER]
    assert updates
    assert all(e["args"]["rows"] >= 64 for e in updates)
    assert {e["tid"] for e in events["f"]} == {LEARNER}


def test_replayed_batches_have_no_arrows(tmp_path):
    algorithm = DQN(
        "CartPole-v1", learning_starts=32, min_sample_timesteps_per_iteration=64, seed=0
    )
    events = traced(algorithm, tmp_path)
    assert any(event["name"] == "TrainOneStep" for event in events["X"])
    assert events["f"] == events["s"] == []


def test_only_the_last_seconds_are_kept(tmp_path):
    stream = LocalIterator(range(6)).for_each(lambda item: time.sleep(0.02))
    tracer = Tracer(stream, 0.05)
    stream.take(6)
    tracer.write(tmp_path / "trace.json")
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"][1:]
    ends = {event["ts"] + event["dur"] for event in spans if event["name"] == "<lambda>"}
    assert 1 <= len(ends) <= 3
    assert max(ends) - min(ends) <= 0.05e6


def test_span_that_began_before_the_last_seconds_is_kept(tmp_path):
    stream = LocalIterator(range(2)).for_each(lambda item: time.sleep(0.05))
    tracer = Tracer(stream, 0.01)
    stream.take(2)
    tracer.write(tmp_path / "trace.json")
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"][1:]
    assert [span["name"] for span in spans if span["dur"] > 0.04e6] == ["<lambda>"]


def test_reads_of_the_clocks_that_were_interrupted_are_repeated(monkeypatch):
    clock, offset = [100.0], 1e9
    delays = iter([(5e-3, 1e-6), (1e-6, 5e-3), (1e-6, 1e-6)])  # after each of two reads

    def perf_counter():
        if perf_counter.delays:
            clock[0] += perf_counter.delays.pop()
        return clock[0]

    def since_1970():
        before, after = next(delays)
        clock[0] += before
        perf_counter.delays = [after]
        return clock[0] + offset

    perf_counter.delays = []
    monkeypatch.setattr("flowrl.monitoring.trace.time.perf_counter", perf_counter)
    monkeypatch.setattr("flowrl.monitoring.trace.time.time", since_1970)
    assert abs(clock_offset() - offset) < 1e-5
    assert next(delays, None) is None


def test_tracer_that_was_stopped_records_nothing(tmp_path):
    stream = LocalIterator(range(4)).for_each(lambda item: time.sleep(0.001))
    tracer = Tracer(stream, 60.0)
    stream.take(2)
    tracer.stop()
    recorded = len(tracer._events)
    stream.take(2)
    assert recorded == len(tracer._events) > 0


@pytest.mark.parametrize("flags", [["--trace"], ["--trace", "5"], []])
def test_trace_of_a_run_is_in_its_directory(flags, tmp_path, monkeypatch):
    from flowrl.cli.main import main

    monkeypatch.chdir(tmp_path)
    run = ["--run-dir", "r", "--display", "none", "--stop-iters", "2", "--train-batch-size", "64"]
    assert main(["train", "a2c", *run, *flags]) == 0
    assert (tmp_path / "r" / "trace.json").exists() == bool(flags)
    settings = json.loads((tmp_path / "r" / "config.json").read_text())
    assert settings["trace_s"] == (None if not flags else 60.0 if len(flags) == 1 else 5.0)


def test_trace_that_cannot_be_written_is_logged(tmp_path, caplog):
    (tmp_path / "r" / "trace.json").mkdir(parents=True)
    (tmp_path / "r" / "config.json").write_text("{}")
    with PPO("CartPole-v1", **SMALL, trace_s=5.0) as algorithm:
        algorithm.learn(64, run_dir=tmp_path / "r", progress=False)
    assert "trace.json" in caplog.text


def test_trace_of_fewer_seconds_than_wanted_is_logged(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("flowrl.monitoring.trace.MAX_EVENTS", 10)
    with PPO("CartPole-v1", **SMALL, trace_s=100.0) as algorithm:
        algorithm.learn(256, run_dir=tmp_path / "r", progress=False)
    assert "trace_s: " in caplog.text
    assert "trace.json has the last 10 events" in caplog.text


def test_slow_clocks_are_read_a_limited_number_of_times(monkeypatch):
    reads = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(reads)), time=time.time)
    monkeypatch.setattr("flowrl.monitoring.trace.time", clock)
    clock_offset()
    assert next(reads) == 20


def test_plan_may_be_stopped_before_its_trace(tmp_path):
    plan = LocalIterator(range(3))
    plan.start()
    tracer = Tracer(plan, 5)
    next(plan)
    plan.stop()
    tracer.stop()
    tracer.write(tmp_path / "trace.json")
