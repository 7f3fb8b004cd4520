"""FluentSettings: methods that set the settings of one group and return the config."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar

from flowrl.errors import ConfigError
from flowrl.sampling.callbacks import EVENTS, DefaultCallbacks
from flowrl.sampling.worker_config import WorkerConfig
from flowrl.setting_aliases import canonical_names
from flowrl.settings import SettingInfo

Method = TypeVar("Method", bound=Callable[..., Any])


# pydantic's lists all settings, which the docstring describes by group
_SIGNATURE = inspect.Signature(
    [inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD, annotation=Any)]
)


def _group(method: Method) -> Method:
    """Mark a method that sets the settings of the group with the method's name."""
    method._is_group = True  # type: ignore[attr-defined]
    return method


class FluentSettings(WorkerConfig):
    """Settings with a method for each group.

    Each class gets its own version of the methods, whose signature and docstring list its settings.

    Raises (from every method):
        ConfigError: an unknown name, or a wrong type or range; nothing changes.
    """

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        infos = cls.describe()
        for name in cls.groups():
            method = vars(cls).get(name, getattr(FluentSettings, name))
            group = [info for info in infos if info.group == name]
            setattr(cls, name, _documented(group, method))
        summary = (inspect.getdoc(cls) or "").split("\n\nSettings by group")[0]
        cls.__doc__ = f"{summary}\n\n{_settings_by_group(infos)}"
        cls.__signature__ = _SIGNATURE

    @classmethod
    def __pydantic_on_complete__(cls) -> None:
        cls.__signature__ = _SIGNATURE  # pydantic has set its own

    @classmethod
    def groups(cls) -> list[str]:
        """Return the names of the groups, in the order of their methods."""
        members = list(vars(FluentSettings).items())
        return [name for name, method in members if getattr(method, "_is_group", False)]

    @classmethod
    def canonical(cls, values: dict[str, Any]) -> dict[str, Any]:
        return canonical_names(values)

    if not TYPE_CHECKING:  # type checkers report unknown names themselves

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or hasattr(type(self), name):
                return super().__getattr__(name)
            known = [
                *type(self).model_fields,
                *self.groups(),
                "build",
                "copy",
                "updated",
                "validate",
            ]
            message = f"{type(self).__name__} has no method or setting {name!r}."
            raise AttributeError(message + self.hint(name, known), name=name, obj=self)

    @_group
    def environment(self, env: Any = None, **settings: Any) -> Self:
        """Set the environment."""
        return self._set("environment", {**({} if env is None else {"env": env}), **settings})

    @_group
    def rollouts(self, **settings: Any) -> Self:
        """Set how workers sample."""
        return self._set("rollouts", settings)

    def rollout(self, **settings: Any) -> Self:
        """Alias of `rollouts`."""
        return self._set("rollouts", settings, "rollout")

    def env_runners(self, **settings: Any) -> Self:
        """Alias of `rollouts`, RLlib's name."""
        return self._set("rollouts", settings, "env_runners")

    @_group
    def training(self, **settings: Any) -> Self:
        """Set how policies learn, and the algorithm's own settings."""
        return self._set("training", settings)

    @_group
    def multi_agent(self, **settings: Any) -> Self:
        """Set the policies, and which agents they act for."""
        return self._set("multi_agent", settings)

    @_group
    def exploration(self, **settings: Any) -> Self:
        """Set how policies explore."""
        return self._set("exploration", settings)

    @_group
    def evaluation(self, **settings: Any) -> Self:
        """Set when and how policies are evaluated."""
        return self._set("evaluation", settings)

    @_group
    def offline_data(self, **settings: Any) -> Self:
        """Set where experience is written to and read from."""
        return self._set("offline_data", settings)

    @_group
    def framework(self, framework: str = "torch", **settings: Any) -> Self:
        """Set the device, the precision and compilation; the framework is torch."""
        return self._set("framework", {"framework": framework, **settings})

    @_group
    def checkpointing(self, **settings: Any) -> Self:
        """Set when a run writes checkpoints, and which it keeps."""
        return self._set("checkpointing", settings)

    @_group
    def resources(self, **settings: Any) -> Self:
        """Set the processors and the cluster that workers use."""
        return self._set("resources", settings)

    @_group
    def fault_tolerance(self, **settings: Any) -> Self:
        """Set what happens when workers and environments fail."""
        return self._set("fault_tolerance", settings)

    @_group
    def callbacks(
        self, callbacks_class: type[DefaultCallbacks] | None = None, **settings: Any
    ) -> Self:
        """Set the callbacks class."""
        event = next((name for name in settings if name in EVENTS), None)
        if event is not None:
            raise ConfigError(
                f".callbacks(): subclass DefaultCallbacks and override {event}, then pass the "
                "class: .callbacks(MyCallbacks)"
            )
        return self._set("callbacks", {"callbacks_class": callbacks_class, **settings})

    @_group
    def reporting(self, **settings: Any) -> Self:
        """Set how often results are reported, their averages, and experiment loggers."""
        return self._set("reporting", settings)

    @_group
    def debugging(self, **settings: Any) -> Self:
        """Set the seed."""
        return self._set("debugging", settings)

    def _set(self, group: str, values: dict[str, Any], method: str | None = None) -> Self:
        """Set settings of a group; `method` is the method that was called, if it is an alias."""
        self._check_not_frozen()
        values = canonical_names(values)
        groups = {info.name: info.group for info in self.describe()}
        for name in values:
            if groups.get(name) != group:
                known = sorted(known for known, its_group in groups.items() if its_group == group)
                hint = f" It belongs to .{groups[name]}()." if name in groups else ""
                hint = hint or self.hint(name, known)
                raise ConfigError(f".{method or group}() has no setting {name!r}.{hint}")
        changed = self.updated(**values)
        vars(self).update({name: getattr(changed, name) for name in values})  # checked together
        self.model_fields_set.update(values)
        return self


