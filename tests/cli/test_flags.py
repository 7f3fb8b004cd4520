"""Settings from flags: switches, schedules, nested settings, policies' settings, invalid flags."""

import re

import pytest

from flowrl.algorithms.dqn import DQNTorchPolicy
from flowrl.algorithms.ppo import PPOConfig
from flowrl.cli.flags import settings_from_flags
from flowrl.cli.help import _entries
from flowrl.cli.run_settings import parse_plan_run
from flowrl.cli.saved_runs import open_run
from flowrl.errors import ConfigError
from flowrl.policies import PolicySpec
from flowrl.trainer.plan_files import shipped_plans
from flowrl.trainer.plan_settings import plan_config
from tests.cli.helpers import TWO_ITERATIONS, read_settings


def test_flags_set_numbers_lists_and_switches(cli, tmp_path):
    flags = ["--lr", "3e-4", "--model.fcnet-hiddens", "8", "8", "--normalize-observations"]
    code, _, _ = cli("train", "ppo", "--run-dir", "r", *TWO_ITERATIONS, *flags)
    assert code == 0
    settings = read_settings(tmp_path / "r")
    assert settings["lr"] == 3e-4
    assert settings["model"]["fcnet_hiddens"] == [8, 8]
    assert settings["normalize_observations"] is True


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ('{"sgd_minibatch_size": 600}', ["--train-batch-size", "1000"]),
        ('{"train_batch_size": 1000, "sgd_minibatch_size": 2000}', ["--sgd-minibatch-size", "600"]),
    ],
)
def test_settings_of_config_and_flags_are_checked_together(config, flags):
    _, found = parse_plan_run("ppo", ["--config", config, *flags])
    assert (found.train_batch_size, found.sgd_minibatch_size) == (1000, 600)


def test_config_and_flags_that_need_each_other_are_checked_together():
    flags = ["--config", '{"replay_proportion": 0.5}', "--replay-buffer-num-slots", "4"]
    _, found = parse_plan_run("impala", flags)
    assert (found.replay_proportion, found.replay_buffer_num_slots) == (0.5, 4)
    with pytest.raises(ConfigError, match="replay_proportion"):
        parse_plan_run("impala", flags[2:])


@pytest.mark.parametrize(
    ("config", "flags", "name", "value"),
    [
        ('"normalize_observations": true', ["--no-normalize-observations"],
         "normalize_observations", False),
        ('"minibatch_size": 700', ["--sgd-minibatch-size", "500"], "sgd_minibatch_size", 500),
        ('"lambda_": 0.5', ["--lambda", "0.9"], "lambda_", 0.9),
        ('"model": {"fcnet_hiddens": [8]}', ["--model.use-lstm"], "model.use_lstm", True),
    ],
)  # fmt: skip
def test_flags_override_config_that_fits_only_with_other_flags(config, flags, name, value):
    minibatch = "" if "minibatch" in config else ', "sgd_minibatch_size": 600'
    text = f"{{{config}{minibatch}}}"
    flags = ["--config", text, *flags, "--train-batch-size", "1000"]
    _, found = parse_plan_run("ppo", flags)
    part, _, inner = name.partition(".")
    assert (found[part][inner] if inner else found[part]) == value
    if "model" in config:
        assert found.model.fcnet_hiddens == [8]


def test_invalid_settings_of_config_are_rejected_with_flags():
    message = "--train-batch-size 512 is smaller than sgd_minibatch_size=600"
    with pytest.raises(ConfigError, match=message):
        parse_plan_run("ppo", ["--config", '{"sgd_minibatch_size": 600}', "--lr", "1e-3"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"model": {"use_lstm": true, "use_attention": true}}', "model: use_lstm and use_attent"),
        ('{"model": {"conv_type": "resnet", "conv_filters": [[8, 3, 1]]}}', "model.conv_filters: "),
    ],
)
def test_errors_of_nested_settings_name_their_record(config, message):
    with pytest.raises(ConfigError, match=message):
        parse_plan_run("ppo", ["--config", config])


@pytest.mark.parametrize("value", ["8,4", "[8, 4]", "[8,4]"])
def test_list_of_numbers_may_be_one_argument(cli, tmp_path, value):
    flags = ["--model.fcnet-hiddens", value, "--run-dir", "r", *TWO_ITERATIONS]
    code, _, err = cli("train", "ppo", *flags)
    assert code == 0, err
    assert read_settings(tmp_path / "r")["model"]["fcnet_hiddens"] == [8, 4]


def test_schedule_of_integers_may_have_commas(cli, tmp_path):
    flags = ["--entropy-coeff", "0,1,5000,0", "--run-dir", "r", *TWO_ITERATIONS]
    code, _, err = cli("train", "ppo", *flags)
    assert code == 0, err
    assert read_settings(tmp_path / "r")["entropy_coeff"] == [[0, 1.0], [5000, 0.0]]


