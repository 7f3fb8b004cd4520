"""Checkpoints: trees round-trip, damage is rejected by file name, a writer may be killed."""

import contextlib
import errno
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flowrl.data import MultiAgentBatch, SampleBatch, checkpoint
from flowrl.data.checkpoint import (
    LARGE_BYTES,
    CheckpointError,
    is_checkpoint,
    read_checkpoint,
    read_manifest,
    remove_checkpoint,
    resolve_checkpoint,
    seal_manifest,
    write_checkpoint,
)
from flowrl.data.checkpoint_storage import LocalStorage, digest, storage_of
from flowrl.data.sequences import without_padding
from flowrl.data.serialization import SMALL_BYTES
from tests.comparisons import assert_same

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


@settings(max_examples=60)
@given(trees)
def test_any_tree_round_trips(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("c")
    write_checkpoint(path, {"tree": tree}, {})
    assert_same(read_checkpoint(path)[0], {"tree": tree})


def test_large_arrays_have_their_own_files(tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(LARGE_BYTES // 8 + 3, 2))
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
    read["rows"][0] = 7  # the arrays are writable
    np.testing.assert_array_equal(read["batch"]["obs"], rows)
    names = [entry["array"] for entry in manifest["files"].values() if "array" in entry]
    assert sorted(names) == ["batch/obs", "columns", "rows", "strided"]
    part, _ = read_checkpoint(tmp_path / "c", "small")
    assert list(part) == ["small"]


def test_part_of_a_checkpoint_may_be_one_large_array(tmp_path):
    large = np.arange(LARGE_BYTES // 8, dtype=float)
    state = {"w": large, "ww": large, "a/b": large + 1, "a": {"b": large}}
    write_checkpoint(tmp_path / "c", state, {})
    for part in ("w", "a/b"):
        read, _ = read_checkpoint(tmp_path / "c", part)
        assert list(read) == [part]
        np.testing.assert_array_equal(read[part], state[part])
    assert read_checkpoint(tmp_path / "c", "a")[0]["a"]["b"][0] == 0


def test_batches_and_objects_round_trip(tmp_path):
    infos = np.empty((2, 1), object)
    infos[:, 0] = [{"a": 1, 3: (np.float32(2),)}, {}]
    batch = SampleBatch(obs=np.ones((2, 3)), infos=infos)
    write_checkpoint(tmp_path / "c", {"m": MultiAgentBatch({"p": batch}, 2)}, {})
    read = read_checkpoint(tmp_path / "c")[0]["m"]
    assert read.env_steps() == 2
    assert read.policy_batches["p"]["infos"].tolist() == infos.tolist()


@pytest.mark.parametrize("lens", [[3, 4], [4, 4]])
def test_zero_padded_batches_round_trip(tmp_path, lens):
    batch = SampleBatch(obs=np.arange(sum(lens)), seq_lens=lens, state_in_0=np.ones((2, 1)))
    padded = batch.right_zero_pad(4)
    write_checkpoint(tmp_path / "c", {"m": MultiAgentBatch({"p": padded}, 7)}, {})
    read = read_checkpoint(tmp_path / "c")[0]["m"]["p"]
    assert (read.zero_padded, read.max_seq_len, read.count) == (True, 4, sum(lens))
    assert read["obs"].tolist() == padded["obs"].tolist()
    assert without_padding(read)["obs"].tolist() == list(range(sum(lens)))


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (object(), "a/0 is of type object, .* convert it to numbers, strings"),
        ({1, 2}, "a/0 is of type set"),
        (np.datetime64("2020-01-01"), "a/0 is a datetime64"),
        (np.bytes_(b"x"), "a/0 is a "),
        (np.complex64(1), "a/0 is a complex64"),
        (np.longdouble(1), "a/0 is a (float128|longdouble)"),
        (np.zeros(1, np.longdouble), "a/0 is an array of (float128|longdouble)"),
        (np.zeros(2, "M8[s]"), "a/0 is an array of datetime64"),
        (lambda: 0, "a/0 is of type function"),
    ],
)
def test_unsupported_leaf_is_named_before_anything_is_written(tmp_path, leaf, message):
    with pytest.raises(TypeError, match=message):
        write_checkpoint(tmp_path / "c", {"a": [leaf]}, {})
    assert not (tmp_path / "c").exists()


def write_example(tmp_path):
    state = {
        "a": np.arange(5),
        "b": [1, {"c": 2.5}],
        "large": np.arange(LARGE_BYTES, dtype=np.uint8),
    }
    return write_checkpoint(tmp_path / "c", state, {"x": 1})


def write_manifest(path, manifest):
    (path / "manifest.json").write_bytes(seal_manifest(manifest))


def test_flipped_bit_is_rejected_with_the_file_name(tmp_path):
    path, rng = write_example(tmp_path), np.random.default_rng(1)
    names = sorted(os.listdir(path))
    assert len(names) == 5
    for _ in range(1000 // len(names)):
        for name in names:
            data = bytearray((path / name).read_bytes())
            position, bit = int(rng.integers(len(data))), int(rng.integers(8))
            data[position] ^= 1 << bit
            (path / name).write_bytes(data)
            with pytest.raises(CheckpointError, match=name):
                read_checkpoint(path)
            data[position] ^= 1 << bit
            (path / name).write_bytes(data)
    assert is_checkpoint(path)


def test_truncated_and_missing_files_are_rejected_with_the_file_name(tmp_path):
    path = write_example(tmp_path)
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


class MakeFolder:
    def __reduce__(self):
        return os.mkdir, (os.environ["FOLDER"],)


def test_planted_pickle_is_never_loaded(tmp_path, monkeypatch):
    path = write_example(tmp_path)
    monkeypatch.setenv("FOLDER", str(tmp_path / "loaded"))
    objects = np.empty(1, object)
    objects[0] = MakeFolder()
    np.save(tmp_path / "objects.npy", objects, allow_pickle=True)
    planted = pickle.dumps(MakeFolder()), (tmp_path / "objects.npy").read_bytes()
    manifest = read_manifest(path)
    for name in os.listdir(path):
        original = (path / name).read_bytes()
        for data in planted:
            (path / name).write_bytes(data)
            with pytest.raises(CheckpointError, match=name):
                read_checkpoint(path)
            if name in manifest["files"]:  # also with a matching hash in the manifest
                changed = json.loads(json.dumps(manifest))
                changed["files"][name] |= {"bytes": len(data), "hash": digest(name, data)}
                changed.pop("blake2b")
                sealed = (path / "manifest.json").read_bytes()
                write_manifest(path, changed)
                if name.endswith(".bin"):  # any bytes are valid numbers
                    with contextlib.suppress(CheckpointError):
                        read_checkpoint(path)
                else:
                    with pytest.raises(CheckpointError, match=name):
                        read_checkpoint(path)
                (path / "manifest.json").write_bytes(sealed)
        (path / name).write_bytes(original)
    assert not (tmp_path / "loaded").exists()


def test_manifest_cannot_name_files_outside_the_folder(tmp_path):
    path = write_example(tmp_path)
    manifest = read_manifest(path)
    manifest.pop("blake2b")
    manifest["files"]["../secret.json"] = {"bytes": 1, "hash": "x"}
    write_manifest(path, manifest)
    with pytest.raises(CheckpointError, match="is not a checkpoint file"):
        read_checkpoint(path)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("kind", ["killed", "disk full"])
def test_interrupted_write_leaves_the_previous_or_the_new_checkpoint(tmp_path, monkeypatch, kind):
    """Interrupt the n-th call of write, fsync, replace and remove, for every n."""
    calls = limit = 0

    def interruptible(fn):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == limit:
                raise Killed if kind == "killed" else OSError(errno.ENOSPC, "no space left")
            return fn(*args, **kwargs)

        return call

    path = tmp_path / "c"
    for name in ("write", "publish", "remove"):
        monkeypatch.setattr(LocalStorage, name, interruptible(getattr(LocalStorage, name)))
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, interruptible(getattr(os, name)))
    write_checkpoint(path, {"n": 0, "array": np.zeros(LARGE_BYTES)}, {})
    points = calls
    assert points > 10
    kept_previous = set()
    for n in range(1, points + 5):
        calls, limit = 0, 0
        write_checkpoint(path, {"n": 0, "array": np.zeros(LARGE_BYTES)}, {})
        calls, limit = 0, n
        with contextlib.suppress(Killed, OSError):
            write_checkpoint(path, {"n": n, "array": np.full(LARGE_BYTES, n)}, {})
        limit = 0
        state, _ = read_checkpoint(path)
        assert state["n"] in (0, n)
        assert (state["array"] == state["n"]).all()
        kept_previous.add(state["n"] == 0)
    assert kept_previous == {True, False}
    write_checkpoint(path, {"n": 1}, {})
    assert len(os.listdir(path)) == 4  # files of interrupted writes are removed


def test_killed_writer_leaves_the_previous_checkpoint(tmp_path):
    """Kill a real process in the middle of a write."""
    write_checkpoint(tmp_path / "c", {"n": 1}, {})
    code = textwrap.dedent(
        """
        import os, signal, sys
        import numpy as np
        from flowrl.data.checkpoint import write_checkpoint
        from flowrl.data.checkpoint_storage import LocalStorage
        def publish(self, name, data):
            os.kill(os.getpid(), signal.SIGKILL)
        LocalStorage.publish = publish
        write_checkpoint(sys.argv[1], {"n": 2, "a": np.zeros(1 << 18)}, {})
        """
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], check=False)
    assert process.returncode == -9
    assert len(os.listdir(tmp_path / "c")) > 4
    assert read_checkpoint(tmp_path / "c")[0] == {"n": 1}
    write_checkpoint(tmp_path / "c", {"n": 3}, {})
    assert len(os.listdir(tmp_path / "c")) == 4


def test_checkpoint_on_a_remote_file_system(tmp_path):
    uri = "memory://flowrl-test/run/c"
    state = {"a": np.arange(3), "large": np.arange(LARGE_BYTES, dtype=np.uint8)}
    assert not is_checkpoint(uri)
    for n in range(2):
        write_checkpoint(uri, {**state, "n": n}, {})
        read, _ = read_checkpoint(uri)
        assert read["n"] == n
        np.testing.assert_array_equal(read["large"], state["large"])
    assert len(storage_of(uri).names()) == 5
    with pytest.raises(CheckpointError, match="nothing"):
        write_checkpoint("nothing://here", {}, {})


def test_uri_of_a_local_file_is_written_like_a_path(tmp_path):
    uri = f"file://{tmp_path}/c"
    write_checkpoint(uri, {"n": 1}, {})
    with open(tmp_path / "c" / "manifest.json") as before:
        write_checkpoint(uri, {"n": 2}, {})
        assert before.read() != (tmp_path / "c" / "manifest.json").read_text()  # replaced
    assert read_checkpoint(tmp_path / "c")[0] == read_checkpoint(uri)[0] == {"n": 2}


def test_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "c", {"a": 1}, {})

    def fails(self, name):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LocalStorage, "read", fails)
    for read in (read_manifest, read_checkpoint):
        with pytest.raises(
            CheckpointError, match=r"manifest\.json: cannot be read: .*Input/output"
        ):
            read(tmp_path / "c")


