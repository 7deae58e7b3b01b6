"""Identities whose products would over- or underflow, taken again in double precision after scaling.

A residual is a quotient that does not care for the size of the loss, but it is computed from squares: a gradient of
1e20 in single precision has none, nor has one of 1e-24. Such laws are rare, and are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from conserved._torch_compat import foreach_norm
from conserved.moment import Direction, Plan, Point
from conserved.symmetry import Symmetry, Tensors, whole


def reweigh(symmetry: Symmetry, theta: Tensors, gradients: Tensors, floor: float) -> tuple[float, float, bool]:
    """Return the residual of one identity, what it is relative to, and whether it says anything.

    It does where a gradient reached a leg and not all legs are zero: with one factor at zero, A dAᵀ = B dBᵀ asks that
    dA vanish. `floor` is a least scale, as linear laws have one.
    """
    points = [matrix.detach() for matrix in symmetry.matrices(theta, torch.float64)]
    directions = [leg.view.matrix(gradients[leg.view.parameter].detach()).double() for leg in symmetry.legs]
    # A linear law does not read its parameters, and a shift is not scaled with them: sizes are no part of either.
    height = 1.0 if symmetry.kind.linear or symmetry.logarithmic else _peak(points)
    steepness = _peak(directions)
    if height == 0 or steepness == 0:
        return 0.0, floor, floor > 0 and symmetry.kind.linear
    if not (np.isfinite(height) and np.isfinite(steepness)):
        return float("nan"), float("nan"), True
    if symmetry.logarithmic:
        plan, names = Plan.of([symmetry], kernels=False), symmetry.parameters
        points = [whole(theta[name].detach()).double() for name in names]
        directions = [whole(gradients[name].detach()).double() for name in names]
    else:
        plan = Plan.of_matrices(symmetry.kind, symmetry.degrees, [matrix.shape for matrix in points])
        names = tuple(plan.needs)
    scaled = (
        Point({name: matrix / height for name, matrix in zip(names, points, strict=True)}),
        Direction({name: matrix / steepness for name, matrix in zip(names, directions, strict=True)}),
    )
    value, scale = plan.evaluate(scaled, [(0, 1)], sizes=True).sizes()[1][0][0].tolist()
    scale = max(scale, floor / steepness / height)
    # Where nothing but zeros is added up, zero is what it should be.
    return (min(value / scale, 1.0) if scale > 0 else 0.0), scale * height * steepness, True


def norms(gradients: Sequence[Tensor]) -> list[float]:
    """Return the norms of gradients whose squares may over- or underflow; most are zero, and read once for all."""
    plain = [g for g in gradients if not hasattr(g, "full_tensor") and not g.is_sparse and g.numel()]
    peaks = foreach_norm(plain, float("inf")) if plain else ()
    zero = {id(gradient) for gradient, peak in zip(plain, peaks, strict=True) if float(peak) == 0}
    return [0.0 if id(gradient) in zero else _norm(whole(gradient).detach().double()) for gradient in gradients]


def _norm(gradient: Tensor) -> float:
    peak = _peak([gradient])
    return peak * float(torch.linalg.vector_norm(gradient / peak)) if 0 < peak < float("inf") else peak


def _peak(matrices: Sequence[Tensor]) -> float:
    """Return the largest magnitude, rounded down to a power of two, by which division is exact.

    NaN and ∞ are returned unchanged.
    """
    largest = max((float(matrix.abs().max()) for matrix in matrices if matrix.numel()), default=0.0, key=_nan_last)
    return float(2.0 ** np.floor(np.log2(largest))) if 0 < largest < float("inf") else largest


def _nan_last(value: float) -> float:
    return float("inf") if value != value else value
