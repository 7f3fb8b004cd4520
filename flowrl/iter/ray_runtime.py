"""Start, share and leave the Ray runtime of this process."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

from flowrl.errors import ConfigError
from flowrl.iter.private_api import (
    fast_reconnection,
    kill_ray_processes,
    without_dashboard,
    without_sigterm_handler,
)
from flowrl.iter.ray_health import is_ray_lost, watch_ray

REACH_TIMEOUT_S = 10.0  # to connect to the address of a cluster

log = logging.getLogger("flowrl")

_unregistered: dict[str, ModuleType] = {}  # by name, see `pickle_by_value`
_start_lock = threading.Lock()
_num_users = 0  # of a Ray runtime that `start_ray` started or joined


def pickle_by_value(modules: Iterable[ModuleType]) -> None:
    """Let Ray's processes receive the code of modules, which they may be unable to import."""
    _unregistered.update({module.__name__: module for module in modules})
    if sys.modules.get("ray") is not None:
        register_modules()


def register_modules() -> None:
    """Register the modules of `pickle_by_value` with Ray; it imports Ray."""
    import ray

    while _unregistered:
        name, module = _unregistered.popitem()
        if sys.modules.get(name) is module:  # another plan file may have replaced it
            ray.cloudpickle.register_pickle_by_value(module)


def cluster_address(address: str | None) -> str | None:
    """Return the address of the cluster to join; None to start a local one.

    Args:
        address: "local" starts a local cluster; None takes the environment variable RAY_ADDRESS.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    return None if address == "local" else address


def _check_reachable(cluster: str) -> None:
    """Raise ConfigError if nothing listens at an address host:port, where Ray would retry for
    minutes."""
    host, colon, port = cluster.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_ipv6_only = ":" in host and not cluster.startswith("[")
    if not colon or "/" in host or not port.isdecimal() or is_ipv6_only:
        return
    try:
        socket.create_connection((host, int(port)), REACH_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"address (or RAY_ADDRESS): nothing listens at {cluster}: {error}. Start Ray there "
            f"with `ray start --head --port={port}`"
        ) from error


def start_ray(address: str | None = None, num_cpus: int | None = None, **options: Any) -> bool:
    """Join a Ray cluster or start a local one, unless this process has Ray already.

    Args:
        address: see `cluster_address`.
        num_cpus: CPUs of a new local cluster; None for those of the machine.
        options: arguments of `ray.init`, which override the defaults of this function.

    Returns:
        whether the runtime was started or joined by this function: the caller must then call
        `leave_ray()` once when it no longer needs Ray.

    Raises:
        ConfigError: there is no cluster at the address, or Ray did not start in time.
    """
    with _start_lock:  # another thread may start it
        return _start_ray(address, num_cpus, options)


def _start_ray(address: str | None, num_cpus: int | None, options: dict[str, Any]) -> bool:
    import ray

    register_modules()
    global _num_users
    if not ray.is_initialized():
        cluster = cluster_address(address)
        defaults: dict[str, Any] = {"logging_level": logging.WARNING}
        if cluster is None:
            defaults |= {"include_dashboard": False, "num_cpus": num_cpus}
        else:
            _check_reachable(cluster)
        options = {**defaults, **options}
        try:
            has_dashboard = cluster is not None or options["include_dashboard"] is not False
            processes = nullcontext() if has_dashboard else without_dashboard()
            with _kept_sigterm_handler(), fast_reconnection(), processes:
                ray.init(cluster or "local", **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            if cluster is None:
                raise
            raise ConfigError(
                f"address (or RAY_ADDRESS): no Ray cluster at {cluster!r}: {error}"
            ) from error
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            raise ConfigError(
                "Ray did not start in time, because the machine is busy or lacks memory: try "
                'again, start it before (ray start --head) and set address="auto", or sample in '
                "this process (num_workers=0)"
            ) from error
        _num_users = 0
    else:
        _warn_of_other_address(address)
        if not _num_users:
            watch_ray()
            return False  # the user of flowrl started it
    watch_ray()
    _num_users += 1
    return True


def _warn_of_other_address(address: str | None) -> None:
    """Warn if an address is that of another cluster than the one of this process."""
    import ray

    if address is None or "://" in address or ":" not in address:
        return
    connected = ray.get_runtime_context().gcs_address
    # one host may have several names, so only the ports are compared
    if address.rpartition(":")[2] != connected.rpartition(":")[2]:
        log.warning(
            "address=%r is not used: this process is connected to the Ray cluster at %s",
            address, connected,
        )  # fmt: skip


@contextmanager
def _kept_sigterm_handler() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, which `ray.init` would replace by one that exits.

    Without a handler, Ray's stays: it ends Ray's processes before this one.
    """
    handler: Any = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or handler in (None, signal.SIG_DFL):
        yield
        return

    def handle(signal_number: int, frame: Any) -> None:
        signal.alarm(0)  # Ray's C++ handler has set one that aborts this process after 3 s
        if callable(handler):
            handler(signal_number, frame)

    signal.signal(signal.SIGTERM, handle)
    try:
        with without_sigterm_handler():
            yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def leave_ray() -> None:
    """Release the Ray runtime after `start_ray` returned True; the last user shuts it down."""
    import ray

    global _num_users
    _num_users = max(0, _num_users - 1)
    if not _num_users and ray.is_initialized():
        if is_ray_lost():
            kill_ray_processes()
        ray.shutdown()


@cache
def actor_class(worker_class: type) -> Any:
    """Return a class as a Ray actor class, without CPUs and without restarts by Ray.

    Set further options with `.options()`. Repeated calls return the same object, because Ray
    exports every new actor class at its first use, and the caller has to wait for that.
    """
    import ray

    return ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(worker_class)


def node_id() -> str | None:
    """Return the id of the Ray node that this process runs on; None without Ray."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return str(ray.get_runtime_context().get_node_id())


def live_nodes() -> list[dict[str, Any]]:
    """Return the records of Ray's live nodes, as `ray.nodes()` has them; [] without Ray."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return []
    return [node for node in ray.nodes() if node["Alive"]]


def death_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of `ray.get` that mean that the process of an actor or task died, that
    its call was interrupted, or that the node that held its result was lost."""
    from ray.exceptions import (
        ObjectLostError,
        OutOfMemoryError,
        RayActorError,
        TaskCancelledError,
        WorkerCrashedError,
    )

    return RayActorError, OutOfMemoryError, WorkerCrashedError, ObjectLostError, TaskCancelledError
