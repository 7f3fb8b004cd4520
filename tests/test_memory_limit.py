"""Settings that ask for more memory than the machine has are refused."""

import os

import pytest

from flowrl import memory_limit
from flowrl.errors import ConfigError
from flowrl.memory_limit import GIB, check_memory, machine_memory


def test_memory_of_the_machine_is_at_most_what_the_system_reports():
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < machine_memory() <= physical


def test_limit_of_a_container_counts(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1073741824\n")
    (tmp_path / "unlimited").write_text("max\n")
    files = [str(tmp_path / name) for name in ("memory.max", "unlimited", "missing")]
    monkeypatch.setattr(memory_limit, "_CGROUP_LIMITS", files)
    assert machine_memory() == GIB


def test_message_names_the_setting_and_both_sizes(monkeypatch):
    monkeypatch.setattr(memory_limit, "machine_memory", lambda: 8 * GIB)
    check_memory(8 * GIB, "lr=1: rows")
    message = "lr=1: rows: this needs 9.0 GiB of memory, and this machine has 8.0 GiB"
    with pytest.raises(ConfigError, match=message):
        check_memory(9 * GIB, "lr=1: rows")
