"""Ray Tune: names, search spaces in a config, schedulers, trials that die."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

import flowrl.tune
from flowrl.algorithms.a2c import A2C, A2CConfig
from flowrl.algorithms.ppo import PPO, PPOConfig
from flowrl.policies import ConfigError
from flowrl.sampling import DefaultCallbacks


def small(**settings):
    base = {
        "env": "CartPole-v1",
        "train_batch_size": 64,
        "sgd_minibatch_size": 32,
        "num_sgd_iter": 1,
        "seed": 3,
        "model": {"fcnet_hiddens": [8]},
    }
    return PPOConfig(**{**base, **settings})


def told(result):
    return {name: result[name] for name in ("timesteps_total", "episode_reward_mean")}


def test_a_trial_is_the_algorithm(tmp_path):
    """The same results as by build(), checkpoints that other trials take over."""
    with small().build() as algorithm:
        expected = [algorithm.train() for _ in range(4)]
    trial = flowrl.tune.PPO(config=small().to_dict())
    try:
        results = [trial.train() for _ in range(2)]
        trial.save(str(tmp_path / "c"))
        results += [trial.train() for _ in range(2)]
        for result, other in zip(results, expected, strict=True):
            assert told(result) == pytest.approx(told(other), nan_ok=True)
        assert results[-1]["training_iteration"] == 4
    finally:
        trial.stop()
    other = flowrl.tune.PPO(config=small(lr=0.5).to_dict())
    try:
        other.restore(str(tmp_path / "c"))
        result = other.train()
        assert result["training_iteration"] == 3
        assert result["timesteps_total"] == 192
        # its own settings, as population based training wants it
        assert result["learners"]["default_policy"]["cur_lr"] == 0.5
        assert other.reset_config(small(lr=0.25).to_dict())
        assert other.train()["learners"]["default_policy"]["cur_lr"] == 0.25
    finally:
        other.stop()


def test_what_a_trial_reserves():
    request = flowrl.tune.PPO.default_resource_request(
        {"num_workers": 2, "evaluation_num_workers": 1}
    )
    assert request.bundles == [{"CPU": 1.0}] * 4
    assert flowrl.tune.A2C.default_resource_request({}).bundles == [{"CPU": 1.0}]


def test_search_spaces_in_a_config():
    config = small(lr=tune.loguniform(1e-4, 1e-2), model={"fcnet_hiddens": tune.choice([[8], [9]])})
    config.training(gamma=tune.grid_search([0.9, 0.99]))
    space = config.copy().to_dict()
    assert space["gamma"] == {"grid_search": [0.9, 0.99]}
    assert isinstance(space["lr"], tune.search.sample.Domain)
    assert isinstance(space["model"]["fcnet_hiddens"], tune.search.sample.Domain)
    with pytest.raises(ConfigError, match=r"(lr|gamma): it is a search space"):
        config.build()
    with pytest.raises(ConfigError, match="unknown setting 'lrr'"):
        small(lrr=tune.choice([1]))
    with pytest.raises(ConfigError, match="lr"):
        flowrl.tune.PPO(config={**small().to_dict(), "lr": -1.0})


def test_trainables_of_ones_own():
    class Mine(A2C):
        pass

    made = flowrl.tune.trainable(Mine)
    trial = made(config=A2CConfig(env="CartPole-v1", train_batch_size=32).to_dict())
    try:
        assert type(trial._built) is Mine
        assert trial.train()["timesteps_total"] == 32
    finally:
        trial.stop()
    with pytest.raises(ConfigError, match="a subclass of Algorithm is needed"):
        flowrl.tune.trainable(dict)


def test_names_are_there_where_tune_was_imported_before():
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "flowrl.tune.PPO" in done.stdout


def fitted(tmp_path, trainable, space, stop=4, checkpoints=0, failures=0, **settings):
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


def test_the_founding_example(tmp_path, ray_session):
    """`tune.run("PPO", config=config)`, with the config object as it is."""
    config = small().environment(env="CartPole-v1").training(train_batch_size=128)
    done = tune.run(
        "PPO",
        config=config,
        stop={"training_iteration": 2},
        storage_path=str(tmp_path),
        verbose=0,
    )
    (trial,) = done.trials
    with config.build() as algorithm:
        algorithm.train()
        assert told(trial.last_result) == pytest.approx(told(algorithm.train()))


@pytest.mark.slow
def test_asha(tmp_path, ray_session):
    config = small(lr=tune.grid_search([1e-4, 1e-3, 1e-2, 1e-1]))
    scheduler = ASHAScheduler(max_t=4, grace_period=1, reduction_factor=2)
    results = fitted(tmp_path, flowrl.tune.PPO, config, num_samples=1, scheduler=scheduler)
    assert not results.errors
    lengths = [r.metrics["training_iteration"] for r in results]
    assert len(lengths) == 4
    assert max(lengths) == 4
    assert [r.metrics["timesteps_total"] for r in results] == [64 * n for n in lengths]
    assert sorted(r.config["lr"] for r in results) == [1e-4, 1e-3, 1e-2, 1e-1]


@pytest.mark.slow
def test_optuna(tmp_path, ray_session):
    """Optuna's samplers draw from the search spaces in a config."""
    from ray.tune.search.optuna import OptunaSearch

    space = small(lr=tune.loguniform(1e-4, 1e-2), gamma=tune.choice([0.9, 0.99]))
    results = fitted(
        tmp_path, flowrl.tune.PPO, space, 2, search_alg=OptunaSearch(seed=1), num_samples=3
    )
    assert not results.errors
    tried = {(result.config["lr"], result.config["gamma"]) for result in results}
    assert len(tried) == 3
    assert all(1e-4 <= lr <= 1e-2 and gamma in (0.9, 0.99) for lr, gamma in tried)
    assert [result.metrics["timesteps_total"] for result in results] == [128] * 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_population_based_training(tmp_path, ray_session):
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        quantile_fraction=0.5,
        hyperparam_mutations={"lr": tune.loguniform(1e-4, 1e-2)},
    )
    config = small(lr=tune.grid_search([1e-4, 1e-3, 1e-2, 1e-1]))
    results = fitted(
        tmp_path, "PPO", config, stop=4, checkpoints=2, num_samples=1, scheduler=scheduler
    )
    assert not results.errors
    for result in results:
        assert result.metrics["training_iteration"] == 4
        assert result.metrics["timesteps_total"] == 4 * 64
        learner = result.metrics["learners"]["default_policy"]
        assert learner["cur_lr"] == pytest.approx(result.config["lr"])


