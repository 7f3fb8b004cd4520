"""Files of results: TensorBoard events, and a disk that is full for a while."""

import errno
import io
import json
import os

import pytest

from flowrl import A2C, whole_files
from flowrl.data.checkpoint_storage import LocalStorage
from flowrl.trainer.runs.result_files import ResultFiles, event_files
from flowrl.trainer.runs.run_directory import RunDirectory
from tests.extras import require_extra


def result_at(iteration, **info):
    return {"training_iteration": iteration, "timesteps_total": 10 * iteration, "info": info}


def read_iterations(folder):
    lines = (folder / "result.json").read_text().splitlines()
    return [json.loads(line)["training_iteration"] for line in lines]


@pytest.fixture
def disk(monkeypatch):
    """A disk with `free` bytes, which writes as much as fits before it raises."""

    class Disk(io.FileIO):
        free = 10**9

        def write(self, data):
            fits = data[: max(Disk.free, 0)]
            if not fits:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            Disk.free -= len(fits)
            return super().write(fits)

    def open_file(path, mode, buffering=-1):
        return io.BufferedWriter(Disk(path, mode)) if buffering else Disk(path, mode)

    monkeypatch.setattr(whole_files, "open", open_file, raising=False)
    return Disk


def test_full_disk_leaves_whole_results_and_is_reported_once(tmp_path, disk, capsys):
    files = ResultFiles(tmp_path, "classic")
    files.rewrite([], with_events=False)
    files.append(result_at(1))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    for iteration in (2, 3):
        disk.free = 20  # less than one record
        files.append(result_at(iteration, loss=0.5))
        assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == sizes
    names = ("result.json", "progress.csv", "the TensorBoard events")
    err = capsys.readouterr().err
    assert err.count("\n") == len(names)
    for name in names:
        message = f"flowrl: cannot write {name} in {tmp_path}: No space left on device. Training"
        assert err.count(message) == 1

    disk.free = 10**9
    for iteration in (4, 5):
        files.append(result_at(iteration, loss=0.5))
    err = capsys.readouterr().err
    assert err.count("\n") == err.count("can be written again") == len(names)
    assert read_iterations(tmp_path) == [1, 4, 5]
    lines = (tmp_path / "progress.csv").read_text().splitlines()
    assert [line.split(",")[1] for line in lines] == ["timesteps_total", "10", "40", "50"]
    assert [line.split(",")[-1] for line in lines] == ["info/loss", "", "0.5", "0.5"]


def test_rewrite_on_a_full_disk_changes_nothing(tmp_path, disk):
    files = ResultFiles(tmp_path, "classic")
    files.rewrite([result_at(1), result_at(2)], with_events=False)
    before = (tmp_path / "result.json").read_bytes()
    disk.free = 20
    with pytest.raises(OSError, match="No space left"):
        files.rewrite([result_at(1)], with_events=False)
    assert (tmp_path / "result.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["progress.csv", "result.json"]


def test_training_goes_on_with_a_full_disk(tmp_path, disk, capsys, monkeypatch):
    write_setup = RunDirectory.write_setup

    def fill_disk_after_setup(*arguments):
        write_setup(*arguments)
        disk.free = 20

    monkeypatch.setattr(RunDirectory, "write_setup", fill_disk_after_setup)
    with A2C("CartPole-v1", train_batch_size=64, seed=1) as algorithm:
        algorithm.learn(128, run_dir=tmp_path / "r", progress=False)
        assert algorithm.iteration == 2
    assert "cannot write result.json" in capsys.readouterr().err
    assert read_iterations(tmp_path / "r") == []


def test_checkpoints_that_cannot_be_written_are_reported_once(tmp_path, monkeypatch, capsys):
    write = LocalStorage.write

    def write_unless_full(self, name, chunks):
        size_and_hash = write(self, name, chunks)
        if algorithm.iteration < 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return size_and_hash

    monkeypatch.setattr(LocalStorage, "write", write_unless_full)
    with A2C("CartPole-v1", train_batch_size=64, seed=1, checkpoint_frequency=1) as algorithm:
        algorithm.learn(256, run_dir=tmp_path / "r", progress=False)
    err = capsys.readouterr().err
    assert err.count("NO CHECKPOINT") == err.count("checkpoints can be written again") == 1
    names = sorted(path.name for path in (tmp_path / "r/checkpoints").iterdir())
    assert names == ["000003", "000004"]


def test_events_can_be_read_by_tensorboard(tmp_path):
    require_extra("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = ResultFiles(tmp_path, "classic")
    for iteration in (1, 2):
        values = {"loss": 0.5 * iteration, "missing": float("nan"), "my loss": 3}
        files.append(result_at(iteration, **values))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("info/loss")] == [
        (10, 0.5), (20, 1.0),
    ]  # fmt: skip
    assert "info/missing" not in events.Tags()["scalars"]
    assert [event.value for event in events.Scalars("info/my_loss")] == [3.0, 3.0]


def test_removed_results_are_removed_from_the_events(tmp_path):
    require_extra("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = ResultFiles(tmp_path, "classic")
    for iteration in (1, 2, 3):
        files.append(result_at(iteration))
    files.rewrite([result_at(1)], with_events=True)
    files.append(result_at(2))
    assert len(event_files(tmp_path)) == 1
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    name = next(iter(events.Tags()["scalars"]))
    assert [event.step for event in events.Scalars(name)] == [10, 20]
