"""States of remote workers: a worker that hangs is not waited for twice."""

import logging
import os
import signal
from types import SimpleNamespace

import pytest
import ray

from flowrl.sampling import WorkerSet
from flowrl.sampling.worker_calls import WorkerCalls

from .fakes import CountEnv, Idle


@pytest.mark.slow
def test_state_of_a_hanging_worker_is_left_out_and_not_waited_for_again(ray_session, caplog):
    config = {"sample_timeout_s": 5.0, "rollout_fragment_length": 4}
    with WorkerSet(lambda context: CountEnv(3), Idle, config, num_workers=2) as workers:
        pids = workers.foreach_worker(lambda worker: os.getpid())[1:]
        assert all(workers.state_dict()["remote"])
        caplog.set_level(logging.WARNING, "flowrl")
        os.kill(pids[0], signal.SIGSTOP)
        try:
            for problem in ("no answer in 5 s", "has not answered an earlier call either"):
                caplog.clear()
                first, second = workers.state_dict()["remote"]
                assert first is None
                assert second is not None
                assert "worker 1 returned no state" in caplog.text
                assert problem in caplog.text
        finally:
            os.kill(pids[0], signal.SIGCONT)
        ray.get(workers.remote_workers()[0].apply.remote(id))  # it has answered
        assert all(workers.state_dict()["remote"])


def test_worker_that_has_returned_a_fragment_is_not_starting(monkeypatch):
    limits = []

    class Actor:
        def __init__(self):
            self.apply = SimpleNamespace(remote=lambda fn: self)

    def get(ref, timeout):
        limits.append(round(timeout))
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([], refs))
    actors = [Actor(), Actor()]
    assert WorkerCalls(15.0).get_states(actors, {1: 100}) == [None, None]
    assert limits == [75, 15]
