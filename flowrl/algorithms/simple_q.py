"""SimpleQ: Q-learning with a network, a replay buffer and a target network (Mnih et al. 2013)."""

from __future__ import annotations

from typing import ClassVar

from flowrl.algorithms.dqn import DQN, DQNConfig


class SimpleQConfig(DQNConfig):
    """DQN's settings, with all that was added to it later switched off."""

    algorithm: ClassVar[str] = "flowrl.algorithms.simple_q:SimpleQ"

    double_q: bool = False
    dueling: bool = False
    prioritized_replay: bool = False


class SimpleQ(DQN):
    """SimpleQ over the plan `dqn`."""

    config_class = SimpleQConfig


DEFAULT_CONFIG = SimpleQConfig()
