"""What users of other libraries have complained about for years, as executable cases.

Each test names the threads. "ray" is ray-project/ray, "SB3" DLR-RM/stable-baselines3, "Tianshou"
thu-ml/tianshou, "Acme" google-deepmind/acme, "TorchRL" pytorch/rl: issues on GitHub.
"""

import os
import signal
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from flowrl import A2C, APPO, DQN, IMPALA, PPO, R2D2, SAC, IMPALAConfig, PPOConfig
from flowrl.envs import make_multi_agent
from flowrl.errors import ConfigError
from flowrl.trainer.plan_settings import plan_config

SMALL_PPO = {"train_batch_size": 64, "sgd_minibatch_size": 32, "num_sgd_iter": 1, "seed": 1}
SMALL_DQN = {
    "learning_starts": 32,
    "train_batch_size": 16,
    "replay_buffer_capacity": 500,
    "min_sample_timesteps_per_iteration": 64,
    "seed": 1,
}
SMALL_IMPALA = {
    "num_workers": 0,
    "train_batch_size": 64,
    "rollout_fragment_length": 16,
    "min_sample_timesteps_per_iteration": 64,
    "seed": 1,
}


def weights_of(algorithm):
    return algorithm.get_policy().get_weights()


def assert_equal_weights(one, two):
    for name, weight in one.items():
        np.testing.assert_array_equal(weight, two[name])


class SlowWorker(gym.Wrapper):
    """CartPole that is slow on worker 2."""

    def __init__(self, context):
        super().__init__(gym.make("CartPole-v1"))
        self.delay_s = 0.001 if context.worker_index == 2 else 0.0

    def step(self, action):
        time.sleep(self.delay_s)
        return super().step(action)


@pytest.mark.slow
def test_policy_lag_is_bounded_and_reported_with_a_slow_worker(ray_session):
    """ray #2857: asynchronous training is unstable, and the age of samples is not reported."""
    config = IMPALAConfig(
        env=SlowWorker,
        **{**SMALL_IMPALA, "num_workers": 2},
        max_policy_lag=2,
        stale_policy="wait",
    )
    with config.build() as algorithm:
        lags = [algorithm.train()["env_runners"]["policy_lag_max"] for _ in range(40)]
        counters = algorithm.plan.metrics.counters
    assert 0 < max(lags) <= 2
    assert counters["num_env_steps_dropped"] == 0


@pytest.mark.slow
def test_slow_learner_stops_sampling_without_a_busy_driver(ray_session):
    """ray #4387: where does the time go? RLlib's asynchronous plans polled in the driver, which
    used a whole core while nothing arrived."""
    config = IMPALAConfig(env="CartPole-v1", **{**SMALL_IMPALA, "num_workers": 2})
    with config.build() as algorithm:
        algorithm.train()
        policy = algorithm.get_policy()
        learn = policy.learn_on_minibatches

        def learn_slowly(*args):
            time.sleep(0.2)
            return learn(*args)

        policy.learn_on_minibatches = learn_slowly
        cpu, wall = time.thread_time(), time.monotonic()
        for _ in range(8):
            result = algorithm.train()
        share = (time.thread_time() - cpu) / (time.monotonic() - wall)
        waiting = result["num_env_steps_sampled"] - result["num_env_steps_trained"]
    assert share < 0.5
    # the queue, the batch that is trained, the one that is concatenated, and one that waits
    assert waiting <= 64 * (config.learner_queue_size + 3) + 16 * 2


def test_error_of_the_learner_thread_ends_training():
    """Acme #213: actors continue although the learner has died."""
    with IMPALA("CartPole-v1", **SMALL_IMPALA) as algorithm:
        algorithm.train()

        def fail(*args):
            raise ArithmeticError("the learner diverged")

        algorithm.get_policy().learn_on_minibatches = fail
        with pytest.raises(ArithmeticError, match="the learner diverged"):
            [algorithm.train() for _ in range(5)]


