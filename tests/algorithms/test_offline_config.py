"""Algorithms that train on recorded experience: their settings, with and without an environment."""

import shutil

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from flowrl.algorithms.cql import CQLConfig
from flowrl.algorithms.marwil import BC, BCConfig, MARWILConfig
from flowrl.data import SampleBatch
from flowrl.errors import ConfigError, OfflineDataError
from flowrl.offline.parquet import read_parquet, write_parquet
from flowrl.policies.views import find_masked
from flowrl.trainer.evaluation import EvaluationWorkers
from flowrl.trainer.runs.stop_rules import StopRules
from tests.extras import require_extra

require_extra("offline")

BOX = spaces.Box(-1, 1, (3,), np.float32)
TWO = spaces.Discrete(2)
SMALL = {"seed": 0, "train_batch_size": 64, "min_sample_timesteps_per_iteration": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with 200 rows; the action is 1 where the first feature is positive."""
    folder = tmp_path_factory.mktemp("rows")
    features = np.random.default_rng(0).uniform(-1, 1, (201, 3)).astype(np.float32)
    batch = SampleBatch(
        obs=features[:-1],
        new_obs=features[1:],
        actions=(features[:-1, 0] > 0).astype(np.int64),
        rewards=np.ones(200, np.float32),
        terminateds=np.arange(200) % 20 == 19,
        truncateds=np.zeros(200, bool),
        unroll_id=np.arange(200) // 20,
    )
    write_parquet(folder / "rows.parquet", batch)
    return folder


@pytest.mark.parametrize("config_class", [BCConfig, MARWILConfig, CQLConfig])
def test_training_needs_spaces_but_no_environment(config_class, folder):
    config = config_class(**SMALL)
    config = config.offline_data(input_=str(folder), observation_space=BOX, action_space=TWO)
    with config.build() as algorithm:
        for _ in range(2):
            result = algorithm.train()
        assert result["num_env_steps_trained"] == 256
        assert algorithm.compute_single_action(np.zeros(3, np.float32)) in (0, 1)
        with pytest.raises(ConfigError, match="no environment to sample or to evaluate in"):
            algorithm.evaluate()


def test_bc_learns_and_its_checkpoint_contains_the_spaces(folder, tmp_path):
    config = BCConfig(**SMALL, lr=3e-3, input_=str(folder), observation_space=BOX, action_space=TWO)
    with config.build() as algorithm:
        for _ in range(40):
            algorithm.train()
        algorithm.save(tmp_path / "checkpoint")
    with BC.from_checkpoint(tmp_path / "checkpoint") as restored:
        obs = np.random.default_rng(3).uniform(-1, 1, (300, 3)).astype(np.float32)
        actions = restored.get_policy().compute_actions(obs, explore=False)[0]
        assert (actions == (obs[:, 0] > 0)).mean() > 0.9


class OneStepEnv(gym.Env):
    """An environment with three features and two actions, whose episodes have one step."""

    observation_space, action_space = BOX, TWO

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.zeros(3, np.float32), 1.0, True, False, {}


def test_evaluation_may_have_its_own_environment(folder):
    config = BCConfig(**SMALL, input_=str(folder), observation_space=BOX, action_space=TWO)
    config = config.evaluation(evaluation_interval=1, evaluation_config={"env": OneStepEnv})
    with config.build() as algorithm:
        assert algorithm.train()["evaluation"]["episode_reward_mean"] == 1.0


def test_missing_and_contradictory_settings_are_rejected(folder):
    with pytest.raises(ConfigError, match="or the observation_space and action_space"):
        BCConfig(**SMALL, input_=str(folder)).build()
    for name in ("normalize_observations", "normalize_rewards"):
        with pytest.raises(ConfigError, match=f"{name} is for sampling"):
            BCConfig(**{name: True})
    with pytest.raises(ConfigError, match="give both"):
        BCConfig(observation_space=BOX)
    with pytest.raises(ConfigError, match="gymnasium space"):
        BCConfig(observation_space=3, action_space=TWO)
    config = BCConfig(**SMALL, input_=str(folder), observation_space=BOX, action_space=TWO)
    with pytest.raises(ConfigError, match="evaluation_interval"):
        config.evaluation(evaluation_interval=1).build()
    config = config.updated(evaluation_interval=None, evaluation_video_dir="videos")
    with pytest.raises(ConfigError, match="no environment to sample"):
        config.build().check_start()


def test_stop_criteria_without_episodes_are_rejected(folder):
    config = BCConfig(env="CartPole-v1", input_=str(folder))
    for name in ("episode_reward_mean", "policy_reward_mean/default_policy"):
        with pytest.raises(ConfigError, match=r"'evaluation/episode_reward_mean' \(\.evaluation"):
            StopRules(metrics=[(name, ">=", 9.0)]).check(config)
    with pytest.raises(ConfigError, match="nothing is sampled"):
        StopRules(reward=9.0).check(config)
    assert StopRules().with_defaults(config).reward is None
    with pytest.raises(ConfigError, match="checkpoint_score_attribute: there is no 'episode_rew"):
        config.updated(checkpoint_score_attribute="episode_reward_mean").check()
    evaluated = config.updated(evaluation_interval=1)
    StopRules(metrics=[("evaluation/episode_reward_mean", ">=", 9.0)]).check(evaluated)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 2}, "num_workers is for sampling"),
        ({"output": "x"}, "output is for sampling"),
        ({"clip_rewards": True}, "offline algorithms learn from the recorded rewards"),
        ({"no_done_at_end": True}, "no_done_at_end is for sampling"),
        ({"env": "CartPole-v1", "observation_space": None}, "the env defines them"),
        ({"beta": 1.0}, "BC does not weight rows"),
        ({"model": {"use_lstm": True}}, "BC supports only networks without memory"),
        ({"model": {"num_framestacks": 2}}, "model: BC learns from single rows"),
        ({"env": "CartPole-v1"}, "the env defines them"),
    ],
)
def test_settings_without_effect_are_rejected(settings, message, folder):
    valid = {"input_": str(folder), "observation_space": BOX, "action_space": TWO}
    with (
        pytest.raises(ConfigError, match=message),
        BCConfig(**{**valid, **settings}).build() as algorithm,
    ):
        algorithm.train()


@pytest.mark.parametrize("config_class", [BCConfig, CQLConfig])
def test_actions_in_the_bounds_of_the_environment_are_one_warning(config_class, tmp_path, caplog):
    rng = np.random.default_rng(0)
    for name in "ab":
        observations = rng.uniform(-1, 1, (201, 3)).astype(np.float32)
        rows = SampleBatch(
            obs=observations[:-1],
            new_obs=observations[1:],
            actions=rng.uniform(-2, 2, (200, 1)).astype(np.float32),
            rewards=np.ones(200, np.float32),
            terminateds=np.zeros(200, bool),
        )
        write_parquet(tmp_path / f"{name}.parquet", rows)
    space = spaces.Box(-2, 2, (1,), np.float32)
    settings = {**SMALL, "min_sample_timesteps_per_iteration": 400, "input_": str(tmp_path)}
    config = config_class(**settings, observation_space=BOX, action_space=space)
    with config.build() as algorithm:
        algorithm.train()
    assert caplog.text.count("scale them from these bounds to [-1, 1]") == 1


@pytest.mark.parametrize("action", [2, -1])
def test_recorded_actions_outside_the_space_are_rejected(action, tmp_path):
    rows = SampleBatch(obs=np.zeros((4, 3), np.float32), actions=np.array([0, 1, action, 0]))
    write_parquet(tmp_path / "a.parquet", rows)
    config = BCConfig(**SMALL, input_=str(tmp_path), observation_space=BOX, action_space=TWO)
    with config.build() as algorithm, pytest.raises(OfflineDataError) as caught:
        algorithm.train()
    message = str(caught.value)
    assert "a.parquet: the rows do not fit the spaces of the policy: actions" in message
    assert str(action) in message


def test_validate_checks_that_the_input_exists(folder, tmp_path):
    config = BCConfig(observation_space=BOX, action_space=TWO)
    with pytest.raises(ConfigError, match="input_: none is set"):
        config.validate()
    with pytest.raises(ConfigError, match=r"input_: there is no /.*/none"):
        config.updated(input_=str(tmp_path / "none")).validate()
    config.updated(input_=str(folder)).validate()
    with pytest.raises(ConfigError, match="must be a folder on this machine, got s3://bucket/e"):
        config.updated(input_="s3://bucket/e").validate()


def test_training_without_recorded_experience_says_how_to_record_some():
    with BC("CartPole-v1", input_="~/no_such_folder") as algorithm:
        with pytest.raises(ConfigError) as error:
            algorithm.train()
        assert "/no_such_folder. To record experience, set `output`" in str(error.value)
        assert "~" not in str(error.value)


def test_restored_algorithm_opens_its_input_only_to_train(folder, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(folder, data)
    config = BCConfig(**SMALL, input_=str(data), observation_space=BOX, action_space=TWO)
    with config.build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        expected = algorithm.train()["learners"]
    shutil.rmtree(data)
    with BC.from_checkpoint(tmp_path / "c") as restored:
        assert restored.compute_single_action(np.zeros(3, np.float32)) in (0, 1)
        restored.save(tmp_path / "d")
        with pytest.raises(ConfigError, match=r"input_: there is no .*/data\. To record"):
            restored.train()
    shutil.copytree(folder, data)
    with BC.from_checkpoint(tmp_path / "d") as restored:  # saved before a file was opened
        assert restored.train()["learners"] == expected


def test_files_of_another_program_are_named(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet: not written by flowrl: its columns are x"):
        BCConfig(env="CartPole-v1", input_=str(tmp_path)).build().train()


def test_input_policy_id_selects_the_recorded_policy(folder, tmp_path):
    _, rows = read_parquet(folder / "rows.parquet")
    write_parquet(tmp_path / "left.parquet", rows, "left")
    flipped = rows.with_columns(actions=1 - rows["actions"])
    write_parquet(tmp_path / "right.parquet", flipped, "right")
    config = BCConfig(
        **SMALL, lr=3e-3, input_=str(tmp_path), observation_space=BOX, action_space=TWO
    )
    message = r"only of 'left', 'right': set .*input_policy_id"
    with pytest.raises(ConfigError, match=message):
        config.validate()
    with config.build() as algorithm, pytest.raises(ConfigError, match=message):
        algorithm.train()
    obs = np.array([[0.9, 0, 0], [-0.9, 0, 0]], np.float32)
    for policy_id, expected in (("left", [1, 0]), ("right", [0, 1])):
        with config.updated(input_policy_id=policy_id).build() as algorithm:
            for _ in range(30):
                algorithm.train()
            actions = algorithm.get_policy().compute_actions(obs, explore=False)[0]
            assert actions.tolist() == expected
    two = config.updated(policies={"default_policy": None, "right": None}, input_policy_id="right")
    with two.build() as algorithm:
        initial = algorithm.get_policy("default_policy").get_weights()
        for _ in range(30):
            counters = algorithm.train()["counters"]
        actions = algorithm.get_policy("right").compute_actions(obs, explore=False)[0]
        assert actions.tolist() == [0, 1]
        for name, weight in algorithm.get_policy("default_policy").get_weights().items():
            np.testing.assert_array_equal(weight, initial[name])
        assert counters["num_agent_steps_sampled/right"] > 0
    neither = config.updated(policies=["a", "b"], policy_mapping_fn=lambda agent, **_: "a")
    neither = neither.updated(input_policy_id="right")
    with (
        neither.build() as algorithm,
        pytest.raises(OfflineDataError, match="plan has only a, b"),
    ):
        algorithm.train()


def test_evaluation_may_have_workers(folder):
    config = BCConfig(env=OneStepEnv, input_=str(folder), evaluation_num_workers=1, seed=0)
    EvaluationWorkers(config, None)  # starts no actors yet


def test_cql_clips_recorded_actions_to_the_action_space(tmp_path):
    """The environment clipped them too, so the critics must not see values outside the bounds."""
    rng = np.random.default_rng(0)
    rows = SampleBatch(
        obs=rng.uniform(-1, 1, (64, 3)).astype(np.float32),
        new_obs=rng.uniform(-1, 1, (64, 3)).astype(np.float32),
        actions=rng.normal(0, 3, (64, 1)).astype(np.float32),
        rewards=np.zeros(64, np.float32),
        terminateds=np.zeros(64, bool),
    )
    write_parquet(tmp_path / "a.parquet", rows)
    bounded = spaces.Box(-2, 2, (1,), np.float32)
    config = CQLConfig(**SMALL, input_=str(tmp_path), observation_space=BOX, action_space=bounded)
    with config.build() as algorithm:
        batch = next(iter(config.batches(algorithm.workers)))
    assert float(np.abs(batch["actions"]).max()) == 1.0


def test_actions_that_the_recorded_mask_forbids_are_rejected(tmp_path):
    space = spaces.Dict({"action_mask": spaces.MultiBinary(2), "x": BOX})
    mask = np.array([[1, 1], [0, 1]], np.int8)
    rows = SampleBatch(
        obs={"action_mask": mask, "x": np.zeros((2, 3), np.float32)},
        actions=np.array([1, 0]),
    )
    write_parquet(tmp_path / "rows.parquet", rows, "default_policy")
    config = BCConfig(**SMALL, input_=str(tmp_path), observation_space=space, action_space=TWO)
    with (
        config.build() as algorithm,
        pytest.raises(OfflineDataError, match="actions: 0 in row 1 is forbidden"),
    ):
        algorithm.train()


def test_mask_of_several_actions_has_one_part_for_each():
    space, mask = spaces.MultiDiscrete([2, 3]), np.array([[1, 0, 1, 1, 0]], np.int8)
    assert find_masked(space, {"action_mask": mask}, np.array([[0, 1]])) is None
    for forbidden in ([1, 1], [0, 2]):
        assert "is forbidden" in find_masked(space, {"action_mask": mask}, np.array([forbidden]))
    assert find_masked(space, {"action_mask": mask[:, :2]}, np.array([[1, 1]])) is None
