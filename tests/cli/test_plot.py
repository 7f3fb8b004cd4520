"""`flowrl plot`: learning curves, mean and interval over seeds."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.trainer.runs.learning_curves import (
    NUM_POINTS,
    default_metric,
    find_runs,
    learning_curves,
)
from tests.extras import require_extra


def write_run(folder, returns, seed=1, plan="ppo", **settings):
    """Write a run directory with a return every 100 env steps."""
    folder.mkdir(parents=True)
    config = {"env": "CartPole-v1", "gamma": 0.9, "seed": seed, "plan": plan.lower(), **settings}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "command.txt").write_text(f"flowrl train {plan} --seed {seed}\n")
    lines = [
        json.dumps({"timesteps_total": 100 * (i + 1), "episode_reward_mean": value, "x": {"y": i}})
        for i, value in enumerate(returns)
    ]
    (folder / "result.json").write_text("\n".join(lines) + "\n")
    return folder


def test_runs_that_differ_in_their_seeds_are_one_curve(tmp_path):
    runs = [write_run(tmp_path / str(seed), [seed, 2.0 * seed], seed) for seed in (1, 2, 6)]
    (curve,) = learning_curves(runs)
    assert curve.name == "ppo CartPole-v1"
    assert len(curve.runs) == 3
    assert curve.steps.shape == curve.mean.shape == (NUM_POINTS,)
    assert (curve.steps[0], curve.steps[-1]) == (100, 200)
    np.testing.assert_allclose(curve.mean, np.linspace(3, 6, NUM_POINTS))
    assert (curve.low < curve.mean).all()
    assert (curve.mean < curve.high).all()
    assert curve.low[0] >= 1
    assert curve.high[0] <= 6


def test_other_settings_and_plans_are_other_curves(tmp_path):
    runs = [
        write_run(tmp_path / "a", [1.0, 2.0]),
        write_run(tmp_path / "b", [1.0, 2.0], gamma=0.5),
        write_run(tmp_path / "c", [1.0, 2.0], plan="mine.py"),
    ]
    names = [curve.name for curve in learning_curves(runs)]
    assert names == [
        "ppo CartPole-v1, gamma=0.9",
        "ppo CartPole-v1, gamma=0.5",
        "mine CartPole-v1, gamma=0.9",
    ]
    assert len(learning_curves(find_runs([tmp_path, runs[0], tmp_path / "b" / ".." / "a"]))) == 3


def test_environments_that_are_classes_are_other_curves(tmp_path):
    runs = [
        write_run(tmp_path / name, [1.0, 2.0], env={"__code__": f"my_envs:{name}"})
        for name in ("First", "Second")
    ]
    assert [curve.name for curve in learning_curves(runs)] == ["ppo First", "ppo Second"]


def test_seeds_of_policies_belong_to_one_run(tmp_path):
    runs = [
        write_run(
            tmp_path / str(seed), [1.0, 2.0], seed,
            env={"__code__": f"functools:partial({'f' * 60}, 'a:b')"},
            policies={"a": {"__code__": f":PolicySpec(config=PPOConfig(seed={seed}, lr=0.1))"}},
        )
        for seed in (1, 2)
    ]  # fmt: skip
    (curve,) = learning_curves(runs)
    assert (curve.name, len(curve.runs)) == ("ppo", 2)


def test_runs_of_several_processes_with_the_same_object_are_one_curve(tmp_path):
    runs = [
        write_run(tmp_path / str(seed), [1.0, 2.0], seed, callbacks_class={"__code__": f":{text}"})
        for seed, text in enumerate(["<C object at 0x7f12>", "<C object at 0x7f99>"])
    ]
    (curve,) = learning_curves(runs)
    assert len(curve.runs) == 2


def test_runs_without_common_steps_are_curves_of_their_own(tmp_path):
    early = write_run(tmp_path / "a", [1.0, 2.0], 1)
    late = write_run(tmp_path / "b", [None] * 5 + [3.0, 4.0], 2)
    assert [curve.mean[-1] for curve in learning_curves([early, late])] == [2, 4]


def test_results_without_the_metric_are_left_out(tmp_path):
    run = write_run(tmp_path / "a", [None, math.inf, 3.0, 4.0])
    (curve,) = learning_curves([run])
    assert curve.runs[0][0].tolist() == [300, 400]
    (curve,) = learning_curves([run], "x/y")
    assert curve.runs[0][1].tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="'nothing'"):
        learning_curves([run], "nothing")
    offline = write_run(tmp_path / "b", [None, None])
    with pytest.raises(ConfigError) as raised:
        learning_curves([offline], "episode_reward_mean")
    assert "Did you mean 'episode_reward_mean'" not in str(raised.value)


def test_runs_without_the_metric_are_reported(tmp_path, caplog):
    with_returns, without = write_run(tmp_path / "a", [1.0]), write_run(tmp_path / "b", [None])
    assert len(learning_curves([with_returns, without])) == 1
    assert f"left out: {without} has no finite 'episode_reward_mean'" in caplog.text


def test_offline_runs_show_their_evaluations(tmp_path):
    run = write_run(tmp_path / "a", [None, None])
    assert default_metric([run]) == "episode_reward_mean"  # it has no evaluation
    with pytest.raises(ConfigError, match=r"have no returns: .* --metric learners/"):
        learning_curves([run])
    assert default_metric([run, write_run(tmp_path / "b", [1.0])]) == "episode_reward_mean"
    result = {"timesteps_total": 50, "evaluation": {"episode_reward_mean": 7.0}}
    lines = (run / "result.json").read_text()
    (run / "result.json").write_text(json.dumps(result) + "\n" + lines)  # not in the last result
    metric = default_metric([run])
    (curve,) = learning_curves([run], metric)
    assert curve.mean[-1] == 7
    with pytest.raises(ConfigError, match="Did you mean 'evaluation/episode_reward_mean'"):
        learning_curves([run], "episode_reward_mean")


def test_names_of_plans_in_upper_case_are_the_same_plan(tmp_path):
    runs = [write_run(tmp_path / p, [1.0], seed=i, plan=p) for i, p in enumerate(("ppo", "PPO"))]
    (curve,) = learning_curves(runs)
    assert curve.name == "ppo CartPole-v1"


def test_runs_of_a_plan_file_are_one_curve_however_its_path_is_written(tmp_path):
    runs = []
    for seed, plan in enumerate(("mine.py", "./mine.py")):
        run = write_run(tmp_path / f"run{seed}", [1.0], seed, plan)
        config = json.loads((run / "config.json").read_text()) | {"plan": "/home/me/mine.py"}
        (run / "config.json").write_text(json.dumps(config))
        runs.append(run)
    (curve,) = learning_curves(runs)
    assert len(curve.runs) == 2


def test_runs_of_other_algorithms_with_the_same_settings_are_other_curves(tmp_path):
    runs = []
    for name in ("A2C", "VPG"):
        run = write_run(tmp_path / name, [1.0])
        setup = {"algorithm": f"mine:{name}", "config": {}}
        (run / "setup.json").write_text(json.dumps(setup))
        runs.append(run)
    names = [curve.name for curve in learning_curves(runs)]
    assert names == [f"ppo CartPole-v1, algorithm=mine:{name}" for name in ("A2C", "VPG")]


def test_curves_of_other_policies_have_other_names(tmp_path):
    policies = ({"p": {"__code__": f":PolicySpec(config=PPOConfig(lr={lr}))"}} for lr in (1, 2))
    runs = [write_run(tmp_path / n, [1.0], policies=p) for n, p in zip("ab", policies, strict=True)]
    assert len({curve.name for curve in learning_curves(runs)}) == 2


def test_folders_of_runs_are_searched(tmp_path):
    a, b = write_run(tmp_path / "runs" / "a", [1.0]), write_run(tmp_path / "runs" / "b", [1.0])
    (tmp_path / "runs" / "other").mkdir()
    assert find_runs([tmp_path / "runs"]) == [a, b]
    assert find_runs([b]) == [b]
    with pytest.raises(ConfigError, match="no such folder"):
        find_runs([tmp_path / "missing"])


def test_damaged_runs_of_a_folder_are_left_out(tmp_path, caplog):
    a, b = write_run(tmp_path / "runs" / "a", [1.0]), write_run(tmp_path / "runs" / "b", [1.0])
    (a / "config.json").write_text("garbage")
    (b / "command.txt").write_text("flowrl train 'ppo")
    assert find_runs([tmp_path / "runs"], warn=False) == [b]
    assert len(learning_curves([b])) == 1
    assert not caplog.records
    assert find_runs([tmp_path / "runs"]) == [b]
    (warning,) = caplog.records
    assert f"left out: {a / 'config.json'}: damaged" in warning.getMessage()
    (b / "config.json").unlink()
    with pytest.raises(ConfigError, match="damaged"):
        find_runs([tmp_path / "runs"])


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_curves_are_drawn(cli, tmp_path, suffix):
    require_extra("plot")
    for seed in (1, 2):
        write_run(tmp_path / "runs" / str(seed), [1.0, 3.0], seed)
    write_run(tmp_path / "runs" / "other", [2.0, 5.0], gamma=0.5)
    code, out, err = cli("plot", "runs", "-o", f"curve{suffix}")
    assert (code, err) == (0, "")
    assert "ppo CartPole-v1, gamma=0.9: 2 runs, 3 after 200 env steps" in out
    assert f"drawn: curve{suffix}" in out
    start = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}[suffix]
    assert Path(f"curve{suffix}").read_bytes().startswith(start)


def test_wrong_arguments_are_rejected(cli, tmp_path):
    require_extra("plot")
    write_run(tmp_path / "a", [1.0])
    for arguments, message in (
        (("a", "-o", "curve.txt"), "must end in .svg, .png, .pdf"),
        (("missing",), "no such folder"),
        (("a", "--metric", "nope"), "no result of these runs has a finite 'nope'"),
        (("a", "-o", "missing/curve.svg"), "cannot write missing/curve.svg: No such file"),
    ):
        code, _, err = cli("plot", *arguments)
        assert code == 2
        assert message in err


def test_runs_of_a_yaml_file_have_the_names_of_their_plans(tmp_path):
    runs = [write_run(tmp_path / name, [1.0], seed=i) for i, name in enumerate(("a", "b"))]
    for run, plan in zip(runs, ("ppo", "runs.yaml"), strict=True):
        (run / "command.txt").write_text(f"flowrl train {plan}\n")
        settings = json.loads((run / "config.json").read_text()) | {"plan": "ppo"}
        (run / "config.json").write_text(json.dumps(settings))
    (curve,) = learning_curves(runs)
    assert (curve.name, len(curve.runs)) == ("ppo CartPole-v1", 2)
