"""Markdown tables that are generated from the code, for the site and for README.md."""

from __future__ import annotations

import argparse
import inspect
import io
import json
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from scores import LIMITS

import flowrl
from flowrl.algorithms.offline_config import OfflineConfig
from flowrl.benchmark.rows import rows_named, shipped_tables
from flowrl.benchmark.summary import LIBRARIES, markdown, read_results, score_text
from flowrl.errors import ConfigError
from flowrl.iter import LocalIterator
from flowrl.policies.policy_spec import PolicySpec
from flowrl.sampling.policy_map import policy_class_and_config
from flowrl.setting_aliases import SETTING_ALIASES
from flowrl.settings import SettingInfo, Settings, import_object
from flowrl.trainer import registry
from flowrl.trainer.metric_reference import METRICS
from flowrl.trainer.plan_files import shipped_plans
from flowrl.trainer.plan_settings import plan_config

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_ACTION_SPACES = {
    "discrete": spaces.Discrete(3),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "continuous": spaces.Box(-1, 1, (2,)),
    "mixed": spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(-1, 1, (1,))),
}
_YES, _NO = "✓", ""


def _row(cells: list[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _table(header: list[str], rows: list[list[Any]]) -> str:
    return "\n".join([_row(header), "|" + "---|" * len(header), *map(_row, rows)])


# -- plans -------------------------------------------------------------------------------------


def algorithms(link: str = "algorithms/{}.md") -> str:
    """Return the table of plans: what each learns from, and what it supports.

    The entries are found by building the policy of each plan with different spaces and models;
    plans with a replay buffer and an LSTM are trained for an iteration.

    Args:
        link: target of a plan's link, with {} for the page.
    """
    rows = []
    for plan, summary in shipped_plans().items():
        config = plan_config(plan)
        if config.policies:
            continue  # a combination of other algorithms
        operators = _operators_of(plan)
        kinds = [name for name, space in _ACTION_SPACES.items() if _supports(config, space)]
        space = _ACTION_SPACES[kinds[0]]
        rows.append(
            [
                f"[`{plan}`]({link.format(page_of(plan))})",
                _data(config, operators),
                ", ".join(kinds),
                _YES if _trains_with_lstm(plan, operators, space) else _NO,
                _YES if not isinstance(config, OfflineConfig) else _NO,
                _YES if {"Dequeue", "gather_async"} & set(operators) else _NO,
                summary.partition(": ")[2],
            ]
        )
    header = ["plan", "learns from", "actions", "LSTM", "multi-agent", "asynchronous", "in short"]
    return _table(header, rows)


def page_of(plan: str) -> str:
    """Return the page of the algorithm that a plan runs."""
    pages = {
        "a2c_replay": "a2c",
        "dqn_distributed": "dqn",
        "rainbow": "dqn",
        "ppo_async": "ppo",
        "bc": "marwil",
        "ppo_dqn": "combined",
        "three_way": "combined",
    }
    return pages.get(plan, plan)


def _supports(config: Any, action_space: spaces.Space, **model: Any) -> bool:
    """Return whether a plan's policy can be built for an action space and a model."""
    algorithm = import_object(config.algorithm)
    try:
        if model:
            config = config.updated(model={**config.model.explicit_settings(), **model})
        policy_class, settings = policy_class_and_config(
            "default_policy", PolicySpec(), algorithm.policy_class, config
        )
        policy_class(spaces.Box(-1, 1, (4,), np.float32), action_space, settings)
    except (ConfigError, NotImplementedError):
        return False
    return True


def _trains_with_lstm(plan: str, operators: list[str], action_space: spaces.Space) -> bool:
    """Return whether a plan supports an LSTM: its policy can be built with one, and its replay
    buffer, if it has one, stores sequences."""
    config = plan_config(plan)
    if not _supports(config, action_space, use_lstm=True):
        return False
    if _data(config, operators) != "replay buffer":
        return True
    try:
        with config.updated(model={**config.model.explicit_settings(), "use_lstm": True}).build(
            plan
        ) as built:
            built.train()
    except ValueError:  # a batch of sequences for a buffer of rows
        return False
    return True


def _data(config: Any, operators: list[str]) -> str:
    if isinstance(config, OfflineConfig):
        return "recorded experience"
    return "replay buffer" if "Replay" in operators else "new samples"


def _operators_of(plan: str) -> list[str]:
    """Return the names of the operators of a plan."""
    with plan_config(plan).build(plan=plan) as built:
        stages = [row["stage"] for row in built.plan.stats()]
    return [stage.removeprefix("for_each(").partition("(")[0] for stage in stages]


def algorithm_names() -> set[str]:
    """Return the names of the algorithms and of their config classes."""
    names = registry.algorithm_names()
    return {*names, *(f"{name}Config" for name in names)}


# -- settings ----------------------------------------------------------------------------------


def settings(path: str, own: str = "", group: str = "") -> str:
    """Return a table of settings.

    Args:
        path: import path "module:Config" of the class.
        own: "own" for those that other algorithms lack or whose default is another one.
        group: only those of this group.
    """
    config: type[Settings] = import_object(path)
    common = _flat(flowrl.AlgorithmConfig.describe()) if own else {}
    rows = [
        [f"`{name}`", f"`{info.type}`", f"`{_short(info.default)}`", info.help]
        for name, info in _flat(config.describe()).items()
        if group in ("", info.group)
        and (name not in common or common[name].default != info.default)
    ]
    return _table(["setting", "type", "default", "meaning"], rows)


def _flat(infos: list[SettingInfo], prefix: str = "") -> dict[str, SettingInfo]:
    """Return settings by name; those of records as "model.use_lstm", with the record's group."""
    flat = {}
    for info in infos:
        name = f"{prefix}{info.name}"
        inner = [i._replace(group=info.group) for i in info.inner()]
        flat.update(_flat(inner, f"{name}.") if inner else {name: info})
    return flat


def _short(value: Any) -> str:
    text = value.__qualname__ if inspect.isclass(value) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def settings_by_group() -> str:
    """Return the common settings of all algorithms, a table per group."""
    parts = []
    config = flowrl.AlgorithmConfig
    for group in config.groups():
        method = getattr(config, group, None)
        summary = (inspect.getdoc(method) or "").split("\n")[0]
        parts += [
            f"## {group}",
            "",
            f"`.{group}(…)`. {summary}",
            "",
            settings("flowrl.trainer.config:AlgorithmConfig", group=group),
            "",
        ]
    return "\n".join(parts)


def setting_aliases() -> str:
    """Return the table of other libraries' names of settings that are accepted."""
    rows = [[f"`{alias}`", f"`{name}`"] for alias, name in SETTING_ALIASES.items()]
    return _table(["accepted name", "setting"], rows)


# -- scores ------------------------------------------------------------------------------------


def scores(plan: str) -> str:
    """Return the learning curves of a plan and a table with the end of each; see scores.py."""
    runs = json.loads((Path(__file__).parent / "_static/scores" / f"{plan}.json").read_text())
    ends = [(run["seed"], *run["curve"][-1], run["reached"]) for run in runs]
    rows = [[seed, f"{steps:,}", f"{value:.0f}", reached] for seed, steps, value, reached in ends]
    picture = f"![Learning curves of {plan}](/_static/scores/{plan}.svg)"
    limit = f" --stop-timesteps {LIMITS[plan]}" if LIMITS[plan] else ""
    command = (
        f"`flowrl train {plan} --seed N{limit}` on {runs[0]['env']}, two CPU cores "
        f"(`python docs/scores.py {plan}`). The return is the mean of the last 100 episodes."
    )
    return f"{command}\n\n{picture}\n\n{_table(['seed', 'env steps', 'return', 'ended by'], rows)}"


def benchmark(table: str) -> str:
    """Return the scores of a table of `flowrl benchmark`, and where they were measured."""
    all_rows = rows_named([table], shipped_tables())
    rows = [row for row in all_rows if read_results(row, RESULTS)]
    missing = [row.name for row in all_rows if row not in rows]
    text = []
    if rows:
        results = [
            result for row in rows for library in LIBRARIES
            for result in read_results(row, RESULTS, library)
        ]  # fmt: skip
        places = sorted({f"{result['machine']} at commit {result['commit']}" for result in results})
        days = sorted({result["date"] for result in results})
        versions = read_results(rows[-1], RESULTS)[-1]["versions"]
        packages = ", ".join(f"{name} {n}" for name, n in versions.items())
        text += [
            markdown(rows, RESULTS),
            f"{days[0]}{f' to {days[-1]}' if len(days) > 1 else ''}; {'; '.join(places)}; "
            f"{packages}.",
            f"![Learning curves](../../benchmarks/results/{table}.svg)",
        ]
    if missing:
        text.append(f"Not trained: {', '.join(missing)}.")
    return "\n\n".join(text)


def benchmark_scores() -> str:
    """Return the recorded scores of the rows with a published score, in short."""
    lines = []
    for row in rows_named([], shipped_tables()):
        if row.published_scores and (results := read_results(row, RESULTS)):
            others = read_results(row, RESULTS, "sb3")
            lines.append([
                row.env, f"`{row.plan}`", f"{row.env_steps:,}", _score(results), _score(others),
                row.scores_text,
            ])  # fmt: skip
    header = ["environment", "plan", "env steps", "score", "SB3, trained here", "published"]
    return _table(header, lines)


def _score(results: list[dict[str, Any]]) -> str:
    """Return the score over seeds with their number."""
    seeds = f"{len(results)} seed{'s' * (len(results) > 1)}"
    return f"{score_text([one['score'] for one in results])}, {seeds}" if results else ""


# -- operators ---------------------------------------------------------------------------------

_NOT_CHAINED = {
    "AggregateBatches": "(takes a stream)",
    "Concurrently": "(joins streams)",
    "StandardMetricsReporting": "(ends a plan)",
}


def operators() -> str:
    """Return the table of operators: how each is chained, its items in and out, its meaning."""
    import flowrl.ops

    rows = []
    for name in sorted(flowrl.ops.__all__):
        operator = getattr(flowrl.ops, name)
        is_stream = name == "ParallelRollouts"  # a function
        if not is_stream and (not inspect.isclass(operator) or issubclass(operator, dict)):
            continue
        first = " ".join((inspect.getdoc(operator) or "").split("\n\n")[0].split())
        how, arrow, rest = first.partition(", ")
        if how in ("for_each", "combine", "filter") and arrow:
            items, _, meaning = rest.partition(": ")
        else:
            is_source = is_stream or issubclass(operator, LocalIterator)
            how = _NOT_CHAINED.get(name, "(source)" if is_source else "")
            items, meaning = "", first
        meaning = meaning[:1].upper() + meaning[1:]
        rows.append([f"[`{name}`](#flowrl.ops.{name})", how, items.replace("->", "→"), meaning])
    return _table(["operator", "chained with", "in → out", "meaning"], rows)


def operator_details() -> str:
    """Return an autodoc directive for each operator."""
    import flowrl.ops

    names = [n for n in sorted(flowrl.ops.__all__) if not n.startswith("_") and n != "ResultDict"]
    parts = []
    for name in names:
        kind = "class" if inspect.isclass(getattr(flowrl.ops, name)) else "function"
        parts += ["```{eval-rst}", f".. auto{kind}:: flowrl.ops.{name}", "```", ""]
    return "\n".join(parts)


# -- command line ------------------------------------------------------------------------------


def commands() -> str:
    """Return the help of every command."""
    from flowrl.cli.main import main

    parts = []
    names = (
        "train ppo", "resume", "evaluate", "replay", "explain", "check", "diagnose", "watch",
        "report", "plot", "plans", "tuned", "benchmark", "checkpoint", "checkpoint inspect",
        "tensorboard", "copy",
    )  # fmt: skip
    for name in names:
        output = io.StringIO()
        with redirect_stdout(output), suppress(SystemExit):
            main([*name.split(), "--help"])
        help_text = output.getvalue().strip()
        parts += [f"## flowrl {name}", "", "```text", help_text, "```", ""]
    return "\n".join(parts)


def metrics() -> str:
    """Return a table of metrics for each group of results."""
    parts, groups = [], {}
    for name, metric in METRICS.items():
        groups.setdefault(name.partition("/")[0] if "/" in name else "", []).append((name, metric))
    for group, members in groups.items():
        rows = [[f"`{name}`", metric.unit, metric.meaning] for name, metric in members]
        parts += [
            f"## {group or 'Whole result'}",
            "",
            _table(["name", "unit", "meaning"], rows),
            "",
        ]
    return "\n".join(parts)


# -- the rest ----------------------------------------------------------------------------------


def faults() -> str:
    """Return a table of the faults that tests cause."""
    sys.path.insert(0, str(ROOT))
    from tests.fault_cases import FAULTS

    rows = [[case.fault, case.outcome, str(len(case.tests))] for case in FAULTS]
    return _table(["fault", "what happens", "tests"], rows)


def errors() -> str:
    """Return the table of public exceptions."""
    paths = (
        "flowrl.errors:ConfigError",
        "flowrl.data.checkpoint_storage:CheckpointError",
        "flowrl.trainer.checkpointing:OtherPlanError",
        "flowrl.trainer.checkpoint_saving:OtherSettingsError",
        "flowrl.state_schema:StateError",
        "flowrl.policies.code_references:UntrustedCodeError",
        "flowrl.envs.validation:InvalidStepError",
        "flowrl.envs.env_process:EnvProcessError",
        "flowrl.iter.errors:ShardFailedError",
        "flowrl.iter.recovery:ConstructorError",
        "flowrl.iter.ray_health:RayLostError",
        "flowrl.iter.journal:ReplayError",
        "flowrl.errors:OfflineDataError",
        "flowrl.learners.learner:ProcessGroupError",
    )
    rows = []
    for path in paths:
        error = import_object(path)
        summary = " ".join((inspect.getdoc(error) or "").split("\n\n")[0].split())
        rows.append([f"`{error.__name__}`", f"`{error.__base__.__name__}`", f"`{error.__module__}`",
                     summary])  # fmt: skip
    return _table(["error", "is a", "module", "raised for"], rows)


def main() -> None:
    """Print a table: `python docs/tables.py algorithms`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("table")
    parser.add_argument("arguments", nargs="*")
    chosen = parser.parse_args()
    print(globals()[chosen.table](*chosen.arguments))


if __name__ == "__main__":
    main()
