"""AlgorithmConfig: groups, aliases, copies, schema, validation."""

import argparse
import inspect
import json
import re
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.algorithms.apex import APEXConfig
from flowrl.algorithms.cql import CQLConfig
from flowrl.algorithms.ddppo import DDPPOConfig
from flowrl.algorithms.dqn import DQN, DQNConfig, DQNTorchPolicy
from flowrl.algorithms.impala import IMPALAConfig
from flowrl.algorithms.marwil import BCConfig, MARWILConfig
from flowrl.algorithms.ppo import PPO, PPOConfig, PPOTorchPolicy
from flowrl.algorithms.r2d2 import R2D2Config
from flowrl.algorithms.sac import SACConfig
from flowrl.algorithms.simple_q import SimpleQConfig
from flowrl.cli.flags import settings_from_flags
from flowrl.cli.help import format_help
from flowrl.policies import ConfigError, PolicySpec
from flowrl.policies.code_references import CodeResolver
from flowrl.policies.config import ExplorationConfig, ModelConfig
from flowrl.policies.json_codec import config_from_json, config_to_json, decode, encode
from flowrl.setting_aliases import SETTING_ALIASES
from flowrl.settings import Settings, setting
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.evaluation import evaluation_settings
from flowrl.trainer.start_checks import has_schedule_in_percent


class Inner(Settings):
    x: int = 0


class Middle(Settings):
    inner: Inner = Inner()


class Outer(Settings):
    middle: Middle = Middle()


CONFIGS = [AlgorithmConfig, A2CConfig, PPOConfig, DQNConfig, SimpleQConfig]


@pytest.mark.parametrize("config", CONFIGS)
def test_group_methods_document_their_settings(config):
    groups = {info.name: info.group for info in config.describe()}
    assert set(groups.values()) == set(config.groups())
    for name, group in groups.items():
        method = getattr(config, group)
        assert f"    {name}: " in method.__doc__, f"{group}: {name}"
        assert name in inspect.signature(method).parameters


class ConfigWithNewSetting(PPOConfig):
    """PPO's settings plus one."""

    new_setting: int = setting(3, group="rollouts", in_evaluation=True, ge=1)
    """Meaning of the new setting."""


def test_new_setting_is_declared_once_and_found_everywhere():
    config = ConfigWithNewSetting(env="CartPole-v1", train_batch_size=200).rollouts(new_setting=5)
    assert config.new_setting == config["new_setting"] == 5
    with pytest.raises(ConfigError, match=r"new_setting: input should be greater than or equal"):
        config.rollouts(new_setting=0)
    with pytest.raises(ConfigError, match=r"It belongs to \.rollouts\(\)"):
        config.training(new_setting=5)
    assert "new_setting: Meaning of the new setting. Default: 3." in config.rollouts.__doc__
    assert inspect.signature(ConfigWithNewSetting.rollouts).parameters["new_setting"].default == 3
    assert "new_setting" not in PPOConfig.rollouts.__doc__

    flags = settings_from_flags(ConfigWithNewSetting(), ["--new-setting", "7"], {})
    assert flags.new_setting == 7
    help_text = format_help(argparse.ArgumentParser(add_help=False), config, show_all=False)
    assert "--new-setting INT" in help_text
    assert "Meaning of the new setting. (default: 5)" in " ".join(help_text.split())

    evaluation = config.updated(evaluation_config={"new_setting": 9})
    evaluation.check()
    assert evaluation_settings(evaluation).new_setting == 9
    with pytest.raises(ConfigError, match="evaluations do not use the setting"):
        config.updated(evaluation_config={"train_batch_size": 9}).check()

    with config.build() as algorithm:
        assert algorithm.workers.local_worker().config.new_setting == 5
    schema = ConfigWithNewSetting.json_schema()["properties"]["new_setting"]
    assert (schema["description"], schema["group"]) == ("Meaning of the new setting.", "rollouts")
    row = "| `new_setting` | rollouts | `int` | `3` | Meaning of the new setting. |"
    assert row in ConfigWithNewSetting.reference()


def test_other_name_of_rollouts_sets_the_same_settings():
    config = PPOConfig().env_runners(num_env_runners=2, num_envs_per_env_runner=3)
    assert (config.num_workers, config.num_envs_per_worker) == (2, 3)


@pytest.mark.parametrize("config", [*CONFIGS, ModelConfig, ExplorationConfig])
def test_every_setting_has_a_description(config):
    for name, field in config.model_fields.items():
        assert field.description, name


