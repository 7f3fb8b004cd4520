"""PPO and A2C: losses against reference implementations, training runs, checkpoints."""

import copy
import json
import pickle
import sys
import tempfile

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from flowrl.algorithms.a2c import A2CConfig, A2CTorchPolicy
from flowrl.algorithms.dqn import DQNConfig
from flowrl.algorithms.ppo import DEFAULT_CONFIG, PPO, PPOConfig, PPOTorchPolicy
from flowrl.data import SampleBatch
from flowrl.data.checkpoint import CheckpointError, read_manifest
from flowrl.ops import ParallelRollouts
from flowrl.policies import ConfigError
from flowrl.sampling import RolloutWorker
from flowrl.settings import setting
from flowrl.trainer.algorithm import Algorithm
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.plan_files import plan_path
from tests.comparisons import without_times

CARTPOLE = gym.make("CartPole-v1")


def ppo_config(**settings):
    base = {
        "env": "CartPole-v1",
        "num_envs_per_worker": 4,
        "train_batch_size": 64,
        "sgd_minibatch_size": 32,
        "num_sgd_iter": 2,
        "seed": 3,
        "model": {"fcnet_hiddens": [16, 16]},
    }
    return PPOConfig(**{**base, **settings})


def policy_and_batch(policy_class, **settings):
    """Return a policy and 64 rows whose old log probabilities differ from the policy's."""
    worker = RolloutWorker(
        "CartPole-v1", policy_class, {"seed": 1, "rollout_fragment_length": 64, **settings}
    )
    batch = worker.sample()
    rng = np.random.default_rng(0)
    shift = rng.normal(0, 0.3, batch.count).astype(np.float32)
    old_inputs = batch["action_dist_inputs"] + rng.normal(0, 0.3, (64, 2)).astype(np.float32)
    return worker.policy, batch.with_columns(
        action_logp=batch["action_logp"] + shift, action_dist_inputs=old_inputs
    )


def reference_ppo_loss(policy, batch):
    """Return PPO's loss, computed row by row in float64 as in Schulman et al. 2017."""
    config, total = policy.config, 0.0
    inputs, values = policy.model.forward_numpy(batch["obs"])
    advantages = batch["advantages"].astype(np.float64)
    if config.standardize_advantages:
        advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    for i in range(batch.count):
        logits = inputs[i].astype(np.float64)
        logp = logits - np.log(np.exp(logits).sum())
        ratio = np.exp(logp[batch["actions"][i]] - batch["action_logp"][i])
        clipped = min(max(ratio, 1 - config.clip_param), 1 + config.clip_param)
        surrogate = min(ratio * advantages[i], clipped * advantages[i])
        target, old = batch["value_targets"][i], batch["vf_preds"][i]
        value_loss = (values[i] - target) ** 2
        if config.vf_clip_param is not None:
            limit = config.vf_clip_param
            clipped_value = old + np.clip(values[i] - old, -limit, limit)
            value_loss = max(value_loss, (clipped_value - target) ** 2)
        entropy = -(np.exp(logp) * logp).sum()
        old_logits = batch["action_dist_inputs"][i].astype(np.float64)
        old_logp = old_logits - np.log(np.exp(old_logits).sum())
        kl = (np.exp(old_logp) * (old_logp - logp)).sum()
        total += -surrogate + config.vf_loss_coeff * value_loss
        total += -config.entropy_coeff * entropy + config.kl_coeff * kl
    return total / batch.count


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"vf_clip_param": 0.05, "entropy_coeff": 0.1},
        {"kl_coeff": 0.7, "standardize_advantages": False},
    ],
)
def test_ppo_loss_equals_reference(settings):
    policy, batch = policy_and_batch(PPOTorchPolicy, **settings)
    policy.learn_on_batch(batch)  # now the policy differs from the one that sampled
    expected = reference_ppo_loss(policy, batch)
    _, stats = policy.compute_gradients(batch)
    assert stats["total_loss"] == pytest.approx(expected, abs=2e-5)


