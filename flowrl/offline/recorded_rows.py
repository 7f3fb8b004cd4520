"""Check recorded rows, and convert their observations to the dtypes of a policy's space."""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Box

from flowrl.data import SampleBatch
from flowrl.data.columns import FLAT_KINDS
from flowrl.errors import ConfigError, OfflineDataError
from flowrl.policies.observations import convert_observation
from flowrl.policies.policy import Policy

# of actions that are recognized as not scaled
MIN_ROWS = 100
MIN_SHARE_OUTSIDE = 0.4  # of [-1, 1]
MIN_SHARE_WITHIN_BOUNDS = 0.99
LARGEST_GAUSSIAN = 8.0  # actions of Gaussian policies are smaller


def rows_for_policy(rows: SampleBatch, policy: Policy, is_normalized: bool = False) -> SampleBatch:
    """Return recorded rows whose observations have the dtypes of the policy's space.

    Args:
        rows: at least one row.
        policy: the policy that is to learn from the rows or to be evaluated.
        is_normalized: whether the policy's filter has normalized the observations, which then stay
            floats.

    Raises:
        OfflineDataError: a column such as `rewards` does not have one number per row; or
            observations or actions do not fit the spaces of the policy.
    """
    for name in (*FLAT_KINDS, "action_logp"):
        column = rows[name] if name in rows else np.zeros(rows.count)
        if column.shape != (rows.count,) or column.dtype.kind not in "biuf":
            raise OfflineDataError(
                f"the column {name!r} must have the shape ({rows.count},), one number per row, got "
                f"{column.dtype} {column.shape}"
            )
    problem = policy.find_mismatch(rows)
    if problem is None and is_normalized:
        return rows
    if problem is None:
        try:
            space = policy.observation_space
            converted = {
                name: convert_observation(space, rows[name], batch=True, name=name)
                for name in ("obs", "new_obs")
                if name in rows
            }
        except ConfigError as error:
            problem = str(error)
        else:
            return rows.with_columns(**converted)
    if "is forbidden by its" in problem:
        raise OfflineDataError(f"the recorded {problem}")
    raise OfflineDataError(
        f"the rows do not fit the spaces of the policy: {problem}. These are the spaces of env or, "
        "without one, observation_space and action_space"
    )


def has_unscaled_actions(rows: SampleBatch, policy: Policy) -> bool:
    """Return whether recorded actions probably have the units of the environment, instead of
    [-1, 1], in which policies with `normalize_actions` act.

    Gaussian policies also record actions outside [-1, 1]. But with the usual deviation of 1, these
    are fewer than MIN_SHARE_OUTSIDE, and they do not end at the bounds of the environment.
    """
    space = policy.action_space
    if not (isinstance(space, Box) and policy.config.normalize_actions and "actions" in rows):
        return False
    if not space.is_bounded():
        return False
    sizes, bounds = np.abs(rows["actions"]), np.maximum(np.abs(space.low), np.abs(space.high))
    if rows.count < MIN_ROWS or (bounds <= 1).all():
        return False
    is_outside = (sizes > 1).mean() >= MIN_SHARE_OUTSIDE
    is_within_bounds = (sizes <= 1.001 * bounds).mean() >= MIN_SHARE_WITHIN_BOUNDS
    reaches_bounds = (sizes >= 0.9 * np.minimum(bounds, LARGEST_GAUSSIAN)).any()
    return bool(is_outside and is_within_bounds and reaches_bounds)
