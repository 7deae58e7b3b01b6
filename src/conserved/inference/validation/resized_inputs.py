"""Inputs of other sizes: one sample more, half as long, so that laws are not tested at the given sizes alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from conserved._torch_compat import tree_flatten, tree_unflatten

Axes = frozenset[tuple[int, int]]
"""Axes of inputs: the number of the tensor and of its axis."""


def resize(inputs: Any) -> Iterator[tuple[str, Any]]:
    """Yield inputs with axes of other sizes, and what was changed in words.

    Axes that go together change together: those of one size at one place (a batch), and all of one size (a mask of
    scores). Whether a program takes such inputs is seen by calling it.
    """
    leaves, form = tree_flatten(inputs)
    for dims in _groups(leaves):
        size = next(leaves[number].shape[axis] for number, axis in dims)
        for other in dict.fromkeys((size + 1, max(size // 2, 1))):
            if other != size:
                changed = [_with_size(leaf, n, dims, other) for n, leaf in enumerate(leaves)]
                yield f"{other} instead of {size} along axis {_name_sizes(dims)}", tree_unflatten(changed, form)


def _groups(leaves: list[Any]) -> list[Axes]:
    at: dict[Any, set[tuple[int, int]]] = {}
    for number, leaf in enumerate(leaves):
        if type(leaf) is Tensor and leaf.layout == torch.strided:
            for axis, size in enumerate(leaf.shape):
                if size:
                    at.setdefault((axis, size), set()).add((number, axis))
                    at.setdefault(size, set()).add((number, axis))
    return list(dict.fromkeys(frozenset(dims) for dims in at.values()))


def _name_sizes(axes: Axes) -> str:
    return " and ".join(str(axis) for axis in sorted({axis for _, axis in axes})) + " of the inputs"


def _with_size(leaf: Any, number: int, axes: Axes, size: int) -> Any:
    for axis in sorted(axis for position, axis in axes if position == number):
        # Entries begin again after the last one: they are of the kind the program expects.
        index = torch.arange(size, device=leaf.device) % leaf.shape[axis]
        leaf = leaf.index_select(axis, index)
    return leaf