class DiesOnce(DefaultCallbacks):
    """Kills its process in the third iteration, once."""

    def on_train_result(self, *, algorithm, result, **kwargs):
        mark = os.environ["FLOWRL_TEST_MARK"]
        if result["training_iteration"] == 3 and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_trial_goes_on_from_its_checkpoint(tmp_path):
    """In a Ray of its own, whose workers know the mark."""
    code = textwrap.dedent(
        f"""
        import ray, sys
        sys.path.insert(0, {os.getcwd()!r})
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        from tests.test_tune import DiesOnce, fitted, small
        results = fitted({str(tmp_path)!r}, "PPO", small(callbacks_class=DiesOnce),
                         checkpoints=1, failures=1, num_samples=1)
        (result,) = results
        assert not results.errors, results.errors
        print("told", result.metrics["training_iteration"], result.metrics["timesteps_total"])
        ray.shutdown()
        """
    )
    env = {**os.environ, "FLOWRL_TEST_MARK": str(tmp_path / "mark")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env
    )
    assert (tmp_path / "mark").exists(), done.stderr[-3000:]
    assert "told 4 256" in done.stdout, done.stderr[-3000:]


def test_names_lead_to_their_algorithms():
    assert flowrl.tune.PPO._class() is PPO
    assert set(flowrl.tune.__all__) >= {"PPO", "A2C", "DQN", "SimpleQ", "trainable"}
