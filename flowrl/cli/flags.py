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
from flowrl.errors import ConfigError
from flowrl.setting_aliases import nearest_setting, setting_hint
from flowrl.setting_values import nearest, whole_number
from flowrl.settings import Settings
from flowrl.trainer.registry import algorithms_with

_NUMBERS = re.compile(r"\[ *\d+( *, *\d+)+ *\]|\d+(,\d+)+")  # [64, 64] or 64,64


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


def _check_names(flags: list[str], defaults: Settings, run_options: dict[str, Any]) -> None:
    """Raise ConfigError for a flag that is no setting; see `settings_from_flags`."""
    known = flag_names(type(defaults))
    accepted = set(known)
    for switch in flag_names(type(defaults), switches=True):
        head, dot, last = switch.rpartition(".")
        accepted |= {f"no-{switch}", f"{head}{dot}no-{last}"}
    for index, flag in enumerate(flags):
        if not flag.startswith("--"):
            continue
        name = flag[2:].split("=")[0].replace("_", "-").rstrip("-")
        if name in ("plan", "algo"):
            raise ConfigError(f"--{name}: name the plan after the command, `flowrl train PLAN`")
        head, _, last = name.rpartition(".")
        if name.startswith("policies."):
            _check_policy(name, defaults, flags[index:])
            continue  # tyro parses their settings
        if name not in accepted:
            if head in known and "." not in head:
                raise ConfigError(
                    f"unknown flag --{name}: --{head} takes a JSON object, such as "
                    f"""--{head} '{{"{last.replace("-", "_")}": …}}'"""
                )
            _check_group(type(defaults), name, "--", flags[index:])
            if elsewhere := commands_with(f"--{name}"):
                raise ConfigError(f"{elsewhere}, not of flowrl train PLAN")
            # --tuned exists only as --no-tuned
            run_names = ["no-tuned" if n == "tuned" else n.replace("_", "-") for n in run_options]
            options = [*known, *run_names]
            settings, setting = type(defaults).model_fields, name.replace("-", "_")
            exact = setting_hint(setting, settings)
            hint = exact or algorithms_with(setting)
            if not hint and exact is None:
                names = [option.replace("-", "_") for option in options]
                hint = nearest_setting(setting, names, settings)
            raise ConfigError(f"unknown flag --{name}.{_as_flags(hint, '--')}")


def _check_group(record: type[Settings], name: str, head: str, words: list[str]) -> None:
    """Raise ConfigError if a name is a group of settings, such as `model`, which have flags of
    their own.

    Args:
        record: the settings.
        name: the name, with hyphens.
        head: what the group's flag starts with, such as `--`.
        words: the flag, its value and further arguments.
    """
    field = record.model_fields.get(name.replace("-", "_"))
    group = None if field is None else field.annotation
    if not (isinstance(group, type) and issubclass(group, Settings)):
        return
    _, equals, value = words[0].partition("=")
    try:
        given = json.loads(value if equals else "".join(words[1:2]))
    except ValueError:
        given = {}
    settings = [s for s in given if s in group.model_fields] if isinstance(given, dict) else []
    inner = [s.rstrip("_").replace("_", "-") for s in settings or list(group.model_fields)[:1]]
    raise ConfigError(
        f"{head}{name}: each of its settings has a flag of its own: "
        f"{', '.join(f'{head}{name}.{setting}' for setting in inner)}{'' if settings else ', …'}"
    )


def _check_policy(name: str, defaults: Any, words: list[str]) -> None:
    """Raise ConfigError for a flag `policies.x.config.y` of an unknown policy x or setting y.

    Args:
        name: the flag, without `--`.
        defaults: the settings.
        words: the flag, its value and further arguments.
    """
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
        _check_group(type(config), f"{inner}{dot}{last}", f"{head}.", words)
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


def settings_from_flags(
    defaults: Settings,
    flags: list[str],
    program: str,
    run_options: dict[str, Any],
) -> Any:
    """Return the settings with the flags applied.

    Args:
        defaults: the settings without flags.
        flags: command-line arguments.
        program: name of the program in `--help`.
        run_options: options of the run, for suggestions in error messages: name -> value.

    Raises:
        ConfigError: a flag is unknown (the message suggests the nearest one), or a value has the
            wrong type or range.
    """
    if not flags:
        return defaults
    _check_names(flags, defaults, run_options)
    records = _records(defaults)
    switches = [flag_names(record, prefix, True) for prefix, record in records.items()]
    flags = _normalize_switches(flags, {name for names in switches for name in names})
    groups = _groups(flags, _annotations(records))
    words = [word for group in groups for word in group.words]
    try:
        with value_rules() as problems:
            settings = _parse(defaults, words, program)
            _unset_others(settings, defaults, [group.flag for group in groups])
            return settings
    except _ParseError as error:
        if error.of_record is not None:
            message = with_flags(error.of_record, words, defaults.keys())
            raise ConfigError(message) from None
    for group in groups:  # find the flag that cannot be parsed
        try:
            with value_rules() as problems:
                _parse(defaults, group.words, program)
        except _ParseError as error:
            if error.of_record is None:
                raise ConfigError(group.problem(problems)) from None
    raise ConfigError(f"cannot parse the flags {' '.join(flags)}")


