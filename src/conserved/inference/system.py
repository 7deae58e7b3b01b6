"""Sparse linear equations between atoms, solved exactly: the charges and shifts that stay free.

Equations come in batches: k arrays of atoms of equal length with one rational weight each, one equation for every
position, Σ_j w_j q[a_j(p)] = 0. Almost all of them have one term (a charge is zero) or two of equal weight (two charges
agree up to sign); those are solved by connected components of a graph on signed atoms. Of the others, equations with a
variable that occurs nowhere else are peeled off, and what is left is eliminated over the rationals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import lcm

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from conserved.inference.roots import compact
from conserved.inference.types import Atoms

Row = dict[int, Fraction]


@dataclass(slots=True)
class Batch:
    """Equations of one shape. `soft` is the ε of a normalisation where they hold only without it, else 0."""

    weights: tuple[Fraction, ...]
    atoms: tuple[Atoms, ...]
    soft: int | float
    origin: int


@dataclass(slots=True)
class Solution:
    """Every atom as a combination of free numbers: `expand` has a row for each atom and a column for each of them.

    `soft[z]` is 0 for a solution of all equations; otherwise it needs a normalisation's ε to be as small as that.
    """

    expand: sparse.csr_matrix
    soft: np.ndarray


@dataclass(slots=True)
class LinearSystem:
    """Unknown numbers, one for every atom, and the equations between them. Atom 0 is always zero."""

    count: int = 1
    batches: list[Batch] = field(default_factory=list)

    def fresh(self, shape: Sequence[int]) -> Atoms:
        """New atoms, as many as an array of this shape has entries."""
        size = int(np.prod(shape, dtype=np.int64))
        found = np.arange(self.count, self.count + size, dtype=np.int64).reshape(tuple(shape))
        self.count += size
        return found

    def add(self, terms: Sequence[tuple[Fraction, Atoms]], *, soft: int | float = 0.0, origin: int = -1) -> None:
        """One equation for every position of arrays that broadcast against each other."""
        terms = [(weight, atoms) for weight, atoms in terms if weight]
        if not terms:
            return
        arrays = np.broadcast_arrays(*(atoms for _, atoms in terms))
        flat = tuple(np.ascontiguousarray(array).reshape(-1) for array in arrays)
        self.batches.append(Batch(tuple(weight for weight, _ in terms), flat, soft, origin))

    def solve(self) -> Solution:
        """All solutions."""
        hard = [batch for batch in self.batches if not batch.soft]
        expand = _solve(self.count, hard)
        soft_rows = [batch for batch in self.batches if batch.soft]
        if not soft_rows:
            return Solution(expand, np.zeros(expand.shape[1]))
        return _with_soft(expand, soft_rows, self.count)


def _matrix(batches: Sequence[Batch], count: int) -> sparse.csr_matrix:
    """All equations as integer rows over atoms."""
    rows: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    values: list[np.ndarray] = []
    start = 0
    for batch in batches:
        scale = lcm(*(weight.denominator for weight in batch.weights))
        size = batch.atoms[0].size
        place = np.arange(start, start + size)
        for weight, atoms in zip(batch.weights, batch.atoms, strict=True):
            rows.append(place)
            columns.append(atoms)
            values.append(np.full(size, int(weight * scale), dtype=np.int64))
        start += size
    if not rows:
        return sparse.csr_matrix((0, count), dtype=np.int64)
    found = sparse.coo_matrix((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), (start, count))
    return found.tocsr()


def _solve(count: int, batches: Sequence[Batch]) -> sparse.csr_matrix:
    """Solutions of equations without ε: a row for every atom over the free numbers."""
    system = _matrix(batches, count)
    # Atom a is sign[a] times the number of its class; class −1 is zero.
    group = np.arange(count)
    sign = np.ones(count, dtype=np.int64)
    group[0] = -1
    while True:
        classes = int(group.max(initial=-1)) + 1
        live = np.flatnonzero(group >= 0)
        project = sparse.csr_matrix((sign[live], (live, group[live])), (count, classes), dtype=np.int64)
        reduced = (system @ project).tocsr()
        reduced.eliminate_zeros()
        length = np.diff(reduced.indptr)
        first = reduced.indptr[:-1][length > 0]
        one = reduced.indices[reduced.indptr[:-1][length == 1]]
        twos = reduced.indptr[:-1][length == 2]
        left, right = reduced.indices[twos], reduced.indices[twos + 1]
        a, b = reduced.data[twos], reduced.data[twos + 1]
        equal = np.abs(a) == np.abs(b)
        if not one.size and not equal.any():
            break
        left, right, opposite = left[equal], right[equal], (a == b)[equal]
        group, sign = _merge(group, sign, classes, one, left, right, opposite)
        system = system[np.flatnonzero(length > 0)] if first.size < length.size else system
    reduced = _distinct(reduced)
    expressions = _eliminate(reduced)
    return (project @ expressions).tocsr()


def _merge(
    group: np.ndarray,
    sign: np.ndarray,
    classes: int,
    zero: np.ndarray,
    left: np.ndarray,
    right: np.ndarray,
    opposite: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Classes after some became zero and pairs of others equal or opposite.

    Every class has a node for itself and one for its negative, and zero a node of its own; a class connected with
    its own negative, or with zero, is zero.
    """
    nodes = 2 * classes + 1
    flip = np.where(opposite, 1, 0)
    sources = [2 * left, 2 * left + 1, 2 * zero, 2 * zero + 1]
    targets = [2 * right + flip, 2 * right + 1 - flip, np.full(zero.size, nodes - 1), np.full(zero.size, nodes - 1)]
    s, t = np.concatenate(sources), np.concatenate(targets)
    graph = sparse.coo_matrix((np.ones(s.size, dtype=np.int8), (s, t)), (nodes, nodes))
    _, label = connected_components(graph, directed=False)
    plus, minus = label[0:-1:2], label[1:-1:2]
    vanishes = (plus == minus) | (plus == label[-1])
    canonical = np.minimum(plus, minus).astype(np.int64)
    turned = np.where(plus <= minus, 1, -1)
    number = np.full(classes, -1, dtype=np.int64)
    number[~vanishes] = compact(canonical[~vanishes])
    live = group >= 0
    new_group = group.copy()
    new_group[live] = number[group[live]]
    new_sign = sign.copy()
    new_sign[live] = sign[live] * turned[group[live]]
    return new_group, new_sign


