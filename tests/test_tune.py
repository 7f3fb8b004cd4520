"""Ray Tune: registered names, search spaces in a config, schedulers, killed trials."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.extras import require_extra

require_extra("tune")

from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from ray.tune.search.sample import Categorical

import flowrl.tune
from flowrl.algorithms.a2c import A2C, A2CConfig
from flowrl.algorithms.dqn import DQNConfig
from flowrl.algorithms.ppo import PPO, PPOConfig
from flowrl.cli.main import main
from flowrl.policies import ConfigError, PolicySpec
from flowrl.sampling import DefaultCallbacks


def ppo_config(**settings):
    base = {
        "env": "CartPole-v1",
        "train_batch_size": 64,
        "sgd_minibatch_size": 32,
        "num_sgd_iter": 1,
        "seed": 3,
        "model": {"fcnet_hiddens": [8]},
    }
    return PPOConfig(**{**base, **settings})


def steps_and_return(result):
    return {name: result[name] for name in ("timesteps_total", "episode_reward_mean")}


def test_trial_trains_like_the_algorithm_and_restores_other_trials(tmp_path):
    with ppo_config().build() as algorithm:
        expected = [algorithm.train() for _ in range(4)]
    trial = flowrl.tune.PPO(config=ppo_config().to_dict())
    try:
        results = [trial.train() for _ in range(2)]
        trial.save(str(tmp_path / "c"))
        results += [trial.train() for _ in range(2)]
        for result, other in zip(results, expected, strict=True):
            expected_result = steps_and_return(other)
            assert steps_and_return(result) == pytest.approx(expected_result, nan_ok=True)
        assert results[-1]["training_iteration"] == 4
    finally:
        trial.stop()
    other = flowrl.tune.PPO(config=ppo_config(lr=0.5).to_dict())
    try:
        other.restore(str(tmp_path / "c"))
        result = other.train()
        assert result["training_iteration"] == 3
        assert result["timesteps_total"] == 192
        # population based training needs the trial's own settings
        assert result["learners"]["default_policy"]["cur_lr"] == 0.5
        assert other.reset_config(ppo_config(lr=0.25).to_dict())
        assert other.train()["learners"]["default_policy"]["cur_lr"] == 0.25
    finally:
        other.stop()


def test_relative_paths_are_those_of_the_folder_in_which_tune_was_started(tmp_path, monkeypatch):
    start, trial_folder = tmp_path / "start", tmp_path / "trial"
    start.mkdir()
    trial_folder.mkdir()
    monkeypatch.setenv("TUNE_ORIG_WORKING_DIR", str(start))
    monkeypatch.chdir(trial_folder)
    assert main(["copy", "a2c", str(start / "my_plan.py")]) == 0
    monkeypatch.setenv("HOME", str(start))
    for plan in ("my_plan.py", "~/my_plan.py"):
        config = {"env": "CartPole-v1", "plan": plan, "output": "recorded"}
        trial = flowrl.tune.A2C(config=config)
        trial.train()
        trial.stop()
    assert list((start / "recorded").glob("*.parquet"))
    assert not list(trial_folder.iterdir())


def test_trial_requests_resources_of_all_workers():
    request = flowrl.tune.PPO.default_resource_request(
        {"num_workers": 2, "evaluation_num_workers": 1}
    )
    assert request.bundles == [{"CPU": 1.0}] * 4
    assert flowrl.tune.A2C.default_resource_request({}).bundles == [{"CPU": 1.0}]
    with_gpus = flowrl.tune.IMPALA.default_resource_request({"num_gpus": 2})
    assert with_gpus.bundles == [{"CPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}]
    without_cpus = {"num_workers": 1, "num_cpus_per_worker": 0}
    (_, bundle) = flowrl.tune.PPO.default_resource_request(without_cpus).bundles
    assert 0 < bundle["CPU"] < 0.01
    with pytest.raises(ConfigError, match="num_workers: input should be a valid integer"):
        flowrl.tune.PPO.default_resource_request({"num_workers": None})
    half = tune.with_resources(flowrl.tune.PPO, {"cpu": 1, "gpu": 0.5})
    assert half.default_resource_request({}).bundles == [{"CPU": 1.0, "GPU": 0.5}]


@pytest.mark.slow
def test_trial_uses_the_resources_that_it_has_reserved(tmp_path, ray_session):
    node = f"node:{ray_session.util.get_node_ip_address()}"  # of which there is 1
    config = ppo_config(num_workers=1, custom_resources_per_worker={node: 0.6})
    run_config = tune.RunConfig(storage_path=str(tmp_path), stop={"training_iteration": 1})
    (result,) = tune.Tuner(flowrl.tune.PPO, param_space=config, run_config=run_config).fit()
    assert result.error is None
    assert result.metrics["training_iteration"] == 1


def test_config_keeps_search_spaces():
    config = ppo_config(
        lr=tune.loguniform(1e-4, 1e-2), model={"fcnet_hiddens": tune.choice([[8], [9]])}
    )
    config.training(gamma=tune.grid_search([0.9, 0.99]))
    assert isinstance(PPOConfig(num_epochs=tune.choice([1, 2])).num_sgd_iter, Categorical)
    space = config.copy().to_dict()
    assert space["gamma"] == {"grid_search": [0.9, 0.99]}
    assert isinstance(space["lr"], tune.search.sample.Domain)
    assert isinstance(space["model"]["fcnet_hiddens"], tune.search.sample.Domain)
    with pytest.raises(ConfigError, match=r"(lr|gamma): is a search space"):
        config.build()
    with pytest.raises(ConfigError, match="unknown setting 'lrr'"):
        ppo_config(lrr=tune.choice([1]))
    with pytest.raises(ConfigError, match="lr"):
        flowrl.tune.PPO(config={**ppo_config().to_dict(), "lr": -1.0})


@pytest.mark.parametrize("space", [tune.grid_search, tune.choice], ids=["grid", "choice"])
@pytest.mark.parametrize(
    ("searched", "fixed"),
    [
        ({"exploration_config": {"epsilon": [0.1, 0.2]}}, {}),
        ({"num_atoms": [11, 51]}, {"v_min": 0.0}),
        ({"noisy": [True]}, {"sigma0": 0.3}),
        ({"prioritized_replay": [True]}, {"prioritized_replay_alpha": 0.5}),
        ({"replay_buffer_capacity": [100_000]}, {"learning_starts": 80_000}),
        ({"model": {"vf_share_layers": [True]}}, {"num_atoms": 51}),
        ({"env_config": {"size": [1, 2]}}, {}),
    ],
    ids=lambda settings: "-".join(settings) or "-",
)
def test_settings_are_checked_together_when_values_are_drawn(space, searched, fixed):
    spaces = {
        name: {key: space(values) for key, values in value.items()}
        if isinstance(value, dict)
        else space(value)
        for name, value in searched.items()
    }
    drawn = {
        name: {key: values[0] for key, values in value.items()}
        if isinstance(value, dict)
        else value[0]
        for name, value in searched.items()
    }
    config = DQNConfig(env="CartPole-v1", **spaces, **fixed)
    with pytest.raises(ConfigError, match="is a search space of Ray Tune, or contains one"):
        config.build()
    config.gamma = 0.9
    assert config.copy().updated(**drawn).gamma == 0.9
    with pytest.raises(ConfigError, match="gamma: "):
        config.gamma = 2.0


def test_values_of_any_kind_are_searched_for_search_spaces():
    repeated = [1]
    repeated.append(repeated)
    config = ppo_config(env_config={"slots": tune.TuneConfig(), "list": repeated})
    assert config.env_config["list"] is not None
    config.env_config = {"list": [repeated, {"a": tune.choice([1])}]}
    with pytest.raises(ConfigError, match="env_config: is a search space"):
        config.check_no_search()


def test_drawn_values_that_do_not_fit_together_are_rejected():
    config = DQNConfig(env="CartPole-v1", num_atoms=tune.choice([1]), v_min=0.0)
    with pytest.raises(ConfigError, match="v_min needs num_atoms above 1"):
        config.updated(num_atoms=1)


def test_search_space_within_a_policy_spec_is_rejected():
    policies = {"a": PolicySpec(config={"lr": tune.choice([1e-3])})}
    config = ppo_config(policies=policies, policy_mapping_fn=lambda *args, **kwargs: "a")
    with pytest.raises(ConfigError, match=r"the config of 'a' has a search space"):
        config.build()


def test_trainable_wraps_a_user_defined_algorithm():
    class CustomA2C(A2C):
        def train(self):
            return {**super().train(), "algorithm": "CustomA2C"}

    trial = flowrl.tune.trainable(CustomA2C)(
        config=A2CConfig(env="CartPole-v1", train_batch_size=32).to_dict()
    )
    try:
        result = trial.train()
        assert result["algorithm"] == "CustomA2C"
        assert result["timesteps_total"] == 32
    finally:
        trial.stop()
    with pytest.raises(ConfigError, match="must be a subclass of Algorithm"):
        flowrl.tune.trainable(dict)


@pytest.mark.slow
def test_importing_an_algorithm_after_tune_registers_its_name():
    code = textwrap.dedent(
        """
        import sys
        from flowrl.algorithms.ppo import PPOConfig
        assert not {"ray", "flowrl.tune"} & set(sys.modules)
        for name in [n for n in sys.modules if n.startswith("flowrl")]:
            del sys.modules[name]
        from ray import tune
        from flowrl.algorithms.ppo import PPOConfig
        from ray.tune.registry import get_trainable_cls
        print(get_trainable_cls("PPO"))
        """
    )
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "flowrl.tune.PPO" in process.stdout


def fit(tmp_path, trainable, space, stop=4, checkpoints=0, failures=0, **settings):
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(metric="episode_reward_mean", mode="max", **settings),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path),
            name="run",
            stop={"training_iteration": stop},
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=checkpoints),
            failure_config=tune.FailureConfig(max_failures=failures),
        ),
    ).fit()


@pytest.mark.slow
def test_tune_run_accepts_a_config_object(tmp_path, ray_session):
    config = ppo_config().environment(env="CartPole-v1").training(train_batch_size=128)
    analysis = tune.run(
        "PPO",
        config=config,
        stop={"training_iteration": 2},
        storage_path=str(tmp_path),
        verbose=0,
    )
    (trial,) = analysis.trials
    with config.build() as algorithm:
        algorithm.train()
        expected = steps_and_return(algorithm.train())
    assert steps_and_return(trial.last_result) == pytest.approx(expected)


def test_tuner_accepts_only_dicts_and_config_objects():
    """Config objects are accepted through a private interface of Ray, see flowrl.tune."""
    tune.Tuner(flowrl.tune.PPO, param_space=ppo_config())
    with pytest.raises(ValueError, match="must be a dict"):
        tune.Tuner(flowrl.tune.PPO, param_space=[("lr", 1e-3)])


class ScoreIsRate(DefaultCallbacks):
    """Reports the learning rate as the mean return."""

    def on_train_result(self, *, algorithm, result, **kwargs):
        result["episode_reward_mean"] = algorithm.config.lr


@pytest.mark.slow
def test_asha_stops_trials_early(tmp_path, ray_session):
    rates = tune.grid_search([1e-1, 1e-2, 1e-3, 1e-4])  # the best one starts first
    config = ppo_config(lr=rates, callbacks_class=ScoreIsRate)
    scheduler = ASHAScheduler(max_t=4, grace_period=1, reduction_factor=2)
    one_at_a_time = {"max_concurrent_trials": 1}
    results = fit(
        tmp_path, flowrl.tune.PPO, config, num_samples=1, scheduler=scheduler, **one_at_a_time
    )
    assert not results.errors
    lengths = [r.metrics["training_iteration"] for r in results]
    assert len(lengths) == 4
    assert max(lengths) == 4
    assert min(lengths) < 4
    assert [r.metrics["timesteps_total"] for r in results] == [64 * n for n in lengths]
    assert sorted(r.config["lr"] for r in results) == [1e-4, 1e-3, 1e-2, 1e-1]


@pytest.mark.slow
def test_optuna_samples_from_the_search_spaces_of_a_config(tmp_path, ray_session):
    require_extra("optuna")
    from ray.tune.search.optuna import OptunaSearch

    space = ppo_config(lr=tune.loguniform(1e-4, 1e-2), gamma=tune.choice([0.9, 0.99]))
    results = fit(
        tmp_path, flowrl.tune.PPO, space, 2, search_alg=OptunaSearch(seed=1), num_samples=3
    )
    assert not results.errors
    tried = {(result.config["lr"], result.config["gamma"]) for result in results}
    assert len(tried) == 3
    assert all(1e-4 <= lr <= 1e-2 and gamma in (0.9, 0.99) for lr, gamma in tried)
    assert [result.metrics["timesteps_total"] for result in results] == [128] * 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_population_based_training_keeps_counters_and_changes_settings(tmp_path, ray_session):
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        quantile_fraction=0.5,
        synch=True,  # all trials have a score before the first ones are replaced
        hyperparam_mutations={"lr": tune.loguniform(1e-4, 1e-2)},
    )
    config = ppo_config(lr=tune.grid_search([1e-4, 1e-3, 1e-2, 1e-1]))
    results = fit(
        tmp_path, "PPO", config, stop=4, checkpoints=2, num_samples=1, scheduler=scheduler
    )
    assert not results.errors
    for result in results:
        assert result.metrics["training_iteration"] == 4
        assert result.metrics["timesteps_total"] == 4 * 64
        learner = result.metrics["learners"]["default_policy"]
        assert learner["cur_lr"] == pytest.approx(result.config["lr"])
    assert {result.config["lr"] for result in results} - {1e-4, 1e-3, 1e-2, 1e-1}


class KillsItsProcessOnce(DefaultCallbacks):
    """Kills its process in the third iteration unless the file FLOWRL_TEST_MARK exists."""

    def on_train_result(self, *, algorithm, result, **kwargs):
        mark = os.environ["FLOWRL_TEST_MARK"]
        if result["training_iteration"] == 3 and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_killed_trial_restarts_from_its_checkpoint(tmp_path):
    """Starts its own Ray, whose workers inherit the environment variable."""
    code = textwrap.dedent(
        f"""
        import ray, sys
        sys.path.insert(0, {os.getcwd()!r})
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        from tests.test_tune import KillsItsProcessOnce, fit, ppo_config
        results = fit({str(tmp_path)!r}, "PPO", ppo_config(callbacks_class=KillsItsProcessOnce),
                         checkpoints=1, failures=1, num_samples=1)
        (result,) = results
        assert not results.errors, results.errors
        print("finished", result.metrics["training_iteration"], result.metrics["timesteps_total"])
        ray.shutdown()
        """
    )
    env = {**os.environ, "FLOWRL_TEST_MARK": str(tmp_path / "mark")}
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env
    )
    assert (tmp_path / "mark").exists(), process.stderr[-3000:]
    assert "finished 4 256" in process.stdout, process.stderr[-3000:]


def test_exported_names_are_trainables_of_the_algorithms():
    assert flowrl.tune.PPO.get_algorithm_class() is PPO
    assert set(flowrl.tune.__all__) >= {"PPO", "A2C", "DQN", "SimpleQ", "trainable"}
