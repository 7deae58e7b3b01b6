"""Positive scales of units that minimise a norm or a distance: Newton's method in their logarithms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def least_norm_scales(
    squares: Sequence[Float[Tensor, " units"]], degrees: Sequence[int | float]
) -> tuple[Float[Tensor, " units"], str]:
    """Minimize Σ_ℓ s_i^{2d_ℓ}·squares_ℓ over s_i for every unit i.

    Args:
        squares: for every leg ℓ, the sum of squares of every unit.
        degrees: the degree d_ℓ of every leg.

    Returns:
        The scales, one where a unit is zero on one side; and why there is no minimum, empty if there is one.
    """
    signs = [degree > 0 for degree in degrees]
    ones = torch.ones_like(squares[0])
    if len(set(signs)) == 1:
        return ones, "all legs move the same way, and would shrink for ever"
    plus, minus = (
        torch.stack([square for square, sign in zip(squares, signs, strict=True) if sign == side]).sum(0)
        for side in (True, False)
    )
    if not bool(torch.isfinite(plus + minus).all()):
        return ones, "some of its weights, or their squares, are not finite"
    alive = (plus > 0) & (minus > 0)
    if not bool(alive.any()):
        return ones, "one side is zero, and would shrink the other for ever"
    if {abs(degree) for degree in degrees} == {1}:
        # With degrees ±1 the minimum of s²·plus + s⁻²·minus is at s⁴ = minus/plus.
        return torch.where(alive, (minus / plus.clamp_min(1e-300)).clamp_min(1e-300).log() / 4, 0.0).exp(), ""
    logarithm = torch.zeros_like(plus)
    powers = torch.tensor([float(degree) for degree in degrees], dtype=torch.float64)[:, None].to(plus.device)
    terms = torch.stack(list(squares))
    for _ in range(200):
        # Newton's method in log s on a convex function, with steps that cannot overshoot.
        now = terms * torch.exp(2 * powers * logarithm)
        gradient, curvature = (powers * now).sum(0), (2 * powers**2 * now).sum(0)
        step = torch.where(alive, gradient / curvature.clamp_min(1e-300), 0.0).clamp(-0.5, 0.5)
        logarithm = logarithm - step
        if float(step.abs().max()) < 1e-14:
            break
    return logarithm.exp(), ""


def nearest_scales(
    squares: Float[Tensor, "legs units"], products: Float[Tensor, "legs units"], degrees: Float[Tensor, "legs 1"]
) -> Float[Tensor, " units"]:
    """Minimize Σ_ℓ s^{2d}·squares − 2 s^d·products, the squared distance of scaled legs to those wanted.

    The cost is not convex in log s, so every step of Newton's method is halved until it does not go uphill.
    """

    def cost(t: Tensor) -> Tensor:
        return ((2 * degrees * t).exp() * squares - 2 * (degrees * t).exp() * products).sum(0)

    t = torch.zeros(squares.shape[1], dtype=torch.float64)
    for _ in range(60):
        twice, once = (2 * degrees * t).exp() * squares, (degrees * t).exp() * products
        gradient = (2 * degrees * (twice - once)).sum(0)
        curvature = (2 * degrees**2 * (2 * twice - once)).sum(0)
        bounded = torch.where(curvature > 0, curvature, curvature.abs() + squares.sum(0) + 1e-300)
        step = (gradient / bounded).clamp(-1, 1)
        while bool((worse := cost(t - step) > cost(t) + 1e-15 * squares.sum(0)).any()):
            step = torch.where(worse, step / 2, step)
            if float(step.abs().max()) < 1e-14:
                break
        t = t - step
        if float(step.abs().max()) < 1e-12:
            break
    return t.exp()
