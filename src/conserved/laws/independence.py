"""How many conserved numbers are functionally independent: the rank of their gradients at the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.symmetry import Symmetry, Tensors, whole

T = TypeVar("T")

_LARGEST = 100_000_000
"""Entries of the largest Jacobian that is formed: 0.8 GB of float64."""

_RELATIVE_RANK = 1e-10
"""Singular values below this fraction of the largest count as zero."""


def rank_of_gradients(symmetries: Sequence[Symmetry], theta: Tensors) -> int:
    """Rank of the stacked ∇h of all laws; symmetries that share no parameter are treated apart."""
    parts = connected_groups(symmetries, lambda symmetry: set(symmetry.parameters))
    for part in parts:
        _refuse_too_large(part, theta)
    return sum(_rank(part, theta) for part in parts)


def connected_groups(items: Iterable[T], keys: Callable[[T], set[str]]) -> list[list[T]]:
    """Return items in groups that are connected through keys they share."""
    groups: list[tuple[set[str], list[T]]] = []
    for item in items:
        own, members = keys(item), [item]
        for group in [group for group in groups if group[0] & own]:
            groups.remove(group)
            own, members = own | group[0], group[1] + members
        groups.append((own, members))
    return [members for _, members in groups]


def _refuse_too_large(symmetries: list[Symmetry], theta: Tensors) -> None:
    numbers = sum(symmetry.numbers for symmetry in symmetries)
    entries = sum(prod(theta[name].shape) for name in _parameters(symmetries))
    if numbers * entries > _LARGEST:
        raise ValueError(
            f"Expected a Jacobian of at most {_LARGEST:,} entries to count independent laws, got {numbers:,} laws × "
            f"{entries:,} parameters ({numbers * entries * 8 / 1e9:,.0f} GB) around {symmetries[0].name}. "
            "Count them on a narrower model of the same architecture; `numbers` is the count without this check."
        )


def _parameters(symmetries: list[Symmetry]) -> list[str]:
    return list(dict.fromkeys(name for symmetry in symmetries for name in symmetry.parameters))


def _rank(symmetries: list[Symmetry], theta: Tensors) -> int:
    names = _parameters(symmetries)
    point = {}
    for name in names:
        if theta[name].is_meta:
            raise ValueError(f"Expected parameters with values, got {name} on the meta device. Load the weights first.")
        point[name] = whole(theta[name].detach()).to(torch.float64)
        if not bool(torch.isfinite(point[name]).all()):
            raise ValueError(
                f"Expected finite parameters, got NaN or infinity in {name}. Count independent laws at finite values."
            )

    def every_number(values: dict[str, Tensor]) -> Float[Tensor, " numbers"]:
        return torch.cat([symmetry.kind.coordinates(symmetry.law(values)) for symmetry in symmetries])

    jacobian = torch.func.jacrev(every_number)(point)
    rows = torch.cat([jacobian[name].reshape(len(jacobian[name]), -1) for name in names], dim=1)
    lengths = torch.linalg.vector_norm(rows, dim=1)
    # A law whose gradient vanishes here (all its legs are zero) must stay zero, not be scaled up to a direction.
    alive = lengths > 1e-14 * lengths.max()
    if not bool(alive.any()):
        return 0
    singular = torch.linalg.svdvals(rows[alive] / lengths[alive, None])
    return int((singular > _RELATIVE_RANK * singular[0]).sum())
