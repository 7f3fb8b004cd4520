"""Experiment loggers: what W&B and MLflow receive, resumed runs, failures and bad settings."""

import json
import time

import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.cli.main import main
from flowrl.policies import ConfigError
from flowrl.sampling import DefaultCallbacks
from flowrl.trainer.loggers import MlflowLogger
from tests.extras import require_extra


def a2c_config(**settings):
    base = {"env": "CartPole-v1", "train_batch_size": 40, "seed": 2}
    return A2CConfig(**{**base, "model": {"fcnet_hiddens": [8]}, **settings})


def mlflow_config(database, callbacks_class=None, **settings):
    log_config = mlflow_settings(database, **settings)
    return a2c_config(log_to=["mlflow"], log_config=log_config, callbacks_class=callbacks_class)


def mlflow_settings(database, **settings):
    return {"mlflow": {"tracking_uri": database, "experiment_name": "poles", **settings}}


@pytest.fixture
def database(tmp_path):
    """URI of an empty MLflow database."""
    require_extra("mlflow")
    return f"sqlite:///{tmp_path}/mlflow.db"


def mlflow_client(database):
    from mlflow.tracking import MlflowClient

    return MlflowClient(database)


def mlflow_runs(database):
    client = mlflow_client(database)
    return client.search_runs([client.get_experiment_by_name("poles").experiment_id])


def metric_history(database, run, name):
    """Return (step, value) of every logged value of a metric."""
    history = mlflow_client(database).get_metric_history(run.info.run_id, name)
    return [(metric.step, metric.value) for metric in history]


def logged_iterations(database, run):
    return [value for _, value in metric_history(database, run, "training_iteration")]


@pytest.mark.slow
def test_mlflow_receives_every_result(database):
    with mlflow_config(database, run_name="mine", tags={"a": "b"}).build() as algorithm:
        results = [algorithm.train() for _ in range(3)]
    (run,) = mlflow_runs(database)
    assert run.info.run_name == "mine"
    assert run.info.status == "FINISHED"
    assert run.data.tags["a"] == "b"
    assert run.data.params["train_batch_size"] == "40"
    assert metric_history(database, run, "num_env_steps_trained") == [
        (r["timesteps_total"], r["num_env_steps_trained"]) for r in results
    ]
    losses = metric_history(database, run, "info/learner/default_policy/learner_stats/policy_loss")
    assert [loss for _, loss in losses] == [
        r["learners"]["default_policy"]["policy_loss"] for r in results
    ]


@pytest.mark.slow
def test_restored_algorithm_continues_the_run(database, tmp_path):
    config = mlflow_config(database)
    with config.build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
    with config.build() as algorithm:
        algorithm.restore(tmp_path / "c")
        algorithm.train()
    (run,) = mlflow_runs(database)
    assert logged_iterations(database, run) == [1, 2]


def test_wandb_receives_every_result(tmp_path, monkeypatch):
    require_extra("wandb")
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    runs, init = [], wandb.init
    monkeypatch.setattr(
        wandb, "init", lambda **arguments: runs.append(init(**arguments)) or runs[0]
    )
    settings = {"wandb": {"mode": "offline", "dir": str(tmp_path), "project": "poles"}}
    with a2c_config(log_to=["wandb"], log_config=settings).build() as algorithm:
        algorithm.train()
        result = algorithm.train()
        (run,) = runs
        assert dict(run.config)["train_batch_size"] == 40
        assert run.project == "poles"
        assert run.offline
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    names = (b"num_env_steps_trained", b"info/learner/default_policy/learner_stats/policy_loss")
    # W&B's own process writes the file, and may do so after finish() has returned
    deadline = time.monotonic() + 30
    while not all(name in file.read_bytes() for name in names) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(name in file.read_bytes() for name in names)
    assert json.dumps(result["num_env_steps_trained"]).encode() in file.read_bytes()


def test_loggers_start_with_the_first_result(database):
    with mlflow_config(database).build() as algorithm:
        algorithm.plan.explain()
    assert mlflow_client(database).get_experiment_by_name("poles") is None