def test_schedule_may_be_a_list_or_numbers(cli, tmp_path):
    for name, values in (("a", ["[[0, 0.001], [1000, 0]]"]), ("b", ["0", "0.001", "1000", "0"])):
        code, _, err = cli("train", "ppo", "--run-dir", name, "--lr", *values, *TWO_ITERATIONS)
        assert code == 0, err
        assert read_settings(tmp_path / name)["lr"] == [[0, 0.001], [1000, 0.0]]
    code, _, err = cli("train", "ppo", "--lr", "[[0, 0.001]")
    assert code == 2
    assert "not a schedule" in err


def test_trailing_underscore_of_a_setting_is_optional(cli, tmp_path):
    for number, flag in enumerate(("--lambda", "--lambda_")):
        run_dir = f"r{number}"
        code, _, err = cli("train", "ppo", flag, "0.9", "--run-dir", run_dir, *TWO_ITERATIONS)
        assert code == 0, err
        assert read_settings(tmp_path / run_dir)["lambda_"] == 0.9


def test_flags_set_nested_settings_and_schedules(cli, tmp_path):
    flags = ["--double_q", "false", "--dueling=true", "--no-prioritized-replay"]
    code, _, err = cli("train", "dqn", *flags, "--run-dir", "d", "--stop-iters", "1")
    assert (code, err) == (0, "")
    dqn = read_settings(tmp_path / "d")
    assert (dqn["double_q"], dqn["dueling"], dqn["prioritized_replay"]) == (False, True, False)
    flags = ["--q-model", '{"fcnet_hiddens": [8]}', "--actor-lr", "0", "1e-3", "1000", "0"]
    flags += ["--learning-starts", "300", "--min-sample-timesteps-per-iteration", "310"]
    code, _, err = cli("train", "sac", *flags, "--run-dir", "s", "--stop-iters", "1")
    assert (code, err) == (0, "")
    sac = read_settings(tmp_path / "s")
    assert sac["q_model"]["fcnet_hiddens"] == [8]
    assert sac["actor_lr"] == [[0, 1e-3], [1000, 0.0]]
    prefix = "--policies.ppo.config"
    flags = [f"{prefix}.lambda", "0.5", f"{prefix}.use-gae", "false", "--stop-iters", "1"]
    flags += ["--min-sample-timesteps-per-iteration", "300", "--run-dir", "p"]
    code, _, err = cli("train", "ppo_dqn", *flags)
    assert (code, err) == (0, "")
    ppo = open_run(str(tmp_path / "p")).config.for_policy("ppo")
    assert (ppo.lambda_, ppo.use_gae) == (0.5, False)


def test_only_flags_and_earlier_settings_count_as_set_explicitly():
    spec = PolicySpec(config=PPOConfig(lr=1e-2))
    defaults = plan_config("ppo", "CartPole-v1").updated(
        policies={"a_1": spec}, policy_mapping_fn=lambda agent_id: "a_1"
    )
    flags = ["--lambda", "0.9", "--no-monitor", "--model.fcnet-hiddens", "8"]
    flags += ["--policies.a-1.config.gamma", "0.5"]
    settings = settings_from_flags(defaults, flags, {})
    given = {"lambda_", "monitor", "model"}
    assert settings.model_fields_set == defaults.model_fields_set | given
    assert settings.model.model_fields_set == {"fcnet_hiddens"}
    assert settings.policies["a_1"].config.model_fields_set == {"lr", "gamma"}
    assert spec.config.model_fields_set == {"lr"}


def test_a_flag_of_a_setting_adds_no_warning_of_others(cli, tmp_path, caplog):
    flags = ["--seed", "1", "--stop-timesteps", "512", "--run-dir", str(tmp_path / "run")]
    assert cli("train", "ppo", *flags)[0] == 0
    assert "rollout_fragment_length" not in caplog.text


def test_flags_of_one_policy_are_kept_by_a_resumed_run(cli, tmp_path):
    flags = ["--policies.dqn.config.tau", "0.25", "--seed", "1", "--stop-iters", "1"]
    flags += ["--min-sample-timesteps-per-iteration", "300"]
    code, _, err = cli("train", "ppo_dqn", "--run-dir", "r", *flags)
    assert (code, err) == (0, "")
    code, _, err = cli("train", "ppo_dqn", "--lr", "1e-4", "--stop-iters", "1")
    assert code == 2  # every policy has its own lr
    assert "--policies.ppo.config.lr" in err
    config = open_run(str(tmp_path / "r")).config
    assert config.for_policy("dqn").tau == 0.25
    code, out, _ = cli("evaluate", "r", "--episodes", "1")
    assert code == 0
    assert "policy dqn: mean return" in out
    code, out, _ = cli("train", "--resume", "r", "--stop-iters", "2")
    assert code == 0
    assert "reached: 2 iterations" in out


