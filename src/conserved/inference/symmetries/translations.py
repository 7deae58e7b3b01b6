"""Free shifts as translations that are easy to read: sums along axes of one parameter, of two of them, of entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conserved.inference.symmetries.row_sums import row_sums
from conserved.inference.symmetries.shifts import ShiftSpace
from conserved.inference.symmetries.unnamed_symmetry import LegPart, UnnamedSymmetry, simple
from conserved.inference.symmetries.views import UnviewableError, columns_view, entries_view, rows_view
from conserved.inference.types.engine import Region
from conserved.inference.types.system import Solution
from conserved.symmetry import Leg, Translation


@dataclass(frozen=True, slots=True)
class Translations:
    """The translations of a solved typing; those that no view can show are noted in `unviewable`."""

    regions: Sequence[Region]
    shifts: Solution
    unviewable: list[str]

    def find(self) -> list[UnnamedSymmetry]:
        """Return free shifts as families that are easy to read: sums along axes of one parameter, or of two of them."""
        space = ShiftSpace(self.regions, self.shifts)
        result = self._row_sums(space)
        for family in space.families():
            try:
                legs = tuple(
                    Leg(columns_view(self.regions[unit.region], sorted(unit.rows), unit.keep), simple(float(weight)))
                    for unit, weight in family
                )
            except UnviewableError as problem:
                self.unviewable.append(str(problem))
                continue
            parts = [
                LegPart(self.regions[unit.region], unit.field, simple(float(weight)), unit.indices)
                for unit, weight in family
            ]
            result.append(UnnamedSymmetry(Translation(), legs, parts).signed())
        for alike in space.rest():
            together = self._entries(space, alike)
            if together is not None:
                result.append(together)
                continue
            for indices, weights in alike:
                symmetries = self._irregular(space, indices, weights)
                if symmetries is not None:
                    result.append(symmetries)
        return result

    def _row_sums(self, space: ShiftSpace) -> list[UnnamedSymmetry]:
        """Return sums over ranges of rows, as those of one head, where they are more than the sums over all rows."""
        result = []
        for number, region in enumerate(self.regions):
            wide = {d for d, chosen in enumerate(region.sets) if chosen.size > 1}
            for sums in row_sums(region, self.shifts):
                sum_space = space.sums_along(number, sums.axis)
                if sum_space is not None and sums.everywhere:
                    if len(sums.ranges) == 1:
                        continue
                    space.take(sum_space)
                index = next(n for n, shift in enumerate(region.type.shifts) if set(shift.dims) == wide - {sums.axis})
                columns = np.arange(region.type.shifts[index].atoms.size)[:, None]
                for first, last in sums.ranges:
                    try:
                        view = columns_view(region, [sums.axis], (sums.axis, first, last))
                    except UnviewableError as problem:
                        self.unviewable.append(str(problem))
                        continue
                    result.append(UnnamedSymmetry(Translation(), (Leg(view),), [LegPart(region, index, 1, columns)]))
        return result

    def _entries(self, space: ShiftSpace, alike: Sequence[tuple[np.ndarray, np.ndarray]]) -> UnnamedSymmetry | None:
        """Return numbers added to single entries of the same parameters with the same weights, as one law of slices."""
        legs, parts = [], []
        rows = np.stack([entries for entries, _ in alike], 1) if len({e.size for e, _ in alike}) == 1 else None
        if rows is None or len(alike) < 2:
            return None
        for row, weight in zip(rows, alike[0][1].tolist(), strict=True):
            number = int(np.searchsorted(space.starts, row[0], side="right")) - 1
            region_number, index, shift = space.fields[number]
            region = self.regions[region_number]
            sizes = [axis.size for axis in region.sets]
            if set(shift.dims) != {dim for dim, size in enumerate(sizes) if size > 1}:
                return None
            try:
                view = entries_view(region, shift.dims, row - space.starts[number])
            except UnviewableError:
                return None
            legs.append(Leg(view, simple(weight)))
            parts.append(LegPart(region, index, simple(weight), (row - space.starts[number])[:, None]))
        return UnnamedSymmetry(Translation(), tuple(legs), parts).signed()

    def _irregular(self, space: ShiftSpace, rows: np.ndarray, weights: np.ndarray) -> UnnamedSymmetry | None:
        """Return a number that is added, with weights, to a list of entries of parameters."""
        legs, parts = [], []
        for number, start, stop in space.spans():
            inside = (rows >= start) & (rows < stop)
            region_number, index, shift = space.fields[number]
            region = self.regions[region_number]
            sizes = [axis.size for axis in region.sets]
            dims = [d for d, size in enumerate(sizes) if size > 1]
            for rounded in np.unique(np.round(weights[inside], 9)):
                alike = np.isclose(weights[inside], rounded)
                # Rounding groups entries; the coefficient itself must hold in float64.
                weight = weights[inside][alike][0]
                chosen = rows[inside][alike] - start
                mask = np.zeros([sizes[d] for d in shift.dims], dtype=bool)
                mask.reshape(-1)[chosen] = True
                full = mask[tuple(slice(None) if d in shift.dims else None for d in range(len(sizes)))]
                flat = np.flatnonzero(np.broadcast_to(full, sizes).reshape([sizes[d] for d in dims]))
                try:
                    view = rows_view(region, dims, flat)
                except UnviewableError as problem:
                    self.unviewable.append(str(problem))
                    return None
                if view.m != 1:
                    return None
                legs.append(Leg(view, simple(float(weight))))
                parts.append(LegPart(region, index, simple(float(weight)), chosen[None]))
        return UnnamedSymmetry(Translation(), tuple(legs), parts).signed() if legs else None
