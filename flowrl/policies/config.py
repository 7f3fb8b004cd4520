"""The settings of a policy: what it needs to act and to learn, typed and checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import Field, SkipValidation, model_validator
from pydantic.functional_validators import AfterValidator

from flowrl.errors import ConfigError
from flowrl.policies.schedules import Schedule, ScheduleValue, values_between
from flowrl.settings import (
    Count,
    Finite,
    Fraction,
    Needs,
    NonNegative,
    NonNegativeInt,
    Positive,
    Settings,
    check_of_settings,
    setting,
)


def _device(name: str) -> str:
    # MPS is not supported: it has no float64, which the losses of distributional DQN use.
    if not re.fullmatch(r"auto|cpu|(cuda|xpu)(:\d+)?", name):
        raise ValueError("must be auto, cpu, cuda, cuda:1 or xpu")
    return name


Activation = Literal["tanh", "relu", "silu", "elu", "gelu"]


class ModelConfig(Settings):
    """The network."""

    fcnet_hiddens: list[Count] = [64, 64]
    """Sizes of the hidden layers; for image observations see `post_fcnet_hiddens`."""
    fcnet_activation: Activation = "tanh"
    """Activation of the hidden layers."""
    vf_share_layers: bool | None = None
    """Share one network between policy and value up to their heads. None shares it for image
    observations; DQN shares it by default, because its heads are values and advantages. SAC, TD3,
    DDPG and CQL have separate networks."""
    free_log_std: bool = True
    """For a Box of continuous actions, make the log standard deviation a parameter instead of an
    output; in Dict and Tuple spaces it is always an output."""
    initial_log_std: Annotated[float, Field(ge=-20, le=20)] = 0.0
    """Initial log standard deviation of continuous actions, with `free_log_std`; bounded actions
    are normalized to [-1, 1]."""
    num_framestacks: Count = 1
    """Number of latest observations that the network sees at once."""
    matrix_products: Literal["auto", "numpy", "torch"] = "auto"
    """Library that multiplies large matrices where fully connected networks use numpy; "auto" is
    torch on processors of Intel, and numpy on others."""

    conv_type: Literal["plain", "resnet"] = "plain"
    """For images: plain convolutions, or IMPALA's small residual network."""
    conv_filters: list[tuple[Count, Count, Count]] | None = None
    """Plain convolutions, [channels, kernel, stride] each. None uses those of the Nature CNN,
    or two small ones below 36 pixels."""
    conv_activation: Activation = "relu"
    """Activation of the convolutions and of `post_fcnet_hiddens`; the convolutions of "resnet" have
    ReLU."""
    post_fcnet_hiddens: list[Count] = [512]
    """Sizes of the layers after convolutions."""

    use_lstm: bool = False
    """Add a recurrent cell after the hidden layers."""
    lstm_cell_type: Literal["lstm", "gru"] = "lstm"
    """Kind of the recurrent cell."""
    lstm_cell_size: Count = 64
    """Size of the recurrent cell."""
    lstm_use_prev_action: bool = False
    """Also feed the previous action to the cell."""
    lstm_use_prev_reward: bool = False
    """Also feed the previous reward to the cell."""
    max_seq_len: Count = 20
    """Maximum rows per training sequence of networks with memory."""
    burn_in: NonNegativeInt = 0
    """Rows before each training sequence that only warm up the recurrent state."""

    use_attention: bool = False
    """Add gated transformer units (GTrXL) after the hidden layers."""
    attention_num_transformer_units: Count = 1
    """Number of transformer units."""
    attention_dim: Count = 64
    """Size of the embeddings."""
    attention_num_heads: Count = 2
    """Attention heads per unit."""
    attention_head_dim: Count = 32
    """Size of each attention head."""
    attention_memory: Count = 50
    """Number of earlier rows that each row attends to."""
    attention_position_wise_mlp_dim: Count = 64
    """Size of the hidden layer after attention."""
    attention_init_gru_gate_bias: Finite = 2.0
    """Initial bias of the gates; larger values keep them more closed."""

    custom_model: Annotated[str | type | Callable[..., Any] | None, SkipValidation] = None
    """A ModelV2 or torch.nn.Module class, a function that returns a model, the name of a
    registered model, or a path "module:Class"."""
    custom_model_config: dict[str, Any] = {}
    """Keyword arguments of the custom model."""

    @check_of_settings
    def _fits_together(self) -> Self:
        if self.use_lstm and self.use_attention:
            raise ValueError("use_lstm and use_attention: use only one of them")
        if self.custom_model is not None and (self.use_lstm or self.use_attention):
            raise ValueError("custom_model: use_lstm and use_attention have no effect on it")
        has_custom = self.custom_model is not None
        of_lstm, of_attention = (
            [name for name in type(self).model_fields if name.startswith(prefix)]
            for prefix in ("lstm_", "attention_")
        )
        self._require(self.free_log_std, "free_log_std=True", "initial_log_std")
        self._require(self.use_lstm or has_custom, "use_lstm=True", "burn_in")
        self._require(self.use_lstm, "use_lstm=True", *of_lstm)
        self._require(self.use_attention, "use_attention=True", *of_attention)
        self._require(has_custom, "a custom_model", "custom_model_config")
        if self.conv_type == "resnet" and self.conv_filters is not None:
            raise ValueError("conv_filters: must be None if conv_type is 'resnet'")
        return self

    def check_no_memory(self, algorithm: str, setting: str = "model") -> None:
        """Check the network of an algorithm that supports only networks without memory.

        Args:
            algorithm: name of the algorithm, for the error message.
            setting: name of this record.

        Raises:
            ConfigError: the network has memory.
        """
        for name in ("use_lstm", "use_attention"):
            if getattr(self, name):
                r2d2 = ", or R2D2, which is DQN with such a network" if name == "use_lstm" else ""
                raise ConfigError(
                    f"{setting}.{name}: {algorithm} supports only networks without memory; those "
                    f"with memory are for PPO, A2C, A3C, IMPALA, APPO and DDPPO{r2d2}"
                )


