"""Lists of results: `print` and notebooks show a table with one row for each result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from conserved.output import html
from conserved.output.lines import TextLine, columns, counted, join_lines

T = TypeVar("T")


class ResultList(list[T], Generic[T]):
    """A list whose `print` is a table. It behaves as a list in every other way; slices are plain lists.

    Args:
        results: the results, in their order.
        word: the noun for one of them.
        heads: the titles of the columns.
        row: the cells of one result.
        plural: the noun for several, where it is not the word with an s.
    """

    def __init__(
        self,
        results: Iterable[T],
        word: str,
        heads: Sequence[str],
        row: Callable[[T], Sequence[str]],
        plural: str = "",
    ) -> None:
        super().__init__(results)
        self._word, self._plural, self._heads, self._row = word, plural, tuple(heads), row

    def __repr__(self) -> str:
        return f"<{self._count()}>"

    def __str__(self) -> str:
        if not self:
            return self._count()
        lines = columns(self._heads, [self._row(result) for result in self[: html.MOST]])
        if len(self) > html.MOST:
            lines.append(TextLine(f"… and {len(self) - html.MOST:,} more"))
        return join_lines(lines, max(len(line.text) for line in lines))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a plain list."""
        return list, (list(self),)

    def _repr_html_(self) -> str:
        if not self:
            return html.panel(html.paragraph(self._count()))
        rows = [tuple(self._row(result)) for result in self[: html.MOST]]
        rest = f"… and {len(self) - html.MOST:,} more" if len(self) > html.MOST else ""
        table = html.table(self._heads, rows, wraps=len(self._heads) - 1)
        return html.panel(table, html.paragraph(rest, quiet=True) if rest else "")

    def _count(self) -> str:
        return counted(len(self), self._word, self._plural) if self else f"no {self._plural or self._word + 's'}"
