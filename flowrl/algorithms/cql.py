"""CQL: conservative Q-learning from recorded experience (Kumar et al. 2020, arXiv 2006.04779), over
SAC's losses, for continuous and Discrete actions."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import optree
import torch
from pydantic import Field

from flowrl.algorithms.offline_config import OfflineConfig
from flowrl.algorithms.sac import SACSettings, SACTorchPolicy
from flowrl.data import SampleBatch
from flowrl.ops import ReadMinari, ReadParquet
from flowrl.policies.torch_policy import TensorBatch
from flowrl.sampling.worker_set import WorkerSet
from flowrl.settings import Count, NotNegative, Positive
from flowrl.trainer.algorithm import Algorithm

COLUMNS = ("obs", "new_obs", "actions", "rewards", "terminateds")


class CQLConfig(SACSettings, OfflineConfig):
    """Settings of CQL."""

    algorithm: ClassVar[str] = "flowrl.algorithms.cql:CQL"

    plan: str | None = "cql"
    min_sample_timesteps_per_iteration: int = Field(default=10_000, ge=0)
    min_q_weight: NotNegative = 5.0
    """How much values of actions that were not recorded are pushed down (alpha in the paper)."""
    temperature: Positive = 1.0
    """Of the soft maximum that is pushed down."""
    num_actions: Count = 10
    """Actions drawn of each kind for that maximum, where they are continuous."""
    bc_iters: int = Field(default=0, ge=0)
    """First updates in which the actor imitates what was recorded, whatever it is worth."""
    lagrangian: bool = False
    """Learn the weight, so that the gap stays below `lagrangian_thresh` (section 3.2)."""
    lagrangian_thresh: Positive = 5.0
    """The most by which other actions' values may be above those of recorded ones."""

    def batches(self, workers: WorkerSet) -> ReadParquet | ReadMinari:
        """The train batches of a plan.

        Raises:
            ConfigError: no `input_` is set.
        """
        return self.recorded(workers, COLUMNS, _as_taken)


def _as_taken(rows: SampleBatch) -> SampleBatch:
    """What is learned from; continuous actions within [-1, 1], as the environment took them."""
    kept = {name: rows[name] for name in COLUMNS}
    actions = kept["actions"]
    if isinstance(actions, np.ndarray) and actions.dtype.kind == "f":
        kept["actions"] = actions.clip(-1.0, 1.0)
    return SampleBatch(kept)


class CQLTorchPolicy(SACTorchPolicy):
    """A policy whose critics do not think well of what they have not seen."""

    config_class = CQLConfig

    def extra_parameters(self) -> dict[str, torch.Tensor]:
        made = super().extra_parameters()
        if self.config.lagrangian:
            made["log_min_q_weight"] = torch.tensor(math.log(max(self.config.min_q_weight, 1e-6)))
        return made

    def critic_loss(self, batch: TensorBatch) -> torch.Tensor:
        """SAC's, and how much values of other actions are above those of recorded ones (equation
        4), added up over the critics."""
        gaps = self.gaps(batch)
        self.stats["cql_gap"] = gaps.detach().mean()
        if not self.config.lagrangian:
            return super().critic_loss(batch) + self.config.min_q_weight * gaps.sum()
        log_weight: Any = self.model.log_min_q_weight
        above = gaps - self.config.lagrangian_thresh
        weight = log_weight.exp().clamp(max=1e6)
        self.stats["min_q_weight"] = weight.detach()
        pushed = weight.detach() * above.sum()
        return super().critic_loss(batch) + pushed - weight * above.detach().sum()

    def gaps(self, batch: TensorBatch) -> torch.Tensor:
        """Of each critic, the mean of log sum exp Q(s, a) - Q(s, a of the batch), [critics]. The
        sum over continuous actions is an estimate from uniform ones and the policy's, at the
        observations and those after them, each weighed by how likely it was drawn (appendix F)."""
        heat = self.config.temperature
        recorded = self.action_values(batch)
        if self.is_discrete:  # forbidden ones are far below
            values = self.model.q_values(batch["obs"])
            return (heat * torch.logsumexp(values / heat, 2) - recorded).mean(1)
        actions, logp = self._others(batch)
        times = len(logp) // batch.count
        obs = optree.tree_map(
            lambda leaf: leaf.repeat(times, *(1,) * (leaf.dim() - 1)), batch["obs"]
        )
        values = self.model.q_values(obs, torch.from_numpy(actions).to(self.device))
        weighed = values - heat * torch.from_numpy(logp).to(self.device)
        weighed = weighed.reshape(len(values), times, batch.count)
        soft = heat * (torch.logsumexp(weighed / heat, 1) - math.log(times))
        return (soft - recorded).mean(1)

    def _others(self, batch: TensorBatch) -> tuple[np.ndarray, np.ndarray]:
        """Actions [3 num_actions B, …] at the batch's observations, one of each after the other,
        and the logarithms of how likely they were drawn."""
        times, shape = self.config.num_actions, self.action_space.shape or ()
        rows = times * batch.count
        uniform = self.learner.rng.uniform(-1, 1, (rows, *shape)).astype(np.float32)
        logps = [np.full(rows, -math.prod(shape) * math.log(2.0), np.float32)]
        actions = [uniform]
        for name in ("obs", "new_obs"):
            outputs = self.model.outputs_numpy(batch.array(name))
            drawn, logp = self.dist_class.act(np.tile(outputs, (times, 1)), self.learner.rng, True)
            actions.append(drawn)
            logps.append(logp)
        return np.concatenate(actions), np.concatenate(logps)

    def actor_loss(self, batch: TensorBatch) -> torch.Tensor:
        """SAC's, and the temperature's; while it imitates, minus log pi(a of the batch | s)."""
        if self.learner.num_updates >= self.config.bc_iters:
            return super().actor_loss(batch)
        dist = self.dist_class(self.model.outputs(batch["obs"]), self.model)
        loss = -dist.logp(batch["actions"]).mean()
        self.stats["actor_loss"] = loss.detach()
        return loss


class CQL(Algorithm):
    """CQL over the plan `cql`."""

    policy_class = CQLTorchPolicy
    config_class = CQLConfig


DEFAULT_CONFIG = CQLConfig()
