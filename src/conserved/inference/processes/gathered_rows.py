"""Rows that a process puts side by side with those of other processes, as a key head that heads everywhere read.

A process that gathers rows computes with those of others. Followed by one process, they are copies of its own, so that
a law seems to be one among its own parameters. What the other processes do with its rows is not known here, so that
such laws are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np

from conserved.inference.types.tensor_type import Type
from conserved.inference.typing import Typing
from conserved.symmetry import Leg, Symmetry, View

GATHERED = "its rows are gathered with those of other processes, which compute with them as well"
"""Why a law of gathered rows is left out."""


def laws_of_gathered_rows(typing: Typing, symmetries: Iterable[Symmetry]) -> frozenset[str]:
    """Return the names of laws of a program with collectives whose rows are gathered."""
    gathered = _repeated_atoms(typing)
    if not gathered.size:
        return frozenset()
    return frozenset(law.name for law in symmetries if any(runs_over(leg, typing, gathered) for leg in law.legs))


def assumed_atoms(typing: Typing) -> np.ndarray:
    """Return the charges of tensors that pass through functions whose backward is their author's, in order."""
    passed = [array.reshape(-1) for arrays in typing.assumed.values() for array in arrays]
    return np.unique(np.concatenate(passed)) if passed else np.zeros(0, dtype=np.int64)


def occur(atoms: np.ndarray, among: np.ndarray) -> bool:
    """Return whether some charges are among others, which are in order: many laws are asked about the same ones."""
    if not among.size or not atoms.size:
        return False
    index = np.searchsorted(among, atoms).clip(max=among.size - 1)
    return bool((among[index] == atoms).any())


def runs_over(leg: Leg, typing: Typing, atoms: np.ndarray) -> bool:
    """Return whether the rows of a leg run over some of these charges, which are in order."""
    faced = _faced_axes(leg.view)
    for region in typing.engine.regions.get(leg.view.parameter, []):
        own = [factor.atoms.reshape(-1) for factor in region.type.factors if faced.intersection(factor.dims)]
        if any(occur(np.abs(part), atoms) for part in own):
            return True
    return False


def _repeated_atoms(typing: Typing) -> np.ndarray:
    """Return the charges of which several copies are put side by side: rows of a gathered tensor."""
    repeated: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    for operation in typing.program.operations:
        if not operation.name.startswith("aten::cat"):
            continue
        axis = operation.args[1] if len(operation.args) > 1 else operation.kwargs.get("dim", 0)
        parts = [_atoms_along(typing, number, int(axis)) for number in operation.inputs()]
        first = parts[0] if parts else None
        if first is not None and len(parts) > 1 and all(p is not None and np.array_equal(p, first) for p in parts):
            repeated.append(np.abs(first.reshape(-1)))
    return np.unique(np.concatenate(repeated))


def _atoms_along(typing: Typing, number: int, axis: int) -> np.ndarray | None:
    """Return the charges of a value along one of its axes; None if it has none there."""
    value = typing.known.get(number)
    if not isinstance(value, Type):
        return None
    axis %= len(typing.program.values[number].shape)
    return next((factor.atoms for factor in value.factors if axis in factor.dims), None)


def _faced_axes(view: View) -> set[int]:
    """Return the axes of the parameter that the rows of a view run over."""
    result = set()
    for axis in view.axes:
        inner = prod(view.grid[axis + 1 :])
        for dim in range(len(view.shape)):
            after = prod(view.shape[dim + 1 :])
            if after <= inner < after * view.shape[dim]:
                result.add(dim)
    return result
