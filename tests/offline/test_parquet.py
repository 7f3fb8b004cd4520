"""Parquet files: exact round trips, rejected files and columns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.extras import require_extra

require_extra("offline")

import pyarrow as pa
import pyarrow.parquet as pq

from flowrl.data import SampleBatch
from flowrl.errors import OfflineDataError
from flowrl.offline.parquet import parquet_files, read_parquet, write_parquet

from .batches import count_batch

DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
dtypes = st.sampled_from(DTYPES.split(" "))


def assert_batches_equal(batch, expected):
    assert set(batch) == set(expected)
    for name in batch:
        assert_columns_equal(batch[name], expected[name])


def assert_columns_equal(column, expected):
    if isinstance(column, dict):
        assert column.keys() == expected.keys()
        for key in column:
            assert_columns_equal(column[key], expected[key])
    elif isinstance(column, tuple):
        assert len(column) == len(expected)
        for inner, expected_inner in zip(column, expected, strict=True):
            assert_columns_equal(inner, expected_inner)
    else:
        assert column.dtype == expected.dtype
        assert column.shape == expected.shape
        assert column.tobytes() == expected.tobytes()


def columns(rows):
    """Strategy: arrays of any dtype and shape, possibly nested in dicts and tuples."""
    shapes = st.lists(st.integers(0, 3), max_size=3).map(lambda inner: (rows, *inner))
    leaf = st.tuples(dtypes, shapes).flatmap(lambda ds: hnp.arrays(np.dtype(ds[0]), ds[1]))
    keys = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=4)
    return st.recursive(
        leaf,
        lambda inner: (
            st.dictionaries(keys, inner, min_size=1, max_size=3)
            | st.lists(inner, min_size=1, max_size=3).map(tuple)
        ),
        max_leaves=4,
    )


@settings(max_examples=60)
@given(data=st.data(), rows=st.integers(0, 5))
def test_batches_survive_a_round_trip(tmp_path_factory, data, rows):
    path = tmp_path_factory.mktemp("parquet") / "a.parquet"
    names = data.draw(st.lists(st.sampled_from(["obs", "actions", "x"]), unique=True, min_size=1))
    batch = SampleBatch({name: data.draw(columns(rows)) for name in names})
    write_parquet(path, batch, "p")
    policy_id, read = read_parquet(path)
    assert policy_id == "p"
    assert_batches_equal(read, batch)


def test_other_parquet_readers_see_the_columns(tmp_path):
    write_parquet(tmp_path / "a.parquet", count_batch(6))
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.column_names == ["obs/image", "obs/speed", "actions", "rewards", "t"]
    assert table.column("actions").to_pylist() == [0, 1, 2, 3, 4, 5]
    assert len(table.column("obs/image")[0].as_py()) == 60


def test_infos_are_stored_as_json(tmp_path):
    infos = [{"lives": np.int64(3), "at": np.zeros(2)}, {}]
    write_parquet(tmp_path / "a.parquet", SampleBatch(t=[0, 1], infos=infos))
    _, read = read_parquet(tmp_path / "a.parquet")
    assert list(read["infos"]) == [{"lives": 3, "at": [0.0, 0.0]}, {}]


def test_columns_per_sequence_are_not_stored(tmp_path):
    batch = SampleBatch(
        obs=np.zeros((4, 2)), seq_lens=np.array([3, 1]), state_in_0=np.zeros((2, 8))
    )
    write_parquet(tmp_path / "a.parquet", batch)
    assert set(read_parquet(tmp_path / "a.parquet")[1]) == {"obs"}


@pytest.mark.parametrize("keep", [0, 1, 0.5, -1])
def test_truncated_file_is_rejected(tmp_path, keep):
    path = tmp_path / "a.parquet"
    write_parquet(path, count_batch(100))
    content = path.read_bytes()
    end = int(len(content) * keep) if isinstance(keep, float) else keep % len(content)
    path.write_bytes(content[:end])
    with pytest.raises(OfflineDataError, match=r"a\.parquet: cannot be read"):
        read_parquet(path)


def test_flipped_bits_never_change_rows(tmp_path):
    """A damaged file is rejected, unless the flipped bit is in a byte without data."""
    path = tmp_path / "a.parquet"
    batch = count_batch(300)
    write_parquet(path, batch)
    content, rng, errors = path.read_bytes(), np.random.default_rng(0), []
    for _ in range(400):
        damaged = bytearray(content)
        damaged[rng.integers(len(content))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            assert_batches_equal(read_parquet(path)[1], batch)
        except OfflineDataError as error:
            errors.append(str(error))
    assert len(errors) > 200
    assert all("a.parquet" in error for error in errors)


def test_other_and_missing_files_are_rejected(tmp_path):
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "a.parquet")
    with pytest.raises(OfflineDataError, match="not written by flowrl: its columns are a, b"):
        read_parquet(tmp_path / "a.parquet")
    with pytest.raises(OfflineDataError, match="cannot be read"):
        read_parquet(tmp_path / "none.parquet")
    with pytest.raises(OfflineDataError, match="there is no such folder"):
        parquet_files(tmp_path / "empty")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": np.array(["x"])}, "'a': Parquet cannot store dtype <U1"),
        ({"a": np.zeros(1, np.complex64)}, "'a': Parquet cannot store dtype complex64"),
        ({"a": {1: np.zeros(1)}}, "its keys must be strings"),
        ({"a/b": np.zeros(1), "a": {"b": np.zeros(1)}}, "two columns have the name 'a/b'"),
    ],
)
def test_columns_that_parquet_cannot_store_are_rejected(tmp_path, columns, message):
    with pytest.raises(OfflineDataError, match=message):
        write_parquet(tmp_path / "a.parquet", SampleBatch(columns))
    assert not list(tmp_path.iterdir())


def test_file_whose_rows_another_program_has_changed_is_rejected(tmp_path):
    write_parquet(tmp_path / "rows.parquet", count_batch(6))
    pq.write_table(pq.read_table(tmp_path / "rows.parquet").slice(0, 3), tmp_path / "a.parquet")
    with pytest.raises(OfflineDataError, match="it has 3 rows, flowrl wrote 6"):
        read_parquet(tmp_path / "a.parquet")


def test_hidden_files_are_not_read(tmp_path):
    write_parquet(tmp_path / "a.parquet", count_batch(6))
    (tmp_path / "._a.parquet").write_text("of a file system")
    assert parquet_files(tmp_path) == [tmp_path / "a.parquet"]


def test_path_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_parquet("~/a.parquet", count_batch(6))
    assert (tmp_path / "a.parquet").exists()
    assert read_parquet("~/a.parquet")[1].count == 6
