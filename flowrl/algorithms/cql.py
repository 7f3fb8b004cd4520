"""CQL: conservative Q-learning from recorded experience (Kumar et al. 2020, arXiv 2006.04779).

It adds a penalty to SAC's critic loss, for continuous and Discrete actions.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import numpy as np
import optree
import torch

from flowrl.algorithms.offline_config import OfflineConfig
from flowrl.algorithms.sac import SACSettings, SACTorchPolicy
from flowrl.data import SampleBatch
from flowrl.ops import ReadMinari, ReadParquet
from flowrl.policies.torch_policy import TensorBatch
from flowrl.sampling.worker_set import WorkerSet
from flowrl.settings import Count, NonNegative, NonNegativeInt, Positive, check_of_settings
from flowrl.state_schema import Amount, check_state
from flowrl.trainer.algorithm import Algorithm, PolicyClass
from flowrl.trainer.config import PlanSetting, PlanSource

MAX_WEIGHT = 1e6  # largest weight of the penalty
COLUMNS = ("obs", "new_obs", "actions", "rewards", "terminateds")


class CQLConfig(SACSettings, OfflineConfig):
    """Settings of CQL."""

    algorithm: ClassVar[str] = "flowrl.algorithms.cql:CQL"

    plan: PlanSetting = "cql"
    min_sample_timesteps_per_iteration: NonNegativeInt = 10_000
    min_q_weight: NonNegative = 5.0
    """Weight of the penalty on the values of actions that were not recorded (alpha in the
    paper); the initial weight with `lagrangian`."""
    temperature: Positive = 1.0
    """Temperature of the soft maximum over actions in the penalty."""
    num_actions: Count = 10
    """For continuous actions, number of actions drawn from each of three distributions to estimate
    the soft maximum."""
    bc_iters: NonNegativeInt = 0
    """Number of initial updates in which the actor imitates the recorded actions (behavior
    cloning)."""
    lagrangian: bool = False
    """Learn the weight of the penalty (a Lagrange multiplier, appendix F): it grows while the gap
    is above `lagrangian_thresh`, and shrinks while the gap is below it. Its learning rate is
    `entropy_lr`."""
    lagrangian_thresh: Positive = 5.0
    """Target of the gap per critic: the soft maximum of the values minus the value of the recorded
    action."""

    @check_of_settings
    def _check_penalty(self) -> Self:
        self._require(self.lagrangian, "lagrangian=True", "lagrangian_thresh")
        return self

    def batches(self, workers: WorkerSet) -> ReadParquet | ReadMinari:
        """Return a stream of the train batches of a plan.

        Raises:
            ConfigError: `input_` is not set.
        """
        return self.read_recorded(workers, COLUMNS, _clip_actions)

    def build(self, plan: PlanSource | None = None) -> CQL:
        return self._build(plan)


def _clip_actions(rows: SampleBatch) -> SampleBatch:
    """Return the columns that the loss reads; clip continuous actions to [-1, 1], as they were
    clipped for the environment."""
    columns = {name: rows[name] for name in COLUMNS}
    actions = columns["actions"]
    if isinstance(actions, np.ndarray) and actions.dtype.kind == "f":
        columns["actions"] = actions.clip(-1.0, 1.0)
    return SampleBatch(columns)


class CQLTorchPolicy(SACTorchPolicy):
    """A policy whose critics assign low values to actions that were not recorded."""

    config_class = CQLConfig

    def extra_parameters(self) -> dict[str, torch.Tensor]:
        parameters = super().extra_parameters()
        if self.config.lagrangian:
            initial_weight = max(self.config.min_q_weight, 1e-6)
            parameters["log_min_q_weight"] = torch.tensor(math.log(initial_weight))
        return parameters

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "min_q_weight": self.config.min_q_weight}

    def set_state(self, state: dict[str, Any]) -> None:
        """Load the result of `get_state`. If `min_q_weight` differs from the setting, the learned
        weight starts at the setting again."""
        if self.config.lagrangian:
            check_state(state, {"min_q_weight": Amount}, f"the state of a {type(self).__name__}")
        super().set_state(state)
        if self.config.lagrangian and state["min_q_weight"] != self.config.min_q_weight:
            with torch.no_grad():
                initial = self.extra_parameters()["log_min_q_weight"]
                self.model.get_parameter("log_min_q_weight").copy_(initial)

    def critic_loss(self, batch: TensorBatch) -> torch.Tensor:
        """Return SAC's critic loss plus the weighted penalty (equation 4), summed over the critics.

        `gaps` returns the penalty of each critic.
        """
        gaps = self.gaps(batch)
        self.stats["cql_gap"] = gaps.detach().mean()
        if not self.config.lagrangian:
            return super().critic_loss(batch) + self.config.min_q_weight * gaps.sum()
        log_weight: Any = self.model.log_min_q_weight
        excess = gaps - self.config.lagrangian_thresh
        weight = log_weight.detach().exp().clamp(max=MAX_WEIGHT)
        self.stats["min_q_weight"] = weight
        penalty = weight * excess.sum()
        # gradient ascent on weight * excess; at MAX_WEIGHT only steps that lower the weight
        gain = weight * excess.detach().sum()
        slope = torch.where(weight < MAX_WEIGHT, gain, gain.clamp(max=0.0))
        gain = gain + (log_weight - log_weight.detach()) * slope
        return super().critic_loss(batch) + penalty - gain

    def gaps(self, batch: TensorBatch) -> torch.Tensor:
        """Return the mean of log sum exp Q(s, a) - Q(s, a of the batch) of each critic, [critics].

        For continuous actions the sum is estimated by importance sampling (appendix F), from
        uniform actions and from the policy's actions at `obs` and at `new_obs`.
        """
        temperature = self.config.temperature
        recorded_values = self.action_values(batch)
        if self.is_discrete:  # masked actions have very low values
            values = self.model.q_values(batch["obs"])
            soft_maximum = temperature * torch.logsumexp(values / temperature, 2)
            return (soft_maximum - recorded_values).mean(1)
        actions, logp = self._draw_actions(batch)
        repeats = len(logp) // batch.count
        obs = optree.tree_map(
            lambda leaf: leaf.repeat(repeats, *(1,) * (leaf.dim() - 1)), batch["obs"]
        )
        values = self.model.q_values(obs, torch.from_numpy(actions).to(self.device))
        weighted = values - temperature * torch.from_numpy(logp).to(self.device)
        weighted = weighted.reshape(len(values), repeats, batch.count)
        log_mean_exp = torch.logsumexp(weighted / temperature, 1) - math.log(repeats)
        return (temperature * log_mean_exp - recorded_values).mean(1)

    def _draw_actions(self, batch: TensorBatch) -> tuple[np.ndarray, np.ndarray]:
        """Draw actions [3 num_actions B, …] for the batch's rows and return them with their log
        probabilities [3 num_actions B].

        Each block of B actions contains one action per row.
        """
        repeats, shape = self.config.num_actions, self.action_space.shape or ()
        rows = repeats * batch.count
        rng: Any = self.learner.row_rng
        uniform = rng.uniform(-1, 1, (rows, *shape)).astype(np.float32)
        logps = [np.full(rows, -math.prod(shape) * math.log(2.0), np.float32)]
        actions = [uniform]
        for name in ("obs", "new_obs"):
            outputs = np.tile(self.model.outputs_numpy(batch.array(name)), (repeats, 1))
            drawn, logp = self.dist_class.act(outputs, rng, True)
            actions.append(drawn)
            logps.append(logp)
        return np.concatenate(actions), np.concatenate(logps)

    def actor_loss(self, batch: TensorBatch) -> torch.Tensor:
        """Return SAC's actor and temperature losses; -log pi(a of the batch | s) in the first
        `bc_iters` updates."""
        if self.learner.num_updates >= self.config.bc_iters:
            return super().actor_loss(batch)
        dist = self.dist_class(self.model.outputs(batch["obs"]), self.model)
        loss = -dist.logp(batch["actions"]).mean()
        self.stats["actor_loss"] = loss.detach()
        return loss


class CQL(Algorithm):
    """CQL with the plan `cql`; CQLConfig has its settings."""

    policy_class: ClassVar[PolicyClass] = CQLTorchPolicy
    config_class = CQLConfig


DEFAULT_CONFIG = CQLConfig()
