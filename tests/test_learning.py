"""Learning to a return: `pytest -m slow` runs one seed of each, `pytest -m seeds` the others."""

import pytest
import torch

from flowrl.algorithms.ppo import PPO, PPOConfig, PPOTorchPolicy
from flowrl.offline.off_policy_evaluation import estimate
from flowrl.ops import ParallelRollouts, WriteParquet
from flowrl.trainer.plan_settings import plan_config
from tests.extras import require_extra

from .learning_envs import Catch, HiddenVelocities, RepeatPast

pytestmark = pytest.mark.timeout(900)

SLOW, OTHER_SEEDS = pytest.mark.slow, pytest.mark.seeds
SEEDS = pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=SLOW), *(pytest.param(s, marks=OTHER_SEEDS) for s in (1, 2))]
)
# for plans whose gradients have an accelerated kernel: one seed also learns with autograd
SEEDS_AND_GRADIENTS = pytest.mark.parametrize(
    ("seed", "numpy_gradients"),
    [
        pytest.param(0, True, marks=SLOW, id="0"),
        pytest.param(1, True, marks=OTHER_SEEDS, id="1"),
        pytest.param(2, True, marks=OTHER_SEEDS, id="2"),
        pytest.param(0, False, marks=OTHER_SEEDS, id="0-autograd"),
    ],
)


def steps_to(plan, goal, limit, **settings):
    """Train until the mean return of 100 episodes is `goal`.

    Returns:
        env steps, result of a greedy evaluation over 100 episodes.
    """
    config = plan_config(plan, settings.get("env"))
    if "env" in settings:
        config = config.updated(total_timesteps=limit)
    with config.updated(**settings).build(plan=plan) as algorithm:
        while True:
            result = algorithm.train()
            full = result["episodes_in_window"] >= 100
            if full and result["episode_reward_mean"] >= goal:
                break
            assert result["timesteps_total"] < limit, result["episode_reward_mean"]
        return result["timesteps_total"], algorithm.evaluate(100, num_envs=16)


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=SLOW if s == 0 else OTHER_SEEDS) for s in range(10)]
)
def test_ppo_cartpole(seed):
    steps, evaluation = steps_to("ppo", 475, 75_000, seed=seed)
    assert steps <= 75_000
    assert evaluation["episode_reward_mean"] >= 475


@SEEDS
def test_ppo_cartpole_two_workers(seed, ray_session):
    workers = {"num_workers": 2, "num_envs_per_worker": 4}
    steps, evaluation = steps_to("ppo", 475, 75_000, seed=seed, **workers)
    assert steps <= 75_000
    assert evaluation["episode_reward_mean"] >= 475


@SEEDS
@pytest.mark.parametrize(
    ("plan", "limit"),
    [("a3c", 400_000), ("impala", 400_000), ("appo", 400_000), ("ddppo", 100_000),
     ("ppo_async", 100_000)],
)  # fmt: skip
def test_asynchronous_and_distributed_plans(plan, limit, seed, ray_session):
    steps, _ = steps_to(plan, 450, limit, seed=seed)
    assert steps <= limit


@SEEDS
def test_apex_cartpole(seed, ray_session):
    steps, _ = steps_to("apex", 450, 200_000, seed=seed)
    assert steps <= 200_000


@SEEDS
def test_ppo_acrobot(seed):
    steps, _ = steps_to("ppo", -100, 300_000, env="Acrobot-v1", seed=seed)
    assert steps <= 300_000


@SEEDS
def test_ppo_pendulum(seed):
    settings = {
        "env": "Pendulum-v1",
        "train_batch_size": 1024,
        "gamma": 0.9,
        "lr": 1e-3,
        "normalize_observations": True,
        "normalize_rewards": True,
    }
    steps, _ = steps_to("ppo", -400, 300_000, seed=seed, **settings)
    assert steps <= 300_000


@SEEDS_AND_GRADIENTS
def test_dqn_cartpole(seed, numpy_gradients):
    steps, _ = steps_to("dqn", 400, 60_000, seed=seed, numpy_gradients=numpy_gradients)
    assert steps <= 60_000


