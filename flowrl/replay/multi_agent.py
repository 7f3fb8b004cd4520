"""MultiAgentReplayBuffer: one buffer per policy, and the ratio of drawn to stored rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from flowrl.data.sample_batch import Batch, MultiAgentBatch, SampleBatch
from flowrl.data.sequences import count_loss_rows
from flowrl.interrupts import delayed_interrupts
from flowrl.replay.buffers import ReplayBuffer
from flowrl.replay.env_step_index import EnvStepIndex
from flowrl.replay.replay_ratio import EMPTY, NOTHING_TO_DRAW, ReplayRatio
from flowrl.replay.trajectories import sort_rows
from flowrl.setting_values import check_int, check_names
from flowrl.state_schema import Fields, check_own_state, check_state


class MultiAgentReplayBuffer:
    """One ReplayBuffer per policy, created with the policy's first rows.

    `can_add` and `can_sample` tell a plan whether to store or to draw next, to keep the ratio of
    drawn to stored rows; see ReplayRatio.

    Args:
        make_buffer: policy id -> new ReplayBuffer.
        replay_batch_size: items to draw per policy (rows, sequences or episodes, by the buffer's
            storage_unit); in lockstep mode, env steps to draw.
        learning_starts: rows stored before the first draw.
        training_intensity: rows drawn per row stored after that; None draws one batch per stored
            batch.
        policies: ids of the policies to store; rows of others are rejected. None: all policies.
        mode: "independent" draws the rows of each policy independently. "lockstep" draws env steps
            with the rows of all policies, in the same order, for centralized critics; `eps_id` and
            `t` identify the env step, which is the one that completed a row if it spans several.

    Attributes:
        buffers: policy id -> ReplayBuffer.
        ratio: the ReplayRatio.

    Raises:
        TypeError: `policies` is neither a collection of ids nor None.
        ValueError: replay_batch_size is below 1, policies is empty, or the mode is unknown; see
            ReplayRatio.
    """

    state_fields: ClassVar[Fields] = {
        "buffers": dict[str, dict[str, Any]],
        "ratio": dict[str, Any],
    }

    def __init__(
        self,
        make_buffer: Callable[[str], ReplayBuffer],
        *,
        replay_batch_size: int,
        learning_starts: int = 0,
        training_intensity: float | None = None,
        policies: Collection[str] | None = None,
        mode: Literal["independent", "lockstep"] = "independent",
    ):
        check_int("replay_batch_size", replay_batch_size)
        check_stored_policies(policies)
        if mode not in ("independent", "lockstep"):
            raise ValueError(f'mode must be "independent" or "lockstep", got {mode!r}')
        self.make_buffer = make_buffer
        self.replay_batch_size = replay_batch_size
        self.ratio = ReplayRatio(learning_starts, training_intensity)
        self.policies = None if policies is None else sorted(policies)
        self.buffers: dict[str, ReplayBuffer] = {}
        self.mode = mode
        self._env_steps: EnvStepIndex | None = None  # in lockstep mode, once rows are stored

    # -- storing and drawing -----------------------------------------------------------------------

    def add(self, batch: Batch) -> None:
        """Store the rows of each policy in its buffer.

        Raises:
            KeyError: the batch has rows of a policy that is not in `policies`.
            ValueError: see ReplayBuffer.add; in lockstep mode also if rows lack `eps_id` or `t`, or
                a buffer does not draw uniformly.
        """
        policy_batches = {pid: rows for pid, rows in batch.policy_batches.items() if rows.count}
        if self.policies is not None:
            unknown = sorted(set(policy_batches) - set(self.policies))
            if unknown:
                raise KeyError(
                    f"rows of policies {unknown} for a replay buffer of {self.policies}: select "
                    "the policies to store with SelectExperiences"
                )
        buffers = {
            policy_id: self.buffers[policy_id]
            if policy_id in self.buffers
            else self.make_buffer(policy_id)
            for policy_id in policy_batches
        }
        for policy_id, rows in policy_batches.items():
            buffers[policy_id].check(rows)  # check all policies before storing any
        with delayed_interrupts:  # an interrupt does not separate storing from counting
            if self.mode == "lockstep" and policy_batches:
                self._add_in_lockstep(policy_batches, buffers)
            else:
                for policy_id, rows in policy_batches.items():
                    buffers[policy_id].add(rows)
            self.buffers |= buffers
            self.ratio.note_stored(sum(rows.count for rows in policy_batches.values()))

    def _add_in_lockstep(
        self, policy_batches: dict[str, SampleBatch], buffers: dict[str, ReplayBuffer]
    ) -> None:
        for policy_id, buffer in buffers.items():
            if type(buffer) is not ReplayBuffer or buffer.storage_unit != "timesteps":
                raise ValueError(
                    "lockstep mode draws env steps uniformly: the buffer of policy "
                    f"{policy_id!r} must be a plain ReplayBuffer of timesteps, got {buffer!r}"
                )
        capacities = {pid: buffer.capacity for pid, buffer in {**self.buffers, **buffers}.items()}
        if len(set(capacities.values())) > 1:
            raise ValueError(
                f"lockstep mode needs buffers of equal capacity, got capacities {capacities}"
            )
        index = self._env_steps
        if index is None:
            index = EnvStepIndex(next(iter(capacities.values())))
        index.check(policy_batches)
        policy_batches = {pid: sort_rows(rows) for pid, rows in policy_batches.items()}
        first_rows = {policy_id: buffer.num_added for policy_id, buffer in buffers.items()}
        try:
            for policy_id, rows in policy_batches.items():
                buffers[policy_id].add(rows)
            index.extend(policy_batches, first_rows)
            self._env_steps = index
        finally:  # also if only some policies' rows were stored, which have overwritten older ones
            index.remove_before(
                {pid: buffer.num_added - len(buffer) for pid, buffer in buffers.items()}
            )

    def can_sample(self, alternate: bool = True) -> bool:
        """Return whether a draw is due.

        Args:
            alternate: see ReplayRatio.may_draw.
        """
        rows = self._rows_per_batch()
        return rows > 0 and self.ratio.may_draw(rows, alternate)

    def has_items(self) -> bool:
        """Return whether there is anything to draw: rows, or whole sequences or episodes."""
        return self._rows_per_batch() > 0

    def _rows_per_batch(self) -> float:
        """Return the mean number of rows to learn from in a drawn batch."""
        size = self.replay_batch_size
        if self._env_steps is not None:
            return size * self._env_steps.rows_per_step()
        return size * sum(buffer.rows_per_item() for buffer in self.buffers.values())

    def can_add(self, alternate: bool = True) -> bool:
        """Return whether storing a batch is due; see `can_sample`."""
        rows = self._rows_per_batch()
        return rows <= 0 or self.ratio.may_store(rows, alternate)

    def missing_stores(self) -> str:
        """Return what must be stored before the next draw."""
        if self.ratio.is_learning and not self.has_items():
            return NOTHING_TO_DRAW
        return self.ratio.missing_stores(self._rows_per_batch())

    def missing_draws(self) -> str:
        """Return how many batches must be drawn before the next one is stored."""
        return self.ratio.missing_draws(self._rows_per_batch())

    def sample(self) -> Batch:
        """Draw `replay_batch_size` items of each policy or, in lockstep mode, env steps.

        Raises:
            ValueError: the buffer is empty.
        """
        if not self.buffers or (self._env_steps is not None and not len(self._env_steps)):
            raise ValueError(EMPTY)
        size = self.replay_batch_size
        if self._env_steps is None:
            drawn = {pid: buffer.sample(size) for pid, buffer in self.buffers.items()}
            steps = max(batch.count for batch in drawn.values())  # sequences have several rows
        else:
            rng = self.buffers[min(self.buffers)].rng
            row_ids = self._env_steps.draw(size, rng)
            drawn = {pid: self.buffers[pid].rows_by_id(ids) for pid, ids in row_ids.items()}
            steps = size
        self.ratio.note_drawn(sum(map(count_loss_rows, drawn.values())))
        return MultiAgentBatch.wrap_as_needed(drawn, steps)

    def update_priorities(
        self, policy_id: str, batch_indexes: np.ndarray, priorities: np.ndarray
    ) -> None:
        """Set the priorities of a policy's rows; see PrioritizedReplayBuffer.update_priorities.

        Buffers without priorities ignore them.

        Raises:
            KeyError: no rows of the policy are stored.
        """
        if policy_id not in self.buffers:
            raise KeyError(
                f"priorities of policy {policy_id!r}, whose rows are not in this replay buffer: it "
                f"has those of {sorted(self.buffers)}"
            )
        self.buffers[policy_id].update_priorities(batch_indexes, priorities)

    def __len__(self) -> int:
        """Return the number of rows of all policies."""
        return sum(map(len, self.buffers.values()))

    def stats(self) -> dict[str, dict[str, float]]:
        """Return policy id -> ReplayBuffer.stats."""
        return {policy_id: buffer.stats() for policy_id, buffer in self.buffers.items()}

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all buffers and of the ratio."""
        buffers = {policy_id: buffer.state_dict() for policy_id, buffer in self.buffers.items()}
        state = {"buffers": buffers, "ratio": self.ratio.state_dict()}
        if self._env_steps is not None:
            state["env_steps"] = self._env_steps.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict` of a buffer with the same settings.

        Raises:
            ValueError: a buffer does not fit, or the state has other policies or the other mode;
                do not use the buffer afterwards.
        """
        check_own_state(self, state)
        unknown = sorted(set(state["buffers"]) - set(self.policies or state["buffers"]))
        if unknown:
            raise ValueError(
                f"the state has rows of the policies {unknown}, this replay buffer stores only "
                f"{self.policies}: add them to `policies`"
            )
        if state["buffers"] and ("env_steps" in state) != (self.mode == "lockstep"):
            raise ValueError(
                f"this replay buffer has mode={self.mode!r}, the state is of the other mode: "
                "create the buffer with the mode of the state (the setting replay_mode of an "
                "algorithm)"
            )
        buffers = {policy_id: self.make_buffer(policy_id) for policy_id in state["buffers"]}
        for policy_id, buffer in buffers.items():
            buffer.load_state_dict(state["buffers"][policy_id])
        self.buffers = buffers
        self._env_steps = None
        if "env_steps" in state:
            check_state(state["env_steps"], EnvStepIndex.state_fields, "EnvStepIndex")
            self._env_steps = EnvStepIndex(int(state["env_steps"]["capacity"]))
            self._env_steps.load_state_dict(state["env_steps"])
        self.ratio.load_state_dict(state["ratio"])

    def __repr__(self) -> str:
        settings = "" if self.policies is None else f", policies={self.policies}"
        settings += f", mode={self.mode!r}" if self.mode != "independent" else ""
        if self.ratio.training_intensity is not None:
            settings += f", training_intensity={self.ratio.training_intensity:g}"
        return f"MultiAgentReplayBuffer(replay_batch_size={self.replay_batch_size}{settings})"


def check_stored_policies(policies: Any) -> None:
    """Check the argument `policies` of a replay buffer.

    Raises:
        TypeError: it is neither a collection of ids nor None.
        ValueError: it is empty.
    """
    if policies is not None:
        check_names("policies", policies, "no rows would be stored: None stores all policies")
