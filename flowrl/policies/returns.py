"""Returns and advantages as pure functions of time-major arrays [T, N]."""

from __future__ import annotations

import numpy as np


def _as_floats(**arrays: np.ndarray) -> list[np.ndarray]:
    """Return the arrays as floats.

    Raises:
        ValueError: the arrays do not have the same shape.
    """
    converted = [np.asarray(array) for array in arrays.values()]
    for name, array in zip(arrays, converted, strict=True):
        if array.shape != converted[0].shape:
            raise ValueError(
                f"{name} has the shape {array.shape}, but {next(iter(arrays))} has "
                f"{converted[0].shape}"
            )
    return [a if a.dtype.kind == "f" else a.astype(np.float64) for a in converted]


def discounted_returns(
    rewards: np.ndarray, dones: np.ndarray, last_values: np.ndarray, gamma: float
) -> np.ndarray:
    """Return discounted sums of rewards.

    G_t = r_t + gamma (1 - done_t) G_{t+1}, with G_T = `last_values`.

    Args:
        rewards: [T, N].
        dones: terminated or truncated, [T, N].
        last_values: values of the states after the last step, [N].
        gamma: discount factor per row.

    Returns:
        G [T, N], with the dtype of the rewards; float64 if that is not a float.

    Raises:
        ValueError: the arrays have different shapes.
    """
    rewards, dones = _as_floats(rewards=rewards, dones=dones)
    returns = np.empty_like(rewards)
    running = np.asarray(last_values).astype(rewards.dtype)
    discounts = gamma * (1.0 - dones.astype(rewards.dtype))
    for t in range(len(rewards) - 1, -1, -1):
        running = rewards[t] + discounts[t] * running
        returns[t] = running
    return returns


def generalized_advantages(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    dones: np.ndarray,
    gamma: float,
    lambda_: float,
) -> np.ndarray:
    """Return generalized advantage estimates (Schulman et al. 2016, equations 11 and 16).

    delta_t = r_t + gamma V(s_{t+1}) - V(s_t);  A_t = delta_t + gamma lambda (1 - done_t) A_{t+1}.

    Args:
        rewards, values: r_t and V(s_t), [T, N].
        next_values: value of the state after each step, [T, N]: 0 where the episode terminated,
            the value of the final observation where it was truncated.
        dones: terminated or truncated, [T, N]; estimates do not cross the end of an episode.
        gamma: discount factor per row.
        lambda_: weight of longer estimates, 0 (one step) to 1 (Monte Carlo).

    Returns:
        A [T, N], floats of the inputs' most precise dtype; ints become float64.

    Raises:
        ValueError: the arrays have different shapes.
    """
    rewards, values, next_values, dones = _as_floats(
        rewards=rewards, values=values, next_values=next_values, dones=dones
    )
    advantages = rewards + gamma * next_values - values
    decay = (gamma * lambda_) * (1.0 - dones.astype(advantages.dtype))
    for t in range(len(advantages) - 2, -1, -1):
        advantages[t] += decay[t] * advantages[t + 1]
    return advantages


def vtrace(
    behavior_logp: np.ndarray,
    target_logp: np.ndarray,
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    dones: np.ndarray,
    gamma: float,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    clip_pg_rho: float = 1.0,
    lambda_: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return V-trace targets and advantages (Espeholt et al. 2018, equation 1, remark 1, section
    4.2).

    v_t = V(s_t) + delta_t + gamma c_t (1 - done_t) (v_{t+1} - V(s_{t+1})), with
    delta_t = rho_t (r_t + gamma V(s_{t+1}) - V(s_t)), rho_t = min(clip_rho, pi / mu),
    c_t = lambda min(clip_c, pi / mu). The advantage is
    min(clip_pg_rho, pi / mu) (r_t + gamma v_{t+1} - V(s_t)).

    Args:
        behavior_logp: log-probabilities of the actions under mu, which sampled them, [T, N].
        target_logp: log-probabilities of the actions under pi, [T, N].
        rewards, values, dones, gamma: as in `generalized_advantages`.
        next_values: value of the state after each step, 0 where the episode terminated, [T, N].
        clip_rho, clip_c, clip_pg_rho: upper bounds of the importance ratios.
        lambda_: weight of longer corrections.

    Returns:
        v [T, N] and the advantages [T, N], floats of the inputs' most precise dtype; ints
        become float64.

    Raises:
        ValueError: the arrays have different shapes.
    """
    rewards, behavior_logp, target_logp, values, next_values, dones = _as_floats(
        rewards=rewards,
        behavior_logp=behavior_logp,
        target_logp=target_logp,
        values=values,
        next_values=next_values,
        dones=dones,
    )
    with np.errstate(over="ignore"):  # infinite ratios are clipped
        ratios = np.exp(target_logp - behavior_logp)
    deltas = np.minimum(clip_rho, ratios) * (rewards + gamma * next_values - values)
    decay = gamma * lambda_ * np.minimum(clip_c, ratios) * (1.0 - dones.astype(ratios.dtype))
    corrections = deltas.copy()  # v_t - V(s_t)
    for t in range(len(corrections) - 2, -1, -1):
        corrections[t] += decay[t] * corrections[t + 1]
    targets = values + corrections
    next_targets = next_values.copy()  # v_{t+1}, or V(s_{t+1}) at the end of an episode
    within_episode = dones[:-1] == 0
    next_targets[:-1] = np.where(within_episode, targets[1:], next_values[:-1])
    advantages = np.minimum(clip_pg_rho, ratios) * (rewards + gamma * next_targets - values)
    return targets, advantages
