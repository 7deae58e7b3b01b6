"""Fields and brackets one sample at a time, by forward over reverse differentiation: slow, and nothing is shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conserved.discovery.fields import one_of
from conserved.discovery.function import ParameterFunction, without_fused_kernels

Field = Callable[[Tensor, Any], Tensor]


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
    field = base = gradient_field(function)
    for _ in range(depth):
        terms = bracket_terms(field, base)

        def bracket(theta: Tensor, sample: Any, terms: Callable[..., tuple[Tensor, Tensor]] = terms) -> Tensor:
            forward, backward = terms(theta, sample)
            return forward - backward

        field = bracket
    return field


def vectors(function: ParameterFunction, theta: Tensor, depth: int, words: Any, count: int) -> Tensor:
    """Brackets of a depth, one row for each word, each divided by the size of the terms it is the difference of."""
    rows, sizes = [], []
    with without_fused_kernels():
        for index in range(count):
            word = one_of(words, index)
            if depth == 0:
                rows.append(gradient_field(function)(theta, word))
                sizes.append(torch.linalg.vector_norm(rows[-1]))
            else:
                terms = bracket_terms(bracket_field(function, depth - 1), gradient_field(function))
                forward, backward = terms(theta, word)
                rows.append(forward - backward)
                sizes.append(torch.linalg.vector_norm(forward) + torch.linalg.vector_norm(backward))
    size = torch.stack(sizes)
    return torch.stack(rows) / torch.where(size > 1e-12 * size.max(), size, torch.inf)[:, None]
