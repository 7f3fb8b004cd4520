"""Checks at the start of training: schedules that end it, plans that never train."""

import logging
from collections import deque
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from torch import nn

from flowrl import DQN, PPO, PPOConfig
from flowrl.algorithms.a2c import A2C, A2CConfig
from flowrl.algorithms.appo import APPOConfig
from flowrl.algorithms.sac import SACConfig
from flowrl.algorithms.td3 import DDPGConfig
from flowrl.envs import make_multi_agent
from flowrl.errors import ConfigError, OfflineDataError
from flowrl.ops import (
    ConcatBatches,
    ParallelRollouts,
    ReadParquet,
    StandardMetricsReporting,
    TrainOneStep,
    WriteParquet,
    synchronous_parallel_sample,
    train_one_step,
)
from flowrl.policies import Policy, PolicySpec
from flowrl.policies.config import ModelConfig
from flowrl.trainer.algorithm import Algorithm
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.plan_settings import plan_config
from flowrl.trainer.start_checks import check_start, warn_of_unused_policies
from tests.extras import require_extra

TO_ZERO = [(0, 1e-3), (1000, 0.0)]
PERCENT = [("0%", 1e-3), ("100%", 0.0)]


def small(**settings):
    return A2CConfig(
        **{
            "env": "CartPole-v1",
            "train_batch_size": 32,
            "model": {"fcnet_hiddens": [8]},
            "seed": 0,
            **settings,
        }
    )


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        (PPOConfig, {"kl_target": 0.02}, "kl_target: no effect, because kl_coeff is 0.0"),
        (APPOConfig, {"kl_target": 0.02}, "kl_target: no effect, because kl_coeff is 0.0"),
        (A2CConfig, {"use_gae": False, "lambda_": 1.0}, "lambda_: no effect, because use_gae is F"),
        (SACConfig, {"target_entropy": None, "entropy_lr": 1e-3}, "because target_entropy is None"),
        (DDPGConfig, {"target_noise_clip": 0.1}, "no effect, because target_noise is 0.0"),
        (A2CConfig, {"grad_clip": None, "grad_clip_by": "value"}, "because grad_clip is None"),
        (A2CConfig, {"grad_clip": None}, None),
        (PPOConfig, {"kl_target": 0.02, "kl_coeff": 0.1}, None),
    ],
)
def test_settings_without_effect_are_reported(config, settings, reason, caplog):
    env = "Pendulum-v1" if config in (SACConfig, DDPGConfig) else "CartPole-v1"
    algorithm = config(env=env, model={"fcnet_hiddens": [8]}, seed=0, **settings).build()
    with algorithm, caplog.at_level(logging.WARNING, "flowrl"):
        algorithm.check_start()
    found = [text for text in caplog.messages if "no effect, because" in text]
    assert len(found) == (reason is not None)
    assert reason is None or reason in found[0]


def warnings_at_start(algorithm, caplog, iterations=2):
    """Train; return the warnings about schedules and plans."""
    with algorithm, caplog.at_level(logging.WARNING, "flowrl"):
        for _ in range(iterations):
            algorithm.train()
    words = ("after that. A schedule", "has no operator that trains")
    return [text for text in caplog.messages if any(word in text for word in words)]


# -- schedules ---------------------------------------------------------------------------------


def test_learning_rate_that_reaches_0_early_is_reported_once(caplog):
    (warning,) = warnings_at_start(small(lr=TO_ZERO, total_timesteps=5000).build(), caplog)
    assert "lr is 0 from env step 1,000 of 5,000 on" in warning


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": TO_ZERO},  # the length of the training is unknown
        {"lr": TO_ZERO, "total_timesteps": 1000},
        {"lr": PERCENT, "total_timesteps": 5000},
        {"lr": 0.0, "total_timesteps": 5000},
        {"entropy_coeff": TO_ZERO, "total_timesteps": 5000},
    ],
)
def test_other_schedules_are_not_reported(caplog, settings):
    assert not warnings_at_start(small(**settings).build(), caplog, iterations=1)


