"""Stop rules: any metric, unknown metrics, several rules, damaged files."""

import math

import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.errors import ConfigError
from flowrl.settings import MAX_INT
from flowrl.trainer.runs.saved_run import list_checkpoints
from flowrl.trainer.runs.stop_rules import DEFAULT_TIMESTEPS, StopRules, has_metric
from tests.cli.helpers import SEEDED, read_results


def test_rules_are_set_if_any_is_given():
    assert not StopRules().is_set()
    assert StopRules(metrics=[("a", ">=", 1.0)]).is_set()


def test_limit_on_env_steps_may_be_a_rule_on_a_metric():
    assert StopRules().env_steps is None
    assert StopRules(iters=3, metrics=[("num_env_steps_trained", ">=", 9.0)]).env_steps is None
    metrics = [("timesteps_total", ">=", 99.5), ("timesteps_total", "<=", 5.0)]
    assert StopRules(metrics=metrics).env_steps == 100
    assert StopRules(timesteps=50, metrics=metrics).env_steps == 50


def test_default_rules_stop_at_the_total_of_the_config():
    constant = A2CConfig(env="CartPole-v1")
    percent = constant.updated(lr=[("0%", 1e-3), ("100%", 0.0)])
    total = percent.updated(total_timesteps=1000)
    assert StopRules().with_defaults(constant) == StopRules(475.0, DEFAULT_TIMESTEPS)
    assert StopRules().with_defaults(total) == StopRules(475.0, 1000)
    iters = StopRules(iters=3)
    assert iters.with_defaults(constant) == iters
    # a run does not continue after its schedules
    assert iters.with_defaults(percent) == StopRules(iters=3, timesteps=DEFAULT_TIMESTEPS)
    assert iters.with_defaults(total) == StopRules(iters=3, timesteps=1000)
    assert StopRules(timesteps=7).with_defaults(total) == StopRules(timesteps=7)


def test_description_says_where_schedules_end():
    constant, stop = A2CConfig(env="CartPole-v1"), StopRules(timesteps=2000)
    percent = constant.updated(lr=[("0%", 1e-3), ("100%", 0.0)])
    assert stop.describe(constant, 2000) == "2,000 env steps"
    assert stop.describe(percent, 2000) == "2,000 env steps (where schedules in percent end)"
    assert "(schedules in percent end at 100,000)" in stop.describe(percent, 100_000)


def test_any_metric_can_stop_a_run(cli):
    for number, (rule, message) in enumerate(
        [
            ("num_env_steps_sampled_lifetime=128", "num_env_steps_sampled_lifetime 128 >= 128"),
            ("learners/default_policy/entropy<=10", "entropy 0.6"),
            ("counters/num_env_steps_trained>=64", "counters/num_env_steps_trained 64 >= 64"),
        ]
    ):
        code, out, err = cli("train", "ppo", *SEEDED, "--stop", rule, "--run-dir", f"r{number}")
        assert code == 0, err
        assert message in out
    code, out, _ = cli("resume", "r0")
    assert "already reached: num_env_steps_sampled_lifetime 128" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stop", "episode_reward_meen=3"], "Did you mean 'episode_reward_mean'?"),
        (["--stop", "learners/ppo/kl=3"], "there is no policy 'ppo'"),
        (["--stop", "evaluation/episode_reward_mean=3"], "needs evaluations"),
        (["--stop", "what"], "METRIC=VALUE"),
        (["--stop", "timesteps_total=nan"], "must be a finite number"),
        (["--checkpoint-score-attribute", "retur"], "no result has a metric 'retur'"),
        (["--checkpoint-num-to-keep", "0"], "--checkpoint-num-to-keep: input should be"),
        (["--evaluation-parallel-to-training"], "needs evaluation workers"),
        (["--evaluation-config", "[3]"], "--evaluation-config: must be a JSON object, got [3]"),
        (["--evaluation-config", '{"explor": true}'], "Did you mean 'explore'?"),
    ],
)
def test_unknown_metrics_are_rejected_before_the_run(cli, tmp_path, flags, message):
    code, _, err = cli("train", "ppo", *SEEDED, "--run-dir", "r", *flags)
    assert code == 2
    assert message in err.replace("\n", " ")
    assert not (tmp_path / "r").exists()


