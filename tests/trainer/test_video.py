"""Videos of evaluations: files, frames and errors."""

import re
import sys

import gymnasium as gym
import numpy as np
import pytest

from tests.extras import require_extra

require_extra("video")

import imageio_ffmpeg

from flowrl import errors
from flowrl.algorithms.a2c import A2CConfig
from flowrl.cli.main import main
from flowrl.envs import MultiAgentEnv
from flowrl.errors import install_command
from flowrl.policies import ConfigError
from flowrl.trainer.evaluation import check_evaluation_env


class GrayFrames(gym.Env):
    """Episodes of five steps; each frame is brighter than the one before."""

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


class TwoAgentGrayFrames(MultiAgentEnv):
    possible_agents = ["a", "b"]
    metadata = GrayFrames.metadata

    def __init__(self):
        self.env = GrayFrames()
        self.observation_space = GrayFrames.observation_space
        self.action_space = GrayFrames.action_space

    def reset(self, *, seed=None, options=None):
        obs, _ = self.env.reset(seed=seed)
        return dict.fromkeys("ab", obs), {}

    def step(self, action_dict):
        obs, reward, terminated, _, _ = self.env.step(0)
        terminateds = {"__all__": terminated}
        return (
            dict.fromkeys("ab", obs), dict.fromkeys("ab", reward), terminateds, {"__all__": False},
            {},
        )  # fmt: skip

    def render(self):
        return self.env.render()


def a2c_config(**settings):
    base = {"env": GrayFrames, "train_batch_size": 40, "seed": 2, "model": {"fcnet_hiddens": [8]}}
    return A2CConfig(**{**base, **settings})


def read_video(path):
    """Return the metadata and the frames of a file."""
    reader = imageio_ffmpeg.read_frames(str(path))
    metadata = next(reader)
    width, height = metadata["size"]
    frames = [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]
    return metadata, frames


@pytest.mark.parametrize(
    "env", [GrayFrames, lambda context: TwoAgentGrayFrames()], ids=["one", "agents"]
)
def test_video_has_one_frame_per_observation(tmp_path, env):
    with a2c_config(env=env).build() as algorithm:
        algorithm.evaluate(episodes=4, num_envs=2, video_dir=tmp_path / "films")
    (file,) = (tmp_path / "films").iterdir()
    metadata, frames = read_video(file)
    assert metadata["fps"] == 10
    assert len(frames) == 6  # after the reset and after each step
    brightness = [frame.mean() for frame in frames]
    assert np.allclose(brightness, [0, 40, 80, 120, 160, 200], atol=6)


def test_evaluations_during_training_are_recorded(tmp_path):
    config = a2c_config().evaluation(
        evaluation_interval=2, evaluation_video_dir=str(tmp_path), evaluation_video_episodes=2
    )
    with config.build() as algorithm:
        for _ in range(4):
            algorithm.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"iteration-{i:06d}-{k}.mp4" for i in (2, 4) for k in (0, 1)
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_one_of_several_evaluation_workers_records(tmp_path):
    config = a2c_config().evaluation(
        evaluation_interval=1, evaluation_num_workers=2, evaluation_video_dir=str(tmp_path)
    )
    with config.build() as algorithm:
        algorithm.train()
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-000001-0.mp4"]


def test_environment_created_by_id_renders(tmp_path):
    with a2c_config(env="CartPole-v1").build() as algorithm:
        metrics = algorithm.evaluate(episodes=1, video_dir=tmp_path)
    _, frames = read_video(tmp_path / "evaluation-000000-0.mp4")
    assert len(frames) == metrics["episode_len_mean"] + 1
    assert frames[0].shape == (400, 600, 3)
    assert frames[0].std() > 0


