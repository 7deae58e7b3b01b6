"""Sums over some rows of a map, such as those of one head, that nothing sees: which rows go together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from conserved.inference.engine import Region
from conserved.inference.system import Solution


@dataclass(frozen=True, slots=True)
class RowSums:
    """Ranges of rows of a region along one of its axes; the sum over each range is conserved, column by column."""

    axis: int
    ranges: tuple[tuple[int, int], ...]
    everywhere: bool
    """Whether the ranges are all of the axis."""


def row_sums(region: Region, shifts: Solution) -> list[RowSums]:
    """The ranges of rows that may be moved by one number each, along every axis that has numbers for its rows.

    Only patterns that are made of ranges are read: rows with the same number, next to each other.
    """
    found = []
    for strand in region.type.strands:
        atoms = strand.field.atoms.reshape(-1)
        if shifts.still(atoms).all():
            continue
        patterns = shifts.rows(atoms).toarray()
        borders = np.flatnonzero(np.abs(np.diff(patterns, axis=0)).max(1) > 1e-9) + 1
        edges = [0, *borders.tolist(), atoms.size]
        runs = [(a, b) for a, b in pairwise(edges) if np.abs(patterns[a]).max() > 1e-9]
        # Numbers that depend on each other (rows with opposite shifts) are no sums over single ranges.
        if len(runs) == np.linalg.matrix_rank(np.stack([patterns[a] for a, _ in runs]), tol=1e-9):
            everywhere = sum(b - a for a, b in runs) == atoms.size
            found.append(RowSums(strand.field.dims[0], tuple(runs), everywhere))
    return found
