"""What a network's outputs say of actions: a value for each, which is learned by the Huber loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from flowrl.policies.exploration import FORBIDDEN


class TDLoss(NamedTuple):
    """How a batch's actions are thought of, beside what should be thought of them."""

    losses: Any
    """[B], an array or a tensor with its graph."""
    values: np.ndarray
    """What the actions are thought to be worth, [B]."""
    errors: np.ndarray
    """How far that is from what it should be, [B]: the priorities of rows."""
    slopes: np.ndarray | None = None
    """How the losses change with what is thought, [B, …], for `gradient`; None with a graph."""


class QValues:
    """Values of the actions of a Discrete space, from a network's outputs [B, num_actions].

    Where it is dueling, outputs are the actions' advantages, and the network's value is the
    state's (Wang et al. 2016, equation 9).

    Methods take outputs, and `state`: the network's values [B], None without dueling.

    Args:
        num_actions: of the space.
        dueling: see above.

    Attributes:
        num_outputs: of the network, for all actions.
        outputs_per_action: so many of them follow each other for each action.
        has_state: whether the network's value is used.
    """

    outputs_per_action = 1

    def __init__(self, num_actions: int, dueling: bool):
        self.num_actions, self.dueling = num_actions, dueling
        self.num_outputs, self.has_state = num_actions, dueling

    def ranks(self, outputs: np.ndarray) -> np.ndarray:
        """Values [B, actions] but for what is the same for all actions of a state; far below all
        others where an action is forbidden."""
        return outputs

    def ranks_of_tensors(self, outputs: torch.Tensor) -> torch.Tensor:
        """`ranks` of tensors."""
        return outputs

    def goals(
        self,
        outputs: np.ndarray,
        state: np.ndarray | None,
        best: np.ndarray,
        rewards: np.ndarray,
        discounts: np.ndarray,
    ) -> np.ndarray:
        """What should be thought of actions: R + d Q(s', best), [B].

        Args:
            outputs, state: at what follows the actions, by the target network.
            best: the actions there, [B].
            rewards, discounts: [B]; a discount of 0 where nothing follows.
        """
        following = outputs if state is None else _dueling_numpy(outputs, state)
        reached = discounts * following[np.arange(len(best)), best]
        return np.where(discounts > 0, rewards + reached, rewards).astype(np.float32)

    def values_of_tensors(self, outputs: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """Values [B, actions]."""
        return outputs if state is None else _dueling(outputs, state)

    def judged(
        self,
        outputs: torch.Tensor,
        state: torch.Tensor | None,
        actions: torch.Tensor,
        goals: np.ndarray,
    ) -> TDLoss:
        """Losses with a graph."""
        chosen = self.values_of_tensors(outputs, state).gather(1, actions[:, None])[:, 0]
        losses = F.smooth_l1_loss(
            chosen, torch.from_numpy(goals).to(chosen.device), reduction="none"
        )
        values = chosen.detach().cpu().numpy()
        return TDLoss(losses, values, values - goals)

    def judged_by_hand(
        self, outputs: np.ndarray, state: np.ndarray | None, actions: np.ndarray, goals: np.ndarray
    ) -> TDLoss:
        """The same of arrays, of a network without masks, and the losses' slopes."""
        values = outputs if state is None else _dueling_numpy(outputs, state)
        chosen = values[np.arange(len(actions)), actions]
        errors = chosen - goals
        slopes = np.clip(errors, -1.0, 1.0)  # of the Huber loss, which is s (e - s / 2) there
        return TDLoss(slopes * (errors - 0.5 * slopes), chosen, errors, slopes)

    def gradient(
        self, slopes: np.ndarray, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """How a loss changes with the outputs, and with the network's values.

        Args:
            slopes: how it changes with what is thought of these actions, see `TDLoss`.
            actions: [B].
        """
        made = np.zeros((len(actions), self.num_actions), np.float32)
        made[np.arange(len(actions)), actions] = slopes
        if not self.dueling:
            return made, None
        made -= (slopes / self.num_actions)[:, None]
        return made, slopes


def _dueling(advantages: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The mean is over the actions that are allowed."""
    allowed = advantages > FORBIDDEN
    mean = (advantages * allowed).sum(1, keepdim=True) / allowed.sum(1, keepdim=True)
    return torch.where(allowed, values.unsqueeze(1) + advantages - mean, advantages)


def _dueling_numpy(advantages: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The same of arrays; forbidden actions of a network with masks stay as they are."""
    if advantages.min(initial=0.0) > FORBIDDEN:
        made: np.ndarray = advantages + (values - advantages.mean(1))[:, None]
        return made
    return _dueling(torch.from_numpy(advantages), torch.from_numpy(values)).numpy()
