"""Target networks: a policy's network as it was, which follows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flowrl.policies.learning.flat_parameters import FlatParameters
from flowrl.policies.torch_policy import TorchPolicy


class TargetNetwork(TorchPolicy):
    """Base of policies with a target network, which is moved by `update_target()` (see the operator
    UpdateTargetNetwork) and saved with the policy.

    Its settings have `tau`.

    Attributes:
        target_model: the network; its parameters take no gradient.
        target_updates: how often it was moved.
    """

    def __init__(self, observation_space: Any, action_space: Any, config: Any):
        super().__init__(observation_space, action_space, config)
        self.target_model = self.new_model()
        self.target_model.eval().requires_grad_(False)
        self._target = FlatParameters(self.target_model)
        self.target_model.bind_numpy_views()
        # found once: looking them up takes longer than the update of a small network
        self._buffer_pairs = list(
            zip(self.target_model.buffers(), self.model.buffers(), strict=True)
        )
        self.target_updates = 0
        self.update_target(1.0)

    def update_target(self, tau: float | None = None) -> None:
        """Move the target network towards the online one: w' <- tau w + (1 - tau) w'."""
        tau = self.config.tau if tau is None else tau
        self._target.vector.data.lerp_(self.flat.vector.data, tau)
        for own, buffer in self._buffer_pairs:
            own.copy_(buffer)
        self.target_updates += 1

    def get_state(self) -> dict[str, Any]:
        target = self.target_model.state_dict()
        arrays = {name: t.detach().cpu().numpy().copy() for name, t in target.items()}
        return {**super().get_state(), "target": arrays}

    def set_state(self, state: dict[str, Any]) -> None:
        if "target" not in state:
            raise ValueError(f"the state of a {type(self).__name__} without target")
        own, given = self.target_model.state_dict(), state["target"]
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        if shapes != {name: np.shape(array) for name, array in given.items()}:
            raise ValueError("this state's target is another network")
        super().set_state(state)
        for name, tensor in own.items():
            tensor.copy_(torch.from_numpy(np.array(given[name])))
