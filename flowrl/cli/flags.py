"""Command-line flags from a settings record, by tyro: `--lr 3e-4 --model.fcnet-hiddens 64 64`."""

from __future__ import annotations

import collections.abc
import contextlib
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from flowrl.cli.arguments import commands_with, with_flags
from flowrl.cli.flag_values import record_or_none, value_rules
from flowrl.errors import ConfigError, with_message
from flowrl.policies.policy_spec import PolicySpec, specs_of
from flowrl.setting_aliases import nearest_setting, setting_hint
from flowrl.setting_values import nearest, whole_number
from flowrl.settings import Settings
from flowrl.trainer.registry import algorithms_with

_NUMBERS = re.compile(r"\[ *\d+( *, *\d+)+ *\]|\d+(,\d+)+")  # [64, 64] or 64,64


def flag_names(record: type[Settings]) -> list[str]:
    """Return the flags of a record, without `--`."""
    return list(_fields_of(record))


def _flatten_list(value: str, annotation: Any) -> list[str]:
    """Return the numbers in `[64, 64]`, `64,64` or `[[0, 1e-3], [100, 0]]`, the form that tyro
    accepts, and other values as they are.

    Args:
        value: a value of a flag.
        annotation: type of the setting.
    """
    lists = [part for part in _parts(annotation) if get_origin(part) is list]
    if _NUMBERS.fullmatch(value) and lists:
        numbers = value.strip("[]").replace(",", " ").split()
        # a schedule has at least two points; 0,001 is a number with a decimal comma
        is_schedule = len(numbers) >= 4 and len(numbers) % 2 == 0
        if is_schedule or any(_leaves(part) == {int} for part in lists):
            return numbers
    if value.startswith("[[") and lists:
        try:
            return [str(number) for point in json.loads(value) for number in point]
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{value}: not a schedule [[env step, value], …]: {error}") from error
    return [value]


def _unknown_flag(
    name: str, words: list[str], defaults: Settings, run_options: dict[str, Any]
) -> str:
    """Return the message for a flag that is no setting.

    Args:
        name: the flag, without `--`.
        words: the flag, its value and further arguments.
        defaults: the settings.
        run_options: see `settings_from_flags`.
    """
    if name in ("plan", "algo"):
        return f"--{name}: name the plan after the command, `flowrl train PLAN`"
    if name.startswith("policies."):
        return _unknown_policy_flag(name, words, defaults)
    record = type(defaults)
    known = flag_names(record)
    head, _, last = name.rpartition(".")
    if head in known and "." not in head:
        return (
            f"unknown flag --{name}: --{head} takes a JSON object, such as "
            f"""--{head} '{{"{last.replace("-", "_")}": …}}'"""
        )
    if group := _flags_of_group(record, name, "--", words):
        return group
    if elsewhere := commands_with(f"--{name}"):
        return f"{elsewhere}, not of flowrl train PLAN"
    setting = name.replace("-", "_")
    exact = setting_hint(setting, record.model_fields)
    hint = exact or algorithms_with(setting)
    if not hint and exact is None:
        # --tuned exists only as --no-tuned
        run_names = ["no-tuned" if n == "tuned" else n for n in run_options]
        names = [option.replace("-", "_") for option in [*known, *run_names]]
        hint = nearest_setting(setting, names, record.model_fields)
    return f"unknown flag --{name}.{_as_flags(hint, '--')}"


def _unknown_policy_flag(name: str, words: list[str], defaults: Settings) -> str:
    """Return the message for a flag `policies.x.config.y` of an unknown policy x or setting y; the
    arguments are those of `_unknown_flag`."""
    policy_id, _, rest = name.removeprefix("policies.").partition(".")
    specs = {i.replace("_", "-"): spec for i, spec in _specs_in(defaults).items()}
    if policy_id not in specs:
        return (
            f"--policies.{policy_id}: there is no such policy.{nearest(policy_id, list(specs))} "
            f"Policies with flags: {', '.join(specs) or 'none'}"
        )
    record = _record_of(specs[policy_id], defaults)
    head, setting = f"--policies.{policy_id}.config.", rest.removeprefix("config.")
    if setting == rest and _find(setting, _fields_of(record)):
        return f"unknown flag --{name}. Did you mean '{head}{setting}'?"
    if group := _flags_of_group(record, setting, head, words):
        return group
    hint = setting_hint(setting.rpartition(".")[2].replace("-", "_"), record.model_fields)
    hint = _as_flags(hint or nearest(setting, flag_names(record)), head)
    return f"unknown flag --{name}.{hint}"


