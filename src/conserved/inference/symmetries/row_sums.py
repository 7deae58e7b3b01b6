"""Sums over some rows of a map, such as those of one head, that nothing sees: which rows go together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.sparse import csr_matrix

from conserved.inference.types.engine import Region
from conserved.inference.types.system import Solution


@dataclass(frozen=True, slots=True)
class RowSums:
    """Ranges of rows of a region along one of its axes; the sum over each range is conserved, column by column."""

    axis: int
    ranges: tuple[tuple[int, int], ...]
    everywhere: bool
    """Whether the ranges are all of the axis."""


_MOST = 4096
"""Ranges of one axis beyond which no sums are looked for: whether they are independent takes a dense matrix."""


def _largest(rows: csr_matrix) -> np.ndarray:
    """Return the largest magnitude of every row of a sparse matrix."""
    return np.asarray(abs(rows).max(axis=1).todense()).reshape(-1)


def row_sums(region: Region, shifts: Solution) -> list[RowSums]:
    """Return the ranges of rows that may be moved by one number each, along every axis that has numbers for its rows.

    Only patterns that are made of ranges are read: rows with the same number, next to each other.
    """
    result = []
    for strand in region.type.strands:
        atoms = strand.field.atoms.reshape(-1)
        if shifts.still(atoms).all():
            continue
        rows = shifts.rows(atoms).tocsr()
        edges = [0, *(np.flatnonzero(_largest(rows[1:] - rows[:-1]) > 1e-9) + 1).tolist(), atoms.size]
        sizes = _largest(rows)
        runs = [(a, b) for a, b in pairwise(edges) if sizes[a] > 1e-9]
        if len(runs) > _MOST:
            continue
        patterns = rows[[a for a, _ in runs]]
        patterns = patterns[:, np.unique(patterns.indices)].toarray()
        # Numbers that depend on each other (rows with opposite shifts) are no sums over single ranges.
        if len(runs) == np.linalg.matrix_rank(patterns, tol=1e-9):
            everywhere = sum(b - a for a, b in runs) == atoms.size
            result.append(RowSums(strand.field.dims[0], tuple(runs), everywhere))
    return result
