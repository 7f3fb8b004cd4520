"""Environments in processes behave like those in this process, and survive the death of one."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import gymnasium as gym
import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.data import SampleBatch
from flowrl.envs.env_factory import EnvFactory
from flowrl.envs.env_process import EnvProcess, EnvProcessError
from flowrl.envs.registry import env_creator_for
from flowrl.policies import ConfigError
from flowrl.sampling import DefaultCallbacks, RolloutWorker, SimpleListCollector

from .fakes import CountEnv, Idle

COLLECTORS = {"columns": None, "rows": SimpleListCollector}


@pytest.fixture(params=list(COLLECTORS))
def collector(request):
    """None samples in columns, SimpleListCollector row by row."""
    return COLLECTORS[request.param]


def worker(env, policy=Idle, **config):
    """Return a worker with two environments in processes; `env` is an id or a function."""
    creator = env if isinstance(env, str) else lambda context: env(context)
    settings = {
        "num_envs_per_worker": 2,
        "rollout_fragment_length": 6,
        "vectorization_mode": "async",
        **config,
    }
    return RolloutWorker(creator, policy, settings)


def sampled(mode, env, policy, collector, fragments=3, **config):
    """Return the rows of some fragments, their infos, the episodes and the failures."""
    w = worker(env, policy, vectorization_mode=mode, sample_collector=collector, seed=5, **config)
    try:
        batches = [w.sample() for _ in range(fragments)]
        metrics = [(e.env_id, e.episode_length, e.episode_return) for e in w.get_metrics()]
        restarts = w.reply_tags().get("env_restarts", 0)
    finally:
        w.stop()
    rows = SampleBatch.concat_samples(batches)
    infos = repr(rows["infos"].tolist()) if "infos" in rows else None
    columns = {name: rows[name] for name in rows if name != "infos"}
    return columns, infos, metrics, restarts


def check_equal_in_processes(env, policy, collector, **config):
    """Check that both modes return the same rows; return their episodes and failures."""
    here, elsewhere = (sampled(m, env, policy, collector, **config) for m in ("flowrl", "async"))
    for name, column in here[0].items():
        leaves = zip(_leaves(column), _leaves(elsewhere[0][name]), strict=True)
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in leaves), name
    assert here[0].keys() == elsewhere[0].keys()
    assert here[1:] == elsewhere[1:]
    return here[2], here[3]


def _leaves(column):
    if isinstance(column, dict):
        return [leaf for value in column.values() for leaf in _leaves(value)]
    if isinstance(column, tuple):
        return [leaf for value in column for leaf in _leaves(value)]
    return [np.asarray(column)]


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Blackjack-v1"])
def test_seeded_rows_equal_those_in_this_process(env, collector):
    episodes, _ = check_equal_in_processes(
        env, PPOTorchPolicy, collector, rollout_fragment_length=60, horizon=25, collect_infos=True
    )
    assert len(episodes) > 3


def test_observations_in_a_reused_array_equal_those_in_this_process(collector):
    check_equal_in_processes(lambda context: CountEnv(4), Idle, collector, collect_infos=True)


def test_failed_environments_are_replaced_in_their_process(collector):
    def create(context):
        return CountEnv(3, fail_at=(1, 1 + context.vector_index))

    _, restarts = check_equal_in_processes(create, Idle, collector)
    assert restarts > 2


def test_invalid_steps_are_dropped(collector):
    class InvalidReward(CountEnv):
        def step(self, action):
            obs, reward, *rest = super().step(action)
            reward = np.nan if (self.episode, self.steps) == (1, 2) else reward
            return obs, reward, *rest

    _, restarts = check_equal_in_processes(
        lambda context: InvalidReward(5), Idle, collector, fragments=4, on_invalid_step="drop"
    )
    assert restarts > 0


class Dies(CountEnv):
    """Kills its process at a step of its first episode, once if `marker` is a file."""

    def __init__(self, marker, at=2, **kwargs):
        super().__init__(reuse=False, **kwargs)
        self.marker, self.at = marker, at

    def step(self, action):
        if (self.episode, self.steps) == (0, self.at - 1) and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_dead_process_is_replaced_and_only_its_episode_is_lost(tmp_path, collector, caplog):
    def create(context):
        marker = tmp_path / "died" if context.vector_index == 1 else "/"
        return Dies(str(marker), length=4)

    w = worker(create, sample_collector=collector, rollout_fragment_length=8)
    batch = w.sample()
    tags = w.reply_tags()
    assert (tags["env_restarts"], tags["faulty_episodes"]) == (1, 1)
    assert batch["t"][batch["env_id"] == 0].tolist() == [0, 1, 2, 3] * 2
    # the death replaced step 2, and step 1 of its episode is lost
    assert batch["t"][batch["env_id"] == 1].tolist() == [0, 1, 2, 3, 0, 1]
    assert "sub-environment 1 of worker 0 ended unexpectedly (SIGKILL): starting" in caplog.text
    assert w.sample().count == 16
    w.stop()


def test_processes_that_die_in_a_row_are_an_error(collector):
    class AlwaysDies(CountEnv):
        def step(self, action):
            os._exit(3)

    w = worker(lambda context: AlwaysDies(), sample_collector=collector, max_num_env_restarts=2)
    with pytest.raises(EnvProcessError, match=r"sub-environment 0 .*\(exit code 3\)") as raised:
        w.sample()
    assert raised.value.__notes__[0] == "3 processes of this environment ended in a row"
    w.stop()


def test_process_that_dies_in_reset_is_replaced(tmp_path):
    class DiesInReset(CountEnv):
        def reset(self, **kwargs):
            if not os.path.exists(tmp_path / "died"):
                (tmp_path / "died").touch()
                os._exit(1)
            return super().reset(**kwargs)

    w = worker(lambda context: DiesInReset(), num_envs_per_worker=1)
    assert w.sample()["t"].tolist() == [0, 1, 2, 0, 1, 2]
    assert w.reply_tags()["env_restarts"] == 1
    w.stop()


def test_new_process_has_other_seeds(tmp_path):
    class Observes(Dies):
        """Observes random numbers of its own and of the global generators."""

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            own = self.np_random.integers(1_000_000)
            return np.array([own, np.random.randint(1_000_000)], np.float32), {}

        def step(self, action):
            _, *rest = super().step(action)
            return np.array([0, random.randrange(1_000_000)], np.float32), *rest

    def observed(marker):
        w = worker(lambda context: Observes(marker, length=9), seed=1)
        batch = w.sample()
        w.stop()
        return batch["obs"][:, 0], batch["obs"][batch["t"] < 2, 1]

    one, numbers = observed("/")
    assert observed("/")[1].tolist() == numbers.tolist()  # repeatable
    assert len(set(numbers)) == len(numbers) == 4  # and different in each process
    other, _ = observed(str(tmp_path / "died"))
    assert 0 < one[0] != other[0] > 0


def test_restored_environments_continue_in_both_modes():
    def factory(mode):
        creator = env_creator_for("CartPole-v1")
        return EnvFactory(creator, {}, 2, seed=3, vectorization_mode=mode).make_vector_env()

    def played(env, steps):
        actions = np.random.default_rng(0).integers(2, size=(200, 2))
        seen = [
            [step.obs["agent0"].tolist() for step in env.step([{"agent0": a} for a in actions[t]])]
            for t in steps
        ]
        return seen, [{"agent0": obs} for obs in env._observations]

    saved = {}
    for mode in ("flowrl", "async"):
        env = factory(mode)
        env.reset()
        _, observations = played(env, range(50))
        saved[mode] = env.state_dict(), observations
        expected, _ = played(env, range(50, 100))
        env.close()
    for one in saved:
        for other in saved:
            env = factory(other)
            state, observations = saved[one]
            assert env.load_state_dict(state, observations) == {}
            assert played(env, range(50, 100))[0] == expected
            short = {k: v if k == "num_restarts" else v[:1] for k, v in state.items()}
            with pytest.raises(ValueError, match="has 1 environments, expected 2"):
                env.load_state_dict(short, observations)
            env.close()


@pytest.mark.parametrize(
    ("create", "error", "message"),
    [
        (lambda context: None, ConfigError, "the creator returned None"),
        (lambda context: object(), ConfigError, "requires gymnasium environments, .* a object"),
        (
            lambda context: CountEnv() if context.vector_index == 0 else 1 / 0,
            ZeroDivisionError,
            "division by zero",
        ),
        (
            lambda context: gym.make(["CartPole-v1", "Acrobot-v1"][context.vector_index]),
            ConfigError,
            "sub-environment 1 has the spaces",
        ),
        (lambda context: os._exit(4), EnvProcessError, r"sub-environment 0 .* \(exit code 4\)"),
    ],
)
def test_environments_that_cannot_be_created_are_an_error(create, error, message):
    before = children()
    with pytest.raises(error, match=message) as raised:
        worker(create)
    if error is ZeroDivisionError:
        assert "sub-environment 1 of worker 0" in raised.value.__notes__[0]
        assert "in the process of sub-environment 1" in str(raised.value.__cause__)
    assert children() == before


def children():
    """Return the ids of the processes that this thread started and that still run."""
    with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
        return set(file.read().split())


def test_errors_that_cannot_be_pickled_keep_their_text():
    class SpecialError(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    def create(context):
        return CountEnv(fail_at=(0, 1), fail_with=lambda text: SpecialError(text, "more"))

    w = worker(create, max_num_env_restarts=0)
    with pytest.raises(
        RuntimeError, match="SpecialError: the environment broke and more"
    ) as raised:
        w.sample()
    assert any("step(), sub-environment 0" in note for note in raised.value.__notes__)
    assert "fakes.py" in str(raised.value.__cause__)
    w.stop()


def test_infos_that_cannot_be_pickled_are_an_error():
    class Info(CountEnv):
        def step(self, action):
            *rest, _ = super().step(action)
            return *rest, {"lock": threading.Lock()}

    w = worker(lambda context: Info())
    with pytest.raises(TypeError, match="cannot pickle '_thread") as raised:
        w.sample()
    assert raised.value.__notes__[0] == "raised while the result of step() was pickled"
    w.stop()


def test_time_limits_apply_in_every_thread(tmp_path):
    class Hangs(CountEnv):
        def step(self, action):
            if not os.path.exists(tmp_path / "hung"):
                (tmp_path / "hung").touch()
                time.sleep(60)
            return super().step(action)

    def sample():
        w = worker(lambda context: Hangs(), num_envs_per_worker=1, env_step_timeout_s=0.2)
        results.append(w.sample().count)
        results.append(w.reply_tags()["env_restarts"])
        w.stop()

    results = []
    thread = threading.Thread(target=sample)
    thread.start()
    thread.join(30)
    assert results == [5, 1]


class Counter:
    def __init__(self):
        self.n = 0

    def add(self, number, seconds=0.0):
        time.sleep(seconds)
        self.n += number
        return self.n

    def close(self):
        pass


def test_results_after_an_interrupted_call_belong_to_their_calls():
    process = EnvProcess("a counter", Counter, None)
    assert process.receive() is None
    process.send("add", 1, 0.2)  # the caller was interrupted and does not receive it
    process.send("add", 10)
    assert process.receive() == 11
    process.close()
    process.close()
    with pytest.raises(EnvProcessError, match=r"a counter ended unexpectedly \(exit code 0\)"):
        process.send("add", 1)


def test_process_that_does_not_close_is_killed(monkeypatch):
    class Stubborn(Counter):
        def close(self):
            time.sleep(60)

    monkeypatch.setattr("flowrl.envs.env_process.CLOSE_S", 0.1)
    process = EnvProcess("a counter", Stubborn, None)
    process.receive()
    started = time.monotonic()
    process.close()
    assert time.monotonic() - started < 30


def test_interrupts_are_left_to_the_calling_process():
    process = EnvProcess("a counter", Counter, None)
    process.receive()
    os.kill(process._process.pid, signal.SIGINT)
    process.send("add", 3)
    assert process.receive() == 3
    process.close()


HANGING_STEP = """
import os, signal, time
from tests.sampling.test_process_vector_env import CountEnv, worker

