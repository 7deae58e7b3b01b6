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
from torch.utils._pytree import tree_map

from conserved.discovery.function import ParameterFunction, Unsuitable, written_out

Field = Callable[[Tensor, Any], Tensor]
"""A vector field with a sample as second argument."""

MEMORY = {"cpu": 1 << 30, "cuda": 1 << 34}
"""Bytes that one chunk of vectors and what differentiation keeps of them may take."""


def gradient_field(function: ParameterFunction) -> Field:
    """X(θ, (x, v)) = ∇_θ ⟨f(x; θ), v⟩."""
    return lambda theta, sample: torch.func.grad(lambda t: (function(t, sample[0]) * sample[1]).sum())(theta)


def bracket_terms(inner: Field, base: Field) -> Callable[[Tensor, Any], tuple[Tensor, Tensor]]:
    """DX·A and DA·X, whose difference is the bracket [A, X]; the sample is a pair (of A, of X)."""

    def terms(theta: Tensor, sample: Any) -> tuple[Tensor, Tensor]:
        a, x = inner(theta, sample[0]), base(theta, sample[1])
        forward = torch.func.jvp(lambda t: base(t, sample[1]), (theta,), (a,))[1]
        backward = torch.func.jvp(lambda t: inner(t, sample[0]), (theta,), (x,))[1]
        return forward, backward

    return terms


def bracket_field(function: ParameterFunction, depth: int) -> Field:
    """The left-nested bracket of depth + 1 gradient fields; samples nest the same way."""
    field = gradient_field(function)
    base = field
    for _ in range(depth):
        terms = bracket_terms(field, base)

        def bracket(theta: Tensor, sample: Any, terms: Callable[..., tuple[Tensor, Tensor]] = terms) -> Tensor:
            forward, backward = terms(theta, sample)
            return forward - backward

        field = bracket
    return field


def draw_words(
    function: ParameterFunction, theta: Float[Tensor, " D"], depth: int, count: int, generator: torch.Generator
) -> Any:
    """Samples for `count` brackets of a depth, stacked."""

    def word(level: int) -> Any:
        samples = function.draw_many(theta, count, generator)
        return samples if level == 0 else (word(level - 1), samples)

    return word(depth)


def one_of(samples: Any, place: int) -> Any:
    """One of several stacked samples."""
    return tree_map(lambda part: part[place] if isinstance(part, Tensor) else part, samples)


def gradient_rows(
    function: ParameterFunction, theta: Float[Tensor, " D"], samples: Any, count: int
) -> Float[Tensor, "count D"]:
    """Gradient fields at a point, one row for each of the stacked samples."""
    return _mapped(gradient_field(function), theta, samples, count, function.size)


def vectors(
    function: ParameterFunction,
    theta: Float[Tensor, " D"],
    depth: int,
    words: Any,
    count: int,
    scale: Float[Tensor, " D"] | None = None,
) -> Float[Tensor, "count D"]:
    """Brackets of a depth, one row for each word, each divided by the size of the terms it is the difference of.

    With `scale`, entries are multiplied by it first, which leaves the rank of the rows as it is.

    A bracket that vanishes up to rounding must not be blown up to length one: it would look like a new direction. So
    rows are scaled by their terms and not by themselves, and fields too small against the rest are left as zero.
    """
    if depth == 0:
        rows = gradient_rows(function, theta, words, count)
        rows = rows if scale is None else rows * scale
        sizes = torch.linalg.vector_norm(rows, dim=1)
    else:
        terms = bracket_terms(bracket_field(function, depth - 1), gradient_field(function))

        def scaled(t: Tensor, sample: Any) -> Tensor:
            forward, backward = terms(t, sample)
            if scale is not None:
                forward, backward = forward * scale, backward * scale
            size = torch.linalg.vector_norm(forward) + torch.linalg.vector_norm(backward)
            return torch.cat((forward - backward, size[None]))

        found = _mapped(scaled, theta, words, count, function.size * (depth + 1))
        rows, sizes = found[:, :-1], found[:, -1]
    floor = 1e-12 * sizes.max()
    return rows / torch.where(sizes > floor, sizes, torch.inf)[:, None]


def _mapped(field: Field, theta: Tensor, words: Any, count: int, size: int) -> Tensor:
    """A field over stacked samples, vectorised in chunks that fit into memory; one by one where vmap cannot."""
    chunk = max(1, min(count, MEMORY.get(theta.device.type, 1 << 30) // (64 * size)))
    with written_out():
        try:
            return torch.func.vmap(field, in_dims=(None, 0), chunk_size=chunk)(theta, words)
        except (RuntimeError, NotImplementedError) as problem:
            if "out of memory" in str(problem).lower():
                raise
        try:
            return torch.stack([field(theta, one_of(words, i)) for i in range(count)])
        except (RuntimeError, NotImplementedError) as problem:
            raise Unsuitable(f"The function cannot be differentiated often enough: {problem}") from problem


def derivative_error(
    function: ParameterFunction, theta: Float[Tensor, " D"], depth: int, generator: torch.Generator
) -> float:
    """How far the derivative that the deepest bracket uses is from central differences, relatively.

    Operators can have wrong higher derivatives; this would show them. Kinks (ReLU, routing) are avoided by taking the
    best of a few step sizes.
    """
    words = draw_words(function, theta, max(depth - 1, 0), 1, generator)
    word = one_of(words, 0)
    field = bracket_field(function, max(depth - 1, 0))
    direction = torch.randn(theta.shape, generator=generator, dtype=torch.float64).to(theta.device)
    direction /= torch.linalg.vector_norm(direction)
    steps = torch.tensor((1e-3, 1e-4, 1e-5), dtype=torch.float64, device=theta.device)[:, None]
    points = torch.cat((theta[None], theta + steps * direction, theta - steps * direction))
    with written_out():
        exact = torch.func.jvp(lambda t: field(t, word), (theta,), (direction,))[1]
        try:
            here, *around = torch.func.vmap(lambda t: field(t, word))(points)
        except (RuntimeError, NotImplementedError):
            here, *around = (field(point, word) for point in points)
    ahead, behind = torch.stack(around).chunk(2)
    errors = torch.linalg.vector_norm((ahead - behind) / (2 * steps) - exact, dim=1)
    scale = max(float(torch.linalg.vector_norm(exact)), float(torch.linalg.vector_norm(here)) * 1e-3)
    return float(errors.min()) / scale if scale > 0 else 0.0