def _flags_of_group(record: type[Settings], name: str, head: str, words: list[str]) -> str:
    """Return the message for a flag that names a group of settings, such as `--model`; "" for other
    names.

    Args:
        record: the settings.
        name: the name, with hyphens.
        head: what the group's flag starts with, such as `--`.
        words: the flag, its value and further arguments.
    """
    field = record.model_fields.get(name.replace("-", "_"))
    group = None if field is None else field.annotation
    if not (isinstance(group, type) and issubclass(group, Settings)):
        return ""
    _, equals, value = words[0].partition("=")
    try:
        given = json.loads(value if equals else "".join(words[1:2]))
    except ValueError:
        given = {}
    settings = [s for s in given if s in group.model_fields] if isinstance(given, dict) else []
    inner = [s.rstrip("_").replace("_", "-") for s in settings or list(group.model_fields)[:1]]
    return (
        f"{head}{name}: each of its settings has a flag of its own: "
        f"{', '.join(f'{head}{name}.{setting}' for setting in inner)}{'' if settings else ', …'}"
    )


def _specs_in(defaults: Settings) -> dict[str, PolicySpec]:
    """Return the policies of a plan by id; {} if it names none."""
    policies = defaults.get("policies")
    return {} if policies is None else specs_of(policies)


def _record_of(spec: PolicySpec, defaults: Settings) -> type[Settings]:
    """Return the settings of a policy: those of its `config` or, if that is a mapping or None, of
    its class."""
    if isinstance(spec.config, Settings):
        return type(spec.config)
    return getattr(spec.policy_class, "config_class", type(defaults))


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


def settings_from_flags(
    defaults: Settings,
    flags: list[str],
    run_options: dict[str, Any],
) -> Any:
    """Return the settings with the flags applied.

    Args:
        defaults: the settings without flags.
        flags: command-line arguments.
        run_options: options of the run, for suggestions in error messages: name -> value.

    Raises:
        ConfigError: a flag is unknown (the message suggests the nearest one), or a value has the
            wrong type or range.
    """
    changes: dict[str, Any] = {}
    for flag in _given(flags, defaults, run_options):
        record = changes
        for name in flag.path[:-1]:
            record = record.setdefault(name, {})
        record[flag.path[-1]] = flag.value()
    try:
        return defaults.updated(**changes)
    except ConfigError as error:
        raise with_message(error, with_flags(str(error), flags, defaults.keys())) from None


class _Field(NamedTuple):
    """A setting: the names of the records that it is in, followed by its own, and its type."""

    path: tuple[str, ...]
    annotation: Any


def _fields(defaults: Settings) -> dict[str, _Field]:
    """Return flag -> setting, for the settings of a plan and of its policies."""
    fields = _fields_of(type(defaults))
    for policy_id, spec in _specs_in(defaults).items():
        prefix = f"policies.{policy_id.replace('_', '-')}.config."
        path = "policies", policy_id, "config"
        fields |= _fields_of(_record_of(spec, defaults), prefix, path)
    return fields


def _fields_of(
    record: type[Settings], prefix: str = "", path: tuple[str, ...] = ()
) -> dict[str, _Field]:
    """Return flag -> setting, for the settings of a record and of the records in it.

    Args:
        record: the settings.
        prefix: what the flags start with, such as `model.`.
        path: names of the records that the record is in.
    """
    fields: dict[str, _Field] = {}
    for name, field in record.model_fields.items():
        flag, inner = f"{prefix}{name.rstrip('_').replace('_', '-')}", field.annotation
        if isinstance(inner, type) and issubclass(inner, Settings):
            fields |= _fields_of(inner, f"{flag}.", (*path, name))
        else:
            fields[flag] = _Field((*path, name), inner)
    return fields


def _find(name: str, fields: dict[str, _Field]) -> tuple[_Field, bool] | None:
    """Return the setting of a flag, and whether the flag turns the setting off, as `--no-x` and
    `--model.no-x` do; None if there is no such setting."""
    if name in fields:
        return fields[name], False
    head, dot, last = name.rpartition(".")
    for switch in (name.removeprefix("no-"), f"{head}{dot}{last.removeprefix('no-')}"):
        if switch in fields and fields[switch].annotation is bool:
            return fields[switch], True
    return None


