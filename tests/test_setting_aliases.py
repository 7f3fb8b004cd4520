"""Names of settings in other libraries: every hint names settings that exist."""

import re

import pytest

import flowrl
from flowrl.errors import ConfigError
from flowrl.policies.config import ExplorationConfig, ModelConfig
from flowrl.setting_aliases import CLASS_HINTS, SETTING_ALIASES, setting_hint
from flowrl.setting_hints import SETTING_HINTS
from flowrl.trainer.registry import algorithm_class, algorithm_names

CONFIGS = {
    **{name: algorithm_class(name).config_class for name in algorithm_names()},
    "model": ModelConfig,
    "exploration_config": ExplorationConfig,
}
# what some hints name needs besides
CONTEXT = {
    "evaluation_video_dir": {"evaluation_interval": 1},
    "epsilon": {"type": "EpsilonGreedy"},
}


def code_in(hint):
    """Yield (name, code of the value or None) for each setting in a hint."""
    for code in re.findall("`([^`]+)`", hint):
        if match := re.fullmatch(r"(\w+)(?:=(.+))?", code):
            yield match[1], match[2]


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_hints_name_settings_that_the_algorithm_accepts(algorithm):
    config = CONFIGS[algorithm]
    for name in SETTING_HINTS.keys() - config.model_fields.keys():
        hint = next((hint for marker, hint in SETTING_HINTS[name] if marker in config()), None)
        with pytest.raises(ConfigError, match=f"unknown setting '{name}'") as error:
            config(**{name: 1})
        if hint is None:
            assert "Did you mean" not in str(error.value)
            continue
        is_rename = re.fullmatch(r"`\w+`", hint)
        assert (f"Did you mean '{hint[1:-1]}'?" if is_rename else hint) in str(error.value)
        for setting, value in code_in(hint):
            assert setting in config.model_fields
            if value is not None:
                changed = config(**{setting: eval(value), **CONTEXT.get(setting, {})})
                assert setting in changed.model_fields_set


def test_every_hint_is_for_some_algorithm():
    for name, hints in SETTING_HINTS.items():
        shown = {setting_hint(name, config.model_fields) for config in CONFIGS.values()}
        assert len(shown - {""}) == len(hints), name


def test_accepted_aliases_have_no_hint():
    assert not SETTING_ALIASES.keys() & SETTING_HINTS.keys()


@pytest.mark.parametrize(
    ("algorithm", "name", "message"),
    [
        ("PPO", "batch_size", "`sgd_minibatch_size` for the rows per update"),
        ("DQN", "batch_size", "Did you mean 'train_batch_size'"),
        ("PPO", "n_steps", "`train_batch_size`, the env steps per update of all environments"),
        ("PPO", "target_kl", "Use `kl_stop`"),
        ("SAC", "ent_coef", "`initial_alpha` for the initial entropy temperature"),
        ("SAC", "q_model_config", "Did you mean 'q_model'"),
        ("PPO", "num_gpus_per_env_runner", "Did you mean 'num_gpus_per_worker'"),
        ("PPO", "num_gpus_per_learner", 'Use `device="cuda"`'),
        ("IMPALA", "num_gpus_per_learner", "Use `num_gpus`"),
        ("IMPALA", "num_aggregator_actors_per_learner", "Did you mean 'num_aggregation_workers'"),
        ("PPO", "gym_env_vectorize_mode", "Use `vectorization_mode="),
        ("PPO", "compress_observations", "Leave it out"),
        ("MARWIL", "vf_coef", "Did you mean 'vf_coeff'"),
        ("TD3", "policy_frequency", "Did you mean 'policy_delay'"),
        ("DQN", "exploration_fraction", "Use a schedule, `exploration_config="),
        ("PPO", "custom_model", r'model: model=\{"custom_model": …\}'),
        ("PPO", "fcnet_hiddens", r'model: model=\{"fcnet_hiddens": …\}'),
        ("PPO", "train_batch_szie", "Did you mean 'train_batch_size'"),
        ("PPO", "buffer_size", "Only APEX, DQN, R2D2, .* have such a setting"),
        ("SAC", "policy_frequency", "Only TD3, .* have such a setting"),
        ("PPO", "learning_starts", "It is a setting of APEX, DQN, R2D2, "),
        ("PPO", "num_env", "Did you mean 'num_envs_per_worker'"),
        ("PPO", "epoch", "Did you mean 'num_sgd_iter'"),
        ("PPO", "verbose", r"`algorithm\.learn\(progress=False\)` prints no progress table"),
        ("PPO", "eval_freq", "Use `evaluation_interval`, in iterations"),
        ("PPO", "ignore_worker_failures", "Did you mean 'recreate_failed_workers'"),
        ("PPO", "num_cpus", "`num_cpus_per_worker` for those that each worker reserves"),
        ("PPO", "eps", "Did you mean 'adam_epsilon'"),
        ("DQN", "eps", "Use a schedule, `exploration_config="),
        ("PPO", "vf_coeff", "Did you mean 'vf_loss_coeff'"),
        ("DQN", "target_update", "Did you mean 'target_network_update_freq'"),
        ("PPO", "target_update", "Only APPO, APEX, DQN, .* have such a setting"),
        ("PPO", "log_folder", r"Use algorithm\.learn\(run_dir=…\)"),
        ("PPO", "run_dir", r"an argument of learn\(\): algorithm\.learn\(run_dir=…\)"),
        ("PPO", "num_gpus", 'Use `device="cuda"`'),
        ("PPO", "remote_worker_envs", 'Use `vectorization_mode="async"`'),
        ("PPO", "timesteps_total", "Did you mean 'total_timesteps'"),
        ("PPO", "log_level", r'Use logging\.getLogger\("flowrl"\)\.setLevel'),
    ],
)
def test_hint_depends_on_the_settings_of_the_algorithm(algorithm, name, message):
    with pytest.raises(ConfigError, match=message):
        CONFIGS[algorithm](**{name: 1})
    with pytest.raises(ConfigError, match=message.removeprefix("unknown ")):
        CONFIGS[algorithm]().training(**{name: 1})


