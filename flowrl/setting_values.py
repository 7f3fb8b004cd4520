"""Values of settings: conversion, comparison, types as text, similar names."""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from functools import partial
from inspect import formatannotation
from numbers import Integral, Real
from pathlib import Path
from types import CellType, FunctionType, MethodType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

log = logging.getLogger("flowrl")


def whole_number(value: Any) -> int | None:
    """Return a whole number given as an int, an integral float or text; None for anything else.

    >>> whole_number(1e5), whole_number("1e5"), whole_number("100_000"), whole_number(0.5)
    (100000, 100000, 100000, None)
    """
    if isinstance(value, str):
        if not value.isascii():  # digits of other scripts
            return None
        try:
            return int(value)
        except ValueError:
            pass
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    number = float(value) if not isinstance(value, Integral) else value
    return int(number) if math.isfinite(number) and number == int(number) else None


def check_int(name: str, value: Any, minimum: int = 1) -> None:
    """Raise ValueError unless an argument is an int, not a bool, and at least `minimum`."""
    is_int = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_int or value < minimum:
        raise ValueError(f"{name} must be an int of at least {minimum}, got {value!r}")


def check_number(name: str, value: Any, minimum: float, maximum: float = math.inf) -> None:
    """Raise ValueError unless an argument is a number, not a bool, and in a range."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not minimum <= value <= maximum:
        limits = f"from {minimum} to {maximum}" if maximum < math.inf else f"of at least {minimum}"
        raise ValueError(f"{name} must be a number {limits}, got {value!r}")


def check_path(name: str, value: Any) -> None:
    """Raise TypeError unless an argument is a path, and ValueError if it is empty."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, got {value!r}")
    if not os.fspath(value):
        raise ValueError(f"{name} is empty: pass '.' for the current folder")


def expanded_path(path: Path | str) -> Path:
    """Return a path with `~` replaced by the home folder; `~name` of an unknown user stays."""
    return Path(os.path.expanduser(path))


def check_names(name: str, value: Any, consequence: str) -> None:
    """Check an argument that is a collection of names, such as policy ids.

    Args:
        name: the argument.
        value: its value.
        consequence: what an empty collection would mean, for the message.

    Raises:
        TypeError: it is not a collection, or a single name.
        ValueError: it is empty.
    """
    if isinstance(value, str) or not isinstance(value, Collection):
        example = f", such as [{value!r}]" if isinstance(value, str) else ""
        raise TypeError(f"{name} must be a collection of names{example}, got {value!r}")
    if not len(value):
        raise ValueError(f"{name} is empty, so {consequence}")


def nearest_name(name: str, known: list[str], similarity: float = 0.6) -> str | None:
    """Return the known name that is most similar, or None if none is similar.

    Args:
        name: the misspelled name.
        known: names that exist.
        similarity: its minimum, from 0 to 1.
    """
    by_lowercase = {other_name.lower(): other_name for other_name in reversed(known)}
    close = difflib.get_close_matches(name.lower(), by_lowercase, 1, similarity)
    return by_lowercase[close[0]] if close else None


def nearest(name: str, known: list[str]) -> str:
    """Return ` Did you mean 'x'?`, or an empty string if no known name is similar."""
    similar = nearest_name(name, known) if isinstance(name, str) else None
    return "" if similar is None else f" Did you mean {similar!r}?"


def warn_of_misspelled_members(cls: type) -> None:
    """Warn of public members of a user's class that are named almost like an inherited one, which
    they probably should override."""
    if cls.__module__.startswith("flowrl."):
        return
    inherited = {name for base in cls.__mro__[1:] for name in vars(base)}
    known = sorted(name for name in inherited if not name.startswith("_"))
    for name in vars(cls).keys() - inherited:
        similar = nearest_name(name, known, 0.9)
        if similar is None or name.startswith("_"):
            continue
        shorter, longer = sorted((name, similar), key=len)
        if longer != shorter + "s" or longer.endswith("ss"):  # a plural is another name
            log.warning(
                "%s.%s overrides nothing: did you mean %s?", cls.__qualname__, name, similar
            )