@SEEDS_AND_GRADIENTS
def test_rainbow_cartpole(seed, numpy_gradients):
    steps, _ = steps_to("rainbow", 400, 60_000, seed=seed, numpy_gradients=numpy_gradients)
    assert steps <= 60_000


@pytest.mark.parametrize(
    ("seed", "numpy_gradients"),
    [(0, True), (1, True), (2, True), (0, False)],
)
@OTHER_SEEDS
def test_discrete_sac_cartpole(seed, numpy_gradients):
    settings = {
        "numpy_gradients": numpy_gradients,
        "env": "CartPole-v1",
        "rollout_fragment_length": 4,
        "train_batch_size": 64,
        "training_intensity": 16,
        "n_step": 10,
        "tau": 0.01,
        "target_entropy": 0.3,
        "initial_alpha": 0.2,
        "model": {"fcnet_hiddens": [128, 128], "fcnet_activation": "relu"},
    }
    assert steps_to("sac", 450, 150_000, seed=seed, **settings)[0] <= 150_000


@SEEDS
def test_r2d2_hidden_velocities(seed):
    steps, _ = steps_to("r2d2", 300, 300_000, seed=seed, env=HiddenVelocities)
    assert steps <= 300_000


@pytest.mark.slow
def test_dqn_with_replay_actors(ray_session):
    assert steps_to("dqn_distributed", 400, 100_000, seed=0)[0] <= 100_000


@pytest.mark.slow
def test_a2c_with_replay():
    assert steps_to("a2c_replay", 400, 200_000, seed=2)[0] <= 200_000


@pytest.mark.slow
def test_ppo_and_dqn_in_one_plan():
    """Both learn within the env steps of the plan.

    PPO takes about 20,000 env steps. DQN takes 16,000 to more than 60,000, by seed and processor.
    """
    with plan_config("ppo_dqn").updated(seed=0).build(plan="ppo_dqn") as algorithm:
        best = {"ppo": 0.0, "dqn": 0.0}
        while min(best.values()) < 450:
            result = algorithm.train()
            assert result["timesteps_total"] < algorithm.config.total_timesteps, best
            if result["episodes_in_window"] == 20:
                means = result["policy_reward_mean"]
                best = {policy_id: max(best[policy_id], means[policy_id]) for policy_id in best}


@pytest.mark.seeds
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_three_algorithms_in_one_plan(seed):
    """Each algorithm reaches a return of 400; the environment has six agents."""
    with plan_config("three_way").updated(seed=seed).build(plan="three_way") as algorithm:
        best = dict.fromkeys(("ppo", "dqn", "sac"), 0.0)
        while min(best.values()) < 400:
            result = algorithm.train()
            assert result["timesteps_total"] < 120_000, best
            if result["episodes_in_window"] >= 20:
                means = result["policy_reward_mean"]
                best = {policy_id: max(best[policy_id], means[policy_id]) for policy_id in best}


@SEEDS
def test_a2c_cartpole(seed):
    steps, _ = steps_to("a2c", 450, 500_000, seed=seed)
    assert steps <= 500_000


# -- recurrent, attention and convolutional networks -----------------------------------------------


def steps_and_best_return(algorithm, goal, limit):
    """Train until the mean return is `goal` or `limit` env steps are sampled.

    Returns:
        env steps, or None if the goal was not reached; the best mean return.
    """
    best = -float("inf")
    with algorithm:
        while True:
            result = algorithm.train()
            if result["episodes_in_window"] >= 100:
                best = max(best, result["episode_reward_mean"])
            if best >= goal:
                return result["timesteps_total"], best
            if result["timesteps_total"] >= limit:
                return None, best


def build_ppo_without_velocities(seed, **model):
    return PPOConfig(
        env=HiddenVelocities,
        num_envs_per_worker=16,
        train_batch_size=1024,
        num_sgd_iter=8,
        sgd_minibatch_size=256,
        lr=[(0, 1e-3), (400_000, 1e-4)],
        gamma=0.98,
        lambda_=0.9,
        normalize_rewards=True,
        seed=seed,
        model={"fcnet_hiddens": [64], "vf_share_layers": True, **model},
    ).build()