@pytest.mark.parametrize("config", CONFIGS)
def test_json_schema_has_every_setting(config):
    schema = config.json_schema()
    assert set(schema["properties"]) == set(config.model_fields)
    assert schema["properties"]["gamma"]["description"]
    json.dumps(schema)


def test_fluent_groups_return_the_config():
    config = (
        PPOConfig()
        .environment(env="CartPole-v1")
        .rollouts(num_workers=1)
        .training(lr=1e-3)
        .multi_agent(count_steps_by="agent_steps")
        .exploration(explore=False)
        .evaluation(evaluation_interval=3)
        .resources(num_cpus_per_worker=0.5)
        .framework("torch", precision="bfloat16")
        .fault_tolerance(max_num_worker_restarts=3)
        .reporting(min_sample_timesteps_per_iteration=5)
        .checkpointing(checkpoint_frequency=2)
        .debugging(seed=1)
    )
    assert set(config.diff()) == {
        "env", "num_workers", "lr", "count_steps_by", "explore", "evaluation_interval",
        "num_cpus_per_worker", "precision", "max_num_worker_restarts",
        "min_sample_timesteps_per_iteration", "checkpoint_frequency", "seed",
    }  # fmt: skip
    restored = PPOConfig.from_dict(config.to_dict())
    assert restored == config
    assert restored.diff(config) == {}
    assert config.validate() is config


def test_copy_shares_no_state_with_the_original():
    config = PPOConfig(env="CartPole-v1", env_config={"a": 1}, model={"fcnet_hiddens": [8]})
    copy = config.copy()
    copy.training(lr=0.5, model={"fcnet_hiddens": [9]})
    copy.env_config["a"] = 2
    copy.model.fcnet_activation = "relu"
    assert config.lr == 3e-4
    assert config.env_config == {"a": 1}
    assert config.model.fcnet_hiddens == [8]
    assert config.model.fcnet_activation == "tanh"
    assert copy.diff(config)["model.fcnet_hiddens"] == ([8], [9])


def test_config_of_algorithm_is_frozen_and_config_of_user_is_not():
    config = A2CConfig(env="CartPole-v1", train_batch_size=32)
    with config.build() as algorithm:
        for change in (
            lambda c: setattr(c, "lr", 0.1),
            lambda c: c.training(lr=0.1),
            lambda c: setattr(c.model, "fcnet_hiddens", [3]),
        ):
            with pytest.raises(ConfigError, match="cannot be changed: change a copy"):
                change(algorithm.config)
        config.training(lr=0.1)
        assert algorithm.config.lr == 3e-4
        assert algorithm.config.copy().training(lr=0.2).lr == 0.2
    assert ModelConfig().updated(fcnet_hiddens=[3]).fcnet_hiddens == [3]


def test_frozen_settings_freeze_records_at_any_depth():
    frozen = Outer(middle=Middle(inner=Inner(x=1))).frozen()
    for change in (
        lambda: setattr(frozen, "middle", Middle()),
        lambda: setattr(frozen.middle, "inner", Inner()),
        lambda: setattr(frozen.middle.inner, "x", 2),
    ):
        with pytest.raises(ConfigError, match="cannot be changed"):
            change()
    copy = frozen.copy()
    copy.middle.inner.x = 2
    assert (copy.middle.inner.x, frozen.middle.inner.x) == (2, 1)


@pytest.mark.parametrize(
    "name", [n for n in SETTING_ALIASES if SETTING_ALIASES[n] in PPOConfig.model_fields]
)
def test_aliases_are_accepted_with_a_log_message(name, caplog):
    setting_name = SETTING_ALIASES[name]
    default = PPOConfig()[setting_name]
    value = {"model": {}, "callbacks_class": None}.get(setting_name, default)
    assert PPOConfig(**{name: value})[setting_name] == default
    assert name in ("lambda", "callbacks") or f"{name} is called {setting_name}" in caplog.text
    with pytest.raises(ConfigError, match=f"are the same setting, {setting_name}: give"):
        PPOConfig(**{name: value, setting_name: value})


def test_alias_values_are_converted():
    assert PPOConfig(observation_filter="MeanStdFilter").normalize_observations
    assert not PPOConfig(observation_filter="NoFilter").normalize_observations
    assert PPOConfig(batch_mode="truncated_episodes").batch_mode == "truncate_episodes"
    assert PPOConfig().rollout(num_env_runners=2).num_workers == 2
    assert PPOConfig(framework="torch").diff() == {}
    assert PPOConfig(**{"lambda": 0.5}).lambda_ == 0.5


