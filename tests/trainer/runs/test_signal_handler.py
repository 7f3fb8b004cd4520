"""SIGTERM, SIGHUP and Ctrl-C stop a run with a checkpoint."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from flowrl.algorithms.a2c import A2C
from flowrl.algorithms.ppo import PPO
from flowrl.cli.main import main
from flowrl.iter import ray_runtime
from flowrl.trainer.runs import signal_handler, training_loop
from flowrl.trainer.runs.signal_handler import SignalHandler


@pytest.fixture(autouse=True)
def _default_hangup_handler():
    """Handle SIGHUP as in a terminal; `nohup pytest` ignores it, here and in child processes."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize(
    ("signals", "code", "reason"),
    [
        pytest.param([signal.SIGINT], 130, "interrupted", marks=pytest.mark.slow),
        ([signal.SIGINT, signal.SIGINT], 130, "interrupted"),  # as `timeout -s INT` sends
        ([signal.SIGTERM], 143, "terminated"),
        pytest.param([signal.SIGHUP], 129, "terminal closed", marks=pytest.mark.slow),
    ],
)
def test_signal_leaves_a_checkpoint(tmp_path, signals, code, reason):
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl", "train", "ppo", "--run-dir", "r"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    results = tmp_path / "r/result.json"
    deadline = time.monotonic() + 60
    while not (results.exists() and results.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.002)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == code
    assert f"stopped: {reason}" in out
    assert list((tmp_path / "r/checkpoints").glob("*/manifest.json"))


