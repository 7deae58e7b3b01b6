r"""What has to be kept of a set of vectors, however many there are: count, mean, and a factor of their scatter.

For vectors x_1 … x_n the scatter is C = Σ (x_j − m)(x_j − m)ᵀ. It is kept as a factor F with FᵀF = C, so that singular
values are those of a d × d matrix. Two sets combine exactly (Chan, Golub and LeVeque, 1983):

    n = n₁ + n₂,   m = (n₁ m₁ + n₂ m₂) / n,   C = C₁ + C₂ + (n₁ n₂ / n)(m₁ − m₂)(m₁ − m₂)ᵀ,

which for factors reads: F is the triangular factor of F₁, F₂ and √(n₁ n₂ / n)(m₁ − m₂)ᵀ written below each other. So a
sequence may be cut into blocks, or over machines, anywhere.

Double-precision vectors are triangularised by QR, which does not square their condition number. For coarser ones the
scatter itself is summed in double precision: its error, about 1e-16 ‖C‖, moves a singular value by at most 1e-8 of the
largest, far below the rounding of the vectors, and it is several times faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

BLOCK = 1 << 21
"""How many numbers a temporary may hold: 16 MiB in double precision."""


def block_rows(heads: int, width: int, least: int = 64) -> int:
    """How many rows of all heads make up one block."""
    return max(least, BLOCK // max(1, heads * width))


def row_blocks(x: Tensor, width: int | None = None) -> Iterator[slice]:
    """Slices of the second-last axis of `x` whose blocks fit a temporary."""
    length, size = x.shape[-2:]
    heads = x.shape[:-2].numel()
    rows = block_rows(heads, max(size, width or 0))
    for start in range(0, length, rows):
        yield slice(start, min(start + rows, length))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenMoments:
    """Count, mean and scatter factor of vectors, one set per head, in double precision."""

    count: Float[Tensor, "*heads"]
    mean: Float[Tensor, "*heads d"]
    factor: Float[Tensor, "*heads rows d"]

    @staticmethod
    def of(x: Float[Tensor, "*heads n d"], mask: Bool[Tensor, "*#heads n"] | None = None) -> TokenMoments:
        """The moments of the rows of `x`, or of those that `mask` keeps."""
        exact = x.dtype == torch.float64
        total = _nothing(x)
        scatter = total.factor.new_zeros(*x.shape[:-2], x.shape[-1], x.shape[-1])
        for rows in row_blocks(x):
            block = x[..., rows, :].double()
            kept = None if mask is None else mask[..., rows].expand(block.shape[:-1]).double()
            count, mean, centred = _centred(block, kept)
            if exact:
                part = TokenMoments(count=count, mean=mean, factor=torch.linalg.qr(centred, mode="r").R)
                total = total.merge(part)
            else:
                n, middle, lift = _joined(total, count, mean)
                scatter = scatter + centred.mT @ centred + lift[..., :, None] * lift[..., None, :]
                total = TokenMoments(count=n, mean=middle, factor=total.factor)
        if not bool(torch.isfinite(total.mean).all()) or not bool(torch.isfinite(scatter).all()):
            raise ValueError("Queries and keys must be finite; some are NaN or infinite.")
        return total if exact else TokenMoments(count=total.count, mean=total.mean, factor=_factor(scatter))

    def merge(self, other: TokenMoments) -> TokenMoments:
        """The moments of both sets together."""
        count, mean, lift = _joined(self, other.count, other.mean)
        rows = torch.cat((self.factor, other.factor, lift[..., None, :]), -2)
        return TokenMoments(count=count, mean=mean, factor=torch.linalg.qr(rows, mode="r").R)

    def about_zero(self) -> Float[Tensor, "*heads rows d"]:
        """A factor of Σ x xᵀ instead of the scatter about the mean."""
        rows = torch.cat((self.factor, self.count.sqrt()[..., None, None] * self.mean[..., None, :]), -2)
        return torch.linalg.qr(rows, mode="r").R


def _nothing(x: Tensor) -> TokenMoments:
    heads, d = x.shape[:-2], x.shape[-1]
    zero = torch.zeros(*heads, d, dtype=torch.float64, device=x.device)
    return TokenMoments(count=zero.new_zeros(heads), mean=zero, factor=zero.new_zeros(*heads, 0, d))


def _centred(block: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and centred rows of a block; rows that are not kept become zero."""
    if kept is None:
        count = block.new_full(block.shape[:-2], float(block.shape[-2]))
        mean = block.mean(-2)
        return count, mean, block - mean[..., None, :]
    count = kept.sum(-1)
    block = torch.where(kept[..., None] > 0, block, 0.0)
    mean = block.sum(-2) / count.clamp(min=1)[..., None]
    return count, mean, (block - mean[..., None, :]) * kept[..., None]


def _joined(total: TokenMoments, count: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count and mean of two sets, and the vector whose outer product is what their scatters lack."""
    n = total.count + count
    share = count / n.clamp(min=1)
    gap = mean - total.mean
    return n, total.mean + share[..., None] * gap, (total.count * share).sqrt()[..., None] * gap


def _factor(scatter: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(scatter)
    return values.clamp(min=0).sqrt()[..., :, None] * vectors.mT
