"""Buffers in files: the same draws as in memory, no files left, a full disk is told."""

import copy
import errno
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms.dqn import DQNConfig
from flowrl.data import SampleBatch
from flowrl.data.memmap import MemmapArrays
from flowrl.policies import ConfigError
from flowrl.replay import PrioritizedReplayBuffer, ReplayBuffer

KINDS = {
    "rows": (ReplayBuffer, {"n_step": 3}),
    "prioritized": (PrioritizedReplayBuffer, {}),
    "sequences": (ReplayBuffer, {"storage_unit": "sequences", "max_seq_len": 4, "burn_in": 2}),
}


def fragment(rng, first, rows):
    """Rows of one environment whose episodes last 7 steps; nested observations."""
    steps = np.arange(first, first + rows)
    seen = rng.standard_normal((rows + 1, 2)).astype(np.float32)
    flags = rng.integers(0, 5, (rows + 1, 3)).astype(np.uint8)
    return SampleBatch(
        obs={"at": seen[:-1], "seen": flags[:-1]},
        new_obs={"at": seen[1:], "seen": flags[1:]},
        actions=rng.integers(0, 2, rows),
        rewards=rng.standard_normal(rows).astype(np.float32),
        terminateds=steps % 7 == 6,
        truncateds=np.zeros(rows, bool),
        eps_id=steps // 7,
        t=steps % 7,
    )


def columns(batch):
    flat = {}
    for name, column in dict(batch.stored()).items():
        parts = column.items() if isinstance(column, dict) else [("", column)]
        flat |= {f"{name}/{key}": np.asarray(part) for key, part in parts}
    return flat


def check_alike(one, other):
    one, other = columns(one), columns(other)
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_it_draws_as_one_in_memory(kind, sizes, seed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    made, more = KINDS[kind]
    plain = made(100, seed=seed, **more)
    mapped = made(100, seed=seed, directory=folder, **more)
    first = 0
    for i, size in enumerate(sizes):
        rng = np.random.default_rng((seed, i))
        batch = fragment(rng, first, size)
        first += size
        for buffer in (plain, mapped):
            buffer.add(batch)
        check_alike(plain.sample(5), mapped.sample(5))
        if i == len(sizes) // 2:  # both go on from what the one in files has saved
            state = mapped.state_dict()
            plain = made(100, seed=0, **more)
            plain.load_state_dict(state)
            again = made(100, seed=0, directory=folder, **more)
            again.load_state_dict(state)
            mapped = again
    assert not list(folder.iterdir())  # the files have no names


def test_its_rows_are_in_files(tmp_path):
    buffer = ReplayBuffer(10_000, directory=tmp_path)
    buffer.add(fragment(np.random.default_rng(0), 0, 50))
    buffer.sample(1)
    places = [leaf.ctypes.data for leaf in buffer._ring.columns["obs"]]
    spans = []
    with open("/proc/self/maps") as file:
        for line in file:
            span, *_, name = line.split(maxsplit=5)
            if str(tmp_path) in name:
                begin, end = (int(part, 16) for part in span.split("-"))
                spans.append((begin, end))
    assert all(any(begin <= at < end for begin, end in spans) for at in places)


def test_nothing_is_left_of_a_process_that_was_killed(tmp_path):
    program = f"""
import os, signal; import numpy as np
from tests.data.test_memmap import fragment
from flowrl.replay import ReplayBuffer
buffer = ReplayBuffer(1000, directory={str(tmp_path)!r})
buffer.add(fragment(np.random.default_rng(0), 0, 500))
buffer.sample(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -9
    assert not list(tmp_path.iterdir())


def test_room_is_taken_before_it_is_written(tmp_path):
    """A write into a file for which the disk has no room ends a process: rows that are there, and
    spare places that are used, have theirs."""
    buffer = ReplayBuffer(100, directory=tmp_path)
    rng = np.random.default_rng(0)
    for i in range(30):
        buffer.add(fragment(rng, 17 * i, 17))
        buffer.sample(1)
        ring = buffer._ring
        used = [
            *range(ring.rows),
            *ring._following[: ring.rows][ring._following[: ring.rows] >= 100],
        ]
        leaf = ring.columns["obs"][0]
        file = ring._mapped._files[leaf.ctypes.data]
        blocks = os.fstat(file.fileno()).st_blocks * 512
        pages = {int(at) * leaf.strides[0] // 4096 for at in used}
        assert blocks >= 4096 * len(pages)


def full(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    buffer = ReplayBuffer(1000, directory=tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no disk space for") as told:
        buffer.add(fragment(np.random.default_rng(0), 0, 50))
    assert told.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(told.value)


def test_units_whose_rows_have_no_room_are_not_there(tmp_path, monkeypatch):
    more = {"storage_unit": "sequences", "max_seq_len": 5}
    buffer = ReplayBuffer(1000, directory=tmp_path, **more)
    rng = np.random.default_rng(0)
    buffer.add(fragment(rng, 0, 50))
    there = buffer._items()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        buffer.add(fragment(rng, 50, 50))  # which waits to be stored with others
        with pytest.raises(OSError, match="no disk space"):
            buffer.sample(1)
    assert buffer._items() == there
    buffer.add(fragment(rng, 100, 50))
    assert set(buffer.sample(200)["batch_indexes"].tolist()) <= set(range(2 * there[1] + 2))


def test_a_copy_has_files_of_its_own(tmp_path):
    buffer = ReplayBuffer(100, seed=0, directory=tmp_path)
    rng = np.random.default_rng(0)
    buffer.add(fragment(rng, 0, 150))
    for other in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        expected = buffer.rows(np.arange(50, 150))
        other.add(fragment(rng, 150, 60))
        other.sample(1)
        check_alike(expected, buffer.rows(np.arange(50, 150)))
        check_alike(buffer.rows(np.arange(120, 149)), other.rows(np.arange(120, 149)))


def test_objects_are_refused_and_nothing_is_half_done(tmp_path):
    buffer = ReplayBuffer(100, directory=tmp_path)
    rng = np.random.default_rng(0)
    names = np.array([None] * 20, object)
    with pytest.raises(ValueError, match="'names' holds objects"):
        buffer.add(fragment(rng, 0, 20).with_columns(names=names))
    buffer.add(fragment(rng, 0, 20))
    assert "rewards" in buffer.sample(3)


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        ReplayBuffer(10, directory=tmp_path / "file" / "rows")
    assert MemmapArrays(tmp_path).empty((3, 0), np.float32).shape == (3, 0)


def test_the_setting_has_an_effect(tmp_path):
    config = DQNConfig(env="CartPole-v1", replay_buffer_dir=str(tmp_path / "rows"))
    assert config.new_buffer()._ring._mapped.directory == tmp_path / "rows"
    assert DQNConfig().new_buffer()._ring._mapped is None
    (tmp_path / "file").write_text("")
    for wrong in (str(tmp_path / "file"), "s3://bucket/rows"):
        with pytest.raises(ConfigError, match="replay_buffer_dir"):
            config.updated(replay_buffer_dir=wrong).build()
    with pytest.raises(ConfigError, match="replay_buffer_dir: it cannot be written"):
        config.updated(replay_buffer_dir="/proc/none").new_buffer()