def without_inherited_memory(changes: dict[str, Any]) -> dict[str, Any]:
    """Return changes of a ModelConfig; a custom model replaces the memory of the default network,
    such as R2D2's LSTM."""
    if changes.get("custom_model") is None:
        return changes
    return {"use_lstm": False, "use_attention": False, **changes}


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
    """How actions are chosen. "StochasticSampling" samples from the distribution. "EpsilonGreedy"
    takes the best action, except for a share of random ones; "PerWorkerEpsilonGreedy" has another
    share on each worker. "GaussianNoise" and "OrnsteinUhlenbeckNoise" add independent or
    correlated noise to the best action. "Random" acts uniformly at random."""
    random_timesteps: NonNegativeInt = 0
    """Env steps of random actions at the start."""
    epsilon: Schedule = Field(default=cast(ScheduleValue, [(0, 1.0), (10_000, 0.05)]))
    """EpsilonGreedy: share of random actions, a number or a schedule as for `lr`."""
    epsilon_base: Fraction = 0.4
    """PerWorkerEpsilonGreedy: worker i = 1 … N explores with epsilon_base ** (1 + (i - 1) / (N - 1)
    * epsilon_exponent) (Horgan et al. 2018)."""
    epsilon_exponent: NonNegative = 7.0
    """PerWorkerEpsilonGreedy: exponent of the spread of epsilon over workers; 0 makes all
    equal."""
    scale: Schedule = 0.1
    """Standard deviation of GaussianNoise, for actions in [-1, 1]; of OrnsteinUhlenbeckNoise, the
    standard deviation of the change per step. A number or a schedule as for `lr`."""
    ou_theta: NonNegative = 0.15
    """OrnsteinUhlenbeckNoise: rate at which the noise returns to 0, per step."""

    def check_has_probabilities(self) -> None:
        """Raise ValueError for noise, for which the probability of an action is not recorded."""
        if self.type in ("GaussianNoise", "OrnsteinUhlenbeckNoise"):
            raise ValueError(
                f"exploration_config: with {self.type} the probabilities of actions are not "
                "recorded, but the algorithm learns from them: use StochasticSampling"
            )

    @check_of_settings
    def _fits_together(self) -> Self:
        types_by_setting = {
            "epsilon": ("EpsilonGreedy",),
            "epsilon_base": ("PerWorkerEpsilonGreedy",),
            "epsilon_exponent": ("PerWorkerEpsilonGreedy",),
            "scale": ("GaussianNoise", "OrnsteinUhlenbeckNoise"),
            "ou_theta": ("OrnsteinUhlenbeckNoise",),
        }
        if max(values_between(self.epsilon)) > 1:
            raise ValueError("epsilon is a share of the actions and must be at most 1")
        for name, types in types_by_setting.items():
            self._require(self.type in types, f"the type {' or '.join(types)}", name)
        return self


MAX_SGD_ITER = 100_000


