"""The file activity.jsonl of a run."""

import dataclasses
import json
import logging

from flowrl import PPO
from flowrl.trainer.runs import activity_log
from flowrl.trainer.runs.activity_log import FILE, ActivityLog, read_activities, truncate_activities
from tests.monitoring.fakes import SMALL, activity, stage, worker


def test_written_activities_are_read(tmp_path):
    first = activity(stage("training", "TrainOneStep", busy=0.5), workers=[worker()])
    second = dataclasses.replace(first, iteration=6, diagnosis="It trains.")
    log = ActivityLog(tmp_path)
    log.append(first)
    log.append(second)
    with open(tmp_path / FILE, "a") as file:
        file.write('{"time": 1')  # is being written
    assert read_activities(tmp_path) == [first, second]
    assert read_activities(tmp_path / "other") == []


def test_damaged_lines_are_left_out(tmp_path):
    ActivityLog(tmp_path).append(activity())
    with open(tmp_path / FILE, "ab") as file:
        file.write(b"\xff\xfe damaged\n[1]\n5\n")
        file.write(json.dumps({**activity().to_json(), "seconds": 0}).encode() + b"\n")
    ActivityLog(tmp_path).append(activity())
    assert read_activities(tmp_path) == [activity(), activity()]


def test_long_runs_keep_a_limited_number(tmp_path, monkeypatch):
    monkeypatch.setattr(activity_log, "MAX_RECORDS", 8)
    log, sizes = ActivityLog(tmp_path), []
    for number in range(200):
        log.append(activity(iteration=number, counters={"num_shard_restarts": number % 7}))
        sizes.append(len(read_activities(tmp_path)))
    assert max(sizes) == 8
    assert sizes[-1] >= 4
    records = read_activities(tmp_path)
    numbers = [one.iteration for one in records]
    assert numbers == sorted(numbers)
    assert numbers[0] < 64
    assert numbers[-1] >= 150
    # the records count all restarts up to the last one
    counted = sum(one.counters["num_shard_restarts"] for one in records)
    assert counted == sum(number % 7 for number in range(numbers[-1] + 1))
    log.close()
    counted = sum(one.counters["num_shard_restarts"] for one in read_activities(tmp_path))
    assert counted == sum(number % 7 for number in range(200))


def test_activities_after_a_checkpoint_are_removed(tmp_path):
    log = ActivityLog(tmp_path)
    for number in range(5):
        log.append(activity(iteration=number))
    truncate_activities(tmp_path, 2)
    assert [one.iteration for one in read_activities(tmp_path)] == [0, 1, 2]
    truncate_activities(tmp_path / "missing", 2)


def test_counters_are_written_after_an_error_of_the_file_system(tmp_path):
    log = ActivityLog(tmp_path)
    (tmp_path / FILE).mkdir()
    log.append(activity(counters={"restarts": 2}))
    (tmp_path / FILE).rmdir()
    log.append(activity(counters={"restarts": 1}))
    assert [one.counters for one in read_activities(tmp_path)] == [{"restarts": 3}]


def test_file_that_cannot_be_written_is_reported_once(tmp_path, caplog):
    log = ActivityLog(tmp_path)
    (tmp_path / FILE).mkdir()
    with caplog.at_level(logging.WARNING, "flowrl"):
        log.append(activity())
        log.append(activity())
    assert len(caplog.records) == 1
    assert "cannot write" in caplog.text


def test_restored_plan_is_measured_anew(tmp_path):
    with PPO("CartPole-v1", **SMALL) as algorithm:
        algorithm.train()
        before = algorithm.monitor
        algorithm.restore(algorithm.save(tmp_path / "c"))
        algorithm.train()
        assert algorithm.monitor is not before
        assert not before._thread.is_alive()