def test_metric_missing_from_learner_statistics_fails_with_a_checkpoint(cli, tmp_path):
    rule = "learners/default_policy/entropyy=3"
    code, _, err = cli("train", "ppo", *SEEDED, "--run-dir", "r", "--stop", rule)
    assert code == 1
    assert "Did you mean 'learners/default_policy/entropy'?" in err
    assert list_checkpoints(tmp_path / "r")


@pytest.mark.parametrize("iterations", ["25", "2"])
def test_metric_that_stays_missing_is_reported_once(cli, iterations):
    rules = ["--stop", "counters/nothing=2", "--stop-iters", iterations]
    code, _, err = cli("train", "ppo", *SEEDED, *rules, "--run-dir", "r")
    assert code == 0
    assert err.count("no result has had 'counters/nothing' so far") == 1
    score = ["--checkpoint-score-attribute", "learners/default_policy/nope"]
    code, _, err = cli("train", "ppo", *SEEDED, *score, "--run-dir", "s")
    assert code == 1
    assert "there is no metric 'learners/default_policy/nope'" in err


def test_first_of_two_rules_for_one_metric_stops(cli):
    rules = ["--stop", "training_iteration=2", "--stop", "training_iteration<=0"]
    code, out, _ = cli("train", "ppo", *SEEDED, *rules, "--run-dir", "r")
    assert code == 0
    assert "training_iteration 2 >= 2" in out


@pytest.mark.parametrize("text", ['{"a": 1}', '{"metrics": {"a": 5}}', "[1]"])
def test_damaged_stop_rules_are_rejected(cli, tmp_path, text):
    cli("train", "ppo", *SEEDED, "--stop-iters", "1", "--run-dir", "r")
    (tmp_path / "r/stop.json").write_text(text)
    code, _, err = cli("resume", "r")
    assert code == 2
    assert "stop" in err
    assert len(read_results(tmp_path / "r")) == 1


def test_policy_that_learns_later_has_no_statistics_yet():
    result = {"learners": {"ppo": {"kl": 1.0}}, "episodes_in_window": 3}
    assert not has_metric(result, "learners/dqn/mean_q", "stop")
    with pytest.raises(ConfigError, match="learners/ppo/kl"):
        has_metric(result, "learners/ppo/mean_q", "stop")


def test_custom_metric_may_be_set_by_later_episodes():
    result = {"learners": {}, "custom_metrics": {}, "episodes_in_window": 3}
    assert not has_metric(result, "custom_metrics/steps_to_goal_mean", "stop")
    result["custom_metrics"] = {"steps_to_goal_mean": 3.0}
    assert has_metric(result, "custom_metrics/steps_to_goal_mean", "stop")
    assert not has_metric(result, "custom_metrics/steps_to_goal_max", "stop")


def test_limit_on_env_steps_fits_the_setting_total_timesteps():
    assert StopRules(timesteps=10**24).env_steps == MAX_INT
    assert StopRules(metrics=[("timesteps_total", ">=", 1e24)]).env_steps == MAX_INT
    assert StopRules(timesteps=7, metrics=[("timesteps_total", ">=", 5.5)]).env_steps == 6
    assert StopRules(iters=3).env_steps is None


def test_metric_may_be_a_numpy_number():
    rules = StopRules(metrics=[("score", ">=", 5.0)])
    result = {
        "score": np.float32(7), "episodes_in_window": 0, "episode_reward_mean": math.nan,
    }  # fmt: skip
    assert rules.reached(result, 100, 0.0) == "score 7 >= 5"
    assert has_metric(result, "score", "stop")
