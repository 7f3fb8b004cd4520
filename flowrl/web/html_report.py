"""The page as HTML: for the server, and as a report in one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.web.run_data import RunData

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("vendor/uPlot.iife.min.js", "charts.js", "page.js")
STYLES = ("vendor/uPlot.min.css", "page.css")
MAX_REPORT_METRICS = 40  # whose curves are part of a report
MAX_REPORT_POINTS = 10_000  # of all curves of a report


def page_html() -> str:
    """Return the page that gets its data from the server."""
    links = "".join(f'<link rel="stylesheet" href="/page/{name}">' for name in STYLES)
    scripts = "".join(f'<script src="/page/{name}" defer></script>' for name in SCRIPTS)
    return _fill(links, scripts)


def report_html(runs: Sequence[RunData]) -> str:
    """Return the page with the data of runs, as one file that needs no server and no network."""
    values: list[dict[str, Any]] = []
    most = max(MAX_REPORT_POINTS // (MAX_REPORT_METRICS * len(runs)), 20)
    for run in runs:
        run.update()
    names = {metric for run in runs for metric in run.metrics()}
    metrics = _most_important([name for name in names if not name.startswith("counters/")])
    for run in runs:
        values.append(run.to_json([name for name in metrics if name in run.metrics()], most))
    # "<" could end the script
    data = json.dumps(values, allow_nan=False).replace("<", "\\u003c")
    styles = "".join(f"<style>{_page_file(name)}</style>" for name in STYLES)
    scripts = f'<script id="data" type="application/json">{data}</script>'
    scripts += "".join(f"<script>{_page_file(name)}</script>" for name in SCRIPTS)
    return _fill(styles, scripts)


def _most_important(metrics: list[str]) -> list[str]:
    groups = (
        "episode_reward_mean", "evaluation/episode_reward_mean", "episode_", "custom_metrics/",
        "evaluation/", "learners/", "timers/", "env_runners/",
    )  # fmt: skip
    rank = {name: [*(name.startswith(g) for g in groups), True].index(True) for name in metrics}
    return sorted(metrics, key=lambda name: (rank[name], name))[:MAX_REPORT_METRICS]


def _page_file(name: str) -> str:
    return (PAGE / name).read_text("utf-8")


def _fill(head: str, scripts: str) -> str:
    page = _page_file("index.html")
    return page.replace("<!-- styles -->", head).replace("<!-- scripts -->", scripts)
