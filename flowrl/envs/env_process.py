"""EnvProcess: a process that calls the methods of an object on request."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import random
import select
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from flowrl.errors import add_note

CLOSE_S = 5.0  # seconds in which objects must close
_NUMBER_BYTES = 8  # at the start of a message


class EnvProcessError(RuntimeError):
    """The process of an environment ended unexpectedly."""


class EnvProcess:
    """A process that calls the methods of an object on request.

    It is a fork of the calling process, so the object is not pickled; arguments and results are. It
    ends with the calling process. It ignores the signals that end programs, so that the calling
    process alone decides what they do.

    Args:
        name: name of the object, for messages.
        make_object: creates the object, which has a method `close`; called in the process. The
            first `receive()` returns None or raises the exception of this call.
        seed: of the global random generators of Python, numpy and torch in the process; None seeds
            them from the operating system.
    """

    def __init__(self, name: str, make_object: Callable[[], Any], seed: int | None):
        self._name = name
        context = multiprocessing.get_context("fork")
        self._connection, other_end = context.Pipe()
        self._process = context.Process(
            target=_run, args=(other_end, make_object, seed, os.getpid()), name=name, daemon=False
        )
        self._process.start()
        other_end.close()
        self._number = 0  # of the last request
        self._is_broken = False  # a message was not read or written to its end
        self._poll = select.poll()
        self._poll.register(self._connection, select.POLLIN)
        self._pidfd = _open_pidfd(self._process.pid)
        if self._pidfd is not None:  # a process that it started may keep the connection open
            self._poll.register(self._pidfd, select.POLLIN)
        self._finalizer = weakref.finalize(self, _kill, self._process, os.getpid(), self._pidfd)
        self._finalizer.atexit = False
        _RUNNING.add(self)

    def send(self, method: str, *args: Any) -> None:
        """Request the call of a method.

        Raises:
            EnvProcessError: the process has ended.
        """
        self._number += 1
        request = pickle.dumps((self._number, method, args), pickle.HIGHEST_PROTOCOL)
        self._transfer(self._connection.send_bytes, request)

    def receive(self) -> Any:
        """Wait for the result of the last request; drop those of interrupted ones.

        Raises:
            EnvProcessError: the process has ended.
            Exception: the call raised it.
        """
        number, reply = -1, b""
        while number != self._number:
            ready = self._poll.poll()
            if all(file == self._pidfd for file, _ in ready):
                raise self._death()
            reply = self._transfer(self._connection.recv_bytes)
            number = int.from_bytes(reply[:_NUMBER_BYTES], "little")
        if len(reply) == _NUMBER_BYTES:
            return None
        result, failure = pickle.loads(reply[_NUMBER_BYTES:])
        if failure is not None:
            raise _error_of(failure, self._name)
        return result

    def _transfer(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the connection; note if it is interrupted in the middle of a message."""
        if self not in _RUNNING:
            raise EnvProcessError(f"the process of {self._name} was closed")
        if self._is_broken and self._process.is_alive():
            self._process.kill()
            self._wait(None)
            raise EnvProcessError(f"the process of {self._name} was ended: a call was interrupted")
        self._is_broken = True
        try:
            result = function(*args)
        except (EOFError, OSError) as error:
            raise self._death() from error
        self._is_broken = False
        return result

    def _death(self) -> EnvProcessError:
        self._is_broken = True
        self._wait(CLOSE_S)
        code = self._process.exitcode
        reason = f"exit code {code}"
        if code is not None and code < 0:
            reason = signal.Signals(-code).name
            if -code == signal.SIGKILL:
                reason += ", perhaps for lack of memory"
        return EnvProcessError(f"the process of {self._name} ended unexpectedly ({reason})")

    def _wait(self, seconds: float | None) -> None:
        """Wait until the process has ended."""
        if self._pidfd is None:
            self._process.join(seconds)
        else:  # join() waits for a pipe, which a process that it started may keep open
            _wait_until_readable(self._pidfd, seconds)

    def close(self, deadline: float | None = None) -> None:
        """Close the object and end the process; kill it if that takes too long.

        Args:
            deadline: time.monotonic() until which the object must have closed; None: CLOSE_S
                seconds from now.
        """
        if self not in _RUNNING:
            return
        self._request_close()
        deadline = time.monotonic() + CLOSE_S if deadline is None else deadline
        self._wait(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._wait(None)
        _RUNNING.discard(self)
        self._finalizer()
        self._connection.close()
        self._process.close()

    def _request_close(self) -> None:
        with suppress(OSError):
            self._connection.send_bytes(b"")


def close_all(processes: Sequence[EnvProcess]) -> None:
    """Close the objects of several processes at the same time."""
    for process in processes:
        process._request_close()
    deadline = time.monotonic() + CLOSE_S
    for process in processes:
        process.close(deadline)


_RUNNING: weakref.WeakSet[EnvProcess] = weakref.WeakSet()


def _kill(process: BaseProcess, parent: int, exit_file: int | None) -> None:
    """Kill a process and close its descriptor, unless this is a fork of its parent."""
    if os.getpid() != parent:
        return
    if process.is_alive():
        process.kill()
        process.join(CLOSE_S)
    if exit_file is not None:
        os.close(exit_file)


@atexit.register  # multiprocessing would wait for the processes
def _kill_all() -> None:
    for running in list(_RUNNING):
        _kill(running._process, os.getpid(), None)


def _open_pidfd(pid: int | None) -> int | None:
    """Return a descriptor that is readable once a process has ended; None if there is none."""
    with suppress(OSError, AttributeError):  # Python may be built without the function
        return os.pidfd_open(pid) if pid is not None else None
    return None


def _wait_until_readable(file: int, seconds: float | None = None) -> None:
    poll = select.poll()
    poll.register(file, select.POLLIN)
    poll.poll(None if seconds is None else 1000 * seconds)


# -- in the process --------------------------------------------------------------------------------


def _run(
    connection: Connection, make_object: Callable[[], Any], seed: int | None, parent: int
) -> None:
    """Create an object and call its methods until a request is empty."""
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)
    for other in list(_RUNNING):  # those of the parent
        other._finalizer.detach()
    _RUNNING.clear()
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    _seed_generators(seed)
    number = 0
    try:
        called = make_object()
    except Exception as error:
        connection.send_bytes(_reply_of_error(number, error))
        return
    connection.send_bytes(_reply(number, "", None))
    while request := _next_request(connection):
        number, method, args = pickle.loads(request)
        try:
            reply = _reply(number, method, getattr(called, method)(*args))
        except Exception as error:
            reply = _reply_of_error(number, error)
        connection.send_bytes(reply)
    called.close()


