"""Logged scalars: every metric once, under classic or nested names; times of operators."""

import csv
import pickle
from collections import Counter

import pytest

from flowrl import DQN, PPO, ConfigError, PPOConfig
from flowrl.iter import LocalIterator
from flowrl.iter.stage import walk
from flowrl.trainer.metric_names import (
    check_metric_name,
    flatten_result,
    logged_scalars,
    metric_hint,
)
from flowrl.trainer.operator_times import OperatorTimes

SMALL = {"train_batch_size": 64, "sgd_minibatch_size": 32, "seed": 1}


@pytest.fixture(scope="module")
def result():
    with PPO("CartPole-v1", **SMALL) as algorithm:
        for _ in range(3):
            result = algorithm.train()
    return result


def test_each_metric_has_one_logged_name(result):
    everything = dict(flatten_result(result))
    for names, present, absent in (
        ("classic", "episode_reward_mean", "env_runners/episode_return_mean"),
        ("nested", "env_runners/episode_return_mean", "episode_reward_mean"),
    ):
        scalars = logged_scalars(result, names)
        assert scalars.items() <= everything.items()
        assert present in scalars
        assert absent not in scalars
        last_parts = Counter(name.rpartition("/")[2] for name in scalars)
        for name in ("policy_loss", "entropy", "cur_lr", "num_agent_steps_trained_lifetime"):
            assert last_parts[name] == 1, name
        # equal numbers under two names occur only by chance or where two quantities are equal
        assert "num_env_steps_sampled" not in scalars
        assert "counters/num_env_steps_sampled" not in scalars
        assert not any(name.startswith("trainers/") for name in scalars)


def test_no_metric_is_lost(result):
    """The values of all metrics are logged under some name, but for the diagnosis, a sentence."""
    values = {
        value
        for name, value in flatten_result(result)
        if value == value and name != "diagnosis"  # without NaN
    }
    for names in ("classic", "nested"):
        logged = set(logged_scalars(result, names).values())
        assert values <= logged


def test_metrics_of_several_trainers_are_kept(result):
    two = {**result, "trainers": {"A": {"x": 1.0}, "B": {"x": 2.0}}}
    assert {"trainers/A/x", "trainers/B/x"} <= set(logged_scalars(two, "classic"))


def test_setting_chooses_the_names_in_files(tmp_path):
    with PPO("CartPole-v1", **SMALL, logged_names="nested") as algorithm:
        algorithm.learn(128, run_dir=tmp_path / "r", progress=False)
    with open(tmp_path / "r" / "progress.csv") as file:
        columns = next(csv.reader(file))
    assert "env_runners/episode_return_mean" in columns
    assert "episode_reward_mean" not in columns
    assert "timers/env_steps_per_s" in columns
    assert len(set(columns)) == len(columns)
    with pytest.raises(ConfigError, match="logged_names"):
        PPO("CartPole-v1", logged_names="new")


def test_results_have_the_times_of_operators(result):
    timers = result["timers"]
    assert timers["env_steps_per_s"] == pytest.approx(64 / result["time_this_iter_s"])
    assert timers["operators"]["TrainOneStep_s"] > 0
    busy = timers["operators"].values()
    assert sum(busy) <= result["time_this_iter_s"] * 1.01
    with DQN("CartPole-v1", learning_starts=0, min_sample_timesteps_per_iteration=64) as algorithm:
        timers = algorithm.train()["timers"]
    assert {"StoreToReplayBuffer_s", "Concurrently_s"} <= set(timers["operators"])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("episode_return_mean", "episode_reward_mean"),
        ("ep_rew_mean", "episode_reward_mean"),
        ("timestep_total", "timesteps_total"),
    ],
)
def test_unknown_metric_of_a_result_names_the_nearest(result, name, hint):
    with pytest.raises(KeyError) as error:
        result[name]
    assert error.value.args == (f"a result has no metric {name!r}. Did you mean {hint!r}?",)
    assert result.get(name) is None
    assert pickle.loads(pickle.dumps(result)) == result


def test_path_of_a_metric_names_its_keys(result):
    for name, keys in (
        ("learners/default_policy/kl", "['learners']['default_policy']['kl']"),
        ("counters/num_env_steps_sampled", "['counters']['num_env_steps_sampled']"),
    ):
        with pytest.raises(KeyError) as error:
            result[name]
        assert error.value.args == (f"a result has no metric {name!r}. Use result{keys}",)
    with pytest.raises(KeyError, match=r"no metric 'learners/default_policy/none'\.\"$"):
        result["learners/default_policy/none"]


def test_unknown_metric_of_a_setting_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'episode_return_mean'\. Did you mean 'episode_reward"):
        check_metric_name("episode_return_mean", PPOConfig(), "stop")
    with pytest.raises(ConfigError, match="Did you mean 'episode_reward_mean'"):
        PPO("CartPole-v1", checkpoint_score_attribute="episode_return_mean")


class Add:
    def __init__(self, number):
        self.number = number

    def __call__(self, item):
        return item + self.number


def test_operators_of_one_name_are_numbered_in_the_order_of_the_data(monkeypatch):
    first, second = (LocalIterator([0]).for_each(Add(n)).for_each(Add(n + 1)) for n in (1, 3))
    plan = first.union(second, deterministic=True)
    assert plan.take(2) == [3, 7]
    rows = plan.stats()

    def set_busy(factor):
        numbers = [getattr(getattr(s, "fn", None), "number", 0) for s in walk(plan.stage)]
        pairs = zip(rows, numbers, strict=True)
        stats = [{**row, "busy_s": factor * number} for row, number in pairs]
        monkeypatch.setattr(plan, "stats", lambda: stats)

    times = OperatorTimes()
    set_busy(1.0)
    found = times.since_last(plan)
    added = {name: s for name, s in found.items() if name.startswith("Add")}
    assert added == {"Add": 1.0, "Add#2": 2.0, "Add#3": 3.0, "Add#4": 4.0}
    set_busy(1.5)
    assert times.since_last(plan)["Add#4"] == 2.0  # since the last call


@pytest.mark.parametrize("name", ["episode_reward", "mean_reward", "score", "ep_return"])
def test_names_of_the_mean_return(name):
    assert metric_hint(name, ["episode_reward_min"]) == " Did you mean 'episode_reward_mean'?"


def test_names_of_evaluation_metrics_stay_in_their_group():
    name = "evaluation/env_runners/episode_return_mean"
    assert metric_hint(name, []) == " Did you mean 'evaluation/episode_reward_mean'?"


def test_metrics_of_trainers_may_be_limits():
    config = PPOConfig(env="CartPole-v1")
    check_metric_name("trainers/TrainOneStep/num_env_steps_trained", config, "stop")
    with pytest.raises(ConfigError, match="no result has a metric 'trainer/x'"):
        check_metric_name("trainer/x", config, "stop")
