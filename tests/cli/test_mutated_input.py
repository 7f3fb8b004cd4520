"""Generated input: every command refuses it in one line that names the field, or trains."""

import functools
import json
import math
import random
from pathlib import Path
from typing import NamedTuple

import pytest

from flowrl.errors import ConfigError
from flowrl.trainer.plan_settings import plan_config

NUM_CASES = 400
NUM_QUICK = 30
SMALL = {
    "ppo": {"train_batch_size": 64, "sgd_minibatch_size": 32, "num_sgd_iter": 1},
    "dqn": {"learning_starts": 50, "train_batch_size": 16, "replay_buffer_capacity": 500},
    "a2c": {"train_batch_size": 64},
    "r2d2": {
        "learning_starts": 50,
        "train_batch_size": 2,
        "replay_buffer_capacity": 500,
        "min_sample_timesteps_per_iteration": 100,
    },
}
WORDS = ["-1", "0", "9" * 23, "1000000000", "nan", "inf", "1e24", "-1e9", "0.5", "x", "", "[]",
         "None", "١", "1_0", "0x10", "{}", "true", "../..", "1;2", "\t"]  # fmt: skip
VALUES = [-1, 0, 10**23, 10**9, float("nan"), float("inf"), 1e24, -1e9, 0.5, "x", "", [], {}, None,
          "١", True, [1, 2], {"a": 1}, "../..", [[0, 1]], "1e400"]  # fmt: skip
# training with these takes long, or starts processes
LONG = {"compile", "num_workers", "evaluation_num_workers", "num_replay_shards", "address",
        "placement_strategy", "min_sample_timesteps_per_iteration", "evaluation_interval",
        "evaluation_duration", "num_envs_per_worker", "num_threads_per_process", "device",
        "min_time_s_per_iteration", "delay_between_worker_restarts_s", "log_to",
        "plan", "env", "env_config", "evaluation_parallel_to_training"}  # fmt: skip
FOLDERS = ("evaluation_video_dir", "replay_buffer_dir", "output")
PLAN_FILE = '''"""A plan with a mistake."""
from flowrl.algorithms.ppo import PPOConfig
from flowrl.ops import *

config = PPOConfig(env="CartPole-v1", train_batch_size=64, sgd_minibatch_size=32, num_sgd_iter=1)


def execution_plan(workers, config):
    train = (
        ParallelRollouts(workers, mode="bulk_sync")
        .combine(ConcatBatches(64))
        .for_each(TrainOneStep(workers))
    )
    learn_again = ParallelRollouts(workers).for_each(TrainOneStep(workers))
    both = Concurrently([train, learn_again], mode="round_robin", output_indexes=[0])
    return StandardMetricsReporting(both, workers, config)
'''
MISTAKES = [
    ('mode="bulk_sync"', 'mode="bulksync"', "mode"),
    ('mode="bulk_sync"', "mode=3", "mode"),
    ("ConcatBatches(64)", "ConcatBatches(0)", "min_batch_size"),
    ("ConcatBatches(64)", "ConcatBatches(-1)", "min_batch_size"),
    ("ConcatBatches(64)", "ConcatBatches('x')", "min_batch_size"),
    ("ConcatBatches(64)", "ConcatBatches()", "min_batch_size"),
    ("ConcatBatches(64)", "ConcatBatches(64, count_steps_by='rows')", "count_steps_by"),
    ("output_indexes=[0]", "output_indexes=[5]", "output_indexes contains 5"),
    ("output_indexes=[0]", "output_indexes=['a']", "output_indexes"),
    ('mode="round_robin"', 'mode="roundrobin"', "mode"),
    ('mode="round_robin"', 'mode="round_robin", round_robin_weights=[0]', "weights"),
    ('mode="round_robin"', 'mode="round_robin", round_robin_weights=[1, 2, 3]', "weights"),
    ("Concurrently([train, learn_again]", "Concurrently([]", "Concurrently"),
    ("Concurrently([train, learn_again]", "Concurrently([train, 3]", "Concurrently"),
    ("StandardMetricsReporting(both, workers, config)", "both", "StandardMetricsReporting"),
    ("StandardMetricsReporting(both, workers, config)", "None", "StandardMetricsReporting"),
    ("def execution_plan(workers, config)", "def execution_plan(workers)", "execution_plan"),
    ("def execution_plan", "def other_plan", "execution_plan"),
    ("train_batch_size=64", "train_batch_sizes=64", "train_batch_sizes"),
    ("train_batch_size=64", "train_batch_size=-64", "train_batch_size"),
    ('env="CartPole-v1"', 'env="CartPol-v1"', "CartPol-v1"),
    ("import *", "import NoSuchOperator", "NoSuchOperator"),
    ("import *", "import (", "mistake.py"),
]  # fmt: skip


