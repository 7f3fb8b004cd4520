"""Source: the origin of an item of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.state_schema import Fields, Natural, check_state


@dataclass(slots=True, unsafe_hash=True)  # a frozen dataclass takes five times as long to create
class Source:
    """The origin of an item: shard, incarnation (number of restarts), sequence number.

    Shards are numbered from 0, so the shard of a remote rollout worker is its `worker_index` - 1,
    also if a plan reads only some of the workers.

    `tags` holds what the worker reported with the item (sampling: weights version, step counts);
    `origin` is the name of the gather stage that received the item, or "replay" for a batch that
    was drawn from a replay actor.
    """

    shard: int
    incarnation: int = 0
    seq: int = 0
    tags: dict[str, Any] = field(default_factory=dict, compare=False)
    origin: str = field(default="", compare=False, repr=False)


_SOURCE: Fields = {
    "shard": int, "incarnation": Natural, "seq": Natural, "tags": dict[str, Any], "origin": str,
}  # fmt: skip


def sources_to_list(sources: Sequence[Source]) -> list[list[Any]]:
    """Convert sources to nested lists for saved state."""
    return [[s.shard, s.incarnation, s.seq, s.tags, s.origin] for s in sources]


def sources_from_list(rows: Sequence[Sequence[Any]]) -> tuple[Source, ...]:
    """Convert the result of `sources_to_list` back to sources.

    Raises:
        ValueError: the rows are not those of sources.
    """
    for row in rows:
        check_state(dict(zip(_SOURCE, row, strict=True)), _SOURCE, "sources")
        versions = {"weights_versions": row[3].get("weights_versions", {})}
        check_state(versions, {"weights_versions": dict[str, Natural]}, "sources")
    return tuple(Source(*row) for row in rows)