def _distinct(rows: sparse.csr_matrix) -> sparse.csr_matrix:
    """Each equation once, up to a factor."""
    rows.sort_indices()
    seen: set[bytes] = set()
    kept: list[int] = []
    pointers, indices, data = rows.indptr, rows.indices, rows.data
    for row in np.flatnonzero(np.diff(pointers)):
        start, stop = pointers[row], pointers[row + 1]
        values = data[start:stop]
        values = values // np.gcd.reduce(values)
        values = values if values[0] > 0 else -values
        key = indices[start:stop].tobytes() + b"|" + values.tobytes()
        if key not in seen:
            seen.add(key)
            kept.append(int(row))
    return rows[kept]


def _eliminate(rows: sparse.csr_matrix) -> sparse.csr_matrix:
    """Every variable as a combination of free ones, for integer equations of any length."""
    variables = rows.shape[1]
    pending: dict[int, Row] = {}
    uses: dict[int, set[int]] = {}
    for number in range(rows.shape[0]):
        start, stop = rows.indptr[number], rows.indptr[number + 1]
        row = {int(v): Fraction(int(c)) for v, c in zip(rows.indices[start:stop], rows.data[start:stop], strict=True)}
        if row:
            pending[number] = row
            for variable in row:
                uses.setdefault(variable, set()).add(number)
    solved: list[tuple[int, Row]] = []
    lonely = [variable for variable, where in uses.items() if len(where) == 1]
    while pending:
        if lonely:
            variable = lonely.pop()
            where = uses.get(variable, set())
            if len(where) != 1:
                continue
            number = next(iter(where))
        else:
            number = min(pending, key=lambda n: len(pending[n]))
            variable = min(pending[number], key=lambda v: (len(uses[v]), -v))
        row = pending.pop(number)
        for other in row:
            uses[other].discard(number)
        pivot = row.pop(variable)
        expression = {other: -value / pivot for other, value in row.items()}
        solved.append((variable, expression))
        for target in list(uses[variable]):
            equation = pending[target]
            factor = equation.pop(variable)
            uses[variable].discard(target)
            for other, value in expression.items():
                total = equation.get(other, Fraction(0)) + factor * value
                if total:
                    equation[other] = total
                    uses[other].add(target)
                else:
                    equation.pop(other, None)
                    uses[other].discard(target)
            if not equation:
                del pending[target]
        lonely += [other for other in expression if len(uses[other]) == 1]
    return _back_substitute(variables, solved)


