"""A table of the report: columns, rows that are already text, and how many were left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from conserved.report.numerals import numeral

MOST_ROWS = 300
"""Rows of one table; the rest is counted, and is in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """Cells as text; `right` are the columns of numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    left_out: int = 0

    @staticmethod
    def of(columns: Sequence[Any], rows: Iterable[Sequence[Any]], most: int = MOST_ROWS) -> ReportTable:
        """Return a table of plain data; a column is one of numbers if all its cells are."""
        body = [list(row) for row in rows]
        wrong = [row for row in body if len(row) != len(columns)]
        if wrong:
            raise ValueError(f"Expected rows of {len(columns)} cells, got one of {len(wrong[0])}.")
        right = {
            index
            for index in range(len(columns))
            if body and all(isinstance(row[index], int | float) or row[index] is None for row in body)
        }
        return ReportTable(
            columns=tuple(map(str, columns)),
            rows=tuple(tuple(numeral(cell) for cell in row) for row in body[:most]),
            right=frozenset(right),
            left_out=max(0, len(body) - most),
        )
