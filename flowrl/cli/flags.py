"""Command-line flags from a settings record, by tyro: `--lr 3e-4 --model.fcnet-hiddens 64 64`."""

from __future__ import annotations

import contextlib
import io
import json
import re
from argparse import ArgumentTypeError
from typing import Any, get_args, get_origin

from gymnasium import spaces

from flowrl.cli.arguments import mapping
from flowrl.settings import ConfigError, Settings, nearest


def flag_names(record: type[Settings], prefix: str = "", switches: bool = False) -> list[str]:
    """Every flag of a record; or the switches alone, which have no value: `--x` or `--no-x`."""
    names = []
    for name, field in record.model_fields.items():
        flag = f"{prefix}{name.rstrip('_').replace('_', '-')}"
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Settings):
            names += flag_names(inner, f"{flag}.", switches)
        elif inner is bool or not switches:
            names.append(flag)
    return names


def _plain_switches(flags: list[str], switches: set[str]) -> list[str]:
    """`--x true` and `--x=false` as the `--x` and `--no-x` that tyro takes."""
    made: list[str] = []
    for flag in flags:
        name, given, value = flag.partition("=")
        told = value if given else flag
        last = name if given else (made[-1] if made else "")
        if told.lower() in ("true", "false") and last[2:].replace("_", "-") in switches:
            if not given:
                made.pop()
            head, dot, end = last[2:].rpartition(".")
            made.append(last if told.lower() == "true" else f"--{head}{dot}no-{end}")
        else:
            made.append(flag)
    return made


def _flat_schedule(flag: str) -> list[str]:
    """`[[0, 1e-3], [100, 0]]` as the four numbers that a schedule's flag takes."""
    if not flag.startswith("[["):
        return [flag]
    try:
        return [str(number) for point in json.loads(flag) for number in point]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{flag}: not a schedule [[env step, value], …]: {error}") from error


def _check_policy(name: str, defaults: Any) -> None:
    """Refuse `policies.x.config.y` where there is no policy x, or it has no setting y."""
    policy_id, _, rest = name.removeprefix("policies.").partition(".")
    given = getattr(defaults, "policies", None) or {}
    known = given if isinstance(given, dict) else {}
    specs = {known_id.replace("_", "-"): spec for known_id, spec in known.items()}
    if policy_id not in specs:
        raise ConfigError(
            f"--policies.{policy_id}: there is no such policy.{nearest(policy_id, list(specs))} "
            f"There are {', '.join(specs) or 'none to be set by flags'}"
        )
    config = getattr(specs[policy_id], "config", None)
    if not isinstance(config, Settings):
        return
    head = f"--policies.{policy_id}.config"
    inner, dot, last = rest.removeprefix("config.").rpartition(".")
    own = flag_names(type(config))
    if {f"{inner}{dot}{last}", f"{inner}{dot}{last.removeprefix('no-')}"}.isdisjoint(own):
        hint = nearest(f"{inner}{dot}{last}", own).replace("mean '", f"mean '{head}.")
        raise ConfigError(f"unknown flag --{name}.{hint}")
    if not rest.startswith("config."):
        raise ConfigError(f"unknown flag --{name}. Did you mean '{head}.{rest}'?")


def _records(defaults: Settings) -> dict[str, type[Settings]]:
    """The settings of a plan and of its policies, by what their flags begin with."""
    records = {"": type(defaults)}
    policies = getattr(defaults, "policies", None)
    for policy_id, spec in policies.items() if isinstance(policies, dict) else ():
        if isinstance(config := getattr(spec, "config", None), Settings):
            records[f"policies.{policy_id.replace('_', '-')}.config."] = type(config)
    return records


def _with_mappings() -> Any:
    """What lets tyro take a mapping of any content as one JSON object."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def json_object(type_info: Any) -> Any:
        record = _record_or_none(type_info.type)
        if get_origin(type_info.type) is not dict and record is None:
            return None
        made = (lambda values: values) if record is None else (lambda values: record(**values))
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="JSON",
            instance_from_str=lambda given: (
                None if record is not None and given[0] == "None" else made(_json_object(given[0]))
            ),
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
            instance_from_str=_no_space,
            is_instance=lambda value: value is None or isinstance(value, spaces.Space),
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def _record_or_none(annotation: Any) -> Any:
    """The record that a setting holds, which may be None."""
    records = [p for p in get_args(annotation) if isinstance(p, type) and issubclass(p, Settings)]
    return records[0] if len(records) == 1 and type(None) in get_args(annotation) else None


def _as_json(value: Any) -> str:
    if isinstance(value, Settings):
        value = value.to_dict()
    return "None" if value is None else json.dumps(value, default=repr)


def _no_space(given: list[str]) -> Any:
    raise ValueError(f"a space cannot be given by a flag ({given[0]}): set it in the plan's config")


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
                _check_policy(name, defaults)
                continue  # tyro knows their settings
            if name not in accepted and plain not in accepted:
                if head in known and "." not in head:
                    raise ConfigError(
                        f"unknown flag --{name}: --{head} takes a JSON object, such as "
                        f"""--{head} '{{"{last.replace("-", "_")}": …}}'"""
                    )
                options = [*known, *(option.replace("_", "-") for option in run_options)]
                hint = nearest(name, options).replace("'", "").replace("mean ", "mean --")
                raise ConfigError(f"unknown flag --{name}.{hint}")
    flags = [part for flag in flags for part in _flat_schedule(flag)]
    records = _records(defaults)
    switches = [flag_names(record, prefix, True) for prefix, record in records.items()]
    flags = _plain_switches(flags, {name for names in switches for name in names})
    import tyro

    # a field such as lambda_ has its underscore from Python: the flag goes with or without it
    for prefix, record in records.items():
        for name in record.model_fields:
            if name.endswith("_"):
                bare, whole = f"--{prefix}{name.rstrip('_')}", f"--{prefix}{name}"
                flags = [
                    f"{whole}{flag[len(bare) :]}" if re.fullmatch(f"{bare}(=.*)?", flag) else flag
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
