r"""Sums of products and of their squares over beginnings or ends of a sequence, in time linear in its length.

Row i of x is paired with the y_j, j < e_i = i + offset. For Σ_j (x_i·y_j)² over j < e the prefix sum is of the matrices
y_j y_jᵀ: with S_c = Σ_{j < cB} y_j y_jᵀ at every B-th place and e = cB + s,

    Σ_{j<e} (x·y_j)² = xᵀ S_c x + Σ_{cB ≤ j < e} (x·y_j)².

With B = d both terms cost d² per row and the S_c take no more memory than the vectors: O(L d²) time. Memory is that of
one segment, since the sequence is taken a segment at a time. Ends of the sequence, j ≥ e_i, are taken from its last
segment to its first, so that nothing is subtracted. A window is a difference of two beginnings and carries, for a width
of w, L/w times the rounding of the sum itself (with a bias that is linear in the distance, (L/w)³ times): nothing to
speak of in double precision.

A running sum over chunks is a product with a triangle of ones, within groups and then over the groups: a device sums
along a long axis of few columns one number after the other.

One more entry of every vector, x_i·y_j + α_i β_j, is kept apart: the width of the matrices stays a power of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from conserved.attention.moments import block_rows, double_less, gram

_GROUP = 32
"""Chunks whose running sums are taken by one product; up to twice as many are not split into groups."""


_SHORT = 32
"""Rows of a chunk where sums are of vectors, not of matrices."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Vectors of some heads as they are stored. They are converted to double precision and centered block by block.

    Row i is (values_i − shift, last_i), or zero where it is not kept.
    """

    values: Float[Tensor, "heads n d"]
    shift: Float[Tensor, "heads d"] | None = None
    kept: Bool[Tensor, "heads n"] | None = None
    last: Float[Tensor, "heads n"] | None = None

    def block(self, start: int, stop: int) -> Float[Tensor, "heads rows d"]:
        """Return some of the vectors in double precision, without their last entry."""
        rows = self.values[:, start:stop]
        rows = rows.double() if self.shift is None else double_less(rows, self.shift[:, None])
        return rows if self.kept is None else torch.where(self.kept[:, start:stop, None], rows, 0.0)

    def norm(self) -> Float[Tensor, "*heads"]:
        """Return the size of all vectors together, without their last entries."""
        heads, n, d = self.values.shape
        rows = block_rows(heads, d, self.values.device)
        blocks = (self.block(at, min(at + rows, n)) for at in range(0, n, rows))
        return torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(block, dim=(-2, -1)) for block in blocks]), dim=0
        )

    def joined(self) -> Float[Tensor, "heads n d1"]:
        """Return all vectors with their last entries."""
        rows = self.block(0, self.values.shape[-2])
        return rows if self.last is None else torch.cat((rows, self.last[..., None]), -1)

    def ends(self, start: int, stop: int) -> Tensor | None:
        """Return their last entries."""
        return None if self.last is None else self.last[:, start:stop]


def prefix_squares(
    x: Rows | Tensor, y: Rows | Tensor, offset: int | None, *, after: bool = False
) -> Float[Tensor, "heads rows"]:
    """Return for every row i of x the sum of (x_i·y_j)² over j < i + offset, or over j ≥ i + offset.

    All rows of y count if `offset` is None.
    """
    return _scan(_rows(x), _rows(y), offset, after, square=True)


def prefix_dots(
    x: Rows | Tensor, y: Rows | Tensor, offset: int | None, *, after: bool = False
) -> Float[Tensor, "heads rows"]:
    """Return the same for the sum of x_i·y_j, without their last entries."""
    return _scan(_rows(x), _rows(y), offset, after, square=False)


def _rows(x: Rows | Tensor) -> Rows:
    return x if isinstance(x, Rows) else Rows(values=x)


def _scan(x: Rows, y: Rows, offset: int | None, after: bool, *, square: bool) -> Tensor:
    heads, rows, d = x.values.shape
    n = y.values.shape[-2]
    # The last key that row i is paired with (the first, if `after`) is i + base; it exists from row `first` to `past`.
    base = n if offset is None else offset if after else offset - 1
    first = min(max(-base, 0), rows)
    past = max(first, min(rows, n - base))
    result = torch.zeros(heads, rows, dtype=torch.float64, device=x.values.device)
    begin, end = (first + base, past + base) if past > first else (n, n)
    carry = _sums_over(y, end, n, square) if after and past > first else _sums_over(y, 0, begin, square)
    pieces = list(_pieces(past - first, max(d, 16) if square else _SHORT, heads, d, result.device))
    for at, chunks, size in reversed(pieces) if after else pieces:
        span = (first + at, first + at + chunks * size)
        left, right = _chunked(x, *span, chunks), _chunked(y, span[0] + base, span[1] + base, chunks)
        before, carry = _running(_sums(*right, square), carry, after)
        part = _far(*left, before) + _near(*left, *right, after, square)
        result[:, span[0] : span[1]] = part.flatten(1)
    _fill(result, x, (0, first) if after else (past, rows), carry)
    return result


def _pieces(rows: int, chunk: int, heads: int, d: int, device: torch.device) -> Iterator[tuple[int, int, int]]:
    """Yield where a segment begins, its chunks, and the rows of each; what fills no chunk comes last."""
    most = max(1, block_rows(heads, max(d, chunk), device) // chunk)
    done, chunks = 0, rows // chunk
    while done < chunks:
        remaining = min(most, chunks - done)
        some = remaining if remaining <= 2 * _GROUP else remaining // _GROUP * _GROUP
        yield done * chunk, some, chunk
        done += some
    if rows > done * chunk:
        yield done * chunk, 1, rows - done * chunk


def _chunked(x: Rows, start: int, stop: int, chunks: int) -> tuple[Tensor, Tensor | None]:
    """Return vectors and their last entries, an axis for the chunks."""
    size = (stop - start) // chunks
    last = x.ends(start, stop)
    return x.block(start, stop).unflatten(1, (chunks, size)), None if last is None else last.unflatten(
        1, (chunks, size)
    )


def _sums(y: Tensor, last: Tensor | None, square: bool) -> list[Tensor]:
    """Return over the second-last axis: Σ y, or Σ y yᵀ and, with last entries β, Σ β y and Σ β²."""
    if not square:
        return [y.sum(-2)]
    if last is None:
        return [gram(y)]
    return [gram(y), (y.mT @ last[..., None])[..., 0], last.square().sum(-1)]


def _sums_over(y: Rows, start: int, stop: int, square: bool) -> list[Tensor]:
    """Return the same for a segment of any length."""
    heads, _, d = y.values.shape
    rows = block_rows(heads, d, y.values.device)
    total = _sums(y.block(start, start), y.ends(start, start), square)
    for at in range(start, stop, rows):
        end = min(at + rows, stop)
        part = _sums(y.block(at, end), y.ends(at, end), square)
        total = [first + other for first, other in zip(total, part, strict=True)]
    return total


def _fill(result: Tensor, x: Rows, edge: tuple[int, int], sums: list[Tensor]) -> None:
    """Fill rows that are paired with the complete sequence."""
    heads, _, d = x.values.shape
    rows = block_rows(heads, d, result.device)
    for at in range(*edge, rows):
        end = min(at + rows, edge[1])
        result[:, at:end] = _far(x.block(at, end), x.ends(at, end), sums)


def _far(x: Tensor, last: Tensor | None, sums: list[Tensor]) -> Tensor:
    """Return what chunks that are paired with all rows of x contribute."""
    if sums[0].ndim < x.ndim:
        return (x @ sums[0][..., None])[..., 0]
    result = (x @ sums[0]).mul_(x).sum(-1)
    if last is None:
        return result
    return result + last * (2 * (x @ sums[1][..., None])[..., 0] + last * sums[2][..., None])


def _near(x: Tensor, x_last: Tensor | None, y: Tensor, y_last: Tensor | None, after: bool, square: bool) -> Tensor:
    """Return what the chunk of a row contributes: keys up to the row's own, or from its own on."""
    products = x @ y.mT
    if square and x_last is not None and y_last is not None:
        products.addcmul_(x_last[..., None], y_last[..., None, :])
    products = products.triu_() if after else products.tril_()
    return torch.linalg.vector_norm(products, dim=-1).square() if square else products.sum(-1)


def _running(sums: list[Tensor], carry: list[Tensor], after: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return for every chunk the sums over chunks before (or after) it and the carry, and those over all of them."""
    chunks = sums[0].shape[1]
    size = chunks if chunks <= 2 * _GROUP else _GROUP
    inner, outer = (_triangle(n, after, sums[0]) for n in (size, chunks // size))
    running, totals = [], []
    for own, base in zip(sums, carry, strict=True):
        groups = own.reshape(len(own), -1, size, base[0].numel())
        within = groups.sum(2)
        start = base.reshape(len(own), 1, -1)
        ahead = (outer @ within + start)[:, :, None]
        running.append((inner @ groups).add_(ahead).reshape(own.shape))
        totals.append((start[:, 0] + within.sum(1)).reshape(base.shape))
    return running, totals


def _triangle(n: int, after: bool, like: Tensor) -> Tensor:
    """Return ones that sum what comes before, or after."""
    ones = like.new_ones(n, n)
    return ones.triu(1) if after else ones.tril(-1)
