"""The help of `flowrl train PLAN`: options and settings in groups."""

from __future__ import annotations

import argparse
import json
from typing import Any, NamedTuple

from flowrl.settings import SettingInfo, Settings
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.runs.run_directory import name_of_env_setting

# settings in the short help, besides those that the algorithm itself declares
COMMON = (
    "env_config", "num_workers", "num_envs_per_worker", "normalize_observations", "gamma", "lr",
    "grad_clip", "train_batch_size", "num_sgd_iter", "sgd_minibatch_size", "model.fcnet_hiddens",
    "model.fcnet_activation", "model.use_lstm", "model.custom_model", "exploration_config.type",
    "evaluation_interval", "evaluation_video_dir", "checkpoint_frequency", "log_to", "log_config",
    "device", "seed",
)  # fmt: skip
# given before the flags, or by options of the run
_NOT_FLAGS = ("env", "plan")


def format_help(options: argparse.ArgumentParser, config: AlgorithmConfig, show_all: bool) -> str:
    """Return the help of a run.

    Args:
        options: parser with the options of the run that are not settings.
        config: the run's config; its values are shown as defaults.
        show_all: describe every setting, not only the most common ones.
    """
    program = options.prog
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [--setting VALUE …]",
        description=_whose_defaults(config),
        parents=[options],
        add_help=False,
    )
    entries = _entries(config)
    shown = [entry for entry in entries if show_all or entry.is_common]
    for group in dict.fromkeys(entry.group for entry in shown):
        section = parser.add_argument_group(f"settings: {group}")
        for entry in shown:
            if entry.group == group:
                text = f"{entry.info.help} (default: {_as_text(entry.value)})".replace("%", "%%")
                flag, value = f"--{_flag(entry.name)}", metavar(entry.info)
                section.add_argument(flag, metavar=value, help=text)
    if len(shown) < len(entries):
        parser.epilog = f"{len(entries) - len(shown)} more settings: {program} --help-all"
    return parser.format_help()


def _whose_defaults(config: AlgorithmConfig) -> str | None:
    """Return a sentence that names the environment to which the defaults belong."""
    if not config.samples or config.env is None:
        return None
    name = name_of_env_setting(config.env)
    return f"The defaults are for {name}; with --env, the help shows those for another environment."


class _Entry(NamedTuple):
    """A setting with a flag; `name` is its path."""

    group: str
    name: str
    info: SettingInfo
    value: Any
    is_common: bool


def _entries(config: Settings) -> list[_Entry]:
    """Return the settings with a flag, in the order of their groups."""
    entries = _of_record(config, "", "", None)
    policies = config.get("policies")
    for policy_id, spec in policies.items() if isinstance(policies, dict) else ():
        if isinstance(inner := getattr(spec, "config", None), Settings):
            group = f"policy {policy_id}"
            entries += _of_record(inner, f"policies.{policy_id}.config.", "", group)
    first = ("environment", "training", "network", "exploration", "rollouts")
    return sorted(entries, key=lambda e: first.index(e.group) if e.group in first else len(first))


def _of_record(record: Settings, prefix: str, path: str, group: str | None) -> list[_Entry]:
    """Return the entries of a record.

    Args:
        record: the record.
        prefix: of the names of its flags.
        path: path of a nested record in its config, such as "model.".
        group: the group of all its settings; None for their own groups.
    """
    entries = []
    for info in record.describe():
        value, name = record[info.name], f"{path}{info.name}"
        annotation = type(record).model_fields[info.name].annotation
        if isinstance(annotation, type) and issubclass(annotation, Settings):
            inner = {"model": "network"}.get(info.name, info.group)
            entries += _of_record(value, prefix, f"{name}.", group or inner)
        elif info.name not in _NOT_FLAGS and info.type != "Any":
            is_own = not path and _declared_in_algorithms(type(record), info.name)
            is_common = is_own or name in COMMON
            entries.append(_Entry(group or info.group, prefix + name, info, value, is_common))
    return entries


def _declared_in_algorithms(cls: type, name: str) -> bool:
    """Return whether the class that first declares a setting is an algorithm's config."""
    declaring = [base for base in cls.__mro__ if name in vars(base).get("__annotations__", {})]
    module = declaring[-1].__module__
    return module.startswith("flowrl.algorithms.") or not module.startswith("flowrl.")


def _flag(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


def metavar(info: SettingInfo) -> str:
    """Return a placeholder for a setting's value, derived from its type."""
    kind = info.type.removesuffix(" | None")
    if "list[tuple[int | str, float]]" in kind:
        return "NUMBER|SCHEDULE"
    if "Callable" in kind or kind.startswith("type[") or info.name == "custom_model":
        return "MODULE:NAME"
    if kind.startswith(("dict", "Any")) or kind.endswith(("Config", "Settings")):
        return "JSON"
    if kind.startswith("list"):
        return "VALUE …"
    if kind == "bool":
        return "{true,false}"
    names = {"int": "INT", "float": "FLOAT", "str": "TEXT"}
    choices = [names.get(part, part.strip("'")) for part in kind.split(" | ")]
    return choices[0] if len(choices) == 1 else "{" + ",".join(choices) + "}"


def _as_text(value: Any) -> str:
    if callable(value):
        return getattr(value, "__qualname__", repr(value))
    return json.dumps(value, default=repr) if isinstance(value, (list, dict)) else str(value)
