"""Inputs at which a function has an infinite slope, moved to where it has a gradient.

The derivative of an inverse sine at one is infinite, and a backward that says so is right. In half precision random
numbers hit such points. A division by zero in the backward of a function with a finite slope is a defect and is left
for the check to find.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from conserved.inference.probing.noise import rms, wide
from conserved.inference.probing.numerical_function import NumericalFunction

_DISTANCE = 2.0**-3
"""The share of its size by which a singular entry is moved towards zero; zeros move by a share of the tensor's size."""

_NEARER, _STEEPER = 8.0, 1.5
"""A slope over an eighth of the distance that is so much steeper does not converge; that of a root is √8 times."""


def move_singular_entries(function: NumericalFunction) -> NumericalFunction:
    """Return the function with entries moved away from points at which its derivative is infinite."""
    outs = function.outputs(function.values)
    _, grads = function.gradients(function.values, [torch.ones_like(out) for out in outs])
    values = list(function.values)
    moved = []
    for index, grad in enumerate(grads):
        if grad is None or bool(torch.isfinite(grad).all()):
            continue
        # An infinite slope times a zero, as that of |x| at its kink, is NaN.
        singular = ~torch.isfinite(grad)
        if _difference_quotient(function, index, singular, 1 / _NEARER) > _STEEPER * _difference_quotient(
            function, index, singular, 1.0
        ):
            values[index] = _displace(values[index], singular, 1.0)
            moved.append(function.names[index])
    if not moved:
        return function
    note = f"{', '.join(moved)} had entries at which the slope of {function.title} is infinite: they were moved."
    return replace(function, values=tuple(values), notes=(*function.notes, note))


def _displace(value: Tensor, where: Tensor, share: float) -> Tensor:
    """Return the input with some entries moved by a share of the distance."""
    x = wide(value)
    step = torch.where(x == 0, torch.full_like(x, _DISTANCE * (rms(x) or 1.0)), -_DISTANCE * x)
    return torch.where(where, x + share * step, x).to(value.dtype)


def _difference_quotient(function: NumericalFunction, index: int, where: Tensor, share: float) -> float:
    """Return how much outputs change over a share of the distance, per distance."""
    values = list(function.values)
    values[index] = _displace(values[index], where, share)
    try:
        pairs = zip(function.outputs(values), function.outputs(function.values), strict=True)
        change = sum(rms(wide(a) - wide(b)) for a, b in pairs)
    except Exception:  # a kernel may refuse inputs in any way it likes
        return 0.0
    return change / share
