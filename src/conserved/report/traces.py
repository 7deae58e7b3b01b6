"""The kinds of trace a report draws: lines and marks, bars, and maps of numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conserved.report.numerals import numeral
from conserved.report.scales import Scale
from conserved.report.svg_elements import colour, mark, number, path, plain, polyline, stroke, words

_MOST_TITLES = 400
"""Marks that say what they are when pointed at; more are drawn as one."""

_MOST_CELLS = 150
"""Cells of a map with their number in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shade:
    """A trace's colour, and how it looks in the legend."""

    colour: str
    trace: Mapping[str, Any]

    def sample(self, x: float, y: float) -> str:
        """Return a short piece of it."""
        if self.trace.get("type", "scatter") != "scatter":
            return path(f"M{number(x + 3)},{number(y - 5)}h13v10h-13Z", f"fill:{self.colour}")
        drawn = ""
        if "lines" in str(self.trace.get("mode", "lines")):
            line = dict(self.trace.get("line") or {})
            line["width"] = min(float(line.get("width") or 2), 4.0)
            drawn += path(f"M{number(x)},{number(y)}h19", stroke(line, self.colour))
        if "markers" in str(self.trace.get("mode", "")):
            drawn += path(mark(x + 9.5, y, _symbol(self.trace), 8.0), _fill(self.trace, self.colour))
        return drawn


def shades(data: Sequence[Mapping[str, Any]]) -> list[Shade]:
    """Return the colour of every trace: its own, or the next of the page's."""
    result, used = [], 0
    for trace in data:
        line, marker = trace.get("line"), trace.get("marker")
        asked = (line if isinstance(line, Mapping) else {}).get("color")
        asked = asked or (marker if isinstance(marker, Mapping) else {}).get("color")
        chosen = colour(asked, "")
        if not chosen:
            chosen = f"var(--line-{used % 8 + 1})"
            used += 1
        result.append(Shade(colour=chosen, trace=trace))
    return result


def trace_marks(
    traces: Sequence[tuple[Mapping[str, Any], Shade]], x: Scale, y: Scale, layout: Mapping[str, Any]
) -> str:
    """Return everything that is drawn in a panel, in the order it is given; bars behind the rest."""
    bars = [(trace, shade) for trace, shade in traces if trace.get("type") == "bar"]
    marks = [_bars(bars, x, y, layout)] if bars else []
    for trace, shade in traces:
        kind = trace.get("type", "scatter")
        if kind == "scatter":
            marks.append(_scatter(trace, shade.colour, x, y))
        elif kind == "heatmap":
            marks.append(_heatmap(trace, x, y))
    return f'<g class="marks">{"".join(marks)}</g>'


def _points(trace: Mapping[str, Any], x: Scale, y: Scale) -> Iterator[tuple[int, float | None, float | None]]:
    across, up = trace.get("x"), trace.get("y")
    up = up if isinstance(up, Sequence) and not isinstance(up, str) else ()
    across = across if isinstance(across, Sequence) and not isinstance(across, str) else range(len(up))
    for index, (first, other) in enumerate(zip(across, up, strict=False)):
        yield index, x.at(first), y.at(other)


def _scatter(trace: Mapping[str, Any], shade: str, x: Scale, y: Scale) -> str:
    points = list(_points(trace, x, y))
    mode = str(trace.get("mode") or ("lines" if len(points) > 1 else "markers"))
    name = plain(trace.get("name") or "")
    marks = []
    if trace.get("fill") == "toself":
        outline = [(a, b) for _, a, b in points if a is not None and b is not None]
        fill = colour(trace.get("fillcolor"), shade)
        marks.append(path(polyline([_held(outline, x, y)], closed=True), f"fill:{fill};stroke:none"))
    elif "lines" in mode:
        line = trace.get("line") if isinstance(trace.get("line"), Mapping) else {}
        pieces = [_thin(piece) for piece in _pieces(points, x, y)]
        if (line or {}).get("shape") == "hvh":
            pieces = [_as_steps(piece) for piece in pieces]
        drawn = polyline(pieces)
        if drawn:
            marks.append(path(drawn, stroke(line, shade, opacity=trace.get("opacity", 1)), kind="line", title=name))
    if "markers" in mode:
        marks.append(_markers(trace, points, shade, x, y))
    return "".join(marks)


