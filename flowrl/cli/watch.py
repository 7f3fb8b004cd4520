"""`flowrl watch RUN_DIR …`: show runs on a local web page."""

from __future__ import annotations

from flowrl.cli.arguments import Parser, add_runs
from flowrl.errors import check_installed

DEFAULT_PORT = 6600


def watch_command(arguments: list[str]) -> int:
    """Serve the page until it is interrupted; return the exit code.

    Raises:
        ConfigError: the extra is not installed, a path is no run, or the port is in use.
    """
    parser = Parser(
        prog="flowrl watch",
        description="Show running and finished runs on a local web page: the plan, the diagnosis, "
        "learning curves, workers, events.",
    )
    add_runs(parser)
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT,
        help=f"port on 127.0.0.1; 0 chooses a free one (default: {DEFAULT_PORT})",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    check_installed("starlette", "flowrl watch", extra="web")
    check_installed("uvicorn", "flowrl watch", extra="web")
    from flowrl.web.server import serve

    serve(options.runs, options.port)
    return 0
