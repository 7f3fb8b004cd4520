"""What a process uses of its machine."""

import os
import sys

import pytest

from flowrl import process_usage
from flowrl.process_usage import _own_memory_file, resident_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_memory_is_read_again_after_the_file_was_closed():
    before = resident_bytes()
    assert before > 0
    os.close(_own_memory_file(os.getpid()))
    assert resident_bytes() == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({"max": "200000 100000"}, 2),
        ({"max": "150000 100000"}, 2),
        ({"max": "50000 100000"}, 1),
        ({"max": "max 100000"}, 16),
        ({"quota": "300000", "period": "100000"}, 3),
        ({"quota": "-1", "period": "100000"}, 16),
        ({}, 16),
    ],
)
def test_cores_of_a_container_are_limited(tmp_path, monkeypatch, texts, expected):
    for name, text in texts.items():
        (tmp_path / name).write_text(f"{text}\n")
    files = (str(tmp_path / "max"),), (str(tmp_path / "quota"), str(tmp_path / "period"))
    monkeypatch.setattr(process_usage, "_CPU_QUOTAS", files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    process_usage._cpu_quota.cache_clear()
    try:
        assert process_usage.num_cores() == expected
    finally:
        process_usage._cpu_quota.cache_clear()
