"""Kernels of DQN's loss, for scalar and for categorical Q-values."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.policies.categorical_q import CategoricalQ, softmax
from flowrl.policies.exploration import MASKED_BELOW
from flowrl.policies.learning.kernels.backprop import Backprop
from flowrl.policies.models.fcnet import uses_numpy
from flowrl.policies.models.tensor_batch import TensorBatch
from flowrl.policies.q_values import QValues, TDLoss, dueling_numpy


class QLearningKernel:
    """Computes DQN's loss and its gradient; see DQNTorchPolicy.loss.

    Args:
        policy: a DQN policy whose network numpy computes.
    """

    def __init__(self, policy: Any):
        self._policy = policy
        self._backprop = Backprop(policy.model)

    @property
    def networks(self) -> list[Any]:
        """See Kernel."""
        return [self._policy.model]

    def __call__(self, batch: TensorBatch) -> float:
        policy, q_function = self._policy, self._policy.q_function
        targets = self._td_targets(batch)
        observations = batch.array("obs")
        actions = action_indexes(batch.array("actions"), q_function.num_actions)
        state_values: np.ndarray | None = None
        if q_function.uses_state_value:
            outputs, state_values = self._backprop.forward(observations)
        else:
            outputs = self._backprop.outputs(policy.model.features_numpy(observations))
        loss, gradients = loss_and_gradients(q_function, outputs, state_values, actions, targets)
        policy.record_td_loss(batch, loss)
        share: Any = np.float32(1.0 / len(actions))
        if "weights" in batch:
            share = share * batch.array("weights").astype(np.float32, copy=False)
        gradients = (gradients.T * share).T
        policy.flat.gradient.zero_()
        self._backprop.backward(*output_gradients(q_function, gradients, actions))
        return float((loss.losses * share).sum())

    def _td_targets(self, batch: TensorBatch) -> np.ndarray:
        """Return `DQNTorchPolicy.td_targets`."""
        policy, q_function = self._policy, self._policy.q_function
        new_obs, state_values = batch.array("new_obs"), None
        if q_function.uses_state_value:
            outputs, state_values = policy.target_model.forward_numpy(new_obs)
        else:
            outputs = policy.target_model.outputs_numpy(new_obs)
        selection = policy.model.outputs_numpy(new_obs) if policy.config.double_q else outputs
        best_actions = q_function.greedy_scores(selection).argmax(1)
        discounts = discounts_numpy(batch, policy.config.gamma)
        rewards = batch.array("rewards")
        return td_targets(q_function, outputs, state_values, best_actions, rewards, discounts)


def q_learning_kernel(policy: Any) -> QLearningKernel | None:
    """Return the kernel of a DQN policy; None if numpy does not compute its network, or it
    interprets outputs in another way."""
    is_known = type(policy.q_function) in (QValues, CategoricalQ)
    return QLearningKernel(policy) if is_known and uses_numpy(policy.model) else None


def action_indexes(actions: np.ndarray, num_actions: int) -> np.ndarray:
    """Return actions [B] as indexes, int64 [B].

    Raises:
        ValueError: the actions have another axis.
        IndexError: an action is not in [0, num_actions); numpy would count from the end.
    """
    if actions.ndim != 1:
        raise ValueError(f"actions have shape {list(actions.shape)}, expected [B]")
    indexes: np.ndarray = actions.astype(np.int64, copy=False)  # bool would be a mask
    numbers = indexes.view(np.uint64)  # negative ones are large
    if numbers.max(initial=0) >= num_actions:
        wrong = indexes[numbers >= num_actions][0]
        raise IndexError(
            f"actions: {wrong} is not in [0, {num_actions}); the batch may be of another action "
            "space"
        )
    return indexes


def discounts_numpy(batch: TensorBatch, gamma: float) -> np.ndarray:
    """Return `TargetNetworkPolicy.discounts`."""
    discounts: Any = gamma ** batch.array("n_steps") if "n_steps" in batch else gamma
    return np.where(batch.array("terminateds"), 0.0, discounts)


def td_targets(
    q_function: QValues,
    outputs: np.ndarray,
    state_values: np.ndarray | None,
    best_actions: np.ndarray,
    rewards: np.ndarray,
    discounts: np.ndarray,
) -> np.ndarray:
    """Return `q_function.td_targets`."""
    rows = np.arange(len(best_actions))
    if isinstance(q_function, CategoricalQ):
        probs = softmax(q_function.logits(outputs)[rows, best_actions])
        first_atoms = q_function.first_atoms(outputs)[rows, best_actions]
        discounts = np.where(first_atoms <= MASKED_BELOW, 0.0, discounts)
        return project(q_function, probs, rewards, discounts)
    next_q = outputs if state_values is None else dueling_numpy(outputs, state_values)
    best = next_q[rows, best_actions]
    discounted = discounts * np.where(best <= MASKED_BELOW, 0, best)
    return np.where(discounts > 0, rewards + discounted, rewards).astype(np.float32)


def project(
    q_function: CategoricalQ, probs: np.ndarray, rewards: np.ndarray, discounts: np.ndarray
) -> np.ndarray:
    """Return `q_function.project`."""
    support, num_atoms = q_function.support, q_function.num_atoms
    first, last = support[0], support[-1]
    moved = rewards[:, None] + discounts[:, None] * support
    positions = (moved.clip(first, last) - first) / (last - first) * (num_atoms - 1)
    # rounding may move a position beyond the last atom; that of a NaN stays NaN in `upper`
    below = np.fmin(positions, num_atoms - 2).astype(np.int64)
    upper = np.minimum(positions - below, 1.0)
    rows = np.arange(len(rewards))[:, None]
    projected = np.zeros(probs.shape, np.float64)
    np.add.at(projected, (rows, below), probs * (1.0 - upper))
    np.add.at(projected, (rows, below + 1), probs * upper)
    return projected.astype(np.float32)


def loss_and_gradients(
    q_function: QValues,
    outputs: np.ndarray,
    state_values: np.ndarray | None,
    actions: np.ndarray,
    targets: np.ndarray,
) -> tuple[TDLoss, np.ndarray]:
    """Return the loss of `q_function.td_loss` and its gradients, of Q-values [B] or of the actions'
    atom logits [B, atoms], for outputs without forbidden actions."""
    rows = np.arange(len(actions))
    if isinstance(q_function, CategoricalQ):
        logits = q_function.logits(outputs)[rows, actions]
        logits -= logits.max(1, keepdims=True)
        logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        losses, probs = -(targets * logp).sum(1), np.exp(logp)
        entropies = -(targets * np.log(np.maximum(targets, 1e-12))).sum(1)
        errors = np.maximum(losses - entropies, 0.0)  # rounding may make them negative
        loss = TDLoss(losses, probs @ q_function.support, errors)
        return loss, probs - targets
    values = outputs if state_values is None else dueling_numpy(outputs, state_values)
    q = values[rows, actions]
    errors = q - targets
    gradients = np.clip(errors, -1.0, 1.0)  # the Huber loss is g (e - g / 2) for g = clip(e)
    losses = gradients * (errors - 0.5 * gradients)
    return TDLoss(losses, q, errors), gradients


def output_gradients(
    q_function: QValues, gradients: np.ndarray, actions: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return gradients with respect to the outputs [B, num_outputs] and the state values [B].

    Args:
        q_function: interprets the outputs.
        gradients: see `loss_and_gradients`.
        actions: [B].
    """
    rows, num_actions = len(actions), q_function.num_actions
    d_outputs = np.zeros((rows, q_function.num_outputs), np.float32)
    if isinstance(q_function, CategoricalQ):
        size = num_actions * q_function.num_atoms
        of_actions = d_outputs[:, :size].reshape(rows, num_actions, q_function.num_atoms)  # a view
        of_actions[np.arange(rows), actions] = gradients
        if q_function.dueling:
            of_actions -= (gradients / num_actions)[:, None]
            d_outputs[:, size:] = gradients
        return d_outputs, None
    d_outputs[np.arange(rows), actions] = gradients
    if not q_function.dueling:
        return d_outputs, None
    d_outputs -= (gradients / num_actions)[:, None]
    return d_outputs, gradients
