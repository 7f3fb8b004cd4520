"""The functions that reply to requests for a worker's streams, in the process of the worker, and
ParallelIteratorWorker, the base class of workers."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from flowrl.iter.errors import ENGINE_DIR, strip_origin
from flowrl.iter.recovery import REMOTE_TRACEBACK
from flowrl.iter.shard_stream import PartitionedStream, Reply, ShardRequest, ShardStream
from flowrl.iter.stages.source import Repeated

U = TypeVar("U")

_NEXT_ITEM = ShardRequest("", None)


def serve(worker: Any, request: ShardRequest) -> Reply:
    """Reply to a request, in the process of the worker."""
    streams = worker.__dict__.setdefault("_flowrl_streams", {})
    if request.stream_id not in streams:
        if request.steps is None:
            raise RuntimeError(
                "this worker does not have the requested stream: it is not the worker that created "
                "the stream"
            )
        stream_class = ShardStream if request.partition is None else PartitionedStream
        streams[request.stream_id] = stream_class(worker, request)
    try:
        return streams[request.stream_id].reply(request)
    except BaseException as error:
        strip_origin(error)  # the reader has its own stages
        raise


# Actors return a list with the fields of a Reply, and most requests have no arguments: Ray takes
# 0.2 ms longer for a class, and 0.2 ms longer for an argument.


def serve_next(worker: Any, stream_handle: int) -> list[Any]:
    """Return the next item of a stream; runs in an actor."""
    return list(_with_traceback(worker._flowrl_stream_handles[stream_handle].reply, _NEXT_ITEM))


def serve_remote(worker: Any, request: ShardRequest) -> list[Any]:
    """Reply to a request with a handle of the stream for later requests; runs in an actor."""
    reply = _with_traceback(serve, worker, request)
    stream = worker._flowrl_streams[request.stream_id]
    handles = worker.__dict__.setdefault("_flowrl_stream_handles", [])
    if stream not in handles:
        if None not in handles:
            handles.append(None)
        handles[handles.index(None)] = stream
    return list(reply._replace(stream_handle=handles.index(stream)))


def _with_traceback(function: Callable[..., Reply], *args: Any) -> Reply:
    """Return function(*args); add the traceback of an exception as its first note."""
    try:
        return function(*args)
    except Exception as error:
        strip_origin(error)
        stack = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in stack if not frame.filename.startswith(ENGINE_DIR)]
        text = "".join(traceback.format_list(frames))
        exception = f"{type(error).__name__}: {error}"
        # the first note, so that those that say where it happened follow the exception
        notes = [f"{REMOTE_TRACEBACK}\n{text}{exception}", *getattr(error, "__notes__", [])]
        vars(error)["__notes__"] = notes
        _make_portable(error)
        raise


def _make_portable(error: Exception) -> None:
    """Let Ray send an exception that cannot be pickled, such as one whose constructor takes other
    arguments than `args`, or that has an attribute that cannot be pickled."""
    import ray.util

    if not _can_be_pickled(error):
        ray.util.register_serializer(type(error), serializer=_parts_of, deserializer=_rebuilt)


def _parts_of(error: Exception) -> tuple[type[Exception], list[Any], dict[str, Any]]:
    """Return class, arguments and attributes of an exception, without those that cannot be pickled:
    arguments become texts."""
    args = [arg if _can_be_pickled(arg) else repr(arg) for arg in error.args]
    state = {name: value for name, value in vars(error).items() if _can_be_pickled(value)}
    return type(error), args, state


def _rebuilt(parts: tuple[type[Exception], list[Any], dict[str, Any]]) -> Exception:
    error_class, args, state = parts
    error = error_class.__new__(error_class)
    error.args = tuple(args)
    error.__dict__.update(state)
    return error


def _can_be_pickled(value: Any) -> bool:
    import ray

    try:
        ray.cloudpickle.loads(ray.cloudpickle.dumps(value))
    except Exception:
        return False
    return True


def drop_stream(worker: Any, stream_id: str) -> None:
    """Stop and remove a stream, in the process of the worker."""
    stream = worker.__dict__.get("_flowrl_streams", {}).pop(stream_id, None)
    if stream is not None:
        stream.stop()
    handles = worker.__dict__.get("_flowrl_stream_handles", [])
    if stream in handles:
        handles[handles.index(stream)] = None


class ParallelIteratorWorker:
    """Base class of shard actors: serves the items of an iterable.

    Args:
        item_generator: an iterable, or a callable that returns one.
        repeat: start again at the end; needs a callable or an iterable that can be read twice.
    """

    replayable = True  # a recreated worker serves the same items: those received are skipped

    def __init__(self, item_generator: Any, repeat: bool = False):
        if repeat and not callable(item_generator) and iter(item_generator) is item_generator:
            raise ValueError("repeat=True needs a callable or an iterable, not an iterator")
        self._item_generator = item_generator
        self._repeat = repeat

    def items(self) -> Iterable[Any]:
        """Return the items of the shard."""
        items = self._item_generator
        if self._repeat:
            return Repeated(items)
        return items() if callable(items) else items

    def apply(self, fn: Callable[..., U], *args: Any) -> U:
        """Return fn(worker, *args), computed in the process of the worker."""
        return fn(self, *args)

    def flowrl_next_item(self) -> list[Any]:
        """Return a reply with the next item of the first stream (a call without arguments)."""
        return serve_next(self, 0)


class PartitionWorker(ParallelIteratorWorker):
    """Serves a partition of other shards; a recreated worker continues at their positions."""

    replayable = False

    def items_for(self, stream_id: str, seed: str | None) -> Iterable[Any]:
        """Return the items for one reader, whose partitions share the streams of the shards."""
        items: Iterable[Any] = self._item_generator(stream_id, seed)
        return items
