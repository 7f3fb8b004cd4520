"""MultiAgentReplayBuffer: a buffer for each policy, and how fast they are filled and drawn from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from flowrl.data.sample_batch import MultiAgentBatch, SampleBatch
from flowrl.replay.buffers import ReplayBuffer
from flowrl.replay.lockstep import Lockstep
from flowrl.replay.replay_ratio import ReplayRatio
from flowrl.replay.ring_buffer import in_order

Batch = SampleBatch | MultiAgentBatch


class MultiAgentReplayBuffer:
    """A ReplayBuffer for each policy, made when its first rows come.

    It also says when it is time to store (`can_add`) and when to draw (`can_sample`), so that plans
    which ask keep the ratio of drawn to stored rows: see ReplayRatio.

    Args:
        make: policy id -> its ReplayBuffer.
        replay_batch_size: rows of each policy in a drawn batch (sequences or episodes, where those
            are the buffer's storage_unit); in lockstep, env steps.
        learning_starts, training_intensity: see ReplayRatio.
        policies: ids of those whose rows are stored; None: all. Rows of others are refused.
        mode: "independent": each policy's rows are drawn for themselves. "lockstep": env steps are
            drawn, with all the rows that all policies have of them, in the same order, as
            centralized critics need them; `eps_id` and `t` say which rows belong together.

    Raises:
        ValueError: a size below 1; another mode; see ReplayRatio.
    """

    def __init__(
        self,
        make: Callable[[str], ReplayBuffer],
        *,
        replay_batch_size: int,
        learning_starts: int = 0,
        training_intensity: float | None = None,
        policies: Collection[str] | None = None,
        mode: str = "independent",
    ):
        if (
            isinstance(replay_batch_size, bool)
            or not isinstance(replay_batch_size, (int, np.integer))
            or replay_batch_size < 1
        ):
            raise ValueError(
                f"replay_batch_size is a whole number from 1, got {replay_batch_size!r}"
            )
        if isinstance(policies, str):
            raise TypeError(f"policies is a collection of ids: [{policies!r}]")
        if mode not in ("independent", "lockstep"):
            raise ValueError(f'mode is "independent" or "lockstep", got {mode!r}')
        self._make = make
        self.replay_batch_size = replay_batch_size
        self.ratio = ReplayRatio(learning_starts, training_intensity)
        self.policies = None if policies is None else sorted(policies)
        self.buffers: dict[str, ReplayBuffer] = {}
        self.mode = mode
        self._steps: Lockstep | None = None  # in lockstep, when there are rows

    # -- storing and drawing -----------------------------------------------------------------------

    def add(self, batch: Batch) -> None:
        """Store each policy's rows in its buffer.

        Raises:
            KeyError: there are rows of a policy that is none of `policies`.
            ValueError: see ReplayBuffer.add; in lockstep, rows without `eps_id` and `t`, or a
                buffer that draws otherwise than uniformly.
        """
        parts = {pid: rows for pid, rows in batch.policy_batches.items() if rows.count}
        if self.policies is not None:
            foreign = sorted(set(parts) - set(self.policies))
            if foreign:
                raise KeyError(
                    f"rows of the policies {foreign} for a replay buffer of {self.policies}: select"
                    " those before storing (SelectExperiences)"
                )
        made = {
            policy_id: self.buffers[policy_id]
            if policy_id in self.buffers
            else self._make(policy_id)
            for policy_id in parts
        }
        for policy_id, rows in parts.items():
            made[policy_id].check(rows)  # all of them before any is stored
        if self.mode == "lockstep" and parts:
            self._add_in_lockstep(parts, made)
        else:
            for policy_id, rows in parts.items():
                made[policy_id].add(rows)
        self.buffers |= made
        self.ratio.note_stored(sum(rows.count for rows in parts.values()))

    def _add_in_lockstep(
        self, parts: dict[str, SampleBatch], made: dict[str, ReplayBuffer]
    ) -> None:
        for policy_id, buffer in made.items():
            if type(buffer) is not ReplayBuffer or buffer.storage_unit != "timesteps":
                raise ValueError(
                    f"in lockstep env steps are drawn uniformly: the buffer of {policy_id!r} is a "
                    f"plain ReplayBuffer of timesteps then, not {buffer!r}"
                )
        every = {**self.buffers, **made}
        capacities = {policy_id: buffer.capacity for policy_id, buffer in every.items()}
        if len(set(capacities.values())) > 1:
            raise ValueError(f"in lockstep all buffers have one capacity, not {capacities}")
        if self._steps is None:
            self._steps = Lockstep(next(iter(capacities.values())))
        for policy_id, rows in parts.items():
            if rows.count > capacities[policy_id]:
                raise ValueError(
                    f"{rows.count} rows of policy {policy_id!r} at once for a capacity of "
                    f"{capacities[policy_id]}: no env step of them would be whole"
                )
        self._steps.check(parts)
        parts = {policy_id: in_order(rows) for policy_id, rows in parts.items()}
        begins = {policy_id: buffer.num_added for policy_id, buffer in made.items()}
        for policy_id, rows in parts.items():
            made[policy_id].add(rows)
        self._steps.extend(parts, begins)
        self._steps.forget({pid: b.num_added - len(b) for pid, b in made.items()})

    def can_sample(self) -> bool:
        """Whether it is time to draw a batch."""
        rows = self._rows_per_batch()
        return rows > 0 and self.ratio.may_draw(rows)

    def _rows_per_batch(self) -> float:
        """Rows to learn from in a drawn batch; on average, where they are not always as many."""
        size = self.replay_batch_size
        if self._steps is not None:
            return size * self._steps.rows_per_step()
        return size * sum(buffer.rows_per_item() for buffer in self.buffers.values())

    def can_add(self) -> bool:
        """Whether it is time to store a batch."""
        return not self.can_sample()

    def sample(self) -> Batch:
        """`replay_batch_size` rows of each policy, or sequences or episodes, or env steps.

        Raises:
            ValueError: there are none.
        """
        if not self.buffers or (self._steps is not None and not len(self._steps)):
            raise ValueError("the replay buffer is empty: store something before drawing from it")
        size = self.replay_batch_size
        if self._steps is None:
            drawn = {pid: buffer.sample(size) for pid, buffer in self.buffers.items()}
        else:
            rng = self.buffers[min(self.buffers)].rng
            numbers = self._steps.draw(size, rng)
            drawn = {pid: self.buffers[pid].rows(own) for pid, own in numbers.items()}
        self.ratio.note_drawn(sum(map(rows_to_learn, drawn.values())))
        return MultiAgentBatch.wrap_as_needed(drawn, size)

    def update_priorities(
        self, policy_id: str, batch_indexes: np.ndarray, priorities: np.ndarray
    ) -> None:
        """Give a policy's rows new priorities; see PrioritizedReplayBuffer. A buffer without
        priorities takes no notice."""
        if policy_id not in self.buffers:
            raise KeyError(
                f"priorities of policy {policy_id!r}, whose rows are not in this replay buffer: it "
                f"has those of {sorted(self.buffers)}"
            )
        self.buffers[policy_id].update_priorities(batch_indexes, priorities)

    def __len__(self) -> int:
        """Rows that are there."""
        return sum(map(len, self.buffers.values()))

    def stats(self) -> dict[str, dict[str, float]]:
        """Each policy's figures; see ReplayBuffer.stats."""
        return {policy_id: buffer.stats() for policy_id, buffer in self.buffers.items()}

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All buffers, and where the ratio is."""
        buffers = {policy_id: buffer.state_dict() for policy_id, buffer in self.buffers.items()}
        state = {"buffers": buffers, "ratio": self.ratio.state_dict()}
        if self._steps is not None:
            state["steps"] = {"capacity": self._steps.capacity, **self._steps.state_dict()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, with the same settings.

        Raises:
            ValueError: a buffer does not fit, or it is of the other mode or of other policies;
                nothing is changed.
        """
        foreign = sorted(set(state["buffers"]) - set(self.policies or state["buffers"]))
        if foreign:
            raise ValueError(
                f"a state of policies {foreign} for a replay buffer of {self.policies}"
            )
        if state["buffers"] and ("steps" in state) != (self.mode == "lockstep"):
            raise ValueError(f"a state of the other mode for a replay buffer in mode {self.mode!r}")
        buffers = {policy_id: self._make(policy_id) for policy_id in state["buffers"]}
        for policy_id, buffer in buffers.items():
            buffer.load_state_dict(state["buffers"][policy_id])
        self.buffers = buffers
        self._steps = None
        if "steps" in state:
            self._steps = Lockstep(int(state["steps"]["capacity"]))
            self._steps.load_state_dict(state["steps"])
        self.ratio.load_state_dict(state["ratio"])

    def __repr__(self) -> str:
        more = "" if self.policies is None else f", policies={self.policies}"
        more += f", mode={self.mode!r}" if self.mode != "independent" else ""
        if self.ratio.training_intensity is not None:
            more += f", training_intensity={self.ratio.training_intensity:g}"
        return f"MultiAgentReplayBuffer(replay_batch_size={self.replay_batch_size}{more})"


def rows_to_learn(batch: Batch) -> int:
    """The rows of a batch but for padding and burn-in."""
    return sum(
        int(np.count_nonzero(rows["loss_mask"])) if "loss_mask" in rows else rows.count
        for rows in batch.policy_batches.values()
    )
