"""Plans on a simulated Ray cluster of several nodes, and their cleanup."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REPOSITORY = str(Path(__file__).parents[1])

CLUSTER = """
import ray
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
node = cluster.add_node(num_cpus=2)
ray.init(address=cluster.address, log_to_driver=False)

from flowrl.trainer.plan_settings import plan_config

def nodes(algorithm):
    ids = algorithm.workers.foreach_worker(lambda w: ray.get_runtime_context().get_node_id())
    return ids[0], ids[1:]
"""


def run(body, tmp_path, before=CLUSTER, timeout=240):
    """Run a driver script and return its output.

    A separate Ray folder hides the cluster from other drivers. Its path is short because the length
    of socket paths is limited.
    """
    file = tmp_path / "driver.py"
    file.write_text(before + textwrap.dedent(body))
    with tempfile.TemporaryDirectory(
        prefix="ray", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        variables = {"PYTHONPATH": REPOSITORY, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": folder}
        process = subprocess.run(
            [sys.executable, str(file)], capture_output=True, text=True, timeout=timeout,
            check=False, env={**os.environ, **variables},
        )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


@pytest.mark.parametrize("plan", ["impala", "a3c", "ppo", "apex"])
def test_plan_trains_with_workers_on_several_nodes(tmp_path, plan):
    output = run(
        f"""
        config = plan_config({plan!r}).updated(
            num_workers=3, num_envs_per_worker=2, rollout_fragment_length=20, seed=0,
            train_batch_size=120, sgd_minibatch_size=0, min_sample_timesteps_per_iteration=240,
            **({{"learning_starts": 50}} if {plan!r} == "apex" else {{}}),
        )
        with config.build() as algorithm:
            results = [algorithm.train() for _ in range(3)]
            while not all(algorithm.workers.foreach_worker(lambda w: w.env_steps)[1:]):
                results.append(algorithm.train())  # some workers may still be starting
            results.append(algorithm.train())
            local, remote = nodes(algorithm)
        print(len(remote), len(set(remote)), results[-1]["num_healthy_workers"])
        print(results[-1]["num_env_steps_trained"] >= 3 * 240 - 120)
        print(results[-1]["counters"]["num_bytes_between_nodes"] > 10_000)
        """,
        tmp_path,
    )
    assert output == "3 2 3\nTrue\nTrue\n"


@pytest.mark.slow
def test_lost_node_loses_no_counted_steps(tmp_path):
    """Workers of the lost node are recreated on other nodes with trained weights."""
    output = run(
        """
        config = plan_config("impala").updated(
            num_workers=3, num_envs_per_worker=2, rollout_fragment_length=20, seed=0,
            train_batch_size=120, min_sample_timesteps_per_iteration=480, num_cpus_per_worker=0.5,
        )
        with config.build() as algorithm:
            algorithm.train()
            local, remote = nodes(algorithm)
            lost = sum(worker_node != local for worker_node in remote)
            cluster.remove_node(node)
            cluster.add_node(num_cpus=2)
            for _ in range(12):
                result = algorithm.train()
                if result["num_remote_worker_restarts"] >= lost:
                    break
            result = algorithm.train()
            versions = algorithm.workers.foreach_worker(lambda w: w.policy.version)
            by_worker = algorithm.workers.env_steps_by_worker
            counted = algorithm.workers.env_steps_of_removed_workers + sum(by_worker.values())
        print(counted == result["num_env_steps_sampled"], counted - sum(by_worker.values()) > 0)
        print(lost > 0, result["num_remote_worker_restarts"] >= lost)
        print(result["num_healthy_workers"], min(versions[1:]) > 0)
        """,
        tmp_path,
    )
    assert output == "True True\nTrue True\n3 True\n"


def test_workers_are_added_on_a_new_node(tmp_path):
    output = run(
        """
        config = plan_config("impala").updated(
            num_workers=2, num_envs_per_worker=2, rollout_fragment_length=20, seed=0,
            train_batch_size=120, min_sample_timesteps_per_iteration=240,
            custom_resources_per_worker={"sampling": 1},
        )
        cluster.add_node(num_cpus=2, resources={"sampling": 2})
        with config.build() as algorithm:
            algorithm.train()
            two = nodes(algorithm)[1]
            new_node = cluster.add_node(num_cpus=2, resources={"sampling": 2})
            cluster.wait_for_nodes()
            algorithm.workers.add(2)
            algorithm.train()
            local, remote = nodes(algorithm)
            print(remote[:2] == two, set(remote[2:]) == {new_node.node_id}, local in remote)
            steps = algorithm.workers.foreach_worker(lambda w: w.env_steps)
            for _ in range(10):
                result = algorithm.train()
            print(min(algorithm.workers.foreach_worker(lambda w: w.env_steps)[1:]) > 0)
            transferred = result["counters"]["num_bytes_between_nodes"]
            rows = result["num_env_steps_sampled"]
            print(rows * 20 < transferred < rows * 2000)
            algorithm.workers.remove(2)
            cluster.remove_node(new_node)
            result = algorithm.train()
            print(result["num_healthy_workers"], result["num_remote_worker_restarts"])
        """,
        tmp_path,
    )
    assert output == "True True False\nTrue\nTrue\n2 0\n"


def test_transfers_within_a_node_are_not_counted(tmp_path):
    output = run(
        """
        config = plan_config("ppo").updated(
            num_workers=1, rollout_fragment_length=20, seed=0, train_batch_size=120,
            sgd_minibatch_size=0, custom_resources_per_worker={"node:__internal_head__": 0.1},
        )
        with config.build() as algorithm:
            result = algorithm.train()
            local, remote = nodes(algorithm)
        print(local == remote[0], result["counters"].get("num_bytes_between_nodes", 0))
        """,
        tmp_path,
    )
    assert output == "True 0\n"


def test_stop_leaves_no_actors_and_threads(tmp_path):
    output = run(
        """
        import threading, time
        from ray._private.state import actors

        def alive():
            return sum(actor["State"] == "ALIVE" for actor in actors().values())

        def wait_for(condition):
            deadline = time.monotonic() + 20
            while not condition() and time.monotonic() < deadline:
                time.sleep(0.2)
            return condition()

        for plan in ("impala", "apex", "ddppo"):
            config = plan_config(plan).updated(
                num_workers=2, num_envs_per_worker=2, rollout_fragment_length=20, seed=0,
                min_sample_timesteps_per_iteration=100, num_cpus_per_worker=0.5,
                sgd_minibatch_size=0,
                **({"learning_starts": 50} if plan == "apex" else {}),
            )
            with config.build() as algorithm:
                for _ in range(2):
                    algorithm.train()
                print(plan, wait_for(lambda: alive() >= 2))
            print(wait_for(lambda: alive() == 0))
            print(sum(thread.name == "flowrl-learner" for thread in threading.enumerate()))
        """,
        tmp_path,
    )
    assert output.split() == [
        word for plan in ("impala", "apex", "ddppo") for word in (plan, "True", "True", "0")
    ]


@pytest.mark.slow
def test_killed_driver_leaves_no_processes(tmp_path):
    code = textwrap.dedent(
        """
        from flowrl.trainer.plan_settings import plan_config
        config = plan_config("apex").updated(num_workers=2, seed=0)
        with config.build() as algorithm:
            while True:
                algorithm.train()
                print("trained", flush=True)
        """
    )
    mark = f"flowrl-{os.getpid()}-{time.time_ns()}"
    driver = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": REPOSITORY, "OMP_NUM_THREADS": "1", "FLOWRL_MARK": mark},
    )  # fmt: skip
    assert driver.stdout is not None
    assert driver.stdout.readline() == "trained\n"

    def processes():
        found = {}
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark.encode() in environ.read_bytes():
                    name = (environ.parent / "cmdline").read_bytes().split(b"\0")[0].decode()
                    found[int(environ.parent.name)] = name
            except OSError:
                continue
        return found

    assert len(processes()) > 3
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    # two Ray agents wait for the terminated server, for a minute from their next request to it
    for seconds, slow in ((30, {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}), (90, set())):
        deadline = time.monotonic() + seconds
        while set(processes().values()) - slow and time.monotonic() < deadline:
            time.sleep(1)
        assert set(processes().values()) <= slow


NUMPY = """
import sys, numpy as np
from flowrl.algorithms.a2c import A2C, A2CConfig
from flowrl.trainer.algorithm import Algorithm
from flowrl.trainer.config import AlgorithmConfig
from flowrl.policies import Policy