def test_other_format_versions_and_other_folders_are_rejected(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest\.json: file not found"):
        read_checkpoint(tmp_path)
    (tmp_path / "manifest.json").write_text('{"name": "other"}')
    with pytest.raises(CheckpointError, match="not a checkpoint's manifest"):
        read_checkpoint(tmp_path)
    path = write_example(tmp_path)
    for version, remedy in (
        (2, "train again, or read it with flowrl 0.3"),
        (99, "only: read it with flowrl 0.3, which wrote it"),
    ):
        write_manifest(path, {"format": version, "files": {}, "flowrl": "0.3"})
        match = rf"manifest\.json: checkpoint format {version} is not supported.*{remedy}"
        with pytest.raises(CheckpointError, match=match):
            read_checkpoint(path)
    remove_checkpoint(path)
    assert not path.exists()


def test_keys_with_slashes_and_many_arrays_round_trip(tmp_path):
    array = np.arange(SMALL_BYTES)
    many = [np.full(3, i) for i in range(50_000)]
    state = {"a/b": array, "a": {"b": -array}, "": {"a": 2 * array}, "many": many}
    write_checkpoint(tmp_path / "c", state, {})
    assert_same(read_checkpoint(tmp_path / "c")[0], state)


def test_reader_finds_a_whole_checkpoint_while_another_is_written(tmp_path):
    path, stop, versions = tmp_path / "c", threading.Event(), set()
    write_checkpoint(path, {"n": 0, "a": np.zeros(LARGE_BYTES)}, {})

    def write():
        n = 0
        while not stop.is_set():
            n += 1
            write_checkpoint(path, {"n": n, "a": np.full(LARGE_BYTES // 8, n)}, {})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while len(versions) < 6:  # the test's timeout is the limit
            state, _ = read_checkpoint(path)
            assert (state["a"] == state["n"]).all()
            versions.add(state["n"])
    finally:
        stop.set()
        writer.join()


def test_file_that_vanishes_before_it_is_opened_is_reported_as_missing(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "c", {"a": np.zeros(LARGE_BYTES)}, {})
    storage = storage_of(tmp_path / "c")
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    with pytest.raises(CheckpointError, match="file not found"):
        storage.read("array-gone.npy")


def test_metadata_that_is_not_json_is_rejected_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError):
        write_checkpoint(tmp_path / "c", {"a": 1}, {"me": object()})
    assert not (tmp_path / "c").exists()


def test_manifest_of_another_program_is_not_replaced(tmp_path):
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"name": "my app"}')
    with pytest.raises(FileExistsError, match=r"manifest.json does not belong to a checkpoint"):
        write_checkpoint(tmp_path, {"a": 1}, {})
    assert manifest.read_text() == '{"name": "my app"}'
    assert list(tmp_path.iterdir()) == [manifest]


def test_file_in_the_place_of_a_checkpoint_is_named(tmp_path):
    file = tmp_path / "model.zip"
    file.write_text("a file")
    with pytest.raises(CheckpointError, match=r"model.zip is a file; a checkpoint is a folder"):
        resolve_checkpoint(file)
    with pytest.raises(FileExistsError, match=r"model.zip is a file; a checkpoint is a folder"):
        write_checkpoint(file, {}, {})
    assert file.read_text() == "a file"


def test_infos_that_cannot_be_saved_are_dropped(tmp_path):
    infos = np.empty(2, object)
    infos[:] = [{"a": {1, 2}}, {"b": 3}]
    write_checkpoint(tmp_path / "c", {"part": SampleBatch(obs=np.zeros(2), infos=infos)}, {})
    read = read_checkpoint(tmp_path / "c")[0]["part"]
    assert read["infos"].tolist() == [{}, {"b": 3}]


@pytest.mark.parametrize("files", [None, [], {"a": 3}, {"state-1.json": {"bytes": 3}}])
def test_manifest_with_damaged_fields_is_rejected(tmp_path, files):
    path = write_example(tmp_path)
    manifest = {"format": checkpoint.FORMAT, "files": files}
    if files is None:
        manifest.pop("files")
    write_manifest(path, manifest)
    with pytest.raises(CheckpointError, match=r"files.*: the manifest is damaged"):
        read_checkpoint(path)
    assert not is_checkpoint(path)


def test_manifest_without_a_state_is_rejected(tmp_path):
    path = write_example(tmp_path)
    write_manifest(path, {"format": checkpoint.FORMAT, "files": {}})
    with pytest.raises(CheckpointError, match="it names no file with the state"):
        read_checkpoint(path)


def test_metadata_cannot_change_the_format(tmp_path):
    path = write_checkpoint(tmp_path / "c", {"a": 1}, {"format": 4, "files": 1})
    assert read_checkpoint(path)[0] == {"a": 1}
