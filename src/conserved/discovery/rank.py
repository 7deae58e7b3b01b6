"""The dimension of the Lie closure at a generic point: fields and brackets are added until they bring nothing new.

What counts as a direction is the rule of `span`. A gap below 1e3, ranks that differ between two random points, or a
smallest kept value within 1e3 of the rounding of the whole program (a cast to float32 inside it) leave the count
INCONCLUSIVE. Entries of very different sizes are brought to one size first (`sizes`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.discovery.fields import derivative_error, draw_words, gradient_rows, vectors
from conserved.discovery.function import ParameterFunction
from conserved.discovery.inputs import UnsuitableError
from conserved.discovery.sizes import Sizes, sizes_of
from conserved.discovery.span import Span

LEAST_GAP = 1e3
"""Kept and dropped singular values closer than this decide nothing."""

DEEPEST = 5
"""Brackets are nested at most this deep unless a depth is given."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Closure:
    """The result at one point: the rank after each level of brackets, and how clear it is."""

    theta: Float[Tensor, " D"]
    ranks: tuple[int, ...]
    gap: float
    converged: bool
    derivative_error: float
    smallest_kept: float
    """The smallest singular value that counted as a direction."""
    sizes: Sizes
    span: Span

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
    converged = False
    for level in range((DEEPEST if depth is None else depth) + 1):
        _exhaust(function, span, theta, level, generator, sizes.scale, lambda text: progress(f"{point}{text}"))
        ranks.append(span.rank)
        progress(f"{point}brackets of depth {level}: rank {span.rank} of {function.size}")
        converged = span.rank == function.size or (level > 0 and ranks[-1] == ranks[-2])
        if converged and depth is None:
            break
    error = derivative_error(function, theta, min(len(ranks) - 1, ranks.index(span.rank) + 1), generator)
    return Closure(
        theta=theta,
        ranks=tuple(ranks),
        gap=span.gap,
        converged=converged or depth is not None,
        derivative_error=error,
        smallest_kept=span.smallest_kept,
        sizes=sizes,
        span=span,
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
    announced = time.monotonic()
    while span.rank < function.size:
        if time.monotonic() - announced > _SILENCE:
            announced = time.monotonic()
            progress(f"depth {level}, rank {span.rank} so far")
        count = min(block, function.size - span.rank + 16)
        words = draw_words(function, theta, level, count, generator)
        if span.add(vectors(function, theta, level, words, count, scale)) == 0:
            return


def block_size(size: int, device: torch.device, level: int) -> int:
    """Return how many vectors make a block: enough for fast matrix products, few enough to stop soon after the last
    direction.
    """
    largest = 512 if device.type == "cpu" else 4096
    wanted = max(32, size // 4) if level == 0 else max(32, size // 8)
    return min(largest, wanted)


def memory_needed(size: int, device: torch.device) -> int:
    """Return bytes for the directions of two points, which take half a square each, and for a few blocks of vectors."""
    return 8 * size * size + 4 * 8 * size * block_size(size, device, 0)


_LARGE = 2000
"""Parameters from which a count says beforehand how large it is."""

_PRODUCTS = 6
"""Products of square matrices of the size of the parameters that a count takes the time of; measured at 2,300 and 4,100
parameters, with brackets of depth 2 at two points."""


def announcement(size: int, device: torch.device) -> str:
    """Return how much memory and time a large count will take; nothing for a small one."""
    if size < _LARGE:
        return ""
    sample = torch.ones(512, 512, dtype=torch.float64, device=device)
    seconds = min(_elapsed(lambda: float((sample @ sample)[0, 0])) for _ in range(3))
    estimate = _PRODUCTS * seconds * (size / 512) ** 3
    duration = f"{estimate:,.0f} s" if estimate < 120 else f"{estimate / 60:,.0f} minutes"
    memory = f"{memory_needed(size, device) / 1e9:,.1f} GB"
    return f"counting the laws of {size:,} parameters: {memory} and about {duration} on {device}"


def _elapsed(work: Callable[[], float]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def refuse_too_large(size: int, device: torch.device) -> None:
    """Say how much memory a count would need before it fails for lack of it."""
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    else:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = memory_needed(size, device)
    if needed > available:
        raise UnsuitableError(
            f"Counting the laws of {size:,} parameters needs about {needed / 1e9:,.1f} GB for the directions it keeps; "
            f"{available / 1e9:,.1f} GB are free on {device}. Study a narrower model of the same architecture, "
            "freeze what is not of interest, or pass a device= with more memory."
        )
