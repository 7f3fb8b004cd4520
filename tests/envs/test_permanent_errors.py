"""Errors that an environment would repeat are raised at once, in process and with actors."""

import logging
import re

import gymnasium as gym
import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.envs import MultiAgentEnv
from flowrl.errors import ConfigError
from flowrl.iter import ShardFailedError
from flowrl.sampling import RolloutWorker, WorkerSet
from tests.sampling.fakes import CountEnv, Idle, ObservedValue


class Sized(CountEnv):
    def __init__(self, size):
        super().__init__(size)


class WithoutSpaces(gym.Env):
    reset, step = CountEnv.reset, CountEnv.step


class ShapeForSpace(CountEnv):
    observation_space = (2,)


def raising(error):
    def create(context):
        raise error

    return create


def importing(context):
    import not_installed_anywhere  # noqa: F401


BOX2D = gym.error.DependencyNotInstalled(
    'Box2D is not installed, you can install it by run `pip install "gymnasium[box2d]"`'
)
MUJOCO = gym.error.DependencyNotInstalled(
    'MuJoCo is not installed, run `pip install "gymnasium[mujoco]"`'
)
# environment, env_config, type of the error, part of its message
CASES = {
    "box2d": (raising(BOX2D), {}, ConfigError, r"env: .*needs the extra box2d: pip"),
    "mujoco": (raising(MUJOCO), {}, ConfigError, r"env: .*needs the extra mujoco: pip"),
    "module": (importing, {}, ConfigError, r"'not_installed_anywhere' \(test_permanent.*line"),
    "unknown_argument": (Sized, {"sizes": 3}, ConfigError, r"env_config: Sized\(size\) does not"),
    "missing_argument": (Sized, {}, ConfigError, "missing a required argument: 'size'"),
    "argument_of_id": ("CartPole-v1", {"size": 3}, ConfigError, "env_config: CartPole-v1 does not"),
    "no_spaces": (WithoutSpaces, {}, ConfigError, "WithoutSpaces.observation_space must be"),
    "no_space": (ShapeForSpace, {}, ConfigError, r"must be a gymnasium space .*got \(2,\)"),
    "key": (lambda context: CountEnv(context["size"]), {}, KeyError, "size"),
    **{
        type(error).__name__: (raising(error), {}, type(error), "wrong")
        for error in (
            AttributeError("wrong"), NameError("wrong"), SyntaxError("wrong"),
            TypeError("wrong"), ValueError("wrong"), gym.error.Error("wrong"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("case", list(CASES))
def test_error_is_raised_once_before_actors_start(caplog, monkeypatch, case, num_workers):
    env, env_config, kind, message = CASES[case]
    monkeypatch.setattr(WorkerSet, "_start_ray", lambda self: pytest.fail("Ray was started"))
    config = A2CConfig(env=env, env_config=env_config, num_workers=num_workers)
    algorithm = config.build()
    with caplog.at_level(logging.WARNING, "flowrl"):
        for attempt in (algorithm.train, algorithm.workers.remote_workers):
            if num_workers or attempt == algorithm.train:
                with pytest.raises(kind, match=message):
                    attempt()
    assert not caplog.messages


class FailingMethod(CountEnv):
    """Raises `error` in the calls of `method` in `at`, counted over all instances."""

    def __init__(self, calls, method, error, at):
        self._calls, self._method, self._error, self._at = calls, method, error, at
        self._count("__init__")
        super().__init__(3)

    def _count(self, method):
        if method == self._method:
            self._calls.append(method)
            if len(self._calls) in self._at:
                raise self._error

    def reset(self, *, seed=None, options=None):
        self._count("reset")
        return super().reset()

    def step(self, action):
        self._count("step")
        return super().step(action)


def sample(method, error, at, num_fragments=1):
    """Sample; return the number of calls of the method, and of restarts."""
    calls = []
    worker = RolloutWorker(
        lambda context: FailingMethod(calls, method, error, at),
        Idle,
        {"rollout_fragment_length": 12},
    )
    for _ in range(num_fragments):
        worker.sample()
    return len(calls), worker.reply_tags()["env_restarts"]


@pytest.mark.parametrize("error", [TypeError("wrong"), gym.error.Error("wrong")])
def test_first_reset_that_raises_is_not_repeated(error):
    calls = []
    with pytest.raises(type(error), match="wrong") as caught:
        RolloutWorker(lambda context: FailingMethod(calls, "reset", error, {1, 2}), Idle).sample()
    assert len(calls) == 1
    origin = "raised by FailingMethod.reset(), sub-environment 0 of worker 0"
    assert origin in caught.value.__notes__


def test_type_error_in_the_first_episode_is_not_repeated():
    calls = []
    with pytest.raises(TypeError, match="wrong") as caught:
        RolloutWorker(
            lambda context: FailingMethod(calls, "step", TypeError("wrong"), {1, 2}), Idle
        ).sample()
    assert len(calls) == 1
    origin = "raised by FailingMethod.step(), sub-environment 0 of worker 0"
    assert caught.value.__notes__[:2] == [origin, "the action was 0"]


@pytest.mark.parametrize(("method", "at"), [("reset", {2, 3}), ("step", {5, 6})])
def test_errors_of_an_environment_that_has_worked_are_retried(method, at):
    assert sample(method, TypeError("now and then"), at)[1] >= 1


def test_messages_name_the_users_wrapper_and_the_line(caplog):
    class Broken(gym.Wrapper):
        def step(self, action):
            raise OSError("now and then")

    worker = RolloutWorker(lambda context: Broken(gym.make("CartPole-v1")), Idle)
    with pytest.raises(OSError, match="now and then"):
        worker.sample()
    assert caplog.messages[0].startswith("Broken.step(), sub-environment 0 of worker 0, raised")
    assert re.search(
        r"OSError\('now and then'\) \(.*test_permanent_errors.py:\d+\):", caplog.messages[0]
    )


def test_repeated_errors_are_logged_twice(caplog):
    settings = {"rollout_fragment_length": 12, "num_envs_per_worker": 4, "max_num_env_restarts": 5}
    calls = []
    worker = RolloutWorker(
        lambda context: FailingMethod(calls, "step", KeyError("goal"), range(100)), Idle, settings
    )
    with pytest.raises(KeyError, match="goal") as caught:
        worker.sample()
    assert "failed 6 times in a row" in " ".join(caught.value.__notes__)
    first, again = caplog.messages
    assert "FailingMethod.step(), sub-environment 0 of worker 0, raised KeyError('goal')" in first
    assert "raised KeyError again; further ones of worker 0 are not logged" in again


def test_error_that_may_pass_is_retried_from_the_first_reset():
    num_calls, num_restarts = sample("reset", OSError("the license server is busy"), {1, 2})
    assert num_calls >= 3
    assert num_restarts == 2


def test_first_creation_is_not_repeated(caplog):
    calls = []

    class Simulator(FailingMethod):
        def __init__(self):
            super().__init__(calls, "__init__", OSError("no simulator"), range(10))

    with pytest.raises(OSError, match="no simulator") as caught:
        RolloutWorker(Simulator, Idle)
    assert len(calls) == 1
    origin = "raised by the creation of Simulator, sub-environment 0 of worker 0"
    assert caught.value.__notes__ == [origin]
    assert not caplog.messages


def test_recreation_is_repeated(caplog):
    calls = []

    def create(context):
        calls.append(1)
        if len(calls) in (2, 3):
            raise OSError("the license server is busy")
        return CountEnv(3, fail_at=(0, 2) if len(calls) == 1 else None)

    assert RolloutWorker(create, Idle, {"rollout_fragment_length": 12}).sample().count > 0
    assert len(calls) == 4
    assert "CountEnv.step(), sub-environment 0 of worker 0, raised" in caplog.messages[0]
    assert "the creation of create, sub-environment 0 of worker 0, raised" in caplog.messages[1]


def test_class_without_reset_or_step_is_rejected_by_build():
    class OnlyReset(WithoutSpaces):
        step = gym.Env.step

    class Settings:
        pass

    for env, message in (
        (OnlyReset, r"env: the class OnlyReset does not define step\(\)"),
        (Settings, r"the class Settings does not define reset\(\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            A2CConfig(env=env).build()


@pytest.mark.parametrize("method", ["reset", "step"])
def test_method_that_is_not_implemented_is_not_repeated(method):
    class Unfinished(MultiAgentEnv):
        possible_agents = ["a"]
        observation_space, action_space = CountEnv.observation_space, CountEnv.action_space

    if method == "step":
        Unfinished.reset = lambda self, **kwargs: ({"a": [0, 0]}, {})
    worker = RolloutWorker(lambda: Unfinished(), Idle)
    with pytest.raises(NotImplementedError, match=f"Unfinished has no {method}") as caught:
        worker.sample()
    assert "failed" not in " ".join(caught.value.__notes__)


@pytest.mark.slow
def test_error_on_actors_alone_fails_once_with_its_message(ray_session):
    def create(context):
        if context.worker_index:
            importing(context)
        return gym.make("CartPole-v1")

    config = A2CConfig(env=create, num_workers=2, train_batch_size=40, seed=0)
    with config.build() as algorithm:
        with pytest.raises(ShardFailedError, match=r"Last error: .*'not_installed_anywhere'"):
            algorithm.train()
        assert algorithm.workers.restart_counts == [0, 0]


class WithoutSeed(CountEnv):
    def reset(self):
        return super().reset()


@pytest.mark.parametrize("wrap", [lambda env: env, gym.wrappers.OrderEnforcing])
def test_reset_without_a_seed_names_its_signature(wrap):
    worker = RolloutWorker(lambda context: wrap(WithoutSeed(3)), ObservedValue, {"seed": 1})
    with pytest.raises(ConfigError, match=r"^env: WithoutSeed\.reset\(\) must accept seed= and"):
        worker.sample()
