r"""The contribution of a leg to its law, as few numbers that add up over processes.

A leg enters an identity through the products of its rows, t_ij = Σ_k θ_ik G_jk, and its scale through their squares
q_ij = Σ_k θ_ik² G_jk². Both are sums over columns. Where the columns of a leg are cut over processes, adding up t, q
and the squares of the rows gives everything that the whole parameter would: n numbers each for scalings, n² for a
general linear group, whatever the size of the parameter.

The sums are turned back into a small leg that has them, so that all that reads legs reads this one as well: row i of θ
has two columns of its own, with √(s_i/2) in both, and row j of G has there the two numbers p with p₁ + p₂ = t_ij and
p₁² + p₂² = q_ij, over √(s_i/2). Two numbers of a given sum have squares of at least t²/2; a smaller q, which only equal
products of many columns have, is taken as that. The scale is then too large by a factor of at most √1.5.

A linear law (translation) adds up the rows of G alone: their sum s, the sum of their magnitudes w, and their squares q.
The small leg has k rows (w + s)/2k and k rows −(w − s)/2k: sum and magnitudes are right, squares at most too large.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.symmetry import Kind, Leg, Tensors, View
from conserved.symmetry.products import RowProducts

_ROWS = 16
"""Rows of one sign in the small leg of a linear law. Squares of 32,000 equal rows come out 45 times too large with it,
which costs sensitivity and never makes a right sum look wrong."""


def leg_sums(kind: Kind, leg: Leg, points: Tensors, gradients: Tensors) -> Float[Tensor, " numbers"]:
    """Return the sums over the columns that this process holds of a leg, in float64; they add up over processes."""
    view = leg.view
    gradient = view.matrix(gradients[view.parameter].detach()).double()
    if kind.linear:
        return torch.stack((gradient.sum(0), gradient.abs().sum(0), gradient.square().sum(0))).flatten()
    theta = view.of_point(points[view.parameter].detach()).double()
    units, unit = _units(kind, leg)
    theta, gradient = (tensor.reshape(units, unit, -1) for tensor in (theta, gradient))
    parts = theta.square().sum(-1), theta @ gradient.mT, theta.square() @ gradient.square().mT
    return torch.cat([part.flatten() for part in parts])


def small_shape(kind: Kind, leg: Leg) -> tuple[int, int]:
    """Return the shape of the small leg that stands for a leg."""
    if kind.linear:
        return 2 * _ROWS, leg.view.m
    units, unit = _units(kind, leg)
    return units * unit, 2 * unit


def small_leg(kind: Kind, leg: Leg, sums: Float[Tensor, " numbers"]) -> tuple[Tensor, Tensor]:
    """Return a leg of parameters and one of gradients that have these sums."""
    if kind.linear:
        return _linear_leg(sums)
    units, unit = _units(kind, leg)
    lengths, terms, squares = sums.split((units * unit, units * unit**2, units * unit**2))
    half = (lengths.clamp_min(0) / 2).sqrt().reshape(units, unit)
    terms, squares = (tensor.reshape(units, unit, unit) for tensor in (terms, squares))
    spread = (squares / 2 - terms.square() / 4).clamp_min(0).sqrt()
    pair = torch.stack((terms / 2 + spread, terms / 2 - spread), -1)
    # Rows of zeros have no products either.
    inverse = torch.where(half > 0, 1 / half.clamp_min(1e-300), torch.zeros_like(half))
    gradient = (pair * inverse[..., None, None]).transpose(1, 2)
    theta = torch.diag_embed(half).unsqueeze(-1).expand(units, unit, unit, 2)
    return theta.reshape(units * unit, 2 * unit), gradient.reshape(units * unit, 2 * unit)


def _linear_leg(sums: Tensor) -> tuple[Tensor, Tensor]:
    total, magnitude, _ = sums.reshape(3, -1)
    parts = (magnitude + total) / 2, (total - magnitude) / 2
    gradient = torch.cat([(part / _ROWS).expand(_ROWS, -1) for part in parts])
    return torch.zeros_like(gradient), gradient


def _units(kind: Kind, leg: Leg) -> tuple[int, int]:
    """Return how many units of rows have products of their own, and the rows of a unit."""
    products = kind.products
    if not isinstance(products, RowProducts):
        return 1, leg.view.n
    return (1, 1) if products.faces == "entries" else (leg.view.n // products.unit, products.unit)


def small_view(name: str, shape: tuple[int, ...]) -> View:
    """Return the view of a small leg: its rows as they are."""
    return View.of(name, shape)
