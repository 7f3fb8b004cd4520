"""The settings of a policy: what it needs to act and to learn, typed and checked."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.functional_validators import AfterValidator

from flowrl.policies.schedules import Scheduled


class ConfigError(ValueError):
    """A setting that flowrl refuses: names the field, what is allowed, and the nearest name."""


def nearest(name: str, known: list[str]) -> str:
    """` Did you mean 'x'?`, or nothing when no known name is near."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _is_type(part: Any) -> bool:
    """Whether an entry of pydantic's error location names a branch of a union, not a field."""
    return isinstance(part, str) and (part in ("float", "int", "str") or "[" in part)


def _explain(cls: type[BaseModel], error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"] if not _is_type(part))
        if problem["type"] == "extra_forbidden":
            known = _names(cls, problem["loc"][:-1])
            name = str(problem["loc"][-1])
            lines.append(f"unknown setting {path!r}.{nearest(name, known)}")
        elif problem["type"] == "value_error" and not path:
            lines.append(str(problem["ctx"]["error"]))
        else:
            message = problem["msg"].removeprefix("Value error, ")
            message = message[:1].lower() + message[1:]
            lines.append(f"{path}: {message} (got {problem['input']!r})")
    return "; ".join(dict.fromkeys(lines))


def _names(cls: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    for part in path:
        inner = cls.model_fields[part].annotation if part in cls.model_fields else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            cls = inner
    return list(cls.model_fields)


class Settings(BaseModel):
    """A typed record that also reads as a mapping. Unknown names and wrong values are refused.

    Raises:
        ConfigError: naming the field, what is allowed, and the nearest name.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        validate_default=False,
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
    )

    def __init__(self, /, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error)) from None

    def __getitem__(self, name: str) -> Any:
        if name not in type(self).model_fields:
            raise KeyError(f"no setting {name!r}.{nearest(name, list(self.keys()))}")
        return getattr(self, name)

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
        """A checked copy with these settings changed; nested mappings change only their keys."""
        values = {name: getattr(self, name) for name in self.keys()}
        for name, value in changes.items():
            current = values.get(name)
            if isinstance(current, Settings) and isinstance(value, dict):
                value = current.updated(**value)
            values[name] = value
        return type(self)(**values)


def _rising(schedule: Scheduled) -> Scheduled:
    if isinstance(schedule, list):
        steps = [point[0] for point in schedule]
        if not steps or steps != sorted(set(steps)) or steps[0] < 0:
            raise ValueError("a schedule is a list of (env step, value), the steps rising from 0")
    values = [v for _, v in schedule] if isinstance(schedule, list) else [schedule]
    if not all(0 <= value < float("inf") for value in values):
        raise ValueError("values must be finite and not negative")
    return schedule


Schedule = Annotated[Scheduled, AfterValidator(_rising)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class ModelConfig(Settings):
    """The network."""

    fcnet_hiddens: list[Count] = [64, 64]
    """Sizes of the hidden layers."""
    fcnet_activation: Literal["tanh", "relu", "silu", "elu", "gelu"] = "tanh"
    """Activation of the hidden layers."""
    vf_share_layers: bool = False
    """One trunk for the policy and the value, instead of two networks."""
    max_seq_len: Count = 20
    """Recurrent networks: rows per sequence, at most."""
    free_log_std: bool = True
    """Continuous actions: the log standard deviation is a parameter, not a network output."""


class PolicyConfig(Settings):
    """What every policy knows."""

    gamma: Fraction = 0.99
    """Discount per env step."""
    lr: Schedule = 3e-4
    """Learning rate: a number, or a schedule [[env step, value], …], linear in between (as a flag:
    env step, value, env step, value …)."""
    adam_epsilon: Positive = 1e-5
    """Epsilon of the Adam optimizer."""
    grad_clip: Positive | None = 0.5
    """Gradients are scaled down to this global norm; None leaves them."""
    model: ModelConfig = ModelConfig()
    """The network."""
    normalize_observations: bool = False
    """Observations minus their running mean, over their standard deviation."""
    normalize_rewards: bool = False
    """Rewards over the running standard deviation of their discounted sum."""
    normalize_actions: bool = True
    """Continuous actions in [-1, 1] are stretched to the bounds of the action space."""
    clip_actions: bool = True
    """Continuous actions outside the bounds are clipped before they reach the environment."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of every random stream; None takes the machine's entropy."""
    num_sgd_iter: Count = 1
    """Passes over each train batch."""
    sgd_minibatch_size: int = Field(default=0, ge=0)
    """Rows per update; 0 makes one update of the whole batch. The last one may be smaller."""

    @model_validator(mode="before")
    @classmethod
    def _as_model(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("model"), dict):
            default = cls.model_fields["model"].default
            if set(values["model"]) <= set(ModelConfig.model_fields):
                values = {**values, "model": {**dict(default.items()), **values["model"]}}
        return values
