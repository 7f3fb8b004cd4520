"""The error that invalid settings raise."""


class ConfigError(ValueError):
    """Invalid setting. The message names the field, the allowed values and the nearest name."""
