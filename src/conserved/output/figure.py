"""A figure as plain data: what is drawn, what it says in words, and the numbers that were found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from conserved.plain_data import record_of

Section = Literal["papers", "beyond", "attention", "audit"]
"""Where a figure belongs: re-running a source, going beyond it, attention, gradient audits."""

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
"""Okabe and Ito's colours, which people with any common form of colour blindness can tell apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One number a figure shows, the interval it is known to, and what theory expects of it."""

    what: str
    value: float
    low: float | None = None
    high: float | None = None
    expected: str
    holds: bool

    @staticmethod
    def rounding(quantity: str, value: float, limit: float) -> Finding:
        """Return a number that should be of the size of rounding.

        Args:
            what: the name of the number.
            value: the number.
            limit: the size below which it counts as rounding.

        Returns:
            The finding, which holds if the number is below the limit.
        """
        return Finding(what=quantity, value=value, expected=f"rounding, below {limit:g}", holds=value < limit)


def in_words(findings: Sequence[Finding]) -> str:
    """Return what was found, for those who cannot see it drawn."""
    return " ".join(f"{f.what}: {f.value:.3g}, expected {f.expected}." for f in findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text and numbers under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | int | None, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"Expected rows of {len(self.columns)} cells, got {row}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Traces and layout with plotly's names for things, a caption, a text for those who cannot see it, and findings.

    Colours of the background and of text are left to the page, so that light and dark pages can show it.
    """

    code: str
    title: str
    caption: str
    alt: str
    data: tuple[Mapping[str, Any], ...]
    layout: Mapping[str, Any]
    findings: tuple[Finding, ...] = ()
    table: Table | None = None
    section: Section = "papers"

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON and the run store."""
        return record_of(self, "code title caption alt data layout findings table section")


def positive(values: Sequence[float]) -> list[float | None]:
    """Return what has a place on a logarithmic axis; a gap for everything else."""
    return [value if value > 0 else None for value in values]


def line(
    x: Sequence[float],
    y: Sequence[float | None],
    *,
    name: str,
    color: str,
    panel: int = 1,
    width: float = 2.5,
    dash: str = "solid",
    opacity: float = 1.0,
    legend: bool = True,
    marks: bool = False,
) -> dict[str, Any]:
    """Return one curve in a panel."""
    drawn_as = {"color": color, "width": width, "dash": dash}
    mode = "lines+markers" if marks else "lines"
    return _curve(name, panel, x=list(x), y=list(y), mode=mode, showlegend=legend, line=drawn_as, opacity=opacity)


def band(
    x: Sequence[float], low: Sequence[float], high: Sequence[float], *, name: str, color: str, panel: int = 1
) -> dict[str, Any]:
    """Return a filled region between two curves: the spread over seeds."""
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    filled = {"fill": "toself", "fillcolor": f"rgba({red},{green},{blue},0.18)", "line": {"width": 0}}
    outline = {"x": [*x, *reversed(x)], "y": [*high, *reversed(low)]}
    return _curve(name, panel, **outline, mode="lines", showlegend=False, **filled, hoverinfo="skip")


def _curve(name: str, panel: int, **options: Any) -> dict[str, Any]:
    axes = {"xaxis": _axis("x", panel), "yaxis": _axis("y", panel)}
    return {"type": "scatter", "name": name, "legendgroup": name, **options, **axes}


def panels(
    titles: Sequence[str], *, x: str, y: str, columns: int = 2, log: tuple[bool, bool] = (True, True)
) -> dict[str, Any]:
    """Return a layout of equal panels, each with its title and axis titles; `log` says which axes are logarithmic."""
    count = len(titles)
    columns = min(columns, count)
    rows = -(-count // columns)
    gap_x, gap_y = 0.13, 0.16
    wide = (1 - gap_x * (columns - 1)) / columns
    high = (1 - gap_y * (rows - 1)) / rows
    layout: dict[str, Any] = {
        "height": 130 + 290 * rows,
        "margin": {"l": 70, "r": 20, "t": 50, "b": 60},
        "legend": {"orientation": "h", "y": -0.16 / rows},
        "annotations": [],
    }
    for index, title in enumerate(titles):
        row, column = divmod(index, columns)
        left, bottom = column * (wide + gap_x), 1 - row * (high + gap_y) - high
        spot = {"x": (left, left + wide), "y": (bottom, bottom + high)}
        for which, label, other, logarithmic in (("x", x, "y", log[0]), ("y", y, "x", log[1])):
            axis: dict[str, Any] = {
                "domain": [max(0.0, round(end, 4)) for end in spot[which]],
                "anchor": _axis(other, index + 1),
                "title": {"text": label},
                "automargin": True,
            }
            if logarithmic:
                axis |= {"type": "log", "exponentformat": "power", "dtick": 1} if which == "y" else {"type": "log"}
            layout[_axis(which, index + 1).replace(which, f"{which}axis")] = axis
        above = {"xref": "paper", "yref": "paper", "xanchor": "center", "yanchor": "bottom", "showarrow": False}
        layout["annotations"].append({"text": title, "x": left + wide / 2, "y": bottom + high, **above})
    return layout


def _axis(which: str, panel: int) -> str:
    return which if panel == 1 else f"{which}{panel}"
