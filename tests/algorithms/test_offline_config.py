"""Recorded experience without an environment, and Minari's data sets."""

import shutil
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from flowrl.algorithms.cql import CQLConfig
from flowrl.algorithms.marwil import BC, BCConfig, MARWILConfig
from flowrl.cli.stop_rules import StopRules
from flowrl.data import SampleBatch
from flowrl.offline.minari import MinariDataset
from flowrl.offline.parquet import OfflineDataError, parquet_files, read_parquet, write_parquet
from flowrl.ops import ReadMinari
from flowrl.policies import ConfigError
from flowrl.trainer.evaluation import EvaluationWorkers

BOX = spaces.Box(-1, 1, (3,), np.float32)
TWO = spaces.Discrete(2)
SMALL = {"seed": 0, "train_batch_size": 64, "min_sample_timesteps_per_iteration": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """200 rows whose actions say whether the first feature is positive."""
    made = tmp_path_factory.mktemp("rows")
    seen = np.random.default_rng(0).uniform(-1, 1, (201, 3)).astype(np.float32)
    batch = SampleBatch(
        obs=seen[:-1],
        new_obs=seen[1:],
        actions=(seen[:-1, 0] > 0).astype(np.int64),
        rewards=np.ones(200, np.float32),
        terminateds=np.arange(200) % 20 == 19,
        truncateds=np.zeros(200, bool),
        unroll_id=np.arange(200) // 20,
    )
    write_parquet(made / "rows.parquet", batch)
    return made


@pytest.mark.parametrize("kind", [BCConfig, MARWILConfig, CQLConfig])
def test_without_an_environment(kind, folder):
    config = kind(**SMALL).offline_data(input_=str(folder), observation_space=BOX, action_space=TWO)
    with config.build() as algorithm:
        for _ in range(2):
            told = algorithm.train()
        assert told["num_env_steps_trained"] == 256
        assert algorithm.compute_single_action(np.zeros(3, np.float32)) in (0, 1)
        with pytest.raises(ConfigError, match="no environment to sample or to evaluate in"):
            algorithm.evaluate()


def test_it_learns_and_is_loaded_with_its_spaces(folder, tmp_path):
    config = BCConfig(**SMALL, lr=3e-3, input_=str(folder), observation_space=BOX, action_space=TWO)
    with config.build() as algorithm:
        for _ in range(40):
            algorithm.train()
        algorithm.save(tmp_path / "there")
    with BC.from_checkpoint(tmp_path / "there") as again:
        seen = np.random.default_rng(3).uniform(-1, 1, (300, 3)).astype(np.float32)
        done = again.get_policy().compute_actions(seen, explore=False)[0]
        assert (done == (seen[:, 0] > 0)).mean() > 0.9


class Cube(gym.Env):
    """Any observation of three numbers, two actions, one step."""

    observation_space, action_space = BOX, TWO

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.zeros(3, np.float32), 1.0, True, False, {}


def test_an_environment_for_evaluation_alone(folder):
    config = BCConfig(**SMALL, input_=str(folder), observation_space=BOX, action_space=TWO)
    config = config.evaluation(evaluation_interval=1, evaluation_config={"env": Cube})
    with config.build() as algorithm:
        assert algorithm.train()["evaluation"]["episode_reward_mean"] == 1.0


def test_what_is_missing_is_said(folder):
    with pytest.raises(ConfigError, match="or the observation_space and action_space"):
        BCConfig(**SMALL, input_=str(folder)).build()
    for name in ("normalize_observations", "normalize_rewards"):
        with pytest.raises(ConfigError, match=f"{name} is for what is sampled"):
            BCConfig(**{name: True})
    with pytest.raises(ConfigError, match="give both"):
        BCConfig(observation_space=BOX)
    with pytest.raises(ConfigError, match="gymnasium space"):
        BCConfig(observation_space=3, action_space=TWO)
    config = BCConfig(**SMALL, input_=str(folder), observation_space=BOX, action_space=TWO)
    with pytest.raises(ConfigError, match="evaluation_interval"):
        config.evaluation(evaluation_interval=1).build()
    with pytest.raises(ConfigError, match="no environment to sample"):
        config.updated(
            evaluation_interval=None, evaluation_video_dir="films"
        ).build().check_evaluation()


# -- Minari ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Two episodes of Pendulum-v1 under random actions, of 200 steps each."""
    import minari
    from minari.data_collector import EpisodeBuffer

    patch = pytest.MonkeyPatch()
    patch.setenv("MINARI_DATASETS_PATH", str(tmp_path_factory.mktemp("minari")))
    env, made = gym.make("Pendulum-v1"), []
    for number in range(2):
        seen = [env.reset(seed=number)[0]]
        env.action_space.seed(number)
        steps = []
        while not steps or not steps[-1][3]:
            action = env.action_space.sample()
            steps.append((action, *env.step(action)[1:4]))
            seen.append(env.unwrapped._get_obs())
        actions, rewards, ended, cut = map(np.array, zip(*steps, strict=True))
        made.append(
            EpisodeBuffer(
                id=number,
                seed=number,
                observations=np.array(seen),
                actions=actions,
                rewards=rewards.tolist(),
                terminations=ended.tolist(),
                truncations=cut.tolist(),
                infos={},
            )
        )
    minari.create_dataset_from_buffers(
        "tests/pendulum-v0",
        buffer=made,
        env="Pendulum-v1",
        eval_env="Pendulum-v1",
        algorithm_name="random",
        author="none",
        author_email="none@none",
        code_permalink="none",
        description="random actions",
        data_format="arrow",
    )
    yield made
    patch.undo()


def test_rows_are_those_of_the_data_set(dataset):
    there = MinariDataset("tests/pendulum-v0")
    assert there.parts() == [[0, 1]]
    rows = there.read([1])
    own = dataset[1]
    np.testing.assert_array_equal(rows["obs"], own.observations[:-1])
    np.testing.assert_array_equal(rows["new_obs"], own.observations[1:])
    np.testing.assert_array_equal(rows["actions"], own.actions)
    np.testing.assert_allclose(rows["rewards"], own.rewards, rtol=1e-6)
    assert rows["truncateds"].tolist() == [False] * 199 + [True]
    assert rows["t"].tolist() == list(range(200))
    assert not rows["terminateds"].any()


def test_actions_become_the_policys(dataset):
    config = CQLConfig(env="Pendulum-v1", **SMALL, model={"fcnet_hiddens": [8]})
    with config.build() as algorithm:
        names = ["obs", "actions", "t"]
        stream = ReadMinari(algorithm.workers, "tests/pendulum-v0", 400, columns=names, seed=0)
        (batch,) = stream.take(1)
        policy = algorithm.get_policy()
        back = policy.actions_for_env(batch["actions"])
    assert abs(batch["actions"]).max() <= 1 < abs(back).max()
    every = np.concatenate([own.actions for own in dataset])
    np.testing.assert_allclose(np.sort(back[:, 0]), np.sort(every[:, 0]), rtol=1e-5, atol=1e-6)


def test_plans_learn_from_it(dataset):
    config = CQLConfig(
        env="Pendulum-v1", **SMALL, model={"fcnet_hiddens": [8]}, input_="minari:tests/pendulum-v0"
    )
    with config.build() as algorithm:
        assert algorithm.train()["num_env_steps_trained"] == 128
        assert "ReadMinari('tests/pendulum-v0')" in algorithm.plan.explain()


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(5, start=2),
        spaces.Box(-3, 7, (2, 2), np.float32),
        spaces.Box(-np.inf, np.inf, (2,), np.float32),
        spaces.MultiDiscrete([3, 4], start=[1, 5]),
        spaces.Dict({"a": spaces.Box(0, 1, (1,), np.float32), "b": spaces.Discrete(3, start=1)}),
        spaces.Tuple((spaces.MultiBinary(3), spaces.Box(-1, 0.5, (2,), np.float64))),
    ],
    ids=lambda space: type(space).__name__,
)
def test_actions_from_an_environment_and_back(space):
    from flowrl.algorithms.a2c import A2CTorchPolicy

    policy = A2CTorchPolicy(BOX, space, {})
    space.seed(0)
    drawn = [space.sample() for _ in range(20)]
    gathered = gym.vector.utils.concatenate(
        space, drawn, gym.vector.utils.create_empty_array(space, 20)
    )
    given = policy.actions_from_env(gathered)
    back = policy.actions_for_env(given)
    for one, other in zip(*map(leaves, (back, gathered)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def leaves(tree):
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    return [leaf for part in tree for leaf in leaves(part)] if isinstance(tree, tuple) else [tree]


def test_the_policy_that_is_named_learns_from_a_data_set(dataset):
    config = BCConfig(env="Pendulum-v1", **SMALL, input_="minari:tests/pendulum-v0")
    config = config.updated(policies={"default_policy": None, "own": None}, input_policy_id="own")
    with config.build() as algorithm:
        assert algorithm.train()["counters"]["num_agent_steps_sampled/own"] > 0


def test_other_data_sets_are_refused(dataset, monkeypatch):
    config = BCConfig(env="CartPole-v1", **SMALL, input_="minari:tests/pendulum-v0")
    with config.build() as algorithm, pytest.raises(OfflineDataError, match="its actions are of"):
        algorithm.train()
    import minari

    there = minari.load_dataset
    monkeypatch.setattr(minari, "load_dataset", lambda name, download: there(name))  # no network
    with pytest.raises(OfflineDataError, match="minari:tests/none-v9: it cannot be loaded"):
        MinariDataset("tests/none-v9")
    damaged = MinariDataset("tests/pendulum-v0")
    monkeypatch.setattr(damaged, "_episodes", lambda part: iter([1 / 0]))
    with pytest.raises(OfflineDataError, match="minari:tests/pendulum-v0: it cannot be read"):
        damaged.read([0])
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(OfflineDataError, match=r"pip install 'flowrl\[minari\]'"):
        MinariDataset("tests/pendulum-v0")


def test_episodes_that_are_not_there_end_no_run(folder):
    config = BCConfig(env="CartPole-v1", input_=str(folder))
    for name in ("episode_reward_mean", "policy_reward_mean/default_policy"):
        with pytest.raises(ConfigError, match=r"'evaluation/episode_reward_mean' \(\.evaluation"):
            StopRules(metrics=[(name, ">=", 9.0)]).check(config)
    with pytest.raises(ConfigError, match="nothing is sampled"):
        StopRules(reward=9.0).check(config)
    assert StopRules().with_defaults(config).reward is None
    with pytest.raises(ConfigError, match="checkpoint_score_attribute: there is no 'episode_rew"):
        config.updated(checkpoint_score_attribute="episode_reward_mean").check()
    wanted = config.updated(evaluation_interval=1)
    StopRules(metrics=[("evaluation/episode_reward_mean", ">=", 9.0)]).check(wanted)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_workers": 2}, "num_workers is for what is sampled"),
        ({"output": "x"}, "output is for what is sampled"),
        ({"beta": 1.0}, "BC has no weights"),
        ({"model": {"use_lstm": True}}, "model: BC learns from single rows"),
        ({"model": {"num_framestacks": 2}}, "model: BC learns from single rows"),
        ({"env": "CartPole-v1"}, "the env says them"),
    ],
)
def test_settings_that_would_do_nothing(settings, said, folder):
    known = {"input_": str(folder), "observation_space": BOX, "action_space": TWO}
    with pytest.raises(ConfigError, match=said), BCConfig(**{**known, **settings}).build() as made:
        made.train()


