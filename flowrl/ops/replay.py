"""Operators that store experience in replay buffers and draw batches from them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

from flowrl.data import Batch, BatchRef
from flowrl.data.item_checks import AnyBatch, check_batch
from flowrl.iter import NOT_READY, LocalIterator, Source, Stage, _get_shared_metrics
from flowrl.iter.errors import call_in_stage
from flowrl.iter.stage import walk
from flowrl.ops.replay_actors import PendingDraw, ReplayActors
from flowrl.ops.train import TrainedItem, check_trained
from flowrl.replay import MultiAgentReplayBuffer
from flowrl.replay.replay_ratio import EMPTY
from flowrl.seeding import random_stream, restore_stream, stream_state
from flowrl.setting_values import check_int, check_number
from flowrl.state_schema import Fields, StateError, check_own_state


class StoreToReplayBuffer:
    """for_each, batch -> the same batch: store the batch in a replay buffer.

    In a plan with Concurrently that also draws from the buffer, no batch is stored while a draw is
    due, so the ratio of trained to sampled steps is kept, whichever side is slower. In a stream
    that is pulled alone, storing waits for draws only if the buffer has a `training_intensity`.

    Counts `num_agent_steps_stored`, in total and per policy. The state of the plan contains the
    rows of each buffer once.

    Args:
        local_buffer: a MultiAgentReplayBuffer or SimpleReplayBuffer.
        actors: ReplayActors, which also store BatchRefs without fetching them to the driver; a
            MultiAgentReplayBuffer is used like `local_buffer`.

    Raises:
        ValueError: not exactly one of local_buffer and actors is given.
        TypeError: the buffer has another type; when called: the item is not a batch.
    """

    chained_with: ClassVar[str] = "for_each"

    def __init__(
        self,
        *,
        local_buffer: MultiAgentReplayBuffer | SimpleReplayBuffer | None = None,
        actors: ReplayActors | MultiAgentReplayBuffer | None = None,
    ):
        self.buffer = _one_of(local_buffer, actors, "StoreToReplayBuffer")
        self.keeps_ratio = False  # set if the plan also draws from the buffer

    @property
    def shared_state(self) -> Any:
        """The buffer, whose state the plan saves once."""
        return self.buffer

    def ready(self) -> bool:
        """Return whether storing is due."""
        return bool(self.buffer.can_add(self.keeps_ratio))

    def blocked_by(self) -> str:
        """Return what must happen before storing is due."""
        return "" if self.ready() else str(self.buffer.missing_draws())

    def waits(self) -> list[Any]:
        """See ReplayActors.waits; empty for a local buffer."""
        if isinstance(self.buffer, ReplayActors):
            return self.buffer.waits(self.keeps_ratio)
        return []

    def __call__(self, batch: AnyBatch) -> AnyBatch:
        if isinstance(batch, BatchRef) and not isinstance(self.buffer, ReplayActors):
            batch = cast(Any, batch.get())
        check_batch(batch, "StoreToReplayBuffer", by_reference=True)
        self.buffer.add(batch)
        counters = _get_shared_metrics().counters
        for policy_id, rows in batch.steps_by_policy().items():
            counters["num_agent_steps_stored"] += rows
            counters[f"num_agent_steps_stored/{policy_id}"] += rows
        return batch

    def extra_stats(self) -> dict[str, Any]:
        """Return additional entries of `stats()`."""
        return _size_stats(self.buffer)

    def stop(self) -> None:
        """Stop the replay actors."""
        if isinstance(self.buffer, ReplayActors):
            self.buffer.stop()

    def __repr__(self) -> str:
        return f"StoreToReplayBuffer({self.buffer!r})"


class Replay(LocalIterator[Batch]):
    """An endless stream of batches drawn from a replay buffer.

    In a plan with Concurrently that also stores to the buffer, it is not ready while storing is
    due, so other branches run. Pulled on its own, it draws as soon as the buffer has
    `learning_starts` rows, and is limited only if the buffer has a `training_intensity`.

    Args:
        local_buffer: a MultiAgentReplayBuffer or SimpleReplayBuffer.
        actors: ReplayActors, which stop with the plan. The `sources` of a batch name its shard. A
            MultiAgentReplayBuffer is used like `local_buffer`.
        num_async: with `actors`, batches to request ahead from all shards together; the replay
            ratio counts them as drawn.

    Raises:
        ValueError: not exactly one of local_buffer and actors is given, or num_async is below 1.
        TypeError: the buffer has another type.
        RuntimeError (when pulled): no draw is due and no other branch can store; the message says
            how many rows are missing.
    """

    def __init__(
        self,
        *,
        local_buffer: MultiAgentReplayBuffer | SimpleReplayBuffer | None = None,
        actors: ReplayActors | MultiAgentReplayBuffer | None = None,
        num_async: int = 16,
    ):
        buffer = _one_of(local_buffer, actors, "Replay")
        check_int("Replay: num_async", num_async)
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
        self.keeps_ratio = False  # set if the plan also stores to the buffer

    @property
    def shared_state(self) -> Any:
        return self.buffer

    def pull(self, block: bool) -> Any:
        batch = call_in_stage(self, self._next)
        if batch is not NOT_READY:
            self.items += 1
        return batch

    def _next(self) -> Any:
        return self.buffer.sample() if self._is_due() else NOT_READY

    def _is_due(self) -> bool:
        return bool(self.buffer.can_sample(self.keeps_ratio))

    def waits(self) -> list[Any]:
        return []

    def can_return_not_ready(self) -> bool:
        return True

    def blocked_by(self) -> str:
        return "" if self._is_due() else str(self.buffer.missing_stores())

    def extra_stats(self) -> dict[str, Any]:
        return _size_stats(self.buffer)


class ReplayActorsStage(ReplayStage):
    """The stage of Replay on actors."""

    is_asynchronous = True
    state_fields: ClassVar[Fields] = {"drawn": list[Batch]}

    def __init__(self, actors: ReplayActors, num_async: int):
        super().__init__(actors)
        self._num_async = num_async
        self._pending: deque[PendingDraw] = deque()
        self._drawn: deque[Batch] = deque()
        self._item_sources: tuple[Source, ...] = ()

    def start(self, seed: str | None) -> None:
        self.buffer.journal = self.journal

    def _next(self) -> Any:
        while True:
            self._request()
            if self._drawn:
                batch = self._drawn.popleft()
                self._item_sources = batch.sources
                return batch
            if not self._pending or not self.buffer.is_ready(self._pending[0].ref, "drawn"):
                return NOT_READY
            self._drawn.extend(self.buffer.receive_batches(self._pending.popleft()))

    def _request(self) -> None:
        """Request batches until `num_async` are in flight.

        Each request draws half of them from one shard; other shards draw meanwhile.
        """
        per_request = max(1, self._num_async // 2)
        limit = self._num_async - per_request
        while sum(request.num_batches for request in self._pending) + len(self._drawn) <= limit:
            if not self._is_due():
                return
            self._pending.append(self.buffer.request_batches(per_request, self.keeps_ratio))

    def waits(self) -> list[Any]:
        return [self._pending[0].ref] if self._pending else []

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "drawn": list(self._drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._pending.clear()
        self._drawn = deque(state["drawn"])

    def stop(self) -> None:
        self._pending.clear()
        self._drawn.clear()
        self.buffer.stop()


def enable_replay_ratio(stages: Iterable[Stage]) -> None:
    """Set `keeps_ratio` on the operators of each buffer that the plan both stores to and draws
    from."""
    operators = [
        stage if isinstance(stage, ReplayStage) else getattr(stage, "fn", None) for stage in stages
    ]
    stores = [op for op in operators if isinstance(op, StoreToReplayBuffer)]
    draws = [op for op in operators if isinstance(op, ReplayStage)]
    for store, draw in itertools.product(stores, draws):
        if store.buffer is draw.buffer:
            store.keeps_ratio = draw.keeps_ratio = True


def share_a_buffer(branches: Iterable[Stage]) -> bool:
    """Return whether all branches store to one buffer or draw from it; see
    `enable_replay_ratio`."""
    buffers = []
    for branch in branches:
        operators: list[Any] = [getattr(stage, "fn", stage) for stage in walk(branch)]
        buffers.append({id(op.buffer) for op in operators if getattr(op, "keeps_ratio", False)})
    return bool(set.intersection(*buffers))


class UpdateReplayPriorities:
    """for_each, (batch, info) -> the same pair: set the priorities of the rows that were trained on
    to their absolute TD errors.

    Chain it after TrainOneStep. It ignores policies that report no TD errors, and rows that were
    not drawn from a buffer.

    Args:
        local_buffer: the MultiAgentReplayBuffer that the batches were drawn from.
        actors: the ReplayActors; the shard of a batch receives its priorities. A
            MultiAgentReplayBuffer is used like `local_buffer`.

    Raises:
        ValueError: not exactly one of local_buffer and actors is given; when called with `actors`:
            the batch has rows of several shards.
        TypeError: the buffer has another type; when called: the item is not (batch, info).
    """

    chained_with: ClassVar[str] = "for_each"

    def __init__(
        self,
        *,
        local_buffer: MultiAgentReplayBuffer | None = None,
        actors: ReplayActors | MultiAgentReplayBuffer | None = None,
    ):
        self.buffer = _one_of(local_buffer, actors, "UpdateReplayPriorities")
        if isinstance(self.buffer, SimpleReplayBuffer):
            raise TypeError(
                "UpdateReplayPriorities: a SimpleReplayBuffer has no priorities: leave the "
                "operator out, or use a MultiAgentReplayBuffer"
            )

    def __call__(self, item: TrainedItem) -> TrainedItem:
        batch, info = check_trained(item, "UpdateReplayPriorities")
        for policy_id, policy_info in info.items():
            row_stats = policy_info.get("row_stats", {})
            if "td_error" not in row_stats or "batch_indexes" not in row_stats:
                continue
            update = policy_id, row_stats["batch_indexes"], abs(row_stats["td_error"])
            if isinstance(self.buffer, ReplayActors):
                if len(batch.sources) != 1:
                    raise ValueError(
                        f"UpdateReplayPriorities(actors=…) needs batches drawn from one shard, but "
                        f"this batch has {len(batch.sources)} sources: do not concatenate batches"
                    )
                (source,) = batch.sources
                self.buffer.update_priorities(source, *update)
            else:
                self.buffer.update_priorities(*update)
        return item

    def __repr__(self) -> str:
        return "UpdateReplayPriorities"


class SimpleReplayBuffer:
    """Stores the last `num_slots` batches and draws whole batches uniformly.

    Args:
        num_slots: capacity in batches; a new batch replaces the oldest one.
        seed: seed of the draws; None seeds from the operating system.

    Raises:
        ValueError: num_slots is not an int of at least 1.
    """

    state_fields: ClassVar[Fields] = {
        "batches": list[Batch],
        "rng": dict[str, Any],
    }

    def __init__(self, num_slots: int, seed: int | None = None):
        check_int("num_slots", num_slots)
        self.num_slots = num_slots
        self.rng = random_stream(seed, "replay")
        self._batches: deque[Batch] = deque(maxlen=int(num_slots))

    def add(self, batch: Batch) -> None:
        """Store a batch without copying it; do not change it afterwards.

        Raises:
            TypeError: it is not a batch.
        """
        check_batch(batch, "SimpleReplayBuffer", by_reference=True)
        self._batches.append(batch)

    def sample(self) -> Batch:
        """Return a random batch.

        Raises:
            ValueError: the buffer is empty.
        """
        if not self._batches:
            raise ValueError(EMPTY)
        return self._batches[int(self.rng.integers(len(self._batches)))]

    def can_add(self, alternate: bool = True) -> bool:
        """Return True, because this buffer keeps no replay ratio."""
        return True

    def can_sample(self, alternate: bool = True) -> bool:
        """Return whether the buffer contains batches."""
        return bool(self._batches)

    def missing_stores(self) -> str:
        """Return what must be stored before the next draw."""
        return EMPTY

    def missing_draws(self) -> str:
        """Return the empty string: storing is always due."""
        return ""

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": list(self._batches), "rng": stream_state(self.rng)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_own_state(self, state)
        self._batches = deque(state["batches"], maxlen=self.num_slots)
        restore_stream(self.rng, state["rng"])

    def __repr__(self) -> str:
        return f"SimpleReplayBuffer({self.num_slots})"


class MixInReplay:
    """combine, batch -> [batch, replayed batches …]: add earlier batches to the stream.

    Args:
        num_slots: number of most recent batches to draw from.
        replay_proportion: replayed batches per new batch; fractions accumulate, so 0.5 replays one
            batch after every second new batch.
        seed: seed of the draws; None seeds from the operating system.

    Raises:
        ValueError: replay_proportion is negative, or is above 0 while num_slots is below 1.
        TypeError (when called): the item is not a batch.
    """

    state_fields: ClassVar[Fields] = {"buffer": dict[str, Any], "batches_due": float}

    chained_with: ClassVar[str] = "combine"

    def __init__(self, num_slots: int, replay_proportion: float, seed: int | None = None):
        check_number("replay_proportion", replay_proportion, 0)
        if replay_proportion == float("inf"):
            raise ValueError("replay_proportion must be at least 0 and finite")
        check_int("num_slots", num_slots, 0)
        if replay_proportion and num_slots < 1:
            raise ValueError("a replay_proportion above 0 needs num_slots of at least 1")
        self.replay_proportion = replay_proportion
        self.buffer = SimpleReplayBuffer(max(num_slots, 1), seed)
        self._batches_due = 0.0

    def __call__(self, batch: Batch) -> list[Batch]:
        check_batch(batch, "MixInReplay", by_reference=True)
        batches = [batch]
        self._batches_due += self.replay_proportion
        if len(self.buffer):  # before the new batch is added, so it is not replayed right away
            while self._batches_due >= 1 - 1e-9:
                batches.append(self.buffer.sample())
                self._batches_due = max(0.0, self._batches_due - 1)
        if self.replay_proportion:
            self.buffer.add(batch)
        return batches

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": self.buffer.state_dict(), "batches_due": self._batches_due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state["batches_due"] >= 0:
            raise StateError(
                f"MixInReplay/batches_due: must be at least 0, got {state['batches_due']!r}"
            )
        self.buffer.load_state_dict(state["buffer"])
        # the run that saved the state may have replayed more
        self._batches_due = min(state["batches_due"], self.replay_proportion + 1)

    def __repr__(self) -> str:
        return f"MixInReplay({self.buffer.num_slots}, {self.replay_proportion})"


def _size_stats(buffer: Any) -> dict[str, int]:
    """Return the size of a buffer for `stats()`."""
    unit = "batches" if isinstance(buffer, SimpleReplayBuffer) else "rows"
    return {unit: len(buffer)}


def _one_of(local_buffer: Any, actors: Any, operator: str) -> Any:
    """Return the given buffer.

    Raises:
        ValueError: none or both are given.
        TypeError: the buffer is of another type.
    """
    if (local_buffer is None) == (actors is None):
        found = "neither" if actors is None else "both"
        raise ValueError(f"{operator}: give local_buffer or actors, got {found}")
    if actors is not None:
        if not isinstance(actors, (ReplayActors, MultiAgentReplayBuffer)):
            raise TypeError(
                f"{operator}: actors must be a ReplayActors, got a {type(actors).__name__}"
            )
        return actors
    methods = ("can_add", "can_sample", "sample", "add", "missing_stores", "missing_draws")
    if not all(hasattr(local_buffer, name) for name in methods):
        raise TypeError(
            f"{operator}: local_buffer must be a MultiAgentReplayBuffer or a SimpleReplayBuffer, "
            f"got a {type(local_buffer).__name__}"
        )
    return local_buffer