class RandomActions(Policy):
    def compute_actions(self, obs_batch, explore=True):
        return self.rng.integers(2, size=len(obs_batch)), [], {}
    def learn_on_batch(self, batch):
        self.version += 1
        return {"total_loss": 1.0}
    def get_weights(self):
        return {"w": np.ones(3)}
    def set_weights(self, weights):
        pass

class NumpyAlgorithm(Algorithm):
    policy_class = RandomActions
    config_class = AlgorithmConfig
"""


@pytest.mark.parametrize(("count", "numpy"), [(64, True), (16, False)])
def test_plan_trains_with_many_workers(tmp_path, count, numpy):
    body = f"""
        import time
        algorithm_class = NumpyAlgorithm if {numpy} else A2C
        config = algorithm_class.config_class(
            env="CartPole-v1", num_workers={count}, rollout_fragment_length=10, seed=0,
            train_batch_size={10 * count}, num_cpus_per_worker=0.03,
        )
        with algorithm_class(config) as algorithm:
            results = [algorithm.train() for _ in range(3)]
            torch = algorithm.workers.foreach_worker(lambda w: "torch" in sys.modules)[1:]
        print(results[-1]["num_env_steps_trained"], results[-1]["num_healthy_workers"])
        print(sum(torch))
        """
    stdout = run(body, tmp_path, NUMPY, timeout=280)
    output = [line for line in stdout.splitlines() if not line.startswith("(")]  # without Ray's
    trained, torch = output[-2:]
    assert trained == f"{30 * count} {count}"
    assert int(torch) == (0 if numpy else count)


def test_gcs_that_restarts_without_its_state_is_an_error_and_the_state_can_be_saved(tmp_path):
    head = """
        import socket, time
        import ray
        from ray.cluster_utils import Cluster

        with socket.socket() as free:
            free.bind(("", 0))
            args = {"num_cpus": 3, "gcs_server_port": free.getsockname()[1]}
        cluster = Cluster(initialize_head=True, head_node_args=args)
        ray.init(address=cluster.address, log_to_driver=False)

        from flowrl.iter.ray_health import RayLostError
        from flowrl.trainer.plan_settings import plan_config
    """
    path = tmp_path / "checkpoint"
    output = run(
        f"""
        config = plan_config("a3c").updated(env="CartPole-v1", num_workers=2, seed=0)
        with config.build() as algorithm:
            started = time.monotonic()
            while time.monotonic() - started < 3:
                algorithm.train()
            cluster.head_node.kill_gcs_server()
            cluster.head_node.start_gcs_server()
            restarted = time.monotonic()
            try:
                while True:
                    algorithm.train()
            except RayLostError as error:
                print(error)
            print(time.monotonic() - restarted < 30)
            algorithm.save({str(path)!r})
        """,
        tmp_path,
        before=textwrap.dedent(head),
    )
    assert output.startswith("Ray's GCS, the process that manages the cluster, has restarted")
    assert output.endswith("RUN_DIR\nTrue\n")
    assert (path / "manifest.json").exists()