def _pieces(
    segments: Sequence[tuple[int, float | None, float | None]], x: Scale, y: Scale
) -> list[list[tuple[float, float]]]:
    """Return runs of points without a gap, held to the panel: a line that leaves it goes on along its edge."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for _, a, b in segments:
        if a is None or b is None:
            pieces.append([])
        else:
            pieces[-1].append((a, b))
    return [_held(piece, x, y) for piece in pieces if piece]


def _held(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> list[tuple[float, float]]:
    left, right = sorted((x.start, x.end))
    top, bottom = sorted((y.start, y.end))
    return [(min(max(a, left), right), min(max(b, top), bottom)) for a, b in points]


def _thin(points: list[tuple[float, float]], most: int = 700) -> list[tuple[float, float]]:
    """Return a long line without what cannot be seen.

    Of the points in one column of pixels, the first, the extremes and the last remain.
    """
    if len(points) <= most:
        return points
    points_shown: list[tuple[float, float]] = []
    column: list[tuple[float, float]] = []
    for point in [*points, (math.inf, 0.0)]:
        if column and (math.isinf(point[0]) or int(point[0]) != int(column[0][0])):
            chosen = {0, len(column) - 1}
            chosen |= {
                min(range(len(column)), key=lambda n: column[n][1]),
                max(range(len(column)), key=lambda n: column[n][1]),
            }
            points_shown += [column[index] for index in sorted(chosen)]
            column = []
        column.append(point)
    return points_shown


def _as_steps(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Level at each point, with the steps half way between."""
    result: list[tuple[float, float]] = []
    for point, after in zip(points, [*points[1:], points[-1]], strict=True):
        middle = (point[0] + after[0]) / 2
        result += [point, (middle, point[1]), (middle, after[1])]
    return result


def _symbol(trace: Mapping[str, Any]) -> str:
    marker = trace.get("marker")
    symbol = marker.get("symbol") if isinstance(marker, Mapping) else None
    return symbol if isinstance(symbol, str) else "circle"


def _fill(trace: Mapping[str, Any], shade: str) -> str:
    if _symbol(trace) == "x":
        return f"fill:none;stroke:{shade};stroke-width:2"
    return f"fill:{shade};stroke:none"


def _markers(
    trace: Mapping[str, Any], points: Sequence[tuple[int, float | None, float | None]], shade: str, x: Scale, y: Scale
) -> str:
    marker = trace.get("marker")
    asked = marker.get("size", 6) if isinstance(marker, Mapping) else 6
    size = float(asked) if isinstance(asked, int | float) and 0 < asked < 40 else 6.0
    style, symbol = _fill(trace, shade), _symbol(trace)
    seen = [(n, a, b) for n, a, b in points if a is not None and b is not None and x.inside(a) and y.inside(b)]
    if len(seen) > _MOST_TITLES:
        return path("".join(mark(a, b, symbol, size) for _, a, b in seen), style, kind="point")
    return "".join(path(mark(a, b, symbol, size), style, kind="point", title=_tooltip(trace, n)) for n, a, b in seen)


def _tooltip(trace: Mapping[str, Any], index: int, field: str = "y") -> str:
    """Return what a mark is, when it is pointed at."""
    texts, values = trace.get("text"), trace.get(field)
    own = texts[index] if isinstance(texts, Sequence) and not isinstance(texts, str) and index < len(texts) else ""
    value = values[index] if isinstance(values, Sequence) and index < len(values) else None
    label = own or trace.get("name") or ""
    return f"{plain(label)}: {numeral(value)}" if label else numeral(value)


