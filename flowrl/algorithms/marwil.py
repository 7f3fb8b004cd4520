"""MARWIL: imitation weighted by advantages (Wang et al. 2018); BC, the same without weights."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from flowrl.algorithms.offline_config import OfflineConfig
from flowrl.data import SampleBatch
from flowrl.ops import ReadMinari, ReadParquet
from flowrl.policies.returns import discounted_returns
from flowrl.policies.torch_policy import TensorBatch, TorchPolicy
from flowrl.sampling.worker_set import WorkerSet
from flowrl.settings import ConfigError, Count, NotNegative, Positive
from flowrl.trainer.algorithm import Algorithm

MOST = 5.0  # exponents are kept below: one row is not to be all of a batch


class MARWILConfig(OfflineConfig):
    """Settings of MARWIL."""

    algorithm: ClassVar[str] = "flowrl.algorithms.marwil:MARWIL"

    plan: str | None = "marwil"
    train_batch_size: Count = 512
    """Rows per train batch."""
    min_sample_timesteps_per_iteration: int = Field(default=10_000, ge=0)
    beta: NotNegative = 1.0
    """How much better actions weigh more: exp(beta x normalised advantage); 0: not at all."""
    vf_coeff: NotNegative = 1.0
    """Weight of the value loss, where there are weights."""
    moving_average_sqd_adv_norm_start: Positive = 100.0
    """The mean square that advantages are normalised by, at first."""
    moving_average_sqd_adv_norm_update_rate: Positive = 1e-3
    """How far each train batch moves it."""

    def batches(self, workers: WorkerSet) -> ReadParquet | ReadMinari:
        """The train batches of a plan.

        Raises:
            ConfigError: no `input_` is set.
        """
        needs = ["obs", "actions"]
        if self.beta:
            needs += ["rewards", "terminateds", "truncateds", "unroll_id"]
        return self.recorded(workers, needs, self._prepared)

    def _prepared(self, rows: SampleBatch) -> SampleBatch:
        """What is learned from: with the returns that followed, where they are asked for."""
        kept = {"obs": rows["obs"], "actions": rows["actions"]}
        if self.beta:
            kept["value_targets"] = returns_of(rows, self.gamma)
        return SampleBatch(kept)


class BCConfig(MARWILConfig):
    """Settings of BC: MARWIL's without weights."""

    algorithm: ClassVar[str] = "flowrl.algorithms.marwil:BC"

    plan: str | None = "bc"
    beta: NotNegative = 0.0
    """Always 0."""

    @model_validator(mode="after")
    def _no_weights(self) -> Self:
        if self.beta:
            raise ValueError(f"beta={self.beta}: BC has no weights, MARWIL has")
        return self


def returns_of(rows: SampleBatch, gamma: float) -> np.ndarray:
    """Discounted sums [rows] of the rewards that followed each row, in its own trajectory as far as
    that is there: rows of an `unroll_id` follow each other."""
    unrolls = np.asarray(rows["unroll_id"])
    ends = np.asarray(rows["terminateds"]) | np.asarray(rows["truncateds"])
    ends = ends | np.append(unrolls[1:] != unrolls[:-1], True)
    rewards = np.asarray(rows["rewards"], np.float32)[:, None]
    made = discounted_returns(rewards, ends[:, None], np.zeros(1, np.float32), gamma)
    return made[:, 0]


class MARWILTorchPolicy(TorchPolicy):
    """A policy that does as it has seen, the more the better that went.

    Attributes:
        mean_square: of the advantages, a moving average.
    """

    config_class = MARWILConfig
    config: MARWILConfig

    def __init__(self, observation_space: Any, action_space: Any, config: Any):
        super().__init__(observation_space, action_space, config)
        others = set(self.model.view_requirements) - {"obs"}
        seen = self.model.view_requirements.get("obs")
        if others or self.is_recurrent or seen is None or seen.is_window:
            name = type(self).__name__.removesuffix("TorchPolicy")
            raise ConfigError(
                f"model: {name} learns from single rows: its network sees observations alone, "
                f"without memory or views of {sorted(others) or 'several observations'}"
            )
        self.mean_square = float(config.moving_average_sqd_adv_norm_start)

    def loss(self, batch: TensorBatch) -> torch.Tensor:
        """Minus the mean of exp(beta A / c) log pi(a | s), and the values' squared errors; c^2 is a
        moving average of A^2 (Wang et al. 2018, algorithm 1)."""
        inputs, _ = self.model.from_batch(batch)
        logp = self.dist_class(inputs, self.model).logp(batch["actions"])
        self.stats["mean_logp"] = logp.detach().mean()
        if not self.config.beta:
            return -logp.mean()
        values = self.model.value_function()
        advantages = (batch["value_targets"] - values).detach()
        rate = self.config.moving_average_sqd_adv_norm_update_rate
        self.mean_square += rate * (float(advantages.square().mean()) - self.mean_square)
        scaled = advantages / (self.mean_square**0.5 + 1e-8)
        weights = torch.exp((self.config.beta * scaled).clamp(max=MOST))
        policy_loss = -(weights * logp).mean()
        vf_loss = 0.5 * (values - batch["value_targets"]).square().mean()
        self.stats |= {"policy_loss": policy_loss.detach(), "vf_loss": vf_loss.detach()}
        self.stats["mean_weight"] = weights.mean()
        return policy_loss + self.config.vf_coeff * vf_loss

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "mean_square": self.mean_square}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.mean_square = float(state.get("mean_square", self.mean_square))


class MARWIL(Algorithm):
    """MARWIL over the plan `marwil`."""

    policy_class = MARWILTorchPolicy
    config_class = MARWILConfig


class BCTorchPolicy(MARWILTorchPolicy):
    """A policy that does as it has seen."""

    config_class = BCConfig
    config: BCConfig


class BC(Algorithm):
    """BC over the plan `bc`."""

    policy_class = BCTorchPolicy
    config_class = BCConfig


DEFAULT_CONFIG = MARWILConfig()
