"""Notice that Ray cannot be used any more: its raylet on this machine, or its GCS, has died.

Ray's own calls raise no error then. They block, or Ray ends the process: at once when an object is
read from or put into the object store of a dead raylet, after a minute without the GCS. So a thread
watches both, and calls that may block go through this module, which raises RayLostError.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from flowrl.iter.private_api import cluster_id, ray_sockets

PROBE_INTERVAL_S = 1.0
MAX_S_WITHOUT_GCS = 15.0  # a cluster with fault tolerance may restart it
MAX_PROBES = 3  # of a raylet without an answer, if the process behind its socket is unknown
CHECK_S = 2.0  # seconds for which a call may block between two checks


class RayLostError(RuntimeError):
    """Ray's raylet on this machine, or its GCS, has died: no worker can be used any more."""


def _message(problem: str) -> str:
    return (
        f"Ray's {problem}, so workers can neither be reached nor replaced. Continue the run from "
        "its last checkpoint in a new process: flowrl resume RUN_DIR"
    )


RAYLET_DIED = _message("raylet, the process that runs the workers of this machine, has died")
GCS_DIED = _message("GCS, the process that manages the cluster, has died")
GCS_LOST_ITS_STATE = _message(
    "GCS, the process that manages the cluster, has restarted without its state"
)


class _Watch:
    """Watches the Ray runtime of this process in a thread, until it is shut down or lost."""

    def __init__(self, sockets: dict[str, str]):
        self.sockets = sockets
        self.lost: str | None = None  # the message
        self._cluster_id: str | None = None  # of the GCS at its first answer
        self._raylet_exit = _exit_event_of(sockets["raylet"])
        threading.Thread(target=self._run, name="flowrl-ray-watch", daemon=True).start()

    def _run(self) -> None:
        gcs_seen, num_probes = time.monotonic(), 0
        while self.lost is None and ray_sockets() == self.sockets:
            num_probes = 0 if self._raylet_answers() else num_probes + 1
            if self.has_raylet_ended() or num_probes >= MAX_PROBES:
                self.lost = RAYLET_DIED
            elif _answers(self.sockets["GCS"]) and (now := cluster_id(self.sockets["GCS"])):
                gcs_seen = time.monotonic()
                self._cluster_id = self._cluster_id or now
                if now != self._cluster_id:
                    self.lost = GCS_LOST_ITS_STATE
            elif time.monotonic() - gcs_seen > MAX_S_WITHOUT_GCS:
                self.lost = GCS_DIED
            time.sleep(PROBE_INTERVAL_S)

    def has_raylet_ended(self) -> bool:
        """Return whether the process of the raylet is known to have ended."""
        exit_event = self._raylet_exit  # another thread may close it
        if exit_event is None:
            return False
        poll = select.poll()  # select() refuses file descriptors above 1023
        poll.register(exit_event, select.POLLIN)
        return any(event & select.POLLIN for _, event in poll.poll(0))

    def close(self) -> None:
        """Close the file descriptor of the raylet's process."""
        exit_event, self._raylet_exit = self._raylet_exit, None
        if exit_event is not None:
            os.close(exit_event)

    def _raylet_answers(self) -> bool:
        return self._raylet_exit is not None or _answers(self.sockets["raylet"])


_watch: _Watch | None = None
_lock = threading.Lock()


def watch_ray() -> None:
    """Watch the Ray runtime of this process, unless it is watched already."""
    global _watch
    with _lock:
        sockets = ray_sockets()
        if sockets and (_watch is None or _watch.sockets != sockets):
            before, _watch = _watch, _Watch(sockets)
            if before is not None:
                before.close()


def _exit_event_of(socket_path: str) -> int | None:
    """Return a file descriptor that becomes readable when the process behind a socket ends.

    None where such a descriptor cannot be opened: outside Linux, or across containers.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(socket_path)
            size = struct.calcsize("3i")
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return os.pidfd_open(struct.unpack("3i", peer)[0])
    except (OSError, AttributeError):
        return None


def _answers(address: str) -> bool:
    """Return whether a process listens at an address, host:port or the path of a socket."""
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), PROBE_INTERVAL_S).close()
        else:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(PROBE_INTERVAL_S)
                connection.connect(address)
    except OSError:
        return False
    return True


def is_ray_lost() -> bool:
    """Return whether Ray cannot be used any more."""
    watch = _watch  # another thread may replace it
    if watch is None or ray_sockets() != watch.sockets:
        return False  # the runtime that was watched has been shut down
    if watch.lost is None and watch.has_raylet_ended():
        watch.lost = RAYLET_DIED
    return watch.lost is not None


def check_ray() -> None:
    """Check that Ray can be used.

    Raises:
        RayLostError: it cannot.
    """
    if is_ray_lost():
        assert _watch is not None
        raise RayLostError(_watch.lost)


def get(refs: Any, wait_first: bool = True) -> Any:
    """Return `ray.get(refs)`.

    Args:
        refs: a Ray object reference or a list of them.
        wait_first: wait for the objects before reading them. Ray ends the process if its raylet
            dies while an object is read, and reading includes waiting. False saves a call.

    Raises:
        RayLostError: Ray died meanwhile.
        Exception: the error of a task.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayTaskError

    if wait_first:
        waited_for = refs if isinstance(refs, list) else [refs]
        wait(waited_for, len(waited_for))
    timeout = CHECK_S
    while True:
        check_ray()
        try:
            return ray.get(refs, timeout=timeout)
        except GetTimeoutError as error:
            if isinstance(error, RayTaskError):
                raise
            timeout *= 2  # the transfer of a large object begins again


def wait(refs: Sequence[Any], num_returns: int, timeout: float | None = None) -> list[Any]:
    """Return the refs that are ready; `ray.wait` without fetching the objects.

    Args:
        refs: Ray object references.
        num_returns: number of refs to wait for.
        timeout: seconds; None waits without limit.

    Raises:
        RayLostError: Ray died meanwhile.
    """
    import ray

    if not refs:
        return []
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        check_ray()
        left = CHECK_S if until is None else min(CHECK_S, max(0.0, until - time.monotonic()))
        ready: list[Any] = ray.wait(
            list(refs), num_returns=num_returns, timeout=left, fetch_local=False
        )[0]
        if len(ready) >= num_returns or (until is not None and time.monotonic() >= until):
            return ready
