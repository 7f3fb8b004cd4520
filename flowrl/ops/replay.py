"""Operators that store experience and give it out again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.iter import NOT_READY, LocalIterator, Stage, _get_shared_metrics
from flowrl.iter.errors import blame, operator_error
from flowrl.ops.train import Info, trained

if TYPE_CHECKING:
    from flowrl.data import MultiAgentReplayBuffer

Batch = SampleBatch | MultiAgentBatch
Trained = tuple[Batch, Info]


class StoreToReplayBuffer:
    """for_each, batch -> batch: stores it in a replay buffer.

    While the buffer says that it is time to draw, nothing is fetched: so the ratio of trained to
    sampled steps holds, whichever side is slow. Counts `num_agent_steps_stored`.

    Args:
        local_buffer: a MultiAgentReplayBuffer. A saved plan has its rows.
    """

    def __init__(self, *, local_buffer: MultiAgentReplayBuffer):
        self.buffer = _checked(local_buffer, "StoreToReplayBuffer")

    def ready(self) -> bool:
        """Whether it is time to store."""
        return self.buffer.can_add()

    def waits(self) -> list[Any]:
        """Nothing: it is another branch that draws."""
        return []

    def __call__(self, batch: Batch) -> Batch:
        self.buffer.add(batch)
        _get_shared_metrics().counters["num_agent_steps_stored"] += batch.agent_steps()
        return batch

    def numbers(self) -> dict[str, Any]:
        """For `stats()`."""
        return {"rows": len(self.buffer)}

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": self.buffer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.buffer.load_state_dict(state["buffer"])

    def __repr__(self) -> str:
        return f"StoreToReplayBuffer(local_buffer={self.buffer!r})"


class Replay(LocalIterator[Any]):
    """Batches drawn from a replay buffer, without end.

    While the buffer says that it is time to store, it gives nothing and lets other branches go on.

    Args:
        local_buffer: a MultiAgentReplayBuffer.
    """

    def __init__(self, *, local_buffer: MultiAgentReplayBuffer):
        super().__init__(ReplayStage(_checked(local_buffer, "Replay")), "Replay")


class ReplayStage(Stage):
    """The stage of Replay."""

    kind = "Replay"
    leans = True

    def __init__(self, buffer: MultiAgentReplayBuffer):
        super().__init__()
        self.buffer = buffer

    def pull(self, block: bool) -> Any:
        try:
            if not self.buffer.can_sample():
                return NOT_READY
            batch = self.buffer.sample()
        except BaseException as error:
            blame(error, self, None)
            raise operator_error(error) from error.__cause__
        self.items += 1
        return batch

    def waits(self) -> list[Any]:
        return []

    def can_wait(self) -> bool:
        return True

    def label(self) -> str:
        return f"Replay(local_buffer={self.buffer!r})"

    def numbers(self) -> dict[str, Any]:
        return {"rows": len(self.buffer)}


class UpdateReplayPriorities:
    """for_each, (batch, info) -> the same: rows that were trained on get their absolute TD errors
    as priorities.

    Takes what TrainOneStep gives; of policies that tell no TD errors, and of rows that were not
    drawn from a buffer, it takes no notice.

    Args:
        local_buffer: the MultiAgentReplayBuffer that the batches were drawn from.
    """

    def __init__(self, *, local_buffer: MultiAgentReplayBuffer):
        self.buffer = _checked(local_buffer, "UpdateReplayPriorities")

    def __call__(self, item: Trained) -> Trained:
        _, info = trained(item, "UpdateReplayPriorities")
        for policy_id, told in info.items():
            rows = told.get("rows", {})
            if "td_error" in rows and "batch_indexes" in rows:
                priorities = abs(rows["td_error"])
                self.buffer.update_priorities(policy_id, rows["batch_indexes"], priorities)
        return item

    def __repr__(self) -> str:
        return "UpdateReplayPriorities"


def _checked(buffer: Any, operator: str) -> Any:
    missing = [name for name in ("can_add", "can_sample", "sample") if not hasattr(buffer, name)]
    if missing:
        raise TypeError(
            f"{operator}: local_buffer is a MultiAgentReplayBuffer, got a {type(buffer).__name__}"
        )
    return buffer
