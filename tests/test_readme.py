"""Snippets, commands and tables of the README work."""

import importlib
import json
import math
import re
import shlex
from pathlib import Path

import pytest

import flowrl.ops
from flowrl.cli.main import main
from flowrl.iter import LocalIterator, ParallelIterator
from flowrl.offline.parquet import parquet_files, read_parquet
from flowrl.trainer.algorithm import Algorithm
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.plan_files import load_plan
from tests.extras import require_extra

README = (Path(__file__).parents[1] / "README.md").read_text()
SNIPPETS = dict(re.findall(r"<!-- snippet: (\w+) -->\n```python\n(.*?)```", README, re.DOTALL))


def test_plan_file_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_plan.py").write_text(SNIPPETS["plan_file"])
    assert main(["train", "my_plan.py", "--stop-iters", "2", "--run-dir", "r"]) == 0
    assert "reached: 2 iterations" in capsys.readouterr().out


def test_print_operator_shows_batches_lazily(capsys):
    code, last = SNIPPETS["print_operator"].split("algo.train()")
    names = {}
    exec(code, names)
    output = capsys.readouterr().out
    assert "I saw" not in output
    assert "for_each(debug_print)" in output
    exec("algo.train()" + last, names)
    assert capsys.readouterr().out == "I saw <class 'flowrl.data.sample_batch.SampleBatch'>\n"