@pytest.mark.slow
def test_signal_lets_the_iteration_end_while_ray_waits(tmp_path):
    """Ray's own handler of SIGTERM would exit in the middle of a wait for a worker."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl", "train", "a3c", "--num-workers=1", "--run-dir", "r"],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    results = tmp_path / "r/result.json"
    while not (results.exists() and results.stat().st_size) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "stopped: terminated" in out


@pytest.fixture
def fake_ray(monkeypatch):
    """Ray whose `init` replaces the handler of SIGTERM, then calls `fake_ray.during_init`."""

    def init(*args, **options):
        ray._private.utils.set_sigterm_handler(lambda number, frame: sys.exit(number))
        fake.during_init()

    fake = SimpleNamespace(during_init=lambda: None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr(ray_runtime, "watch_ray", lambda: None)
    monkeypatch.setattr(ray_runtime, "_num_users", 0)
    previous = signal.getsignal(signal.SIGTERM)
    yield fake
    signal.signal(signal.SIGTERM, previous)


def fail():
    raise ConnectionError


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
@pytest.mark.parametrize("during_init", [lambda: None, fail])
def test_start_of_ray_keeps_the_handler_of_a_signal(fake_ray, handler, during_init):
    signal.signal(signal.SIGTERM, handler)
    fake_ray.during_init = during_init
    with suppress(ConnectionError):
        ray_runtime.start_ray()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_threads_start_ray_once(fake_ray, monkeypatch):
    started = []

    def during_init():
        time.sleep(0.05)
        monkeypatch.setattr("ray.is_initialized", lambda: True)
        started.append(threading.current_thread())

    def start(results):
        with suppress(ValueError):  # only the main thread may set handlers of signals
            results.append(ray_runtime.start_ray())

    fake_ray.during_init = during_init
    results: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", lambda *args: None)
        threads = [threading.Thread(target=start, args=[results]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (len(started), results) == (1, [True, True])


def test_signal_while_ray_starts_is_a_termination(fake_ray):
    def during_init():
        signal.alarm(100)  # by Ray's C++ handler
        os.kill(os.getpid(), signal.SIGTERM)

    fake_ray.during_init = during_init
    with SignalHandler() as signals:
        ray_runtime.start_ray()
        with pytest.raises(SystemExit) as caught:
            signals.raise_pending()
        assert signals.is_termination(caught.value)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_exit_of_the_program_after_ctrl_c_is_not_a_termination():
    with SignalHandler() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert not signals.is_termination(SystemExit(1))


@pytest.mark.slow
def test_closed_terminal_leaves_a_checkpoint(tmp_path):
    terminal, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl", "train", "ppo", "--run-dir", "r"],
        cwd=tmp_path, stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(inner)
    results = tmp_path / "r/result.json"
    deadline = time.monotonic() + 60
    while not (results.exists() and results.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.close(terminal)
    assert process.wait(timeout=30) == 129
    assert list((tmp_path / "r/checkpoints").glob("*/manifest.json"))


@pytest.mark.slow
@pytest.mark.parametrize("num_lines", [0, 2])
def test_closed_output_leaves_a_checkpoint(tmp_path, num_lines):
    command = f"{sys.executable} -m flowrl train a2c --run-dir r --train-batch-size 5000"
    process = subprocess.run(
        f"unset PYTHONUNBUFFERED; {command} | head -n {num_lines}; exit ${{PIPESTATUS[0]}}",
        cwd=tmp_path, shell=True, executable="/bin/bash", capture_output=True, text=True,
    )  # fmt: skip
    assert (process.returncode, process.stderr) == (141, "")
    assert process.stdout.count("\n") == num_lines
    assert list((tmp_path / "r/checkpoints").glob("*/manifest.json"))


def test_broken_pipe_of_an_environment_is_an_error(tmp_path, monkeypatch):
    def train(self):
        raise BrokenPipeError("the simulator is gone")

    monkeypatch.setattr(PPO, "train", train)
    with PPO("CartPole-v1") as algorithm, pytest.raises(BrokenPipeError, match="the simulator"):
        algorithm.learn(128, run_dir=tmp_path / "run")


def test_signal_that_nohup_ignores_stays_ignored():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalHandler() as signals:
            signals.armed = True
            signal.raise_signal(signal.SIGHUP)
            assert not signals.terminal_closed
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_first_ctrl_c_says_what_happens(capfd):
    with SignalHandler():
        signal.raise_signal(signal.SIGINT)
    assert "stopping after this iteration; Ctrl-C again stops at once" in capfd.readouterr().err


def test_ctrl_c_with_a_closed_error_output_raises_nothing(monkeypatch):
    def write(descriptor, text):
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", write)
    with SignalHandler() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.exit_code == 130


def test_output_that_is_closed_at_the_end_leaves_a_checkpoint(tmp_path, monkeypatch):
    def finish(self, result):
        raise BrokenPipeError

    monkeypatch.setattr("flowrl.trainer.runs.progress.ProgressTable.finish", finish)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # is replaced by the null device
    with A2C("CartPole-v1", train_batch_size=64) as algorithm:
        algorithm.learn(128, run_dir=tmp_path / "r")
    assert [path.name for path in (tmp_path / "r/checkpoints").iterdir()] == ["000002"]


def test_first_signal_waits_for_the_iteration_and_a_later_one_raises(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(signal_handler.time, "monotonic", lambda: now[0])
    previous = signal.getsignal(signal.SIGINT)
    with SignalHandler() as signals:
        signals.armed = True
        signal.raise_signal(signal.SIGINT)  # pending
        signal.raise_signal(signal.SIGINT)  # a duplicate
        with pytest.raises(KeyboardInterrupt):
            signals.raise_pending()
        now[0] = 5.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is previous
    for number, code in ((signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        with SignalHandler() as signals:
            signal.raise_signal(number)
            with pytest.raises(SystemExit) as caught:
                signals.raise_pending()
            assert caught.value.code == code
            assert signals.terminal_closed == (code == 129)


def test_long_iteration_is_interrupted_after_the_grace_time(monkeypatch):
    monkeypatch.setattr(signal_handler, "GRACE_S", 0.05)
    monkeypatch.setattr(signal_handler, "DUPLICATE_SIGNAL_S", 0.01)
    with SignalHandler() as signals:
        signals.armed = True
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(60)


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")],
)
def test_second_signal_during_the_last_checkpoint_ends_the_run(
    tmp_path, monkeypatch, capsys, number, code, reason
):
    monkeypatch.setattr(signal_handler, "DUPLICATE_SIGNAL_S", 0.0)
    save = PPO.save

    def interrupted(self, path, **settings):
        signal.raise_signal(number)
        return save(self, path, **settings)

    def signalled(self):
        result = train(self)
        signal.raise_signal(number)
        return result

    train = PPO.train
    monkeypatch.setattr(PPO, "train", signalled)
    monkeypatch.setattr(PPO, "save", interrupted)
    flags = ["--train-batch-size=64", "--sgd-minibatch-size=32", "--display=none"]
    assert main(["train", "ppo", *flags, "--run-dir", str(tmp_path / "r")]) == code
    error = capsys.readouterr().err
    assert "stopped at once: the last checkpoint may be missing" in error
    assert "Traceback" not in error
    last = (tmp_path / "r/events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["text"] == reason


@pytest.mark.parametrize("code", [143, ["x"]])
def test_exit_of_the_users_code_is_a_failure(tmp_path, monkeypatch, capsys, code):
    def exits(self):
        sys.exit(code)

    monkeypatch.setattr(PPO, "train", exits)
    assert main(["train", "ppo", "--display=none", "--run-dir", str(tmp_path / "r")]) == 1
    assert f"SystemExit: {code}" in capsys.readouterr().err


def test_signal_after_a_failure_does_not_hide_the_failure(tmp_path, monkeypatch, capsys):
    def fails(self):
        raise ArithmeticError("boom")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(PPO, "train", fails)
    monkeypatch.setattr(training_loop, "_finish_display", interrupted)
    command = ["train", "ppo", "--display=none", "--run-dir", str(tmp_path / "r")]
    assert main(command) == 1
    assert "ArithmeticError: boom" in capsys.readouterr().err
    monkeypatch.setattr(training_loop, "_write_last_result", interrupted)
    assert main([*command[:-1], str(tmp_path / "s")]) == 1
    for name in ("r", "s"):
        lines = (tmp_path / name / "events.jsonl").read_text().splitlines()
        kinds = [json.loads(line)["kind"] for line in lines]
        assert kinds == ["started", "failed"]


def test_signal_while_the_files_are_closed_is_the_end_of_the_run(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(training_loop, "_finish_display", interrupted)
    flags = ["--train-batch-size=64", "--sgd-minibatch-size=32", "--display=none"]
    command = ["train", "ppo", *flags, "--stop-iters=1", "--run-dir", str(tmp_path / "r")]
    assert main(command) == 130
    last = (tmp_path / "r/events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["kind"] == "ended"


def test_interrupted_run_continues_like_an_uninterrupted_one(tmp_path, monkeypatch):
    """Ctrl-C while a batch is trained on does not lose the batch."""
    train, settings = (
        PPO.train,
        {"seed": 1, "train_batch_size": 64, "sgd_minibatch_size": 32, "num_sgd_iter": 2},
    )

    def interrupted(self):
        if self.iteration == 2:
            signal.raise_signal(signal.SIGINT)
        return train(self)

    with PPO("CartPole-v1", **settings) as algorithm:
        algorithm.learn(320, run_dir=tmp_path / "whole", progress=False)
        expected = algorithm.get_policy().get_weights()
    with monkeypatch.context() as patch, PPO("CartPole-v1", **settings) as algorithm:
        patch.setattr(PPO, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            algorithm.learn(320, run_dir=tmp_path / "run", progress=False)
    with PPO.from_checkpoint(tmp_path / "run") as algorithm:
        assert algorithm.iteration == 3
        algorithm.learn(progress=False)
        assert algorithm.last_result["num_env_steps_trained"] == 320
        for name, weights in algorithm.get_policy().get_weights().items():
            np.testing.assert_array_equal(weights, expected[name])


def test_second_ctrl_c_ends_the_run_without_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(signal_handler, "DUPLICATE_SIGNAL_S", 0.0)

    def signalled(self):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(PPO, "train", signalled)
    flags = ["--train-batch-size=64", "--sgd-minibatch-size=32", "--display=none"]
    assert main(["train", "ppo", *flags, "--run-dir", str(tmp_path / "r")]) == 130
    assert "stopped at once: the last checkpoint may be missing" in capsys.readouterr().err
    assert not list((tmp_path / "r").glob("checkpoints/*"))
    last = (tmp_path / "r/events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["text"] == "interrupted"


def test_end_of_the_grace_time_does_not_interrupt_the_writing_of_a_result(monkeypatch):
    """The iteration may end between the timer's look at `armed` and its signal."""
    monkeypatch.setattr(signal_handler, "DUPLICATE_SIGNAL_S", 0.0)
    sent = threading.Event()
    with SignalHandler() as signals:
        signals.armed = True

        def kill_later(thread, number):
            signals.armed = False
            sent.set()

        monkeypatch.setattr(signal_handler.signal, "pthread_kill", kill_later)
        monkeypatch.setattr(signal_handler, "GRACE_S", 0.01)
        signal.raise_signal(signal.SIGINT)
        assert sent.wait(60)
        signal.raise_signal(signal.SIGINT)  # the timer's
        assert not signals.is_repeated
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # the user's second one
        assert signals.is_repeated
