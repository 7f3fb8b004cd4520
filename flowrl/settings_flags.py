"""Command-line flags from a settings record, by tyro: `--lr 3e-4 --model.fcnet-hiddens 64 64`."""

from __future__ import annotations

import contextlib
import io
import json
import re
from argparse import ArgumentTypeError
from typing import Any, get_origin

from flowrl.arguments import mapping
from flowrl.policies.config import ConfigError, Settings, nearest


def flag_names(record: type[Settings], prefix: str = "") -> list[str]:
    """Every flag of a record."""
    names = []
    for name, field in record.model_fields.items():
        flag = f"{prefix}{name.rstrip('_').replace('_', '-')}"
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Settings):
            names += flag_names(inner, f"{flag}.")
        else:
            names.append(flag)
    return names


def _flat_schedule(flag: str) -> list[str]:
    """`[[0, 1e-3], [100, 0]]` as the four numbers that a schedule's flag takes."""
    if not flag.startswith("[["):
        return [flag]
    try:
        return [str(number) for point in json.loads(flag) for number in point]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{flag}: not a schedule [[env step, value], …]: {error}") from error


def _check_policy(policy_id: str, defaults: Any) -> None:
    known = list(getattr(defaults, "policies", None) or {})
    flags = [known_id.replace("_", "-") for known_id in known]
    if policy_id not in flags:
        raise ConfigError(
            f"--policies.{policy_id}: there is no such policy.{nearest(policy_id, flags)} "
            f"There are {', '.join(flags) or 'none to be set by flags'}"
        )


def _with_mappings() -> Any:
    """What lets tyro take a mapping of any content as one JSON object."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def json_object(type_info: Any) -> Any:
        if get_origin(type_info.type) is not dict:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="JSON",
            instance_from_str=lambda given: _json_object(given[0]),
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [json.dumps(value, default=repr)],
        )

    return registry


def _json_object(text: str) -> dict[str, Any]:
    try:
        return mapping(text)
    except ArgumentTypeError as error:
        raise ValueError(str(error)) from None


def settings_from_flags(
    defaults: Settings, flags: list[str], program: str, run_options: dict[str, Any]
) -> Any:
    """The defaults with the flags applied.

    Raises:
        ConfigError: unknown flag (the nearest is offered), or a value of the wrong type or range.
        SystemExit: 0 after `--help`.
    """
    if not flags:
        return defaults
    known = flag_names(type(defaults))
    accepted = {*known, *(f"no-{name}" for name in known), "help"}
    for flag in flags:
        if flag.startswith("--"):
            name = flag[2:].split("=")[0].replace("_", "-").rstrip("-")
            if name == "plan":
                raise ConfigError("--plan: name the plan after the command, `flowrl train PLAN`")
            head, dot, last = name.rpartition(".")
            plain = f"{head}{dot}{last.removeprefix('no-')}"
            if name.startswith("policies."):
                _check_policy(name.split(".")[1], defaults)
                continue  # tyro knows their settings
            if name not in accepted and plain not in accepted:
                options = [*known, *(option.replace("_", "-") for option in run_options)]
                hint = nearest(name, options).replace("'", "").replace("mean ", "mean --")
                raise ConfigError(f"unknown flag --{name}.{hint}")
    flags = [part for flag in flags for part in _flat_schedule(flag)]
    import tyro

    # a field such as lambda_ has its underscore from Python: the flag goes with or without it
    for name in type(defaults).model_fields:
        if name.endswith("_"):
            bare = f"--{name.rstrip('_')}"
            flags = [
                f"--{name}{flag[len(bare) :]}" if re.fullmatch(f"{bare}(=.*)?", flag) else flag
                for flag in flags
            ]
    helping = "--help" in flags or "-h" in flags
    said = io.StringIO()
    try:
        silent = contextlib.nullcontext() if helping else contextlib.redirect_stderr(said)
        with silent, _with_mappings():
            return tyro.cli(
                type(defaults), default=defaults, args=flags, prog=program, console_outputs=True
            )
    except SystemExit as error:
        if error.code in (0, None):
            raise
        text = re.sub(r"[│╭╮╰╯─]", " ", said.getvalue())
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        short = " ".join(line for line in lines if not line.startswith("For full helptext"))
        short = re.sub(r"^Value error Error parsing (\w+: |(?=--))|^Invalid choice ", "", short)
        raise ConfigError(short.split(" Argument helptext:")[0]) from None
