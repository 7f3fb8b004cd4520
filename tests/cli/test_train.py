"""`flowrl train` in all its ways, `resume`, `checkpoint inspect`; stop rules; what runs keep."""

import errno
import json
import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flowrl.algorithms import Algorithm
from flowrl.algorithms.ppo import PPOConfig
from flowrl.cli.run_directory import _plain, checkpoints_of, read_config
from flowrl.cli.training_run import Stop
from flowrl.data import checkpoint
from flowrl.data.checkpoint import CheckpointError, read_manifest
from flowrl.data.checkpoint_storage import LocalStorage
from flowrl.policies import ConfigError
from flowrl.trainer.plan_files import plans_folder
from flowrl.trainer.registry import algorithm_class, register_algorithm
from tests.cli.test_main import run

REPOSITORY = Path(__file__).parents[2]
SETTINGS = {"train_batch_size": 64, "sgd_minibatch_size": 32, "num_sgd_iter": 2, "seed": 4}
SHORT = ["--train-batch-size", "64", "--sgd-minibatch-size", "32", "--seed", "4"]


@pytest.fixture(autouse=True)
def in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def results(path):
    return [json.loads(line) for line in (path / "result.json").read_text().splitlines()]


def returns(rows):
    return [(row["timesteps_total"], row["episode_reward_mean"]) for row in rows]


def test_three_ways_are_one(capsys, tmp_path):
    """Python, the command line with --run, and YAML; Tune is in test_tune.py."""
    config = PPOConfig().environment(env="CartPole-v1").debugging(seed=4)
    config.training(**{name: value for name, value in SETTINGS.items() if name != "seed"})
    with config.build() as algorithm:
        expected = returns([algorithm.train() for _ in range(3)])
    code, _, err = run(
        capsys, "train", "--run=PPO", "--env=CartPole-v1", f"--config={json.dumps(SETTINGS)}",
        "--stop", '{"training_iteration": 3}', "--run-dir", "r",
    )  # fmt: skip
    assert code == 0, err
    assert returns(results(tmp_path / "r")) == expected
    assert [r["timesteps_total"] for r in results(tmp_path / "r")] == [64, 128, 192]
    (tmp_path / "run.yaml").write_text(
        textwrap.dedent(
            """
            first:
              run: PPO
              env: CartPole-v1
              stop: {training_iteration: 3}
              config: {train_batch_size: 64, sgd_minibatch_size: 32, num_sgd_iter: 2, seed: 4}
            second:
              plan: a2c
              stop: {timesteps_total: 64}
              config: {seed: 1}
            """
        )
    )
    code, _, err = run(capsys, "train", "run.yaml", "--run-dir", "y")
    assert code == 0, err
    assert returns(results(tmp_path / "y/first")) == expected
    assert results(tmp_path / "y/second")[-1]["timesteps_total"] == 64
    code, _out, err = run(capsys, "resume", "y/first", "--stop-iters", "4")
    assert code == 0, err
    assert len(results(tmp_path / "y/first")) == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "it has no runs"),
        ("a: 3", "a mapping with run or plan is needed"),
        ("run: PPPO", "unknown algorithm 'PPPO'. Did you mean 'PPO'?"),
        ("{run: PPO, plan: ppo}", "either run (an algorithm) or plan"),
        ("{run: PPO, envv: x}", "unknown 'envv'. Did you mean 'env'?"),
        ("{run: PPO, env: CartPole-v1, config: {lrr: 1}}", "unknown setting 'lrr'"),
        ("{run: PPO, env: CartPole-v1, stop: {nothing: 1}}", "no result has a metric 'nothing'"),
        ("{run: PPO, env: CartPole-v1, stop: {timesteps_total: x}}", "a number is needed, got 'x'"),
        ("{run: PPO, env: CartPol-v1}", "unknown environment"),
        ("{run: PPO", "cannot be read"),
    ],
)
def test_wrong_yaml(capsys, tmp_path, text, said):
    (tmp_path / "x.yaml").write_text(text)
    code, _, err = run(capsys, "train", "x.yaml")
    assert code == 2
    assert said in err
    assert os.listdir(tmp_path) == ["x.yaml"]


