"""A local web server that shows runs; it reads run directories and changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.web.html_report import PAGE, page_html
from flowrl.web.run_data import RunData

HOST = "127.0.0.1"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:"
    ),
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def make_app(runs: Sequence[Path]) -> Any:
    """Return the application of starlette that shows these runs.

    It answers only requests to 127.0.0.1 or localhost, so that no other site can read it through
    the user's browser, and serves only the page and what `RunData` reads.

    Args:
        runs: run directories.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, JSONResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    names = _names(runs)
    data = [RunData(path, name) for path, name in zip(runs, names, strict=True)]
    lock = threading.Lock()  # requests are answered in threads

    def index(request: Any) -> Any:
        return HTMLResponse(page_html(), headers=HEADERS)

    def list_runs(request: Any) -> Any:
        return JSONResponse([{"name": run.name} for run in data], headers=HEADERS)

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


def _names(runs: Sequence[Path]) -> list[str]:
    """Return the names of the runs' folders, with their parents if two are equal."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def serve(runs: Sequence[Path], port: int) -> None:
    """Serve the page until the process is interrupted.

    Args:
        runs: run directories.
        port: a free port is chosen if it is 0.

    Raises:
        OSError: the port is in use.
    """
    import socket

    import uvicorn

    listener = socket.create_server((HOST, port))
    print(f"http://{HOST}:{listener.getsockname()[1]}/  (Ctrl-C ends the server)", flush=True)
    config = uvicorn.Config(make_app(runs), log_level="warning")
    uvicorn.Server(config).run(sockets=[listener])
