"""The moment map by its definition and by entry-wise loops: slow, obvious, and sharing no code with the library."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def general_linear(degrees: Sequence[float], a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    n = a[0].shape[0]
    mu = torch.zeros(n, n, dtype=a[0].dtype)
    for degree, left, right in zip(degrees, a, b, strict=True):
        for i in range(n):
            for j in range(n):
                entry = sum(left[i, k] * right[j, k] for k in range(left.shape[1]))
                if degree > 0:
                    mu[i, j] += entry
                else:
                    mu[j, i] -= entry
    return mu


def complex_scaling(degrees: Sequence[float], a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Trace and J-part of each pair's 2 × 2 block of the general linear moment map."""
    full = general_linear(degrees, a, b)
    pairs = full.shape[0] // 2
    mu = torch.zeros(pairs, 2, dtype=full.dtype)
    for j in range(pairs):
        block = full[2 * j : 2 * j + 2, 2 * j : 2 * j + 2]
        mu[j, 0] = block[0, 0] + block[1, 1]
        mu[j, 1] = block[0, 1] - block[1, 0]
    return mu


def scaling(degrees: Sequence[float], a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    n = a[0].shape[0]
    mu = torch.zeros(n, dtype=a[0].dtype)
    for degree, left, right in zip(degrees, a, b, strict=True):
        for i in range(n):
            mu[i] += degree * sum(left[i, k] * right[i, k] for k in range(left.shape[1]))
    return mu


def one_scale(degrees: Sequence[float], a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=a[0].dtype)
    for degree, left, right in zip(degrees, a, b, strict=True):
        total += degree * sum(x * y for x, y in zip(left.flatten(), right.flatten(), strict=True))
    return total


def translation(degrees: Sequence[float], a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    m = b[0].shape[1]
    mu = torch.zeros(m, dtype=b[0].dtype)
    for degree, right in zip(degrees, b, strict=True):
        for i in range(right.shape[0]):
            mu += degree * right[i]
    return mu


BY_CODE = {
    "general_linear": general_linear,
    "complex_scaling": complex_scaling,
    "scaling": scaling,
    "one_scale": one_scale,
    "translation": translation,
}
