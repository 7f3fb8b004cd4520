"""SumTree: draws leaves in proportion to their weight, whole batches at once."""

from __future__ import annotations

import numpy as np

SHIFT = 4  # a node is the sum of 16: numpy looks through such rows in the time of a few calls
WIDTH = 1 << SHIFT
ROOTS = 8192  # at most: beyond, one more level is cheaper than a longer cumulative sum


class SumTree:
    """Weights of leaves, float64, and the sums that a draw descends by.

    The tops of the tree are a plain list of roots: one cumulative sum over them is faster than
    their levels would be. Rounding does not add up, as each sum is made anew from what it is of.

    Args:
        size: number of leaves; all begin with weight 0.
    """

    def __init__(self, size: int):
        self.size = size
        self._levels = [_level(size)]  # [nodes, WIDTH] each, the leaves first
        while len(self._levels[-1]) > ROOTS:
            self._levels.append(_level(len(self._levels[-1])))
        self._roots = np.zeros(len(self._levels[-1]))
        # every level's nodes one by one, and the roots: the rows of the level before
        self._flat = [*(level.reshape(-1) for level in self._levels), self._roots]
        self._before = np.zeros(len(self._roots) + 1)  # the sum of all roots before each

    @property
    def leaves(self) -> np.ndarray:
        """The weights [size], to be read."""
        return self._flat[0][: self.size]

    def total(self) -> float:
        """The sum of all weights."""
        return float(self._roots.sum())

    def set(self, leaves: np.ndarray, weights: np.ndarray) -> None:
        """Give leaves [n] new weights [n]; of a leaf that is named twice the last one counts."""
        self._flat[0][leaves] = weights
        places = leaves
        for level, sums in zip(self._levels, self._flat[1:], strict=True):
            places = places >> SHIFT
            # "clip": all places are there, so numpy need not look
            sums[places] = level.take(places, 0, mode="clip") @ _ONES

    def fill(self, start: int, stop: int, weight: float) -> None:
        """Give the leaves start … stop-1 one weight."""
        if stop <= start:
            return
        self._flat[0][start:stop] = weight
        for level, sums in zip(self._levels, self._flat[1:], strict=True):
            start, stop = start >> SHIFT, (stop - 1 >> SHIFT) + 1
            np.dot(level[start:stop], _ONES, out=sums[start:stop])

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Leaves [count], each with a chance in proportion to its weight: one from each of `count`
        equal parts of the total (Schaul et al. 2016, appendix B.2.1). And their weights.

        Raises:
            ValueError: all weights are 0.
        """
        np.cumsum(self._roots, out=self._before[1:])
        total = self._before[-1]
        if not total > 0:
            raise ValueError("a draw from weights that are all 0")
        values = rng.random(count)
        values += np.arange(count)
        values *= total / count
        leaves = self._find(values)
        weights = self._flat[0].take(leaves, mode="clip")
        # rounding may end at a leaf without weight: drawn again, which is right for any of them
        while not weights.min() > 0:
            odd = weights <= 0
            leaves[odd] = self._find(rng.random(int(odd.sum())) * total)
            weights = self._flat[0].take(leaves, mode="clip")
        return leaves, weights

    def _find(self, values: np.ndarray) -> np.ndarray:
        """The leaf in which each of these positions [n] of the running sum lies."""
        places = self._before[1:-1].searchsorted(values, side="right")
        values -= self._before.take(places, mode="clip")
        for number in range(len(self._levels) - 1, -1, -1):
            sums = self._levels[number].take(places, 0, mode="clip").cumsum(1)
            # rounding may put a position behind its node: argmax finds none there, so the first
            child = (sums > values[:, None]).argmax(1)
            places <<= SHIFT
            places += child
            if number:
                child += np.arange(0, sums.size, WIDTH)
                values -= sums.reshape(-1).take(child, mode="clip")
                values += self._flat[number].take(places, mode="clip")
        return places


def _level(size: int) -> np.ndarray:
    """Rows of WIDTH for so many nodes."""
    return np.zeros((-(-size // WIDTH), WIDTH))


_ONES = np.ones(WIDTH)
