"""`flowrl replay`: an asynchronous run again in one process, bit for bit."""

import bdb
import json
import os
import shutil
import signal

import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from flowrl.algorithms.a3c import A3CConfig
from flowrl.algorithms.impala import IMPALAConfig
from flowrl.cli.main import main
from flowrl.data.checkpoint import read_checkpoint
from flowrl.errors import ConfigError
from flowrl.trainer.plan_settings import plan_config
from flowrl.trainer.runs.comparison import first_difference
from flowrl.trainer.runs.recording import JOURNAL
from flowrl.trainer.runs.replaying import NOT_REPLAYED, RunReplayer

stopped_at = []

PLANS = ["impala", "appo", "a3c", "ppo_async", "apex", "dqn_distributed"]
SMALL = {
    "apex": ["--learning-starts", "300", "--num-replay-shards", "2"],
    "dqn_distributed": ["--learning-starts", "300"],
    "impala": ["--replay-proportion", "0.5", "--replay-buffer-num-slots", "4"],
}


def train(tmp_path, plan, *flags, steps=3000):
    run_dir = tmp_path / "run"
    command = ["train", plan, "--no-tuned", "--seed=3", "--num-workers=2", "--display=none"]
    command += [*SMALL.get(plan, []), f"--stop-timesteps={steps}", "--checkpoint-frequency=4"]
    assert main([*command, *flags, "--run-dir", str(run_dir)]) == 0
    return run_dir


@pytest.fixture(scope="module")
def recorded_a3c(tmp_path_factory):
    return train(tmp_path_factory.mktemp("a3c"), "a3c", "--num-workers=1", steps=500)


@pytest.fixture
def a3c_run(recorded_a3c, tmp_path):
    """A run directory of A3C with a journal, which a test may change."""
    return shutil.copytree(recorded_a3c, tmp_path / "run")


def replay(run_dir, capsys, *flags):
    capsys.readouterr()
    code = main(["replay", str(run_dir), *flags])
    return code, capsys.readouterr()


@pytest.mark.parametrize(
    "plan",
    [pytest.param(p, marks=pytest.mark.slow) for p in PLANS],
)
def test_a_replay_has_the_results_and_weights_of_the_run(tmp_path, capsys, plan):
    run_dir = train(tmp_path, plan)
    num_results = len((run_dir / "result.json").read_text().splitlines())
    code, printed = replay(run_dir, capsys)
    assert f"{num_results} of {num_results} results are equal" in printed.out, printed.out
    assert num_results > (plan != "ppo_async")
    assert code == 0


@pytest.mark.slow
def test_a_replay_ends_with_the_weights_of_the_run(tmp_path):
    run_dir = train(tmp_path, "a3c", "--normalize-observations")
    saved, _ = read_checkpoint(max((run_dir / "checkpoints").iterdir()))
    settings = json.loads((run_dir / "config.json").read_text())
    names = ["seed", "num_workers", "normalize_observations", "total_timesteps"]
    names += [name for name in settings if name.startswith("replay_")]
    changes = {name: settings[name] for name in names}
    config = plan_config("a3c", "CartPole-v1", tuned=False).updated(**changes, **NOT_REPLAYED)
    with config.build() as algorithm:
        replayed = RunReplayer(algorithm, run_dir)
        assert all(one.difference is None for one in replayed.results())
        policy = algorithm.get_policy()
        expected = saved["worker"]["policies"]["default_policy"]
        for name, array in policy.get_weights().items():
            assert array.tobytes() == expected["weights"][name].tobytes()


@pytest.mark.slow
def test_batches_that_are_used_several_times_replay(tmp_path, capsys):
    flags = ["--minibatch-buffer-size=3", "--num-sgd-iter=2", "--max-policy-lag=3"]
    run_dir = train(tmp_path, "impala", *flags, steps=20_000)
    code, printed = replay(run_dir, capsys)
    assert code == 0, printed.out


