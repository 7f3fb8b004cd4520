"""Command-line flags from a settings record, by tyro: `--lr 3e-4 --model.fcnet-hiddens 64 64`."""

from __future__ import annotations

import contextlib
import io
import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any, get_args, get_origin

from gymnasium import spaces

from flowrl.cli.arguments import json_object
from flowrl.setting_aliases import setting_hint
from flowrl.settings import ConfigError, Settings, imported, nearest


def flag_names(record: type[Settings], prefix: str = "", switches: bool = False) -> list[str]:
    """Return the flags of a record, without `--`.

    If `switches` is set, return only flags without a value, which are given as `--x` or `--no-x`.
    """
    names = []
    for name, field in record.model_fields.items():
        flag = f"{prefix}{name.rstrip('_').replace('_', '-')}"
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Settings):
            names += flag_names(inner, f"{flag}.", switches)
        elif inner is bool or not switches:
            names.append(flag)
    return names


def _normalize_switches(args: list[str], switches: set[str]) -> list[str]:
    """Replace `--x true` and `--x=false` by the forms that tyro accepts, `--x` and `--no-x`."""
    result: list[str] = []
    for arg in args:
        name, equals, assigned = arg.partition("=")
        value = assigned if equals else arg
        switch = name if equals else (result[-1] if result else "")
        if value.lower() in ("true", "false") and switch[2:].replace("_", "-") in switches:
            if not equals:
                result.pop()
            head, dot, end = switch[2:].rpartition(".")
            result.append(switch if value.lower() == "true" else f"--{head}{dot}no-{end}")
        else:
            result.append(arg)
    return result


def _flatten_schedule(argument: str) -> list[str]:
    """Replace `[[0, 1e-3], [100, 0]]` by its numbers, the form that tyro accepts.

    Args:
        argument: a value, `--flag=value`, or any other argument, which is returned as it is.
    """
    flag, _, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    if not value.startswith("[["):
        return [argument]
    try:
        numbers = [str(number) for point in json.loads(value) for number in point]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{argument}: not a schedule [[env step, value], …]: {error}") from error
    return [flag, *numbers] if flag else numbers


def _check_policy(name: str, defaults: Any) -> None:
    """Raise ConfigError for a flag `policies.x.config.y` of an unknown policy x or setting y."""
    policy_id, _, rest = name.removeprefix("policies.").partition(".")
    policies = getattr(defaults, "policies", None) or {}
    policies = policies if isinstance(policies, dict) else {}
    specs = {known_id.replace("_", "-"): spec for known_id, spec in policies.items()}
    if policy_id not in specs:
        raise ConfigError(
            f"--policies.{policy_id}: there is no such policy.{nearest(policy_id, list(specs))} "
            f"Policies with flags: {', '.join(specs) or 'none'}"
        )
    config = getattr(specs[policy_id], "config", None)
    if not isinstance(config, Settings):
        return
    head = f"--policies.{policy_id}.config"
    inner, dot, last = rest.removeprefix("config.").rpartition(".")
    known = flag_names(type(config))
    if {f"{inner}{dot}{last}", f"{inner}{dot}{last.removeprefix('no-')}"}.isdisjoint(known):
        hint = setting_hint(last.replace("-", "_"), type(config).model_fields)
        hint = _as_flags(hint or nearest(f"{inner}{dot}{last}", known), f"{head}.")
        raise ConfigError(f"unknown flag --{name}.{hint}")
    if not rest.startswith("config."):
        raise ConfigError(f"unknown flag --{name}. Did you mean '{head}.{rest}'?")


def _as_flags(hint: str, head: str) -> str:
    """Return a hint about settings with their names as flags, such as `--model.fcnet-hiddens`.

    Args:
        hint: names are in quotes; names, with or without a value, in backticks.
        head: what all flags start with, such as `--`.
    """

    def flag(match: re.Match[str]) -> str:
        name, inner, value = match.group(1, 2, 3)
        name = f"{name}.{inner}" if inner else name
        is_short = value is not None and not value.startswith("[")
        return f"{head}{name.rstrip('_').replace('_', '-')}" + (f"={value}" if is_short else "")

    hint = re.sub(r"'([\w.-]+)'", r"`\1`", hint)
    return re.sub(r"`([\w.-]+)(?:=\{\"(\w+)\"[^`]*|=([^`]*))?`", flag, hint)


def _records(defaults: Settings) -> dict[str, type[Settings]]:
    """Return the settings records of a plan and of its policies: prefix of the flags -> record."""
    records = {"": type(defaults)}
    policies = getattr(defaults, "policies", None)
    for policy_id, spec in policies.items() if isinstance(policies, dict) else ():
        if isinstance(config := getattr(spec, "config", None), Settings):
            records[f"policies.{policy_id.replace('_', '-')}.config."] = type(config)
    return records


