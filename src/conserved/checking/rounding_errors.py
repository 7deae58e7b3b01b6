"""How precise the gradients of a function are: a finding of its own, and never a wrong backward.

The gradient of the given form is compared with that of the most precise form on the same inputs and output gradient. A
kernel whose dq is mostly rounding is right, and training with it is not what it looks like.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conserved.checking.pass_under_test import Setting
from conserved.checking.reference_form import FunctionForm
from conserved.inference.probing.noise import rms, wide
from conserved.plain_data import record_of

NOTABLE = 0.05
"""A relative error of a gradient from which on it is worth a note: 13 roundings of bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingError:
    """The relative error of one gradient against the most precise form of the function.

    Attributes:
        error: ‖given − reference‖ / ‖reference‖.
        worst: the largest such quotient of an index along the leading axes, such as one head.
        median: the median of them.
        reference: the form it was compared with, in words.
    """

    error: float
    worst: float
    median: float
    reference: str

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return record_of(self, "error worst median reference")

    def __str__(self) -> str:
        return f"{self.error:.2g} of its size (median {self.median:.2g}, worst {self.worst:.2g} of a slice)"


def rounding_errors(given: Setting, reference: Setting, form: FunctionForm) -> Mapping[str, RoundingError]:
    """Compare every gradient of the given form with the reference form's."""
    errors = {}
    for name, grad, right in zip(given.function.names, given.grads, reference.grads, strict=True):
        if grad is not None and right is not None:
            errors[name] = _error(wide(grad), wide(right), form.words)
    return errors


def _error(grad: Tensor, right: Tensor, words: str) -> RoundingError:
    leading = max(0, right.ndim - 2)
    gap = (grad - right).square().flatten(leading).sum(-1).flatten()
    size = right.square().flatten(leading).sum(-1).flatten()
    live = size > 0
    slices = (gap[live] / size[live]).sqrt() if bool(live.any()) else torch.zeros(1, dtype=torch.float64)
    total = rms(grad - right) / (rms(right) or 1.0)
    return RoundingError(error=total, worst=float(slices.max()), median=float(slices.median()), reference=words)
