"""Reads the same leg of many layers as one batch of matrices, without copying them into one tensor.

A view of a contiguous tensor is described by an offset and by the stride of each of its axes. Where parameters of many
layers have the same shape and are seen through the same view, one description serves all of them, and what tells them
apart is the address of each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from conserved.view import Reading

Axis = tuple[int, int]
"""Size and stride, in entries."""

Axes = tuple[Axis, Axis]
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
        """The layout of a reading; None if it takes single rows, or more than two axes in any direction."""
        view = reading.view
        if view.rows is not None:
            return None
        axes = [(size, prod(view.grid[place + 1 :])) for place, size in enumerate(view.grid)]
        offset = 0
        for axis, chosen in reading.picks:
            stride = axes[axis][1]
            start, stop = (chosen, chosen) if isinstance(chosen, int) else chosen
            offset += start * stride
            axes[axis] = (stop - start, stride)
        gone = {axis for axis, chosen in reading.picks if isinstance(chosen, int)}
        kept = [axis for number, axis in enumerate(axes) if number not in gone]
        ordered = [kept[place] for place in reading.order]
        first = len(ordered) - len(view.axes) - len(view.rest)
        second = first + len(view.axes)
        merged = [_merged(part) for part in (ordered[:first], ordered[first:second], ordered[second:])]
        if any(len(part) > 2 for part in merged):
            return None
        batch, rows, columns = (_two(part) for part in merged)
        return Layout(offset, batch, rows, columns)

    def count(self, axes: Literal["batch", "rows", "columns"]) -> int:
        """How many there are."""
        outer, inner = getattr(self, axes)
        return int(outer[0] * inner[0])

    def halves(self) -> tuple[Layout, Layout]:
        """The even rows and the odd rows."""
        outer, (size, stride) = self.rows
        if size == 2:
            rows = ((1, 0), outer)
        else:
            assert size % 2 == 0, "rows come in pairs"
            rows = (outer, (size // 2, 2 * stride))
        even = replace(self, rows=rows)
        return even, replace(even, offset=self.offset + stride)

    def turned(self) -> Layout:
        """The transposes of the matrices."""
        return replace(self, rows=self.columns, columns=self.rows)


def _merged(axes: list[Axis]) -> list[Axis]:
    """The same entries in the same order with as few axes as possible."""
    found: list[Axis] = []
    for size, stride in axes:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found


def _two(axes: list[Axis]) -> Axes:
    outer, inner = [(1, 0)] * (2 - len(axes)) + axes
    return outer, inner


@dataclass(frozen=True, slots=True)
class RowProduct:
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

    def swapped(self) -> RowProduct:
        """The same for μ(B, A)."""
        return replace(self, first=self.second, second=self.first)


@dataclass(frozen=True, slots=True, eq=False)
class Sheaf:
    """One view of several tensors: a stack of (entries, batch, n, m) matrices, entry by entry in the tensors' order."""

    tensors: tuple[Tensor, ...]
    layout: Layout
    shift: float = 0.0
    """Added to every entry that is read."""

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Entries, batch, n, m."""
        layout = self.layout
        return len(self.tensors), layout.count("batch"), layout.count("rows"), layout.count("columns")

    def halves(self) -> tuple[Sheaf, Sheaf]:
        """The even rows and the odd rows, as real and imaginary parts lie."""
        even, odd = self.layout.halves()
        return replace(self, layout=even), replace(self, layout=odd)

    def addresses(self) -> list[int]:
        """Where the first entry of each tensor's view lies."""
        offset = self.layout.offset * self.tensors[0].element_size()
        return [tensor.data_ptr() + offset for tensor in self.tensors]


Legs = Float[Tensor, "..."] | Sheaf
"""Matrices that rows and columns are summed over, whether they lie in one tensor or not."""


def plain(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor is a plain, contiguous one on the device, so that a layout says where its entries are."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device == device
        and tensor.is_contiguous()
    )
