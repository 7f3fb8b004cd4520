"""The web server of `flowrl watch`: what it serves, and what it refuses."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.cli.test_plot import write_run
from tests.extras import require_extra

require_extra("web")


class Server:
    """`flowrl watch` in another process."""

    def __init__(self, *paths, port=0):
        command = [sys.executable, "-m", "flowrl", "watch", *map(str, paths), "--port", str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        first = self.process.stdout.readline()
        self.url = re.search(r"http://127\.0\.0\.1:\d+", first)[0]

    def request(self, path, method="GET", **headers):
        """Return status, headers and text."""
        request = urllib.request.Request(self.url + path, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return response.status, response.headers, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()

    def get(self, path):
        status, _, text = self.request(path)
        assert status == 200
        return json.loads(text)

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(20)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, gamma in (("a", 0.9), ("b", 0.5)):
        write_run(folder / name, [1.0, 2.0], gamma=gamma)
    (folder / "secret.txt").write_text("secret")
    return folder


@pytest.fixture(scope="module")
def server(runs):
    server = Server(runs)
    yield server
    assert server.stop() in (0, 130)


def test_runs_and_curves_are_served(server):
    assert [run["name"] for run in server.get("/api/runs")] == ["a", "b"]
    assert server.get("/api/runs/1")["config"]["gamma"] == 0.5
    curves = server.get("/api/curves?metric=episode_reward_mean")
    assert curves == [{"x": [100, 200], "y": [1, 2]}] * 2
    status, headers, text = server.request("/")
    assert status == 200
    assert "default-src 'self'" in headers["Content-Security-Policy"]
    assets = re.findall(r'(?:src|href)="(/page/[^"]+)"', text)
    assert len(assets) == 5
    for path in assets:
        assert server.request(path)[0] == 200


def test_new_results_are_served(tmp_path):
    write_run(tmp_path / "a", [1.0, 2.0])
    server = Server(tmp_path)
    try:
        assert server.get("/api/runs/0")["env_steps"] == 200
        with open(tmp_path / "a" / "result.json", "a") as file:
            file.write('{"timesteps_total": 300, "episode_reward_mean": 7.0}\n')
        assert server.get("/api/runs/0")["env_steps"] == 300
    finally:
        server.stop()


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1.example.com", "[::1]", "10.0.0.1"])
def test_other_hosts_are_refused(server, host):
    assert server.request("/api/runs", Host=host)[0] == 400
    assert server.request("/", Host=host)[0] == 400


def test_only_this_machine_can_connect(server):
    own_sockets = set()
    for file in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the server has closed it meanwhile
            own_sockets |= set(re.findall(r"socket:.(\d+)", os.readlink(file)))
    listening = []  # addresses of this process only: others may use the port on other interfaces
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in own_sockets:
                listening.append(address)
    assert listening == [f"0100007F:{int(server.url.rpartition(':')[2]):04X}"]


@pytest.mark.parametrize(
    "path",
    [
        "/secret.txt", "/page/../server.py", "/page/..%2fserver.py", "/page/%2e%2e/server.py",
        "/page/..%2f..%2ferrors.py", "/page//etc/passwd", "/api/runs/2", "/api/runs/-1",
        "/api/runs/x", "/api/runs/99999999999", "/a/config.json",
    ],
)  # fmt: skip
def test_nothing_else_is_served(server, path):
    status, _, text = server.request(path)
    assert status == 404
    assert "secret" not in text.replace(path, "")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(server, runs, method):
    before = {path: path.stat().st_mtime for path in runs.rglob("*")}
    for path in ("/", "/api/runs", "/api/runs/0", "/api/curves", "/page/page.js"):
        assert server.request(path, method=method)[0] == 405
    assert {path: path.stat().st_mtime for path in runs.rglob("*")} == before


def test_port_in_use_and_wrong_paths_are_rejected(server, runs, tmp_path):
    port = server.url.rpartition(":")[2]
    for arguments, message in (
        ([runs, "--port", port], f"cannot use port {port}"),
        ([runs, "--port", "70000"], "cannot use port 70000"),
        ([tmp_path], "no config.json"),
    ):
        command = [sys.executable, "-m", "flowrl", "watch", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_runs_of_one_name_are_named_by_their_folders(tmp_path):
    for folder in ("a", "b"):
        write_run(tmp_path / folder / "seed-0", [1.0])
    server = Server(tmp_path / "a", tmp_path / "b")
    try:
        names = [run["name"] for run in server.get("/api/runs")]
    finally:
        server.stop()
    assert names == ["a/seed-0", "b/seed-0"]


def test_runs_that_start_later_are_served(tmp_path):
    write_run(tmp_path / "a", [1.0])
    server = Server(tmp_path)
    try:
        assert len(server.get("/api/runs")) == 1
        (tmp_path / "c").mkdir()  # is being created
        write_run(tmp_path / "b", [1.0, 2.0])
        first, second = server.get("/api/runs")
        assert (first["name"], second["name"]) == ("a", "b")
        assert second["changed"] >= first["changed"]
        assert server.get("/api/runs/1")["env_steps"] == 200
    finally:
        server.stop()


def test_server_survives_a_run_that_is_removed_and_created_again(tmp_path):
    run = write_run(tmp_path / "r", [1.0])
    server = Server(run)
    try:
        assert server.get("/api/runs/0")["env_steps"] == 100
        os.rename(run, tmp_path / "elsewhere")
        write_run(run, [1.0, 2.0, 3.0])
        assert server.get("/api/runs/0")["env_steps"] == 300
    finally:
        server.stop()


def test_deleted_run_is_shown_as_ended(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name, [1.0, 2.0])
    server = Server(tmp_path)
    try:
        server.get("/api/runs/1")
        shutil.rmtree(tmp_path / "b")
        assert [run["name"] for run in server.get("/api/runs")] == ["a", "b"]
        assert server.get("/api/runs/1")["running"] is False
        assert server.get("/api/runs/0")["env_steps"] == 200
    finally:
        server.stop()


def test_new_settings_of_a_run_and_new_runs_beside_damaged_ones_are_shown(tmp_path):
    for name in ("one", "two"):
        write_run(tmp_path / name / "run", [1.0], gamma=0.9)
    server = Server(tmp_path / "one", tmp_path / "two")
    try:
        assert server.get("/api/runs/0")["config"]["gamma"] == 0.9
        config = tmp_path / "one" / "run" / "config.json"  # resumed with other settings
        config.write_text(config.read_text().replace("0.9", "0.5"))
        assert server.get("/api/runs/0")["config"]["gamma"] == 0.5
        shutil.rmtree(tmp_path / "two")
        damaged = tmp_path / "one" / "damaged"
        damaged.mkdir()
        (damaged / "config.json").write_text("{")
        write_run(tmp_path / "one" / "later", [2.0], gamma=0.9)
        names = [run["name"] for run in server.get("/api/runs")]
        assert names == ["one/run", "two/run", "later"]
        assert server.get("/api/runs/1")["config"]["gamma"] == 0.9  # the last ones of a deleted run
    finally:
        server.stop()
