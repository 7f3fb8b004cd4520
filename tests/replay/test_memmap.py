"""Replay buffers in files: draws as in memory, unlinked files, errors for a full disk."""

import contextlib
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
from tests.replay.streams import FragmentStream, check_stacks, with_stacks

KINDS = {
    "rows": (ReplayBuffer, {"n_step": 3}),
    "prioritized": (PrioritizedReplayBuffer, {}),
    "sequences": (ReplayBuffer, {"storage_unit": "sequences", "max_seq_len": 4, "burn_in": 2}),
}


def fragment(rng, first, rows):
    """Return rows with nested observations, of an environment whose episodes last 7 steps."""
    steps = np.arange(first, first + rows)
    positions = rng.standard_normal((rows + 1, 2)).astype(np.float32)
    flags = rng.integers(0, 5, (rows + 1, 3)).astype(np.uint8)
    return SampleBatch(
        obs={"position": positions[:-1], "flags": flags[:-1]},
        new_obs={"position": positions[1:], "flags": flags[1:]},
        actions=rng.integers(0, 2, rows),
        rewards=rng.standard_normal(rows).astype(np.float32),
        terminateds=steps % 7 == 6,
        truncateds=np.zeros(rows, bool),
        eps_id=steps // 7,
        t=steps % 7,
    )


def leaves(batch):
    arrays = {}
    for name, column in dict(batch.stored()).items():
        parts = column.items() if isinstance(column, dict) else [("", column)]
        arrays |= {f"{name}/{key}": np.asarray(part) for key, part in parts}
    return arrays


