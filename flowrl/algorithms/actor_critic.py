"""The common part of SAC, CQL, TD3 and DDPG: an actor, critics, and target networks of both."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from pydantic import model_validator

from flowrl.algorithms.action_spaces import wrong_action_space
from flowrl.algorithms.off_policy import OffPolicyConfig
from flowrl.errors import ConfigError
from flowrl.policies.action_scaling import is_bounded
from flowrl.policies.config import ModelConfig
from flowrl.policies.learning.flat_parameters import FlatAdam
from flowrl.policies.learning.torch_learner import TorchLearner
from flowrl.policies.models.actor_critic import ActorCritic
from flowrl.policies.models.base import ModelV2
from flowrl.policies.schedules import Schedule, initial_value
from flowrl.policies.target_network import TargetNetworkPolicy
from flowrl.policies.torch_policy import TensorBatch
from flowrl.seeding import random_stream
from flowrl.settings import Count, Fraction, NonNegativeInt, Positive
from flowrl.trainer.config import AlgorithmConfig

ACTOR, EXTRA = 0, 2  # indexes of the actor's and the first further parameter group


class ActorCriticSettings(AlgorithmConfig):
    """Settings that the online and offline actor-critic algorithms share."""

    train_batch_size: Count = 256
    """Rows per train batch, drawn from the replay buffer; for CQL, from the recorded rows."""
    lr: Schedule = 3e-4
    grad_clip: Positive | None = None
    model: ModelConfig = ModelConfig(fcnet_hiddens=[256, 256], fcnet_activation="relu")
    q_model: ModelConfig | None = None
    """Networks of the critics; None uses `model`. A mapping contains the settings that differ from
    `model`. A custom model is created for each critic, whose observation space contains the
    action."""
    actor_lr: Schedule | None = None
    """Learning rate of the actor; None uses `lr`."""
    critic_lr: Schedule | None = None
    """Learning rate of the critics; None uses `lr`."""
    twin_q: bool = True
    """Train two critics and use the smaller value (Fujimoto et al. 2018, section 4.2)."""
    tau: Fraction = 0.005
    """Polyak coefficient of target updates: target = tau * online + (1 - tau) * target."""
    target_network_update_freq: NonNegativeInt = 0
    """Env steps sampled between updates of the target networks; 0 updates them after every train
    batch."""

    @model_validator(mode="before")
    @classmethod
    def _complete_q_model(cls, values: Any) -> Any:
        """Replace a mapping for `q_model` by all settings of the critics' networks."""
        if not (isinstance(values, dict) and isinstance(values.get("q_model"), dict)):
            return values
        model, changes = values.get("model", {}), values["q_model"]
        if isinstance(model, dict):
            try:
                model = cls.model_fields["model"].default.updated(**model)
            except ConfigError:
                return values  # `model` is invalid
        if not isinstance(model, ModelConfig):
            return values  # the error names `model`
        if changes.get("custom_model", "") is None:
            changes = {"custom_model_config": {}, **changes}
        return {**values, "q_model": {**dict(model.items()), **changes}}


class ActorCriticConfig(ActorCriticSettings, OffPolicyConfig):
    """Settings of the actor-critic algorithms with a replay buffer."""

    rollout_fragment_length: Count | Literal["auto"] = 1
    replay_buffer_capacity: Count = 100_000
    min_sample_timesteps_per_iteration: NonNegativeInt = 1000


