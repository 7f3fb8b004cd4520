"""Settings: typed records of settings that can also be read as mappings."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Never, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from flowrl.errors import ConfigError
from flowrl.setting_aliases import canonical_names, nearest_setting, setting_hint
from flowrl.setting_values import equal, is_search, type_text

R = TypeVar("R", bound="Settings")
Needs = Mapping[str, tuple[str, Any]]
"""Settings that are ignored while another setting has a value: name -> (other setting, value)."""


def import_object(path: str) -> Any:
    """Return the object at "module:name".

    Raises:
        ImportError, AttributeError: the module, or the name in it, does not exist.
    """
    module, _, name = path.partition(":")
    found = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _is_type(part: Any) -> bool:
    """Return whether an entry of pydantic's error location is a branch of a union, not a field."""
    names = ("float", "int", "str", "constrained-int", "constrained-float")
    return isinstance(part, str) and (part in names or "[" in part)


def _explain(cls: type[Settings], error: ValidationError) -> str:
    lines = []
    # (setting, value) -> types that the members of the setting's union expect
    alternatives: dict[tuple[str, str], list[str]] = {}
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"] if not _is_type(part))
        if problem["type"] == "extra_forbidden":
            record = _record(cls, problem["loc"][:-1])
            lines.append(f"unknown setting {path!r}.{record.hint(str(problem['loc'][-1]))}")
        elif problem["type"] == "value_error" and not path:
            lines.append(str(problem["ctx"]["error"]))
        elif problem["type"] == "value_error" and type(problem["ctx"]["error"]) is ConfigError:
            lines += [
                within_record(path, line) for line in str(problem["ctx"]["error"]).split("; ")
            ]
        else:
            message = problem["msg"].removeprefix("Value error, ")
            message = message[:1].lower() + message[1:]
            if problem["type"].startswith("greater_than") and _may_be_none(cls, problem["loc"]):
                message += ", or None"
            got = f" (got {problem['input']!r})"
            branches = alternatives.setdefault((path, got), [])
            if branches:
                lines.remove(f"{path}: {', or '.join(branches)}{got}")
                message = message.removeprefix("input should be ")
            branches.append(message)
            lines.append(f"{path}: {', or '.join(branches)}{got}")
    return "; ".join(dict.fromkeys(lines))


def _may_be_none(cls: type[Settings], path: tuple[Any, ...]) -> bool:
    """Return whether the setting of cls at a path of pydantic may be None."""
    field = cls.model_fields.get(path[0]) if path and isinstance(path[0], str) else None
    return field is not None and type(None) in get_args(field.annotation)


def within_record(path: str, message: str) -> str:
    """Return the message of a nested record's error, with the path of that record."""
    if message.startswith("unknown setting '"):
        return message.replace("setting '", f"setting '{path}.", 1)
    starts_with_field = re.match(r"[\w.]+: ", message)
    return f"{path}.{message}" if starts_with_field else f"{path}: {message}"


def _record(cls: type[Settings], path: tuple[Any, ...]) -> type[Settings]:
    """Return the class of the nested record at a path."""
    for part in path:
        inner = cls.model_fields[part].annotation if part in cls.model_fields else None
        if isinstance(inner, type) and issubclass(inner, Settings):
            cls = inner
    return cls


class SettingInfo(NamedTuple):
    """Description of one setting.

    Attributes:
        name: name of the field.
        group: name of the fluent method that sets it.
        type: its type, as text.
        default: default value.
        help: meaning of the setting.
        in_evaluation: whether `evaluation_config` may override it.
    """

    name: str
    group: str
    type: str
    default: Any
    help: str
    in_evaluation: bool

    def inner(self) -> list[SettingInfo]:
        """Return the settings of a record, such as `model`, with the record's values as defaults.

        [] for a setting that is no record.
        """
        if not isinstance(self.default, Settings):
            return []
        infos = self.default.describe()
        return [info._replace(default=getattr(self.default, info.name)) for info in infos]


def setting(
    default: Any, *, group: str = "training", in_evaluation: bool = False, **constraints: Any
) -> Any:
    """Declare a setting: a field of a Settings record; its docstring is its help.

    Everything else follows from the declaration: the fluent method that sets it, its flag and help
    on the command line, whether evaluations may override it, and its row in the reference.

    Args:
        default: default value.
        group: name of the fluent method that sets it.
        in_evaluation: whether `evaluation_config` may override it.
        constraints: arguments of pydantic's Field, such as `ge=0`.
    """
    extra: Any = {"group": group, "in_evaluation": in_evaluation}
    return Field(default, json_schema_extra=extra, **constraints)