class Hangs(CountEnv):
    def step(self, action):
        print(os.getpid(), flush=True)
        time.sleep(600)

if not os.fork():
    time.sleep(5)
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(0)
worker(lambda context: Hangs()).sample()
"""


def test_processes_end_with_the_calling_process():
    script = HANGING_STEP.replace("time.sleep(5)", "time.sleep(4)")
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    pids = process.stdout.split()
    assert len(pids) == 2, process.stderr
    until = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_callbacks_see_the_environment_in_its_process(tmp_path):
    class Notes(DefaultCallbacks):
        def on_sub_environment_created(self, *, sub_environment, env_context, **kwargs):
            file = tmp_path / f"{env_context.vector_index}-{os.getpid()}"
            file.write_text(type(sub_environment.unwrapped).__name__)

    w = worker("CartPole-v1", PPOTorchPolicy, callbacks_class=Notes)
    w.stop()
    files = sorted(tmp_path.iterdir())
    assert [file.name[0] for file in files] == ["0", "1"]
    assert {file.read_text() for file in files} == {"CartPoleEnv"}
    assert str(os.getpid()) not in {file.name.split("-")[1] for file in files}


def test_training_learns_from_environments_in_processes():
    config = A2CConfig(
        env="CartPole-v1", vectorization_mode="async", num_envs_per_worker=2, seed=1,
        train_batch_size=40, evaluation_interval=1, evaluation_duration=1,
    )  # fmt: skip
    results = []
    for mode in ("async", "flowrl"):
        with config.updated(vectorization_mode=mode).build() as algorithm:
            for _ in range(3):
                result = algorithm.train()
            results.append((result["episode_reward_mean"], result["info"]))
            results.append(result["evaluation"]["episode_reward_mean"])
    assert results[:2] == results[2:]
