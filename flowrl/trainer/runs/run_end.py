"""RunEnd: how a run ended, as data and in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.trainer.runs.formatting import format_count


@dataclass
class RunEnd:
    """How a run ended.

    Attributes:
        reason: the limit that was reached, "interrupted", "terminated", "terminal closed" or
            "output closed".
        exit_code: 0; INTERRUPTED after Ctrl-C; TERMINATED after SIGTERM; TERMINAL_CLOSED after
            SIGHUP; OUTPUT_CLOSED if the reader of the output closed it, as `head` does.
        checkpoint: the last checkpoint; None if none was written.
        seconds: duration of the training.
        needs_limit: a resumed run ends at once without larger limits.
    """

    reason: str
    exit_code: int
    checkpoint: Path | None
    seconds: float
    needs_limit: bool


_FAILURES = {
    "num_env_restarts": "environment failure",
    "num_remote_worker_restarts": "worker restart",
}


def describe_end(end: RunEnd, algorithm: Any) -> str:
    """Return how a run of an algorithm ended, in words."""
    result = algorithm.last_result
    ended = "stopped" if end.exit_code else "reached"
    text = f"{ended}: {end.reason}, after {end.seconds:.1f} s"
    if result is None:
        return text
    failures = [
        format_count(number, noun)
        for name, noun in _FAILURES.items()
        if (number := result.get(name, 0))
    ]
    if failures:
        text += f". {' and '.join(failures)}: see the warnings above"
    if not algorithm.config.samples:
        if (mean := result.get("evaluation", {}).get("episode_reward_mean")) is not None:
            text += f". Mean return of the last evaluation: {mean:,.1f}"
    elif result.get("episodes_total") == 0 and not (failures or end.exit_code):
        text += (
            ". No episode has ended, so there are no returns: train longer, or set horizon if the "
            "environment has no limit"
        )
    interval = algorithm.config.evaluation_interval
    if interval is not None and algorithm.iteration < interval and not end.exit_code:
        text += (
            f". No evaluation took place: evaluation_interval is {interval}, and the training had "
            f"{format_count(algorithm.iteration, 'iteration')}"
        )
    return text