def _bars(bars: Sequence[tuple[Mapping[str, Any], Shade]], x: Scale, y: Scale, layout: Mapping[str, Any]) -> str:
    flat = bars[0][0].get("orientation") == "h"
    along, value_axis = (y, x) if flat else (x, y)
    positions = [{along.raw(category) for category in (trace.get("y" if flat else "x") or ())} for trace, _ in bars]
    shared = any(a & b for n, a in enumerate(positions) for b in positions[:n])
    slots = len(bars) if shared and layout.get("barmode") != "overlay" else 1
    every = sorted(index for index in set().union(*positions) if index is not None)
    unit = min((b - a for a, b in itertools.pairwise(every)), default=1.0)
    zero = value_axis.at(0.0)
    base = zero if zero is not None and value_axis.inside(zero) else value_axis.start
    marks = []
    for slot, (trace, shade) in enumerate(bars):
        names, values = trace.get("y" if flat else "x") or (), trace.get("x" if flat else "y") or ()
        for index, (category, value) in enumerate(zip(names, values, strict=False)):
            middle, end = along.raw(category), value_axis.at(value)
            if middle is None or end is None:
                continue
            offset = 0.76 * unit * ((slot % slots - (slots - 1) / 2) / slots)
            half = 0.38 * unit / slots
            low, high = along.along(middle + offset - half), along.along(middle + offset + half)
            corners = f"M{number(base)},{number(low)}H{number(end)}V{number(high)}H{number(base)}Z"
            if not flat:
                corners = f"M{number(low)},{number(base)}V{number(end)}H{number(high)}V{number(base)}Z"
            label = _tooltip({**trace, "text": ()}, index, "x" if flat else "y")
            marks.append(path(corners, f"fill:{shade.colour}", kind="bar", title=f"{plain(category)} · {label}"))
            if flat and trace.get("textposition") == "outside" and index < len(trace.get("text") or ()):
                marks.append(words(end + 5, (low + high) / 2 + 4, trace["text"][index], kind="tick"))
    return "".join(marks)


def heat_of(trace: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[list[Any]]]:
    """Return columns, rows and numbers of a map; places are counted where they have no names."""
    grid = [list(row) for row in trace.get("z") or () if isinstance(row, Sequence) and not isinstance(row, str)]
    widest = max((len(row) for row in grid), default=0)
    columns, rows = list(trace.get("x") or range(widest)), list(trace.get("y") or range(len(grid)))
    return columns, rows, grid


def _heatmap(trace: Mapping[str, Any], x: Scale, y: Scale) -> str:
    columns, rows, grid = heat_of(trace)
    known = [value for row in grid for value in row if isinstance(value, int | float) and math.isfinite(value)]
    low = trace.get("zmin", min(known, default=0.0))
    high = trace.get("zmax", max(known, default=1.0))
    cells = []
    for name, row in zip(rows, grid, strict=False):
        up = y.raw(name)
        for column, value in zip(columns, row, strict=False):
            across = x.raw(column)
            if across is None or up is None or not isinstance(value, int | float) or not math.isfinite(value):
                continue
            left, right = x.along(across - 0.5) + 0.5, x.along(across + 0.5) - 0.5
            top, bottom = sorted((y.along(up - 0.5), y.along(up + 0.5)))
            share = min(max((value - low) / ((high - low) or 1.0), 0.0), 1.0)
            corners = f"M{number(left)},{number(top + 0.5)}H{number(right)}V{number(bottom - 0.5)}H{number(left)}Z"
            title = f"{plain(name)} · {plain(column)}: {numeral(value)}"
            cells.append(path(corners, f"fill:{_ramp(share)}", kind="cell", title=title))
            if len(known) <= _MOST_CELLS and right - left > 26:
                kind = "cell-dark" if share > 0.5 else "cell-light"
                cells.append(
                    words((left + right) / 2, (top + bottom) / 2 + 4, f"{value:.2g}", anchor="middle", kind=kind)
                )
    return "".join(cells)


def _ramp(share: float) -> str:
    """Return the colour of a share, between two steps of the page's ramp."""
    position = share * 4
    step = min(int(position), 3)
    return f"color-mix(in srgb, var(--ramp-{step + 1}) {100 * (position - step):.0f}%, var(--ramp-{step}))"
