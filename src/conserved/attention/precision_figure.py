"""Heat maps of rounding errors: layers and heads from top to bottom, steps from left to right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path

from conserved.optional import require

Cells = Mapping[tuple[str, int], float]
"""Errors by row name and step."""

_LEAST, _MOST = -3.0, 1.0
"""Decades of the colour scale: from an accurate gradient in half precision to ten times its size."""

_SHOWN = 240
"""Rows that a table in a notebook shows."""


def heat_map(cells: Cells, path: str | Path, symbol: str) -> Path:
    """Draw errors on a logarithmic colour scale.

    Args:
        cells: errors by row and step.
        path: the file to write.
        symbol: what the errors are of.

    Returns:
        The path.

    Raises:
        ValueError: there are no cells.
    """
    if not cells:
        raise ValueError("Expected predictions to draw, got none. Run a backward pass inside watch_precision first.")
    numpy = require("numpy", "Heat maps")
    figures = require("matplotlib.figure", "Heat maps")
    names, steps = _axes(cells)
    table = numpy.full((len(names), len(steps)), numpy.nan)
    for (name, step), error in cells.items():
        table[names.index(name), steps.index(step)] = _decades(error)
    figure = figures.Figure(figsize=(7.2, max(2.4, min(9.0, 0.06 * len(names) + 1.6))), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(table, aspect="auto", interpolation="nearest", vmin=_LEAST, vmax=_MOST, cmap="inferno")
    axes.set(xlabel="step", ylabel="layer and head", title=f"rounding of {symbol}, relative to the gradient")
    columns = range(0, len(steps), max(1, len(steps) // 12))
    axes.set_xticks(list(columns), [str(steps[column]) for column in columns])
    rows = range(0, len(names), max(1, len(names) // 24))
    axes.set_yticks(list(rows), [names[row] for row in rows], fontsize=6)
    bar = figure.colorbar(image)
    bar.set_ticks([-3, -2, -1, 0, 1], labels=["0.001", "0.01", "0.1", "1", "≥ 10"])
    path = Path(path)
    figure.savefig(path)
    return path


def heat_table(cells: Cells) -> str:
    """Return errors as a small table of coloured cells for a notebook."""
    names, steps = _axes(cells)
    rows = []
    for name in names[:_SHOWN]:
        boxes = "".join(_box(cells.get((name, step), math.nan), step) for step in steps)
        rows.append(f'<tr><td style="padding:0 .6em;white-space:nowrap">{escape(name)}</td>{boxes}</tr>')
    more = f"<p>… and {len(names) - _SHOWN} more</p>" if len(names) > _SHOWN else ""
    return f'<table style="border-collapse:collapse;font-size:10px;line-height:1">{"".join(rows)}</table>{more}'


def _box(error: float, step: int) -> str:
    if math.isnan(error):
        return '<td style="width:9px"></td>'
    share = (_decades(error) - _LEAST) / (_MOST - _LEAST)
    return f'<td title="step {step}: {error:.3g}" style="width:9px;background:rgba(179,38,30,{share:.2f})"></td>'


def _axes(cells: Cells) -> tuple[list[str], list[int]]:
    return list(dict.fromkeys(name for name, _ in cells)), sorted({step for _, step in cells})


def _decades(error: float) -> float:
    return max(_LEAST, min(_MOST, math.log10(error))) if error > 0 else _LEAST