class ActorCriticLearner(TorchLearner):
    """Optimizes the actor, the critics and further parameters with separate learning rates.

    The actor's parameters change only if ActorCriticPolicy.updates_actor() returns True, a further
    parameter only if updates_parameter(name) does.
    """

    def before_step(self) -> None:
        if self._is_default_optimizer():
            policy: Any = self.policy
            groups = self.optimizers[0].param_groups
            groups[ACTOR]["active"] = policy.updates_actor()
            for name, group in zip(policy.extra_names, groups[EXTRA:], strict=True):
                group["active"] = policy.updates_parameter(name)

    def fixed_parameters(self) -> list[torch.Tensor]:
        policy: Any = self.policy
        fixed = super().fixed_parameters()
        if self._is_default_optimizer():
            return fixed
        if not policy.updates_actor():
            fixed += policy.model.actor.parameters()
        for name in policy.extra_names:
            if not policy.updates_parameter(name):
                fixed.append(getattr(policy.model, name))
        return fixed

    def follow_schedules(self) -> None:
        if not self._is_default_optimizer():
            super().follow_schedules()
            return
        policy: Any = self.policy
        for part, group in enumerate(self.optimizers[0].param_groups):
            group["lr"] = policy.scheduled(policy.learning_rate(part))

    def _is_default_optimizer(self) -> bool:
        policy: Any = self.policy
        return self.optimizers == [policy.default_optimizer]