@pytest.mark.parametrize("number", [2, -1])
def test_actions_beyond_the_space_are_named(number, tmp_path):
    rows = SampleBatch(obs=np.zeros((4, 3), np.float32), actions=np.array([0, 1, number, 0]))
    write_parquet(tmp_path / "a.parquet", rows)
    config = BCConfig(**SMALL, input_=str(tmp_path), observation_space=BOX, action_space=TWO)
    with config.build() as algorithm, pytest.raises(OfflineDataError) as caught:
        algorithm.train()
    said = str(caught.value)
    assert "a.parquet: it is of other spaces than the policy: actions: numbers from 0" in said
    assert str(number) in said


def test_validation_looks_for_the_experience(folder, tmp_path):
    config = BCConfig(observation_space=BOX, action_space=TWO)
    with pytest.raises(ConfigError, match="input_: none is set"):
        config.validate()
    with pytest.raises(ConfigError, match=r"input_: there is no /.*/none"):
        config.updated(input_=str(tmp_path / "none")).validate()
    config.updated(input_=str(folder)).validate()


def test_a_checkpoint_acts_without_its_data(folder, tmp_path):
    moved = tmp_path / "data"
    shutil.copytree(folder, moved)
    config = BCConfig(**SMALL, input_=str(moved), observation_space=BOX, action_space=TWO)
    with config.build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        expected = algorithm.train()["learners"]
    shutil.rmtree(moved)
    with BC.from_checkpoint(tmp_path / "c") as again:
        assert again.compute_single_action(np.zeros(3, np.float32)) in (0, 1)
        again.save(tmp_path / "d")
        with pytest.raises(OfflineDataError, match="there is no such folder"):
            again.train()
    shutil.copytree(folder, moved)
    with BC.from_checkpoint(tmp_path / "d") as again:  # saved before a file was opened again
        assert again.train()["learners"] == expected


