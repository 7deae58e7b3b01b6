"""An energy field in a notebook: one row per head, with its spectrum as a small picture."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

from torch import Tensor

from conserved.output import html

if TYPE_CHECKING:
    from conserved.attention.energy import EnergyField

HEADS = ("head", "spectrum", "rank", "effective rank", "stable rank", "participation", "coherence", "largest row sum")


def title(field: EnergyField) -> str:
    """Return how many heads, of what size."""
    queries, keys = field.row_sums.shape[-1], field.column_energies.shape[-1]
    bound = "no bound on the rank" if field.bound is None else f"rank at most {field.bound}"
    heads = field.row_sums.shape[:-1].numel()
    return f"{heads:,} {'head' if heads == 1 else 'heads'}, {queries:,} queries, {keys:,} keys, {bound}"


def table(field: EnergyField) -> str:
    """Return the statistics of every head; what has no value is a dash."""
    return html.panel(html.paragraph(title(field)), html.table(HEADS, list(_rows(field)), numbers=range(2, 8), raw=1))


def _rows(field: EnergyField) -> Iterator[tuple[str, ...]]:
    """Yield a row for each head; heads beyond the first `html.MOST` are named only, so that a thousand cost no more."""
    spectra = field.singular_values
    statistics = (field.rank, field.effective_rank, field.stable_rank, field.participation, field.coherence)
    sums = field.row_sums.abs().amax(-1)
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