class PolicyConfig(Settings):
    """Settings of every policy.

    Attributes:
        needs: settings that have no effect with one value of another one; a subclass names only its
            own.
    """

    needs: ClassVar[Needs] = {"grad_clip_by": ("grad_clip", None)}

    gamma: Fraction = 0.99
    """Discount per row: per env step, or per action of an agent that does not act in every env
    step."""
    lr: Schedule = 3e-4
    """Learning rate: a number, or a schedule [[step, value], …], linear in between. Steps are env
    steps, or percentages of `total_timesteps`: [["0%", 1e-3], ["100%", 0]] (as a flag: step, value,
    step, value …). {"initial": 1e-3, "decay": 0.9, "steps": 10_000} multiplies by 0.9 every 10,000
    env steps."""
    total_timesteps: Count | None = None
    """Env steps of the whole training, which schedules in percent follow. On the command line, the
    default is the value of `--stop-timesteps`, and a run without another limit stops after
    `total_timesteps`. A resumed run may have a larger value."""
    adam_epsilon: Positive = 1e-5
    """Added to the denominator of Adam's update; larger values damp the steps of parameters with
    small gradients."""
    grad_clip: Positive | None = 0.5
    """Maximum gradient norm, or absolute value with `grad_clip_by="value"`; None does not clip."""
    grad_clip_by: Literal["global_norm", "norm", "value"] = "global_norm"
    """Clip the norm of all gradients together, the norm of each parameter's gradient, or each
    number."""
    microbatch_size: NonNegativeInt = 0
    """Rows whose gradient is computed at once; larger updates average the gradients of their
    parts. 0 computes all rows at once. With `standardize_advantages`, and with MARWIL, the
    advantages of each part are normalized by themselves. IMPALA and APPO cut only between
    segments. Set it if the GPU runs out of memory."""
    on_nonfinite_update: Literal["raise", "skip"] = "raise"
    """If a loss or gradient is not finite: raise an error, or skip the update and count it in
    `num_skipped_updates`. Either way the weights do not change."""
    precision: Literal["float32", "bfloat16"] = setting("float32", group="framework")
    """Precision of the network's arithmetic while learning; weights are float32."""
    compile: bool = setting(False, group="framework")
    """Compile the network for learning with torch.compile."""
    numpy_gradients: bool = setting(True, group="framework")
    """Compute gradients with numpy where that is faster than autograd: for the shipped losses of
    PPO, A2C, DQN, SAC (Box actions), TD3 and DDPG on fully connected networks. Results differ by
    rounding only, except that autograd refuses an update if the ratio of two probabilities
    overflows."""
    device: Annotated[str, AfterValidator(_device)] = setting("auto", group="framework")
    """Device of the network in processes that learn: "cpu", "cuda", "cuda:1"; "auto" uses the
    GPU, if there is one, for observations with images, and the CPU for others. Remote workers use
    the CPU, unless `num_gpus_per_worker` gives them a GPU."""
    cuda_graphs: bool = setting(True, group="framework")
    """On a GPU, launch an update or a forward pass on images as one CUDA graph where its shapes
    stay the same: for the policies of PPO, A2C, DQN, SAC, TD3 and DDPG, not those that a user
    derives from them, on networks of flowrl and torch without recurrent states, noisy layers,
    dropout and BatchNorm.
    Results differ by rounding only."""
    model: ModelConfig = ModelConfig()
    """The network."""
    exploration_config: ExplorationConfig = setting(ExplorationConfig(), group="exploration")
    """How the policy explores."""
    normalize_observations: bool = setting(False, group="rollouts")
    """Subtract the running mean from observations, divide by the standard deviation, and clip to
    ± 10."""
    normalize_rewards: bool = setting(False, group="rollouts")
    """Divide rewards by the running standard deviation of their discounted sum, and clip to
    ± 10."""
    normalize_actions: bool = setting(True, group="rollouts")
    """Scale continuous actions from [-1, 1] to the bounds of the action space."""
    clip_actions: bool = setting(True, group="rollouts")
    """Clip continuous actions to the bounds before they reach the environment."""
    seed: NonNegativeInt | None = setting(None, group="debugging")
    """Seed of every random stream; None uses entropy of the machine."""
    num_sgd_iter: Annotated[Count, Field(le=MAX_SGD_ITER)] = 1
    """Epochs: passes over each train batch."""
    sgd_minibatch_size: NonNegativeInt = 0
    """Rows per update; 0 makes one update of the whole batch. The last minibatch may be smaller.
    Minibatches of sequences consist of whole ones, with at least this many rows."""

    def updated(self, **changes: Any) -> Self:
        changes = self.canonical(changes)
        model = changes.get("model")
        has_default = self.model == type(self).model_fields["model"].default
        if isinstance(model, dict) and has_default:
            changes["model"] = without_inherited_memory(model)
        return super().updated(**changes)

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
                changes = values[name]
                if name == "model":
                    changes = without_inherited_memory(changes)
                values[name] = {**dict(default.items()), **changes}
        return values
