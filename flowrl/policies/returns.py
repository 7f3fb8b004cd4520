"""Returns and advantages as pure functions over time-major arrays [T, N]."""

from __future__ import annotations

import numpy as np


def discounted_returns(
    rewards: np.ndarray, dones: np.ndarray, last_values: np.ndarray, gamma: float
) -> np.ndarray:
    """Discounted sums of rewards [T, N], cut after `dones` [T, N], bootstrapped at the end.

    G_t = r_t + gamma (1 - done_t) G_{t+1}, with G_T = `last_values` [N].
    """
    returns = np.empty_like(rewards)
    running = last_values.astype(rewards.dtype)
    keep = gamma * (1.0 - dones.astype(rewards.dtype))
    for t in range(len(rewards) - 1, -1, -1):
        running = rewards[t] + keep[t] * running
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
    """Generalized advantage estimates [T, N] (Schulman et al. 2016, equations 11 and 16).

    delta_t = r_t + gamma V(s_{t+1}) - V(s_t);  A_t = delta_t + gamma lambda (1 - done_t) A_{t+1}.

    Args:
        rewards, values: r_t and V(s_t), [T, N].
        next_values: V of the state that the step led to, [T, N]: 0 where it terminated, the
            value of the final observation where it was truncated.
        dones: terminated or truncated, [T, N]: the estimate does not reach over an episode's end.
        gamma: discount per env step.
        lambda_: weight of longer estimates, 0 (one step) to 1 (Monte Carlo).
    """
    advantages = rewards + gamma * next_values - values
    decay = (gamma * lambda_) * (1.0 - dones.astype(advantages.dtype))
    for t in range(len(advantages) - 2, -1, -1):
        advantages[t] += decay[t] * advantages[t + 1]
    return advantages
