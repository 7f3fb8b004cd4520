"""CategoricalQ: return distributions on fixed atoms (Bellemare et al. 2017, arXiv 1707.06887)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flowrl.policies.exploration import MASKED_BELOW, MASKED_OUTPUT
from flowrl.policies.q_values import QValues, TDLoss

MAX_DENSE_ATOMS = 101


class CategoricalQ(QValues):
    """Distributions of returns over `num_atoms` evenly spaced values, one for each action.

    The network outputs `num_atoms` logits per action; a dueling network also outputs `num_atoms`
    logits for the state (Wang et al. 2016, equation 9, for each atom). The loss is the
    cross-entropy to the target distribution; the error of a row is the Kullback-Leibler divergence
    from its target, in nats.

    Args:
        num_actions: number of actions of a Discrete space.
        num_atoms: at least 2.
        v_min, v_max: returns at the first and the last atom.
        dueling: whether the network is dueling.

    Attributes:
        support: the atoms [num_atoms], float32.
    """

    def __init__(self, num_actions: int, num_atoms: int, v_min: float, v_max: float, dueling: bool):
        super().__init__(num_actions, dueling)
        self.num_atoms = self.outputs_per_action = num_atoms
        self.num_outputs = (num_actions + dueling) * num_atoms
        self.uses_state_value = False  # its logits are among the outputs
        self.support = np.linspace(v_min, v_max, num_atoms, dtype=np.float32)
        self._supports: dict[torch.device, torch.Tensor] = {}

    def logits(self, outputs: Any) -> Any:
        """Return the logits of each action's atoms, [B, actions, atoms].

        Args:
            outputs: [B, num_outputs], an array or a tensor.
        """
        of_actions = self._outputs_of_actions(outputs)
        if not self.dueling:
            return of_actions
        allowed = of_actions > MASKED_BELOW
        # all actions may be forbidden at a terminal state
        where: Any = torch.where if isinstance(outputs, torch.Tensor) else np.where
        mean = where(allowed, of_actions, 0.0).sum(1) / allowed.sum(1).clip(1)
        return of_actions + (outputs[:, -self.num_atoms :] - mean)[:, None]

    def first_atoms(self, outputs: Any) -> Any:
        """Return the outputs of each action's first atom, [B, actions]: at most MASKED_BELOW for
        masked actions."""
        return self._outputs_of_actions(outputs)[..., 0]

    def _outputs_of_actions(self, outputs: Any) -> Any:
        """Return the outputs [B, actions, atoms] without those of the state value."""
        split = self.num_actions * self.num_atoms
        return outputs[:, :split].reshape(-1, self.num_actions, self.num_atoms)

    def greedy_scores(self, outputs: np.ndarray) -> np.ndarray:
        """Return the mean returns [B, actions]; forbidden actions score far below all others."""
        logits = self.logits(outputs)
        values: np.ndarray = softmax(logits) @ self.support
        return np.where(logits[..., 0] > MASKED_BELOW, values, MASKED_OUTPUT)

    def greedy_scores_of_tensors(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return `greedy_scores` of tensors."""
        logits = self.logits(outputs)
        # not a matrix product, which autocast would compute in bfloat16
        values: torch.Tensor = (logits.softmax(-1) * self._support_on(logits.device)).sum(-1)
        return torch.where(logits[..., 0] > MASKED_BELOW, values, MASKED_OUTPUT)

    def td_targets(
        self,
        outputs: torch.Tensor,
        state_values: torch.Tensor | None,
        best_actions: torch.Tensor,
        rewards: torch.Tensor,
        discounts: torch.Tensor,
    ) -> torch.Tensor:
        """Return the target distributions of the actions, [B, atoms]; see QValues.td_targets."""
        probs = self._logits_of(outputs, best_actions).softmax(1)
        first_atoms = self.first_atoms(outputs).gather(1, best_actions[:, None])[:, 0]
        discounts = torch.where(first_atoms <= MASKED_BELOW, 0.0, discounts)
        return self.project(probs, rewards, discounts)

    def td_loss(
        self,
        outputs: torch.Tensor,
        state_values: torch.Tensor | None,
        actions: torch.Tensor,
        targets: torch.Tensor,
    ) -> TDLoss:
        """Return the cross-entropy of the actions' distributions to the targets."""
        logp = self._logits_of(outputs, actions).log_softmax(1)
        losses = -(targets * logp).sum(1)
        entropies = -(targets * targets.clamp(min=1e-12).log()).sum(1)
        errors = (losses.detach() - entropies).clamp(min=0.0)  # rounding may make them negative
        q = (logp.detach().exp() * self._support_on(logp.device)).sum(1)
        return TDLoss(losses, q, errors)

    def project(
        self, probs: torch.Tensor, rewards: torch.Tensor, discounts: torch.Tensor
    ) -> torch.Tensor:
        """Project the distribution of r + d z back onto the atoms, [B, atoms].

        Probability between two atoms is split between them in proportion (Bellemare et al. 2017,
        algorithm 1).

        Args:
            probs: of the next state's atoms z, [B, atoms].
            rewards, discounts: [B]; a discount is 0 at a terminal state.
        """
        first, last = float(self.support[0]), float(self.support[-1])
        moved = rewards[:, None] + discounts[:, None] * self._support_on(probs.device)
        positions = (moved.clamp(first, last) - first) / (last - first) * (self.num_atoms - 1)
        if probs.device.type != "cpu" and self.num_atoms <= MAX_DENSE_ATOMS:
            # a GPU adds scattered numbers in no fixed order
            atoms = torch.arange(self.num_atoms, device=probs.device)
            shares = (1 - (positions[:, :, None] - atoms).abs()).clamp(min=0.0)  # [B, from, to]
            return (probs[:, :, None] * shares).sum(1).float()
        # rounding may move a position beyond the last atom; that of a NaN stays NaN in `upper`
        below = positions.nan_to_num().long().clamp(max=self.num_atoms - 2)
        upper = (positions - below).clamp(max=1.0)
        projected = torch.zeros(probs.shape, dtype=torch.float64, device=probs.device)
        projected.scatter_add_(1, below, (probs * (1 - upper)).double())
        projected.scatter_add_(1, below + 1, (probs * upper).double())
        return projected.float()

    def _logits_of(self, outputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Return the logits of one action per row, [B, atoms]."""
        index = actions.long()[:, None, None].expand(-1, 1, self.num_atoms)
        logits: torch.Tensor = self.logits(outputs)
        return logits.gather(1, index)[:, 0]

    def _support_on(self, device: torch.device) -> torch.Tensor:
        """Return the support as a tensor on a device, copied there once."""
        if device not in self._supports:
            self._supports[device] = torch.from_numpy(self.support).to(device)
        return self._supports[device]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return probabilities over the last axis."""
    probs: np.ndarray = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    return probs
