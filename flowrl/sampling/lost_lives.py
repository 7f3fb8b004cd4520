"""LostLives: find the steps in which a life of a game was lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class LostLives:
    """Compares the entry `lives` of the infos of consecutive steps.

    Args:
        num_envs: number of environments, N.

    Attributes:
        lives: lives after the last step, int [N].
    """

    def __init__(self, num_envs: int):
        self.lives = np.zeros(num_envs, np.int64)

    def after(self, infos: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return in which environments a step has lost a life, bool [N].

        Args:
            infos: of the step, one per environment; empty if there are none.
        """
        before = self.lives
        self.lives = np.zeros_like(before)
        if len(infos):
            self.lives[:] = [info.get("lives", 0) for info in infos]
        return self.lives < before