class _Flag:
    """A flag of a setting with its values.

    Args:
        name: without `--`.
        field: the setting.
        is_negated: whether the flag is `--no-x` of a setting `x`.
    """

    def __init__(self, name: str, field: _Field, is_negated: bool):
        self._name, self._is_negated = name, is_negated
        self.path, self._annotation = field
        self._leaves = _leaves(self._annotation)
        self.words: list[str] = []

    def value(self) -> Any:
        """Return the value that the words after the flag give.

        Raises:
            ConfigError: they do not fit the type of the setting.
        """
        are_bools = {word.lower() for word in self.words} <= {"true", "false"}
        if self._annotation is bool or (bool in self._leaves and are_bools):
            return self._switch()
        words = [part for word in self.words for part in _flatten_list(word, self._annotation)]
        needs_value = get_origin(self._annotation) is not list
        # Python would convert the digits of all scripts
        has_other_digits = {int, float} & self._leaves and not all(map(str.isascii, words))
        if self._annotation is Any or has_other_digits or (needs_value and not words):
            raise ConfigError(self._problem(words))
        args = [_as_int(word) if int in self._leaves else word for word in words]
        import tyro

        def parameter(value: Any) -> Any:
            return value

        parameter.__annotations__["value"] = self._annotation
        try:
            with value_rules() as problems, contextlib.redirect_stderr(io.StringIO()):
                return tyro.cli(parameter, args=["--value", *args])
        except SystemExit:
            raise ConfigError(self._problem(words, problems)) from None

    def _switch(self) -> bool:
        given = [word.lower() for word in self.words]
        is_one = given in ([], ["true"], ["false"])
        if not is_one or (given and self._is_negated):
            raise ConfigError(self._problem(self.words))
        return given == ["true"] or not (given or self._is_negated)

    def _problem(self, words: list[str], found: Sequence[str] = ()) -> str:
        """Return the message of words that do not fit the type of the setting.

        Args:
            words: after the flag.
            found: problems of JSON objects, code or spaces among the words.
        """
        if found and not {int, float} & self._leaves:
            return f"--{self._name}: {found[-1]}"
        given = " ".join(map(repr, words)) or "no value"
        if self._annotation is Any:
            setting = self._name.replace("-", "_")
            return (
                f"""--{self._name}: pass this setting as --config '{{"{setting}": …}}', or set """
                f"it in a plan file; got {given}"
            )
        choices = [part for part in self._leaves if isinstance(part, str)]
        hint = nearest(words[0], choices) if words else ""
        text = f"--{self._name}: expected {_expected(self._annotation)}, got {given}"
        return f"{text}.{hint}" if hint else text


def _given(flags: list[str], defaults: Settings, run_options: dict[str, Any]) -> list[_Flag]:
    """Return the flags in arguments, each with the words after it; see `settings_from_flags`.

    Raises:
        ConfigError: the arguments do not start with a flag, or a flag is unknown.
    """
    fields = _fields(defaults)
    given: list[_Flag] = []
    for index, word in enumerate(flags):
        if not word.startswith("--"):
            if not given:
                hint = "pass settings as --name VALUE"
                if re.fullmatch(r".+-v\d+", word):
                    hint = f"did you mean --env {word}?"
                raise ConfigError(f"unexpected argument {word!r}: {hint}")
            given[-1].words.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-").rstrip("-")
        found = None if name in ("plan", "algo") else _find(name, fields)
        if found is None:
            raise ConfigError(_unknown_flag(name, flags[index:], defaults, run_options))
        given.append(_Flag(name, *found))
        given[-1].words += [value] if equals else []
    return given


def _leaves(annotation: Any) -> set[Any]:
    """Return the plain types in an annotation, and the values of its Literals."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _leaves(get_args(annotation)[0])
    if get_origin(annotation) in (dict, Callable, collections.abc.Callable):
        return {get_origin(annotation)}
    parts = get_args(annotation)
    return set().union(*map(_leaves, parts)) if parts else {annotation}


def _as_int(text: str) -> str:
    """Return a whole number such as 1e5 in digits, other text as it is."""
    number = whole_number(text)
    return text if number is None else str(number)


def _expected(annotation: Any) -> str:
    """Describe the values of a setting."""
    leaves = _leaves(annotation)
    choices = sorted(part for part in leaves if isinstance(part, str))
    if choices:
        return f"one of {', '.join(choices)}"
    if bool in leaves:
        return "true or false"
    names = {float: "number", int: "whole number", str: "text"}
    kind = next((kind for kind in names if kind in leaves), None)
    if kind is None:
        return "a JSON object" if dict in leaves or record_or_none(annotation) else "a value"
    if kind is float and tuple in {get_origin(part) for part in _parts(annotation)}:
        return "a number or a schedule [[env step, value], …]"
    if kind is str:
        return "text"
    if get_origin(annotation) is list:
        return f"{names[kind]}s, separated by spaces"
    return f"a {names[kind]}"


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and all types in it."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)
