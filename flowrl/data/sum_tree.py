"""SumTree: draws leaves in proportion to their weight, whole batches at once."""

from __future__ import annotations

import numpy as np

DEPTH = 7  # levels of sums over the leaves: one root for 128 of them


class SumTree:
    """Weights of leaves, float64, and the sums that a draw descends by.

    The tops of the tree are a plain list of roots: one cumulative sum over them is faster than
    their levels would be, and keeps no rounding from earlier updates.

    Args:
        size: number of leaves; all begin with weight 0.
    """

    def __init__(self, size: int):
        self.size = size
        width = -(-size // 2**DEPTH) * 2**DEPTH
        self._levels = [np.zeros(width >> level) for level in range(DEPTH + 1)]

    @property
    def leaves(self) -> np.ndarray:
        """The weights [size], to be read."""
        return self._levels[0][: self.size]

    def total(self) -> float:
        """The sum of all weights."""
        return float(self._levels[-1].sum())

    def set(self, leaves: np.ndarray, weights: np.ndarray) -> None:
        """Give leaves [n] new weights [n]; of a leaf that is named twice the last one counts."""
        self._levels[0][leaves] = weights
        places = leaves
        for below, level in zip(self._levels[:-1], self._levels[1:], strict=True):
            places = places >> 1
            left = places << 1
            # "clip": all places are there, so numpy need not look
            sums = below.take(left, mode="clip")
            left += 1
            sums += below.take(left, mode="clip")
            level[places] = sums

    def fill(self, start: int, stop: int, weight: float) -> None:
        """Give the leaves start … stop-1 one weight."""
        if stop <= start:
            return
        self._levels[0][start:stop] = weight
        for below, level in zip(self._levels[:-1], self._levels[1:], strict=True):
            start, stop = start >> 1, (stop + 1) >> 1
            pairs = below[2 * start : 2 * stop]
            np.add(pairs[::2], pairs[1::2], out=level[start:stop])

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Leaves [count], each with a chance in proportion to its weight: one from each of `count`
        equal parts of the total (Schaul et al. 2016, appendix B.2.1).

        Raises:
            ValueError: all weights are 0.
        """
        tops = self._levels[-1].cumsum()
        total = tops[-1]
        if not total > 0:
            raise ValueError("a draw from weights that are all 0")
        values = rng.random(count)
        values += np.arange(count)
        values *= total / count
        leaves = self._descend(tops, values)
        # rounding may end at a leaf without weight: drawn again, which is right for any of them
        while (odd := self._levels[0].take(leaves, mode="clip") <= 0).any():
            leaves[odd] = self._descend(tops, rng.random(int(odd.sum())) * total)
        return leaves

    def _descend(self, tops: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The leaf in which each of these positions [n] of the running sum lies."""
        places = np.minimum(tops.searchsorted(values, side="right"), len(tops) - 1)
        values = values - (tops.take(places) - self._levels[-1].take(places))
        left, right = np.empty_like(values), np.empty(len(values), bool)
        for level in reversed(self._levels[:-1]):
            places <<= 1
            level.take(places, out=left, mode="clip")
            np.greater_equal(values, left, out=right)
            left *= right
            values -= left
            places += right
        return places