def assert_same(batch, expected):
    batch, expected = leaves(batch), leaves(expected)
    assert batch.keys() == expected.keys()
    for name in batch:
        np.testing.assert_array_equal(batch[name], expected[name])


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_buffer_in_files_draws_like_one_in_memory(kind, sizes, seed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    make, arguments = KINDS[kind]
    in_memory = make(100, seed=seed, **arguments)
    in_files = make(100, seed=seed, directory=folder, **arguments)
    first = 0
    for i, size in enumerate(sizes):
        rng = np.random.default_rng((seed, i))
        batch = fragment(rng, first, size)
        first += size
        for buffer in (in_memory, in_files):
            buffer.add(batch)
        assert_same(in_memory.sample(5), in_files.sample(5))
        if i == len(sizes) // 2:  # restore both from the state of the buffer in files
            state = in_files.state_dict()
            in_memory = make(100, seed=0, **arguments)
            in_memory.load_state_dict(state)
            restored = make(100, seed=0, directory=folder, **arguments)
            restored.load_state_dict(state)
            in_files = restored
    assert not list(folder.iterdir())  # the files are unlinked


def test_rows_are_in_files(tmp_path):
    buffer = ReplayBuffer(10_000, directory=tmp_path)
    buffer.add(fragment(np.random.default_rng(0), 0, 50))
    (position, flags) = buffer.state_dict()["ring"]["columns"]["obs"]  # views of the files
    spans = []
    with open("/proc/self/maps") as file:
        for line in file:
            span, *_, name = line.split(maxsplit=5)
            if str(tmp_path) in name:
                start, end = (int(part, 16) for part in span.split("-"))
                spans.append((start, end))
    for leaf in (position, flags):
        assert any(start <= leaf.ctypes.data < end for start, end in spans)


def test_killed_process_leaves_no_files(tmp_path):
    program = f"""
import os, signal; import numpy as np
from tests.replay.test_memmap import fragment
from flowrl.replay import ReplayBuffer
buffer = ReplayBuffer(1000, directory={str(tmp_path)!r})
buffer.add(fragment(np.random.default_rng(0), 0, 500))
buffer.sample(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.run([sys.executable, "-c", program], check=False)
    assert process.returncode == -9
    assert not list(tmp_path.iterdir())


def reserved_bytes(folder, size):
    """Return the reserved disk space of the open file of this size in a folder."""
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        if os.path.exists(path) and os.readlink(path).startswith(str(folder)):
            stat = os.stat(path)
            if stat.st_size == size:
                return stat.st_blocks * 512
    raise AssertionError(f"no open file of {size} bytes in {folder}")


def test_disk_space_is_reserved_before_rows_are_written(tmp_path):
    """A write to a file on a full disk kills the process: all used slots must be reserved."""
    buffer = ReplayBuffer(100, directory=tmp_path)
    rng = np.random.default_rng(0)
    row_bytes = 4000
    for i in range(30):
        batch = fragment(rng, 17 * i, 17)
        obs = rng.integers(0, 255, (18, row_bytes), np.uint8)
        buffer.add(batch.with_columns(obs=obs[:-1], new_obs=obs[1:]))
        next_slots = buffer.state_dict()["ring"]["successors"]["next_slots"]
        used = [*range(len(buffer)), *next_slots[next_slots >= 100]]
        pages = {int(slot) * row_bytes // 4096 for slot in used}
        assert reserved_bytes(tmp_path, 2 * 100 * row_bytes) >= 4096 * len(pages)


def disk_full(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_raises_an_error_with_the_folder(tmp_path, monkeypatch):
    buffer = ReplayBuffer(1000, directory=tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", disk_full)
    with pytest.raises(OSError, match="no disk space for") as caught:
        buffer.add(fragment(np.random.default_rng(0), 0, 50))
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_a_full_disk_refuses_are_stored_later(kind, tmp_path, monkeypatch):
    make, arguments = KINDS[kind]
    buffer = make(100, seed=0, directory=tmp_path, **arguments)
    expected = make(100, seed=0, **arguments)
    rng = np.random.default_rng(0)
    batches = [fragment(rng, first, 20) for first in range(0, 120, 20)]
    for each in (buffer, expected):
        each.add(batches[0])
        each.sample(1)
    items = buffer.item_ids()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", disk_full)
        for batch in batches[1:4]:  # stored with the next batch or draw
            buffer.add(batch)
        with pytest.raises(OSError, match="no disk space"):
            buffer.sample(1)
    assert buffer.item_ids() == items
    for batch in batches[1:4]:
        expected.add(batch)
    for each in (buffer, expected):
        for batch in batches[4:]:  # more than the capacity
            each.add(batch)
    assert_same(buffer.sample(50), expected.sample(50))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("successes", range(12))
def test_each_row_is_stored_at_most_once_if_the_disk_is_full_for_a_time(
    successes, kind, tmp_path, monkeypatch
):
    make, arguments = KINDS[kind]
    buffer = make(33, seed=0, directory=tmp_path, **arguments)
    rng = np.random.default_rng(0)
    buffer.add(fragment(rng, 0, 14))
    buffer.sample(1)
    for first in range(14, 70, 14):
        buffer.add(fragment(rng, first, 14))
    calls = iter(range(successes))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *_: next(calls, None) is None and disk_full())
        with contextlib.suppress(OSError):
            buffer.sample(1)
        state = buffer.state_dict()  # the stored rows can be saved
        make(33, seed=0, **arguments).load_state_dict(state)
    buffer.add(fragment(rng, 70, 14))
    rows = [buffer.sample(1) for _ in range(300)]
    assert all(len(set(one["eps_id"])) == 1 for one in rows)
    drawn = {(int(e), int(t)) for one in rows for e, t in zip(one["eps_id"], one["t"], strict=True)}
    newest = [(step // 7, step % 7) for step in range(84 - 33, 84)]
    assert drawn <= set(newest)
    assert buffer._ring.num_added <= 84


def test_an_add_that_fails_adds_nothing(tmp_path, monkeypatch):
    buffer = ReplayBuffer(100_000, directory=tmp_path)
    rng = np.random.default_rng(0)
    buffer.add(fragment(rng, 0, 20))
    buffer.sample(1)
    number = 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", disk_full)
        for number in range(300):
            before = len(buffer)
            try:
                buffer.add(fragment(rng, 20 + 20 * number, 20))
            except OSError:
                assert len(buffer) == before
    assert len(buffer) < 20 * 300
    buffer.add(fragment(rng, 20 + 20 * number, 20))


@pytest.mark.parametrize("successes", range(4))
def test_a_full_disk_changes_no_stored_stack(successes, tmp_path, monkeypatch):
    stream = FragmentStream(1, [7] * 100)
    buffer = ReplayBuffer(20, directory=tmp_path, seed=0)
    buffer.add(with_stacks(stream.fragment(12), 3))
    buffer.sample(1)
    buffer.add(with_stacks(stream.fragment(5), 3))
    calls = iter(range(successes))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *_: next(calls, None) is None and disk_full())
        with pytest.raises(OSError, match="no disk space"):
            buffer.sample(1)
    assert buffer.item_ids() == range(12)
    for _ in range(3):
        check_stacks(buffer.sample(50), 3)
        buffer.add(with_stacks(stream.fragment(5), 3))
    check_stacks(buffer.sample(50), 3)


def test_copied_buffer_has_its_own_files(tmp_path):
    buffer = ReplayBuffer(100, seed=0, directory=tmp_path)
    rng = np.random.default_rng(0)
    buffer.add(fragment(rng, 0, 150))
    for other in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        expected = buffer.rows_by_id(np.arange(50, 150))
        other.add(fragment(rng, 150, 60))
        other.sample(1)
        assert_same(expected, buffer.rows_by_id(np.arange(50, 150)))
        rows = np.arange(120, 149)
        assert_same(buffer.rows_by_id(rows), other.rows_by_id(rows))


def test_object_columns_are_rejected_and_nothing_is_stored(tmp_path):
    buffer = ReplayBuffer(100, directory=tmp_path)
    rng = np.random.default_rng(0)
    names = np.array([None] * 20, object)
    with pytest.raises(ValueError, match="'names' holds objects"):
        buffer.add(fragment(rng, 0, 20).with_columns(names=names))
    buffer.add(fragment(rng, 0, 20))
    assert "rewards" in buffer.sample(3)


def test_folder_that_cannot_be_created_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        ReplayBuffer(10, directory=tmp_path / "file" / "rows")
    with pytest.raises(ValueError, match="directory is empty"):
        ReplayBuffer(10, directory="")
    with pytest.raises(TypeError, match="directory must be a path, got 3"):
        ReplayBuffer(10, directory=3)


def test_array_without_elements_needs_no_file(tmp_path):
    assert MemmapArrays(tmp_path).empty((3, 0), np.float32).shape == (3, 0)


def test_replay_buffer_dir_sets_the_folder(tmp_path):
    config = DQNConfig(env="CartPole-v1", replay_buffer_dir=str(tmp_path / "rows"))
    assert config.new_buffer().directory == tmp_path / "rows"
    assert DQNConfig().new_buffer().directory is None
    (tmp_path / "file").write_text("")
    for invalid in (str(tmp_path / "file"), "s3://bucket/rows"):
        with pytest.raises(ConfigError, match="replay_buffer_dir"):
            config.updated(replay_buffer_dir=invalid).build()
    with pytest.raises(ConfigError, match="replay_buffer_dir: it cannot be written"):
        config.updated(replay_buffer_dir="/proc/none").new_buffer()


def test_disk_space_of_an_array_is_released_with_it(tmp_path):
    def num_files():
        links = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        return sum(link.startswith(str(tmp_path)) for link in links)

    files = MemmapArrays(tmp_path)
    first, second = files.empty((1000, 10), float), files.empty((1000, 10), float)
    files.reserve(first, 0, 1000)
    row = first[3]
    row[:] = 7
    both = num_files()
    del first
    assert (num_files(), row[0]) == (both, 7)  # a view keeps the memory
    del row
    assert num_files() == both / 2
    files.reserve(second, 0, 1000)
    second[:] = 1
    assert second.sum() == 10_000


def test_episodes_of_which_a_full_disk_took_rows_are_stored_again(tmp_path, monkeypatch):
    def episode(number):
        steps = np.arange(7.0)
        return SampleBatch(
            obs=steps[:-1], new_obs=steps[1:], eps_id=np.full(6, number), t=np.arange(6),
            terminateds=np.arange(6) == 5, truncateds=np.zeros(6, bool),
        )  # fmt: skip

    buffer = ReplayBuffer(20, storage_unit="episodes", directory=tmp_path, seed=0)
    for number in range(6):
        buffer.add(episode(number))
        buffer.sample(1)
    calls = iter([buffer._ring._reserve])
    with monkeypatch.context() as patch:  # the rows before the ring's end are stored
        patch.setattr(
            buffer._ring,
            "_reserve",
            lambda *a: next(calls, disk_full)(*a),
        )
        buffer.add(episode(6))
        with pytest.raises(OSError, match="No space"):
            buffer.sample(1)
        assert buffer.item_ids() == range(4, 6)
    episodes = [buffer.sample(1)["eps_id"].tolist() for _ in range(50)]
    assert {tuple(ids) for ids in episodes} == {(5,) * 6, (6,) * 6}


def test_batches_stored_before_a_full_disk_are_drawn(tmp_path, monkeypatch):
    def rows(episode, count):
        steps = np.arange(count + 1.0)
        return SampleBatch(
            obs=steps[:-1], new_obs=steps[1:], eps_id=np.full(count, episode), t=np.arange(count),
            terminateds=np.zeros(count, bool), truncateds=np.zeros(count, bool),
        )  # fmt: skip

    settings = {"storage_unit": "sequences", "max_seq_len": 4, "directory": tmp_path, "seed": 0}
    buffer = ReplayBuffer(24, **settings)
    buffer.add(rows(0, 2))
    buffer.add(rows(1, 12))
    buffer.add(rows(2, 12))  # the second part replaces the first rows of the ring
    calls = iter([buffer._ring._reserve])
    with monkeypatch.context() as patch:
        patch.setattr(buffer._ring, "_reserve", lambda *a: next(calls, disk_full)(*a))
        with pytest.raises(OSError, match="No space"):
            buffer.sample(1)
        assert buffer._sequences.read(np.arange(4))[1].tolist() == [2, 4, 4, 4]
    drawn = {int(id) for _ in range(60) for id in buffer.sample(1)["eps_id"]}
    assert drawn == {1, 2}
