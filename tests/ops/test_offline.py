"""Plans that record experience: every sampled row is written once, also by resumed runs."""

import gymnasium as gym
import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.cli.main import main
from flowrl.data import SampleBatch
from flowrl.data.checkpoint import CheckpointError
from flowrl.errors import OfflineDataError
from flowrl.iter import LocalIterator, from_items, metrics_scope
from flowrl.iter.metrics import MetricsContext
from flowrl.offline.parquet import parquet_files, read_parquet, write_parquet
from flowrl.ops import ParallelRollouts, ReadParquet, WriteParquet
from flowrl.ops.offline import ReadStage
from tests.extras import require_extra

require_extra("offline")


def recording_config(tmp_path, **settings):
    base = {"env": "CartPole-v1", "train_batch_size": 40, "seed": 2, "output": str(tmp_path / "e")}
    return A2CConfig(**{**base, "model": {"fcnet_hiddens": [8]}, **settings})


def recorded_batches(tmp_path):
    return [read_parquet(path)[1] for path in parquet_files(tmp_path / "e")]


def recorded_steps(tmp_path):
    """(episode, step) of every row, sorted."""
    return sorted(
        pair
        for batch in recorded_batches(tmp_path)
        for pair in zip(batch["eps_id"].tolist(), batch["t"].tolist(), strict=True)
    )