def test_learning_rates_of_parts_and_of_policies_are_reported(caplog):
    config = SACConfig(
        env="Pendulum-v1", actor_lr=TO_ZERO, total_timesteps=5000, learning_starts=10,
        min_sample_timesteps_per_iteration=20, train_batch_size=8,
        model={"fcnet_hiddens": [8]},
    )  # fmt: skip
    (warning,) = warnings_at_start(config.build(), caplog, iterations=1)
    assert warning.startswith("actor_lr is 0")
    caplog.clear()
    plan = plan_config("ppo_dqn")
    specs = {
        "ppo": PolicySpec(config=plan.policies["ppo"].config.updated(lr=TO_ZERO)),
        "dqn": plan.policies["dqn"],
    }
    config = plan.updated(policies=specs, min_sample_timesteps_per_iteration=64)
    (warning,) = warnings_at_start(config.build(plan="ppo_dqn"), caplog, iterations=1)
    assert warning.startswith("policies.ppo.config.lr is 0 from env step 1,000 of 100,000")


def test_schedule_in_percent_needs_the_length_of_the_training():
    with small(lr=PERCENT).build() as algorithm:
        algorithm.evaluate(1)
        with pytest.raises(ConfigError, match="lr: a schedule in percent needs total_timesteps"):
            algorithm.train()
        algorithm.workers.set_total_timesteps(320)
        lrs = []
        for _ in range(10):
            lrs.append(algorithm.train()["learners"]["default_policy"]["cur_lr"])
    # each update has the value at which the sampling of its batch began: the last one is not 0
    assert lrs == pytest.approx([1e-3 * (1 - i / 10) for i in range(10)])


@pytest.mark.slow_on_actors
def test_total_that_is_set_later_reaches_all_workers_and_checkpoints(tmp_path, num_workers):
    exploration = {"type": "EpsilonGreedy", "epsilon": [("0%", 1.0), ("100%", 0.0)]}
    settings = {"lr": PERCENT, "exploration_config": exploration, "num_workers": num_workers}
    with small(**settings).build() as algorithm:
        algorithm.workers.set_total_timesteps(320)
        algorithm.train()
        totals = algorithm.workers.foreach_worker(lambda worker: worker.policy.total_timesteps)
        assert totals == [320] * (num_workers + 1)
        algorithm.save(tmp_path / "c")
    policy = Policy.from_checkpoint(tmp_path / "c")
    assert policy.scheduled(PERCENT) == pytest.approx(1e-3 * (1 - 32 / 320))
    policy.compute_actions(np.zeros((1, 4), np.float32))
    for changes, total in (({}, 320), ({"total_timesteps": 640}, 640)):
        with Algorithm.from_checkpoint(tmp_path / "c", config=changes) as algorithm:
            result = algorithm.train()
            assert algorithm.evaluate(1, explore=True)["episodes"] == 1
        lr = result["learners"]["default_policy"]["cur_lr"]
        assert lr == pytest.approx(1e-3 * (1 - 32 / total))


def test_all_policies_follow_the_total_of_the_run():
    config = plan_config("ppo_dqn").updated(total_timesteps=400)
    with config.build(plan="ppo_dqn") as algorithm:
        policies = algorithm.workers.local_worker().policy_map
        assert {policy.total_timesteps for policy in policies.values()} == {400}
        policies["dqn"].on_global_var_update({"timestep": 400})
        assert policies["dqn"].exploration.epsilon(policies["dqn"]) == 0.01


# -- plans that never train --------------------------------------------------------------------


def with_plan(make_train, **settings):
    """Return an A2C whose plan reports make_train(rollouts, workers)."""

    def execution_plan(workers, config):
        rollouts = ParallelRollouts(workers, mode="bulk_sync")
        return StandardMetricsReporting(make_train(rollouts, workers), workers, config)

    cls = type("Custom", (A2C,), {"execution_plan": staticmethod(execution_plan)})
    return cls(small(**settings))


def test_plan_that_never_trains_is_reported_once(caplog):
    algorithm = with_plan(lambda rollouts, workers: rollouts.combine(ConcatBatches(64)))
    (warning,) = warnings_at_start(algorithm, caplog)
    assert "the plan samples, but has no operator that trains" in warning
    assert "for_each(TrainOneStep(workers))" in warning


