"""What the README shows, runs."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

import flowrl.ops
from flowrl.cli.main import main
from flowrl.iter import LocalIterator, ParallelIterator
from flowrl.offline.parquet import parquet_files, read_parquet
from flowrl.trainer.algorithm import Algorithm
from flowrl.trainer.config import _GROUPS, AlgorithmConfig, _training_fields
from flowrl.trainer.plan_files import load_plan

README = (Path(__file__).parents[1] / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_plan_is_a_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_plan.py").write_text(PYTHON[0])
    assert main(["train", "my_plan.py", "--stop-iters", "2", "--run-dir", "r"]) == 0
    assert "reached: 2 iterations" in capsys.readouterr().out


def test_print_operators_and_laziness(capsys):
    code, last = PYTHON[1].split("algo.train()")
    names = {}
    exec(code, names)
    said = capsys.readouterr().out
    assert "I saw" not in said
    assert "for_each(debug_print)" in said
    exec("algo.train()" + last, names)
    assert capsys.readouterr().out == "I saw <class 'flowrl.data.sample_batch.SampleBatch'>\n"


def test_from_python(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(PYTHON[2], {})
    assert "'training_iteration': 1" in capsys.readouterr().out
    assert (tmp_path / "my_checkpoint/manifest.json").is_file()


def test_an_environment_of_ones_own(capsys):
    exec(PYTHON[3], {})
    assert 0 < float(capsys.readouterr().out) <= 50


def test_views(capsys):
    exec(PYTHON[4], {})
    assert capsys.readouterr().out == "(200,) (200, 4, 4)\n"


def test_a_policy_from_functions(capsys):
    exec(PYTHON[5], {"__name__": "__main__"})
    assert abs(float(capsys.readouterr().out)) < 10


def test_a_policy_of_numpy_learns(capsys):
    exec(PYTHON[6], {})
    returns = json.loads(capsys.readouterr().out)
    assert len(returns) == 15
    assert max(returns) > 2 * returns[0]


def test_a_model_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # the checkpoint names the model by its module, so it has to be in one
    (tmp_path / "with_a_model.py").write_text(PYTHON[7])
    monkeypatch.syspath_prepend(tmp_path)
    made = importlib.import_module("with_a_model")
    assert made.action in (0, 1)
    assert (tmp_path / "policy.pt2").is_file()


def test_several_agents(capsys):
    exec(PYTHON[8], {})
    told = capsys.readouterr().out
    assert told.startswith("{'left': ")
    assert float(told.split()[-1]) > 1


def test_two_algorithms_in_one_plan():
    shipped = load_plan("ppo_dqn")
    source = Path(shipped.__file__).read_text()
    names = {}
    exec(PYTHON[9], names)
    assert "def execution_plan" + PYTHON[9].split("def execution_plan")[1] in source
    config = shipped.config.updated(min_sample_timesteps_per_iteration=1500, seed=0)

    class Both(Algorithm):
        execution_plan = staticmethod(names["execution_plan"])

    with Both(config) as algo:
        assert set(algo.train()["learners"]) == {"ppo", "dqn"}


def test_an_actor_and_critics(capsys):
    exec(PYTHON[10], {})
    alpha, entropy, loss = map(float, capsys.readouterr().out.split())
    assert 0 < alpha < 1.1
    assert loss >= 0
    assert entropy == entropy  # a number


def test_sequences_from_a_buffer(capsys):
    exec(PYTHON[11], {})
    assert "(8, 64)" in capsys.readouterr().out


def test_a_training_step(capsys):
    exec(PYTHON[12], {})
    assert capsys.readouterr().out == "200\n"


def test_an_algorithm_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reinforce.py").write_text(PYTHON[13])
    lines = [line for line in PYTHON[13].splitlines() if line.strip()]
    assert len(lines) <= 60
    flags = ["--stop-iters", "2", "--run-dir", "r", "--baseline-coeff", "0.25"]
    assert main(["train", "reinforce.py", *flags]) == 0
    assert main(["resume", "r", "--stop-iters", "3"]) == 0
    assert "reached: 3 iterations" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_it_learns(tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reinforce.py").write_text(PYTHON[13])
    flags = ["--stop-reward", "400", "--stop-timesteps", "250000", "--seed", seed]
    assert main(["train", "reinforce.py", "--run-dir", "r", *flags]) == 0
    last = json.loads((tmp_path / "r/result.json").read_text().splitlines()[-1])
    assert last["episode_reward_mean"] >= 400


def test_train_in_python(capsys):
    exec(PYTHON[14], {})
    said = capsys.readouterr().out
    assert "'lr': (0.0003, 0.001)" in said
    assert len(said.splitlines()[-1].split()) == 2


def test_train_by_tune(tmp_path, monkeypatch, capsys, ray_session):
    for module in ("train.constants", "tune.experiment.experiment", "tune.trainable.trainable"):
        monkeypatch.setattr(f"ray.{module}.DEFAULT_STORAGE_PATH", str(tmp_path))
    exec(PYTHON[15], {})
    assert capsys.readouterr().out.splitlines()[-1] == "[800, 800]"


def test_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(PYTHON[16], {})
    assert capsys.readouterr().out == "800\n"


def test_experience_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(PYTHON[17], {})
    assert capsys.readouterr().out == "default_policy 400 1.0\n"


def test_what_a_finished_policy_does(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(PYTHON[2], {})
    capsys.readouterr()
    exec(PYTHON[18], {})
    recorded = [read_parquet(path)[1].count for path in parquet_files(tmp_path / "expert")]
    assert int(capsys.readouterr().out) == sum(recorded) > 0


def test_what_was_kept_is_learned_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(PYTHON[17], {})
    exec(PYTHON[19], {})
    assert -0.8 < float(capsys.readouterr().out.split()[-1]) < 0
    flags = ["--input_", "experience", "--evaluation-interval", "1", "--stop-iters", "1"]
    assert main(["train", "bc", *flags, "--evaluation-duration", "2", "--run-dir", "r"]) == 0


def test_data_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(PYTHON[20], {})
    assert capsys.readouterr().out in ("0\n", "1\n")


def test_what_was_kept_judges_a_policy(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(PYTHON[17], {})
    capsys.readouterr()
    exec(PYTHON[21], {})
    behavior, target, ess = map(float, capsys.readouterr().out.split())
    assert behavior > 5
    assert target > 0
    assert 1 <= ess <= 400


def test_a_walking_cheetah(tmp_path, monkeypatch):
    """The command that the README shows, with fewer steps before it learns."""
    monkeypatch.chdir(tmp_path)
    line = re.search(r"`flowrl (train sac --env HalfCheetah-v5 .*?)`", README)[1]
    flags = [*shlex.split(line), "--learning-starts", "200", "--stop-timesteps", "400"]
    flags += ["--min-sample-timesteps-per-iteration", "200", "--run-dir", "r"]
    assert main(flags) == 0
    last = json.loads((tmp_path / "r/result.json").read_text().splitlines()[-1])
    assert last["num_env_steps_trained"] > 0


def test_an_operator_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scaled.py").write_text(PYTHON[22])
    assert main(["train", "scaled.py", "--stop-iters", "2", "--run-dir", "r"]) == 0
    assert main(["resume", "r", "--stop-iters", "3"]) == 0
    last = json.loads((tmp_path / "r/result.json").read_text().splitlines()[-1])
    assert last["counters"]["num_batches_scaled"] == 3
    assert main(["explain", "scaled.py"]) == 0
    assert "ScaleAdvantages()" in capsys.readouterr().out


def test_the_list_of_plans_is_that_of_the_command(capsys):
    main(["plans"])
    assert f"```\n{capsys.readouterr().out}```" in README


def test_the_asynchronous_plan_that_is_shown_is_the_shipped_one():
    assert PYTHON[23] in Path(load_plan("impala").__file__).read_text()


def test_the_engine(capsys, ray_session):
    exec(PYTHON[24], {})
    said = capsys.readouterr().out
    assert "[0, 16, 1, 25]\n[-10, -5, -4, 2, 3, 5, 10]\n" in said
    assert "gather_async" in said
    assert "busy" in said
    exec(PYTHON[25], {})
    assert capsys.readouterr().out == "[0, 2, 4]\n"


def test_commands(tmp_path, monkeypatch, capsys, ray_session):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_plan.py").write_text(PYTHON[0])
    commands = re.findall(r"^\| `(flowrl [^`]*)`", README, re.MULTILINE)
    assert len(commands) == 12
    (tmp_path / "runs.yaml").write_text(
        "{plan: a2c, env: CartPole-v1, stop: {training_iteration: 1}, config: {seed: 1}}"
    )
    runs = [c for c in commands if c.startswith("flowrl train") and "yaml" not in c]
    for number, command in enumerate(runs):
        short = ["--stop-iters", "2", "--run-dir", f"run{number}"]
        assert main([*shlex.split(command)[1:], *short]) == 0, command
    for command in commands:
        if command not in runs:
            words = shlex.split(command.replace("RUN_DIR", "run0").replace(" 100", " 2"))[1:]
            extra = ["--stop-iters", "3"] if "resume" in words else []
            assert main([*words, *extra]) == 0, command


def test_make_bench_runs_the_scripts_that_figures_are_of():
    quoted = set(re.findall(r"`benchmarks/(\w+)\.py`", README))
    root = Path(__file__).parents[1]
    makefile = (root / "Makefile").read_text().replace("\\\n", " ")
    assert set(re.search(r"BENCHMARKS := (.*)", makefile)[1].split()) == quoted
    assert quoted == {path.stem for path in root.glob("benchmarks/*.py")} - {"peer_env"}


def test_the_operator_table_is_complete():
    table = README.split("## Operators")[1].split("Streams have")[0]
    named = set(re.findall(r"`([A-Z]\w+)\(", table))
    public = {name for name in flowrl.ops.__all__ if isinstance(getattr(flowrl.ops, name), type)}
    assert named == public


def test_the_table_of_settings_is_complete():
    rows = dict(re.findall(r"^\| `\.(\w+)\(\)` \| (.*) \|$", README, re.MULTILINE))
    assert set(rows) == {*_GROUPS, "training"}
    for group, settings in rows.items():
        known = _GROUPS.get(group) or _training_fields(AlgorithmConfig)
        assert set(re.findall(r"`(\w+)`", settings)) == known


def test_the_stream_methods_exist():
    words = README.split("Streams have")[1].split("An exception")[0]
    for name in re.findall(r"`(\w+)", words):
        assert hasattr(LocalIterator, name) or hasattr(ParallelIterator, name), name
