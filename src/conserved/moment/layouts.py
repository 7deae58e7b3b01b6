"""Reads the same leg of many layers as one batch of matrices, without copying them into one tensor.

A view of a contiguous tensor is described by an offset and by the stride of each of its axes. Where parameters of many
layers have the same shape and are seen through the same view, one description serves all of them, and what tells them
apart is the address of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from operator import attrgetter
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from conserved.symmetry.view import Reading

SizeAndStride = tuple[int, int]
"""Size and stride, in entries."""

Axes = tuple[SizeAndStride, SizeAndStride]
"""(size, stride) of an outer and an inner axis that are iterated as a single axis; (1, 0) means no axis."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the entries of a (batch, n, m) reading lie in a contiguous tensor of the parameter's shape."""

    offset: int
    batch: Axes
    rows: Axes
    columns: Axes

    @staticmethod
    def of(reading: Reading) -> Layout | None:
        """Return the layout of a reading; None if it takes single rows, or more than two axes in any direction."""
        view = reading.view
        if view.rows is not None:
            return None
        axes = [(size, prod(view.grid[index + 1 :])) for index, size in enumerate(view.grid)]
        offset = 0
        for axis, chosen in reading.picks:
            stride = axes[axis][1]
            start, stop = (chosen, chosen) if isinstance(chosen, int) else chosen
            offset += start * stride
            axes[axis] = (stop - start, stride)
        gone = {axis for axis, chosen in reading.picks if isinstance(chosen, int)}
        remaining = [axis for number, axis in enumerate(axes) if number not in gone]
        ordered = [remaining[index] for index in reading.order]
        first = len(ordered) - len(view.axes) - len(view.rest)
        second = first + len(view.axes)
        merged = [_merge(part) for part in (ordered[:first], ordered[first:second], ordered[second:])]
        if any(len(part) > 2 for part in merged):
            return None
        batch, rows, columns = (_two(part) for part in merged)
        return Layout(offset, batch, rows, columns)

    def count(self, axes: Literal["batch", "rows", "columns"]) -> int:
        """Return how many there are."""
        outer, inner = getattr(self, axes)
        return int(outer[0] * inner[0])

    def row_of_units(self, unit: int, row: int) -> Layout | None:
        """Return the row with this number out of every `unit` rows; None if strides do not say where those are."""
        if unit == 1:
            return self
        (many, far), (few, near) = self.rows
        if few % unit == 0:
            rows = ((many, far), (few // unit, unit * near)) if few > unit else ((1, 0), (many, far))
            return replace(self, rows=rows, offset=self.offset + row * near)
        several = unit // few
        if unit % few or many % several:
            return None
        offset = self.offset + row // few * far + row % few * near
        return replace(self, rows=((1, 0), (many // several, several * far)), offset=offset)

    def from_first(self) -> Layout:
        """Return the same, counted from the first entry."""
        return replace(self, offset=0)

    def turned(self) -> Layout:
        """Return the transposes of the matrices."""
        return replace(self, rows=self.columns, columns=self.rows)

    def folded(self, length: int) -> Layout:
        """Return the same entries in rows of at most this length, where each is a row of its own, for sums over all of
        them.

        Args:
            length: a power of two; rows are as long as the greatest common divisor of it and the number of entries.
        """
        far, (size, stride) = self.rows
        along = gcd(size, length)
        if self.count("columns") > 1 or far[0] > 1 or along == 1:
            return self
        return replace(self, rows=((1, 0), (size // along, along * stride)), columns=((1, 0), (along, stride)))

    def in_pieces(self, length: int) -> tuple[Layout, int]:
        """Return the columns in pieces of at most this length, and how many: each member of the batch becomes so many.

        As they are, if they do not divide into pieces at least half as long, or if there is no axis left for them.
        """
        far, (size, stride) = self.columns
        pieces = next((k for k in range(max(1, -(-size // length)), 2 * size // length + 1) if size % k == 0), 1)
        if far[0] > 1 or self.batch[0][0] > 1 or pieces <= 1:
            return self, 1
        columns = size // pieces
        members = self.batch[1] if self.batch[1][0] > 1 else (1, 0)
        batch = (members, (pieces, columns * stride))
        return replace(self, batch=batch, columns=((1, 0), (columns, stride))), pieces


def _merge(axes: list[SizeAndStride]) -> list[SizeAndStride]:
    """Return the same entries in the same order with as few axes as possible."""
    result: list[SizeAndStride] = []
    for size, stride in axes:
        if size == 1:
            continue
        if result and result[-1][1] == size * stride:
            result[-1] = (result[-1][0] * size, stride)
        else:
            result.append((size, stride))
    return result


def _two(axes: list[SizeAndStride]) -> Axes:
    outer, inner = [(1, 0)] * (2 - len(axes)) + axes
    return outer, inner


@dataclass(frozen=True, slots=True)
class PlacedProduct:
    """Products of one row of A with one row of B, for all rows of two layouts: what they are added to, and the sign.

    Row r is added to number start + step · r of the moment map.
    """

    first: Layout
    second: Layout
    start: int = 0
    step: int = 1
    sign: int = 1
    lifted: bool = False
    """A is all ones and not read: what translations act on."""


_PLAIN = frozenset((Tensor, nn.Parameter))


def _on_one_device(tensors: Sequence[Tensor]) -> bool:
    """Return whether there are tensors, and all on one device.

    There is one kind of accelerator, so its number says which.
    """
    numbers = {*map(Tensor.get_device, tensors)}
    return len(numbers) == 1 and (min(numbers) >= 0 or len({*map(attrgetter("device"), tensors)}) == 1)


@dataclass(frozen=True, slots=True, eq=False)
class PlainTensors:
    """Where tensors lie that are plain, contiguous and on one device, so that a layout says where their entries are."""

    device: torch.device
    types: tuple[torch.dtype, ...]
    addresses: NDArray[np.int64]

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> PlainTensors | None:
        """Return plain tensors, or None if one of them is not.

        There may be thousands, so each check runs over all at once.
        """
        if not {*map(type, tensors)} <= _PLAIN or not _on_one_device(tensors):
            return None
        try:
            addresses = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
        except RuntimeError:
            # Sparse tensors and others without strides have no address.
            return None
        if not all(map(Tensor.is_contiguous, tensors)):
            return None
        return PlainTensors(tensors[0].device, (*map(attrgetter("dtype"), tensors),), addresses)

    def some(self, indices: NDArray[np.int64]) -> PlainTensors:
        """Return those with these numbers, in this order."""
        alike = self.types.count(self.types[0]) == len(self.types)
        types = self.types[:1] * len(indices) if alike else (*map(self.types.__getitem__, indices.tolist()),)
        return PlainTensors(self.device, types, self.addresses[indices])

    @property
    def aligned(self) -> bool:
        """Whether all addresses are multiples of 16 bytes."""
        return not bool((self.addresses & 15).any())
