"""All symmetries of a model evaluated together: heads of one parameter at once, and small layers of one shape at once.

Symmetries that differ only in which index they pick (head 0, head 1, …) see one parameter through the same grid, so
their legs are one tensor with a batch axis and no copy is made. Batches of different parameters but equal shapes are
concatenated when they are small, where the cost is in launching the operations and not in the arithmetic. On a GPU that
is everywhere, and there kernels of our own read them where they lie (`conserved.fused`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from conserved import fused
from conserved.kind import Degree, Kind
from conserved.sheaf import Layout, Sheaf
from conserved.symmetry import Symmetry, Tensors, full_precision, weighed, working_dtype
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
    layout: Layout | None
    """Where its entries lie in memory, if that can be said with a few strides."""

    @staticmethod
    def of(view: View, batch: tuple[int, ...] = ()) -> BatchLeg:
        """A view, read along whole grid axes `batch`."""
        reading = view.reading(batch)
        return BatchLeg(view, reading, Layout.of(reading))

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


Group = tuple[Batch, ...]
"""Batches whose legs are concatenated: small ones; a large one is alone."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Plan:
    """How to evaluate a fixed list of symmetries with few operations."""

    symmetries: tuple[Symmetry, ...]
    alike: tuple[tuple[Group, ...], ...]
    """Groups of legs of the same sizes that lie in memory in the same way."""
    needs: dict[str, str]
    """Every parameter that is read, with the name of a symmetry that reads it."""
    entries: NDArray[np.int64]
    """How many entries the legs of each symmetry have together."""
    epsilons: NDArray[np.float64]
    """The ε of each symmetry."""
    linear: tuple[int, ...]
    """Symmetries, by their place, whose laws are linear."""

    @staticmethod
    def of(symmetries: Sequence[Symmetry]) -> Plan:
        alike: dict[Hashable, list[int]] = defaultdict(list)
        for place, symmetry in enumerate(symmetries):
            alike[_same_but_for_picks(symmetry)].append(place)
        shapes: dict[Hashable, list[Batch]] = defaultdict(list)
        for places in alike.values():
            for batch in _batches(symmetries, places):
                first = symmetries[batch.members[0]]
                legs = tuple((leg.view.n, leg.view.m, leg.view.offset, leg.layout) for leg in batch.legs)
                shapes[first.kind, first.degrees, legs].append(batch)
        needs = {name: symmetry.name for symmetry in reversed(symmetries) for name in symmetry.parameters}
        return Plan(
            tuple(symmetries),
            tuple(map(_grouped, shapes.values())),
            needs,
            np.array([symmetry.entries for symmetry in symmetries], dtype=np.int64),
            np.array([symmetry.epsilon for symmetry in symmetries], dtype=np.float64),
            tuple(place for place, symmetry in enumerate(symmetries) if symmetry.kind.linear),
        )

    @property
    def groups(self) -> tuple[Group, ...]:
        """Every group."""
        return tuple(group for groups in self.alike for group in groups)

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
        """Evaluate the bilinear form `form` for every symmetry, in the order of the symmetries.

        `points` says which of A and B are parameters and not directions; by default A is, and B if it is A.
        """
        results: dict[int, Tensor] = {}
        for group in self.groups:
            members, value = self._of_group(group, form, a, b, (True, a is b) if points is None else points, dtype)
            results.update(zip(members, value.unbind(), strict=True))
        return [results[place] for place in range(len(self.symmetries))]

    def _of_group(
        self,
        group: Group,
        form: Form,
        a: Tensors,
        b: Tensors,
        points: tuple[bool, bool],
        dtype: torch.dtype | None,
    ) -> tuple[list[int], Tensor]:
        """Members of a group, by their place, and `form` of them along a first axis."""
        members = [member for batch in group for member in batch.members]
        first = self.symmetries[members[0]]
        left = _stacked(group, a, dtype, point=points[0])
        right = left if a is b else _stacked(group, b, dtype, point=points[1])
        if left[0].dtype != right[0].dtype:
            common = torch.promote_types(left[0].dtype, right[0].dtype)
            left, right = [x.to(common) for x in left], [x.to(common) for x in right]
        with full_precision(left[0]):
            value = form(first.kind, first.degrees, left, right)
        return members, value.expand(len(members), *value.shape[1:])

    def weighed(
        self,
        theta: Tensors,
        slopes: Tensors,
        *,
        dtype: torch.dtype | None = None,
        together: bool = True,
        known: Collection[int] = (),
    ) -> tuple[list[int], list[Float[Tensor, "_ 2"]]]:
        """‖μ(θ, G)‖ of every symmetry but the `known` ones, and what it is held against: their places, and tables.

        Nothing waits for the device. `together` reads all layers that look alike at once, where that can be done.
        """
        places: list[int] = []
        tables: list[Tensor] = []
        for groups in self.alike:
            if groups[0][0].members[0] in known:
                continue
            batches = tuple(batch for group in groups for batch in group)
            sheaves = self._sheaves(batches, theta, slopes) if together and dtype in (None, torch.float32) else None
            if sheaves is not None:
                degrees, left, right, legs = sheaves
                kind = self.symmetries[batches[0].members[0]].kind
                tables.append(weighed(kind, degrees, left, right, legs=legs))
                places += [place for batch in batches for place in batch.members]
                continue
            for group in groups:
                members, value = self._of_group(group, weighed, theta, slopes, (True, False), dtype)
                tables.append(value)
                places += members
        return places, tables

    def _sheaves(
        self, batches: Group, theta: Tensors, slopes: Tensors
    ) -> tuple[list[Degree], list[Sheaf], list[Sheaf], list[int]] | None:
        """Legs of all batches that lie in memory alike, as sheaves of θ and G; None where kernels cannot read them.

        Several legs of one symmetry can lie alike too: all that is written into a residual stream is scaled by one
        number. They are listed one after the other, and the last list says how many there are in each sheaf.
        """
        first = self.symmetries[batches[0].members[0]]
        if not first.kind.in_sheaves(first.n) or not fused.available(theta[first.legs[0].view.parameter].device):
            return None
        classes: dict[tuple[Degree, Layout, float], list[int]] = defaultdict(list)
        for position, (degree, leg) in enumerate(zip(first.degrees, batches[0].legs, strict=True)):
            if leg.layout is None:
                return None
            classes[degree, leg.layout, leg.view.offset].append(position)
        degrees: list[Degree] = []
        left: list[Sheaf] = []
        right: list[Sheaf] = []
        for (degree, layout, offset), positions in classes.items():
            names = [batch.legs[position].view.parameter for position in positions for batch in batches]
            points = Sheaf(tuple(theta[name] for name in names), layout, offset)
            directions = Sheaf(tuple(slopes[name] for name in names), layout)
            if not (fused.reads(points) and fused.reads(directions)):
                return None
            degrees.append(degree)
            left.append(points)
            right.append(directions)
        return degrees, left, right, [len(positions) for positions in classes.values()]


def _stacked(group: Group, tensors: Tensors, dtype: torch.dtype | None, *, point: bool) -> list[Tensor]:
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


def _grouped(batches: list[Batch]) -> tuple[Group, ...]:
    """Small batches together, large ones alone."""
    small = tuple(batch for batch in batches if batch.entries <= _SMALL)
    large = [(batch,) for batch in batches if batch.entries > _SMALL]
    return (small, *large) if small else tuple(large)


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
        sizes = [views[0].grid[axis] for axis in along]
        if along and (len(visited) != prod(sizes) or visited != list(product(*map(range, sizes)))):
            return [Batch((p,), tuple(BatchLeg.of(leg.view) for leg in symmetries[p].legs)) for p in places]
        legs.append(BatchLeg.of(views[0], along))
    return [Batch(tuple(places), tuple(legs))]
