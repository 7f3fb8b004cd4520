"""Replay buffers: uniform, prioritized, mix-in, reservoir, multi-agent.

Imports neither torch nor Ray.
"""

from flowrl.replay.buffers import ReplayBuffer
from flowrl.replay.mix_in import MixInReplayBuffer
from flowrl.replay.multi_agent import MultiAgentReplayBuffer
from flowrl.replay.prioritized import PrioritizedReplayBuffer
from flowrl.replay.reservoir import ReservoirReplayBuffer

__all__ = [
    "MixInReplayBuffer",
    "MultiAgentReplayBuffer",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReservoirReplayBuffer",
]
