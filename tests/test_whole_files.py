"""write_whole leaves the old file if the new one cannot be written."""

import errno
import os
from pathlib import Path

import pytest

from flowrl.whole_files import write_whole


def test_text_replaces_the_file_behind_a_link(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new: é")
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == "new: é"
    assert sorted(os.listdir(tmp_path)) == ["link", "target"]


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


def test_devices_are_not_replaced():
    write_whole(Path(os.devnull), "text")
    assert not os.path.isfile(os.devnull)
