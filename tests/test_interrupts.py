"""Signals that are delayed until a block has ended."""

import signal
import threading

import numpy as np
import pytest

from flowrl.data import SampleBatch
from flowrl.interrupts import delayed_interrupts
from flowrl.replay import ReplayBuffer


def test_signal_in_a_block_is_handled_at_its_end():
    steps = []

    def interrupted():
        with delayed_interrupts():
            signal.raise_signal(signal.SIGINT)
            steps.append("after the signal")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert steps
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ignored_signals_and_other_threads_are_left_alone():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with delayed_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    found = []

    def in_thread():
        with delayed_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert found == [before]


def test_interrupt_while_rows_are_stored_leaves_a_whole_buffer(monkeypatch):
    buffer = ReplayBuffer(8, seed=0)
    store = buffer._store

    def interrupted(batches, counts):
        signal.raise_signal(signal.SIGINT)
        store(batches, counts)

    monkeypatch.setattr(buffer, "_store", interrupted)
    obs = np.arange(3.0)
    rows = SampleBatch(obs=obs, new_obs=obs + 1, rewards=np.ones(3, np.float32))
    with pytest.raises(KeyboardInterrupt):
        buffer.add(rows)
    assert len(buffer) == 3
    copy = ReplayBuffer(8, seed=0)
    copy.load_state_dict(buffer.state_dict())
    np.testing.assert_array_equal(np.sort(copy.sample(64)["obs"])[[0, -1]], [0.0, 2.0])
