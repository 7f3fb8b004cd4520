"""Processes and actors of tests: whether they run, how to kill them."""

import contextlib
import time


def is_running(pid):
    """Return whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_ended(pids, seconds=30):
    """Wait for processes, and fail if some still run after that time."""
    deadline = time.monotonic() + seconds
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"the processes {running} have not ended"
        time.sleep(0.05)


def kill_actor(actor):
    """Kill an actor, and wait until it is dead."""
    import ray

    ray.kill(actor)
    deadline = time.monotonic() + 60
    with contextlib.suppress(ray.exceptions.RayActorError):
        while True:  # kill() returns before the actor is dead
            ray.get(actor.__ray_ready__.remote(), timeout=60)
            assert time.monotonic() < deadline
