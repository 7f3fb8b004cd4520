"""PolicyOutputs: store what a policy returns for the observations of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optree

from flowrl.data.columns import leaves_of, map_leaves
from flowrl.data.fragment_columns import FragmentColumns
from flowrl.envs.validation import ObservationCheck
from flowrl.policies.policy import Policy
from flowrl.sampling.fragment_builder import values_of
from flowrl.sampling.output_checks import (
    check_actions,
    check_extra_columns,
    check_outputs,
    check_states,
    first_invalid_action,
)


class PolicyOutputs:
    """Checks the outputs of a policy, and stores them in columns.

    Args:
        policy: the policy.
        columns: receives `actions`, `state_out_0`, … and the extra outputs of the policy.
        check: finds observations on which no policy can act, such as NaN. Invalid actions for them
            become 0; the checks at the end of the fragment raise an error, or their rows are
            dropped.
        check_actions: check the actions of every step, not only of the first one of a fragment.
        name: the policy, for messages.
        describe_target: (n) -> what the n-th action is for, for messages.
    """

    def __init__(
        self,
        policy: Policy,
        columns: FragmentColumns,
        check: ObservationCheck,
        check_actions: bool,
        name: str = "the policy",
        describe_target: Callable[[int], str] = "sub-environment {}".format,
    ):
        self._policy, self._columns, self._check = policy, columns, check
        self._check_actions = check_actions
        self._name, self._describe_target = name, describe_target
        self._at_first_step = True  # of a fragment
        self._dtype: Any = None  # of the actions in this fragment; None if they are nested
        self._shape: Any = ()  # of an action
        self._extra: list[tuple[str, Any, Any]] = []  # name, dtype and shape of a row
        self._states: list[tuple[str, Any, Any]] = []
        # name -> dtype and shape of a row; empty before the first step, also if rows were loaded
        self._kinds: dict[str, tuple[Any, Any]] = {}

    def allocate(self, expected: int, outputs: Any, continues: bool) -> None:
        """Check the policy's outputs in the first step of a fragment, and allocate their columns.

        Args:
            expected: number of observations.
            outputs: (actions, states, extra), as `Policy.compute_actions` returns them.
            continues: whether the fragment has rows already.

        Raises:
            TypeError, ValueError: an output has another type, shape, dtype or number of rows, or
                earlier rows of the fragment have other columns.
        """
        check_outputs(self._name, outputs)
        actions, states, extra = outputs
        check_extra_columns(self._name, extra, expected)
        check_states(self._name, states, self._policy.get_initial_state(), expected)
        check_actions(self._name, self._policy.action_space, actions, expected)
        before = [name for name, _, _ in self._extra]
        if continues and self._kinds and (set(before) ^ set(extra)) - {"vf_preds"}:
            raise self._other_columns(extra)
        named = {f"state_out_{i}": np.asarray(state) for i, state in enumerate(states)}
        outputs = {"actions": actions, **extra, **named}
        kinds = {name: _dtype_and_shape(value) for name, value in outputs.items()}
        if continues:
            self._check_kinds(kinds)
        is_first, self._kinds = not self._kinds, kinds
        for name in set(before) - set(extra):
            self._columns.drop(name)
        # rows of running episodes, without values because other views did not read them
        if not is_first and "vf_preds" in extra and self._columns.get("vf_preds") is None:
            values = values_of(self._policy, self._columns["obs"])
            self._columns.allocate("vf_preds", (), values.dtype)[:] = values
        for name, value in outputs.items():
            self._columns.allocate_like(name, value)
        self._states = [(name, *kinds[name]) for name in named]
        self._dtype, self._shape = kinds["actions"]
        self._extra = [(name, *kinds[name]) for name in extra]
        self._at_first_step = True

    def _check_kinds(self, kinds: dict[str, tuple[Any, Any]]) -> None:
        """Raise ValueError if outputs have another dtype or shape than in earlier rows."""
        for name in self._kinds.keys() & kinds.keys():
            if self._kinds[name] != kinds[name]:
                raise ValueError(
                    f"{self._name} returned {name} of dtype {kinds[name][0]} and row shape "
                    f"{kinds[name][1]}, but of {self._kinds[name][0]} and {self._kinds[name][1]} "
                    "in earlier rows of the same episodes: return the same in every step"
                )

    def store(self, at: Any, actions: Any, states: Any, extra: dict[str, Any]) -> Any:
        """Store the outputs at an index of the columns; return the actions in the environments'
        form."""
        arrays = self._columns.arrays
        count = self._columns.lanes if type(at) is int else len(at[1])
        if len(extra) != len(self._extra):
            raise self._other_columns(extra)
        if len(states) != len(self._states):
            raise ValueError(
                f"{self._name} returned {len(states)} states, but {len(self._states)} in earlier "
                "steps of the fragment: return the same number in every step"
            )
        if self._check_actions or self._at_first_step:
            actions, self._at_first_step = self._valid(actions, at), False
        if _fits(actions, self._dtype, (count, *self._shape)):
            arrays["actions"][at] = actions
        else:
            self._write("actions", at, count, actions)
        for name, dtype, shape in self._extra:
            value = extra.get(name)
            if _fits(value, dtype, (count, *shape)):
                arrays[name][at] = value
            elif name in extra:
                self._write(name, at, count, value)
            else:
                raise self._other_columns(extra)
        for (name, dtype, shape), state in zip(self._states, states, strict=True):
            if _fits(state, dtype, (count, *shape)):
                arrays[name][at] = state
            else:
                self._write(name, at, count, np.asarray(state))
        to_env = self._policy.actions_for_env(actions)
        return to_env if isinstance(to_env, np.ndarray) else rows_of(to_env)

    def _other_columns(self, extra: dict[str, Any]) -> ValueError:
        return ValueError(
            f"{self._name} returned the extra columns {list(extra)}, but "
            f"{[name for name, _, _ in self._extra]} in earlier steps of the fragment: return the "
            "same columns in every step"
        )

    def _write(self, name: str, at: Any, count: int, value: Any) -> None:
        column = self._columns.arrays[name]
        leaves = [value] if isinstance(column, np.ndarray) else optree.tree_leaves(value)
        for array, leaf in zip(leaves_of(column), leaves, strict=True):
            if np.shape(leaf) != (count, *array.shape[2:]):  # numpy would repeat values
                raise ValueError(
                    f"{self._name} returned {name} of shape {np.shape(leaf)} for {count} "
                    f"observations, expected {(count, *array.shape[2:])} as in the first step of "
                    "the fragment"
                )
            if type(value) is np.ndarray and not np.can_cast(value.dtype, array.dtype, "same_kind"):
                raise ValueError(
                    f"{self._name} returned {name} of dtype {value.dtype}, but of {array.dtype} in "
                    "the first step of the fragment: return the same dtype in every step"
                )
            array[at] = leaf

    def _valid(self, actions: Any, at: Any) -> Any:
        """Return the actions, with zeros for observations that no policy can act on.

        Raises:
            ValueError: an action cannot be executed.
        """
        space = self._policy.action_space
        invalid = first_invalid_action(space, actions)
        if invalid is None:
            return actions
        observations = map_leaves(lambda array: array[at], self._columns["raw_obs"])
        unusable = self._check.invalid_rows(observations, 1, usable=True)
        if unusable.any():
            actions = optree.tree_map(np.array, actions)
            for array in optree.tree_leaves(actions):
                array[unusable] = 0
            invalid = first_invalid_action(space, actions)
            if invalid is None:
                return actions
        raise ValueError(
            f"{self._name} returned the action {rows_of(actions)[invalid]!r} for "
            f"{self._describe_target(invalid)}; its action space is {space}"
        )


def _fits(values: Any, dtype: Any, shape: tuple[int, ...]) -> bool:
    """Return whether values are an array of a dtype and shape."""
    # dtypes of numbers are singletons; `is` is faster than ==
    return type(values) is np.ndarray and values.dtype is dtype and values.shape == shape


def _dtype_and_shape(values: Any) -> tuple[Any, Any]:
    """Return the dtype and shape of each row of an array; None and () for nested values."""
    return getattr(values, "dtype", None), getattr(values, "shape", ())[1:]


def rows_of(values: Any) -> list[Any]:
    """Return the rows of an array or of a nest of arrays."""
    if isinstance(values, np.ndarray):
        return list(values)
    count = len(optree.tree_leaves(values)[0])
    return [optree.tree_map(lambda leaf, i=i: leaf[i], values) for i in range(count)]
