"""`flowrl report` writes its file completely or not at all."""

import errno
import os

from tests.cli.test_plot import write_run


def test_output_behind_a_link_is_written_there(cli, tmp_path):
    write_run(tmp_path / "run", [1.0, 2.0])
    (tmp_path / "target.html").write_text("old")
    (tmp_path / "link.html").symlink_to(tmp_path / "target.html")
    assert cli("report", "run", "-o", "link.html")[0] == 0
    assert (tmp_path / "link.html").is_symlink()
    assert "<html" in (tmp_path / "target.html").read_text()


def test_output_that_is_not_a_file_is_not_replaced(cli, tmp_path):
    write_run(tmp_path / "run", [1.0, 2.0])
    assert cli("report", "run", "-o", os.devnull)[0] == 0
    assert not os.path.isfile(os.devnull)


def test_failed_write_keeps_the_old_report(cli, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_run(tmp_path / "run", [1.0, 2.0])
    (tmp_path / "old.html").write_text("old")
    monkeypatch.setattr(os, "replace", full)
    code, _, err = cli("report", "run", "-o", "old.html")
    assert code == 2
    assert "No space left" in err
    assert (tmp_path / "old.html").read_text() == "old"
    assert not (tmp_path / ".old.html").exists()


def test_resumed_run_writes_its_report_again(cli, tmp_path):
    page = tmp_path / "r/report.html"
    settings = ["--train-batch-size", "64", "--seed", "1"]
    start = ["train", "a2c", *settings, "--stop-iters", "1", "--run-dir"]
    assert cli(*start, "r", "--report")[0] == 0
    page.write_text("old")
    assert cli("resume", "r", "--stop-iters", "2")[0] == 0
    assert '"iteration": 2' in page.read_text()
    page.unlink()
    assert "already reached" in cli("resume", "r", "--stop-iters", "2")[1]
    assert '"running": false' in page.read_text()
    assert cli(*start, "s")[0] == 0
    page = tmp_path / "s/report.html"
    for limit, options in ((2, []), (3, ["--report"]), (3, ["--report"])):
        code, out, _ = cli("resume", "s", "--stop-iters", str(limit), *options)
        assert code == 0
        assert page.exists() == bool(options)
        if options:
            assert f'"iteration": {limit}' in page.read_text()
            page.unlink()
    assert "already reached" in out
