"""ParquetWriter: file sizes, one file per policy and type, saved states, failures."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.data.indexed_columns import IndexedColumn
from flowrl.data.lazy_columns import LazyColumn
from flowrl.errors import OfflineDataError
from flowrl.offline import parquet_writer
from flowrl.offline.parquet import parquet_files, read_parquet
from flowrl.offline.parquet_writer import ParquetWriter
from tests.extras import require_extra

from .batches import count_batch

require_extra("offline")


def test_full_files_are_written(tmp_path):
    writer = ParquetWriter(tmp_path / "e", rows_per_file=10)
    for start in range(0, 24, 6):
        writer.add(count_batch(6, start))
    names = [path.name for path in parquet_files(tmp_path / "e")]
    assert [name[-14:] for name in names] == ["000000.parquet", "000001.parquet"]
    assert all(name.startswith("default_policy-") for name in names)
    writer.add(count_batch(3, 24))
    writer.flush()
    writer.flush()
    batches = [read_parquet(path)[1] for path in parquet_files(tmp_path / "e")]
    assert [batch.count for batch in batches] == [12, 12, 3]
    assert np.concatenate([batch["t"] for batch in batches]).tolist() == list(range(27))


def test_lazy_columns_are_read_when_rows_are_added(tmp_path):
    values, is_gone = np.arange(6, dtype=np.float32), False

    def fetch():
        assert not is_gone, "the worker that stores the column is gone"
        return values

    lazy = LazyColumn("vf_preds", fetch, values.shape, values.dtype)
    column = IndexedColumn(lazy, np.arange(6))
    writer = ParquetWriter(tmp_path, rows_per_file=10)
    rows = count_batch(6)
    writer.add(SampleBatch.unchecked({**dict(rows.stored()), "vf_preds": column}, like=rows))
    is_gone = True
    assert not writer.state_dict()["pending"]["default_policy"][0].is_lazy("vf_preds")
    writer.flush()
    (path,) = parquet_files(tmp_path)
    np.testing.assert_array_equal(read_parquet(path)[1]["vf_preds"], values)


def test_folder_that_is_a_file_is_rejected_at_once(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(FileExistsError, match="x is a file; WriteParquet needs a folder"):
        ParquetWriter(tmp_path / "x")


def test_policies_have_separate_files(tmp_path):
    writer = ParquetWriter(tmp_path, rows_per_file=10)
    batches = {"a/b": count_batch(4), "c": count_batch(12), "d": count_batch(0)}
    writer.add(MultiAgentBatch(batches, 12))
    assert [path.name[:2] for path in parquet_files(tmp_path)] == ["c-"]
    writer.flush()
    files = [read_parquet(path) for path in parquet_files(tmp_path)]
    assert {policy_id: rows.count for policy_id, rows in files} == {"a/b": 4, "c": 12}


def test_writers_do_not_overwrite_each_others_files(tmp_path):
    writers = [ParquetWriter(tmp_path, 4) for _ in range(3)]
    for writer in writers:
        writer.add(count_batch(3))
    for writer in writers:
        writer.add(count_batch(3))
    assert sum(read_parquet(path)[1].count for path in parquet_files(tmp_path)) == 18


def test_copies_in_other_processes_do_not_overwrite_each_others_files(tmp_path):
    writer = ParquetWriter(tmp_path, 4)
    for copy in (pickle.loads(pickle.dumps(writer)) for _ in range(2)):
        copy.add(count_batch(6))
    assert sum(read_parquet(path)[1].count for path in parquet_files(tmp_path)) == 12


def test_restored_writer_starts_new_files_and_lists_newer_ones(tmp_path):
    writer = ParquetWriter(tmp_path, 10)
    for start in (0, 6, 12):
        writer.add(count_batch(6, start))
    state = writer.state_dict()
    writer.add(count_batch(6, 900))  # newer than the state
    restored = ParquetWriter(tmp_path, 10)
    restored.load_state_dict(state)
    (newer,) = restored.newer_files()
    assert read_parquet(newer)[1]["t"].tolist() == [*range(12, 18), *range(900, 906)]
    restored.flush()  # nothing was added: the rows of the state are not written
    assert len(parquet_files(tmp_path)) == 2
    restored.add(count_batch(6, 18))
    restored.flush()
    newer.unlink()
    steps = [read_parquet(path)[1]["t"] for path in parquet_files(tmp_path)]
    assert sorted(np.concatenate(steps).tolist()) == list(range(24))


def test_files_of_all_writers_since_a_state_are_newer(tmp_path):
    ParquetWriter(tmp_path, 4).add(count_batch(4, 500))  # of another run
    writer = ParquetWriter(tmp_path, 4)
    writer.add(count_batch(4))
    state = writer.state_dict()
    writer.add(count_batch(4, 4))
    resumed = ParquetWriter(tmp_path, 4)
    resumed.load_state_dict(state)
    resumed.add(count_batch(4, 4))  # and it dies before its first checkpoint
    (tmp_path / "notes-20260101T000000-abcdef-000001.parquet").write_bytes(b"damaged")
    again = ParquetWriter(tmp_path, 4)
    again.load_state_dict(state)
    assert [read_parquet(path)[1]["t"][0] for path in again.newer_files()] == [4, 4]
    resumed.add(count_batch(4, 8))
    later = ParquetWriter(tmp_path, 4)
    later.load_state_dict(resumed.state_dict())
    later.add(count_batch(4, 12))
    assert len(later.newer_files()) == 1  # without its own
    last = ParquetWriter(tmp_path, 4)
    last.load_state_dict(later.state_dict())
    # the file that the first writer wrote after its state was never part of this run
    assert [read_parquet(path)[1]["t"][0] for path in last.newer_files()] == [4]


def test_batches_of_other_shapes_go_to_another_file(tmp_path):
    writer = ParquetWriter(tmp_path)
    writer.add(SampleBatch(obs=np.zeros((2, 3))))
    writer.add(SampleBatch(obs=np.zeros((2, 4))))
    writer.flush()
    shapes = sorted(read_parquet(p)[1]["obs"].shape for p in parquet_files(tmp_path))
    assert shapes == [(2, 3), (2, 4)]


def test_many_small_batches_fill_one_file(tmp_path):
    writer = ParquetWriter(tmp_path, 10_000)
    for start in range(3000):
        writer.add(count_batch(1, start))
    writer.flush()
    assert read_parquet(parquet_files(tmp_path)[0])[1].count == 3000


def test_padding_byte_order_and_infos_are_normalized(tmp_path):
    batch = SampleBatch(
        obs=np.arange(5, dtype=">f4"),
        infos=[{"seen": {1}, 3: (1, 2)}] * 5,
        seq_lens=np.array([2, 3]),
    )
    writer = ParquetWriter(tmp_path)
    writer.add(batch.right_zero_pad(3))
    writer.flush()
    _, read = read_parquet(parquet_files(tmp_path)[0])
    assert read["obs"].tolist() == [0, 1, 2, 3, 4]
    assert read["obs"].dtype == np.float32
    assert read["infos"][0] == {"seen": "{1}", "3": [1, 2]}


def test_failed_write_keeps_the_rows(tmp_path):
    writer = ParquetWriter(tmp_path / "e", 4)
    (tmp_path / "e").write_text("not a folder")
    with pytest.raises(OSError, match="exists"):
        writer.add(count_batch(6))
    (tmp_path / "e").unlink()
    writer.flush()
    assert read_parquet(parquet_files(tmp_path / "e")[0])[1].count == 6


@pytest.mark.parametrize("rows", [0, -1, 1.5, True])
def test_invalid_rows_per_file_is_rejected(tmp_path, rows):
    with pytest.raises(ValueError, match="rows_per_file"):
        ParquetWriter(tmp_path, rows)


def test_unflushed_rows_are_written_at_exit(tmp_path):
    code = """
