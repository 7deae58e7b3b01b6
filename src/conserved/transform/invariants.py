"""Numbers that no symmetry changes: what is left of weights when their gauge is forgotten.

At the point of `fix_scales` all remaining symmetries are orthogonal. Let L and M be two legs of one space, n × m each.
A rotation or an exchange of the space turns the rows of both alike, so these do not change:

| number | what it sees |
|---|---|
| ‖W‖ | the size of a parameter |
| ‖W Wᵀ‖^½ | its singular values, to fourth order |
| Σ L·M / (‖W_L‖‖W_M‖) | how two parameters stand to each other, with their sign |

The last is taken where the columns of L and M belong to the same spaces, entry by entry. None needs a frame,
which rounding would turn wherever two eigenvalues are close.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from conserved.symmetry import Symmetry, View
from conserved.transform.moving import Weights, write

LARGE = 2**24
"""Entries from which on products of matrices are taken in single precision."""


def rotating_spaces(symmetries: Iterable[Symmetry]) -> list[Symmetry]:
    """Return the symmetries whose groups hold rotations or exchanges; scales and shifts are fixed."""
    return [symmetry for symmetry in symmetries if symmetry.kind.rotates]


def sizes(tensor: Tensor) -> tuple[float, float]:
    """Return the norm of a parameter and, of a matrix, the fourth-order norm of its singular values."""
    norm = float(tensor.norm())
    if tensor.ndim != 2:
        return norm, norm
    matrix = tensor.float() if tensor.numel() > LARGE else tensor
    matrix = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    return norm, float((matrix @ matrix.mT).double().norm()) ** 0.5


def partners(spaces: Sequence[Symmetry]) -> list[tuple[View, View]]:
    """Return pairs of legs of one space whose columns belong to the same spaces, entry by entry."""
    touching: dict[str, set[int]] = defaultdict(set)
    for number, space in enumerate(spaces):
        for name in space.parameters:
            touching[name].add(number)
    result: dict[tuple[View, View], None] = {}
    for number, space in enumerate(spaces):
        views = list(dict.fromkeys(leg.view for leg in space.legs))
        for index, left in enumerate(views):
            for right in views[index + 1 :]:
                own, other = touching[left.parameter], touching[right.parameter]
                near = (own ^ other) - {number}
                if left.m != right.m or left.parameter == right.parameter or _elsewhere(near, spaces, left, right):
                    continue
                if all(_alike(spaces[t], left, right) for t in own & other if t != number):
                    result[left, right] = None
                    break
    return list(result)


def _elsewhere(near: set[int], spaces: Sequence[Symmetry], left: View, right: View) -> bool:
    """Return whether a space that moves only one of two parameters touches the entries that a leg has there."""
    return any(bool((_labels(spaces[t], view) >= 0).any()) for t in near for view in (left, right))


def _alike(space: Symmetry, left: View, right: View) -> bool:
    return torch.equal(_labels(space, left), _labels(space, right))


def _labels(space: Symmetry, view: View) -> Tensor:
    """Return for every entry of a leg, the row of the space that it belongs to; −1 where it belongs to none."""
    labels = torch.full(view.shape, -1.0)
    for leg in space.legs:
        if leg.view.parameter == view.parameter:
            rows = torch.arange(leg.view.n, dtype=torch.float32)[:, None].expand(leg.view.n, leg.view.m)
            write(replace(leg.view, offset=0.0), labels, rows)
    return view.matrix(labels)


def orthogonal_invariants(weights: Weights, names: Iterable[str], spaces: Sequence[Symmetry]) -> dict[str, list[float]]:
    """Return, by parameter, numbers that rotations and exchanges of the spaces do not change.

    Two tensors are held at a time. Heads are added up, so that their order does not count.
    """
    numbers = {name: list(sizes(weights.read(name))) for name in names}
    together: dict[tuple[str, str], list[tuple[View, View]]] = defaultdict(list)
    for left, right in partners(spaces):
        together[left.parameter, right.parameter].append((left, right))
    for (first, other), views in together.items():
        a, b = weights.read(first), weights.read(other)
        size = float(a.norm() * b.norm())
        total = sum(float((left.of_point(a) * right.of_point(b)).sum()) for left, right in views)
        numbers[first].append(total / size if size else 0.0)
    return numbers
