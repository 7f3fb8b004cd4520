"""Features whose package is missing name the extra that installs it."""

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
from gymnasium import spaces

from flowrl import errors
from flowrl.algorithms.marwil import BCConfig
from flowrl.algorithms.ppo import PPOConfig, PPOTorchPolicy
from flowrl.errors import ConfigError, install_hint
from flowrl.offline.minari import MinariDataset
from flowrl.offline.parquet import read_parquet
from flowrl.ops import WriteParquet
from flowrl.sampling import RolloutWorker


def export_to_onnx(folder):
    space = spaces.Box(-1, 1, (2,))
    PPOTorchPolicy(space, spaces.Discrete(2), {}).export(folder / "policy.onnx")


def make_envpool(folder):
    RolloutWorker("CartPole-v1", PPOTorchPolicy, {"vectorization_mode": "envpool"})


def check(**settings):
    PPOConfig(env="CartPole-v1", **settings).check()


def learn_from(path):
    return BCConfig(env="CartPole-v1", input_=str(path)).validate()


@pytest.mark.parametrize(
    ("use", "feature", "extra"),
    [
        (export_to_onnx, "export: the format onnx", "onnx"),
        (make_envpool, 'vectorization_mode="envpool"', "envpool"),
        (lambda folder: check(log_to=["mlflow"]), "log_to: mlflow", "mlflow"),
        (lambda folder: check(evaluation_video_dir=str(folder)), "evaluation_video_dir", "video"),
        (learn_from, "input_=", "offline"),
        (lambda folder: learn_from("minari:a-v0"), "input_='minari:a-v0'", "minari"),
        (lambda folder: MinariDataset("a-v0"), "minari:a-v0", "minari"),
        (WriteParquet, "recorded experience", "offline"),
        (lambda folder: read_parquet(folder / "a.parquet"), "recorded experience", "offline"),
    ],
)
def test_missing_package_is_reported_with_its_extra(use, feature, extra, tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "find_spec", lambda module: None)
    hint = re.escape(f"needs the extra {extra}: {errors.install_command(extra)}")
    with pytest.raises(ConfigError, match=f"{re.escape(feature)}.* {hint}"):
        use(tmp_path)


def test_missing_tune_is_reported_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.tune.tune", None)
    monkeypatch.delitem(sys.modules, "flowrl.tune", raising=False)
    with pytest.raises(ImportError, match=re.escape(install_hint("flowrl.tune", "tune"))):
        importlib.import_module("flowrl.tune")


def test_extras_are_installed_from_the_clone_with_the_tested_versions(tmp_path, monkeypatch):
    clone = Path(errors.__file__).resolve().parents[1]
    monkeypatch.chdir(clone)
    assert errors.install_command("web") == "pip install -c constraints.txt -e '.[web]'"
    monkeypatch.chdir(tmp_path)
    words = shlex.split(errors.install_command("web"))
    assert words == ["pip", "install", "-c", f"{clone}/constraints.txt", "-e", f"{clone}[web]"]
    monkeypatch.setattr(
        errors, "__file__", str(tmp_path / "site-packages" / "flowrl" / "errors.py")
    )
    assert errors.install_command("web") == 'pip install "flowrl-dataflow[web]"'
