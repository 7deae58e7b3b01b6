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
from conserved.moment.forms import Pair, Wanted, finished, multiplied
from conserved.moment.launches import Tile
from conserved.moment.layouts import Layout, PlacedProduct
from conserved.symmetry.kind import Degree
from conserved.symmetry.products import OuterProduct, Products, RowProducts

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Leg:
    """What legs must share for their results to lie next to each other."""

    products: Products
    degree: Degree
    layout: Layout
    pairs: tuple[Pair, ...]
    types: tuple[torch.dtype, ...]
    """Of the tensors that are paired."""
    wanted: Wanted


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The results of one leg of several parameters."""

    leg: Leg
    begin: int
    shape: tuple[int, ...]
    """Parameters, products, batch, and the rows of every product."""

    def forms(self, results: Float[Tensor, " results"]) -> Float[Tensor, "pairs parameters batch ..."]:
        """For every pair, parameter and member of the batch what μ is, up to the sign of the degree."""
        leg = self.leg
        sums = results[self.begin : self.begin + prod(self.shape)].view(self.shape).transpose(0, 1)
        return finished(leg.products, multiplied(leg.products, leg.pairs, leg.degree, leg.wanted), sums, None)[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """Products of equal shape, strides and types."""

    outer: bool
    tile: Tile
    layout: Layout
    types: tuple[torch.dtype, torch.dtype]
    begin: int
    """Where its part of the table begins: addresses of first factors, of second factors, places of results."""
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class LegProgram:
    """All products of some legs: what is launched, and where each result is."""

    blocks: tuple[Block, ...]
    launches: tuple[_Launch, ...]
    tensors: Integers
    """For every number of the table, the tensor whose address it is counted from; one after the last for zero."""
    offsets: Integers
    """Bytes from there on, or the place of a result."""
    size: int

    @staticmethod
    def of(legs: Sequence[tuple[Leg, Sequence[int]]]) -> LegProgram:
        """A program for legs, each of several parameters: of each the number of its first tensor among all tensors."""
        return _Draft().program(legs)

    def run(self, tensors: Sequence[Tensor]) -> Float[Tensor, " results"]:
        """All products of these tensors, which lie on one device."""
        device = tensors[0].device
        bases = np.array([*(tensor.data_ptr() for tensor in tensors), 0], dtype=np.int64)
        numbers = bases[self.tensors] + self.offsets
        table = torch.from_numpy(numbers).to(device, non_blocking=True)
        results = torch.empty(self.size, device=device, dtype=torch.float32)
        for one in self.launches:
            aligned = not bool((numbers[one.begin : one.begin + 2 * one.count] % 16).any())
            compute = triton_backend.launch_outer_products if one.outer else triton_backend.launch_row_products
            compute(table[one.begin :], one.count, one.layout, one.types, one.tile, results, aligned=aligned)
        return results


class _Draft:
    """A program that is being written down."""

    def __init__(self) -> None:
        self._size = 0
        self._blocks: list[Block] = []
        self._products: dict[tuple[bool, Tile, Layout, tuple[torch.dtype, torch.dtype]], list[tuple[int, ...]]] = (
            defaultdict(list)
        )
        """By what a launch has in common: both tensors, the bytes into each, and the place of the results."""

    def program(self, legs: Sequence[tuple[Leg, Sequence[int]]]) -> LegProgram:
        for leg, parameters in legs:
            self._add(leg, parameters)
        launches, tensors, offsets, length = [], [], [], 0
        for (outer, tile, layout, types), products in self._products.items():
            first, second, a, b, places = np.array(products, dtype=np.int64).T
            launches.append(_Launch(outer, tile, layout, types, length, len(products)))
            # Tables begin at multiples of 16 bytes, so that every kernel is compiled for that alone.
            spare = [-1] * (len(products) % 2)
            tensors += [first, second, np.full_like(first, -1), np.array(spare, dtype=np.int64)]
            offsets += [a, b, places, np.zeros(len(spare), dtype=np.int64)]
            length += 3 * len(products) + len(spare)
        return LegProgram(
            tuple(self._blocks), tuple(launches), np.concatenate(tensors), np.concatenate(offsets), self._size
        )

    def _add(self, leg: Leg, parameters: Sequence[int]) -> None:
        outer = isinstance(leg.products, OuterProduct)
        sides = _sides(leg)
        layout = sides[0][0][1]
        rows = layout.count("rows")
        results = (layout.count("batch"), rows, rows) if outer else (layout.count("batch"), rows)
        self._blocks.append(Block(leg, self._size, (len(parameters), len(sides), *results)))
        # Parameter by parameter, so that what products have in common is still in the cache.
        for tensor in parameters:
            for (one, a), (other, b) in sides:
                types = leg.types[one], leg.types[other]
                products = self._products[outer, Tile.of(PlacedProduct(a, b)), replace(a, offset=0), types]
                begins = a.offset * types[0].itemsize, b.offset * types[1].itemsize
                products.append((tensor + one, tensor + other, *begins, self._size))
                self._size += prod(results)


def _sides(leg: Leg) -> list[tuple[tuple[int, Layout], tuple[int, Layout]]]:
    """For every product of a leg both factors: the number of a source, and where the rows that count lie in it."""
    recipe, layout = multiplied(leg.products, leg.pairs, leg.degree, leg.wanted), leg.layout
    if not isinstance(leg.products, RowProducts):
        return [((i, layout), (j, layout)) for i, j in recipe.products]
    faced = layout.turned() if leg.products.faces == "columns" else layout
    rows = []
    for source, row in recipe.rows:
        lies = faced if row is None else faced.row_of_units(leg.products.unit, row)
        assert lies is not None, "takes() says so"
        rows.append((source, lies))
    return [(rows[x], rows[y]) for x, y in recipe.products]
