"""Threads of a process: those of torch and numpy, and calls in the background."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from threadpoolctl import threadpool_info, threadpool_limits

from flowrl.algorithms.a2c import A2C, A2CConfig
from flowrl.algorithms.sac import SACConfig, SACTorchPolicy
from flowrl.algorithms.td3 import TD3TorchPolicy
from flowrl.data import SampleBatch
from flowrl.errors import ConfigError
from flowrl.policies.learning.kernels import actor_critic
from flowrl.threads import (
    BackgroundCall,
    allow_background_calls,
    limit_threads,
    num_free_cores,
)

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _callers_make_their_calls():
    yield
    allow_background_calls(False)


class Images(gym.Env):
    """An environment whose observations are images."""

    observation_space = gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


def blas_threads():
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def test_threads_are_limited_when_an_algorithm_is_built():
    before = torch.get_num_threads()
    config = A2CConfig(env="CartPole-v1")
    try:
        torch.set_num_threads(2)
        with threadpool_limits(2, "blas"):
            config.resources(num_threads_per_process=None).build()
            assert (torch.get_num_threads(), blas_threads()) == (2, {2})
            config.resources(num_threads_per_process=1).build()
            assert (torch.get_num_threads(), blas_threads()) == (1, {1})
    finally:
        torch.set_num_threads(before)


def test_only_torch_has_several_threads():
    """Threads of two libraries, which wait in busy loops, would take each other's cores."""
    before = torch.get_num_threads()
    config = A2CConfig(env="CartPole-v1")
    try:
        with threadpool_limits(2, "blas"):
            config.resources(num_threads_per_process=2).build()
            assert (torch.get_num_threads(), blas_threads()) == (2, {1})
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("env", "num_workers", "expected"),
    [
        ("CartPole-v1", 0, ["auto"]),
        (Images, 0, ["auto", 3]),
        (Images, 1, ["auto", 2]),
        pytest.param(Images, 4, ["auto", 1], marks=pytest.mark.slow),
    ],
)
def test_convolutions_use_the_cores_that_no_worker_uses(env, num_workers, expected, monkeypatch):
    limits = []
    monkeypatch.setattr("flowrl.threads.num_cores", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("flowrl.trainer.algorithm.limit_threads", limits.append)
    settings = {"horizon": 5, "train_batch_size": 8, "seed": 0}
    with A2CConfig(env=env, num_workers=num_workers, **settings).build() as algorithm:
        monkeypatch.setattr(type(algorithm.plan), "__next__", lambda plan: {})  # trains nothing
        with pytest.raises(ConfigError, match="must end in"):
            algorithm.train()
    assert limits == expected


def test_resumed_algorithm_uses_the_free_cores(monkeypatch, tmp_path):
    limits = []
    monkeypatch.setattr("flowrl.trainer.algorithm.num_free_cores", lambda num_workers: 3)
    monkeypatch.setattr("flowrl.trainer.algorithm.limit_threads", limits.append)
    settings = {"horizon": 5, "train_batch_size": 8, "rollout_fragment_length": 4, "seed": 0}
    with A2CConfig(env=Images, **settings).build() as algorithm:
        algorithm.train()
        algorithm.train()
        algorithm.save(tmp_path / "checkpoint")
    with A2C.from_checkpoint(tmp_path / "checkpoint", env=Images) as algorithm:
        algorithm.train()
    assert limits == ["auto", 3, "auto", 3]


@pytest.mark.parametrize(("value", "expected"), [("2", 2), ("16", 8), ("0", 8), ("x", 8)])
def test_free_cores_are_limited_by_the_environment(value, expected, monkeypatch):
    monkeypatch.setattr("flowrl.threads.num_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert num_free_cores(0) == expected


@pytest.mark.slow
def test_threads_are_limited_on_workers(ray_session):
    config = A2CConfig(env="CartPole-v1", num_workers=1).resources(num_threads_per_process=2)

    def threads(worker):
        np.ones((8, 8)) @ np.ones((8, 8))
        return torch.get_num_threads(), sorted(blas_threads())

    with config.build() as algorithm:
        limit_threads(1)
        _, remote = algorithm.workers.foreach_worker(threads)
    limit_threads(1)
    assert remote == (2, [1])


@pytest.mark.parametrize(
    ("threads", "num_workers", "expected"),
    [("auto", 0, True), ("auto", 1, True), ("auto", 2, False), (1, 0, False), (2, 0, False)],
)
def test_free_core_allows_background_calls(threads, num_workers, expected, monkeypatch):
    monkeypatch.setattr("flowrl.threads.num_cores", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    config = SACConfig(env="Pendulum-v1", num_workers=num_workers, num_threads_per_process=threads)
    try:
        with config.build() as algorithm:
            monkeypatch.setattr(type(algorithm.plan), "__next__", lambda plan: {})
            with pytest.raises(ConfigError, match="must end in"):
                algorithm.train()
            call = BackgroundCall(threading.current_thread)
            wait_until_begun(call)
            assert (call.result() is not threading.current_thread()) == expected
    finally:
        torch.set_num_threads(before)


def wait_until_begun(call):
    """Wait until the second thread has begun a call, if it makes it at all."""
    while call._future is not None and not (call._future.running() or call._future.done()):
        time.sleep(0.001)


def test_background_call_runs_in_a_second_thread():
    allow_background_calls(True)
    call = BackgroundCall(threading.current_thread)
    wait_until_begun(call)
    assert call.result() is not threading.current_thread()


def test_caller_makes_the_call_if_the_second_thread_is_busy():
    allow_background_calls(True)
    release = threading.Event()
    busy = BackgroundCall(lambda: release.wait(60))
    wait_until_begun(busy)
    call = BackgroundCall(threading.current_thread)
    assert call.result() is threading.current_thread()
    release.set()
    assert busy.result()


@pytest.mark.parametrize("allowed", [True, False])
def test_caller_makes_calls_that_are_not_for_the_background(allowed):
    allow_background_calls(allowed)
    call = BackgroundCall(threading.current_thread, in_background=not allowed)
    assert call.result() is threading.current_thread()


@pytest.mark.parametrize("allowed", [True, False])
def test_error_of_a_background_call_is_raised(allowed):
    allow_background_calls(allowed)
    with pytest.raises(ZeroDivisionError):
        BackgroundCall(lambda: 1 / 0).result()


def test_block_ends_after_a_call_that_has_begun():
    allow_background_calls(True)
    begun, release, ended = threading.Event(), threading.Event(), []

    def call():
        begun.set()
        release.wait(60)
        ended.append(1)

    def fail():
        with BackgroundCall(call):
            assert begun.wait(60)
            threading.Timer(0.1, release.set).start()
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert ended


def test_block_ends_without_a_call_that_has_not_begun():
    allow_background_calls(True)
    release, calls = threading.Event(), []
    busy = BackgroundCall(lambda: release.wait(60))
    wait_until_begun(busy)
    with BackgroundCall(lambda: calls.append(1)):
        pass
    release.set()
    busy.result()
    assert not calls


EXIT = """
import os, threading
from flowrl.threads import BackgroundCall, allow_background_calls

allow_background_calls(True)
assert BackgroundCall(int).result() == 0

def after_main():
    threading.main_thread().join()
    print(BackgroundCall(os.getpid).result() == os.getpid())

threading.Thread(target=after_main).start()
if os.fork() == 0:
    calls = [BackgroundCall(threading.get_ident) for _ in range(2)]
    while not calls[0]._future.done():
        pass
    print(calls[0].result() != threading.get_ident(), flush=True)
    os._exit(0)
os.wait()
"""


def test_calls_are_made_at_the_exit_and_after_a_fork():
    command = [sys.executable, "-c", EXIT]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert process.stderr == ""
    assert process.stdout.split() == ["True", "True"]


OBS, BOX = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-2, 2, (2,), np.float32)
POLICIES = {
    "sac": (SACTorchPolicy, {}),
    "sac, fixed temperature": (SACTorchPolicy, {"target_entropy": None}),
    "sac, one critic": (SACTorchPolicy, {"twin_q": False}),
    "td3": (TD3TorchPolicy, {}),
}


def make_policy(case):
    policy_class, settings = POLICIES[case]
    return policy_class(OBS, BOX, {"seed": 0, "model": {"fcnet_hiddens": [16, 8]}, **settings})


def rows(seed, count=32):
    rng = np.random.default_rng(seed)

    def floats(*shape):
        return rng.uniform(-1, 1, shape).astype(np.float32)

    return SampleBatch(
        obs=floats(count, 3),
        new_obs=floats(count, 3),
        actions=floats(count, 2),
        rewards=floats(count),
        terminateds=rng.random(count) < 0.2,
        weights=rng.random(count).astype(np.float32),
    )


def updated(case, monkeypatch):
    """Return the weights and statistics after 20 updates, and the threads that computed losses."""
    policy, threads = make_policy(case), set()
    kernel = policy.learner.kernel

    def actor_loss(obs, noise, make=kernel._actor_loss):
        threads.add(threading.current_thread())
        return make(obs, noise)

    def values_and_backward(*arguments, make=actor_critic._values_and_backward):
        threads.add(threading.current_thread())
        return make(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_actor_loss", actor_loss)
        patch.setattr(actor_critic, "_values_and_backward", values_and_backward)
        stats = [policy.learn_on_minibatches(rows(seed)) for seed in range(20)]
    return policy.get_weights(), stats, threads


@pytest.mark.parametrize("case", POLICIES)
@pytest.mark.parametrize("waits", [True, False])
def test_updates_are_identical_in_one_thread_and_in_two(case, waits, monkeypatch):
    class BegunCall(BackgroundCall):
        """A call that has begun in the second thread before its caller continues."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            wait_until_begun(self)

    monkeypatch.setattr(actor_critic, "MIN_BACKGROUND_SIZE", 0)
    weights, stats, threads = updated(case, monkeypatch)
    assert threads == {threading.current_thread()}
    allow_background_calls(True)
    if waits:
        monkeypatch.setattr(actor_critic, "BackgroundCall", BegunCall)
    weights_of_two, stats_of_two, threads = updated(case, monkeypatch)
    assert not waits or len(threads) == 2
    assert stats == stats_of_two
    assert weights.keys() == weights_of_two.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, weights_of_two[name])


LARGE = """
import hashlib, os
import numpy as np
from gymnasium import spaces
from flowrl.algorithms.sac import SACTorchPolicy
from flowrl.data import SampleBatch
from flowrl.threads import allow_background_calls, limit_threads

box, rng = spaces.Box(-1, 1, (8,), np.float32), np.random.default_rng(0)
names = "obs", "new_obs", "actions"
columns = {name: rng.uniform(-1, 1, (256, 8)).astype("f4") for name in names}
rewards, ends = rng.standard_normal(256, dtype="f4"), np.zeros(256, bool)
batch = SampleBatch(**columns, rewards=rewards, terminateds=ends)
limit_threads(1)
for allowed in (False, True):
    allow_background_calls(allowed)
    model = {"fcnet_hiddens": [400, 300], "fcnet_activation": "tanh", "matrix_products": "torch"}
    policy = SACTorchPolicy(box, box, {"seed": 0, "model": model})
    before = len(os.listdir("/proc/self/task"))
    for _ in range(10):
        policy.learn_on_minibatches(batch)
    weights = b"".join(weight.tobytes() for weight in policy.get_weights().values())
    print(hashlib.sha256(weights).hexdigest(), len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_second_thread_has_the_limits_of_torch():
    """MKL's limits belong to threads: a new one would multiply matrices with several threads, which
    wait in busy loops and round differently."""
    env = {**os.environ, "OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}
    command = [sys.executable, "-c", LARGE]
    process = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=100, check=True
    )
    (one, new_threads), (two, more_threads) = map(str.split, process.stdout.splitlines())
    assert one == two
    assert (new_threads, more_threads) == ("0", "1")


def test_small_updates_stay_in_one_thread(monkeypatch):
    allow_background_calls(True)
    kernel, threads = make_policy("sac").learner.kernel, set()
    actor_loss = kernel._actor_loss

    def recorded(obs, noise):
        threads.add(threading.current_thread())
        return actor_loss(obs, noise)

    monkeypatch.setattr(kernel, "_actor_loss", recorded)
    kernel(kernel._policy.tensors(rows(0)))
    assert threads == {threading.current_thread()}


def test_training_keeps_the_number_of_threads_of_the_user_but_not_of_another_algorithm():
    before = torch.get_num_threads()
    settings = {"env": "CartPole-v1", "train_batch_size": 8, "seed": 0}
    two = A2CConfig(**settings).resources(num_threads_per_process=2)
    try:
        with two.build() as first, A2CConfig(**settings).build() as second:
            assert torch.get_num_threads() == 1  # of the second one
            first.train()
            assert torch.get_num_threads() == 2
            second.train()
            assert torch.get_num_threads() == 1
            torch.set_num_threads(3)
            second.train()
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
