"""Row products of any number of legs, written down once for a kernel that computes all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from conserved.sheaf import Axes, RowProduct

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

    @staticmethod
    def of(product: RowProduct) -> Tile:
        """The long side of a tile is the one along which entries are next to each other."""
        layout = product.first
        n, m = layout.count("rows"), layout.count("columns")
        axes = (layout.batch, layout.rows, layout.columns)
        turned = layout.rows[1][1] == 1 and m > 1
        if m == 1:
            height, width = _power(n, 256), 1
        elif turned:
            height, width = _power(n, 64), _power(m, 32)
        else:
            height, width = _power(n, 4), _power(m, 512)
        steps = [stride for pair in axes for size, stride in pair if size > 1 and stride != 1]
        return Tile(
            height,
            width,
            turned,
            merged=any(outer[0] > 1 for outer, _ in axes),
            aligned=m > 1
            and (turned or layout.columns[1][1] == 1)
            and all(step % _VECTOR == 0 for step in (*steps, layout.offset, product.second.offset)),
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
    first: int
    """Where the squares of its programs begin."""

    def run(self, where: Addresses, sums: Float[Tensor, " rows"], squares: Float[Tensor, " programs"]) -> None:
        """Fill in the sums of all row products, and the sums of their squares by program."""
        from conserved import kernels

        tile = self.tile
        with torch.cuda.device_of(sums):
            kernels.survey[(len(self.programs),)](
                self.programs,
                self.fields,
                self.shifts,
                where.table,
                sums,
                squares[self.first :],
                FIELDS=self.fields.shape[1],
                A=kernels.TYPES[self.types[0]],
                B=kernels.TYPES[self.types[1]],
                HEIGHT=tile.height,
                WIDTH=tile.width,
                TURNED=tile.turned,
                MERGED=tile.merged,
                ALIGNED=tile.aligned and where.aligned,
            )


@dataclass(frozen=True, slots=True, eq=False)
class Addresses:
    """Where tensors lie, as kernels read it."""

    table: Tensor
    aligned: bool

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Addresses:
        """The addresses of tensors on one device."""
        found = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
        table = torch.from_numpy(found).to(tensors[0].device, non_blocking=True)
        return Addresses(table, not bool((found % 16).any()))


@dataclass(slots=True)
class Draft:
    """A launch that is being written down."""

    fields: list[list[int]] = field(default_factory=list)
    shifts: list[float] = field(default_factory=list)
    programs: list[NDArray[np.int32]] = field(default_factory=list)
    owners: list[NDArray[np.int64]] = field(default_factory=list)
    """For every program, the symmetry it works for."""
    weights: list[NDArray[np.float64]] = field(default_factory=list)

    def add(
        self,
        product: RowProduct,
        sources: tuple[int, int],
        shift: float,
        out: int,
        owners: NDArray[np.int64],
        weight: float,
    ) -> None:
        """One product, for one symmetry of each of its batch; its sums go to `out` and after."""
        layout = product.first
        assert replace(layout, offset=0) == replace(product.second, offset=0)
        axes = [number for part in (layout.batch, layout.rows, layout.columns) for number in _numbers(part)]
        self.fields.append([*sources, layout.offset, product.second.offset, out, *axes])
        self.shifts.append(shift)
        tiles = -(-layout.count("rows") // Tile.of(product).height)
        member, part = np.meshgrid(np.arange(len(owners)), np.arange(tiles), indexing="ij")
        number = np.full_like(member, len(self.fields) - 1)
        self.programs.append(np.stack((number, member, part), -1).reshape(-1, 3).astype(np.int32))
        self.owners.append(np.repeat(owners, tiles))
        self.weights.append(np.full(len(owners) * tiles, weight))

    def launch(self, types: tuple[torch.dtype, torch.dtype], tile: Tile, first: int, device: torch.device) -> Launch:
        """The finished launch."""
        return Launch(
            types,
            tile,
            torch.tensor(self.fields).to(device),
            torch.tensor(self.shifts, dtype=torch.float32).to(device),
            torch.from_numpy(np.concatenate(self.programs)).to(device),
            first,
        )


def _numbers(axes: Axes) -> list[int]:
    """Both sizes together, the inner size, and both strides."""
    (outer, outer_stride), (inner, inner_stride) = axes
    return [outer * inner, inner, outer_stride, inner_stride]


def _power(size: int, most: int) -> int:
    """The smallest power of two that holds `size`, but no more than `most`."""
    return min(most, 1 << (size - 1).bit_length())
