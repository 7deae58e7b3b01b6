"""The sparse echelon form agrees with dense elimination over the rationals."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from conserved.inference.types.echelon import Echelon, Equation, Exact, back_substitute, eliminate


def dense_rank(rows: list[Equation], columns: int) -> int:
    """Return the rank by dense Gaussian elimination over the rationals."""
    table = [[Fraction(row.get(column, 0)) for column in range(columns)] for row in rows]
    rank = 0
    for column in range(columns):
        chosen = next((i for i in range(rank, len(table)) if table[i][column]), None)
        if chosen is None:
            continue
        table[rank], table[chosen] = table[chosen], table[rank]
        for i in range(rank + 1, len(table)):
            factor = table[i][column] / table[rank][column]
            table[i] = [a - factor * b for a, b in zip(table[i], table[rank], strict=True)]
        rank += 1
    return rank


def random_rows(seed: int, columns: int = 12) -> list[Equation]:
    """Sparse rational rows, some of them combinations of others."""
    rng = np.random.default_rng(seed)
    rows: list[Equation] = []
    for _ in range(10):
        chosen = rng.choice(columns, int(rng.integers(1, 5)), replace=False).tolist()
        rows.append({c: Fraction(int(rng.integers(1, 9)), int(rng.integers(1, 9))) * (-1) ** c for c in chosen})
        if len(rows) > 2 and rng.random() < 0.5:
            a, b = rows[int(rng.integers(len(rows)))], rows[int(rng.integers(len(rows)))]
            total: Equation = {c: a.get(c, 0) + Fraction(1, 3) * b.get(c, 0) for c in {*a, *b}}
            rows.append({c: value for c, value in total.items() if value})
    return rows


def value_of(row: Equation, numbers: list[Fraction]) -> Exact:
    return sum((value * numbers[column] for column, value in row.items()), Fraction(0))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("choose", [min, max])
def test_rank_is_that_of_dense_elimination(seed: int, choose) -> None:  # type: ignore[no-untyped-def]
    rows, echelon = random_rows(seed), Echelon()
    for row in rows:
        echelon.add(row, choose)
    assert echelon.rank == dense_rank(rows, 12)
    assert all(not echelon.reduce(row) for row in rows)


@pytest.mark.parametrize("seed", range(30))
def test_every_basis_vector_has_an_entry_of_its_own(seed: int) -> None:
    rows, echelon = random_rows(seed), Echelon()
    for row in rows:
        echelon.add(row, min)
    basis = echelon.basis()
    for pivot, vector in basis.items():
        assert vector[pivot] == 1
        assert not any(other in vector for other in basis if other != pivot)
    assert dense_rank([*rows, *basis.values()], 12) == len(basis)


@pytest.mark.parametrize("seed", range(30))
def test_solutions_satisfy_every_equation_exactly(seed: int) -> None:
    rows = random_rows(seed)
    final = back_substitute(eliminate(rows))
    assert len(final) == dense_rank(rows, 12)
    rng = np.random.default_rng(seed)
    numbers = [Fraction(int(rng.integers(-9, 9)), 7) for _ in range(12)]
    for column, expression in final.items():
        assert not any(other in final for other in expression)
        numbers[column] = Fraction(value_of(expression, numbers))
    assert all(value_of(row, numbers) == 0 for row in rows)
