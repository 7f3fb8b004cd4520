"""Saved states are checked by the fields that a component declares."""

from typing import Any, ClassVar

import numpy as np
import pytest

from flowrl.state_schema import (
    Amount,
    Fields,
    Natural,
    StateError,
    check_finite,
    check_own_state,
    check_state,
)

FIELDS: Fields = {
    "items": Natural,
    "seconds": Amount,
    "rows": list[Natural],
    "array": np.ndarray | None,
}
VALID = {"items": 1, "seconds": 2, "rows": [0, 3], "array": None}


def test_valid_state_with_further_fields_is_accepted():
    check_state({**VALID, "array": np.zeros(2), "further": "x"}, FIELDS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"items": True}, "stage/items: input should be a valid integer, got True"),
        ({"items": -1}, "stage/items: input should be greater than or equal to 0, got -1"),
        ({"items": 1.0}, "stage/items: input should be a valid integer"),
        ({"items": 2**63}, "stage/items: input should be less than"),
        ({"seconds": "1"}, "stage/seconds: input should be a valid number"),
        ({"rows": True}, "stage/rows: input should be a valid list, got True"),
        ({"rows": [1, "x"]}, "stage/rows/1: input should be a valid integer, got 'x'"),
        ({"array": [1, 2]}, "stage/array"),
    ],
)
def test_message_has_the_path_of_the_field(changes, message):
    with pytest.raises(StateError, match=message):
        check_state({**VALID, **changes}, FIELDS, "stage")


def test_missing_fields_and_other_types_are_refused():
    with pytest.raises(StateError, match=r"^items: field required$"):
        check_state({}, FIELDS)
    for state in (None, [1], True):
        with pytest.raises(StateError):
            check_state(state, FIELDS, "stage")


def test_fields_of_base_classes_count():
    class Base:
        state_fields: ClassVar[Fields] = {"items": Natural}

    class Component(Base):
        state_fields: ClassVar[Fields] = {"pending": list[Any]}

    check_own_state(Component(), {"items": 1, "pending": []})
    for missing in ("items", "pending"):
        state = {"items": 1, "pending": []}
        del state[missing]
        with pytest.raises(StateError, match=f"Component/{missing}: field required"):
            check_own_state(Component(), state)


@pytest.mark.parametrize("value", [float("nan"), np.array([1, np.inf]), np.float32("nan")])
def test_numbers_that_are_not_finite_are_refused_with_their_path(value):
    check_finite({"weights": [np.ones(2), 1, "x", None, np.arange(2)]}, "state")
    with pytest.raises(StateError, match="state/weights/1: must be finite"):
        check_finite({"weights": [0.0, value]}, "state")
