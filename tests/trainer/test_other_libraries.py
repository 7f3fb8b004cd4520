"""Methods and arguments of other libraries: they work, or the error says what to use instead."""

import inspect

import gymnasium as gym
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from flowrl import DQN, PPO, ConfigError, PPOConfig
from flowrl.trainer.other_libraries import _ARGUMENTS, _ATTRIBUTES

SMALL = {"train_batch_size": 100, "sgd_minibatch_size": 50, "min_sample_timesteps_per_iteration": 0}


@pytest.fixture(scope="module")
def algorithm():
    with PPO("CartPole-v1", seed=1, **SMALL) as algorithm:
        yield algorithm


def test_two_positional_arguments_are_rejected():
    too_many = (
        r"^PPO\(\): too many positional arguments\. It takes one: an environment, with settings as "
        r"keywords, PPO\(env, gamma=0.99\), or a config, PPO\(PPOConfig\(…\)\)\."
    )
    for arguments in ((PPOConfig(), "CartPole-v1"), ("CartPole-v1", {"lr": 1e-3})):
        with pytest.raises(TypeError, match=f"{too_many}$"):
            PPO(*arguments)
    with pytest.raises(TypeError, match=f"{too_many} The type of the network follows from the sp"):
        PPO("MlpPolicy", "CartPole-v1")
    with pytest.raises(TypeError, match=too_many + r".*Unknown setting 'verbose'\. `algorithm\.le"):
        PPO("MlpPolicy", "CartPole-v1", verbose=1)
    with pytest.raises(TypeError, match=too_many + ".*'learning_rate'. Did you mean 'lr'") as error:
        PPO("MlpPolicy", "CartPole-v1", lr=1e-3, num_epochs=2, learning_rate=1e-3)
    assert str(error.value).count("Unknown setting") == 1
    with pytest.raises(ConfigError, match="PPO: two environments are given, 'MlpPolicy' and env="):
        PPO("MlpPolicy", env="CartPole-v1")
    with pytest.raises(ConfigError, match=r"unknown setting 'config'\. Pass the config as the fir"):
        PPO(config=PPOConfig(env="CartPole-v1"))


def test_constructor_names_itself_and_the_nearest_setting():
    message = r"^PPO: unknown setting 'train_batch_szie'\. Did you mean 'train_batch_size'\?$"
    for argument in ("CartPole-v1", {"env": "CartPole-v1"}, PPOConfig(env="CartPole-v1")):
        with pytest.raises(ConfigError, match=message):
            PPO(argument, train_batch_szie=1)
    with pytest.raises(ConfigError, match=r"^DQN: lr: values must be from 0"):
        DQN("CartPole-v1", lr=-1)


def test_signature_of_an_algorithm_names_its_arguments():
    assert list(inspect.signature(PPO).parameters) == ["env_or_config", "settings"]
    assert "env_or_config: an environment" in inspect.getdoc(PPO.__init__)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trainning", "PPOConfig has no method or setting 'trainning'. Did you mean 'training'?"),
        ("learning_rate", "PPOConfig has no method or setting 'learning_rate'. Did you mean 'lr'?"),
        ("bild", "PPOConfig has no method or setting 'bild'. Did you mean 'build'?"),
        ("use_lstm", 'It is a setting of model: model={"use_lstm": …}.'),
    ],
)
def test_unknown_attribute_of_a_config_is_rejected_with_a_hint(name, message):
    with pytest.raises(AttributeError) as error:
        getattr(PPOConfig(), name)
    assert message in str(error.value)


@pytest.mark.parametrize("name", _ATTRIBUTES)
def test_attributes_of_other_libraries_have_a_hint(algorithm, name):
    with pytest.raises(AttributeError, match=f"PPO has no attribute '{name}': "):
        getattr(algorithm, name)
    assert not hasattr(PPO, name)
    assert name not in dir(algorithm)


def test_load_names_from_checkpoint():
    with pytest.raises(AttributeError, match=r"use PPO\.from_checkpoint\(path\)"):
        PPO.load("ppo_cartpole")


@pytest.mark.parametrize("name", sorted(_ARGUMENTS.keys() - {"__init__"}))
def test_arguments_of_other_libraries_have_a_hint(algorithm, name):
    method = getattr(algorithm.config if name == "build" else algorithm, name)
    for argument, hint in _ARGUMENTS[name].items():
        assert argument not in inspect.signature(method).parameters
        with pytest.raises(TypeError) as error:
            method(*(range(9) if not argument else ()), **({argument: 1} if argument else {}))
        assert hint in str(error.value)


def test_unknown_argument_names_those_that_exist(algorithm):
    with pytest.raises(TypeError, match=r"no argument 'note'\. .* are metadata=\{…\}\.$"):
        algorithm.save(note=1)
    with pytest.raises(KeyError, match="Its metrics: episode_reward_mean, "):
        algorithm.evaluate(episodes=1)["env_runners"]


def test_environment_and_reset_in_the_wrong_place_have_a_hint(algorithm):
    with gym.make("CartPole-v1") as env:
        with pytest.raises(ConfigError, match=r'the setting evaluation_config=\{"env": …\}'):
            algorithm.evaluate(env)
        with pytest.raises(ConfigError, match=r"\(observation, info\), as reset\(\) returns"):
            algorithm.predict(env.reset())


