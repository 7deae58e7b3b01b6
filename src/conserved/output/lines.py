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


def counted(count: int, word: str, plural: str = "") -> str:
    """Return a number with the noun it counts, such as "1 law" and "1,200 laws".

    Args:
        count: how many there are.
        word: the noun for one.
        plural: the noun for several, where it is not the word with an s.
    """
    return f"{count:,} {word if count == 1 else plural or word + 's'}"


def paragraphs(text: str) -> list[TextLine]:
    """Return text of several lines as one paragraph each, indented as it was."""
    return [TextLine(line.lstrip(" "), len(line) - len(line.lstrip(" "))) for line in text.splitlines()]


def wrap(line: TextLine, width: int) -> list[str]:
    """Return one paragraph as lines of at most `width` columns, with control characters escaped."""
    blanks, text = " " * line.indent, printable(line.text)
    if len(text) + line.indent <= width:
        return [(blanks + text).rstrip()]
    return textwrap.wrap(text, width, initial_indent=blanks, subsequent_indent=blanks, break_on_hyphens=False)


def join_lines(lines: Iterable[TextLine], width: int = WIDTH) -> str:
    """Return lines as plain text, wrapped at `width` columns."""
    return "\n".join(text for line in lines for text in wrap(line, width))


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
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(TextLine("  ".join(padded).rstrip(), indent, "bold" if number == 0 else ""))
    return lines
