"""Displays of a plan: indented tree, mermaid flowchart, JSON, and the rows of `stats()`."""

from __future__ import annotations

import json
from numbers import Integral, Real
from typing import Any

from flowrl.iter.profiler import Profiler
from flowrl.iter.stage import Stage, walk

MAX_DEPTH = 8  # of dicts and lists in the statistics of an operator


def tree(stage: Stage, profiler: Profiler | None = None) -> str:
    """Return an indented tree, the end of the plan first; a shared stage is drawn once."""
    lines: list[str] = []
    drawn_at: dict[int, int] = {}

    def draw(node: Stage, first: str, rest: str) -> None:
        if id(node) in drawn_at:
            lines.append(f"{first}{node}  (the same as line {drawn_at[id(node)]})")
            return
        lines.append(f"{first}{node}{_progress(node, profiler)}")
        drawn_at[id(node)] = len(lines)
        lines.extend(rest + line for line in _shard_lines(node))
        if len(node.parents) == 1:
            draw(node.parents[0], rest + "└─ ", rest + "   ")
            return
        for index, parent in enumerate(node.parents):
            last = index == len(node.parents) - 1
            branch = "└─" if last else "├─"
            draw(parent, f"{rest}{branch}[{index}] ", rest + ("      " if last else "│     "))

    draw(stage, "", "")
    return "\n".join(lines)


def _progress(stage: Stage, profiler: Profiler | None) -> str:
    """Return the items, time shares and extra stats of a stage; empty before the plan starts."""
    if profiler is None:
        return ""
    times = profiler.times(stage)
    values = [f"{stage.items:,} items"]
    values += [f"{name} {times[name]:.0%}" for name in ("busy", "waiting", "blocked")]
    values += [f"{name} {value}" for name, value in stage.extra_stats().items()]
    return f"  [{', '.join(values)}]"


def _shard_lines(stage: Stage) -> list[str]:
    """Return a line per stage on the shards, last step first: the sum of its items and its mean
    time share."""
    shards_by_steps: dict[tuple[str, ...], list[list[dict[str, Any]]]] = {}
    for rows in stage.shard_stats().values():
        shards_by_steps.setdefault(tuple(row["stage"] for row in rows), []).append(rows)
    lines = []
    for titles, shards in shards_by_steps.items():
        for title, step in zip(titles, zip(*shards, strict=True), strict=True):
            items = sum(row["items"] for row in step)
            busy = sum(row["busy"] for row in step) / len(step)
            where = f"on {len(step)} shards" if len(step) > 1 else "on 1 shard"
            lines.append(f"   ({where}: {title}  [{items:,} items, busy {busy:.0%}])")
    return lines


def stats_rows(stage: Stage, profiler: Profiler | None = None) -> list[dict[str, Any]]:
    """Return one dict per stage, end first, as described in `LocalIterator.stats()`."""
    ids = {node: index for index, node in enumerate(walk(stage))}
    rows = []
    for node, index in ids.items():
        row = {
            "id": index,
            "stage": str(node),
            "chained_at": node.line,
            "parents": [ids[parent] for parent in node.parents],
            "items": node.items,
            **(profiler.times(node) if profiler is not None else {}),
            **({"shards": shards} if (shards := node.shard_stats()) else {}),
        }
        for name, value in _plain(node.extra_stats()).items():
            row[f"own_{name}" if name in row else name] = value
        rows.append(row)
    return rows


def mermaid(stage: Stage, profiler: Profiler | None = None) -> str:
    """Return a mermaid flowchart, sources first."""
    lines = ["flowchart LR"]
    ids = {node: f"s{index}" for index, node in enumerate(walk(stage))}
    for node, node_id in ids.items():
        text = (str(node) + _progress(node, profiler)).replace('"', "#quot;")
        lines.append(f'  {node_id}["{text}"]')
    for node, node_id in ids.items():
        lines += [f"  {ids[parent]} --> {node_id}" for parent in node.parents]
    return "\n".join(lines)


def as_json(stage: Stage, profiler: Profiler | None = None) -> str:
    """Return the rows of `stats_rows` as JSON."""
    return json.dumps(stats_rows(stage, profiler), indent=1)


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value of an operator's `extra_stats` in the types of JSON; others as text."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if depth < MAX_DEPTH and isinstance(value, dict):
        return {_text(name): _plain(part, depth + 1) for name, part in value.items()}
    if depth < MAX_DEPTH and isinstance(value, (list, tuple)):
        return [_plain(part, depth + 1) for part in value]
    if getattr(value, "size", None) == 1 and isinstance(number := value.item(), (bool, int, float)):
        return number
    return _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # it must not end a training that is displayed
        return f"<{type(value).__name__} whose text raised {type(error).__name__}>"


FORMATS = {"tree": tree, "mermaid": mermaid, "json": as_json}