@pytest.mark.parametrize(("algorithm_class", "settings"), [(PPO, SMALL_PPO), (DQN, SMALL_DQN)])
def test_resumed_run_is_the_same_run(algorithm_class, settings, tmp_path):
    """ray #2330, #8151; SB3 #326, #435, #1526, #1643; Tianshou #500: buffers, random numbers and
    running episodes are lost."""
    with algorithm_class("CartPole-v1", **settings) as algorithm:
        for _ in range(2):
            algorithm.train()
        algorithm.save(tmp_path / "checkpoint")
        expected = [algorithm.train() for _ in range(2)]
        expected_weights = weights_of(algorithm)
    with algorithm_class.from_checkpoint(tmp_path / "checkpoint") as algorithm:
        results = [algorithm.train() for _ in range(2)]
        assert_equal_weights(weights_of(algorithm), expected_weights)
    for name in ("episode_reward_mean", "timesteps_total", "episodes_total"):
        assert [r[name] for r in results] == [r[name] for r in expected], name


@pytest.mark.parametrize(("algorithm_class", "settings"), [(PPO, SMALL_PPO), (DQN, SMALL_DQN)])
def test_restored_policy_acts_the_same(algorithm_class, settings, tmp_path):
    """ray #8873, Tianshou #724: after loading, the agent acts as if it had not been trained."""
    observations = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    with algorithm_class("CartPole-v1", **settings) as algorithm:
        for _ in range(3):
            algorithm.train()
        algorithm.save(tmp_path / "checkpoint")
        expected = [algorithm.predict(obs)[0] for obs in observations]
    with algorithm_class.from_checkpoint(tmp_path / "checkpoint") as algorithm:
        assert [algorithm.predict(obs)[0] for obs in observations] == expected


class Regularized(torch.nn.Module):
    """A network with dropout and batch normalization."""

    def __init__(self, obs_space, action_space, num_outputs):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.5)
        )
        self.outputs, self.values = torch.nn.Linear(16, num_outputs), torch.nn.Linear(16, 1)
        self.modes = []

    def forward(self, obs):
        self.modes.append(self.training)
        features = self.body(obs)
        return self.outputs(features), self.values(features)


def test_dropout_and_batch_norm_are_off_while_acting():
    """SB3 #535: predict() does not switch the network to its evaluation mode."""
    with PPO("CartPole-v1", model={"custom_model": Regularized}, **SMALL_PPO) as algorithm:
        algorithm.train()
        network = next(
            m for m in algorithm.get_policy().model.modules() if isinstance(m, Regularized)
        )
        assert True in network.modes  # while learning
        before = {name: value.clone() for name, value in network.state_dict().items()}
        network.modes.clear()
        outputs = {algorithm.predict(np.full(4, 0.1, np.float32))[0] for _ in range(20)}
        assert len(outputs) == 1
        assert network.modes
        assert not any(network.modes)
        for name, value in network.state_dict().items():
            assert torch.equal(value, before[name])


class Recorded(gym.Wrapper):
    """CartPole that counts its steps by the entry `purpose` of env_config."""

    steps: dict = {}

    def __init__(self, context):
        super().__init__(gym.make("CartPole-v1", max_episode_steps=context["limit"]))
        self.purpose = context["purpose"]

    def step(self, action):
        Recorded.steps[self.purpose] = Recorded.steps.get(self.purpose, 0) + 1
        return super().step(action)


