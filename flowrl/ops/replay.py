"""Operators that store experience and give it out again."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from flowrl.data import BatchRef, MultiAgentBatch, SampleBatch
from flowrl.iter import NOT_READY, LocalIterator, Source, Stage, _get_shared_metrics
from flowrl.iter.errors import note_origin, operator_error
from flowrl.iter.stage import sources_to_list
from flowrl.iter.waiting import ready_refs
from flowrl.learners.learner import Batch
from flowrl.learners.thread import with_sources
from flowrl.ops.replay_actors import PendingRequest, ReplayActors
from flowrl.ops.train import Trained, check_trained
from flowrl.replay import MultiAgentReplayBuffer
from flowrl.seeding import random_stream, restore_stream, stream_state


class StoreToReplayBuffer:
    """for_each, batch -> batch: stores it in a replay buffer.

    While it is time to draw, nothing is fetched: so the ratio of trained to sampled steps holds,
    whichever side is slow. Counts `num_agent_steps_stored`, together and for each policy. A saved
    plan has the rows.

    Args:
        local_buffer: a MultiAgentReplayBuffer; or
        actors: ReplayActors. Batches, or references to them, which do not pass the driver.

    Raises:
        ValueError: neither is given, or both.
    """

    def __init__(
        self,
        *,
        local_buffer: MultiAgentReplayBuffer | SimpleReplayBuffer | None = None,
        actors: ReplayActors | None = None,
    ):
        self.buffer = _one_of(local_buffer, actors, "StoreToReplayBuffer")

    def ready(self) -> bool:
        """Whether it is time to store."""
        return bool(self.buffer.can_add())

    def waits(self) -> list[Any]:
        """What a shard is behind with; else it is another branch that has to draw."""
        return self.buffer.waits() if isinstance(self.buffer, ReplayActors) else []

    def __call__(self, batch: Any) -> Any:
        if isinstance(batch, BatchRef) and not isinstance(self.buffer, ReplayActors):
            batch = batch.get()
        if not isinstance(batch, (SampleBatch, MultiAgentBatch, BatchRef)):
            raise TypeError(
                f"StoreToReplayBuffer takes batches, got a {type(batch).__name__}: chain it before "
                "TrainOneStep"
            )
        self.buffer.add(batch)
        counters = _get_shared_metrics().counters
        for policy_id, rows in batch.steps_by_policy().items():
            counters["num_agent_steps_stored"] += rows
            counters[f"num_agent_steps_stored/{policy_id}"] += rows
        return batch

    def extra_stats(self) -> dict[str, Any]:
        """For `stats()`."""
        return {"rows": len(self.buffer)}

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": self.buffer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.buffer.load_state_dict(state["buffer"])

    def __repr__(self) -> str:
        return f"StoreToReplayBuffer({self.buffer!r})"


class Replay(LocalIterator[Any]):
    """Batches drawn from a replay buffer, without end.

    While it is time to store, it gives nothing and lets other branches go on.

    Args:
        local_buffer: a MultiAgentReplayBuffer; or
        actors: ReplayActors, which end with the plan. A batch's `sources` say its shard.
        num_async: batches asked for ahead, of all shards together; the ratio counts them as drawn.

    Raises:
        ValueError: neither is given, or both; a num_async below 1.
    """

    def __init__(
        self,
        *,
        local_buffer: MultiAgentReplayBuffer | SimpleReplayBuffer | None = None,
        actors: ReplayActors | None = None,
        num_async: int = 16,
    ):
        buffer = _one_of(local_buffer, actors, "Replay")
        if num_async < 1:
            raise ValueError(f"Replay: num_async is at least 1, got {num_async}")
        stage: Stage = ReplayStage(buffer)
        if isinstance(buffer, ReplayActors):
            stage = ReplayActorsStage(buffer, num_async)
        super().__init__(stage, "Replay")


class ReplayStage(Stage):
    """The stage of Replay on a local buffer."""

    name = "Replay"
    depends_on_sibling = True

    def __init__(self, buffer: Any):
        super().__init__()
        self.title = f"Replay({buffer!r})"
        self.buffer = buffer

    def pull(self, block: bool) -> Any:
        try:
            batch = self._next()
        except BaseException as error:
            note_origin(error, self, None)
            raise operator_error(error) from error.__cause__
        if batch is not NOT_READY:
            self.items += 1
        return batch

    def _next(self) -> Any:
        return self.buffer.sample() if self.buffer.can_sample() else NOT_READY

    def waits(self) -> list[Any]:
        return []

    def can_wait(self) -> bool:
        return True

    def extra_stats(self) -> dict[str, Any]:
        return {"rows": len(self.buffer)}


class ReplayActorsStage(ReplayStage):
    """The stage of Replay on actors."""

    def __init__(self, actors: ReplayActors, num_async: int):
        super().__init__(actors)
        self._num_async = num_async
        self._asked: deque[PendingRequest] = deque()
        self._drawn: deque[Batch] = deque()
        self._sources: tuple[Source, ...] = ()

    def _next(self) -> Any:
        while True:
            self._ask()
            if self._drawn:
                batch = self._drawn.popleft()
                self._sources = batch.sources
                return batch
            if not self._asked or not ready_refs([self._asked[0].ref]):
                return NOT_READY
            self._drawn.extend(self.buffer.taken(self._asked.popleft()))

    def _ask(self) -> None:
        """Have so many batches on their way: half of them from one shard, so that another one works
        while these are learned from."""
        most = max(1, self._num_async // 2)
        while sum(one.number for one in self._asked) + len(self._drawn) <= self._num_async - most:
            if not self.buffer.can_draw():
                return
            self._asked.append(self.buffer.ask(most))

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._sources

    def waits(self) -> list[Any]:
        return [self._asked[0].ref] if self._asked else []

    def state_dict(self) -> dict[str, Any]:
        drawn = [[batch, sources_to_list(batch.sources)] for batch in self._drawn]
        return {**super().state_dict(), "drawn": drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._asked.clear()
        self._drawn = deque(with_sources(*one) for one in state.get("drawn", ()))

    def stop(self) -> None:
        self._asked.clear()
        self._drawn.clear()
        self.buffer.stop()


class UpdateReplayPriorities:
    """for_each, (batch, info) -> the same: rows that were trained on get their absolute TD errors
    as priorities.

    Takes what TrainOneStep gives; of policies that tell no TD errors, and of rows that were not
    drawn from a buffer, it takes no notice.

    Args:
        local_buffer: the MultiAgentReplayBuffer that the batches were drawn from; or
        actors: the ReplayActors; priorities go to the shard that a batch came from.

    Raises:
        ValueError: neither is given, or both.
    """

    def __init__(
        self,
        *,
        local_buffer: MultiAgentReplayBuffer | None = None,
        actors: ReplayActors | None = None,
    ):
        self.buffer = _one_of(local_buffer, actors, "UpdateReplayPriorities")

    def __call__(self, item: Trained) -> Trained:
        batch, info = check_trained(item, "UpdateReplayPriorities")
        for policy_id, told in info.items():
            rows = told.get("rows", {})
            if "td_error" not in rows or "batch_indexes" not in rows:
                continue
            update = policy_id, rows["batch_indexes"], abs(rows["td_error"])
            if isinstance(self.buffer, ReplayActors):
                if len(batch.sources) != 1:
                    raise ValueError(
                        f"UpdateReplayPriorities(actors=…): rows drawn at once from one shard are "
                        f"needed, this batch has {len(batch.sources)} sources"
                    )
                (source,) = batch.sources
                self.buffer.update_priorities(source.worker, *update)
            else:
                self.buffer.update_priorities(*update)
        return item

    def __repr__(self) -> str:
        return "UpdateReplayPriorities"


class SimpleReplayBuffer:
    """The last `num_slots` batches, whole, drawn uniformly.

    Args:
        num_slots: batches; the oldest is overwritten.
        seed: of the draws; None takes the machine's entropy.
    """

    def __init__(self, num_slots: int, seed: int | None = None):
        if isinstance(num_slots, bool) or not isinstance(num_slots, int) or num_slots < 1:
            raise ValueError(f"num_slots is a whole number from 1, got {num_slots!r}")
        self.num_slots = num_slots
        self.rng = random_stream(seed, "replay")
        self._batches: deque[Batch] = deque(maxlen=num_slots)

    def add(self, batch: Batch) -> None:
        """Store a batch, which must not be changed afterwards."""
        self._batches.append(batch)

    def sample(self) -> Batch:
        """One of the batches.

        Raises:
            ValueError: there are none.
        """
        if not self._batches:
            raise ValueError("the replay buffer is empty: store something before drawing from it")
        return self._batches[int(self.rng.integers(len(self._batches)))]

    def can_add(self) -> bool:
        """Always: there is no ratio to keep."""
        return True

    def can_sample(self) -> bool:
        """Whether there are batches."""
        return bool(self._batches)

    def __len__(self) -> int:
        """Batches that are there."""
        return len(self._batches)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": list(self._batches), "rng": stream_state(self.rng)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches = deque(state["batches"], maxlen=self.num_slots)
        restore_stream(self.rng, state["rng"])

    def __repr__(self) -> str:
        return f"SimpleReplayBuffer({self.num_slots})"


class MixInReplay:
    """combine, batch -> [batch, replayed ones …]: mixes earlier batches in.

    Args:
        num_slots: batches that are kept to be replayed.
        replay_proportion: replayed batches for each new one; fractions add up, so 0.5 gives one
            after every second.
        seed: of the draws.

    Raises:
        ValueError: a negative proportion; one above 0 without slots.
    """

    def __init__(self, num_slots: int, replay_proportion: float, seed: int | None = None):
        if not 0 <= replay_proportion < float("inf"):
            raise ValueError(f"replay_proportion is at least 0, got {replay_proportion!r}")
        if replay_proportion and num_slots < 1:
            raise ValueError("a replay_proportion above 0 needs num_slots of at least 1")
        self.replay_proportion = replay_proportion
        self.buffer = SimpleReplayBuffer(max(num_slots, 1), seed)
        self._owed = 0.0

    def __call__(self, batch: Batch) -> list[Batch]:
        mixed = [batch]
        self._owed += self.replay_proportion
        if len(self.buffer):  # what is new is not mixed with itself
            while self._owed >= 1 - 1e-9:
                mixed.append(self.buffer.sample())
                self._owed -= 1
        if self.replay_proportion:
            self.buffer.add(batch)
        return mixed

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": self.buffer.state_dict(), "owed": self._owed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.buffer.load_state_dict(state["buffer"])
        self._owed = state["owed"]

    def __repr__(self) -> str:
        return f"MixInReplay({self.buffer.num_slots}, {self.replay_proportion})"


def _one_of(local_buffer: Any, actors: Any, operator: str) -> Any:
    """The buffer that is given, if it is one."""
    if (local_buffer is None) == (actors is None):
        raise ValueError(f"{operator} takes one of local_buffer and actors")
    if actors is not None:
        if not isinstance(actors, ReplayActors):
            raise TypeError(f"{operator}: actors is a ReplayActors, got a {type(actors).__name__}")
        return actors
    methods = ("can_add", "can_sample", "sample", "add")
    if not all(hasattr(local_buffer, name) for name in methods):
        raise TypeError(
            f"{operator}: local_buffer is a MultiAgentReplayBuffer, got a "
            f"{type(local_buffer).__name__}"
        )
    return local_buffer
