"""Experience in Parquet files: batches come back bit for bit; damage, foreign files are named."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.offline.parquet import (
    OfflineDataError,
    ParquetWriter,
    parquet_files,
    read_parquet,
    write_parquet,
)

KINDS = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
dtypes = st.sampled_from(KINDS.split(" "))


def assert_same(batch, other):
    assert set(batch) == set(other)
    for name in batch:
        assert_same_column(batch[name], other[name])


def assert_same_column(mine, theirs):
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert_same_column(mine[key], theirs[key])
    elif isinstance(mine, tuple):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_same_column(one, other)
    else:
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert mine.tobytes() == theirs.tobytes()


def column(rows):
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


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(0, 5))
def test_round_trip(tmp_path_factory, data, rows):
    path = tmp_path_factory.mktemp("parquet") / "a.parquet"
    names = data.draw(st.lists(st.sampled_from(["obs", "actions", "x"]), unique=True, min_size=1))
    batch = SampleBatch({name: data.draw(column(rows)) for name in names})
    write_parquet(path, batch, "p")
    policy_id, back = read_parquet(path)
    assert policy_id == "p"
    assert_same(batch, back)


def rows_of(count, start=0):
    numbers = np.arange(start, start + count)
    return SampleBatch(
        obs={"image": np.ones((count, 4, 5, 3), np.uint8) * 7, "speed": numbers * 0.5},
        actions=numbers,
        rewards=np.full(count, np.nan, np.float32),
        t=numbers,
    )


def test_others_can_read_the_columns(tmp_path):
    write_parquet(tmp_path / "a.parquet", rows_of(6))
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.column_names == ["obs/image", "obs/speed", "actions", "rewards", "t"]
    assert table.column("actions").to_pylist() == [0, 1, 2, 3, 4, 5]
    assert len(table.column("obs/image")[0].as_py()) == 60


def test_infos_are_json(tmp_path):
    infos = [{"lives": np.int64(3), "at": np.zeros(2)}, {}]
    write_parquet(tmp_path / "a.parquet", SampleBatch(t=[0, 1], infos=infos))
    _, back = read_parquet(tmp_path / "a.parquet")
    assert list(back["infos"]) == [{"lives": 3, "at": [0.0, 0.0]}, {}]


def test_what_belongs_to_sequences_is_left_out(tmp_path):
    batch = SampleBatch(
        obs=np.zeros((4, 2)), seq_lens=np.array([3, 1]), state_in_0=np.zeros((2, 8))
    )
    write_parquet(tmp_path / "a.parquet", batch)
    assert set(read_parquet(tmp_path / "a.parquet")[1]) == {"obs"}


@pytest.mark.parametrize("keep", [0, 1, 0.5, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "a.parquet"
    write_parquet(path, rows_of(100))
    whole = path.read_bytes()
    end = int(len(whole) * keep) if isinstance(keep, float) else keep % len(whole)
    path.write_bytes(whole[:end])
    with pytest.raises(OfflineDataError, match=r"a\.parquet: it cannot be read"):
        read_parquet(path)


def test_flipped_bits_are_found(tmp_path):
    """None gives other rows: they are refused, or hit bytes that nothing is read from."""
    path = tmp_path / "a.parquet"
    batch = rows_of(300)
    write_parquet(path, batch)
    whole, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            assert_same(batch, read_parquet(path)[1])
        except OfflineDataError as error:
            refused += "a.parquet" in str(error)
    assert refused > 200


def test_foreign_files_are_refused(tmp_path):
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "a.parquet")
    with pytest.raises(OfflineDataError, match="flowrl did not write it: its columns are a, b"):
        read_parquet(tmp_path / "a.parquet")
    with pytest.raises(OfflineDataError, match="cannot be read"):
        read_parquet(tmp_path / "none.parquet")
    with pytest.raises(OfflineDataError, match="there is no"):
        parquet_files(tmp_path / "empty")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"a": np.array(["x"])}, "'a': <U1 has no form"),
        ({"a": np.zeros(1, np.complex64)}, "'a': complex64 has no form"),
        ({"a": {1: np.zeros(1)}}, "its keys must be strings"),
        ({"a/b": np.zeros(1), "a": {"b": np.zeros(1)}}, "two columns are called 'a/b'"),
    ],
)
def test_what_has_no_form_is_refused(tmp_path, columns, said):
    with pytest.raises(OfflineDataError, match=said):
        write_parquet(tmp_path / "a.parquet", SampleBatch(columns))
    assert not list(tmp_path.iterdir())


def test_a_writer_cuts_into_files(tmp_path):
    writer = ParquetWriter(tmp_path / "e", rows_per_file=10)
    for start in range(0, 24, 6):
        writer.add(rows_of(6, start))
    names = [path.name for path in parquet_files(tmp_path / "e")]
    assert [name[-14:] for name in names] == ["000000.parquet", "000001.parquet"]
    assert all(name.startswith("default_policy-") for name in names)
    writer.add(rows_of(3, 24))
    writer.flush()
    writer.flush()
    read = [read_parquet(path)[1] for path in parquet_files(tmp_path / "e")]
    assert [batch.count for batch in read] == [12, 12, 3]
    assert np.concatenate([batch["t"] for batch in read]).tolist() == list(range(27))


def test_policies_apart(tmp_path):
    writer = ParquetWriter(tmp_path, rows_per_file=10)
    writer.add(MultiAgentBatch({"a/b": rows_of(4), "c": rows_of(12), "d": rows_of(0)}, 12))
    assert [path.name[:2] for path in parquet_files(tmp_path)] == ["c-"]
    writer.flush()
    assert {read_parquet(p)[0]: read_parquet(p)[1].count for p in parquet_files(tmp_path)} == {
        "a/b": 4,
        "c": 12,
    }


def test_writers_do_not_touch_each_others_files(tmp_path):
    writers = [ParquetWriter(tmp_path, 4) for _ in range(3)]
    for writer in writers:
        writer.add(rows_of(3))
    for writer in writers:
        writer.add(rows_of(3))
    assert sum(read_parquet(path)[1].count for path in parquet_files(tmp_path)) == 18


def test_who_goes_on_from_a_state_begins_new_files_and_knows_the_later_ones(tmp_path):
    writer = ParquetWriter(tmp_path, 10)
    for start in (0, 6, 12):
        writer.add(rows_of(6, start))
    state = writer.state_dict()
    writer.add(rows_of(6, 900))  # after the state
    other = ParquetWriter(tmp_path, 10)
    other.load_state_dict(state)
    (later,) = other.later_files()
    assert read_parquet(later)[1]["t"].tolist() == [*range(12, 18), *range(900, 906)]
    other.flush()  # nothing was added: what the state holds is not written here
    assert len(list(parquet_files(tmp_path))) == 2
    other.add(rows_of(6, 18))
    other.flush()
    later.unlink()
    read = [read_parquet(path)[1]["t"] for path in parquet_files(tmp_path)]
    assert sorted(np.concatenate(read).tolist()) == list(range(24))


def test_what_does_not_go_together_gets_a_file_of_its_own(tmp_path):
    writer = ParquetWriter(tmp_path)
    writer.add(SampleBatch(obs=np.zeros((2, 3))))
    writer.add(SampleBatch(obs=np.zeros((2, 4))))
    writer.flush()
    shapes = sorted(read_parquet(p)[1]["obs"].shape for p in parquet_files(tmp_path))
    assert shapes == [(2, 3), (2, 4)]


def test_many_small_batches(tmp_path):
    writer = ParquetWriter(tmp_path, 10_000)
    for start in range(3000):
        writer.add(rows_of(1, start))
    writer.flush()
    assert read_parquet(next(parquet_files(tmp_path)))[1].count == 3000


def test_padding_and_foreign_byte_orders_and_odd_infos(tmp_path):
    batch = SampleBatch(
        obs=np.arange(5, dtype=">f4"),
        infos=[{"seen": {1}, 3: (1, 2)}] * 5,
        seq_lens=np.array([2, 3]),
    )
    writer = ParquetWriter(tmp_path)
    writer.add(batch.right_zero_pad(3))
    writer.flush()
    _, back = read_parquet(next(parquet_files(tmp_path)))
    assert back["obs"].tolist() == [0, 1, 2, 3, 4]
    assert back["obs"].dtype == np.float32
    assert back["infos"][0] == {"seen": "{1}", "3": [1, 2]}


def test_a_file_that_cannot_be_written_loses_no_rows(tmp_path):
    (tmp_path / "e").write_text("in the way")
    writer = ParquetWriter(tmp_path / "e", 4)
    with pytest.raises(OSError, match="exists"):
        writer.add(rows_of(6))
    (tmp_path / "e").unlink()
    writer.flush()
    assert read_parquet(next(parquet_files(tmp_path / "e")))[1].count == 6


@pytest.mark.parametrize("rows", [0, -1, 1.5, True])
def test_bad_sizes(tmp_path, rows):
    with pytest.raises(ValueError, match="rows_per_file"):
        ParquetWriter(tmp_path, rows)
