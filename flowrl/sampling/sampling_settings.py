"""SamplingSettings: a worker's validated sampling settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.envs.validation import OnInvalidStep
from flowrl.sampling.callbacks import DefaultCallbacks
from flowrl.sampling.sample_collector import SampleCollector
from flowrl.settings import ConfigError

DEFAULT_FRAGMENT_LENGTH = 200
BATCH_MODE_ALIASES = {"truncated_episodes": "truncate_episodes"}  # RLlib documents use both
CHOICES = {
    "batch_mode": ("truncate_episodes", "complete_episodes"),
    "count_steps_by": ("env_steps", "agent_steps"),
    "on_invalid_step": ("raise", "drop", "replace"),
}
FLAGS = ("soft_horizon", "no_done_at_end", "sample_async", "collect_infos", "explore")
# seconds in environments, action computation, storing of rows, postprocessing, and in total
TIMINGS = ("env_step_s", "inference_s", "collection_s", "postprocess_s", "sample_s")


@dataclass(frozen=True)
class SamplingSettings:
    """The sampling settings of a worker; see AlgorithmConfig.

    `length` is the resolved `rollout_fragment_length`; a `sample_collector` of None selects the
    built-in one.
    """

    length: int
    batch_mode: str = "truncate_episodes"
    count_steps_by: str = "env_steps"
    horizon: int | None = None
    soft_horizon: bool = False
    no_done_at_end: bool = False
    on_invalid_step: OnInvalidStep = "raise"
    max_env_restarts: int = 5
    sample_async: bool = False
    sample_collector: type[SampleCollector] | None = None
    explore: bool = True

    @classmethod
    def from_config(
        cls, config: Any, length: int | None, count_steps_by: str | None
    ) -> SamplingSettings:
        """Return the settings of a worker's config, a record or a mapping.

        Args:
            config: the worker's settings.
            length: overrides `rollout_fragment_length`.
            count_steps_by: from the multi-agent settings.

        Raises:
            ConfigError: a setting has a wrong type or value.
        """
        if length is None:
            length = config.get("rollout_fragment_length", DEFAULT_FRAGMENT_LENGTH)
        batch_mode = config.get("batch_mode", "truncate_episodes")
        chosen = {
            "batch_mode": BATCH_MODE_ALIASES.get(batch_mode, batch_mode),
            "count_steps_by": count_steps_by or "env_steps",
            "on_invalid_step": config.get("on_invalid_step", "raise"),
        }
        for name, choices in CHOICES.items():
            if chosen[name] not in choices:
                raise ConfigError(
                    f"{name}: must be one of {', '.join(choices)}, got {chosen[name]!r}"
                )
        horizon = config.get("horizon")
        _check_int("horizon", horizon, 1, optional=True)
        _check_int("num_envs_per_worker", config.get("num_envs_per_worker", 1), 1)
        _check_int("max_num_env_restarts", config.get("max_num_env_restarts", 5), 0)
        _check_int("seed", config.get("seed"), 0, optional=True)
        if length != "auto":
            _check_int("rollout_fragment_length", length, 1)
        for name in FLAGS:
            if not isinstance(config.get(name, False), bool):
                raise ConfigError(f"{name}: must be True or False, got {config.get(name)!r}")
        if not isinstance(config.get("env_config") or {}, Mapping):
            raise ConfigError(f"env_config: must be a mapping, got {config.get('env_config')!r}")
        if config.get("soft_horizon") and horizon is None:
            raise ConfigError("soft_horizon needs a horizon")
        _check_subclass("callbacks_class", config.get("callbacks_class"), DefaultCallbacks)
        collector = config.get("sample_collector") or None
        _check_subclass("sample_collector", collector, SampleCollector)
        return cls(
            **chosen,
            length=DEFAULT_FRAGMENT_LENGTH if length == "auto" else int(length),
            horizon=horizon,
            soft_horizon=bool(config.get("soft_horizon", False)),
            no_done_at_end=bool(config.get("no_done_at_end", False)),
            max_env_restarts=config.get("max_num_env_restarts", 5),
            sample_async=config.get("sample_async", False),
            sample_collector=collector,
            explore=config.get("explore", True),
        )


def _check_int(name: str, value: Any, minimum: int, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < minimum:
        raise ConfigError(f"{name}: must be an int >= {minimum}, got {value!r}")


def _check_subclass(name: str, value: Any, base: type) -> None:
    if value and not (isinstance(value, type) and issubclass(value, base)):
        raise ConfigError(f"{name}: must be a subclass of {base.__name__}, got {value!r}")
