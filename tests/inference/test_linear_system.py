"""Sparse exact systems have the solutions of the dense ones, whether unknowns are merged first or not."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from conserved.inference.types.system import LinearSystem

Equation = list[tuple[Fraction, int]]


def solutions(equations: list[Equation], count: int, *, joined: bool) -> np.ndarray:
    """A column for each free number, a row for each atom; atom 0 is zero."""
    system = LinearSystem()
    system.fresh((count - 1,))
    for equation in equations:
        system.add([(weight, np.array([atom])) for weight, atom in equation])
    return np.asarray(system.solve(joined=joined).expand.todense())


def dense(equations: list[Equation], count: int) -> np.ndarray:
    rows = np.zeros((len(equations) + 1, count))
    rows[0, 0] = 1
    for row, equation in zip(rows[1:], equations, strict=True):
        for weight, atom in equation:
            row[atom] += float(weight)
    return rows


def sums_over_positions(tokens: int, width: int, layers: int) -> tuple[list[Equation], int]:
    """u_{l+1}[t] = u_l[t] + v_l[d] for all t and d, with the signs of every third equation turned."""
    u = 1 + np.arange((layers + 1) * tokens).reshape(layers + 1, tokens)
    v = u.max() + 1 + np.arange(layers * width).reshape(layers, width)
    one = Fraction(1)
    equations: list[Equation] = []
    for layer, t, d in np.ndindex(layers, tokens, width):
        sign = -one if len(equations) % 3 == 0 else one
        terms = ((sign, u[layer, t]), (sign, v[layer, d]), (-sign, u[layer + 1, t]))
        equations.append([(weight, int(atom)) for weight, atom in terms])
    return equations, int(v.max()) + 1


def random_system(seed: int) -> tuple[list[Equation], int]:
    """Mostly equations of three terms with unit weights on few unknowns, so that many differ in one term."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(6, 16))
    equations = []
    for _ in range(int(rng.integers(2, 14))):
        size = int(rng.choice([2, 3, 3, 3, 4]))
        weights = rng.choice([-1, 1], size) if rng.random() < 0.8 else rng.choice([-3, -2, 1, 2], size)
        atoms = rng.choice(count, size, replace=False)
        equations.append([(Fraction(int(w), 2), int(a)) for w, a in zip(weights, atoms, strict=True)])
    return equations, count


def check(equations: list[Equation], count: int, *, joined: bool) -> None:
    result, matrix = solutions(equations, count, joined=joined), dense(equations, count)
    assert np.abs(matrix @ result).max(initial=0.0) < 1e-12
    assert result.shape[1] == np.linalg.matrix_rank(result) == count - np.linalg.matrix_rank(matrix)


@pytest.mark.parametrize("joined", [True, False], ids=["merged first", "eliminated"])
@pytest.mark.parametrize("seed", range(60))
def test_random_systems(seed: int, joined: bool) -> None:
    check(*random_system(seed), joined=joined)


@pytest.mark.parametrize("joined", [True, False], ids=["merged first", "eliminated"])
def test_sums_over_positions(joined: bool) -> None:
    check(*sums_over_positions(5, 4, 3), joined=joined)


def test_sums_over_positions_are_merged_and_not_eliminated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one equation for each position, layer and feature, one for each position and layer is left at most."""
    from conserved.inference.types import echelon, system

    eliminated: list[int] = []
    eliminate = echelon.eliminate

    def counted(rows):  # type: ignore[no-untyped-def]
        eliminated.append(len(rows))
        return eliminate(rows)

    monkeypatch.setattr(system, "eliminate", counted)
    solutions(*sums_over_positions(12, 10, 2), joined=True)
    solutions(*sums_over_positions(12, 10, 2), joined=False)
    assert eliminated[0] <= 2 * 12
    assert eliminated[1] == 2 * 12 * 10


def test_an_unknown_that_is_its_own_negative_is_zero() -> None:
    """x + y + z = 0 and x + y − z = 0."""
    one = Fraction(1)
    equations = [[(one, 1), (one, 2), (one, 3)], [(one, 1), (one, 2), (-one, 3)]]
    result = solutions(equations, 4, joined=True)
    assert not result[3].any()
    check(equations, 4, joined=True)


def test_soft_equations_are_solved_exactly() -> None:
    """7·x = 10007·y, and softly y = z/7: denominators beyond any table of round numbers."""
    system = LinearSystem()
    x, y, z = system.fresh((3,))
    system.add([(Fraction(7), np.array([x])), (Fraction(-10007), np.array([y]))])
    system.add([(Fraction(1), np.array([y])), (Fraction(-1, 7), np.array([z]))], soft=1e-6)
    solution = system.solve()
    assert solution.soft.tolist() == [0.0, 1e-6]
    rows = [solution.exact_row(int(solution.group[atom])) for atom in (x, y, z)]
    signs = [int(solution.sign[atom]) for atom in (x, y, z)]
    exact = [Fraction(row.get(0, 0)) * sign for row, sign in zip(rows, signs, strict=True)]
    assert exact[1] != 0
    assert 7 * exact[0] == 10007 * exact[1]
    assert 7 * exact[1] == exact[2]
