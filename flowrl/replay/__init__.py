"""Replay buffers: uniform, prioritized, multi-agent, reservoir; numpy only."""

from flowrl.replay.buffers import PrioritizedReplayBuffer, ReplayBuffer
from flowrl.replay.mix_in import MixInReplayBuffer
from flowrl.replay.multi_agent import MultiAgentReplayBuffer
from flowrl.replay.reservoir import ReservoirReplayBuffer

__all__ = [
    "MixInReplayBuffer",
    "MultiAgentReplayBuffer",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReservoirReplayBuffer",
]
