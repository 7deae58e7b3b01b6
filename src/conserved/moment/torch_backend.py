"""Products of legs that are (…, n, m) tensors, for several pairs of them in one pass over memory.

On processors large legs are read in slices that follow memory order and stay in cache, so that a slice that several
pairs need is fetched once, and no full-size product or conversion is formed. All of it can be differentiated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.moment import triton_backend
from conserved.moment.forms import Backend, FormValues, stack
from conserved.symmetry.pairs import Pair

_CHUNK = 1 << 19
"""Entries of a tensor that are read at a time: two megabytes of float32, so that products stay in cache."""

_SLICE = 1 << 17
"""The same where several tensors are paired: half a megabyte of float32 each."""

_DEVICE_SLICE = 1 << 22
"""The same on other devices, where only the memory for temporaries is at stake."""

_STRIPE = 64
"""Stored rows that are summed in one go; a multiple of them is accumulated at a time."""


class TorchBackend(Backend):
    """Row products and outer products of tensors, by PyTorch's own operations."""

    def faced(self, legs: Sequence[Tensor], faces: str) -> list[Tensor]:
        """Return rows as they are, columns as rows, or all entries as one row, in the order in which the first are
        stored.
        """
        if faces == "rows":
            return [*legs]
        if faces == "columns":
            return [leg.mT for leg in legs]
        turned = legs[0].stride(-2) < legs[0].stride(-1)
        return [(leg.mT if turned else leg).flatten(-2).unsqueeze(-2) for leg in legs]

    def row_of_units(self, leg: Tensor, unit: int, row: int) -> Tensor:
        """Return one row of every unit."""
        return leg if unit == 1 else leg.unflatten(-2, (-1, unit))[..., row, :]

    def row_products(
        self, legs: Sequence[Tensor], pairs: Sequence[Pair], dtype: torch.dtype, *, sizes: bool = False
    ) -> FormValues:
        """Return Σ_j a_ij b_ij for every row i and every pair of legs."""
        first = legs[0]
        if first.shape[-2] == 1 and first.numel() > _STRIPE**2 and not sizes:
            return _dots(legs, pairs, dtype), None
        across = first.stride(-2) < first.stride(-1)
        if not in_cache(first):
            if len(pairs) > 1 and not sizes:
                return torch.stack(_device_grams(legs, pairs, dtype, across=across)), None
        elif first.numel() > _size(pairs):
            if sizes:
                return _in_slices(legs, pairs, dtype, -1 if across else -2)
            if across:
                return torch.stack(_column_sums([leg.mT for leg in legs], pairs, dtype)), None
            parts = [[(piece[i] * piece[j]).sum(-1) for i, j in pairs] for piece in _slices(legs, -2, pairs, dtype)]
            return torch.stack([torch.cat(part, -1) for part in zip(*parts, strict=True)]), None
        cast = [leg.to(dtype) for leg in legs]
        products = [cast[i] * cast[j] for i, j in pairs]
        return stack([product.sum(-1) for product in products]), stack([*map(_square, products)]) if sizes else None

    def row_totals(self, leg: Tensor, dtype: torch.dtype, *, sizes: bool = False) -> FormValues:
        """Return Σ_j b_ij for every row i of a leg.

        On a GPU by a kernel, where PyTorch would convert all of it first.
        """
        result = triton_backend.row_totals(leg) if dtype == torch.float64 and not leg.requires_grad else None
        if result is not None:
            return result
        cast = leg.to(dtype)
        # Times a column of ones: on processors that is faster than a sum over what lies far apart.
        ones = cast.new_ones((1,) * leg.ndim).expand(*leg.shape[:-2], 1, leg.shape[-1])
        return (ones @ cast.mT)[..., 0, :], _square(cast) if sizes else None

    def outer_products(
        self, legs: Sequence[Tensor], pairs: Sequence[Pair], dtype: torch.dtype, *, sizes: bool = False
    ) -> FormValues:
        """Return a Bᵀ for every pair of legs; Σ_ijk (a_ik b_jk)² = Σ_k ‖a_:k‖² ‖b_:k‖²."""
        cast = [leg.to(dtype) for leg in legs]
        if len(pairs) == 1 or in_cache(cast[0]):
            values = stack([cast[i] @ cast[j].mT for i, j in pairs])
        else:
            stacked, n = torch.cat(cast, -2), cast[0].shape[-2]
            gram = stacked @ stacked.mT
            values = torch.stack([gram[..., i * n : (i + 1) * n, j * n : (j + 1) * n] for i, j in pairs])
        if not sizes:
            return values, None
        columns = [torch.linalg.vector_norm(leg, dim=-2) for leg in cast]
        return values, stack([(columns[i] * columns[j]).square().sum(-1) for i, j in pairs])


TORCH = TorchBackend()


