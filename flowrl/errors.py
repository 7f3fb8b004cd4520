"""The error that invalid settings raise, notes of errors, and the check that an optional package is
installed."""

from importlib.util import find_spec

DISTRIBUTION = "flowrl-dataflow"
"""The name to install flowrl by."""


class ConfigError(ValueError):
    """Invalid setting. The message names the field, the allowed values and the nearest name."""


def install_hint(feature: str, extra: str) -> str:
    """Return a message that says how to install the packages that a feature needs.

    >>> print(install_hint("log_to=['wandb']", "wandb"))
    log_to=['wandb'] needs the extra wandb: pip install "flowrl-dataflow[wandb]"
    """
    return f'{feature} needs the extra {extra}: pip install "{DISTRIBUTION}[{extra}]"'


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


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error, also to one that is a frozen dataclass."""
    vars(error).setdefault("__notes__", []).append(text)