def test_evaluation_has_its_own_environments_and_acts_greedily():
    """ray #4569, #27973, #56271: which environment, which exploration and which worker an
    evaluation uses is not what users think."""
    Recorded.steps = {}
    config = PPOConfig(env=Recorded, env_config={"purpose": "training", "limit": 50}, **SMALL_PPO)
    config = config.evaluation(
        evaluation_interval=1,
        evaluation_duration=3,
        evaluation_config={"env_config": {"purpose": "evaluation", "limit": 7}},
    )
    with config.build() as algorithm:
        explored = []
        compute = algorithm.get_policy().compute_actions

        def record(*args, **kwargs):
            explored.append(kwargs.get("explore"))
            return compute(*args, **kwargs)

        result = algorithm.train()
        assert set(Recorded.steps) == {"training", "evaluation"}
        assert Recorded.steps["training"] == result["num_env_steps_sampled"] == 64
        assert result["evaluation"]["episode_len_mean"] == 7
        assert result["evaluation"]["episodes"] == 3
        algorithm.get_policy().compute_actions = record
        algorithm.evaluate()
    assert set(explored) == {False}


@pytest.mark.slow
def test_restarted_worker_is_healthy(ray_session):
    """ray #54071: a restarted worker is never marked as healthy."""
    config = PPOConfig(env="CartPole-v1", num_workers=2, **SMALL_PPO)
    with config.build() as algorithm:
        algorithm.train()
        worker = algorithm.workers.remote_workers()[0]
        os.kill(ray_session.get(worker.apply.remote(lambda w: os.getpid())), signal.SIGKILL)
        result = algorithm.train()
        steps = algorithm.workers.env_steps_by_worker  # of the present processes
        while not result["num_remote_worker_restarts"] or not steps.get(0):
            result = algorithm.train()
        assert result["num_healthy_workers"] == 2
        assert result["num_remote_worker_restarts"] == 1


class Broken(gym.Env):
    """Raises in every step."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
    tried = 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        Broken.tried += 1
        raise OSError("the simulator is gone")


def test_crash_loop_ends_with_the_error_of_the_environment():
    """ray #62884: workers restart for ever and hide the error."""
    Broken.tried = 0
    with PPO(Broken, **SMALL_PPO) as algorithm, pytest.raises(OSError, match="simulator is gone"):
        algorithm.train()
    assert 1 < Broken.tried <= 10


class ShowsFirst(gym.Wrapper):
    """CartPole that records its first observations."""

    first: list = []

    def __init__(self, context):
        super().__init__(gym.make("CartPole-v1"))

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        ShowsFirst.first.append(tuple(obs.tolist()))
        return obs, info


def test_environments_have_different_seeds_and_runs_repeat():
    """ray #46986, #5194: every worker has the same seed; ray #17900: or none."""
    runs = []
    for _ in range(2):
        ShowsFirst.first = []
        with PPO(ShowsFirst, num_envs_per_worker=4, **SMALL_PPO) as algorithm:
            algorithm.train()
        runs.append(ShowsFirst.first)
    assert len(set(runs[0])) == len(runs[0]) >= 4
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_workers_have_different_seeds_and_runs_repeat(ray_session):
    """ray #46986, on actors."""
    runs = []
    for _ in range(2):
        with PPOConfig(env="CartPole-v1", num_workers=2, **SMALL_PPO).build() as algorithm:
            rows = [algorithm.train()["episode_reward_mean"] for _ in range(3)]
            first, second = algorithm.workers.foreach_worker(lambda w: w.sample()["obs"])[1:]
            assert not (first == second).all(1).any()
            runs.append((rows, first.tolist(), second.tolist()))
    assert runs[0] == runs[1]


def test_agents_of_all_environments_act_in_one_call():
    """ray #46521, #13387: several multi-agent environments per worker are not vectorized."""
    settings = {**SMALL_PPO, "env_config": {"num_agents": 4}, "num_envs_per_worker": 8}
    with PPO(make_multi_agent("CartPole-v1"), **settings) as algorithm:
        algorithm.train()
        policy = algorithm.workers.local_worker().policy_map["default_policy"]
        rows, act = [], policy._act

        def record(input_dict, explore):
            rows.append(len(input_dict["obs"]))
            return act(input_dict, explore)

        policy._act = record
        algorithm.train()
    assert max(rows) == 8 * 4
    assert sum(rows) / len(rows) > 16