def _registry(import_code: bool) -> Any:
    """Return a tyro registry that parses mappings and optional records from one JSON object, and
    code from an import path "module:name"."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def json_object(type_info: Any) -> Any:
        record = _record_or_none(type_info.type)
        if get_origin(type_info.type) is not dict and record is None:
            return None

        def parse(args: list[str]) -> Any:
            if record is None:
                return _json_object(args[0])
            return None if args[0] == "None" else record(**_json_object(args[0]))

        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="JSON",
            instance_from_str=parse,
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
            instance_from_str=_reject_space,
            is_instance=lambda value: value is None or isinstance(value, spaces.Space),
            str_from_instance=lambda value: [str(value)],
        )

    import_path = _imported if import_code else _reject_code

    @registry.primitive_rule
    def code(type_info: Any) -> Any:
        parts = get_args(type_info.type) or (type_info.type,)
        if not any(part is type or get_origin(part) is Callable for part in parts):
            return None
        # a setting that also takes text imports the code itself
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="MODULE:NAME",
            instance_from_str=_text_or_none if str in parts else import_path,
            is_instance=lambda value: True,
            str_from_instance=lambda value: [repr(value)],
        )

    return registry


def _text_or_none(args: list[str]) -> str | None:
    return None if args[0] == "None" else args[0]


def _reject_code(args: list[str]) -> Any:
    raise ValueError(f"the flag names the code {args[0]}: pass --trust to import it")


def _imported(args: list[str]) -> Any:
    if args[0] == "None":
        return None
    try:
        return imported(args[0])
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{args[0]!r} is not an import path module:name: {error}") from None


def _record_or_none(annotation: Any) -> Any:
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


def settings_from_flags(
    defaults: Settings,
    flags: list[str],
    program: str,
    run_options: dict[str, Any],
    import_code: bool = True,
) -> Any:
    """Return the settings with the flags applied.

    Args:
        defaults: the settings without flags.
        flags: command-line arguments.
        program: name of the program in `--help`.
        run_options: options of the run, for suggestions in error messages: name -> value.
        import_code: import the code that flags name; if False, such flags are errors.

    Raises:
        ConfigError: a flag is unknown (the message suggests the nearest one), or a value has the
            wrong type or range.
    """
    if not flags:
        return defaults
    known = flag_names(type(defaults))
    accepted = {*known, *(f"no-{name}" for name in known)}
    for flag in flags:
        if flag.startswith("--"):
            name = flag[2:].split("=")[0].replace("_", "-").rstrip("-")
            if name == "plan":
                raise ConfigError("--plan: name the plan after the command, `flowrl train PLAN`")
            head, dot, last = name.rpartition(".")
            positive = f"{head}{dot}{last.removeprefix('no-')}"
            if name.startswith("policies."):
                _check_policy(name, defaults)
                continue  # tyro parses their settings
            if name not in accepted and positive not in accepted:
                if head in known and "." not in head:
                    raise ConfigError(
                        f"unknown flag --{name}: --{head} takes a JSON object, such as "
                        f"""--{head} '{{"{last.replace("-", "_")}": …}}'"""
                    )
                options = [*known, *(option.replace("_", "-") for option in run_options)]
                hint = setting_hint(name.replace("-", "_"), type(defaults).model_fields)
                hint = _as_flags(nearest(name, options) if hint is None else hint, "--")
                raise ConfigError(f"unknown flag --{name}.{hint}")
    flags = [part for flag in flags for part in _flatten_schedule(flag)]
    records = _records(defaults)
    switches = [flag_names(record, prefix, True) for prefix, record in records.items()]
    flags = _normalize_switches(flags, {name for names in switches for name in names})
    import tyro

    # accept flags without the final underscore of fields such as lambda_
    for prefix, record in records.items():
        for name in record.model_fields:
            if name.endswith("_"):
                short, full = f"--{prefix}{name.rstrip('_')}", f"--{prefix}{name}"
                flags = [
                    f"{full}{flag[len(short) :]}" if re.fullmatch(f"{short}(=.*)?", flag) else flag
                    for flag in flags
                ]
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), _registry(import_code):
            return tyro.cli(type(defaults), default=defaults, args=flags, prog=program)
    except SystemExit:
        text = re.sub(r"[│╭╮╰╯─]", " ", stderr.getvalue())
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        message = " ".join(line for line in lines if not line.startswith("For full helptext"))
        message = re.sub(r"^Value error Error parsing (\w+: |(?=--))|^Invalid choice ", "", message)
        raise ConfigError(message.split(" Argument helptext:")[0]) from None