def test_a2c_loss_equals_reference():
    policy, batch = policy_and_batch(A2CTorchPolicy, entropy_coeff=0.2)
    inputs, values = policy.model.forward_numpy(batch["obs"])
    logp = inputs - np.log(np.exp(inputs).sum(1, keepdims=True))
    chosen = logp[np.arange(64), batch["actions"]]
    expected = (
        -(chosen * batch["advantages"]).mean()
        + 0.5 * ((values - batch["value_targets"]) ** 2).mean()
        + 0.2 * (np.exp(logp) * logp).sum(1).mean()
    )
    _, stats = policy.compute_gradients(batch)
    assert stats["total_loss"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("use_gae", [True, False])
def test_value_targets_are_returns_if_lambda_is_one(use_gae):
    worker = RolloutWorker(
        "CartPole-v1",
        PPOTorchPolicy,
        {
            "seed": 1,
            "use_gae": use_gae,
            "lambda_": 1,
            "gamma": 0.9,
            "rollout_fragment_length": 90,
        },
    )
    batch = worker.sample()
    np.testing.assert_allclose(
        batch["value_targets"], batch["advantages"] + batch["vf_preds"], rtol=1e-5, atol=1e-5
    )
    first = batch.split_by_episode()[0]
    assert first["terminateds"][-1]
    returns = 0.0
    for t in reversed(range(first.count)):
        returns = 1.0 + 0.9 * returns
        assert first["value_targets"][t] == pytest.approx(returns, rel=1e-4)


def test_kl_coefficient_adapts_and_kl_stop_ends_learning():
    policy, batch = policy_and_batch(PPOTorchPolicy, kl_coeff=1.0, kl_target=1e-6)
    info = policy.end_learning(batch, {})
    assert info["kl"] > 1e-5
    assert policy.kl_coeff == info["cur_kl_coeff"] == 2.0
    policy.config.kl_target = 100.0
    policy.end_learning(batch, {})
    assert policy.kl_coeff == 1.0
    assert not policy.end_epoch(batch, {})
    policy.config.kl_stop = 1e-6
    version = policy.version
    policy.learn_on_minibatches(batch, num_sgd_iter=5)
    assert policy.version == version + 1
    state = policy.get_state()
    other = PPOTorchPolicy(policy.observation_space, policy.action_space, policy.config)
    other.set_state(state)
    assert other.kl_coeff == policy.kl_coeff


def test_clip_param_follows_its_schedule():
    policy, batch = policy_and_batch(PPOTorchPolicy, clip_param=[(0, 10.0), (100, 0.0)])
    wide = policy.compute_gradients(batch)[1]["policy_loss"]
    policy.on_global_var_update({"timestep": 99})
    assert policy.compute_gradients(batch)[1]["policy_loss"] != wide


@pytest.mark.parametrize("trains_before", [True, False])
def test_schedules_do_not_follow_other_streams_of_the_workers(trains_before):
    with ppo_config(lr=[(0, 1e-3), (640, 0.0)]).build() as algorithm:
        if trains_before:
            algorithm.train()
        others = ParallelRollouts(algorithm.workers)
        sum(batch.count for batch in others.take(20))
        rates = [algorithm.train()["learners"]["default_policy"]["cur_lr"] for _ in range(2)]
    assert rates == pytest.approx([9e-4, 8e-4] if trains_before else [1e-3, 9e-4])


def results(config, n=3):
    """Return n results without times, and the final weights."""
    with config.build() as algorithm:
        out = [without_times(algorithm.train()) for _ in range(n)]
        return out, algorithm.get_policy().get_weights()


@pytest.mark.slow_on_actors
@pytest.mark.parametrize("normalize", [pytest.param(False, marks=pytest.mark.slow), True])
def test_seeded_runs_are_identical(num_workers, normalize):
    if num_workers and not normalize:
        pytest.skip("covered by the case with filters")
    config = ppo_config(
        num_workers=num_workers,
        num_envs_per_worker=2,
        normalize_observations=normalize,
        normalize_rewards=normalize,
    )
    (first, weights), (second, other_weights) = results(config), results(config)
    assert json.dumps(first) == json.dumps(second)
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, other_weights[name])
    assert first[-1]["timesteps_total"] == "192"


