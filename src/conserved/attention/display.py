"""An energy field as a table, one row per head; in a notebook with its spectrum as a small picture."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

from torch import Tensor

from conserved.output import html
from conserved.output.lines import TextLine, columns, join_lines

if TYPE_CHECKING:
    from conserved.attention.energy import EnergyField

HEADS = ("head", "spectrum", "rank", "effective rank", "stable rank", "participation", "coherence", "row sums")


def title(field: EnergyField) -> str:
    """Return the number of heads and their size as text."""
    queries, keys = field.row_sums.shape[-1], field.column_energies.shape[-1]
    bound = "no bound on the rank" if field.bound is None else f"rank at most {field.bound}"
    heads = field.row_sums.shape[:-1].numel()
    return f"{heads:,} {'head' if heads == 1 else 'heads'}, {queries:,} queries, {keys:,} keys, {bound}"


def table(field: EnergyField) -> str:
    """Return the statistics of every head; what has no value is a dash."""
    return html.panel(html.paragraph(title(field)), html.table(HEADS, list(_rows(field)), numbers=range(2, 8), raw=1))


def text(field: EnergyField) -> str:
    """Return the statistics of every head as lines of text."""
    rows = [(row[0], *row[2:]) for row in _rows(field)]
    heads = (HEADS[0], *HEADS[2:])
    lines = columns(heads, [row for row in rows if len(row) > 1], right=range(1, len(heads)), indent=2)
    rest = [TextLine(f"… and {len(rows) - html.MOST:,} more heads", 2)] if len(rows) > html.MOST else []
    return join_lines([TextLine(title(field)), *lines, *rest])


def _rows(field: EnergyField) -> Iterator[tuple[str, ...]]:
    """Yield a row for each head; heads beyond the first `html.MOST` are named only, so that a thousand cost no more."""
    spectra = field.singular_values
    statistics = (field.rank, field.effective_rank, field.stable_rank, field.participation, field.coherence)
    # Relative to the largest sum that entries of this size could have (Cauchy–Schwarz): zero but for rounding.
    largest = (field.row_energies.amax(-1) * field.column_energies.shape[-1]).sqrt()
    sums = field.row_sums.abs().amax(-1) / largest.where(largest > 0, 1.0)
    for position, index in enumerate(product(*map(range, field.row_sums.shape[:-1]))):
        name = ", ".join(map(str, index)) or "–"
        if position >= html.MOST:
            yield (name,)
            continue
        numbers = [_text(statistic[index], ".3g") for statistic in statistics]
        yield name, html.spectrum(spectra[index].tolist()), *numbers, _text(sums[index], ".1g")


def _text(value: Tensor, form: str) -> str:
    number = float(value)
    return "–" if number != number else format(number, form)
