"""Law sets of the store as tables: what is conserved, where, and how many numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conserved.laws import LawSet
from conserved.laws.law_table import rows, totals
from conserved.report.plot import Plot, PlotAxis
from conserved.report.table import ReportTable


@dataclass(frozen=True, slots=True, kw_only=True)
class LawSection:
    """The laws of one model."""

    name: str
    laws: int
    numbers: int
    independent: int | None
    coverage: float | None
    """The share of the model's trained parameters that take part in a law."""
    sentence: str
    table: ReportTable
    dropped: ReportTable
    unclaimed: ReportTable
    plot: Plot | None


def law_section(name: str, content: Mapping[str, Any]) -> LawSection:
    """A law set from its record; layers and heads that share a law are one row."""
    found = LawSet.from_dict(content)
    counted = content.get("independent")
    independent = int(counted) if isinstance(counted, int) else None
    folded = rows(found.symmetries)
    return LawSection(
        name=name,
        laws=len(found),
        numbers=found.numbers,
        independent=independent,
        coverage=share(content.get("coverage")),
        sentence=totals(found.symmetries, independent),
        table=ReportTable.of(
            ("law", "what is conserved", "where", "numbers", "copies", "group", "holds"),
            [
                (
                    row.family,
                    row.formula,
                    row.block,
                    row.numbers,
                    row.copies,
                    row.group,
                    "exactly" if row.epsilon == 0 else f"up to ε = {row.epsilon:g}",
                )
                for row in folded
            ],
        ),
        dropped=ReportTable.of(
            ("law", "why it is not kept"), [(item.name, item.reason) for item in found.dropped], 100
        ),
        unclaimed=ReportTable.of(("parameter",), [(item,) for item in found.unclaimed], 100),
        plot=_numbers_by_family(name, found) if len(found) else None,
    )


def share(value: Any) -> float | None:
    """A share of parameters from a record, which holds the number or what it is made of."""
    found = value.get("parameters") if isinstance(value, Mapping) else value
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) and 0 <= found <= 1 else None


def _numbers_by_family(name: str, found: LawSet) -> Plot:
    count: Counter[str] = Counter()
    for symmetry in found:
        count[symmetry.family] += symmetry.numbers
    ranked = sorted(count.items(), key=lambda item: item[1])[-30:]
    listing = ", ".join(f"{family} {numbers:,}" for family, numbers in reversed(ranked))
    return Plot(
        anchor=f"laws-{name}",
        title="Conserved numbers by law",
        alt=f"Bars of how many conserved numbers each law of {name} holds: {listing}.",
        data=[
            {
                "type": "bar",
                "orientation": "h",
                "x": [numbers for _, numbers in ranked],
                "y": [family for family, _ in ranked],
                "text": [f"{numbers:,}" for _, numbers in ranked],
                "textposition": "outside",
                "cliponaxis": False,
                "hovertemplate": "%{y}: %{x:,} numbers<extra></extra>",
            }
        ],
        layout={
            "xaxis": PlotAxis("conserved numbers").layout(),
            "yaxis": {"type": "category"},
            "height": 110 + 26 * len(ranked),
        },
    )