@pytest.mark.parametrize("flags", [["--lr=[[0,1e-3],[100,0]]"], ["--lr", "[[0,1e-3],[100,0]]"]])
def test_schedule_is_a_value_after_a_space_or_an_equals_sign(flags):
    config = settings_from_flags(PPOConfig(), flags, {})
    assert config.lr == [(0, 1e-3), (100, 0.0)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--plan", "a2c"], "name the plan after the command"),
        (["--sgd-minibatch-size", "-5"], "--sgd-minibatch-size: input should be greater"),
        (["--stop-reward", "nan"], "must be a finite number"),
        (["--stop", '{"training_iteration": "a"}'], "--stop: training_iteration: must be a number"),
        (["--stop-time-s", "inf"], "finite"),
        (["--env-config", '{"nope": 1}'], "--env-config: CartPole-v1 does not accept {'nope': 1}"),
        (["--metrics-num-episodes-for-smoothing", "9999999999999"], "less than or equal"),
    ],
)
def test_invalid_flags_of_a_plan_are_rejected(cli, tmp_path, flags, message):
    code, _, err = cli("train", "ppo", *flags, "--run-dir", "r")
    assert code == 2
    assert message in err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config={bad"], "not JSON"),
        (["--stop", "training_iteration=abc"], "must be a finite number, got abc"),
        (["--stop", "training_iteration==2"], "METRIC=VALUE"),
        (["--stop", '{"training_iteration": true}'], "must be a number, got True"),
        (["--stop-timestep", "5"], "Did you mean --stop-timesteps"),
        (['--config={"plan": "dqn"}'], "may be for another algorithm"),
    ],
)
def test_invalid_flags_of_an_algorithm_are_rejected(cli, tmp_path, flags, message):
    code, _, err = cli("train", "--run=PPO", "--env=CartPole-v1", *flags, "--run-dir", "r")
    assert code == 2
    assert message in err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lr abc", "--lr: expected a number or a schedule [[env step, value], …], got 'abc'"),
        ("--lr", "--lr: expected a number or a schedule [[env step, value], …], got no value"),
        ("--lr 0,1", "--lr: expected a number or a schedule [[env step, value], …], got '0,1'"),
        ("--lr -1", "--lr: values must be from 0 to 1e+06 (got -1.0)"),
        ("--num-workers two", "--num-workers: expected a whole number, got 'two'"),
        ("--num-workers 1 2", "--num-workers: expected a whole number, got '1' '2'"),
        ("--num-workers --lr 1", "--num-workers: expected a whole number, got no value"),
        ("--gamma=x", "--gamma: expected a number, got 'x'"),
        ("--use-gae maybe", "--use-gae: expected true or false, got 'maybe'"),
        ("--model.fcnet-hiddens a b", "whole numbers, separated by spaces, got 'a' 'b'"),
        ("--model.fcnet-hiddens 64,b", "whole numbers, separated by spaces, got '64,b'"),
        ("--log-to wandbb", "expected one of mlflow, wandb, got 'wandbb'. Did you mean 'wandb'?"),
        ("--env-config 3", "--env-config: must be a JSON object, got 3"),
        ("stray", "unexpected argument 'stray': pass settings as --name VALUE"),
        ("CartPole-v1", "unexpected argument 'CartPole-v1': did you mean --env CartPole-v1?"),
        ('--model {"use_lstm":true}', "--model: each of its settings has a flag of its own: "),
        ('--model={"use_lstm":true}', "own: --model.use-lstm\n"),
        ("--exploration-config", "own: --exploration-config.type, …\n"),
        ("--no-such-flag 3", "unknown flag --no-such-flag."),
        ("--stop-timesteps abc", "must be a whole number such as 100000 or 1e5, got abc"),
        ("--stop-timestep 5", "unknown flag --stop-timestep. Did you mean --stop-timesteps?"),
        ("--env", "--env: needs a value"),
        ("--num-envs-per-worker 0", "--num-envs-per-worker: input should be greater than"),
    ],
)
def test_problem_of_a_flag_is_one_line(cli, flags, message):
    code, out, err = cli("train", "ppo", *flags.split())
    assert code == 2
    assert message in err
    assert err.startswith("flowrl: ")
    assert "Error parsing" not in err
    assert (out, err.count("\n")) == ("", 1)


