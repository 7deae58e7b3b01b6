r"""The dimension of the Lie closure at a generic point, by a numerical rule that is stated and reported.

Vectors are added in blocks. What is left of a block after projecting the basis out has singular values that are of the
size of clear new directions, of faint ones, or of rounding:

    clear     above 1e-4 of the unit vectors that were added: a unit vector joins the orthonormal basis,
    faint     above 1e-13: kept at its own length, beside the basis,
    counted   clear, or faint and above 1e-10,
    gap       smallest counted over largest not counted.

A faint direction must not join the basis. A remainder of length 1e-9 is known to rounding, 1e-16, so the unit vector
made of it points wrong by 1e-7, and later vectors that have a large part along it would all leave a remainder of that
size, which looks like a new direction. At its own length it stays as accurate as it is, and when a later vector shows
the same direction clearly, that vector takes its place.

A gap below 1e3, ranks that differ between two random points, or a smallest kept value within 1e3 of the rounding of the
whole program (a cast to float32 inside it) leave the count INCONCLUSIVE. Entries of very different sizes are brought to
one size first (`sizes`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.discovery.fields import derivative_error, draw_words, gradient_rows, vectors
from conserved.discovery.function import ParameterFunction, Unsuitable
from conserved.discovery.sizes import Sizes, sizes_of

CUT = 1e-10
"""Singular values below this, relative to unit vectors, are rounding."""

CLEAR = 1e-4
"""Remainders above this become unit vectors of the basis: their direction is known to 1e-12."""

ROUNDING = 1e-13
"""Remainders below this are forgotten."""

_LARGEST_SVD = 512
"""Larger blocks are halved before their singular values are computed."""

LEAST_GAP = 1e3
"""Kept and dropped singular values closer than this decide nothing."""

DEEPEST = 5
"""Brackets are nested at most this deep unless a depth is given."""

Progress = Callable[[str], None]


@dataclass(slots=True)
class Span:
    """The span of all vectors added: a basis for its clear directions, faint ones beside it."""

    size: int
    device: torch.device
    _rows: Tensor = field(init=False)
    _clear: int = 0
    _faint: Tensor = field(init=False)
    """Orthogonal to the basis and to each other, each as long as its singular value."""
    _smallest_clear: float = float("inf")
    _largest_forgotten: float = 0.0

    def __post_init__(self) -> None:
        self._rows = torch.empty(0, self.size, dtype=torch.float64, device=self.device)
        self._faint = torch.empty(0, self.size, dtype=torch.float64, device=self.device)

    @property
    def basis(self) -> Float[Tensor, "clear D"]:
        """Orthonormal rows along the clear directions."""
        return self._rows[: self._clear]

    @property
    def rank(self) -> int:
        """Directions counted: all clear ones, and the faint ones above the cut."""
        return self._clear + sum(value > CUT for value in self._faint_values())

    @property
    def smallest_kept(self) -> float:
        """The smallest singular value that counts as a direction."""
        return min([value for value in self._faint_values() if value > CUT], default=self._smallest_clear)

    @property
    def gap(self) -> float:
        """Smallest counted over largest uncounted singular value."""
        faint = self._faint_values()
        counted = self.smallest_kept
        dropped = max([value for value in faint if value <= CUT], default=self._largest_forgotten)
        return counted / dropped if dropped > 0 else float("inf")

    def add(self, block: Float[Tensor, "count D"]) -> int:
        """Add the span of a block of vectors of at most unit length; returns how many new directions there were."""
        before = self.rank
        self._absorb(block)
        return max(self.rank - before, 0)

    def _faint_values(self) -> list[float]:
        return [float(value) for value in torch.linalg.vector_norm(self._faint, dim=1)]

    def _absorb(self, block: Tensor) -> None:
        left = self._project_out(self._project_out(block))
        size = float(torch.linalg.matrix_norm(left))
        if size < ROUNDING:
            self._largest_forgotten = max(self._largest_forgotten, size)
            return
        q, r = torch.linalg.qr(left.mT)
        square = r.shape[0] == r.shape[1]
        least = 1 / float(torch.linalg.matrix_norm(torch.linalg.inv_ex(r).inverse)) if square else 0.0
        if least > CLEAR:
            # ‖R⁻¹‖_F bounds the smallest singular value from below: every vector is clearly a new direction.
            self._smallest_clear = min(self._smallest_clear, least)
            self._append(q.mT if least > 1e-2 else self._orthonormal(q.mT))
            self._sort(self._project_out(self._faint))
        elif len(block) > _LARGEST_SVD:
            half = len(block) // 2
            self._absorb(block[:half])
            self._absorb(block[half:])
        else:
            self._sort(torch.cat((r.mT @ q.mT, self._faint)))

    def _sort(self, rows: Tensor) -> None:
        """Sort rows orthogonal to the basis into clear and faint directions; these replace the faint ones so far."""
        if not len(rows):
            return
        _, values, right = torch.linalg.svd(rows, full_matrices=False)
        clear, faint = int((values > CLEAR).sum()), int((values > ROUNDING).sum())
        self._faint = values[clear:faint, None] * right[clear:faint]
        if clear:
            self._smallest_clear = min(self._smallest_clear, float(values[clear - 1]))
            self._append(self._orthonormal(right[:clear]))
        if faint < len(values):
            self._largest_forgotten = max(self._largest_forgotten, float(values[faint]))

    def _orthonormal(self, fresh: Tensor) -> Tensor:
        """Unit vectors made from small remainders have kept a part along the basis; take it out before they join."""
        fresh = self._project_out(fresh)
        return fresh / torch.linalg.vector_norm(fresh, dim=1, keepdim=True)

    def _project_out(self, block: Tensor) -> Tensor:
        return block - (block @ self.basis.mT) @ self.basis

    def _append(self, rows: Tensor) -> None:
        needed = self._clear + len(rows)
        if needed > len(self._rows):
            room = min(self.size, max(needed, 2 * len(self._rows)))
            grown = torch.empty(room, self.size, dtype=torch.float64, device=self.device)
            grown[: self._clear] = self.basis
            self._rows = grown
        self._rows[self._clear : needed] = rows
        self._clear = needed


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


_SILENCE = 5.0
"""Seconds after which a level says how far it is."""


def closure(
    function: ParameterFunction, *, depth: int | None, generator: torch.Generator, progress: Progress, point: str = ""
) -> Closure:
    """Add fields, then brackets level by level, until a level brings nothing new."""
    theta = function.generic_point(generator)
    span = Span(function.size, function.device)
    # Random numbers of its own: what is counted does not depend on what is measured beside it.
    sizes = sizes_of(function, theta, partial(gradient_rows, function), torch.Generator().manual_seed(0))
    ranks: list[int] = []
    settled = False
    for level in range((DEEPEST if depth is None else depth) + 1):
        _exhaust(function, span, theta, level, generator, sizes.scale, lambda text: progress(f"{point}{text}"))
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
    function: ParameterFunction,
    span: Span,
    theta: Tensor,
    level: int,
    generator: torch.Generator,
    scale: Tensor | None,
    progress: Progress,
) -> None:
    """Add brackets of one level until a whole block of them brings nothing new; say every few seconds how far it is."""
    block = block_size(function.size, function.device, level)
    said = time.monotonic()
    while span.rank < function.size:
        if time.monotonic() - said > _SILENCE:
            said = time.monotonic()
            progress(f"depth {level}, rank {span.rank} so far")
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


_LARGE = 2000
"""Parameters from which a count says beforehand how large it is."""

_PRODUCTS = 25
"""Products of square matrices of the size of the parameters that a count takes the time of; measured at 1,000 to 2,300
parameters, with brackets of depth 2 at two points."""


def announcement(size: int, device: torch.device) -> str:
    """How much memory and time a large count will take; nothing for a small one."""
    if size < _LARGE:
        return ""
    sample = torch.ones(512, 512, dtype=torch.float64, device=device)
    seconds = min(_timed(lambda: float((sample @ sample)[0, 0])) for _ in range(3))
    estimate = _PRODUCTS * seconds * (size / 512) ** 3
    said = f"{estimate:,.0f} s" if estimate < 120 else f"{estimate / 60:,.0f} minutes"
    return f"counting the laws of {size:,} parameters: {memory_needed(size) / 1e9:,.1f} GB and about {said} on {device}"


def _timed(work: Callable[[], float]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


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
