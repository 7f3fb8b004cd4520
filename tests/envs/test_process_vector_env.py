"""Environments in processes behave like those in this process, and survive the death of one."""

import collections
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types

import gymnasium as gym
import numpy as np
import pytest
import torch

from flowrl.algorithms.a2c import A2CConfig
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.cli.main import main
from flowrl.data import SampleBatch
from flowrl.envs.env_factory import EnvFactory
from flowrl.envs.env_process import EnvProcess, EnvProcessError, close_all
from flowrl.envs.registry import env_creator_for
from flowrl.policies import ConfigError
from flowrl.sampling import DefaultCallbacks, RolloutWorker, SimpleListCollector
from tests.processes import is_running
from tests.sampling.fakes import CountEnv, Idle

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
    assert "sub-environment 1 of worker 0 ended unexpectedly (SIGKILL, perhaps" in caplog.text
    assert w.sample().count == 16
    w.stop()


def test_process_that_dies_in_foreach_env_is_replaced_by_the_next_step(tmp_path):
    def dies_once(env):
        if not os.path.exists(tmp_path / "died"):
            (tmp_path / "died").touch()
            os._exit(1)

    w = worker(lambda context: CountEnv(length=9), num_envs_per_worker=1)
    assert w.sample()["t"].tolist() == [0, 1, 2, 3, 4, 5]
    assert w.foreach_env(dies_once) == [None]
    batch = w.sample()
    assert batch["t"].tolist() == [0, 1, 2, 3, 4]  # a new episode, after a lost step
    assert batch["obs"][0, 1] == 0  # after a reset
    assert w.reply_tags()["env_restarts"] == 1
    with pytest.raises(EnvProcessError, match="exit code 1"):
        w.foreach_env(lambda env: os._exit(1))
    assert w.sample()["t"].tolist() == [0, 1, 2, 3, 4]
    w.stop()


def test_state_after_a_process_was_replaced_starts_a_new_episode():
    w = worker(lambda context: CountEnv(length=20))
    w.sample()
    os.kill(w.foreach_env(lambda env: os.getpid())[1], signal.SIGKILL)
    assert len(w.foreach_env(lambda env: os.getpid())) == 2
    loaded = worker(lambda context: CountEnv(length=20))
    loaded.load_sampling_state_dict(w.sampling_state_dict())
    assert sorted(loaded.sample()["t"].tolist()) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    w.stop(), loaded.stop()


