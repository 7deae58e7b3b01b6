"""Free shifts written so that people recognise them: a parameter summed along some of its axes, or two such sums
against each other.

All free shifts of a program form a linear space. A basis that elimination happens to give mixes them; the natural
ones are found by trying: every sum of one parameter along a set of its axes is tested for being in the space, then
pairs of sums. What is left over, if anything, is listed entry by entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
from scipy import sparse

from conserved.inference.types.echelon import Echelon, Equation, Exact, simplest
from conserved.inference.types.engine import Region
from conserved.inference.types.system import Solution
from conserved.inference.types.tensor_type import Field

EXACT = 1e-9

PARTS = 100_000
"""Shifts of larger parameters are not looked for in parts of an axis."""

RATIOS = 6
"""Ratios at which two parameters are tried to move against each other."""

Family = Sequence[tuple["Unit", Exact]]
"""Shifts of one or more parameters that move together, with the weight of each."""


@dataclass(slots=True)
class Unit:
    """A family of shifts of one parameter: one for every index along some axes, the same along all others (`rows`)."""

    region: int
    field: int
    rows: set[int]
    indices: np.ndarray
    """For every member the entries of the field that it moves."""
    start: int
    keep: tuple[int, int, int] | None = None
    """An axis of the region of which only a range is moved."""

    @property
    def size(self) -> int:
        return len(self.indices)


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
        vectors: dict[int, Equation] = {}
        for (_, _, shift), start in zip(self.fields, self.starts.tolist(), strict=False):
            weight = simplest(shift.weight)
            for position, free, value in zip(*shifts.exact_entries(shift.atoms.reshape(-1)), strict=True):
                vectors.setdefault(free, {})[start + position] = value * weight
        self._exact = reduced_basis([vectors[free] for free in sorted(vectors)])
        self.pivots = np.array(list(self._exact), dtype=np.int64)
        self.basis = _columns(list(self._exact.values()), int(self.starts[-1]))
        self.regions = regions
        self._spanned = Echelon()
        """The families counted so far, in coordinates of the pivots."""
        self._kernel()

    def _kernel(self) -> None:
        """Count shifts of two fields of one parameter that cancel: they are not a motion."""
        by_region: dict[int, list[int]] = {}
        for number, (region, _, _) in enumerate(self.fields):
            by_region.setdefault(region, []).append(number)
        for numbers in by_region.values():
            for a, b in combinations(numbers, 2):
                common = set(self.fields[a][2].dims) & set(self.fields[b][2].dims)
                family = []
                for number, weight in ((a, 1), (b, -1)):
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

    def sums_along(self, region: int, axis: int) -> list[tuple[Unit, Exact]] | None:
        """Return the sums of a region along one axis as a family, if they are free."""
        wide = {d for d, chosen in enumerate(self.regions[region].sets) if chosen.size > 1}
        for number, (region_number, _, shift) in enumerate(self.fields):
            if region_number == region and set(shift.dims) == wide - {axis}:
                family: list[tuple[Unit, Exact]] = [(next(self._units(number)), 1)]
                return family if self._inside(family) else None
        return None

    def take(self, family: Family) -> None:
        """Count a family as found."""
        self._holds(family)

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Number, start and end of every field among all entries."""
        for number, size in enumerate(self.sizes):
            yield number, int(self.starts[number]), int(self.starts[number]) + size

    def families(self) -> list[list[tuple[Unit, Exact]]]:
        """Return families of shifts that span the space as far as sums of one or two parameters do."""
        if not self.pivots.size:
            return []
        touched = np.unique(self.basis.indices)
        active = [
            n for n, start, stop in self.spans() if np.searchsorted(touched, stop) > np.searchsorted(touched, start)
        ]
        units = [unit for number in active for unit in self._units(number)]
        result: list[list[tuple[Unit, Exact]]] = []
        result += [[(unit, 1)] for unit in units if self._holds([(unit, 1)])]
        if self._spanned.rank < self.pivots.size:
            result += self._pairs(units)
        return result

    def _units(self, number: int) -> Iterator[Unit]:
        """Yield sums of a field's entries along sets of its axes, those along most axes last."""
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
                indices = index.transpose([*remaining, *summed]).reshape(
                    int(np.prod([shape[n] for n in remaining])), -1
                )
                yield Unit(
                    region, position, outside | {shift.dims[n] for n in summed}, indices, int(self.starts[number])
                )
        if outside or len(shape) < 2 or shift.atoms.size > PARTS:
            return
        # The first place along an axis and the others, as a class token and the patches that follow it.
        for n, dim in enumerate(shift.dims):
            for first, last in ((0, 1), (1, shape[n])):
                part = np.moveaxis(index, n, -1)[..., first:last]
                indices = part.reshape(-1, last - first)
                yield Unit(region, position, {dim}, indices, int(self.starts[number]), (dim, first, last))

    def _vectors(self, family: Family) -> sparse.csc_matrix:
        rows, columns, values = [], [], []
        for unit, weight in family:
            rows.append((unit.start + unit.indices).reshape(-1))
            columns.append(np.repeat(np.arange(unit.size), unit.indices.shape[1]))
            values.append(np.full(unit.indices.size, float(weight)))
        shape = (self.basis.shape[0], family[0][0].size)
        return sparse.csc_matrix((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape)

    def _holds(self, family: Family) -> bool:
        """Return whether all members are in the space and at least one is not spanned by what was found before."""
        return self._inside(family) and self._count(family)

    def _count(self, family: Family) -> bool:
        """Add the members of a family to the span; return whether one of them was new."""
        before = self._spanned.rank
        weights = [weight for _, weight in family]
        # Members as columns that say which unit moves an entry; units of one family move different entries.
        members = self._vectors([(unit, number) for number, (unit, _) in enumerate(family, 1)])[self.pivots].tocsc()
        for start, stop in pairwise(members.indptr.tolist()):
            numbers = members.data[start:stop].astype(np.int64).tolist()
            entries = members.indices[start:stop].tolist()
            self._spanned.add({entry: weights[n - 1] for entry, n in zip(entries, numbers, strict=True)})
        return self._spanned.rank > before

    def _inside(self, family: Family) -> bool:
        """Return whether all members are in the space."""
        vectors = self._vectors(family)
        difference = (self.basis @ vectors[self.pivots]) - vectors
        return not difference.nnz or float(np.abs(difference.data).max()) <= EXACT

    def _pairs(self, units: Sequence[Unit]) -> list[list[tuple[Unit, Exact]]]:
        """Return pairs of sums that move against each other, among parameters that occur together in what is left."""
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
                    if self._spanned.rank < self.pivots.size and self._holds([(a, 1), (b, weight)]):
                        result.append([(a, 1), (b, weight)])
                        break
        return result

    def _linked(self) -> dict[tuple[int, int], list[Exact]]:
        """Return pairs of regions that one basis vector moves both, with the ratios at which it does."""
        owner = np.repeat([region for region, _, _ in self.fields], self.sizes).tolist()
        result: dict[tuple[int, int], list[Exact]] = {}
        seen: set[tuple[tuple[int, Exact], ...]] = set()
        for vector in self._exact.values():
            moved: dict[int, Exact] = {}
            for entry in sorted(vector):
                moved.setdefault(owner[entry], vector[entry])
            key = tuple(sorted(moved.items()))
            if key in seen:
                continue
            seen.add(key)
            for a, x in key:
                for b, y in key:
                    ratios = result.setdefault((a, b), [-1, 1])
                    ratio = simplest(Fraction(y) / x)
                    if len(ratios) < RATIOS and ratio not in ratios:
                        ratios.append(ratio)
        return result

    def rest(self) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
        """Yield what the families do not span: entries and weights, those that read alike in one list."""
        alike: dict[tuple[tuple[int, float], ...], list[tuple[np.ndarray, np.ndarray]]] = {}
        for column in range(self.pivots.size):
            if self._spanned.rank >= self.pivots.size:
                break
            if self._spanned.add({column: 1}) is not None:
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


def reduced_basis(vectors: Sequence[Equation]) -> dict[int, Equation]:
    """Return a basis of the vectors' span by pivot: each is 1 at its own pivot, an entry where all others are 0."""
    uses = Counter(entry for vector in vectors for entry in vector)
    echelon = Echelon()
    # Vectors with an entry of their own come first, solved for that entry: they need no elimination.
    rest = []
    for vector in vectors:
        single = next((entry for entry in sorted(vector) if uses[entry] == 1), None)
        if single is None:
            rest.append(vector)
        else:
            echelon.add({single: vector[single]} | vector, lambda columns: next(iter(columns)))
    for vector in rest:
        echelon.add(vector, min)
    return dict(sorted(echelon.basis().items()))


def _columns(vectors: Sequence[Equation], size: int) -> sparse.csc_matrix:
    """Return sparse vectors as columns of a matrix, in float64."""
    rows = np.array([entry for vector in vectors for entry in vector], dtype=np.int64)
    columns = np.repeat(np.arange(len(vectors)), [len(vector) for vector in vectors])
    values = np.array([float(value) for vector in vectors for value in vector.values()], dtype=np.float64)
    return sparse.csc_matrix((values, (rows, columns)), (size, len(vectors)))
