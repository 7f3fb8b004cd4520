"""SIGTERM, SIGHUP and Ctrl-C stop a run with a checkpoint."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time

import pytest

from flowrl.trainer.runs import signal_handler
from flowrl.trainer.runs.signal_handler import SignalHandler


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


def test_signal_that_nohup_ignores_stays_ignored():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalHandler() as signals:
            signals.armed = True
            signal.raise_signal(signal.SIGHUP)
            assert not signals.terminal_closed
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_first_signal_raises_only_while_armed_and_a_later_one_always(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(signal_handler.time, "monotonic", lambda: now[0])
    previous = signal.getsignal(signal.SIGINT)
    with SignalHandler() as signals:
        signal.raise_signal(signal.SIGINT)  # not armed: pending
        signal.raise_signal(signal.SIGINT)  # a duplicate
        with pytest.raises(KeyboardInterrupt):
            signals.raise_pending()
        now[0] = 5.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is previous
    for number, code in ((signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        with SignalHandler() as signals:
            signals.armed = True
            with pytest.raises(SystemExit) as caught:
                signal.raise_signal(number)
            assert caught.value.code == code
            assert signals.terminal_closed == (code == 129)