def test_plan_file_that_never_trains_is_reported(caplog, tmp_path):
    file = tmp_path / "samples_only.py"
    file.write_text(
        "from flowrl.algorithms.a2c import A2CConfig\n"
        "from flowrl.ops import ParallelRollouts, StandardMetricsReporting\n"
        "config = A2CConfig(env='CartPole-v1', train_batch_size=32)\n"
        "def execution_plan(workers, config):\n"
        "    return StandardMetricsReporting(ParallelRollouts(workers), workers, config)\n"
    )
    (warning,) = warnings_at_start(plan_config(str(file)).build(plan=str(file)), caplog)
    assert "samples_only.py" in warning


class Constant(Policy):
    """A policy that does not learn."""

    def compute_actions(self, obs_batch, explore=True):
        return np.zeros(len(obs_batch), np.int64), [], {}


def train_by_hand(workers):
    def learn(batch):
        workers.local_worker().learn_on_batch(batch)
        return batch

    learn.trains, learn.policies = True, None
    return learn


@pytest.mark.parametrize(
    ("make_train", "settings"),
    [
        (lambda rollouts, workers: rollouts.for_each(TrainOneStep(workers)), {}),
        (lambda rollouts, workers: rollouts.for_each(train_by_hand(workers)), {}),
        (lambda rollouts, workers: rollouts, {"explore": False}),
        (lambda rollouts, workers: rollouts, {"policies_to_train": []}),
        (lambda rollouts, workers: rollouts, {"output": "recorded"}),
        (lambda rollouts, workers: rollouts.for_each(WriteParquet("recorded")), {}),
        (lambda rollouts, workers: rollouts,
         {"policies": {"default_policy": PolicySpec(policy_class=Constant)}}),
    ],
    ids=["trains", "by_hand", "greedy", "frozen", "output", "records", "fixed_policy"],
)  # fmt: skip
def test_plans_that_train_or_are_not_meant_to_are_not_reported(
    caplog, tmp_path, monkeypatch, make_train, settings
):
    require_extra("offline")
    monkeypatch.chdir(tmp_path)
    assert not warnings_at_start(with_plan(make_train, **settings), caplog, iterations=1)


def test_training_steps_are_not_reported(caplog):
    class ByHand(A2C):
        def training_step(self):
            batch = synchronous_parallel_sample(worker_set=self.workers, max_env_steps=32)
            return train_one_step(self, batch)

    assert not warnings_at_start(ByHand(small()), caplog, iterations=1)
    config = AlgorithmConfig(env="CartPole-v1", train_batch_size=32)
    base = type("Base", (Algorithm,), {"policy_class": A2C.policy_class})
    assert not warnings_at_start(base(config), caplog, iterations=1)


class Window:
    """An operator with a state that checkpoints cannot contain."""

    def __init__(self, state):
        self.state = state

    def __call__(self, batch):
        return batch

    def state_dict(self):
        return {"last": self.state}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(("state", "kind"), [(deque(), "deque"), ({1}, "set"), (b"x", "bytes")])
def test_operator_state_that_cannot_be_saved_is_an_error_before_training(state, kind):
    def plan(workers, config):
        rollouts = ParallelRollouts(workers).for_each(Window(state))
        train = rollouts.for_each(TrainOneStep(workers))
        return StandardMetricsReporting(train, workers, config)

    with small().build(plan=plan) as algorithm:
        message = (
            rf"for_each\(Window\) .*test_start_checks.py.*last is of type {kind}, .*NumPy arrays"
        )
        with pytest.raises(ConfigError, match=message):
            algorithm.train()
        assert algorithm.workers.local_worker().env_steps == 0


# -- custom models -----------------------------------------------------------------------------


class Linear(nn.Linear):
    def __init__(self, obs_space, action_space, num_outputs):
        super().__init__(obs_space.shape[0], num_outputs)
        self.values = nn.Linear(obs_space.shape[0], 1)

    def forward(self, obs):
        return super().forward(obs), self.values(obs)


def make_network(obs_space, action_space, num_outputs, model_config, name):
    return Linear(obs_space, action_space, num_outputs)


