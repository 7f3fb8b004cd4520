"""EnvProcess: a process that calls the methods of an object on request."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import select
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

CLOSE_S = 5.0  # seconds in which an object must close


class EnvProcessError(RuntimeError):
    """The process of an environment ended unexpectedly."""


class EnvProcess:
    """A process that calls the methods of an object on request.

    It is a fork of the calling process, so the object is not pickled; arguments and results are. It
    ends with the calling process, and ignores SIGINT, so that the calling process alone decides
    what Ctrl-C does.

    Args:
        name: of what the process runs, for messages.
        make_object: () -> an object with a method `close`; called in the process. The first result
            to receive is None, or the exception that it raised.
        seed: of Python's and numpy's global random generators in the process; None seeds them from
            the operating system.
    """

    def __init__(self, name: str, make_object: Callable[[], Any], seed: int | None):
        self._name = name
        context = multiprocessing.get_context("fork")
        self._connection, other_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other_end, make_object, seed, os.getpid()), name=name, daemon=True
        )
        self._process.start()
        other_end.close()
        self._num_expected = 1  # results that were not received yet

    def send(self, method: str, *args: Any) -> None:
        """Request the call of a method.

        Raises:
            EnvProcessError: the process has ended.
        """
        while self._num_expected:  # the caller was interrupted before it received them
            self._receive()
        try:
            self._connection.send_bytes(pickle.dumps((method, args), pickle.HIGHEST_PROTOCOL))
        except OSError as error:
            raise self._death() from error
        self._num_expected += 1

    def receive(self) -> Any:
        """Wait for the result of the call.

        Raises:
            EnvProcessError: the process has ended.
            Exception: the call raised it.
        """
        data = self._receive()
        if not data:
            return None
        result, error, lines = pickle.loads(data)
        if error is not None:
            raise error from RuntimeError(f"in the process of {self._name}:\n{lines}")
        return result

    def _receive(self) -> bytes:
        try:
            data = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._death() from error
        self._num_expected -= 1
        return data

    def _death(self) -> EnvProcessError:
        self._process.join(CLOSE_S)
        code = self._process.exitcode
        signal_name = signal.Signals(-code).name if code is not None and code < 0 else None
        reason = signal_name or f"exit code {code}"
        return EnvProcessError(f"the process of {self._name} ended unexpectedly ({reason})")

    def close(self) -> None:
        """Close the object and end the process, which is killed if that takes over CLOSE_S."""
        with suppress(OSError):
            self._connection.send_bytes(b"")
        self._process.join(CLOSE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()


def _serve(
    connection: Connection, make_object: Callable[[], Any], seed: int | None, parent: int
) -> None:
    """Create an object and call its methods until a request is empty."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    random.seed(seed)
    np.random.seed(seed)  # environments may use the global generators
    try:
        served = make_object()
    except Exception as error:
        connection.send_bytes(_pickled_error(error))
        return
    connection.send_bytes(b"")
    while request := connection.recv_bytes():
        method, args = pickle.loads(request)
        try:
            result = getattr(served, method)(*args)
            data = b"" if result is None else _pickled_result(result, method)
        except Exception as error:
            data = _pickled_error(error)
        connection.send_bytes(data)
    served.close()


def _exit_with(parent: int) -> None:
    """Wait until the parent process ends, and exit, even if the main thread hangs."""
    with suppress(ProcessLookupError):
        poll = select.poll()
        poll.register(os.pidfd_open(parent), select.POLLIN)
        poll.poll()
    os._exit(1)


def _pickled_result(result: Any, method: str) -> bytes:
    try:
        return pickle.dumps((result, None, ""), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        error.add_note(f"raised while the result of {method}() was pickled")
        raise


def _pickled_error(error: Exception) -> bytes:
    lines = "".join(traceback.format_exception(error))
    return pickle.dumps((None, portable(error), lines))


def portable(error: Exception) -> Exception:
    """Return an error that can be pickled: itself, or a RuntimeError with its message and notes."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", []):
            plain.add_note(note)
        return plain