CARTPOLE = "CartPole-v1"
INVALID = [
    # names
    (PPOConfig, {"lrr": 1}, "unknown setting 'lrr'. Did you mean 'lr'"),
    (PPOConfig, {"learning_rate": 1}, "Did you mean 'lr'"),
    (PPOConfig, {"gae_lambda": 1}, "Did you mean 'lambda_'"),
    (PPOConfig, {"n_epochs": 1}, "Did you mean 'num_sgd_iter'"),
    (PPOConfig, {"ent_coef": 1}, "Did you mean 'entropy_coeff'"),
    (PPOConfig, {"vf_coef": 1}, "Did you mean 'vf_loss_coeff'"),
    (PPOConfig, {"clip_range": 1}, "Did you mean 'clip_param'"),
    (PPOConfig, {"max_grad_norm": 1}, "Did you mean 'grad_clip'"),
    (PPOConfig, {"n_steps": 1}, "Use `train_batch_size`, the env steps"),
    (PPOConfig, {"n_envs": 1}, "Did you mean 'num_envs_per_worker'"),
    (DQNConfig, {"buffer_size": 1}, "Did you mean 'replay_buffer_capacity'"),
    (DQNConfig, {"gradient_steps": 1}, "Use `training_intensity`, the rows"),
    (DQNConfig, {"target_update_interval": 1}, "Did you mean 'target_network_update_freq'"),
    (DQNConfig, {"clip_param": 0.2}, "unknown setting 'clip_param'"),
    (PPOConfig, {"tau": 0.1}, "unknown setting 'tau'"),
    (PPOConfig, {"model": {"fcnet_hidden": [1]}}, "model.fcnet_hidden'. Did you mean"),
    (PPOConfig, {"exploration_config": {"typ": "Random"}}, "Did you mean 'type'"),
    (PPOConfig, {"policy_kwargs": {}}, "Use `model={"),
    (PPOConfig, {"framework": "tf2"}, "framework: only 'torch' is supported, got 'tf2'"),
    (PPOConfig, {"exploration_config": {"type": "GaussianNoise"}}, "probabilities of actions"),
    (IMPALAConfig, {"exploration_config": {"type": "OrnsteinUhlenbeckNoise"}}, "probabilities"),
    (
        PPOConfig,
        {
            "evaluation_interval": 1,
            "evaluation_num_workers": 1,
            "evaluation_parallel_to_training": True,
            "checkpoint_score_attribute": "evaluation/episode_reward_mean",
        },
        "checkpoint_score_attribute: with evaluation_parallel_to_training",
    ),
    (PPOConfig, {"_use_trajectory_view_api": False}, "_use_trajectory_view_api"),
    (PPOConfig, {"multiagent": {"polices": {}}}, "multiagent: unknown setting 'polices'"),
    # types and ranges
    (PPOConfig, {"lr": "fast"}, "lr: expected a number or a schedule such as "),
    (PPOConfig, {"lr": [1e-3, 0]}, "lr: expected a number or a schedule such as "),
    (PPOConfig, {"lr": len}, "lr: expected a number or a schedule such as "),
    (PPOConfig, {"lr": -1e-3}, "lr: values must be from 0 to 1e+06"),
    (PPOConfig, {"lr": float("nan")}, "lr: "),
    (PPOConfig, {"lr": [(5, 1.0), (0, 0.0)]}, "lr: a schedule is a list"),
    (PPOConfig, {"lr": []}, "lr: a schedule is a list"),
    (PPOConfig, {"lr": {"initial": 1.0}}, "lr: an exponential schedule has"),
    (PPOConfig, {"gamma": 1.5}, "gamma: "),
    (PPOConfig, {"gamma": None}, "gamma: "),
    (PPOConfig, {"lambda_": -0.1}, "lambda_: "),
    (PPOConfig, {"entropy_coeff": -1.0}, "entropy_coeff: "),
    (PPOConfig, {"vf_loss_coeff": float("inf")}, "vf_loss_coeff: "),
    (PPOConfig, {"clip_param": "x"}, "clip_param: "),
    (PPOConfig, {"vf_clip_param": 0.0}, "vf_clip_param: "),
    (PPOConfig, {"kl_coeff": -1.0}, "kl_coeff: "),
    (PPOConfig, {"kl_target": 0.0}, "kl_target: "),
    (PPOConfig, {"grad_clip": 0.0}, "grad_clip: "),
    (PPOConfig, {"grad_clip_by": "size"}, "grad_clip_by: "),
    (PPOConfig, {"adam_epsilon": 0.0}, "adam_epsilon: "),
    (PPOConfig, {"microbatch_size": -1}, "microbatch_size: "),
    (DDPPOConfig, {"microbatch_size": 8, "num_workers": 2}, "microbatch_size: DD-PPO supports it"),
    (
        IMPALAConfig,
        {"microbatch_size": 8, "num_learners": 2},
        "microbatch_size: learners on actors",
    ),
    (APEXConfig, {"microbatch_size": 8, "num_gpus": 1}, "microbatch_size: learners on actors"),
    (DDPPOConfig, {"num_workers": 32}, "train_batch_size=4000, with 125 rows of each worker, is"),
    (PPOConfig, {"on_nonfinite_update": "ignore"}, "on_nonfinite_update: "),
    (PPOConfig, {"precision": "float16"}, "precision: "),
    (PPOConfig, {"seed": -1}, "seed: "),
    (PPOConfig, {"seed": 1.5}, "seed: "),
    (PPOConfig, {"num_sgd_iter": 0}, "num_sgd_iter: "),
    (PPOConfig, {"sgd_minibatch_size": -1}, "sgd_minibatch_size: "),
    (PPOConfig, {"train_batch_size": 0}, "train_batch_size: "),
    (PPOConfig, {"train_batch_size": 2.5}, "train_batch_size: "),
    (PPOConfig, {"num_workers": -1}, "num_workers: "),
    (PPOConfig, {"num_workers": "two"}, "num_workers: "),
    (PPOConfig, {"num_envs_per_worker": 0}, "num_envs_per_worker: "),
    (PPOConfig, {"rollout_fragment_length": 0}, "rollout_fragment_length: "),
    (PPOConfig, {"rollout_fragment_length": 0.5}, "rollout_fragment_length: input should be a "),
    (PPOConfig, {"batch_mode": "whole"}, "batch_mode: "),
    (PPOConfig, {"horizon": 0}, "horizon: "),
    (PPOConfig, {"soft_horizon": "maybe"}, "soft_horizon: "),
    (PPOConfig, {"on_invalid_step": "hide"}, "on_invalid_step: "),
    (PPOConfig, {"vectorization_mode": "gpu"}, "vectorization_mode: "),
    (PPOConfig, {"env_config": 3}, "env_config: "),
    (PPOConfig, {"count_steps_by": "seconds"}, "count_steps_by: "),
    (PPOConfig, {"num_cpus_per_worker": -1}, "num_cpus_per_worker: "),
    (PPOConfig, {"max_num_env_restarts": -1}, "max_num_env_restarts: "),
    (PPOConfig, {"sample_timeout_s": 0}, "sample_timeout_s: "),
    (PPOConfig, {"delay_between_worker_restarts_s": -1}, "delay_between_worker_restarts_s: "),
    (PPOConfig, {"min_time_s_per_iteration": -1}, "min_time_s_per_iteration: "),
    (PPOConfig, {"min_sample_timesteps_per_iteration": -1}, "min_sample_timesteps"),
    (PPOConfig, {"metrics_num_episodes_for_smoothing": 0}, "metrics_num_episodes"),
    (PPOConfig, {"metrics_num_episodes_for_smoothing": 10_001}, "metrics_num_episodes"),
    (PPOConfig, {"evaluation_duration": 0}, "evaluation_duration: "),
    (PPOConfig, {"evaluation_duration_unit": "s"}, "evaluation_duration_unit: "),
    (PPOConfig, {"checkpoint_num_to_keep": 0}, "checkpoint_num_to_keep: "),
    (PPOConfig, {"checkpoint_score_order": "best"}, "checkpoint_score_order: "),
    (PPOConfig, {"checkpoint_every_s": 0}, "checkpoint_every_s: "),
    (PPOConfig, {"explore": "often"}, "explore: "),
    (DQNConfig, {"tau": 2.0}, "tau: "),
    (DQNConfig, {"target_network_update_freq": -1}, "target_network_update_freq: "),
    (DQNConfig, {"n_step": 0}, "n_step: "),
    (DQNConfig, {"learning_starts": -1}, "learning_starts: "),
    (DQNConfig, {"training_intensity": 0}, "training_intensity: "),
    (DQNConfig, {"replay_buffer_capacity": 0}, "replay_buffer_capacity: "),
    (DQNConfig, {"num_replay_shards": -1}, "num_replay_shards: "),
    (DQNConfig, {"replay_mode": "both"}, "replay_mode: "),
    (DQNConfig, {"prioritized_replay_alpha": -1}, "prioritized_replay_alpha: "),
    (PPOConfig, {"model": {"fcnet_hiddens": [0]}}, "model.fcnet_hiddens"),
    (PPOConfig, {"model": {"fcnet_activation": "step"}}, "model.fcnet_activation"),
    (PPOConfig, {"model": {"num_framestacks": 0}}, "model.num_framestacks"),
    (PPOConfig, {"model": 3}, "model: "),
    (PPOConfig, {"exploration_config": {"type": "Boltzmann"}}, "exploration_config.type"),
    (DQNConfig, {"exploration_config": {"type": "EpsilonGreedy", "epsilon": 2.0}}, "at most 1"),
    # combinations
    (
        PPOConfig,
        {"sgd_minibatch_size": 9000},
        "is smaller than sgd_minibatch_size=9000",
    ),
    (PPOConfig, {"lr": True}, "lr: expected a number or a schedule"),
    (SACConfig, {"target_entropy": float("nan")}, "target_entropy: "),
    (SACConfig, {"target_entropy": True}, "target_entropy: "),
    (PPOConfig, {"model": {"attention_init_gru_gate_bias": float("inf")}}, "gru_gate_bias: "),
    (MARWILConfig, {"moving_average_sqd_adv_norm_update_rate": 2.0}, "update_rate: "),
    (IMPALAConfig, {"replay_proportion": 1.0}, "needs replay_buffer_num_slots of at least 1"),
    (IMPALAConfig, {"replay_buffer_num_slots": 9}, "needs a replay_proportion above 0"),
    (CQLConfig, {"lagrangian_thresh": 1.0}, "lagrangian_thresh needs lagrangian=True"),
    (R2D2Config, {"use_h_function": False, "h_function_epsilon": 0.1}, "needs use_h_function"),
    (PPOConfig, {"soft_horizon": True}, "soft_horizon needs a horizon"),
    (PPOConfig, {"model": {"use_lstm": True, "use_attention": True}}, "one of them"),
    (PPOConfig, {"model": {"lstm_cell_size": 8}}, "lstm_cell_size needs use_lstm=True"),
    (PPOConfig, {"model": {"attention_dim": 8}}, "attention_dim needs use_attention=True"),
    (PPOConfig, {"model": {"burn_in": 2}}, "burn_in needs use_lstm=True"),
    (PPOConfig, {"model": {"custom_model_config": {"a": 1}}}, "needs a custom_model"),
    (PPOConfig, {"exploration_config": {"scale": 0.5}}, "scale needs the type Gaussian"),
    (DQNConfig, {"replay_buffer_capacity": 10}, "is less than train_batch_size=32"),
    (
        IMPALAConfig,
        {"num_learners": 1, "policies": {"a": PolicySpec(config={"microbatch_size": 8})}},
        "learners on actors do not split minibatches",
    ),
    (DQNConfig, {"prioritized_replay": False, "prioritized_replay_alpha": 0.3}, "needs priori"),
    (DQNConfig, {"replay_mode": "lockstep"}, "draws uniformly"),
    (PPOConfig, {"evaluation_parallel_to_training": True}, "needs evaluation workers"),
    (PPOConfig, {"evaluation_timeout_s": 5.0}, "needs evaluation workers"),
    (PPOConfig, {"checkpoint_score_order": "min"}, "needs a checkpoint_score_attribute"),
    (PPOConfig, {"checkpoint_score_attribute": "scor"}, "no result has a metric 'scor'"),
    (PPOConfig, {"policies": {}}, "policies: there must be at least one"),
    (PPOConfig, {"policies": "main"}, "policies: must be a mapping"),
    (PPOConfig, {"policies": {"a": 3}}, "policies: each value must be a PolicySpec"),
    (PPOConfig, {"policies": ["a", "b"]}, "policy_mapping_fn: with the policies"),
    (PPOConfig, {"policy_mapping_fn": "main"}, "policy_mapping_fn"),
    (PPOConfig, {"policies_to_train": ["x"]}, "there is no policy 'x'"),
    (PPOConfig, {"callbacks_class": dict}, "callbacks_class: must be a subclass"),
    (PPOConfig, {"sample_collector": dict}, "sample_collector: must be a subclass"),
    (PPOConfig, {"plan": "pppo"}, "unknown plan 'pppo'. Did you mean 'ppo'"),
    (PPOConfig, {"plan": "nowhere.py"}, "there is no file 'nowhere.py'"),
    (PPOConfig, {"plan": None}, "plan: no execution plan is set"),
    (PPOConfig, {"env": None}, "env: no environment is set"),
    (PPOConfig, {"env": "CartPol-v1"}, "Did you mean 'CartPole-v"),
    (PPOConfig, {"env": 7}, "env: expected an env id, a class, a function or an environment"),
]


