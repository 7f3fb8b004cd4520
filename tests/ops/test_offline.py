"""Experience that plans write: all that was sampled, once, with every column; runs that go on."""

import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.data.parquet import parquet_files, read_parquet
from flowrl.iter import LocalIterator, from_items
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


def test_a_run_that_goes_on_writes_what_one_without_break_does(tmp_path):
    with config(tmp_path / "1", output_rows_per_file=60).build() as algorithm:
        for _ in range(4):
            algorithm.train()
    cut = config(tmp_path / "2", output_rows_per_file=60)
    algorithm = cut.build()
    algorithm.train()
    algorithm.save(tmp_path / "c")
    algorithm.train()  # dies here
    with cut.build() as algorithm:
        algorithm.restore(tmp_path / "c")
        for _ in range(3):
            algorithm.train()
    one, other = written(tmp_path / "1"), written(tmp_path / "2")
    assert [batch.count for batch in one] == [80, 80]
    for mine, theirs in zip(one, other, strict=True):
        assert [n for n in mine if not np.array_equal(mine[n], theirs[n])] == []


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


@pytest.mark.usefixtures("ray_session")
def test_fragments_that_stay_in_the_store_are_refused(tmp_path):
    with config(tmp_path, num_workers=2).build() as algorithm:
        rollouts = {"mode": "async", "by_reference": True}
        with pytest.raises(ValueError, match="output: the fragments"):
            ParallelRollouts(algorithm.workers, **rollouts)
