"""Rotations of rows: the nearest one, and the one to principal axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def overlap(wanted: Sequence[Tensor], legs: Sequence[Tensor]) -> Float[Tensor, "n n"]:
    """Return inner products of every target row with every current row, summed over all legs."""
    return sum((a @ b.mT for a, b in zip(wanted, legs, strict=True)), torch.zeros(1, dtype=torch.float64))


def nearest_rotation(wanted: Sequence[Tensor], legs: Sequence[Tensor]) -> Float[Tensor, "n n"]:
    """Return the orthogonal matrix that brings legs nearest to those wanted (the Procrustes problem)."""
    u, _, v = torch.linalg.svd(overlap(wanted, legs))
    return u @ v


def principal_axes(legs: Sequence[Tensor], degrees: Sequence[int | float]) -> Float[Tensor, "n n"]:
    """Return the rotation that makes rows eigenvectors of their Gram matrix, largest first.

    Signs are fixed by positive sums of cubes, because plain sums may be zero, as behind a norm that centres.
    """
    n = legs[0].shape[0]
    gram = torch.zeros(n, n, dtype=torch.float64)
    for leg, degree in zip(legs, degrees, strict=True):
        if degree > 0:
            gram += leg @ leg.mT
    axes = torch.linalg.eigh(gram).eigenvectors.flip(1).mT
    return torch.where((axes @ legs[0]).pow(3).sum(1) < 0, -1.0, 1.0).double()[:, None] * axes
