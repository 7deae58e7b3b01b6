r"""Count, mean and a factor of the scatter of a set of vectors: all that sums over it need, however many there are.

For vectors x_1 … x_n the scatter is C = Σ (x_j − m)(x_j − m)ᵀ. It is kept as a factor F with FᵀF = C, so that singular
values are those of a d × d matrix. Two sets combine exactly (Chan, Golub and LeVeque, 1983):

    n = n₁ + n₂,   m = (n₁ m₁ + n₂ m₂) / n,   C = C₁ + C₂ + (n₁ n₂ / n)(m₁ − m₂)(m₁ − m₂)ᵀ,

which for factors reads: F is the triangular factor of F₁, F₂ and √(n₁ n₂ / n)(m₁ − m₂)ᵀ written below each other. So a
sequence may be cut into blocks, or over machines, anywhere.

Double-precision vectors are triangularised by QR, which does not square their condition number. For coarser ones the
scatter itself is summed in double precision, about their mean in single precision, s:

    t = Σ (x_j − s),   m = s + t/n,   C = Σ (x_j − s)(x_j − s)ᵀ − t tᵀ/n.

Since t/n is but the rounding of s, nothing cancels. The error, about 1e-16 ‖C‖, moves a singular value by at most 1e-8
of the largest, far below the rounding of the vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from conserved.attention.small_matrices import fetched, placed

BLOCK = 1 << 19
"""How many numbers a temporary may hold on a processor: 4 MiB in double precision, which caches hold."""

DEVICE_BLOCKS = 32
"""How many times as many on a GPU, where few large operations count: 128 MiB."""

DEVICE_BLOCKS_IN_ONE_PASS = 64
"""The same where tokens are gone through once, with few temporaries at a time."""

_CHUNK = 512
"""Rows whose products are summed by one product of matrices; a device takes many such at once."""


def block_rows(
    heads: int, width: int, device: torch.device, least: int = 64, device_blocks: int = DEVICE_BLOCKS
) -> int:
    """Return how many rows of all heads make up one block."""
    numbers = device_blocks * BLOCK if device.type == "cuda" else BLOCK
    return max(least, numbers // max(1, heads * width))


def row_blocks(x: Tensor, width: int | None = None) -> Iterator[slice]:
    """Yield slices of the second-last axis of `x` whose blocks fit a temporary."""
    length, size = x.shape[-2:]
    rows = block_rows(x.shape[:-2].numel(), max(size, width or 0), x.device, device_blocks=DEVICE_BLOCKS_IN_ONE_PASS)
    for start in range(0, length, rows):
        yield slice(start, min(start + rows, length))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenMoments:
    """Count, mean and scatter factor of vectors, one set per head, in double precision."""

    count: Float[Tensor, "*heads"]
    mean: Float[Tensor, "*heads d"]
    factor: Float[Tensor, "*heads rows d"]
    orthogonal: bool = False
    """Whether the rows of the factor are orthogonal and fall in length: its singular vectors, times their values."""

    @staticmethod
    def of(x: Float[Tensor, "*heads n d"], mask: Bool[Tensor, "*#heads n"] | None = None) -> TokenMoments:
        """Return the moments of vectors.

        Args:
            x: the vectors as rows, (…, n, d).
            mask: (…, n), False leaves a row out.

        Returns:
            Count, mean and scatter factor for each leading index, on the device of `x`.

        Raises:
            ValueError: a vector is not finite.
        """
        moments = token_moments(x, mask)()
        count, mean, factor = placed(x.device, moments.count, moments.mean, moments.factor)
        return TokenMoments(count=count, mean=mean, factor=factor, orthogonal=moments.orthogonal)

    def merge(self, other: TokenMoments) -> TokenMoments:
        """Return the moments of two sets of vectors together.

        Args:
            other: the moments of the other set, of the same heads and width.

        Returns:
            The moments of both, as if they had been computed at once.
        """
        count, mean, lift = _joined(self, other.count, other.mean)
        rows = torch.cat((self.factor, other.factor, lift[..., None, :]), -2)
        return TokenMoments(count=count, mean=mean, factor=torch.linalg.qr(rows, mode="r").R)

    def about_zero(self) -> Float[Tensor, "*heads rows d"]:
        """Return a factor of Σ x xᵀ instead of the scatter about the mean."""
        rows = torch.cat((self.factor, self.count.sqrt()[..., None, None] * self.mean[..., None, :]), -2)
        return torch.linalg.qr(rows, mode="r").R


def token_moments(x: Tensor, mask: Tensor | None, *, triangular: bool = False) -> Callable[[], TokenMoments]:
    """Queue the sums over tokens. Calling the result waits for them and factors them, few heads on the host.

    With `triangular` the factor may be any; that of coarse vectors then takes a tenth of the time.
    """
    exact = x.dtype == torch.float64
    count, mean, matrix = _triangularised(x, mask) if exact else _scatter(x, mask)
    d, rows = x.shape[-1], matrix.shape[-2]
    arrived = fetched(torch.cat((count[..., None], mean, matrix.flatten(-2)), -1), x.shape[:-2].numel())

    def moments() -> TokenMoments:
        packed = arrived()
        if not bool(torch.isfinite(packed).all()):
            raise ValueError(
                "Expected finite queries and keys, got NaN or infinite entries. Check the activations of the model."
            )
        count, mean, flat = packed[..., 0], packed[..., 1 : 1 + d], packed[..., 1 + d :]
        matrix = flat.unflatten(-1, (rows, d))
        if exact:
            return TokenMoments(count=count, mean=mean, factor=matrix)
        factor = _cholesky(matrix) if triangular else None
        if factor is not None:
            return TokenMoments(count=count, mean=mean, factor=factor)
        return TokenMoments(count=count, mean=mean, factor=_factor(matrix), orthogonal=True)

    return moments


def double_less(x: Tensor, shift: Tensor) -> Tensor:
    """Return x − shift in double precision: a GPU converts as it reads, a processor is faster if that is done first."""
    return torch.sub(x, shift) if x.device.type == "cuda" else x.to(torch.float64, copy=True).sub_(shift)


def gram(y: Float[Tensor, "*heads n d"]) -> Float[Tensor, "*heads d d"]:
    """Return Σ y yᵀ, as products of matrices that are short enough for a device to take many at once."""
    whole_chunks = y.shape[-2] // _CHUNK * _CHUNK
    if whole_chunks < 2 * _CHUNK:
        return y.mT @ y
    chunks = y[..., :whole_chunks, :].unflatten(-2, (-1, _CHUNK))
    scatter = (chunks.mT @ chunks).sum(-3)
    return scatter if whole_chunks == y.shape[-2] else scatter + y[..., whole_chunks:, :].mT @ y[..., whole_chunks:, :]


def _scatter(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and scatter of coarse vectors, in double precision."""
    heads, (n, d) = x.shape[:-2], x.shape[-2:]
    if mask is None:
        count = torch.full(heads, float(n), dtype=torch.float64, device=x.device)
        near = x.mean(-2, dtype=torch.float32)
    else:
        mask = mask.expand(x.shape[:-1])
        count = mask.sum(-1, dtype=torch.float64)
        blocks = (torch.where(mask[..., rows, None], x[..., rows, :], 0.0) for rows in row_blocks(x))
        near = torch.stack([block.sum(-2, dtype=torch.float32) for block in blocks]).sum(0)
        near = near / count.clamp(min=1)[..., None]
    # A sum beyond single precision is no reason to refuse vectors that are within it.
    shift = torch.where(torch.isfinite(near), near, 0.0).double()[..., None, :]
    total, scatter = shift.new_zeros(*heads, d), shift.new_zeros(*heads, d, d)
    for rows in row_blocks(x):
        block = double_less(x[..., rows, :], shift)
        if mask is not None:
            block = torch.where(mask[..., rows, None], block, 0.0)
        total += block.sum(-2)
        scatter += gram(block)
    rest = total / count.clamp(min=1)[..., None]
    return count, shift[..., 0, :] + rest, scatter - total[..., :, None] * rest[..., None, :]


