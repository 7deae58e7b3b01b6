"""Different entries of arrays of atoms: those of `np.unique`, without sorting what is numbered in a row."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from conserved.inference.types.tensor_type import distinct

GENERATOR = np.random.default_rng(0)

ARRAYS = [
    GENERATOR.integers(0, 50, (7, 3)),
    np.broadcast_to(GENERATOR.integers(5, 900, (6, 1, 9)), (6, 50, 9)),
    GENERATOR.integers(0, 10**12, 100),
    np.array([[3]]),
    np.zeros((0, 2), dtype=np.int64),
    np.arange(10)[::-1],
    np.arange(12).reshape(3, 4).T,
]


@pytest.mark.parametrize("atoms", ARRAYS, ids=lambda atoms: str(atoms.shape))
def test_different_entries_come_in_order(atoms: NDArray[np.int64]) -> None:
    found = distinct(atoms)
    assert np.array_equal(found, np.unique(atoms))
    assert found.dtype == atoms.dtype


def test_atoms_that_are_numbered_in_a_row_are_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`np.unique` takes seconds for the millions of atoms of a convolution."""

    def refuse(*_: object) -> None:
        raise AssertionError

    atoms = GENERATOR.integers(0, 5000, 2000)
    monkeypatch.setattr(np, "unique", refuse)
    assert np.array_equal(distinct(atoms), sorted(set(atoms.tolist())))
