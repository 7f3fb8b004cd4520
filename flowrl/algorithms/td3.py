"""TD3: twin delayed deep deterministic policy gradients (Fujimoto et al. 2018, arXiv 1802.09477).

DDPG (Lillicrap et al. 2016, arXiv 1509.02971) is TD3 with one critic, without delayed updates and
without noise on target actions.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from flowrl.algorithms.actor_critic import ActorCriticConfig, ActorCriticPolicy
from flowrl.policies.config import ExplorationConfig
from flowrl.policies.distributions import SquashedDeterministic
from flowrl.policies.schedules import Schedule
from flowrl.policies.torch_policy import TensorBatch
from flowrl.settings import Count, Needs, NonNegative
from flowrl.trainer.algorithm import Algorithm, PolicyClass
from flowrl.trainer.config import PlanSetting, PlanSource


class TD3Config(ActorCriticConfig):
    """Settings of TD3."""

    algorithm: ClassVar[str] = "flowrl.algorithms.td3:TD3"
    needs: ClassVar[Needs] = {"target_noise_clip": ("target_noise", 0)}

    plan: PlanSetting = "td3"
    lr: Schedule = 1e-3
    policy_delay: Count = 2
    """Critic updates per update of the actor and the target networks (section 5.2). Target networks
    are updated at most once per train batch."""
    target_noise: NonNegative = 0.2
    """Standard deviation of the noise on target actions, for actions in [-1, 1] (section 5.3); 0
    adds none."""
    target_noise_clip: NonNegative = 0.5
    """Clip the noise on target actions to ± this."""
    exploration_config: ExplorationConfig = ExplorationConfig(
        type="GaussianNoise", scale=0.1, random_timesteps=1000
    )

    def build(self, plan: PlanSource | None = None) -> TD3:
        return self._build(plan)


class DDPGConfig(TD3Config):
    """Settings of DDPG: TD3 with one critic, without delayed updates and target noise."""

    algorithm: ClassVar[str] = "flowrl.algorithms.td3:DDPG"

    twin_q: bool = False
    policy_delay: Count = 1
    target_noise: NonNegative = 0.0
    exploration_config: ExplorationConfig = ExplorationConfig(
        type="OrnsteinUhlenbeckNoise", scale=0.1, random_timesteps=1000
    )

    def build(self, plan: PlanSource | None = None) -> DDPG:
        return self._build(plan)


class TD3TorchPolicy(ActorCriticPolicy):
    """A deterministic policy with noise on its actions while sampling."""

    config_class = TD3Config
    config: TD3Config

    def make_distribution(self) -> Any:
        return SquashedDeterministic.for_space(self.action_space)

    def updates_actor(self) -> bool:
        return (self.learner.num_updates + 1) % self.config.policy_delay == 0

    def update_target(self, tau: float | None = None) -> bool:
        """Update the target networks; without `tau`, only if the last batch updated the actor.

        Returns:
            whether the target networks were updated.
        """
        updates, delay = self.learner.num_updates, self.config.policy_delay
        if tau is None and updates // delay == (updates - self.learner.updates_in_batch) // delay:
            return False
        return super().update_target(tau)

    def next_values(self, new_obs: Any) -> torch.Tensor:
        """Return min Q'(s', a' + noise) for the target actor's a' (equations 13 and 14)."""
        actions = torch.tanh(self.target_model.evaluate_actor(new_obs))
        if self.config.target_noise:
            limit = self.config.target_noise_clip
            noise = self.learner.standard_normal(*actions.shape) * self.config.target_noise
            actions = (actions + noise.clamp(-limit, limit)).clamp(-1.0, 1.0)
        return self.target_model.evaluate_critics(new_obs, actions).amin(0)

    def actor_loss(self, batch: TensorBatch) -> torch.Tensor:
        """Return minus the first critic's value of the actor's actions (section 3)."""
        dist: Any = self.dist_class(self.model.outputs(batch["obs"]), self.model)
        values = self.model.q_values(
            batch["obs"], dist.deterministic_sample(), frozen=True, first=1
        )
        loss = -values[0].mean()
        self.stats["actor_loss"] = loss.detach()
        return loss


class TD3(Algorithm):
    """TD3 with the plan `td3`; TD3Config has its settings.

    Example:
        >>> algo = TD3("Pendulum-v1", seed=1)  # doctest: +SKIP
        >>> algo.learn(total_timesteps=100_000)  # doctest: +SKIP
    """

    policy_class: ClassVar[PolicyClass] = TD3TorchPolicy
    config_class = TD3Config


class DDPGTorchPolicy(TD3TorchPolicy):
    """TD3's policy with DDPG's settings."""

    config_class = DDPGConfig


class DDPG(TD3):
    """DDPG with the plan `td3`; DDPGConfig has its settings.

    Example:
        >>> algo = DDPG("Pendulum-v1", seed=1)  # doctest: +SKIP
        >>> algo.learn(total_timesteps=100_000)  # doctest: +SKIP
    """

    policy_class: ClassVar[PolicyClass] = DDPGTorchPolicy
    config_class = DDPGConfig


DEFAULT_CONFIG = TD3Config()
