"""Processes of a benchmark end with it."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from flowrl.benchmark.processes import Processes, run_training
from tests.processes import is_running

CHILD = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
SCRIPT = f"""
from flowrl.benchmark.processes import run_training

run_training({CHILD!r})
"""


def test_sigterm_ends_the_training():
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    assert is_running(child)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    process.stdout.close()
    assert not is_running(child)


@pytest.fixture
def sighup():
    """Handle SIGHUP as by default: it is ignored under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_all_trainings_and_starts_no_other(tmp_path, sighup, number):
    processes = Processes()
    with open(tmp_path / "log", "w") as output, ThreadPoolExecutor(2) as pool:
        with processes.ended_by_signals():
            running = [pool.submit(processes.run, CHILD, output) for _ in range(2)]
            while len((tmp_path / "log").read_text().splitlines()) < 2:
                time.sleep(0.05)
            os.kill(os.getpid(), number)
        assert [each.result(timeout=30) for each in running] == [128 + number] * 2
    assert processes.run(CHILD) == 128 + number


def test_sighup_that_is_ignored_stays_ignored(sighup):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    processes = Processes()
    with processes.ended_by_signals():
        os.kill(os.getpid(), signal.SIGHUP)
    assert not processes.exit_code


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.003])
def test_sigterm_at_the_start_of_a_training_ends_it(delay_s):
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGTERM))
    processes, started = Processes(), time.monotonic()
    with processes.ended_by_signals():
        timer.start()
        codes = [processes.run(CHILD) for _ in range(2)]
        timer.join()
    assert codes == [128 + signal.SIGTERM] * 2
    assert time.monotonic() - started < 30


def test_training_that_fails_raises_its_exit_code():
    with pytest.raises(subprocess.CalledProcessError) as error:
        run_training([sys.executable, "-c", "raise SystemExit(3)"])
    assert error.value.returncode == 3
    run_training([sys.executable, "-c", ""])


def test_output_goes_to_a_file(tmp_path):
    command = [sys.executable, "-c", "import sys; print('a'); print('b', file=sys.stderr)"]
    with open(tmp_path / "log", "w") as output:
        assert Processes().run(command, output) == 0
    assert sorted((tmp_path / "log").read_text().split()) == ["a", "b"]
