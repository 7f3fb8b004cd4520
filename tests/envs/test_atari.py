"""Atari games: preprocessing, lost lives, clipped rewards, frame stacks."""

import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import ray.cloudpickle

from tests.extras import require_extra

require_extra("atari")

from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from flowrl import DQN, PPO
from flowrl.algorithms.dqn import DQNConfig
from flowrl.algorithms.ppo import PPOConfig
from flowrl.cli.flags import settings_from_flags
from flowrl.envs import make_atari
from flowrl.envs.atari import AtariSettings, FireAfterReset, for_envpool, is_atari
from flowrl.envs.env_factory import _warn_of_unprocessed_frames
from flowrl.envs.registry import EnvContext, env_creator_for
from flowrl.errors import ConfigError
from flowrl.iter.stage import walk
from flowrl.sampling import SimpleListCollector
from flowrl.sampling.lost_lives import LostLives
from flowrl.seeding import derive_seed

BREAKOUT, PONG = "ALE/Breakout-v5", "ALE/Pong-v5"
SMALL = {
    "num_envs_per_worker": 2, "rollout_fragment_length": 64, "train_batch_size": 128,
    "sgd_minibatch_size": 64, "num_sgd_iter": 1, "seed": 0,
    "model": {"conv_filters": [[4, 8, 8]], "post_fcnet_hiddens": [8]},
}  # fmt: skip
# EnvPool makes at least one no-op, and its random numbers are others
WITHOUT_RANDOM_STARTS = {
    "noop_max": 1, "repeat_action_probability": 0.0, "fire_on_reset": False,
}  # fmt: skip


