"""Steps and resets that take too long are failures of their environment."""

import signal
import threading
import time

import gymnasium as gym
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from flowrl.algorithms.ppo import PPOConfig
from flowrl.envs import make_multi_agent
from flowrl.envs.call_limits import CallLimits, _warn_of_threads, limit_seconds
from flowrl.errors import ConfigError
from flowrl.sampling import RolloutWorker, WorkerSet
from tests.sampling.fakes import Idle

HANG_S = 30
LIMIT_S = 1.0  # a garbage collection of the test process can take more than 0.2 s


class HangingCartPole(CartPoleEnv):
    """Hangs in a step or a reset of the first environment, after its first episode."""

    def __init__(self, hangs, method):
        super().__init__()
        self.hangs, self.method, self.num_resets = hangs, method, 0

    def _hang(self, method):
        if method == self.method and self.num_resets > 1 and self.hangs:
            self.hangs.pop()
            time.sleep(HANG_S)

    def step(self, action):
        self._hang("step")
        return super().step(action)

    def reset(self, **options):
        self.num_resets += 1
        self._hang("reset")
        return super().reset(**options)


def config(env, **settings):
    return PPOConfig(
        env=env, num_envs_per_worker=2, train_batch_size=200, sgd_minibatch_size=100, seed=1,
        num_sgd_iter=1, monitor=False, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("method", ["step", "reset"])
def test_environment_that_hangs_is_created_again(method):
    hangs = [1]
    limit = {f"env_{method}_timeout_s": LIMIT_S}
    started = time.monotonic()
    with config(lambda context: HangingCartPole(hangs, method), **limit).build() as algorithm:
        results = [algorithm.train() for _ in range(2)]
    assert results[-1]["num_env_restarts"] == 1
    assert not hangs
    assert time.monotonic() - started < HANG_S


def test_agents_have_the_limits_too():
    hangs = [1]
    create = make_multi_agent("CartPole-v1")

    def create_hanging(context):
        env = create(context)
        step = env.step

        def hang_once(actions):
            env_steps.append(1)
            if hangs and len(env_steps) > 50:
                hangs.pop()
                time.sleep(HANG_S)
            return step(actions)

        env.step = hang_once
        return env

    env_steps = []
    multi = config(
        create_hanging,
        env_config={"num_agents": 2},
        policies={"default_policy"},
        policy_mapping_fn=lambda *_, **__: "default_policy",
        env_step_timeout_s=LIMIT_S,
    )
    with multi.build() as algorithm:
        assert algorithm.train()["num_env_restarts"] == 1


class AlwaysHangs(CartPoleEnv):
    def step(self, action):
        time.sleep(HANG_S)


def test_environment_that_always_hangs_is_an_error_that_names_it():
    limits = {"env_step_timeout_s": 0.02, "max_num_env_restarts": 2}
    message = r"step\(\) took more than env_step_timeout_s=0\.02 s"
    with (
        config(lambda context: AlwaysHangs(), **limits).build() as algorithm,
        pytest.raises(TimeoutError, match=message) as raised,
    ):
        algorithm.train()
    assert any("sub-environment" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("mode", ["flowrl", "sync"])
def test_vector_environments_refuse_the_limits(mode):
    def create(context):
        vector = gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")
        return vector if mode == "flowrl" else gym.make("CartPole-v1")

    settings = {"vectorization_mode": mode, "env_step_timeout_s": 1.0}
    with pytest.raises(ConfigError, match="steps all its environments in one call"):
        WorkerSet(create, None, config("CartPole-v1", **settings)).local_worker()


def test_a_timer_and_handler_of_the_caller_are_restored():
    fired = []
    before = signal.signal(signal.SIGALRM, lambda *_: fired.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.15)
        with limit_seconds(10, "never"):
            pass
        until = time.monotonic() + 10
        while not fired and time.monotonic() < until:
            time.sleep(0.01)
        assert fired
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_limit_of_more_seconds_than_a_timer_takes():
    with limit_seconds(1e24, "too long"):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 1e8


def test_another_thread_gets_the_error_when_the_call_ends(caplog):
    errors = []
    _warn_of_threads.cache_clear()

    def run():
        try:
            with limit_seconds(0.01, "too long"):
                time.sleep(0.05)
        except TimeoutError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == ["too long"]
    assert "outside of the main thread, where a call that takes too long is noticed" in caplog.text


def test_without_limits_an_environment_is_unchanged():
    env = CartPoleEnv()
    assert CallLimits().apply(env) is env
    assert "step" not in vars(env)
    limited = CallLimits(step_s=1.0).apply(env)
    assert "step" in vars(limited)
    assert "reset" not in vars(limited)


def test_environment_that_hangs_in_close_is_given_up(caplog, monkeypatch):
    monkeypatch.setattr("flowrl.envs.call_limits.MIN_CLOSE_S", 0.1)

    class HangsInClose(CartPoleEnv):
        def close(self):
            time.sleep(HANG_S)

    started = time.monotonic()
    settings = {"env_step_timeout_s": 0.1, "env_reset_timeout_s": 0.2}
    worker = RolloutWorker(lambda context: HangsInClose(), Idle, settings)
    worker.stop()
    assert time.monotonic() - started < HANG_S
    assert "close() took more than 0.2 s" in caplog.text