def row_dots(a: Float[Tensor, "*batch n m"], b: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch n"]:
    """Return Σ_j a_ij b_ij for every row i."""
    return TORCH.row_products([a, b], [(0, 1)], torch.promote_types(a.dtype, b.dtype))[0][0]


def column_bounds(legs: Sequence[Float[Tensor, "*batch n m"]], dtype: torch.dtype) -> Float[Tensor, "legs *batch m"]:
    """Return upper bounds of the sums of absolute values of every column: Σ|a_i| ≤ (n Σ a_i²)^½."""
    squares, _ = TORCH.row_products([leg.mT for leg in legs], [(k, k) for k in range(len(legs))], dtype)
    return (legs[0].shape[-2] * squares).sqrt()


def in_cache(like: Shaped[Tensor, "..."]) -> bool:
    """Return whether to cut work into slices that fit a cache (CPU) instead of few launches (GPU)."""
    return like.device.type == "cpu"


def _square(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices, dim=(-2, -1)).square()


def _size(pairs: Sequence[Pair]) -> int:
    return _CHUNK if len(pairs) == 1 else _SLICE


def _slices(legs: Sequence[Tensor], along: int, pairs: Sequence[Pair], dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """Yield the legs together, a slice at a time, in the working precision."""
    first = legs[0]
    length = first.shape[along]
    entries = _size(pairs) if in_cache(first) else _DEVICE_SLICE
    size = max(1, entries * length // max(first.numel(), 1))
    if size >= length:
        yield [leg.to(dtype) for leg in legs]
        return
    for start in range(0, length, size):
        yield [leg.narrow(along, start, min(size, length - start)).to(dtype) for leg in legs]


def _in_slices(legs: Sequence[Tensor], pairs: Sequence[Pair], dtype: torch.dtype, along: int) -> FormValues:
    """Return row products and their squares, slice by slice, without forming a whole product."""
    sums: list[list[Tensor]] = [[] for _ in pairs]
    squares: list[list[Tensor]] = [[] for _ in pairs]
    for piece in _slices(legs, along, pairs, dtype):
        for index, (i, j) in enumerate(pairs):
            product = piece[i] * piece[j]
            sums[index].append(product.sum(-1))
            squares[index].append(_square(product))
    joined = [torch.cat(part, -1) if along == -2 else torch.stack(part).sum(0) for part in sums]
    return stack(joined), stack([torch.stack(part).sum(0) for part in squares])


def _column_sums(
    legs: Sequence[Float[Tensor, "*batch m n"]], pairs: Sequence[Pair], dtype: torch.dtype
) -> list[Float[Tensor, "*batch n"]]:
    """Return Σ_k a_kj b_kj, accumulated entry by entry over slices of stored rows and summed at the end.

    Each thread keeps to its own rows of the accumulator until the end. Summing every product at once would make each
    read what another core has just written, which takes twice as long.
    """
    m, n = legs[0].shape[-2:]
    size = max(1, _size(pairs) * m // legs[0].numel())
    if len(pairs) == 1:
        size = max(_STRIPE, min(4 * _STRIPE, _CHUNK // n // _STRIPE * _STRIPE))
    totals: list[Tensor] = []
    for start in range(0, m, size):
        pieces = [leg.narrow(-2, start, min(size, m - start)).to(dtype) for leg in legs]
        if not totals:
            totals = [pieces[i] * pieces[j] for i, j in pairs]
            continue
        for total, (i, j) in zip(totals, pairs, strict=True):
            total[..., : pieces[i].shape[-2], :].addcmul_(pieces[i], pieces[j])
    if len(pairs) > 1 or totals[0].shape[-2] % _STRIPE:
        return [total.sum(-2) for total in totals]
    return [total.unflatten(-2, (-1, _STRIPE)).sum(-2).sum(-2) for total in totals]


def _device_grams(
    legs: Sequence[Float[Tensor, "*batch n m"]], pairs: Sequence[Pair], dtype: torch.dtype, *, across: bool
) -> list[Float[Tensor, "*batch n"]]:
    """Use as few launches as possible: where rows are contiguous, all pairs are one product."""
    if across:
        sums: list[Tensor] = []
        for piece in _slices(legs, -1, pairs, dtype):
            products = [(piece[i] * piece[j]).sum(-1) for i, j in pairs]
            sums = [total + product for total, product in zip(sums, products, strict=True)] if sums else products
        return sums
    parts = []
    for piece in _slices(legs, -2, pairs, dtype):
        stacked = torch.stack(piece, -2)
        parts.append(stacked @ stacked.mT)
    grams = parts[0] if len(parts) == 1 else torch.cat(parts, -3)
    return [grams[..., i, j] for i, j in pairs]


def _dots(
    legs: Sequence[Float[Tensor, "*batch 1 m"]], pairs: Sequence[Pair], dtype: torch.dtype
) -> Float[Tensor, " pairs *batch 1"]:
    """Return Σ_j a_j b_j, slice by slice."""
    totals: list[Tensor] = []
    for piece in _slices(legs, -1, pairs, dtype):
        products = [(piece[i] @ piece[j].mT)[..., 0] for i, j in pairs]
        totals = [total + product for total, product in zip(totals, products, strict=True)] if totals else products
    return stack(totals)