def test_evaluate_command_records_a_video(tmp_path, capsys):
    run = str(tmp_path / "run")
    stop = ["--stop-iters", "1", "--train-batch-size", "64", "--seed", "1"]
    assert main(["train", "a2c", *stop, "--run-dir", run]) == 0
    assert main(["evaluate", run, "--episodes", "2", "--video", str(tmp_path / "films")]) == 0
    assert [path.name for path in (tmp_path / "films/run").iterdir()] == ["evaluation-000001-0.mp4"]
    assert main(["evaluate", run, "--render", "human", "--video", str(tmp_path)]) == 2
    assert "give one of the two" in capsys.readouterr().err
    assert main(["resume", run, "--stop-iters", "2"]) == 0
    assert main(["evaluate", run, "--episodes", "2", "--video", str(tmp_path / "films")]) == 0
    assert len(list((tmp_path / "films/run").iterdir())) == 2  # each checkpoint has its own


@pytest.mark.parametrize(
    ("env", "env_config", "rendered"),
    [
        (GrayFrames, {"shape": (4, 4)}, r"an array \[4, 4\]"),
        (GrayFrames, {"dtype": "float32"}, "an array .* of float32"),
        (lambda context: gym.make("CartPole-v1"), {}, "nothing.*render_mode is None"),
        ("FrozenLake-v1", {"render_mode": "ansi"}, "a str.*render_mode is 'ansi'"),
    ],
)
def test_environment_without_rgb_frames_is_rejected_before_training(
    tmp_path, env, env_config, rendered
):
    config = a2c_config(env=env, env_config=env_config, evaluation_video_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=f"returns {rendered}.*rgb_array"):
        check_evaluation_env(config, {})


class RenderingRaises(GrayFrames):
    """Raises at every call of render()."""

    created = 0

    def __init__(self):
        super().__init__()
        type(self).created += 1

    def render(self):
        raise NotImplementedError("no display")


def test_environment_whose_render_raises_is_not_recreated(tmp_path, monkeypatch):
    monkeypatch.setattr(RenderingRaises, "created", 0)
    config = a2c_config(env=RenderingRaises, evaluation_video_dir=str(tmp_path))
    message = r"RenderingRaises cannot be recorded: its render\(\) raised .*no display.*rgb_array"
    with pytest.raises(ConfigError, match=f"^evaluation_video_dir: .*{message}"):
        check_evaluation_env(config, {})
    with (
        config.build() as algorithm,
        pytest.raises(ConfigError, match=rf"^video_dir \(--video\): .*{message}"),
    ):
        algorithm.evaluate(episodes=1, video_dir=tmp_path)
    assert RenderingRaises.created == 3  # the check, the worker, the evaluation


def test_environment_without_a_render_mode_is_rejected(tmp_path):
    gym.register("FlowrlGrayFrames-v0", GrayFrames)
    with (
        a2c_config(env="FlowrlGrayFrames-v0").build() as algorithm,
        pytest.raises(ConfigError, match=r"FlowrlGrayFrames-v0 .* has no argument render_mode"),
    ):
        algorithm.evaluate(episodes=1, video_dir=tmp_path)


class RenderingFails(GrayFrames):
    """From the third step on, renders frames of another size or raises."""

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
def test_rendering_failure_stops_only_the_video(tmp_path, caplog, size):
    config = a2c_config(env=RenderingFails, env_config={"size": size}, max_num_env_restarts=0)
    with config.build() as algorithm:
        metrics = algorithm.evaluate(episodes=3, video_dir=tmp_path)
    assert metrics["episodes"] == 3
    assert caplog.text.count("recording of evaluation-000000-0.mp4 stopped") == 1
    _, frames = read_video(tmp_path / "evaluation-000000-0.mp4")
    assert len(frames) == 3


