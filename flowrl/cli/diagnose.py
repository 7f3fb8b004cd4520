"""`flowrl diagnose RUN_DIR`: what limits a running or finished run."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from flowrl.cli.arguments import Parser, file_path
from flowrl.cli.display import printable
from flowrl.data.checkpoint import list_checkpoints
from flowrl.errors import ConfigError
from flowrl.monitoring.activity import Activity, StageActivity, WorkerActivity
from flowrl.trainer.runs.activity_log import read_activities
from flowrl.trainer.runs.saved_run import is_in_use, read_config, read_events

_PARTS = ("env_step_s", "reset_s", "inference_s", "collection_s", "postprocess_s", "weights_s")


def diagnose_command(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    parser = Parser(
        prog="flowrl diagnose",
        description="Say what limits a running or finished run, with the figures of its last "
        "seconds.",
    )
    parser.add_argument("run_dir", type=file_path, metavar="RUN_DIR", help="a run directory")
    run_dir = parser.parse_args(arguments).run_dir
    activities = read_activities(run_dir)
    if not activities:
        read_config(run_dir)  # raises if it is no run directory
        raise ConfigError(
            f"diagnose: {run_dir} has no measurements: {_why_not_measured(run_dir)}. "
            f"{_state_of(run_dir)}"
        )
    print(printable(f"{_state_of(run_dir)}\n{format_activity(activities[-1])}"))
    return 0


def _why_not_measured(run_dir: Path) -> str:
    """Return why a run has no measurements."""
    if not read_config(run_dir).get("monitor", True):
        return "its setting monitor is off"
    results = run_dir / "result.json"
    if results.exists() and results.stat().st_size:
        return (
            "it ended less than two seconds after its first fragment, with which measuring begins: "
            "train longer, or use a smaller train_batch_size"
        )
    return (
        "its first result is not complete (if an environment hangs, set env_step_timeout_s), or it "
        "ended before"
    )


def _state_of(run_dir: Path) -> str:
    """Return a line that says whether a run trains, or how it ended."""
    in_use = is_in_use(run_dir)
    events = read_events(run_dir, in_use)
    if in_use or not events:
        return "The run is training." if in_use else "The run is not training."
    last = events[-1]
    text = f"The run has {last['kind']}: {last['text']}"
    if last["kind"] != "killed":
        return text
    text = f"The run did not end: {last['text']}."
    if checkpoints := list_checkpoints(run_dir):
        # not imported above: it imports torch
        from flowrl.trainer.runs.continuing import trust_flag

        path = shlex.quote(str(run_dir))
        return f"{text} To continue it: flowrl resume {path}{trust_flag(checkpoints[-1])}"
    return f"{text} It has no checkpoint: start it again with the same run directory"


def format_activity(activity: Activity) -> str:
    """Return a diagnosis and the figures behind it as text."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(activity.time))
    counts = Counter(stage.name for stage in activity.stages)
    lines = [
        activity.diagnosis,
        "",
        f"{activity.seconds:.1f} seconds until {when}, iteration {activity.iteration}, "
        f"{activity.env_steps_total:,} env steps",
        "",
        *_table(
            ("operator", "items/s", "busy", "waiting", "blocked"),
            (_stage_row(s, activity.seconds, counts[s.name] > 1) for s in activity.stages),
        ),
    ]
    if activity.workers:
        names = [part.removesuffix("_s") for part in _PARTS]
        lines += [
            "",
            *_table(
                ("worker", "env steps/s", "busy", *names),
                map(_worker_row, activity.workers),
            ),
        ]
    return "\n".join(lines)


def _stage_row(stage: StageActivity, seconds: float, shows_line: bool) -> tuple[str, ...]:
    name = f"{stage.name} ({stage.line})" if shows_line else stage.name
    shares = (f"{share:.0%}" for share in (stage.busy, stage.waiting, stage.blocked))
    return name, f"{stage.items / seconds:.1f}", *shares


def _worker_row(worker: WorkerActivity) -> tuple[str, ...]:
    seconds = {part: worker.seconds.get(part, 0.0) for part in _PARTS}
    seconds["env_step_s"] = max(seconds["env_step_s"] - seconds["reset_s"], 0.0)  # contains resets
    parts = (f"{worker.share_of(value):.0%}" for value in seconds.values())
    rate = worker.env_steps / worker.period_s if worker.period_s > 0 else 0.0
    return str(worker.index), f"{rate:,.0f}", f"{worker.busy:.0%}", *parts


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table; the first column is aligned to the left."""
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table
    ]