class ActorCriticPolicy(TargetNetworkPolicy):
    """Base of policies with an actor, and critics that are trained on temporal differences.

    The target networks evaluate the actor's next actions. A subclass implements `next_values` and
    `actor_loss`, and may add parameters.

    Attributes:
        row_stats: contains `td_error` [rows], the mean of the critics' absolute errors.
        default_optimizer: the optimizer with parts for actor, critics and further parameters;
            None if a subclass replaces `make_optimizer`.
    """

    learner_class = ActorCriticLearner
    config: Any
    model: ActorCritic
    target_model: ActorCritic
    default_optimizer: FlatAdam | None = None

    def __init__(self, observation_space: Any, action_space: Any, config: Any):
        name = self.algorithm_name
        config = self.config_from(config)
        if isinstance(action_space, spaces.Box):
            is_unit = (action_space.low == -1).all() and (action_space.high == 1).all()
            if action_space.dtype.kind != "f":
                raise ConfigError(
                    f"{name} computes continuous actions, not integers of {action_space}: use a "
                    "Discrete space in the environment"
                )
            if not is_bounded(action_space):
                raise ConfigError(f"{name} needs bounded actions, not {action_space}")
            if not (config.normalize_actions or is_unit):
                raise ConfigError(
                    f"normalize_actions: {name} computes actions in [-1, 1], which must be scaled "
                    f"to {action_space}: leave it at True"
                )
        else:
            self.check_non_box_space(action_space)
        for setting, model in (("model", config.model), ("q_model", config.q_model)):
            if model is None:
                continue
            if model.num_framestacks > 1:
                raise ConfigError(
                    f"{setting}.num_framestacks: {name} reads single observations: stack frames "
                    "with an environment wrapper (gymnasium's FrameStackObservation); for an Atari "
                    "game set atari.frame_stack=1"
                )
            if model.initial_log_std:
                raise ConfigError(
                    f"{setting}.initial_log_std: the networks of {name} have no parameters for "
                    "standard deviations: leave it out"
                )
            if model.vf_share_layers:
                raise ConfigError(
                    f"{setting}.vf_share_layers: the actor and the critics of {name} are separate "
                    "networks: set it to None; with several policies, set it in the config of the "
                    "PolicySpec"
                )
            model.check_no_memory(name, setting)
        super().__init__(observation_space, action_space, config)
        extra_views = set(self.model.view_requirements) - {"obs"}
        obs_view = self.model.view_requirements.get("obs")
        if extra_views or self.is_recurrent or obs_view is None or obs_view.is_window:
            raise ConfigError(
                f"model: {name} supports only networks without memory whose only view is `obs`, a "
                f"single observation, not {sorted(extra_views) or 'several observations'}"
            )
        self.model.use_numpy &= config.precision == "float32" and config.numpy_gradients
        self.target_model.use_numpy = self.model.use_numpy

    def check_non_box_space(self, action_space: Any) -> None:
        """Raise ConfigError for a space that is not a Box, unless the algorithm supports it."""
        raise wrong_action_space(self.algorithm_name, "Box", action_space)

    # -- networks ----------------------------------------------------------------------------------

    @cached_property
    def extra_names(self) -> list[str]:
        """Names of the `extra_parameters`."""
        return list(self.extra_parameters())

    def extra_parameters(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters outside of the networks: name -> initial value."""
        return {}

    def make_model(self) -> ModelV2:
        config = self.config
        actor_config = config.model.updated(vf_share_layers=True, free_log_std=False)
        return ActorCritic(
            self.make_catalog_model(actor_config),
            self.action_space,
            2 if config.twin_q else 1,
            config.q_model or config.model,
            random_stream(config.seed, "policy", "critics"),
            self.extra_parameters(),
        )

    def make_optimizer(self) -> Any:
        config, model = self.config, self.model
        slices = [self.flat.part(part.parameters()) for part in (model.actor, model.critics)]
        slices += [self.flat.part([getattr(model, name)]) for name in self.extra_names]
        parts = [(part, initial_value(self.learning_rate(i))) for i, part in enumerate(slices)]
        self.default_optimizer = FlatAdam(
            self.flat, lr=parts[0][1], eps=config.adam_epsilon, parts=parts
        )
        return self.default_optimizer

    def learning_rate(self, part: int) -> Any:
        """Return the learning rate, a number or a schedule, of the actor (part 0), the critics (1)
        or one of the `extra_parameters` (2, …)."""
        rate = (self.config.actor_lr, self.config.critic_lr, self.extra_lr())[min(part, EXTRA)]
        return self.config.lr if rate is None else rate

    def extra_lr(self) -> Any:
        """Return the learning rate of `extra_parameters`, a number or a schedule; None for
        `lr`."""
        return None

    # -- acting ------------------------------------------------------------------------------------

    def _act(
        self, input_dict: dict[str, Any], explore: bool
    ) -> tuple[Any, list[np.ndarray], dict[str, np.ndarray]]:
        actions, states, extra = super()._act(input_dict, explore)
        if not self._has_own_columns:
            extra = {}  # the loss reads no other columns
        return actions, states, extra

    # -- learning ----------------------------------------------------------------------------------

    def loss(self, batch: TensorBatch) -> torch.Tensor:
        """Return the sum of the critics' and the actor's losses, a scalar."""
        total = self.critic_loss(batch)
        if self.updates_actor():
            total = total + self.actor_loss(batch)
        return total

    def updates_actor(self) -> bool:
        """Return whether this update includes the actor."""
        return True

    def updates_parameter(self, name: str) -> bool:
        """Return whether this update includes one of the `extra_parameters`."""
        return True

    def critic_loss(self, batch: TensorBatch) -> torch.Tensor:
        """Return the mean of half the squared TD errors, summed over the critics.

        Rows are weighted by the column `weights` [B] if there is one.
        """
        with torch.no_grad():
            targets = self.td_targets(batch)
        values = self.action_values(batch)
        errors = values - targets
        self.record_row_stats(batch, td_error=errors.detach().abs().mean(0))
        self.stats["mean_q"] = values.detach().mean()
        self.stats["mean_td_error"] = errors.detach().mean()
        losses = 0.5 * errors.square().sum(0)
        if "weights" in batch:
            losses = losses * batch["weights"]
        loss = losses.mean()
        self.stats["critic_loss"] = loss.detach()
        return loss

    def action_values(self, batch: TensorBatch) -> torch.Tensor:
        """Return the critics' values [critics, B] of the batch's actions."""
        return self.model.q_values(batch["obs"], batch["actions"])

    def td_targets(self, batch: TensorBatch) -> torch.Tensor:
        """Return the critics' targets [B]: R + gamma^n v(s'), and R if s' is terminal."""
        rewards, discounts = batch["rewards"], self.discounts(batch)
        next_values = self.next_values(batch["new_obs"])
        return torch.where(discounts > 0, rewards + discounts * next_values, rewards).float()

    def next_values(self, new_obs: Any) -> torch.Tensor:
        """Return the target networks' values [B] of next observations, tensors [B, …]."""
        raise NotImplementedError(f"{type(self).__name__} has no next_values(): implement it")

    def actor_loss(self, batch: TensorBatch) -> torch.Tensor:
        """Return the actor's loss, a scalar."""
        raise NotImplementedError(f"{type(self).__name__} has no actor_loss(): implement it")