def test_first_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shorter = SNIPPETS["first_training"].replace("100_000", "4_000").replace("150_000", "8_000")
    exec(shorter, {})
    out = capsys.readouterr().out
    assert "reached: 4,000 env steps" in out
    assert "reached: 8,000 env steps" in out
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_train_from_python(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(SNIPPETS["train_from_python"], {})
    assert "'training_iteration': 1" in capsys.readouterr().out
    assert (tmp_path / "my_checkpoint/manifest.json").is_file()


def test_user_defined_environment(capsys):
    exec(SNIPPETS["own_environment"], {})
    assert 0 < float(capsys.readouterr().out) <= 50


def test_views_have_the_documented_shapes(capsys):
    exec(SNIPPETS["views"], {})
    assert capsys.readouterr().out == "(200,) (200, 4, 4)\n"


def test_policy_from_functions(capsys):
    exec(SNIPPETS["policy_from_functions"], {"__name__": "__main__"})
    assert abs(float(capsys.readouterr().out)) < 10


def test_numpy_policy_learns(capsys):
    exec(SNIPPETS["numpy_policy"], {})
    returns = json.loads(capsys.readouterr().out)
    assert len(returns) == 15
    assert max(returns) > 2 * returns[0]


def test_custom_model_is_loaded_and_exported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # checkpoints store the import path of the model, so its class must be in a module
    (tmp_path / "with_a_model.py").write_text(SNIPPETS["custom_model"])
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("with_a_model")
    assert module.action in (0, 1)
    assert (tmp_path / "policy.pt2").is_file()


def test_multi_agent_plan_trains(capsys):
    exec(SNIPPETS["multi_agent"], {})
    output = capsys.readouterr().out
    assert output.startswith("{'left': ")
    assert float(output.split()[-1]) > 1


def test_two_algorithms_in_one_plan():
    shipped = load_plan("ppo_dqn")
    source = Path(shipped.__file__).read_text()
    names = {}
    exec(SNIPPETS["two_algorithms"], names)
    assert (
        "def execution_plan" + SNIPPETS["two_algorithms"].split("def execution_plan")[1] in source
    )
    config = shipped.config.updated(min_sample_timesteps_per_iteration=1500, seed=0)

    class Both(Algorithm):
        execution_plan = staticmethod(names["execution_plan"])

    with Both(config) as algo:
        assert set(algo.train()["learners"]) == {"ppo", "dqn"}


def test_actor_critic_policy_learns(capsys):
    exec(SNIPPETS["actor_critic_policy"], {})
    alpha, entropy, loss = map(float, capsys.readouterr().out.split())
    assert 0 < alpha < 1.1
    assert loss >= 0
    assert not math.isnan(entropy)


def test_sequence_replay_draws_sequences(capsys):
    exec(SNIPPETS["sequence_replay"], {})
    assert "(8, 64)" in capsys.readouterr().out


def test_training_step_trains(capsys):
    exec(SNIPPETS["training_step"], {})
    assert capsys.readouterr().out == "200\n"


def test_user_defined_algorithm_trains_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reinforce.py").write_text(SNIPPETS["own_algorithm"])
    lines = [line for line in SNIPPETS["own_algorithm"].splitlines() if line.strip()]
    assert len(lines) <= 60
    flags = ["--stop-iters", "2", "--run-dir", "r", "--baseline-coeff", "0.25"]
    assert main(["train", "reinforce.py", *flags]) == 0
    assert main(["resume", "r", "--trust", "--stop-iters", "3"]) == 0
    assert "reached: 3 iterations" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_user_defined_algorithm_learns(tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reinforce.py").write_text(SNIPPETS["own_algorithm"])
    flags = ["--stop-reward", "400", "--stop-timesteps", "250000", "--seed", seed]
    assert main(["train", "reinforce.py", "--run-dir", "r", *flags]) == 0
    last = json.loads((tmp_path / "r/result.json").read_text().splitlines()[-1])
    assert last["episode_reward_mean"] >= 400


def test_settings_can_be_compared_in_python(capsys):
    exec(SNIPPETS["settings_in_python"], {})
    output = capsys.readouterr().out
    assert "'lr': (0.0003, 0.001)" in output
    assert len(output.splitlines()[-1].split()) == 2


@pytest.mark.slow
def test_tune_runs_trials(tmp_path, monkeypatch, capsys, ray_session):
    require_extra("tune")
    for module in ("train.constants", "tune.experiment.experiment", "tune.trainable.trainable"):
        monkeypatch.setattr(f"ray.{module}.DEFAULT_STORAGE_PATH", str(tmp_path))
    exec(SNIPPETS["tune"], {})
    assert capsys.readouterr().out.splitlines()[-1] == "[800, 800]"


def test_checkpoint_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(SNIPPETS["checkpoint"], {})
    assert capsys.readouterr().out == "800\n"


def test_experience_is_recorded(tmp_path, monkeypatch, capsys):
    require_extra("offline")
    monkeypatch.chdir(tmp_path)
    exec(SNIPPETS["record_experience"], {})
    assert capsys.readouterr().out == "default_policy 400 1.0\n"


def test_trained_policy_records_experience(tmp_path, monkeypatch, capsys):
    require_extra("offline")
    monkeypatch.chdir(tmp_path)
    exec(SNIPPETS["train_from_python"], {})
    capsys.readouterr()
    exec(SNIPPETS["record_policy"], {})
    recorded = [read_parquet(path)[1].count for path in parquet_files(tmp_path / "expert")]
    assert int(capsys.readouterr().out) == sum(recorded) > 0


def test_learn_from_recorded_experience(tmp_path, monkeypatch, capsys):
    require_extra("offline")
    monkeypatch.chdir(tmp_path)
    exec(SNIPPETS["record_experience"], {})
    exec(SNIPPETS["learn_offline"], {})
    assert -0.8 < float(capsys.readouterr().out.split()[-1]) < 0
    flags = ["--input_", "experience", "--evaluation-interval", "1", "--stop-iters", "1"]
    assert main(["train", "bc", *flags, "--evaluation-duration", "2", "--run-dir", "r"]) == 0


def test_user_data_can_be_written_and_read(tmp_path, monkeypatch, capsys):
    require_extra("offline")
    monkeypatch.chdir(tmp_path)
    exec(SNIPPETS["write_own_data"], {})
    assert capsys.readouterr().out in ("0\n", "1\n")


def test_evaluate_policy_on_recorded_experience(tmp_path, monkeypatch, capsys):
    require_extra("offline")
    monkeypatch.chdir(tmp_path)
    exec(SNIPPETS["record_experience"], {})
    capsys.readouterr()
    exec(SNIPPETS["evaluate_offline"], {})
    behavior, target, ess = map(float, capsys.readouterr().out.split())
    assert behavior > 5
    assert target > 0
    assert 1 <= ess <= 400


@pytest.mark.slow
def test_half_cheetah_command_trains(tmp_path, monkeypatch):
    """Run the command with fewer steps before learning starts."""
    require_extra("mujoco")
    monkeypatch.chdir(tmp_path)
    line = re.search(r"`flowrl (train sac --env HalfCheetah-v5 .*?)`", README)[1]
    flags = [*shlex.split(line), "--learning-starts", "200", "--stop-timesteps", "400"]
    flags += ["--min-sample-timesteps-per-iteration", "200", "--run-dir", "r"]
    assert main(flags) == 0
    last = json.loads((tmp_path / "r/result.json").read_text().splitlines()[-1])
    assert last["num_env_steps_trained"] > 0


def test_user_defined_operator_trains_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scaled.py").write_text(SNIPPETS["own_operator"])
    assert main(["train", "scaled.py", "--stop-iters", "2", "--run-dir", "r"]) == 0
    assert main(["resume", "r", "--trust", "--stop-iters", "3"]) == 0
    last = json.loads((tmp_path / "r/result.json").read_text().splitlines()[-1])
    assert last["counters"]["num_batches_scaled"] == 3
    assert main(["explain", "scaled.py"]) == 0
    assert "ScaleAdvantages()" in capsys.readouterr().out


def test_list_of_plans_equals_command_output(capsys):
    main(["plans"])
    assert f"```\n{capsys.readouterr().out}```" in README


def test_asynchronous_plan_equals_shipped_plan():
    assert SNIPPETS["asynchronous_plan"] in Path(load_plan("impala").__file__).read_text()


def test_parallel_iterators_print_the_documented_items(capsys, ray_session):
    exec(SNIPPETS["parallel_iterators"], {})
    output = capsys.readouterr().out
    assert "[0, 16, 1, 25]\n[-10, -5, -4, 2, 3, 5, 10]\n" in output
    assert "gather_async" in output
    assert "busy" in output
    exec(SNIPPETS["shuffled_iterator"], {})
    assert capsys.readouterr().out == "[0, 2, 4]\n"


def test_commands_in_the_table_run(tmp_path, monkeypatch, capsys, ray_session):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_plan.py").write_text(SNIPPETS["plan_file"])
    commands = re.findall(r"^\| `(flowrl [^`]*)`", README, re.MULTILINE)
    assert len(commands) == 13
    (tmp_path / "runs.yaml").write_text(
        "{plan: a2c, env: CartPole-v1, stop: {training_iteration: 1}, config: {seed: 1}}"
    )
    runs = [c for c in commands if c.startswith("flowrl train") and "yaml" not in c]
    for number, command in enumerate(runs):
        stop = ["--stop-iters", "2", "--run-dir", f"run{number}"]
        assert main([*shlex.split(command)[1:], *stop]) == 0, command
    for command in commands:
        if command not in runs and "tensorboard" not in command:  # a server
            words = shlex.split(command.replace("RUN_DIR", "run0").replace(" 100", " 2"))[1:]
            extra = ["--stop-iters", "3"] if "resume" in words else []
            assert main([*words, *extra]) == 0, command


def test_make_bench_runs_every_quoted_script():
    quoted = set(re.findall(r"`benchmarks/(\w+)\.py`", README))
    root = Path(__file__).parents[1]
    makefile = (root / "Makefile").read_text().replace("\\\n", " ")
    assert set(re.search(r"BENCHMARKS := (.*)", makefile)[1].split()) == quoted
    assert quoted == {path.stem for path in root.glob("benchmarks/*.py")} - {"peer_env"}


def test_operator_table_is_complete():
    table = README.split("## Operators")[1].split("Streams have")[0]
    named = set(re.findall(r"`([A-Z]\w+)\(", table))
    public = {name for name in flowrl.ops.__all__ if isinstance(getattr(flowrl.ops, name), type)}
    assert named == public


def test_readme_names_every_group_of_settings():
    assert set(re.findall(r"^\| `\.(\w+)\(\)` \|", README, re.MULTILINE)) == set(
        AlgorithmConfig.groups()
    )


def test_every_python_block_has_a_name_and_a_test():
    assert len(SNIPPETS) == README.count("```python\n")
    tests = Path(__file__).read_text()
    assert [name for name in SNIPPETS if f'SNIPPETS["{name}"]' not in tests] == []


def test_listed_stream_methods_exist():
    words = README.split("Streams have")[1].split("An exception")[0]
    for name in re.findall(r"`(\w+)", words):
        assert hasattr(LocalIterator, name) or hasattr(ParallelIterator, name), name
