"""MARWIL: imitation weighted by advantages (Wang et al. 2018, NeurIPS), and BC: behavior cloning,
which weights all rows equally (Pomerleau 1989)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import torch
from pydantic import Field

from flowrl.algorithms.offline_config import OfflineConfig
from flowrl.data import SampleBatch
from flowrl.errors import ConfigError, OfflineDataError
from flowrl.ops import ReadMinari, ReadParquet
from flowrl.policies.policy_spec import specs_of
from flowrl.policies.returns import discounted_returns
from flowrl.policies.torch_policy import TensorBatch, TorchPolicy
from flowrl.sampling.worker_set import WorkerSet
from flowrl.settings import (
    Count,
    Needs,
    NonNegative,
    NonNegativeInt,
    Positive,
    check_of_settings,
)
from flowrl.state_schema import Amount, check_state
from flowrl.trainer.algorithm import Algorithm, PolicyClass
from flowrl.trainer.config import PlanSetting, PlanSource

log = logging.getLogger("flowrl")

MAX_EXPONENT = 5.0  # largest exponent of a weight, so that no row dominates a batch


class MARWILConfig(OfflineConfig):
    """Settings of MARWIL."""

    algorithm: ClassVar[str] = "flowrl.algorithms.marwil:MARWIL"
    needs: ClassVar[Needs] = dict.fromkeys(
        (
            "vf_coeff", "moving_average_sqd_adv_norm_start",
            "moving_average_sqd_adv_norm_update_rate",
        ),
        ("beta", 0),
    )  # fmt: skip

    plan: PlanSetting = "marwil"
    train_batch_size: Count = 512
    """Rows per train batch."""
    min_sample_timesteps_per_iteration: NonNegativeInt = 10_000
    beta: NonNegative = 1.0
    """Scale of the exponent in the weights of rows, exp(beta * normalized advantage); 0 weights all
    rows equally."""
    vf_coeff: NonNegative = 1.0
    """Weight of the value loss; for a `beta` above 0."""
    moving_average_sqd_adv_norm_start: Positive = 100.0
    """Initial value of the moving average of squared advantages, which normalizes advantages."""
    moving_average_sqd_adv_norm_update_rate: Annotated[Positive, Field(le=1)] = 1e-3
    """Weight of the rows of each update in the moving average of squared advantages."""

    def batches(self, workers: WorkerSet) -> ReadParquet | ReadMinari:
        """Return a stream of the train batches of a plan.

        Raises:
            ConfigError: `input_` is not set.
        """
        columns, config = ["obs", "actions"], self._settings_of_trained_policy()
        if config.beta:
            columns += ["rewards", "terminateds", "truncateds", "unroll_id"]
        return self.read_recorded(workers, columns, _PrepareRows(config.beta, config.gamma))

    def _settings_of_trained_policy(self) -> Any:
        policy_ids = list(specs_of(self.policies))
        is_known = self.input_policy_id in policy_ids  # else the only policy, or an error later
        settings = self.for_policy(self.input_policy_id if is_known else policy_ids[0])
        return settings if isinstance(settings, MARWILConfig) else self

    def build(self, plan: PlanSource | None = None) -> MARWIL:
        return self._build(plan)


class BCConfig(MARWILConfig):
    """Settings of BC: MARWIL without weights."""

    algorithm: ClassVar[str] = "flowrl.algorithms.marwil:BC"

    plan: PlanSetting = "bc"
    beta: NonNegative = 0.0
    """Must be 0; use MARWIL for weighted rows."""

    @check_of_settings
    def _check_beta(self) -> Self:
        if self.beta:
            raise ValueError(f"beta={self.beta}: BC does not weight rows, use MARWIL")
        return self

    def build(self, plan: PlanSource | None = None) -> BC:
        return self._build(plan)


class _PrepareRows:
    """Returns the columns that the loss reads, with discounted returns if `beta` is set; logs one
    warning if most trajectories are cut."""

    def __init__(self, beta: float, gamma: float):
        self._beta, self._gamma = beta, gamma
        self._has_warned = False

    def __call__(self, rows: SampleBatch) -> SampleBatch:
        columns = {"obs": rows["obs"], "actions": rows["actions"]}
        if self._beta:
            columns["value_targets"] = returns_of(rows, self._gamma)
            self._warn_if_most_are_cut(rows)
        return SampleBatch(columns)

    def _warn_if_most_are_cut(self, rows: SampleBatch) -> None:
        ends, lasts = _ends_of(rows)
        if not self._has_warned and 2 * (lasts & ~ends).sum() > (lasts | ends).sum():
            self._has_warned = True
            log.warning(
                "most of the recorded trajectories end with a fragment, not with an episode, so "
                'their returns lack later rewards: record with batch_mode="complete_episodes"'
            )


def returns_of(rows: SampleBatch, gamma: float) -> np.ndarray:
    """Return the discounted sum [rows] of the rewards from each row to the end of its trajectory.

    Consecutive rows of one `unroll_id` are consecutive steps. A trajectory that was not recorded up
    to its end has no rewards after its last row.

    Raises:
        OfflineDataError: the rows of a trajectory are not consecutive.
    """
    unrolls = np.asarray(rows["unroll_id"])
    ends, lasts = _ends_of(rows)
    firsts = np.append(True, lasts[:-1])
    open_ids = unrolls[lasts & ~ends]  # of trajectories that were cut
    ids, counts = np.unique(unrolls[firsts], return_counts=True)
    divided = np.intersect1d(ids[counts > 1], open_ids)
    if len(divided):
        raise OfflineDataError(
            f"the rows with unroll_id {divided[0]} are not consecutive, so their returns are "
            "unknown: sort the rows by unroll_id and t before they are written"
        )
    rewards = np.asarray(rows["rewards"], np.float32)[:, None]
    cuts = (ends | lasts)[:, None]
    returns = discounted_returns(rewards, cuts, np.zeros(1, np.float32), gamma)
    return returns[:, 0]


def _ends_of(rows: SampleBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows end an episode, and which are the last rows of their `unroll_id`."""
    unrolls = np.asarray(rows["unroll_id"])
    ends = np.asarray(rows["terminateds"], bool) | np.asarray(rows["truncateds"], bool)
    return ends, np.append(unrolls[1:] != unrolls[:-1], True)


