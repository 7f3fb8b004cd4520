"""TargetNetworkPolicy: base of policies with a delayed copy of the network."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from flowrl.policies.learning.flat_parameters import FlatParameters
from flowrl.policies.torch_policy import TensorBatch, TorchPolicy
from flowrl.state_schema import check_state


class TargetNetworkPolicy(TorchPolicy):
    """Base of policies with a target network.

    The operator UpdateTargetNetwork calls `update_target()`. The target network is part of the
    policy's state. Its `config_class` must have the setting `tau`.

    Attributes:
        target_model: the target network; its parameters have no gradient.
        target_version: number of calls of `update_target`.
    """

    scalar_columns: ClassVar[tuple[str, ...]] = ("rewards", "terminateds", "weights", "n_steps")

    def __init__(self, observation_space: Any, action_space: Any, config: Any):
        super().__init__(observation_space, action_space, config)
        self.target_model = self.new_model()
        self.target_model.eval().requires_grad_(False)
        self._target = FlatParameters(self.target_model)
        self.target_model.bind_numpy_views()
        # listed once, because finding them takes longer than updating a small network; None: listed
        # at each use, because a user's network may replace its buffers
        pairs = self._new_buffer_pairs()
        self._buffer_pairs = pairs if self.model.has_only_known_modules or not pairs else None
        self.target_version = 0
        self.update_target(1.0)

    def update_target(self, tau: float | None = None) -> bool:
        """Update the target network: w' <- tau w + (1 - tau) w'.

        Args:
            tau: share of the online network's weights w; None uses the setting `tau`.

        Returns:
            whether it was updated; a subclass may skip updates.
        """
        tau = self.config.tau if tau is None else tau
        self._target.vector.data.lerp_(self.flat.vector.data, tau)
        pairs = self._new_buffer_pairs() if self._buffer_pairs is None else self._buffer_pairs
        for target_buffer, buffer in pairs:
            target_buffer.copy_(buffer)
        self.target_version += 1
        return True

    def _new_buffer_pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the buffers of the target network with those of the online network."""
        online = dict(self.model.named_buffers())
        return [(buffer, online[name]) for name, buffer in self.target_model.named_buffers()]

    def discounts(self, batch: TensorBatch) -> torch.Tensor:
        """Return gamma ** n_steps of the rows, [B] float32; 0 where the episode terminated."""
        discounts: Any = self.config.gamma
        if "n_steps" in batch:
            discounts = torch.pow(discounts, batch["n_steps"]).float()
        return torch.where(batch["terminateds"] != 0, 0.0, discounts)

    def get_state(self) -> dict[str, Any]:
        target = self.target_model.state_dict()
        arrays = {name: t.detach().cpu().numpy().copy() for name, t in target.items()}
        return {**super().get_state(), "target": arrays}

    def set_state(self, state: dict[str, Any]) -> None:
        if "target" not in state:
            raise ValueError(
                f'the state of a {type(self).__name__} has no "target": it belongs to a policy '
                "without a target network"
            )
        check_state(
            state, {"target": dict[str, np.ndarray]}, f"the state of a {type(self).__name__}"
        )
        tensors, arrays = self.target_model.state_dict(), state["target"]
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != {name: np.shape(array) for name, array in arrays.items()}:
            raise ValueError(
                "the target network of this state has parameters of other names or shapes: it "
                "belongs to a policy with another network (settings `model`, with DQN `noisy`, "
                "with SAC, TD3, DDPG and CQL `q_model` and `twin_q`)"
            )
        loaded = {name: torch.from_numpy(np.array(arrays[name])) for name in tensors}
        super().set_state(state)
        for name, tensor in tensors.items():
            tensor.copy_(loaded[name])
