"""Symmetries that are evaluated together: heads of one parameter at once, and layers that look alike.

Symmetries that differ only in which index they pick (head 0, head 1, …) see one parameter through the same grid, so
their legs are one tensor with a batch axis and no copy is made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from conserved.moment.layouts import Layout
from conserved.symmetry.kind import Degree
from conserved.symmetry.symmetry import Symmetry
from conserved.symmetry.view import Reading, View


@dataclass(frozen=True, slots=True)
class BatchLeg:
    """One leg of several symmetries: a representative view, and how to read it for all of them."""

    view: View
    reading: Reading
    layout: Layout | None
    """Where its entries lie in memory, if a few strides describe it."""

    @staticmethod
    def of(view: View, batch: tuple[int, ...] = ()) -> BatchLeg:
        """Return a leg that reads a view once for every index along the grid axes `batch`."""
        reading = view.reading(batch)
        return BatchLeg(view, reading, Layout.of(reading))

    @property
    def strides(self) -> Layout | None:
        """How its entries lie, from the first of them on."""
        return None if self.layout is None else self.layout.from_first()


@dataclass(frozen=True, slots=True)
class Batch:
    """Symmetries, by their place in the set, whose legs are read together."""

    members: tuple[int, ...]
    degrees: tuple[Degree, ...]
    legs: tuple[BatchLeg, ...]

    @property
    def entries(self) -> int:
        return len(self.members) * max(leg.view.n * leg.view.m for leg in self.legs)


def alike(symmetries: Sequence[Symmetry]) -> tuple[tuple[Batch, ...], ...]:
    """Return every symmetry in one batch; batches whose legs have the same sizes and strides are together."""
    picks: dict[Hashable, list[int]] = defaultdict(list)
    for index, symmetry in enumerate(symmetries):
        picks[_same_but_for_picks(symmetry)].append(index)
    shapes: dict[Hashable, list[Batch]] = defaultdict(list)
    for indices in picks.values():
        for batch in _batches(symmetries, indices):
            first = symmetries[batch.members[0]]
            legs = tuple((leg.view.n, leg.view.m, leg.view.offset, leg.strides) for leg in batch.legs)
            shapes[first.kind, batch.degrees, legs].append(batch)
    return tuple(map(tuple, shapes.values()))


def _same_but_for_picks(symmetry: Symmetry) -> Hashable:
    """Return what symmetries must share to be read through one grid: all but the indices they pick."""
    legs = tuple(
        (
            leg.view.parameter,
            leg.view.grid,
            leg.view.axes,
            leg.view.rows,
            leg.view.offset,
            tuple("index" if isinstance(p, int) else p for p in leg.view.pick),
        )
        for leg in symmetry.legs
    )
    return symmetry.kind, symmetry.degrees, legs


def _batches(symmetries: Sequence[Symmetry], indices: list[int]) -> list[Batch]:
    """Return one batch if the symmetries go through every index of some grid axes in order, else one batch each."""
    degrees = symmetries[indices[0]].degrees
    legs: list[BatchLeg] = []
    for column in zip(*(symmetries[index].legs for index in indices), strict=True):
        views = [leg.view for leg in column]
        picks = [view.pick for view in views]
        along = tuple(axis for axis in range(len(picks[0])) if len({pick[axis] for pick in picks}) > 1)
        visited = [tuple(pick[axis] for axis in along) for pick in picks]
        sizes = [views[0].grid[axis] for axis in along]
        if along and (len(visited) != prod(sizes) or visited != list(product(*map(range, sizes)))):
            return [Batch((p,), degrees, tuple(BatchLeg.of(leg.view) for leg in symmetries[p].legs)) for p in indices]
        legs.append(BatchLeg.of(views[0], along))
    return [Batch(tuple(indices), degrees, tuple(legs))]
