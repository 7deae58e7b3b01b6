"""Exact algebra for claims: matrices of letters whose polynomials are compared term by term, and of fractions.

An identity of polynomials with rational coefficients that holds term by term holds for all real values of the letters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import flint
import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[Any]
"""An array of objects: polynomials or fractions."""


class Letters:
    """Independent letters, arranged in matrices by name: `Letters(X=(2, 3), w=())["X"]`."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self._where: dict[str, tuple[int, tuple[int, ...]]] = {}
        names: list[str] = []
        for name, shape in shapes.items():
            self._where[name] = (len(names), shape)
            names += [f"{name}_{'_'.join(map(str, index))}" for index in np.ndindex(*shape)]
        self._ring = flint.fmpq_mpoly_ctx.get(tuple(names), "lex")
        self._letters = self._ring.gens()

    def __getitem__(self, name: str) -> Matrix:
        return self._arranged(name, self._letters.__getitem__)

    def __iter__(self) -> Iterator[Any]:
        """Return the matrices in their order, to be unpacked, and letters that are not in one."""
        return (self[name] if shape else self.scalar(name) for name, (_, shape) in self._where.items())

    def scalar(self, name: str) -> Any:
        """Return a letter that is not in a matrix."""
        return self[name][()]

    def gradient(self, polynomial: Any, name: str) -> Matrix:
        """Return the derivatives of a polynomial in the letters of a matrix."""
        return self._arranged(name, polynomial.derivative)

    def _arranged(self, name: str, entry: Callable[[int], Any]) -> Matrix:
        start, shape = self._where[name]
        result = np.empty(shape, dtype=object)
        for offset, index in enumerate(np.ndindex(*shape)):
            result[index] = entry(start + offset)
        return result


def arranged(rows: Sequence[Sequence[Any]]) -> Matrix:
    """Rows of polynomials as a matrix; numpy would take a polynomial for a sequence of its terms."""
    result = np.empty((len(rows), len(rows[0])), dtype=object)
    for i, row in enumerate(rows):
        for j, entry in enumerate(row):
            result[i, j] = entry
    return result


def identical(left: Any, right: Any) -> bool:
    """Return whether two polynomials, or two matrices of them, agree term by term."""
    gaps = left - right
    return all(gap == 0 for gap in (gaps.ravel().tolist() if isinstance(gaps, np.ndarray) else [gaps]))


def times(factor: Any, matrix: Matrix) -> Matrix:
    """Return a polynomial times a matrix of them; numpy would take the polynomial for a sequence."""
    result: Matrix = np.frompyfunc(lambda entry: factor * entry, 1, 1)(matrix)
    return result


def squares(matrix: Matrix) -> Any:
    """Return ‖M‖_F²."""
    return sum(entry * entry for entry in matrix.ravel().tolist())


def determinant(matrix: Matrix) -> Any:
    """Return the determinant by expansion along the first row, which needs no division; for the few rows that letters
    allow.
    """
    if len(matrix) == 1:
        return matrix[0, 0]
    rest = np.arange(len(matrix))
    return sum((-1) ** j * matrix[0, j] * determinant(matrix[1:][:, rest != j]) for j in range(len(matrix)))


def fractions(rows: Any) -> Matrix:
    """Return a matrix of exact fractions."""
    result = np.array(rows, dtype=object)
    convert: Callable[[Any], Any] = np.frompyfunc(Fraction, 1, 1)
    return np.asarray(convert(result), dtype=object)


def format_matrix(array: Matrix) -> str:
    """Exact numbers as a person writes them: (1, 1/2), or ((1, 0), (0, 1)) for a matrix."""
    parts = [format_matrix(part) if isinstance(part, np.ndarray) else str(part) for part in array]
    return f"({', '.join(parts)})"


def _rational(matrix: Matrix) -> flint.fmpq_mat:
    entries = [flint.fmpq(e.numerator, e.denominator) for e in fractions(matrix).ravel().tolist()]
    rows, columns = matrix.shape
    return flint.fmpq_mat(rows, columns, entries)


def rank(matrix: Matrix) -> int:
    """Return the rank of a matrix of fractions, exactly."""
    return int(_rational(matrix).rank()) if matrix.size else 0


def exact_determinant(matrix: Matrix) -> Fraction:
    """Return the determinant of a matrix of fractions, exactly."""
    result = _rational(matrix).det()
    return Fraction(int(result.p), int(result.q))


def positive_semidefinite(matrix: Matrix) -> bool:
    """Return whether a symmetric matrix of fractions has no negative eigenvalue: all principal minors are ≥ 0."""
    size = len(matrix)
    for chosen in range(1, 2**size):
        indices = [i for i in range(size) if chosen >> i & 1]
        if exact_determinant(matrix[np.ix_(indices, indices)]) < 0:
            return False
    return True