class Masked(gym.Env):
    """A walk from 0 to 9 that asserts that only allowed actions are taken."""

    observation_space = spaces.Dict(
        {"position": spaces.Discrete(10), "action_mask": spaces.MultiBinary(2)}
    )
    action_space = spaces.Discrete(2)
    steps = 0

    def __init__(self, context=None):
        self.position = 0

    def _observe(self):
        mask = np.array([self.position > 0, self.position < 9], np.int8)
        return {"position": self.position, "action_mask": mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = 0
        return self._observe(), {}

    def step(self, action):
        assert self._observe()["action_mask"][action], "a forbidden action"
        Masked.steps += 1
        self.position += 1 if action == 1 else -1
        return self._observe(), -0.1, self.position == 9, False, {}


@pytest.mark.parametrize(
    ("algorithm_class", "settings"),
    [
        (PPO, SMALL_PPO),
        (A2C, {"train_batch_size": 64, "seed": 1}),
        (IMPALA, SMALL_IMPALA),
        (APPO, SMALL_IMPALA),
        (DQN, SMALL_DQN),
        (SAC, SMALL_DQN),
        (R2D2, {**SMALL_DQN, "train_batch_size": 2}),
    ],
)
def test_action_masks_work_with_every_kind_of_algorithm(algorithm_class, settings):
    """Tianshou #334, SB3 #1876: masks exist for one algorithm, and not off-policy."""
    Masked.steps = 0
    with algorithm_class(Masked, horizon=50, **settings) as algorithm:
        for _ in range(3):
            result = algorithm.train()
    assert Masked.steps >= 128
    assert result["num_env_steps_trained"] > 0


def test_policy_has_one_copy_of_its_network():
    """ray #18429, #39631: workers and the local worker hold further copies of the model."""
    networks = []

    class Counted(Regularized):
        def __init__(self, *args):
            super().__init__(*args)
            networks.append(self)

    with PPO("CartPole-v1", model={"custom_model": Counted}, **SMALL_PPO) as algorithm:
        algorithm.train()
        algorithm.evaluate(episodes=1)
        assert len(networks) == 1


def test_off_policy_algorithm_with_memory():
    """ray #9206, Tianshou #795: no recurrent networks for off-policy algorithms."""
    with R2D2("CartPole-v1", **{**SMALL_DQN, "train_batch_size": 2}) as algorithm:
        for _ in range(3):
            result = algorithm.train()
        assert algorithm.get_policy().get_initial_state()
    assert np.isfinite(result["learners"]["default_policy"]["total_loss"])


def test_two_algorithms_train_in_one_plan():
    """ray #7289, #9278: several algorithms at once."""
    with plan_config("ppo_dqn").updated(seed=1).build(plan="ppo_dqn") as algorithm:
        policies = algorithm.workers.local_worker().policy_map
        before = {name: policy.get_weights() for name, policy in policies.items()}
        learned = {}
        while set(learned) != {"ppo", "dqn"}:
            learned |= algorithm.train()["learners"]
        for name, policy in policies.items():
            weights = policy.get_weights()
            assert any((weights[n] != before[name][n]).any() for n in weights), name


class WrongShape(gym.Env):
    """Returns an observation of another shape in its third step."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        shape = 3 if self.steps == 3 else 2
        return np.zeros(shape, np.float32), 0.0, False, False, {}


def test_error_of_sampling_names_the_environment_and_the_value():
    """TorchRL #1518: `stack expects each tensor to be equal size` names neither."""
    with (
        PPO(WrongShape, num_envs_per_worker=2, **SMALL_PPO) as algorithm,
        pytest.raises(ConfigError) as error,
    ):
        algorithm.train()
    message = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    for part in ("worker 0", "sub-environment 0", "step 2", "obs has shape (3,)", "not (2,)"):
        assert part in message, part