def test_each_invalid_setting_has_one_message():
    with pytest.raises(ConfigError) as caught:
        PPOConfig(lr="fast", rollout_fragment_length="long")
    assert str(caught.value) == (
        "lr: expected a number or a schedule such as [[0, 1e-3], [100_000, 0.0]] or "
        '[["0%", 1e-3], ["100%", 0.0]] (got \'fast\'); rollout_fragment_length: input should be '
        "a valid integer, unable to parse string as an integer, or 'auto' (got 'long')"
    )


def test_at_least_a_hundred_invalid_settings():
    assert len(INVALID) >= 100


@pytest.mark.parametrize(
    ("config", "settings", "message"), INVALID, ids=[str(s) for _, s, _ in INVALID]
)
def test_invalid_settings_are_rejected_before_anything_starts(
    config, settings, message, monkeypatch
):
    monkeypatch.setattr(gym, "make", lambda *a, **k: pytest.fail("an environment was created"))
    monkeypatch.setitem(sys.modules, "ray", None)  # an import of Ray raises an error
    with pytest.raises(ConfigError) as caught:
        config(**{"env": CARTPOLE, **settings}).build()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_policy_specs_survive_conversion_to_dict():
    config = A2CConfig(env=CARTPOLE, policies={"a": PolicySpec(config={"lr": 0.1})})
    restored = A2CConfig.from_dict(config.to_dict())
    assert restored.for_policy("a").lr == 0.1
    with pytest.raises(ConfigError, match="must be a mapping"):
        A2CConfig.from_dict([1])


