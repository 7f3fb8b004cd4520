"""Checkpoints of a run: frequency, number to keep, damaged files, a full disk."""

import errno
import json
import os
from pathlib import Path

import pytest

from flowrl.algorithms import Algorithm
from flowrl.algorithms.a2c import A2C
from flowrl.algorithms.ppo import PPO
from flowrl.data.checkpoint import is_checkpoint, read_manifest
from flowrl.policies import Policy
from flowrl.trainer.runs.saved_run import list_checkpoints
from tests.cli.helpers import SEEDED, TWO_ITERATIONS, learning_curve, read_results


def test_checkpoints_are_written_at_the_end_and_by_time(cli, monkeypatch):
    saved, save = [], PPO.save
    monkeypatch.setattr(PPO, "save", lambda self, path, **about: saved.append(save(self, path)))
    assert cli("train", "ppo", "--run-dir", "r", *TWO_ITERATIONS)[0] == 0
    assert len(saved) == 1  # at the end, within the first minute
    flags = ["--checkpoint-every-s", "1e-9"]
    assert cli("train", "ppo", "--run-dir", "s", *TWO_ITERATIONS, *flags)[0] == 0
    assert len(saved) == 1 + 2  # after the first iteration and at the end


def test_newest_and_best_checkpoints_are_kept(cli, tmp_path):
    flags = ["--checkpoint-frequency", "1", "--checkpoint-num-to-keep", "2", "--stop-iters", "6"]
    score = ["--checkpoint-score-attribute", "learners/default_policy/entropy"]
    code, _, err = cli("train", "ppo", *SEEDED, *flags, *score, "--run-dir", "r")
    assert code == 0, err
    names = [path.name for path in list_checkpoints(tmp_path / "r")]
    results = read_results(tmp_path / "r")
    entropies = [result["learners"]["default_policy"]["entropy"] for result in results]
    best = f"{1 + entropies.index(max(entropies)):06d}"
    assert names == sorted({best, "000005", "000006"})
    assert read_manifest(tmp_path / "r/checkpoints" / best)["score"] == max(entropies)
    assert cli("evaluate", "r", "--checkpoint", "best", "--episodes", "1")[0] == 0
    assert cli("evaluate", "r", "--checkpoint", "5", "--episodes", "1")[0] == 0
    code, _, err = cli("evaluate", "r", "--checkpoint", "77", "--episodes", "1")
    assert code == 2
    assert "there is no checkpoint '77'" in err


def test_checkpoint_of_a_killed_process_is_removed_by_a_resume(cli, tmp_path):
    cli("train", "ppo", *SEEDED, "--stop-iters", "2", "--run-dir", "r")
    partial = tmp_path / "r/checkpoints/000001"
    partial.mkdir()
    (partial / "replay.bin").write_bytes(b"0" * 100)
    code, _, err = cli("resume", "r", "--stop-iters", "3")
    assert code == 0, err
    assert not partial.exists()
    assert list_checkpoints(tmp_path / "r")[-1].name == "000003"


def test_resuming_an_older_checkpoint_replaces_later_results(cli, tmp_path):
    flags = ["--checkpoint-frequency", "1", "--stop-iters", "4", "--run-dir", "r"]
    cli("train", "ppo", *SEEDED, *flags)
    before = learning_curve(read_results(tmp_path / "r"))
    code, _, err = cli("resume", "r", "--checkpoint", "3")
    assert code == 0, err
    assert learning_curve(read_results(tmp_path / "r")) == before
    assert len((tmp_path / "r/progress.csv").read_text().splitlines()) == 5


def test_goal_that_is_already_reached_removes_nothing(cli, tmp_path):
    flags = ["--checkpoint-frequency", "1", "--checkpoint-num-to-keep", "5", "--stop-iters", "4"]
    cli("train", "ppo", *SEEDED, *flags, "--run-dir", "r")
    code, out, _ = cli("resume", "r", "--checkpoint", "2", "--stop-iters", "2")
    assert code == 0
    assert "already reached" in out
    assert len(list_checkpoints(tmp_path / "r")) == 4
    assert len(read_results(tmp_path / "r")) == 4


def test_damaged_checkpoint_is_named_and_an_intact_one_suggested(cli, tmp_path):
    flags = ["--checkpoint-frequency", "1", "--stop-iters", "3", "--run-dir", "r"]
    cli("train", "ppo", *SEEDED, *flags)
    (file,) = (tmp_path / "r/checkpoints/000003").glob("arrays-*")
    file.write_bytes(file.read_bytes()[:-1])
    code, _, err = cli("resume", "r", "--stop-iters", "4")
    assert code == 1
    assert file.name in err
    assert "bytes, but" in err
    assert "resume r --checkpoint 000002" in err
    assert len(read_results(tmp_path / "r")) == 3  # nothing was removed
    code, _, err = cli("evaluate", "r", "--episodes", "1")
    assert code == 1
    assert "evaluate r --checkpoint 000002" in err
    for options in ((), ("--json",)):
        code, out, err = cli("checkpoint", "inspect", "r", *options)
        assert (code, out) == (1, "")
        assert file.name in err
    manifest = tmp_path / "r/checkpoints/000003/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    for command in (["resume", "r", "--stop-iters", "4"], ["evaluate", "r", "--episodes", "1"]):
        code, _, err = cli(*command)
        assert code == 2
        assert "manifest.json" in err
        assert "; an older checkpoint is intact: --checkpoint 000002" in err
    assert cli("resume", "r", "--checkpoint", "2", "--stop-iters", "4")[0] == 0
    assert len(read_results(tmp_path / "r")) == 4


