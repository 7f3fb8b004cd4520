"""Exceptions of signals that are delayed until a block has ended."""

import signal
import threading

import numpy as np
import pytest

from flowrl.data import SampleBatch
from flowrl.interrupts import delayed_interrupts
from flowrl.replay import ReplayBuffer
from flowrl.trainer.runs import signal_handler
from flowrl.trainer.runs.signal_handler import SignalHandler


def interrupt():
    raise KeyboardInterrupt


def test_interrupt_in_a_block_is_raised_at_its_end():
    steps = []

    def interrupted():
        with delayed_interrupts:
            with delayed_interrupts:
                delayed_interrupts.call(interrupt)
            steps.append("after the inner block")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert steps
    with delayed_interrupts:  # nothing is left
        pass
    with pytest.raises(KeyboardInterrupt):
        delayed_interrupts.call(interrupt)


def test_block_of_another_thread_delays_nothing():
    entered, leave = threading.Event(), threading.Event()

    def in_thread():
        with delayed_interrupts:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=in_thread)
    thread.start()
    entered.wait()
    with pytest.raises(KeyboardInterrupt):
        delayed_interrupts.call(interrupt)
    leave.set()
    thread.join()


def test_signals_while_rows_are_stored_leave_a_whole_buffer(monkeypatch):
    monkeypatch.setattr(signal_handler, "DUPLICATE_SIGNAL_S", 0.0)
    buffer = ReplayBuffer(8, seed=0)
    store = buffer._store

    def interrupted(batches, counts):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        store(batches, counts)

    monkeypatch.setattr(buffer, "_store", interrupted)
    obs = np.arange(3.0)
    rows = SampleBatch(obs=obs, new_obs=obs + 1, rewards=np.ones(3, np.float32))
    with SignalHandler(), pytest.raises(KeyboardInterrupt):
        buffer.add(rows)
    assert len(buffer) == 3
    copy = ReplayBuffer(8, seed=0)
    copy.load_state_dict(buffer.state_dict())
    np.testing.assert_array_equal(np.sort(copy.sample(64)["obs"])[[0, -1]], [0.0, 2.0])
