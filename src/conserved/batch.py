"""All symmetries of a model evaluated together: heads of one parameter at once, and small layers of one shape at once.

Symmetries that differ only in which index they pick (head 0, head 1, …) see one parameter through the same grid, so
their legs are one tensor with a batch axis and no copy is made. Batches of different parameters but equal shapes are
concatenated when they are small, where the cost is in launching the operations and not in the arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.kind import Degree, Kind
from conserved.symmetry import Symmetry, Tensors, full_precision, working_dtype
from conserved.view import Reading, View

_SMALL = 1 << 15
"""Legs of at most this many entries are concatenated across parameters."""

Form = Callable[[Kind, Sequence[Degree], Sequence[Tensor], Sequence[Tensor]], Tensor]
"""A bilinear quantity of legs, such as the moment map itself."""


@dataclass(frozen=True, slots=True)
class BatchLeg:
    """One leg of several symmetries: a representative view, and how to read it for all of them."""

    view: View
    reading: Reading

    def matrices(self, tensors: Tensors, *, point: bool) -> Float[Tensor, "batch n m"]:
        view = self.view
        faced = self.reading.of(tensors[view.parameter]).reshape(-1, view.faced, view.m)
        return view.shifted(view.chosen(faced), point=point)


@dataclass(frozen=True, slots=True)
class Batch:
    """Symmetries, by their place in the set, whose legs are read together."""

    members: tuple[int, ...]
    legs: tuple[BatchLeg, ...]

    @property
    def entries(self) -> int:
        return len(self.members) * max(leg.view.n * leg.view.m for leg in self.legs)


@dataclass(frozen=True, slots=True)
class Plan:
    """How to evaluate a fixed list of symmetries with few operations."""

    symmetries: tuple[Symmetry, ...]
    groups: tuple[tuple[Batch, ...], ...]
    needs: dict[str, str]
    """Every parameter that is read, with the name of a symmetry that reads it."""

    @staticmethod
    def of(symmetries: Sequence[Symmetry]) -> Plan:
        alike: dict[Hashable, list[int]] = defaultdict(list)
        for place, symmetry in enumerate(symmetries):
            alike[_same_but_for_picks(symmetry)].append(place)
        shapes: dict[Hashable, list[Batch]] = defaultdict(list)
        for places in alike.values():
            for batch in _batches(symmetries, places):
                first = symmetries[batch.members[0]]
                sizes = tuple((leg.view.n, leg.view.m) for leg in first.legs)
                lone = None if batch.entries <= _SMALL else batch.members
                shapes[first.kind, first.degrees, sizes, lone].append(batch)
        needs = {name: symmetry.name for symmetry in reversed(symmetries) for name in symmetry.parameters}
        return Plan(tuple(symmetries), tuple(map(tuple, shapes.values())), needs)

    @property
    def batches(self) -> tuple[Batch, ...]:
        """Every batch of every group: each symmetry is a member of exactly one."""
        return tuple(batch for group in self.groups for batch in group)

    def evaluate(
        self,
        form: Form,
        a: Tensors,
        b: Tensors,
        *,
        points: tuple[bool, bool] | None = None,
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """`form` of every symmetry, in their order.

        `points` says which of A and B are parameters and not directions; by default A is, and B if it is A.
        """
        results: dict[int, Tensor] = {}
        for members, value in self._by_group(form, a, b, (True, a is b) if points is None else points, dtype):
            results.update(zip(members, value.unbind(), strict=True))
        return [results[place] for place in range(len(self.symmetries))]

    def _by_group(
        self, form: Form, a: Tensors, b: Tensors, points: tuple[bool, bool], dtype: torch.dtype | None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Members of each group, by their place, and `form` of them along a first axis."""
        first_is, second_is = points
        for group in self.groups:
            members = [member for batch in group for member in batch.members]
            first = self.symmetries[members[0]]
            left = _stacked(group, a, dtype, point=first_is)
            right = left if a is b else _stacked(group, b, dtype, point=second_is)
            if left[0].dtype != right[0].dtype:
                common = torch.promote_types(left[0].dtype, right[0].dtype)
                left, right = [x.to(common) for x in left], [x.to(common) for x in right]
            with full_precision(left[0]):
                value = form(first.kind, first.degrees, left, right)
            yield members, value.expand(len(members), *value.shape[1:])

    def numbers(self, form: Form, a: Tensors, b: Tensors, *, dtype: torch.dtype | None = None) -> Float[Tensor, "s k"]:
        """A `form` that gives k numbers for every symmetry, as one float64 table in their order on one device.

        Nothing waits for the device: callers move the table once.
        """
        rows: list[Tensor] = []
        members: list[int] = []
        for group, value in self._by_group(form, a, b, (True, a is b), dtype):
            rows.append(value.to(torch.float64))
            members += group
        device = rows[0].device
        table = torch.cat([row.to(device, non_blocking=True) for row in rows])
        order = sorted(range(len(members)), key=members.__getitem__)
        return table[torch.tensor(order).to(device, non_blocking=True)]


def _stacked(group: tuple[Batch, ...], tensors: Tensors, dtype: torch.dtype | None, *, point: bool) -> list[Tensor]:
    """Each leg of a group as one (batch, n, m) tensor, in a common precision."""
    found = [[leg.matrices(tensors, point=point) for leg in batch.legs] for batch in group]
    precision = working_dtype([matrix for legs in found for matrix in legs], dtype)
    if len(group) == 1:
        return [matrix if matrix.dtype == precision else matrix.to(precision) for matrix in found[0]]
    return [
        torch.cat(
            [matrix.to(precision).expand(len(b.members), -1, -1) for matrix, b in zip(column, group, strict=True)]
        )
        for column in zip(*found, strict=True)
    ]


def _same_but_for_picks(symmetry: Symmetry) -> Hashable:
    """What symmetries must share to be read through one grid: all but the indices they pick."""
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


def _batches(symmetries: Sequence[Symmetry], places: list[int]) -> list[Batch]:
    """One batch if the symmetries go through every index of some grid axes in order, else one batch each."""
    legs: list[BatchLeg] = []
    for column in zip(*(symmetries[place].legs for place in places), strict=True):
        views = [leg.view for leg in column]
        picks = [view.pick for view in views]
        along = tuple(axis for axis in range(len(picks[0])) if len({pick[axis] for pick in picks}) > 1)
        visited = [tuple(pick[axis] for axis in along) for pick in picks]
        everything = list(product(*(range(views[0].grid[axis]) for axis in along)))
        if along and visited != everything:
            return [
                Batch((p,), tuple(BatchLeg(leg.view, leg.view.reading()) for leg in symmetries[p].legs)) for p in places
            ]
        legs.append(BatchLeg(views[0], views[0].reading(along)))
    return [Batch(tuple(places), tuple(legs))]
