"""Fixtures: the two execution modes, one Ray instance per session."""

import gc
import os
from pathlib import Path

import hypothesis
import pytest

from tests.fault_cases import FAULTS

TESTS = Path(__file__).parent

# the time of an example depends on the other processes of the machine
hypothesis.settings.register_profile("flowrl", deadline=None)
hypothesis.settings.load_profile("flowrl")

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")


# Ray's buffer of task events grows in each process and would disturb memory measurements
os.environ.setdefault("RAY_task_events_report_interval_ms", "0")


@pytest.fixture(scope="session")
def ray_session():
    """Start one local Ray for all tests that use actors."""
    import ray

    from flowrl.iter.private_api import without_dashboard

    options = {"include_dashboard": False, "logging_level": "WARNING", "log_to_driver": False}
    with without_dashboard():
        ray.init("local", num_cpus=4, **options)
    yield ray
    ray.shutdown()


@pytest.fixture(params=[0, 2], ids=["in_process", "two_actors"])
def num_workers(request):
    """Return 0 (in process) or 2 (on Ray actors)."""
    if request.param:
        request.getfixturevalue("ray_session")
    return request.param


def pytest_collection_finish():
    """Let Python's garbage collection visit the objects of imported modules less often: that was
    a tenth of the time of the tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)


def pytest_collection_modifyitems(items):
    """Mark the actors' case of tests with `slow_on_actors` as slow, and the tests of faults as
    chaos."""
    tests_of_faults = {test for case in FAULTS for test in case.tests}
    for item in items:
        path = item.path.relative_to(TESTS) if item.path.is_relative_to(TESTS) else item.path
        if f"{path}::{getattr(item, 'originalname', None)}" in tests_of_faults:
            item.add_marker(pytest.mark.chaos)
        if "two_actors" in item.name and item.get_closest_marker("slow_on_actors"):
            item.add_marker(pytest.mark.slow)