_without_checks: ContextVar[bool] = ContextVar("without_checks", default=False)


@contextmanager
def unchecked_combinations(when: bool = True) -> Iterator[None]:
    """Do not check in the block whether settings fit together; see `check_of_settings`.

    Args:
        when: False changes nothing.
    """
    token = _without_checks.set(_without_checks.get() or when)
    try:
        yield
    finally:
        _without_checks.reset(token)


def adjusted(settings: R, **changes: Any) -> R:
    """Return a copy of valid settings with changes that no user made, such as those for an
    evaluation.

    Neither the copy nor copies of it are checked for settings that do not fit together.
    """
    with unchecked_combinations():
        copied = settings.updated(**changes)
    copied._is_adjusted = True
    return copied


def check_of_settings(method: Callable[[R], R]) -> Any:
    """Decorate a method that checks whether the settings of a record fit together.

    It returns the record or raises ValueError. It is called after each setting has been checked
    on its own, unless the record has a search space of Ray Tune: the settings of each trial are
    checked.
    """

    @wraps(method)
    def check(self: R) -> R:
        return self if _without_checks.get() else method(self)

    return model_validator(mode="after")(check)


_PLAIN = {bool, int, float, str, type(None)}  # most settings; none is a search space


def contains_search(value: Any) -> bool:
    """Return whether settings are or contain a search space of Ray Tune, in records, dicts, lists
    and tuples."""
    remaining, seen = [value], set()
    while remaining:
        part = remaining.pop()
        if type(part) in _PLAIN:
            continue
        if is_search(part):
            return True
        if isinstance(part, (Settings, dict, list, tuple)) and id(part) not in seen:
            seen.add(id(part))
            part = vars(part) if isinstance(part, Settings) else part
            remaining.extend(part.values() if isinstance(part, dict) else part)
    return False


