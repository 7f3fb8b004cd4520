"""Checkpoints: trees come back as they were, damage is refused by name, a writer may be killed."""

import contextlib
import errno
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flowrl.data import MultiAgentBatch, SampleBatch, checkpoint
from flowrl.data.checkpoint import (
    LARGE,
    CheckpointError,
    is_checkpoint,
    read_checkpoint,
    read_manifest,
    remove_checkpoint,
    write_checkpoint,
)
from flowrl.data.serialization import SMALL

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.integers(-5, 5).map(np.int64),
    st.floats(width=32).map(np.float32),
)
arrays = hnp.arrays(
    st.sampled_from(["float32", "float64", "int64", "uint8", "bool", "<U3"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
keys = st.one_of(st.text(max_size=4), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))
trees = st.recursive(
    st.one_of(scalars, arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=8,
)


def assert_same(one, two):
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert list(one) == list(two)
        for key in one:
            assert_same(one[key], two[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_same(a, b)
    elif isinstance(one, np.ndarray):
        assert one.dtype == two.dtype
        assert one.shape == two.shape
        np.testing.assert_array_equal(one, two)
    else:
        assert one == two or (one != one and two != two)


@settings(deadline=None, max_examples=60)
@given(trees)
def test_any_tree_comes_back_as_it_was(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("c")
    write_checkpoint(path, {"tree": tree}, {})
    assert_same(read_checkpoint(path)[0], {"tree": tree})


def test_large_arrays_have_files_of_their_own(tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(LARGE // 8 + 3, 2))
    state = {
        "rows": rows,
        "columns": np.asfortranarray(rows),
        "strided": rows[::2],
        "small": rows[:2],
        "batch": SampleBatch(obs=rows),
        "zero": np.float32(0.1),
    }
    write_checkpoint(tmp_path / "c", state, {"by": "me"})
    read, manifest = read_checkpoint(tmp_path / "c")
    assert manifest["by"] == "me"
    for name in ("rows", "columns", "strided", "small"):
        np.testing.assert_array_equal(read[name], state[name])
        assert read[name].dtype == state[name].dtype
    read["rows"][0] = 7  # it is ours to write to
    np.testing.assert_array_equal(read["batch"]["obs"], rows)
    held = [about["array"] for about in manifest["files"].values() if "array" in about]
    assert sorted(held) == ["batch/__batch__/obs", "columns", "rows", "strided"] or len(held) == 4
    only, _ = read_checkpoint(tmp_path / "c", "small")
    assert list(only) == ["small"]


def test_batches_and_objects(tmp_path):
    infos = np.empty((2, 1), object)
    infos[:, 0] = [{"a": 1, 3: (np.float32(2),)}, {}]
    batch = SampleBatch(obs=np.ones((2, 3)), infos=infos)
    write_checkpoint(tmp_path / "c", {"m": MultiAgentBatch({"p": batch}, 2)}, {})
    read = read_checkpoint(tmp_path / "c")[0]["m"]
    assert read.env_steps() == 2
    assert read.policy_batches["p"]["infos"].tolist() == infos.tolist()


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (object(), "a/0 is a object"),
        ({1, 2}, "a/0 is a set"),
        (np.datetime64("2020-01-01"), "a/0 is a datetime64"),
        (np.bytes_(b"x"), "a/0 is a "),
        (np.complex64(1), "a/0 is a complex64"),
        (np.longdouble(1), "a/0 is a (float128|longdouble)"),
        (np.zeros(1, np.longdouble), "a/0 is an array of (float128|longdouble)"),
        (np.zeros(2, "M8[s]"), "a/0 is an array of datetime64"),
        (lambda: 0, "a/0 is a function"),
    ],
)
def test_what_cannot_be_saved_is_named_before_anything_is_written(tmp_path, leaf, said):
    with pytest.raises(TypeError, match=said):
        write_checkpoint(tmp_path / "c", {"a": [leaf]}, {})
    assert not (tmp_path / "c").exists()


def whole(tmp_path):
    state = {"a": np.arange(5), "b": [1, {"c": 2.5}], "big": np.arange(LARGE, dtype=np.uint8)}
    return write_checkpoint(tmp_path / "c", state, {"x": 1})


def test_a_thousand_flipped_bits_are_each_refused_with_the_files_name(tmp_path):
    path, rng = whole(tmp_path), np.random.default_rng(1)
    names = sorted(os.listdir(path))
    assert len(names) == 5
    for _ in range(1000 // len(names)):
        for name in names:
            data = bytearray((path / name).read_bytes())
            at, bit = int(rng.integers(len(data))), int(rng.integers(8))
            data[at] ^= 1 << bit
            (path / name).write_bytes(data)
            with pytest.raises(CheckpointError, match=name):
                read_checkpoint(path)
            data[at] ^= 1 << bit
            (path / name).write_bytes(data)
    assert is_checkpoint(path)


def test_truncated_and_missing_files_are_refused_with_their_names(tmp_path):
    path = whole(tmp_path)
    for name in os.listdir(path):
        data = (path / name).read_bytes()
        for length in (0, 1, len(data) // 2, len(data) - 1):
            (path / name).write_bytes(data[:length])
            assert not is_checkpoint(path)
            with pytest.raises(CheckpointError, match=name):
                read_checkpoint(path)
        os.remove(path / name)
        with pytest.raises(CheckpointError, match=name):
            read_checkpoint(path)
        (path / name).write_bytes(data)


class Planted:
    def __reduce__(self):
        return os.mkdir, (os.environ["PLANTED"],)


def test_a_planted_pickle_never_runs(tmp_path, monkeypatch):
    path = whole(tmp_path)
    monkeypatch.setenv("PLANTED", str(tmp_path / "ran"))
    planted = pickle.dumps(Planted())
    objects = np.empty(1, object)
    objects[0] = Planted()
    np.save(tmp_path / "objects.npy", objects, allow_pickle=True)
    array = (tmp_path / "objects.npy").read_bytes()
    manifest = read_manifest(path)
    for name in os.listdir(path):
        before = (path / name).read_bytes()
        for data in (planted, array):
            (path / name).write_bytes(data)
            with pytest.raises(CheckpointError, match=name):
                read_checkpoint(path)
            if name in manifest["files"]:  # even where the manifest was made to agree
                told = json.loads(json.dumps(manifest))
                digest = checkpoint._digest(name, data)
                told["files"][name] |= {"bytes": len(data), "hash": digest}
                told.pop("blake2b")
                sealed = (path / "manifest.json").read_bytes()
                (path / "manifest.json").write_bytes(checkpoint._sealed(told))
                if name.endswith(".bin"):  # numbers, whatever they were written as
                    with contextlib.suppress(CheckpointError):
                        read_checkpoint(path)
                else:
                    with pytest.raises(CheckpointError, match=name):
                        read_checkpoint(path)
                (path / "manifest.json").write_bytes(sealed)
        (path / name).write_bytes(before)
    assert not (tmp_path / "ran").exists()


def test_a_manifest_cannot_name_files_elsewhere(tmp_path):
    path = whole(tmp_path)
    manifest = read_manifest(path)
    manifest.pop("blake2b")
    manifest["files"]["../secret.json"] = {"bytes": 1, "hash": "x"}
    (path / "manifest.json").write_bytes(checkpoint._sealed(manifest))
    with pytest.raises(CheckpointError, match="no file of a checkpoint"):
        read_checkpoint(path)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("kind", ["killed", "disk full"])
def test_at_every_write_there_is_the_old_or_the_new_checkpoint(tmp_path, monkeypatch, kind):
    """Stop at the n-th call of write, fsync, replace and remove, for every n there is."""
    calls = limit = 0

    def counted(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == limit:
                raise Killed if kind == "killed" else OSError(errno.ENOSPC, "no space left")
            return real(*args, **kwargs)

        return call

    path = tmp_path / "c"
    for name in ("write", "publish", "remove"):
        own = getattr(checkpoint._Folder, name)
        monkeypatch.setattr(checkpoint._Folder, name, counted(own))
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    write_checkpoint(path, {"n": 0, "array": np.zeros(LARGE)}, {})
    points = calls
    assert points > 10
    seen = set()
    for n in range(1, points + 5):
        calls, limit = 0, 0
        write_checkpoint(path, {"n": 0, "array": np.zeros(LARGE)}, {})
        calls, limit = 0, n
        with contextlib.suppress(Killed, OSError):
            write_checkpoint(path, {"n": n, "array": np.full(LARGE, n)}, {})
        limit = 0
        state, _ = read_checkpoint(path)
        assert state["n"] in (0, n)
        assert (state["array"] == state["n"]).all()
        seen.add(state["n"] == 0)
    assert seen == {True, False}
    write_checkpoint(path, {"n": 1}, {})
    assert len(os.listdir(path)) == 4  # nothing of those that were stopped is left


def test_a_writer_that_is_killed_leaves_the_old_one(tmp_path):
    """A real process, killed by the system in the middle of a write."""
    write_checkpoint(tmp_path / "c", {"n": 1}, {})
    code = textwrap.dedent(
        """
        import os, signal, sys
        import numpy as np
        from flowrl.data import checkpoint
        real = checkpoint._Folder.publish
        def publish(self, name, data):
            os.kill(os.getpid(), signal.SIGKILL)
        checkpoint._Folder.publish = publish
        checkpoint.write_checkpoint(sys.argv[1], {"n": 2, "a": np.zeros(1 << 18)}, {})
        """
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], check=False)
    assert done.returncode == -9
    assert len(os.listdir(tmp_path / "c")) > 4
    assert read_checkpoint(tmp_path / "c")[0] == {"n": 1}
    write_checkpoint(tmp_path / "c", {"n": 3}, {})
    assert len(os.listdir(tmp_path / "c")) == 4


def test_a_checkpoint_elsewhere(tmp_path):
    pytest.importorskip("fsspec")
    uri = "memory://flowrl-test/run/c"
    state = {"a": np.arange(3), "big": np.arange(LARGE, dtype=np.uint8)}
    assert not is_checkpoint(uri)
    for n in range(2):
        write_checkpoint(uri, {**state, "n": n}, {})
        read, _ = read_checkpoint(uri)
        assert read["n"] == n
        np.testing.assert_array_equal(read["big"], state["big"])
    assert len(checkpoint._place(uri).names()) == 5
    with pytest.raises(CheckpointError, match="nothing"):
        write_checkpoint("nothing://here", {}, {})


def test_other_formats_and_other_folders(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest\.json: there is no such file"):
        read_checkpoint(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 1}')
    with pytest.raises(CheckpointError, match="older format"):
        read_checkpoint(tmp_path)
    (tmp_path / "manifest.json").write_bytes(checkpoint._sealed({"format": 99, "files": {}}))
    with pytest.raises(CheckpointError, match="of format 99"):
        read_checkpoint(tmp_path)
    path = whole(tmp_path)
    remove_checkpoint(path)
    assert not path.exists()


def test_keys_with_slashes_and_very_many_arrays(tmp_path):
    big = np.arange(SMALL)
    many = [np.full(3, i) for i in range(50_000)]
    state = {"a/b": big, "a": {"b": -big}, "": {"a": 2 * big}, "many": many}
    write_checkpoint(tmp_path / "c", state, {})
    assert_same(read_checkpoint(tmp_path / "c")[0], state)


def test_a_reader_beside_a_writer_finds_the_old_or_the_new_one(tmp_path):
    path, stop, seen = tmp_path / "c", threading.Event(), set()
    write_checkpoint(path, {"n": 0, "a": np.zeros(LARGE)}, {})

    def write():
        n = 0
        while not stop.is_set():
            n += 1
            write_checkpoint(path, {"n": n, "a": np.full(LARGE // 8, n)}, {})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while len(seen) < 6:  # the test's time limit ends it where nothing new is ever found
            state, _ = read_checkpoint(path)
            assert (state["a"] == state["n"]).all()
            seen.add(state["n"])
    finally:
        stop.set()
        writer.join()


def test_what_the_manifest_cannot_say_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError):
        write_checkpoint(tmp_path / "c", {"a": 1}, {"me": object()})
    assert not (tmp_path / "c").exists()
