"""What SAC, TD3 and DDPG share: an actor, critics of its actions, and slow copies of both."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from pydantic import Field

from flowrl.algorithms.off_policy import OffPolicyConfig
from flowrl.policies.config import ModelConfig
from flowrl.policies.learning.flat_parameters import FlatAdam
from flowrl.policies.learning.kernels.backprop import Backprop
from flowrl.policies.models.actor_critic import ActorCritic
from flowrl.policies.models.base import ModelV2
from flowrl.policies.models.fcnet import uses_numpy
from flowrl.policies.models.flatten import flatten_numpy
from flowrl.policies.schedules import Schedule, value_at
from flowrl.policies.target_network import TargetNetwork
from flowrl.policies.torch_policy import TensorBatch
from flowrl.seeding import random_stream
from flowrl.settings import ConfigError, Count, Fraction, Positive
from flowrl.trainer.config import AlgorithmConfig


class ActorCriticSettings(AlgorithmConfig):
    """What the algorithms with an actor and critics share, wherever their experience is from."""

    train_batch_size: Count = 256
    lr: Schedule = 3e-4
    grad_clip: Positive | None = None
    model: ModelConfig = ModelConfig(fcnet_hiddens=[256, 256], fcnet_activation="relu")
    q_model: ModelConfig | None = None
    """The critics' networks; None: like the actor's."""
    actor_lr: Schedule | None = None
    """Learning rate of the actor; None: `lr`."""
    critic_lr: Schedule | None = None
    """The same of the critics."""
    twin_q: bool = True
    """Two critics, the smaller value counts (Fujimoto et al. 2018, section 4.2)."""
    tau: Fraction = 0.005
    """How far each update of the target networks goes towards the online ones."""
    target_network_update_freq: int = Field(default=0, ge=0)
    """Env steps sampled between updates of the target networks; 0 is after every train batch."""


class ActorCriticConfig(ActorCriticSettings, OffPolicyConfig):
    """Settings of those that learn from replay."""

    rollout_fragment_length: Count | Literal["auto"] = 1
    replay_buffer_capacity: Count = 100_000
    min_sample_timesteps_per_iteration: int = Field(default=1000, ge=0)


class ActorCriticPolicy(TargetNetwork):
    """Base of policies whose critics learn by temporal differences, from what their target networks
    say of the actor's next actions.

    A subclass writes `next_values` and `actor_loss`, and says which parameters it has besides.

    Attributes:
        row_stats: has `td_error` [rows], the mean over the critics.
    """

    config: Any
    model: ActorCritic
    target_model: ActorCritic
    _in_parts: FlatAdam | None = None  # the optimizer whose parts have rates of their own

    def __init__(self, observation_space: Any, action_space: Any, config: Any):
        name = type(self).__name__.removesuffix("TorchPolicy")
        config = self.settings_of(config)
        if isinstance(action_space, spaces.Box):
            bounded = np.isfinite(action_space.low).all() and np.isfinite(action_space.high).all()
            unit = (action_space.low == -1).all() and (action_space.high == 1).all()
            if not bounded:
                raise ConfigError(f"{name} needs actions within bounds, not {action_space}")
            if not (config.normalize_actions or unit):
                raise ConfigError(
                    f"normalize_actions: {name} acts in [-1, 1], which must be stretched to "
                    f"{action_space}: leave it True"
                )
        else:
            self.check_discrete(action_space)
        if config.model.num_framestacks > 1:
            raise ConfigError(
                f"model: {name} sees single observations: stack frames by a wrapper of the "
                "environment (gymnasium's FrameStackObservation)"
            )
        super().__init__(observation_space, action_space, config)
        others = set(self.model.view_requirements) - {"obs"}
        if others or self.is_recurrent:
            raise ConfigError(
                f"{name}'s networks see observations alone, without memory or views of "
                f"{sorted(others)}"
            )
        self.model.use_numpy &= config.precision == "float32"
        self.target_model.use_numpy = self.model.use_numpy
        self._by_hand = self._networks_by_hand()

    def _networks_by_hand(self) -> list[Backprop] | None:
        """The actor and the critics as numpy differentiates them; None where it does not, or where
        a subclass has a loss of its own."""
        model, own = self.model, type(self)
        known = {ActorCriticPolicy.__qualname__, _class_of(own.actor_by_hand)}
        losses = own.loss, own.critic_loss, own.values_of_actions, own.actor_loss
        networks = [model.actor, *model.critics]
        plain = isinstance(self.action_space, spaces.Box) and model.use_numpy
        plain = plain and all(_class_of(part) in known for part in losses)
        return [Backprop(n) for n in networks] if plain and all(map(uses_numpy, networks)) else None

    def check_discrete(self, action_space: Any) -> None:
        """Refuse actions that are not continuous, where there is nothing for them."""
        name = type(self).__name__.removesuffix("TorchPolicy")
        raise ConfigError(f"{name} is for Box actions, not {action_space}")

    # -- networks ----------------------------------------------------------------------------------

    def extra_parameters(self) -> dict[str, torch.Tensor]:
        """Parameters that are no network's, by name, with their first values."""
        return {}

    def make_model(self) -> ModelV2:
        config = self.config
        shared = config.model.updated(vf_share_layers=True, free_log_std=False)
        return ActorCritic(
            self.network(shared),
            self.action_space,
            2 if config.twin_q else 1,
            config.q_model or config.model,
            random_stream(config.seed, "policy", "critics"),
            self.extra_parameters(),
        )

    def make_optimizer(self) -> Any:
        config, model = self.config, self.model
        places = [self.flat.part(part.parameters()) for part in (model.actor, model.critics)]
        extra = [getattr(model, name) for name in self.extra_parameters()]
        if extra:
            places.append(self.flat.part(extra))
        parts = [(place, value_at(self._rate(i), 0)) for i, place in enumerate(places)]
        made = FlatAdam(self.flat, lr=parts[0][1], eps=config.adam_epsilon, parts=parts)
        self._in_parts = made
        return made

    def _rate(self, part: int) -> Any:
        """Learning rate of a part: actor, critics, `extra_parameters`."""
        own = (self.config.actor_lr, self.config.critic_lr, self.extra_lr())[part]
        return self.config.lr if own is None else own

    def _follow_schedule(self) -> None:
        if self.optimizers != [self._in_parts]:  # a subclass' own
            super()._follow_schedule()
            return
        for part, group in enumerate(self.optimizer.param_groups):
            group["lr"] = value_at(self._rate(part), self.timestep)

    def extra_lr(self) -> Any:
        """Learning rate of `extra_parameters`, a schedule; None: `lr`."""
        return None

    # -- acting ------------------------------------------------------------------------------------

    def _act(
        self, input_dict: dict[str, Any], explore: bool
    ) -> tuple[Any, list[np.ndarray], dict[str, np.ndarray]]:
        actions, states, _ = super()._act(input_dict, explore)
        return actions, states, {}  # nothing else is worth the memory of a replay buffer

    # -- learning ----------------------------------------------------------------------------------

    def loss(self, batch: TensorBatch) -> torch.Tensor:
        """The critics' loss and the actor's, each of parameters of its own."""
        total = self.critic_loss(batch)
        if self.updates_actor():
            total = total + self.actor_loss(batch)
        return total

    def updates_actor(self) -> bool:
        """Whether this update is the actor's, too."""
        return True

    def critic_loss(self, batch: TensorBatch) -> torch.Tensor:
        """Half the squared TD errors, added up over the critics; weighted by `weights` [B] where
        there are some."""
        goals = self.goals(batch)
        values = self.values_of_actions(batch)
        errors = values - torch.from_numpy(goals).to(self.device)
        told = errors.detach().mean(0).cpu().numpy()
        self.note_rows(batch, td_error=told)
        self.stats["mean_q"] = values.detach().mean()
        self.stats["mean_td_error"] = float(told.mean())
        squares = 0.5 * errors.square().sum(0)
        if "weights" in batch:
            squares = squares * batch["weights"]
        loss = squares.mean()
        self.stats["critic_loss"] = loss.detach()
        return loss

    def gradient_by_hand(self, batch: TensorBatch) -> float | None:
        """The same losses and their derivatives, where numpy computes the networks: without
        autograd."""
        if self._by_hand is None:
            return None
        self.flat.gradient.zero_()
        goals = self.goals(batch)
        obs = flatten_numpy(self.observation_space, batch.array("obs"))
        seen = _joined(obs, batch.array("actions"))
        critics = self._by_hand[1:]
        errors = np.stack([critic.outputs(seen)[:, 0] for critic in critics])
        self.stats["mean_q"] = float(errors.mean())
        errors -= goals
        told = errors.mean(0)
        self.note_rows(batch, td_error=told)
        self.stats["mean_td_error"] = float(told.mean())
        share: Any = np.float32(1.0 / len(goals))
        if "weights" in batch:
            share = share * batch.array("weights").astype(np.float32, copy=False)
        slopes = errors * share
        for critic, own in zip(critics, slopes, strict=True):
            critic.backward(own[:, None])
        loss = 0.5 * float((errors * slopes).sum())
        self.stats["critic_loss"] = loss
        return loss + self.actor_by_hand(obs) if self.updates_actor() else loss

    def actor_by_hand(self, obs: np.ndarray) -> float:
        """`actor_loss` and its derivative, at features [B, size] of observations."""
        raise NotImplementedError(f"{type(self).__name__} has no actor_by_hand(): write one")

    def worth_by_hand(
        self, obs: np.ndarray, actions: np.ndarray, first: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The least value [B] that so many of the critics give actions [B, d], and how it changes
        with them [B, d], until the next call."""
        assert self._by_hand is not None
        critics, seen = self._by_hand[1:][:first], _joined(obs, actions)
        size = obs.shape[1]
        if len(critics) == 1:
            values = critics[0].outputs(seen)[:, 0]
            ones = np.ones((len(seen), 1), np.float32)
            return values, critics[0].to_inputs(ones, slice(None))[:, size:]
        values = np.stack([critic.outputs(seen)[:, 0] for critic in critics])
        least = values.argmin(0)
        slopes = np.empty_like(actions)
        for number, critic in enumerate(critics):
            rows = np.flatnonzero(least == number)
            ones = np.ones((len(rows), 1), np.float32)
            slopes[rows] = critic.to_inputs(ones, rows)[:, size:]
        return values.min(0), slopes

    def values_of_actions(self, batch: TensorBatch) -> torch.Tensor:
        """The critics' values [critics, B] of the batch's actions."""
        return self.model.q_values(batch["obs"], batch["actions"])

    def goals(self, batch: TensorBatch) -> np.ndarray:
        """What those values are to be, [B]: R + gamma^n v(s'), R alone where s' is terminal."""
        discounts: Any = self.config.gamma
        if "n_steps" in batch:
            discounts = discounts ** batch.array("n_steps")
        following = self.next_values(batch.array("new_obs"))
        following = np.where(batch.array("terminateds"), 0.0, discounts * following)
        return (batch.array("rewards") + following).astype(np.float32)

    def next_values(self, new_obs: Any) -> np.ndarray:
        """Values [B] of observations, by the target networks."""
        raise NotImplementedError(f"{type(self).__name__} has no next_values(): write one")

    def actor_loss(self, batch: TensorBatch) -> torch.Tensor:
        """What is the smaller, the better the actor is."""
        raise NotImplementedError(f"{type(self).__name__} has no actor_loss(): write one")


def _class_of(method: Any) -> str:
    """The class that a method was written in."""
    name: str = method.__qualname__.rpartition(".")[0]
    return name


def _joined(obs: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """What critics see [B, size]."""
    made: np.ndarray = np.concatenate([obs, actions.reshape(len(obs), -1)], 1, dtype=np.float32)
    return made
