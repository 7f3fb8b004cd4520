"""Check what a policy returns for the observations of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
from gymnasium import spaces

# columns that the sampler adds to every batch; a policy must not return them
SAMPLER_COLUMNS = {
    "obs",
    "new_obs",
    "actions",
    "rewards",
    "terminateds",
    "truncateds",
    "dones",
    "infos",
    "t",
    "eps_id",
    "unroll_id",
    "agent_index",
    "env_id",
    "seq_lens",
}


def check_extra_columns(policy: str, columns: dict[str, Any], count: int) -> None:
    """Check the extra columns that a policy returns with its actions.

    Args:
        policy: names the policy in error messages.
        columns: name -> array, or nest of arrays, [count, …].
        count: number of observations that the policy acted on.

    Raises:
        TypeError: a column is not an array.
        ValueError: the name belongs to the sampler, or the number of rows differs from `count`.
    """
    for name, column in columns.items():
        if name in SAMPLER_COLUMNS:
            raise ValueError(
                f"{policy} returned a column {name!r}, which is reserved for the sampler: rename it"
            )
        leaves: list[Any] = optree.tree_leaves(column)
        for leaf in leaves:
            if not isinstance(leaf, np.ndarray) or not leaf.ndim:
                is_array = isinstance(leaf, np.ndarray)
                got = "an array without axes" if is_array else f"a {type(leaf).__name__}"
                raise TypeError(
                    f"{policy} must return the column {name!r} as a numpy array of {count} rows, "
                    f"it returned {got}"
                )
            if len(leaf) != count:
                raise ValueError(
                    f"{policy} returned the column {name!r} with {len(leaf)} rows for "
                    f"{count} observations"
                )


def check_states(policy: str, states: Any, initial: list[np.ndarray], count: int) -> None:
    """Check the recurrent states that a policy returns with its actions.

    Args:
        policy: names the policy in error messages.
        states: the states, each [count, …].
        initial: those of one observation, as `Policy.get_initial_state` returns them.
        count: number of observations that the policy acted on.

    Raises:
        ValueError: another number of states, or another shape.
    """
    if len(states) != len(initial):
        raise ValueError(
            f"{policy} returned {len(states)} states, get_initial_state() has {len(initial)}"
        )
    for number, (state, first) in enumerate(zip(states, initial, strict=True)):
        expected = (count, *np.shape(first))
        if np.shape(state) != expected:
            raise ValueError(
                f"{policy} returned state {number} of shape {np.shape(state)} for {count} "
                f"observations: by get_initial_state(), it has the shape {expected}"
            )


def check_outputs(policy: str, outputs: Any) -> None:
    """Check that a policy returned (actions, states, extra columns).

    Args:
        policy: names the policy in error messages.
        outputs: what its compute_actions has returned.

    Raises:
        TypeError: it did not.
    """
    is_triple = isinstance(outputs, (tuple, list)) and len(outputs) == 3
    if is_triple and isinstance(outputs[1], (tuple, list)) and isinstance(outputs[2], dict):
        return
    found = type(outputs).__name__
    if isinstance(outputs, (tuple, list)):
        found = f"({', '.join(type(output).__name__ for output in outputs)})"
    raise TypeError(
        f"{policy} must return (actions, states, extra columns) for observations: an array or nest "
        f"of arrays, a list of arrays, and a dict of arrays; it returned {found}"
    )


def check_actions(policy: str, space: spaces.Space, actions: Any, count: int) -> None:
    """Check structure, shapes and dtypes of actions.

    Args:
        policy: names the policy in error messages.
        space: the action space.
        actions: policy output [B, …].
        count: number of observations that the policy acted on.

    Raises:
        TypeError, ValueError: they do not fit.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(actions, dict) or set(actions) != set(space):
            raise TypeError(f"{policy} must return actions as a dict with the keys {list(space)}")
        for key in space:
            check_actions(policy, space[key], actions[key], count)
        return
    if isinstance(space, spaces.Tuple):
        if not isinstance(actions, (tuple, list)) or len(actions) != len(space):
            raise TypeError(f"{policy} must return actions as a tuple of {len(space)} arrays")
        for part, values in zip(space, actions, strict=True):
            check_actions(policy, part, values, count)
        return
    if not isinstance(actions, np.ndarray):
        raise TypeError(
            f"{policy} must return actions as numpy arrays, it returned a {type(actions).__name__}"
        )
    if actions.ndim == 0 or len(actions) != count:
        number = len(actions) if actions.ndim else 1
        raise ValueError(f"{policy} returned {number} actions for {count} observations")
    if space.shape is not None and actions.shape[1:] != space.shape:
        raise ValueError(
            f"{policy} returned actions of shape {actions.shape} for {count} observations: the "
            f"action space {space} needs {(count, *space.shape)}"
        )
    is_binary = isinstance(space, spaces.MultiBinary)
    is_discrete = is_binary or isinstance(space, (spaces.Discrete, spaces.MultiDiscrete))
    kinds = "iu" if is_discrete else "fiu"
    if actions.dtype.kind not in (kinds + "b" if is_binary else kinds):
        raise ValueError(
            f"{policy} returned actions of dtype {actions.dtype}: the action space {space} needs "
            f"{'integers' if is_discrete else 'numbers'}"
        )


def first_invalid_action(space: spaces.Space, actions: Any) -> int | None:
    """Find the first action that no environment can execute.

    Args:
        space: the action space.
        actions: policy output [B, …]. Discrete and MultiDiscrete actions count from 0; Box
            actions may be out of bounds but must be finite.

    Returns:
        row of the first invalid action; None if all are valid.
    """
    if isinstance(space, spaces.Dict):
        rows = (first_invalid_action(space[key], actions[key]) for key in space)
    elif isinstance(space, spaces.Tuple):
        pairs = zip(space, actions, strict=True)
        rows = (first_invalid_action(part, values) for part, values in pairs)
    else:
        return _first_invalid_row(space, np.asarray(actions))
    return next((row for row in rows if row is not None), None)


def _first_invalid_row(space: spaces.Space, actions: np.ndarray) -> int | None:
    if isinstance(space, spaces.Discrete):
        if actions.ndim != 1 or actions.dtype.kind not in "iu":
            return 0
        invalid = (actions < 0) | (actions >= space.n)
    elif isinstance(space, spaces.MultiDiscrete):
        invalid = (actions < 0) | (actions >= space.nvec)
    elif isinstance(space, spaces.MultiBinary):
        invalid = (actions < 0) | (actions > 1)
    elif actions.dtype.kind == "f":
        invalid = ~np.isfinite(actions)
    else:
        return None
    return int(np.argwhere(invalid)[0][0]) if invalid.any() else None
