"""Free shifts written so that people recognise them: a parameter summed along some of its axes, or two such sums
against each other.

All free shifts of a program form a linear space. A basis that elimination happens to give mixes them; the natural
ones are found by trying: every sum of one parameter along a set of its axes is tested for being in the space, then
pairs of sums. What is left over, if anything, is listed entry by entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy import sparse

from conserved.inference.engine import Region
from conserved.inference.system import Solution
from conserved.inference.types import Field

EXACT = 1e-9

PARTS = 100_000
"""Shifts of larger parameters are not looked for in parts of an axis."""

RATIOS = 6
"""Ratios at which two parameters are tried to move against each other."""


@dataclass(slots=True)
class Unit:
    """A family of shifts of one parameter: one for every index along some axes, the same along all others (`rows`)."""

    region: int
    field: int
    rows: set[int]
    places: np.ndarray
    """For every member the entries of the field that it moves."""
    start: int
    keep: tuple[int, int, int] | None = None
    """An axis of the region of which only a range is moved."""

    @property
    def size(self) -> int:
        return len(self.places)


class ShiftSpace:
    """The space of free shifts over the entries of all shift fields of all regions."""

    def __init__(self, regions: Sequence[Region], shifts: Solution) -> None:
        self.fields: list[tuple[int, int, Field]] = [
            (number, index, shift)
            for number, region in enumerate(regions)
            for index, shift in enumerate(region.type.shifts)
            if not shifts.still(shift.atoms.reshape(-1)).all()
        ]
        self.sizes = [shift.atoms.size for _, _, shift in self.fields]
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        blocks = [shifts.rows(shift.atoms.reshape(-1)) * float(shift.weight) for _, _, shift in self.fields]
        space = sparse.vstack(blocks).tocsc() if blocks else sparse.csc_matrix((0, 0))
        space.eliminate_zeros()
        space = space[:, np.flatnonzero(np.diff(space.indptr))]
        self.basis, self.pivots = _echelon(space)
        self.regions = regions
        self._taken = _Span(self.pivots.size)
        self._kernel()

    def _kernel(self) -> None:
        """Shifts of two fields of one parameter that cancel are no motion at all: they count as found."""
        by_region: dict[int, list[int]] = {}
        for number, (region, _, _) in enumerate(self.fields):
            by_region.setdefault(region, []).append(number)
        for numbers in by_region.values():
            for a, b in combinations(numbers, 2):
                common = set(self.fields[a][2].dims) & set(self.fields[b][2].dims)
                family = []
                for number, weight in ((a, 1.0), (b, -1.0)):
                    shift = self.fields[number][2]
                    outside = {n for n, dim in enumerate(shift.dims) if dim not in common}
                    unit = next(
                        u
                        for u in self._units(number)
                        if u.rows >= {shift.dims[n] for n in outside}
                        and u.size
                        == int(np.prod([shift.atoms.shape[n] for n in range(len(shift.dims)) if n not in outside]))
                    )
                    family.append((unit, weight))
                self._holds(family)

    def sums_along(self, region: int, axis: int) -> list[tuple[Unit, float]] | None:
        """Return the sums of a region along one axis as a family, if they are free."""
        wide = {d for d, chosen in enumerate(self.regions[region].sets) if chosen.size > 1}
        for number, (region_number, _, shift) in enumerate(self.fields):
            if region_number == region and set(shift.dims) == wide - {axis}:
                family = [(next(self._units(number)), 1.0)]
                return family if self._inside(family) else None
        return None

    def take(self, family: Sequence[tuple[Unit, float]]) -> None:
        """Count a family as found."""
        self._holds(family)

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Number, start and end of every field among all entries."""
        for number, size in enumerate(self.sizes):
            yield number, int(self.starts[number]), int(self.starts[number]) + size

    def families(self) -> list[list[tuple[Unit, float]]]:
        """Families of shifts that span the space as far as sums of one or two parameters do."""
        if not self.pivots.size:
            return []
        touched = np.unique(self.basis.indices)
        active = [
            n for n, start, stop in self.spans() if np.searchsorted(touched, stop) > np.searchsorted(touched, start)
        ]
        units = [unit for number in active for unit in self._units(number)]
        result: list[list[tuple[Unit, float]]] = []
        result += [[(unit, 1.0)] for unit in units if self._holds([(unit, 1.0)])]
        if self._taken.rank < self.pivots.size:
            result += self._pairs(units)
        return result

    def _units(self, number: int) -> Iterator[Unit]:
        """Sums of a field's entries along sets of its axes, those along most axes last."""
        region, position, shift = self.fields[number]
        shape = shift.atoms.shape
        index = np.arange(shift.atoms.size).reshape(shape)
        outside = {
            d
            for d in range(len(self.regions[region].sets))
            if d not in shift.dims and self.regions[region].sets[d].size > 1
        }
        for count in range(len(shape) + 1):
            for summed in combinations(range(len(shape)), count):
                remaining = [n for n in range(len(shape)) if n not in summed]
                places = index.transpose([*remaining, *summed]).reshape(int(np.prod([shape[n] for n in remaining])), -1)
                yield Unit(
                    region, position, outside | {shift.dims[n] for n in summed}, places, int(self.starts[number])
                )
        if outside or len(shape) < 2 or shift.atoms.size > PARTS:
            return
        # The first place along an axis and the others, as a class token and the patches that follow it.
        for n, dim in enumerate(shift.dims):
            for first, last in ((0, 1), (1, shape[n])):
                part = np.moveaxis(index, n, -1)[..., first:last]
                places = part.reshape(-1, last - first)
                yield Unit(region, position, {dim}, places, int(self.starts[number]), (dim, first, last))

    def _vectors(self, family: Sequence[tuple[Unit, float]]) -> sparse.csc_matrix:
        rows, columns, values = [], [], []
        for unit, weight in family:
            rows.append((unit.start + unit.places).reshape(-1))
            columns.append(np.repeat(np.arange(unit.size), unit.places.shape[1]))
            values.append(np.full(unit.places.size, weight))
        shape = (self.basis.shape[0], family[0][0].size)
        return sparse.csc_matrix((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape)

    def _holds(self, family: Sequence[tuple[Unit, float]]) -> bool:
        """Return whether all members are in the space and at least one is not spanned by what was found before."""
        return self._inside(family) and self._taken.add(self._vectors(family)[self.pivots].tocsc())

    def _inside(self, family: Sequence[tuple[Unit, float]]) -> bool:
        """Return whether all members are in the space."""
        vectors = self._vectors(family)
        difference = (self.basis @ vectors[self.pivots]) - vectors
        return not difference.nnz or float(np.abs(difference.data).max()) <= EXACT

    def _pairs(self, units: Sequence[Unit]) -> list[list[tuple[Unit, float]]]:
        """Pairs of sums that move against each other, among parameters that occur together in what is left."""
        result = []
        by_size: dict[int, list[Unit]] = {}
        for unit in units:
            by_size.setdefault(unit.size, []).append(unit)
        linked = self._linked()
        for size in sorted(by_size, reverse=True):
            for a, b in combinations(by_size[size], 2):
                if a.region == b.region or (a.region, b.region) not in linked:
                    continue
                for weight in linked[a.region, b.region]:
                    if self._taken.rank < self.pivots.size and self._holds([(a, 1.0), (b, weight)]):
                        result.append([(a, 1.0), (b, weight)])
                        break
        return result

    def _linked(self) -> dict[tuple[int, int], list[float]]:
        """Pairs of regions that one basis vector moves both, with the ratios at which it does."""
        owner = np.repeat([region for region, _, _ in self.fields], self.sizes)
        result: dict[tuple[int, int], list[float]] = {}
        seen: set[bytes] = set()
        for column in range(self.basis.shape[1]):
            span = slice(self.basis.indptr[column], self.basis.indptr[column + 1])
            regions, first = np.unique(owner[self.basis.indices[span]], return_index=True)
            values = self.basis.data[span][first]
            key = regions.tobytes() + np.round(values, 9).tobytes()
            if key in seen:
                continue
            seen.add(key)
            for a, x in zip(regions.tolist(), values.tolist(), strict=True):
                for b, y in zip(regions.tolist(), values.tolist(), strict=True):
                    ratios = result.setdefault((a, b), [-1.0, 1.0])
                    if len(ratios) < RATIOS and not any(abs(y / x - ratio) < EXACT for ratio in ratios):
                        ratios.append(y / x)
        return result

    def rest(self) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
        """Yield what the families do not span: entries and weights, those that read alike in one list."""
        alike: dict[tuple[tuple[int, float], ...], list[tuple[np.ndarray, np.ndarray]]] = {}
        for column in range(self.pivots.size):
            if self._taken.rank >= self.pivots.size:
                break
            unit = sparse.csc_matrix(([1.0], ([column], [0])), (self.pivots.size, 1))
            if self._taken.add(unit):
                span = slice(self.basis.indptr[column], self.basis.indptr[column + 1])
                order = np.argsort(self.basis.indices[span])
                rows, weights = self.basis.indices[span][order], self.basis.data[span][order]
                fields = np.searchsorted(self.starts, rows, side="right") - 1
                single = np.unique(fields).size == fields.size
                key = (
                    tuple(zip(fields.tolist(), np.round(weights, 9).tolist(), strict=True))
                    if single
                    else ((-1, column),)
                )
                alike.setdefault(key, []).append((rows, weights))
        yield from alike.values()


def _echelon(space: sparse.csc_matrix) -> tuple[sparse.csc_matrix, np.ndarray]:
    """Return a basis of the column space with an entry for every vector where it alone is one, and these entries."""
    columns: list[dict[int, float]] = []
    alone = np.diff(space.tocsr().indptr) == 1
    pivots: dict[int, dict[int, float]] = {}
    order = []
    for column in range(space.shape[1]):
        rows = space.indices[space.indptr[column] : space.indptr[column + 1]]
        data = space.data[space.indptr[column] : space.indptr[column + 1]]
        single = np.flatnonzero(alone[rows])
        vector = dict(zip(map(int, rows), map(float, data), strict=True))
        if single.size:
            pivot = int(rows[single[0]])
            pivots[pivot] = {row: value / vector[pivot] for row, value in vector.items()}
            order.append(pivot)
        else:
            columns.append(vector)
    for vector in columns:
        for pivot in [row for row in vector if row in pivots]:
            _subtract(vector, pivots[pivot], vector.get(pivot, 0.0))
        vector = {row: value for row, value in vector.items() if abs(value) > EXACT}
        if not vector:
            continue
        pivot = min(vector)
        vector = {row: value / vector[pivot] for row, value in vector.items()}
        for other in pivots.values():
            if pivot in other:
                _subtract(other, vector, other[pivot])
        pivots[pivot] = vector
        order.append(pivot)
    rows_list, columns_list, values = [], [], []
    order.sort()
    for number, pivot in enumerate(order):
        for row, value in pivots[pivot].items():
            if abs(value) > EXACT:
                rows_list.append(row)
                columns_list.append(number)
                values.append(value)
    basis = sparse.csc_matrix((values, (rows_list, columns_list)), (space.shape[0], len(order)))
    return basis, np.array(order, dtype=np.int64)


def _subtract(vector: dict[int, float], other: dict[int, float], factor: float) -> None:
    if factor:
        for row, value in other.items():
            vector[row] = vector.get(row, 0.0) - factor * value


class _Span:
    """A growing set of vectors, to tell what is new."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = 0
        self._rows: dict[int, dict[int, float]] = {}

    def add(self, vectors: sparse.csc_matrix) -> bool:
        """Take vectors in; whether one of them was new."""
        before = self.rank
        for column in range(vectors.shape[1]):
            start, stop = vectors.indptr[column], vectors.indptr[column + 1]
            vector = dict(zip(map(int, vectors.indices[start:stop]), map(float, vectors.data[start:stop]), strict=True))
            pending = [row for row in vector if row in self._rows]
            while pending:
                row = pending.pop()
                factor = vector.pop(row, 0.0)
                if not factor:
                    continue
                for other, value in self._rows[row].items():
                    if other == row:
                        continue
                    total = vector.get(other, 0.0) - factor * value
                    if abs(total) <= EXACT:
                        vector.pop(other, None)
                        continue
                    vector[other] = total
                    if other in self._rows:
                        pending.append(other)
            if vector:
                pivot = max(vector)
                self._rows[pivot] = {r: v / vector[pivot] for r, v in vector.items()}
                self.rank += 1
        return self.rank > before
