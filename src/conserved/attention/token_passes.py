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
    """Maps that make leverages, ridge leverages if asked for, and column energies squared lengths, side by side."""
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
    """For every form the squared lengths of the centred keys under it; and the sum of the centred keys."""
    d = k.shape[-1]
    work = torch.float64 if k.dtype == torch.float64 else torch.float32
    weights = forms.to(work)
    total = mean.new_zeros(k.shape[:-2] + (d,))
    parts = []
    for rows in row_blocks(forms.new_empty(0).expand(*forms.shape[:-2], k.shape[-2], 0), forms.shape[-1]):
        centred = _centred(k[..., rows, :], mean, work)
        if mask is not None:
            centred = torch.where(mask[..., rows, None], centred, 0.0)
        total += _total(centred)
        product = (centred @ weights).unflatten(-1, (-1, d))
        parts.append(torch.linalg.vector_norm(product, dim=-1))
    lengths = torch.cat(parts, -2).double().square()
    return [x.contiguous() for x in lengths.unbind(-1)], total


def query_pass(
    q: Float[Tensor, "*heads n d"],
    form: Float[Tensor, "*heads d rows"],
    total: Float[Tensor, "*heads d"],
    mask: Bool[Tensor, "*heads n"] | None,
) -> tuple[Float[Tensor, "*heads n"], Float[Tensor, "*heads n"]]:
    """Row energies, as squared lengths under the form, and row sums."""
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    weights, ones = form.to(work), total[..., None].to(work)
    lengths, sums = [], []
    for rows in row_blocks(q, form.shape[-1]):
        block = q[..., rows, :].to(work)
        if mask is not None:
            block = torch.where(mask[..., rows, None], block, 0.0)
        lengths.append(torch.linalg.vector_norm(block @ weights, dim=-1))
        sums.append((block @ ones)[..., 0])
    return torch.cat(lengths, -1).double().square(), torch.cat(sums, -1).double()


def _centred(block: Tensor, mean: Tensor, work: torch.dtype) -> Tensor:
    """Keys minus their mean, as if subtracted in double precision, and then in that of the work."""
    if block.device.type == "cuda":
        return torch.sub(block, mean[..., None, :], out=torch.empty(block.shape, dtype=work, device=block.device))
    near = mean.to(work)
    # A processor converts slowly: a second subtraction keeps what the mean has beyond the working precision.
    rest = (mean - near.double()).to(work)
    return (block.to(work) - near[..., None, :]).sub_(rest[..., None, :])


def _total(x: Tensor) -> Tensor:
    """The sum of the rows in double precision, without a double copy of all of them."""
    if x.dtype == torch.float64:
        return x.sum(-2)
    whole = x.shape[-2] // _FEW * _FEW
    found = x[..., :whole, :].unflatten(-2, (-1, _FEW)).sum(-2).sum(-2, dtype=torch.float64)
    return found if whole == x.shape[-2] else found + x[..., whole:, :].sum(-2, dtype=torch.float64)