def lose_results(monkeypatch):
    """Make MLflow reject all results until `monkeypatch.undo()`."""

    def write(self, result):
        raise ConnectionError

    monkeypatch.setattr(MlflowLogger, "write", write)


@pytest.mark.slow
def test_failing_logger_is_removed_after_three_failures(database, caplog, monkeypatch):
    with mlflow_config(database).build() as algorithm:
        algorithm.train()
        lose_results(monkeypatch)
        for iteration in range(2, 7):
            assert algorithm.train()["training_iteration"] == iteration
    assert caplog.text.count("mlflow could not log a result") == 1
    assert caplog.text.count("mlflow failed 3 times in a row and was removed") == 1


@pytest.mark.slow
def test_logger_continues_after_a_lost_result(database, monkeypatch):
    with mlflow_config(database).build() as algorithm:
        algorithm.train()
        lose_results(monkeypatch)
        algorithm.train()
        monkeypatch.undo()
        algorithm.train()
    (run,) = mlflow_runs(database)
    assert logged_iterations(database, run) == [1, 3]


class AddsMetrics(DefaultCallbacks):
    """Adds metrics whose names MLflow does not accept."""

    def on_train_result(self, *, algorithm, result, **kwargs):
        result["mine"] = {"a//b": np.float32(7), "/../x(1)": 1, "y" * 300: True}


@pytest.mark.slow
def test_metric_names_are_converted_for_mlflow(database):
    with mlflow_config(database, AddsMetrics).build() as algorithm:
        algorithm.train()
    (run,) = mlflow_runs(database)
    assert run.data.metrics["mine/a/b"] == 7
    assert run.data.metrics["mine/x_1_"] == 1
    assert "log_config" not in run.data.params


class FailsInSecondIteration(DefaultCallbacks):
    def on_train_result(self, *, algorithm, result, **kwargs):
        if result["training_iteration"] == 2:
            raise ArithmeticError


def test_failed_training_marks_the_run_as_failed(database):
    algorithm = mlflow_config(database, FailsInSecondIteration).build()
    algorithm.train()
    with pytest.raises(ArithmeticError), algorithm:
        algorithm.train()
    (run,) = mlflow_runs(database)
    assert run.info.status == "FAILED"


@pytest.mark.slow
def test_run_that_cannot_be_resumed_is_replaced_by_a_new_one(database, tmp_path, caplog):
    with mlflow_config(database).build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
    other_database = f"sqlite:///{tmp_path}/other.db"
    with mlflow_config(other_database).build() as algorithm:
        algorithm.restore(tmp_path / "c")
        algorithm.train()
    assert len(mlflow_runs(other_database)) == 1
    assert "mlflow: cannot resume run" in caplog.text


def test_logger_that_cannot_start_stops_training():
    require_extra("mlflow")
    settings = {"mlflow": {"tracking_uri": "nowhere://at/all"}}
    with a2c_config(log_to=["mlflow"], log_config=settings).build() as algorithm:
        for _ in range(2):  # it does not continue without the logger
            with pytest.raises(ConfigError, match="log_to: cannot start mlflow"):
                algorithm.train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"log_to": ["wandbb"]}, "log_to"),
        ({"log_to": 3}, "log_to"),
        (
            {"log_to": ["mlflow"], "log_config": {"mlflow": {"project": "x"}}},
            "no setting 'project'",
        ),
        ({"log_config": {"wandb": {}}}, "'wandb' is not in log_to"),
        ({"log_to": ["mlflow"], "log_config": {"mlflow": 3}}, "log_config"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    if settings.get("log_to") == ["mlflow"]:
        require_extra("mlflow")
    with pytest.raises(ConfigError, match=message):
        a2c_config(**settings).build()


def test_command_line_flags(database, tmp_path):
    flags = ["--log-to", "mlflow", "--log-config", json.dumps(mlflow_settings(database))]
    stop = ["--stop-iters", "2", "--train-batch-size", "64", "--run-dir", str(tmp_path / "run")]
    assert main(["train", "a2c", *flags, *stop]) == 0
    assert main(["resume", str(tmp_path / "run"), "--trust", "--stop-iters", "3"]) == 0
    (run,) = mlflow_runs(database)
    assert logged_iterations(database, run) == [1, 2, 3]
