"""The death of Ray's own processes is an error, not a run that never continues."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from flowrl.iter import ray_health
from flowrl.iter.waiting import Signal, Waiter

PROGRAM = """
    import os, signal, sys, time
    import ray
    from flowrl.algorithms.a3c import A3CConfig
    from flowrl.iter.ray_health import RayLostError

    config = A3CConfig(env="CartPole-v1", num_workers=2, seed=1, monitor=False)
    with config.build() as algorithm:
        algorithm.train()
        processes = ray._private.worker._global_node.all_processes
        os.kill(processes[{victim!r}][0].process.pid, signal.SIGKILL)
        killed = time.monotonic()
        try:
            while True:
                algorithm.train()
        except RayLostError as error:
            assert time.monotonic() - killed < 30
            print("lost:", error, flush=True)
        algorithm.save({path!r})
        print("saved", flush=True)
    print("stopped", flush=True)
"""


@pytest.mark.parametrize(
    ("victim", "name"),
    [
        pytest.param("raylet", "raylet", marks=pytest.mark.slow),
        pytest.param("gcs_server", "GCS", marks=pytest.mark.slow),
    ],
)
def test_a_dead_process_of_ray_is_an_error_and_the_state_can_be_saved(tmp_path, victim, name):
    path = str(tmp_path / "checkpoint")
    program = textwrap.dedent(PROGRAM).format(victim=victim, path=path)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert f"lost: Ray's {name}, the process that" in done.stdout, done.stderr[-3000:]
    assert {"saved", "stopped"} <= set(done.stdout.splitlines())
    assert os.path.exists(f"{path}/manifest.json")


def test_no_ray_is_not_a_loss(monkeypatch):
    monkeypatch.setattr(ray_health, "_watch", None)
    assert not ray_health.is_ray_lost()
    ray_health.check_ray()


@pytest.fixture
def raylet(tmp_path, monkeypatch):
    """A process that listens at the address of the raylet; there is no GCS."""
    program = (
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); "
        "s.listen(); print('ready', flush=True); time.sleep(60)"
    )
    path = str(tmp_path / "raylet")
    process = subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE)
    process.stdout.readline()
    sockets = {"raylet": path, "GCS": "127.0.0.1:1"}
    monkeypatch.setattr(ray_health, "ray_sockets", lambda: sockets)
    monkeypatch.setattr(ray_health, "_watch", None)
    yield process
    process.kill()
    process.wait()


def wait_until_lost():
    until = time.monotonic() + 20
    while not ray_health.is_ray_lost() and time.monotonic() < until:
        time.sleep(0.01)


@pytest.mark.parametrize("with_process_id", [True, False])
def test_the_end_of_the_process_behind_a_socket_is_noticed(raylet, monkeypatch, with_process_id):
    if not with_process_id:
        monkeypatch.delattr(os, "pidfd_open")
    ray_health.watch_ray()
    ray_health.check_ray()
    os.kill(raylet.pid, signal.SIGKILL)  # not reaped yet: a zombie has ended, too
    wait_until_lost()
    with pytest.raises(ray_health.RayLostError, match="flowrl resume RUN_DIR"):
        ray_health.check_ray()


def test_a_gcs_that_does_not_answer_for_a_while_is_lost(raylet, monkeypatch):
    monkeypatch.setattr(ray_health, "PROBE_INTERVAL_S", 0.01)
    monkeypatch.setattr(ray_health, "MAX_S_WITHOUT_GCS", 0.05)
    ray_health.watch_ray()
    wait_until_lost()
    with pytest.raises(ray_health.RayLostError, match="GCS"):
        ray_health.check_ray()


def test_a_gcs_that_restarts_is_lost_only_if_it_has_another_cluster_id(raylet, monkeypatch):
    ids = ["a", "a", None, "a", None, "b"]
    monkeypatch.setattr(ray_health, "PROBE_INTERVAL_S", 0.01)
    monkeypatch.setattr(ray_health, "_answers", lambda address: True)
    monkeypatch.setattr(ray_health, "cluster_id", lambda address: ids.pop(0))
    ray_health.watch_ray()
    wait_until_lost()
    assert not ids
    with pytest.raises(ray_health.RayLostError, match="restarted without its state"):
        ray_health.check_ray()


def test_a_runtime_that_was_shut_down_is_not_lost(raylet, monkeypatch):
    ray_health.watch_ray()
    raylet.kill()
    raylet.wait()
    assert ray_health.is_ray_lost()
    monkeypatch.setattr(ray_health, "ray_sockets", dict)
    ray_health.check_ray()


def test_processes_with_many_open_files_are_watched(raylet):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        ray_health.watch_ray()
        ray_health.check_ray()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_object_that_takes_longer_than_a_check_is_fetched(ray_session, monkeypatch):
    monkeypatch.setattr(ray_health, "CHECK_S", 0.01)
    slow = ray_session.remote(num_cpus=0)(lambda: time.sleep(0.3) or 7).remote()
    assert ray_health.get(slow, wait_first=False) == 7
    assert ray_health.get([slow]) == [7]


def test_a_wait_for_a_ref_and_a_signal_does_not_exceed_its_timeout(ray_session, monkeypatch):
    never = ray_session.remote(num_cpus=0)(lambda: time.sleep(60)).remote()
    waiter, timeouts = Waiter(), []
    signals = [Signal()]
    waiter.wait([never, *signals, time.monotonic() - 1])  # subscribes
    monkeypatch.setattr(waiter._event, "wait", timeouts.append)
    waiter.wait([never, *signals, time.monotonic() - 1])
    waiter.wait([never, *signals])
    assert timeouts == [0.0, ray_health.CHECK_S]
    ray_session.cancel(never, force=True)
