"""QValues: interpret the outputs of a Q-network; Huber loss of temporal-difference errors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from flowrl.policies.exploration import MASKED_BELOW


class TDLoss(NamedTuple):
    """The temporal-difference loss of a batch, in tensors or in arrays.

    Attributes:
        losses: loss of each row [B]; a tensor has its graph.
        q: predicted values of the actions, [B].
        errors: errors of the rows [B], used as priorities: q minus target, unless a subclass of
            QValues documents another one.
    """

    losses: Any
    q: Any
    errors: Any


class QValues:
    """Values of the actions of a Discrete space, from a network's outputs [B, num_actions].

    In a dueling network the outputs are the actions' advantages, and the network's value is the
    state's (Wang et al. 2016, arXiv 1511.06581, equation 9).

    Methods take `outputs` and `state_values`: the network's values [B], None without dueling.

    Args:
        num_actions: number of actions of the space.
        dueling: whether the network is dueling.

    Attributes:
        num_outputs: number of outputs of the network.
        outputs_per_action: number of consecutive outputs of each action.
        uses_state_value: whether `state_values` are needed.
    """

    outputs_per_action = 1

    def __init_subclass__(cls) -> None:
        if "greedy_scores" in vars(cls) and "greedy_scores_of_tensors" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} replaces greedy_scores, which selects actions, but not "
                "greedy_scores_of_tensors, which selects them in the targets: replace both"
            )

    def __init__(self, num_actions: int, dueling: bool):
        self.num_actions, self.dueling = num_actions, dueling
        self.num_outputs, self.uses_state_value = num_actions, dueling

    def greedy_scores(self, outputs: np.ndarray) -> np.ndarray:
        """Return scores [B, actions] that order actions by value.

        They may lack a term that is equal for all actions of a state. Forbidden actions score far
        below all others.
        """
        return outputs

    def greedy_scores_of_tensors(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return `greedy_scores` of tensors."""
        return outputs

    def td_targets(
        self,
        outputs: torch.Tensor,
        state_values: torch.Tensor | None,
        best_actions: torch.Tensor,
        rewards: torch.Tensor,
        discounts: torch.Tensor,
    ) -> torch.Tensor:
        """Return the targets of the actions' values, R + d Q(s', best action), [B].

        The value of a state in which all actions are masked counts as 0, and so does any value of
        at most MASKED_BELOW.

        Args:
            outputs, state_values: of the target network at the next observations.
            best_actions: the best actions there, [B].
            rewards, discounts: [B]; a discount is 0 at a terminal state.
        """
        next_q = self.values(outputs, state_values).gather(1, best_actions[:, None])[:, 0]
        next_q = torch.where(next_q <= MASKED_BELOW, 0.0, next_q)  # NaN stays
        return torch.where(discounts > 0, rewards + discounts * next_q, rewards).float()

    def values(self, outputs: torch.Tensor, state_values: torch.Tensor | None) -> torch.Tensor:
        """Return the values of all actions, [B, actions]."""
        return outputs if state_values is None else _dueling(outputs, state_values)

    def td_loss(
        self,
        outputs: torch.Tensor,
        state_values: torch.Tensor | None,
        actions: torch.Tensor,
        targets: torch.Tensor,
    ) -> TDLoss:
        """Return the Huber loss of the differences between values and targets.

        Args:
            outputs, state_values: at the observations.
            actions: taken there, [B].
            targets: see `td_targets`.
        """
        q = self.values(outputs, state_values).gather(1, actions[:, None].long())[:, 0]
        losses = F.smooth_l1_loss(q, targets, reduction="none")
        return TDLoss(losses, q.detach(), q.detach() - targets)


def _dueling(advantages: torch.Tensor, state_values: torch.Tensor) -> torch.Tensor:
    """Combine advantages [B, n] and values [B]; the mean is over allowed actions."""
    allowed = advantages > MASKED_BELOW
    # all actions may be forbidden at a terminal state
    count = allowed.sum(1, keepdim=True).clip(1)
    mean = torch.where(allowed, advantages, 0.0).sum(1, keepdim=True) / count
    return torch.where(allowed, state_values.unsqueeze(1) + advantages - mean, advantages)


def dueling_numpy(advantages: np.ndarray, state_values: np.ndarray) -> np.ndarray:
    """Combine advantages [B, n] and values [B] of arrays; forbidden actions do not change."""
    if advantages.min(initial=0.0) > MASKED_BELOW:
        q: np.ndarray = advantages + (state_values - advantages.mean(1))[:, None]
        return q
    return _dueling(torch.from_numpy(advantages), torch.from_numpy(state_values)).numpy()
