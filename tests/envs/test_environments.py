"""Creation, time limits, checks and saved states of a worker's environments."""

import random
import sys
import threading
from collections import Counter, defaultdict
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit
from packaging.version import Version

from flowrl import PPO
from flowrl.envs.env_factory import EnvFactory
from flowrl.envs.env_record import check_restarting_envs_state
from flowrl.envs.env_state import pack_actions, unpack_actions
from flowrl.envs.multi_agent import make_multi_agent
from flowrl.envs.registry import EnvContext, env_creator_for, env_id_of, register_env
from flowrl.envs.restarting_envs import RestartingEnvs
from flowrl.envs.time_limit import (
    get_elapsed_steps,
    get_max_steps,
    set_elapsed_steps,
    set_max_steps,
)
from flowrl.envs.validation import ObservationCheck
from flowrl.errors import ConfigError
from flowrl.sampling import DefaultCallbacks, RolloutWorker, SimpleListCollector, WorkerSet
from flowrl.setting_values import equal
from flowrl.state_schema import StateError
from tests.extras import require_extra
from tests.processes import kill_actor
from tests.sampling.fakes import CountEnv, DrawEnv, Idle


def test_only_creators_from_an_env_id_have_one():
    def by_name(name, context):
        return gym.make("CartPole-v1")

    assert env_id_of(env_creator_for("CartPole-v1")) == "CartPole-v1"
    assert env_id_of(partial(by_name, "my-layout")) is None


def test_num_envs_must_be_that_of_a_vector_environment():
    def two(context):
        return gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")

    assert [EnvFactory(two, {}, n).make_agent_envs().num_envs for n in (1, 2)] == [2, 2]
    with pytest.raises(ConfigError, match=r"num_envs_per_worker=5.* of 2 environments"):
        EnvFactory(two, {}, 5).make_agent_envs()