class MARWILTorchPolicy(TorchPolicy):
    """A policy that imitates recorded actions, weighted by their advantages.

    Attributes:
        mean_square: moving average of the squared advantages.
    """

    config_class = MARWILConfig
    config: MARWILConfig
    scalar_columns = ("value_targets",)

    def __init__(self, observation_space: Any, action_space: Any, config: Any):
        name = self.algorithm_name
        config = self.config_from(config)
        config.model.check_no_memory(name)
        super().__init__(observation_space, action_space, config)
        extra_views = set(self.model.view_requirements) - {"obs"}
        obs_view = self.model.view_requirements.get("obs")
        if extra_views or self.is_recurrent or obs_view is None or obs_view.is_window:
            raise ConfigError(
                f"model: {name} learns from single rows: it supports only networks without memory "
                "that read single observations, not views of "
                f"{sorted(extra_views) or 'several observations'}"
            )
        self._squares: list[tuple[float, int]] = []  # mean of A^2 and rows, of each loss
        self.mean_square = float(self.config.moving_average_sqd_adv_norm_start)

    def loss(self, batch: TensorBatch) -> torch.Tensor:
        """Return the policy loss, the mean of -exp(beta A / c) log pi(a | s), plus the value loss.

        c^2 is a moving average of A^2 (Wang et al. 2018, algorithm 1). Without beta the loss is the
        mean of -log pi(a | s).
        """
        inputs, _ = self.model.from_batch(batch)
        logp = self.dist_class(inputs, self.model).logp(batch["actions"])
        self.stats["mean_logp"] = logp.detach().mean()
        if not self.config.beta:
            return -logp.mean()
        values = self.model.checked_values(len(logp))
        advantages = (batch["value_targets"] - values).detach()
        square = self.learner.mean_of_rows(advantages.square())
        self._squares.append((square, len(advantages)))
        scaled = advantages / (self._next_mean_square(square) ** 0.5 + 1e-8)
        weights = torch.exp((self.config.beta * scaled).clamp(max=MAX_EXPONENT))
        policy_loss = -(weights * logp).mean()
        vf_loss = 0.5 * (values - batch["value_targets"]).square().mean()
        self.stats |= {"policy_loss": policy_loss.detach(), "vf_loss": vf_loss.detach()}
        self.stats["mean_weight"] = weights.mean()
        return policy_loss + self.config.vf_coeff * vf_loss

    def loss_without_rows(self) -> None:
        """See TorchPolicy; a subclass with another loss also overrides this method."""
        if self.config.beta:
            self._squares.append((self.learner.mean_of_rows(torch.empty(0)), 1))

    def _next_mean_square(self, square: float) -> float:
        """Return `mean_square` after an update with this mean of A^2."""
        rate = self.config.moving_average_sqd_adv_norm_update_rate
        return self.mean_square + rate * (square - self.mean_square)

    def learn_on_batch(self, batch: SampleBatch) -> dict[str, float]:
        """See TorchPolicy; also updates `mean_square`, once per update."""
        self._squares = []
        num_updates = self.learner.num_updates
        stats = super().learn_on_batch(batch)
        if self.config.beta and self.learner.num_updates > num_updates:
            self._update_mean_square()
        return stats

    def compute_gradients(self, batch: SampleBatch) -> tuple[np.ndarray, dict[str, float]]:
        self._squares = []
        return super().compute_gradients(batch)

    def apply_gradients(self, gradients: np.ndarray | torch.Tensor | Mapping[str, Any]) -> None:
        """See TorchPolicy; also updates `mean_square` if this policy computed gradients."""
        num_updates = self.learner.num_updates
        super().apply_gradients(gradients)
        if self._squares and self.learner.num_updates > num_updates:
            self._update_mean_square()
        self._squares = []

    def _update_mean_square(self) -> None:
        if not self._squares:  # a subclass replaces the loss
            return
        rows = sum(count for _, count in self._squares)
        square = sum(value * count for value, count in self._squares) / rows
        self.mean_square = self._next_mean_square(square)
        self._squares = []

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "mean_square": self.mean_square}

    def set_state(self, state: dict[str, Any]) -> None:
        check_state(state, {"mean_square": Amount}, f"the state of a {type(self).__name__}")
        super().set_state(state)
        self.mean_square = float(state["mean_square"])


class MARWIL(Algorithm):
    """MARWIL with the plan `marwil`; MARWILConfig has its settings."""

    policy_class: ClassVar[PolicyClass] = MARWILTorchPolicy
    config_class = MARWILConfig


class BCTorchPolicy(MARWILTorchPolicy):
    """A policy that imitates recorded actions."""

    config_class = BCConfig
    config: BCConfig


class BC(MARWIL):
    """BC with the plan `bc`; BCConfig has its settings."""

    policy_class: ClassVar[PolicyClass] = BCTorchPolicy
    config_class = BCConfig


DEFAULT_CONFIG = MARWILConfig()
