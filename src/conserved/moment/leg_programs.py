"""Products of all legs of many parameters, written down once for kernels that compute them step after step.

Which legs there are, where they lie in their tensors and which pairs of tensors are multiplied does not change from one
step to the next; addresses of tensors do. A program therefore holds, for every product, which two tensors it reads, how
far into them, and where its results go; to run it takes one table of addresses. Legs of equal shape and strides are
read by one launch, and the results of one leg of many layers lie next to each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from conserved.moment import triton_backend
from conserved.moment.forms import FormValues, ProductList, WantedNumbers, assemble_forms, product_list
from conserved.moment.host_copies import send_to_device
from conserved.moment.launches import Tile
from conserved.moment.layouts import Layout, PlacedProduct, PlainTensors
from conserved.moment.triton_backend import KernelCall
from conserved.symmetry.kind import Degree
from conserved.symmetry.pairs import Pair
from conserved.symmetry.products import OuterProduct, Products, RowProducts

Integers = NDArray[np.int64]

_LENGTH = 1024
"""Entries of a row where all entries are added up: each program writes one number for it."""

_COLUMNS = 512
"""Columns that a program goes through, where neighbours are in different rows."""

LegTensors = tuple[int, int]
"""The number of the first tensor of a leg among all, and where in each of them the leg begins, in entries."""


@dataclass(frozen=True, slots=True)
class ProgramLeg:
    """The key that legs share if their results lie next to each other."""

    products: Products
    degree: Degree
    layout: Layout
    """From the first entry of the leg on."""
    pairs: tuple[Pair, ...]
    types: tuple[torch.dtype, ...]
    """Types of the tensors that are paired."""
    wanted: WantedNumbers


@dataclass(frozen=True, slots=True, eq=False)
class LegResults:
    """The results of one leg of several parameters."""

    leg: ProgramLeg
    begin: int
    count: tuple[int, int]
    """Parameters, and products of each."""
    values: tuple[int, ...]
    """Batch and rows of the values of one product."""
    squares: tuple[int, ...]
    """Batch, and rows if there are any, of the sums of squares that follow them."""
    pieces: int
    """How many of a batch belong to one member of it, and are added up."""

    @property
    def size(self) -> int:
        """Numbers of all products."""
        return prod(self.count) * self.each

    @property
    def each(self) -> int:
        """Numbers of one product."""
        return prod(self.values) + (prod(self.squares) if self.leg.wanted.sizes else 0)

    def forms(self, results: Float[Tensor, " results"]) -> FormValues:
        """Return for every pair, parameter and member of the batch what μ is, up to the sign of the degree."""
        leg = self.leg
        sums = results[self.begin : self.begin + self.size].view(*self.count, self.each).transpose(0, 1)
        values, squares = sums, None
        if leg.wanted.sizes:
            values, spread = sums[..., : prod(self.values)], sums[..., prod(self.values) :]
            squares = self._added_up(spread.unflatten(-1, self.squares))
            squares = squares.sum(-1) if len(self.squares) > 1 else squares
        recipe = product_list(leg.products, leg.pairs, leg.degree, leg.wanted)
        return assemble_forms(leg.products, recipe, self._added_up(values.unflatten(-1, self.values)), squares)

    def _added_up(self, sums: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Add up the pieces of the batch, the third axis."""
        return sums if self.pieces == 1 else sums.unflatten(2, (-1, self.pieces)).sum(3)


@dataclass(frozen=True, slots=True)
class _Alike:
    """The key that entries share if one launch reads them."""

    outer: bool
    tile: Tile
    layout: Layout
    types: tuple[torch.dtype, ...]
    """Types of the factors of an entry."""
    pairs: tuple[Pair, ...]
    """The pairs of factors whose products are taken."""
    sizes: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """Entries of equal shape, strides, types and pairs."""

    kernel: KernelCall
    begin: int
    """Where its part of the table begins: addresses of first factors, of second factors and so on, then places."""
    end: int
    """Where the places of results begin in it."""

    @staticmethod
    def of(alike: _Alike, begin: int, count: int) -> _Launch:
        """Return a launch for so many entries."""
        given = count, alike.layout, alike.types, alike.tile
        if alike.outer:
            kernel = triton_backend.outer_products(*given, sizes=alike.sizes)
        else:
            kernel = triton_backend.row_products(*given, pairs=alike.pairs, sizes=alike.sizes)
        return _Launch(kernel, begin, begin + len(alike.types) * count)


@dataclass(frozen=True, slots=True, eq=False)
class LegProgram:
    """All products of some legs: what is launched, and where each result is."""

    blocks: tuple[LegResults, ...]
    launches: tuple[_Launch, ...]
    tensors: Integers
    """For every number of the table the tensor whose address it is counted from; −1 for places of results."""
    offsets: Integers
    """Bytes from there on, or the place of a result."""
    size: int

    @staticmethod
    def of(legs: Sequence[tuple[ProgramLeg, Sequence[LegTensors]]]) -> LegProgram:
        """Return a program for legs, each of several parameters."""
        return _Draft().program(legs)

    def run(self, tensors: PlainTensors) -> Float[Tensor, " results"]:
        """Return all products of these tensors."""
        numbers = np.append(tensors.addresses, 0)[self.tensors] + self.offsets
        table = send_to_device(numbers, tensors.device)
        results = torch.empty(self.size, device=tensors.device, dtype=torch.float32)
        edges = [edge for launch in self.launches for edge in (launch.begin, launch.end)]
        unaligned = np.bitwise_or.reduceat(numbers, edges)[::2] & 15
        with torch.cuda.device_of(results):
            for launch, bits in zip(self.launches, unaligned.tolist(), strict=True):
                launch.kernel.run(table[launch.begin :], results, aligned=not bits)
        return results


