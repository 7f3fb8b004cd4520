"""PolicyOutputs: store what a policy returns for the observations of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.data.fragment_columns import FragmentColumns, write
from flowrl.envs.validation import (
    ObservationCheck,
    check_extra_columns,
    first_invalid_action,
)
from flowrl.policies.policy import Policy


class PolicyOutputs:
    """Checks the outputs of a policy, and stores them in columns.

    Args:
        policy: the policy.
        columns: receives `actions`, `state_out_0`, … and the extra outputs of the policy.
        check: the check of observations; actions for invalid ones are replaced by zeros, because
            the rows are dropped, or raise an error, at the end of the fragment.
        check_actions: check the actions of every step, not only of the first one of a fragment.
    """

    def __init__(
        self,
        policy: Policy,
        columns: FragmentColumns,
        check: ObservationCheck,
        check_actions: bool,
    ):
        self._policy, self._columns, self._check = policy, columns, check
        self._check_actions = check_actions
        self._is_first = True  # step of a fragment

    def allocate(self, actions: Any, states: Any, extra: dict[str, Any]) -> None:
        """Allocate columns for the outputs of a step.

        Raises:
            ValueError: an output has another number of rows than there are observations.
        """
        columns = self._columns
        check_extra_columns(DEFAULT_POLICY_ID, extra, columns.lanes)
        count = len(optree.tree_leaves(actions)[0])
        if count != columns.lanes:
            raise ValueError(
                f"the policy returned {count} actions for {columns.lanes} observations"
            )
        outputs = {f"state_out_{i}": np.asarray(state) for i, state in enumerate(states)}
        for name, value in {"actions": actions, **extra, **outputs}.items():
            columns.allocate_like(name, value)
        self._is_first = True

    def store(self, t: int, actions: Any, states: Any, extra: dict[str, Any]) -> Any:
        """Store the outputs at row t; return the actions in the environments' form."""
        arrays, at = self._columns.arrays, self._columns.lookback + t
        if self._check_actions or self._is_first:
            actions, self._is_first = self._valid(actions, t), False
        if type(actions) is np.ndarray:
            arrays["actions"][at] = actions
        else:
            write(arrays["actions"], at, actions)
        for name, value in extra.items():
            if type(value) is np.ndarray:
                arrays[name][at] = value
            else:
                write(arrays[name], at, value)
        for i, state in enumerate(states):
            arrays[f"state_out_{i}"][at] = state
        to_env = self._policy.actions_for_env(actions)
        return to_env if isinstance(to_env, np.ndarray) else rows_of(to_env)

    def _valid(self, actions: Any, t: int) -> Any:
        """Return the actions, with zeros for observations that no policy can act on.

        Raises:
            ValueError: an action cannot be executed.
        """
        space = self._policy.action_space
        invalid = first_invalid_action(space, actions)
        if invalid is None:
            return actions
        unusable = self._check.invalid_rows(self._columns.row("raw_obs", t), 1, usable=True)
        if unusable.any():
            actions = optree.tree_map(np.array, actions)
            for array in optree.tree_leaves(actions):
                array[unusable] = 0
            invalid = first_invalid_action(space, actions)
            if invalid is None:
                return actions
        raise ValueError(
            f"the policy returned the action {rows_of(actions)[invalid]!r} for sub-environment "
            f"{invalid}; its action space is {space}"
        )


def rows_of(values: Any) -> list[Any]:
    """Return the rows of an array or of a nest of arrays."""
    if isinstance(values, np.ndarray):
        return list(values)
    count = len(optree.tree_leaves(values)[0])
    return [optree.tree_map(lambda leaf, i=i: leaf[i], values) for i in range(count)]
