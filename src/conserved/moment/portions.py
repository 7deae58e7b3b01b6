"""Moment maps of parameters that are handed out a portion at a time: each is read once, leg by leg.

What a leg adds to its laws is added at once, so that nothing of a parameter's size has to be kept. On a GPU legs that
lie in memory alike wait for each other and are read by one kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from conserved.moment import triton_backend
from conserved.moment.batches import Batch
from conserved.moment.forms import Pair, Sums, Wanted, forms
from conserved.moment.layouts import Layout, LegStack
from conserved.moment.precision import full_precision, working_dtype
from conserved.moment.sources import Paired, Reader
from conserved.moment.torch_backend import TORCH, column_bounds
from conserved.symmetry.kind import Degree
from conserved.symmetry.products import OuterProduct, Products
from conserved.symmetry.symmetry import Symmetry


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Moment maps of some symmetries, by their places."""

    members: tuple[int, ...]
    sums: dict[int, Sums] = field(default_factory=dict)
    """By what a reader tells legs apart; sums of legs that it does not tell apart."""

    def only(self) -> Sums:
        """The sums of legs that are all alike."""
        (sums,) = self.sums.values()
        return sums

    def expanded(self, key: int) -> Sums:
        """Sums of legs, those that symmetries share repeated for each of them."""
        sums, size = self.sums[key], len(self.members)
        legs = (sums.plus, sums.minus, sums.scales, sums.columns)
        if all(one.shape[1] == size for side in legs for one in side):
            return sums

        def spread(legs: list[Tensor]) -> list[Tensor]:
            return [one if one.shape[1] == size else one.expand(-1, size, *one.shape[2:]) for one in legs]

        return Sums(sums.pairs, sums.absolute, *map(spread, legs))


@runtime_checkable
class Batched(Protocol):
    """What is needed of a plan."""

    @property
    def symmetries(self) -> tuple[Symmetry, ...]: ...
    @property
    def batches(self) -> tuple[Batch, ...]: ...
    @property
    def uses(self) -> Mapping[str, list[tuple[int, int]]]: ...
    @property
    def counts(self) -> Mapping[str, int]: ...
    @property
    def by_kernels(self) -> tuple[tuple[bool, ...], ...]: ...


def in_portions(plan: Batched, reader: Reader, wanted: Wanted, dtype: torch.dtype | None) -> tuple[Part, ...]:
    """A part for every batch of a plan."""
    parts = tuple(Part(batch.members) for batch in plan.batches)
    stored = {name: reader.stored(name) for name in plan.uses}
    types = [dtype or torch.float32] * len(parts)
    if dtype is None and not {one.dtype for tensors in stored.values() for one in tensors} <= {*triton_backend.TYPES}:
        types = [
            working_dtype((one.dtype for leg in batch.legs for one in stored[leg.view.parameter]), None)
            for batch in plan.batches
        ]
    queue = _Queue(wanted)
    kernels = reader.kernels and not wanted.absolute
    with full_precision(tensor.device.type for tensors in stored.values() for tensor in tensors):
        for names in _portions(plan.counts, reader.portion):
            made = False
            for name, parcel in zip(names, reader.read(names), strict=True):
                made = made or parcel.made
                # Of what several laws read in the same way, the pairs and types are worked out once.
                known: dict[tuple[bool, float], tuple[Paired, _Types | None]] = {}
                for number, position in plan.uses[name]:
                    batch = plan.batches[number]
                    leg, symmetry = batch.legs[position], plan.symmetries[batch.members[0]]
                    way = symmetry.kind.linear, leg.view.offset
                    if way not in known:
                        paired = parcel.paired(linear=way[0], offset=way[1])
                        readable = kernels and not way[1]
                        known[way] = paired, triton_backend.types_of(paired.tensors) if readable else None
                    paired, read = known[way]
                    held = parts[number].sums
                    sums = held.get(paired.key) or held.setdefault(paired.key, Sums(paired.pairs, wanted.absolute))
                    products, degree = symmetry.kind.products, symmetry.legs[position].degree
                    together = plan.by_kernels[number][position] and types[number] == torch.float32
                    if together and read is not None and leg.layout is not None:
                        queue.add(products, leg.layout, sums, degree, paired, read)
                        continue
                    legs = [leg.matrices(one, point=p) for one, p in zip(paired.tensors, paired.points, strict=True)]
                    _add(legs, products, sums, degree, paired, types[number], wanted)
            if made:
                queue.flush()
        queue.flush()
    return parts


def _add(
    legs: list[Tensor],
    products: Products,
    sums: Sums,
    degree: Degree,
    paired: Paired,
    dtype: torch.dtype,
    wanted: Wanted,
) -> None:
    """Add one leg to the sums of its batch."""
    if paired.bounded:
        sums.columns.append(abs(degree) * column_bounds([legs[place] for place in paired.bounded], dtype))
    legs = [one.abs() for one in legs] if wanted.absolute else legs
    sums.add(forms(TORCH, products, degree, legs, paired.pairs, paired.points, dtype, wanted), degree)


_Types = tuple[torch.dtype, ...]

_Alike = tuple[Products, Layout, _Types, tuple[Pair, ...], bool]
"""What legs must share to be read together: products, where they lie, types, pairs, and whether A and B swap."""


@dataclass(slots=True)
class _Queue:
    """Legs that wait for others that lie alike."""

    wanted: Wanted
    waiting: dict[_Alike, list[tuple[Sums, Degree, Paired]]] = field(default_factory=lambda: defaultdict(list))

    def add(
        self, products: Products, layout: Layout, sums: Sums, degree: Degree, paired: Paired, types: _Types
    ) -> None:
        """Put a leg on the list."""
        # Laws are symmetric; and what is to be transposed is, once it is there.
        turned = degree < 0 and not self.wanted.law and not isinstance(products, OuterProduct)
        self.waiting[products, layout, types, paired.pairs, turned].append((sums, degree, paired))

    def flush(self) -> None:
        """Read all that wait, those that lie alike in one go."""
        for (products, layout, _, pairs, turned), reads in self.waiting.items():
            columns = zip(*(paired.tensors for *_, paired in reads), strict=True)
            stacks = [LegStack(column, layout) for column in columns]
            points, sign = reads[0][2].points, -1 if turned else 1
            values, squares = forms(
                triton_backend.TRITON, products, sign, stacks, pairs, points, torch.float32, self.wanted
            )
            outer = isinstance(products, OuterProduct)
            spreads = [None] * len(reads) if squares is None else squares.unbind(1)
            for (sums, degree, _), mine, spread in zip(reads, values.unbind(1), spreads, strict=True):
                sums.add((mine.mT if outer and degree < 0 else mine, spread), degree)
        self.waiting.clear()


def _portions(entries: Mapping[str, int], most: int) -> list[list[str]]:
    """Parameters in order, as many at a time as have at most so many entries together; a larger one by itself."""
    found: list[list[str]] = []
    room = -1
    for name, count in entries.items():
        if count > room:
            found.append([])
            room = most
        found[-1].append(name)
        room -= count
    return found