def test_async_vector_environments_are_rejected_before_they_are_copied():
    env = gym.make_vec("CartPole-v1", 2, vectorization_mode="async")
    wrapped = gym.wrappers.vector.RecordEpisodeStatistics(env)
    try:
        for given in (env, wrapped):
            with pytest.raises(ConfigError, match=r"other processes: pass a function .*\"async\""):
                PPO(given)
        assert env.reset()[0].shape == (2, 4)  # the environment still works
    finally:
        env.close()


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPol-v1", "Did you mean 'CartPole-v1'"),
        ("LunarLander-v2", "Did you mean 'LunarLander-v3'"),
        ("ALE/Pong-v5", r"the Atari environment .*: pip install .*\[atari\]'?$"),
        (
            "PongNoFrameskip-v4",
            r"the Atari environment .*: pip install .*\[atari\]'?$",
        ),
        ("Zzzzzz-v4", r"An Atari game needs the extra atari: pip install"),
        ("minihack/Maze-v0", r"registers 'minihack': install .*env=\"module:minihack/Maze-v0\""),
        ("zzzzzz", r"register_env\(name, creator\)"),
    ],
)
def test_unknown_id_says_what_to_install_or_use(monkeypatch, env_id, message):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(ConfigError, match=message):
        env_creator_for(env_id)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("./my_env.py:MyEnv", "'./my_env.py:MyEnv' must name a module, not a file: my_env:MyEnv"),
        ("bad_name:E", r"importing 'bad_name:E' failed: NameError: .*\(.*bad_name.py, line 2\)"),
        ("bad_syntax:E", r"importing 'bad_syntax:E' failed: SyntaxError: .*bad_syntax.py, line 1"),
        ("bad_import:E", r"importing 'bad_import:E' failed: .*'nothere' \(.*bad_import.py, line 1"),
        ("no_such_module:E", "there is no module 'no_such_module'; start the program in"),
        ("json:E", "json neither registers the id 'E' nor has a class or function 'E'"),
    ],
)
def test_module_that_cannot_be_imported_is_one_error(monkeypatch, tmp_path, env, message):
    (tmp_path / "bad_name.py").write_text("x = 1\nundefined\n")
    (tmp_path / "bad_syntax.py").write_text("def (\n")
    (tmp_path / "bad_import.py").write_text("import nothere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        env_creator_for(env)


def test_module_names_the_environments_that_it_registers(monkeypatch, tmp_path):
    code = """import flowrl
from tests.sampling.fakes import CountEnv
flowrl.register_env("far-count", lambda context: CountEnv(context.get("length", 3)))
"""
    (tmp_path / "far_envs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"env_config": {"length": 7}, "batch_mode": "complete_episodes"}
    worker = RolloutWorker("far_envs:far-count", Idle, {**settings, "rollout_fragment_length": 1})
    assert worker.sample().count == 7
    register_env("CountEnv", lambda context: gym.make("CartPole-v1"))
    assert env_creator_for("far_envs:CountEnv")(EnvContext()).__class__ is CountEnv
    with pytest.raises(ConfigError, match="far_envs neither registers the id 'near-count'"):
        env_creator_for("far_envs:near-count")


def test_installed_atari_environments_are_registered(monkeypatch, tmp_path):
    require_extra("atari")
    code = "import gymnasium\ngymnasium.register('ALE/Fake-v5', 'tests.sampling.fakes:CountEnv')\n"
    (tmp_path / "ale_py.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ale_py", raising=False)
    try:
        assert RolloutWorker("ALE/Fake-v5", Idle, {"atari": None}).sample().count == 200
    finally:
        gym.registry.pop("ALE/Fake-v5", None)
        sys.modules.pop("ale_py", None)


class Sized(CountEnv):
    """An environment with an argument."""


FUNCTIONS = {
    "no_argument": (lambda: CountEnv(3), {}, 3),
    "context": (lambda context: CountEnv(context["n"]), {"n": 4}, 4),
    "any_name": (lambda c: CountEnv(c["n"]), {"n": 4}, 4),
    "context_with_default": (lambda config=None: CountEnv(config["n"]), {"n": 4}, 4),
    "positional": (lambda *args: CountEnv(args[0]["n"]), {"n": 4}, 4),
    "keyword": (lambda n=3: CountEnv(n), {"n": 4}, 4),
    "required_keyword": (lambda n: CountEnv(n), {"n": 4}, 4),
    "two_required_keywords": (lambda n, m: CountEnv(n + m), {"n": 3, "m": 1}, 4),
    "context_with_an_entry_of_its_name": (lambda n: CountEnv(n["n"]), {"n": 4, "m": 1}, 4),
    "keyword_default": (lambda n=3: CountEnv(n), {}, 3),
    "keywords": (lambda **kwargs: CountEnv(kwargs["n"]), {"n": 4}, 4),
    "partial": (partial(Sized, 5), {}, 5),
    "partial_with_context": (partial(lambda n, context: CountEnv(n), 5), {}, 5),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("registered", [False, True])
def test_functions_are_called_by_their_signature(name, registered):
    function, env_config, length = FUNCTIONS[name]
    if registered:
        register_env("function-env", function)
        function = "function-env"
    worker = RolloutWorker(function, Idle, {"env_config": env_config})
    worker.sample()
    assert {episode.episode_length for episode in worker.get_metrics()} == {length}


@pytest.mark.parametrize("name", ["config", "context", "env_config"])
def test_class_with_one_configuration_argument_receives_the_context(name):
    scope = {"CountEnv": CountEnv}
    exec(
        "class Configured(CountEnv):\n"
        f"    def __init__(self, {name}=None):\n"
        f"        super().__init__({name}['n'] + {name}.worker_index)",
        scope,
    )
    worker = RolloutWorker(scope["Configured"], Idle, {"env_config": {"n": 4}})
    worker.sample()
    assert {episode.episode_length for episode in worker.get_metrics()} == {4}


def test_class_whose_configuration_argument_is_a_key_receives_keywords():
    class Sized(CountEnv):
        def __init__(self, config):
            super().__init__(config)

    worker = RolloutWorker(Sized, Idle, {"env_config": {"config": 5}})
    worker.sample()
    assert {episode.episode_length for episode in worker.get_metrics()} == {5}


def test_functions_that_cannot_be_called_name_the_allowed_forms():
    message = r"env: <lambda>\(a, b\) has 2 required arguments, but env_config has .'a'.: def"
    with pytest.raises(ConfigError, match=message):
        RolloutWorker(lambda a, b: CountEnv(), Idle, {"env_config": {"a": 4}})
    with pytest.raises(ConfigError, match=r"env_config: <lambda>\(\) does not accept it: .*'n'"):
        RolloutWorker(lambda: CountEnv(), Idle, {"env_config": {"n": 4}})


def test_arguments_that_a_creator_passes_on_are_named():
    def make(**kwargs):
        return CountEnv(**kwargs)

    with pytest.raises(ConfigError, match=r"env_config: .* unexpected keyword argument 'players'"):
        RolloutWorker(make, Idle, {"env_config": {"players": 4}})

    def broken(**kwargs):
        return CountEnv(typo=1)

    with pytest.raises(TypeError, match="unexpected keyword argument 'typo'"):
        RolloutWorker(broken, Idle, {"env_config": {"players": 4}})


@pytest.mark.parametrize("as_instance", [False, True])
def test_auto_fragments_use_the_number_of_a_vector_environment(as_instance):
    def four(context=None):
        return gym.make_vec("CartPole-v1", 4, vectorization_mode="sync")

    env = four() if as_instance else four
    if as_instance and Version(gym.__version__) < Version("1.4"):
        pytest.skip("vector environments of this version of gymnasium cannot be copied")
    workers = WorkerSet(env, Idle, {"rollout_fragment_length": "auto", "train_batch_size": 400})
    assert workers.local_worker().num_envs == 4
    assert workers.steps_per_fragment() == 400
    assert 400 <= workers.local_worker().sample().count < 404
    workers.stop()


@pytest.mark.parametrize("collector", [None, SimpleListCollector])
@pytest.mark.parametrize("method", ["reset", "step"])
def test_only_wrong_results_are_reported_as_a_wrong_signature(method, collector):
    class ReturnsWrong(CountEnv):
        pass

    def sample(result):
        setattr(ReturnsWrong, method, lambda *args, **kwargs: result())
        settings = {"max_num_env_restarts": 0, "sample_collector": collector}
        RolloutWorker(lambda context: ReturnsWrong(), Idle, settings).sample()

    def unpacks_wrongly():
        [_] = 1, 2

    with pytest.raises(ValueError, match="values to unpack"):
        sample(unpacks_wrongly)
    for wrong in (None, np.zeros(2), (np.zeros(2),) * 3):
        with pytest.raises(ConfigError, match=rf"{method}\(\) must return \(observation"):
            sample(lambda wrong=wrong: wrong)


def test_counters_of_gymnasiums_time_limit_are_read_and_set():
    limit = TimeLimit(CountEnv(length=100), 7)
    limit.reset()
    limit.step(0)
    assert (get_max_steps(limit), get_elapsed_steps(limit)) == (7, 1)
    set_max_steps(limit, 10)
    set_elapsed_steps(limit, 8)
    assert [limit.step(0)[3] for _ in range(2)] == [False, True]


def test_every_entry_of_a_saved_state_is_checked():
    state = EnvFactory(lambda context: CountEnv(), {}, 2).make_agent_envs().state_dict()
    check_restarting_envs_state(state, 2)
    for name in state:
        without_name = {key: value for key, value in state.items() if key != name}
        with pytest.raises(StateError, match=name):
            check_restarting_envs_state(without_name, 2)
    first, second = state["envs"]
    for name in first:
        without_name = {key: value for key, value in first.items() if key != name}
        with pytest.raises(StateError, match=f"environments/envs/1.*{name}"):
            check_restarting_envs_state({**state, "envs": [second, without_name]}, 2)


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (np.zeros(3, np.float32), r"obs\['arm'\] has shape \(3,\) .*not \(2,\).* shape of the"),
        (
            np.zeros(2, complex),
            r"obs\['arm'\] has .*dtype complex128, not .*np.asarray\(…, np.float",
        ),
    ],
)
def test_observation_that_does_not_fit_names_its_part_and_the_remedy(arm, message):
    check = ObservationCheck(gym.spaces.Dict({"arm": gym.spaces.Box(0, 1, (2,))}))
    with pytest.raises(ConfigError, match=message):
        check.check_structure({"arm": arm})


@pytest.mark.parametrize(
    ("observation", "problem"),
    [
        ({"image": 1}, r"obs lacks the key 'vec' \(it has \['image'\]\)"),
        ({"image": 1, "vec": (1, 1), "x": 1}, r"obs has the extra key 'x' \(it has \['image', 'v"),
        ({"image": 1, "vec": (1,)}, r"obs\['vec'\] is a tuple of length 1, not a tuple of le"),
        ({"image": 1, "vec": (1, 2)}, r"obs\['vec'\]\[1\] is of the type int, not a dict"),
        ({"image": 1, "vec": 5}, r"obs\['vec'\] is a int, not a tuple of length 2"),
    ],
)
def test_observation_of_another_structure_names_the_difference(observation, problem):
    part = gym.spaces.Discrete(3)
    vec = gym.spaces.Tuple([part, gym.spaces.Dict({"a": part})])
    check = ObservationCheck(gym.spaces.Dict({"image": part, "vec": vec}))
    check.check_structure({"vec": (1, {"a": 1}), "image": 2})
    with pytest.raises(ConfigError, match=rf"^env: an observation does not fit .*: {problem}"):
        check.check_structure(observation)


def restored(make_env, changed, num_envs=1):
    """Change RestartingEnvs by `changed(envs)`; return a restored copy, and whether the episode of
    environment 0 was replayed."""
    envs = RestartingEnvs(make_env, num_envs, 7, 5)
    changed(envs)
    state = envs.state_dict()
    copy = RestartingEnvs(make_env, num_envs, 7, 5)
    copy.load_state_dict(state)
    return copy, copy.replay(0, state, lambda observation: True)


def test_restored_environments_are_recreated_after_the_same_errors():
    def reset(envs):
        envs.reset(0)
        envs.mark_healthy([0])

    envs, replayed = restored(lambda index: CountEnv(), reset)
    assert replayed
    for error in (ValueError("sporadic"), TypeError("sporadic")):
        envs.handle_failure(0, error, "step")
    assert envs.num_restarts == 2

    envs, _ = restored(lambda index: CountEnv(), lambda envs: envs.reset(0))
    envs.handle_failure(0, ValueError("sporadic"), "step")
    with pytest.raises(TypeError, match="before a fragment was complete"):
        envs.handle_failure(0, TypeError("before a fragment was complete"), "step")


def test_failures_at_other_steps_are_forgiven_after_a_fragment():
    envs = RestartingEnvs(lambda index: CountEnv(), 1, 7, 2)
    for step in (90, 70, 50, 30, 20):
        envs.reset(0)
        envs.mark_healthy([0])
        envs.action_logs[0] = [0] * step
        envs.handle_failure(0, TimeoutError("sporadic"), "step")
    assert envs.num_restarts == 5


class SavesState(CountEnv):
    def get_state(self):
        return {"steps": self.steps}

    def set_state(self, state):
        self.steps = state["steps"]


def test_steps_of_failures_are_those_of_the_episode_in_a_resumed_run():
    def step(envs):
        for _ in range(2):
            envs.reset(0)
            envs.action_logs[0] = [0] * 150
            envs.handle_failure(0, OSError("always"), "step")
        envs.reset(0)
        envs.action_logs[0] = [0] * 120

    envs, replayed = restored(lambda index: SavesState(), step)
    assert replayed
    envs.action_logs[0] += [0] * 30
    envs.handle_failure(0, OSError("always"), "step")
    (saved,) = envs.state_dict()["envs"]
    assert saved["failures"] == 2  # the first failure was not at the same step as another one
    assert saved["failed_step"] == 150


def test_environment_that_cannot_be_replayed_is_seeded_again(monkeypatch):
    monkeypatch.setattr("flowrl.envs.restarting_envs.MAX_LOGGED_ACTIONS", 3)
    first = []

    def step(envs):
        first.append(envs.reset(0)[0])
        envs.action_logs[0] = [0] * 5
        envs.mark_healthy([0])

    starts = []
    for _ in range(2):
        envs, replayed = restored(lambda index: gym.make("CartPole-v1"), step)
        assert not replayed
        starts.append(envs.reset(0)[0])
    np.testing.assert_array_equal(*starts)  # two resumed runs are equal
    assert not np.array_equal(first[0], starts[0])


def test_large_actions_are_kept_for_shorter_episodes(monkeypatch):
    monkeypatch.setattr("flowrl.envs.restarting_envs.MAX_LOGGED_BYTES", 10 * 4100)
    envs = RestartingEnvs(lambda index: gym.make("Pendulum-v1"), 2, 7, 5)
    for index in (0, 1):
        envs.reset(index)
    # 11 actions are too many, also if the last one is small; then none is kept in the episode
    action = {"a": np.zeros(1000, np.float32)}  # and 100 bytes of its object
    for kept in (range(1, 11), [0, 0, 0]):
        for number in kept:
            envs.action_logs[0].append(action)
            envs.mark_healthy([0, 1])
            assert len(envs.action_logs[0]) == number
    first, second = envs.state_dict()["envs"]
    assert first["actions"] == second["actions"] == []
    assert (first["unlogged_steps"], second["unlogged_steps"]) == (13, 0)
    assert first["reset"] is None
    assert second["reset"] is not None
    envs.reset(0)
    envs.action_logs[0].append(action)
    envs.mark_healthy([0])
    assert len(envs.action_logs[0]) == 1


@pytest.mark.parametrize(
    "actions",
    [[], [1, 0, 1], [True, False], [1, 2.5], [np.zeros(2), np.ones(2)], [{"a": 1}, {"b": (1, 2)}]],
)
def test_actions_are_packed_without_loss(actions):
    unpacked = unpack_actions(pack_actions(actions))
    assert [type(action) for action in unpacked] == [type(action) for action in actions]
    assert all(map(equal, unpacked, actions))


def test_error_of_close_does_not_leave_workers_running(caplog):
    class FailsToClose(gym.vector.SyncVectorEnv):
        def close(self, **kwargs):
            raise RuntimeError("cannot close")

    def create(context):
        mode = gym.vector.AutoresetMode.SAME_STEP
        return FailsToClose([lambda: gym.make("CartPole-v1")], autoreset_mode=mode)

    workers = WorkerSet(create, Idle, {})
    workers.local_worker()
    workers.stop()
    assert "raised RuntimeError('cannot close')" in caplog.text
    with pytest.raises(RuntimeError, match="the workers were stopped"):
        workers.local_worker()


def test_created_vector_environment_is_passed_to_the_callback():
    class Collects(DefaultCallbacks):
        created = []

        def on_sub_environment_created(self, *, sub_environment, **kwargs):
            self.created.append(sub_environment)

    settings = {"num_envs_per_worker": 2, "callbacks_class": Collects}
    RolloutWorker("CartPole-v1", Idle, {**settings, "vectorization_mode": "vector_entry_point"})
    (created,) = Collects.created
    assert isinstance(created, gym.vector.VectorEnv)


def test_recreated_vector_environment_is_passed_to_the_callback():
    created = []

    class Fails(gym.vector.SyncVectorEnv):
        def step(self, actions):
            raise OSError("crashed")

    def create(context):
        mode = gym.vector.AutoresetMode.SAME_STEP
        return Fails([lambda: gym.make("CartPole-v1")], autoreset_mode=mode)

    factory = EnvFactory(create, {}, 1, on_env_created=lambda index, env: created.append(env))
    env = factory.make_agent_envs()
    env.reset()
    with pytest.raises(OSError, match="crashed"):
        env.step([{"agent0": 0}])
    env.reset()
    assert len(set(map(id, created))) == 2


def test_vector_environments_cannot_drop_invalid_steps():
    settings = {"on_invalid_step": "drop", "num_envs_per_worker": 2}
    with pytest.raises(ConfigError, match='on_invalid_step="drop" recreates single'):
        RolloutWorker(lambda context: CountEnv(), Idle, {**settings, "vectorization_mode": "sync"})
    with pytest.raises(ConfigError, match='on_invalid_step="drop" recreates single'):
        RolloutWorker(lambda context: gym.vector.SyncVectorEnv([CountEnv] * 2), Idle, settings)


def test_cartpole_without_velocities():
    env = env_creator_for("CartPoleNoVel-v1")(EnvContext())
    plain = gym.make("CartPole-v1")
    expected, _ = plain.reset(seed=3)
    observation, _ = env.reset(seed=3)
    for action in (1, 0, 1):
        np.testing.assert_array_equal(observation, expected * np.array([1, 0, 1, 0], np.float32))
        assert observation.dtype == np.float32
        observation, expected = env.step(action)[0], plain.step(action)[0]
    assert env.spec.max_episode_steps == 500


@pytest.mark.filterwarnings("error")
def test_check_of_the_largest_floats_causes_no_warning():
    largest = np.finfo(np.float32).max
    check = ObservationCheck(gym.spaces.Box(-largest, largest, (2,), np.float32))
    assert check.in_bounds(np.array([largest, 0], np.float32))


class Levels(gym.Env):
    """The observation is the level; episodes have two steps."""

    observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    level = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.full(1, self.level, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.level, np.float32), 1.0, self.t == 2, False, {}


def set_level(env, level=7):
    env.unwrapped.level = level
    return type(env.unwrapped).__name__


@pytest.mark.parametrize("mode", ["flowrl", "async"])
@pytest.mark.parametrize("is_sampled", [False, True])
def test_foreach_env_reaches_every_environment(mode, is_sampled):
    config = {"num_envs_per_worker": 3, "rollout_fragment_length": 4, "vectorization_mode": mode}
    worker = RolloutWorker(lambda context: Levels(), Idle, config)
    try:
        if is_sampled:
            assert not worker.sample()["obs"].any()
        assert worker.foreach_env(set_level) == ["Levels"] * 3
        worker.sample()
        assert (worker.sample()["obs"] == 7).all()
        with pytest.raises(AttributeError, match="no_such_name"):
            worker.foreach_env(lambda env: env.unwrapped.no_such_name)
        assert (worker.sample()["obs"] == 7).all()
    finally:
        worker.stop()


def test_foreach_env_passes_a_vector_environment_as_a_whole():
    config = {"num_envs_per_worker": 2, "vectorization_mode": "sync"}
    worker = RolloutWorker("CartPole-v1", Idle, config)
    assert worker.foreach_env(lambda env: env.num_envs) == [2]
    worker.stop()


def test_foreach_env_reaches_multi_agent_environments():
    make = make_multi_agent("CartPole-v1")
    worker = RolloutWorker(
        lambda context: make({"num_agents": 2}), Idle, {"num_envs_per_worker": 2}
    )
    assert worker.foreach_env(lambda env: len(env.possible_agents)) == [2, 2]
    worker.stop()


@pytest.mark.slow
def test_foreach_env_of_a_worker_set_returns_a_list_per_worker(ray_session, caplog):
    config = {"num_envs_per_worker": 2, "rollout_fragment_length": 4}
    with WorkerSet(lambda context: Levels(), Idle, config, num_workers=2) as workers:
        workers.foreach_env(set_level)
        levels = workers.foreach_env(lambda env: env.unwrapped.level)
        assert levels == [[7, 7]] * 2
        with pytest.raises(AttributeError, match="no_such_name") as caught:
            workers.foreach_env(lambda env: env.unwrapped.no_such_name)
        (note,) = caught.value.__notes__
        assert note.startswith("Traceback in the worker:")
        assert "env.unwrapped.no_such_name" in note
        kill_actor(workers.remote_workers()[0])
        caplog.set_level("WARNING", "flowrl")
        assert workers.foreach_env(set_level) == [[], ["Levels"] * 2]
        assert "worker 1 did not call the function of foreach_env" in caplog.text


class DrawsAndFails(DrawEnv):
    """Observes a random number of the episode; the first environments fail in their third step."""

    num_created = 0

    def __init__(self):
        super().__init__(length=5, fail_at=(0, 3) if DrawsAndFails.num_created < 2 else None)
        DrawsAndFails.num_created += 1


def test_vector_environment_that_replaces_a_failed_one_is_seeded():
    def numbers(seed):
        DrawsAndFails.num_created = 0
        worker = RolloutWorker(
            lambda context: DrawsAndFails(),
            Idle,
            {"num_envs_per_worker": 2, "vectorization_mode": "sync", "seed": seed,
             "rollout_fragment_length": 2},
        )  # fmt: skip
        batches = [worker.sample()]
        with pytest.raises(ValueError, match="the environment broke"):
            worker.sample()
        batches += [worker.sample() for _ in range(3)]
        return [batch["obs"][:, 0].tolist() for batch in batches]

    first = numbers(1)
    assert first == numbers(1)
    assert first[1][:2] != first[0][:2]
    assert first != numbers(2)


def test_the_state_of_a_wrapper_may_have_any_dicts():
    class Counts(gym.Wrapper):
        def __init__(self, env):
            super().__init__(env)
            self.visits = Counter()

        def step(self, action):
            self.visits[action] += 1
            return self.env.step(action)

        def get_state(self):
            return {"visits": defaultdict(int, self.visits), "most": self.visits}

        def set_state(self, state):
            self.visits = Counter(state["visits"])

    def step(envs):
        for _ in range(2):  # the second reset saves the state of the wrapper
            envs.reset(0)
            for _ in range(3):
                envs.action_logs[0].append(1)
                envs.envs[0].step(1)

    envs, replayed = restored(lambda index: Counts(gym.make("CartPole-v1")), step)
    assert replayed
    assert envs.envs[0].visits == {1: 6}


class HasHiddenState(CountEnv):
    """Its reward is the number of all steps, which observations do not show."""

    def __init__(self, kind=dict):
        super().__init__(length=5)
        self.count, self.kind = 0, kind

    def step(self, action):
        self.count += 1
        observation, _, *ends = super().step(action)
        return observation, float(self.count), *ends

    def get_state(self):
        return self.kind(count=self.count, steps=self.steps, episode=self.episode)

    def set_state(self, state):
        vars(self).update(state)


class OwnWrapper(gym.Wrapper):
    pass


@pytest.mark.parametrize(
    ("make", "warning"),
    [
        (HasHiddenState, None),
        (lambda: gym.wrappers.ClipReward(HasHiddenState(), 0, 99), None),
        (lambda: gym.wrappers.TransformReward(HasHiddenState(), float), "the wrapper Transform"),
        (lambda: gym.wrappers.FlattenObservation(HasHiddenState()), None),
        (lambda: OwnWrapper(HasHiddenState()), "the wrapper OwnWrapper around"),
        (
            lambda: HasHiddenState(lambda **state: {"x": object()}),
            "an object that checkpoints cannot",
        ),
    ],
)
def test_states_that_are_not_saved_are_a_warning(make, warning, caplog, monkeypatch):
    monkeypatch.setattr("flowrl.envs.env_state._warned", set())
    config = {"rollout_fragment_length": 8}
    first, resumed = (RolloutWorker(lambda context: make(), Idle, config) for _ in range(2))
    first.sample()
    resumed.load_sampling_state_dict(first.sampling_state_dict())
    assert resumed.sample()["rewards"][0] == (9 if warning is None else 4)
    messages = [m for m in caplog.messages if "checkpoints do not contain the state of" in m]
    assert len(messages) == (warning is not None)
    assert all("HasHiddenState" in m and warning in m for m in messages)


@pytest.mark.parametrize("mode", ["flowrl", "async"])
@pytest.mark.parametrize("wrong", [np.full(1, 7, np.float32), 7.0, np.full((2, 1), 7.0)])
def test_first_observations_of_all_episodes_are_checked(mode, wrong):
    class Env(CountEnv):
        def reset(self, *, seed=None, options=None):
            observation, info = super().reset(seed=seed)
            return (wrong if self.episode == 2 else observation), info

    config = {"rollout_fragment_length": 20, "vectorization_mode": mode}
    worker = RolloutWorker(lambda context: Env(), Idle, config)
    with pytest.raises(ConfigError, match=r"does not fit the space.*\(2,\) and float32"):
        worker.sample()
    worker.stop()


@pytest.mark.parametrize("name", ["id", "disable_env_checker"])
def test_arguments_of_make_are_no_env_config(name):
    with pytest.raises(ConfigError, match=f"does not accept.*{name}"):
        env_creator_for("CartPole-v1")(EnvContext({name: 1}))


def test_infos_are_copied_with_the_objects_in_them():
    class Env(CountEnv):
        inner = {"n": np.zeros(1)}

        def step(self, action):
            *result, _ = super().step(action)
            self.inner["n"][0] = self.steps
            return *result, {"inner": self.inner}

    for config in ({}, {"policies": ["p"], "policy_mapping_fn": lambda agent: "p"}):
        worker = RolloutWorker(
            lambda context: Env(), Idle, {"rollout_fragment_length": 6, **config}
        )
        (batch,) = worker.sample().policy_batches.values()
        assert [info["inner"]["n"].tolist() for info in batch["infos"]] == [[1], [2], [3]] * 2


def test_sampler_after_a_state_that_cannot_be_loaded_starts_new_episodes():
    class Fails(DefaultCallbacks):
        is_failing = False

        def on_episode_start(self, **kwargs):
            assert not self.is_failing

    config = {"rollout_fragment_length": 4, "callbacks_class": Fails}
    first, other = (RolloutWorker(lambda context: DrawEnv(9), Idle, config) for _ in range(2))
    first.sample()
    state = first.sampling_state_dict()
    state["env_sampler"]["open"]["envs"]["envs"][0]["reset"] = None  # cannot be replayed
    other.sample()
    other.callbacks.is_failing = True
    with pytest.raises(AssertionError):
        other.load_sampling_state_dict(state)
    other.callbacks.is_failing = False
    assert other.sample()["t"].tolist() == [0, 1, 2, 3]


def test_setting_that_cannot_be_sent_to_workers_is_named(ray_session):
    settings = {"env_config": {"lock": threading.Lock()}, "num_workers": 1}
    with (
        PPO(lambda context: CountEnv(), **settings) as algorithm,
        pytest.raises(ConfigError, match=r"env_config\['lock'\] cannot be sent to remote workers"),
    ):
        algorithm.train()


class OwnGenerator(gym.Env):
    """Draws from a generator that reset() does not seed."""

    observation_space, action_space = gym.spaces.Box(0, 1, (3,)), gym.spaces.Discrete(2)

    def __init__(self):
        self.env = self  # no wrapper
        self.rng, self.random = np.random.Generator(np.random.MT19937(3)), random.Random(3)
        self.old, self.part = np.random.RandomState(3), {"random": self.random}

    def observe(self):
        draws = self.rng.random(), self.random.random(), self.old.random_sample()
        return np.array(draws, np.float32)

    def reset(self, *, seed=None, options=None):
        assert self.part["random"] is self.random
        assert isinstance(self.rng.bit_generator, np.random.MT19937)
        return self.observe(), {}

    def step(self, action):
        return self.observe(), 0.0, False, False, {}


def test_copies_of_an_environment_have_their_own_random_numbers():
    config = {"num_envs_per_worker": 3, "rollout_fragment_length": 4, "seed": 1}

    def sampled(index):
        creator = env_creator_for(gym.wrappers.TimeLimit(OwnGenerator(), 3))
        worker = RolloutWorker(creator, Idle, config, worker_index=index)
        obs = worker.sample()["obs"]
        worker.stop()
        return obs

    first, other = sampled(1), sampled(2)
    for column in range(3):
        assert len(set(first[:, column]) | set(other[:, column])) == 24
    np.testing.assert_array_equal(first, sampled(1))


@pytest.mark.parametrize(("low", "high"), [(0.0, np.inf), (-np.inf, 0.0), (0.0, 0.0)])
def test_rounding_errors_are_within_half_bounded_spaces(low, high):
    check = ObservationCheck(gym.spaces.Box(low, high, (1,), np.float32))
    sign = -1 if low == 0 else 1
    for size, is_valid in ((1e-7, True), (1e-2, False)):
        assert check.in_bounds(np.array([sign * size], np.float32)) == is_valid


def test_list_for_a_float64_box_is_converted():
    check = ObservationCheck(gym.spaces.Box(-1, 1, (2,), np.float64))
    assert not check.matches_shape_and_dtype([0.5, 0.5])
    assert not check.matches_shape_and_dtype(None)
    assert check.matches_shape_and_dtype(np.zeros(2))


class Closed(CountEnv):
    """Notes how many environments were closed."""

    count = 0

    def close(self):
        type(self).count += 1


def test_environment_is_closed_if_another_check_fails(monkeypatch):
    monkeypatch.setattr(Closed, "count", 0)
    factory = EnvFactory(lambda context: Closed(), {}, 1)
    monkeypatch.setattr("flowrl.envs.env_factory.DirectVectorEnv", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        factory.make_agent_envs()
    assert Closed.count == 1


def test_all_copies_of_an_environment_are_closed_after_an_error(monkeypatch):
    monkeypatch.setattr(Closed, "count", 0)

    class Fails(Closed):
        def close(self):
            Closed.count += 1
            raise OSError("cannot close")

    env = make_multi_agent(lambda context: Fails())({"num_agents": 3})
    with pytest.raises(OSError, match="cannot close"):
        env.close()
    assert Closed.count == 3
