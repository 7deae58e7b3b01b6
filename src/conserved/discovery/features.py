r"""Candidate quantities and their rates of change along gradient fields.

A quantity Σ_f c_f q_f(θ) is a law if its rate of change Σ_f c_f φ_f along every field is zero at every θ. For

    the squared length of row i of a parameter along an axis     φ = ⟨W_i, G_i⟩   (half the rate of ‖W_i‖²),
    the sum of a parameter's entries along an axis               φ = Σ_i G_ik,

G the field. Entries ⟨W_i, G_j⟩ off the diagonal are looked at only between rows that already have a law each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.discovery.fields import gradient_rows
from conserved.discovery.function import ParameterFunction

Sort = Literal["length", "sum"]

WHOLE = 12
"""Samples kept whole, for looking off the diagonal."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Row `index` along `axis`: its squared length, or entry `index` of the sums along `axis` (flattened)."""

    sort: Sort
    parameter: str
    axis: int
    index: int


@dataclass(frozen=True, slots=True)
class Rates:
    """φ of every feature for many samples, each at parameters of its own."""

    features: tuple[Feature, ...]
    values: Float[Tensor, "samples features"]
    sizes: Float[Tensor, "samples features"]
    """The same with absolute values taken inside, which is what rounding is relative to."""
    points: dict[str, Tensor]
    """The parameters of the first few samples, whole, for looking off the diagonal."""
    fields: dict[str, Tensor]
    """Their fields."""


def features_of(function: ParameterFunction) -> tuple[Feature, ...]:
    """Return all candidates, parameter by parameter."""
    return tuple(feature for name, tensor in function.start.items() for feature in _of(name, tuple(tensor.shape)))


def _of(name: str, shape: tuple[int, ...]) -> Iterator[Feature]:
    shape = shape or (1,)
    for axis, size in enumerate(shape):
        for index in range(size):
            yield Feature("length", name, axis, index)
    if len(shape) == 1:
        # Each entry is a sum of one; axis −1 says that nothing is summed.
        yield from (Feature("sum", name, -1, index) for index in range(shape[0]))
        return
    for axis, size in enumerate(shape):
        rest = torch.Size(shape).numel() // size
        yield from (Feature("sum", name, axis, index) for index in range(rest))


def rates(function: ParameterFunction, samples: int, generator: torch.Generator, whole: int = WHOLE) -> Rates:
    """Return rates of all features over random parameters and fields; the first `whole` of these are kept."""
    values: list[Tensor] = []
    sizes: list[Tensor] = []
    points: dict[str, Tensor] = {}
    fields: dict[str, Tensor] = {}
    for theta, gradients in _pairs(function, samples, generator):
        blocks = [block for name in function.start for block in _rates_of(theta[name], gradients[name])]
        values.append(torch.cat([value for value, _ in blocks], 1))
        sizes.append(torch.cat([size for _, size in blocks], 1))
        if not points or len(next(iter(points.values()))) < whole:
            points = {n: torch.cat((points[n], t))[:whole] if points else t[:whole] for n, t in theta.items()}
            fields = {n: torch.cat((fields[n], t))[:whole] if fields else t[:whole] for n, t in gradients.items()}
    return Rates(features_of(function), torch.cat(values), torch.cat(sizes), points, fields)


def _rates_of(w: Tensor, g: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of rates in the order of `_of`; the first axis is the sample."""
    w, g = (t.unsqueeze(-1) if t.ndim == 1 else t for t in (w, g))
    axes = range(1, w.ndim)
    for axis in axes:
        rest = [other for other in axes if other != axis]
        product = w * g
        yield (product.sum(rest), product.abs().sum(rest)) if rest else (product, product.abs())
    if w.ndim == 2:
        yield g, g.abs()
        return
    for axis in axes:
        yield g.sum(axis).flatten(1), g.abs().sum(axis).flatten(1)


def _pairs(
    function: ParameterFunction, samples: int, generator: torch.Generator
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Yield random parameters with a gradient field at each, in chunks that fit into memory, fields of unit length."""
    chunk = max(1, min(samples, (1 << 28) // (64 * function.size)))
    for start in range(0, samples, chunk):
        count = min(chunk, samples - start)
        points = torch.stack([function.generic_point(generator) for _ in range(count)])
        words = function.draw_many(points[0], count, generator)
        gradients = gradient_rows(function, points, words, count)
        length = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
        gradients = gradients / torch.where(length > 0, length, 1)
        yield _name_features(function, points), _name_features(function, gradients)


def _name_features(function: ParameterFunction, rows: Float[Tensor, "count D"]) -> dict[str, Tensor]:
    pieces = rows.split([tensor.numel() for tensor in function.start.values()], 1)
    return {n: p.reshape(-1, *t.shape) for (n, t), p in zip(function.start.items(), pieces, strict=True)}
