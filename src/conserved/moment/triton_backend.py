"""Sums of products over the legs of many layers in one launch, where a GPU would otherwise wait for the host.

On a GPU the laws of a deep model cost what it costs to launch their operations, dozens of small ones for every layer.
Legs of all layers that look alike (`Stack`) are therefore read by one Triton kernel; nothing is copied, converted or
stacked. The numbers are those of `torch_backend`, which they are compared with in the tests, and which is used
wherever this is not available.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conserved.moment.forms import Backend, Found, Pair
from conserved.moment.launches import Tile, power
from conserved.moment.layouts import Layout, LegStack, PlacedProduct, plain
from conserved.symmetry.products import OuterProduct, Products, RowProducts

LARGEST = 128
"""Rows of a leg whose outer product fits one tile."""

TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What kernels read; they add up in float32."""


@cache
def available(device: torch.device) -> bool:
    """Whether kernels can be compiled for this device; tried once, because that takes a C compiler too."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    ones = LegStack(
        (torch.ones(16, 16, device=device),), Layout(0, ((1, 0), (1, 0)), ((1, 0), (16, 16)), ((1, 0), (16, 1)))
    )
    try:
        sums, _ = row_products(ones, ones, sizes=False)
        outer, _ = outer_products(ones, ones, sizes=False)
        return bool((sums == 16).all()) and bool((outer == 16).all())
    except Exception as problem:
        warnings.warn(
            f"Triton cannot compile kernels for {device} ({type(problem).__name__}: {str(problem)[:200]}). "
            "Laws are evaluated layer by layer, which is slower and gives the same numbers.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


def reads(stack: LegStack) -> bool:
    """Whether kernels read these legs: plain tensors of one type they know, on a device they run on."""
    types = types_of(stack.tensors)
    return types is not None and len(set(types)) == 1


def types_of(sources: Sequence[Tensor]) -> tuple[torch.dtype, ...] | None:
    """The types of tensors that kernels can read; None for others."""
    device = sources[0].device
    if not available(device):
        return None
    found = []
    for source in sources:
        if source.dtype not in TYPES or not plain(source, device):
            return None
        found.append(source.dtype)
    return tuple(found)


def takes(products: Products, layout: Layout | None, n: int) -> bool:
    """Whether kernels compute these products of legs of n rows that lie so."""
    if layout is None or isinstance(products, OuterProduct):
        return layout is not None and n <= LARGEST
    assert isinstance(products, RowProducts)
    in_units = layout.row_of_units(products.unit, 0) is not None
    return bool(products.terms) and not products.lifted and in_units


class TritonBackend(Backend):
    """Row products and outer products of stacks, all pairs of the same types in one launch."""

    def faced(self, legs: Sequence[LegStack], faces: str) -> list[LegStack]:
        """Rows as they are, or columns as rows; of all entries the rows, which are added up later."""
        return [replace(leg, layout=leg.layout.turned()) for leg in legs] if faces == "columns" else [*legs]

    def row_of_units(self, leg: LegStack, unit: int, row: int) -> LegStack:
        """One row of every unit."""
        layout = leg.layout.row_of_units(unit, row)
        assert layout is not None, "takes() says so"
        return replace(leg, layout=layout)

    def row_products(
        self, legs: Sequence[LegStack], pairs: Sequence[Pair], dtype: torch.dtype, *, sizes: bool = False
    ) -> Found:
        """Σ_j a_ij b_ij for every row i and every pair of legs."""
        return _of_pairs(row_products, legs, pairs, sizes=sizes)

    def outer_products(
        self, legs: Sequence[LegStack], pairs: Sequence[Pair], dtype: torch.dtype, *, sizes: bool = False
    ) -> Found:
        """A Bᵀ for every pair of legs."""
        return _of_pairs(outer_products, legs, pairs, sizes=sizes)


TRITON = TritonBackend()


def _of_pairs(
    product: Callable[..., Found], stacks: Sequence[LegStack], pairs: Sequence[Pair], *, sizes: bool
) -> Found:
    """The product of every listed pair of stacks, in one launch for all pairs of the same types."""
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for number, pair in enumerate(pairs):
        alike[tuple((stacks[i].dtype, stacks[i].layout, stacks[i].shift) for i in pair)].append(number)
    found: dict[int, tuple[Tensor, Tensor | None]] = {}
    for numbers in alike.values():
        # Entry by entry, so that what pairs have in common is still in the cache.
        a, b = (
            replace(stacks[side[0]], tensors=tuple(chain(*zip(*(stacks[i].tensors for i in side), strict=True))))
            for side in zip(*(pairs[number] for number in numbers), strict=True)
        )
        values, squares = (
            None if part is None else part.unflatten(0, (-1, len(numbers))).transpose(0, 1)
            for part in product(a, b, sizes=sizes)
        )
        assert values is not None
        if len(alike) == 1:
            return values, squares
        for place, number in enumerate(numbers):
            found[number] = values[place], None if squares is None else squares[place]
    # Stacked and not indexed: an index would have to be sent to the device, and the host would wait for that.
    values, squares = zip(*(found[number] for number in range(len(pairs))), strict=True)
    return torch.stack(values), torch.stack(squares) if sizes else None


def row_products(a: LegStack, b: LegStack, *, sizes: bool) -> Found:
    """Σ_k a_ik b_ik for every row i, entry by entry and batch by batch, and Σ_ik (a_ik b_ik)²."""
    entries, batch, n, _ = a.shape
    sums = torch.empty((entries, batch, n), device=a.device, dtype=torch.float32)
    squares = torch.empty_like(sums) if sizes else None
    _launch_stacks(launch_row_products, a, b, batch * n, sums, squares)
    return sums, None if squares is None else squares.sum(-1)


def outer_products(a: LegStack, b: LegStack, *, sizes: bool) -> Found:
    """A Bᵀ, for legs of at most `LARGEST` rows, and Σ_ijk (a_ik b_jk)² = Σ_k ‖a_:k‖² ‖b_:k‖²."""
    entries, batch, n, _ = a.shape
    sums = torch.empty((entries, batch, n, n), device=a.device, dtype=torch.float32)
    squares = torch.empty((entries, batch), device=a.device, dtype=torch.float32) if sizes else None
    _launch_stacks(launch_outer_products, a, b, batch * n * n, sums, squares)
    return sums, squares


def _launch_stacks(
    launch: Callable[..., None], a: LegStack, b: LegStack, results: int, sums: Tensor, squares: Tensor | None
) -> None:
    """Products of two stacks entry by entry, with so many results each."""
    assert replace(a.layout, offset=0) == replace(b.layout, offset=0)
    addresses = np.array(a.addresses() + b.addresses())
    places = np.arange(len(a.tensors)) * results
    table = torch.from_numpy(np.concatenate((addresses, places))).to(a.device, non_blocking=True)
    launch(
        table,
        len(a.tensors),
        a.layout,
        (a.dtype, b.dtype),
        Tile.of(PlacedProduct(a.layout, b.layout)),
        sums,
        squares,
        shifts=(a.shift, b.shift),
        aligned=not bool((addresses % 16).any()),
    )


FACTORS = 4
"""How many factors one launch of row products reads at the most."""

_LETTERS = "ABCD"


def launch_row_products(
    table: Tensor,
    count: int,
    layout: Layout,
    types: Sequence[torch.dtype],
    tile: Tile,
    sums: Tensor,
    squares: Tensor | None = None,
    *,
    pairs: Sequence[Pair] = ((0, 1),),
    shifts: tuple[float, float] = (0.0, 0.0),
    aligned: bool,
) -> None:
    """Fill in Σ_k a_ik b_ik for every row i, for pairs of factors of `count` entries.

    Args:
        table: addresses of all first factors, all second factors and so on, then the places of results among the sums:
            of every entry one pair after the other.
        count: how many entries.
        layout: how factors lie, from their addresses on.
        types: one for every factor, at most `FACTORS`.
        tile: how rows and columns are gone through.
        sums: where results go.
        squares: where sums of squares of the products of the first two factors go, if they are asked for.
        pairs: pairs of factors, the earlier one first.
        shifts: what is added to every entry of the first two factors.
        aligned: whether all addresses are multiples of 16 bytes.

    """
    from conserved.moment import kernels

    assert len(types) <= FACTORS
    assert squares is None or pairs == ((0, 1),)
    numbers = {_LETTERS[i] + _LETTERS[j]: -1 for i in range(FACTORS) for j in range(i, FACTORS)}
    numbers |= {_LETTERS[i] + _LETTERS[j]: number for number, (i, j) in enumerate(pairs)}
    kinds = {letter: kernels.TYPES[types[min(place, len(types) - 1)]] for place, letter in enumerate(_LETTERS)}
    programs = -(-layout.count("rows") // tile.height) * count * layout.count("batch")
    _launch(
        kernels.row_sums, programs, table, count, layout, tile, sums, squares, shifts,
        aligned=aligned, FACTORS=len(types), **kinds, **numbers,
    )  # fmt: skip


def launch_outer_products(
    table: Tensor,
    count: int,
    layout: Layout,
    types: Sequence[torch.dtype],
    tile: Tile,
    sums: Tensor,
    squares: Tensor | None = None,
    *,
    shifts: tuple[float, float] = (0.0, 0.0),
    aligned: bool,
) -> None:
    """The same for A Bᵀ of two factors of at most `LARGEST` rows; squares are one number for each product."""
    from conserved.moment import kernels

    rows = layout.count("rows")
    assert rows <= LARGEST
    tile = replace(tile, height=max(16, power(rows, LARGEST)), width=32)
    # Half-precision numbers are tf32 numbers; three products of such parts make one of single precision, up to the
    # rounding of its last bits, which a ledger of single steps must not see.
    half = torch.float32 not in types
    precision = "tf32" if half else "ieee" if squares is None else "tf32x3"
    a, b = (kernels.TYPES[kind] for kind in types)
    programs = count * layout.count("batch")
    _launch(
        kernels.outer_products, programs, table, count, layout, tile, sums, squares, shifts,
        aligned=aligned, A=a, B=b, PRECISION=precision,
    )  # fmt: skip


def _launch(
    kernel: Any, programs: int, table: Tensor, count: int, layout: Layout, tile: Tile, sums: Tensor,
    squares: Tensor | None, shifts: tuple[float, float], *, aligned: bool, **constants: object,
) -> None:  # fmt: skip
    strides: list[int] = []
    for outer, inner in (layout.batch, layout.rows, layout.columns):
        strides += [outer[0] * inner[0], inner[0], outer[1], inner[1]]
    with torch.cuda.device_of(sums):
        kernel[(programs,)](
            table, sums, sums if squares is None else squares, *shifts, count, *strides,
            SPREAD=squares is not None, HEIGHT=tile.height, WIDTH=tile.width, TURNED=tile.turned, MERGED=tile.merged,
            ALIGNED=tile.aligned and aligned, **constants,
        )  # fmt: skip
