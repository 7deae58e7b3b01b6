"""Law sets of the store as tables: what is conserved, where, and how many numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conserved.laws import LawSet
from conserved.laws.law_table import rows, totals
from conserved.report.plot import Plot, axis, trace
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


_COLUMNS = ("family", "formula", "block", "numbers", "copies", "group")


def law_section(name: str, content: Mapping[str, Any]) -> LawSection:
    """Return a law set from its record; layers and heads that share a law are one row."""
    law_set = LawSet.from_dict(content)
    counted = content.get("independent")
    independent = int(counted) if isinstance(counted, int) else None
    return LawSection(
        name=name,
        laws=len(law_set),
        numbers=law_set.numbers,
        independent=independent,
        coverage=share(content.get("coverage")),
        sentence=totals(law_set.symmetries, independent),
        table=ReportTable.of(
            ("law", "what is conserved", "where", "numbers", "copies", "group", "holds"),
            [(*(getattr(row, field) for field in _COLUMNS), _held(row.epsilon)) for row in rows(law_set.symmetries)],
        ),
        dropped=ReportTable.of(
            ("law", "why it is not kept"), [(item.name, item.reason) for item in law_set.dropped], 100
        ),
        unclaimed=ReportTable.of(("parameter",), [(item,) for item in law_set.unclaimed], 100),
        plot=_numbers_by_family(name, law_set) if len(law_set) else None,
    )


def _held(epsilon: float) -> str:
    return "exactly" if epsilon == 0 else f"up to ε = {epsilon:g}"


def share(value: Any) -> float | None:
    """Return a share of parameters from a record, which holds the number or what it is made of."""
    count = value.get("parameters") if isinstance(value, Mapping) else value
    return float(count) if isinstance(count, int | float) and not isinstance(count, bool) and 0 <= count <= 1 else None


def _numbers_by_family(name: str, law_set: LawSet) -> Plot:
    count: Counter[str] = Counter()
    for symmetry in law_set:
        count[symmetry.family] += symmetry.numbers
    ranked = sorted(count.items(), key=lambda item: item[1])[-30:]
    families, numbers = [family for family, _ in ranked], [number for _, number in ranked]
    texts = [f"{number:,}" for number in numbers]
    listing = ", ".join(f"{family} {number:,}" for family, number in reversed(ranked))
    return Plot(
        anchor=f"laws-{name}",
        title="Conserved numbers by law",
        alt=f"Bars of how many conserved numbers each law of {name} holds: {listing}.",
        data=[trace("bar", "", numbers, families, orientation="h", text=texts, textposition="outside")],
        layout={
            "xaxis": axis("conserved numbers"),
            "yaxis": {"type": "category"},
            "height": 110 + 26 * len(ranked),
        },
    )
