"""Where the laws of a function are looked for: among rows of whole parameters, or, where those are not all, entries.

Rows along the axes of parameters are few, so they serve models of any width. They miss what acts on a slice: heads that
are stacked in one parameter have laws of their own that no row along a whole axis sees. Among single entries nothing is
missed that scales or shifts entries, at the price of one sample for every parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from conserved.discovery.charges import Charges, EntryRelation, charges_of
from conserved.discovery.entries import Entries, entry_symmetries
from conserved.discovery.features import WHOLE, Rates, features_of, rates
from conserved.discovery.forms import name_laws, symmetries
from conserved.discovery.function import ParameterFunction
from conserved.discovery.relations import relations
from conserved.laws.independence import rank_of_gradients
from conserved.symmetry import Symmetry

MOST_ENTRIES = 5000
"""Parameters up to which single entries are looked at: the rates fill a square matrix of this size."""

_ALONG_AXES = 1e-5
"""A law with a larger part that is not made of whole rows is not a law of rows."""


def search(function: ParameterFunction, generator: torch.Generator, say: Callable[[str], None]) -> tuple[Symmetry, ...]:
    """Return the symmetries of a function as formulas."""
    count = len(features_of(function))
    shapes = {name: tuple(tensor.shape) for name, tensor in function.start.items()}
    by_entry = function.size <= MOST_ENTRIES
    samples = max(count, function.size if by_entry else 0) + 40
    say(f"looking for forms among {count} features over {samples} samples")
    measured = rates(function, samples, generator, whole=samples if by_entry else WHOLE)
    if not by_entry:
        return tuple(name_laws(symmetries(relations(measured), measured, shapes)))
    entries = Entries(_flat(measured.points), _flat(measured.fields), shapes)
    measured = dataclasses.replace(measured, points=_few(measured.points), fields=_few(measured.fields))
    scalings, shifts = charges_of(entries.points * entries.fields), charges_of(entries.fields)
    if _along_axes(scalings, shapes, shifted=False) and _along_axes(shifts, shapes, shifted=True):
        candidates = name_laws(symmetries(relations(measured), measured, shapes))
        exact = [symmetry for symmetry in candidates if symmetry.exact]
        lengths = [symmetry for symmetry in exact if not symmetry.kind.linear]
        sums = [symmetry for symmetry in exact if symmetry.kind.linear]
        point = function.split(entries.points[0])
        if _holds(lengths, len(scalings.null), point) and _holds(sums, len(shifts.null) + len(shifts.still), point):
            return tuple(candidates)
    return _by_entry(scalings, shifts, entries, measured, say)


def _by_entry(
    scalings: Charges, shifts: Charges, entries: Entries, measured: Rates, say: Callable[[str], None]
) -> tuple[Symmetry, ...]:
    """Return exact laws from entries; those that hold up to something small from rows, which is where they are seen."""
    say(f"looking for forms among {entries.points.shape[1]} entries")
    still = [EntryRelation(np.array([index]), np.ones(1)) for index in shifts.still.tolist()]
    exact = entry_symmetries(scalings.relations(), [*shifts.relations(), *still], entries)
    nearly = [s for s in symmetries(relations(measured, exact=False), measured, entries.shapes) if not s.exact]
    return tuple(name_laws([*exact, *nearly]))


def _flat(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten(1) if part.ndim > 1 else part.unsqueeze(1) for part in parts.values()], 1)


def _few(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: part[:WHOLE] for name, part in parts.items()}


def _holds(symmetries: list[Symmetry], least: int, point: Mapping[str, Tensor]) -> bool:
    """Return whether symmetries hold at least so many independent laws."""
    return not least or (bool(symmetries) and rank_of_gradients(symmetries, point) >= least)


def _along_axes(charges: Charges, shapes: Mapping[str, tuple[int, ...]], *, shifted: bool) -> bool:
    """Return whether every relation between entries is one between whole rows, or between sums along whole axes.

    Coefficients of whole rows are sums of functions of one index each; those of sums along an axis do not depend on the
    index along some axis. Means tell both.
    """
    table = np.zeros((len(charges.null), charges.rates.shape[1]))
    table[:, charges.alive] = charges.null
    lives = np.zeros(charges.rates.shape[1], dtype=bool)
    lives[charges.alive] = True
    start = 0
    for shape in shapes.values():
        size = int(np.prod(shape))
        part, alive = table[:, start : start + size], lives[start : start + size].reshape(shape or (1,))
        start += size
        if len(shape) < 2:
            continue
        axes = range(len(shape))
        alive_indices = [np.flatnonzero(alive.any(tuple(a for a in axes if a != axis))) for axis in axes]
        if not alive[np.ix_(*alive_indices)].all() or not (alive.all() or len(alive_indices[0]) < shape[0]):
            return False
        values = part.reshape(-1, *shape)[np.ix_(np.arange(len(part)), *alive_indices)]
        if values.size and np.abs(_beyond(values, shifted)).max() > _ALONG_AXES * np.abs(table).max():
            return False
    return True


def _beyond(values: np.ndarray, shifted: bool) -> np.ndarray:
    """Return coefficients (laws first) without the part that complete rows, or sums along axes, explain."""
    axes = range(1, values.ndim)
    if shifted:
        for axis in axes:
            values = values - values.mean(axis, keepdims=True)
        return values
    mean = values.mean(tuple(axes), keepdims=True)
    rows = sum(values.mean(tuple(a for a in axes if a != axis), keepdims=True) - mean for axis in axes)
    return values - mean - rows
