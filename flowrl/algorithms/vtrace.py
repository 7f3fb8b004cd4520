"""The common part of IMPALA and APPO: V-trace, which corrects experience of older policies
(Espeholt et al. 2018, arXiv 1802.01561)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal, Self

import numpy as np
import optree

from flowrl.algorithms.async_learner import AsyncLearnerConfig
from flowrl.algorithms.on_policy import no_values_error
from flowrl.data import SampleBatch
from flowrl.data.sequences import loss_rows_of_sequences, take_sequences, without_masked_rows
from flowrl.ops import StalenessLimit
from flowrl.ops.staleness import check_waiting
from flowrl.policies.learning.torch_learner import TorchLearner
from flowrl.policies.models.fcnet import uses_numpy
from flowrl.policies.returns import vtrace
from flowrl.policies.schedules import Schedule
from flowrl.policies.torch_policy import TensorBatch, TorchPolicy
from flowrl.settings import (
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    check_of_settings,
)

BOOTSTRAP = "bootstrap_values"  # column: the sampler's values of next states


class VTraceConfig(AsyncLearnerConfig):
    """Settings of the algorithms with V-trace."""

    train_batch_size: Count = 500
    rollout_fragment_length: Count | Literal["auto"] = 50
    min_sample_timesteps_per_iteration: NonNegativeInt = 1000
    lambda_: Fraction = 1.0
    """Discount of temporal differences of later steps in V-trace targets (lambda in remark 2 of the
    paper)."""
    vtrace_clip_rho_threshold: Positive = 1.0
    """Maximum importance ratio in the temporal differences (rho-bar in the paper)."""
    vtrace_clip_c_threshold: Positive = 1.0
    """Maximum importance ratio in the weights of later steps (c-bar in the paper)."""
    vtrace_clip_pg_rho_threshold: Positive = 1.0
    """Maximum importance ratio in the policy gradient."""
    entropy_coeff: Schedule = 0.01
    """Weight of the entropy bonus: a number, or a schedule as for `lr`."""
    vf_loss_coeff: Schedule = 0.5
    """Weight of the value loss: a number, or a schedule as for `lr`."""
    max_policy_lag: NonNegativeInt | None = None
    """Maximum policy lag of a fragment, in updates (optimizer steps); None for no limit."""
    stale_policy: Literal["drop", "wait"] = "drop"
    """"drop" drops fragments that exceed `max_policy_lag` when they arrive; fragments can exceed it
    later, in the learner's queue. "wait" delays sampling, so that no fragment exceeds it when its
    first update begins."""
    broadcast_interval: Count = 1
    """Number of fragments after which the workers that sampled them get new weights."""
    num_aggregation_workers: NonNegativeInt = 0
    """Number of Ray tasks that concatenate fragments to train batches, so that the driver only
    receives train batches; 0 concatenates them in the driver."""
    replay_proportion: NonNegative = 0.0
    """Replayed fragments per new fragment; fractions accumulate."""
    replay_buffer_num_slots: NonNegativeInt = 0
    """Capacity of the buffer of fragments to replay, in fragments; needed with
    `replay_proportion`."""

    def staleness(self) -> dict[str, Any]:
        """Return the options of ParallelRollouts that limit the policy lag of fragments."""
        if self.max_policy_lag is None:
            return {}
        if self.stale_policy == "drop":
            return {"max_policy_lag": self.max_policy_lag}
        max_batches = self.max_policy_lag // self.num_sgd_iter
        return {"limit": StalenessLimit(self.train_batch_size, max_batches)}

    @check_of_settings
    def _check_waiting(self) -> Self:
        if self.stale_policy == "wait":
            check_waiting(self.max_policy_lag, self.count_steps_by)
            required = {
                "replay_proportion": 0.0,
                "minibatch_buffer_size": 1,
                "broadcast_interval": 1,
                "sgd_minibatch_size": 0,
            }
            for name, value in required.items():
                if getattr(self, name) != value:
                    raise ValueError(
                        f'{name}: stale_policy="wait" can guarantee max_policy_lag only if this is '
                        f"{value!r}, got {getattr(self, name)!r}"
                    )
        return self

    @check_of_settings
    def _check_replay(self) -> Self:
        if self.replay_proportion and not self.replay_buffer_num_slots:
            raise ValueError("replay_proportion needs replay_buffer_num_slots of at least 1")
        if self.replay_buffer_num_slots and not self.replay_proportion:
            raise ValueError("replay_buffer_num_slots needs a replay_proportion above 0")
        return self

    @check_of_settings
    def _check_exploration(self) -> Self:
        self.exploration_config.check_has_probabilities()
        return self

    @check_of_settings
    def _check_aggregation(self) -> Self:
        if self.num_aggregation_workers and not self.num_workers:
            raise ValueError(
                "num_aggregation_workers concatenates fragments of remote workers, but num_workers "
                "is 0: set num_workers"
            )
        return self


class VTraceLearner(TorchLearner):
    """Splits batches between trajectories, never within one."""

    def minibatches(self, batch: SampleBatch, size: int) -> Iterator[SampleBatch]:
        """Yield whole trajectories in random order, at least `size` rows at a time; the last
        minibatch may have fewer."""
        if size >= batch.count:
            yield batch
            return
        trajectories = Trajectories(batch)
        yield from trajectories.iterate_groups(
            self.policy.shuffle_rng.permutation(len(trajectories)).tolist(), size
        )

    def microbatches(self, batch: SampleBatch, size: int) -> Iterator[SampleBatch]:
        """Yield whole trajectories in order, at least `size` rows at a time; the last microbatch
        may have fewer."""
        trajectories = Trajectories(batch)
        return trajectories.iterate_groups(range(len(trajectories)), size)

    def rows_of_process(
        self, batch: SampleBatch, rank: int, num_processes: int
    ) -> SampleBatch | None:
        """Return the whole trajectories that one of several processes learns from; None if there
        are none."""
        trajectories = Trajectories(batch)
        begin, end = (len(trajectories) * index // num_processes for index in (rank, rank + 1))
        return trajectories.take(range(begin, end)) if end > begin else None


class Trajectories:
    """The trajectories of a batch, each of several rows or of several sequences.

    Args:
        batch: consecutive trajectories, each in order of time.

    Raises:
        ValueError: the batch is zero-padded.
    """

    def __init__(self, batch: SampleBatch):
        if batch.zero_padded:
            raise ValueError(
                "V-trace needs a batch without zero-padding: pass "
                "flowrl.data.sequences.without_padding(batch)"
            )
        self._batch = batch
        if "seq_lens" in batch:
            self._sizes = loss_rows_of_sequences(batch)
            units = np.flatnonzero(self._sizes)
            rows = without_masked_rows(batch)[0] if "loss_mask" in batch else batch
            ends = trajectory_ends(rows)[np.cumsum(self._sizes[units]) - 1]
        else:
            self._sizes, units = np.ones(batch.count, np.int64), np.arange(batch.count)
            ends = trajectory_ends(batch)
        # numbers of the rows, or of the sequences, of each trajectory
        self._parts = np.split(units, np.flatnonzero(ends)[:-1] + 1)

    def __len__(self) -> int:
        return len(self._parts)

    def take(self, indices: Iterable[int]) -> SampleBatch:
        """Return the trajectories with these indices, in that order."""
        index = np.concatenate([self._parts[i] for i in indices])
        if "seq_lens" in self._batch:
            return take_sequences(self._batch, index)
        return self._batch.take_rows(index)

    def iterate_groups(self, indices: Iterable[int], min_rows: int) -> Iterator[SampleBatch]:
        """Yield trajectories in the order of `indices`, with at least `min_rows` rows each time;
        the last ones may have fewer."""
        chosen: list[int] = []
        rows = 0
        for i in indices:
            chosen.append(i)
            rows += int(self._sizes[self._parts[i]].sum())
            if rows >= min_rows:
                yield self.take(chosen)
                chosen, rows = [], 0
        if chosen:
            yield self.take(chosen)


class VTracePolicy(TorchPolicy):
    """Learns from whole trajectories; computes values and V-trace targets while learning."""

    learner_class = VTraceLearner
    config_class = VTraceConfig
    config: VTraceConfig
    scalar_columns: ClassVar[tuple[str, ...]] = ("rewards", "terminateds", "action_logp")

    def _act(
        self, input_dict: dict[str, Any], explore: bool
    ) -> tuple[Any, list[np.ndarray], dict[str, np.ndarray]]:
        """Compute actions; skip values where they cost extra, because the learner recomputes
        them."""
        reads_obs_only = set(input_dict) == {"obs"}
        if self._has_own_columns or not (uses_numpy(self.acting_model) and reads_obs_only):
            return super()._act(input_dict, explore)
        actions, states, extra = self._act_by_numpy(input_dict, explore)
        return actions, states, {"action_logp": extra["action_logp"]}

    def postprocess_fragment(self, fragment: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Add the values [T, N] of next states, to bootstrap from, for networks that read more than
        the observation."""
        if "next_values" in fragment and set(self.model.view_requirements) != {"obs"}:
            return {BOOTSTRAP: fragment["next_values"]}
        return {}

    def vtrace_targets(
        self, batch: TensorBatch, target_logp: np.ndarray, values: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return V-trace value targets [B] and advantages [B], float32.

        Args:
            batch: consecutive trajectories, each in order of time.
            target_logp: log-probabilities of the actions under the target policy, [B].
            values: values of the observations, [B].
        """
        config = self.config
        # a row inside an episode may be terminated, too, if a life was lost
        ends = trajectory_ends(batch) | batch.array("terminateds").astype(bool)
        end_rows = np.flatnonzero(ends)
        next_values = np.empty_like(values)
        next_values[:-1] = values[1:]
        next_values[end_rows] = self._next_values(batch, end_rows)
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

    def _next_values(self, batch: TensorBatch, rows: np.ndarray) -> np.ndarray:
        """Return the values of the states after these rows, 0 where they terminated."""
        is_alive = ~batch.array("terminateds")[rows].astype(bool)
        if BOOTSTRAP in batch:
            next_values = batch.array(BOOTSTRAP)[rows]
        else:
            next_values = self.compute_values(batch.array_rows("new_obs", rows))
        if next_values is None:
            raise no_values_error(self)
        return np.where(is_alive, next_values, 0.0)


def trajectory_ends(batch: Any) -> np.ndarray:
    """Return a bool array [B], True for the last row of each trajectory.

    The next row continues a trajectory if it is of the same agent and episode, and of the next env
    step. If agents take turns, it is of a later env step, and has the next observation of the row
    before.
    """
    column = batch.array if isinstance(batch, TensorBatch) else batch.__getitem__
    episodes, agents, times = column("eps_id"), column("agent_index"), column("t")
    is_same = (episodes[1:] == episodes[:-1]) & (agents[1:] == agents[:-1])
    continues = is_same & (times[1:] == times[:-1] + 1)
    (later,) = (is_same & (times[1:] > times[:-1] + 1)).nonzero()
    if len(later) and "new_obs" in batch:
        continues[later] = _is_followed(batch, later)
    return np.append(~continues, True)


def _is_followed(batch: Any, rows: np.ndarray) -> np.ndarray:
    """Return whether the next observations of rows are the observations of the rows after them."""

    def leaves(name: str, index: np.ndarray) -> list[np.ndarray]:
        if isinstance(batch, TensorBatch):
            nest = batch.array_rows(name, index)
        else:
            nest = optree.tree_map(lambda leaf: np.asarray(leaf[index]), batch[name])
        found: Any = optree.tree_leaves(nest)
        return found

    is_equal = np.ones(len(rows), bool)
    for following, leaf in zip(leaves("new_obs", rows), leaves("obs", rows + 1), strict=True):
        is_equal &= (following == leaf).reshape(len(rows), -1).all(1)
    return is_equal


def vtrace_of_rows(
    behavior_logp: np.ndarray,
    target_logp: np.ndarray,
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    ends: np.ndarray,
    **settings: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Apply `vtrace` to consecutive trajectories of any lengths.

    Args:
        behavior_logp, target_logp, rewards, values, next_values: floats [B], see `vtrace`.
        ends: whether a row is the last one of its trajectory, bool [B].
        settings: `gamma`, `lambda_` and the clip options of `vtrace`.

    Returns:
        value targets [B] and advantages [B].
    """
    last = np.flatnonzero(ends)
    lengths = np.diff(last, prepend=-1)
    steps = np.arange(lengths.max())[:, None]
    mask = steps < lengths  # [T, N], one column per trajectory
    rows = np.where(mask, steps + (last - lengths + 1), 0)
    targets, advantages = vtrace(
        behavior_logp[rows],
        target_logp[rows],
        rewards[rows],
        values[rows],
        next_values[rows],
        steps >= lengths - 1,
        **settings,
    )
    # transposed, because the rows of one trajectory are consecutive
    return targets.T[mask.T], advantages.T[mask.T]
