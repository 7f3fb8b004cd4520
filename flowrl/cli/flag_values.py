"""How flags give values that are not plain: mappings and records as JSON, code as import paths."""

from __future__ import annotations

import contextlib
import json
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_origin

from gymnasium import spaces

from flowrl.cli.arguments import json_object
from flowrl.settings import Settings, import_object


@contextlib.contextmanager
def value_rules() -> Iterator[list[str]]:
    """Let tyro parse mappings and optional records from one JSON object, and code from an import
    path "module:name"; yield a list of the problems of these values."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    registry = ConstructorRegistry()
    problems: list[str] = []

    def noting(parse: Callable[[list[str]], Any]) -> Callable[[list[str]], Any]:
        def parse_or_note(args: list[str]) -> Any:
            try:
                return parse(args)
            except ValueError as error:
                problems.append(str(error))
                raise

        return parse_or_note

    @registry.primitive_rule
    def json_object(type_info: Any) -> Any:
        record = record_or_none(type_info.type)
        if get_origin(type_info.type) is not dict and record is None:
            return None

        def parse(args: list[str]) -> Any:
            if record is None:
                return _json_object(args[0])
            if (word := args[0].lower()) in ("none", "null", "false"):
                return None
            return record() if word == "true" else record(**_json_object(args[0]))

        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="JSON",
            instance_from_str=noting(parse),
            is_instance=lambda value: value is None or isinstance(value, (dict, Settings)),
            str_from_instance=lambda value: [_as_json(value)],
        )

    @registry.primitive_rule
    def space(type_info: Any) -> Any:
        if not any(part is spaces.Space for part in get_args(type_info.type)):
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="SPACE",
            instance_from_str=noting(_reject_space),
            is_instance=lambda value: value is None or isinstance(value, spaces.Space),
            str_from_instance=lambda value: [str(value)],
        )

    @registry.primitive_rule
    def code(type_info: Any) -> Any:
        parts = get_args(type_info.type) or (type_info.type,)
        if not any(
            type in (part, get_origin(part)) or get_origin(part) is Callable for part in parts
        ):
            return None
        # a setting that also takes text imports the code itself
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="MODULE:NAME",
            instance_from_str=noting(_text_or_none if str in parts else _imported),
            is_instance=lambda value: True,
            str_from_instance=lambda value: [repr(value)],
        )

    with registry:
        yield problems


def _text_or_none(args: list[str]) -> str | None:
    return None if args[0] == "None" else args[0]


def _imported(args: list[str]) -> Any:
    if args[0] == "None":
        return None
    try:
        return import_object(args[0])
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{args[0]!r} is not an import path module:name: {error}") from None


def record_or_none(annotation: Any) -> Any:
    """Return the record class of a setting that is a record or None; None for other settings."""
    records = [p for p in get_args(annotation) if isinstance(p, type) and issubclass(p, Settings)]
    return records[0] if len(records) == 1 and type(None) in get_args(annotation) else None


def _as_json(value: Any) -> str:
    if isinstance(value, Settings):
        value = value.to_dict()
    return "None" if value is None else json.dumps(value, default=repr)


def _reject_space(args: list[str]) -> Any:
    raise ValueError(f"a space cannot be set by a flag ({args[0]}): set it in the plan's config")


def _json_object(text: str) -> dict[str, Any]:
    try:
        return json_object(text)
    except ArgumentTypeError as error:
        raise ValueError(str(error)) from None
