"""ViewRequirement: which rows of a trajectory a batch column shows at each timestep."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import optree
from gymnasium import spaces

from flowrl.data.spaces import leaf_names, leaf_spaces, leaf_values
from flowrl.errors import ConfigError

ACTION_MASK = "action_mask"  # leaf of a Dict observation: which actions are allowed

_RANGE = re.compile(r"\s*(-?\d+)\s*:\s*(-?\d+)\s*(?::\s*(\d+)\s*)?")


class ViewRequirement:
    """A view of the trajectory: at timestep t, the rows t + shift of a column.

    Timesteps before the start of the episode show the first observation for observations, the
    initial state for recurrent states, and zeros for other columns. Timesteps after the end of the
    episode, or after the end of the fragment, show zeros (but the final observation is known).
    Views never cross into another episode; with negative shifts they reach into earlier fragments
    of the same episode.

    Args:
        data_col: the viewed column; None is the column with the view's name.
        space: space of the value of one timestep; a view of a custom column that looks back needs
            it for the fill value.
        shift: 0 is the timestep itself, 1 the next, -1 the previous one. A list of ints, or a
            range "first:last" or "first:last:step" (both ends included), is a window: values
            [rows, k, …] in that order.
        batch_repeat_value: number of rows that share one value, counted from the start of each
            trajectory's part of a fragment: a recurrent state is needed once per sequence. Only
            for views named `state_in_…`.
        agents: show other agents of the episode, whatever their policies, instead of the row's
            own agent: a list of agent ids, or `"others"` for all of the environment's
            `possible_agents` except the row's own. Values are [rows, agents, …] in the same env
            step (plus shift), zeros for an agent without a row there and, except for observations,
            for an agent that waits for the result of its action. The column `<name>_mask`, bool
            [rows, agents, …], marks the agents with values.
        used_for_compute_actions: whether the view is part of the input of action computation. None
            includes it if it shows nothing later than the observation of the timestep.
        used_for_training: whether the view is part of the train batch.

    Raises:
        ConfigError: a malformed argument.
    """

    def __init__(
        self,
        data_col: str | None = None,
        space: spaces.Space | None = None,
        shift: int | Sequence[int] | str = 0,
        batch_repeat_value: int = 1,
        used_for_compute_actions: bool | None = None,
        used_for_training: bool = True,
        agents: Sequence[Any] | str | None = None,
    ):
        if data_col is not None and not isinstance(data_col, str):
            raise ConfigError(f"ViewRequirement: data_col must be a column's name: {data_col!r}")
        self.data_col = data_col
        self.space = space
        self.shifts = _offsets(shift)
        self.shift: int | str | list[int] = list(self.shifts)
        given: Any = shift
        if isinstance(given, Integral):
            self.shift = self.shifts[0]
        elif isinstance(given, str):
            self.shift = given
        count: Any = batch_repeat_value
        if not isinstance(count, Integral) or count < 1:
            raise ConfigError(
                "ViewRequirement: batch_repeat_value must be an int >= 1, got "
                f"{batch_repeat_value!r}"
            )
        is_list = isinstance(agents, (list, tuple)) and len(agents) > 0
        if agents is not None and agents != "others" and not is_list:
            raise ConfigError(
                "ViewRequirement: agents must be a list of at least one agent id, or "
                f'"others", got {agents!r}'
            )
        self.batch_repeat_value = batch_repeat_value
        self.agents = agents
        self.used_for_compute_actions = used_for_compute_actions
        self.used_for_training = used_for_training

    @property
    def is_window(self) -> bool:
        """Whether values have an axis of timesteps."""
        return not isinstance(self.shift, int)

    def known_for_actions(self, name: str) -> bool:
        """Return whether the view is part of the input of action computation.

        Args:
            name: name of the view.

        Raises:
            ConfigError: `used_for_compute_actions` is True, but the view shows values that are not
                known when actions are computed.
        """
        latest = 0 if (self.data_col or name) == "obs" else -1
        known = max(self.shifts) <= latest
        if self.used_for_compute_actions and not known:
            raise ConfigError(
                f"view {name!r}: shift {self.shift!r} of {self.data_col or name!r} is not known "
                "when actions are computed: do not set used_for_compute_actions"
            )
        return known if self.used_for_compute_actions is None else self.used_for_compute_actions

    def __repr__(self) -> str:
        parts = [] if self.data_col is None else [f"data_col={self.data_col!r}"]
        parts += [f"shift={self.shift!r}", f"space={self.space}"]
        if self.batch_repeat_value != 1:
            parts.append(f"batch_repeat_value={self.batch_repeat_value}")
        if self.agents is not None:
            parts.append(f"agents={self.agents!r}")
        if self.used_for_compute_actions is not None:
            parts.append(f"used_for_compute_actions={self.used_for_compute_actions}")
        if not self.used_for_training:
            parts.append("used_for_training=False")
        return f"ViewRequirement({', '.join(parts)})"


ViewRequirements = ViewRequirement  # the name in some examples of RLlib's documentation


def acting_views(views: Mapping[str, ViewRequirement]) -> dict[str, ViewRequirement]:
    """Return the views that are part of the input of action computation.

    Raises:
        ConfigError: see ViewRequirement.known_for_actions.
    """
    return {name: view for name, view in views.items() if view.known_for_actions(name)}


def forward_views(views: Mapping[str, ViewRequirement]) -> dict[str, ViewRequirement]:
    """Return the views that a network's forward pass reads when it acts and when it learns: those
    of `acting_views` and the recurrent states."""
    states = {name: view for name, view in views.items() if name.startswith("state_")}
    return {**acting_views(views), **states}


def _offsets(shift: Any) -> tuple[int, ...]:
    """Return the offsets of a `shift` argument."""
    if isinstance(shift, str):
        match = _RANGE.fullmatch(shift)
        first, last, step = (int(g) if g else 1 for g in match.groups()) if match else (0, -1, 1)
        if first > last or step < 1:
            raise ConfigError(
                'ViewRequirement: a range must be "first:last" or "first:last:step", both ends '
                f"included and in order, got {shift!r}"
            )
        return tuple(range(first, last + 1, step))
    offsets = list(shift) if isinstance(shift, (list, tuple, range, np.ndarray)) else [shift]
    if not offsets or not all(isinstance(o, Integral) and not isinstance(o, bool) for o in offsets):
        raise ConfigError(
            'ViewRequirement: shift must be an int, a list of ints or text such as "-3:0", got '
            f"{shift!r}"
        )
    return tuple(map(int, offsets))


def find_mismatch(space: spaces.Space, values: Any, name: str) -> str | None:
    """Describe how arrays [B, …] differ from a space in structure, shape or kind of dtype.

    Args:
        space: the space.
        values: arrays [B, …] in the structure of the space.
        name: name of the values in the description.

    Returns:
        a description of the first mismatch; None if there is none.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(values, dict) or set(values) != set(space):
            return f"{name}: expected a dict of arrays for {sorted(space)}, got {_brief(values)}"
        problems = (
            find_mismatch(space[key], values[key], f"{name}[{key!r}]") for key in sorted(space)
        )
        return next((problem for problem in problems if problem), None)
    if isinstance(space, spaces.Tuple):
        if not isinstance(values, tuple) or len(values) != len(space):
            return f"{name}: expected a tuple of {len(space)} arrays, got {_brief(values)}"
        pairs = enumerate(zip(space, values, strict=True))
        problems = (find_mismatch(part, v, f"{name}[{i}]") for i, (part, v) in pairs)
        return next((problem for problem in problems if problem), None)
    shape = "".join(f", {side}" for side in space.shape or ())
    kinds = "biuf" if isinstance(space, spaces.Box) else "biu"
    if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds:
        return f"{name}: expected an array of {space.dtype} [B{shape}], got {_brief(values)}"
    if values.ndim == 0 or values.shape[1:] != (space.shape or ()):
        return f"{name}: expected an array [B{shape}], got one of shape {list(values.shape)}"
    return None


