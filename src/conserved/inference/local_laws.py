"""Laws of a program with collectives that one process can test by itself.

A law between a replicated parameter and parameters in pieces is an identity of sums over all processes: a gain against
the columns of readers that are spread over a group. Tested by one process, right gradients seem wrong and wrong ones
right. Without a layout it is not known which parameters are in pieces. What one process can test are laws among maps
whose space neither enters nor leaves a function that exchanges tensors: heads and hidden units that it holds alone.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
from torch import nn

from conserved.inference.derivation import Derivation
from conserved.inference.typing import Typing
from conserved.laws import Dropped, LawSet
from conserved.symmetry import Symmetry, View

SPREAD = "it is an identity of sums over several processes, and which parameters are in pieces is not known"
"""Why a law is not tested by one process."""

_LAYOUT_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "full_tensor")
"""Attributes by which a stack tells which parameters are in pieces."""


def laws_of_one_process(laws: LawSet, model: nn.Module) -> LawSet:
    """Return the laws that a process can test alone, if nothing says which parameters are in pieces.

    Args:
        laws: the laws of the model.
        model: the model.

    Returns:
        All laws of a program that exchanges no tensors, or whose parameters tell their layout. Otherwise those of the
        process's own heads and hidden units; the others are in `dropped`.
    """
    derivation = laws.derivation
    if not isinstance(derivation, Derivation) or not derivation.typing.program.communicates:
        return laws
    if any(hasattr(p, name) for p in model.parameters() for name in _LAYOUT_ATTRIBUTES):
        return laws
    arrays = [one.reshape(-1) for several in derivation.typing.assumed.values() for one in several]
    exchanged = np.unique(np.abs(np.concatenate(arrays))) if arrays else np.zeros(0, dtype=np.int64)
    spread = [one for one in laws if not _is_local(one, derivation.typing, exchanged)]
    names = {one.name for one in spread}
    return replace(
        laws,
        symmetries=tuple(one for one in laws if one.name not in names),
        dropped=(*laws.dropped, *(Dropped(name, SPREAD) for name in sorted(names))),
    )


def _is_local(symmetry: Symmetry, typing: Typing, exchanged: np.ndarray) -> bool:
    """Whether a law is among maps of one process: vectors may be replicated, and their gradients sums of all."""
    for leg in symmetry.legs:
        if len(leg.view.shape) < 2 or len(symmetry.parameters) < 2:
            return False
        faced = _faced_axes(leg.view)
        for region in typing.engine.regions.get(leg.view.parameter, []):
            atoms = [one.atoms.reshape(-1) for one in region.type.factors if faced.intersection(one.dims)]
            if atoms and np.isin(np.abs(np.concatenate(atoms)), exchanged).any():
                return False
    return True


def _faced_axes(view: View) -> set[int]:
    """The axes of the parameter that the rows of a view run over."""
    found = set()
    for axis in view.axes:
        inner = prod(view.grid[axis + 1 :])
        for dim in range(len(view.shape)):
            after = prod(view.shape[dim + 1 :])
            if after <= inner < after * view.shape[dim]:
                found.add(dim)
    return found