class Case(NamedTuple):
    """Arguments of a command.

    Attributes:
        arguments: after `flowrl`.
        files: name -> text of files in the current folder.
        field: what a refusal must name.
        invalid: whether the input must be refused; if not, it may also be accepted.
    """

    arguments: list[str]
    files: dict[str, str]
    field: str
    invalid: bool = False


@functools.cache
def settings_of(plan):
    """Return the names of the settings of a plan, and its small settings."""
    config = plan_config(plan, "CartPole-v1", tuned=False)
    return [name for name in config if name not in LONG], SMALL[plan]


def flag_of(name):
    return f"--{name.rstrip('_').replace('_', '-')}"


def flags_of(settings):
    return [word for name, value in settings.items() for word in (flag_of(name), str(value))]


def is_never_a_value(name, value):
    """Return whether a setting cannot have a value; folders may have any name."""
    if name in FOLDERS:
        return False
    return value in ("١", "\t") or (isinstance(value, float) and value != value)


def flag_case(rng):
    plan = rng.choice(list(SMALL))
    names, small = settings_of(plan)
    name, word = rng.choice(names), rng.choice(WORDS)
    rest = {n: v for n, v in small.items() if n != name}
    arguments = ["train", plan, "--no-tuned", *flags_of(rest), f"{flag_of(name)}={word}"]
    return Case(arguments, {}, flag_of(name)[2:])


def unknown_flag_case(rng):
    plan = rng.choice(list(SMALL))
    name = rng.choice(settings_of(plan)[0])
    position = rng.randrange(len(name))
    flag = flag_of(name[:position] + rng.choice("qxz") + name[position:])
    return Case(["train", plan, f"{flag}=1"], {}, flag, invalid=True)


def json_case(rng):
    plan = rng.choice(list(SMALL))
    names, small = settings_of(plan)
    name, value = rng.choice(names), rng.choice(VALUES)
    config = json.dumps({**small, name: value})
    arguments = ["train", plan, "--no-tuned", "--config", config]
    return Case(arguments, {}, name.rstrip("_"), is_never_a_value(name, value))


def yaml_case(rng):
    plan = rng.choice(list(SMALL))
    names, small = settings_of(plan)
    name, value = rng.choice(names), rng.choice(VALUES)
    entry = {"plan": plan, "env": "CartPole-v1", "config": {**small, name: value}}
    field, invalid = name.rstrip("_"), is_never_a_value(name, value)
    match rng.randrange(8):
        case 0:
            entry = {**entry, "config": value if value != {} else []}
            is_mapping = isinstance(value, dict)
            field, invalid = "config", bool(entry["config"]) and not is_mapping
            if is_mapping and value:  # the message names its unknown setting
                (field,) = value
        case 1:
            entry = {"../evil": {**entry, "config": small}}
            field, invalid = "../evil", True
        case 2:
            entry = {**entry, "config": small, "stop": {"timesteps_total": value}}
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            field, invalid = "timesteps_total", not is_number or not math.isfinite(value)
        case 3:
            entry = {**entry, "config": small, "plan": value}
            field, invalid = "plan", True
    text = json.dumps(entry)
    return Case(["train", "mine.yaml"], {"mine.yaml": text}, field, invalid)