@SEEDS
def test_lstm_ppo_learns_without_velocities(seed):
    algorithm = build_ppo_without_velocities(seed, use_lstm=True, max_seq_len=32)
    steps, best = steps_and_best_return(algorithm, 400, 500_000)
    assert steps is not None, best


@pytest.mark.slow
def test_ppo_without_memory_fails_without_velocities():
    steps, best = steps_and_best_return(build_ppo_without_velocities(0), 400, 200_000)
    assert steps is None
    assert best <= 200


def build_ppo_for_repeat_past(seed, **model):
    """Build PPO for RepeatPast; the best return is 31 - 4 + 1 = 28, random actions get a third."""
    return PPOConfig(
        env=RepeatPast,
        num_envs_per_worker=16,
        train_batch_size=2048,
        num_sgd_iter=4,
        sgd_minibatch_size=256,
        lr=1e-3,
        gamma=0.3,
        lambda_=0.9,
        entropy_coeff=0.001,
        seed=seed,
        model={"fcnet_hiddens": [32], **model},
    ).build()


@SEEDS
def test_attention_ppo_repeats_past_symbols(seed):
    memory = {"attention_memory": 8, "attention_dim": 32, "attention_head_dim": 16}
    algorithm = build_ppo_for_repeat_past(seed, use_attention=True, max_seq_len=16, **memory)
    steps, best = steps_and_best_return(algorithm, 26, 100_000)
    assert steps is not None, best


@pytest.mark.slow
def test_ppo_without_memory_cannot_repeat_past_symbols():
    steps, best = steps_and_best_return(build_ppo_for_repeat_past(0), 26, 100_000)
    assert steps is None
    assert best <= 14


@SEEDS
def test_cnn_ppo_learns_to_catch(seed):
    config = PPOConfig(
        env=Catch,
        num_envs_per_worker=16,
        train_batch_size=1024,
        num_sgd_iter=4,
        sgd_minibatch_size=128,
        lr=1e-3,
        entropy_coeff=0.01,
        seed=seed,
        model={"post_fcnet_hiddens": [64]},
    )
    steps, best = steps_and_best_return(config.build(), 0.9, 150_000)
    assert steps is not None, best


class TwoOptimizers(PPOTorchPolicy):
    """PPO with separate losses and optimizers of the policy and the value network."""

    def make_optimizer(self):
        named = dict(self.model.named_parameters())
        values = [p for name, p in named.items() if name.startswith("value")]
        others = [p for name, p in named.items() if not name.startswith("value")]
        return [torch.optim.Adam(others, 3e-4), torch.optim.Adam(values, 1e-3)]

    def loss(self, batch):
        super().loss(batch)
        return [self.stats["policy_loss"], self.stats["vf_loss"]]


class TwoOptimizersPPO(PPO):
    policy_class = TwoOptimizers


@SEEDS
def test_ppo_with_two_optimizers(seed):
    config = PPOConfig(
        env="CartPole-v1", num_envs_per_worker=8, train_batch_size=2048, lr=3e-4, seed=seed
    )
    steps, best = steps_and_best_return(TwoOptimizersPPO(config), 450, 150_000)
    assert steps is not None, best


def learning_curve(plan, steps, **settings):
    """Yield (env steps, mean return of the last 20 episodes) of each iteration."""
    base = {"metrics_num_episodes_for_smoothing": 20, "min_sample_timesteps_per_iteration": 200}
    total = 0
    with plan_config(plan).updated(**{**base, **settings}).build() as algorithm:
        while total < steps:
            result = algorithm.train()
            total = result["timesteps_total"]
            yield total, result["episode_reward_mean"]


