"""Gradient flow by an eighth-order adaptive Runge–Kutta method."""

from __future__ import annotations

from collections.abc import Callable

import torch
from scipy.integrate import solve_ivp
from torch import Tensor


def follow(loss: Callable[[dict[str, Tensor]], Tensor], start: dict[str, Tensor], time: float) -> dict[str, Tensor]:
    """The parameters after following −∇loss for a time."""
    sizes = [tensor.numel() for tensor in start.values()]

    def unpack(vector: Tensor) -> dict[str, Tensor]:
        pieces = vector.split(sizes)
        return {name: piece.reshape(t.shape) for (name, t), piece in zip(start.items(), pieces, strict=True)}

    slope = torch.func.grad(lambda vector: loss(unpack(vector)))
    begin = torch.cat([tensor.detach().flatten() for tensor in start.values()])
    solution = solve_ivp(
        lambda _, y: -slope(torch.from_numpy(y)).numpy(),
        (0, time),
        begin.numpy(),
        method="DOP853",
        rtol=1e-11,
        atol=1e-12,
    )
    assert solution.success
    return unpack(torch.from_numpy(solution.y[:, -1].copy()))
