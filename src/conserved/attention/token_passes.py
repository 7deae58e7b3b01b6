"""The second reading of keys and queries, when the d × d forms are known: energies, leverages and row sums.

A squared length ‖W x‖² keeps the accuracy of the working precision where the quadratic form xᵀ(WᵀW)x would square the
condition number of W. Coarse keys are centred before they are rounded, and then worked on in single precision.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from conserved.attention.coherence import KeySpace
from conserved.attention.moments import row_blocks

_FEW = 4
"""Rows that are added up in single precision before their sum is made double."""


def key_forms(space: KeySpace, a: Float[Tensor, "*heads rows d"] | None) -> Float[Tensor, "*heads d forms_d"]:
    """Return maps that make leverages, ridge leverages if asked for, and column energies squared lengths, side by
    side.
    """
    forms = [space.whitening]
    if space.ridge_whitening is not None:
        forms.append(space.ridge_whitening)
    if a is not None:
        forms.append(a.mT)
        forms = [form.expand(*a.shape[:-2], -1, -1) for form in forms]
    d = space.whitening.shape[-2]
    return torch.cat([torch.nn.functional.pad(form, (0, d - form.shape[-1])) for form in forms], -1)


def key_pass(
    k: Float[Tensor, "*kv_heads n d"],
    mean: Float[Tensor, "*kv_heads d"],
    forms: Float[Tensor, "*heads d forms_d"],
    mask: Bool[Tensor, "*kv_heads n"] | None,
) -> tuple[list[Tensor], Float[Tensor, "*kv_heads d"]]:
    """Return for every form the squared lengths of the centred keys under it; and the sum of the centred keys."""
    n, d = k.shape[-2:]
    work = _precision(k)
    weights = forms.to(work)
    total = mean.new_zeros((*k.shape[:-2], d))
    parts = []
    width = forms.shape[-1] * work.itemsize // 8
    for rows in row_blocks(forms.new_empty(0).expand(*forms.shape[:-2], n, 0), width):
        centred = _kept(_centred(k[..., rows, :], mean, work), mask, rows)
        total += _total(centred)
        # A length is read off a product in one pass, and squared in double precision.
        parts.append(torch.linalg.vector_norm((centred @ weights).unflatten(-1, (-1, d)), dim=-1))
    lengths = torch.cat(parts, -2).double().square()
    return [x.contiguous() for x in lengths.unbind(-1)], total


def row_energies(
    q: Float[Tensor, "*heads n d"], form: Float[Tensor, "*kv_heads d rows"], mask: Bool[Tensor, "*heads n"] | None
) -> Float[Tensor, "*heads n"]:
    """Return the squared lengths of the queries under a form."""
    work = _precision(q)
    weights = form.to(work)
    blocks = (_kept(q[..., rows, :].to(work), mask, rows) for rows in row_blocks(q, form.shape[-1]))
    lengths = [torch.linalg.vector_norm(block @ weights, dim=-1) for block in blocks]
    return torch.cat(lengths, -1).double().square()


def row_sums(
    q: Float[Tensor, "*heads n d"], total: Float[Tensor, "*kv_heads d"], mask: Bool[Tensor, "*heads n"] | None
) -> Float[Tensor, "*heads n"]:
    """Return the products of the queries with the sum of the centred keys."""
    work = _precision(q)
    column = total[..., None].to(work)
    blocks = (_kept(q[..., rows, :].to(work), mask, rows) for rows in row_blocks(q))
    return torch.cat([(block @ column)[..., 0] for block in blocks], -1).double()


def _precision(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _kept(block: Tensor, mask: Tensor | None, rows: slice) -> Tensor:
    return block if mask is None else torch.where(mask[..., rows, None], block, 0.0)


def _centred(block: Tensor, mean: Tensor, work: torch.dtype) -> Tensor:
    """Return keys minus their mean, as if subtracted in double precision, and then in that of the work."""
    return (centred_as_read if block.device.type == "cuda" else centred_twice)(block, mean[..., None, :], work)


def centred_as_read(block: Tensor, mean: Tensor, work: torch.dtype) -> Tensor:
    """Subtract the mean in one kernel that converts what it reads and writes: for a GPU."""
    return torch.sub(block, mean, out=torch.empty(block.shape, dtype=work, device=block.device))


def centred_twice(block: Tensor, mean: Tensor, work: torch.dtype) -> Tensor:
    """Subtract the mean twice, which keeps its digits beyond the working precision; converting is slow on a CPU."""
    near = mean.to(work)
    return (block.to(work) - near).sub_((mean - near.double()).to(work))


def _total(x: Tensor) -> Tensor:
    """Return the sum of the rows in double precision, without a double copy of all of them."""
    if x.dtype == torch.float64:
        return x.sum(-2)
    whole_chunks = x.shape[-2] // _FEW * _FEW
    total = x[..., :whole_chunks, :].unflatten(-2, (-1, _FEW)).sum(-2).sum(-2, dtype=torch.float64)
    return total if whole_chunks == x.shape[-2] else total + x[..., whole_chunks:, :].sum(-2, dtype=torch.float64)
