"""The private interfaces of Python and Ray that the engine uses exist and behave as expected."""

import inspect
import os
import queue
import signal
import threading
from pathlib import Path

import pytest
from packaging.version import Version

from flowrl.iter import private_api
from flowrl.iter.private_api import (
    call_on_put_and_get,
    call_when_ready,
    captures_child_tasks,
    cluster_id,
    fast_reconnection,
    queued_items,
    ray_sockets,
    restore_items,
    without_dashboard,
    without_sigterm_handler,
)


@pytest.mark.parametrize("queue_class", [queue.Queue, queue.LifoQueue, queue.PriorityQueue])
def test_queue_calls_its_put_and_get_methods(queue_class):
    watched, calls = queue_class(maxsize=2), []
    call_on_put_and_get(watched, lambda: calls.append(watched.mutex.locked()))
    watched.put(1)
    watched.put_nowait(2)
    assert sorted([watched.get(), watched.get_nowait()]) == [1, 2]
    assert calls == [True] * 4  # once per put and get, with the lock of the queue held
    with pytest.raises(queue.Empty):
        watched.get_nowait()
    assert len(calls) == 4


def test_queue_has_a_list_of_its_items():
    watched = queue.Queue(maxsize=1)
    watched.put("a")
    restore_items(watched, ["b", "c"])
    assert queued_items(watched) == ["a", "b", "c"]
    assert [watched.get_nowait() for _ in range(3)] == ["a", "b", "c"]


def test_object_ref_calls_back_when_ready(ray_session):
    ready, ready_again = threading.Event(), threading.Event()

    @ray_session.remote(num_cpus=0)
    def nothing():
        return None

    # `future()` replaces it for older versions
    if Version(ray_session.__version__) >= Version("2.60"):
        assert hasattr(ray_session.ObjectRef, "_on_ready")
    ref = nothing.remote()
    call_when_ready(ref, lambda *_: ready.set())
    assert ready.wait(60)
    call_when_ready(ref, lambda *_: ready_again.set())  # also if it is ready already
    assert ready_again.wait(60)


def test_gcs_returns_the_same_cluster_id_to_every_client(ray_session):
    address = ray_sockets()["GCS"]
    first = cluster_id(address)
    assert first
    assert cluster_id(address) == first


def test_child_tasks_are_captured_only_if_the_strategy_says_so(ray_session):
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1}])

    def captures(value):
        strategy = PlacementGroupSchedulingStrategy(
            group, placement_group_capture_child_tasks=value
        )
        task = ray_session.remote(captures_child_tasks).options(scheduling_strategy=strategy)
        return ray_session.get(task.remote(), timeout=60)

    assert captures(True)
    assert not captures(False)
    remove_placement_group(group)
    assert not captures_child_tasks()


def test_raylet_has_the_settings_of_connections():
    import ray

    raylet = Path(ray.__file__).parent / "core/src/ray/raylet/raylet"
    program = raylet.read_bytes()
    for name in private_api._CONNECTION_SETTINGS:
        assert name.encode() in program


def test_settings_of_connections_are_set_only_in_the_context(monkeypatch):
    timeout, attempts = private_api._CONNECTION_SETTINGS
    monkeypatch.delenv(timeout, raising=False)
    monkeypatch.setenv(attempts, "7")  # by the user
    with fast_reconnection():
        assert (os.environ[timeout], os.environ[attempts]) == ("50", "7")
    assert timeout not in os.environ
    assert os.environ[attempts] == "7"


def test_ray_has_the_methods_that_start_the_dashboard_and_the_autoscaler():
    from ray._private.node import Node

    def methods():
        return [getattr(Node, name) for name in private_api._OPTIONAL_PROCESSES]

    before = methods()
    with without_dashboard():
        assert set(methods()).isdisjoint(before)
    assert methods() == before


def test_cluster_without_a_dashboard_has_only_the_processes_that_it_needs(ray_session):
    started = ray_session._private.worker._global_node.all_processes
    assert {"gcs_server", "raylet"} <= set(started)
    assert {"dashboard", "monitor"}.isdisjoint(started)


def test_ray_sets_its_sigterm_handler_by_the_function_that_is_replaced():
    import ray._private.node
    import ray._private.utils
    import ray._private.worker

    before = signal.getsignal(signal.SIGTERM)
    with without_sigterm_handler():
        ray._private.utils.set_sigterm_handler(lambda *args: None)
    assert signal.getsignal(signal.SIGTERM) == before
    for module in (ray._private.node, ray._private.worker):
        assert "ray._private.utils.set_sigterm_handler(" in inspect.getsource(module)
