"""PolicyOutputs: store what a policy returns for the observations of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.data.fragment_columns import FragmentColumns, write
from flowrl.envs.validation import check_extra_columns, first_invalid_action
from flowrl.policies.policy import Policy


class PolicyOutputs:
    """Checks the outputs of a policy, and stores them in columns.

    Args:
        policy: the policy.
        columns: receives `actions`, `state_out_0`, … and the extra outputs of the policy.
        check_actions: check the actions of every step, not only of the first one of a fragment.
    """

    def __init__(self, policy: Policy, columns: FragmentColumns, check_actions: bool):
        self._policy, self._columns = policy, columns
        self._check_actions = check_actions

    def allocate(self, actions: Any, states: Any, extra: dict[str, Any]) -> None:
        """Allocate columns for the outputs of a step.

        Raises:
            ValueError: an output has another number of rows than there are observations, or an
                action cannot be executed.
        """
        columns = self._columns
        check_extra_columns(DEFAULT_POLICY_ID, extra, columns.lanes)
        count = len(optree.tree_leaves(actions)[0])
        if count != columns.lanes:
            raise ValueError(
                f"the policy returned {count} actions for {columns.lanes} observations"
            )
        self._check(actions)
        outputs = {f"state_out_{i}": np.asarray(state) for i, state in enumerate(states)}
        for name, value in {"actions": actions, **extra, **outputs}.items():
            columns.allocate_like(name, value)

    def store(self, t: int, actions: Any, states: Any, extra: dict[str, Any]) -> Any:
        """Store the outputs at row t; return the actions in the environments' form."""
        arrays, at = self._columns.arrays, self._columns.lookback + t
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
        if self._check_actions:
            self._check(actions)
        to_env = self._policy.actions_for_env(actions)
        return to_env if isinstance(to_env, np.ndarray) else rows_of(to_env)

    def _check(self, actions: Any) -> None:
        invalid = first_invalid_action(self._policy.action_space, actions)
        if invalid is not None:
            raise ValueError(
                f"the policy returned the action {rows_of(actions)[invalid]!r} for sub-environment "
                f"{invalid}; its action space is {self._policy.action_space}"
            )


def rows_of(values: Any) -> list[Any]:
    """Return the rows of an array or of a nest of arrays."""
    if isinstance(values, np.ndarray):
        return list(values)
    count = len(optree.tree_leaves(values)[0])
    return [optree.tree_map(lambda leaf, i=i: leaf[i], values) for i in range(count)]
