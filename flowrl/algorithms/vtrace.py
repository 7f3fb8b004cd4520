"""What IMPALA and APPO share: experience of older policies, corrected by V-trace as it is learned
from (Espeholt et al. 2018, arXiv 1802.01561)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from flowrl.algorithms.async_learner import AsyncLearnerConfig
from flowrl.data import SampleBatch
from flowrl.ops import StalenessLimit
from flowrl.policies.learning.torch_learner import TorchLearner
from flowrl.policies.models.fcnet import uses_numpy
from flowrl.policies.returns import vtrace
from flowrl.policies.schedules import Schedule
from flowrl.policies.torch_policy import TensorBatch, TorchPolicy
from flowrl.settings import ConfigError, Count, Fraction, Positive

BOOTSTRAP = "bootstrap_values"  # of a network with memory: its values as they were sampled


class VTraceConfig(AsyncLearnerConfig):
    """Settings of the algorithms that correct by V-trace."""

    train_batch_size: Count = 500
    rollout_fragment_length: Count | Literal["auto"] = 50
    min_sample_timesteps_per_iteration: int = Field(default=1000, ge=0)
    lambda_: Fraction = 1.0
    """Weight of corrections from later steps (the lambda of the paper's remark 2)."""
    vtrace_clip_rho_threshold: Positive = 1.0
    """Largest probability ratio in the temporal differences (rho-bar)."""
    vtrace_clip_c_threshold: Positive = 1.0
    """Largest ratio in what is carried back from later steps (c-bar)."""
    vtrace_clip_pg_rho_threshold: Positive = 1.0
    """Largest ratio in the policy's gradient."""
    entropy_coeff: Schedule = 0.01
    """Weight of the entropy bonus: a number, or a schedule over env steps."""
    vf_loss_coeff: Schedule = 0.5
    """Weight of the value loss: a number, or a schedule over env steps."""
    max_policy_lag: int | None = Field(default=None, ge=0)
    """The most updates that the weights of a fragment may be old; None for any."""
    stale_policy: Literal["drop", "wait"] = "drop"
    """Drop fragments of older weights, or have workers wait, so that there are none."""
    broadcast_interval: Count = 1
    """Fragments between two times that their workers are sent new weights."""
    num_aggregation_workers: int = Field(default=0, ge=0)
    """Tasks that join fragments to train batches, so that the driver gets these alone; 0 joins them
    in the driver."""
    replay_proportion: float = Field(default=0.0, ge=0)
    """Earlier fragments trained on for each new one."""
    replay_buffer_num_slots: int = Field(default=0, ge=0)
    """Fragments that are kept for that."""

    def staleness(self) -> dict[str, Any]:
        """The options of ParallelRollouts by which fragments do not get too old."""
        if self.max_policy_lag is None:
            return {}
        if self.stale_policy == "drop":
            return {"max_policy_lag": self.max_policy_lag}
        most = self.max_policy_lag // self.num_sgd_iter
        return {"limit": StalenessLimit(self.train_batch_size, most)}

    @model_validator(mode="after")
    def _check_waiting(self) -> Self:
        if self.stale_policy == "wait":
            if self.max_policy_lag is None:
                raise ValueError('stale_policy="wait" needs a max_policy_lag')
            needed = {
                "replay_proportion": 0.0,
                "minibatch_buffer_size": 1,
                "broadcast_interval": 1,
                "sgd_minibatch_size": 0,
                "count_steps_by": "env_steps",
            }
            for name, only in needed.items():
                if getattr(self, name) != only:
                    raise ValueError(
                        f'{name}: stale_policy="wait" can promise no max_policy_lag unless this is '
                        f"{only!r}, got {getattr(self, name)!r}"
                    )
        return self

    @model_validator(mode="after")
    def _check_aggregation(self) -> Self:
        if self.num_aggregation_workers and not self.num_workers:
            raise ValueError(
                "num_aggregation_workers joins what workers on actors have sampled, and there are "
                "none: set num_workers"
            )
        return self


class VTraceLearner(TorchLearner):
    """Keeps trajectories whole when batches are split."""

    def minibatches(self, batch: SampleBatch, size: int) -> Iterator[SampleBatch]:
        """Yield whole trajectories in random order, at least `size` rows at a time."""
        if size >= batch.count or "seq_lens" in batch:
            yield from super().minibatches(batch, min(size, batch.count))
            return
        trajectories = _split_trajectories(batch)
        chosen: list[np.ndarray] = []
        rows = 0
        for number in self.policy.shuffle_rng.permutation(len(trajectories)).tolist():
            chosen.append(trajectories[number])
            rows += len(chosen[-1])
            if rows >= size:
                yield batch.take_rows(np.concatenate(chosen))
                chosen, rows = [], 0
        if chosen:
            yield batch.take_rows(np.concatenate(chosen))

    def share_of(self, batch: SampleBatch, rank: int, size: int) -> SampleBatch | None:
        """Return whole trajectories, as many as for the other processes."""
        if "seq_lens" in batch:
            return super().share_of(batch, rank, size)
        trajectories = _split_trajectories(batch)
        begin, end = (len(trajectories) * number // size for number in (rank, rank + 1))
        return batch.take_rows(np.concatenate(trajectories[begin:end])) if end > begin else None


class VTracePolicy(TorchPolicy):
    """Learns from trajectories as they were sampled, with values as they are now."""

    learner_class = VTraceLearner
    config_class = VTraceConfig
    config: VTraceConfig

    def _act(
        self, input_dict: dict[str, Any], explore: bool
    ) -> tuple[Any, list[np.ndarray], dict[str, np.ndarray]]:
        """Without values where they cost extra: the learner works out its own."""
        model = self.model
        if not uses_numpy(model) or set(input_dict) != {"obs"}:
            return super()._act(input_dict, explore)
        outputs = self._computed(lambda inputs: model.outputs_numpy(inputs["obs"]), input_dict)
        actions, logp = self.exploration.act(outputs, self, explore)
        return actions, [], {"action_logp": logp}

    def postprocess_fragment(self, fragment: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The values [T, N] at which trajectories are cut, of networks with memory."""
        if self.is_recurrent and "next_values" in fragment:
            return {BOOTSTRAP: fragment["next_values"]}
        return {}

    def corrected(
        self, batch: TensorBatch, target_logp: np.ndarray, values: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """V-trace's value targets [B] and advantages [B] of the rows.

        Args:
            batch: trajectories one after another, in the order of time.
            target_logp: of the actions under the policy whose values are wanted, [B].
            values: of the rows' observations, [B].
        """
        config = self.config
        ends = trajectory_ends(batch)
        at_end = np.flatnonzero(ends)
        next_values = np.empty_like(values)
        next_values[:-1] = values[1:]
        next_values[at_end] = self._values_after(batch, at_end)
        targets, advantages = vtrace_of_rows(
            batch.array("action_logp"),
            target_logp,
            batch.array("rewards"),
            values,
            next_values,
            ends,
            gamma=config.gamma,
            clip_rho=config.vtrace_clip_rho_threshold,
            clip_c=config.vtrace_clip_c_threshold,
            clip_pg_rho=config.vtrace_clip_pg_rho_threshold,
            lambda_=config.lambda_,
        )
        return targets.astype(np.float32), advantages.astype(np.float32)

    def _values_after(self, batch: TensorBatch, rows: np.ndarray) -> np.ndarray:
        """Values of the states after these rows, 0 where they terminated."""
        alive = ~batch.array("terminateds")[rows]
        if BOOTSTRAP in batch:
            after = batch.array(BOOTSTRAP)[rows]
        else:
            after = self.compute_values(batch.array_rows("new_obs", rows))
        if after is None:
            raise ConfigError(
                f"{type(self).__name__} learns from values, but its model gives none: write its "
                "value_function(), or let a plain module give (outputs, values)"
            )
        return np.where(alive, after, 0.0)


def _split_trajectories(batch: SampleBatch) -> list[np.ndarray]:
    """The row numbers of each trajectory."""
    ends = np.flatnonzero(trajectory_ends(batch))
    begins = np.concatenate([[0], ends[:-1] + 1])
    return [np.arange(b, e + 1) for b, e in zip(begins.tolist(), ends.tolist(), strict=True)]


def trajectory_ends(batch: Any) -> np.ndarray:
    """Of rows one after another: whether the next one does not go on where this one ends, [B]."""
    column = batch.array if isinstance(batch, TensorBatch) else batch.__getitem__
    episodes, agents, times = column("eps_id"), column("agent_index"), column("t")
    ends = np.ones(len(times), bool)
    ends[:-1] = (
        (times[1:] != times[:-1] + 1)
        | (episodes[1:] != episodes[:-1])
        | (agents[1:] != agents[:-1])
    )
    return ends


def vtrace_of_rows(
    behaviour_logp: np.ndarray,
    target_logp: np.ndarray,
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    ends: np.ndarray,
    **settings: float,
) -> tuple[np.ndarray, np.ndarray]:
    """`vtrace` over rows [B] of trajectories of any lengths, one after another; `ends` [B] says
    where each ends."""
    last = np.flatnonzero(ends)
    lengths = np.diff(last, prepend=-1)
    steps = np.arange(lengths.max())[:, None]
    there = steps < lengths  # [T, N], a column for each trajectory
    rows = np.where(there, steps + (last - lengths + 1), 0)
    targets, advantages = vtrace(
        behaviour_logp[rows],
        target_logp[rows],
        rewards[rows],
        values[rows],
        next_values[rows],
        steps >= lengths - 1,
        **settings,
    )
    # column by column, as the rows were
    return targets.T[there.T], advantages.T[there.T]
