"""Experience that plans write: all that was sampled, once, with every column; runs that go on."""

import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.cli.main import main
from flowrl.data.checkpoint import CheckpointError
from flowrl.iter import LocalIterator, from_items
from flowrl.offline.parquet import parquet_files, read_parquet
from flowrl.ops import ParallelRollouts, WriteParquet


def config(tmp_path, **settings):
    base = {"env": "CartPole-v1", "train_batch_size": 40, "seed": 2, "output": str(tmp_path / "e")}
    return A2CConfig(**{**base, "model": {"fcnet_hiddens": [8]}, **settings})


def written(tmp_path):
    return [read_parquet(path)[1] for path in parquet_files(tmp_path / "e")]


def test_all_that_is_sampled(tmp_path, num_workers):
    with config(tmp_path, num_workers=num_workers).build() as algorithm:
        results = [algorithm.train() for _ in range(3)]
    (batch,) = written(tmp_path)
    assert batch.count == results[-1]["num_env_steps_sampled"]
    columns = {"obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "action_logp"}
    assert columns <= set(batch)
    for rows in batch.split_by_episode():
        assert np.array_equal(rows["obs"][1:], rows["new_obs"][:-1])


def steps_of(tmp_path):
    """(episode, step) of every row, sorted."""
    return sorted(
        pair
        for batch in written(tmp_path)
        for pair in zip(batch["eps_id"].tolist(), batch["t"].tolist(), strict=True)
    )


def test_a_run_that_goes_on_writes_every_step_once(tmp_path):
    flags = ["--train-batch-size", "40", "--output", str(tmp_path / "e"), "--seed", "1"]
    flags += ["--output-rows-per-file", "50", "--checkpoint-frequency", "1"]
    run, keep = ["--run-dir", str(tmp_path / "run")], ["--checkpoint-num-to-keep", "9"]
    assert main(["train", "a2c", *flags, *run, *keep, "--stop-iters", "5"]) == 0
    whole = steps_of(tmp_path)
    assert len(whole) == len(set(whole)) >= 200
    back = ["resume", str(tmp_path / "run"), "--checkpoint", "2", "--stop-iters", "5"]
    assert main(back) == 0
    assert steps_of(tmp_path) == whole


def test_a_restore_takes_nothing_from_other_runs(tmp_path, caplog):
    with config(tmp_path / "1").build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
    with config(tmp_path / "2").build() as algorithm:
        for _ in range(3):
            algorithm.train()
    there = steps_of(tmp_path / "2")
    other = config(tmp_path / "2", model={"fcnet_hiddens": [16]})
    with other.build() as algorithm, pytest.raises(CheckpointError):
        algorithm.restore(tmp_path / "c")
    assert steps_of(tmp_path / "2") == there
    with config(tmp_path / "2").build() as algorithm:
        algorithm.restore(tmp_path / "c")
        algorithm.train()
    assert len(steps_of(tmp_path / "2")) == len(there) + 80
    with config(tmp_path / "1").build() as algorithm:
        algorithm.restore(tmp_path / "c")
    assert "1 files" in caplog.text


def test_what_cannot_be_written_at_the_end_ends_everything_else(tmp_path):
    algorithm = config(tmp_path).build()
    algorithm.train()
    (tmp_path / "e").write_text("in the way")
    with pytest.raises(OSError, match="exists"):
        algorithm.stop()
    assert algorithm.workers._local is None
    with pytest.raises(RuntimeError, match="this algorithm was stopped"):
        algorithm.train()


def test_in_a_plan(tmp_path):
    with config(tmp_path, output=None).build() as algorithm:
        stream = ParallelRollouts(algorithm.workers).for_each(WriteParquet(tmp_path / "e"))
        assert "WriteParquet" in stream.explain()
        with stream:
            rows = sum(batch.count for batch in stream.take(2))
    assert sum(batch.count for batch in written(tmp_path)) == rows


def test_no_batches(tmp_path):
    stream = LocalIterator(from_items([1], in_process=True).gather_sync().stage)
    with (
        stream.for_each(WriteParquet(tmp_path)) as stream,
        pytest.raises(TypeError, match="WriteParquet takes batches, got int"),
    ):
        next(stream)


def test_raw_fragments_are_refused(tmp_path):
    with (
        config(tmp_path).build() as algorithm,
        pytest.raises(ValueError, match='output: in mode="raw"'),
    ):
        ParallelRollouts(algorithm.workers, mode="raw")


@pytest.mark.usefixtures("ray_session")
def test_fragments_that_stay_in_the_store_are_refused(tmp_path):
    with config(tmp_path, num_workers=2).build() as algorithm:
        rollouts = {"mode": "async", "by_reference": True}
        with pytest.raises(ValueError, match="output: the fragments"):
            ParallelRollouts(algorithm.workers, **rollouts)
