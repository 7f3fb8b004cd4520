"""SumTree: draws leaves in proportion to their weights, in batches."""

from __future__ import annotations

from typing import Any

import numpy as np

SHIFT = 4  # each node has 16 children: numpy scans such a row in a few calls
WIDTH = 1 << SHIFT
MAX_ROOTS = 8192  # with more roots, one more level is cheaper than a longer cumulative sum


class SumTree:
    """Weights of leaves, float64, and the sums that a draw descends by.

    The top of the tree is a flat list of roots: one cumulative sum over them is faster than more
    levels. Each sum is recomputed from its children, so rounding errors do not accumulate.

    Args:
        size: number of leaves; all have weight 0 initially.
    """

    def __init__(self, size: int):
        self.size = size
        self._levels = [_new_level(size)]  # [nodes, WIDTH] each, the leaves first
        while len(self._levels[-1]) > MAX_ROOTS:
            self._levels.append(_new_level(len(self._levels[-1])))
        self._roots = np.zeros(len(self._levels[-1]))
        # the nodes of each level, flat, and the roots: one per row of the level below
        self._flat = [*(level.reshape(-1) for level in self._levels), self._roots]
        self._root_starts = np.zeros(len(self._roots) + 1)  # sum of all roots before each

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle copies views as separate arrays, so a copy is rebuilt from its leaves
        return _tree_from_weights, (self.leaves.copy(),)

    @property
    def leaves(self) -> np.ndarray:
        """The weights [size]; read-only by convention."""
        return self._flat[0][: self.size]

    def set(self, leaves: np.ndarray, weights: np.ndarray) -> None:
        """Set the weights [n] of leaves [n]; of duplicates the last one counts."""
        self._flat[0][leaves] = weights
        nodes = leaves
        for level, sums in zip(self._levels, self._flat[1:], strict=True):
            nodes = nodes >> SHIFT
            # mode="clip" skips numpy's bounds check: all nodes are valid
            sums[nodes] = level.take(nodes, 0, mode="clip") @ _ONES

    def fill(self, start: int, stop: int, weight: float) -> None:
        """Set the weight of the leaves start … stop-1."""
        if stop <= start:
            return
        self._flat[0][start:stop] = weight
        for level, sums in zip(self._levels, self._flat[1:], strict=True):
            start, stop = start >> SHIFT, (stop - 1 >> SHIFT) + 1
            np.dot(level[start:stop], _ONES, out=sums[start:stop])

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw leaves in proportion to their weights.

        One leaf is drawn from each of `count` equal parts of the total (Schaul et al. 2016,
        appendix B.2.1).

        Returns:
            leaves [count] and their weights [count].

        Raises:
            ValueError: all weights are 0.
        """
        np.cumsum(self._roots, out=self._root_starts[1:])
        total = self._root_starts[-1]
        if not total > 0:
            raise ValueError(
                "cannot draw: all weights are 0; prioritized_replay_eps keeps priorities above 0"
            )
        values = rng.random(count)
        values += np.arange(count)
        values *= total / count
        leaves = self._find(values)
        weights = self._flat[0].take(leaves, mode="clip")
        # rounding may select a leaf of weight 0: draw again, which keeps the distribution
        while not weights.min() > 0:
            zero = weights <= 0
            leaves[zero] = self._find(rng.random(int(zero.sum())) * total)
            weights = self._flat[0].take(leaves, mode="clip")
        return leaves, weights

    def _find(self, values: np.ndarray) -> np.ndarray:
        """Return the leaves [n] that contain these values [n] of the running sum."""
        nodes = self._root_starts[1:-1].searchsorted(values, side="right")
        values -= self._root_starts.take(nodes, mode="clip")
        for number in range(len(self._levels) - 1, -1, -1):
            sums = self._levels[number].take(nodes, 0, mode="clip").cumsum(1)
            # rounding may put a value past its node: argmax then finds no child and returns 0
            child = (sums > values[:, None]).argmax(1)
            nodes <<= SHIFT
            nodes += child
            if number:
                child += np.arange(0, sums.size, WIDTH)
                values -= sums.reshape(-1).take(child, mode="clip")
                values += self._flat[number].take(nodes, mode="clip")
        return nodes


def _tree_from_weights(weights: np.ndarray) -> SumTree:
    """Return a tree with these weights [size]."""
    tree = SumTree(len(weights))
    tree.set(np.arange(len(weights)), weights)
    return tree


def _new_level(size: int) -> np.ndarray:
    """Return rows of WIDTH nodes for `size` nodes."""
    return np.zeros((-(-size // WIDTH), WIDTH))


_ONES = np.ones(WIDTH)
