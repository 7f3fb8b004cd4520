"""SamplingSettings: what a worker's settings say about sampling, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.envs.validation import OnInvalidStep
from flowrl.sampling.callbacks import DefaultCallbacks
from flowrl.sampling.list_collector import SimpleListCollector
from flowrl.sampling.sample_collector import SampleCollector
from flowrl.settings import ConfigError

DEFAULT_FRAGMENT_LENGTH = 200
BATCH_MODES = {"truncated_episodes": "truncate_episodes"}  # as one of the documents spells it
# seconds in environments, in policies that act, in storing rows, in postprocessing, in all of it
TIMINGS = ("env_step_s", "inference_s", "collection_s", "postprocess_s", "sample_s")


@dataclass(frozen=True)
class SamplingSettings:
    """What a worker's settings say about sampling; see AlgorithmConfig."""

    length: int
    batch_mode: str = "truncate_episodes"
    count_steps_by: str = "env_steps"
    horizon: int | None = None
    soft_horizon: bool = False
    no_done_at_end: bool = False
    on_invalid_step: OnInvalidStep = "raise"
    max_env_restarts: int = 5
    sample_collector: type[SampleCollector] = SimpleListCollector
    explore: bool = True

    @classmethod
    def of(cls, given: Any, length: int | None, count_steps_by: str | None) -> SamplingSettings:
        """From a worker's settings, a record or a mapping.

        Args:
            length: if not the settings'.
            count_steps_by: from the multi-agent settings.

        Raises:
            ConfigError: a wrong type or value.
        """
        wanted = length
        if wanted is None:
            wanted = given.get("rollout_fragment_length", DEFAULT_FRAGMENT_LENGTH)
        mode = given.get("batch_mode", "truncate_episodes")
        mode = BATCH_MODES.get(mode, mode)
        by = count_steps_by or "env_steps"
        for name, value, allowed in (
            ("batch_mode", mode, ("truncate_episodes", "complete_episodes")),
            ("count_steps_by", by, ("env_steps", "agent_steps")),
            (
                "on_invalid_step",
                given.get("on_invalid_step", "raise"),
                ("raise", "drop", "replace"),
            ),
        ):
            if value not in allowed:
                raise ConfigError(f"{name}: one of {', '.join(allowed)} is needed, got {value!r}")
        horizon = given.get("horizon")
        _check_whole("horizon", horizon, 1, True)
        _check_whole("num_envs_per_worker", given.get("num_envs_per_worker", 1), 1)
        _check_whole("max_num_env_restarts", given.get("max_num_env_restarts", 5), 0)
        _check_whole("seed", given.get("seed"), 0, True)
        if wanted != "auto":
            _check_whole("rollout_fragment_length", wanted, 1)
        for name in ("soft_horizon", "no_done_at_end", "sample_async", "collect_infos", "explore"):
            if not isinstance(given.get(name, False), bool):
                raise ConfigError(f"{name}: True or False is needed, got {given.get(name)!r}")
        if not isinstance(given.get("env_config") or {}, Mapping):
            raise ConfigError(f"env_config: a mapping is needed, got {given.get('env_config')!r}")
        callbacks = given.get("callbacks_class") or DefaultCallbacks
        if not (isinstance(callbacks, type) and issubclass(callbacks, DefaultCallbacks)):
            raise ConfigError(
                f"callbacks_class: a subclass of DefaultCallbacks is needed, got {callbacks!r}"
            )
        if given.get("soft_horizon") and horizon is None:
            raise ConfigError("soft_horizon needs a horizon")
        collector = given.get("sample_collector") or SimpleListCollector
        if not (isinstance(collector, type) and issubclass(collector, SampleCollector)):
            raise ConfigError(
                f"sample_collector: a subclass of SampleCollector is needed, got {collector!r}"
            )
        return cls(
            length=DEFAULT_FRAGMENT_LENGTH if wanted == "auto" else int(wanted),
            batch_mode=mode,
            count_steps_by=by,
            horizon=horizon,
            soft_horizon=bool(given.get("soft_horizon", False)),
            no_done_at_end=bool(given.get("no_done_at_end", False)),
            on_invalid_step=given.get("on_invalid_step", "raise"),
            max_env_restarts=given.get("max_num_env_restarts", 5),
            sample_collector=collector,
            explore=given.get("explore", True),
        )


def _check_whole(name: str, value: Any, least: int, may_be_none: bool = False) -> None:
    if may_be_none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"{name}: an int from {least} is needed, got {value!r}")
