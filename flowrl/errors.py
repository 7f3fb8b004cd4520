"""Errors of invalid settings and data, notes of errors, and how to install optional packages."""

import shlex
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "flowrl-dataflow"
"""The name to install flowrl by."""


class ConfigError(ValueError):
    """Invalid setting. The message names the field, the allowed values and the nearest name."""


class OfflineDataError(ValueError):
    """Recorded experience cannot be read or written; the message names the file and column."""


def install_hint(feature: str, extra: str) -> str:
    """Return a message that says how to install the packages that a feature needs."""
    return f"{feature} needs the extra {extra}: {install_command(extra)}"


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the clone that this package is in, with the
    tested versions, or else from the package index."""
    clone = Path(__file__).resolve().parents[1]
    constraints = clone / "constraints.txt"
    if not constraints.is_file():
        return f'pip install "{DISTRIBUTION}[{extra}]"'
    with suppress(OSError):  # the current folder was removed
        if Path.cwd() == clone:
            return f"pip install -c constraints.txt -e '.[{extra}]'"
    return shlex.join(["pip", "install", "-c", str(constraints), "-e", f"{clone}[{extra}]"])


def check_installed(module: str, feature: str, extra: str) -> None:
    """Check that an optional package is installed, without importing it.

    Args:
        module: name of the package's module.
        feature: what needs the package, for the message.
        extra: the extra of flowrl that installs the package.

    Raises:
        ConfigError: the package is not installed.
    """
    if find_spec(module) is None:
        raise ConfigError(install_hint(feature, extra))


def with_message(error: ConfigError, message: str) -> ConfigError:
    """Return a ConfigError with another message, and the notes of an error."""
    changed = ConfigError(message)
    for note in getattr(error, "__notes__", ()):
        add_note(changed, note)
    return changed


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error, also to one that is a frozen dataclass."""
    vars(error).setdefault("__notes__", []).append(text)