import gc, os, shutil, sys
import numpy as np
from flowrl.data import SampleBatch
from flowrl.offline.parquet_writer import ParquetWriter

def record(folder):
    writer = ParquetWriter(folder)
    writer.add(SampleBatch(obs=np.zeros(200), actions=np.zeros(200)))
    return writer

os.mkdir("open"), os.mkdir("removed")
writer, removed = record("open"), record("removed")
record("dropped")
gc.collect()
shutil.rmtree("removed")
child = os.fork()
if child == 0:
    sys.exit()
os.waitpid(child, 0)
assert not os.listdir("open")
writer.add(SampleBatch(obs=np.zeros(1), actions=np.zeros(1)))
raise RuntimeError("the process fails")
"""
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert "RuntimeError: the process fails" in process.stderr
    assert "removed: the rows recorded last are not written: /" in process.stderr
    assert not (tmp_path / "removed").exists()
    for folder, rows in (("open", 201), ("dropped", 200)):
        (path,) = parquet_files(tmp_path / folder)
        assert read_parquet(path)[1].count == rows


def test_column_that_cannot_be_stored_is_rejected_before_any_row_is_added(tmp_path):
    writer = ParquetWriter(tmp_path, rows_per_file=10)
    texts = count_batch(4).with_columns(note=np.array(["a", "b", "c", "d"]))
    for bad in (texts, MultiAgentBatch({"p": count_batch(4), "q": texts}, 4)):
        with pytest.raises(OfflineDataError, match="column 'note': Parquet cannot store"):
            writer.add(bad)
    assert not writer.state_dict()["pending"]


def test_rows_stay_in_the_writer_if_a_file_cannot_be_written(tmp_path, monkeypatch):
    writer = ParquetWriter(tmp_path, rows_per_file=6)
    write = parquet_writer.write_parquet

    def full_disk(*args):
        raise OSError("the disk is full")

    monkeypatch.setattr(parquet_writer, "write_parquet", full_disk)
    with pytest.raises(OSError, match="full"):
        writer.add(MultiAgentBatch({"p": count_batch(6), "q": count_batch(6)}, 6))
    with pytest.raises(OSError, match="full"):  # other types, in another file
        writer.add(MultiAgentBatch({"p": count_batch(2, 6).with_columns(x=np.zeros(2))}, 2))
    monkeypatch.setattr(parquet_writer, "write_parquet", write)
    writer.flush()
    files = [read_parquet(path) for path in parquet_files(tmp_path)]
    assert sorted((policy_id, rows.count) for policy_id, rows in files) == [
        ("p", 2), ("p", 6), ("q", 6),
    ]  # fmt: skip


def test_missing_infos_are_empty(tmp_path):
    writer = ParquetWriter(tmp_path)
    writer.add(count_batch(2).with_columns(infos=[{"a": 1}, {"a": 2}]))
    writer.add(count_batch(2, 2).without_columns("infos"))
    writer.flush()
    (path,) = parquet_files(tmp_path)
    assert list(read_parquet(path)[1]["infos"]) == [{"a": 1}, {"a": 2}, {}, {}]
