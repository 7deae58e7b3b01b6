"""A backward pass with a sample of its own rounding, from a second pass that is scaled.

The backward is linear in the output gradient, rounding is not: what is left after a pass from 11/8 of it is divided by
11/8 and subtracted is a sample of the rounding of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conserved.inference.probing.noise import by_row, wide
from conserved.inference.probing.numerical_function import NumericalFunction

_SCALE = 1.375
"""Three bits, so that multiplying output gradients of five bits by it is exact in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPass:
    """Gradients of one backward pass, and the standard deviation of their rounding by row."""

    grads: tuple[Tensor | None, ...]
    deviations: tuple[Tensor | None, ...]

    @property
    def finite(self) -> bool:
        """Whether every gradient that arrives is finite."""
        return all(grad is None or bool(torch.isfinite(grad).all()) for grad in self.grads)


def sampled_pass(function: NumericalFunction, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> SampledPass:
    """Run a backward pass twice, the second time from a scaled output gradient."""
    grads = function.gradients(values, gradients)[1]
    scaled = function.gradients(values, [gradient * _SCALE for gradient in gradients])[1]
    deviations = tuple(_deviation(grad, other) for grad, other in zip(grads, scaled, strict=True))
    return SampledPass(grads=grads, deviations=deviations)


def _deviation(grad: Tensor | None, scaled: Tensor | None) -> Tensor | None:
    """Return by row, with the noise of a typical row added: a row may be quiet by chance."""
    if grad is None or scaled is None:
        return None
    sample = by_row((wide(scaled) / _SCALE - wide(grad)).square() / 2)
    return (sample + sample.median()).sqrt()