def _triangularised(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and triangular factor of double-precision vectors."""
    heads, d = x.shape[:-2], x.shape[-1]
    zero = x.new_zeros(*heads, d)
    total = TokenMoments(count=zero.new_zeros(heads), mean=zero, factor=zero.new_zeros(*heads, 0, d))
    for rows in row_blocks(x):
        block = x[..., rows, :]
        weights = None if mask is None else mask[..., rows].expand(block.shape[:-1]).double()
        count, mean, centred = _centred(block, weights)
        total = total.merge(TokenMoments(count=count, mean=mean, factor=torch.linalg.qr(centred, mode="r").R))
    return total.count, total.mean, total.factor


def _centred(block: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and centred rows of a block; rows that are not kept become zero."""
    if weights is None:
        count = block.new_full(block.shape[:-2], float(block.shape[-2]))
        mean = block.mean(-2)
        return count, mean, block - mean[..., None, :]
    count = weights.sum(-1)
    block = torch.where(weights[..., None] > 0, block, 0.0)
    mean = block.sum(-2) / count.clamp(min=1)[..., None]
    return count, mean, (block - mean[..., None, :]) * weights[..., None]


def _joined(total: TokenMoments, count: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count and mean of two sets, and the vector whose outer product is what their scatters lack."""
    n = total.count + count
    share = count / n.clamp(min=1)
    gap = mean - total.mean
    return n, total.mean + share[..., None] * gap, (total.count * share).sqrt()[..., None] * gap


def _factor(scatter: Tensor) -> Tensor:
    """Return the factor whose rows are eigenvectors, the longest first."""
    values, vectors = torch.linalg.eigh(scatter)
    return (values.clamp(min=0).sqrt()[..., None, :] * vectors).flip(-1).mT


def _cholesky(scatter: Tensor) -> Tensor | None:
    """Return the triangular factor, if every head has one.

    Not asked for on a device, which would have to be waited for.
    """
    if scatter.device.type != "cpu":
        return None
    factor, failed = torch.linalg.cholesky_ex(scatter)
    return None if bool(failed.any()) else factor.mT
