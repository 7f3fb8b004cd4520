"""What a process uses of its machine."""

import os
import sys

import pytest

from flowrl.process_usage import _own_memory_file, resident_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_memory_is_read_again_after_the_file_was_closed():
    before = resident_bytes()
    assert before > 0
    os.close(_own_memory_file(os.getpid()))
    assert resident_bytes() == pytest.approx(before, rel=0.1)
