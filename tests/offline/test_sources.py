"""Sources of recorded rows: episode ids."""

import numpy as np

from flowrl.data import SampleBatch
from flowrl.offline.parquet import write_parquet
from flowrl.offline.sources import ParquetSource
from tests.extras import require_extra

POLICY = "default_policy"


def write(path, run):
    ids = np.array([0, 0, 1, 1, 1 << 40])
    rows = SampleBatch(obs=np.arange(5.0), actions=np.zeros(5, int), eps_id=ids)
    write_parquet(path, rows, POLICY, run)


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
