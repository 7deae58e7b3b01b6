"""Gradient flow by an eighth-order adaptive Runge–Kutta method."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

EVALUATIONS = 4000
"""A flow that needs more gradients than this has met a kink it slides along; a shorter piece of it is followed."""


class _Stuck(Exception):
    pass


def follow(loss: Callable[[dict[str, Tensor]], Tensor], start: dict[str, Tensor], time: float) -> dict[str, Tensor]:
    """The parameters after following −∇loss for a time, or for a part of it where kinks stop the integrator."""
    sizes = [tensor.numel() for tensor in start.values()]

    def unpack(vector: Tensor) -> dict[str, Tensor]:
        pieces = vector.split(sizes)
        return {name: piece.reshape(t.shape) for (name, t), piece in zip(start.items(), pieces, strict=True)}

    grad = torch.func.grad(lambda vector: loss(unpack(vector)))
    begin = torch.cat([tensor.detach().flatten() for tensor in start.values()])
    spent = 0

    def downhill(_: float, y: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        nonlocal spent
        spent += 1
        if spent > EVALUATIONS:
            raise _Stuck
        return np.asarray(-grad(torch.from_numpy(y)).numpy())

    try:
        solution = solve_ivp(downhill, (0, time), begin.numpy(), method="DOP853", rtol=1e-11, atol=1e-12)
    except _Stuck:
        return follow(loss, start, time / 10)
    assert solution.success
    return unpack(torch.from_numpy(solution.y[:, -1].copy()))