def find_input_problem(
    view_requirements: dict[str, ViewRequirement],
    initial_states: list[np.ndarray],
    input_dict: dict[str, Any],
) -> str | None:
    """Return a description of the first problem in the views of a step; None if there is none.

    Args:
        view_requirements: of the policy.
        initial_states: recurrent states at an episode's start, without batch axis.
        input_dict: the views to check, arrays [B, …].
    """
    views = acting_views(view_requirements)
    missing = sorted(set(views) - set(input_dict))
    if missing:
        return f"the view {missing[0]!r} is missing, there is only {sorted(input_dict)}"
    problems = [
        find_mismatch(view.space, input_dict[name], name)
        for name, view in views.items()
        if view.space is not None and not view.is_window
    ]
    for i, initial in enumerate(initial_states):
        name = f"state_in_{i}"
        view = views.get(name)
        window = (len(view.shifts),) if view is not None and view.is_window else ()
        state = spaces.Box(-np.inf, np.inf, (*window, *initial.shape), np.float32)
        problems.append(find_mismatch(state, input_dict.get(name), name))
    found = next((problem for problem in problems if problem), None)
    if found is None:
        leaves: dict[str, Any] = {n: optree.tree_leaves(input_dict[n]) for n in views}
        rows = {n: sorted({len(leaf) for leaf in arrays}) for n, arrays in leaves.items()}
        if len({count for counts in rows.values() for count in counts}) > 1:
            return f"arrays of different numbers of rows: {rows}"
    return found