@pytest.mark.slow_on_actors
def test_all_sampled_rows_are_recorded(tmp_path, num_workers):
    with recording_config(tmp_path, num_workers=num_workers).build() as algorithm:
        results = [algorithm.train() for _ in range(3)]
    (batch,) = recorded_batches(tmp_path)
    assert batch.count == results[-1]["num_env_steps_sampled"]
    columns = {"obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "action_logp"}
    assert columns <= set(batch)
    for rows in batch.split_by_episode():
        assert np.array_equal(rows["obs"][1:], rows["new_obs"][:-1])


def test_resumed_run_records_every_step_once(tmp_path):
    flags = ["--train-batch-size", "40", "--output", str(tmp_path / "e"), "--seed", "1"]
    flags += ["--output-rows-per-file", "50", "--checkpoint-frequency", "1"]
    flags += ["--run-dir", str(tmp_path / "run"), "--checkpoint-num-to-keep", "9"]
    assert main(["train", "a2c", *flags, "--stop-iters", "5"]) == 0
    expected = recorded_steps(tmp_path)
    assert len(expected) == len(set(expected)) >= 200
    resume = ["resume", str(tmp_path / "run"), "--checkpoint", "2", "--stop-iters", "5"]
    assert main(resume) == 0
    assert recorded_steps(tmp_path) == expected


def test_restore_keeps_files_of_other_runs_and_warns_of_newer_ones(tmp_path, caplog):
    with recording_config(tmp_path / "1").build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
    with recording_config(tmp_path / "2").build() as algorithm:
        for _ in range(3):
            algorithm.train()
    before = recorded_steps(tmp_path / "2")
    incompatible = recording_config(tmp_path / "2", model={"fcnet_hiddens": [16]})
    with (
        incompatible.build() as algorithm,
        pytest.raises(CheckpointError, match="these weights do not fit this network"),
    ):
        algorithm.restore(tmp_path / "c")
    assert recorded_steps(tmp_path / "2") == before
    with recording_config(tmp_path / "2").build() as algorithm:
        algorithm.restore(tmp_path / "c")
        algorithm.train()
    assert len(recorded_steps(tmp_path / "2")) == len(before) + 80
    with recording_config(tmp_path / "1").build() as algorithm:
        algorithm.restore(tmp_path / "c")
        algorithm.train()
    assert "1 files" in caplog.text


def test_failed_write_at_stop_still_stops_the_algorithm(tmp_path):
    closed = []

    class ClosingEnv(gym.Wrapper):
        def close(self):
            closed.append(True)
            super().close()

    config = recording_config(tmp_path, env=lambda context: ClosingEnv(gym.make("CartPole-v1")))
    algorithm = config.build()
    algorithm.train()
    (tmp_path / "e").write_text("not a folder")
    with pytest.raises(OSError, match="exists"):
        algorithm.stop()
    assert closed
    with pytest.raises(RuntimeError, match="this algorithm was stopped"):
        algorithm.train()
    (tmp_path / "e").unlink()  # so that the rows can be written at the exit


def test_write_parquet_records_a_stream(tmp_path):
    with recording_config(tmp_path, output=None).build() as algorithm:
        stream = ParallelRollouts(algorithm.workers).for_each(WriteParquet(tmp_path / "e"))
        assert "WriteParquet" in stream.explain()
        with stream:
            rows = sum(batch.count for batch in stream.take(2))
    assert sum(batch.count for batch in recorded_batches(tmp_path)) == rows


def test_write_parquet_rejects_other_items(tmp_path):
    stream = LocalIterator(from_items([1], in_process=True).gather_sync().stage)
    with (
        stream.for_each(WriteParquet(tmp_path)) as stream,
        pytest.raises(TypeError, match="WriteParquet takes batches, got int"),
    ):
        next(stream)


def test_raw_fragments_cannot_be_recorded(tmp_path):
    with (
        recording_config(tmp_path).build() as algorithm,
        pytest.raises(ValueError, match='output: in mode="raw"'),
    ):
        ParallelRollouts(algorithm.workers, mode="raw")


@pytest.mark.usefixtures("ray_session")
def test_fragments_passed_by_reference_cannot_be_recorded(tmp_path):
    with recording_config(tmp_path, num_workers=2).build() as algorithm:
        rollouts = {"mode": "async", "by_reference": True}
        with pytest.raises(ValueError, match="output: the fragments"):
            ParallelRollouts(algorithm.workers, **rollouts)


class FailingSource:
    """Three parts of three rows; reading the second one fails once."""

    policy_id = "default_policy"

    def __init__(self):
        self.failures = 1

    def parts(self):
        return [0, 1, 2]

    def read(self, part):
        if self.failures and part == 1:
            self.failures -= 1
            raise OSError("the disk is gone")
        return SampleBatch(obs=np.arange(3) + 10 * part)

    def to_policy_actions(self, rows, policy):
        return rows

    def part_name(self, part):
        return f"part {part}"

    def __str__(self):
        return "the source"


class CountingSource(FailingSource):
    """Counts the parts that are read."""

    num_read = 0

    def read(self, part):
        self.num_read += 1
        return SampleBatch(obs=np.arange(3) + 10 * part)


def test_restored_stream_reads_only_the_last_part_again(monkeypatch):
    monkeypatch.setattr("flowrl.ops.offline.rows_for_policy", lambda rows, policy: rows)
    with A2CConfig(env="CartPole-v1", seed=1).build() as algorithm:
        arguments = (algorithm.workers, 2, ["obs"], None, 3)
        whole = ReadStage("Read", CountingSource(), *arguments)
        batches = LocalIterator(whole, "read")
        batches.take(4)  # of the third part
        state = whole.state_dict()
        expected = [batch["obs"].tolist() for batch in batches.take(8)]
        other = ReadStage("Read", CountingSource(), *arguments)
        other.load_state_dict(state)
        first = LocalIterator(other, "read")
        found = [next(first)["obs"].tolist()]
        assert other.source.num_read <= 2
        found += [batch["obs"].tolist() for batch in first.take(7)]
    assert found == expected


def test_restored_stream_reads_added_parts_in_the_next_pass(monkeypatch, caplog):
    monkeypatch.setattr("flowrl.ops.offline.rows_for_policy", lambda rows, policy: rows)
    with A2CConfig(env="CartPole-v1", seed=1).build() as algorithm:
        arguments = (algorithm.workers, 3, ["obs"], None, 3)
        whole = ReadStage("Read", CountingSource(), *arguments)
        batches = LocalIterator(whole, "read")
        batches.take(1)
        state = whole.state_dict()
        expected = [batch["obs"].tolist() for batch in batches.take(2)]
        other = ReadStage("Read", CountingSource(), *arguments)
        other.load_state_dict(state)
        monkeypatch.setattr(other.source, "parts", lambda: [5, 0, 1, 2])
        restored = LocalIterator(other, "read")
        assert [batch["obs"].tolist() for batch in restored.take(2)] == expected
        rows = [row for batch in restored.take(4) for row in batch["obs"].tolist()]
        assert sorted(rows) == [0, 1, 2, 10, 11, 12, 20, 21, 22, 50, 51, 52]
        assert "the source: files (or groups of episodes) were added, such as part 5" in (
            caplog.text
        )
        other = ReadStage("Read", CountingSource(), *arguments)
        other.load_state_dict(state)
        monkeypatch.setattr(other.source, "parts", list)
        with pytest.raises(OfflineDataError, match=r"part \d is still to be read, but there is no"):
            next(LocalIterator(other, "read"))


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("seed", range(6))  # of the order of the parts
def test_each_pass_reads_every_row_once_although_a_read_fails(seed, restored, monkeypatch):
    monkeypatch.setattr("flowrl.ops.offline.rows_for_policy", lambda rows, policy: rows)
    with A2CConfig(env="CartPole-v1", seed=1).build() as algorithm:
        stage = ReadStage("Read", FailingSource(), algorithm.workers, 2, ["obs"], None, seed)
        batches, rows, failures = LocalIterator(stage, "read"), [], 0
        while len(rows) < 18:
            try:
                rows += next(batches)["obs"].tolist()
            except OSError:
                failures += 1
                if restored:  # a checkpoint after the failure
                    state, arguments = stage.state_dict(), (algorithm.workers, 2, ["obs"])
                    stage = ReadStage("Read", stage.source, *arguments, None, 9)
                    stage.load_state_dict(state)
                    batches = LocalIterator(stage, "read")
    expected = [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert failures == 1
    assert sorted(rows[:9]) == sorted(rows[9:18]) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rewards": np.zeros((8, 1), np.float32)},
            "the column 'rewards' must have the shape (8,)",
        ),
        ({"terminateds": np.zeros((8, 1), bool)}, "the column 'terminateds' must have the shape"),
        ({"new_obs": np.zeros((8, 3), np.float32)}, "new_obs"),
    ],
)
def test_columns_with_other_shapes_are_named(tmp_path, changes, message):
    columns = {
        "obs": np.zeros((8, 4), np.float32),
        "actions": np.zeros(8, np.int64),
        **changes,
    }
    write_parquet(tmp_path / "a.parquet", SampleBatch(columns))
    with (
        A2CConfig(env="CartPole-v1").build() as algorithm,
        pytest.raises(OfflineDataError) as caught,
    ):
        ReadParquet(algorithm.workers, tmp_path, 4).take(1)
    assert "a.parquet" in str(caught.value)
    assert message in str(caught.value)


