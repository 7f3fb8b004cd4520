"""Find methods that the user has overridden or replaced."""

from __future__ import annotations

from typing import Any


def is_builtin_method(owner: Any, name: str) -> bool:
    """Return whether a method or property of an object is flowrl's: the user's class does not
    override it, and the user has not replaced it by assigning to the object."""
    return is_defined_by_flowrl(vars(owner).get(name, getattr(type(owner), name)))


def is_defined_by_flowrl(method: Any) -> bool:
    """Return whether a method or property is defined in a module of flowrl."""
    function = method.fget if isinstance(method, property) else method
    # not `__module__`, which functools.wraps copies
    module = getattr(function, "__globals__", {}).get("__name__", "")
    return bool(module.startswith("flowrl."))