class _Draft:
    """A program that is being written down."""

    def __init__(self) -> None:
        self._size = 0
        self._blocks: list[LegResults] = []
        self._entries: dict[_Alike, list[tuple[int, ...]]] = defaultdict(list)
        """For every entry, the tensors of its factors, the bytes into each, and the position of its results."""

    def program(self, legs: Sequence[tuple[ProgramLeg, Sequence[LegTensors]]]) -> LegProgram:
        for leg, placed in legs:
            self._add(leg, placed)
        launches: list[_Launch] = []
        tensors: list[Integers] = []
        offsets: list[Integers] = []
        length = 0
        for alike, entries in self._entries.items():
            count, factors = len(entries), len(alike.types)
            columns = np.array(entries, dtype=np.int64).T
            launches.append(_Launch.of(alike, length, count))
            # Tables begin at multiples of 16 bytes, so that every kernel is compiled for that alone.
            spare = (factors + 1) * count % 2
            tensors += [columns[:factors].reshape(-1), np.full(count + spare, -1)]
            offsets += [columns[factors:].reshape(-1), np.zeros(spare, dtype=np.int64)]
            length += (factors + 1) * count + spare
        return LegProgram(
            tuple(self._blocks), tuple(launches), np.concatenate(tensors), np.concatenate(offsets), self._size
        )

    def _add(self, leg: ProgramLeg, tensors: Sequence[LegTensors]) -> None:
        outer = isinstance(leg.products, OuterProduct)
        factors, pairs = _factors(leg)
        pieces = 1
        if not outer and _rows_are_neighbours(factors[0][1]):
            cut = [(source, *lies.in_pieces(_COLUMNS)) for source, lies in factors]
            factors, pieces = [(source, lies) for source, lies, _ in cut], cut[0][2]
        layout = factors[0][1]
        rows = layout.count("rows")
        batch = layout.count("batch")
        values, squares = ((batch, rows, rows), (batch,)) if outer else ((batch, rows), (batch, rows))
        block = LegResults(leg, self._size, (len(tensors), len(pairs)), values, squares, pieces)
        self._blocks.append(block)
        sizes = leg.wanted.sizes
        # One entry for all pairs where a kernel reads so many factors, else one for each: parameter by parameter, so
        # that what pairs have in common is still in the cache.
        together = not outer and not sizes and len(factors) <= triton_backend.FACTORS
        each = [(factors, pairs)] if together else [([factors[x], factors[y]], ((0, 1),)) for x, y in pairs]
        for first, begin in tensors:
            for some, wanted in each:
                types = tuple(leg.types[source] for source, _ in some)
                lie = [replace(lies, offset=begin + lies.offset) for _, lies in some]
                tiles = [Tile.of(PlacedProduct(lies, lies)) for lies in lie]
                tile = replace(tiles[0], aligned=all(lies.aligned for lies in tiles))
                begins = [lies.offset * kind.itemsize for lies, kind in zip(lie, types, strict=True)]
                entries = self._entries[_Alike(outer, tile, layout.from_first(), types, wanted, sizes)]
                entries.append((*(first + source for source, _ in some), *begins, self._size))
                self._size += len(wanted) * block.each


def _factors(leg: ProgramLeg) -> tuple[list[tuple[int, Layout]], tuple[Pair, ...]]:
    """Return the rows that are multiplied: the number of a source, and where they lie in it; and pairs of them."""
    recipe, layout = product_list(leg.products, leg.pairs, leg.degree, leg.wanted), leg.layout
    if not isinstance(leg.products, RowProducts):
        return [(source, layout) for source in range(len(leg.types))], recipe.products
    factors = placed_rows(leg.products, recipe, layout)
    assert factors is not None, "takes() says so"
    if leg.products.faces == "entries":
        factors = [(source, lies.folded(_LENGTH)) for source, lies in factors]
    return factors, recipe.products


def _rows_are_neighbours(layout: Layout) -> bool:
    """Return whether entries next to each other are in different rows, so that few programs would go through all
    columns.
    """
    return Tile.of(PlacedProduct(layout, layout)).turned


def placed_rows(products: RowProducts, recipe: ProductList, layout: Layout) -> list[tuple[int, Layout]] | None:
    """Return the rows of a recipe: the number of a source, and where they lie in it.

    The result is None if strides do not determine where they lie.
    """
    faced = layout.turned() if products.faces == "columns" else layout
    result = []
    for source, row in recipe.rows:
        row_layout = faced if row is None else faced.row_of_units(products.unit, row)
        if row_layout is None:
            return None
        result.append((source, row_layout))
    return result