@pytest.mark.slow
def test_a_replay_stops_at_an_item(a3c_run, capsys, monkeypatch):
    monkeypatch.setattr("sys.breakpointhook", lambda: stopped_at.append("breakpoint"))
    stopped_at.clear()
    code, _ = replay(a3c_run, capsys, "--until", "gather_async:5")
    assert stopped_at == ["breakpoint"]
    assert code == 0


def test_an_unknown_operator_is_refused_with_the_known_ones(a3c_run, capsys):
    code, printed = replay(a3c_run, capsys, "--until", "nothing:5")
    assert code == 2
    assert "there is no operator 'nothing', only StandardMetricsReporting, " in printed.err


@pytest.mark.parametrize("until", ["gather_async", "gather_async:0", ":3", "a:١"])
def test_a_breakpoint_needs_an_operator_and_a_number(tmp_path, capsys, until):
    code, printed = replay(tmp_path, capsys, "--until", until)
    assert code == 2
    assert "an operator and a number from 1" in printed.err


def test_synchronous_runs_have_no_journal(tmp_path, capsys):
    flags = ["--train-batch-size=200", "--stop-timesteps=200", "--display=none"]
    assert main(["train", "ppo", "--no-tuned", *flags, "--run-dir", str(tmp_path / "ppo")]) == 0
    assert not (tmp_path / "ppo" / JOURNAL).exists()
    code, printed = replay(tmp_path / "ppo", capsys)
    assert code == 2
    assert "only runs of asynchronous plans have one" in printed.err


def test_a_damaged_journal_is_refused(a3c_run, capsys):
    (a3c_run / JOURNAL).write_bytes(b"text")
    code, printed = replay(a3c_run, capsys)
    assert code == 1
    assert JOURNAL in printed.err
    assert "damaged" in printed.err


def test_another_run_than_the_recorded_one_is_an_error(a3c_run, capsys):
    manifest = json.loads((a3c_run / "setup.json").read_text())
    manifest["config"]["values"]["gamma"] = 0.5
    (a3c_run / "setup.json").write_text(json.dumps(manifest))
    code, printed = replay(a3c_run, capsys)
    assert code == 1
    assert "differ" in printed.err + printed.out


@pytest.mark.slow
def test_a_resume_ends_the_recording(tmp_path, capsys):
    run_dir = train(tmp_path, "a3c", "--min-sample-timesteps-per-iteration=500")
    before = len((run_dir / "result.json").read_text().splitlines())
    assert main(["resume", str(run_dir), "--stop-timesteps=5000", "--display=none"]) == 0
    code, printed = replay(run_dir, capsys)
    assert f"{before} of {before} results are equal" in printed.out
    assert "end: the run was resumed here" in printed.out
    assert code == 0


class DyingCartPole(CartPoleEnv):
    """Kills the process of worker 1 in its 300th step; its replacement lives."""

    def __init__(self, context, marker):
        super().__init__()
        self.steps_left = 300 if context.worker_index == 1 else None
        self.marker = marker

    def step(self, action):
        if self.steps_left is not None:
            self.steps_left -= 1
            if not self.steps_left and not self.marker.exists():
                self.marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.slow
def test_the_death_of_a_worker_ends_the_recording(tmp_path):
    config = A3CConfig(
        env=lambda context: DyingCartPole(context, tmp_path / "died"),
        num_workers=2,
        num_envs_per_worker=2,
        min_sample_timesteps_per_iteration=100,  # several results before the death
        seed=1,
    )
    with config.build() as algorithm:
        stop = {"num_remote_worker_restarts": 1}
        algorithm.learn(100_000, stop=stop, run_dir=tmp_path / "run", progress=False)
        assert algorithm.last_result["num_remote_worker_restarts"] == 1
    total = config.updated(total_timesteps=100_000, **NOT_REPLAYED)
    safe = total.updated(env=lambda context: CartPoleEnv())
    with safe.build() as algorithm:
        replayed = RunReplayer(algorithm, tmp_path / "run")
        results = list(replayed.results())
    assert results
    assert all(one.difference is None for one in results)
    assert replayed.end == (
        "shard 0 of rollouts[workers=2].for_each() (worker 1) died or did not reply"
    )


