"""Running normalization of observations and rewards."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.state_schema import Amount, check_state


class RunningMeanStd:
    """Mean and variance of all rows so far, in float64, merged exactly (Chan et al. 1979).

    Args:
        shape: shape of one row.

    Attributes:
        count: number of rows.
        mean: mean of the rows, float64 [*shape].
        m2: sum of squared deviations from the mean, float64 [*shape].
    """

    def __init__(self, shape: tuple[int, ...] = ()):
        self.count = 0.0
        self.mean = np.zeros(shape)
        self.m2 = np.zeros(shape)

    def update(self, rows: np.ndarray) -> None:
        """Add rows [n, *shape]."""
        if not len(rows):
            return
        rows = rows.astype(np.float64)
        mean = rows.mean(0)
        self._combine(float(len(rows)), mean, ((rows - mean) ** 2).sum(0))

    def merge(self, other: RunningMeanStd) -> None:
        """Add the rows of another RunningMeanStd."""
        self._combine(other.count, other.mean, other.m2)

    def _combine(self, count: float, mean: np.ndarray, m2: np.ndarray) -> None:
        total = self.count + count
        if not total:
            return
        delta = mean - self.mean
        self.mean = self.mean + delta * (count / total)
        self.m2 = self.m2 + m2 + delta**2 * (self.count * count / total)
        self.count = total

    @property
    def std(self) -> np.ndarray:
        """Standard deviation; 1 for fewer than two rows."""
        if self.count < 2:
            return np.ones_like(self.mean)
        return np.sqrt(self.m2 / self.count)

    def state_dict(self) -> dict[str, Any]:
        """Return count, mean and sum of squared deviations."""
        return {"count": self.count, "mean": self.mean.copy(), "m2": self.m2.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        self.count = float(state["count"])
        self.mean = np.array(state["mean"], dtype=np.float64)
        self.m2 = np.array(state["m2"], dtype=np.float64)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> RunningMeanStd:
        """Create a RunningMeanStd from a `state_dict`."""
        stats = cls()
        stats.load_state_dict(state)
        return stats


def _load(stats: RunningMeanStd, state: dict[str, Any]) -> None:
    """Load a saved state into statistics of the same shape.

    Raises:
        ValueError: it is not such a state.
    """
    check_state(state, {"count": Amount, "mean": np.ndarray | float, "m2": np.ndarray | float})
    shapes = np.shape(state["mean"]), np.shape(state["m2"])
    if shapes != (stats.mean.shape, stats.mean.shape):
        raise ValueError(f"a filter of shape {stats.mean.shape} cannot load the shapes {shapes}")
    stats.load_state_dict(state)


class _Filter:
    """Statistics that normalize values, and those of new rows, which are merged later.

    Attributes:
        stats: statistics that are in use.
        new_stats: statistics of the rows since the last `take_new_stats`.
    """

    def __init__(self, shape: tuple[int, ...] = ()):
        self.stats = RunningMeanStd(shape)
        self.new_stats = RunningMeanStd(shape)
        self._on_change()

    def _on_change(self) -> None:
        """Called when `stats` have changed."""

    def take_new_stats(self) -> dict[str, Any]:
        """Return the state of `new_stats` and reset it."""
        new_stats, self.new_stats = self.new_stats, RunningMeanStd(self.stats.mean.shape)
        return new_stats.state_dict()

    def merge_stats(self, new_stats: dict[str, Any]) -> None:
        """Merge a worker's `take_new_stats` into the statistics in use."""
        self.stats.merge(RunningMeanStd.from_state_dict(new_stats))
        self._on_change()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the statistics in use."""
        return self.stats.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        _load(self.stats, state)
        self._on_change()


class ObservationFilter(_Filter):
    """Subtract the running mean, divide by the standard deviation, clip to ±`clip`.

    New rows are collected in `new_stats`, so that statistics of several workers can be merged. The
    normalization changes only when new statistics are merged, between fragments.

    Args:
        shape: shape of one observation.
        clip: bound of normalized observations.
    """

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0):
        super().__init__(shape)
        self.clip = clip

    def _on_change(self) -> None:
        self._mean = self.stats.mean.astype(np.float32)
        self._scale = (1.0 / (self.stats.std + 1e-8)).astype(np.float32)

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        """Return a normalized float32 copy of observations [n, *shape]."""
        # the mean of large float64 or integer values has more digits than float32
        is_exact = np.result_type(observations, np.float32) == np.float32
        mean = self._mean if is_exact else self.stats.mean
        normalized = ((observations - mean) * self._scale).astype(np.float32, copy=False)
        return np.clip(normalized, -self.clip, self.clip, out=normalized)


class RewardScaler(_Filter):
    """Divide rewards by the running standard deviation of their discounted sum; clip to ±`clip`.

    The sum R_t = gamma (1 - start_t) R_{t-1} + r_t runs forward in each environment, as in
    Engstrom et al. 2020 ("Implementation matters in deep policy gradients", appendix A.2).

    Args:
        gamma: discount factor per env step.
        clip: bound of scaled rewards.
    """

    def __init__(self, gamma: float, clip: float = 10.0):
        super().__init__()
        self.gamma = gamma
        self.clip = clip
        self._discounted_sums: np.ndarray | None = None

    @property
    def discounted_sums(self) -> np.ndarray | None:
        """Discounted sums of the newest episodes, [N], which may have ended; None before the first
        reward."""
        return self._discounted_sums

    @discounted_sums.setter
    def discounted_sums(self, sums: np.ndarray | None) -> None:
        self._discounted_sums = None if sums is None else np.array(sums)

    def observe(
        self,
        rewards: np.ndarray,
        sums: np.ndarray | None,
        starts: np.ndarray | None = None,
        valid: np.ndarray | None = None,
    ) -> np.ndarray:
        """Add rewards to the statistics.

        Args:
            rewards: [T, N].
            sums: discounted sums before the first reward [N]; None starts new episodes.
            starts: first rewards of episodes, bool [T, N]; None: there are none.
            valid: rewards to include in the statistics, bool [T, N]; None includes all.

        Returns:
            the discounted sums after the last reward [N].
        """
        running = sums if sums is not None else np.zeros(rewards.shape[1])
        all_sums = np.empty(rewards.shape)
        for t in range(len(rewards)):
            if starts is not None:
                running = np.where(starts[t], 0.0, running)
            later = running * self.gamma + rewards[t]
            running = later if valid is None else np.where(valid[t], later, running)
            all_sums[t] = running
        self.new_stats.update(all_sums.reshape(-1) if valid is None else all_sums[valid])
        return running

    def scale(self, rewards: np.ndarray) -> np.ndarray:
        """Return scaled rewards, float32, of the same shape; `new_stats` count, too."""
        stats = RunningMeanStd.from_state_dict(self.stats.state_dict())
        stats.merge(self.new_stats)
        scaled = rewards / (float(stats.std) + 1e-8)
        return np.clip(scaled, -self.clip, self.clip).astype(np.float32)