def test_similar_argument_is_suggested(algorithm):
    message = (
        r"PPO\.learn\(\): it has no argument 'total_timestep'\. Did you mean 'total_timesteps'"
    )
    with pytest.raises(TypeError, match=message):
        algorithm.learn(total_timestep=100)


def test_save_and_predict_have_the_usual_arguments(algorithm, tmp_path):
    path = algorithm.save(tmp_path / "ppo_cartpole")
    observation, _ = gym.make("CartPole-v1").reset(seed=1)
    action, state = algorithm.predict(observation, deterministic=True)
    assert state is None
    with PPO.from_checkpoint(path) as restored:
        assert restored.predict(observation)[0] == action


@pytest.mark.parametrize(
    "env",
    [
        CartPoleEnv,
        lambda context: gym.make("CartPole-v1"),
        gym.make("CartPole-v1"),
    ],
)
def test_checkpoint_continues_in_another_environment(algorithm, tmp_path, env):
    path = algorithm.save(tmp_path / "checkpoint")
    with PPO.from_checkpoint(path, env=env, config={"lr": 1e-5}) as restored:
        assert restored.config.env is env
        assert restored.config.lr == 1e-5
        restored.train()
        assert restored.iteration == algorithm.iteration + 1
    with pytest.raises(ConfigError, match="env is given twice"):
        PPO.from_checkpoint(path, env=env, config={"env": "CartPole-v1"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mdoel", "Did you mean 'config.model'?"),
        ("polycy", "For 'policy', use get_policy()."),
        ("trian", "Did you mean 'train'?"),
        ("train_batch_siz", "Did you mean 'config.train_batch_size'?"),
        ("lr", "It is the setting algorithm.config.lr."),
        ("learning_rate", "It is the setting algorithm.config.lr."),
        ("num_env_runners", "It is the setting algorithm.config.num_workers."),
        ("anneal_lr", 'Use a schedule, `lr=[["0%", 3e-4], ["100%", 0.0]]`.'),
    ],
)
def test_unknown_attribute_has_a_hint(algorithm, name, hint):
    with pytest.raises(AttributeError) as error:
        getattr(algorithm, name)
    assert str(error.value) == f"PPO has no attribute {name!r}. {hint}"
    assert not hasattr(algorithm, name)


def test_attribute_error_in_a_property_is_not_replaced():
    class Broken(PPO):
        @property
        def learner(self):
            return None.missing

    with Broken("CartPole-v1", **SMALL) as algorithm, pytest.raises(AttributeError) as error:
        algorithm.learner  # noqa: B018
    assert str(error.value) == "'NoneType' object has no attribute 'missing'"


def test_setting_cannot_be_assigned_to_an_algorithm(algorithm):
    for name in ("lr", "learning_rate"):
        with pytest.raises(ConfigError) as error:
            setattr(algorithm, name, 1e-9)
        assert str(error.value) == (
            f"PPO.{name} cannot be assigned: it is the setting algorithm.config.lr, and a built "
            "algorithm keeps its settings. Set it in PPO(env, lr=…), give a schedule, lr=[[env "
            "step, value], …], or continue with PPO.from_checkpoint(path, config={'lr': …})"
        )
        assert not hasattr(algorithm, name)
    with pytest.raises(ConfigError, match=r"it is the setting algorithm.config.num_workers.*num_w"):
        algorithm.num_env_runners = 2
    with pytest.raises(ConfigError, match=r"^PPO.batch_size cannot be assigned. Use `sgd_minibat"):
        algorithm.batch_size = 64
    message = "this PPOConfig belongs to a built algorithm and cannot be changed"
    with pytest.raises(ConfigError, match=message):
        algorithm.config.lr = 3
    algorithm.note = "my own"
    assert algorithm.note == "my own"


def test_own_class_may_have_attributes_with_names_of_other_libraries():
    class Mine(PPO):
        def setup(self, config):
            super().setup(config)
            self.num_steps = 0

    with Mine("CartPole-v1", **SMALL) as algorithm:
        assert algorithm.num_steps == 0
        with pytest.raises(ConfigError, match=r"^Mine.learning_rate cannot be assigned: it is the"):
            algorithm.learning_rate = 1e-9


@pytest.mark.parametrize("name", ["lr", "clip_param", "num_env_runners", "device"])
def test_setting_as_an_argument_of_from_checkpoint_names_the_config(name):
    with pytest.raises(TypeError, match=rf"it has no argument '{name}'\. Use config={{'{name}': …"):
        PPO.from_checkpoint("run", **{name: 1})


def test_env_steps_continue_after_a_checkpoint(algorithm, tmp_path):
    before = algorithm.env_steps
    steps = algorithm.train()["timesteps_total"]
    assert algorithm.env_steps == steps > before
    with PPO.from_checkpoint(algorithm.save(tmp_path / "checkpoint")) as restored:
        assert restored.env_steps == steps


@pytest.mark.parametrize("method", ["train", "learn"])
def test_method_that_is_called_on_the_class_says_so(method):
    with pytest.raises(TypeError, match=rf"^{method}\(\): call it on an object: algo\.{method}"):
        getattr(PPO, method)()
