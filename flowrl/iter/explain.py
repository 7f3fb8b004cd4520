"""The plan as text: a tree, a mermaid flowchart, JSON; and the way to one of its stages."""

from __future__ import annotations

import json
from typing import Any

from flowrl.iter.profiler import Profiler
from flowrl.iter.stage import Stage, walk


def tree(stage: Stage, clock: Profiler | None = None) -> str:
    """An indented tree, the end of the plan first; a shared stage is drawn once."""
    lines: list[str] = []
    seen: dict[int, int] = {}

    def draw(node: Stage, first: str, rest: str) -> None:
        if id(node) in seen:
            lines.append(f"{first}{node.shown()}  (the same as line {seen[id(node)]})")
            return
        lines.append(f"{first}{node.shown()}{_live(node, clock)}")
        seen[id(node)] = len(lines)
        lines.extend(rest + line for line in _on_shards(node))
        if len(node.parents) == 1:
            draw(node.parents[0], rest + "└─ ", rest + "   ")
            return
        for index, parent in enumerate(node.parents):
            last = index == len(node.parents) - 1
            branch = "└─" if last else "├─"
            draw(parent, f"{rest}{branch}[{index}] ", rest + ("      " if last else "│     "))

    draw(stage, "", "")
    return "\n".join(lines)


def _live(stage: Stage, clock: Profiler | None) -> str:
    """What the stage has done so far, once the plan runs."""
    if clock is None:
        return ""
    shares = clock.of(stage)
    figures = [f"{stage.items:,} items"]
    figures += [f"{name} {shares[name]:.0%}" for name in ("busy", "waiting", "blocked")]
    figures += [f"{name} {value}" for name, value in stage.extra_stats().items()]
    return f"  [{', '.join(figures)}]"


def _on_shards(stage: Stage) -> list[str]:
    """A line per step on the shards, with the sum of its items and its mean time shares."""
    kinds: dict[tuple[str, ...], list[list[dict[str, Any]]]] = {}
    for steps in stage.shard_stats().values():
        kinds.setdefault(tuple(row["stage"] for row in steps), []).append(steps)
    lines = []
    for names, shards in kinds.items():
        for name, step in zip(names, zip(*shards, strict=True), strict=True):
            items = sum(row["items"] for row in step)
            busy = sum(row["busy"] for row in step) / len(step)
            where = f"on {len(step)} shards" if len(step) > 1 else "on 1 shard"
            lines.append(f"   ({where}: {name}  [{items:,} items, busy {busy:.0%}])")
    return lines


def rows(stage: Stage, clock: Profiler | None = None) -> list[dict[str, Any]]:
    """One dict per stage, end first: `id`, `stage`, `chained_at`, `parents`, `items`, and when
    the plan runs its times and figures; `shards` holds the rows of the steps on each shard."""
    ids = {node: index for index, node in enumerate(walk(stage))}
    return [
        {
            "id": index,
            "stage": node.shown(),
            "chained_at": node.line,
            "parents": [ids[parent] for parent in node.parents],
            "items": node.items,
            **(clock.of(node) if clock is not None else {}),
            **node.extra_stats(),
            **({"shards": node.shard_stats()} if node.shard_stats() else {}),
        }
        for node, index in ids.items()
    ]


def mermaid(stage: Stage, clock: Profiler | None = None) -> str:
    """A mermaid flowchart, sources first."""
    lines = ["flowchart LR"]
    ids = {node: f"s{index}" for index, node in enumerate(walk(stage))}
    for node, name in ids.items():
        text = (node.shown() + _live(node, clock)).replace('"', "#quot;")
        lines.append(f'  {name}["{text}"]')
    for node, name in ids.items():
        lines += [f"  {ids[parent]} --> {name}" for parent in node.parents]
    return "\n".join(lines)


def as_json(stage: Stage, clock: Profiler | None = None) -> str:
    """The rows as JSON."""
    return json.dumps(rows(stage, clock), indent=1)


FORMATS = {"tree": tree, "mermaid": mermaid, "json": as_json}


def path_to(root: Stage, target: Stage) -> str:
    """`end › … › target`: the labels on the way from the end of the plan to a stage."""

    def search(node: Stage) -> list[str] | None:
        if node is target:
            return [node.short()]
        for index, parent in enumerate(node.parents):
            found = search(parent)
            if found is not None:
                own = f"{node.short()}[{index}]" if len(node.parents) > 1 else node.short()
                return [own, *found]
        return None

    found = search(root)
    return " › ".join(found if found is not None else [target.short()])