def plan_case(rng):
    before, after, field = rng.choice(MISTAKES)
    text = PLAN_FILE.replace(before, after)
    assert text != PLAN_FILE
    return Case(["train", "mistake.py"], {"mistake.py": text}, field, invalid=True)


def path_case(rng):
    arguments, field = rng.choice(
        [
            (["train", "ppo", "--run-dir", "/proc/x"], "/proc"),
            (["train", "ppo", "--run-dir", "file.txt"], "file.txt"),
            (["train", "ppo", "--run-dir", "file.txt/x"], "file.txt"),
            (["train", "ppo", "--run-dir", "x" * 300], "x" * 300),
            (["train", "ppo", "--run-dir", "a\0b"], "run"),
            (["train", "ppo", "--output", "file.txt"], "file.txt"),
            (["train", "nowhere.py"], "nowhere.py"),
            (["train", "nowhere.yaml"], "nowhere.yaml"),
            (["train", "file.txt"], "file.txt"),
            (["train", "../../ppo"], "../../ppo"),
            (["resume", "nowhere"], "nowhere"),
            (["resume", "file.txt"], "file.txt"),
            (["evaluate", "nowhere"], "nowhere"),
            (["evaluate", ".", "--episodes", "0"], "episodes"),
            (["copy", "ppo", "no/folder/x.py"], "no/folder"),
            (["copy", "../ppo", "x.py"], "../ppo"),
            (["explain", "../../ppo"], "../../ppo"),
            (["report", "nowhere"], "nowhere"),
            (["plot", "nowhere"], "nowhere"),
            (["diagnose", "nowhere"], "nowhere"),
        ]
    )
    return Case(arguments, {"file.txt": "text"}, field, invalid=True)


KINDS = [flag_case, flag_case, flag_case, json_case, yaml_case, yaml_case, unknown_flag_case,
         plan_case, path_case]  # fmt: skip


def cases(count):
    """Return the first cases of a fixed sequence."""
    rng = random.Random(29)
    return [KINDS[index % len(KINDS)](rng) for index in range(count)]


def check(case, cli):
    """Run a command and check that it refused its input well, or trained."""
    for name, text in case.files.items():
        Path(name).write_text(text)
    stop = ["--stop-iters", "1"] if case.arguments[0] == "train" else []
    code, _, err = cli(*case.arguments, *stop)
    problem = f"flowrl {' '.join(case.arguments)}\n{case.files}\n{err}"
    assert code in (0, 2), problem
    assert "Traceback" not in err, problem
    if code == 0:
        assert not case.invalid, problem
        return
    error = err.strip().splitlines()[-1]
    assert error.startswith("flowrl: "), problem
    assert case.field.replace("_", "-") in error.replace("_", "-"), problem
    assert {path.name for path in Path.cwd().iterdir()} == set(case.files), problem


def parts(start, end):
    return [range(first, min(first + 20, end)) for first in range(start, end, 20)]


@pytest.mark.parametrize(
    "numbers",
    [
        *parts(0, NUM_QUICK),
        *(pytest.param(part, marks=pytest.mark.slow) for part in parts(NUM_QUICK, NUM_CASES)),
    ],
)
def test_mutated_input_is_refused_or_trains(cli, tmp_path, monkeypatch, numbers):
    for number, case in enumerate(cases(numbers.stop)[numbers.start :], numbers.start):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        check(case, cli)


def test_mutated_settings_in_python_are_refused_by_name():
    rng = random.Random(3)
    refused = 0
    for _ in range(300):
        plan = rng.choice(list(SMALL))
        names, small = settings_of(plan)
        name, value = rng.choice(names), rng.choice(VALUES)
        config = plan_config(plan, "CartPole-v1", tuned=False).updated(**small)
        before = config.to_dict()
        problem = None
        try:
            setattr(config, name, value)
        except ConfigError as error:
            problem = str(error)
        if problem is None:
            assert not is_never_a_value(name, value), (name, value)
            continue
        assert name.rstrip("_") in problem, (name, value)
        assert config.to_dict() == before
        refused += 1
    assert refused > 100