def test_a_mapping_changes_settings_of_one_policy():
    policies = {"a": PolicySpec(config=DQNConfig()), "b": PolicySpec(config={"gamma": 0.5})}
    config = AlgorithmConfig(env=CARTPOLE, policies=policies)
    changes = {"a": {"config": {"lr": 0.1}}, "b": {"config": {"lr": 0.2}}}
    changed = config.updated(policies=changes)
    assert isinstance(changed.policies["a"].config, DQNConfig)
    assert [changed.for_policy(policy_id).lr for policy_id in "ab"] == [0.1, 0.2]
    assert changed.for_policy("b").gamma == 0.5
    assert config.for_policy("a").lr == DQNConfig().lr  # it is unchanged


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dqm": {"config": {}}}, "policies: no policy 'dqm'. Did you mean 'dqn'?"),
        ({"dqn": {"lr": 0.1}}, "policies.dqn: no field 'lr': change settings with {'dqn': {'conf"),
        ({"dqn": {"config": {"lrr": 1}}}, "setting 'policies.dqn.config.lrr'. Did you mean 'lr'?"),
        ({"dqn": {"config": {"lr": -1}}}, "policies.dqn.config.lr: values must be from 0"),
    ],
)
def test_invalid_changes_of_policies_are_rejected(changes, message):
    config = AlgorithmConfig(env=CARTPOLE, policies={"dqn": PolicySpec(config=DQNConfig())})
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.updated(policies=changes)


