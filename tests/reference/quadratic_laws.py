"""All laws of degree one and two of a function, by brute force: a null space over gradients at many random parameters.

A law ½ θᵀAθ + bᵀθ is conserved if and only if ⟨∇L, Aθ + b⟩ = 0 for every gradient at every θ. Here A is symmetric and
couples entries of one parameter that differ in at most one index. Unlike a rank at one point, many points see every
side of every kink: what holds only while the same neurons are active is no law here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

import float64
from conserved import LawSet
from conserved.discovery.fields import one_of
from conserved.discovery.function import ParameterFunction, function_of, without_fused_kernels
from law_checks import Subject, imitate, logits_of, without_epsilon

SMALL = 1e-9
"""Singular values below this, relative to the largest, are rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quadratic:
    """Laws of degree one and two: their number, how clear it is, and how many of them a list of laws holds."""

    count: int
    """Independent laws."""
    gap: float
    """Smallest singular value that counts over the largest that does not."""
    missing: int
    """How many of them are no combination of the listed laws."""


def function_to_count(subject: Subject) -> ParameterFunction:
    """A model as a function of parameters and inputs, its norms without ε."""
    example: dict[str, Any] = {str(i): a for i, a in enumerate(subject.args)} | dict(subject.kwargs)
    constant = {str(name) for name in subject.constant}

    def sample(generator: torch.Generator) -> dict[str, Tensor]:
        varied = {n: a for n, a in example.items() if isinstance(a, Tensor) and n not in constant}
        return {name: imitate(value, generator) for name, value in varied.items()}

    def function(theta: dict[str, Tensor], x: dict[str, Tensor]) -> Any:
        values = example | x
        args = tuple(values[str(i)] for i in range(len(subject.args)))
        kwargs = {name: values[name] for name in subject.kwargs}
        with without_epsilon(subject.model), float64.kept():
            output = functional_call(subject.model, theta, args, kwargs)
        return logits_of(output) if subject.loss == "cross_entropy" else output

    return function_of(function, sample, loss=subject.loss, params=subject.theta, device=None)


def quadratic_laws(subject: Subject, laws: LawSet | None = None, *, seed: int = 0) -> Quadratic:
    """Count the laws of degree one and two of a model, and those among them that a list lacks."""
    function = function_to_count(subject)
    first, second = _pairs(function)
    points, fields = _fields(function, 2 * (first.size + function.size) + 200, seed)
    off = torch.as_tensor((first != second).astype(float))
    system = torch.cat([points[:, first] * fields[:, second] + off * points[:, second] * fields[:, first], fields], 1)
    scale = system.norm(dim=0)
    # A column that is rounding (an entry without a gradient) must not be blown up to one that counts.
    scale = torch.where(scale > 1e-12 * scale.max(), scale, scale.max())
    values, vectors = torch.linalg.eigh(((system / scale).mT @ (system / scale)) / len(system))
    # A Gram matrix squares singular values: null vectors are looked for among the small ones and checked on the rows.
    some = vectors[:, values < 1e-10 * values[-1]].mT
    left = torch.linalg.svd((system / scale) @ some.mT, full_matrices=False) if len(some) else None
    largest = float(values[-1].clamp_min(0)) ** 0.5 * len(system) ** 0.5
    small = int((left.S / largest < SMALL).sum()) if left is not None else 0
    null = (left.Vh[len(left.S) - small :] @ some) / scale if left is not None else system.new_zeros(0, len(scale))
    values_left = [float(v) ** 0.5 for v in values[len(some) :] if v > 0]
    values_left += [float(v) / len(system) ** 0.5 for v in (left.S[: len(left.S) - small] if left is not None else ())]
    dropped = float(left.S[len(left.S) - small]) / len(system) ** 0.5 if small and left is not None else 0.0
    theta = function.generic_point(torch.Generator().manual_seed(seed + 99))
    grads = _slopes(null, first, second, theta)
    listed = _listed(laws, function, theta) if laws is not None and len(laws) else theta.new_zeros(0, function.size)
    return Quadratic(
        count=_rank(grads),
        gap=min(values_left, default=0.0) / dropped if dropped else float("inf"),
        missing=_rank(torch.cat([listed, grads])) - _rank(listed),
    )


def _pairs(function: ParameterFunction) -> tuple[np.ndarray, np.ndarray]:
    """Unordered pairs of entries of one parameter that differ in at most one index."""
    first: list[np.ndarray] = []
    second: list[np.ndarray] = []
    start = 0
    for tensor in function.start.values():
        index = np.arange(tensor.numel()).reshape(tuple(tensor.shape)) + start
        start += tensor.numel()
        first.append(index.reshape(-1))
        second.append(index.reshape(-1))
        for axis in range(tensor.ndim):
            rows = np.moveaxis(index, axis, 0)
            for i, j in combinations(range(len(rows)), 2):
                first.append(rows[i].reshape(-1))
                second.append(rows[j].reshape(-1))
    return np.concatenate(first), np.concatenate(second)


def _fields(function: ParameterFunction, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random parameters, and at each the gradient of a random loss of a random input."""
    generator = torch.Generator().manual_seed(seed)

    def field(theta: Tensor, sample: Any) -> Tensor:
        return torch.func.grad(lambda t: (function(t, sample[0]) * sample[1]).sum())(theta)

    points: list[Tensor] = []
    fields: list[Tensor] = []
    tries = 0
    while sum(len(part) for part in points) < count and tries < 4 * count:
        theta = torch.stack([function.generic_point(generator) for _ in range(64)])
        samples = function.draw_many(theta[0], 64, generator)
        with without_fused_kernels():
            try:
                rows = torch.func.vmap(field, in_dims=(0, 0))(theta, samples)
            except (RuntimeError, NotImplementedError):
                rows = torch.stack([field(theta[i], one_of(samples, i)) for i in range(64)])
        good = torch.isfinite(rows).all(1) & (rows.norm(dim=1) > 0)
        points.append(theta[good])
        fields.append(rows[good] / rows[good].norm(dim=1, keepdim=True))
        tries += 64
    return torch.cat(points), torch.cat(fields)


def _slopes(null: Tensor, first: np.ndarray, second: np.ndarray, theta: Tensor) -> Tensor:
    """Gradients of the laws at a point."""
    pairs, linear = null[:, : first.size], null[:, first.size :]
    result = linear.clone()
    a, b = torch.as_tensor(first), torch.as_tensor(second)
    result.index_add_(1, a, pairs * theta[b])
    off = a != b
    result.index_add_(1, b[off], pairs[:, off] * theta[a[off]])
    return result


def _listed(laws: LawSet, function: ParameterFunction, theta: Tensor) -> Tensor:
    def numbers(values: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([symmetry.kind.coordinates(symmetry.law(dict(values))) for symmetry in laws])

    jacobian = torch.func.jacrev(numbers)(function.split(theta))
    return torch.cat([jacobian[name].flatten(1) for name in function.start], 1)


def _rank(rows: Tensor) -> int:
    lengths = rows.norm(dim=1)
    alive = lengths > 1e-12 * lengths.max() if len(rows) else lengths > 0
    if not bool(alive.any()):
        return 0
    values = torch.linalg.svdvals(rows[alive] / lengths[alive, None])
    return int((values > 1e-8 * values[0]).sum())