ALGORITHM = """
from flowrl.algorithms import Algorithm
from flowrl.algorithms.a2c import A2CConfig, A2CTorchPolicy
from flowrl.ops import synchronous_parallel_sample, train_one_step

class MinePolicy(A2CTorchPolicy):
    pass

class Mine(Algorithm):
    policy_class, config_class = MinePolicy, A2CConfig

    def training_step(self):
        batch = synchronous_parallel_sample(worker_set=self.workers, max_env_steps=32)
        told = train_one_step(self, batch)
        self.workers.sync_weights()
        return told

config = A2CConfig(env="CartPole-v1", plan=None, train_batch_size=32)
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_algorithm_of_ones_own(capsys, tmp_path, workers, ray_session):
    (tmp_path / "mine.py").write_text(ALGORITHM)
    flags = ["--num-workers", workers, "--seed", "1", "--run-dir", "r"]
    code, out, err = run(capsys, "train", "mine.py", *flags, "--stop-iters", "2")
    assert code == 0, err
    assert [r["timesteps_total"] for r in results(tmp_path / "r")] == [32, 64]
    assert run(capsys, "resume", "r", "--stop-iters", "3")[0] == 0
    assert run(capsys, "evaluate", "r", "--episodes", "1")[0] == 0
    code, out, _ = run(capsys, "explain", "mine.py")
    assert "Mine.training_step" in out
    (tmp_path / "mine.py").write_text(ALGORITHM + "\n# another text\n")
    code, _, err = run(capsys, "resume", "r", "--stop-iters", "4")
    assert code == 1
    assert "another plan" in err
    assert run(capsys, "resume", "r", "--plan", "mine.py", "--stop-iters", "4")[0] == 0
    assert len(results(tmp_path / "r")) == 4
    assert "another text" in (tmp_path / "r/plan.py").read_text()


def test_registered_algorithms():
    from flowrl.algorithms.a2c import A2C

    class Other(A2C):
        pass

    register_algorithm("Other", Other)
    register_algorithm("Other", Other)
    assert algorithm_class("other") is Other
    with pytest.raises(ConfigError, match="'Other' is taken"):
        register_algorithm("Other", A2C)
    with pytest.raises(ConfigError, match="Did you mean 'SimpleQ'"):
        algorithm_class("SimpelQ")


def test_any_metric_ends_a_run(capsys, tmp_path):
    for number, (rule, said) in enumerate(
        [
            ("num_env_steps_sampled_lifetime=128", "num_env_steps_sampled_lifetime 128 >= 128"),
            ("learners/default_policy/entropy<=10", "entropy 0.6"),
            ("counters/num_env_steps_trained>=64", "counters/num_env_steps_trained 64 >= 64"),
        ]
    ):
        code, out, err = run(
            capsys, "train", "ppo", *SHORT, "--stop", rule, "--run-dir", f"r{number}"
        )
        assert code == 0, err
        assert said in out
    code, out, _ = run(capsys, "resume", "r0")
    assert "reached already: num_env_steps_sampled_lifetime 128" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--stop", "episode_reward_meen=3"], "Did you mean 'episode_reward_mean'?"),
        (["--stop", "learners/ppo/kl=3"], "there is no policy 'ppo'"),
        (["--stop", "evaluation/episode_reward_mean=3"], "without evaluations"),
        (["--stop", "what"], "METRIC=VALUE"),
        (["--stop", "timesteps_total=nan"], "must be a number"),
        (["--checkpoint-score-attribute", "retur"], "no result has a metric 'retur'"),
        (["--checkpoint-num-to-keep", "0"], "checkpoint_num_to_keep"),
        (["--evaluation-parallel-to-training"], "needs workers to evaluate"),
        (["--evaluation-config", "[3]"], "--evaluation-config: a JSON object is needed, got [3]"),
        (["--evaluation-config", '{"explor": true}'], "Did you mean 'explore'?"),
    ],
)
def test_metrics_that_will_not_exist_are_refused_at_the_start(capsys, tmp_path, flags, said):
    code, _, err = run(capsys, "train", "ppo", *SHORT, "--run-dir", "r", *flags)
    assert code == 2
    assert said in err.replace("\n", " ")
    assert not (tmp_path / "r").exists()


def test_a_metric_that_only_shows_not_to_exist_ends_the_run_with_what_there_is(capsys, tmp_path):
    rule = "learners/default_policy/entropyy=3"
    code, _, err = run(capsys, "train", "ppo", *SHORT, "--run-dir", "r", "--stop", rule)
    assert code == 1
    assert "Did you mean 'learners/default_policy/entropy'?" in err
    assert checkpoints_of(tmp_path / "r")


def test_a_run_keeps_its_newest_and_its_best_checkpoints(capsys, tmp_path):
    flags = ["--checkpoint-frequency", "1", "--checkpoint-num-to-keep", "2", "--stop-iters", "6"]
    score = ["--checkpoint-score-attribute", "learners/default_policy/entropy"]
    code, _, err = run(capsys, "train", "ppo", *SHORT, *flags, *score, "--run-dir", "r")
    assert code == 0, err
    there = [path.name for path in checkpoints_of(tmp_path / "r")]
    rows = results(tmp_path / "r")
    entropies = [row["learners"]["default_policy"]["entropy"] for row in rows]
    best = f"{1 + entropies.index(max(entropies)):06d}"
    assert there == sorted({best, "000005", "000006"})
    assert read_manifest(tmp_path / "r/checkpoints" / best)["score"] == max(entropies)
    assert run(capsys, "evaluate", "r", "--checkpoint", "best", "--episodes", "1")[0] == 0
    assert run(capsys, "evaluate", "r", "--checkpoint", "5", "--episodes", "1")[0] == 0
    code, _, err = run(capsys, "evaluate", "r", "--checkpoint", "77", "--episodes", "1")
    assert code == 2
    assert "there is no checkpoint '77'" in err


def test_going_on_from_an_older_checkpoint_takes_back_what_came_after(capsys, tmp_path):
    flags = ["--checkpoint-frequency", "1", "--stop-iters", "4", "--run-dir", "r"]
    run(capsys, "train", "ppo", *SHORT, *flags)
    before = returns(results(tmp_path / "r"))
    code, _, err = run(capsys, "resume", "r", "--checkpoint", "3")
    assert code == 0, err
    assert returns(results(tmp_path / "r")) == before
    assert len((tmp_path / "r/progress.csv").read_text().splitlines()) == 5


def test_a_damaged_checkpoint_is_named_and_the_last_good_one_offered(capsys, tmp_path):
    flags = ["--checkpoint-frequency", "1", "--stop-iters", "3", "--run-dir", "r"]
    run(capsys, "train", "ppo", *SHORT, *flags)
    (file,) = (tmp_path / "r/checkpoints/000003").glob("arrays-*")
    file.write_bytes(file.read_bytes()[:-1])
    code, _, err = run(capsys, "resume", "r", "--stop-iters", "4")
    assert code == 1
    assert file.name in err
    assert "resume r --checkpoint 000002" in err
    assert len(results(tmp_path / "r")) == 3  # nothing was taken back
    code, _, err = run(capsys, "checkpoint", "inspect", "r")
    assert code == 1
    assert file.name in err
    assert run(capsys, "resume", "r", "--checkpoint", "2", "--stop-iters", "4")[0] == 0
    assert len(results(tmp_path / "r")) == 4


def test_inspect(capsys, tmp_path):
    run(capsys, "train", "ppo", *SHORT, "--stop-iters", "2", "--run-dir", "r")
    for path in ("r", "r/checkpoints/000002"):
        code, out, _ = run(capsys, "checkpoint", "inspect", path)
        assert code == 0
        assert "whole" in out
        assert "2 iterations, 128 env steps" in out
        assert "flowrl.algorithms.ppo:PPOTorchPolicy" in out
    code, out, _ = run(capsys, "checkpoint", "inspect", "r", "--json")
    assert json.loads(out)["training_iteration"] == 2
    code, _, err = run(capsys, "checkpoint", "inspect", "nowhere")
    assert code == 1
    assert "nowhere" in err


def test_a_full_disk_leaves_the_old_checkpoint_and_training_going(capsys, tmp_path, monkeypatch):
    real, calls = LocalStorage.write, []

    def write(self, name, chunks):
        calls.append(name)
        if len(calls) > 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, name, chunks)

    monkeypatch.setattr(LocalStorage, "write", write)
    flags = ["--checkpoint-frequency", "1", "--stop-iters", "5", "--run-dir", "r"]
    code, _out, err = run(capsys, "train", "ppo", *SHORT, *flags)
    assert code == 1  # what was asked for was not all done: the last checkpoint is not there
    assert err.count("NO CHECKPOINT") == 1
    assert "No space left" in err
    assert len(results(tmp_path / "r")) == 5
    there = checkpoints_of(tmp_path / "r")
    assert [path.name for path in there] == ["000001", "000002"]
    assert all(map(checkpoint.is_checkpoint, there))
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "resume", "r")[0] == 0
    assert results(tmp_path / "r")[-1]["training_iteration"] == 5


def test_from_a_rules_text():
    assert Stop().is_set() is False
    assert Stop(metrics=[("a", ">=", 1.0)]).is_set()


def test_a_run_by_name_without_a_seed_goes_on_and_can_be_repeated(capsys, tmp_path):
    settings = {name: value for name, value in SETTINGS.items() if name != "seed"}
    flags = ["--run=PPO", "--env=CartPole-v1", f"--config={json.dumps(settings)}", "--lr", "1e-3"]
    code, out, err = run(capsys, "train", *flags, "--stop-iters", "2", "--run-dir", "r")
    assert code == 0, err
    config = json.loads((tmp_path / "r/config.json").read_text())
    assert config["lr"] == 1e-3
    (repeat,) = [line for line in out.splitlines() if line.startswith("repeat:")]
    again = shlex.split(repeat)[2:]
    again[again.index("r")] = "again"
    assert run(capsys, *again)[0] == 0
    assert returns(results(tmp_path / "r")) == returns(results(tmp_path / "again"))
    assert run(capsys, "resume", "r", "--stop-iters", "3")[0] == 0
    assert run(capsys, "evaluate", "r", "--episodes", "1")[0] == 0
    (tmp_path / "other.py").write_text(
        ALGORITHM.replace("A2CConfig", "PPOConfig")
        .replace("batch_size=32", "batch_size=256")
        .replace("algorithms.a2c", "algorithms.ppo")
        .replace("A2CTorchPolicy", "PPOTorchPolicy")
    )
    code, _, err = run(capsys, "resume", "r", "--plan", "other.py", "--stop-iters", "4")
    assert code in (1, 2)  # it is taken, and found to be another one
    assert "of a run by name" not in err and "Traceback" not in err


def test_a_yaml_run_can_be_repeated_by_its_name(capsys, tmp_path):
    (tmp_path / "x.yaml").write_text(
        "a: {plan: a2c, stop: {training_iteration: 1}}\nb: {plan: a2c, stop: {timesteps_total: 64}}"
    )
    code, out, err = run(capsys, "train", "x.yaml", "--run-dir", "r")
    assert code == 0, err
    repeats = [line for line in out.splitlines() if line.startswith("repeat:")]
    assert ["--only a" in repeats[0], "--only b" in repeats[1]] == [True, True]
    assert all("--seed" in line for line in repeats)
    code, _, err = run(capsys, "train", "x.yaml", "--only", "b", "--seed", "1", "--run-dir", "s")
    assert code == 0, err
    assert (tmp_path / "s/b/result.json").exists()
    code, _, err = run(capsys, "train", "x.yaml", "--only", "c")
    assert code == 2
    assert "there is no run 'c'" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{run: PPO, stop: 5}", "stop: a mapping is needed"),
        ("{run: PPO, config: [1]}", "config: a mapping is needed"),
        ("{plan: 5}", "plan: a name or a file is needed"),
        ("{run: PPO, stop: {1: 2}}", "the name of a metric is needed"),
        ("{run: PPO, stop: {training_iteration: }}", "a number is needed, got None"),
        ("{run: PPO, config: {1: 2}}", "the name of a setting is a string"),
        ("{run: PPO, env: A, config: {env: B}}", "env: it is given twice"),
        ("../esc: {run: PPO}", "the name of a run is a plain word"),
        ("2: {run: PPO}", "the name of a run is a plain word"),
        ("runn: PPO", "Did you mean 'run'"),
    ],
)
def test_more_wrong_yaml(capsys, tmp_path, text, said):
    (tmp_path / "x.yaml").write_text(text)
    code, _, err = run(capsys, "train", "x.yaml", "--run-dir", "r")
    assert code == 2
    assert said in err
    assert os.listdir(tmp_path) == ["x.yaml"]


def test_a_goal_that_is_reached_takes_nothing_back(capsys, tmp_path):
    flags = ["--checkpoint-frequency", "1", "--checkpoint-num-to-keep", "5", "--stop-iters", "4"]
    run(capsys, "train", "ppo", *SHORT, *flags, "--run-dir", "r")
    code, out, _ = run(capsys, "resume", "r", "--checkpoint", "2", "--stop-iters", "2")
    assert code == 0
    assert "reached already" in out
    assert len(checkpoints_of(tmp_path / "r")) == 4
    assert len(results(tmp_path / "r")) == 4


def test_an_evaluation_that_fails_loses_no_result(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        ALGORITHM + "import gymnasium as gym\n"
        "class Breaks(gym.Wrapper):\n"
        "    def step(self, action):\n"
        "        raise ArithmeticError('on purpose')\n"
        "config = config.updated(evaluation_interval=2, max_num_env_restarts=0,\n"
        "    checkpoint_score_attribute='training_iteration', evaluation_config={\n"
        "    'env': lambda context: Breaks(gym.make('CartPole-v1')), 'max_num_env_restarts': 0})\n"
    )
    code, _, err = run(capsys, "train", "mine.py", "--stop-iters", "4", "--run-dir", "r")
    assert code == 1
    assert "on purpose" in err
    assert [r["training_iteration"] for r in results(tmp_path / "r")] == [1, 2]
    (path,) = checkpoints_of(tmp_path / "r")
    assert read_manifest(path)["score"] == 2


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"env_config": {"nope": 1}}, "evaluation_config: its environment cannot be made"),
        ({"env": "MountainCar-v0"}, "evaluation_config: its environment has the observation_space"),
        ({"model": {"fcnet_hiddens": [8]}}, "it takes no 'model'"),
        ({"num_workers": 2}, "it takes no 'num_workers'"),
    ],
)
def test_evaluations_that_cannot_be_are_refused_before_a_run(capsys, tmp_path, told, said):
    settings = json.dumps({"evaluation_interval": 3, "evaluation_config": told})
    code, _, err = run(capsys, "train", "ppo", *SHORT, "--config", settings, "--run-dir", "r")
    assert code == 2
    assert said in err
    assert not (tmp_path / "r").exists()


def test_two_rules_for_one_metric_both_hold(capsys, tmp_path):
    rules = ["--stop", "training_iteration=2", "--stop", "training_iteration<=0"]
    code, out, _ = run(capsys, "train", "ppo", *SHORT, *rules, "--run-dir", "r")
    assert code == 0
    assert "training_iteration 2 >= 2" in out


def test_a_metric_that_has_not_come_is_said_to_be_awaited(capsys, tmp_path):
    rules = ["--stop", "counters/nothing=2", "--stop-iters", "25"]
    code, _, err = run(capsys, "train", "ppo", *SHORT, *rules, "--run-dir", "r")
    assert code == 0
    assert err.count("no result has had 'counters/nothing' so far") == 1
    score = ["--checkpoint-score-attribute", "learners/default_policy/nope"]
    code, _, err = run(capsys, "train", "ppo", *SHORT, *score, "--run-dir", "s")
    assert code == 1
    assert "there is no metric 'learners/default_policy/nope'" in err


@pytest.mark.parametrize(
    ("file", "text"),
    [("stop.json", '{"a": 1}'), ("stop.json", '{"metrics": {"a": 5}}'), ("stop.json", "[1]")],
)
def test_damaged_stop_rules(capsys, tmp_path, file, text):
    run(capsys, "train", "ppo", *SHORT, "--stop-iters", "1", "--run-dir", "r")
    (tmp_path / "r" / file).write_text(text)
    code, _, err = run(capsys, "resume", "r")
    assert code == 2
    assert "stop" in err
    assert len(results(tmp_path / "r")) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--config={bad"], "not JSON"),
        (["--stop", "training_iteration=abc"], "must be a number, got abc"),
        (["--stop", "training_iteration==2"], "METRIC=VALUE"),
        (["--stop", '{"training_iteration": true}'], "a number is needed, got True"),
        (["--stop-timestep", "5"], "Did you mean --stop-timesteps"),
        (['--config={"plan": "dqn"}'], "it is for another algorithm"),
    ],
)
def test_wrong_flags_of_a_run_by_name(capsys, tmp_path, flags, said):
    code, _, err = run(capsys, "train", "--run=PPO", "--env=CartPole-v1", *flags, "--run-dir", "r")
    assert code == 2
    assert said in err
    assert not (tmp_path / "r").exists()


def test_the_checkpoint_of_an_algorithm_in_a_file_opens_in_python(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine_again.py").write_text(ALGORITHM.replace("Mine", "Again"))
    assert run(capsys, "train", "mine_again.py", "--stop-iters", "1", "--run-dir", "r")[0] == 0
    code = textwrap.dedent(
        """
        from flowrl.algorithms import Algorithm
        with Algorithm.from_checkpoint("r", trust=True) as algorithm:
            print(type(algorithm).__name__, algorithm.iteration)
        """
    )
    own = "from mine_again import Again\n" + code.replace("Algorithm.from", "Again.from").replace(
        ", trust=True", ""
    )
    for text in (code, own):
        told = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"},
        )  # fmt: skip
        assert told.stdout == "Again 1\n", told.stderr
    with pytest.raises(CheckpointError, match="trust=True"):
        Algorithm.from_checkpoint("r")
    with pytest.raises(CheckpointError, match="no such folder"):
        Algorithm.from_checkpoint("none")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        Algorithm.from_checkpoint(tmp_path)


def test_a_class_that_is_imported_needs_no_trust(capsys, tmp_path):
    (tmp_path / "own_class.py").write_text(ALGORITHM)
    code = textwrap.dedent(
        """
        from own_class import Mine, config
        with Mine(config) as algorithm:
            algorithm.train()
            algorithm.save("c")
        with Mine.from_checkpoint("c") as algorithm:
            print(algorithm.iteration)
        """
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"},
    )  # fmt: skip
    assert told.stdout == "1\n", told.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["train", "ppo", "--run=PPO"], "give a plan (ppo) or --run, not both"),
        (["train", "ppo_dqn", "--policies.dqnn.config.lr", "1"], "Did you mean 'dqn'?"),
        (["train", "ppo", "--policies.x.config.lr", "1"], "no such policy"),
        (
            ["train", "three_way", "--policies.sac.config.lrr", "5e-4"],
            "unknown flag --policies.sac.config.lrr. Did you mean '--policies.sac.config.lr'?",
        ),
        (
            ["train", "ppo_dqn", "--policies.dqn.lr", "1"],
            "Did you mean '--policies.dqn.config.lr'?",
        ),
        (["train", "sac", "--q-model.fcnet-hiddens", "8"], "--q-model takes a JSON object"),
        (["train", "sac", "--q-model", '{"fcnet_hidden": [8]}'], "Did you mean 'fcnet_hiddens'?"),
        (["train", "bc"], "experience: the setting `output` of a run that samples makes such"),
        (["train", "bc", "--input_", "nowhere"], "nowhere: the setting `output` of a run that"),
        (["train", "dqn", "--env", "Pendulum-v1"], "DQN is for Discrete actions"),
        (["train", "rainbow", "--num-replay-shards", "3"], "whose buffer is on actors"),
        (["train", "ppo", "--output", "s3://a/b"], "output: a folder of this machine"),
        (["train", "ppo", "--output", "/dev/null/x"], "output: /dev/null/x cannot be written"),
    ],
)
def test_what_is_wrong_is_said_before_the_run(capsys, tmp_path, command, said):
    code, _, err = run(capsys, *command)
    assert code == 2
    assert said in err
    assert not list(tmp_path.iterdir())


def test_a_plan_of_other_arguments(capsys, tmp_path):
    (tmp_path / "odd.py").write_text(
        "from flowrl.algorithms.a2c import A2CConfig\n"
        'config = A2CConfig(env="CartPole-v1")\n'
        "def execution_plan(workers):\n    return None\n"
    )
    code, _, err = run(capsys, "train", "odd.py")
    assert code == 2
    assert "execution_plan(workers, config) is needed: too many positional arguments" in err


def test_a_resumed_plan_that_changed_says_how_to_go_on(capsys, tmp_path):
    text = (plans_folder() / "a2c.py").read_text()
    (tmp_path / "plan.py").write_text(text)
    assert run(capsys, "train", "plan.py", "--stop-iters", "1", "--run-dir", "r")[0] == 0
    (tmp_path / "plan.py").write_text(text + "\n# changed\n")
    code, _, err = run(capsys, "resume", "r", "--stop-iters", "2")
    assert code == 1
    assert "--plan" in err
    assert run(capsys, "resume", "r", "--stop-iters", "2", "--plan", "plan.py")[0] == 0


def test_an_env_config_that_looks_like_code_is_kept(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(_plain({"env_config": {"code": 3}})))
    assert read_config(tmp_path) == {"env_config": {"code": 3}}
