"""Save and restore one environment: its own state, its random generator, its logged actions."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from typing import Any

import gymnasium as gym
import numpy as np
import optree
from gymnasium.wrappers import (
    OrderEnforcing,
    PassiveEnvChecker,
    TimeLimit,
    TransformAction,
    TransformObservation,
    TransformReward,
)

from flowrl.data.serialization import can_be_saved
from flowrl.envs.time_limit import get_elapsed_steps, set_elapsed_steps
from flowrl.envs.validation import unwrapped
from flowrl.seeding import restore_stream

log = logging.getLogger("flowrl")
_warned: set[tuple[str, str]] = set()
_TRANSFORMS = (TransformAction, TransformObservation, TransformReward)


def find_rng(env: Any) -> np.random.Generator | None:
    """Return the random generator of an environment, or None if it has not created one."""
    attributes = getattr(unwrapped(env), "__dict__", {})
    for name in ("_np_random", "np_random"):
        if isinstance(attributes.get(name), np.random.Generator):
            return attributes[name]
    return None


def _stateful_layer(env: Any) -> tuple[Any, list[Any], Any]:
    """Return the outermost layer with `get_state()` and `set_state(state)`, or None; the TimeLimits
    around it; and the outermost wrapper around it that may have state, or None."""
    limits: list[Any] = []
    wrapper = None
    while env is not None:
        methods: list[Any] = [getattr(env, name, None) for name in ("get_state", "set_state")]
        if all(callable(method) for method in methods):
            with contextlib.suppress(TypeError, ValueError):
                inspect.signature(methods[0]).bind()
                inspect.signature(methods[1]).bind(None)
                return env, limits, wrapper
            return None, limits, wrapper
        if isinstance(env, TimeLimit):
            limits.append(env)
        elif not _is_stateless(env):
            wrapper = wrapper or env
        env = env.env if isinstance(env, gym.Wrapper) else None
    return None, limits, wrapper


def _is_stateless(wrapper: Any) -> bool:
    """Return whether an object is a wrapper of Gymnasium without state, such as ClipReward;
    TransformReward itself calls a function of the user, which may have state."""
    if isinstance(wrapper, (OrderEnforcing, PassiveEnvChecker)):
        return True
    is_own = type(wrapper) not in _TRANSFORMS and isinstance(wrapper, _TRANSFORMS)
    return is_own and type(wrapper).__module__.startswith("gymnasium.")


def _restorable_layer(env: Any) -> tuple[Any, list[Any]]:
    """Return the layer whose methods restore the environment, and the TimeLimits around it.

    The layer is None if no layer has the methods, or a wrapper around it may have state.
    """
    layer, limits, wrapper = _stateful_layer(env)
    return None if wrapper is not None else layer, limits


def has_whole_state(env: Any) -> bool:
    """Return whether `get_state` and `set_state` are methods of the environment itself, not of a
    wrapper, whose state does not contain that of the environment in it."""
    layer, _ = _restorable_layer(env)
    return layer is not None and getattr(layer, "unwrapped", layer) is layer


def has_wrapper_state(env: Any) -> bool:
    """Return whether `get_state` and `set_state` are methods of a wrapper only."""
    layer, _ = _restorable_layer(env)
    return layer is not None and getattr(layer, "unwrapped", layer) is not layer


def get_env_state(env: Any, warns: bool = True) -> dict[str, Any] | None:
    """Return the state of an environment or a wrapper that implements `get_state` and `set_state`.

    Args:
        env: the environment.
        warns: warn of a state that is not returned, once.

    Returns:
        its state, the state of the random generator and the elapsed steps of the TimeLimits; None
        if the environment does not implement the methods, if a wrapper around it may have state,
        or if the state cannot be saved.
    """
    layer, limits, wrapper = _stateful_layer(env)
    if layer is None:
        return None
    if wrapper is not None:
        if warns:
            _warn(
                layer,
                f"the wrapper {type(wrapper).__name__} around it may have state: implement "
                "get_state() and set_state(state) in the wrapper, which must include the state of "
                "the environment",
            )
        return None
    rng = find_rng(env)
    state = {
        "state": layer.get_state(),
        "rng": None if rng is None else rng.bit_generator.state,
        "elapsed_steps": [get_elapsed_steps(limit) for limit in limits],
    }
    if not can_be_saved(state):
        if warns:
            _warn(
                layer,
                "get_state() returned an object that checkpoints cannot contain: return dicts "
                "and lists of numbers, strings and arrays",
            )
        return None
    return copy.deepcopy(state)


def _warn(layer: Any, problem: str) -> None:
    """Warn once that an environment is restored by repeating the actions of its episode."""
    name = type(layer).__name__
    if (name, problem) not in _warned:
        _warned.add((name, problem))
        log.warning(
            "checkpoints do not contain the state of %s: %s. A resumed run repeats the actions of "
            "the running episode; values that are kept across episodes are lost", name, problem,
        )  # fmt: skip


def set_env_state(env: Any, state: dict[str, Any]) -> bool:
    """Restore the result of `get_env_state`; return False if the wrappers do not match, or the
    environment has no random generator."""
    layer, limits = _restorable_layer(env)
    if layer is None or len(limits) != len(state["elapsed_steps"]):
        return False
    layer.set_state(state["state"])
    for limit, elapsed_steps in zip(limits, state["elapsed_steps"], strict=True):
        set_elapsed_steps(limit, elapsed_steps)
    if state["rng"] is None:
        return True
    rng = find_rng(env)
    if rng is not None:
        restore_stream(rng, state["rng"])
    return rng is not None


def copy_actions(actions: dict[Any, Any]) -> dict[Any, Any]:
    """Copy actions by agent id, because an environment may modify them in place."""
    return {a: v if type(v) is int else copy.deepcopy(v) for a, v in actions.items()}


def size_of_action(action: Any) -> int:
    """Return about how many bytes an action takes in memory."""
    return sum(np.asarray(leaf).nbytes + 100 for leaf in optree.tree_leaves(action))


def pack_actions(actions: list[Any]) -> list[Any]:
    """Store consecutive actions of equal structure as one array per leaf.

    Returns:
        for each run of actions: [first action, [array [count, …] per leaf]]; actions without
        leaves, such as {}, have one array, of which only the length counts.
    """
    if actions and set(map(type, actions)) == {int}:
        return [[actions[0], [np.array(actions)]]]
    runs: list[Any] = []
    previous = None
    for action in actions:
        leaves, treespec = optree.tree_flatten(action)
        types = [(type(leaf), np.shape(leaf), np.asarray(leaf).dtype) for leaf in leaves]
        structure = (treespec, types)
        if structure != previous:
            previous = structure
            runs.append([action, [[] for _ in leaves or [False]]])
        for column, leaf in zip(runs[-1][1], leaves or [False], strict=True):
            column.append(leaf)
    return [[first, [np.array(column) for column in columns]] for first, columns in runs]


def unpack_actions(runs: list[Any]) -> list[Any]:
    """Return the actions that `pack_actions` stored."""
    actions: list[Any] = []
    for first, columns in runs:
        leaves, treespec = optree.tree_flatten(first)
        if not leaves:
            actions += [optree.tree_unflatten(treespec, []) for _ in columns[0]]
            continue
        is_python_scalar = [
            isinstance(leaf, (bool, int, float)) and not isinstance(leaf, np.generic)
            for leaf in leaves
        ]
        values = [
            column.tolist() if scalar else list(column)
            for column, scalar in zip(columns, is_python_scalar, strict=True)
        ]
        actions += [optree.tree_unflatten(treespec, row) for row in zip(*values, strict=True)]
    return actions