@pytest.mark.parametrize(
    ("config", "model", "unused"),
    [
        (small(), {"custom_model": Linear}, "model.fcnet_hiddens"),
        (small(model={}), {"custom_model": Linear, "fcnet_hiddens": [9]}, "model.fcnet_hiddens"),
        (
            small(model={}),
            {"custom_model": Linear, "fcnet_activation": "relu", "vf_share_layers": True},
            "model.fcnet_activation, model.vf_share_layers",
        ),
        (small(model={}), {"custom_model": Linear}, None),
        (
            small(model={}),
            {"custom_model": Linear, "max_seq_len": 5, "burn_in": 5, "matrix_products": "torch"},
            "model.max_seq_len, model.burn_in, model.matrix_products",
        ),
        (small(), {"custom_model": make_network}, None),
        (plan_config("dqn"), {"custom_model": Linear}, None),
        (plan_config("dqn"), {"custom_model": Linear, "fcnet_hiddens": [9]}, "model.fcnet_hiddens"),
    ],
)
def test_network_settings_that_a_custom_model_does_not_receive_are_reported(
    caplog, config, model, unused
):
    config = config.updated(model=model, min_sample_timesteps_per_iteration=32, seed=1)
    with config.build() as algorithm, caplog.at_level(logging.WARNING, "flowrl"):
        for _ in range(2):
            algorithm.train()
    found = [text for text in caplog.messages if "no effect" in text]
    assert len(found) == (unused is not None)
    assert all(text.startswith(f"policy default_policy: {unused}: no effect") for text in found)


