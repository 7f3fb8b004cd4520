"""Minari datasets: rows, conversion of actions, training."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.algorithms.cql import CQLConfig
from flowrl.algorithms.marwil import BCConfig
from flowrl.errors import OfflineDataError
from flowrl.offline.minari import MinariDataset
from flowrl.ops import ReadMinari
from tests.extras import require_extra

BOX = spaces.Box(-1, 1, (3,), np.float32)
SMALL = {"seed": 0, "train_batch_size": 64, "min_sample_timesteps_per_iteration": 128}
DATASET = "tests/pendulum-v0"


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    """Create the dataset `DATASET`; return its two episodes of 200 random Pendulum-v1 steps."""
    require_extra("minari")
    import minari
    from minari.data_collector import EpisodeBuffer

    patch = pytest.MonkeyPatch()
    patch.setenv("MINARI_DATASETS_PATH", str(tmp_path_factory.mktemp("minari")))
    env, episodes = gym.make("Pendulum-v1"), []
    for number in range(2):
        observations = [env.reset(seed=number)[0]]
        env.action_space.seed(number)
        steps = []
        while not steps or not steps[-1][3]:
            action = env.action_space.sample()
            observation, *result, _ = env.step(action)
            steps.append((action, *result))
            observations.append(observation)
        actions, rewards, terminations, truncations = map(np.array, zip(*steps, strict=True))
        episodes.append(
            EpisodeBuffer(
                id=number,
                seed=number,
                observations=np.array(observations),
                actions=actions,
                rewards=rewards.tolist(),
                terminations=terminations.tolist(),
                truncations=truncations.tolist(),
                infos={},
            )
        )
    minari.create_dataset_from_buffers(
        DATASET,
        buffer=episodes,
        env="Pendulum-v1",
        eval_env="Pendulum-v1",
        algorithm_name="random",
        author="none",
        author_email="none@none",
        code_permalink="none",
        description="random actions",
        data_format="arrow",
    )
    yield episodes
    patch.undo()


def test_rows_equal_the_dataset(episodes):
    dataset = MinariDataset(DATASET)
    assert dataset.parts() == [[0, 1]]
    rows = dataset.read([1])
    episode = episodes[1]
    np.testing.assert_array_equal(rows["obs"], episode.observations[:-1])
    np.testing.assert_array_equal(rows["new_obs"], episode.observations[1:])
    np.testing.assert_array_equal(rows["actions"], episode.actions)
    np.testing.assert_allclose(rows["rewards"], episode.rewards, rtol=1e-6)
    assert rows["truncateds"].tolist() == [False] * 199 + [True]
    assert rows["t"].tolist() == list(range(200))
    assert not rows["terminateds"].any()


def test_actions_are_converted_to_policy_actions(episodes):
    config = CQLConfig(env="Pendulum-v1", **SMALL, model={"fcnet_hiddens": [8]})
    with config.build() as algorithm:
        columns = ["obs", "actions", "t"]
        stream = ReadMinari(algorithm.workers, DATASET, 400, columns=columns, seed=0)
        (batch,) = stream.take(1)
        env_actions = algorithm.get_policy().actions_for_env(batch["actions"])
    assert abs(batch["actions"]).max() <= 1 < abs(env_actions).max()
    recorded = np.concatenate([episode.actions for episode in episodes])
    np.testing.assert_allclose(
        np.sort(env_actions[:, 0]), np.sort(recorded[:, 0]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.usefixtures("episodes")
def test_plan_trains_on_a_dataset():
    config = CQLConfig(
        env="Pendulum-v1", **SMALL, model={"fcnet_hiddens": [8]}, input_=f"minari:{DATASET}"
    )
    with config.build() as algorithm:
        assert algorithm.train()["num_env_steps_trained"] == 128
        assert f"ReadMinari('{DATASET}')" in algorithm.plan.explain()


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
def test_env_actions_survive_a_round_trip_through_policy_actions(space):
    policy = A2CTorchPolicy(BOX, space, {})
    space.seed(0)
    samples = [space.sample() for _ in range(20)]
    env_actions = gym.vector.utils.concatenate(
        space, samples, gym.vector.utils.create_empty_array(space, 20)
    )
    result = policy.actions_for_env(policy.actions_from_env(env_actions))
    for actual, expected in zip(leaves(result), leaves(env_actions), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def leaves(tree):
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    return [leaf for part in tree for leaf in leaves(part)] if isinstance(tree, tuple) else [tree]


@pytest.mark.usefixtures("episodes")
def test_input_policy_id_selects_the_policy_that_trains():
    config = BCConfig(env="Pendulum-v1", **SMALL, input_=f"minari:{DATASET}")
    config = config.updated(
        policies={"default_policy": None, "trained": None}, input_policy_id="trained"
    )
    with config.build() as algorithm:
        assert algorithm.train()["counters"]["num_agent_steps_sampled/trained"] > 0


@pytest.mark.usefixtures("episodes")
def test_unsuitable_missing_and_damaged_datasets_are_rejected(monkeypatch):
    import minari

    config = BCConfig(env="CartPole-v1", **SMALL, input_=f"minari:{DATASET}")
    with (
        config.build() as algorithm,
        pytest.raises(OfflineDataError, match=r"its action space is Box.*the policy's is Discrete"),
    ):
        algorithm.train()
    monkeypatch.setattr(minari, "download_dataset", lambda name: None)
    with pytest.raises(OfflineDataError, match="minari:tests/none-v9: cannot be loaded"):
        MinariDataset("tests/none-v9")
    dataset = MinariDataset(DATASET)
    monkeypatch.setattr(minari.MinariDataset, "iterate_episodes", lambda *_: iter([1 / 0]))
    with pytest.raises(OfflineDataError, match=f"minari:{DATASET}: cannot be read"):
        dataset.read([0])