class Lives(gym.Env):
    """Episodes of 6 steps with a reward of 5 each; a life is lost in steps 2, 4 and 6."""

    observation_space = gym.spaces.Box(0, 255, (4,), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.actions = []

    def _result(self):
        return np.full(4, self.t, np.uint8), {"lives": 3 - self.t // 2}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._result()

    def step(self, action):
        self.actions.append(action)
        self.t += 1
        observation, info = self._result()
        return observation, 5.0, self.t == 6, False, info


def atari(env_id, **settings):
    return env_creator_for(env_id)(EnvContext(atari=AtariSettings(**settings)))


def assert_same_game(ours, theirs, steps, first):
    """Compare two environments until the end of a game; `theirs` returns [1, height, width]."""
    rng = np.random.default_rng(0)
    one, other = first
    for _ in range(steps):
        assert np.array_equal(one[..., 0], other[0])
        action = int(rng.integers(4))
        one, reward, terminated, _, _ = ours.step(action)
        other, their_reward, their_end, _, _ = theirs.step(np.array([action], np.int32))
        other = other[0]
        assert (reward, terminated) == (their_reward[0], their_end[0])
        if terminated:
            return


@pytest.mark.parametrize("env_id", [BREAKOUT, "PongNoFrameskip-v4"])
def test_frames_equal_those_of_gymnasium(env_id):
    ours = atari(env_id, fire_on_reset=False)
    theirs = AtariPreprocessing(gym.make(env_id, frameskip=1), grayscale_newaxis=True)
    rng = np.random.default_rng(0)
    first, second = ours.reset(seed=3)[0], theirs.reset(seed=3)[0]
    for _ in range(300):
        assert np.array_equal(first, second)
        action = int(rng.integers(4))
        one, other = ours.step(action), theirs.step(action)
        first, second = one[0], other[0]
        assert one[1:4] == other[1:4]
        if one[2]:
            first, second = ours.reset()[0], theirs.reset()[0]


@pytest.mark.parametrize("game", ["Breakout", "Pong"])
def test_frames_equal_those_of_envpool(game):
    require_extra("envpool")
    import envpool

    ours = atari(f"ALE/{game}-v5", **WITHOUT_RANDOM_STARTS)
    arguments = for_envpool(f"ALE/{game}-v5", AtariSettings(**WITHOUT_RANDOM_STARTS))
    theirs = envpool.make_gymnasium(f"{game}-v5", num_envs=1, **arguments)
    assert_same_game(ours, theirs, 200, (ours.reset(seed=0)[0], theirs.reset()[0][0]))


def test_network_sees_the_frame_stack_of_envpool():
    require_extra("envpool")
    import envpool

    settings = {**SMALL, "num_envs_per_worker": 1, "rollout_fragment_length": 300}
    with PPO(BREAKOUT, atari=WITHOUT_RANDOM_STARTS, **settings) as algorithm:
        batch = algorithm.workers.local_worker().sample()
    arguments = for_envpool(BREAKOUT, AtariSettings(**WITHOUT_RANDOM_STARTS))
    theirs = envpool.make_gymnasium("Breakout-v5", num_envs=1, **{**arguments, "stack_num": 4})
    observation, ended = theirs.reset()[0], False
    for stack, action in zip(batch["obs"], batch["actions"], strict=True):
        if ended:  # EnvPool ignores the action of the step that resets
            observation = theirs.step(np.zeros(1, np.int32))[0]
        assert np.array_equal(stack[..., 0], observation[0])
        observation, _, terminated, _, _ = theirs.step(np.array([action], np.int32))
        ended = terminated[0]


def test_network_sees_the_frame_stack_of_gymnasium():
    length = 600  # over the ends of lives and of games
    settings = {**SMALL, "rollout_fragment_length": length}
    with PPO(BREAKOUT, atari={"fire_on_reset": False}, **settings) as algorithm:
        worker = algorithm.workers.local_worker()
        assert algorithm.config.model.num_framestacks == 4
        batch = worker.sample()[:length]
    seed = derive_seed(derive_seed(0, "worker", 0), "env", 0)
    stacked = FrameStackObservation(
        atari(BREAKOUT, fire_on_reset=False),
        4,
    )
    observation, _ = stacked.reset(seed=seed)
    assert batch["obs"].shape == (length, 4, 84, 84, 1)
    lives, games = set(), 1
    for stack, action in zip(batch["obs"], batch["actions"], strict=True):
        assert np.array_equal(stack, observation)
        observation, _, terminated, _, info = stacked.step(int(action))
        lives.add(info["lives"])
        if terminated:
            observation, _ = stacked.reset()
            games += 1
    assert len(lives) > 3
    assert games > 1


def test_replayed_batches_have_frame_stacks():
    settings = {"train_batch_size": 32, "learning_starts": 64, "rollout_fragment_length": 4}
    settings |= {"model": SMALL["model"], "min_sample_timesteps_per_iteration": 100, "seed": 0}
    with DQN(PONG, replay_buffer_capacity=256, **settings) as algorithm:
        result = algorithm.train()
        (buffer,) = {
            stage.fn.buffer for stage in walk(algorithm.plan.stage)
            if hasattr(getattr(stage, "fn", None), "buffer")
        }  # fmt: skip
        batch = buffer.sample()
    batch = batch.policy_batches["default_policy"]
    assert batch["obs"].shape == batch["new_obs"].shape == (32, 4, 84, 84, 1)
    assert np.array_equal(batch["obs"][:, 1:], batch["new_obs"][:, :3])
    assert np.isfinite(result["learners"]["default_policy"]["mean_q"])


def test_fire_is_pressed_after_resets_and_lost_lives():
    env = FireAfterReset(Lives())
    env.reset()
    assert env.unwrapped.actions == [1]
    _, reward, terminated, _, info = env.step(0)  # loses a life, then FIRE
    assert (reward, terminated, info["lives"]) == (10.0, False, 2)
    assert env.unwrapped.actions == [1, 0, 1]
    _, reward, *_ = env.step(0)
    assert reward == 10.0
    _, reward, terminated, _, _ = env.step(0)  # the last life: no FIRE
    assert (reward, terminated) == (5.0, True)
    assert env.unwrapped.actions == [1, 0, 1, 0, 1, 0]


def test_game_without_fire_is_left_alone():
    assert not isinstance(atari("ALE/Freeway-v5"), FireAfterReset)
    assert isinstance(atari(BREAKOUT), FireAfterReset)
    assert not isinstance(atari(BREAKOUT, fire_on_reset=False), FireAfterReset)


def test_lost_lives_are_found():
    lives = LostLives(2)
    steps = [(3, 0), (3, 0), (2, 0), (2, 0), (0, 0), (3, 0)]  # a game over, then a new game
    lost = [lives.after([{"lives": a}, {"lives": b}]).tolist() for a, b in steps]
    assert [first for first, _ in lost] == [False, False, True, False, True, False]
    assert not any(second for _, second in lost)
    assert lives.after([{"lives": 2}, {}]).tolist() == [True, False]
    assert lives.after([]).tolist() == [False, False]


def test_lives_of_another_game_are_not_compared():
    lives = LostLives(2)
    lives.after([{"lives": 4}, {"lives": 4}])
    lives.start(np.array([0]))  # its episode was truncated
    assert lives.after([{"lives": 3}, {"lives": 3}]).tolist() == [False, True]


class BonusLives(gym.Env):
    """Each game starts with 3 lives, and a fourth one is won in step 2."""

    observation_space = gym.spaces.Box(0, 255, (4,), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(4, np.uint8), {"lives": 3}

    def step(self, action):
        self.steps += 1
        if self.steps == 8:
            raise OSError("the game crashed")
        return np.zeros(4, np.uint8), 0.0, False, False, {"lives": 3 + (self.steps >= 2)}


@pytest.mark.parametrize("horizon", [3, None])  # games are truncated, or fail
def test_a_game_is_not_compared_with_the_one_before(monkeypatch, horizon):
    monkeypatch.setattr("flowrl.envs.env_factory.is_atari", lambda env: True)
    settings = {**SMALL, "num_envs_per_worker": 1, "rollout_fragment_length": 12, "model": {}}
    with PPO(BonusLives, **settings, atari={}, horizon=horizon) as algorithm:
        batch = algorithm.workers.local_worker().sample()
    assert batch.count >= 4  # rows of a game that fails are dropped
    assert not batch["terminateds"].any()


def test_a_game_without_a_no_op_action_starts_without():
    with PPO("ALE/Backgammon-v5", **SMALL) as algorithm:
        assert algorithm.workers.local_worker().sample().count == 128


@pytest.mark.parametrize("mode", ["flowrl", "async", "vector_entry_point", "envpool"])
def test_episodes_continue_after_lost_lives(mode):
    """Rows of lost lives are terminated for the learner; returns are those of whole games."""
    if mode == "envpool":
        require_extra("envpool")
    settings = {**SMALL, "vectorization_mode": mode, "rollout_fragment_length": 400}
    with PPO(BREAKOUT, **settings) as algorithm:
        worker = algorithm.workers.local_worker()
        batch = worker.sample()
        episodes = worker.get_metrics()
    ends = batch["terminateds"].nonzero()[0]
    last = np.append(batch["eps_id"][1:] != batch["eps_id"][:-1], True)
    assert any(not last[end] for end in ends)
    assert set(batch["rewards"].tolist()) <= {0.0, 1.0}  # a brick of an upper row has 4 or 7
    lives = np.array([info["lives"] for info in batch["infos"]])
    lost = np.append(False, lives[1:] < lives[:-1])
    inner = ~last & np.append(False, ~last[:-1])
    assert np.array_equal(batch["terminateds"][inner], lost[inner])
    assert len(episodes) >= 1
    # values are not bootstrapped over a lost life
    inner = [end for end in ends if not last[end]]
    expected = batch["rewards"][inner] - batch["vf_preds"][inner]
    assert np.allclose(batch["advantages"][inner], expected, atol=1e-5)


@pytest.mark.parametrize("frame_stack", [1, 4])
def test_n_step_returns_end_at_lost_lives(frame_stack):
    settings = {**SMALL, "num_envs_per_worker": 1, "rollout_fragment_length": 200}
    atari_settings = {"frame_stack": frame_stack, "screen_size": 42}
    config = DQNConfig(
        env=BREAKOUT, n_step=3, atari=atari_settings, prioritized_replay=False, **settings
    )
    with config.build() as algorithm:
        batch = algorithm.workers.local_worker().sample()
        buffer = config.new_buffer()
        buffer.add(batch)
        replayed = buffer.rows_by_id(np.arange(batch.count))
    last = np.append(batch["eps_id"][1:] != batch["eps_id"][:-1], True)
    lost = np.flatnonzero(batch["terminateds"] & ~last)
    assert len(lost) > 0
    for row in lost.tolist():
        assert replayed["n_steps"][row - 2 : row + 1].tolist() == [3, 2, 1]
        assert replayed["terminateds"][row - 2 : row + 1].all()


def test_settings_switch_the_steps_off():
    settings = {"terminal_on_life_loss": False, "frame_stack": 1, "screen_size": 42}
    config = {**SMALL, "rollout_fragment_length": 200, "clip_rewards": False}
    with PPO(BREAKOUT, atari=settings, **config) as algorithm:
        batch = algorithm.workers.local_worker().sample()
    assert batch["obs"].shape == (400, 42, 42, 1)
    last = np.append(batch["eps_id"][1:] != batch["eps_id"][:-1], True)
    assert not batch["terminateds"][~last].any()
    assert atari(PONG, grayscale=False).observation_space.shape == (84, 84, 3)
    assert atari(PONG, full_action_space=True).action_space.n == 18
    raw = env_creator_for(PONG)(EnvContext())
    assert raw.observation_space.shape == (210, 160, 3)


def test_evaluation_reports_true_returns_of_whole_games(monkeypatch):
    from ale_py.env import AtariEnv

    step, returns = AtariEnv.step, []

    def step_with_large_rewards(game, action):
        """Triple the rewards, which clipping would change, and note the returns of ended games."""
        observation, reward, terminated, truncated, info = step(game, action)
        game.total = 3 * reward + getattr(game, "total", 0)
        if terminated:
            returns.append(game.total)
            game.total = 0
        return observation, 3 * reward, terminated, truncated, info

    with PPO(BREAKOUT, **SMALL) as algorithm:
        algorithm.train()
        monkeypatch.setattr(AtariEnv, "step", step_with_large_rewards)
        result = algorithm.evaluate(episodes=3, num_envs=1)
    assert result["episodes"] == 3
    assert sum(returns[:3]) > 0
    assert result["episode_reward_mean"] == pytest.approx(np.mean(returns[:3]))
    assert result["episode_len_mean"] > 100  # of five lives


def test_resumed_game_keeps_its_lives(tmp_path):
    with PPO(BREAKOUT, **SMALL) as algorithm:
        algorithm.train()
        path = algorithm.save(tmp_path)
        expected = [algorithm.workers.local_worker().sample() for _ in range(3)]
    with PPO.from_checkpoint(path) as resumed:
        for batch in expected:
            again = resumed.workers.local_worker().sample()
            assert np.array_equal(again["terminateds"], batch["terminateds"])
            assert np.array_equal(again["rewards"], batch["rewards"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env_config": {"frameskip": 4}}, "env_config: 'frameskip' is set by the preprocessing"),
        (
            {"env_config": {"frameskip": 4}, "vectorization_mode": "vector_entry_point"},
            "env_config: 'frameskip' is set by the preprocessing",
        ),
        (
            {"env_config": {"colour": 1}, "vectorization_mode": "vector_entry_point"},
            'with vectorization_mode="vector_entry_point" does not accept',
        ),
        (
            {"atari": None, "vectorization_mode": "vector_entry_point"},
            'atari=None leaves a game as it is, but vectorization_mode="vector_entry_point"',
        ),
        ({"atari": {"frame_skip": 0}}, "atari.frame_skip"),
        ({"atari": {"noop": 3}}, "unknown setting 'atari.noop'"),
        ({"atari": {"clip_rewards": True}}, "clipped by the algorithm's setting `clip_rewards`"),
        ({"sample_collector": SimpleListCollector}, "atari.terminal_on_life_loss: not supported"),
        (
            {"atari": {"grayscale": False}, "vectorization_mode": "vector_entry_point"},
            "atari.grayscale=False needs vectorization_mode",
        ),
    ],
)
def test_invalid_settings_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):  # noqa: SIM117
        with PPO(BREAKOUT, **{**SMALL, **changes}) as algorithm:
            algorithm.train()


@pytest.mark.parametrize(
    ("config", "message"),
    [({"stack_num": 4}, "'stack_num' is set by"), ({"colour": 1}, "does not accept")],
)
def test_invalid_arguments_of_envpool_are_rejected(config, message):
    require_extra("envpool")
    settings = {**SMALL, "vectorization_mode": "envpool", "env_config": config}
    with pytest.raises(ConfigError, match=f"env_config: .*{message}"):  # noqa: SIM117
        with PPO(PONG, **settings) as algorithm:
            algorithm.train()


ON_WORKER = """
import pickle, sys
from flowrl.envs.atari import AtariSettings
from flowrl.envs.env_factory import EnvFactory
creator = pickle.loads(sys.stdin.buffer.read())
factory = EnvFactory(creator, {}, 2, vectorization_mode=sys.argv[1], atari=AtariSettings())
vector_env = factory.make_agent_envs()
print([result[0]["agent0"].shape for result in vector_env.reset()])
vector_env.close()
"""


@pytest.mark.parametrize("mode", ["vector_entry_point", "envpool"])
def test_vector_environment_is_created_in_a_process_without_registered_games(mode):
    if mode == "envpool":
        require_extra("envpool")
    creator = ray.cloudpickle.dumps(env_creator_for(PONG))
    command = [sys.executable, "-c", ON_WORKER, mode]
    done = subprocess.run(command, input=creator, capture_output=True, check=False)
    assert done.stdout.decode().strip() == "[(1, 84, 84), (1, 84, 84)]", done.stderr.decode()


def test_frames_without_preprocessing_are_a_warning(caplog):
    _warn_of_unprocessed_frames.cache_clear()
    env_creator_for(PONG)
    with PPO(lambda: gym.make(PONG), **{**SMALL, "atari": None}) as algorithm:
        algorithm.workers.local_worker()
    assert caplog.text == ""
    for _ in range(2):
        with PPO(lambda: gym.make(PONG), **SMALL) as algorithm:
            algorithm.workers.local_worker()
    assert caplog.text.count("the frames of this Atari game are not preprocessed") == 1


@pytest.mark.parametrize("value", [None, False, "null", "false"])
def test_preprocessing_can_be_switched_off(value):
    if isinstance(value, str):
        config = settings_from_flags(PPOConfig(env=PONG), ["--atari", value], {})
    else:
        config = PPOConfig(env=PONG, atari=value)
    assert config.atari is None
    assert config.completed().model.num_framestacks == 1
    assert PPOConfig(env=PONG, atari=True).atari == AtariSettings()


def test_environment_for_an_own_loop():
    env = make_atari(PONG, AtariSettings(screen_size=42))
    assert env.reset(seed=0)[0].shape == (42, 42, 1)
    with pytest.raises(ConfigError, match="'obs_type' is for games without preprocessing"):
        make_atari(PONG, obs_type="ram")


def test_name_without_namespace_is_suggested():
    with pytest.raises(ConfigError, match="Did you mean 'ALE/Breakout-v5'"):
        env_creator_for("Breakout-v5")
    frames = env_creator_for("Breakout-v4")(EnvContext(atari=AtariSettings())).observation_space
    assert frames.shape == (84, 84, 1)  # an old id of ale-py


def test_ids():
    ids = (PONG, f"ale_py:{PONG}", "PongNoFrameskip-v4", "BreakoutDeterministic-v0", "Pong-v4")
    assert all(map(is_atari, ids))
    gym.register("MazeDeterministic-v0", "tests.sampling.fakes:CountEnv")
    assert not any(map(is_atari, ("MazeDeterministic-v0", "mine:MazeDeterministic-v0")))
    assert not any(map(is_atari, ("CartPole-v1", "MinAtar/Breakout-v1", None, Lives)))
