"""Command-line options for the stop rules of a run."""

from __future__ import annotations

import argparse

from flowrl.cli.arguments import count, finite_float, json_object, positive_float
from flowrl.errors import ConfigError
from flowrl.trainer.runs.stop_rules import (
    DEFAULT_TIMESTEPS,
    MetricRule,
    StopRules,
    metric_rule,
    metric_rules,
)


def add_stop_options(
    parser: argparse.ArgumentParser,
    default: str = "the environment's own reward threshold, and the plan's total_timesteps or "
    f"{DEFAULT_TIMESTEPS:,} env steps",
) -> None:
    """Add the options that `stop_rules_of` reads.

    Args:
        parser: gets the options.
        default: rules that apply without these options, for the help text.
    """
    group = parser.add_argument_group(
        "stop rules", f"Stop at the first of these limits. Default: {default}."
    )
    group.add_argument(
        "--stop-reward",
        type=finite_float,
        metavar="RETURN",
        help="mean return of the last episodes (metrics_num_episodes_for_smoothing, default: 100); "
        "applies once that many have ended",
    )
    group.add_argument(
        "--stop-timesteps",
        type=count,
        metavar="N",
        help="env steps; schedules in percent reach 100%% there",
    )
    group.add_argument("--stop-iters", type=count, metavar="N", help="iterations")
    group.add_argument(
        "--stop-time-s",
        type=positive_float,
        metavar="SECONDS",
        help="seconds since start or resume; stops after the first iteration that ends later",
    )
    group.add_argument(
        "--stop",
        type=_parse_metric_rules,
        action="append",
        default=[],
        metavar="METRIC=VALUE",
        help="minimum of any metric, by its path a/b/c in a result (METRIC<=VALUE: maximum); "
        "applies from the first result on",
    )


def add_display_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--display`."""
    parser.add_argument(
        "--display",
        choices=("auto", "live", "line", "none"),
        default="auto",
        help="show the progress live, with operators and the diagnosis; as lines of a table; or "
        "not at all (default: live on a terminal, else lines)",
    )


def add_report_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--report`."""
    parser.add_argument(
        "--report", action="store_true", help="write report.html into the run directory at the end"
    )


def stop_rules_of(options: argparse.Namespace) -> StopRules:
    """Return the rules of the options that `add_stop_options` adds."""
    return StopRules(
        options.stop_reward,
        options.stop_timesteps,
        options.stop_iters,
        options.stop_time_s,
        [rule for rules in options.stop for rule in rules],
    )


def _parse_metric_rules(text: str) -> list[MetricRule]:
    """Parse one rule, or a JSON object metric -> value."""
    try:
        if text.lstrip().startswith("{"):
            return metric_rules(json_object(text))
        return [metric_rule(text)]
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("stop: ")) from None
