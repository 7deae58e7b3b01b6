"""Sparse linear equations between atoms, solved exactly: the charges and shifts that stay free.

Equations come in batches: k arrays of atoms of equal length with one rational weight each, one equation for every
position, Σ_j w_j q[a_j(p)] = 0. Almost all of them have one term (a charge is zero) or two of equal weight (two charges
agree up to sign); those are solved as they come, by merging sets of atoms. Two equations of three terms that differ in
one of them say that two charges agree as well, which turns the equations of a sum over all positions of a large tensor
into a few. Of the others, equations with a variable that occurs nowhere else are peeled off, and what is left is
eliminated over the rationals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from math import lcm

import numpy as np
from scipy import sparse

from conserved.inference.types.echelon import Echelon, Equation, Exact, back_substitute, eliminate, simplest
from conserved.inference.types.signed_sets import SignedSets
from conserved.inference.types.tensor_type import Atoms

LARGEST_WHOLE = 1 << 56
"""The largest coefficient of an equation in whole numbers: sums of a few of them fit into 64 bits."""

LARGEST_FLOAT = 1 << 53
"""Whole numbers up to here are float64 numbers without rounding."""


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

    `exact` has the same rows as exact numbers, for every class that is not itself a free number. `classes` holds them
    rounded to float64, which is what array code reads.
    """

    group: Atoms
    sign: np.ndarray
    classes: sparse.csr_matrix
    soft: np.ndarray
    exact: dict[int, Equation]

    def exact_row(self, number: int) -> Equation:
        """Return a class as an exact combination of free numbers."""
        if number in self.exact:
            return self.exact[number]
        return {int(self.classes.indices[self.classes.indptr[number]]): 1}

    def exact_entries(self, atoms: Atoms) -> tuple[list[int], list[int], list[Exact]]:
        """Return what `entries` does, with exact coefficients."""
        position, free, value = self.entries(atoms)
        # Almost all coefficients are small whole numbers, which float64 holds exactly. Only the others are looked up.
        inexact = np.flatnonzero((value != np.round(value)) | (np.abs(value) >= LARGEST_FLOAT))
        numbers: list[Exact] = [int(number) for number in np.round(value).astype(np.int64).tolist()]
        for index in inexact.tolist():
            atom = atoms[position[index]]
            numbers[index] = self.exact[int(self.group[atom])][int(free[index])] * int(self.sign[atom])
        return position.tolist(), free.tolist(), numbers

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
        """Return for each of these atoms whether it is zero in every solution."""
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
        """Return new atoms, as many as an array of this shape has entries."""
        size = int(np.prod(shape, dtype=np.int64))
        result = np.arange(self.count, self.count + size, dtype=np.int64).reshape(tuple(shape))
        self.count += size
        return result

    def add(self, terms: Sequence[tuple[Fraction, Atoms]], *, soft: int | float = 0.0, origin: int = -1) -> None:
        """Add one equation for every position of arrays that broadcast against each other."""
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
        group, sign, rows = self._reduce_classes([batch for batch in self.batches if not batch.soft], joined=joined)
        count = int(group.max(initial=-1)) + 1
        final = back_substitute(eliminate(_rows(_distinct(rows))))
        column = _renumber(count, final)
        exact = {number: {int(column[free]): value for free, value in row.items()} for number, row in final.items()}
        size = count - len(final)
        classes = _class_matrix(column, exact, size)
        solution = Solution(group, sign, classes, np.zeros(size), exact)
        soft = [batch for batch in self.batches if batch.soft]
        return _with_soft(solution, soft) if soft else solution

    def _reduce_classes(
        self, batches: Sequence[Equations], *, joined: bool
    ) -> tuple[Atoms, np.ndarray, sparse.csr_matrix]:
        """Return classes of atoms, and the equations between them of more than two terms or unequal weights."""
        rows, columns, values, count = _as_coordinates(batches)
        # Written over classes, long equations get shorter, and those of one or two terms merge further classes: repeat
        # until none does. Sums of entries that are equal after all cost no elimination this way.
        while True:
            root, sign = self.sets.roots()
            # Classes are numbered from 0 without the class of atom 0, whose number is −1: it is zero and drops out.
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
            # One term: that class is zero. Two terms of equal size: both classes are one, up to a sign.
            single = reduced.indptr[:-1][length == 1]
            twos = reduced.indptr[:-1][length == 2]
            a, b = reduced.data[twos], reduced.data[twos + 1]
            result = single.size
            zero = stands[1 + reduced.indices[single]]
            self.sets.join(zero, np.zeros_like(zero), 1)
            for sign_of_pair in (1, -1):
                chosen = twos[a == -sign_of_pair * b]
                result += chosen.size
                left, right = (stands[1 + reduced.indices[chosen + n]] for n in (0, 1))
                # A class that would be its own opposite is zero.
                torn = self.sets.join(left, right, sign_of_pair)
                self.sets.join(torn, np.zeros_like(torn), 1)
            if joined:
                result += self._join_similar(stands, reduced, reduced.indptr[:-1][length == 3])
            if not result:
                return group, sign, reduced
            # Equations that were used up are left out of the next round.
            rest = np.zeros(count, dtype=bool)
            rest[length > 1] = True
            rest[np.flatnonzero(length == 2)[np.abs(a) == np.abs(b)]] = False
            keep = rest[rows]
            rows, columns, values = rows[keep], columns[keep], values[keep]

    def _join_similar(self, stands: Atoms, rows: sparse.csr_matrix, starts: np.ndarray) -> int:
        """Merge two variables wherever two equations of three terms agree up to these; return how many pairs were
        merged.

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
            # Equations that share the other two variables, with the same relative sign, get one key and stand together.
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


def _as_coordinates(batches: Sequence[Equations]) -> tuple[Atoms, Atoms, np.ndarray, int]:
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


def unsolved_motions(system: LinearSystem, group: Atoms, orientation: np.ndarray, count: int) -> np.ndarray:
    """Return which of `count` motions do not solve all equations.

    Motion g moves the atoms of class g (`group[a]`, −1 for none) by their orientation.
    """
    wrong = np.zeros(count + 1, dtype=bool)
    root, sign = system.sets.roots()
    differs = (group != group[root]) | ((group >= 0) & (orientation != sign * orientation[root]))
    wrong[group[differs]] = True
    wrong[group[root[differs]]] = True
    rows, columns, values, equations = _as_coordinates(system.batches)
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
        # Divided by their common divisor and with a positive first coefficient, multiples of one equation are equal.
        values //= np.gcd.reduce(values, axis=1)[:, None] * np.sign(values[:, :1])
        _, first = np.unique(np.concatenate([rows.indices[index], values], axis=1), axis=0, return_index=True)
        numbers_of_first.append(numbers[first])
    return rows[np.sort(np.concatenate(numbers_of_first))] if numbers_of_first else rows[:0]


def _rows(matrix: sparse.csr_matrix) -> list[Equation]:
    """Return the rows of an integer matrix as mappings."""
    indices, data, starts = matrix.indices.tolist(), matrix.data.tolist(), matrix.indptr.tolist()
    return [dict(zip(indices[a:b], data[a:b], strict=True)) for a, b in pairwise(starts)]


def _renumber(count: int, gone: Iterable[int]) -> np.ndarray:
    """Return new numbers for 0 … count − 1 without those that are gone, which get −1."""
    free = np.ones(count, dtype=bool)
    free[list(gone)] = False
    return np.where(free, np.cumsum(free) - 1, -1)


def _class_matrix(column: np.ndarray, exact: Mapping[int, Equation], size: int) -> sparse.csr_matrix:
    """Return all classes as rows over `size` free numbers, in float64.

    Args:
        column: The free number that a class is, or −1 where `exact` has its row.
        exact: The rows of all other classes.
        size: How many free numbers there are.
    """
    units = np.flatnonzero(column >= 0)
    numbers = np.repeat(np.array(list(exact), dtype=np.int64), [len(row) for row in exact.values()])
    columns = np.array([free for row in exact.values() for free in row], dtype=np.int64)
    values = np.array([float(value) for row in exact.values() for value in row.values()], dtype=np.float64)
    where = (np.concatenate([units, numbers]), np.concatenate([column[units], columns]))
    return sparse.coo_matrix((np.concatenate([np.ones(units.size), values]), where), (column.size, size)).tocsr()


def _with_soft(solution: Solution, batches: Sequence[Equations]) -> Solution:
    """Return solutions sorted into those that also solve the soft equations and those that need ε to be small.

    In coordinates of the free numbers the soft equations are eliminated one by one; each pivot becomes a solution up to
    the ε of the equation, and the others are corrected so that they solve all of them.
    """
    count, size = solution.classes.shape
    soft = np.zeros(size)
    echelon = Echelon()
    equations = _soft_equations(solution, batches)
    for row, epsilon in sorted(equations, key=lambda item: len(item[0])):
        pivot = echelon.add(row, max)
        if pivot is not None:
            soft[pivot] = epsilon
    # A soft solution violates every soft equation its column occurs in: its ε is the largest of them.
    for row, epsilon in equations:
        for number in row:
            if number in echelon.expressions:
                soft[number] = max(soft[number], epsilon)
    # Solutions of all equations come first, numbered as before without the pivots; the soft ones follow.
    chosen = sorted(echelon.expressions)
    column = _renumber(size, chosen)
    corrected = back_substitute(list(echelon.expressions.items()))
    place_of = {number: size - len(chosen) + position for position, number in enumerate(chosen)}

    def moved(row: Equation) -> Equation:
        total: Equation = {}
        for number, value in row.items():
            # A pivot moves by itself, up to ε, and by the exact solutions that correct the others.
            parts = {int(column[free]): weight for free, weight in corrected.get(number, {}).items()}
            parts |= {place_of[number]: 1} if number in place_of else {int(column[number]): 1}
            for target, weight in parts.items():
                total[target] = total.get(target, 0) + value * weight
        return {target: weight for target, weight in total.items() if weight}

    exact = {number: moved(row) for number, row in solution.exact.items()}
    units = np.full(count, -1, dtype=np.int64)
    single = np.setdiff1d(np.arange(count), np.array(list(solution.exact), dtype=np.int64), assume_unique=True)
    free = solution.classes.indices[solution.classes.indptr[single]]
    units[single] = column[free]
    exact |= {int(number): moved({int(z): 1}) for number, z in zip(single, free, strict=True) if column[z] < 0}
    flags = np.concatenate([np.zeros(size - len(chosen)), soft[chosen]])
    return Solution(solution.group, solution.sign, _class_matrix(units, exact, size), flags, exact)


def _soft_equations(solution: Solution, batches: Sequence[Equations]) -> list[tuple[Equation, float]]:
    """Return the soft equations in free numbers, each once up to a factor, with the largest ε it was made with."""
    rows, atoms, values, count = _as_coordinates(batches)
    epsilon = np.concatenate([np.full(batch.atoms[0].size, batch.soft) for batch in batches])
    live = solution.group[atoms] >= 0
    rows, atoms, values = rows[live], atoms[live], values[live]
    over_classes = sparse.coo_matrix(
        (values * solution.sign[atoms], (rows, solution.group[atoms])), (count, solution.classes.shape[0])
    ).tocsr()
    result: dict[tuple[tuple[int, Exact], ...], float] = {}
    for equation, limit in zip(_rows(over_classes), epsilon.tolist(), strict=True):
        row: Equation = {}
        for number, weight in equation.items():
            for free, value in solution.exact_row(number).items():
                row[free] = row.get(free, 0) + weight * value
        terms = sorted((free, value) for free, value in row.items() if value)
        if terms:
            first = Fraction(terms[0][1])
            key = tuple((free, simplest(value / first)) for free, value in terms)
            result[key] = max(result.get(key, 0.0), limit)
    return [(dict(key), limit) for key, limit in result.items()]