class ImageEnv(gym.Env):
    observation_space = gym.spaces.Box(0, 255, (8, 8, 1), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.low, {}

    def step(self, action):
        return self.observation_space.low, 1.0, True, False, {}


@pytest.mark.parametrize("model", [{"fcnet_hiddens": [9]}, {"post_fcnet_hiddens": [9]}, {}])
def test_hidden_layers_that_networks_for_images_do_not_have_are_reported(caplog, model):
    config = small(env=ImageEnv, model={"conv_filters": [[4, 8, 8]], **model})
    with config.build() as algorithm, caplog.at_level(logging.WARNING, "flowrl"):
        algorithm.train()
    found = [text for text in caplog.messages if "no effect" in text]
    assert len(found) == ("fcnet_hiddens" in model)
    assert all("model.fcnet_hiddens: no effect, because the observation is" in t for t in found)


def test_own_defaults_of_an_algorithm_are_not_reported(caplog):
    settings = {"env": "Pendulum-v1", "seed": 1, "min_sample_timesteps_per_iteration": 10}
    settings |= {"learning_starts": 20, "train_batch_size": 16}
    for model in ({"custom_model": Linear}, ModelConfig(custom_model=Linear)):
        with SACConfig(**settings, model=model).build() as algorithm:
            algorithm.train()
    assert not [text for text in caplog.messages if "no effect" in text]


class Large(gym.Env):
    """Observations with the bounds 0 and 255."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, shape=(12, 12, 1), dtype="float32", high=255.0, nested=False):
        high = np.broadcast_to(np.asarray(high, dtype), shape)
        box = gym.spaces.Box(np.zeros(shape, dtype), high, shape, dtype)
        self.observation_space = gym.spaces.Dict(a=box) if nested else box

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, True, {}


@pytest.mark.parametrize(
    ("env_config", "settings", "remedy"),
    [
        ({}, {}, "return images as uint8"),
        ({"shape": (3,)}, {}, "scale them"),
        ({"shape": (3,), "nested": True}, {}, "scale them"),
        ({"shape": (3,)}, {"normalize_observations": True}, None),
        ({"dtype": "uint8"}, {}, None),
        ({"high": 1.0}, {}, None),
        ({"shape": (3,), "high": np.inf}, {}, None),
        ({"shape": (3,), "high": 3e38}, {}, None),
        ({"shape": (3,), "high": [255, np.inf, 1]}, {}, "scale them"),
    ],
)
def test_large_observations_are_a_warning(env_config, settings, remedy, caplog):
    model = {"conv_filters": [[4, 4, 2]], "post_fcnet_hiddens": [8]}
    if "shape" in env_config:
        model = {"fcnet_hiddens": [8]}
    small = {"train_batch_size": 8, "num_sgd_iter": 1, "sgd_minibatch_size": 0, "seed": 0}
    with PPO(Large, env_config=env_config, model=model, **small, **settings) as algorithm:
        check_start(algorithm.config, algorithm.workers, algorithm.plan.stage)
    found = [text for text in caplog.messages if "observations may be as large as 255" in text]
    assert len(found) == (remedy is not None)
    assert all(remedy in text for text in found)


def test_policy_that_no_agent_uses_is_a_warning(caplog):
    counters = {"num_agent_steps_sampled/a": 10, "num_agent_steps_sampled": 10}
    warn_of_unused_policies(counters, ["a", "b", "c"])
    assert "no agent has used 'b' or 'c' so far: does policy_mapping_fn return them?" in caplog.text
    caplog.clear()
    warn_of_unused_policies(counters, ["a"])
    warn_of_unused_policies({}, ["a", "b"])  # the plan does not count them
    assert caplog.text == ""


def test_unused_policy_is_reported_by_training(caplog):
    settings = {"train_batch_size": 32, "sgd_minibatch_size": 0, "num_sgd_iter": 1, "seed": 0}
    two = {"policies": ["p", "q"], "policy_mapping_fn": lambda *args, **kwargs: "p"}
    with PPO(make_multi_agent("CartPole-v1"), **two, **settings) as algorithm:
        algorithm.train()
        algorithm.train()
    assert caplog.text.count("no agent has used 'q' so far") == 1


class Small(gym.Env):
    """Episodes of seven steps; the reward of step 4 and the result of step 5 can be chosen."""

    observation_space = gym.spaces.Box(-1, 1, (3,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, reward=1.0, parts=5):
        self.reward, self.parts = reward, parts

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.t += 1
        reward = self.reward if self.t == 4 else 1.0
        return (np.zeros(3, np.float32), reward, self.t == 7, False, {})[: self.parts]


@pytest.mark.parametrize("setting", ["normalize_observations", "normalize_rewards"])
def test_normalized_rows_are_not_recorded(tmp_path, setting):
    require_extra("offline")
    algorithm = PPO(Small, output=str(tmp_path), **{setting: True})
    with algorithm, pytest.raises(ConfigError, match=r"output: .* normalized"):
        algorithm.train()


def records(workers, config, folder):
    rollouts = ParallelRollouts(workers).for_each(WriteParquet(folder))
    train = rollouts.for_each(TrainOneStep(workers))
    return StandardMetricsReporting(train, workers, config)


@pytest.mark.parametrize("setting", ["normalize_observations", "normalize_rewards"])
def test_normalized_rows_are_neither_written_nor_read_by_a_plan(tmp_path, setting):
    require_extra("offline")

    def reads(workers, config):
        recorded = ReadParquet(workers, tmp_path, 10).for_each(TrainOneStep(workers))
        return StandardMetricsReporting(recorded, workers, config)

    for plan, name in ((partial(records, folder=tmp_path), "WriteParquet"), (reads, "ReadParquet")):
        algorithm = PPOConfig(env=Small, **{setting: True}).build(plan)
        with algorithm, pytest.raises(ConfigError, match=rf"{name}.*chained at .* normalized"):
            algorithm.train()


class IntegerKeys(Small):
    observation_space = spaces.Dict({0: spaces.Box(-1, 1, (3,), np.float32)})

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return {0: obs}, info

    def step(self, action):
        obs, *rest = super().step(action)
        return ({0: obs}, *rest)


class IntegerKeysOfActions(Small):
    choices = spaces.Dict({0: spaces.Discrete(2), 1: spaces.Discrete(2)})
    action_space = spaces.Tuple([choices])


def test_dicts_with_integer_keys_are_not_recorded(tmp_path):
    require_extra("offline")
    with PPO(IntegerKeys, train_batch_size=16, sgd_minibatch_size=16) as algorithm:
        algorithm.train()  # other runs may have them
    for env, what in ((IntegerKeys, "observations"), (IntegerKeysOfActions, "actions")):
        algorithm = PPO(env, output=str(tmp_path))
        message = f"output: the {what} of .* keys that are not strings"
        with algorithm, pytest.raises(ConfigError, match=message):
            algorithm.train()


def test_policies_that_read_no_rows_may_be_normalized(tmp_path):
    require_extra("offline")

    def plan(workers, config):
        folder, own = tmp_path / "rows", {"policy_id": "a", "columns": ("obs", "actions")}
        recorded = ReadParquet(workers, folder, 10, **own).for_each(TrainOneStep(workers, ["a"]))
        return StandardMetricsReporting(recorded, workers, config)

    normalized = PolicySpec(config={"normalize_observations": True})
    policies = {"a": None, "b": normalized}
    config = PPOConfig(env=Small, policies=policies, policy_mapping_fn=lambda *a, **k: "b")
    with config.build(plan) as algorithm, pytest.raises(OfflineDataError, match="no such folder"):
        algorithm.train()


def test_exponent_in_percent_needs_the_total_of_the_buffer():
    beta = [["0%", 0.4], ["100%", 1.0]]
    settings = {"learning_starts": 100, "seed": 1, "prioritized_replay_beta": beta}
    for total in (None, 400):
        algorithm = DQN("CartPole-v1", total_timesteps=total, **settings)
        with algorithm, pytest.raises(ConfigError, match=r"prioritized_replay_beta: .*setting"):
            algorithm.learn(500, run_dir=None, progress=False)
    with DQN("CartPole-v1", total_timesteps=500, **settings) as algorithm:
        algorithm.learn(500, run_dir=None, progress=False)
        assert algorithm.env_steps >= 500
        with pytest.raises(ConfigError, match=r"prioritized_replay_beta: .*total_timesteps=900"):
            algorithm.learn(900, run_dir=None, progress=False)
        algorithm.train()  # with the total of before


@pytest.mark.parametrize("reward", [None, "x", np.ones(2)])
@pytest.mark.parametrize("handling", ["warn", "drop", "replace"])
def test_reward_that_is_no_number_is_an_error_in_any_step(reward, handling):
    settings = {"env_config": {"reward": reward}, "on_invalid_step": handling}
    with PPO(Small, train_batch_size=200, **settings) as algorithm:
        with pytest.raises(ConfigError, match=r"step\(\) returned the reward"):
            algorithm.train()
        assert algorithm.workers.local_worker().reply_tags()["env_restarts"] == 0


def test_horizon_keeps_the_message_about_four_values():
    algorithm = PPO(Small, env_config={"parts": 4}, horizon=10, train_batch_size=200)
    with algorithm, pytest.raises(ConfigError, match="the environment returned 4 values"):
        algorithm.train()


def test_horizon_truncates_episodes():
    algorithm = PPO(Small, horizon=5, train_batch_size=200, seed=1)
    with algorithm:
        assert algorithm.train()["episode_len_mean"] == 5


@pytest.mark.filterwarnings("error")
def test_float16_observations_raise_no_warning_of_numpy():
    class Half(Small):
        observation_space = gym.spaces.Box(-1, 1, (3,), np.float16)

        def reset(self, **kwargs):
            return super().reset(**kwargs)[0].astype(np.float16), {}

        def step(self, action):
            obs, *rest = super().step(action)
            return obs.astype(np.float16), *rest

    with PPO(Half, train_batch_size=40, sgd_minibatch_size=0) as algorithm:
        algorithm.check_start()


def test_settings_of_evaluations_without_an_interval_are_reported(caplog):
    for interval, is_reported in ((None, True), (1, False)):
        caplog.clear()
        config = PPOConfig(env="CartPole-v1", evaluation_num_workers=1)
        with config.updated(evaluation_interval=interval).build() as algorithm:
            algorithm.check_start()
        message = "evaluation_num_workers: no effect without evaluation_interval"
        assert (message in caplog.text) == is_reported


def test_settings_that_no_policy_has_are_reported(caplog):
    own = PPOConfig(model={"fcnet_hiddens": [8]})
    policies = {"default_policy": PolicySpec(config=own)}
    settings = {"train_batch_size": 128, "rollout_fragment_length": 128, "seed": 0}
    message = "gamma, lr: no effect, because every policy has its own settings"
    same = {"lr": own.lr, "num_sgd_iter": 2, "sgd_minibatch_size": 64}  # plans use the others
    cases = ({"lr": 0.5, "gamma": 0.1}, True), ({}, False), (same, False)
    for changes, is_reported in cases:
        caplog.clear()
        with PPO("CartPole-v1", policies=policies, **changes, **settings) as algorithm:
            algorithm.train()
        assert (message in caplog.text) == ("no effect" in caplog.text) == is_reported