def _next_request(connection: Connection) -> bytes:
    """Wait for a request; an empty one ends the process, as does the end of the connection."""
    try:
        return connection.recv_bytes()
    except EOFError:
        return b""


def _seed_generators(seed: int | None) -> None:
    """Seed the global random generators, and limit torch to one thread: its other threads do not
    exist in a fork."""
    random.seed(seed)
    np.random.seed(seed)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
        if seed is None:
            torch.seed()
        else:
            torch.manual_seed(seed)


def _exit_with(parent: int) -> None:
    """Wait until the parent process ends, and exit, even if the main thread hangs."""
    file = _open_pidfd(parent)
    if file is not None:
        _wait_until_readable(file)
    else:
        while os.getppid() == parent:
            time.sleep(1)
    os._exit(1)


def _reply(number: int, method: str, result: Any) -> bytes:
    """Return the reply with the result of a method."""
    head = number.to_bytes(_NUMBER_BYTES, "little")
    if result is None:
        return head
    try:
        return head + pickle.dumps((result, None), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        add_note(
            error,
            f'raised while the result of {method}() was pickled: vectorization_mode="async" needs '
            "spaces, observations and infos that can be pickled",
        )
        raise


def _reply_of_error(number: int, error: Exception) -> bytes:
    """Return the reply that raises an error. It has the error in pieces, because its class may not
    exist in the parent process."""
    lines = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    notes = getattr(error, "__notes__", [])
    failure = pickle.dumps(portable(error)), _text_of(error), list(notes), lines
    return number.to_bytes(_NUMBER_BYTES, "little") + pickle.dumps((None, failure))


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def portable(error: Exception) -> Exception:
    """Return an error that can be pickled: itself, or a RuntimeError with its text and notes."""
    with suppress(Exception):
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    return _plain_error(_text_of(error), getattr(error, "__notes__", []))


def _plain_error(text: str, notes: Sequence[str]) -> Exception:
    error = RuntimeError(text)
    for note in notes:
        add_note(error, note)
    return error


def _error_of(failure: tuple[bytes, str, list[str], str], name: str) -> Exception:
    """Return the error of a reply; a RuntimeError with its text if its class cannot be imported."""
    pickled, text, notes, lines = failure
    try:
        error: Exception = pickle.loads(pickled)
    except Exception:
        error = _plain_error(text, notes)
    add_note(error, f"traceback in the process of {name}:\n{lines}")
    return error
