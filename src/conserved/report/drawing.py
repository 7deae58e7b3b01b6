"""Draws a plot as SVG when the page is built: no script, no waiting, no shift, and the same on paper as on screen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from conserved.report.scales import Scale, scale_of
from conserved.report.svg_elements import letters, number, path, shorten, width_of, words
from conserved.report.traces import Shade, heat_of, shades, trace_marks

WIDE, SMALL, NARROW = 840, 450, 340
"""Widths a plot is drawn for: a screen, one of two columns, a phone; the page shows the one that fits."""

_ROW = 19
"""Height of a line of the legend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes: its traces with their colours, and where on paper it goes."""

    traces: tuple[tuple[Mapping[str, Any], Shade], ...]
    x: Mapping[str, Any]
    y: Mapping[str, Any]
    title: str
    box: tuple[float, float, float, float]
    """Left, top, width and height of the whole panel, with everything that is written beside it."""


def draw(data: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], *, small: bool) -> Markup:
    """Return a plot for wide and for narrow places; a style sheet decides which is shown."""
    wide = _figure(data, layout, SMALL if small else WIDE, "wide", small=small)
    return Markup(wide + _figure(data, layout, NARROW, "narrow", small=small))


def _figure(data: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], width: int, kind: str, *, small: bool) -> str:
    coloured = list(zip(data, shades(data), strict=True))
    legend, used = _legend(coloured, width)
    pairs = list(dict.fromkeys(_axes(trace) for trace in data)) or [("x", "y")]
    stacked = width < 600 and len(pairs) > 1
    height = _height(layout, pairs, width, small=small, stacked=stacked)
    panels = []
    for index, (across, up) in enumerate(pairs):
        x, y = _of(layout, "xaxis", across), _of(layout, "yaxis", up)
        if stacked:
            each = height / len(pairs)
            box = (0.0, used + index * each, float(width), each)
        else:
            (left, right), (low, high) = _domain(x), _domain(y)
            box = (left * width, used + (1 - high) * height, (right - left) * width, (high - low) * height)
        own = tuple(item for item in coloured if _axes(item[0]) == (across, up))
        panels.append(Panel(traces=own, x=x, y=y, title=_title(layout, x, y, index, len(pairs)), box=box))
    body = legend + "".join(_panel(panel, layout) for panel in panels)
    total = used + height
    return (
        f'<svg class="{kind}" viewBox="0 0 {width} {number(total)}" width="{width}" height="{number(total)}" '
        f'aria-hidden="true" focusable="false">{body}</svg>'
    )


def _axes(trace: Mapping[str, Any]) -> tuple[str, str]:
    return str(trace.get("xaxis") or "x"), str(trace.get("yaxis") or "y")


def _of(layout: Mapping[str, Any], kind: str, name: str) -> Mapping[str, Any]:
    axis = layout.get(f"{kind}{name[1:]}")
    return axis if isinstance(axis, Mapping) else {}


def _domain(axis: Mapping[str, Any]) -> tuple[float, float]:
    given = axis.get("domain")
    if isinstance(given, Sequence) and len(given) == 2 and all(isinstance(end, int | float) for end in given):
        return max(0.0, float(given[0])), min(1.0, float(given[1]))
    return 0.0, 1.0


def _height(
    layout: Mapping[str, Any], pairs: Sequence[tuple[str, str]], width: int, *, small: bool, stacked: bool
) -> float:
    asked = layout.get("height")
    given = float(asked) if isinstance(asked, int | float) and 50 <= asked <= 3000 else None
    if stacked:
        return 270.0 * len(pairs)
    if _of(layout, "yaxis", pairs[0][1]).get("scaleanchor"):
        return float(min(width, given or 560))
    return given or (290.0 if small or width < 600 else 360.0)


def _title(layout: Mapping[str, Any], x: Mapping[str, Any], y: Mapping[str, Any], index: int, count: int) -> str:
    """Return the annotation that stands over a panel, as the layouts of the laboratory have it."""
    titles = [
        annotation
        for annotation in layout.get("annotations") or ()
        if isinstance(annotation, Mapping) and annotation.get("xref") == annotation.get("yref") == "paper"
    ]
    (left, right), (_, high) = _domain(x), _domain(y)
    for annotation in titles:
        across, up = annotation.get("x"), annotation.get("y")
        if not isinstance(across, int | float) or not isinstance(up, int | float):
            continue
        if left <= across <= right and abs(up - high) < 0.02:
            return str(annotation.get("text", ""))
    return str(titles[index].get("text", "")) if len(titles) == count else ""


def _legend(coloured: Sequence[tuple[Mapping[str, Any], Shade]], width: int) -> tuple[str, float]:
    """Return names over the plot, in as many lines as they need, and the height of that."""
    named: dict[str, Shade] = {}
    for trace, shade in coloured:
        if trace.get("showlegend", True) and trace.get("name"):
            named.setdefault(str(trace["name"]), shade)
    if len(named) < 2 and not any("Gaussian" in name for name in named):
        return "", 0.0
    x, y, drawn_names = 4.0, 12.0, list[str]()
    for name, shade in named.items():
        label = shorten(name, width - 40.0)
        wide = width_of(label) + 38
        if x + wide > width and x > 4:
            x, y = 4.0, y + _ROW
        drawn_names.append(shade.sample(x, y - 4) + words(x + 24, y, label, kind="name"))
        x += wide
    return f'<g class="legend">{"".join(drawn_names)}</g>', y + 12


def _panel(panel: Panel, layout: Mapping[str, Any]) -> str:
    left, top, wide, high = panel.box
    x, y = _scales(panel)
    y_title, x_title = _axis_title(panel.y), _axis_title(panel.x)
    upright = replace(y, start=100.0, end=0.0)
    labels = [text for _, text in upright.ticks(panel.y)]
    room = min(max((width_of(text, 11.0) for text in labels), default=0.0), 0.42 * wide) + 10
    inner_left = left + room + (16 if y_title else 0)
    inner_right = left + wide - 12
    x = replace(x, start=inner_left, end=inner_right)
    ticks = x.ticks(panel.x)
    turned = _labels_collide(x, ticks)
    longest = min(max((width_of(text, 11.0) for _, text in ticks), default=0.0), 150.0)
    below = (longest * 0.62 + 20 if turned else 20) + (18 if x_title else 0)
    over = 22 if panel.title else 8
    inner_top, inner_bottom = top + over, top + high - below - 4
    if panel.y.get("scaleanchor"):
        side = min(inner_right - inner_left, inner_bottom - inner_top)
        inner_bottom, inner_right = inner_top + side, inner_left + side
        x = replace(x, end=inner_right)
        ticks = x.ticks(panel.x)
    y = replace(y, start=inner_bottom, end=inner_top)
    frame = _frame(panel, x, y, ticks, turned=turned, room=room)
    if panel.title:
        frame += words((inner_left + inner_right) / 2, top + 14, panel.title, anchor="middle", kind="title")
    if x_title:
        frame += words((inner_left + inner_right) / 2, top + high - 5, x_title, anchor="middle", kind="axis")
    if y_title:
        frame += words(left + 11, (inner_top + inner_bottom) / 2, y_title, anchor="middle", kind="axis", turn=-90.0)
    return frame + trace_marks(panel.traces, x, y, layout) + _notes(layout, x, y, first=top < 200 and left < 200)


def _scales(panel: Panel) -> tuple[Scale, Scale]:
    across: list[Any] = []
    up: list[Any] = []
    zero = {"x": False, "y": False}
    for trace, _ in panel.traces:
        if trace.get("type") == "heatmap":
            columns, rows = heat_of(trace)[:2]
            across += columns
            up += rows
            continue
        across += _as_list(trace.get("x"))
        up += _as_list(trace.get("y"))
        if trace.get("type") == "bar":
            zero["x" if trace.get("orientation") == "h" else "y"] = True
    x = scale_of(across, panel.x, zero=zero["x"])
    y = scale_of(up, panel.y, zero=zero["y"])
    kinds = {trace.get("type", "scatter") for trace, _ in panel.traces}
    if kinds & {"bar", "heatmap"} and not zero["x"] and not x.categories and not x.log:
        x = replace(x, low=min((v for v in across if isinstance(v, int | float)), default=0) - 0.6,
                    high=max((v for v in across if isinstance(v, int | float)), default=1) + 0.6)  # fmt: skip
    if zero["x"] and not x.log:
        x = replace(x, high=x.high + 0.1 * (x.high - x.low))
    return x, y


def _as_list(values: Any) -> list[Any]:
    return list(values) if isinstance(values, Sequence) and not isinstance(values, str) else []


def _axis_title(axis: Mapping[str, Any]) -> str:
    title = axis.get("title")
    return str(title.get("text") or "") if isinstance(title, Mapping) else str(title or "")


def _labels_collide(x: Scale, ticks: Sequence[tuple[float, str]]) -> bool:
    """Return whether labels would run into each other."""
    if len(ticks) < 2:
        return False
    apart = min(abs(b[0] - a[0]) for a, b in itertools.pairwise(ticks))
    return bool(x.categories) and max(width_of(text, 11.0) for _, text in ticks) + 6 > apart


def _frame(panel: Panel, x: Scale, y: Scale, ticks: Sequence[tuple[float, str]], *, turned: bool, room: float) -> str:
    """Return grid, ticks and their labels."""
    elements = [
        path(
            f"M{number(x.start)},{number(y.end)}H{number(x.end)}V{number(y.start)}H{number(x.start)}Z", "", kind="frame"
        )
    ]
    apart = _apart(ticks)
    for coordinate, text in ticks:
        elements.append(path(f"M{number(coordinate)},{number(y.end)}V{number(y.start)}", "", kind="grid"))
        if turned:
            elements.append(
                words(coordinate + 4, y.start + 14, shorten(text, 150.0, 11.0), anchor="end", kind="tick", turn=-38.0)
            )
        else:
            elements.append(
                words(coordinate, y.start + 15, shorten(text, max(apart, 30.0), 11.0), anchor="middle", kind="tick")
            )
    for coordinate, text in y.ticks(panel.y):
        elements.append(path(f"M{number(x.start)},{number(coordinate)}H{number(x.end)}", "", kind="grid"))
        elements.append(words(x.start - 6, coordinate + 4, shorten(text, room, 11.0), anchor="end", kind="tick"))
    return f"<g>{''.join(elements)}</g>"


def _apart(ticks: Sequence[tuple[float, str]]) -> float:
    return min((abs(b[0] - a[0]) for a, b in itertools.pairwise(ticks)), default=math.inf)


def _notes(layout: Mapping[str, Any], x: Scale, y: Scale, *, first: bool) -> str:
    """Return annotations at places of the data, in the first panel."""
    elements = []
    for note in (layout.get("annotations") or ()) if first else ():
        if not isinstance(note, Mapping) or "paper" in (note.get("xref"), note.get("yref")):
            continue
        across, up = x.at(note.get("x")), y.at(note.get("y"))
        if across is not None and up is not None and letters(note.get("text", "")):
            anchor = (min(max(across, x.start), x.end), min(max(up, y.end), y.start))
            elements.append(words(anchor[0] + 4, anchor[1] - 4, note["text"], kind="note"))
    return "".join(elements)
