"""Results as HTML in a notebook: escaped, small, and legible on light and on dark backgrounds.

Text has the colour of its surroundings and nothing has a background but the word of a verdict, which brings its own
pair of colours (contrast above 4.5). Styles are inline: viewers that strip style sheets keep them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from conserved.output.printable import printable
from conserved.verdict import Status, Verdict

_LINE = "border-bottom:1px solid rgba(128,128,128,.35)"

_COLOURS = {
    Status.PROVED: "#0b5fa5",
    Status.VERIFIED: "#1a7332",
    Status.REFUTED: "#b3261e",
    Status.INCONCLUSIVE: "#6b5900",
    Status.ANSWERED: "#5b3c9e",
}

MOST = 20
"""Rows that a table shows."""


def panel(*parts: str) -> str:
    """Return parts one below the other."""
    return f'<div style="font-size:14px;line-height:1.45;max-width:72em;overflow-x:auto">{"".join(parts)}</div>'


def paragraph(text: str, *, quiet: bool = False) -> str:
    """Return a line of plain text."""
    style = "margin:.35em 0;opacity:.75" if quiet else "margin:.35em 0"
    return f'<p style="{style}">{escape(text)}</p>'


def preformat(text: str) -> str:
    """Return text whose columns are aligned, in lines that scroll and do not wrap."""
    return f'<pre style="margin:.35em 0;background:none;line-height:1.35">{escape(printable(text, lines=True))}</pre>'


def badge(verdict: Verdict, words: str = "") -> str:
    """Return the verdict as a coloured word, or `words` in its colour, and its sentence."""
    word = f"padding:.1em .5em;border-radius:.3em;color:#fff;font-weight:600;background:{_COLOURS[verdict.status]}"
    return (
        f'<p style="margin:.35em 0"><span style="{word}">{escape((words or verdict.status.value).upper())}</span> '
        f"{escape(verdict.message)}</p>"
    )


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    wraps: int | None = None,
    raw: int | None = None,
) -> str:
    """Return a table of texts.

    `numbers` are columns set to the right, `wraps` is the one whose lines may be broken, and the
    column `raw` is markup already."""
    head = _row("th", [escape(name) for name in heads], numbers, wraps)
    body = "".join(
        _row("td", [text if index == raw else escape(text) for index, text in enumerate(row)], numbers, wraps)
        for row in rows[:MOST]
    )
    more = paragraph(f"… and {len(rows) - MOST:,} more", quiet=True) if len(rows) > MOST else ""
    style = "border-collapse:collapse;margin:.3em 0;white-space:nowrap"
    return f'<table cellpadding="5" style="{style}">{head}{body}</table>{more}'


def _row(tag: str, contents: Sequence[str], numbers: Sequence[int], wraps: int | None) -> str:
    """Return a row; what all cells share is said once, for the row or the table, so that results stay small."""
    cells = []
    for index, content in enumerate(contents):
        style = f"text-align:{'right' if index in numbers else 'left'}"
        style += ";white-space:normal;min-width:18em" if index == wraps else ""
        cells.append(f'<{tag} style="{style}">{content}</{tag}>')
    return f'<tr style="background:none;vertical-align:top;{_LINE}">{"".join(cells)}</tr>'


def spectrum(values: Sequence[float], *, width: int = 120, height: int = 26) -> str:
    """Return singular values as a small picture.

    Each value is a bar on a logarithmic scale over twelve decades, in the colour of the text.
    """
    largest = max((value for value in values if math.isfinite(value)), default=0.0)
    if largest <= 0:
        return ""
    step = width / len(values)
    bars = []
    for index, value in enumerate(values):
        share = max(0.0, 1 + math.log10(value / largest) / 12) if value > 0 and math.isfinite(value) else 0.0
        tall, wide = share * height, max(0.5, 0.8 * step)
        bars.append(f'<rect x="{index * step:.1f}" y="{height - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}"/>')
    label = f"{len(values)} singular values from {largest:.2g} down, logarithmic"
    return (
        f'<svg width="{width}" height="{height}" role="img" aria-label="{label}" fill="currentColor" opacity=".8">'
        f"{''.join(bars)}</svg>"
    )