def test_one_of_several_recorded_policies(folder, tmp_path):
    _, rows = read_parquet(folder / "rows.parquet")
    for name, flip in (("left", False), ("right", True)):
        own = rows.with_columns(actions=1 - rows["actions"]) if flip else rows
        write_parquet(tmp_path / f"{name}.parquet", own, name)
    config = BCConfig(
        **SMALL, lr=3e-3, input_=str(tmp_path), observation_space=BOX, action_space=TWO
    )
    with (
        config.build() as algorithm,
        pytest.raises(
            OfflineDataError, match=r"only of 'left', 'right': say which: .*input_policy"
        ),
    ):
        algorithm.train()
    seen = np.array([[0.9, 0, 0], [-0.9, 0, 0]], np.float32)
    for name, best in (("left", [1, 0]), ("right", [0, 1])):
        with config.updated(input_policy_id=name).build() as algorithm:
            for _ in range(30):
                algorithm.train()
            done = algorithm.get_policy().compute_actions(seen, explore=False)[0]
            assert done.tolist() == best
    two = config.updated(policies={"default_policy": None, "right": None}, input_policy_id="right")
    with two.build() as algorithm:
        others = algorithm.get_policy("default_policy").get_weights()
        for _ in range(30):
            counters = algorithm.train()["counters"]
        done = algorithm.get_policy("right").compute_actions(seen, explore=False)[0]
        assert done.tolist() == [0, 1]
        for name, weight in algorithm.get_policy("default_policy").get_weights().items():
            np.testing.assert_array_equal(weight, others[name])
        assert counters["num_agent_steps_sampled/right"] > 0
    none = config.updated(policies=["a", "b"], policy_mapping_fn=lambda agent, **_: "a")
    none = none.updated(input_policy_id="right")
    with none.build() as algorithm, pytest.raises(OfflineDataError, match="plan has only a, b"):
        algorithm.train()


