"""LostLives: find the steps in which a life of a game was lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


class LostLives:
    """Compares the entry `lives` of the infos of consecutive steps; without it, no life was lost.

    Args:
        num_envs: number of environments, N.

    Attributes:
        lives: lives after the last step that reported them, int [N].
    """

    def __init__(self, num_envs: int):
        self.lives = np.zeros(num_envs, np.int64)

    def start(self, envs: Iterable[int]) -> None:
        """Start another game in environments: its lives are not compared with those before."""
        for env in envs:
            self.lives[env] = 0

    def after(self, infos: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return in which environments a step has lost a life, bool [N].

        Args:
            infos: of the step, one per environment; empty if there are none.
        """
        before = self.lives
        if len(infos):
            known = zip(infos, before.tolist(), strict=True)
            self.lives = np.array([info.get("lives", lives) for info, lives in known], np.int64)
        return self.lives < before