def test_aliases_work_in_updates_and_attributes():
    config = PPOConfig(env=CARTPOLE)
    assert config.updated(num_env_runners=1).num_workers == 1
    config.num_env_runners = 2
    assert config.num_workers == 2
    config.batch_mode = "truncated_episodes"
    assert config.batch_mode == "truncate_episodes"
    before = config.to_dict()
    config.framework = "torch"
    assert config.to_dict() == before
    with pytest.raises(ConfigError, match="only 'torch' is supported"):
        config.framework = "tf2"
    config.evaluation(evaluation_config={"num_envs_per_env_runner": 2}).check()
    for settings, message in (
        ({"num_env_runners": 1, "num_rollout_workers": 2}, "give only one of them"),
        (
            {"observation_filter": "Mean"},
            "observation_filter: must be 'NoFilter' or 'MeanStdFilter'",
        ),
        ({"observation_filter": ["NoFilter"]}, "observation_filter"),
        ({1: 2}, "the name of a setting must be a string"),
    ):
        with pytest.raises(ConfigError, match=message):
            PPOConfig.from_dict(settings)
    with pytest.raises(ConfigError, match=r"unknown setting 'gama'\. Did you mean 'gamma'"):
        config.gama = 1


def test_updated_copies_deeply_and_settings_cannot_be_deleted():
    config = PPOConfig(env=CARTPOLE, env_config={"a": {"b": 1}})
    other = config.updated(gamma=0.5)
    other.model.fcnet_hiddens = [8]
    other.env_config["a"]["b"] = 2
    assert config.model.fcnet_hiddens == [64, 64]
    assert config.env_config == {"a": {"b": 1}}
    with pytest.raises(ConfigError, match="cannot be deleted"):
        del config.gamma
    config.model.fcnet_hiddens.append(-1)
    with pytest.raises(ConfigError, match=r"model\.fcnet_hiddens"):
        config.validate()
    with pytest.raises(ConfigError, match="device"):
        PPOConfig(device="gpu")


