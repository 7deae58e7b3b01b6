"""Results as lines of text, which need no terminal library: `print` joins them, and the command adds styles."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conserved.output.printable import printable

WIDTH = 100
"""Columns of text where no terminal says how many there are."""


@dataclass(frozen=True, slots=True)
class TextLine:
    """One paragraph of a result.

    Attributes:
        text: the text, without line breaks.
        indent: the number of blanks before it, also where it is wrapped.
        style: the style a terminal shows it in: "bold", "cyan", "red" or none.
    """

    text: str = ""
    indent: int = 0
    style: str = ""


def joined(lines: Iterable[TextLine], width: int = WIDTH) -> str:
    """Return lines as plain text, wrapped at `width` columns, with control characters escaped."""
    wrapped: list[str] = []
    for line in lines:
        blanks, text = " " * line.indent, printable(line.text)
        if len(text) + line.indent <= width:
            wrapped.append((blanks + text).rstrip())
        else:
            wrapped += textwrap.wrap(
                text, width, initial_indent=blanks, subsequent_indent=blanks, break_on_hyphens=False
            )
    return "\n".join(wrapped)


def columns(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: int = 0
) -> list[TextLine]:
    """Return a table with a bold head, one line a row.

    Args:
        heads: the title of each column.
        rows: the cells of each row.
        right: the columns that are aligned right, such as numbers.
        indent: the number of blanks before each line.
    """
    cells = [list(heads), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for number, row in enumerate(cells):
        padded = [
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(TextLine("  ".join(padded).rstrip(), indent, "bold" if number == 0 else ""))
    return lines
