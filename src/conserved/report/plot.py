"""A plot of the report: traces and a layout as plain data, drawn when the page is built, with findings as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from conserved.report.drawing import draw
from conserved.report.table import ReportTable

TRACES = ("scatter", "bar", "heatmap")
"""Kinds of trace that are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFinding:
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
    findings: tuple[ShownFinding, ...] = ()
    table: ReportTable | None = None
    section: str = ""
    small: bool = False
    """Whether two of them fit beside each other."""

    def drawing(self) -> Markup:
        """Return the plot as SVG, for wide places and for narrow ones."""
        return draw(self.data, self.layout, small=self.small)


def from_document(name: str, content: Mapping[str, Any]) -> Plot:
    """Return the plot of a figure as a run store keeps it; ValueError if it holds a trace that is not drawn."""
    data = [dict(trace) for trace in content["data"]]
    unsupported = [str(trace.get("type", "scatter")) for trace in data if trace.get("type", "scatter") not in TRACES]
    if unsupported:
        raise ValueError(f"Expected traces of type {', '.join(TRACES)}, got {unsupported[0]!r}.")
    title = str(content.get("title") or name)
    findings = tuple(
        ShownFinding(**{key: item.get(key) for key in ("what", "value", "low", "high", "expected", "holds")})
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
        table=None if not table else ReportTable.of(table["columns"], table["rows"]),
        section=str(content.get("section") or ""),
    )


def axis(title: str, **options: Any) -> dict[str, Any]:
    """Return an axis as part of a layout."""
    return {"title": {"text": title}, **options}


def axes(x: str, y: str, *, log: bool = False, **layout: Any) -> dict[str, Any]:
    """Return a layout by the titles of its axes; `log` is for the upright one."""
    return {"xaxis": axis(x), "yaxis": axis(y, type="log") if log else axis(y), **layout}


def trace(kind: str, name: str, x: Sequence[Any], y: Sequence[Any], **options: Any) -> dict[str, Any]:
    """Return lines or markers through points, bars, or a heatmap."""
    drawn_as = {"type": "scatter", "mode": kind} if kind in ("lines", "markers") else {"type": kind}
    return {**drawn_as, "name": name, "x": list(x), "y": list(y), **options}


def line(name: str, x: Sequence[Any], y: Sequence[Any], **options: Any) -> dict[str, Any]:
    """Return a line through points; a point alone is drawn as a mark, since a line of one point is nothing."""
    return trace("lines" if len(x) > 1 else "markers", name, x, y, **options)
