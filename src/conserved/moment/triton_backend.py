"""Launches of kernels that sum products of the legs of many layers, where a GPU would otherwise wait for the host.

On a GPU the laws of a deep model cost what it costs to launch their operations, dozens of small ones for every layer.
Legs of all layers that look alike are therefore read by one Triton kernel (`leg_programs`); nothing is copied or
converted. The numbers are those of `torch_backend`, which they are compared with in the tests, and which is used
wherever this is not available.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.moment.launches import Tile, power
from conserved.moment.layouts import Layout, PlacedProduct, PlainTensors
from conserved.symmetry.pairs import Pair
from conserved.symmetry.products import BlockOuterProducts, OuterProduct, Products, RowProducts

_PIECE = 256
"""Columns of a leg that one program adds up."""

LARGEST = 128
"""Rows of a leg whose outer product fits one tile."""

TYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""Dtypes that kernels read; they add up in float32."""


@cache
def available(device: torch.device) -> bool:
    """Return whether kernels can be compiled for this device; tried once, because that takes a C compiler too."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    ones = torch.ones(16, 16, device=device)
    layout = Layout(0, ((1, 0), (1, 0)), ((1, 0), (16, 16)), ((1, 0), (16, 1)))
    table = torch.tensor([ones.data_ptr(), ones.data_ptr(), 0], device=device)
    tile, types = Tile.of(PlacedProduct(layout, layout)), (torch.float32, torch.float32)
    sums, outer = torch.zeros(16, device=device), torch.zeros(256, device=device)
    try:
        with torch.cuda.device_of(sums):
            row_products(1, layout, types, tile).run(table, sums, aligned=False)
            outer_products(1, layout, types, tile).run(table, outer, aligned=False)
        return bool((sums == 16).all()) and bool((outer == 16).all())
    except Exception as problem:
        warnings.warn(
            f"Triton cannot compile kernels for {device} ({type(problem).__name__}: {str(problem)[:200]}). "
            "Laws are evaluated layer by layer, which is slower and gives the same numbers.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


def readable(tensors: Sequence[Tensor]) -> PlainTensors | None:
    """Return tensors that kernels can read; None for others."""
    plain = PlainTensors.of(tensors)
    return plain if plain is not None and TYPES.issuperset(plain.types) and available(plain.device) else None


def takes(products: Products, layout: Layout | None, n: int) -> bool:
    """Return whether kernels compute these products of legs of n rows that lie so."""
    if layout is None or isinstance(products, BlockOuterProducts):
        return False
    if isinstance(products, OuterProduct):
        return n <= LARGEST
    assert isinstance(products, RowProducts)
    in_units = layout.row_of_units(products.unit, 0) is not None
    return bool(products.terms) and not products.lifted and in_units


def row_totals(leg: Float[Tensor, "*batch n m"]) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, " *batch"]] | None:
    """Return Σ_j b_ij for every row i of a leg in float64, and the sum of all squares.

    The result is None where kernels cannot read the leg.

    To convert it first would take longer than the sums.
    """
    if leg.dtype not in TYPES or leg.ndim != 3 or not leg.numel() or not available(leg.device):
        return None
    from conserved.moment import kernels

    batch, n, m = leg.shape
    turned = leg.stride(1) < leg.stride(2)
    height, width = (power(n, 64), power(m, 32)) if turned else (power(n, 16), power(m, 128))
    pieces = -(-m // _PIECE)
    sums = leg.new_empty((2, batch, pieces, n), dtype=torch.float64)
    with torch.cuda.device_of(leg):
        grid = batch * pieces, -(-n // height)
        strides = leg.stride()
        kernels.row_totals[grid](leg, sums[0], sums[1], n, m, pieces, *strides, HEIGHT=height, WIDTH=width)
    totals, squares = sums.sum(2).unbind()
    return totals, squares.sum(-1)


FACTORS = 4
"""How many factors one launch of row products reads at the most."""

_LETTERS = "ABCD"


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """A kernel with all of its arguments but tensors, worked out once."""

    kernel: str
    programs: int
    numbers: tuple[int, ...]
    """How many entries there are, then sizes and strides."""
    aligned: bool
    """Whether many entries are fetched at once where all addresses allow it."""
    constants: Mapping[str, Any]

    @staticmethod
    def of(
        kernel: str, programs: int, count: int, layout: Layout, tile: Tile, constants: Mapping[str, Any]
    ) -> KernelCall:
        """Return a call with the options that the layout and the tile imply."""
        strides: list[int] = []
        for outer, inner in (layout.batch, layout.rows, layout.columns):
            strides += [outer[0] * inner[0], inner[0], outer[1], inner[1]]
        shape = {"HEIGHT": tile.height, "WIDTH": tile.width, "TURNED": tile.turned, "MERGED": tile.merged}
        return KernelCall(kernel, programs, (count, *strides), tile.aligned, {**shape, **constants})

    def run(self, table: Tensor, results: Tensor, *, aligned: bool) -> None:
        """Fill in the results, on the current device.

        Args:
            table: addresses of all first factors, all second factors and so on, then places among the results: of
                every entry one pair after the other.
            results: where they go.
            aligned: whether all addresses are multiples of 16 bytes.

        """
        from conserved.moment import kernels

        kernel: Any = getattr(kernels, self.kernel)
        kernel[(self.programs,)](table, results, *self.numbers, ALIGNED=self.aligned and aligned, **self.constants)


def row_products(
    count: int,
    layout: Layout,
    types: Sequence[torch.dtype],
    tile: Tile,
    *,
    pairs: Sequence[Pair] = ((0, 1),),
    sizes: bool = False,
) -> KernelCall:
    """Return a launch that fills in Σ_k a_ik b_ik for every row i, for pairs of factors of `count` entries.

    Args:
        count: how many entries.
        layout: how factors lie, from their addresses on.
        types: one for every factor, at most `FACTORS`.
        tile: how rows and columns are gone through.
        pairs: pairs of factors, the earlier one first.
        sizes: whether Σ_k (a_ik b_ik)² follow; only for the pair of the first two factors.
    """
    from conserved.moment import kernels

    assert len(types) <= FACTORS
    assert not sizes or pairs == ((0, 1),)
    numbers = {_LETTERS[i] + _LETTERS[j]: -1 for i in range(FACTORS) for j in range(i, FACTORS)}
    numbers |= {_LETTERS[i] + _LETTERS[j]: number for number, (i, j) in enumerate(pairs)}
    kinds = {letter: kernels.TYPES[types[min(index, len(types) - 1)]] for index, letter in enumerate(_LETTERS)}
    programs = -(-layout.count("rows") // tile.height) * count * layout.count("batch")
    constants = {"FACTORS": len(types), "SPREAD": sizes, **kinds, **numbers}
    return KernelCall.of("row_sums", programs, count, layout, tile, constants)


def outer_products(
    count: int, layout: Layout, types: Sequence[torch.dtype], tile: Tile, *, sizes: bool = False
) -> KernelCall:
    """Return the same for A Bᵀ of two factors of at most `LARGEST` rows.

    Their sizes are Σ_k ‖a_:k‖² ‖b_:k‖², one for each product.
    """
    from conserved.moment import kernels

    rows = layout.count("rows")
    assert rows <= LARGEST
    tile = replace(tile, height=max(16, power(rows, LARGEST)), width=32)
    # Half-precision numbers are tf32 numbers; three products of such parts make one of single precision, up to the
    # rounding of its last bits, which a ledger of single steps must not see.
    precision = "tf32" if torch.float32 not in types else "tf32x3" if sizes else "ieee"
    a, b = (kernels.TYPES[kind] for kind in types)
    constants = {"A": a, "B": b, "SPREAD": sizes, "PRECISION": precision}
    return KernelCall.of("outer_products", count * layout.count("batch"), count, layout, tile, constants)