def test_a_replay_needs_workers_that_have_not_started(a3c_run):
    with A3CConfig(env="CartPole-v1", num_workers=0).build() as algorithm:
        algorithm.train()
        with pytest.raises(RuntimeError, match="before the workers start"):
            RunReplayer(algorithm, a3c_run)


def test_a_run_whose_checkpoints_are_scored_by_evaluations_replays(tmp_path, capsys):
    score = "--checkpoint-score-attribute=evaluation/episode_reward_mean"
    flags = ["--evaluation-interval=1", "--evaluation-duration=1", score, "--num-workers=0"]
    run_dir = train(tmp_path, "a3c", *flags, steps=200)
    code, output = replay(run_dir, capsys)
    assert code == 0, output.err


def test_a_run_without_a_journal_is_refused(tmp_path):
    with (
        A3CConfig(env="CartPole-v1").build() as algorithm,
        pytest.raises(ConfigError, match=r"it has no journal\.msgpack"),
    ):
        RunReplayer(algorithm, tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        ["--num-workers=0"],
        ["--num-workers=0", "--normalize-observations", "--min-time-s-per-iteration=0.02"],
    ],
)
def test_a_learner_thread_in_the_sampling_process_replays(tmp_path, capsys, flags):
    run_dir = train(tmp_path, "impala", *flags, steps=6000)
    code, printed = replay(run_dir, capsys)
    assert code == 0, printed.out


@pytest.mark.slow
def test_reports_by_time_and_several_agents_replay(tmp_path, capsys):
    (tmp_path / "two_agents.py").write_text(TWO_AGENTS)
    plan = str(tmp_path / "two_agents.py")
    run_dir = train(tmp_path, plan, "--min-time-s-per-iteration=0.05", steps=6000)
    code, printed = replay(run_dir, capsys, "--trust")
    assert code == 0, printed.out + printed.err


TWO_AGENTS = """
from plans.impala import execution_plan
from flowrl.algorithms.impala import IMPALAConfig
from flowrl.envs import make_multi_agent

config = IMPALAConfig(
    env=make_multi_agent("CartPole-v1"),
    env_config={"num_agents": 2},
    policies={"a", "b"},
    policy_mapping_fn=lambda agent_id, *_, **__: "ab"[agent_id],
    num_workers=2,
)
"""

SHARDS_IN_ROUNDS = """
from flowrl.algorithms.dqn import DQNConfig
from flowrl.ops import (
    Concurrently, ParallelRollouts, Replay, StandardMetricsReporting, StoreToReplayBuffer,
    TrainOneStep, UpdateWorkerWeights,
)
from flowrl.algorithms.apex import APEXConfig

config = APEXConfig(env="CartPole-v1", num_workers=2, num_replay_shards=2, learning_starts=200)


def execution_plan(workers, config):
    actors = config.replay_actors()
    store = ParallelRollouts(workers, mode="bulk_sync").for_each(StoreToReplayBuffer(actors=actors))
    train = Replay(actors=actors).for_each(TrainOneStep(workers))
    store = store.for_each(UpdateWorkerWeights(workers, max_weight_sync_delay=64))
    return StandardMetricsReporting(
        Concurrently([store, train], mode="async", output_indexes=[1]), workers, config
    )
"""


@pytest.mark.slow
def test_rounds_with_replay_shards_on_actors_replay(tmp_path, capsys):
    (tmp_path / "rounds.py").write_text(SHARDS_IN_ROUNDS)
    run_dir = train(tmp_path, str(tmp_path / "rounds.py"))
    code, printed = replay(run_dir, capsys, "--trust")
    assert code == 0, printed.out + printed.err


def test_a_second_learn_is_not_recorded(tmp_path):
    with IMPALAConfig(env="CartPole-v1", num_workers=0, seed=1).build() as algorithm:
        algorithm.learn(2000, run_dir=tmp_path / "run", progress=False)
        journal = algorithm.plan.metrics.journal
        size = (tmp_path / "run" / JOURNAL).stat().st_size
        algorithm.learn(4000, run_dir=tmp_path / "run", progress=False)
        assert journal.plan_log.take()["entries"] == journal.learner_log.take()["entries"] == []
    assert (tmp_path / "run" / JOURNAL).stat().st_size <= size + 100


