"""Launches of kernels that sum products of the legs of many layers, where a GPU would otherwise wait for the host.

On a GPU the laws of a deep model cost what it costs to launch their operations, dozens of small ones for every layer.
Legs of all layers that look alike are therefore read by one Triton kernel (`leg_programs`); nothing is copied or
converted. The numbers are those of `torch_backend`, which they are compared with in the tests, and which is used
wherever this is not available.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from conserved.moment.forms import Pair
from conserved.moment.launches import Tile, power
from conserved.moment.layouts import Layout, PlacedProduct, plain
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
    ones = torch.ones(16, 16, device=device)
    layout = Layout(0, ((1, 0), (1, 0)), ((1, 0), (16, 16)), ((1, 0), (16, 1)))
    table = torch.tensor([ones.data_ptr(), ones.data_ptr(), 0], device=device)
    tile, types = Tile.of(PlacedProduct(layout, layout)), (torch.float32, torch.float32)
    sums, outer = torch.zeros(16, device=device), torch.zeros(256, device=device)
    try:
        launch_row_products(table, 1, layout, types, tile, sums, aligned=False)
        launch_outer_products(table, 1, layout, types, tile, outer, aligned=False)
        return bool((sums == 16).all()) and bool((outer == 16).all())
    except Exception as problem:
        warnings.warn(
            f"Triton cannot compile kernels for {device} ({type(problem).__name__}: {str(problem)[:200]}). "
            "Laws are evaluated layer by layer, which is slower and gives the same numbers.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


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


FACTORS = 4
"""How many factors one launch of row products reads at the most."""

_LETTERS = "ABCD"


def launch_row_products(
    table: Tensor,
    count: int,
    layout: Layout,
    types: Sequence[torch.dtype],
    tile: Tile,
    results: Tensor,
    *,
    pairs: Sequence[Pair] = ((0, 1),),
    sizes: bool = False,
    aligned: bool,
) -> None:
    """Fill in Σ_k a_ik b_ik for every row i, for pairs of factors of `count` entries.

    Args:
        table: addresses of all first factors, all second factors and so on, then places among the results: of every
            entry one pair after the other.
        count: how many entries.
        layout: how factors lie, from their addresses on.
        types: one for every factor, at most `FACTORS`.
        tile: how rows and columns are gone through.
        results: where they go.
        pairs: pairs of factors, the earlier one first.
        sizes: whether Σ_k (a_ik b_ik)² follow; only for the pair of the first two factors.
        aligned: whether all addresses are multiples of 16 bytes.

    """
    from conserved.moment import kernels

    assert len(types) <= FACTORS
    assert not sizes or pairs == ((0, 1),)
    numbers = {_LETTERS[i] + _LETTERS[j]: -1 for i in range(FACTORS) for j in range(i, FACTORS)}
    numbers |= {_LETTERS[i] + _LETTERS[j]: number for number, (i, j) in enumerate(pairs)}
    kinds = {letter: kernels.TYPES[types[min(place, len(types) - 1)]] for place, letter in enumerate(_LETTERS)}
    programs = -(-layout.count("rows") // tile.height) * count * layout.count("batch")
    constants = {"FACTORS": len(types), "SPREAD": sizes, "ALIGNED": tile.aligned and aligned, **kinds, **numbers}
    _launch(kernels.row_sums, programs, table, count, layout, tile, results, **constants)


def launch_outer_products(
    table: Tensor,
    count: int,
    layout: Layout,
    types: Sequence[torch.dtype],
    tile: Tile,
    results: Tensor,
    *,
    sizes: bool = False,
    aligned: bool,
) -> None:
    """The same for A Bᵀ of two factors of at most `LARGEST` rows; sizes are Σ_k ‖a_:k‖² ‖b_:k‖², one for each."""
    from conserved.moment import kernels

    rows = layout.count("rows")
    assert rows <= LARGEST
    tile = replace(tile, height=max(16, power(rows, LARGEST)), width=32)
    # Half-precision numbers are tf32 numbers; three products of such parts make one of single precision, up to the
    # rounding of its last bits, which a ledger of single steps must not see.
    precision = "tf32" if torch.float32 not in types else "tf32x3" if sizes else "ieee"
    a, b = (kernels.TYPES[kind] for kind in types)
    constants = {"A": a, "B": b, "SPREAD": sizes, "ALIGNED": tile.aligned and aligned, "PRECISION": precision}
    programs = count * layout.count("batch")
    _launch(kernels.outer_products, programs, table, count, layout, tile, results, **constants)


def _launch(
    kernel: Any, programs: int, table: Tensor, count: int, layout: Layout, tile: Tile, results: Tensor, **more: object
) -> None:
    strides: list[int] = []
    for outer, inner in (layout.batch, layout.rows, layout.columns):
        strides += [outer[0] * inner[0], inner[0], outer[1], inner[1]]
    with torch.cuda.device_of(results):
        kernel[(programs,)](
            table, results, count, *strides,
            HEIGHT=tile.height, WIDTH=tile.width, TURNED=tile.turned, MERGED=tile.merged, **more,
        )  # fmt: skip
