"""Draw a plan as SVG: a box per operator, sources on top, arrows in the direction of items."""

from __future__ import annotations

import re
from html import escape
from typing import Any

CHAR, LINE = 7.2, 18  # width of a character, height of a line, in pixels
PAD, GAP_X, GAP_Y = 8, 18, 26
WRAP = 28  # characters per line in a box


def svg(rows: list[dict[str, Any]]) -> str:
    """Return an SVG drawing of a plan.

    Args:
        rows: the result of `LocalIterator.stats()`: end of the plan first, `parents` are ids.
    """
    rows = _without_internals(rows)
    boxes = _place(rows, _depths(rows))
    width = max(x + w for x, _, w, _ in boxes.values()) + 1
    height = max(y + h for _, y, _, h in boxes.values()) + 1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" role="img" class="plan" font-family="monospace" font-size="12" '
        'stroke="currentColor" fill="none">'
    ]
    parts += [_arrow(boxes[parent], boxes[row["id"]]) for row in rows for parent in row["parents"]]
    for row in rows:
        x, y, w, h = boxes[row["id"]]
        parts.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{w:.0f}" height="{h:.0f}" rx="5"/>')
        for number, line in enumerate(_lines(row["stage"])):
            weight = "bold" if number == 0 else "normal"
            parts.append(
                f'<text x="{x + PAD:.0f}" y="{y + PAD + LINE * number + 10:.0f}" '
                f'font-weight="{weight}" stroke="none" fill="currentColor">'
                f"{escape(line)}</text>"
            )
    return "\n".join([*parts, "</svg>"])


def _without_internals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove the stages that operators are made of: each is replaced by its parents."""
    hidden = {
        row["id"]: row["parents"]
        for row in rows
        if row["stage"].startswith(("duplicate_child", "zip_with_source", "filter(ReportDue"))
    }

    def visible(ids: list[int]) -> list[int]:
        return [v for i in ids for v in (visible(hidden[i]) if i in hidden else [i])]

    return [{**row, "parents": visible(row["parents"])} for row in rows if row["id"] not in hidden]


def _depths(rows: list[dict[str, Any]]) -> dict[int, int]:
    """Return the level of each stage, 0 on top: its largest distance from a source."""
    by_id = {row["id"]: row for row in rows}
    depths: dict[int, int] = {}

    def depth(i: int) -> int:
        if i not in depths:
            depths[i] = 1 + max(map(depth, by_id[i]["parents"]), default=-1)
        return depths[i]

    for row in rows:
        depth(row["id"])
    for row in reversed(rows):  # a source stands right above what reads it
        readers = [depths[other["id"]] for other in rows if row["id"] in other["parents"]]
        if not row["parents"] and readers:
            depths[row["id"]] = min(readers) - 1
    return depths


def _place(
    rows: list[dict[str, Any]], depths: dict[int, int]
) -> dict[int, tuple[float, float, float, float]]:
    """Return (x, y, width, height) of each box; the stages of a chain stand below each other."""
    by_id = {row["id"]: row for row in rows}
    sizes = {}
    for row in rows:
        lines = _lines(row["stage"])
        sizes[row["id"]] = (max(map(len, lines)) * CHAR + 2 * PAD, LINE * len(lines) + PAD)
    lanes: dict[int, int] = {}

    def assign(i: int, lane: int) -> int:
        """Assign a lane to a stage and its ancestors; return the last lane in use."""
        lanes[i] = last = lane
        for number, parent in enumerate(p for p in by_id[i]["parents"] if p not in lanes):
            last = assign(parent, lane if number == 0 else last + 1)
        return last

    num_lanes = assign(rows[0]["id"], 0) + 1
    widths = [max(sizes[i][0] for i in lanes if lanes[i] == lane) for lane in range(num_lanes)]
    heights = [
        max(sizes[i][1] for i in depths if depths[i] == depth)
        for depth in range(max(depths.values()) + 1)
    ]
    boxes = {}
    for i, (width, height) in sizes.items():
        lane, depth = lanes[i], depths[i]
        left = 1 + sum(widths[:lane]) + GAP_X * lane
        top = 1 + sum(heights[:depth]) + GAP_Y * depth
        boxes[i] = (left + (widths[lane] - width) / 2, top, width, height)
    return boxes


def _lines(text: str) -> list[str]:
    """Return the lines of a box: the operator, then its arguments."""
    method, _, rest = text.partition("(")
    if method in ("for_each", "combine", "filter") and rest:
        text = rest.removesuffix(")")
    name, rest = re.fullmatch(r"([\w.\[\]]+)(.*)", text).groups()  # type: ignore[union-attr]
    arguments, _, source = rest.partition(") ") if rest.startswith("(") else ("", "", rest)
    arguments = arguments.removeprefix("(").removesuffix("" if source else ")")
    lines = [name]
    for argument in [*_split(arguments), *([source.strip()] if source else [])]:
        argument = argument if len(argument) <= WRAP else argument[: WRAP - 1] + "…"
        if len(lines) > 1 and len(lines[-1]) + len(argument) + 2 <= WRAP:
            lines[-1] += f", {argument}"
        else:
            lines.append(argument)
    return lines


def _split(arguments: str) -> list[str]:
    """Return the arguments, split at the commas that are not in brackets."""
    parts, depth = [""], 0
    for char in arguments:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def _arrow(start: tuple[float, float, float, float], end: tuple[float, float, float, float]) -> str:
    x0, y0 = start[0] + start[2] / 2, start[1] + start[3]
    x1, y1 = end[0] + end[2] / 2, end[1]
    # turn right below the box or right above the other one, where no box stands between
    turn = y0 + GAP_Y / 2 if x1 > x0 else y1 - GAP_Y / 2
    return f'<path d="M{x0:.0f} {y0:.0f} V{turn:.0f} H{x1:.0f} V{y1 - 1:.0f} m-4 -6 l4 6 l4 -6"/>'