def test_full_disk_stops_only_the_video(tmp_path, caplog, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(imageio_ffmpeg, "write_frames", fail)
    with a2c_config(env=GrayFrames).build() as algorithm:
        metrics = algorithm.evaluate(episodes=3, video_dir=tmp_path)
    assert metrics["episodes"] == 3
    assert metrics["episode_len_mean"] == 5
    assert caplog.text.count("stopped: OSError(28") == 1
    assert "recreating" not in caplog.text
    assert not list(tmp_path.iterdir())


def test_file_that_cannot_be_completed_stops_only_the_video(tmp_path, caplog, monkeypatch):
    write_frames = imageio_ffmpeg.write_frames

    def fail_at_the_end(*args, **kwargs):
        writer = write_frames(*args, **kwargs)
        try:
            while True:
                writer.send((yield))
        finally:
            writer.close()
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(imageio_ffmpeg, "write_frames", fail_at_the_end)
    envs = []

    def make_env(context):
        envs.append(GrayFrames())
        return envs[-1]

    with a2c_config(env=make_env, max_num_env_restarts=0).build() as algorithm:
        for episodes in (1, 3):
            metrics = algorithm.evaluate(episodes=episodes, video_dir=tmp_path)
            assert metrics["episodes"] == episodes
    assert caplog.text.count("stopped: OSError(28") == 2
    assert not list(tmp_path.iterdir())
    assert not any({"reset", "step"} & vars(env).keys() for env in envs)


def test_training_in_the_recorded_environment_is_not_recorded(tmp_path):
    shared = GrayFrames()
    config = a2c_config(env=lambda context: shared, evaluation_video_episodes=5)
    with config.build() as algorithm:
        algorithm.evaluate(episodes=2, video_dir=tmp_path)
        for _ in range(3):
            algorithm.train()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("mode", ["vector_entry_point", "sync", "async"])
def test_video_is_recorded_in_every_vectorization_mode(tmp_path, mode):
    config = a2c_config(env="CartPole-v1", vectorization_mode=mode, num_envs_per_worker=2)
    with config.build() as algorithm:
        metrics = algorithm.evaluate(episodes=2, num_envs=2, video_dir=tmp_path)
    assert metrics["episodes"] == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_envpool_is_rejected():
    config = a2c_config(env="CartPole-v1", vectorization_mode="envpool", evaluation_video_dir="x")
    with pytest.raises(ConfigError, match="EnvPool renders nothing"):
        config.check()


def test_pettingzoo_environment_renders(tmp_path):
    require_extra("marl")
    from pettingzoo.classic import tictactoe_v3

    from flowrl.envs.pettingzoo import PettingZooEnv

    def make(context):
        return PettingZooEnv(tictactoe_v3.env(render_mode="rgb_array"))

    with a2c_config(env=make).build() as algorithm:
        algorithm.evaluate(episodes=1, video_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_missing_package_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    message = "evaluation_video_dir needs the extra video: pip install"
    with pytest.raises(ConfigError, match=message):
        a2c_config(evaluation_video_dir=str(tmp_path)).build()
    with (
        a2c_config().build() as algorithm,
        pytest.raises(
            ConfigError, match=r"video_dir \(--video\) needs the extra video: pip install"
        ),
    ):
        algorithm.evaluate(episodes=1, video_dir=tmp_path)


def test_folder_that_cannot_be_created_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        a2c_config().build() as algorithm,
        pytest.raises(ConfigError, match="cannot create the folder"),
    ):
        algorithm.evaluate(episodes=1, video_dir=tmp_path / "file")


def test_package_that_rendering_needs_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pygame", None)
    with (
        a2c_config(env="CartPole-v1").build() as algorithm,
        pytest.raises(ConfigError, match=re.escape(install_command("video"))),
    ):
        algorithm.evaluate(episodes=1, video_dir=tmp_path)


class ModeOfArgument(GrayFrames):
    """Renders frames only if it was created with render_mode="rgb_array"."""

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        return super().render() if self.render_mode == "rgb_array" else None


def test_class_with_the_argument_render_mode_is_recorded(tmp_path):
    with a2c_config(env=ModeOfArgument).build() as algorithm:
        algorithm.evaluate(episodes=1, video_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation-000000-0.mp4"]