def _back_substitute(variables: int, solved: list[tuple[int, Row]]) -> sparse.csr_matrix:
    pivots = {variable for variable, _ in solved}
    free = np.array([v for v in range(variables) if v not in pivots], dtype=np.int64)
    column = {int(v): n for n, v in enumerate(free)}
    final: dict[int, Row] = {}
    for variable, expression in reversed(solved):
        total: Row = {}
        for other, value in expression.items():
            terms = final.get(other) if other in pivots else {column[other]: Fraction(1)}
            assert terms is not None
            for target, weight in terms.items():
                total[target] = total.get(target, Fraction(0)) + value * weight
        final[variable] = {target: weight for target, weight in total.items() if weight}
    rows = [free]
    columns = [np.arange(free.size)]
    values = [np.ones(free.size)]
    for variable, expression in final.items():
        rows.append(np.full(len(expression), variable))
        columns.append(np.fromiter(expression, dtype=np.int64, count=len(expression)))
        values.append(np.array([float(weight) for weight in expression.values()]))
    return sparse.coo_matrix(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), (variables, free.size)
    ).tocsr()


def _with_soft(expand: sparse.csr_matrix, batches: Sequence[Batch], count: int) -> Solution:
    """Solutions sorted into those that also solve the soft equations and those that need ε to be small.

    In coordinates of the free numbers the soft equations are eliminated one by one; each pivot becomes a solution up to
    the ε of the equation, and the others are corrected so that they solve all of them.
    """
    rows = _matrix(batches, count)
    epsilon = np.concatenate([np.full(batch.atoms[0].size, batch.soft) for batch in batches])
    reduced = (rows.astype(np.float64) @ expand).tocsr()
    reduced.data = np.round(reduced.data * 5040) / 5040
    reduced.eliminate_zeros()
    kept: dict[bytes, tuple[Row, float]] = {}
    for number in np.flatnonzero(np.diff(reduced.indptr)):
        start, stop = reduced.indptr[number], reduced.indptr[number + 1]
        indices, data = reduced.indices[start:stop], reduced.data[start:stop]
        order = np.argsort(indices)
        indices, data = indices[order], data[order] / data[order][0]
        key = indices.tobytes() + data.tobytes()
        former = kept.get(key)
        if former is None:
            row = {int(v): Fraction(float(c)).limit_denominator(5040) for v, c in zip(indices, data, strict=True)}
            kept[key] = (row, float(epsilon[number]))
        elif former[1] < epsilon[number]:
            kept[key] = (former[0], float(epsilon[number]))
    size = expand.shape[1]
    soft = np.zeros(size)
    solved: list[tuple[int, Row]] = []
    pending = sorted(kept.values(), key=lambda item: len(item[0]))
    pivots: dict[int, Row] = {}
    for row, eps in pending:
        row = dict(row)
        while any(v in pivots for v in row):
            variable = next(v for v in row if v in pivots)
            factor = row.pop(variable)
            for other, value in pivots[variable].items():
                total = row.get(other, Fraction(0)) + factor * value
                if total:
                    row[other] = total
                else:
                    row.pop(other, None)
        if not row:
            continue
        variable = max(row)
        pivot = row.pop(variable)
        pivots[variable] = {other: -value / pivot for other, value in row.items()}
        solved.append((variable, pivots[variable]))
        soft[variable] = eps
    # A soft solution violates every soft equation its column occurs in: its ε is the largest of them.
    if pivots:
        occurs = reduced.tocsc()
        for variable in pivots:
            rows_of = occurs.indices[occurs.indptr[variable] : occurs.indptr[variable + 1]]
            soft[variable] = max(soft[variable], float(epsilon[rows_of].max(initial=0.0)))
    corrected = _back_substitute(size, solved)
    free = [v for v in range(size) if v not in pivots]
    chosen = sorted(pivots)
    exact = expand @ corrected
    softened = expand[:, chosen]
    merged = sparse.hstack([exact, softened]).tocsr()
    flags = np.concatenate([np.zeros(len(free)), soft[chosen]]) if chosen else np.zeros(len(free))
    return Solution(merged, flags)