def find_out_of_range(space: spaces.Space, actions: Any, name: str) -> str | None:
    """Describe integers in a policy's actions [B, …] that are outside a space.

    Args:
        space: the action space.
        actions: arrays for which `find_mismatch` returns None; integers of Discrete and
            MultiDiscrete spaces start at 0.
        name: name of the actions in the description.

    Returns:
        a description of the first problem; None if there is none.
    """
    leaves = zip(
        leaf_spaces(space), leaf_values(space, actions), leaf_names(space, name), strict=True
    )
    for leaf, values, leaf_name in leaves:
        size: Any = None
        if isinstance(leaf, spaces.Discrete):
            size = leaf.n
        elif isinstance(leaf, spaces.MultiDiscrete):
            size = leaf.nvec
        elif isinstance(leaf, spaces.MultiBinary):
            size = 2
        if size is not None and len(values) and ((values < 0) | (values >= size)).any():
            return (
                f"{leaf_name}: expected integers from 0 to below {size}, got {values.min()} to "
                f"{values.max()}"
            )
    return None


def find_masked(space: spaces.Space, observations: Any, actions: Any) -> str | None:
    """Describe an action of a policy that the leaf `action_mask` of its observation forbids.

    Args:
        space: the action space.
        observations, actions: arrays [B, …] for which `find_mismatch` returns None.
    """
    if not isinstance(observations, dict) or ACTION_MASK not in observations:
        return None
    if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return None
    sizes = np.array([space.n]) if isinstance(space, spaces.Discrete) else space.nvec.reshape(-1)
    mask = np.asarray(observations[ACTION_MASK]).astype(bool)
    if mask.shape != (len(actions), sizes.sum()):  # a custom model gives it another meaning
        return None
    columns = actions.reshape(len(actions), -1) + np.cumsum(sizes) - sizes
    rows = np.flatnonzero(~np.take_along_axis(mask, columns, 1).all(1))
    if not len(rows):
        return None
    return f"actions: {actions[rows[0]]} in row {rows[0]} is forbidden by its {ACTION_MASK}"


def _brief(values: Any) -> str:
    """Describe values by their type and size."""
    if isinstance(values, dict):
        return f"a dict of {sorted(map(str, values))}"
    if isinstance(values, np.ndarray):
        return f"one of {values.dtype} {list(values.shape)}"
    kind = f"a {type(values).__name__}"
    return f"{kind} of {len(values)}" if isinstance(values, (list, tuple)) else kind