def test_processes_work_without_pidfd_open(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    w = worker(lambda context: CountEnv())
    assert w.sample().count == 12
    w.stop()


def test_processes_that_die_in_a_row_are_an_error(collector):
    class AlwaysDies(CountEnv):
        def step(self, action):
            os._exit(3)

    w = worker(lambda context: AlwaysDies(), sample_collector=collector, max_num_env_restarts=2)
    with pytest.raises(EnvProcessError, match=r"sub-environment 0 .*\(exit code 3\)") as raised:
        w.sample()
    assert raised.value.__notes__[0] == "max_num_env_restarts=2: it ended 3 times in a row"
    with pytest.raises(EnvProcessError):  # the count starts again
        w.sample()
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
        def create(context):
            return Observes("/" if context.vector_index else marker, length=9)

        w = worker(create, seed=1)
        batch = w.sample()
        w.stop()
        return batch["obs"][:, 0], batch["obs"][batch["t"] < 2, 1]

    one, numbers = observed("/")
    assert observed("/")[1].tolist() == numbers.tolist()  # repeatable
    assert len(set(numbers)) == len(numbers) == 4  # and different in each process
    other, _ = observed(str(tmp_path / "died"))
    assert 0 < one[0] != other[0] > 0  # of environment 0, whose process died


def test_restored_environments_continue_in_both_modes():
    def factory(mode):
        creator = env_creator_for("CartPole-v1")
        return EnvFactory(creator, {}, 2, seed=3, vectorization_mode=mode).make_agent_envs()

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
        (lambda context: None, ConfigError, "requires gymnasium environments, .* a NoneType"),
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
        assert "in the process of sub-environment 1" in raised.value.__notes__[1]
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
    assert any("fakes.py" in note for note in raised.value.__notes__)
    w.stop()


def test_infos_that_cannot_be_pickled_are_an_error():
    class Info(CountEnv):
        def step(self, action):
            *rest, _ = super().step(action)
            return *rest, {"lock": threading.Lock()}

    w = worker(lambda context: Info())
    with pytest.raises(TypeError, match="cannot pickle '_thread") as raised:
        w.sample()
    notes = raised.value.__notes__
    assert notes[0].startswith("raised while the result of step() was pickled: vectorization_mode")
    assert notes[1].startswith("traceback in the process of sub-environment 0 of worker 0")
    w.stop()


def test_time_limits_apply_in_every_thread(tmp_path):
    class Hangs(CountEnv):
        def step(self, action):
            if not os.path.exists(tmp_path / "hung"):
                (tmp_path / "hung").touch()
                time.sleep(60)
            return super().step(action)

    def sample():
        w = worker(lambda context: Hangs(), num_envs_per_worker=1, env_step_timeout_s=1.0)
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
    with pytest.raises(EnvProcessError, match="a counter was closed"):
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


HANGING_CALL = """
import os, time
from flowrl.envs.env_process import EnvProcess

class Hangs:
    def hang(self):
        os.write(1, f"{os.getpid()}\\n".encode())  # one call: prints of two processes could mix
        time.sleep(600)

processes = [EnvProcess("an object", Hangs, None) for _ in range(2)]
for process in processes:
    process.receive()
    process.send("hang")
"""


def test_processes_end_with_the_calling_process():
    script = f"{HANGING_CALL}\nprocess.receive()"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pids = [process.stdout.readline().strip() for _ in range(2)]
    assert all(os.path.exists(f"/proc/{pid}") for pid in pids), pids
    process.kill()
    process.wait()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def test_program_that_does_not_close_ends():
    done = subprocess.run(
        [sys.executable, "-c", HANGING_CALL],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def wait_until(condition, seconds=30):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    assert condition()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer
def test_signals_during_sampling_do_not_mix_up_steps():
    """Rows after an exception in a signal handler are whole episodes of the right environment."""

    class StopSamplingError(Exception):
        pass

    def interrupt(*_):
        raise StopSamplingError

    w = worker(lambda context: CountEnv(length=50, reuse=False), rollout_fragment_length=50)
    handler = signal.signal(signal.SIGALRM, interrupt)
    num_interrupted = 0
    try:
        for delay in np.random.default_rng(0).uniform(1e-4, 8e-3, size=60):
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                w.sample()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except StopSamplingError:
                num_interrupted += 1
            batch = w.sample()
            assert (batch["rewards"] == batch["t"] + 1).all()
            assert (batch["obs"][:, 1] == batch["t"]).all()
    finally:
        signal.signal(signal.SIGALRM, handler)
        w.stop()
    assert num_interrupted > 10


def test_signals_that_end_programs_are_left_to_the_calling_process():
    process = EnvProcess("a counter", Counter, None)
    process.receive()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process._process.pid, number)
    process.send("add", 3)
    assert process.receive() == 3
    process.close()


def test_death_is_noticed_while_another_process_has_the_connection(tmp_path):
    class StartsHelper(Dies):
        def reset(self, **kwargs):
            if not os.path.exists(self.marker) and not os.fork():
                time.sleep(60)
                os._exit(0)
            return super().reset(**kwargs)

    w = worker(lambda context: StartsHelper(str(tmp_path / "died")), num_envs_per_worker=1)
    started = time.monotonic()
    assert w.sample().count > 0
    assert time.monotonic() - started < 30
    w.stop()


def test_replacement_with_other_spaces_is_an_error(tmp_path):
    class Other(Dies):
        observation_space = gym.spaces.Box(-1.0, 1e6, (4000,), np.float32)

    def create(context):
        died = (tmp_path / "died").exists()
        return Other("/") if died else Dies(str(tmp_path / "died"), length=9)

    w = worker(create, num_envs_per_worker=1)
    with pytest.raises(ConfigError, match="sub-environment 0 has the spaces"):
        w.sample()
    w.stop()


@pytest.mark.parametrize("fails", ["raise", "die"])
@pytest.mark.parametrize("call", ["create", "reset"])
def test_replacement_that_fails_at_first_is_replaced(tmp_path, fails, call):
    def fail_once(name):
        if (tmp_path / "died").exists() and not (tmp_path / name).exists():
            (tmp_path / name).touch()
            if fails == "die":
                os._exit(1)
            raise ValueError("port in use")

    class Fails(Dies):
        def reset(self, **kwargs):
            if call == "reset":
                fail_once("reset")
            return super().reset(**kwargs)

    def create(context):
        if call == "create":
            fail_once("create")
        return Fails(str(tmp_path / "died"))

    w = worker(create, num_envs_per_worker=1)
    assert w.sample().count > 0
    assert (tmp_path / call).exists()
    w.stop()


def test_processes_end_if_the_worker_cannot_be_built_or_is_dropped():
    class Broken(Idle):
        def __init__(self, *args, **kwargs):
            raise ValueError("no policy")

    before = children()
    with pytest.raises(ValueError, match="no policy"):
        worker(lambda context: CountEnv(), Broken)
    w = worker(lambda context: CountEnv())
    assert len(children() - before) >= 2
    del w
    gc.collect()
    wait_until(lambda: not [pid for pid in children() - before if is_running(pid)])


def test_descriptors_are_closed():
    gc.collect()
    before = open_files()
    for _ in range(3):
        w = worker(lambda context: CountEnv())
        assert open_files() - before
        w.sample()
        w.stop()
    # not equal: other tests in this process may have left objects that close theirs meanwhile
    assert not open_files() - before


def open_files():
    """Return what the descriptors of this process refer to, with their numbers."""
    targets = collections.Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            targets[os.readlink(f"/proc/self/fd/{number}")] += 1
    return targets


def test_process_is_ended_after_a_call_that_was_interrupted_within_a_message(monkeypatch):
    process = EnvProcess("a counter", Counter, None)
    process.receive()

    def interrupted(data):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(process._connection, "send_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.send("add", 1)
    for _ in range(2):
        with pytest.raises(EnvProcessError, match=r"a counter (was ended: a call|ended unexp)"):
            process.send("add", 1)
    process.close()


def test_environments_close_at_the_same_time(monkeypatch):
    monkeypatch.setattr("flowrl.envs.env_process.CLOSE_S", 1.0)
    processes = [EnvProcess("a counter", StubbornCounter, None) for _ in range(8)]
    for process in processes:
        process.receive()
    started = time.monotonic()
    close_all(processes)
    assert time.monotonic() - started < 5


class StubbornCounter(Counter):
    def close(self):
        time.sleep(60)


def test_torch_has_other_random_numbers_in_each_process():
    class Draws(CountEnv):
        def step(self, action):
            _, *rest = super().step(action)
            threads = torch.get_num_threads()
            return np.array([threads, torch.randint(1_000_000, ()).item()], np.float32), *rest

    for seed in (None, 1):
        w = worker(lambda context: Draws(9), seed=seed, rollout_fragment_length=1)
        threads, numbers = w.sample()["new_obs"].T
        assert numbers[0] != numbers[1]
        assert threads.tolist() == [1, 1]
        w.stop()


class ChangesText(Exception):  # noqa: N818
    def __init__(self, code):
        super().__init__(f"simulator error code {code}")


def test_errors_whose_text_pickle_changes_keep_it():
    def create(context):
        return CountEnv(fail_at=(0, 1), fail_with=lambda text: ChangesText(7))

    w = worker(create, max_num_env_restarts=0)
    with pytest.raises(RuntimeError, match=r"(?m)^ChangesText: simulator error code 7$"):
        w.sample()
    w.stop()


def test_error_class_that_only_the_process_has_keeps_its_text():
    class Raises(Counter):
        def add(self, number):
            namespace = {"__name__": "simulator_x"}
            sys.modules["simulator_x"] = types.ModuleType("simulator_x")
            exec("class Crash(Exception): pass", namespace)
            sys.modules["simulator_x"].Crash = namespace["Crash"]
            raise namespace["Crash"]("out of fuel")

    process = EnvProcess("a counter", Raises, None)
    process.receive()
    process.send("add", 1)
    with pytest.raises(RuntimeError, match=r"(?m)^Crash: out of fuel$"):
        process.receive()
    process.close()


def test_checkpoint_after_a_death_starts_this_episode_anew(tmp_path):
    settings = {"num_envs_per_worker": 2, "train_batch_size": 20, "seed": 1}
    config = A2CConfig(env="CartPole-v1", vectorization_mode="async", **settings)

    def kill_first(algorithm):
        env = algorithm.workers.local_worker()._envs.vector_env
        env._processes[0]._process.kill()
        env._processes[0]._process.join()

    with config.build() as algorithm:
        algorithm.train()
        kill_first(algorithm)
        algorithm.save(tmp_path / "c")
        assert algorithm.train()["num_env_restarts"] == 1
    with config.build() as algorithm:
        algorithm.workers.local_worker()
        kill_first(algorithm)
        algorithm.restore(tmp_path / "c")
        assert algorithm.workers.num_episodes_restarted == 1
        assert algorithm.train()["timesteps_total"] == 40


def test_deaths_with_nested_observations_in_one_step(tmp_path):
    class Nested(Dies):
        observation_space = gym.spaces.Dict({"a": CountEnv.observation_space})

        def observe(self):
            return {"a": super().observe()}

    class NestedIdle(Idle):
        def compute_actions(self, obs_batch, explore=True):
            return np.zeros(len(obs_batch["a"]), np.int64), [], {}

    w = worker(lambda context: Nested(str(tmp_path / str(context.vector_index))), NestedIdle)
    batch = w.sample()
    assert w.reply_tags()["env_restarts"] == 2
    assert (batch["obs"]["a"][:, 1] == batch["t"]).all()
    w.stop()


def test_command_prints_the_traceback_of_the_environment(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_env.py").write_text(
        "from tests.sampling.fakes import CountEnv\n"
        "class Broken(CountEnv):\n"
        "    def step(self, action):\n"
        "        return self.missing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    flags = "--env broken_env:Broken --vectorization-mode async --no-tuned"
    assert main(["train", "a2c", *flags.split()]) == 1
    assert 'broken_env.py", line 4, in step' in capsys.readouterr().err


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


def test_training_results_equal_those_in_this_process():
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
