"""Spare processes become the replacements of workers that die."""

import os
import signal
import time

import pytest

from flowrl.algorithms.ppo import PPOConfig
from flowrl.errors import ConfigError
from flowrl.iter.recovery import ConstructorError
from flowrl.sampling.callbacks import DefaultCallbacks
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.spare_worker import SpareWorkers

SMALL = {"env": "CartPole-v1", "train_batch_size": 64, "sgd_minibatch_size": 32, "num_sgd_iter": 1}


def pid_of(worker):
    return os.getpid()


@pytest.mark.slow
def test_replacement_is_the_spare_process(ray_session):
    config = PPOConfig(**SMALL, num_workers=2, num_spare_workers=1, seed=1)
    with config.build() as algorithm:
        algorithm.train()
        workers = algorithm.workers
        first, second = workers.remote_workers()
        classes = [worker.apply.remote(lambda w: type(w).__name__) for worker in (first, second)]
        assert ray_session.get(classes) == ["RolloutWorker"] * 2
        (spare,) = workers._spares._actors
        os.kill(ray_session.get(first.apply.remote(pid_of)), signal.SIGKILL)
        while workers.remote_workers()[0] is first:
            algorithm.train()
        replacement = workers.remote_workers()[0]
        assert replacement is spare
        assert workers.remote_workers()[1] is second
        assert len(workers._spares._actors) == 1
        settings = ray_session.get(
            replacement.apply.remote(
                lambda w: (w.worker_index, w.restart_count, w.policy.num_workers)
            )
        )
        assert settings == (1, 1, 2)
        steps = algorithm.env_steps
        counters = algorithm.train()["info"]
        assert counters["num_env_steps_sampled"] > steps
        assert workers.env_steps_by_worker[0] > 0


@pytest.mark.slow
def test_error_of_a_spare_process_names_its_cause(ray_session):
    def broken(context):
        raise OSError("no simulator on this machine")

    spares = SpareWorkers(1)
    arguments = {"env_creator": broken, "policy_spec": None, "policy_config": {}}
    spares.start(arguments)
    assert spares.take(1, 0, 2) is not None
    spares.start(arguments)
    actor = spares.take(1, 0, 2)
    with pytest.raises(ConstructorError, match="OSError: no simulator on this machine"):
        ray_session.get(actor.apply.remote(pid_of))
    assert spares.take(1, 0, 2) is None
    spares.stop()


class FailingReplacement(DefaultCallbacks):
    """Raises when the environment of a worker's first or second replacement is created."""

    def on_sub_environment_created(self, *, worker, **kwargs):
        if worker.restart_count in (1, 2):
            raise OSError(f"port {worker.restart_count} is in use")


@pytest.mark.slow
def test_spare_process_that_cannot_become_a_worker_is_replaced(ray_session, caplog):
    config = PPOConfig(
        **SMALL, num_workers=2, num_spare_workers=1, seed=1, callbacks_class=FailingReplacement
    )
    with config.build() as algorithm:
        algorithm.train()
        workers = algorithm.workers
        first = workers.remote_workers()[0]
        os.kill(ray_session.get(first.apply.remote(pid_of)), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while workers.restart_counts[0] < 3 or 0 not in workers.env_steps_by_worker:
            algorithm.train()
            assert time.monotonic() < deadline
        assert (workers.restart_counts[0], workers.failed) == (3, set())
        assert "OSError: port 1 is in use" in caplog.text


def test_spares_take_no_resources_and_are_refused_with_them():
    for settings in (
        {"num_gpus_per_worker": 1},
        {"custom_resources_per_worker": {"simulator": 1}},
        {"placement_strategy": "SPREAD"},
    ):
        (name,) = settings
        with pytest.raises(ConfigError, match=f"num_spare_workers: not supported with {name}"):
            PPOConfig(**SMALL, num_spare_workers=1, **settings)


def test_settings_are_those_of_the_recovery():
    recovery = PPOConfig(wait_for_replaced_workers=True, sample_timeout_s=3.0).recovery
    assert (recovery.rounds_wait_for_replacement, recovery.timeout_s) == (True, 3.0)
    assert not PPOConfig().recovery.rounds_wait_for_replacement


def test_worker_in_process_has_no_spares():
    with PPOConfig(**SMALL, num_spare_workers=2).build() as algorithm:
        algorithm.train()
        assert algorithm.workers._spares._actors == []
        assert type(algorithm.workers.local_worker()) is RolloutWorker
