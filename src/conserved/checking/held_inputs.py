"""Inputs that a function does not differentiate by, held fixed while the others are checked.

The target of a hinge loss is compared with ±1: the loss jumps where the target moves, and no gradient arrives. A check
that moved such an input with the others would see jumps everywhere.
"""

from __future__ import annotations

import torch

from conserved.checking.line_derivatives import has_derivative
from conserved.inference.probing.noise import wide
from conserved.inference.probing.numerical_function import NumericalFunction, hold


def hold_discrete_inputs(function: NumericalFunction) -> NumericalFunction:
    """Return the function with those inputs held that get no gradient, have no derivative, and change the outputs."""
    outs = function.outputs(function.values)
    _, grads = function.gradients(function.values, [torch.ones_like(out) for out in outs])
    indices = [
        index
        for index, grad in enumerate(grads)
        if grad is None
        and not any(has_derivative(function, index, function.seed) or (True,))
        and _jumps(function, index)
    ]
    return hold(function, indices, "no gradient arrives and outputs jump where it moves")


def _jumps(function: NumericalFunction, index: int) -> bool:
    """Return whether outputs change when one input is made smaller."""
    values = list(function.values)
    values[index] = (0.5 * wide(values[index])).to(values[index].dtype)
    try:
        moved = function.outputs(values)
    except Exception:  # a kernel may refuse inputs in any way it likes
        return False
    return any(not torch.equal(a, b) for a, b in zip(moved, function.outputs(function.values), strict=True))
