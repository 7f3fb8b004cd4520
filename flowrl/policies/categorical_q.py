"""Atoms: values of actions as distributions (Bellemare et al. 2017, arXiv 1707.06887)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flowrl.policies.exploration import FORBIDDEN
from flowrl.policies.q_values import QValues, TDLoss


class CategoricalQ(QValues):
    """Returns have one of `num_atoms` values, evenly spaced; a network says how likely each is, and
    learns it by its cross-entropy.

    Its outputs are `num_atoms` logits for each action, and as many for the state where it is
    dueling (Wang et al. 2016, equation 9, for each atom). An error is the Kullback-Leibler
    divergence from what it should say, in nats.

    Args:
        num_actions: of a Discrete space.
        num_atoms: from 2.
        v_min, v_max: the first and the last value.
        dueling: whether there are logits of the state.

    Attributes:
        support: the values [num_atoms], float32.
    """

    def __init__(self, num_actions: int, num_atoms: int, v_min: float, v_max: float, dueling: bool):
        super().__init__(num_actions, dueling)
        self.num_atoms = self.outputs_per_action = num_atoms
        self.num_outputs = (num_actions + dueling) * num_atoms
        self.has_state = False  # it is among the outputs
        self.support = np.linspace(v_min, v_max, num_atoms, dtype=np.float32)

    def logits(self, outputs: Any) -> Any:
        """Of each action's atoms [B, actions, atoms], from outputs [B, num_outputs]: arrays or
        tensors."""
        split = self.num_actions * self.num_atoms
        own = outputs[:, :split].reshape(-1, self.num_actions, self.num_atoms)
        if not self.dueling:
            return own
        allowed = own > FORBIDDEN
        mean = (own * allowed).sum(1) / allowed.sum(1).clip(1)  # none may be, where nothing follows
        return own + (outputs[:, split:] - mean)[:, None]

    def ranks(self, outputs: np.ndarray) -> np.ndarray:
        """The mean return [B, actions]; far below all others of actions that are forbidden."""
        logits = self.logits(outputs)
        values: np.ndarray = _softmax(logits) @ self.support
        return np.where(logits[..., 0] > FORBIDDEN, values, 10 * FORBIDDEN)

    def ranks_of_tensors(self, outputs: torch.Tensor) -> torch.Tensor:
        """`ranks` of tensors."""
        logits = self.logits(outputs)
        values: torch.Tensor = logits.softmax(-1) @ torch.from_numpy(self.support)
        return torch.where(logits[..., 0] > FORBIDDEN, values, 10 * FORBIDDEN)

    def goals(
        self,
        outputs: np.ndarray,
        state: np.ndarray | None,
        best: np.ndarray,
        rewards: np.ndarray,
        discounts: np.ndarray,
    ) -> np.ndarray:
        """How likely the atoms of actions should be, [B, atoms]."""
        chances = _softmax(self.logits(outputs)[np.arange(len(best)), best])
        return self.projected(chances, rewards, discounts)

    def judged(
        self,
        outputs: torch.Tensor,
        state: torch.Tensor | None,
        actions: torch.Tensor,
        goals: np.ndarray,
    ) -> TDLoss:
        index = actions[:, None, None].expand(-1, 1, self.num_atoms)
        logp = self.logits(outputs).gather(1, index)[:, 0].log_softmax(1)
        losses = -(torch.from_numpy(goals).to(logp.device) * logp).sum(1)
        chances = logp.detach().exp().cpu().numpy()
        return self._judged(losses, losses.detach().cpu().numpy(), chances, goals)

    def judged_by_hand(
        self, outputs: np.ndarray, state: np.ndarray | None, actions: np.ndarray, goals: np.ndarray
    ) -> TDLoss:
        logits = self.logits(outputs)[np.arange(len(actions)), actions]
        logits -= logits.max(1, keepdims=True)
        logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        losses, chances = -(goals * logp).sum(1), np.exp(logp)
        return self._judged(losses, losses, chances, goals, chances - goals)

    def _judged(
        self,
        losses: Any,
        numbers: np.ndarray,
        chances: np.ndarray,
        goals: np.ndarray,
        slopes: np.ndarray | None = None,
    ) -> TDLoss:
        entropy = -(goals * np.log(np.maximum(goals, 1e-12))).sum(1)
        errors = np.maximum(numbers - entropy, 0.0)  # 0 but for rounding where they are alike
        return TDLoss(losses, chances @ self.support, errors, slopes)

    def projected(
        self, chances: np.ndarray, rewards: np.ndarray, discounts: np.ndarray
    ) -> np.ndarray:
        """The distribution of r + d z, on the atoms again [B, atoms]: what falls between two of
        them is theirs in proportion (Bellemare et al. 2017, algorithm 1).

        Args:
            chances: of the atoms z that follow, [B, atoms].
            rewards, discounts: [B]; a discount of 0 where nothing follows.
        """
        first, last = self.support[0], self.support[-1]
        moved = rewards[:, None] + discounts[:, None] * self.support
        places = (moved.clip(first, last) - first) / (last - first) * (self.num_atoms - 1)
        # rounding may put a place behind the last atom
        below = np.minimum(places.astype(np.int64), self.num_atoms - 2)
        upper = np.minimum(places - below, 1.0)
        rows = np.arange(len(rewards))[:, None]
        made = np.zeros(chances.shape, np.float64)
        np.add.at(made, (rows, below), chances * (1.0 - upper))
        np.add.at(made, (rows, below + 1), chances * upper)
        return made.astype(np.float32)

    def gradient(
        self, slopes: np.ndarray, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        rows = len(actions)
        made = np.zeros((rows, self.num_outputs), np.float32)
        own = made[:, : self.num_actions * self.num_atoms]
        own = own.reshape(rows, self.num_actions, self.num_atoms)  # a view
        own[np.arange(rows), actions] = slopes
        if self.dueling:
            own -= (slopes / self.num_actions)[:, None]
            made[:, own[0].size :] = slopes
        return made, None


def _softmax(logits: np.ndarray) -> np.ndarray:
    made: np.ndarray = np.exp(logits - logits.max(-1, keepdims=True))
    made /= made.sum(-1, keepdims=True)
    return made