def test_training_without_workers_does_not_import_ray(tmp_path):
    import subprocess

    code = (
        "import sys; from flowrl.cli.main import main; "
        f"run_dir = {str(tmp_path / 'r')!r}; "
        "code = main(['train', 'ppo', '--stop-iters', '2', '--run-dir', run_dir]); "
        "print(code, 'ray' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert process.stdout.split("\n")[-2] == "0 False"


def test_fluent_config_builds_and_trains_ppo():
    algo = PPOConfig().environment(env="CartPole-v1").training(train_batch_size=4000).build()
    result = algo.train()
    assert result["timesteps_total"] == 4000
    assert isinstance(algo, PPO)
    algo.stop()


def test_rollout_worker_accepts_default_config():
    worker = RolloutWorker(
        env_creator=lambda _: gym.make("CartPole-v1"),
        policy_config=DEFAULT_CONFIG,
        policy_spec=PPOTorchPolicy,
    )
    batch = worker.sample()
    assert worker.policy_map["default_policy"] is worker.policy
    assert batch.data["advantages"].shape == (200,)


def test_continuous_actions_train():
    config = ppo_config(env="Pendulum-v1", normalize_observations=True, normalize_rewards=True)
    with config.build() as algorithm:
        result = algorithm.train()
        action = algorithm.compute_single_action(np.zeros(3, np.float32))
    assert action.shape == (1,)
    assert np.isfinite(result["learners"]["default_policy"]["total_loss"])


def test_execution_plan_of_subclass_replaces_plan_file():
    from flowrl.ops import ParallelRollouts, StandardMetricsReporting

    class JustSample(PPO):
        @staticmethod
        def execution_plan(workers, config):
            return StandardMetricsReporting(ParallelRollouts(workers), workers, config)

    algorithm = JustSample(ppo_config())
    assert algorithm.train()["num_env_steps_trained"] == 0


def test_config_of_another_class_keeps_the_algorithms_defaults():
    with PPO(AlgorithmConfig(env="CartPole-v1")) as algorithm:
        assert algorithm.config.plan == "ppo"
    for settings in ({}, {"lr": 5e-5}, {"double_q": False}):
        with pytest.raises(ConfigError, match="must be of the class PPOConfig, got DQNConfig"):
            PPO(DQNConfig(env="CartPole-v1", **settings))
    with pytest.raises(
        ConfigError, match="of the class PPOConfig, a mapping of settings or an env"
    ):
        PPO(3)


class OwnConfig(PPOConfig):
    bonus: float = setting(0.1)
    """Own setting."""


class OwnPPO(PPO):
    config_class = OwnConfig


def test_config_of_a_base_class_keeps_what_was_changed_in_place():
    config = PPOConfig(env="CartPole-v1")
    config.model.fcnet_hiddens = [8]
    config.env_config["x"] = 1
    with OwnPPO(config) as algorithm:
        assert algorithm.config.model.fcnet_hiddens == [8]
        assert algorithm.config.env_config == {"x": 1}


def test_misspelled_members_of_subclasses_are_reported(caplog):
    class Misspelled(PPO):
        policy_clas = PPOTorchPolicy

        def helper(self): ...

    assert "Misspelled.policy_clas overrides nothing: did you mean policy_class?" in caplog.text

    class MisspelledPolicy(PPOTorchPolicy):
        def postprocess_trajectry(self, batch): ...

    assert "did you mean postprocess_trajectory?" in caplog.text
    assert len(caplog.messages) == 2


def test_algorithm_without_a_policy_class_is_rejected():
    message = "^Algorithm has no policy_class for 'default_policy': use an algorithm that has one"
    with pytest.raises(ConfigError, match=message):
        Algorithm(PPOConfig(env="CartPole-v1"))


def test_checkpoint_has_the_hash_of_the_plan_that_was_built(tmp_path):
    plan = tmp_path / "mine.py"
    plan.write_text(plan_path("a2c").read_text())
    with A2CConfig(env="CartPole-v1", train_batch_size=32, plan=str(plan)).build() as algorithm:
        algorithm.train()
        plan.write_text(plan.read_text() + "\n# edited while the algorithm trained\n")
        algorithm.save(tmp_path / "c")
    with A2CConfig(env="CartPole-v1", train_batch_size=32, plan=str(plan)).build() as algorithm:
        with pytest.raises(CheckpointError, match="has changed since"):
            algorithm.restore(tmp_path / "c")
        algorithm.restore(tmp_path / "c", other_plan=True)


@pytest.mark.parametrize("normalize", [False, True])
def test_restored_algorithm_continues_training(tmp_path, normalize):
    config = ppo_config(normalize_observations=normalize, normalize_rewards=normalize, kl_coeff=0.1)
    with config.build() as algorithm, config.build() as restored:
        for _ in range(2):
            last = algorithm.train()
        algorithm.save(tmp_path / "c")
        restored.restore(tmp_path / "c")
        assert restored.iteration == 2
        observation = np.ones(4, np.float32)
        action = algorithm.compute_single_action(observation)
        assert restored.compute_single_action(observation) == action
        restored_weights = restored.get_policy().get_weights()
        for name, weight in algorithm.get_policy().get_weights().items():
            np.testing.assert_array_equal(weight, restored_weights[name])
        result = restored.train()
        assert result["timesteps_total"] == last["timesteps_total"] + 64
        assert result["training_iteration"] == 3
        assert result["episodes_total"] >= last["episodes_total"]


def test_save_without_a_path_uses_the_run_directory_or_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ppo_config().build() as algorithm:
        result = algorithm.train()
        first, second = algorithm.save(), algorithm.save()
        assert first.parent == second.parent == tmp_path
        assert first != second
        algorithm.run_dir = tmp_path / "run"
        path = algorithm.save()
        assert path == tmp_path / "run/checkpoints/000001"
        assert algorithm.save() == path  # replaces the checkpoint of the same iteration
    for saved in (first, path, tmp_path / "run"):
        with PPO.from_checkpoint(saved) as restored:
            assert restored.train()["timesteps_total"] == 2 * result["timesteps_total"]


def test_save_takes_metadata_in_one_argument(tmp_path):
    with ppo_config().build() as algorithm:
        path = algorithm.save(tmp_path / "c", metadata={"note": "first"})
        assert read_manifest(path)["note"] == "first"
        with pytest.raises(TypeError, match=r"no argument 'checkpoint_dir'\. Use path=…\."):
            algorithm.save(checkpoint_dir=tmp_path / "d")
        for name in ("config", "format"):
            with pytest.raises(ConfigError, match=rf"that the manifest uses: \['{name}'\]"):
                algorithm.save(tmp_path / "d", metadata={name: 1})
        with pytest.raises(ConfigError, match=r"metadata\['score'\] is not JSON: .*float32"):
            algorithm.save(tmp_path / "d", metadata={"score": np.float32(1)})
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("name", ["num_workers", "num_envs_per_worker"])
def test_other_numbers_of_workers_and_environments_name_restore_policies(tmp_path, name):
    with ppo_config().build() as algorithm:
        path = algorithm.save(tmp_path / "c")
        weights = algorithm.get_policy().get_weights()
    with pytest.raises(CheckpointError, match=rf"{name} is 3, in .*algorithm\.restore_policies\("):
        PPO.from_checkpoint(path, config={name: 3})
    with ppo_config(**{name: 3}).build() as algorithm:
        algorithm.restore_policies(path)
        restored = algorithm.get_policy().get_weights()
    assert all(np.array_equal(weights[name], restored[name]) for name in weights)


def test_policies_of_another_class_are_named(tmp_path):
    with A2CConfig(env="CartPole-v1", model={"fcnet_hiddens": [16, 16]}).build() as algorithm:
        path = algorithm.save(tmp_path / "c")
        weights = algorithm.get_policy().get_weights()
    message = (
        r"'default_policy' is of the class PPOTorchPolicy, in the checkpoint it is of the class "
        r"A2CTorchPolicy: .* policy\.set_weights\(A2CTorchPolicy\.from_checkpoint\(path, "
    )
    with ppo_config().build() as other:
        with pytest.raises(CheckpointError, match=message):
            other.restore_policies(path)
        policy = other.get_policy()
        policy.set_weights(A2CTorchPolicy.from_checkpoint(path).get_weights())
        assert all(np.array_equal(weights[name], policy.get_weights()[name]) for name in weights)


def test_restore_rejects_other_models_and_plans(tmp_path):
    with (
        ppo_config().build() as algorithm,
        ppo_config(model={"fcnet_hiddens": [8]}).build() as other,
    ):
        algorithm.train()
        path = algorithm.save(tmp_path / "c")
        with pytest.raises(CheckpointError, match=r"hidden.0.weight: has \(8, 4\), got \(16, 4\)"):
            other.restore(path)
        a2c = A2CConfig(env="CartPole-v1", train_batch_size=64).build()
        message = (
            r"it was written by PPO, but this algorithm is A2C: use PPO.from_checkpoint\(path\)"
        )
        with pytest.raises(CheckpointError, match=message):
            a2c.restore(path)

        class Derived(PPO):
            pass

        with Derived(ppo_config()) as derived:
            derived.restore(path)
            derived.restore(derived.save(tmp_path / "d"))
            algorithm.restore(tmp_path / "d")
        other_plan = ppo_config(plan="ppo_async").build()
        message = "written by the plan 'ppo', this algorithm has 'ppo_async'"
        with pytest.raises(CheckpointError, match=message):
            other_plan.restore(path)
        with pytest.raises(ConfigError, match="the path is empty"):
            algorithm.save("")
        for use in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="a PPO cannot be pickled or copied: save"):
                use(algorithm)


