"""Comparisons of spaces."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text, Tuple

from flowrl.data.spaces import fits_into


def box(low, high, dtype=np.float32, size=2):
    return Box(low, high, (size,), dtype)


@pytest.mark.parametrize(
    ("space", "other", "with_bounds", "expected"),
    [
        # values of observations: only the dtype counts
        (box(0, 255, np.uint8), box(-1, 1), False, True),
        (box(0, 255, np.uint8), box(0, 9, np.int64), False, True),
        (box(0, 255, np.uint8), box(-128, 127, np.int8), False, False),
        (box(0, 300, np.int64), box(0, 255, np.uint8), False, False),
        (box(0, 1), box(0, 255, np.uint8), False, False),
        (box(0, 1), box(0, 1, size=3), False, False),
        # values of actions: also the bounds
        (box(-0.1, 0.1), box(-0.1, 0.1, np.float64), True, True),
        (box(-1, 1), box(-2, 2), True, True),
        (box(-3, 3), box(-2, 2), True, False),
        (box(-np.inf, np.inf), box(-2, 2), True, False),
        (box(-1, 1), box(-1, 1, np.int64), True, False),
        (box(0, 2**53, np.int64), box(0, 2**52, np.int64), True, False),
        (Discrete(2), Discrete(4), True, True),
        (Discrete(4), Discrete(2), True, False),
        (Discrete(2, start=3), Discrete(4), True, False),
        (MultiDiscrete([2, 2]), MultiDiscrete([3, 3]), True, True),
        (MultiDiscrete([2, 4]), MultiDiscrete([3, 3]), True, False),
        (MultiDiscrete([200], np.uint8, start=[100]), MultiDiscrete([299]), True, False),
        (Dict(a=Discrete(2)), Dict(a=Discrete(3)), True, True),
        (Dict(a=Discrete(2)), Dict(b=Discrete(3)), True, False),
        (Tuple([Discrete(2)]), Tuple([Discrete(2), Discrete(2)]), True, False),
        (Text(3), Text(3), True, True),
        (Text(3), Discrete(3), True, False),
    ],
)
def test_values_of_a_space_fit_into_another_one(space, other, with_bounds, expected):
    assert fits_into(space, other, with_bounds) == expected
