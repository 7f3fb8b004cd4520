"""Random streams."""

import numpy as np
import pytest

from flowrl.seeding import RowNoise


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("blocks", [1, 4])
def test_processes_share_the_noise_of_a_batch(size, blocks):
    """The parts of all processes are the numbers that one process draws."""
    normal, uniform = [], []
    for rank in range(size):
        rng = np.random.default_rng(7)
        begin, end = 11 * rank // size, 11 * (rank + 1) // size
        noise, shape = RowNoise(rng, begin, end, 11), (blocks * (end - begin), 2)
        normal.append(noise.standard_normal(shape, np.float32).reshape(blocks, -1, 2))
        uniform.append(noise.uniform(-1, 1, shape).reshape(blocks, -1, 2))
    rng = np.random.default_rng(7)
    expected = rng.standard_normal((blocks, 11, 2), np.float32), rng.uniform(-1, 1, (blocks, 11, 2))
    np.testing.assert_array_equal(np.concatenate(normal, 1), expected[0])
    np.testing.assert_array_equal(np.concatenate(uniform, 1), expected[1])


def test_noise_of_rows_needs_rows():
    noise = RowNoise(np.random.default_rng(0), 0, 4, 8)
    for shape in ((), (3, 2), (5,)):
        with pytest.raises(ValueError, match="its first axis must be rows"):
            noise.standard_normal(shape)
