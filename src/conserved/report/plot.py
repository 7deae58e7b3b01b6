"""A plot of the report: a plotly specification that cannot reach outside the page, with its findings as text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conserved.report.table import Table

TRACES = frozenset(
    {"scatter", "bar", "heatmap", "box", "violin", "histogram", "histogram2d", "contour", "histogram2dcontour"}
    | {"barpolar", "scatterpolar"}
)
"""Kinds of trace that need nothing but the page itself: no maps with remote tiles, no shaders compiled from strings."""

_REACHING = frozenset({"images", "map", "mapbox", "geo", "updatemenus", "sliders", "meta", "ids", "customdata", "uid"})
"""Entries of a layout or trace that load pictures, or that nothing here uses."""

_PLAIN_TAGS = re.compile(r"&lt;(/?(?:sub|sup|b|i|br|extra))&gt;")
"""Tags of plotly's own little language that only set type; they have no attributes and reach nothing."""

_MOST_POINTS = 2000
"""Points of one line; more cannot be told apart on a screen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A number that a figure shows, what was expected, and whether it is so."""

    what: str
    value: Any = None
    low: Any = None
    high: Any = None
    expected: Any = None
    holds: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One figure: what to draw, what it shows in words, and the same as numbers."""

    anchor: str
    title: str
    alt: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    caption: str = ""
    findings: tuple[Finding, ...] = ()
    table: Table | None = None
    section: str = ""
    small: bool = False
    """Whether two of them fit beside each other."""

    def specification(self) -> dict[str, Any]:
        """What is drawn, as plain data that is safe in a page."""
        return {"data": [cleaned_trace(trace) for trace in self.data], "layout": _cleaned(self.layout)}


def from_document(name: str, content: Mapping[str, Any]) -> Plot:
    """A figure as `conserved.lab` stores it; ValueError if it cannot be drawn in a page that loads nothing."""
    data = [dict(trace) for trace in content["data"]]
    strange = [str(trace.get("type", "scatter")) for trace in data if trace.get("type", "scatter") not in TRACES]
    if strange:
        raise ValueError(f"a trace of type {strange[0]!r} needs more than the page itself")
    title = str(content.get("title") or name)
    findings = tuple(
        Finding(**{key: item.get(key) for key in ("what", "value", "low", "high", "expected", "holds")})
        for item in content.get("findings") or ()
    )
    table = content.get("table")
    return Plot(
        anchor=str(content.get("code") or name),
        title=title,
        caption=str(content.get("caption") or ""),
        alt=str(content.get("alt") or title),
        data=data,
        layout=dict(content.get("layout") or {}),
        findings=findings,
        table=None if not table else Table.of(table["columns"], table["rows"]),
        section=str(content.get("section") or ""),
    )


def cleaned_trace(trace: Mapping[str, Any]) -> dict[str, Any]:
    """A trace whose text is text, whose numbers are numbers or nothing, and which is not longer than can be seen."""
    found: dict[str, Any] = _cleaned(dict(trace))
    lengths = [len(found[axis]) for axis in ("x", "y") if isinstance(found.get(axis), list)]
    if found.get("type", "scatter") == "scatter" and lengths and max(lengths) > _MOST_POINTS:
        length = max(lengths)
        kept = [round(place * (length - 1) / (_MOST_POINTS - 1)) for place in range(_MOST_POINTS)]
        found = {
            key: [value[place] for place in kept] if isinstance(value, list) and len(value) == length else value
            for key, value in found.items()
        }
    return found


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return literal(value)
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _cleaned(item) for key, item in value.items() if key not in _REACHING}
    if isinstance(value, Sequence):
        return [_cleaned(item) for item in value]
    raise ValueError(f"a figure holds a {type(value).__name__}, which is not plain data")


def literal(text: str) -> str:
    """Text as plotly shows it letter by letter: it reads tags such as <a href> in labels, and undoes these escapes."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _PLAIN_TAGS.sub(r"<\1>", escaped)


@dataclass(frozen=True, slots=True)
class Axis:
    """The title of an axis and whether it is logarithmic."""

    title: str
    log: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def layout(self) -> dict[str, Any]:
        """For plotly."""
        scale = {"type": "log", "exponentformat": "power", "dtick": None} if self.log else {}
        return {"title": {"text": self.title}, **scale, **self.options}


def line(name: str, x: Sequence[Any], y: Sequence[Any], **options: Any) -> dict[str, Any]:
    """A line through points; a point alone is drawn as a mark, since a line of one point is nothing."""
    mode = "lines" if len(x) > 1 else "markers"
    return {"type": "scatter", "mode": mode, "name": name, "x": list(x), "y": list(y), **options}
