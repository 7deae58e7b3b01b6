"""Shapes of sums and products with tangents that are zero, found without PyTorch's reference implementation in Python.

Forward-mode differentiation multiplies by a tangent that is zero wherever a dual number meets a constant, and asks the
kernel for tensors without data, in Python, what shape comes out. In counts of laws of tiny models that took two fifths
of the time. Plain tensors are answered here; all others (fake tensors, sizes that are symbols) go where they went.
"""

from __future__ import annotations

import warnings
from contextlib import suppress

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm

_REGISTERED: list[torch.library.Library] = []


def install() -> None:
    """For the rest of the process."""
    library = torch.library.Library("aten", "IMPL")
    # Torch 2.6 refuses a second kernel for an operator: the tests are then slower, and no others.
    with warnings.catch_warnings(), suppress(RuntimeError):
        warnings.simplefilter("ignore")
        library.impl("mul.Tensor", product, "Meta")
        library.impl("add.Tensor", total, "Meta")
    _REGISTERED.append(library)


def product(a: Tensor, b: Tensor) -> Tensor:
    """A tensor without data, with the shape and type of a · b."""
    return _like(a, b) if _plain(a) and _plain(b) else torch._refs.mul(a, b)


def total(a: Tensor, b: Tensor, *, alpha: float = 1) -> Tensor:
    """A tensor without data, with the shape and type of a + alpha · b."""
    return _like(a, b) if alpha == 1 and _plain(a) and _plain(b) else torch._refs.add(a, b, alpha=alpha)


def _plain(a: Tensor) -> bool:
    return type(a) is Tensor


def _like(a: Tensor, b: Tensor) -> Tensor:
    shape = a.shape if a.shape == b.shape else torch.broadcast_shapes(a.shape, b.shape)
    dtype = torch.result_type(a, b)
    if a.is_contiguous() and b.is_contiguous():
        return torch.empty(shape, dtype=dtype, device="meta")
    order, _ = compute_elementwise_output_logical_to_physical_perm(a.expand(shape), b.expand(shape))
    return torch.empty_permuted(shape, order, dtype=dtype, device="meta")
