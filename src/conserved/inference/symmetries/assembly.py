"""From solved types to symmetries: which parts of which parameters move together, and by which group.

Free charges that occur at single indices of the same parameters are the rows of one scaling; those whose atoms may be
mixed make a general linear group; one that covers whole parameters is one scale. Free shifts are columns of a
translation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conserved.inference.symmetries.exponentials import separate, traded_laws
from conserved.inference.symmetries.rotation import Rotations
from conserved.inference.symmetries.translations import Translations
from conserved.inference.symmetries.unnamed_symmetry import LegPart, UnnamedSymmetry, simple
from conserved.inference.symmetries.views import UnviewableError, entries_view, planes_view, rows_view, whole_view
from conserved.inference.types.echelon import Echelon, Equation
from conserved.inference.types.mixable_atoms import combine, mix, shared
from conserved.inference.types.system import Solution, unsolved_motions
from conserved.inference.types.tensor_type import Field
from conserved.inference.typing import Typing
from conserved.symmetry import ComplexScaling, GeneralLinear, Leg, OneScale, Scaling, Translation, View


class Assembly:
    """All that is needed to read symmetries off a solved typing."""

    def __init__(self, typing: Typing) -> None:
        self.typing = typing
        self.engine = typing.engine
        self.regions = [region for regions in self.engine.regions.values() for region in regions if regions]
        self.traded = traded_laws(self.engine, self.regions)
        separate(self.engine)
        self.charges: Solution = self.engine.charges.solve()
        self.shifts: Solution = self.engine.shifts.solve(joined=True)
        self.classes, self.orientation, self.blocks, self.spaces = self.engine.partition.solve()
        self.unviewable: list[str] = []
        self.parts: dict[str, list[LegPart]] = {}
        """The parts that each named symmetry is made of."""
        self.rotations = Rotations(typing)
        self.factors: list[tuple[int, int, Field]] = [
            (number, index, factor)
            for number, region in enumerate(self.regions)
            for index, factor in enumerate(region.type.factors)
        ]

    def find(self) -> list[UnnamedSymmetry]:
        """Return every symmetry."""
        linear, gone = self._linear()
        shifts = Translations(self.regions, self.shifts, self.unviewable).find()
        return linear + self._scalings(gone) + self.traded + shifts

    def _linear(self) -> tuple[list[UnnamedSymmetry], np.ndarray]:
        """Return blocks of atoms that mix, and the free charges that are the diagonals of those groups."""
        count = self.engine.charges.count
        # Only classes that occur in a parameter can give a law, and only blocks of at least two of them can mix.
        present = np.zeros(int(self.classes.max(initial=0)) + 1, dtype=bool)
        for _, _, field in self.factors:
            flat = field.atoms.reshape(-1)
            present[self.classes[flat[flat > 0]]] = True
        classes = np.flatnonzero(present)
        classes = classes[shared(self.blocks[classes])]
        _label, inverse, sizes = np.unique(self.blocks[classes], return_inverse=True, return_counts=True)
        many = classes[sizes[inverse] > 1]
        if not many.size:
            return [], np.zeros(0, dtype=np.int64)
        # A block is a general linear group if each of its atoms may be scaled alone: test all those motions at once.
        member = np.full(present.size, -1, dtype=np.int64)
        member[many] = np.arange(many.size)
        moved = member[self.classes[:count]]
        moved[0] = -1
        holds = ~unsolved_motions(self.engine.charges, moved, self.orientation[:count], many.size)
        groups: dict[int, list[int]] = {}
        for cls, good in zip(many, holds, strict=True):
            groups.setdefault(int(self.blocks[cls]), []).append(int(cls) if good else -1)
        proper = {key: np.array(members) for key, members in groups.items() if min(members) >= 0}
        # One failing member spoils its block, so a block is kept whole (no −1 in it) or not at all.
        chosen: dict[int, tuple[int, int]] = {}
        for key, members in proper.items():
            for row, cls in enumerate(members):
                chosen[int(cls)] = (key, row)
        table = np.full(int(self.classes.max()) + 1, -1, dtype=np.int64)
        keys = {key: n for n, key in enumerate(proper)}
        rows = np.zeros_like(table)
        for cls, (key, row) in chosen.items():
            table[cls], rows[cls] = keys[key], row
        # A factor may hold several copies of a block, as heads do; each copy is a leg of its own.
        parts: list[list[LegPart]] = [[] for _ in keys]
        for number, factor_number, field in self.factors:
            flat = field.atoms.reshape(-1)
            group = table[self.classes[flat]]
            inside = np.flatnonzero((group >= 0) & (flat > 0))
            if not inside.size:
                continue
            # Entries of one copy share a label. Sorting by (copy, row of the block) lines all copies up.
            own = self.engine.partition.fine[flat[inside]]
            if field.copies is not None:
                own = combine(own, field.copies.reshape(-1)[inside].astype(np.uint64))
            pair = combine(own, group[inside].astype(np.uint64))
            _, which = np.unique(pair, return_inverse=True)
            order = np.lexsort((rows[self.classes[flat[inside]]], which))
            borders = np.flatnonzero(np.diff(which[order])) + 1
            for run in np.split(order, borders):
                indices = inside[run]
                sign = self.orientation[flat[indices[0]]] * float(field.weight)
                parts[int(group[indices[0]])].append(LegPart(self.regions[number], factor_number, sign, indices))
        # A leg must hold the whole block with degree ±1: matrices act linearly, and not on part of their space.
        result, diagonal = [], []
        for key, members in proper.items():
            own_parts = sorted(
                parts[keys[key]], key=lambda part: (part.region.origin, part.factor, int(part.indices[0]))
            )
            if not own_parts or any(part.indices.size != members.size or abs(part.degree) != 1 for part in own_parts):
                continue
            order = np.argsort(own_parts[0].indices)
            legs = self._legs([LegPart(p.region, p.factor, p.degree, p.indices[order]) for p in own_parts])
            if legs is None:
                continue
            if legs[0].degree < 0:
                legs = tuple(leg.turned() for leg in legs)
            result.append(UnnamedSymmetry(GeneralLinear(), legs, own_parts))
            diagonal.append(members)
        return result, np.concatenate(diagonal) if diagonal else np.zeros(0, dtype=np.int64)

    def _scalings(self, diagonal: np.ndarray) -> list[UnnamedSymmetry]:
        """Return free charges that are not diagonals of a general linear group."""
        columns = np.arange(self.charges.soft.size)
        if diagonal.size:
            columns = np.delete(columns, self._pivots(diagonal))
        if not columns.size:
            return []
        renumber = np.full(self.charges.soft.size, -1, dtype=np.int64)
        renumber[columns] = np.arange(columns.size)
        z, factor, index, value = self._footprint(renumber)
        if not z.size:
            return []
        keep = self._distinct(z, factor, index, value, columns.size)
        # By power before place: column by column, charges that are rows of one leg have one power.
        order = np.lexsort((index[keep], np.round(value[keep], 9), factor[keep], z[keep]))
        z, factor, index, value = (array[keep][order] for array in (z, factor, index, value))
        starts = np.searchsorted(z, np.arange(columns.size + 1))
        present = np.flatnonzero(np.diff(starts))
        space = self._space_of(present, starts, factor, index, columns.size)
        signature = np.zeros(columns.size, dtype=np.uint64)
        with np.errstate(over="ignore"):
            scaled = np.round(value * 5040).astype(np.int64)
            np.add.at(signature, z, mix(combine(factor.astype(np.uint64), scaled.astype(np.uint64))))
            signature = combine(signature, space)
            signature = combine(signature, (self.charges.soft[columns] > 0).astype(np.uint64))
        _label, inverse = np.unique(signature[present], return_inverse=True)
        result: list[UnnamedSymmetry] = []
        grouped = np.argsort(inverse, kind="stable")
        borders = np.flatnonzero(np.diff(inverse[grouped])) + 1
        gathered = []
        for members in np.split(present[grouped], borders):
            length = int(starts[members[0] + 1] - starts[members[0]])
            entries = starts[members][:, None] + np.arange(length)
            soft = float(self.charges.soft[columns[members]].max())
            parts, scalar = self._parts(factor[entries[0]], value[entries], index[entries])
            gathered.append((len(members), parts, scalar, soft))
        turning = self._turning([parts for _, parts, scalar, soft in gathered if not scalar and not soft])
        for count, parts, scalar, soft in gathered:
            result += self._scaling(count, parts, scalar, soft, turning)
        return result

    def _turning(self, candidates: Sequence[list[LegPart]]) -> set[int]:
        """Return the candidates whose pairs of tied charges may be rotated into each other, all heads at once."""
        together: dict[tuple[int, ...], list[list[LegPart]]] = {}
        for parts in candidates:
            maps = all(part.region.role != "gain" and (part.region.role != "map" or part.factor == 0) for part in parts)
            if parts and maps and all(part.indices.shape[1] == 2 and abs(part.degree) == 1 for part in parts):
                together.setdefault(tuple(sorted({id(part.region) for part in parts})), []).append(parts)
        result: set[int] = set()
        for members in together.values():
            pairs = [
                part.region.type.factors[part.factor].atoms.reshape(-1)[part.indices]
                for parts in members
                for part in parts
            ]
            if self.rotations.hold(np.concatenate(pairs)):
                result.update(id(parts) for parts in members)
        return result

    def _pivots(self, diagonal: np.ndarray) -> np.ndarray:
        """Return columns to leave out so that the others span what is not a diagonal of a general linear group."""
        classes = self.charges.classes
        # A column whose free number is an atom: the coordinate of a motion there is how it moves that atom.
        single = np.flatnonzero(np.diff(classes.indptr) == 1)
        single = single[np.abs(classes.data[classes.indptr[single]]) == 1]
        atom_of = np.full(classes.shape[0], -1, dtype=np.int64)
        live = np.flatnonzero(self.charges.group >= 0)
        atom_of[self.charges.group[live][::-1]] = live[::-1]
        index = np.full(int(self.classes.max()) + 1, -1, dtype=np.int64)
        index[diagonal] = np.arange(diagonal.size)
        atoms = atom_of[single]
        member = index[self.classes[atoms]]
        column = classes.indices[classes.indptr[single]]
        turned = self.orientation[atoms] * classes.data[classes.indptr[single]] * self.charges.sign[atoms]
        chosen = np.flatnonzero(member >= 0)
        coordinates: list[Equation] = [{} for _ in diagonal]
        for m, c, t in zip(member[chosen].tolist(), column[chosen].tolist(), turned[chosen].tolist(), strict=True):
            coordinates[m][c] = round(t)
        echelon = Echelon()
        for vector in coordinates:
            echelon.add(vector, min)
        return np.array(sorted(echelon.expressions), dtype=np.int64)

    def _footprint(self, renumber: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return for every free charge the indices of parameters that it scales: charge, factor, index, power.

        A charge that scales all indices of a factor alike scales the region; such scales of one region add up. Regions
        are numbered after the factors, and have place 0.
        """
        zs, factors, indices, values = [], [], [], []
        sums: dict[tuple[int, int], float] = {}
        for number, (region, _, field) in enumerate(self.factors):
            flat = field.atoms.reshape(-1)
            if not flat.size:
                continue
            row, z, value = self.charges.entries(flat)
            # Charges that are diagonals of a general linear group have number −1 and drop out here.
            z = renumber[z]
            value = value * float(field.weight)
            keep = z >= 0
            # A charge that scales the whole factor occurs at its first place, so only those need the full test.
            for charge in np.unique(z[(row == 0) & keep]):
                own = z == charge
                powers = value[own]
                if powers.size == flat.size and float(powers.max() - powers.min()) < 1e-9:
                    sums[region, int(charge)] = sums.get((region, int(charge)), 0.0) + float(powers[0])
                    keep &= ~own
            if keep.any():
                zs.append(z[keep])
                factors.append(np.full(int(keep.sum()), number))
                indices.append(row[keep])
                values.append(value[keep])
        common = [(charge, region, power) for (region, charge), power in sums.items() if abs(power) > 1e-9]
        zs.append(np.array([charge for charge, _, _ in common], dtype=np.int64))
        factors.append(np.array([len(self.factors) + region for _, region, _ in common], dtype=np.int64))
        indices.append(np.zeros(len(common), dtype=np.int64))
        values.append(np.array([power for _, _, power in common]))
        return tuple(np.concatenate(parts) for parts in (zs, factors, indices, values))

    def _distinct(
        self, z: np.ndarray, factor: np.ndarray, index: np.ndarray, value: np.ndarray, count: int
    ) -> np.ndarray:
        """Return the entries of all free charges but those that move parameters as an earlier one does, up to a
        multiple.
        """
        # Hash each charge's entries relative to its first one: equal hashes are equal motions up to a multiple.
        lead = np.ones(count)
        lead[z[::-1]] = value[::-1]
        relative = np.round(value / lead[z] * 5040).astype(np.int64)
        with np.errstate(over="ignore"):
            entry = mix(combine(combine(factor.astype(np.uint64), index.astype(np.uint64)), relative.astype(np.uint64)))
            total = np.zeros(count, dtype=np.uint64)
            np.add.at(total, z, entry)
        suspect = shared(total)
        keep = np.ones(count, dtype=bool)
        keep[suspect] = False
        keep[suspect[np.unique(total[suspect], return_index=True)[1]]] = True
        return np.flatnonzero(keep[z])

    def _space_of(
        self, charges: np.ndarray, starts: np.ndarray, factor: np.ndarray, index: np.ndarray, count: int
    ) -> np.ndarray:
        """Return the space (head, channel axis) that a free charge belongs to: that of its first place."""
        result = np.zeros(count, dtype=np.uint64)
        entries = starts[charges]
        numbers = factor[entries]
        order = np.argsort(numbers, kind="stable")
        borders = np.flatnonzero(np.diff(numbers[order])) + 1
        for members in np.split(order, borders):
            if members.size and numbers[members[0]] < len(self.factors):
                atoms = self.factors[numbers[members[0]]][2].atoms.reshape(-1)[index[entries[members]]]
                result[charges[members]] = self.spaces[self.classes[atoms]]
        return result

    def _parts(self, numbers: np.ndarray, powers: np.ndarray, where: np.ndarray) -> tuple[list[LegPart], list[LegPart]]:
        """Return free charges that move the same factors of the same parameters.

        The keys say where each acts, and which whole regions it scales.
        """
        count = len(where)
        total = len(self.factors)
        parts: list[LegPart] = []
        scalar: list[LegPart] = []
        for number in np.unique(numbers):
            columns = np.flatnonzero(numbers == number)
            if number >= total:
                region = self.regions[number - total]
                scalar.append(LegPart(region, -1, simple(powers[0, columns[0]]), np.zeros((count, 0), np.int64)))
                continue
            region = self.regions[self.factors[number][0]]
            index = self.factors[number][1]
            flat = self.factors[number][2].atoms.reshape(-1)
            for rounded in np.unique(np.round(powers[0, columns], 9)):
                own = columns[np.isclose(powers[0, columns], rounded)]
                # Rounding groups columns; the power itself must hold in float64.
                power = powers[0, own[0]]
                # Columns in different spaces (heads, experts) are different legs, if every charge has the same ones.
                labels = self.engine.partition.spaces[flat[where[:, own]]]
                copies = self.factors[number][2].copies
                if copies is not None:
                    labels = combine(labels, copies.reshape(-1)[where[:, own]].astype(np.uint64))
                apart = [np.flatnonzero(labels[0] == item) for item in np.unique(labels[0])]
                regular = bool((np.sort(labels, 1) == np.sort(labels[0])).all())
                if not regular or len(apart) == 1 or count == 1:
                    apart = [np.arange(own.size)]
                    parts.append(LegPart(region, index, simple(power), where[:, own]))
                    continue
                for item in sorted(apart, key=lambda cols: int(where[0, own[cols[0]]])):
                    label = labels[0][item[0]]
                    chosen = where[:, own][labels == label].reshape(count, -1)
                    parts.append(LegPart(region, index, simple(power), chosen))
        order = np.argsort(parts[0].indices[:, 0]) if parts else np.arange(count)
        for part in parts:
            part.indices = part.indices[order]
        return parts, scalar

    def _scaling(
        self, count: int, parts: list[LegPart], scalar: list[LegPart], soft: int | float, turning: set[int]
    ) -> list[UnnamedSymmetry]:
        """Return the symmetry of free charges that move the same factors of the same parameters."""
        widths = {part.indices.shape[1] for part in parts}
        try:
            if not soft and len(parts) == 1 and not scalar and widths == {1} and _rows(parts[0]).m == 1:
                return [self._inert(parts[0])]
            if parts and not scalar and widths == {1} and not any(_repeats(part) for part in parts):
                legs = tuple(Leg(_rows(part), part.degree) for part in parts)
                return [UnnamedSymmetry(Scaling(), legs, parts, soft).signed()]
            if parts and not scalar and widths == {2} and all(abs(part.degree) == 1 for part in parts):
                if id(parts) in turning:
                    legs = tuple(Leg(_rows(part), part.degree) for part in parts)
                    return [UnnamedSymmetry(ComplexScaling(), legs, parts, soft).signed()]
                if all(part.region.role == "gain" for part in parts):
                    return [UnnamedSymmetry(Scaling(), tuple(map(_planes, parts)), parts, soft).signed()]
        except UnviewableError:
            # No one view shows all of them: each is a law by itself, below.
            pass
        result = []
        for n in range(count):
            own = [LegPart(part.region, part.factor, part.degree, part.indices[n : n + 1].T) for part in parts]
            legs_or_none = self._legs(own + scalar)
            if legs_or_none is not None:
                result.append(UnnamedSymmetry(OneScale(), legs_or_none, own + scalar, soft).signed())
        return result

    def _inert(self, part: LegPart) -> UnnamedSymmetry:
        """Return the laws of entries whose scales are free one by one: no gradient reaches them.

        Θ ∂L/∂θ = 0 for each, so each is conserved.
        """
        factor = part.region.type.factors[part.factor]
        view = entries_view(part.region, factor.dims, np.sort(part.indices.reshape(-1)))
        return UnnamedSymmetry(Translation(), (Leg(view),), [part], family="inert")

    def _legs(self, parts: Sequence[LegPart]) -> tuple[Leg, ...] | None:
        try:
            return tuple(
                Leg(whole_view(part.region) if part.factor < 0 else _rows(part), simple(part.degree)) for part in parts
            )
        except UnviewableError as problem:
            self.unviewable.append(str(problem))
            return None


def _rows(part: LegPart) -> View:
    factor = part.region.type.factors[part.factor]
    return rows_view(part.region, factor.dims, part.indices.reshape(-1))


def _repeats(part: LegPart) -> bool:
    """Return whether two free charges scale one place: they cannot be rows of one leg."""
    ordered = np.sort(part.indices.reshape(-1))
    return bool((ordered[1:] == ordered[:-1]).any())


def _planes(part: LegPart) -> Leg:
    factor = part.region.type.factors[part.factor]
    return Leg(planes_view(part.region, factor.dims, part.indices), part.degree)