def test_item_assignment_names_the_attribute_and_items_cannot_be_deleted():
    with pytest.raises(TypeError, match=r"^settings are assigned as attributes: \.lr = 1 instead"):
        PPOConfig()["lr"] = 1
    with pytest.raises(TypeError, match=r"attributes: \.fcnet_hiddens = \[8\] instead"):
        PPOConfig().model["fcnet_hiddens"] = [8]
    with pytest.raises(ConfigError, match=r"^lr: a setting cannot be deleted, only changed$"):
        del PPOConfig()["lr"]


def test_settings_are_not_positional():
    with pytest.raises(TypeError, match=r"^PPOConfig\(\): settings are keywords: PPOConfig\(\*\*"):
        PPOConfig({"lr": 1})


def test_diff_compares_arrays_by_their_elements():
    def config(array, **more):
        box = gym.spaces.Box(-1, 1, (2,))
        values = {"maps": [array], "nested": (np.float32(1), {"space": box})}
        return PPOConfig(env_config={**values, **more})

    base = config(np.arange(3))
    assert base.diff(config(np.arange(3))) == {}
    for other in (
        config(np.array([0, 1, 3])),
        config(np.arange(4)),
        config(np.zeros(0)),
        config(np.arange(3)[None]),
        config(np.arange(3), more=1),
        config([0, 1, 2]),
    ):
        assert list(base.diff(other)) == list(other.diff(base)) == ["env_config"]
    assert config(np.zeros(1)).diff(config(0)).keys() == {"env_config"}


def test_assigned_mapping_changes_only_the_settings_that_it_names():
    config = SACConfig()
    config.model = {"fcnet_hiddens": [5]}
    config.exploration_config = {}
    assert config.model.fcnet_activation == "relu"
    assert config.exploration_config.random_timesteps == 1000
    config = DQNConfig()
    config.exploration_config = {"epsilon": 0.1}
    assert config.exploration_config.type == "EpsilonGreedy"
    with pytest.raises(ConfigError, match=r"unknown setting 'model\.hidden'"):
        config.model = {"hidden": 3}
    assert config.model == DQNConfig().model


def test_restore_needs_an_env_that_the_checkpoint_cannot_hold(tmp_path, caplog):
    from flowrl.algorithms.ppo import PPO
    from flowrl.data.checkpoint import CheckpointError

    def seven_step_cartpole(_):
        return gym.make(CARTPOLE, max_episode_steps=7)

    config = PPOConfig(env=seven_step_cartpole, train_batch_size=64, sgd_minibatch_size=32, seed=1)
    with config.build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        assert "does not contain the settings ['env']" in caplog.text
        expected = algorithm.train()["episode_len_mean"]
    with pytest.raises(CheckpointError, match=r"does not contain the settings \['env'\]"):
        PPO.from_checkpoint(tmp_path / "c")
    with PPO.from_checkpoint(tmp_path / "c", config={"env": seven_step_cartpole}) as algorithm:
        assert algorithm.train()["episode_len_mean"] == expected <= 7
    with pytest.raises(ConfigError, match="a mapping of changes"):
        PPO.from_checkpoint(tmp_path / "c", config=[1])
    with pytest.raises(ConfigError, match="must be of the class DQNConfig, got PPOConfig"):
        DQN(PPOConfig(env=CARTPOLE, clip_param=0.1))


def test_settings_keep_tuples_and_keys_that_are_not_text():
    value = {"table": {0: 1.0, (1, 2): "x", frozenset("ab"): 2}, "shape": (3, 4)}
    assert decode(json.loads(json.dumps(encode(value))), CodeResolver(False)) == value


def test_folders_are_absolute_in_an_algorithm(tmp_path, monkeypatch):
    """A run may be continued in another folder."""
    monkeypatch.chdir(tmp_path)
    config = A2CConfig(env="CartPole-v1", output="rows").completed()
    assert config.output == str(tmp_path / "rows")
    offline = BCConfig(env="CartPole-v1", input_="minari:a/b-v0").completed()
    assert offline.input_ == "minari:a/b-v0"


