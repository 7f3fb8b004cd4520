"""A local web server that shows runs; it reads run directories and changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.trainer.runs.learning_curves import find_runs
from flowrl.web.html_report import PAGE, page_html
from flowrl.web.run_data import RunData, name_runs

HOST = "127.0.0.1"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:"
    ),
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def make_app(paths: Sequence[Path]) -> Any:
    """Return the application of starlette that shows runs.

    It answers only requests to 127.0.0.1 or localhost, so that no other site can read it through
    the user's browser, and serves only the page and what `RunData` reads.

    Args:
        paths: run directories, or folders of them, in which new runs may start.

    Raises:
        ConfigError: a path is neither.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, JSONResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    data = [RunData(path) for path in find_runs(paths)]
    name_runs(data)
    lock = threading.Lock()  # requests are answered in threads

    seen: set[tuple[Path, int]] = set()  # files with settings, and their times

    def add_new_runs() -> None:
        files = {file for path in paths for file in path.glob("*/config.json")}
        times = {(file, _modified_at(file)) for file in files}
        if times == seen:
            return
        seen.clear()
        seen.update(times)
        known = {run.path.resolve() for run in data}
        for path in paths:
            with suppress(ConfigError):  # the path was removed
                for run in find_runs([path], warn=False):
                    if run.resolve() not in known:
                        known.add(run.resolve())
                        with suppress(ConfigError):  # it is being created, or is damaged
                            data.append(RunData(run))
                            name_runs(data)

    def index(request: Any) -> Any:
        return HTMLResponse(page_html(), headers=HEADERS)

    def list_runs(request: Any) -> Any:
        with lock:
            add_new_runs()
            runs = [
                {"id": str(run.path), "name": run.name, "changed": run.changed()} for run in data
            ]
        return JSONResponse(runs, headers=HEADERS)

    def show_run(request: Any) -> Any:
        number = int(request.path_params["number"])
        if number >= len(data):
            raise HTTPException(404)
        with lock:
            values = data[number].to_json()
        return JSONResponse(values, headers=HEADERS)

    def curves(request: Any) -> Any:
        metric = request.query_params.get("metric", "episode_reward_mean")
        with lock:
            for run in data:
                run.update()
            values: list[Any] = [run.curve(metric) for run in data]
        return JSONResponse(values, headers=HEADERS)

    return Starlette(
        routes=[
            Route("/", index),
            Route("/api/runs", list_runs),
            Route("/api/runs/{number:int}", show_run),
            Route("/api/curves", curves),
            Mount("/page", StaticFiles(directory=PAGE)),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])],
    )


def _modified_at(file: Path) -> int:
    """Return the time of the last change of a file [ns]; 0 if it was removed."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def serve(paths: Sequence[Path], port: int) -> None:
    """Serve the page until the process is interrupted.

    Args:
        paths: see `make_app`.
        port: a free port is chosen if it is 0.

    Raises:
        ConfigError: the port is in use; see `make_app`.
    """
    import socket

    import uvicorn

    app = make_app(paths)
    try:
        listener = socket.create_server((HOST, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"watch: cannot use port {port}: {error}") from error
    print(f"http://{HOST}:{listener.getsockname()[1]}/  (Ctrl-C ends the server)", flush=True)
    config = uvicorn.Config(app, log_level="warning")
    uvicorn.Server(config).run(sockets=[listener])
