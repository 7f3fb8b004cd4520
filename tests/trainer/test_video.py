"""Videos of evaluations: how many frames, of which episodes, and what cannot be recorded."""

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.cli.main import main
from flowrl.envs import MultiAgentEnv
from flowrl.policies import ConfigError
from flowrl.trainer import video
from flowrl.trainer.evaluation import check_evaluation_env


class Greys(gym.Env):
    """Episodes of five steps; frames that get brighter, or what it is told to render."""

    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_fps": 10}

    def __init__(self, shape=(33, 48, 3), dtype="uint8"):
        self.shape, self.dtype = tuple(shape), dtype

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == 5, False, {}

    def render(self):
        return np.full(self.shape, 40 * self.t, self.dtype)


class TwoGreys(MultiAgentEnv):
    """Two agents in one of them."""

    possible_agents = ["a", "b"]

    metadata = Greys.metadata

    def __init__(self):
        self.env = Greys()
        self.observation_space, self.action_space = Greys.observation_space, Greys.action_space

    def reset(self, *, seed=None, options=None):
        obs, _ = self.env.reset(seed=seed)
        return dict.fromkeys("ab", obs), {}

    def step(self, action_dict):
        obs, reward, terminated, _, _ = self.env.step(0)
        ended = {"__all__": terminated}
        return dict.fromkeys("ab", obs), dict.fromkeys("ab", reward), ended, {"__all__": False}, {}

    def render(self):
        return self.env.render()


def config(**settings):
    base = {"env": Greys, "train_batch_size": 40, "seed": 2, "model": {"fcnet_hiddens": [8]}}
    return A2CConfig(**{**base, **settings})


def frames_of(path):
    reader = imageio_ffmpeg.read_frames(str(path))
    about = next(reader)
    width, height = about["size"]
    frames = [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]
    return about, frames


@pytest.mark.parametrize("env", [Greys, lambda context: TwoGreys()], ids=["one", "agents"])
def test_an_episode_is_a_file(tmp_path, env):
    with config(env=env).build() as algorithm:
        algorithm.evaluate(episodes=4, num_envs=2, video_dir=tmp_path / "films")
    (file,) = (tmp_path / "films").iterdir()
    about, frames = frames_of(file)
    assert about["fps"] == 10
    assert len(frames) == 6  # after the reset, and after each step
    levels = [frame.mean() for frame in frames]
    assert np.allclose(levels, [0, 40, 80, 120, 160, 200], atol=6)


def test_in_between(tmp_path):
    own = config().evaluation(
        evaluation_interval=2, evaluation_video_dir=str(tmp_path), evaluation_video_episodes=2
    )
    with own.build() as algorithm:
        for _ in range(4):
            algorithm.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"iteration-{i:06d}-{k}.mp4" for i in (2, 4) for k in (0, 1)
    ]


@pytest.mark.usefixtures("ray_session")
def test_on_actors_one_of_them_records(tmp_path):
    own = config().evaluation(
        evaluation_interval=1, evaluation_num_workers=2, evaluation_video_dir=str(tmp_path)
    )
    with own.build() as algorithm:
        algorithm.train()
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-000001-0.mp4"]


def test_an_environment_by_id_is_told_to_render(tmp_path):
    with config(env="CartPole-v1").build() as algorithm:
        told = algorithm.evaluate(episodes=1, video_dir=tmp_path)
    _, frames = frames_of(tmp_path / "evaluation-0.mp4")
    assert len(frames) == told["episode_len_mean"] + 1
    assert frames[0].shape == (400, 600, 3)
    assert frames[0].std() > 0


def test_the_command(tmp_path, capsys):
    run = str(tmp_path / "run")
    stop = ["--stop-iters", "1", "--train-batch-size", "64", "--seed", "1"]
    assert main(["train", "a2c", *stop, "--run-dir", run]) == 0
    assert main(["evaluate", run, "--episodes", "2", "--video", str(tmp_path / "films")]) == 0
    assert [path.name for path in (tmp_path / "films").iterdir()] == ["evaluation-0.mp4"]


@pytest.mark.parametrize(
    ("env", "settings", "got"),
    [
        (Greys, {"shape": (4, 4)}, r"an array \[4, 4\]"),
        (Greys, {"dtype": "float32"}, "an array .* of float32"),
        (lambda context: gym.make("CartPole-v1"), {}, "nothing"),
    ],
)
def test_what_renders_nothing_is_refused_before_the_run(tmp_path, env, settings, got):
    own = config(env=env, env_config=settings, evaluation_video_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=f"gives {got}.*rgb_array"):
        check_evaluation_env(own, {})


class Fails(Greys):
    """Renders another size, or not at all, from the third step on."""

    metadata = {"render_fps": np.int64(10)}

    def __init__(self, size=None):
        super().__init__()
        self.size = size

    def render(self):
        if self.t < 3:
            return super().render()
        if self.size is None:
            raise OSError("no context")
        return np.zeros(self.size, np.uint8)


@pytest.mark.parametrize("size", [None, (48, 33, 3)])
def test_rendering_that_fails_costs_only_the_video(tmp_path, caplog, size):
    own = config(env=Fails, env_config={"size": size}, max_num_env_restarts=0)
    with own.build() as algorithm:
        told = algorithm.evaluate(episodes=3, video_dir=tmp_path)
    assert told["episodes"] == 3
    assert caplog.text.count("was not recorded further") == 1
    _, frames = frames_of(tmp_path / "evaluation-0.mp4")
    assert len(frames) == 3


def test_an_environment_that_is_shared_is_recorded_in_evaluations_alone(tmp_path):
    shared = Greys()
    with config(env=lambda context: shared, evaluation_video_episodes=5).build() as algorithm:
        algorithm.evaluate(episodes=2, video_dir=tmp_path)
        for _ in range(3):
            algorithm.train()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("mode", ["vector_entry_point", "sync"])
def test_other_ways_to_vectorise(tmp_path, mode):
    own = config(env="CartPole-v1", vectorization_mode=mode, num_envs_per_worker=2)
    with own.build() as algorithm:
        told = algorithm.evaluate(episodes=2, num_envs=2, video_dir=tmp_path)
    assert told["episodes"] == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_envpool_is_refused():
    own = config(env="CartPole-v1", vectorization_mode="envpool", evaluation_video_dir="x")
    with pytest.raises(ConfigError, match="EnvPool renders nothing"):
        own.check()


def test_pettingzoo_renders(tmp_path):
    from pettingzoo.classic import tictactoe_v3

    from flowrl.envs.pettingzoo import PettingZooEnv

    def make(context):
        return PettingZooEnv(tictactoe_v3.env(render_mode="rgb_array"))

    with config(env=make).build() as algorithm:
        algorithm.evaluate(episodes=1, video_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr(video, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "flowrl\[video\]"'):
        config(evaluation_video_dir=str(tmp_path)).build()
    with (
        config().build() as algorithm,
        pytest.raises(ConfigError, match=r'pip install "flowrl\[video\]"'),
    ):
        algorithm.evaluate(episodes=1, video_dir=tmp_path)


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        config().build() as algorithm,
        pytest.raises(ConfigError, match="cannot make the folder"),
    ):
        algorithm.evaluate(episodes=1, video_dir=tmp_path / "file")
