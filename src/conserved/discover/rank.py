r"""The dimension of the Lie closure at a generic point, by a numerical rule that is stated and reported.

Vectors are added in blocks to an orthonormal basis. What is left of a block after projecting the basis out has
singular values that are either of the size of genuine new directions or of rounding:

    kept      above 1e-10 of the unit vectors that were added,
    dropped   below it,
    gap       smallest kept over largest dropped.

A gap below 1e3, ranks that differ between two random points, or a smallest kept value within 1e3 of the rounding of the
whole program (a cast to float32 inside it) leave the count INCONCLUSIVE. Entries of very different sizes are brought to
one size first (`sizes`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.discover.fields import derivative_error, draw_words, gradient_rows, vectors
from conserved.discover.function import Function, Unsuitable
from conserved.discover.sizes import Sizes, sizes_of

CUT = 1e-10
"""Singular values below this, relative to unit vectors, are rounding."""

CLEAR = 1e-7
"""A block whose smallest singular value is surely above this needs no closer look."""

_LARGEST_SVD = 512
"""Larger blocks are halved before their singular values are computed."""

LEAST_GAP = 1e3
"""Kept and dropped singular values closer than this decide nothing."""

DEEPEST = 5
"""Brackets are nested at most this deep unless a depth is given."""

Progress = Callable[[str], None]


@dataclass(slots=True)
class Span:
    """An orthonormal basis that grows, and the singular values that decided about it."""

    size: int
    device: torch.device
    smallest_kept: float = float("inf")
    largest_dropped: float = 0.0
    _rows: Tensor = field(init=False)
    rank: int = 0

    def __post_init__(self) -> None:
        self._rows = torch.empty(0, self.size, dtype=torch.float64, device=self.device)

    @property
    def basis(self) -> Float[Tensor, "rank D"]:
        """Orthonormal rows."""
        return self._rows[: self.rank]

    @property
    def gap(self) -> float:
        """Smallest kept over largest dropped singular value."""
        return self.smallest_kept / self.largest_dropped if self.largest_dropped > 0 else float("inf")

    def add(self, block: Float[Tensor, "count D"]) -> int:
        """Add the span of a block of vectors of at most unit length; returns how many new directions there were."""
        left = self._project_out(self._project_out(block))
        size = float(torch.linalg.matrix_norm(left))
        if size < CUT:
            self.largest_dropped = max(self.largest_dropped, size)
            return 0
        q, r = torch.linalg.qr(left.mT)
        square = r.shape[0] == r.shape[1]
        least = 1 / float(torch.linalg.matrix_norm(torch.linalg.inv_ex(r).inverse)) if square else 0.0
        if least > CLEAR:
            # ‖R⁻¹‖_F bounds the smallest singular value from below: every vector is clearly a new direction.
            self.smallest_kept = min(self.smallest_kept, least)
            self._append(q.mT if least > 1e-2 else self._orthonormal(q.mT))
            return len(block)
        if len(block) > _LARGEST_SVD:
            half = len(block) // 2
            return self.add(block[:half]) + self.add(block[half:])
        _, values, right = torch.linalg.svd(r.mT, full_matrices=False)
        kept = int((values > CUT).sum())
        if kept:
            self.smallest_kept = min(self.smallest_kept, float(values[kept - 1]))
            self._append(self._orthonormal(right[:kept] @ q.mT))
        if kept < len(values):
            self.largest_dropped = max(self.largest_dropped, float(values[kept]))
        return kept

    def _orthonormal(self, fresh: Tensor) -> Tensor:
        """Unit vectors made from small remainders have kept a part along the basis; take it out before they join."""
        fresh = self._project_out(fresh)
        return fresh / torch.linalg.vector_norm(fresh, dim=1, keepdim=True)

    def _project_out(self, block: Tensor) -> Tensor:
        return block - (block @ self.basis.mT) @ self.basis

    def _append(self, rows: Tensor) -> None:
        needed = self.rank + len(rows)
        if needed > len(self._rows):
            room = min(self.size, max(needed, 2 * len(self._rows)))
            grown = torch.empty(room, self.size, dtype=torch.float64, device=self.device)
            grown[: self.rank] = self.basis
            self._rows = grown
        self._rows[self.rank : needed] = rows
        self.rank = needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Closure:
    """What was found at one point: the rank after each level of brackets, and how clearly."""

    theta: Float[Tensor, " D"]
    ranks: tuple[int, ...]
    gap: float
    settled: bool
    derivative_error: float
    smallest_kept: float
    """The smallest singular value that counted as a direction."""
    sizes: Sizes
    basis: Float[Tensor, "rank D"]

    @property
    def rank(self) -> int:
        return self.ranks[-1]

    @property
    def depth(self) -> int:
        """The level at which the rank was reached."""
        return self.ranks.index(self.rank)


def closure(
    function: Function, *, depth: int | None, generator: torch.Generator, progress: Progress, point: str = ""
) -> Closure:
    """Add fields, then brackets level by level, until a level brings nothing new."""
    theta = function.generic_point(generator)
    span = Span(function.size, function.device)
    # Random numbers of its own: what is counted does not depend on what is measured beside it.
    sizes = sizes_of(function, theta, partial(gradient_rows, function), torch.Generator().manual_seed(0))
    ranks: list[int] = []
    settled = False
    for level in range((DEEPEST if depth is None else depth) + 1):
        _exhaust(function, span, theta, level, generator, sizes.scale)
        ranks.append(span.rank)
        progress(f"{point}brackets of depth {level}: rank {span.rank} of {function.size}")
        settled = span.rank == function.size or (level > 0 and ranks[-1] == ranks[-2])
        if settled and depth is None:
            break
    error = derivative_error(function, theta, min(len(ranks) - 1, ranks.index(span.rank) + 1), generator)
    return Closure(
        theta=theta,
        ranks=tuple(ranks),
        gap=span.gap,
        settled=settled or depth is not None,
        derivative_error=error,
        smallest_kept=span.smallest_kept,
        sizes=sizes,
        basis=span.basis,
    )


def _exhaust(
    function: Function, span: Span, theta: Tensor, level: int, generator: torch.Generator, scale: Tensor | None
) -> None:
    """Add brackets of one level until a whole block of them brings nothing new."""
    block = block_size(function.size, function.device, level)
    while span.rank < function.size:
        count = min(block, function.size - span.rank + 16)
        words = draw_words(function, theta, level, count, generator)
        if span.add(vectors(function, theta, level, words, count, scale)) == 0:
            return


def block_size(size: int, device: torch.device, level: int) -> int:
    """Vectors per block: large enough for fast matrix products, small enough to stop soon after the last direction."""
    largest = 512 if device.type == "cpu" else 4096
    wanted = max(32, size // 4) if level == 0 else max(32, size // 8)
    return min(largest, wanted)


def memory_needed(size: int) -> int:
    """Bytes for the basis and one block of vectors."""
    return 8 * size * size + 3 * 8 * size * 512


def refuse_too_large(size: int, device: torch.device) -> None:
    """Say how much memory a count would need before it fails for lack of it."""
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    else:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = memory_needed(size)
    if needed > available:
        raise Unsuitable(
            f"Counting the laws of {size:,} parameters needs about {needed / 1e9:,.1f} GB for an orthonormal basis; "
            f"{available / 1e9:,.1f} GB are free on {device}. Study a narrower model of the same architecture, "
            "freeze what is not of interest, or pass a device= with more memory."
        )
