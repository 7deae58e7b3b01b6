r"""Gradient fields of a function and their nested Lie brackets, for many samples at once.

For an input x and an output direction v the gradient flow of any loss moves along combinations of the fields

    X_{x,v}(θ) = ∇_θ ⟨f(x; θ), v⟩.

A law is constant along all of them, hence along their brackets [X, Y] = DY·X − DX·Y too. Brackets are nested to the
left, [[X_0, X_1], X_2] and so on; by the Jacobi identity these span everything brackets can reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from conserved._torch_compat import tree_map
from conserved.discovery.derivatives import Derivatives, FieldDerivatives, along, bracket, letter, one_of
from conserved.discovery.function import ParameterFunction, without_fused_kernels
from conserved.discovery.inputs import UnsuitableError

__all__ = ["bracket_field", "derivative_error", "draw_words", "gradient_rows", "one_of", "vectors"]

MEMORY = {"cpu": 1 << 30, "cuda": 1 << 34}
"""Bytes that one chunk of vectors and what differentiation keeps of them may take."""


def draw_words(
    function: ParameterFunction, theta: Float[Tensor, " D"], depth: int, count: int, generator: torch.Generator
) -> Any:
    """Return samples for `count` brackets of a depth, stacked."""

    def word(level: int) -> Any:
        samples = function.draw_many(theta, count, generator)
        return samples if level == 0 else (word(level - 1), samples)

    return word(depth)


def letters_of(words: Any, depth: int) -> list[Any]:
    """Return the samples of X_0, X_1, …, as nested words hold them."""
    last: list[Any] = []
    for _ in range(depth):
        words, samples = words
        last.append(samples)
    return [words, *last[::-1]]


def nested(depth: int) -> FieldDerivatives:
    """Return the left-nested bracket of the first depth + 1 letters."""
    field = letter(0)
    for index in range(1, depth + 1):
        field = bracket(field, letter(index))
    return field


def bracket_field(function: ParameterFunction, depth: int) -> Callable[[Tensor, Any], Tensor]:
    """Return the left-nested bracket of depth + 1 gradient fields, of a point and one sample.

    Samples nest the same way.
    """

    def field(theta: Tensor, sample: Any) -> Tensor:
        words = tree_map(lambda part: part[None] if isinstance(part, Tensor) else part, sample)
        at = Derivatives(function, theta[None], letters_of(words, depth), depth)
        return nested(depth)(at, ())[0].detach()

    return field


def gradient_rows(
    function: ParameterFunction, points: Float[Tensor, " D"] | Float[Tensor, "count D"], samples: Any, count: int
) -> Float[Tensor, "count D"]:
    """Return gradient fields, one row for each of the stacked samples, at one point or at one for each."""

    def rows(where: Tensor, some: Any) -> Tensor:
        return Derivatives(function, where, [some], 0).letter(0, ())

    return _in_chunks(rows, points.expand(count, -1), samples, count, function.size)


def vectors(
    function: ParameterFunction,
    theta: Float[Tensor, " D"],
    depth: int,
    words: Any,
    count: int,
    scale: Float[Tensor, " D"] | None = None,
) -> Float[Tensor, "count D"]:
    """Return brackets of a depth, one row for each word, each divided by the size of the terms it is the difference of.

    With `scale`, entries are multiplied by it first, which leaves the rank of the rows as it is.

    A bracket that vanishes up to rounding must not be blown up to length one: it would look like a new direction. So
    rows are scaled by their terms and not by themselves, and fields too small against the rest are left as zero.
    """
    if depth == 0:
        rows = gradient_rows(function, theta, words, count)
        rows = rows if scale is None else rows * scale
        sizes = torch.linalg.vector_norm(rows, dim=1)
    else:
        inner, last = nested(depth - 1), letter(depth)
        terms = along(last, inner), along(inner, last)

        def scaled(where: Tensor, some: Any) -> Tensor:
            at = Derivatives(function, where, letters_of(some, depth), depth)
            forward, backward = (term(at, ()).detach() for term in terms)
            if scale is not None:
                forward, backward = forward * scale, backward * scale
            size = torch.linalg.vector_norm(forward, dim=1) + torch.linalg.vector_norm(backward, dim=1)
            return torch.cat((forward - backward, size[:, None]), 1)

        # Graphs that are kept for the next order hold three times as much at each level: 13, 35 and 130 vectors of D.
        field_rows = _in_chunks(scaled, theta.expand(count, -1), words, count, 2 * function.size * 3 ** (depth - 1))
        rows, sizes = field_rows[:, :-1], field_rows[:, -1]
    floor = 1e-12 * sizes.max()
    return rows / torch.where(sizes > floor, sizes, torch.inf)[:, None]


def _in_chunks(rows: Callable[[Tensor, Any], Tensor], points: Tensor, samples: Any, count: int, size: int) -> Tensor:
    """Return rows for stacked samples at points, in chunks that fit into memory."""
    chunk = max(1, min(count, MEMORY.get(points.device.type, 1 << 30) // (64 * size)))
    chunks = []
    with without_fused_kernels():
        for start in range(0, count, chunk):
            some = slice(start, start + chunk)
            part = tree_map(lambda p, some=some: p[some] if isinstance(p, Tensor) else p, samples)
            try:
                chunks.append(rows(points[some], part))
            except (RuntimeError, NotImplementedError) as problem:
                if "out of memory" in str(problem).lower():
                    raise
                raise UnsuitableError(
                    f"Expected a function that can be differentiated several times, got an error: {problem} Write "
                    "it with differentiable operators."
                ) from problem
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def derivative_error(
    function: ParameterFunction, theta: Float[Tensor, " D"], depth: int, generator: torch.Generator
) -> float:
    """Return how far the derivative that the deepest bracket uses is from central differences, relatively.

    Operators can have wrong higher derivatives; this would show them. Kinks (ReLU, routing) are avoided by taking the
    best of a few step sizes.
    """
    depth = max(depth - 1, 0)
    words = draw_words(function, theta, depth, 1, generator)
    direction = torch.randn(theta.shape, generator=generator, dtype=torch.float64).to(theta.device)
    direction /= torch.linalg.vector_norm(direction)
    steps = torch.tensor((1e-3, 1e-4, 1e-5), dtype=torch.float64, device=theta.device)[:, None]
    points = torch.cat((theta[None], theta + steps * direction, theta - steps * direction))
    field = nested(depth)
    letters = [_repeat(samples, len(points)) for samples in letters_of(words, depth)]
    with without_fused_kernels():
        at = Derivatives(function, points, letters, depth + 1)
        center, *around = field(at, ()).detach()
        exact = field(at, (direction.expand(len(points), -1),))[0].detach()
    ahead, behind = torch.stack(around).chunk(2)
    errors = torch.linalg.vector_norm((ahead - behind) / (2 * steps) - exact, dim=1)
    scale = max(float(torch.linalg.vector_norm(exact)), float(torch.linalg.vector_norm(center)) * 1e-3)
    return float(errors.min()) / scale if scale > 0 else 0.0


def _repeat(samples: Any, count: int) -> Any:
    return tree_map(lambda p: p.expand(count, *p.shape[1:]) if isinstance(p, Tensor) else p, samples)
