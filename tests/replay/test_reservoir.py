"""ReservoirReplayBuffer: a uniform sample of all rows."""

import numpy as np
import pytest

from flowrl.data import MultiAgentBatch
from flowrl.replay import ReplayBuffer, ReservoirReplayBuffer
from tests.replay.streams import FragmentStream, check_rows, chi_square


@pytest.mark.parametrize("kind", ["indexed", "plain", "nested"])
def test_reservoir_keeps_every_row_with_equal_probability(kind):
    counts = np.zeros(60)
    for seed in range(120):
        stream = FragmentStream(2, [7] * 100, nested=kind == "nested")
        buffer = ReservoirReplayBuffer(12, seed=seed)
        for _ in range(6):
            buffer.add(stream.fragment(5, kind))
        assert (len(buffer), buffer.num_added) == (12, 60)
        rows = {(e, t): i for i, (e, t, _, _) in enumerate(stream.rows)}
        check_rows(buffer.sample(60), stream.rows, 1, 0.9)
        stored = buffer.rows_by_id(np.arange(12))
        for e, t in zip(stored["eps_id"], stored["t"], strict=True):
            counts[rows[int(e), int(t)]] += 1
    assert chi_square(counts, np.full(60, 24.0)) < 115  # p = 1 / 20,000 (59 degrees of freedom)


def test_restored_reservoir_continues_identically():
    stream = FragmentStream(1, [7] * 100)
    buffer, restored = ReservoirReplayBuffer(12, seed=0), ReservoirReplayBuffer(12, seed=1)
    for _ in range(6):
        buffer.add(stream.fragment(5))
    restored.load_state_dict(buffer.state_dict())
    for _ in range(3):
        fragment = stream.fragment(5)
        buffer.add(fragment)
        restored.add(fragment)
        first, second = buffer.sample(20), restored.sample(20)
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])
    assert buffer.stats() == restored.stats()


@pytest.mark.parametrize("item", [{}, [1], MultiAgentBatch({}, 0)])
def test_other_types_than_a_sample_batch_are_rejected(item):
    for buffer in (ReplayBuffer(10), ReservoirReplayBuffer(10)):
        with pytest.raises(TypeError, match="stores a SampleBatch"):
            buffer.add(item)