@pytest.mark.parametrize(
    ("plan", "seed", "numpy_gradients"),
    [
        pytest.param("sac", 0, True, marks=SLOW),
        *(pytest.param("sac", seed, True, marks=OTHER_SEEDS) for seed in (1, 2)),
        *(pytest.param("td3", seed, True, marks=OTHER_SEEDS) for seed in (0, 1, 2)),
        *(pytest.param(plan, 0, False, marks=OTHER_SEEDS) for plan in ("sac", "td3")),
    ],
)
def test_sac_and_td3_solve_pendulum(plan, seed, numpy_gradients):
    """Pendulum-v1 is solved within 12,000 env steps and stays solved for 3,000 more."""
    curve = learning_curve(plan, 15_000, seed=seed, numpy_gradients=numpy_gradients)
    solved_at = next(steps for steps, value in curve if steps >= 4000 and value >= -200)
    assert solved_at <= 12_000
    assert next(value for steps, value in curve if steps >= solved_at + 3000) >= -220


# -- offline ---------------------------------------------------------------------------------------


def record(weights, folder, steps, seed):
    """Record env steps of a PPO policy with these weights; None uses its initial weights."""
    config = PPOConfig(env="CartPole-v1", num_envs_per_worker=4, seed=seed, train_batch_size=1000)
    with config.build() as algorithm:
        if weights is not None:
            algorithm.get_policy().set_weights(weights)
        rollouts = ParallelRollouts(algorithm.workers, mode="bulk_sync")
        written = rollouts.for_each(WriteParquet(folder))
        written.take(steps // 1000)
        written.stop()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Record experience of an expert, and a mix of half a beginner's and half random experience.

    Returns:
        folders and mean returns, by name: "expert" and "mixed".
    """
    require_extra("offline")
    folders = {name: tmp_path_factory.mktemp(name) for name in ("expert", "mixed")}
    with plan_config("ppo").updated(seed=0).build(plan="ppo") as algorithm:
        expert, weights = algorithm.get_policy(), {}
        for level in (60, 475):
            while algorithm.train()["episode_reward_mean"] < level:
                assert algorithm.plan.metrics.counters["num_env_steps_sampled"] < 75_000
            weights[level] = expert.get_weights()
    record(weights[475], folders["expert"], 20_000, seed=1)
    record(weights[60], folders["mixed"], 10_000, seed=2)
    record(None, folders["mixed"], 10_000, seed=3)
    estimates = {name: estimate(expert, folder, gamma=1.0) for name, folder in folders.items()}
    return folders, {name: values["is"]["v_behavior"] for name, values in estimates.items()}


def offline_return(plan, folder, rows, **settings):
    """Train offline on `rows` rows; return the mean return of 50 greedy episodes."""
    config = plan_config(plan).updated(input_=str(folder), **settings)
    with config.build(plan=plan) as algorithm:
        while algorithm.train()["num_env_steps_trained"] < rows:
            pass
        return algorithm.evaluate(50, num_envs=16)["episode_reward_mean"]


@SEEDS
def test_bc_imitates_the_expert(recorded, seed):
    """After 100,000 rows the return is about 300, after 200,000 nearly always 500."""
    folders, means = recorded
    assert means["expert"] > 450
    assert offline_return("bc", folders["expert"], 400_000, seed=seed) >= 0.9 * means["expert"]


@SEEDS
def test_marwil_outperforms_the_recorded_policies(recorded, seed):
    folders, means = recorded
    assert offline_return("marwil", folders["mixed"], 200_000, seed=seed) > 2 * means["mixed"]


@pytest.fixture(scope="module")
def sac_experience(tmp_path_factory):
    """Record the first 6,000 env steps of SAC on Pendulum-v1; return the folder."""
    require_extra("offline")
    folder = tmp_path_factory.mktemp("sac_experience")
    with plan_config("sac").updated(seed=0, output=str(folder)).build(plan="sac") as sac:
        while sac.train()["num_env_steps_sampled"] < 6000:
            pass
    return folder


@SEEDS_AND_GRADIENTS
def test_cql_outperforms_imitation(sac_experience, seed, numpy_gradients):
    imitated = offline_return("bc", sac_experience, 1_000_000, seed=seed, env="Pendulum-v1")
    settings = {"seed": seed, "numpy_gradients": numpy_gradients}
    assert offline_return("cql", sac_experience, 1_000_000, **settings) > imitated + 300