@pytest.mark.parametrize("name", ["verbos", "conv", "num_gpu", "sop", "my_own_name"])
def test_names_that_only_resemble_another_librarys_have_no_hint(name):
    with pytest.raises(ConfigError, match=rf"^unknown setting '{name}'\.$"):
        CONFIGS["PPO"](**{name: 1})


def test_names_of_networks_are_suggested_in_a_network():
    with pytest.raises(ConfigError, match="Did you mean 'fcnet_hiddens'"):
        ModelConfig(fcnet_hidden=[8])
    with pytest.raises(ConfigError, match=r"'model\.net_arch'\. Did you mean 'fcnet_hiddens'"):
        CONFIGS["PPO"](model={"net_arch": [8]})


def test_class_hints_create_algorithms_that_exist():
    created = [hint for hint in CLASS_HINTS.values() if re.match(r"Use \w+\(.*=.*\)$", hint)]
    assert len(created) >= 5
    for hint in created:
        code = hint.removeprefix("Use ").replace("(env,", '("CartPole-v1",')
        eval(code, {"PPO": flowrl.PPO, "DQN": flowrl.DQN}).stop()


def test_previous_actions_of_attention_name_recurrent_cells():
    with pytest.raises(
        ConfigError, match=r"observations, recurrent cells have `lstm_use_prev_action`\.$"
    ):
        CONFIGS["PPO"](model={"attention_use_n_prev_actions": 1})


def test_epsilons_of_rllib_name_the_schedule():
    rllib = {"initial_epsilon": 1.0, "final_epsilon": 0.05, "epsilon_timesteps": 1000}
    for name in rllib:
        message = rf"'exploration_config\.{name}'\. Use a schedule of env steps, `epsilon="
        with pytest.raises(ConfigError, match=message):
            CONFIGS["DQN"](exploration_config=rllib)


@pytest.mark.parametrize(
    ("algorithm", "method", "hint"),
    [
        ("IMPALA", "learners", "Use `.training(num_learners=…)`."),
        ("PPO", "learners", "Use `.framework(device=…)`;"),
        ("PPO", "rl_module", "Use `.training(model={…})`."),
        ("PPO", "api_stack", "Leave it out"),
    ],
)
def test_methods_of_rllibs_configs_have_a_hint(algorithm, method, hint):
    with pytest.raises(AttributeError, match=f"has no method or setting '{method}'") as error:
        getattr(CONFIGS[algorithm](), method)
    assert hint in str(error.value)


@pytest.mark.parametrize("method", ["rollouts", "rollout", "env_runners"])
def test_misspelled_name_of_another_library_is_suggested_under_our_name(method):
    message = rf"^\.{method}\(\) has no setting 'num_env_runner'\. Did you mean 'num_workers'\?$"
    with pytest.raises(ConfigError, match=message):
        getattr(CONFIGS["PPO"](), method)(num_env_runner=1)
