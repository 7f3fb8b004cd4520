"""The page in a browser: figures of running plans, in light and dark, wide and narrow.

Needs Chromium and its driver: apt-get install chromium chromium-driver.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowrl.trainer.runs.activity_log import ActivityLog, read_activities
from tests.extras import require_extra

require_extra("web")
webdriver = pytest.importorskip("selenium.webdriver")
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("install chromium and chromium-driver with apt-get", allow_module_level=True)

from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.cli.test_plot import write_run
from tests.monitoring.fakes import activity, stage, worker
from tests.web.test_server import Server

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
SCREENSHOTS = os.environ.get("FLOWRL_SCREENSHOTS")  # folder; None keeps none


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def open_page(browser, url, width=1280, scheme="light"):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 1800, "deviceScaleFactor": 1, "mobile": False},
    )
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    browser.get("about:blank")  # the last page no longer asks its server, which may have stopped
    browser.get_log("browser")
    browser.get(url)
    wait(browser, lambda: text(browser, "status"))


def wait(browser, condition, seconds=20):
    return WebDriverWait(browser, seconds, 0.1).until(lambda _: condition())


def text(browser, name):
    return browser.find_element(By.ID, name).text


def assert_no_errors(browser):
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []


def keep(browser, name):
    if SCREENSHOTS:
        browser.save_screenshot(str(Path(SCREENSHOTS) / f"{name}.png"))


def train(folder, plan, *flags):
    """Start a training; return its process once its plan was measured."""
    run = folder / plan
    command = [sys.executable, "-m", "flowrl", "train", plan, "--run-dir", str(run)]
    log = open(folder / f"{plan}.log", "w")  # noqa: SIM115
    process = subprocess.Popen([*command, "--display", "none", *flags], stdout=log, stderr=log)
    until = time.monotonic() + 60
    while len(read_activities(run)) < 2:
        assert process.poll() is None, (folder / f"{plan}.log").read_text()
        assert time.monotonic() < until
        time.sleep(0.2)
    return run, process


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ppo", "ppo_dqn", "impala"])
def test_running_plan_is_shown(browser, tmp_path, plan):
    run, process = train(tmp_path, plan, "--stop-timesteps", "100000000", "--stop-reward", "1e9")
    server = Server(run)
    try:
        for width in (1280, 400):
            for scheme in ("light", "dark"):
                open_page(browser, server.url, width, scheme)
                wait(browser, lambda: "running: iteration" in text(browser, "status"))
                wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#graph .node"))
                wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#curve canvas"))
                keep(browser, f"{plan}_{width}_{scheme}")
                page = browser.execute_script("return document.documentElement.scrollWidth")
                assert page <= width
                background = browser.execute_script(
                    "return getComputedStyle(document.body).backgroundColor"
                )
                assert (background == "rgb(18, 22, 28)") == (scheme == "dark")
                assert_no_errors(browser)
        before = text(browser, "status")
        wait(browser, lambda: text(browser, "status") != before)
        shown = browser.execute_script("return state.data.activity")
        (measured,) = [one.to_json() for one in read_activities(run) if one.time == shown["time"]]
        assert json.loads(json.dumps(measured)) == shown
        nodes = browser.find_elements(By.CSS_SELECTOR, "#graph .node")
        assert len(nodes) == len(shown["stages"])
        assert text(browser, "diagnosis")
        check_stage(browser, shown)
        process.terminate()
        process.wait(60)
        wait(browser, lambda: "ended: iteration" in text(browser, "status"))
        assert "terminated" in text(browser, "events")
        resumed = subprocess.Popen(
            [sys.executable, "-m", "flowrl", "resume", str(run), "--display", "none"],
            stdout=subprocess.DEVNULL,
        )
        wait(browser, lambda: "running: iteration" in text(browser, "status"), 60)
        wait(browser, lambda: "resumed" in text(browser, "events"))
        resumed.terminate()
        resumed.wait(60)
        assert_no_errors(browser)
    finally:
        server.stop()
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def check_stage(browser, shown):
    """Click a stage and compare its figures with the measurement."""
    stage = next(s for s in shown["stages"] if "Train" in s["name"] or s["kind"] == "dequeue")
    selector = f'#graph .node[data-id="{stage["id"]}"]'
    browser.execute_script(
        "document.querySelector(arguments[0]).dispatchEvent(new MouseEvent('click'))", selector
    )
    wait(browser, lambda: text(browser, "stage-title") == stage["title"])
    assert text(browser, "stage-line") == stage["line"]
    assert "items/s" in text(browser, "stage-figures")
    wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#stage-chart canvas"))


@pytest.fixture
def folder_of_runs(tmp_path):
    runs = tmp_path / "runs"
    write_run(runs / "a", [float(i) for i in range(100)])
    write_run(runs / "b", [2.0 * i for i in range(100)], gamma=0.5)
    return runs


def test_runs_are_compared(browser, folder_of_runs):
    server = Server(folder_of_runs)
    try:
        open_page(browser, server.url)
        wait(browser, lambda: text(browser, "shown-runs") == "a\nb")
        lines = browser.execute_script("return charts.get('curve').plot.series.map(s => s.label)")
        assert lines == ["env steps", "a", "b"]
        browser.find_element(By.ID, "only-differences").click()
        wait(browser, lambda: "gamma 0.9 0.5" in text(browser, "config"))
        assert "env" not in text(browser, "config").split()
        browser.find_element(By.CSS_SELECTOR, "#shown-runs input").click()
        lines = browser.execute_script("return charts.get('curve').plot.series.map(s => s.label)")
        assert lines == ["env steps", "b"]
        browser.execute_script(
            "at('smoothing').value = 0.9; at('smoothing').dispatchEvent(new Event('input'))"
        )
        last = browser.execute_script("return charts.get('curve').plot.data[1].at(-1)")
        assert 170 < last < 198
        assert "ended before its plan was measured" in text(browser, "graph")
        write_run(folder_of_runs / "new", [5.0, 6.0])
        wait(browser, lambda: text(browser, "shown-runs") == "a\nb\nnew")
        boxes = browser.find_elements(By.CSS_SELECTOR, "#shown-runs input")
        assert [box.is_selected() for box in boxes] == [False, True, True]
        assert_no_errors(browser)
    finally:
        server.stop()


def test_page_follows_a_server_that_starts_again_with_other_runs(browser, folder_of_runs, tmp_path):
    write_run(tmp_path / "others" / "c", [5.0, 6.0])
    servers = [Server(folder_of_runs)]
    try:
        open_page(browser, servers[0].url)
        wait(browser, lambda: text(browser, "shown-runs") == "a\nb")
        servers.pop().stop()
        port = int(browser.current_url.rstrip("/").rpartition(":")[2])
        servers.append(Server(tmp_path / "others", port=port))
        wait(browser, lambda: browser.title.startswith("c "))
        assert text(browser, "run") == "c"
        assert "not answer" not in text(browser, "status")
    finally:
        for server in servers:
            server.stop()


def test_selected_run_stays_selected_if_another_one_is_found(browser, folder_of_runs, tmp_path):
    others = tmp_path / "others"
    write_run(others / "c", [5.0, 6.0], gamma=0.8)
    server = Server(folder_of_runs, others)
    try:
        open_page(browser, server.url)
        wait(browser, lambda: text(browser, "shown-runs") == "a\nb\nc")
        browser.execute_script("at('run').value = 1; at('run').dispatchEvent(new Event('change'))")
        wait(browser, lambda: browser.title.startswith("b "))
        browser.find_element(By.CSS_SELECTOR, "#shown-runs label:nth-of-type(2) input").click()
        browser.find_element(By.ID, "only-differences").click()
        wait(browser, lambda: "gamma 0.9 0.5 0.8" in text(browser, "config"))
        write_run(others / "b", [5.0, 6.0], gamma=0.7)  # renames the first b
        wait(browser, lambda: text(browser, "shown-runs") == "a\nruns/b\nc\nothers/b")
        wait(browser, lambda: "gamma 0.9 0.5 0.8 0.7" in text(browser, "config"))
        wait(browser, lambda: browser.title.startswith("runs/b "))
        boxes = browser.find_elements(By.CSS_SELECTOR, "#shown-runs input")
        assert [box.is_selected() for box in boxes] == [True, False, True, True]
    finally:
        server.stop()


def test_report_opens_without_a_server(browser, folder_of_runs, tmp_path, monkeypatch):
    from flowrl.cli.main import main

    monkeypatch.chdir(tmp_path)
    assert main(["report", "runs", "-o", "report.html"]) == 0
    open_page(browser, (tmp_path / "report.html").as_uri())
    assert text(browser, "status").startswith("ended: iteration")
    assert browser.find_elements(By.CSS_SELECTOR, "#curve canvas")
    browser.execute_script("at('run').value = 1; at('run').dispatchEvent(new Event('change'))")
    wait(browser, lambda: "198" in text(browser, "results"))
    assert_no_errors(browser)


def test_an_offline_run_shows_its_evaluations_and_no_workers(browser, tmp_path):
    from flowrl.cli.main import main

    trained = write_run(tmp_path / "runs/a", [1.0, 2.0], num_workers=2)
    stages = [stage("sampling", "gather")]
    ActivityLog(trained).append(activity(*stages, workers=[worker(1), worker(2)]))
    offline = write_run(tmp_path / "runs/b", [1.0], input_="experience")
    results = [
        {"timesteps_total": 100 * i, "evaluation": {"episode_reward_mean": i}} for i in (1, 2)
    ]
    (offline / "result.json").write_text("\n".join(map(json.dumps, results)) + "\n")
    report = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "runs"), "-o", str(report)]) == 0
    open_page(browser, report.as_uri())
    choose = "at('run').value = arguments[0]; at('run').dispatchEvent(new Event('change'))"
    browser.execute_script(choose, 0)
    wait(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, "#workers tr")) > 2)
    browser.execute_script(choose, 1)
    wait(browser, lambda: not browser.find_elements(By.CSS_SELECTOR, "#workers tr"))
    assert text(browser, "worker-state") == text(browser, "parts") == ""
    metric = "return [at('metric').value, charts.get('curve').plot.data[1].at(-1)]"
    shown = browser.execute_script(metric)
    assert shown == ["evaluation/episode_reward_mean", 2]
    browser.execute_script(choose, 0)
    wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#workers tr"))
    assert_no_errors(browser)


def test_curve_of_many_results_has_a_limited_number_of_points(browser, tmp_path):
    run = write_run(tmp_path / "r", [float(i % 500) for i in range(50_000)])
    server = Server(run)
    try:
        open_page(browser, server.url)
        wait(browser, lambda: "5,000,000 env steps" in text(browser, "status"))
        points = browser.execute_script("return charts.get('curve').plot.data[0].length")
        assert points <= 1000
        assert_no_errors(browser)
    finally:
        server.stop()