def test_policies_of_a_checkpoint_have_the_defaults_of_their_class(tmp_path):
    """Settings of the run that were not set explicitly do not replace them."""
    config = AlgorithmConfig(
        env="CartPole-v1", plan="a2c", policies={"a": PolicySpec(policy_class=DQNTorchPolicy)}
    )
    saved, _ = config_to_json(config)
    loaded = config_from_json(json.loads(json.dumps(saved)), {}, CodeResolver(True))
    assert loaded.model_fields_set == config.model_fields_set
    changed = config_from_json(saved, {"gamma": 0.5}, CodeResolver(True))
    assert changed.model_fields_set == {*config.model_fields_set, "gamma"}


def test_configs_with_arrays_can_be_compared():
    configs = [PPOConfig(env_config={"start": np.array(start)}) for start in ([1, 2], [1, 2], [3])]
    assert configs[0] == configs[1]
    assert configs[0] != configs[2]


def test_assignment_accepts_the_same_forms_as_the_constructor():
    config = PPOConfig()
    config.log_to = "wandb"
    assert config.log_to == ["wandb"]
    config.evaluation_config = {"num_envs_per_env_runner": 4}
    assert config.evaluation_config == {"num_envs_per_worker": 4}


@pytest.mark.parametrize(
    "value",
    [{(1, 2), (3, 4)}, {"__tuple__": [1]}, {"__space__": {"a": 1}}, {"__code__": "no:code"}],
)
def test_values_that_resemble_encoded_ones_are_restored(value):
    assert decode(json.loads(json.dumps(encode(value))), CodeResolver(False)) == value


def test_config_class_of_a_policy_is_suggested_for_its_algorithm():
    class WithAux(PPOConfig):
        aux: float = 0.0

    class AuxPolicy(PPOTorchPolicy):
        config_class = WithAux

    class AuxPPO(PPO):
        policy_class = AuxPolicy

    with pytest.raises(ConfigError, match="Set config_class = WithAux on AuxPPO"):
        AuxPPO("CartPole-v1", aux=0.5)
    with pytest.raises(ConfigError) as caught:
        AuxPPO("CartPole-v1", nonsense=0.5)
    assert "WithAux" not in str(caught.value)


def test_settings_of_a_policy_of_another_algorithm_are_those_of_its_class():
    specs = {"a": PolicySpec(), "b": PolicySpec(DQNTorchPolicy, config={"n_step": 3})}
    config = PPOConfig(env=CARTPOLE, lr=0.1, policies=specs)
    assert config.for_policy("a") == config
    settings = config.for_policy("b")
    assert (type(settings), settings.n_step, settings.lr) == (DQNTorchPolicy.config_class, 3, 0.1)


def test_schedules_in_percent_of_a_policy_are_found_in_mappings():
    def config(of_run, of_policy):
        spec = PolicySpec(config={"exploration_config": {"epsilon": of_policy}})
        return DQNConfig(exploration_config={"epsilon": of_run}, policies={"a": spec})

    schedule = [["0%", 1.0], ["100%", 0.05]]
    assert has_schedule_in_percent(config(0.1, schedule))
    assert not has_schedule_in_percent(config(schedule, 0.1))


def test_aliases_of_records_are_accepted_in_updates():
    network = {"custom_model": "some:network"}
    assert R2D2Config().updated(model_config=network) == R2D2Config().updated(model=network)
    config = PPOConfig(env=CARTPOLE, policies={"a": PolicySpec()})
    changes = {"policies": {"a": {"config": {"lr": 1e-4}}}}
    assert config.updated(multiagent=changes).for_policy("a").lr == 1e-4


def test_evaluation_without_a_horizon_has_no_soft_one():
    config = PPOConfig(
        env=CARTPOLE, horizon=10, soft_horizon=True, evaluation_config={"horizon": None}
    )
    config.check()
    settings = evaluation_settings(config)
    assert (settings.horizon, settings.soft_horizon) == (None, False)


def test_message_of_a_number_says_that_none_is_possible():
    with pytest.raises(ConfigError, match=r"greater than or equal to 1, or None \(got 0\)"):
        PPOConfig(evaluation_interval=0)
    with pytest.raises(ConfigError, match=r"greater than or equal to 0 \(got -1\)"):
        PPOConfig(num_workers=-1)


def test_plan_may_be_a_path():
    assert PPOConfig(plan=Path("my_plan.py")).plan == "my_plan.py"


def test_bools_of_numpy_are_no_numbers():
    with pytest.raises(ConfigError, match="should be a number, not true or false"):
        PPOConfig(num_workers=np.True_)


@pytest.mark.parametrize("name", ["output", "evaluation_video_dir"])
def test_folders_are_paths(name):
    assert PPOConfig(**{name: Path("a/b")})[name] == "a/b"
    for value in ("", b"a", 3):
        with pytest.raises(ConfigError, match=name):
            PPOConfig(**{name: value})