def _settings_by_group(infos: list[SettingInfo]) -> str:
    """Return the settings of a class as text, for `help()`."""
    lines = ["Settings by group, each with its type and default:"]
    for group in FluentSettings.groups():
        lines += ["", f".{group}()"]
        for info in infos:
            if info.group == group:
                lines += _describe_setting(info, "")
    return "\n".join(lines)


def _describe_setting(info: SettingInfo, prefix: str) -> list[str]:
    """Return the lines that describe a setting, and those of a nested record."""
    if inner := info.inner():
        return [line for i in inner for line in _describe_setting(i, f"{prefix}{info.name}.")]
    meaning = textwrap.wrap(info.help, 84)
    return [
        f"    {prefix}{info.name}: {info.type} = {info.default!r}",
        *(f"        {line}" for line in meaning),
    ]


def _documented(infos: list[SettingInfo], method: Callable[..., Any]) -> Any:
    """Return a group's method with the signature and the docstring for a class's settings."""

    @functools.wraps(method)
    def set_group(self: FluentSettings, *args: Any, **settings: Any) -> FluentSettings:
        config: FluentSettings = method(self, *args, **settings)
        return config

    declared = inspect.signature(method).parameters.values()
    parameters = [p for p in declared if p.kind is not inspect.Parameter.VAR_KEYWORD]
    names = {parameter.name for parameter in parameters}
    for info in infos:
        if info.name not in names:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(
                inspect.Parameter(info.name, kind, default=info.default, annotation=info.type)
            )
    set_group.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    lines = [f"    {info.name}: {info.help} Default: {info.default!r}." for info in infos]
    summary = (inspect.getdoc(method) or "").split("\n\nArgs:")[0]
    set_group.__doc__ = "\n".join([f"{summary}\n\nArgs:", *lines])
    return set_group
