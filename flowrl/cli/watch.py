"""`flowrl watch RUN_DIR …` and `flowrl report RUN_DIR …`: runs as a web page."""

from __future__ import annotations

from pathlib import Path

from flowrl.cli.arguments import Parser
from flowrl.errors import check_installed
from flowrl.settings import ConfigError
from flowrl.trainer.runs.learning_curves import find_runs

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
    _add_runs(parser)
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT,
        help=f"port on 127.0.0.1; 0 chooses a free one (default: {DEFAULT_PORT})",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    check_installed("starlette", "flowrl watch", extra="web")
    check_installed("uvicorn", "flowrl watch", extra="web")
    from flowrl.web.server import serve

    try:
        serve(options.runs, options.port)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"watch: cannot use port {options.port}: {error}") from error
    return 0


def report_command(arguments: list[str]) -> int:
    """Write the page as one file; return the exit code.

    Raises:
        ConfigError: a path is no run, or the file cannot be written.
    """
    parser = Parser(
        prog="flowrl report",
        description="Write runs as one HTML file that needs no server and no network.",
    )
    _add_runs(parser)
    parser.add_argument(
        "-o", "--output", type=Path, default=None, metavar="FILE",
        help="the file (default: report.html in the run directory, or here for several runs)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    runs = find_runs(options.runs)
    output = options.output or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    write_report(runs, output)
    print(f"report: {output}")
    return 0


def write_report(runs: list[Path], output: Path) -> None:
    """Write the report of runs.

    Raises:
        ConfigError: the file cannot be written.
    """
    from flowrl.web.html_report import report_html
    from flowrl.web.run_data import RunData

    html = report_html([RunData(path, path.resolve().name) for path in runs])
    try:
        output.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"report: cannot write {output}: {error.strerror}") from error


def _add_runs(parser: Parser) -> None:
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN_DIR", help="run directories, or folders of them"
    )
