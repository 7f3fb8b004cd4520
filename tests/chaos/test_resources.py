"""Too few resources: disk, object store, open files, network, a run directory, clocks that jump."""

import resource
import shutil
import subprocess
import sys
import textwrap
import time

import pytest

from flowrl.algorithms.ppo import PPOConfig
from flowrl.trainer.runs.saved_run import read_results

SMALL = {"env": "CartPole-v1", "train_batch_size": 128, "sgd_minibatch_size": 64, "seed": 1}

SMALL_OBJECT_STORE = """
    import gymnasium as gym
    import numpy as np
    import ray
    from flowrl.algorithms.impala import IMPALAConfig

    class Frames(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (128, 128, 3), np.uint8)
        action_space = gym.spaces.Discrete(2)
        steps = 0

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.observation_space.sample(), {}

        def step(self, action):
            self.steps += 1
            return self.observation_space.sample(), 1.0, self.steps % 50 == 0, False, {}

    ray.init(
        num_cpus=2, object_store_memory=80_000_000, include_dashboard=False,
        _system_config={"automatic_object_spilling_enabled": False},
    )
    config = IMPALAConfig(
        env=Frames, num_workers=2, rollout_fragment_length=100, train_batch_size=200, seed=1,
        model={"conv_filters": [[4, 8, 8]]}, monitor=False,
    )
    with config.build() as algorithm:
        while algorithm.env_steps < 4000:
            result = algorithm.train()
    assert result["num_remote_worker_restarts"] == 0
    ray.shutdown()
    print("trained", result["num_env_steps_trained"])
"""


@pytest.mark.slow
def test_a_small_object_store_limits_what_is_in_flight():
    # 4,000 frames are 197 MB, more than twice the object store
    program = textwrap.dedent(SMALL_OBJECT_STORE)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=110, check=False
    )
    assert "trained" in done.stdout, done.stderr[-3000:]


def test_too_many_open_files_is_an_error_and_the_run_can_continue(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with PPOConfig(**SMALL).build() as algorithm:
        algorithm.learn(256, run_dir=tmp_path / "run", progress=False)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no further file
        try:
            with pytest.raises(OSError, match="Too many open files"):
                algorithm.save(tmp_path / "checkpoint")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        algorithm.train()
        algorithm.save(tmp_path / "checkpoint")


def test_training_goes_on_without_its_run_directory(tmp_path, capsys):
    run_dir = tmp_path / "run"

    def delete(algorithm, result):
        if result["training_iteration"] == 2:
            shutil.rmtree(run_dir)

    with PPOConfig(**SMALL).build() as algorithm:
        callbacks = algorithm.workers.local_worker().callbacks
        callbacks.on_train_result = lambda *, algorithm, result: delete(algorithm, result)
        algorithm.learn(128 * 5, run_dir=run_dir, progress=False)
        assert algorithm.iteration == 5
    printed = capsys.readouterr()
    assert str(run_dir) in printed.err


@pytest.mark.parametrize("jump_s", [-1e6, 1e6])
def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch, jump_s):
    now, returns = time.time, []
    for jump in (0.0, jump_s):
        run_dir = tmp_path / f"run{jump}"
        with PPOConfig(**SMALL).build() as algorithm:
            algorithm.learn(256, run_dir=run_dir, progress=False)
            monkeypatch.setattr(time, "time", lambda jump=jump: now() + jump)
            algorithm.learn(640, run_dir=run_dir, progress=False)
        monkeypatch.setattr(time, "time", now)
        results = read_results(run_dir)
        assert all(0 <= result["time_this_iter_s"] < 60 for result in results)
        returns.append([result["episode_reward_mean"] for result in results])
    assert returns[0] == returns[1]


# with every kind of file that a run writes
WRITING_RUN = """
    mount -t tmpfs -o size={kilobytes}k none {folder} && cd {folder} || exit 77
    {flowrl} train dqn --no-tuned --seed 1 --learning-starts 200 \
        --min-sample-timesteps-per-iteration 250 --stop-timesteps 1000 --checkpoint-frequency 1 \
        --replay-buffer-dir rows --replay-buffer-capacity 2000 --output recorded \
        --output-rows-per-file 400 --trace-s 2 --report --display none --run-dir run
    echo "exit code $?"
    mount -o remount,size=50m {folder}
    [ -e run ] || echo "no run directory"
    [ -e run/checkpoints ] && ls run/checkpoints/*/manifest.json && {flowrl} resume run
    echo "resumed $?"
"""


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [4, 24, 48, 80, 120, 200, 300, 450, 700])
def test_full_disk_is_reported_without_a_traceback(tmp_path, kilobytes):
    program = textwrap.dedent(WRITING_RUN).format(
        kilobytes=kilobytes, folder=tmp_path, flowrl=f"{sys.executable} -m flowrl"
    )
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", program],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    if done.returncode in (1, 77) and not done.stdout:
        pytest.skip(f"this machine does not allow to mount a file system: {done.stderr}")
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert "exit code 1" in lines or {"exit code 2", "no run directory"} <= set(lines)
    if "manifest.json" in done.stdout:
        assert "resumed 0" in done.stdout


@pytest.mark.slow
def test_training_with_workers_needs_no_network(tmp_path):
    if not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("unshare or ip is not installed")
    namespace = ["unshare", "--user", "--map-root-user", "--net", "bash", "-c"]
    allowed = subprocess.run([*namespace, "ip link set lo up"], check=False, capture_output=True)
    if allowed.returncode:
        pytest.skip(f"this machine does not allow network namespaces: {allowed.stderr!r}")
    program = (
        f"ip link set lo up; exec {sys.executable} -m flowrl train ppo --env CartPole-v1 "
        "--num-workers 2 --stop-timesteps 8000 --no-tuned --run-dir run"
    )
    done = subprocess.run(
        [*namespace, program],
        capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "reached: 8,000 env steps" in done.stdout
