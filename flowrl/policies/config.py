"""The settings of a policy: what it needs to act and to learn, typed and checked."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SkipValidation,
    ValidationError,
    model_validator,
)
from pydantic.functional_validators import AfterValidator

from flowrl.policies.schedules import Scheduled


class ConfigError(ValueError):
    """A setting that flowrl refuses: names the field, what is allowed, and the nearest name."""


def imported(path: str) -> Any:
    """What lies at "module:name".

    Raises:
        ImportError, AttributeError: there is no such module, or nothing of that name in it.
    """
    module, _, name = path.partition(":")
    found = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


# what other libraries call settings of ours
_ELSEWHERE = {
    "learning_rate": "lr",
    "discount": "gamma",
    "discount_factor": "gamma",
    "n_steps": "rollout_fragment_length",
    "num_steps": "rollout_fragment_length",
    "n_epochs": "num_sgd_iter",
    "update_epochs": "num_sgd_iter",
    "gae_lambda": "lambda_",
    "ent_coef": "entropy_coeff",
    "vf_coef": "vf_loss_coeff",
    "clip_range": "clip_param",
    "clip_coef": "clip_param",
    "max_grad_norm": "grad_clip",
    "n_envs": "num_envs_per_worker",
    "num_envs": "num_envs_per_worker",
    "buffer_size": "replay_buffer_capacity",
    "gradient_steps": "training_intensity",
    "train_freq": "training_intensity",
    "exploration_fraction": "exploration_config",
    "exploration_final_eps": "exploration_config",
    "total_timesteps": "stop_timesteps",
    "policy_kwargs": "model",
    "net_arch": "model",
    "target_update_interval": "target_network_update_freq",
    "env_id": "env",
    "env_kwargs": "env_config",
}


def nearest(name: str, known: list[str]) -> str:
    """` Did you mean 'x'?`, or nothing when no known name is near."""
    other = _ELSEWHERE.get(name.replace("-", "_"))
    if other is not None and "-" in name:
        other = other.rstrip("_").replace("_", "-")
    close = [other] if other in known else difflib.get_close_matches(name, known, n=1)
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
        elif problem["type"] == "value_error" and type(problem["ctx"]["error"]) is ConfigError:
            lines += [_within(path, line) for line in str(problem["ctx"]["error"]).split("; ")]
        else:
            message = problem["msg"].removeprefix("Value error, ")
            message = message[:1].lower() + message[1:]
            lines.append(f"{path}: {message} (got {problem['input']!r})")
    return "; ".join(dict.fromkeys(lines))


def _within(path: str, said: str) -> str:
    """What a nested record says of itself, with its place."""
    if said.startswith("unknown setting '"):
        return said.replace("setting '", f"setting '{path}.", 1)
    field = re.match(r"[\w.]+: ", said)
    return f"{path}.{said}" if field else f"{path}: {said}"


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

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """A field with another default says of itself what it said before."""
        changed = False
        for name, field in cls.model_fields.items():
            for base in cls.__mro__[1:]:
                if field.description is None and issubclass(base, Settings):
                    before = base.model_fields.get(name)
                    field.description = None if before is None else before.description
                    changed |= field.description is not None
        if changed:
            cls.model_rebuild(force=True)

    def __init__(self, /, **values: Any):
        searched = {name: value for name, value in values.items() if is_search(value)}
        unknown = [name for name in searched if name not in type(self).model_fields]
        if searched and not unknown:  # they are checked when Tune has drawn values
            values = {name: value for name, value in values.items() if name not in searched}
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error)) from None
        vars(self).update(searched)
        self.model_fields_set.update(searched)

    _frozen: bool = PrivateAttr(default=False)

    def frozen(self) -> Self:
        """A copy that takes no changes: the settings of something that was built."""
        made = self.copy()
        for value in (made, *vars(made).values()):
            if isinstance(value, Settings):
                value._frozen = True
        return made

    def __delattr__(self, name: str) -> None:
        raise ConfigError(f"{name}: a setting cannot be taken away, only changed")

    @classmethod
    def spelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Settings with our names for them, where others are known."""
        return values

    def check_no_search(self) -> None:
        """Refuse search spaces of Tune, which only Tune draws values from.

        Raises:
            ConfigError: naming the field.
        """
        for name, value in vars(self).items():
            if is_search(value):
                raise ConfigError(
                    f"{name}: it is a search space of Ray Tune: tune.Tuner(flowrl.tune.PPO, "
                    "param_space=config) draws values from it"
                )
            if isinstance(value, Settings):
                value.check_no_search()

    def _check_not_frozen(self) -> None:
        if self._frozen:
            raise ConfigError(
                f"this {type(self).__name__} belongs to an algorithm that was built: change a copy "
                "of it (config.copy()) and build another"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_frozen":
            super().__setattr__(name, value)
            return
        self._check_not_frozen()
        ((ours, value),) = self.spelled({name: value}).items() or ((name, value),)
        if ours not in type(self).model_fields:
            raise ConfigError(f"unknown setting {name!r}.{nearest(name, self.keys())}")
        name = ours
        if is_search(value) and name in type(self).model_fields:
            vars(self)[name] = value
            self.model_fields_set.add(name)
            return
        before = dict(vars(self))
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            vars(self).update(before)  # a check of several settings comes after the assignment
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
        changes = self.spelled(changes)
        values = {name: _copied(getattr(self, name)) for name in self.keys()}
        for name, value in changes.items():
            current = values.get(name)
            if isinstance(current, Settings) and isinstance(value, dict):
                value = current.updated(**value)
            values[name] = value
        made = type(self)(**values)
        made.model_fields_set.clear()
        made.model_fields_set.update(self.model_fields_set, changes)
        return made

    def copy(self) -> Self:  # type: ignore[override]
        """A copy that can be changed."""
        return self.updated()

    def diff(self, other: Settings | None = None) -> dict[str, tuple[Any, Any]]:
        """Name -> (value there, value here) of the settings that differ from another record's, or
        from the defaults. Nested ones are named by their path, `model.fcnet_hiddens`."""
        base = type(self)() if other is None else other
        found: dict[str, tuple[Any, Any]] = {}
        for name, value in self.items():
            before = base.get(name)
            if isinstance(value, Settings) and isinstance(before, Settings):
                inner = value.diff(before)
                found |= {f"{name}.{key}": pair for key, pair in inner.items()}
            elif value is not before and not _equal(value, before):
                found[name] = (before, value)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, nested ones as dicts; code (an env creator) as it is."""
        return {k: v.to_dict() if isinstance(v, Settings) else v for k, v in self.items()}

    def chosen(self) -> dict[str, Any]:
        """The settings that somebody has set; the others have their defaults."""
        return {name: self[name] for name in self.keys() if name in self.model_fields_set}


def _copied(value: Any) -> Any:
    """A setting's value for another record, which may change it."""
    if isinstance(value, Settings):
        return value.copy()
    if isinstance(value, (dict, list)) and not is_search(value):
        try:
            return copy.deepcopy(value)
        except Exception:  # there is something in it that cannot be copied
            return type(value)(value)
    return value


def is_search(value: Any) -> bool:
    """Whether a value is a search space of Ray Tune: a domain, or {"grid_search": [...]}."""
    if isinstance(value, dict):
        return set(value) == {"grid_search"}
    return type(value).__module__.startswith("ray.tune.search")


def _equal(one: Any, two: Any) -> bool:
    try:
        return bool(one == two)
    except Exception:  # arrays in an env_config
        return False


def _rising(schedule: Scheduled) -> Scheduled:
    if isinstance(schedule, list):
        steps = [point[0] for point in schedule]
        if not steps or steps != sorted(set(steps)) or steps[0] < 0:
            raise ValueError("a schedule is a list of (env step, value), the steps rising from 0")
        values = [v for _, v in schedule]
    elif isinstance(schedule, dict):
        names = {"initial", "decay", "steps"}
        if not names <= set(schedule) <= names | {"final"}:
            raise ValueError(
                f"an exponential schedule has {', '.join(sorted(names))} and maybe final"
            )
        values = [schedule["initial"], schedule.get("final", 0.0)]
        if not (0 < schedule["decay"] <= 1 and schedule["steps"] >= 1):
            raise ValueError("an exponential schedule has a decay in (0, 1] and steps from 1")
    else:
        values = [schedule]
    if not all(0 <= value < float("inf") for value in values):
        raise ValueError("values must be finite and not negative")
    return schedule


Schedule = Annotated[Scheduled, AfterValidator(_rising)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", name):
        raise ValueError("auto, cpu, cuda, cuda:1 and the like, mps or xpu is needed")
    return name


Activation = Literal["tanh", "relu", "silu", "elu", "gelu"]


class ModelConfig(Settings):
    """The network."""

    fcnet_hiddens: list[Count] = [64, 64]
    """Sizes of the hidden layers (but for a lone image: `post_fcnet_hiddens`)."""
    fcnet_activation: Activation = "tanh"
    """Activation of the hidden layers."""
    vf_share_layers: bool | None = None
    """One network for the policy and the value up to their heads. None: one where there are images,
    two else."""
    free_log_std: bool = True
    """Continuous actions: the log standard deviation is a parameter, not a network output."""
    num_framestacks: Count = 1
    """Observations that the network sees at once, the latest ones of the episode."""

    conv_type: Literal["plain", "resnet"] = "plain"
    """Images: convolutions one after another, or IMPALA's small residual network."""
    conv_filters: list[tuple[Count, Count, Count]] | None = None
    """Plain convolutions: [channels, kernel, stride] each. None: the Nature CNN's, or two small
    ones below 36 pixels."""
    conv_activation: Activation = "relu"
    """Activation of the convolutions and of `post_fcnet_hiddens`."""
    post_fcnet_hiddens: list[Count] = [512]
    """Sizes of the layers after convolutions."""

    use_lstm: bool = False
    """A recurrent cell after the hidden layers."""
    lstm_cell_type: Literal["lstm", "gru"] = "lstm"
    """Its kind."""
    lstm_cell_size: Count = 64
    """Its size."""
    lstm_use_prev_action: bool = False
    """The cell also sees the action before."""
    lstm_use_prev_reward: bool = False
    """The cell also sees the reward before."""
    max_seq_len: Count = 20
    """Networks with memory: rows per training sequence, at most."""
    burn_in: int = Field(default=0, ge=0)
    """Recurrent networks: so many rows before each training sequence are computed to have fresh
    states, and not learned from."""

    use_attention: bool = False
    """Gated transformer units (GTrXL) after the hidden layers."""
    attention_num_transformer_units: Count = 1
    """How many."""
    attention_dim: Count = 64
    """Size of what they work on."""
    attention_num_heads: Count = 2
    """Heads of each."""
    attention_head_dim: Count = 32
    """Size of a head."""
    attention_memory: Count = 50
    """Earlier rows that each row looks back on."""
    attention_position_wise_mlp_dim: Count = 64
    """Size of the hidden layer after attention."""
    attention_init_gru_gate_bias: float = 2.0
    """How far the gates are closed at first."""

    custom_model: Annotated[Any, SkipValidation] = None
    """A ModelV2 or torch.nn.Module class, a function that makes one, the name of a registered one,
    or a path "module:Class"."""
    custom_model_config: dict[str, Any] = {}
    """Keyword arguments for it."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.use_lstm and self.use_attention:
            raise ValueError("use_lstm and use_attention: one of them")
        if self.custom_model is not None and (self.use_lstm or self.use_attention):
            raise ValueError("custom_model: a model of one's own brings its memory itself")
        if self.burn_in and not self.use_lstm:
            raise ValueError("burn_in needs use_lstm=True")
        if self.conv_type == "resnet" and self.conv_filters is not None:
            raise ValueError("conv_filters: the resnet has its own")
        for name, field in type(self).model_fields.items():
            if getattr(self, name) == field.default:
                continue
            if name.startswith("lstm_") and not self.use_lstm:
                raise ValueError(f"{name} needs use_lstm=True")
            if name.startswith("attention_") and not self.use_attention:
                raise ValueError(f"{name} needs use_attention=True")
        if self.custom_model_config and self.custom_model is None:
            raise ValueError("custom_model_config needs a custom_model")
        return self


class ExplorationConfig(Settings):
    """How a policy explores."""

    type: Literal[
        "StochasticSampling",
        "EpsilonGreedy",
        "PerWorkerEpsilonGreedy",
        "GaussianNoise",
        "OrnsteinUhlenbeckNoise",
        "Random",
    ] = "StochasticSampling"
    """Draw from the distribution; the best action but for a share of random ones; that with a share
    of each worker's own; the best action plus noise (independent, or drifting); random actions."""
    random_timesteps: int = Field(default=0, ge=0)
    """Env steps of random actions before anything else."""
    epsilon: Schedule = Field(default=[(0, 1.0), (10_000, 0.05)])
    """EpsilonGreedy: share of random actions."""
    epsilon_base: Fraction = 0.4
    """PerWorkerEpsilonGreedy: worker i of N explores with epsilon_base ** (1 + i / (N - 1) *
    epsilon_exponent) (Horgan et al. 2018)."""
    epsilon_exponent: NotNegative = 7.0
    """PerWorkerEpsilonGreedy: how far the workers differ."""
    scale: Schedule = 0.1
    """Noise: its standard deviation, in actions stretched to [-1, 1]."""
    ou_theta: NotNegative = 0.15
    """OrnsteinUhlenbeckNoise: how fast it goes back to 0, per step."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        of = {
            "epsilon": ("EpsilonGreedy",),
            "epsilon_base": ("PerWorkerEpsilonGreedy",),
            "epsilon_exponent": ("PerWorkerEpsilonGreedy",),
            "scale": ("GaussianNoise", "OrnsteinUhlenbeckNoise"),
            "ou_theta": ("OrnsteinUhlenbeckNoise",),
        }
        if isinstance(self.epsilon, list) and any(value > 1 for _, value in self.epsilon):
            raise ValueError("epsilon is a share of the actions: at most 1")
        if isinstance(self.epsilon, (int, float)) and self.epsilon > 1:
            raise ValueError("epsilon is a share of the actions: at most 1")
        for name, types in of.items():
            default = type(self).model_fields[name].default
            if self.type not in types and getattr(self, name) != default:
                raise ValueError(f"{name} is for the type {' or '.join(types)}")
        return self


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
    """Gradients are clipped to this; None leaves them."""
    grad_clip_by: Literal["global_norm", "norm", "value"] = "global_norm"
    """What is clipped: the norm of all gradients together, that of each parameter, or each
    number."""
    accumulate_rows: int = Field(default=0, ge=0)
    """Rows whose gradient is computed at once; an update of more adds up those of parts. 0: all."""
    on_bad_update: Literal["raise", "skip"] = "raise"
    """A loss or gradient that is not finite: stop, or leave the update out and count it in
    `num_skipped_updates`. The weights stay as they were."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the network's arithmetic while learning; weights are float32."""
    compile: bool = False
    """Compile the network for learning with torch.compile."""
    device: Annotated[str, AfterValidator(_device)] = "auto"
    """Where a process that learns keeps the network: "cpu", "cuda", "cuda:1"; "auto" takes the GPU
    if there is one. Workers that only sample act on the CPU."""
    model: ModelConfig = ModelConfig()
    """The network."""
    exploration_config: ExplorationConfig = ExplorationConfig()
    """How the policy explores."""
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
    def _over_defaults(cls, values: Any) -> Any:
        """Mappings for nested settings change only what they name."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for name in ("model", "exploration_config"):
            default: Any = cls.model_fields[name].default
            known = set(type(default).model_fields)
            if isinstance(values.get(name), dict) and set(values[name]) <= known:
                values[name] = {**dict(default.items()), **values[name]}
        return values