def test_group_of_settings_of_one_policy_has_flags(cli):
    flags = ["--policies.dqn.config.model", '{"fcnet_hiddens": [8]}']
    code, _, err = cli("train", "ppo_dqn", *flags)
    assert code == 2
    assert "of its own: --policies.dqn.config.model.fcnet-hiddens\n" in err


def test_counts_are_whole_numbers_in_any_notation(cli, tmp_path):
    flags = ["--train-batch-size", "1.28e2", "--sgd-minibatch-size", "1_28", "--seed", "1e3"]
    flags += ["--model.fcnet-hiddens", "8", "1e1", "--stop-timesteps", "2.56e2", "--run-dir", "r"]
    code, _, err = cli("train", "ppo", *flags)
    assert (code, err) == (0, "")
    settings = read_settings(tmp_path / "r")
    names = ("train_batch_size", "sgd_minibatch_size", "seed", "total_timesteps")
    assert [settings[name] for name in names] == [128, 128, 1000, 256]
    assert settings["model"]["fcnet_hiddens"] == [8, 10]
    config = PPOConfig(total_timesteps=1e5, train_batch_size=4e3)
    assert (config.total_timesteps, config.train_batch_size) == (100_000, 4000)


@pytest.mark.parametrize("plan", sorted(shipped_plans()))
def test_every_flag_in_the_help_is_accepted(plan):
    config = plan_config(plan)
    names = [entry.name.rstrip("_").replace("_", "-") for entry in _entries(config)]
    has_policies = any(name.startswith("policies.") for name in names)
    assert has_policies == (plan in ("ppo_dqn", "three_way"))
    messages = []
    for name in names:
        try:
            settings_from_flags(config, [f"--{name}"], {})
        except ConfigError as error:  # most flags need a value
            messages.append(str(error))
    assert not [text for text in messages if re.search("unknown flag|no such policy", text)]


@pytest.mark.parametrize("name", ["policies", "policies-to-train"])
def test_settings_without_flags_name_the_option_config(cli, name):
    code, _, err = cli("train", "ppo", f"--{name}", '["a"]')
    assert code == 2
    assert f"""--{name}: pass this setting as --config '{{"{name.replace("-", "_")}": …}}'""" in err


@pytest.mark.parametrize("limit", ["-1e9", "-1E9", "-.5e9", "-1000000000"])
def test_limits_may_be_negative_numbers(cli, limit):
    code, out, err = cli("train", "ppo", "--stop-reward", limit, "--run-dir", "r")
    assert (code, err) == (0, "")
    assert "reached: mean return" in out


def test_mean_return_is_no_limit_of_a_run_that_samples_nothing(cli):
    code, _, err = cli("train", "bc", "--input", "x", "--env", "CartPole-v1", "--stop-reward", "1")
    assert code == 2
    assert "--stop-reward: nothing is sampled, so there is no mean return: set evaluation_" in err


def test_flags_of_policies_of_every_form():
    policies = {"a": None, "b": (DQNTorchPolicy,), "c": PolicySpec(config={"lr": 0.5})}
    defaults = PPOConfig(env="CartPole-v1", policies=policies, policy_mapping_fn=lambda a: "a")
    flags = ["--policies.b.config.tau", "0.5", "--policies.a.config.lr", "0.1"]
    flags += ["--policies.c.config.gamma", "0.9"]
    configs = {i: s.config for i, s in settings_from_flags(defaults, flags, {}).policies.items()}
    assert configs == {"a": {"lr": 0.1}, "b": {"tau": 0.5}, "c": {"lr": 0.5, "gamma": 0.9}}
    with pytest.raises(ConfigError, match=r"unknown flag --policies\.a\.config\.tau"):
        settings_from_flags(defaults, ["--policies.a.config.tau", "1"], {})


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("no-lr 0.5", "unknown flag --policies.p.config.no-lr"),
        ("model.no-fcnet-hiddens", "unknown flag --policies.p.config.model.no-fcnet-hiddens"),
        ("no-train-batch-size=4000", "unknown flag --policies.p.config.no-train-batch-size"),
        ("no-use-gae true", "--policies.p.config.no-use-gae: expected true or false, got 'true'"),
    ],
)
def test_only_switches_are_negated(flag, message):
    name, *words = f"--policies.p.config.{flag}".split()
    defaults = PPOConfig(
        env="CartPole-v1", policies={"p": PolicySpec(config=PPOConfig())},
        policy_mapping_fn=lambda agent_id: "p",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        settings_from_flags(defaults, [name, *words], {})


def test_switch_of_a_setting_that_is_also_a_number_takes_both():
    for words, value in (([], True), (["true"], True), (["0.5"], 0.5), (["None"], None)):
        settings = settings_from_flags(PPOConfig(), ["--clip-rewards", *words], {})
        assert settings.clip_rewards == value
