"""Experiment trackers: what W&B and MLflow get, a run that goes on, and what cannot be."""

import json

import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from flowrl.algorithms.a2c import A2CConfig
from flowrl.cli.main import main
from flowrl.policies import ConfigError
from flowrl.sampling import DefaultCallbacks
from flowrl.trainer import loggers as trackers


def config(**settings):
    base = {"env": "CartPole-v1", "train_batch_size": 40, "seed": 2}
    return A2CConfig(**{**base, "model": {"fcnet_hiddens": [8]}, **settings})


@pytest.fixture
def store(tmp_path):
    """An MLflow database of its own."""
    return f"sqlite:///{tmp_path}/mlflow.db"


def mlflow_of(store, **settings):
    return {"mlflow": {"tracking_uri": store, "experiment_name": "poles", **settings}}


def runs_of(store):
    client = MlflowClient(store)
    return client.search_runs([client.get_experiment_by_name("poles").experiment_id])


def test_mlflow_gets_every_result(store):
    own = config(log_to=["mlflow"], log_config=mlflow_of(store, run_name="mine", tags={"a": "b"}))
    with own.build() as algorithm:
        results = [algorithm.train() for _ in range(3)]
    (run,) = runs_of(store)
    assert run.info.run_name == "mine"
    assert run.info.status == "FINISHED"
    assert run.data.tags["a"] == "b"
    assert run.data.params["train_batch_size"] == "40"
    told = MlflowClient(store).get_metric_history(run.info.run_id, "num_env_steps_trained")
    assert [(m.step, m.value) for m in told] == [
        (r["timesteps_total"], r["num_env_steps_trained"]) for r in results
    ]
    loss = MlflowClient(store).get_metric_history(
        run.info.run_id, "learners/default_policy/policy_loss"
    )
    assert [m.value for m in loss] == [
        r["learners"]["default_policy"]["policy_loss"] for r in results
    ]


def test_who_goes_on_from_a_checkpoint_adds_to_the_run(store, tmp_path):
    own = config(log_to=["mlflow"], log_config=mlflow_of(store))
    with own.build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
    with own.build() as algorithm:
        algorithm.restore(tmp_path / "c")
        algorithm.train()
    (run,) = runs_of(store)
    told = MlflowClient(store).get_metric_history(run.info.run_id, "training_iteration")
    assert [m.value for m in told] == [1, 2]


def test_wandb_gets_every_result(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = {"wandb": {"mode": "offline", "dir": str(tmp_path), "project": "poles"}}
    with config(log_to=["wandb"], log_config=settings).build() as algorithm:
        algorithm.train()
        sent = algorithm.train()
        (tracker,) = algorithm._trackers._running.values()
        assert dict(tracker._run.config)["train_batch_size"] == 40
        assert tracker._run.project == "poles"
        assert tracker._run.offline
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    assert b"learners/default_policy/policy_loss" in file.read_bytes()
    assert json.dumps(sent["num_env_steps_trained"]).encode() in file.read_bytes()


def test_without_a_result_nothing_is_started(store):
    with config(log_to=["mlflow"], log_config=mlflow_of(store)).build() as algorithm:
        algorithm.plan.explain()
    assert MlflowClient(store).get_experiment_by_name("poles") is None


def test_one_that_fails_later_is_left_out(store, caplog):
    with config(log_to=["mlflow"], log_config=mlflow_of(store)).build() as algorithm:
        algorithm.train()
        tracker = algorithm._trackers._running["mlflow"]
        tracker.run_id = "lost"
        for iteration in range(2, 7):
            assert algorithm.train()["training_iteration"] == iteration
    assert caplog.text.count("mlflow could not take a result") == 1
    assert caplog.text.count("mlflow failed 3 times and gets no more results") == 1


def test_a_result_that_is_lost_does_not_end_it(store):
    with config(log_to=["mlflow"], log_config=mlflow_of(store)).build() as algorithm:
        algorithm.train()
        tracker = algorithm._trackers._running["mlflow"]
        run_id, tracker.run_id = tracker.run_id, "lost"
        algorithm.train()
        tracker.run_id = run_id
        algorithm.train()
    told = MlflowClient(store).get_metric_history(run_id, "training_iteration")
    assert [m.value for m in told] == [1, 3]


class Odd(DefaultCallbacks):
    """Adds numbers under names that MLflow does not take."""

    def on_train_result(self, *, algorithm, result, **kwargs):
        result["mine"] = {"a//b": np.float32(7), "/../x(1)": 1, "y" * 300: True}


def test_odd_names_and_what_callbacks_add(store):
    own = config(log_to=["mlflow"], log_config=mlflow_of(store), callbacks_class=Odd)
    with own.build() as algorithm:
        algorithm.train()
    (run,) = runs_of(store)
    assert run.data.metrics["mine/a/b"] == 7
    assert run.data.metrics["mine/x_1_"] == 1
    assert "log_config" not in run.data.params


class Breaks(DefaultCallbacks):
    """Raises in the second iteration."""

    def on_train_result(self, *, algorithm, result, **kwargs):
        if result["training_iteration"] == 2:
            raise ArithmeticError


def test_a_run_that_fails_is_marked(store):
    own = config(log_to=["mlflow"], log_config=mlflow_of(store), callbacks_class=Breaks)
    algorithm = own.build()
    algorithm.train()
    with pytest.raises(ArithmeticError), algorithm:
        algorithm.train()
    (run,) = runs_of(store)
    assert run.info.status == "FAILED"


def test_another_store_gets_a_new_run(store, tmp_path, caplog):
    with config(log_to=["mlflow"], log_config=mlflow_of(store)).build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
    elsewhere = f"sqlite:///{tmp_path}/other.db"
    with config(log_to=["mlflow"], log_config=mlflow_of(elsewhere)).build() as algorithm:
        algorithm.restore(tmp_path / "c")
        algorithm.train()
    assert len(runs_of(elsewhere)) == 1
    assert "cannot be gone on with" in caplog.text


def test_one_that_cannot_be_started_stops_the_run():
    settings = {"mlflow": {"tracking_uri": "nowhere://at/all"}}
    with config(log_to=["mlflow"], log_config=settings).build() as algorithm:
        for _ in range(2):  # it does not go on without
            with pytest.raises(ConfigError, match="log_to: mlflow cannot be started"):
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
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        config(**settings).build()


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "flowrl\[wandb\]"'):
        config(log_to=["wandb"]).build()


def test_by_flags(store, tmp_path):
    flags = ["--log-to", "mlflow", "--log-config", json.dumps(mlflow_of(store))]
    stop = ["--stop-iters", "2", "--train-batch-size", "64", "--run-dir", str(tmp_path / "run")]
    assert main(["train", "a2c", *flags, *stop]) == 0
    assert main(["resume", str(tmp_path / "run"), "--stop-iters", "3"]) == 0
    (run,) = runs_of(store)
    told = MlflowClient(store).get_metric_history(run.info.run_id, "training_iteration")
    assert [m.value for m in told] == [1, 2, 3]
