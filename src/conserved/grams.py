"""Sums of products over rows, columns and whole legs, for several pairs of tensors in one pass over memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved import fused
from conserved.sheaf import Legs, Sheaf

_CHUNK = 1 << 19
"""Entries per temporary in a row-wise dot product: two megabytes of float32, so that it stays in cache."""

_SLICE = 1 << 17
"""Entries of a tensor that are read at a time where several are paired: half a megabyte of float32 each."""

_DEVICE_SLICE = 1 << 22
"""The same on other devices, where only the memory for temporaries is at stake."""

_STRIPE = 64
"""Stored rows that are summed in one go; a multiple of them is accumulated at a time."""


def row_dots(a: Float[Tensor, "*batch n m"], b: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch n"]:
    """Σ_j a_ij b_ij for every row i. On CPUs, in slices that follow memory order, so no full-size product is formed."""
    count = -(-b.numel() // _CHUNK)
    if count <= 1 or b.device.type != "cpu" or a.shape != b.shape:
        return (a * b).sum(-1)
    if b.stride(-2) < b.stride(-1):
        return _column_dots(a.mT, b.mT)
    size = max(1, b.shape[-2] // count)
    return torch.cat([(x * y).sum(-1) for x, y in zip(a.split(size, -2), b.split(size, -2), strict=True)], -1)


def _column_dots(a: Float[Tensor, "*batch m n"], b: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch n"]:
    """Σ_k a_kj b_kj, accumulated over stripes of stored rows.

    Each thread keeps to its own rows of the accumulator until the end. Summing every product at once would make each
    read what another core has just written, which takes twice as long.
    """
    size = max(_STRIPE, min(4 * _STRIPE, _CHUNK // a.shape[-1] // _STRIPE * _STRIPE))
    total = a[..., :size, :] * b[..., :size, :]
    for start in range(size, a.shape[-2], size):
        x, y = a[..., start : start + size, :], b[..., start : start + size, :]
        total[..., : x.shape[-2], :].addcmul_(x, y)
    if total.shape[-2] % _STRIPE:
        return total.sum(-2)
    return total.unflatten(-2, (-1, _STRIPE)).sum(-2).sum(-2)


def row_dots_and_spread(a: Legs, b: Legs) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch"]]:
    """Σ_j a_ij b_ij for every row i, and Σ_ij (a_ij b_ij)², from one product that on CPUs is never formed whole."""
    if isinstance(a, Sheaf) or isinstance(b, Sheaf):
        return fused.row_sums_and_spread(a, b)
    count = -(-b.numel() // _CHUNK)
    if count <= 1 or b.device.type != "cpu" or a.shape != b.shape:
        product = a * b
        return product.sum(-1), torch.linalg.vector_norm(product, dim=(-2, -1)).square()
    axis = -1 if b.stride(-2) < b.stride(-1) else -2
    size = max(1, b.shape[axis] // count)
    dots: list[Tensor] = []
    squares: list[Tensor] = []
    for x, y in zip(a.split(size, axis), b.split(size, axis), strict=True):
        product = x * y
        dots.append(product.sum(-1))
        squares.append(torch.linalg.vector_norm(product, dim=(-2, -1)).square())
    return torch.cat(dots, -1) if axis == -2 else torch.stack(dots).sum(0), torch.stack(squares).sum(0)


def outer_and_spread(a: Legs, b: Legs) -> tuple[Float[Tensor, "*batch n n"], Float[Tensor, "*batch"]]:
    """A Bᵀ, and Σ_ijk (a_ik b_jk)² = Σ_k ‖a_:k‖² ‖b_:k‖²."""
    if isinstance(a, Sheaf) or isinstance(b, Sheaf):
        return fused.outer_products_and_spread(a, b)
    columns = torch.linalg.vector_norm(a, dim=-2) * torch.linalg.vector_norm(b, dim=-2)
    return a @ b.mT, columns.square().sum(-1)


def halves(a: Legs) -> tuple[Legs, Legs]:
    """The even rows and the odd rows: real and imaginary parts."""
    if isinstance(a, Sheaf):
        return a.halves()
    pairs = a.unflatten(-2, (-1, 2))
    return pairs[..., 0, :], pairs[..., 1, :]


def in_cache(like: Shaped[Tensor, "..."]) -> bool:
    """Whether work is best cut into slices that fit a cache (processors) or into few launches (other devices)."""
    return like.device.type == "cpu"


def outer_products(
    sources: Sequence[Legs], pairs: Sequence[tuple[int, int]], dtype: torch.dtype
) -> Float[Tensor, "pairs *batch n n"]:
    """A Bᵀ for every listed pair (a, b) of the sources."""
    tensors = _tensors(sources)
    if tensors is None:
        return _in_sheaves(fused.outer_products, sources, pairs)
    cast = [source.to(dtype) for source in tensors]
    if in_cache(cast[0]):
        return torch.stack([cast[i] @ cast[j].mT for i, j in pairs])
    stacked, n = torch.cat(cast, -2), cast[0].shape[-2]
    gram = stacked @ stacked.mT
    return torch.stack([gram[..., i * n : (i + 1) * n, j * n : (j + 1) * n] for i, j in pairs])


def row_grams(
    sources: Sequence[Legs], pairs: Sequence[tuple[int, int]], dtype: torch.dtype
) -> Float[Tensor, "pairs *batch n"]:
    """Σ_j a_ij b_ij for every row i and every listed pair (a, b) of the sources, in one pass over them.

    The sources are read in slices that follow memory order and stay in cache, so that a slice that several pairs need
    is fetched once, and no full-size product or conversion is formed.
    """
    tensors = _tensors(sources)
    if tensors is None:
        return _in_sheaves(fused.row_sums, sources, pairs)
    first = tensors[0]
    if first.numel() <= _SLICE and in_cache(first):
        small = [source.to(dtype) for source in tensors]
        return torch.stack([(small[i] * small[j]).sum(-1) for i, j in pairs])
    across = first.stride(-2) < first.stride(-1)
    if not in_cache(first):
        return torch.stack(_device_grams(tensors, pairs, dtype, across=across))
    if across:
        return torch.stack(_column_grams([source.mT for source in tensors], pairs, dtype))
    found: list[list[Tensor]] = [[] for _ in pairs]
    product: Tensor | None = None
    for here in _slices(tensors, -2, dtype):
        if product is None or product.shape != here[0].shape:
            product = torch.empty_like(here[0], memory_format=torch.contiguous_format)
        for parts, (i, j) in zip(found, pairs, strict=True):
            parts.append(torch.mul(here[i], here[j], out=product).sum(-1))
    return torch.stack([torch.cat(parts, -1) for parts in found])


def _column_grams(
    sources: Sequence[Float[Tensor, "*batch m n"]], pairs: Sequence[tuple[int, int]], dtype: torch.dtype
) -> list[Float[Tensor, "*batch n"]]:
    """Σ_k a_kj b_kj, accumulated entry by entry over slices of stored rows and summed at the end."""
    totals: list[Tensor] = []
    for here in _slices(sources, -2, dtype):
        if totals:
            for total, (i, j) in zip(totals, pairs, strict=True):
                total[..., : here[i].shape[-2], :].addcmul_(here[i], here[j])
        else:
            totals = [here[i] * here[j] for i, j in pairs]
    return [total.sum(-2) for total in totals]


def _device_grams(
    sources: Sequence[Float[Tensor, "*batch n m"]],
    pairs: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    *,
    across: bool,
) -> list[Float[Tensor, "*batch n"]]:
    """As few launches as there can be: where rows lie in memory one after the other, all pairs are one product."""
    if across:
        sums: list[Tensor] = []
        for here in _slices(sources, -1, dtype):
            found = [(here[i] * here[j]).sum(-1) for i, j in pairs]
            sums = [total + one for total, one in zip(sums, found, strict=True)] if sums else found
        return sums
    parts = []
    for here in _slices(sources, -2, dtype):
        stacked = torch.stack(here, -2)
        parts.append(stacked @ stacked.mT)
    grams = parts[0] if len(parts) == 1 else torch.cat(parts, -3)
    return [grams[..., i, j] for i, j in pairs]


def dots(
    sources: Sequence[Legs], pairs: Sequence[tuple[int, int]], dtype: torch.dtype
) -> Float[Tensor, " pairs *batch"]:
    """Σ_ij a_ij b_ij for every listed pair of the sources, slice by slice in memory order."""
    tensors = _tensors(sources)
    if tensors is None:
        return _in_sheaves(fused.row_sums, sources, pairs).sum(-1)
    turned = tensors[0].stride(-2) < tensors[0].stride(-1)
    flat = [(one.mT if turned else one).flatten(-2) for one in tensors]
    totals: list[Tensor] = []
    for here in _slices(flat, -1, dtype):
        found = [(here[i].unsqueeze(-2) @ here[j].unsqueeze(-1))[..., 0, 0] for i, j in pairs]
        totals = [total + one for total, one in zip(totals, found, strict=True)] if totals else found
    return torch.stack(totals)


def _slices(sources: Sequence[Tensor], along: int, dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """The sources together, a slice at a time, in the working precision."""
    first = sources[0]
    length = first.shape[along]
    entries = _SLICE if in_cache(first) else _DEVICE_SLICE
    size = max(1, entries * length // max(first.numel(), 1))
    for start in range(0, length, size):
        yield [source.narrow(along, start, min(size, length - start)).to(dtype) for source in sources]


def _in_sheaves(
    product: Callable[[Sheaf, Sheaf], Tensor], sources: Sequence[Legs], pairs: Sequence[tuple[int, int]]
) -> Float[Tensor, "pairs entries ..."]:
    """The product of every listed pair of sheaves, in one launch for all pairs of the same types."""
    sheaves = [source for source in sources if isinstance(source, Sheaf)]
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for number, pair in enumerate(pairs):
        alike[tuple((sheaves[i].dtype, sheaves[i].layout, sheaves[i].shift) for i in pair)].append(number)
    found: dict[int, Tensor] = {}
    for numbers in alike.values():
        # Entry by entry, so that what pairs have in common is still in the cache.
        a, b = (
            replace(sheaves[side[0]], tensors=tuple(chain(*zip(*(sheaves[i].tensors for i in side), strict=True))))
            for side in zip(*(pairs[number] for number in numbers), strict=True)
        )
        values = product(a, b).unflatten(0, (-1, len(numbers))).transpose(0, 1)
        if len(alike) == 1:
            return values
        found |= zip(numbers, values.unbind(), strict=True)
    # Stacked and not indexed: an index would have to be sent to the device, and the host would wait for that.
    return torch.stack([found[number] for number in range(len(pairs))])


def _tensors(sources: Sequence[Legs]) -> list[Tensor] | None:
    """The sources as tensors; None if they are sheaves, which kernels of their own read."""
    found = [source for source in sources if isinstance(source, Tensor)]
    return found if len(found) == len(sources) else None
