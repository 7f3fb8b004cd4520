"""Check that a saved state has the fields and types that a component expects."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, create_model

Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Natural = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Amount = Annotated[float, Field(ge=0)]
Fields = Mapping[str, Any]
"""Name of a field -> its type. A class has the fields of its states in `state_fields`; those of its
base classes are added."""


class StateError(ValueError):
    """A saved state does not have the expected fields. The message names the field."""


def check_state(state: Any, fields: Fields, name: str = "") -> None:
    """Check the fields of a state; further ones are ignored, and numbers are not converted.

    Args:
        state: the state.
        fields: the expected fields.
        name: name of the state in messages.

    Raises:
        StateError: a field is missing, or has another type.
    """
    try:
        _model(tuple(fields.items())).model_validate(state)
    except ValidationError as error:
        problem = error.errors()[0]
        path = "/".join([*filter(None, [name]), *map(str, problem["loc"])])
        message = problem["msg"][:1].lower() + problem["msg"][1:]
        got = "" if problem["type"] == "missing" else f", got {problem['input']!r:.60}"
        raise StateError(f"{path}: {message}{got}") from None


def check_own_state(component: Any, state: Any, name: str = "") -> None:
    """Check a state by the `state_fields` of a component's class; see `check_state`."""
    cls: Any = type(component)
    check_state(state, _fields_of(cls), name or type(component).__name__)


def check_finite(tree: Any, name: str, may_be_infinite: Collection[str] = ()) -> None:
    """Check that the arrays and floats in nested dicts and lists are finite.

    Args:
        tree: the dicts and lists.
        name: start of the message.
        may_be_infinite: keys whose values may be infinite, but not NaN.

    Raises:
        StateError: one of them is not.
    """
    import numpy as np

    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key not in may_be_infinite:
                check_finite(value, f"{name}/{key}", may_be_infinite)
            elif not has_valid_numbers(value, may_be_infinite=True):
                raise StateError(f"{name}/{key}: must not be NaN")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            check_finite(value, f"{name}/{index}", may_be_infinite)
    elif isinstance(tree, (float, np.floating, np.ndarray)) and not has_valid_numbers(tree):
        raise StateError(f"{name}: must be finite")


def has_valid_numbers(value: Any, may_be_infinite: bool = False) -> bool:
    """Return whether an array or a number is finite, or at least not NaN if it may be infinite."""
    import numpy as np

    array = np.asarray(value)
    if array.dtype.kind != "f":
        return True
    return not np.isnan(array).any() if may_be_infinite else bool(np.isfinite(array).all())


@functools.cache
def _fields_of(cls: type) -> Fields:
    fields: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        fields |= vars(base).get("state_fields", {})
    return fields


@functools.cache
def _model(fields: tuple[tuple[str, Any], ...]) -> Any:
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    types: dict[str, Any] = {name: (kind, ...) for name, kind in fields}
    return create_model("State", __config__=config, **types)
