"""write_whole leaves the old file if the new one cannot be written."""

import errno
import os

import pytest

from flowrl.whole_files import write_whole


@pytest.mark.parametrize("planted", ["file", ".file"])
def test_links_are_not_followed(tmp_path, planted):
    (tmp_path / "target").write_text("mine")
    (tmp_path / planted).symlink_to(tmp_path / "target")
    write_whole(tmp_path / "file", "new: é")
    assert (tmp_path / "target").read_text() == "mine"
    assert (tmp_path / "file").read_text(encoding="utf-8") == "new: é"
    assert sorted(os.listdir(tmp_path)) == ["file", "target"]


@pytest.mark.parametrize("existing", [None, "old"])
def test_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch, existing):
    path = tmp_path / "file"
    if existing is not None:
        path.write_text(existing)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert os.listdir(tmp_path) == ([] if existing is None else ["file"])
    assert existing is None or path.read_text() == existing