def test_a_run_with_loaded_policies_is_not_recorded(tmp_path):
    with IMPALAConfig(env="CartPole-v1", num_workers=0, seed=1).build() as algorithm:
        algorithm.learn(2000, run_dir=tmp_path / "first", progress=False)
    with IMPALAConfig(env="CartPole-v1", num_workers=0, seed=1).build() as algorithm:
        algorithm.restore_policies(tmp_path / "first")
        algorithm.learn(2000, run_dir=tmp_path / "second", progress=False)
    assert not (tmp_path / "second" / JOURNAL).exists()


def test_a_breakpoint_after_the_last_item_says_so(a3c_run, capsys):
    _, printed = replay(a3c_run, capsys, "--until", "gather_async:1000000")
    assert "gather_async has returned " in printed.out
    assert "items, fewer than 1,000,000" in printed.out


def test_the_debugger_can_be_left(a3c_run, capsys, monkeypatch):
    def quit_debugger(*args, **kwargs):
        raise bdb.BdbQuit

    monkeypatch.setattr("flowrl.ops.inspection.Breakpoint.__call__", quit_debugger)
    code, printed = replay(a3c_run, capsys, "--until", "ApplyGradients:1")
    assert code == 1
    assert printed.out.endswith("stopped in the debugger\n")
    assert printed.err == ""


def test_calls_on_workers_run_after_the_requests_in_flight():
    config = A3CConfig(env="CartPole-v1", num_workers=2, num_envs_per_worker=2, seed=1)
    with config.build() as algorithm:
        algorithm.workers.replay_in_process()
        shards = algorithm.workers.parallel_iterator()
        stream = shards.gather_async(num_async=2)
        stream.metrics.journal = FirstOfShardOne()
        next(stream)
        steps = algorithm.workers.foreach_worker(lambda worker: worker.env_steps)[1:]
        assert steps[0] == steps[1] > 0


def test_a_worker_answers_requests_in_their_order():
    config = A3CConfig(env="CartPole-v1", num_workers=1, rollout_fragment_length=5, seed=1)
    with config.build() as algorithm:
        algorithm.workers.replay_in_process()
        shards = algorithm.workers.parallel_iterator()
        first, second = shards.gather_async(num_async=2), shards.gather_async(num_async=1)
        for stream in (first, second):
            stream.metrics.journal = FirstOfShardOne()
        batches = [next(first), next(second), next(first)]
        begins = [(batch["eps_id"][0], batch["t"][0]) for batch in batches]
        assert begins[0] < begins[2] < begins[1]


class FirstOfShardOne:
    """A journal in which the replies of the first shard arrive first."""

    replays = True

    @property
    def plan_log(self):
        return self

    def observe(self, name, value, expected=0):
        return 1 if name == "gather_async" else expected


def test_metrics_of_time_are_not_compared():
    one = {"a": 1, "time_total_s": 2.0, "timers": {"b": 1.0}, "c": {"timesteps": 3, "nan": None}}
    two = {**one, "time_total_s": 3.0, "timers": {}}
    assert first_difference(one, two) is None
    assert first_difference(one, {**two, "c": {"timesteps": 4, "nan": None}}) == (
        "c/timesteps: 3 instead of 4"
    )
    assert first_difference(one, {**two, "d": 1}) == "d: None instead of 1"


def test_a_run_whose_plan_file_has_moved_replays(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["copy", "impala", "mine.py"]) == 0
    run_dir = train(tmp_path, "mine.py", "--num-workers=0", steps=3000)
    (tmp_path / "mine.py").rename("moved.py")
    code, printed = replay(run_dir, capsys, "--trust")
    assert code == 2
    assert f"there is no plan file {tmp_path / 'mine.py'}; a run directory keeps" in printed.err
    assert f"pass --plan {run_dir / 'plan.py'}" in printed.err
    code, printed = replay(run_dir, capsys, "--plan", str(run_dir / "plan.py"))
    assert code == 0, printed.out + printed.err
