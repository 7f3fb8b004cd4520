"""SamplerWorker: the interface of a RolloutWorker for samplers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from flowrl.data.sample_batch import AgentID, PolicyID
from flowrl.sampling.callback_worker import CallbackWorker
from flowrl.sampling.callbacks import DefaultCallbacks
from flowrl.sampling.episode import MultiAgentEpisode


class SamplerWorker(CallbackWorker, Protocol):
    """The part of a RolloutWorker that samplers use."""

    callbacks: DefaultCallbacks

    @property
    def lock(self) -> threading.RLock:
        """Held while an item is sampled, and while policies learn."""

    @property
    def policy_for(self) -> Callable[[AgentID, MultiAgentEpisode], PolicyID]:
        """Function (agent id, episode) -> policy id."""