def test_inspect_shows_the_contents_of_a_checkpoint(cli):
    cli("train", "ppo", *SEEDED, "--stop-iters", "2", "--run-dir", "r")
    for path in ("r", "r/checkpoints/000002"):
        code, out, _ = cli("checkpoint", "inspect", path)
        assert code == 0
        assert "000002: valid" in out
        assert "2 iterations, 128 env steps" in out
        assert "flowrl.algorithms.ppo:PPOTorchPolicy" in out
    code, out, _ = cli("checkpoint", "inspect", "r", "--json")
    assert json.loads(out)["training_iteration"] == 2
    code, _, err = cli("checkpoint", "inspect", "nowhere")
    assert code == 1
    assert "nowhere" in err


def test_full_disk_keeps_the_old_checkpoints_and_continues_training(cli, tmp_path, monkeypatch):
    fsync = os.fsync

    def full_from_third_checkpoint(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name.startswith("arrays-") and int(path.parent.name) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full_from_third_checkpoint)
    flags = ["--checkpoint-frequency", "1", "--stop-iters", "5", "--run-dir", "r"]
    code, out, err = cli("train", "ppo", *SEEDED, *flags)
    assert code == 1  # the last checkpoint is missing
    assert "checkpoints/000002 is the last checkpoint that could be written" in out
    assert err.count("NO CHECKPOINT") == 1
    assert "No space left" in err
    assert len(read_results(tmp_path / "r")) == 5
    checkpoints = list_checkpoints(tmp_path / "r")
    assert [path.name for path in checkpoints] == ["000001", "000002"]
    assert all(map(is_checkpoint, checkpoints))
    monkeypatch.setattr(os, "fsync", fsync)
    assert cli("resume", "r")[0] == 0
    assert read_results(tmp_path / "r")[-1]["training_iteration"] == 5


@pytest.fixture
def checkpoint_paths(tmp_path, monkeypatch):
    """A run directory, a checkpoint in it, and a checkpoint that `save` wrote elsewhere."""
    with A2C("CartPole-v1", train_batch_size=32, seed=1) as algorithm:
        algorithm.learn(64, run_dir=tmp_path / "run", progress=False)
        algorithm.save(tmp_path / "saved")
    return [str(tmp_path / name) for name in ("run", "run/checkpoints/000002", "saved")]


def test_every_checkpoint_path_is_loaded_in_python(checkpoint_paths):
    for path in checkpoint_paths:
        with Algorithm.from_checkpoint(path) as algorithm:
            assert algorithm.iteration == 2
        with A2C("CartPole-v1", train_batch_size=32) as algorithm:
            algorithm.restore_policies(path)
            algorithm.restore(path)
            assert algorithm.iteration == 2
        assert Policy.from_checkpoint(path).timestep == 64


def test_every_checkpoint_path_is_accepted_by_the_commands(cli, tmp_path, checkpoint_paths):
    for path in checkpoint_paths:
        assert cli("evaluate", path, "--episodes", "1")[0] == 0
        assert cli("checkpoint", "inspect", path)[0] == 0
        code, out, err = cli("resume", path, "--stop-timesteps", "64")
        assert (code, err) == (0, "")
        assert "already reached: 64 env steps" in out
    assert cli("resume", checkpoint_paths[1], "--stop-timesteps", "96")[0] == 0
    assert len(read_results(tmp_path / "run")) == 3
    # a checkpoint outside a run directory starts a new run
    code, out, err = cli("resume", checkpoint_paths[2], "--stop-timesteps", "96")
    assert code == 0, err
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert [r["training_iteration"] for r in read_results(run_dir)] == [3]
    assert cli("resume", str(run_dir), "--stop-timesteps", "128")[0] == 0


def test_path_without_a_checkpoint_is_rejected(cli, tmp_path, checkpoint_paths):
    (tmp_path / "empty").mkdir()
    for command, code in (("evaluate", 2), ("resume", 2), ("checkpoint inspect", 1)):
        for path in ("empty", "nowhere"):
            assert cli(*command.split(), path)[0] == code
    _, _, err = cli("checkpoint", "inspect", "empty")
    assert "a folder RUN/checkpoints/NUMBER or a folder that save(path) wrote" in err
    code, _, err = cli("evaluate", checkpoint_paths[1], "--checkpoint", "2")
    assert code == 2
    assert "is a checkpoint, not a run directory" in err
