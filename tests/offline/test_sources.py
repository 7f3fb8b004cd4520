"""Sources of recorded rows: episode ids, files that are skipped or rejected."""

import numpy as np
import pytest

from flowrl.data import SampleBatch
from flowrl.errors import OfflineDataError
from flowrl.offline import parquet
from flowrl.offline.parquet import write_parquet
from flowrl.offline.sources import ParquetSource
from tests.extras import require_extra

POLICY = "default_policy"


def write(path, run):
    ids = np.array([0, 0, 1, 1, 1 << 40])
    rows = SampleBatch(obs=np.arange(5.0), actions=np.zeros(5, int), eps_id=ids)
    write_parquet(path, rows, POLICY, run)


def test_files_that_cannot_be_used_are_named(tmp_path):
    require_extra("offline")
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_parquet(tmp_path / "a.parquet", SampleBatch(obs=np.zeros((2, 3), np.float32)))
    source = ParquetSource(tmp_path, "default_policy")
    table = pa.table({"x": [1]})
    pq.write_table(table, tmp_path / "b.parquet")
    assert source.read(source.parts()[0]).count == 2
    with pytest.raises(OfflineDataError, match=r"b\.parquet: not written by flowrl"):
        source.read(source.parts()[1])
    table = table.replace_schema_metadata({"flowrl": '{"format": 99}'})
    pq.write_table(table, tmp_path / "b.parquet")
    with pytest.raises(OfflineDataError, match=r"b\.parquet: "):
        source.read(source.parts()[1])


def test_rows_of_other_policies_are_not_decoded(tmp_path, monkeypatch):
    require_extra("offline")
    write_parquet(tmp_path / "a.parquet", SampleBatch(obs=np.zeros((2, 3))), policy_id="other")
    monkeypatch.setattr(parquet, "read_parquet", lambda path: pytest.fail("was decoded"))
    source = ParquetSource(tmp_path, "default_policy")
    assert source.read(source.parts()[0]).count == 0


def test_episode_ids_differ_between_runs_and_from_those_of_environments(tmp_path):
    require_extra("offline")
    write(tmp_path / "a1.parquet", "a")
    write(tmp_path / "a2.parquet", "a")
    write(tmp_path / "b.parquet", "b")
    source = ParquetSource(tmp_path, POLICY)
    first, second, other = (source.read(part)["eps_id"] for part in source.parts())
    assert first.tolist() == second.tolist()  # a run may continue an episode in its next file
    assert not set(first) & set(other)
    for ids in (first, other):
        assert (ids < 0).all()
        assert ids[0] == ids[1] != ids[2] == ids[3] != ids[4]
