"""Running normalisation of observations and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class RunningMeanStd:
    """Mean and variance of all rows seen, in float64, joined exactly (Chan et al. 1979).

    Args:
        shape: of one row.
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
        self._join(float(len(rows)), mean, ((rows - mean) ** 2).sum(0))

    def merge(self, other: RunningMeanStd) -> None:
        """Add the rows that `other` has seen."""
        self._join(other.count, other.mean, other.m2)

    def _join(self, count: float, mean: np.ndarray, m2: np.ndarray) -> None:
        total = self.count + count
        if not total:
            return
        delta = mean - self.mean
        self.mean = self.mean + delta * (count / total)
        self.m2 = self.m2 + m2 + delta**2 * (self.count * count / total)
        self.count = total

    @property
    def std(self) -> np.ndarray:
        """Standard deviation; 1 until two rows were seen."""
        if self.count < 2:
            return np.ones_like(self.mean)
        return np.sqrt(self.m2 / self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean.copy(), "m2": self.m2.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = float(state["count"])
        self.mean = np.array(state["mean"], dtype=np.float64)
        self.m2 = np.array(state["m2"], dtype=np.float64)

    @classmethod
    def of(cls, state: dict[str, Any]) -> RunningMeanStd:
        made = cls()
        made.load_state_dict(state)
        return made


class ObservationFilter:
    """Observations minus their running mean, over their standard deviation, clipped to ±`clip`.

    What is being learned is kept apart (`fresh`), so that the workers' parts can be merged; the
    numbers used change only when fresh rows are absorbed, between fragments.
    """

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0):
        self.seen = RunningMeanStd(shape)
        self.fresh = RunningMeanStd(shape)
        self.clip = clip
        self._cache()

    def _cache(self) -> None:
        self._mean = self.seen.mean.astype(np.float32)
        self._scale = (1.0 / (self.seen.std + 1e-8)).astype(np.float32)

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        """Normalised float32 copy of observations [n, *shape]."""
        normal = (observations - self._mean) * self._scale
        return np.clip(normal, -self.clip, self.clip, out=normal)

    def take_fresh(self) -> dict[str, Any]:
        """What was seen since the last call, for merging elsewhere."""
        fresh, self.fresh = self.fresh, RunningMeanStd(self.seen.mean.shape)
        return fresh.state_dict()

    def absorb(self, fresh: dict[str, Any]) -> None:
        """Merge what a worker has seen."""
        self.seen.merge(RunningMeanStd.of(fresh))
        self._cache()

    def state_dict(self) -> dict[str, Any]:
        return self.seen.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.load_state_dict(state)
        self._cache()


class RewardScaler:
    """Rewards over the running standard deviation of their discounted sum (clipped to ±`clip`).

    The sum R_t = gamma (1 - done_{t-1}) R_{t-1} + r_t runs forward in every environment, as in
    Engstrom et al. 2020 ("Implementation matters in deep policy gradients", appendix A.2).
    """

    def __init__(self, gamma: float, clip: float = 10.0):
        self.gamma = gamma
        self.clip = clip
        self.seen = RunningMeanStd()
        self.fresh = RunningMeanStd()
        self._running: np.ndarray | None = None

    def restart(self, envs: Sequence[int] | None = None) -> None:
        """New episodes begin everywhere, or in these environments."""
        if envs is None:
            self._running = None
        elif self._running is not None:
            self._running[list(envs)] = 0.0

    @property
    def running(self) -> np.ndarray | None:
        """The sums of the episodes in progress, [N]; None before the first reward."""
        return self._running

    @running.setter
    def running(self, sums: np.ndarray | None) -> None:
        self._running = None if sums is None else np.array(sums)

    def __call__(
        self, rewards: np.ndarray, dones: np.ndarray, real: np.ndarray | None = None
    ) -> np.ndarray:
        """Scaled float32 rewards [T, N]; learns first from those that are `real`, [T, N]."""
        self._running = self.observe(rewards, self._running, dones, real)
        return self.scaled(rewards)

    def observe(
        self,
        rewards: np.ndarray,
        running: np.ndarray | None,
        dones: np.ndarray | None = None,
        real: np.ndarray | None = None,
    ) -> np.ndarray:
        """Learn from rewards [T, N] that follow on the sums `running` [N]; the sums after them."""
        running = running if running is not None else np.zeros(rewards.shape[1])
        sums = np.empty(rewards.shape)
        for t in range(len(rewards)):
            running = running * self.gamma + rewards[t]
            sums[t] = running
            if dones is not None:
                running = running * (1.0 - dones[t])
        self.fresh.update(sums.reshape(-1) if real is None else sums[real])
        return running

    def scaled(self, rewards: np.ndarray) -> np.ndarray:
        """Rewards as they are learned from, float32."""
        known = RunningMeanStd.of(self.seen.state_dict())
        known.merge(self.fresh)
        scaled = rewards / (float(known.std) + 1e-8)
        return np.clip(scaled, -self.clip, self.clip).astype(np.float32)

    def take_fresh(self) -> dict[str, Any]:
        """What was seen since the last call, for merging elsewhere."""
        fresh, self.fresh = self.fresh, RunningMeanStd()
        return fresh.state_dict()

    def absorb(self, fresh: dict[str, Any]) -> None:
        """Merge what a worker has seen."""
        self.seen.merge(RunningMeanStd.of(fresh))

    def state_dict(self) -> dict[str, Any]:
        return self.seen.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.load_state_dict(state)