def test_workers_of_evaluations_are_no_workers_of_the_plan(folder):
    config = BCConfig(env=Cube, input_=str(folder), evaluation_num_workers=1, seed=0)
    EvaluationWorkers(config, None)  # nothing is started


def test_what_nobody_stopped_is_written_at_the_end(tmp_path):
    code = """
import gc, os, shutil, sys
import numpy as np
from flowrl.data import SampleBatch
from flowrl.offline.parquet import ParquetWriter

def record(folder):
    writer = ParquetWriter(folder)
    writer.add(SampleBatch(obs=np.zeros(200), actions=np.zeros(200)))
    return writer

os.mkdir("d"), os.mkdir("gone")
kept, gone = record("d"), record("gone")
record("dropped")
gc.collect()
shutil.rmtree("gone")
child = os.fork()
if child == 0:
    sys.exit()
os.waitpid(child, 0)
assert not os.listdir("d")
kept.add(SampleBatch(obs=np.zeros(1), actions=np.zeros(1)))
raise RuntimeError("no more")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert "RuntimeError: no more" in done.stderr
    assert "gone: rows that were recorded last are lost: /" in done.stderr
    assert not (tmp_path / "gone").exists()
    for folder, rows in (("d", 201), ("dropped", 200)):
        (path,) = parquet_files(tmp_path / folder)
        assert read_parquet(path)[1].count == rows


def test_actions_are_learned_as_the_environment_took_them(tmp_path):
    """CQL's critics see none beyond the bounds, where a Gaussian policy's were clipped."""
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
