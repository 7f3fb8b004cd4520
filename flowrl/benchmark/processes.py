"""Processes: the processes that a benchmark trains in, which end with it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from flowrl.trainer.runs.signal_handler import ENDED_BY_SIGNAL, INTERRUPTED


class Processes:
    """Runs processes, and ends them on SIGTERM and SIGHUP. Ctrl-C reaches them without help.

    Attributes:
        exit_code: 128 + number of the signal that ended the processes; 0 if there was none. After a
            signal, no other process may start.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, command: list[str], output: IO[Any] | None = None) -> int:
        """Run a process until it ends; return its exit code, or `exit_code` after a signal.

        Args:
            command: the program and its arguments.
            output: file for stdout and stderr; None: those of this process.
        """
        process = subprocess.Popen(command, stdout=output, stderr=output)
        self._running.add(process)
        try:
            if self.exit_code:
                process.terminate()
            code = process.wait()
        except KeyboardInterrupt:
            self.exit_code = INTERRUPTED
            process.wait()
        finally:
            self._running.discard(process)
        return self.exit_code or code

    @contextmanager
    def ended_by_signals(self) -> Iterator[None]:
        """On SIGTERM, or SIGHUP of a closed terminal, end the running processes by SIGTERM, and
        start no other; for the main thread. A SIGHUP that is ignored (nohup) stays ignored."""

        def end(number: int, frame: Any) -> None:
            self.exit_code = 128 + number
            for process in tuple(self._running):
                process.terminate()

        handled = [signal.SIGTERM, signal.SIGHUP]
        before = {one: signal.getsignal(one) for one in handled}
        for one in handled:
            if before[one] is not signal.SIG_IGN:
                signal.signal(one, end)
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


def run_training(command: list[str]) -> None:
    """Run a training from the main thread until it ends.

    Raises:
        subprocess.CalledProcessError: the training failed.
        SystemExit: Ctrl-C, SIGTERM or SIGHUP ended it; the training has saved a checkpoint.
    """
    processes = Processes()
    with processes.ended_by_signals():
        code = processes.run(command)
    if code in ENDED_BY_SIGNAL:
        raise SystemExit(code)
    if code:
        raise subprocess.CalledProcessError(code, command)