def test_evaluation_is_repeatable_and_leaves_filters_unchanged():
    with ppo_config(normalize_observations=True).build() as algorithm:
        algorithm.train()
        before = json.dumps(algorithm.get_policy().filter_state_dict(), default=str)
        info = algorithm.evaluate(episodes=7, num_envs=3)
        assert info["episodes"] == 7
        assert info["episode_reward_mean"] == info["episode_len_mean"]
        assert algorithm.evaluate(episodes=7, num_envs=3) == info
        assert json.dumps(algorithm.get_policy().filter_state_dict(), default=str) == before
        with pytest.raises(ConfigError, match="episodes"):
            algorithm.evaluate(episodes=0)
    with ppo_config(evaluation_config={"vectorization_mode": "sync"}).build() as algorithm:
        info = algorithm.evaluate(episodes=7, num_envs=3)
        assert info["episodes"] == 7
        assert info["episode_reward_mean"] == info["episode_len_mean"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.training(lrr=1), "lrr.*lr"),
        (lambda c: c.training(num_workers=1), r"belongs to .rollouts\(\)"),
        (lambda c: c.rollouts(gamma=0.9), r"belongs to .training\(\)"),
        (lambda c: c.rollouts(num_workers=-1), "num_workers"),
        (lambda c: c.training(train_batch_size=16), "smaller than sgd_minibatch_size=32"),
        (lambda c: c.environment(env="CartPol-v1").build(), "CartPole-v1"),
        (lambda c: c.environment(env=7).build(), "env"),
        (lambda c: PPOConfig().build(), "no environment"),
        (lambda c: c.training(plan="ppoo").build(), "Did you mean 'ppo'"),
        (lambda c: c.training(plan="no_such.py").build(), "no file"),
        (lambda c: c.training(plan=None).build(), "no execution plan"),
        (lambda c: c.training(clip_param=-0.1), "clip_param"),
        (lambda c: c.training(kl_target=0), "kl_target"),
    ],
)
def test_invalid_settings_are_rejected(change, message):
    config = ppo_config()
    with pytest.raises(ConfigError, match=message):
        change(config)
    assert config.train_batch_size == 64  # a rejected change leaves the config as it was
    assert config.num_workers == 0


