"""Row products of any number of legs, written down once for a kernel that computes all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from conserved.moment.host_copies import send_to_device
from conserved.moment.layouts import Axes, PlacedProduct, PlainTensors

_VECTOR = 8
"""Entries that are fetched at once if addresses and strides are multiples of it."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a kernel goes through rows and columns: what it must know when it is compiled."""

    height: int
    width: int
    turned: bool
    """Rows and not columns lie next to each other."""
    merged: bool
    """Rows, columns or batches are two axes gone through as one."""
    aligned: bool
    lifted: bool

    @staticmethod
    def of(product: PlacedProduct) -> Tile:
        """Choose a tile whose long side is the one along which entries are contiguous."""
        layout = product.first
        n, m = layout.count("rows"), layout.count("columns")
        turned = layout.rows[1][1] == 1 and m > 1
        if m == 1:
            height, width = power(n, 256), 1
        elif turned:
            height, width = power(n, 64), power(m, 16)
        else:
            height, width = power(n, 8), power(m, 128)
        far, near = zip(layout.batch, layout.rows, layout.columns, strict=True)
        neighbours = near[1 if turned else 2]
        others = (*far, near[0], near[2 if turned else 1])
        return Tile(
            height,
            width,
            turned,
            merged=any(size > 1 for size, _ in far),
            aligned=m > 1
            and neighbours[1] == 1
            and neighbours[0] % _VECTOR == 0
            and all(size == 1 or stride % _VECTOR == 0 for size, stride in others)
            and layout.offset % _VECTOR == product.second.offset % _VECTOR == 0,
            lifted=product.lifted,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Row products that one launch computes: of the same types, through the same tiles."""

    types: tuple[torch.dtype, torch.dtype]
    tile: Tile
    fields: Tensor
    """For every product: the numbers of both sources and of their first entries, where its sums go, its layout."""
    shifts: Tensor
    programs: Tensor
    """For every program: its product, which of the batch, and which rows."""

    @property
    def count(self) -> int:
        """How many programs."""
        # Counted by its shape: the length of a tensor is asked for through several calls.
        return self.programs.shape[0]

    def run(
        self,
        where: Addresses,
        sums: Float[Tensor, " rows"],
        squares: Sequence[Float[Tensor, " programs"]],
    ) -> None:
        """Fill in the sums of all row products, and by program the squares of products and of both factors.

        Their device is the current one. Those of the second factor are before those of the first; all three begin
        with the programs of this launch.
        """
        from conserved.moment import kernels

        tile = self.tile
        kernels.placed_sums[(self.count,)](
            self.programs,
            self.fields,
            self.shifts,
            where.table,
            sums,
            *squares,
            FIELDS=self.fields.shape[1],
            A=kernels.TYPES[self.types[0]],
            B=kernels.TYPES[self.types[1]],
            HEIGHT=tile.height,
            WIDTH=tile.width,
            TURNED=tile.turned,
            MERGED=tile.merged,
            ALIGNED=tile.aligned and where.aligned,
            LIFTED=tile.lifted,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Addresses:
    """Where tensors lie, as kernels read it."""

    table: Tensor
    aligned: bool

    @staticmethod
    def of(tensors: PlainTensors) -> Addresses:
        """Return the addresses of tensors."""
        return Addresses(send_to_device(tensors.addresses, tensors.device), tensors.aligned)


@dataclass(slots=True)
class Draft:
    """A launch that is being assembled."""

    fields: list[list[int]] = field(default_factory=list)
    shifts: list[float] = field(default_factory=list)
    programs: list[NDArray[np.int32]] = field(default_factory=list)
    count: int = 0
    """How many programs."""

    def add(self, product: PlacedProduct, sources: tuple[int, int], shift: float, out: int) -> NDArray[np.int64]:
        """Add one product, whose sums go to `out` and after. Return the numbers of its programs, a row for each of the
        batch.
        """
        layout = product.first
        assert replace(layout, offset=0) == replace(product.second, offset=0)
        axes = [number for part in (layout.batch, layout.rows, layout.columns) for number in _numbers(part)]
        shape = layout.count("batch"), -(-layout.count("rows") // Tile.of(product).height)
        member, part = np.indices(shape, dtype=np.int32).reshape(2, -1)
        self.programs.append(np.stack((np.full_like(member, len(self.fields)), member, part), -1))
        self.fields.append([*sources, layout.offset, product.second.offset, out, *axes])
        self.shifts.append(shift)
        begin = self.count
        self.count += member.size
        return np.arange(begin, self.count).reshape(shape)

    def launch(self, types: tuple[torch.dtype, torch.dtype], tile: Tile, device: torch.device) -> Launch:
        """Return the finished launch."""
        return Launch(
            types,
            tile,
            torch.tensor(self.fields).to(device),
            torch.tensor(self.shifts, dtype=torch.float32).to(device),
            torch.from_numpy(np.concatenate(self.programs)).to(device),
        )


def _numbers(axes: Axes) -> list[int]:
    """Return both sizes together, the inner size, and both strides."""
    (outer, outer_stride), (inner, inner_stride) = axes
    return [outer * inner, inner, outer_stride, inner_stride]


def power(size: int, most: int) -> int:
    """Return the smallest power of two that holds `size`, but no more than `most`."""
    return min(most, 1 << (size - 1).bit_length())
