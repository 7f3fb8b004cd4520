"""YAML files with runs: `flowrl train FILE.yaml`, and the tuned examples."""

from __future__ import annotations

import re
import reprlib
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.setting_values import nearest

MAX_VALUES = 100_000  # in a file whose aliases are written out
RUN_KEYS = ("run", "plan", "env", "env_config", "stop", "config")


def load_yaml(file: Path) -> Any:
    """Return the contents of a YAML file, in which 1e5 is a number, too.

    Raises:
        ConfigError: the file cannot be read, is too large, or has a mapping in which a key occurs
            twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads 1e5 as a number, too, and rejects keys that occur twice."""

        def __init__(self, stream: Any):
            super().__init__(stream)
            self.checked: set[int] = set()  # ids of mappings

        def flatten_mapping(self, node: Any) -> None:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            repeated = [key for key in keys if keys.count(key) > 1]
            if repeated and id(node) not in self.checked:  # merged keys may be overridden
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {repeated[0]!r} occurs twice", node.start_mark
                )
            self.checked.add(id(node))
            super().flatten_mapping(node)

    number = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        entries = yaml.load(file.read_text(encoding="utf-8"), Loader)
        if _size(entries, {}) > MAX_VALUES:
            raise ValueError(f"its aliases stand for more than {MAX_VALUES:,} values")
    except RecursionError:
        raise ConfigError(f"{file}: cannot be read: it is nested too deeply") from None
    except (OSError, ValueError, OverflowError, MemoryError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    return entries


def read_run_file(file: Path) -> dict[str, dict[str, Any]]:
    """Return name -> entry of every run in a YAML file; the name of a single run is "".

    Raises:
        ConfigError: the file cannot be read, or contains something else.
    """
    entries = load_yaml(file)
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(
            f"{file}: contains no runs: it needs run or plan at the top level, or below the name "
            "of a run"
        )
    if {"run", "plan"} & set(entries):
        return {"": entries}
    if set(entries) & set(RUN_KEYS):
        raise ConfigError(f"{file}: needs either run (an algorithm) or plan")
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            hint = nearest(str(name), list(RUN_KEYS))
            raise ConfigError(
                f"{file}: {name!r}: must be a mapping with run or plan, got "
                f"{reprlib.repr(entry)}.{hint}"
            )
        if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
            raise ConfigError(f"{file}: the name of a run must be a plain word, got {name!r}")
    return entries


def _size(value: Any, known: dict[int, int]) -> int:
    """Return the number of values in a tree in which aliases are written out.

    Args:
        value: the tree.
        known: id of a container -> its size; filled here.

    Raises:
        RecursionError: a container contains itself.
    """
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        parts = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(value)]
