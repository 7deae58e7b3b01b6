"""Laws as a table: one row per kind of law, with the layers and heads that share it folded together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from conserved.output.lines import WIDTH, TextLine, counted
from conserved.symmetry import Symmetry


@dataclass(frozen=True, slots=True, kw_only=True)
class LawRow:
    """Laws that differ only in the layer or the head."""

    block: str
    family: str
    group: str
    formula: str
    copies: int
    numbers: int
    epsilon: float


def rows(symmetries: Sequence[Symmetry]) -> list[LawRow]:
    """Return the table of a law set, in the order of the model."""
    folded: dict[tuple[object, ...], list[Symmetry]] = {}
    for symmetry in symmetries:
        key = (_pattern(symmetry.block), symmetry.family, symmetry.kind, _sizes(symmetry), symmetry.epsilon)
        folded.setdefault(key, []).append(symmetry)
    return [
        LawRow(
            block=_range([member.block for member in members]) or "(model)",
            family=members[0].family,
            group=members[0].kind.group(members[0].n, members[0].m),
            formula=_short(members[0]),
            copies=len(members),
            numbers=sum(member.numbers for member in members),
            epsilon=members[0].epsilon,
        )
        for members in folded.values()
    ]


def totals(symmetries: Sequence[Symmetry], independent: int | None) -> str:
    """Return one line: how many laws, and how many numbers they hold."""
    exact = sum(symmetry.numbers for symmetry in symmetries if symmetry.exact)
    nearly = sum(symmetry.numbers for symmetry in symmetries if not symmetry.exact)
    holds = f"{counted(len(symmetries), 'law')} {'holds' if len(symmetries) == 1 else 'hold'}"
    text = f"{holds} {exact + nearly:,} conserved {'number' if exact + nearly == 1 else 'numbers'}"
    if nearly:
        text += f" ({exact:,} exact, {nearly:,} up to a normalisation's ε)"
    return text if independent is None else f"{text}; {independent:,} are independent at these weights"


def table_lines(
    symmetries: Sequence[Symmetry],
    unclaimed: Sequence[str],
    dropped: Sequence[tuple[str, str]],
    independent: int | None,
    width: int = WIDTH,
) -> list[TextLine]:
    """Return the table with its totals, then the laws that do not hold here and the parameters without a law."""
    lines = [*_listing(rows(symmetries), width), TextLine()] if symmetries else []
    lines.append(TextLine(totals(symmetries, independent), style="bold"))
    if dropped:
        lines += [TextLine(), TextLine(f"Not conserved in this model ({len(dropped)}):")]
        lines += _truncate(_fold([f"{name}: {reason}" for name, reason in dropped]))
    if unclaimed:
        lines += [TextLine(), TextLine(f"No law spans {counted(len(unclaimed), 'parameter')}:")]
        lines += _truncate(_fold(unclaimed))
    return lines


def _fold(lines: Sequence[str]) -> list[str]:
    """Return lines that differ in numbers only, such as those of equal layers, as one."""
    alike: dict[str, list[str]] = {}
    for line in lines:
        alike.setdefault(_pattern(line), []).append(line)
    return [_range(members) for members in alike.values()]


def _truncate(lines: Sequence[str], most: int = 20) -> list[TextLine]:
    """Return the first lines, indented, and how many more there are."""
    rest = [f"… and {len(lines) - most:,} more"] if len(lines) > most else []
    return [TextLine(line, 2) for line in [*lines[:most], *rest]]


def _listing(table: Sequence[LawRow], width: int) -> Iterator[TextLine]:
    """Yield two lines a row, so that formulas have room on a narrow terminal.

    A row takes three lines where the path of its module is too long.
    """
    cells = [("where", "law", "group", "×", "numbers")]
    cells += [(row.block, row.family, row.group, f"{row.copies:,}", f"{row.numbers:,}") for row in table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    narrow = sum(widths) + 2 * (len(widths) - 1) > width
    above = ""
    for index, (where, law, group, copies, numbers) in enumerate(cells):
        style = "bold" if index == 0 else ""
        if narrow and where != above:
            yield TextLine(where, style=style)
            above = where
        first = "" if narrow else f"{where:<{widths[0]}}  "
        line = f"{first}{law:<{widths[1]}}  {group:<{widths[2]}}  {copies:>{widths[3]}}  {numbers:>{widths[4]}}"
        yield TextLine(line, 4 if narrow else 0, style)
        if index > 0:
            row = table[index - 1]
            nearly = "" if row.epsilon == 0 else f"  (up to ε = {row.epsilon:g})"
            yield TextLine(row.formula + nearly, 8 if narrow else 4, "cyan")


def _pattern(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def _sizes(symmetry: Symmetry) -> tuple[object, ...]:
    return tuple((leg.view.n, leg.view.m, leg.degree, _pattern(leg.view.parameter)) for leg in symmetry.legs)


def _range(paths: Sequence[str]) -> str:
    """Return one path for several that differ in their numbers, such as layers.{0–11}.attention."""
    numbers = [[int(x) for x in re.findall(r"\d+", path)] for path in paths]
    columns = iter(sorted(set(column)) for column in zip(*numbers, strict=True))
    return re.sub(r"\d+", lambda _: _span(next(columns)), paths[0])


def _span(values: list[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    contiguous = values == list(range(values[0], values[-1] + 1))
    return f"{{{values[0]}–{values[-1]}}}" if contiguous else "{" + ",".join(map(str, values)) + "}"


def _short(symmetry: Symmetry) -> str:
    """Return the formula with parameter names as seen from the block, and long sums cut."""
    text = str(symmetry.formula)
    if symmetry.block:
        for prefix in (symmetry.block, symmetry.block.rpartition(".")[0]):
            # A layer's number is not taken from its path: "0.norm" would not say whose norm it is.
            text = re.sub(rf"(?<![\w.]){re.escape(prefix)}\.(?!\d)", "", text) if prefix else text
    terms = re.split(r" (?=[+−] )", text)
    return text if len(terms) <= 6 else " ".join([*terms[:3], f"+ … {len(terms) - 4} more …", terms[-1]])
