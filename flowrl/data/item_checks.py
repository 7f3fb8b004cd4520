"""Check the items that operators take."""

from __future__ import annotations

from typing import Any, TypeVar

from flowrl.data.batch_ref import BatchRef
from flowrl.data.sample_batch import MultiAgentBatch, SampleBatch

AnyBatch = TypeVar("AnyBatch", bound=SampleBatch | MultiAgentBatch | BatchRef)


def check_batch(item: Any, receiver: str, by_reference: bool = False) -> None:
    """Check that an item is a batch.

    Args:
        item: the item.
        receiver: the operator that takes it, for the message.
        by_reference: also accept a BatchRef.

    Raises:
        TypeError: the item is something else; the message says how to chain the operator.
    """
    if not (is_batch(item) or (by_reference and isinstance(item, BatchRef))):
        raise TypeError(
            f"{receiver} takes batches, got {type(item).__name__}: {how_to_get_a_batch(item)}"
        )


def is_batch(item: Any) -> bool:
    """Return whether an item is a batch whose rows are in this process."""
    return isinstance(item, (SampleBatch, MultiAgentBatch))


def how_to_get_a_batch(item: Any) -> str:
    """Return how to change the plan so that an operator gets a batch instead of `item`."""
    if isinstance(item, BatchRef):
        return "pass the stream through AggregateBatches, which fetches the rows"
    if isinstance(item, tuple) and item and is_batch(item[0]):
        return "chain it before the operator that trains"
    if isinstance(item, tuple) and len(item) == 2 and is_batch(item[1]):
        return "chain .for_each(CountRollouts(workers)) after .zip_with_source()"
    if isinstance(item, list) and item and is_batch(item[0]):
        return (
            "chain .combine(ConcatBatches(…)) instead of .batch(n), or return the batch instead of "
            "a list of it"
        )
    return "make sure that the operator before it returns the batch"
