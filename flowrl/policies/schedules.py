"""Schedules: numbers that depend on the number of sampled env steps."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from flowrl.errors import ConfigError

MAX_VALUE = 1e6
Step = int | str
"""A number of env steps, or a percentage of `total_timesteps` such as "60%"."""
ScheduleValue = float | list[tuple[Step, float]] | dict[str, float | str]


def _check_steps(steps: Sequence[int | str]) -> None:
    """Check the steps of a schedule's points.

    Raises:
        ValueError: they do not rise, are below 0 or above 100%, or mix env steps and percentages.
    """
    for step in steps:
        _check_step(step)
    percentages = [is_percent(step) for step in steps if step != 0]
    if any(percentages) and not all(percentages):
        raise ValueError("the steps must be all env steps or all percentages (0 may be either)")
    numbers = [_number(step) for step in steps]
    if not numbers or numbers != sorted(set(numbers)) or numbers[0] < 0:
        raise ValueError("a schedule is a list of (step, value) with rising steps, none below 0")
    if any(percentages) and numbers[-1] > 100:
        raise ValueError(f"{steps[-1]} is more than 100% of total_timesteps")
    if len(numbers) > 1 and steps[-1] == 1:
        raise ValueError("it ends at env step 1: write shares of the training as '0%' … '100%'")


def _check_step(step: Any) -> None:
    if isinstance(step, str) and not re.fullmatch(r"\d+(\.\d+)?%", step):
        raise ValueError(f"{step!r} is neither a number of env steps nor a percentage ('60%')")


def _validate_schedule(schedule: ScheduleValue) -> ScheduleValue:
    if isinstance(schedule, list):
        _check_steps([step for step, _ in schedule])
    elif isinstance(schedule, dict):
        required = {"initial", "decay", "steps"}
        if not required <= set(schedule) <= required | {"final"}:
            raise ValueError(
                f"an exponential schedule has the keys {', '.join(sorted(required))} and "
                "optionally final"
            )
        text = next((k for k, v in schedule.items() if isinstance(v, str) and k != "steps"), None)
        if text is not None:
            raise ValueError(f"{text} must be a number: only steps can be a percentage")
        _check_step(schedule["steps"])
        decay, steps = _number(schedule["decay"]), _number(schedule["steps"])
        if not (0 < decay <= 1 and steps > 0 and (is_percent(schedule["steps"]) or steps >= 1)):
            raise ValueError("an exponential schedule needs a decay in (0, 1] and steps >= 1")
        if _number(schedule.get("final", 0.0)) > _number(schedule["initial"]):
            raise ValueError("final, the smallest value of the schedule, is above initial")
    if not all(0 <= value <= MAX_VALUE for value in values_between(schedule)):
        raise ValueError(f"values must be from 0 to {MAX_VALUE:g}")
    return schedule


def _check_form(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Replace the errors of each form that a schedule can have by one error; True is no number."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return validate(value)
    except (TypeError, ValidationError):
        raise ValueError(
            "expected a number or a schedule such as [[0, 1e-3], [100_000, 0.0]] or "
            '[["0%", 1e-3], ["100%", 0.0]]'
        ) from None


_FORM = WrapValidator(_check_form)
_VALIDATOR = AfterValidator(_validate_schedule)
Schedule = Annotated[ScheduleValue, _FORM, _VALIDATOR]
"""A setting that may be a schedule; see `value_at`."""
LinearSchedule = Annotated[float | list[tuple[Step, float]], _FORM, _VALIDATOR]
"""A setting that may be a schedule, but not an exponential one."""


def is_percent(step: Any) -> bool:
    """Return whether a step is a percentage of `total_timesteps`."""
    return isinstance(step, str)


def _number(step: Any) -> float:
    return float(step.removesuffix("%")) if is_percent(step) else step


def env_step(step: Any, total_timesteps: int | None) -> float:
    """Return a step of a schedule as a number of env steps.

    Raises:
        ConfigError: it is a percentage, and `total_timesteps` is None.
    """
    if not is_percent(step):
        return step
    if total_timesteps is None:
        raise ConfigError(
            f"a schedule with the step {step!r} needs total_timesteps, the env steps of the whole "
            "training: set it, or give the schedule in env steps"
        )
    return _number(step) * total_timesteps / 100


def values_between(schedule: ScheduleValue) -> list[float]:
    """Return the values between which a schedule moves."""
    if isinstance(schedule, list):
        return [value for _, value in schedule]
    if isinstance(schedule, dict):
        return [_number(schedule["initial"]), _number(schedule.get("final", 0.0))]
    return [schedule]


def initial_value(schedule: Any) -> float:
    """Return the value of a schedule before the first env step."""
    if isinstance(schedule, (int, float)):
        return float(schedule)
    return float(schedule["initial"] if isinstance(schedule, Mapping) else schedule[0][1])


def value_at(
    schedule: float | Sequence[Sequence[Any]] | Mapping[str, Any],
    timestep: int,
    total_timesteps: int | None = None,
) -> float:
    """Return the value of a schedule.

    Args:
        schedule: a number is constant. A list of (step, value) in rising order is interpolated
            linearly, and constant before its first and after its last point. A mapping decays
            exponentially: initial * decay ** (timestep / steps), but not below `final` (default
            0). Steps are env steps, or percentages of `total_timesteps` such as "60%".
        timestep: number of env steps sampled so far.
        total_timesteps: env steps of the whole training; None if unknown.

    Raises:
        ConfigError: a step is a percentage, and `total_timesteps` is None although the training has
            begun.

    >>> value_at([(0, 1.0), (100, 0.0)], 25)
    0.75
    >>> value_at([("0%", 1.0), ("50%", 0.0)], 25, total_timesteps=100)
    0.5
    >>> value_at(0.2, 25)
    0.2
    >>> value_at({"initial": 1.0, "decay": 0.5, "steps": 100, "final": 0.1}, 200)
    0.25
    """
    if isinstance(schedule, (int, float)):
        return float(schedule)
    if timestep == 0 and total_timesteps is None and needs_total(schedule):
        return initial_value(schedule)
    if isinstance(schedule, Mapping):
        steps = env_step(schedule["steps"], total_timesteps)
        value = schedule["initial"] * schedule["decay"] ** (timestep / steps)
        return float(max(value, schedule.get("final", 0.0)))
    steps_of_points = [env_step(point[0], total_timesteps) for point in schedule]
    index = bisect_right(steps_of_points, timestep)
    if index == 0:
        return float(schedule[0][1])
    if index == len(schedule):
        return float(schedule[-1][1])
    t0, t1 = steps_of_points[index - 1], steps_of_points[index]
    v0, v1 = schedule[index - 1][1], schedule[index][1]
    return float(v0 + (v1 - v0) * (timestep - t0) / (t1 - t0))


def needs_total(schedule: Any) -> bool:
    """Return whether a schedule depends on `total_timesteps`."""
    if isinstance(schedule, Mapping):
        return is_percent(schedule["steps"])
    return isinstance(schedule, (list, tuple)) and any(is_percent(step) for step, _ in schedule)


def zero_from(schedule: Any, total_timesteps: int | None) -> float | None:
    """Return the env step from which a schedule is 0 until its end; None for other schedules and
    for constants.

    Raises:
        ConfigError: see `value_at`.
    """
    if not isinstance(schedule, (list, tuple)):  # exponential schedules do not reach 0
        return None
    step = None
    for point_step, value in reversed(schedule):
        if value != 0:
            break
        step = env_step(point_step, total_timesteps)
    return step


def schedules_in(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of every setting of a record that may be a schedule, also of its nested
    records (`exploration_config.epsilon`)."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if hasattr(type(value), "model_fields"):
            yield from schedules_in(value, f"{prefix}{name}.")
        elif value is not None and _accepts_schedule(field):
            yield f"{prefix}{name}", value


def _accepts_schedule(field: Any) -> bool:
    metadata = [*field.metadata]
    for part in get_args(field.annotation):  # Schedule | None
        metadata += getattr(part, "__metadata__", ())
    return any(part is _VALIDATOR for part in metadata)
