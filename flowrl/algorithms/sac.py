"""SAC: soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905); for Discrete actions the variant
of Christodoulou 2019 (arXiv 1910.07207)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from gymnasium import spaces

from flowrl.algorithms.action_spaces import wrong_action_space
from flowrl.algorithms.actor_critic import (
    ActorCriticConfig,
    ActorCriticPolicy,
    ActorCriticSettings,
)
from flowrl.policies.config import ExplorationConfig
from flowrl.policies.distributions import Categorical, SquashedGaussian
from flowrl.policies.exploration import MASKED_BELOW
from flowrl.policies.schedules import Schedule
from flowrl.policies.torch_policy import TensorBatch
from flowrl.settings import Finite, Needs, Positive
from flowrl.state_schema import Amount, Fields, check_state
from flowrl.trainer.algorithm import Algorithm, PolicyClass
from flowrl.trainer.config import AlgorithmConfig, PlanSetting, PlanSource


class SACSettings(ActorCriticSettings):
    """Settings that SAC and CQL share."""

    initial_alpha: Positive = 1.0
    """Initial temperature: weight of the entropy relative to the rewards."""
    target_entropy: Finite | Literal["auto"] | None = "auto"
    """Target entropy in nats, to which the temperature adapts: "auto" uses minus the number of
    action dimensions, or 0.98 of the maximum entropy of the actions that are not masked for
    Discrete actions. None keeps the temperature fixed."""
    entropy_lr: Schedule | None = None
    """Learning rate of the temperature, if it is learned; None uses `lr`."""


class SACConfig(ActorCriticConfig, SACSettings):
    """Settings of SAC."""

    algorithm: ClassVar[str] = "flowrl.algorithms.sac:SAC"
    needs: ClassVar[Needs] = {"entropy_lr": ("target_entropy", None)}

    plan: PlanSetting = "sac"
    exploration_config: ExplorationConfig = ExplorationConfig(random_timesteps=1000)

    def build(self, plan: PlanSource | None = None) -> SAC:
        return self._build(plan)


_FIELDS: Fields = {"initial_alpha": Amount}


class SACTorchPolicy(ActorCriticPolicy):
    """A policy that maximizes its rewards plus its weighted entropy.

    Attributes:
        target_entropy: in nats; None if the temperature is fixed.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = SACConfig
    config: Any

    def check_non_box_space(self, action_space: Any) -> None:
        if not isinstance(action_space, spaces.Discrete):
            raise wrong_action_space(self.algorithm_name, "Box and Discrete", action_space)

    def make_distribution(self) -> Any:
        if isinstance(self.action_space, spaces.Discrete):
            return Categorical
        return SquashedGaussian.for_space(self.action_space)

    def extra_parameters(self) -> dict[str, torch.Tensor]:
        return {"log_alpha": torch.tensor(math.log(self.config.initial_alpha))}

    def extra_lr(self) -> Any:
        return self.config.entropy_lr

    def updates_parameter(self, name: str) -> bool:
        return name != "log_alpha" or self.target_entropy is not None

    @property
    def is_discrete(self) -> bool:
        """Whether the action space is Discrete."""
        return isinstance(self.action_space, spaces.Discrete)

    @property
    def target_entropy(self) -> float | None:
        """Target entropy in nats if no action is masked; None if the temperature is fixed."""
        target: float | None = self.config.target_entropy
        if target != "auto":
            return target
        if self.is_discrete:
            return 0.98 * math.log(int(self.action_space.n))  # type: ignore[attr-defined]
        return -float(math.prod(self.action_space.shape or ()))

    @property
    def alpha(self) -> float:
        """The temperature."""
        return float(self._log_alpha.detach().exp())

    @property
    def _log_alpha(self) -> torch.Tensor:
        parameter = self.model.log_alpha
        assert isinstance(parameter, torch.Tensor)
        return parameter

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "initial_alpha": self.config.initial_alpha}

    def set_state(self, state: dict[str, Any]) -> None:
        """Load a state from `get_state`; its temperature only if it is learned, and the setting
        `initial_alpha` was the same."""
        check_state(state, _FIELDS, f"the state of a {type(self).__name__}")
        super().set_state(state)
        initial = self.config.initial_alpha
        if self.target_entropy is None or state["initial_alpha"] != initial:
            with torch.no_grad():
                self._log_alpha.fill_(math.log(initial))

    def action_values(self, batch: TensorBatch) -> torch.Tensor:
        if not self.is_discrete:
            return super().action_values(batch)
        values = self.model.q_values(batch["obs"])
        actions = batch["actions"].long()[None, :, None].expand(len(values), -1, 1)
        return values.gather(2, actions).squeeze(2)

    def next_values(self, new_obs: Any) -> torch.Tensor:
        """Return min Q(s', a') - alpha log pi(a' | s') [B] for a sampled action a' (equation 3 of
        the paper); its expectation for Discrete actions (Christodoulou 2019, equation 10)."""
        alpha = self._log_alpha.detach().exp()
        outputs = self.model.evaluate_actor(new_obs)
        if not self.is_discrete:
            actions, logp = self._sample_actions(outputs)
            values = self.target_model.evaluate_critics(new_obs, actions).amin(0)
            return values - alpha * logp
        logp = torch.log_softmax(outputs, 1)
        soft_q = self.target_model.evaluate_critics(new_obs).amin(0) - alpha * logp
        return torch.where(outputs <= MASKED_BELOW, 0.0, logp.exp() * soft_q).sum(1)

    def _sample_actions(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return reparameterized actions [B, …] and their log-probabilities [B]."""
        dist: Any = self.dist_class(outputs, self.model)
        rows, size = outputs.shape
        sampled: tuple[torch.Tensor, torch.Tensor] = dist.sample_and_logp(
            self.learner.standard_normal(rows, size // 2)
        )
        return sampled

    def actor_loss(self, batch: TensorBatch) -> torch.Tensor:
        """Return the actor's loss (equation 9 of the paper), plus that of the temperature if it is
        learned (equation 18 with log alpha in place of alpha), a scalar."""
        alpha = self._log_alpha.detach().exp()
        outputs = self.model.outputs(batch["obs"])
        target: Any = self.target_entropy
        if self.is_discrete:
            loss, entropy = self._discrete_loss(batch, outputs, alpha)
            if target is not None and self.config.target_entropy == "auto":
                target = self._mean_target_entropy(outputs)
        else:
            actions, logp = self._sample_actions(outputs)
            values = self.model.q_values(batch["obs"], actions, frozen=True)
            loss = (alpha * logp - values.amin(0)).mean()
            entropy = -logp.detach().mean()
        self.stats |= {"actor_loss": loss.detach(), "entropy": entropy, "alpha": alpha}
        if target is None:
            return loss
        return loss + self._log_alpha * (entropy - target)

    @staticmethod
    def _mean_target_entropy(outputs: torch.Tensor) -> torch.Tensor:
        """Return the mean of 0.98 of the maximum entropy of the actions that are not masked."""
        allowed = (outputs > MASKED_BELOW).sum(1).clip(1)
        return 0.98 * allowed.float().log().mean()

    def _discrete_loss(
        self, batch: TensorBatch, outputs: torch.Tensor, alpha: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the actor's loss (Christodoulou 2019, equation 12) and the mean entropy."""
        logp = torch.log_softmax(outputs, 1)
        probs = logp.exp()
        with torch.no_grad():
            q = self.model.q_values(batch["obs"], frozen=True).amin(0)
        forbidden = outputs <= MASKED_BELOW
        losses = torch.where(forbidden, 0.0, probs * (alpha * logp - q)).sum(1)
        entropy = -torch.where(forbidden, 0.0, probs * logp).sum(1)
        return losses.mean(), entropy.detach().mean()


class SAC(Algorithm):
    """SAC with the plan `sac`; SACConfig has its settings.

    Example:
        >>> algo = SAC("Pendulum-v1", seed=1)  # doctest: +SKIP
        >>> algo.learn(total_timesteps=100_000)  # doctest: +SKIP
    """

    policy_class: ClassVar[PolicyClass] = SACTorchPolicy
    config_class = SACConfig


DEFAULT_CONFIG = SACConfig()
