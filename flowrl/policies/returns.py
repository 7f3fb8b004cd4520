"""Returns and advantages as pure functions over time-major arrays [T, N]."""

from __future__ import annotations

import numpy as np


def _floats(**arrays: np.ndarray) -> list[np.ndarray]:
    """The arrays as floats, all of the first one's shape.

    Raises:
        ValueError: one has another shape.
    """
    made = [np.asarray(array) for array in arrays.values()]
    for name, array in zip(arrays, made, strict=True):
        if array.shape != made[0].shape:
            raise ValueError(
                f"{name} has the shape {array.shape}, {next(iter(arrays))} has {made[0].shape}"
            )
    return [a if a.dtype.kind == "f" else a.astype(np.float64) for a in made]


def discounted_returns(
    rewards: np.ndarray, dones: np.ndarray, last_values: np.ndarray, gamma: float
) -> np.ndarray:
    """Discounted sums of rewards [T, N], cut after `dones` [T, N], bootstrapped at the end.

    G_t = r_t + gamma (1 - done_t) G_{t+1}, with G_T = `last_values` [N].
    """
    rewards, ends = _floats(rewards=rewards, dones=dones)
    returns = np.empty_like(rewards)
    running = np.asarray(last_values).astype(rewards.dtype)
    keep = gamma * (1.0 - ends.astype(rewards.dtype))
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
    rewards, values, next_values, ends = _floats(
        rewards=rewards, values=values, next_values=next_values, dones=dones
    )
    advantages = rewards + gamma * next_values - values
    decay = (gamma * lambda_) * (1.0 - ends.astype(advantages.dtype))
    for t in range(len(advantages) - 2, -1, -1):
        advantages[t] += decay[t] * advantages[t + 1]
    return advantages


def lambda_returns(
    rewards: np.ndarray,
    next_values: np.ndarray,
    dones: np.ndarray,
    gamma: float,
    lambda_: float,
) -> np.ndarray:
    """lambda-returns [T, N] (Sutton & Barto 2018, equation 12.2, in its recursive form).

    G_t = r_t + gamma ((1 - lambda) V(s_{t+1}) + lambda G_{t+1}), where an episode or the array
    ends G_t = r_t + gamma V(s_{t+1}).

    Args:
        rewards, dones, gamma, lambda_: as in `generalized_advantages`.
        next_values: V of the state that the step led to, 0 where it terminated, [T, N].
    """
    rewards, next_values, ends = _floats(rewards=rewards, next_values=next_values, dones=dones)
    returns = rewards + gamma * next_values
    keep = (gamma * lambda_) * (1.0 - ends.astype(returns.dtype))
    for t in range(len(returns) - 2, -1, -1):
        returns[t] += keep[t] * (returns[t + 1] - next_values[t])
    return returns


def n_step_returns(
    rewards: np.ndarray, dones: np.ndarray, n: int, gamma: float
) -> tuple[np.ndarray, np.ndarray]:
    """Discounted sums of the next n rewards, and how many they are (Watkins 1989; Mnih et al. 2016,
    section 4.2).

    R_t = sum of gamma^j r_{t+j} for j below k_t; k_t is n, or fewer where the episode or the array
    ends before. The target is R_t + gamma^{k_t} V(s_{t+k_t}), without V where the last of those
    steps terminated.

    Args:
        rewards: [T, N].
        dones: terminated or truncated, [T, N]: no sum reaches over an episode's end.
        n: steps, at least 1.
        gamma: discount per env step.

    Returns:
        R [T, N]; k [T, N], int64.
    """
    if not isinstance(n, (int, np.integer)) or n < 1:
        raise ValueError(f"n_step_returns: n is an int, at least 1, got {n}")
    rewards, ends = _floats(rewards=rewards, dones=dones)
    dones = ends.astype(bool)
    steps = np.ones(rewards.shape, np.int64)
    returns = rewards * 1.0
    going = ~dones  # the sum of each row goes on after its j-th step
    discount = 1.0
    for j in range(1, min(n, len(rewards))):
        discount *= gamma
        here = going[: len(rewards) - j]
        returns[:-j] += np.where(here, discount * rewards[j:], 0)
        steps[:-j] += here
        going = here & ~dones[j:]
    return returns, steps


def vtrace(
    behaviour_logp: np.ndarray,
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
    """V-trace targets and policy-gradient advantages (Espeholt et al. 2018, equation 1, remark 1,
    section 4.2).

    v_t = V(s_t) + delta_t + gamma c_t (v_{t+1} - V(s_{t+1})), with
    delta_t = rho_t (r_t + gamma V(s_{t+1}) - V(s_t)), rho_t = min(clip_rho, pi / mu),
    c_t = lambda min(clip_c, pi / mu); the advantage is
    min(clip_pg_rho, pi / mu) (r_t + gamma v_{t+1} - V(s_t)).

    Args:
        behaviour_logp, target_logp: of the actions under mu, which sampled, and pi, [T, N].
        rewards, values, dones, gamma: as in `generalized_advantages`.
        next_values: V of the state that the step led to, 0 where it terminated, [T, N].
        clip_rho, clip_c, clip_pg_rho: upper bounds of the ratios.
        lambda_: weight of longer corrections.

    Returns:
        v [T, N] and the advantages [T, N].
    """
    rewards, behaviour_logp, target_logp, values, next_values, ends = _floats(
        rewards=rewards,
        behaviour_logp=behaviour_logp,
        target_logp=target_logp,
        values=values,
        next_values=next_values,
        dones=dones,
    )
    ratios = np.exp(target_logp - behaviour_logp)
    deltas = np.minimum(clip_rho, ratios) * (rewards + gamma * next_values - values)
    keep = gamma * lambda_ * np.minimum(clip_c, ratios) * (1.0 - ends.astype(ratios.dtype))
    excess = deltas.copy()  # v_t - V(s_t)
    for t in range(len(excess) - 2, -1, -1):
        excess[t] += keep[t] * excess[t + 1]
    targets = values + excess
    following = next_values.copy()  # v_{t+1}: within an episode the target, else the value
    inside = ends[:-1] == 0
    following[:-1] = np.where(inside, targets[1:], next_values[:-1])
    advantages = np.minimum(clip_pg_rho, ratios) * (rewards + gamma * following - values)
    return targets, advantages
