"""Sparse linear equations between atoms, solved exactly: the charges and shifts that stay free.

Equations come in batches: k arrays of atoms of equal length with one rational weight each, one equation for every
position, Σ_j w_j q[a_j(p)] = 0. Almost all of them have one term (a charge is zero) or two of equal weight (two charges
agree up to sign); those are solved as they come, by merging sets of atoms. Two equations of three terms that differ in
one of them say that two charges agree as well, which turns the equations of a sum over all positions of a large tensor
into a few. Of the others, equations with a variable that occurs nowhere else are peeled off, and what is left is
eliminated over the rationals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import lcm

import numpy as np
from scipy import sparse

from conserved.inference.signed_sets import SignedSets
from conserved.inference.types import Atoms

LARGEST_WHOLE = 1 << 56
"""The largest coefficient of an equation in whole numbers: sums of a few of them fit into 64 bits."""

Exact = int | Fraction
"""Exact; whole numbers stay `int`, whose arithmetic takes a tenth of the time."""

Equation = dict[int, Exact]


@dataclass(slots=True)
class Equations:
    """Equations of one shape. `soft` is the ε of a normalisation where they hold only without it, else 0."""

    weights: tuple[Fraction, ...]
    atoms: tuple[Atoms, ...]
    soft: int | float
    origin: int


@dataclass(slots=True)
class Solution:
    """Every atom as a combination of free numbers.

    Atom a is `sign[a]` times the number of its class `group[a]`, or zero if that is −1; `classes` has a row for each
    class and a column for each free number. `soft[z]` is 0 for a solution of all equations; otherwise it needs a
    normalisation's ε to be as small as that.
    """

    group: Atoms
    sign: np.ndarray
    classes: sparse.csr_matrix
    soft: np.ndarray

    @property
    def expand(self) -> sparse.csr_matrix:
        """A row for each atom."""
        return self.rows(np.arange(self.group.size))

    def rows(self, atoms: Atoms) -> sparse.csr_matrix:
        """Return a row for each of these atoms."""
        group = self.group[atoms]
        live = np.flatnonzero(group >= 0)
        pick = sparse.csr_matrix(
            (self.sign[atoms[live]].astype(np.float64), (live, group[live])), (atoms.size, self.classes.shape[0])
        )
        return (pick @ self.classes).tocsr()

    def entries(self, atoms: Atoms) -> tuple[Atoms, Atoms, np.ndarray]:
        """Return the non-zero coefficients of these atoms: position among them, free number, value."""
        group = self.group[atoms]
        position = np.flatnonzero(group >= 0)
        group = group[position]
        sign = self.sign[atoms[position]].astype(np.float64)
        start = self.classes.indptr[group]
        length = self.classes.indptr[group + 1] - start
        if group.size and int(length.min()) == 1 == int(length.max()):
            return position, self.classes.indices[start].astype(np.int64), self.classes.data[start] * sign
        total = int(length.sum())
        where = np.repeat(start - np.concatenate([[0], np.cumsum(length)[:-1]]), length) + np.arange(total)
        return (
            np.repeat(position, length),
            self.classes.indices[where].astype(np.int64),
            self.classes.data[where] * np.repeat(sign, length),
        )

    def still(self, atoms: Atoms) -> np.ndarray:
        """For each of these atoms whether it is zero in every solution."""
        group = self.group[atoms]
        return (group < 0) | (self.classes.indptr[group + 1] == self.classes.indptr[group])


@dataclass(slots=True)
class LinearSystem:
    """Unknown numbers, one for every atom, and the equations between them. Atom 0 is always zero."""

    count: int = 1
    batches: list[Equations] = field(default_factory=list)
    """The equations that are not solved as they come: of more than two terms, of unequal weights, or soft."""
    sets: SignedSets = field(default_factory=SignedSets)

    def fresh(self, shape: Sequence[int]) -> Atoms:
        """New atoms, as many as an array of this shape has entries."""
        size = int(np.prod(shape, dtype=np.int64))
        result = np.arange(self.count, self.count + size, dtype=np.int64).reshape(tuple(shape))
        self.count += size
        return result

    def add(self, terms: Sequence[tuple[Fraction, Atoms]], *, soft: int | float = 0.0, origin: int = -1) -> None:
        """One equation for every position of arrays that broadcast against each other."""
        terms = [(weight, atoms) for weight, atoms in terms if weight]
        if not terms:
            return
        self.sets.grow(self.count)
        arrays = np.broadcast_arrays(*(atoms for _, atoms in terms))
        flat = tuple(np.ascontiguousarray(array).reshape(-1) for array in arrays)
        weights = tuple(weight for weight, _ in terms)
        if max(abs(weight) for weight in weights) * lcm(*(weight.denominator for weight in weights)) > LARGEST_WHOLE:
            # Not written out: setting all of them to zero loses solutions and adds none.
            for array in flat:
                self.sets.join(array, np.zeros_like(array), 1)
            return
        if not soft and len(flat) == 1:
            self.sets.join(flat[0], np.zeros_like(flat[0]), 1)
        elif not soft and len(flat) == 2 and abs(weights[0]) == abs(weights[1]):
            torn = self.sets.join(flat[0], flat[1], -1 if weights[0] == weights[1] else 1)
            self.sets.join(torn, np.zeros_like(torn), 1)
        else:
            self.batches.append(Equations(weights, flat, soft, origin))

    def solve(self, *, joined: bool = False) -> Solution:
        """Return all solutions.

        Args:
            joined: Whether equations of three terms that differ in one are used to merge unknowns first. Of large
                tensors this leaves few equations; which unknowns stay free is then another choice.
        """
        self.sets.grow(self.count)
        group, sign, rows = self._reduced([batch for batch in self.batches if not batch.soft], joined=joined)
        count = int(group.max(initial=-1)) + 1
        classes = _eliminate(_distinct(rows), count)
        solution = Solution(group, sign, classes, np.zeros(classes.shape[1]))
        soft = [batch for batch in self.batches if batch.soft]
        return _with_soft(solution, soft) if soft else solution

    def _reduced(self, batches: Sequence[Equations], *, joined: bool) -> tuple[Atoms, np.ndarray, sparse.csr_matrix]:
        """Classes of atoms, and the equations between them of more than two terms or unequal weights."""
        rows, columns, values, count = _written(batches)
        while True:
            root, sign = self.sets.roots()
            stands = np.flatnonzero(root == np.arange(root.size))
            number = np.full(root.size, -1, dtype=np.int64)
            number[stands[1:]] = np.arange(stands.size - 1)
            group = number[root]
            live = group[columns] >= 0
            reduced = sparse.coo_matrix(
                (values[live] * sign[columns[live]], (rows[live], group[columns[live]])), (count, stands.size - 1)
            ).tocsr()
            reduced.eliminate_zeros()
            length = np.diff(reduced.indptr)
            ones = reduced.indptr[:-1][length == 1]
            twos = reduced.indptr[:-1][length == 2]
            a, b = reduced.data[twos], reduced.data[twos + 1]
            result = ones.size
            zero = stands[1 + reduced.indices[ones]]
            self.sets.join(zero, np.zeros_like(zero), 1)
            for sign_of_pair in (1, -1):
                chosen = twos[a == -sign_of_pair * b]
                result += chosen.size
                left, right = (stands[1 + reduced.indices[chosen + n]] for n in (0, 1))
                torn = self.sets.join(left, right, sign_of_pair)
                self.sets.join(torn, np.zeros_like(torn), 1)
            if joined:
                result += self._joined(stands, reduced, reduced.indptr[:-1][length == 3])
            if not result:
                return group, sign, reduced
            rest = np.zeros(count, dtype=bool)
            rest[length > 1] = True
            rest[np.flatnonzero(length == 2)[np.abs(a) == np.abs(b)]] = False
            keep = rest[rows]
            rows, columns, values = rows[keep], columns[keep], values[keep]

    def _joined(self, stands: Atoms, rows: sparse.csr_matrix, starts: np.ndarray) -> int:
        """Merge two variables wherever two equations of three terms are the same up to these; how many pairs are.

        From v + x + y = 0 and w + x + y = 0 follows v = w, and likewise with signs.

        Args:
            stands: The atom that stands for each variable, after the one that is zero.
            rows: All equations, their variables in ascending order.
            starts: Where in them the equations of three terms begin.
        """
        index = starts[:, None] + np.arange(3)
        weights, variables = rows.data[index], rows.indices[index].astype(np.int64)
        plain = np.flatnonzero((np.abs(weights) == np.abs(weights[:, :1])).all(1))
        signs, variables = np.sign(weights[plain]), variables[plain]
        result = 0
        for own, first, second in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
            apart = signs[:, first] != signs[:, second]
            key = (variables[:, first] * rows.shape[1] + variables[:, second]) * 2 + apart
            order = np.argsort(key, kind="stable")
            begins = np.flatnonzero(np.diff(key[order], prepend=-1))
            leader = np.repeat(order[begins], np.diff(begins, append=order.size))
            relative = signs[:, own] * signs[:, first]
            same = relative[order] == relative[leader]
            left, right = variables[order, own], variables[leader, own]
            for sign_of_pair, chosen in ((1, same & (left != right)), (-1, ~same)):
                pairs = np.unique(left[chosen] * rows.shape[1] + right[chosen])
                result += pairs.size
                item, other = np.divmod(pairs, rows.shape[1])
                torn = self.sets.join(stands[1 + item], stands[1 + other], sign_of_pair)
                self.sets.join(torn, np.zeros_like(torn), 1)
        return result


def _written(batches: Sequence[Equations]) -> tuple[Atoms, Atoms, np.ndarray, int]:
    """Return all equations as integer coefficients: equation, atom, coefficient, and how many equations there are."""
    rows: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    columns: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    values: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    start = 0
    for batch in batches:
        scale = lcm(*(weight.denominator for weight in batch.weights))
        size = batch.atoms[0].size
        index = np.arange(start, start + size)
        for weight, atoms in zip(batch.weights, batch.atoms, strict=True):
            rows.append(index)
            columns.append(atoms)
            values.append(np.full(size, int(weight * scale), dtype=np.int64))
        start += size
    return np.concatenate(rows), np.concatenate(columns), np.concatenate(values), start


def unsolved(system: LinearSystem, group: Atoms, orientation: np.ndarray, count: int) -> np.ndarray:
    """Return which of `count` motions do not solve all equations.

    Motion g moves the atoms of class g (`group[a]`, −1 for none) by their orientation.
    """
    wrong = np.zeros(count + 1, dtype=bool)
    root, sign = system.sets.roots()
    differs = (group != group[root]) | ((group >= 0) & (orientation != sign * orientation[root]))
    wrong[group[differs]] = True
    wrong[group[root[differs]]] = True
    rows, columns, values, equations = _written(system.batches)
    live = group[columns] >= 0
    residual = sparse.coo_matrix(
        (values[live] * orientation[columns[live]], (rows[live], group[columns[live]])), (equations, count)
    ).tocsr()
    residual.eliminate_zeros()
    wrong[residual.indices] = True
    return wrong[:count]


def _distinct(rows: sparse.csr_matrix) -> sparse.csr_matrix:
    """Return each equation once, up to a factor."""
    rows.sort_indices()
    lengths = np.diff(rows.indptr)
    numbers_of_first = []
    for length in np.unique(lengths[lengths > 0]):
        numbers = np.flatnonzero(lengths == length)
        index = rows.indptr[numbers][:, None] + np.arange(length)
        values = rows.data[index]
        values //= np.gcd.reduce(values, axis=1)[:, None] * np.sign(values[:, :1])
        _, first = np.unique(np.concatenate([rows.indices[index], values], axis=1), axis=0, return_index=True)
        numbers_of_first.append(numbers[first])
    return rows[np.sort(np.concatenate(numbers_of_first))] if numbers_of_first else rows[:0]


def _eliminate(rows: sparse.csr_matrix, variables: int) -> sparse.csr_matrix:
    """Return every variable as a combination of free ones, for integer equations of any length."""
    pending: dict[int, Equation] = {}
    uses: dict[int, set[int]] = {}
    for number in range(rows.shape[0]):
        start, stop = rows.indptr[number], rows.indptr[number + 1]
        row: Equation = dict(zip(rows.indices[start:stop].tolist(), rows.data[start:stop].tolist(), strict=True))
        if row:
            pending[number] = row
            for variable in row:
                uses.setdefault(variable, set()).add(number)
    solved: list[tuple[int, Equation]] = []
    lonely = [variable for variable, where in uses.items() if len(where) == 1]
    shortest = [(len(row), number) for number, row in pending.items()]
    heapify(shortest)
    while pending:
        if lonely:
            variable = lonely.pop()
            where = uses.get(variable, set())
            if len(where) != 1:
                continue
            number = next(iter(where))
        else:
            size, number = heappop(shortest)
            if len(pending.get(number, ())) != size:
                # It has changed since, and was put in again.
                continue
            variable = min(pending[number], key=lambda v: (len(uses[v]), -v))
        row = pending.pop(number)
        for other in row:
            uses[other].discard(number)
        pivot = row.pop(variable)
        expression = _divided(row, -pivot)
        solved.append((variable, expression))
        for target in list(uses[variable]):
            equation = pending[target]
            factor = equation.pop(variable)
            uses[variable].discard(target)
            for other, value in expression.items():
                total = equation.get(other, 0) + factor * value
                if total:
                    equation[other] = total
                    uses[other].add(target)
                else:
                    equation.pop(other, None)
                    uses[other].discard(target)
            if equation:
                heappush(shortest, (len(equation), target))
            else:
                del pending[target]
        lonely += [other for other in expression if len(uses[other]) == 1]
    return _back_substitute(variables, solved)


def _divided(row: Equation, by: Exact) -> Equation:
    """Return a row over a number that is not zero."""
    if by == 1:
        return row
    if by == -1:
        return {variable: -value for variable, value in row.items()}
    return {variable: _whole(Fraction(value) / by) for variable, value in row.items()}


def _whole(number: Fraction) -> Exact:
    return number.numerator if number.denominator == 1 else number


def _back_substitute(variables: int, solved: list[tuple[int, Equation]]) -> sparse.csr_matrix:
    """Return every variable over the free ones, which are all that were not solved for."""
    pivots = {variable for variable, _ in solved}
    free = np.ones(variables, dtype=bool)
    free[list(pivots)] = False
    column = np.cumsum(free) - 1
    final: dict[int, Equation] = {}
    for variable, expression in reversed(solved):
        total: Equation = {}
        for other, value in expression.items():
            for target, weight in final[other].items() if other in pivots else ((int(column[other]), 1),):
                total[target] = total.get(target, 0) + value * weight
        final[variable] = {target: weight for target, weight in total.items() if weight}
    count = int(free.sum())
    rows = np.concatenate(
        [np.flatnonzero(free), np.repeat(np.array(list(final), dtype=np.int64), [len(row) for row in final.values()])]
    )
    columns = [*range(count), *(target for row in final.values() for target in row)] if final else np.arange(count)
    weights = [float(weight) for row in final.values() for weight in row.values()]
    values = np.concatenate([np.ones(count), np.array(weights, dtype=np.float64)])
    return sparse.coo_matrix((values, (rows, np.asarray(columns, dtype=np.int64))), (variables, count)).tocsr()


def _with_soft(solution: Solution, batches: Sequence[Equations]) -> Solution:
    """Solutions sorted into those that also solve the soft equations and those that need ε to be small.

    In coordinates of the free numbers the soft equations are eliminated one by one; each pivot becomes a solution up to
    the ε of the equation, and the others are corrected so that they solve all of them.
    """
    expand = solution.classes
    rows, atoms, values, count = _written(batches)
    epsilon = np.concatenate([np.full(batch.atoms[0].size, batch.soft) for batch in batches])
    live = solution.group[atoms] >= 0
    rows, atoms, values = rows[live], atoms[live], values[live].astype(np.float64)
    equations = sparse.coo_matrix(
        (values * solution.sign[atoms], (rows, solution.group[atoms])), (count, expand.shape[0])
    ).tocsr()
    reduced = (equations @ expand).tocsr()
    reduced.data = np.round(reduced.data * 5040) / 5040
    reduced.eliminate_zeros()
    retained: dict[bytes, tuple[Equation, float]] = {}
    for number in np.flatnonzero(np.diff(reduced.indptr)):
        start, stop = reduced.indptr[number], reduced.indptr[number + 1]
        indices, data = reduced.indices[start:stop], reduced.data[start:stop]
        order = np.argsort(indices)
        indices, data = indices[order], data[order] / data[order][0]
        key = indices.tobytes() + data.tobytes()
        former = retained.get(key)
        if former is None:
            row = {
                int(v): _whole(Fraction(float(c)).limit_denominator(5040)) for v, c in zip(indices, data, strict=True)
            }
            retained[key] = (row, float(epsilon[number]))
        elif former[1] < epsilon[number]:
            retained[key] = (former[0], float(epsilon[number]))
    size = expand.shape[1]
    soft = np.zeros(size)
    solved: list[tuple[int, Equation]] = []
    pending = sorted(retained.values(), key=lambda item: len(item[0]))
    pivots: dict[int, Equation] = {}
    for row, eps in pending:
        row = dict(row)
        while any(v in pivots for v in row):
            variable = next(v for v in row if v in pivots)
            factor = row.pop(variable)
            for other, value in pivots[variable].items():
                total = row.get(other, 0) + factor * value
                if total:
                    row[other] = total
                else:
                    row.pop(other, None)
        if not row:
            continue
        variable = max(row)
        pivot = row.pop(variable)
        pivots[variable] = _divided(row, -pivot)
        solved.append((variable, pivots[variable]))
        soft[variable] = eps
    # A soft solution violates every soft equation its column occurs in: its ε is the largest of them.
    if pivots:
        occurs = reduced.tocsc()
        for variable in pivots:
            rows_of = occurs.indices[occurs.indptr[variable] : occurs.indptr[variable + 1]]
            soft[variable] = max(soft[variable], float(epsilon[rows_of].max(initial=0.0)))
    corrected = _back_substitute(size, solved)
    chosen = sorted(pivots)
    merged = sparse.hstack([expand @ corrected, expand[:, chosen]]).tocsr()
    flags = np.concatenate([np.zeros(size - len(chosen)), soft[chosen]])
    return Solution(solution.group, solution.sign, merged, flags)
