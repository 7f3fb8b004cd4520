"""`flowrl report RUN_DIR …`: write runs as one HTML file."""

from __future__ import annotations

from pathlib import Path

from flowrl.cli.arguments import Parser, add_runs, file_path
from flowrl.errors import ConfigError
from flowrl.trainer.runs.learning_curves import find_runs
from flowrl.trainer.runs.run_directory import REPORT
from flowrl.whole_files import write_whole


def report_command(arguments: list[str]) -> int:
    """Write the page as one file; return the exit code.

    Raises:
        ConfigError: a path is no run, or the file cannot be written.
    """
    parser = Parser(
        prog="flowrl report",
        description="Write runs as one HTML file that needs no server and no network.",
    )
    add_runs(parser)
    parser.add_argument(
        "-o", "--output", type=file_path, default=None, metavar="FILE",
        help="the file (default: report.html in the run directory, or here for several runs)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    runs = find_runs(options.runs)
    output = (runs[0] if len(runs) == 1 else Path()) / REPORT
    if options.output is not None:
        output = options.output
        if output.is_dir():
            output = output / REPORT
    write_report(runs, output)
    print(f"report: {output}")
    return 0


def write_report(runs: list[Path], output: Path) -> None:
    """Write the report of runs.

    Raises:
        ConfigError: the file cannot be written.
    """
    from flowrl.web.html_report import report_html
    from flowrl.web.run_data import RunData, name_runs

    for run in runs:
        if (results := run / "result.json").is_file():
            results.open("rb").close()  # PermissionError: not a report without results
    data = [RunData(path) for path in runs]
    name_runs(data)
    html = report_html(data)
    try:
        if output.exists() and not output.is_file():  # such as /dev/stdout
            output.write_text(html, encoding="utf-8")
        else:
            write_whole(output.resolve(), html)  # a link stays a link
    except OSError as error:
        raise ConfigError(f"report: cannot write {output}: {error.strerror}") from error
