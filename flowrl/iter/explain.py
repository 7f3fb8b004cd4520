"""The plan as text, and the way from its end to one of its stages. Nothing runs."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.iter.stage import Stage


def walk(stage: Stage) -> Iterator[Stage]:
    """Every stage of the plan that ends in `stage`, each once, end first."""
    seen: set[int] = set()
    stack = [stage]
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            stack.extend(reversed(node.parents))


def explain(stage: Stage) -> str:
    """An indented tree, the end of the plan first; a shared stage is drawn once."""
    lines: list[str] = []
    seen: dict[int, int] = {}

    def draw(node: Stage, first: str, rest: str) -> None:
        if id(node) in seen:
            lines.append(f"{first}{node.shown()}  (the same as line {seen[id(node)]})")
            return
        lines.append(f"{first}{node.shown()}")
        seen[id(node)] = len(lines)
        if len(node.parents) == 1:
            draw(node.parents[0], rest + "└─ ", rest + "   ")
            return
        for index, parent in enumerate(node.parents):
            last = index == len(node.parents) - 1
            branch = "└─" if last else "├─"
            draw(parent, f"{rest}{branch}[{index}] ", rest + ("      " if last else "│     "))

    draw(stage, "", "")
    return "\n".join(lines)


def path_to(root: Stage, target: Stage) -> str:
    """`end › … › target`: the labels on the way from the end of the plan to a stage."""

    def search(node: Stage) -> list[str] | None:
        if node is target:
            return [node.shown()]
        for index, parent in enumerate(node.parents):
            found = search(parent)
            if found is not None:
                own = f"{node.shown()}[{index}]" if len(node.parents) > 1 else node.shown()
                return [own, *found]
        return None

    found = search(root)
    return " › ".join(found if found is not None else [target.shown()])
