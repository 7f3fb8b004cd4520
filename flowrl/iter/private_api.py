"""The private interfaces of other libraries that the engine uses, all in one place.

`tests/iter/test_private_api.py` fails if a new version of Python or Ray changes one of them.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_CONNECTION_SETTINGS = {
    "RAY_raylet_client_connect_timeout_milliseconds": "50",
    "RAY_raylet_client_num_connect_attempts": "200",
}
_OPTIONAL_PROCESSES = "start_api_server", "start_monitor"  # methods of ray._private.node.Node


def call_on_put_and_get(watched: queue.Queue[Any], callback: Callable[[], None]) -> None:
    """Call `callback` after every put into and every get from a queue.

    Wraps `queue.Queue._put` and `_get`, the methods that subclasses of Queue override; Queue calls
    them with its lock held.
    """
    for name in ("_put", "_get"):
        setattr(watched, name, _then(getattr(watched, name), callback))


def _then(method: Callable[..., Any], callback: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        result = method(*args)
        callback()
        return result

    return call


def queued_items(watched: queue.Queue[T]) -> list[T]:
    """Return the items of a queue without taking them out."""
    with watched.mutex:
        return list(watched.queue)


def restore_items(watched: queue.Queue[T], items: Iterable[T]) -> None:
    """Add items to a queue even if they exceed its capacity.

    Adds to `queue.Queue.queue`, so it never blocks, and no callback of
    `call_on_put_and_get` runs.
    """
    with watched.mutex:
        watched.queue.extend(items)


def call_when_ready(ref: Any, callback: Callable[..., None]) -> None:
    """Call `callback` from another thread when a Ray object ref is ready.

    Uses `ray.ObjectRef._on_ready`, which does not fetch the object. Refs without it (Ray client)
    use `future()`.
    """
    if hasattr(ref, "_on_ready"):
        ref._on_ready(callback)
    else:
        ref.future().add_done_callback(callback)


def ray_sockets() -> dict[str, str]:
    """Return the addresses of the processes that Ray cannot work without: "raylet" (the path of a
    socket) and "GCS" (host:port). Empty without Ray, and for Ray clients, which have neither.

    Uses `ray._private.worker._global_node`.
    """
    worker: Any = sys.modules.get("ray._private.worker")
    node = getattr(worker, "_global_node", None)
    if node is None:
        return {}
    return {"raylet": node.raylet_socket_name, "GCS": node.gcs_address}


def cluster_id(gcs_address: str) -> str | None:
    """Return the ID of the cluster that a GCS manages; None if it does not answer within 40 s.

    A GCS that has restarted without its state has another ID. Uses `ray._raylet.GcsClient`.
    """
    from ray.exceptions import RayError

    raylet = importlib.import_module("ray._raylet")  # its type hints lack GcsClient
    try:
        cluster: str = raylet.GcsClient(address=gcs_address).cluster_id.hex()
    except RayError:
        return None
    return cluster


@contextmanager
def fast_reconnection() -> Iterator[None]:
    """Let the processes that Ray starts in this context try to connect every 50 ms.

    A raylet that connects to its object store before the store listens tries again after a second
    by default: with two cores, every second start of Ray took a second longer. Sets two of Ray's
    internal settings by their environment variables, unless they are set.
    """
    added = {name: value for name, value in _CONNECTION_SETTINGS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def without_dashboard() -> Iterator[None]:
    """Let `ray.init` start a local cluster in this context without the processes of Ray's dashboard
    and of its autoscaler.

    Even with `include_dashboard=False`, Ray starts the dashboard's process, to report usage
    statistics, and waits until the process has imported its packages. Replaces two methods of
    `ray._private.node.Node`; in versions of Ray without them, the processes start.
    """
    node: Any = importlib.import_module("ray._private.node").Node
    replaced = {name: getattr(node, name) for name in _OPTIONAL_PROCESSES if hasattr(node, name)}
    for name in replaced:
        setattr(node, name, lambda self, **options: None)
    try:
        yield
    finally:
        for name, method in replaced.items():
            setattr(node, name, method)


@contextmanager
def without_sigterm_handler() -> Iterator[None]:
    """Let `ray.init` set no handler of SIGTERM in this context.

    Ray's would raise SystemExit in the middle of its start, after which the process ends with a
    segmentation fault. Replaces `ray._private.utils.set_sigterm_handler`.
    """
    utils: Any = importlib.import_module("ray._private.utils")
    set_handler = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler


def captures_child_tasks() -> bool:
    """Return whether actors that this process starts belong to its placement group.

    Uses `ray._private.worker.global_worker`.
    """
    from ray._private.worker import global_worker

    return bool(global_worker.should_capture_child_tasks_in_placement_group)


def kill_ray_processes() -> None:
    """Kill the processes that Ray has started for this process, without a graceful stop.

    Uses `ray._private.worker._global_node.kill_all_processes`.
    """
    worker: Any = sys.modules.get("ray._private.worker")
    node = getattr(worker, "_global_node", None)
    if node is not None:
        node.kill_all_processes(check_alive=False, allow_graceful=False)