class Settings(BaseModel):
    """A typed record of settings that can also be read as a mapping.

    Raises:
        ConfigError: a name is unknown (the message suggests the nearest one), or a value is invalid
            (the message names the field and what is allowed).
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        validate_default=False,
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
        defer_build=True,  # of its validator until the first use
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the help and group of a field that a subclass redeclares with a new default."""
        for name, field in cls.model_fields.items():
            for base in cls.__mro__[1:]:
                inherited = base.model_fields.get(name) if issubclass(base, Settings) else None
                if inherited is None:
                    continue
                for attribute in ("description", "json_schema_extra"):
                    value = getattr(inherited, attribute)
                    if getattr(field, attribute) is None and value is not None:
                        setattr(field, attribute, value)

    @classmethod
    def of(cls, config: Any) -> Any:
        """Return the settings of this class in a config, which may also have others.

        Args:
            config: a record of this class, which is returned as it is; another record or a mapping,
                in which other libraries' names of settings are accepted.
        """
        if isinstance(config, cls):
            return config
        values = canonical_names(dict(config.items()))
        return cls(**{name: value for name, value in values.items() if name in cls.model_fields})

    @classmethod
    def hint(cls, name: str, known: list[str] | None = None) -> str:
        """Return a sentence with a space before it about a name that is not a setting: what to
        use instead, or ""

        Args:
            name: the unknown name.
            known: names that are similar to it may be suggested; None for all settings.
        """
        hint = setting_hint(name, cls.model_fields)
        if hint or (elsewhere := cls._hint_elsewhere(name)):
            return hint or elsewhere
        if hint is not None:  # names of other libraries resemble those of flowrl only by chance
            return ""
        known = list(cls.model_fields) if known is None else known
        return nearest_setting(name, known, cls.model_fields)

    @classmethod
    def _hint_elsewhere(cls, name: str) -> str:
        """Return a sentence about a name that is a setting of another record, or ""."""
        for outer, field in cls.model_fields.items():
            if isinstance(field.default, Settings) and name in field.default:
                return f' It is a setting of {outer}: {outer}={{"{name}": …}}.'
        return ""

    @classmethod
    def describe(cls) -> list[SettingInfo]:
        """Return a description of each setting, in the order of declaration."""
        infos = []
        for name, field in cls.model_fields.items():
            extra: Any = field.json_schema_extra or {}
            infos.append(
                SettingInfo(
                    name,
                    extra.get("group", "training"),
                    type_text(field.annotation),
                    field.default,
                    " ".join((field.description or "").split()),
                    extra.get("in_evaluation", False),
                )
            )
        return infos

    @classmethod
    def reference(cls) -> str:
        """Return a Markdown table of the settings."""
        lines = ["| setting | group | type | default | meaning |", "|---|---|---|---|---|"]
        for info in cls.describe():
            cells = [
                f"`{info.name}`",
                info.group,
                f"`{info.type}`",
                f"`{info.default!r}`",
                info.help,
            ]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(lines)

    def __init__(self, /, *positional: Any, **values: Any):
        if positional:
            name = type(self).__name__
            raise TypeError(f"{name}(): settings are keywords: {name}(**settings)")
        if any(is_search(value) for value in values.values()):
            values = self.canonical(values)
        searched = {name: value for name, value in values.items() if is_search(value)}
        unknown = [name for name in searched if name not in type(self).model_fields]
        if searched and not unknown:  # validated after Tune has drawn values
            values = {name: value for name, value in values.items() if name not in searched}
        try:
            with unchecked_combinations(bool(searched) or contains_search(values)):
                super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error)) from None
        vars(self).update(searched)
        self.model_fields_set.update(searched)

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Yield the settings that differ from the defaults, which `repr` shows."""
        for name, field in type(self).model_fields.items():
            if not equal(value := getattr(self, name), field.default):
                yield name, value

    def __str__(self) -> str:
        return repr(self)

    def __dir__(self) -> list[str]:
        """Return the settings and methods, without the names that all pydantic models have."""
        classes = [cls for cls in type(self).__mro__ if cls is not BaseModel]
        own = {n for cls in classes for n in vars(cls) if not n.startswith("model_")}
        hidden = vars(BaseModel).keys() - own - type(self).model_fields.keys()
        return [name for name in super().__dir__() if name not in hidden]

    _frozen: bool = PrivateAttr(default=False)
    _is_adjusted: bool = PrivateAttr(default=False)  # by `adjusted`

    def frozen(self) -> Self:
        """Return a copy whose settings cannot be assigned; dicts and lists in it stay mutable."""
        copied = self.copy()
        copied._freeze()
        return copied

    def _freeze(self) -> None:
        self._frozen = True
        for value in vars(self).values():
            if isinstance(value, Settings):
                value._freeze()

    def __delattr__(self, name: str) -> None:
        raise ConfigError(f"{name}: a setting cannot be deleted, only changed")

    @classmethod
    def canonical(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return settings under their canonical names; a subclass may accept aliases."""
        return values

    def _require(self, holds: Any, condition: str, *names: str) -> None:
        """Raise ValueError if settings that need a condition were changed without it.

        Args:
            holds: whether the condition is true.
            condition: the condition, for the message.
            names: the settings, which have no effect without it.
        """
        for name in names if not holds else ():
            if not equal(getattr(self, name), type(self).model_fields[name].default):
                raise ValueError(f"{name} needs {condition}")

    def check_no_search(self) -> None:
        """Check that no setting is a search space, which only Ray Tune can draw values from.

        Raises:
            ConfigError: a setting is a search space.
        """
        for name, value in vars(self).items():
            if isinstance(value, Settings):
                value.check_no_search()
            elif contains_search(value):
                raise ConfigError(
                    f"{name}: is a search space of Ray Tune, or contains one: only Ray Tune draws "
                    "values from it. Pass this config to tune.Tuner as param_space"
                )

    def _check_not_frozen(self) -> None:
        if self._frozen:
            raise ConfigError(
                f"this {type(self).__name__} belongs to a built algorithm and cannot be changed: "
                "change a copy (config.copy()) and build another algorithm, or continue with "
                "from_checkpoint(path, config={…})"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):  # private attributes are not settings
            super().__setattr__(name, value)
            return
        self._check_not_frozen()
        canonical = self.canonical({name: value})
        if not canonical:
            return  # accepted without effect, such as framework="torch"
        if len(canonical) > 1:  # several settings that have one name in RLlib
            changed = self.updated(**canonical)  # checked together
            vars(self).update({key: changed[key] for key in canonical})
            self.model_fields_set.update(canonical)
            return
        ((canonical_name, value),) = canonical.items()
        if canonical_name not in type(self).model_fields:
            raise ConfigError(f"unknown setting {name!r}.{self.hint(name)}")
        name = canonical_name
        if is_search(value):
            vars(self)[name] = value
            self.model_fields_set.add(name)
            return
        if isinstance(value, dict) and _is_record(type(self), name):
            value = self.updated(**{name: value})[name]  # it changes only what it names
        before, chosen_before = dict(vars(self)), set(self.model_fields_set)
        try:
            with unchecked_combinations(contains_search(value) or contains_search(self)):
                super().__setattr__(name, value)
        except ValidationError as error:
            vars(self).update(before)  # checks of several settings run after the assignment
            self.model_fields_set.intersection_update(chosen_before)
            raise ConfigError(_explain(type(self), error)) from None

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and equal(vars(self), vars(other))

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, name: str) -> Any:
        if name not in type(self).model_fields:
            raise KeyError(f"no setting {name!r}.{self.hint(name)}")
        return getattr(self, name)

    if not TYPE_CHECKING:  # type checkers report the assignment themselves

        def __setitem__(self, name: str, value: Any) -> Never:
            raise TypeError(
                f"settings are assigned as attributes: .{name} = {value!r} instead of "
                f"[{name!r}] = …"
            )

    def __delitem__(self, name: str) -> None:
        delattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in type(self).model_fields

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        return iter(type(self).model_fields)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def keys(self) -> list[str]:
        return list(type(self).model_fields)

    def items(self) -> list[tuple[str, Any]]:
        return [(name, self[name]) for name in self.keys()]

    def updated(self, **changes: Any) -> Self:
        """Return a validated copy with changes; a dict updates a nested record key by key.

        Raises:
            ConfigError: a setting is unknown or invalid, or settings do not fit together.
        """
        changes = self.canonical(changes)
        values = dict(changes)
        for name, value in self.items():
            try:
                if name not in changes:
                    values[name] = _copied(value)
                elif isinstance(value, Settings) and isinstance(changes[name], dict):
                    values[name] = value.updated(**changes[name])
            except ConfigError as error:
                raise ConfigError(within_record(name, str(error))) from None
        with unchecked_combinations(self._is_adjusted):
            copied = type(self)(**values)
        copied._is_adjusted = self._is_adjusted
        copied.model_fields_set.clear()
        copied.model_fields_set.update(self.model_fields_set, changes)
        return copied

    def copy(self) -> Self:  # type: ignore[override]
        """Return a copy that can be changed."""
        return self.updated()

    def diff(self, other: Settings | None = None) -> dict[str, tuple[Any, Any]]:
        """Return name -> (other value, own value) of the settings that differ.

        Args:
            other: record to compare with; None for the defaults. Nested settings have names such
                as `model.fcnet_hiddens`.
        """
        base = type(self)() if other is None else other
        found: dict[str, tuple[Any, Any]] = {}
        for name, value in self.items():
            before = base.get(name)
            if isinstance(value, Settings) and isinstance(before, Settings):
                inner = value.diff(before)
                found |= {f"{name}.{key}": pair for key, pair in inner.items()}
            elif value is not before and not equal(value, before):
                found[name] = (before, value)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a dict; nested records become dicts."""
        return {k: v.to_dict() if isinstance(v, Settings) else v for k, v in self.items()}

    def explicit_settings(self) -> dict[str, Any]:
        """Return the settings that were set explicitly, also those whose value was changed in
        place: an entry of a dict, or a setting of a nested record."""
        explicit = {}
        for name, field in type(self).model_fields.items():
            value = self[name]
            is_changeable = isinstance(value, (Settings, dict, list))
            if name in self.model_fields_set or (is_changeable and not equal(value, field.default)):
                explicit[name] = value
        return explicit


def _is_record(cls: type[Settings], name: str) -> bool:
    """Return whether the values of a setting are records, or None."""
    annotation = cls.model_fields[name].annotation
    types = get_args(annotation) or (annotation,)
    return any(isinstance(one, type) and issubclass(one, Settings) for one in types)


def _copied(value: Any) -> Any:
    """Return a copy of a setting's value, so that two records share no mutable value."""
    if isinstance(value, Settings):
        return value.copy()
    if isinstance(value, (dict, list)) and not is_search(value):
        try:
            return copy.deepcopy(value)
        except Exception:  # it contains something that cannot be copied
            return type(value)(value)
    return value


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):  # also numpy's
        raise ValueError("input should be a number, not true or false")
    return value


def _folder(value: Any) -> Any:
    if isinstance(value, bytes) or value == "":
        raise ValueError("input should be the path of a folder")
    return str(value) if isinstance(value, os.PathLike) else value


Folder = Annotated[str, BeforeValidator(_folder)]
MAX_INT = 2**63 - 1  # of a signed 64-bit integer
_NUMBER = BeforeValidator(_not_bool)
Finite = Annotated[float, _NUMBER, Field(allow_inf_nan=False)]
Fraction = Annotated[float, _NUMBER, Field(ge=0, le=1)]
NonNegative = Annotated[float, _NUMBER, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, _NUMBER, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, _NUMBER, Field(ge=1, le=MAX_INT)]
NonNegativeInt = Annotated[int, _NUMBER, Field(ge=0, le=MAX_INT)]
