r"""Leading singular values of a masked field through products with vectors, each in O(L d).

E_ij = l_i·r_j where j is visible from i, so (E v)_i = Σ_{visible j} l_i·(r_j v_j): prefix sums again. Golub and Kahan's
bidiagonalisation with full reorthogonalisation turns such products into singular values.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.attention.band import Band

TOLERANCE = 1e-11
"""Relative change of the wanted values over a few steps at which they are taken as found."""

_PATIENCE = 4


def leading_values(
    left: Float[Tensor, "heads queries d"],
    right: Float[Tensor, "heads keys d"],
    band: Band,
    count: int,
    *,
    most: int = 200,
) -> Float[Tensor, "heads count"]:
    """Return the `count` largest singular values of every head's field."""
    if count < 1:
        raise ValueError(f"Expected a count of at least 1, got {count}. Ask for one singular value or more.")
    back = band.mirrored()
    heads, queries, _ = left.shape
    keys = right.shape[-2]
    count = min(count, queries, keys)
    generator = torch.Generator(device=left.device).manual_seed(0)
    v = torch.randn(heads, keys, dtype=left.dtype, device=left.device, generator=generator)
    steps = min(most + count, queries, keys)
    rights, lefts = v.new_zeros(heads, keys, steps + 1), v.new_zeros(heads, queries, steps)
    rights[..., 0] = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    history: list[Tensor] = []
    for step in range(steps):
        u = band.dots(left, right * rights[..., step, None])
        alpha, u = _unit(u, lefts[..., :step])
        alphas.append(alpha)
        lefts[..., step] = u
        v = back.dots(right, left * u[..., None])
        beta, v = _unit(v, rights[..., : step + 1])
        values = _bidiagonal(alphas, betas, count)
        history.append(values)
        if len(history) > _PATIENCE + count and _converged(history):
            break
        betas.append(beta)
        rights[..., step + 1] = v
    values = history[-1]
    return torch.nn.functional.pad(values, (0, count - values.shape[-1]))


def _unit(x: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return length and direction of what is orthogonal to the basis; zero stays zero."""
    before = torch.linalg.vector_norm(x, dim=-1)
    for _ in range(2):
        x = x - (known @ (known.mT @ x[..., None]))[..., 0]
    length = torch.linalg.vector_norm(x, dim=-1)
    # What is left of a vector inside the basis is rounding, and must not be made a direction.
    alive = length > 1e-14 * before
    length = torch.where(alive, length, 0.0)
    return length, torch.where(alive[..., None], x / length.clamp(min=1e-300)[..., None], 0.0)


def _bidiagonal(alphas: list[Tensor], betas: list[Tensor], count: int) -> Tensor:
    matrix = torch.diag_embed(torch.stack(alphas, -1))
    if betas:
        matrix = matrix + torch.diag_embed(torch.stack(betas, -1), offset=1)
    return torch.linalg.svdvals(matrix)[..., :count]


def _converged(history: list[Tensor]) -> bool:
    now, earlier = history[-1], history[-1 - _PATIENCE]
    if now.shape != earlier.shape:
        return False
    return bool(((now - earlier).abs() <= TOLERANCE * now[..., :1]).all())