def test_rewards_that_are_trained_on_are_finite(tmp_path):
    rows = SampleBatch(obs=np.zeros((8, 4), np.float32), actions=np.zeros(8, np.int64))
    write_parquet(tmp_path / "a.parquet", rows.with_columns(rewards=np.full(8, np.nan)))
    with A2CConfig(env="CartPole-v1").build() as algorithm:
        ReadParquet(algorithm.workers, tmp_path, 4).take(1)  # as for behavior cloning
        message = r"a\.parquet: the column 'rewards' has values that are not finite"
        with pytest.raises(OfflineDataError, match=message):
            ReadParquet(algorithm.workers, tmp_path, 4, columns=["rewards"]).take(1)


def test_columns_that_some_files_lack_are_not_filled(tmp_path):
    rows = SampleBatch(obs=np.zeros((8, 4), np.float32), actions=np.zeros(8, np.int64))
    write_parquet(tmp_path / "a.parquet", rows)
    more = {"rewards": np.ones(8, np.float32), "loss_mask": np.zeros(8, bool)}
    write_parquet(tmp_path / "b.parquet", rows.with_columns(**more))
    with A2CConfig(env="CartPole-v1").build() as algorithm:
        (both,) = ReadParquet(algorithm.workers, tmp_path, 16).take(1)
        assert set(both) == {"obs", "actions", "loss_mask"}
        assert both["loss_mask"].sum() == 8  # rows without the column are trained on
        for batch in ReadParquet(algorithm.workers, tmp_path, 8).take(4):
            assert "rewards" not in batch or (batch["rewards"] == 1).all()


def test_columns_are_a_list_of_names(tmp_path):
    with (
        A2CConfig(env="CartPole-v1").build() as algorithm,
        pytest.raises(TypeError, match="columns must be a list of names, got 'obs'"),
    ):
        ReadParquet(algorithm.workers, tmp_path, 4, columns="obs")


def test_path_of_recorded_rows_is_checked_at_once():
    with A2CConfig(env="CartPole-v1").build() as algorithm:
        with pytest.raises(TypeError, match="folder must be a path, got None"):
            ReadParquet(algorithm.workers, None, 4)
        with pytest.raises(ValueError, match="folder is empty"):
            ReadParquet(algorithm.workers, "", 4)


def test_parquet_files_need_a_folder_on_this_machine():
    with pytest.raises(ValueError, match="must be a folder on this machine, got s3://bucket/rows"):
        WriteParquet("s3://bucket/rows")
    with pytest.raises(ValueError, match="folder is empty: pass"):
        WriteParquet("")
    with pytest.raises(TypeError, match="folder must be a path, got 3"):
        WriteParquet(3)


@pytest.mark.parametrize(
    ("prepare", "error", "message"),
    [
        (lambda rows: None, TypeError, "prepare must return a SampleBatch, it returned None"),
        (lambda rows: rows[:0], OfflineDataError, "`prepare` has removed all rows"),
    ],
)
def test_result_of_prepare_is_checked(tmp_path, prepare, error, message):
    rows = SampleBatch(obs=np.zeros((4, 4), np.float32), actions=np.zeros(4, np.int64))
    write_parquet(tmp_path / "rows.parquet", rows, "default_policy")
    with A2CConfig(env="CartPole-v1").build() as algorithm:
        stream = ReadParquet(algorithm.workers, tmp_path, 8, prepare=prepare)
        with pytest.raises(error, match=message):
            next(stream)


def test_columns_that_some_files_lack_stay_left_out_after_a_resume(tmp_path):
    columns = {"obs": np.zeros((6, 4), np.float32), "actions": np.zeros(6, np.int64)}
    write_parquet(tmp_path / "a.parquet", SampleBatch(**columns), "default_policy")
    more = SampleBatch(**columns, extra=np.zeros(6, np.float32))
    write_parquet(tmp_path / "b.parquet", more, "default_policy")
    with A2CConfig(env="CartPole-v1").build() as algorithm, metrics_scope(MetricsContext()):
        first = ReadParquet(algorithm.workers, tmp_path, 4, seed=0)
        expected = [set(batch) for batch in first.take(6)]
        assert "extra" not in expected[-1]
        for number in range(6):
            stream = ReadParquet(algorithm.workers, tmp_path, 4, seed=0)
            stream.take(number)
            again = ReadParquet(algorithm.workers, tmp_path, 4, seed=0)
            again.load_state_dict(stream.state_dict())
            assert [set(batch) for batch in again.take(6 - number)] == expected[number:]