def type_text(annotation: Any) -> str:
    """Return a type as text, without the constraints of Annotated."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(map(type_text, arguments))
    if origin is Literal:
        return " | ".join(map(repr, arguments))
    if annotation is NoneType:
        return "None"
    if origin is Callable:
        return "function"
    if origin in (list, dict, tuple):
        return f"{origin.__name__}[{', '.join(map(type_text, arguments))}]"
    return annotation.__name__ if isinstance(annotation, type) else formatannotation(annotation)


def is_search(value: Any) -> bool:
    """Return whether a value is a search space of Ray Tune: a domain or {"grid_search": [...]}."""
    if isinstance(value, dict):
        return len(value) == 1 and "grid_search" in value
    return type(value).__module__.startswith("ray.tune.search")


def equal(one: Any, two: Any) -> bool:
    """Return whether two values are equal; arrays are equal if their shapes and elements are."""
    if one is two:
        return True
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)) and type(one) is type(two):
        return len(one) == len(two) and all(map(equal, one, two))
    try:
        same = one == two
        if not hasattr(same, "all"):
            return bool(same)
        return getattr(one, "shape", ()) == getattr(two, "shape", ()) and bool(same.all())
    except Exception:  # the values cannot be compared
        return False


def equal_code(one: Any, two: Any) -> bool:
    """Return whether two values are equal, where code may come from two executions of one file."""
    try:
        return _CodeComparison().are_equal(one, two)
    except RecursionError:
        return False


_OF_EVERY_CLASS = {"__dict__", "__weakref__", "__module__", "__qualname__", "__doc__"}


class _CodeComparison:
    """Compares functions with their defaults and captured values, classes, and instances."""

    def __init__(self) -> None:
        # pairs that were compared, or are being compared, by their ids; they count as equal
        self._compared: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._in_function = False

    def are_equal(self, one: Any, two: Any) -> bool:
        pair = id(one), id(two)
        if one is two or pair in self._compared:
            return True
        self._compared[pair] = one, two  # kept, so that no other objects get their ids
        if isinstance(one, partial) and isinstance(two, partial):
            return self.are_equal(
                (one.func, one.args, one.keywords), (two.func, two.args, two.keywords)
            )
        if isinstance(one, FunctionType) and isinstance(two, FunctionType):
            return self._are_equal_functions(one, two)
        if isinstance(one, MethodType) and isinstance(two, MethodType):
            return self.are_equal((one.__func__, one.__self__), (two.__func__, two.__self__))
        if isinstance(one, type) and isinstance(two, type):
            return self._are_equal_classes(one, two)
        if isinstance(one, property) and isinstance(two, property):
            return self.are_equal((one.fget, one.fset, one.fdel), (two.fget, two.fset, two.fdel))
        if isinstance(one, (staticmethod, classmethod)) and type(one) is type(two):
            return self.are_equal(one.__func__, two.__func__)
        if isinstance(one, dict) and isinstance(two, dict):
            return one.keys() == two.keys() and all(
                self.are_equal(one[key], two[key]) for key in one
            )
        if isinstance(one, (list, tuple)) and type(one) is type(two):
            return len(one) == len(two) and all(map(self.are_equal, one, two))
        return self._are_equal_instances(one, two)

    def _are_equal_functions(self, one: FunctionType, two: FunctionType) -> bool:
        if one.__code__ != two.__code__:
            return False
        before, self._in_function = self._in_function, True
        values = [(f.__defaults__, f.__kwdefaults__, _captured(f)) for f in (one, two)]
        same = self.are_equal(*values)
        self._in_function = before
        return same

    def _are_equal_classes(self, one: type, two: type) -> bool:
        if (one.__module__, one.__qualname__) != (two.__module__, two.__qualname__):
            return False
        if "<locals>" not in one.__qualname__:
            return True
        members = [
            {name: value for name, value in vars(cls).items() if name not in _OF_EVERY_CLASS}
            for cls in (one, two)
        ]
        return self.are_equal(*members)

    def _are_equal_instances(self, one: Any, two: Any) -> bool:
        if equal(one, two):
            return True
        cls = type(one)
        is_comparable = cls.__eq__ is not object.__eq__ and cls is type(two)
        is_record = is_dataclass(one) or isinstance(one, BaseModel)
        if (is_comparable and not is_record) or not self.are_equal(cls, type(two)):
            return False
        if is_dataclass(one):
            names = [field.name for field in fields(one)]
            return all(self.are_equal(getattr(one, n), getattr(two, n)) for n in names)
        if hasattr(one, "__dict__"):
            return self.are_equal(vars(one), vars(two))
        return self._in_function  # such as a random generator that a function captures


def _captured(function: FunctionType) -> list[Any]:
    """Return the values that a function captures."""
    cells = function.__closure__ or ()
    return [cell.cell_contents for cell in cells if cell != CellType()]
