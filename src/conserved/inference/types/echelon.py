"""Exact sparse elimination over the rationals: the one echelon form of the package.

A row is a mapping from columns to coefficients that are not zero, and stands for the equation Σ c_j x_j = 0 (or for the
vector c; the algebra is the same). Coefficients are `int` where they are whole and `Fraction` elsewhere, so no sum is
rounded and no tolerance decides what is zero. Whole numbers stay `int` because their arithmetic takes a tenth of the
time, and almost all coefficients here are ±1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heapify, heappop, heappush

Exact = int | Fraction
Equation = dict[int, Exact]
Solved = list[tuple[int, Equation]]
"""Columns in the order they were solved for, each with its expression over columns that were unsolved then."""


@dataclass(slots=True)
class Echelon:
    """A growing set of rows, each solved for one of its columns, its pivot.

    Row r with pivot p is kept as the expression x_p = Σ e_j x_j. An expression names no pivot that was there when its
    row came, so substituting expressions always ends.
    """

    expressions: dict[int, Equation] = field(default_factory=dict)
    """The expression of every pivot, in the order in which rows came."""

    @property
    def rank(self) -> int:
        """The number of independent rows."""
        return len(self.expressions)

    def reduce(self, row: Mapping[int, Exact]) -> Equation:
        """Return the row modulo the rows here: no pivots in it, and empty if it depends on them."""
        result = dict(row)
        # Substituting one pivot may bring in others that were added later; those are appended and follow in turn.
        pending = [column for column in result if column in self.expressions]
        while pending:
            column = pending.pop()
            if column in result:
                expression = self.expressions[column]
                substitute(result, column, expression)
                pending += [other for other in expression if other in self.expressions]
        return result

    def add(self, row: Mapping[int, Exact], choose: Callable[[Iterable[int]], int] = max) -> int | None:
        """Add a row; return its pivot, or None if it depends on the rows here.

        Args:
            row: The new row.
            choose: Which of the reduced row's columns becomes the pivot.
        """
        reduced = self.reduce(row)
        if not reduced:
            return None
        pivot = choose(reduced)
        self.expressions[pivot] = solve_for(reduced, pivot)
        return pivot

    def basis(self) -> dict[int, Equation]:
        """Return the reduced basis of the row space: each vector is 1 at its pivot and 0 at all other pivots."""
        result: dict[int, Equation] = {}
        for pivot, row in back_substitute(list(self.expressions.items())).items():
            result[pivot] = {column: -value for column, value in row.items()}
            result[pivot][pivot] = 1
        return result


def substitute(row: Equation, column: int, expression: Mapping[int, Exact]) -> None:
    """Replace a column of a row, in place, by an expression over other columns."""
    factor = row.pop(column)
    for other, value in expression.items():
        total = row.get(other, 0) + factor * value
        if total:
            row[other] = total
        else:
            row.pop(other, None)


def solve_for(row: Mapping[int, Exact], column: int) -> Equation:
    """Return x_column as an expression over the other columns of the equation."""
    pivot = -row[column]
    others = {other: value for other, value in row.items() if other != column}
    if pivot == 1:
        return others
    if pivot == -1:
        return {other: -value for other, value in others.items()}
    return {other: simplest(Fraction(value) / pivot) for other, value in others.items()}


def simplest(number: Fraction) -> Exact:
    """Return a whole number as an `int`, any other unchanged."""
    return number.numerator if number.denominator == 1 else number


def eliminate(rows: Iterable[Equation]) -> Solved:
    """Solve many equations, in an order that keeps them sparse.

    Equations with a column that occurs nowhere else are solved for that column first, which changes no other equation.
    Of the rest the shortest is next, solved for its rarest column (Markowitz's rule, with ties to the later column).

    Returns:
        Pivots with their expressions, in the order of elimination.
    """
    pending = {number: dict(row) for number, row in enumerate(rows) if row}
    uses: dict[int, set[int]] = {}
    for number, row in pending.items():
        for column in row:
            uses.setdefault(column, set()).add(number)
    solved: Solved = []
    lonely = [column for column, where in uses.items() if len(where) == 1]
    shortest = [(len(row), number) for number, row in pending.items()]
    heapify(shortest)
    while pending:
        if lonely:
            column = lonely.pop()
            where = uses.get(column, set())
            if len(where) != 1:
                continue
            number = next(iter(where))
        else:
            size, number = heappop(shortest)
            if len(pending.get(number, ())) != size:
                # The heap is not updated when an equation changes: the changed one is pushed again, this one is stale.
                continue
            column = min(pending[number], key=lambda c: (len(uses[c]), -c))
        row = pending.pop(number)
        for other in row:
            uses[other].discard(number)
        expression = solve_for(row, column)
        solved.append((column, expression))
        for target in list(uses[column]):
            equation = pending[target]
            substitute(equation, column, expression)
            for other in expression:
                # Fill-in adds the equation to the uses of a column, cancellation takes it away.
                (uses[other].add if other in equation else uses[other].discard)(target)
            if equation:
                heappush(shortest, (len(equation), target))
            else:
                del pending[target]
        uses[column].clear()
        lonely += [other for other in expression if len(uses[other]) == 1]
    return solved


def back_substitute(solved: Solved) -> dict[int, Equation]:
    """Return every solved column over the columns that stay free."""
    pivots = {column for column, _ in solved}
    final: dict[int, Equation] = {}
    # Backwards: an expression names only pivots that were solved after it, and those are final already.
    for column, expression in reversed(solved):
        total: Equation = {}
        for other, value in expression.items():
            for target, weight in final[other].items() if other in pivots else ((other, 1),):
                total[target] = total.get(target, 0) + value * weight
        final[column] = {target: weight for target, weight in total.items() if weight}
    return final
