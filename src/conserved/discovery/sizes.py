r"""How large the entries of gradient fields are against each other and against the rounding of the program.

A rank does not care for units: the vectors X and X·S, with S diagonal, span spaces of one dimension. So entries that
are small and still sure are brought up to the others before anything is compared with rounding; entries that are
rounding themselves (the gradient of a bias that softmax cannot see) are left as they are. The two are distinguished by
computing them again, at parameters that differ in the tenth digit and for another multiple of v: rounding comes out
quite different.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from conserved._torch_compat import tree_map
from conserved.discovery.function import ParameterFunction, without_fused_kernels
from conserved.laws.verification import precision_of

FieldsAtPoints = Callable[[Tensor, Any, int], Tensor]
"""Gradient fields at points, one for each of that many stacked samples."""

_SAMPLES = 12

_MULTIPLE = 1.2345678
"""Factor of v for which fields are computed again: not a power of two, so that rounding differs."""

_SMALL = 1e-6
"""Entries this far below the largest are looked at closely."""

_SURE, _NOISE = 1e-3, 0.05
"""Relative change on computing an entry again: below the first it is sure, above the second it is rounding."""

_FAINTEST = 1e-15
"""Entries further below the largest than this, and neither sure nor rounding, are left to rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """The scales that vectors are multiplied with before their rank is taken, and estimates of their rounding."""

    scale: Float[Tensor, " D"] | None
    """None where all entries are of comparable size."""
    small: int
    """Entries that are small and not mere rounding. As fields they are scaled; their brackets are smaller still."""
    noise: float
    """The rounding of the whole program, relative to its fields: a cast to float32 inside makes it 1e-7."""


def sizes_of(
    function: ParameterFunction, theta: Float[Tensor, " D"], rows: FieldsAtPoints, generator: torch.Generator
) -> Sizes:
    """Measure them on a few fields."""
    x, v = function.draw_many(theta, _SAMPLES, generator)
    nearby = torch.randn(theta.shape, generator=generator, dtype=torch.float64).to(theta.device)
    # At θ, for another multiple of v very near to it, and on either side: all in one go.
    step = 3e-7 * theta.abs() * nearby
    points = torch.stack((theta, theta + 1e-9 * theta.abs() * nearby, theta + step, theta - step))
    samples = tree_map(lambda part: torch.cat((part,) * 4) if isinstance(part, Tensor) else part, (x, v))
    factors = torch.tensor((1, _MULTIPLE, 1, 1), dtype=v.dtype, device=v.device).repeat_interleave(_SAMPLES)[:, None]
    field_rows = rows(points.repeat_interleave(_SAMPLES, 0), (samples[0], samples[1] * factors), 4 * _SAMPLES)
    fields, again, ahead, behind = field_rows.split(_SAMPLES)
    again = again / _MULTIPLE
    largest = fields.abs().amax(0)
    reach = float(largest.max())
    noise = max(_precision(function, theta, x, v), _roughness(ahead, fields, behind))
    small = (largest > 0) & (largest < _SMALL * reach)
    if not bool(small.any()):
        return Sizes(None, 0, noise)
    there = fields.abs() > 0.1 * largest
    apart = (again - fields).abs() / torch.where(there, fields.abs(), 1)
    change = torch.where(there, apart, torch.nan).nanmedian(0).values
    sure = small & (change < _SURE)
    doubtful = small & ~sure & (change < _NOISE) & (largest > _FAINTEST * reach)
    scale = torch.where(sure, torch.exp2(torch.log2(reach / torch.where(sure, largest, reach)).floor()), 1.0)
    return Sizes(scale if bool(sure.any()) else None, int((sure | doubtful).sum()), noise)


def _precision(function: ParameterFunction, theta: Tensor, x: Any, v: Tensor) -> float:
    """Return the rounding of the coarsest type that gradients pass through, as the graph of one output shows it."""
    from conserved.discovery.fields import one_of

    with torch.enable_grad(), without_fused_kernels():
        point = theta.detach().clone().requires_grad_()
        value = (function(point, one_of(x, 0)) * v[0]).sum()
    return torch.finfo(precision_of(value)).eps if value.requires_grad else torch.finfo(torch.float64).eps


def _roughness(
    ahead: Float[Tensor, "samples D"], center: Float[Tensor, "samples D"], behind: Float[Tensor, "samples D"]
) -> float:
    """Return second differences over a tiny step, against the fields: what a smooth program leaves is its rounding."""
    norms = torch.linalg.vector_norm(center, dim=1)
    curvature = torch.linalg.vector_norm(ahead + behind - 2 * center, dim=1)
    alive = norms > 0
    return float((curvature[alive] / norms[alive]).median()) if bool(alive.any()) else 0.0
