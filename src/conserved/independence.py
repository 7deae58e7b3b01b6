"""How many conserved numbers are functionally independent: the rank of their gradients at the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.symmetry import Symmetry, Tensors
from conserved.view import whole

_LARGEST = 100_000_000
"""Entries of the largest Jacobian that is formed: 0.8 GB of float64."""

_RELATIVE_RANK = 1e-10
"""Singular values below this fraction of the largest count as zero."""


def rank_of_gradients(symmetries: Sequence[Symmetry], theta: Tensors) -> int:
    """Rank of the stacked ∇h of all laws; symmetries that share no parameter are treated apart."""
    return sum(_rank(part, theta) for part in _components(symmetries))


def _components(symmetries: Sequence[Symmetry]) -> list[list[Symmetry]]:
    """Symmetries connected through the parameters they move."""
    parts: list[tuple[set[str], list[Symmetry]]] = []
    for symmetry in symmetries:
        names, members = set(symmetry.parameters), [symmetry]
        touching = [part for part in parts if part[0] & names]
        for part in touching:
            names |= part[0]
            members = part[1] + members
        parts = [part for part in parts if not any(part is other for other in touching)] + [(names, members)]
    return [members for _, members in parts]


def _rank(symmetries: list[Symmetry], theta: Tensors) -> int:
    names = list(dict.fromkeys(name for symmetry in symmetries for name in symmetry.parameters))
    numbers = sum(symmetry.numbers for symmetry in symmetries)
    entries = sum(prod(theta[name].shape) for name in names)
    if numbers * entries > _LARGEST:
        raise ValueError(
            f"Counting independent laws needs a Jacobian of {numbers:,} laws × {entries:,} parameters "
            f"({numbers * entries * 8 / 1e9:,.0f} GB) for the part around {symmetries[0].name}. "
            "Count them on a narrower model of the same architecture; `numbers` is the count without this check."
        )
    point = {}
    for name in names:
        if theta[name].is_meta:
            raise ValueError(f"{name} is on the meta device: the number of independent laws depends on its values.")
        point[name] = whole(theta[name].detach()).to(torch.float64)
        if not bool(torch.isfinite(point[name]).all()):
            raise ValueError(
                f"{name} holds NaN or infinite values; the number of independent laws is not defined there."
            )

    def every_number(values: dict[str, Tensor]) -> Float[Tensor, " numbers"]:
        return torch.cat([symmetry.kind.coordinates(symmetry.law(values)) for symmetry in symmetries])

    jacobian = torch.func.jacrev(every_number)(point)
    rows = torch.cat([jacobian[name].reshape(numbers, -1) for name in names], dim=1)
    lengths = torch.linalg.vector_norm(rows, dim=1)
    # A law whose gradient vanishes here (all its legs are zero) must stay zero, not be scaled up to a direction.
    alive = lengths > 1e-14 * lengths.max()
    if not bool(alive.any()):
        return 0
    singular = torch.linalg.svdvals(rows[alive] / lengths[alive, None])
    return int((singular > _RELATIVE_RANK * singular[0]).sum())