def _unset_others(settings: Settings, defaults: Settings, flags: Sequence[str]) -> None:
    """Let only the settings of the defaults and of the flags count as set explicitly: tyro sets
    all settings of a record.

    Args:
        settings: the settings with the flags applied, which are changed.
        defaults: the settings without flags, a record of the same class.
        flags: names of the flags of this record, without `--`, such as `model.fcnet-hiddens`.
    """
    given = set()
    for name, value in settings.items():
        flag = name.rstrip("_").replace("_", "-")
        inner = [other.removeprefix(f"{flag}.") for other in flags if other.startswith(f"{flag}.")]
        if inner or flag in flags or f"no-{flag}" in flags:
            given.add(name)
        before = defaults[name]
        if name == "policies" and isinstance(value, dict) and isinstance(before, dict):
            for policy_id in value.keys() & before.keys():
                prefix = f"{policy_id.replace('_', '-')}.config."
                of_policy = [f.removeprefix(prefix) for f in inner if f.startswith(prefix)]
                one, other = (getattr(spec[policy_id], "config", None) for spec in (value, before))
                if isinstance(one, Settings) and isinstance(other, Settings):
                    _unset_others(one, other, of_policy)
        elif isinstance(value, Settings) and type(value) is type(before):
            _unset_others(value, before, inner)
    settings.model_fields_set.intersection_update(defaults.model_fields_set | given)


class _ParseError(Exception):
    """tyro cannot parse the flags.

    Args:
        text: what tyro printed.

    Attributes:
        of_record: message of the settings record if it rejected the values, otherwise None.
    """

    def __init__(self, text: str):
        super().__init__(text)
        text = " ".join(re.sub(r"[│╭╮╰╯─]|-{5,}", " ", text).split())  # without tyro's box
        found = re.match(r"Value error Error parsing (?!--)\S+: (.*?)( For full help.*)?$", text)
        self.of_record = None if found is None else found[1]


def _parse(defaults: Settings, flags: list[str], program: str) -> Any:
    """Return the settings with flags applied.

    Raises:
        _ParseError: a flag is invalid.
    """
    import tyro

    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return tyro.cli(type(defaults), default=defaults, args=flags, prog=program)
    except SystemExit:
        raise _ParseError(stderr.getvalue()) from None


class _Group(NamedTuple):
    """A flag with its values.

    Attributes:
        flag: its name without `--`.
        values: the words after it.
        annotation: type of the setting; None if it is unknown.
        words: the flag and its values in the form that tyro accepts.
    """

    flag: str
    values: list[str]
    annotation: Any
    words: list[str]

    def problem(self, found: Sequence[str] = ()) -> str:
        """Return the message of a flag whose values do not fit its type.

        Args:
            found: problems of JSON objects, code or spaces among the values.
        """
        leaves = _leaves(self.annotation)
        if found and not {int, float} & leaves:
            return f"--{self.flag}: {found[-1]}"
        given = " ".join(map(repr, self.values)) or "no value"
        if self.annotation is Any:
            setting = self.flag.replace("-", "_")
            return (
                f"""--{self.flag}: pass this setting as --config '{{"{setting}": …}}', or set it """
                f"in a plan file; got {given}"
            )
        choices = [part for part in leaves if isinstance(part, str)]
        hint = nearest(self.values[0], choices) if self.values else ""
        text = f"--{self.flag}: expected {_expected(self.annotation)}, got {given}"
        return f"{text}.{hint}" if hint else text


def _groups(flags: list[str], annotations: dict[str, Any]) -> list[_Group]:
    """Split arguments at the flags.

    Raises:
        ConfigError: a value is not after a flag, or a flag without values needs one.
    """
    groups: list[_Group] = []
    for word in flags:
        if not word.startswith("--"):
            if not groups:
                hint = "pass settings as --name VALUE"
                if re.fullmatch(r".+-v\d+", word):
                    hint = f"did you mean --env {word}?"
                raise ConfigError(f"unexpected argument {word!r}: {hint}")
            groups[-1].values.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        flag = name.replace("_", "-").rstrip("-")
        head, dot, last = flag.rpartition(".")
        annotation = annotations.get(
            flag, annotations.get(f"{head}{dot}{last.removeprefix('no-')}")
        )
        # tyro knows lambda_ as --lambda_
        full = f"--{flag}{'_' * (f'{flag}_' in annotations)}"
        groups.append(_Group(flag, [value] if equals else [], annotation, [full]))
    for group in groups:
        group.values[:] = [
            part for v in group.values for part in _flatten_list(v, group.annotation)
        ]
        leaves = _leaves(group.annotation)
        needs_value = bool not in leaves and get_origin(group.annotation) is not list
        if (not group.values and needs_value) or (group.values and bool in leaves):
            raise ConfigError(group.problem())
        if {int, float} & leaves and not all(map(str.isascii, group.values)):
            raise ConfigError(group.problem())  # digits of other scripts
        group.words.extend(_as_int(v) if int in leaves else v for v in group.values)
    return groups


def _annotations(records: dict[str, type[Settings]]) -> dict[str, Any]:
    """Return flag -> type of every setting; also `name_` of a setting that ends so."""
    found: dict[str, Any] = {}
    for prefix, record in records.items():
        for name, field in record.model_fields.items():
            flag, inner = f"{prefix}{name.rstrip('_').replace('_', '-')}", field.annotation
            if isinstance(inner, type) and issubclass(inner, Settings):
                found |= _annotations({f"{flag}.": inner})
            found[flag] = inner
            if name.endswith("_"):
                found[f"{flag}_"] = inner
    return found


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
