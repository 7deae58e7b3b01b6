"""Sums of products over the legs of many layers in one launch, where a GPU would otherwise wait for the host.

On a GPU the laws of a deep model cost what it costs to launch their operations, dozens of small ones for every layer.
Legs of all layers that look alike (`Sheaf`) are therefore read by one Triton kernel; nothing is copied, converted or
stacked. The numbers are those of `conserved.grams`, which they are compared with in the tests, and which is used
wherever this is not available.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from conserved.launches import Tile, power
from conserved.sheaf import Layout, Legs, RowProduct, Sheaf, plain

LARGEST = 128
"""Rows of a leg whose outer product fits one tile."""

TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What kernels read; they add up in float32."""


@cache
def available(device: torch.device) -> bool:
    """Whether kernels can be compiled for this device; tried once, because that takes a C compiler too."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    ones = Sheaf(
        (torch.ones(16, 16, device=device),), Layout(0, ((1, 0), (1, 0)), ((1, 0), (16, 16)), ((1, 0), (16, 1)))
    )
    try:
        return bool((row_sums(ones, ones) == 16).all()) and bool((outer_products(ones, ones) == 16).all())
    except Exception as problem:
        warnings.warn(
            f"Triton cannot compile kernels for {device} ({type(problem).__name__}: {str(problem)[:200]}). "
            "Laws are evaluated layer by layer, which is slower and gives the same numbers.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


def reads(sheaf: Sheaf) -> bool:
    """Whether kernels read these legs: plain tensors of one type they know, on a device they run on."""
    device = sheaf.device
    return (
        sheaf.dtype in TYPES
        and available(device)
        and all(plain(tensor, device) and tensor.dtype == sheaf.dtype for tensor in sheaf.tensors)
    )


def row_sums(a: Legs, b: Legs) -> Float[Tensor, "entries batch n"]:
    """Σ_k a_ik b_ik for every row i."""
    return _row_sums(a, b, spread=False)[0]


def row_sums_and_spread(a: Legs, b: Legs) -> tuple[Float[Tensor, "entries batch n"], Float[Tensor, "entries batch"]]:
    """Σ_k a_ik b_ik for every row i, and Σ_ik (a_ik b_ik)²."""
    sums, squares = _row_sums(a, b, spread=True)
    return sums, squares.sum(-1)


def outer_products(a: Legs, b: Legs) -> Float[Tensor, "entries batch n n"]:
    """A Bᵀ, for legs of at most `LARGEST` rows."""
    return _outer_products(a, b, spread=False)[0]


def outer_products_and_spread(
    a: Legs, b: Legs
) -> tuple[Float[Tensor, "entries batch n n"], Float[Tensor, "entries batch"]]:
    """A Bᵀ, for legs of at most `LARGEST` rows, and Σ_ijk (a_ik b_jk)² = Σ_k ‖a_:k‖² ‖b_:k‖²."""
    return _outer_products(a, b, spread=True)


def _row_sums(a: Legs, b: Legs, *, spread: bool) -> tuple[Tensor, Tensor]:
    from conserved import kernels

    assert isinstance(a, Sheaf)
    assert isinstance(b, Sheaf)
    entries, batch, n, _ = a.shape
    tile = Tile.of(RowProduct(a.layout, b.layout))
    sums = torch.empty((entries, batch, n), device=a.device, dtype=torch.float32)
    squares = torch.empty_like(sums) if spread else sums
    _launch(kernels.row_sums, -(-n // tile.height) * entries * batch, tile, a, b, sums, squares, spread=spread)
    return sums, squares


def _outer_products(a: Legs, b: Legs, *, spread: bool) -> tuple[Tensor, Tensor]:
    from conserved import kernels

    assert isinstance(a, Sheaf)
    assert isinstance(b, Sheaf)
    entries, batch, n, _ = a.shape
    assert n <= LARGEST
    sums = torch.empty((entries, batch, n, n), device=a.device, dtype=torch.float32)
    squares = torch.empty((entries, batch), device=a.device, dtype=torch.float32) if spread else sums
    tile = replace(Tile.of(RowProduct(a.layout, b.layout)), height=max(16, power(n, LARGEST)), width=32)
    # Half-precision numbers are tf32 numbers; three products of such parts make one of single precision, up to the
    # rounding of its last bits, which a ledger of single steps must not see.
    half = torch.float32 not in (a.dtype, b.dtype)
    precision = "tf32" if half else "tf32x3" if spread else "ieee"
    _launch(
        kernels.outer_products,
        entries * batch,
        tile,
        a,
        b,
        sums,
        squares,
        spread=spread,
        PRECISION=precision,
    )
    return sums, squares


def _launch(
    kernel: Any, programs: int, tile: Tile, a: Sheaf, b: Sheaf, sums: Tensor, squares: Tensor, *,
    spread: bool, **more: str,
) -> None:  # fmt: skip
    from conserved.kernels import TYPES

    assert replace(a.layout, offset=0) == replace(b.layout, offset=0)
    strides: list[int] = []
    for outer, inner in (a.layout.batch, a.layout.rows, a.layout.columns):
        strides += [outer[0] * inner[0], inner[0], outer[1], inner[1]]
    addresses = np.array(a.addresses() + b.addresses())
    table = torch.from_numpy(addresses).to(a.device, non_blocking=True)
    with torch.cuda.device_of(sums):
        kernel[(programs,)](
            table, sums, squares, a.shift, b.shift, len(a.tensors), *strides,
            A=TYPES[a.dtype], B=TYPES[b.dtype], SPREAD=spread, HEIGHT=tile.height, WIDTH=tile.width,
            TURNED=tile.turned, MERGED=tile.merged, ALIGNED=tile.aligned and not bool((addresses % 16).any()), **more,
        )  # fmt: skip