def test_unsupported_observation_space_is_rejected():
    class TextObservations(gym.Env):
        observation_space = gym.spaces.Text(3)
        action_space = gym.spaces.Discrete(2)

    with (
        ppo_config(env=lambda context: TextObservations()).build() as algorithm,
        pytest.raises(ValueError, match="space"),
    ):
        algorithm.train()


def test_fluent_config_is_a_mapping():
    config = AlgorithmConfig().environment("CartPole-v1").rollouts(num_workers=1).debugging(seed=1)
    assert config["num_workers"] == 1
    assert config.to_dict()["model"]["fcnet_hiddens"] == [64, 64]
    assert Algorithm.config_class is AlgorithmConfig


def test_worker_samples_a_sample_batch():
    with ppo_config().build() as algorithm:
        batch = algorithm.workers.local_worker().sample()
    assert isinstance(batch, SampleBatch)


class BoxAndDiscrete(gym.Env):
    """Observations are a tuple of a vector and an integer."""

    observation_space = spaces.Tuple((spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return (np.zeros(2, np.float32), 1), {}

    def step(self, action):
        return (np.zeros(2, np.float32), 2), 1.0, True, False, {}


def test_single_action_of_nested_observation():
    with A2CConfig(env=BoxAndDiscrete, model={"fcnet_hiddens": [4]}).build() as algorithm:
        assert algorithm.compute_single_action((np.zeros(2, np.float32), 2)) in (0, 1)
        with pytest.raises(ValueError, match="not finite"):
            algorithm.compute_single_action((np.array([0, np.nan], np.float32), 2))


def test_stopped_algorithm_has_no_policies(tmp_path):
    with ppo_config().build() as algorithm:
        algorithm.train()
    calls = [
        lambda: algorithm.predict(np.zeros(4)),
        lambda: algorithm.evaluate(1),
        lambda: algorithm.save(tmp_path / "c"),
        algorithm.get_policy,
        algorithm.train,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="stopped: build a new"):
            call()
    assert not (tmp_path / "c").exists()


def test_missing_seed_is_drawn():
    config = ppo_config(seed=None)
    with config.build() as one, config.build() as other:
        assert isinstance(one.config.seed, int)
        assert one.config.seed != other.config.seed
        assert config.seed is None
