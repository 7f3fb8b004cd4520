"""Read the source code of operators of the user: what they return, change and mention."""

from __future__ import annotations

import ast
import inspect
import textwrap
import tokenize
from collections.abc import Iterator
from typing import Any

from flowrl.iter.stages.function_stage import is_user_defined

_CHANGING_METHODS = {
    "append", "clear", "extend", "fill", "insert", "pop", "popitem", "remove", "reverse", "sort",
}  # fmt: skip


def mentions(operator: Any, text: str) -> bool:
    """Return whether the source of an operator of the user contains a text; False if the source is
    unknown."""
    function = operator if inspect.isroutine(operator) else type(operator)
    if not is_user_defined(function):
        return False
    try:
        return text in inspect.getsource(function)
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # also of an edited file
        return False


def returns_nothing(operator: Any) -> bool:
    """Return whether the source of an operator of the user has no statement that returns a value;
    False if the source is unknown."""
    definition = _own_definition(operator)
    if not isinstance(definition, ast.FunctionDef):
        return False
    nodes = list(ast.walk(definition))
    may_return = any(isinstance(node, ast.Return) and node.value is not None for node in nodes)
    always_raises = isinstance(definition.body[-1], ast.Raise)
    is_generator = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes)
    return not (may_return or always_raises or is_generator)


def returns_its_input(operator: Any) -> bool:
    """Return whether an operator of the user returns its first argument itself, in all cases; False
    if the source is unknown."""
    definition = _own_definition(operator)
    if not isinstance(definition, ast.FunctionDef):
        return False
    name = _first_argument(definition)
    if name is None or _is_assigned(definition, name):
        return False
    returned = [node.value for node in ast.walk(definition) if isinstance(node, ast.Return)]
    return bool(returned) and all(isinstance(v, ast.Name) and v.id == name for v in returned)


def accumulated_attribute(operator: Any) -> str | None:
    """Return the name of an attribute that `__call__` of an operator of the user adds to, such as
    `self.count += 1` or `self.mean = 0.9 * self.mean + …`.

    Attributes that `__call__` also sets to new values are not reported.

    Returns:
        the name of the first one; None if there is none, or the source is unknown.
    """
    if inspect.isroutine(operator):
        return None
    definition = _own_definition(operator)
    added: list[str] = []
    replaced: set[str] = set()
    for node in ast.walk(definition) if definition is not None else ():
        if isinstance(node, ast.AugAssign):
            added += _own_attributes(node.target)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            read = {ast.unparse(part) for part in ast.walk(node.value)}
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for attribute in (name for target in targets for name in _own_attributes(target)):
                if attribute not in read:
                    replaced.add(attribute)
                elif isinstance(node.value, ast.BinOp):
                    added.append(attribute)
    return next((attribute for attribute in added if attribute not in replaced), None)


def _own_attributes(target: ast.AST) -> list[str]:
    """Return the attributes of `self` that a target of an assignment sets."""
    return [
        ast.unparse(node)
        for node in ast.walk(target)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    ]


def in_place_change(operator: Any) -> str | None:
    """Return the code with which an operator of the user changes its first argument in place.

    `batch["x"] = …` and `batch.update(…)` are not reported, because each branch of a plan has its
    own mapping. `batch.pop(…)` and `del batch["x"]` are reported: the item may be a list.

    Returns:
        the code of the first change; None if there is none, the source is unknown, or the operator
        is one of flowrl's.
    """
    definition = _own_definition(operator)
    if definition is None:
        return None
    name = _first_argument(definition)
    if name is None or _is_assigned(definition, name):
        return None
    return next((ast.unparse(change) for change in _changes(definition, name)), None)


def _first_argument(definition: ast.FunctionDef | ast.Lambda) -> str | None:
    """Return the name of the first argument after `self`; None if there is none."""
    names = [argument.arg for argument in definition.args.posonlyargs + definition.args.args]
    return next(iter(names[1:] if names[:1] == ["self"] else names), None)


def _own_definition(operator: Any) -> ast.FunctionDef | ast.Lambda | None:
    """Return the parsed definition of an operator of the user, or None."""
    function = operator if inspect.isroutine(operator) else type(operator).__call__
    return _definition_of(function) if is_user_defined(function) else None


def _definition_of(function: Any) -> ast.FunctionDef | ast.Lambda | None:
    """Return the parsed definition of a function; None if its source cannot be read or parsed, or
    if a decorator has replaced it by another function."""
    if hasattr(function, "__wrapped__"):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (
        OSError,
        TypeError,
        SyntaxError,
        tokenize.TokenError,
    ):  # a lambda inside a chain is not a statement
        return None
    found = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    return found[0] if len(found) == 1 else None


def _is_assigned(definition: ast.AST, name: str) -> bool:
    """Return whether the argument is replaced, after which it may be a copy."""
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        for node in ast.walk(definition)
    )


def _changes(definition: ast.AST, name: str) -> Iterator[ast.AST]:
    """Yield the statements and calls that change the value of `name`."""
    for node in ast.walk(definition):
        if isinstance(node, ast.AugAssign) and _depth(node.target, name):
            yield node
        elif isinstance(node, ast.Assign):
            if any(_depth(target, name) >= 2 for target in node.targets):
                yield node
        elif isinstance(node, ast.Delete):
            if any(_depth(target, name) for target in node.targets):
                yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            value = node.func.value
            is_part = _depth(value, name) or (isinstance(value, ast.Name) and value.id == name)
            if node.func.attr in _CHANGING_METHODS and is_part:
                yield node


def _depth(node: ast.AST, name: str) -> int:
    """Return how many subscripts of `name` a node is, `name["x"][0]` is two; 0 if it is none."""
    depth = 0
    while isinstance(node, ast.Subscript):
        node, depth = node.value, depth + 1
    return depth if isinstance(node, ast.Name) and node.id == name else 0
