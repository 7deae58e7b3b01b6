"""A kind whose law has squares of both signs in one unit: its formula has them, and its baseline has others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conserved.laws.baselines import spoil
from conserved.symmetry import Kind, Leg, RowProducts, Symmetry, Term, View


class Squeeze(Kind):
    """(R₊)^{n/2}: row 2j is multiplied by s_j, row 2j + 1 divided by it."""

    code = "squeeze"
    title = "squeeze"
    products = RowProducts((Term(0, 0), Term(1, 1, sign=-1)), unit=2)

    def act(self, g: Tensor, a: Tensor, degree: float) -> Tensor:
        return torch.stack((g**degree, g**-degree), 1).flatten()[:, None] * a

    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Tensor:
        return torch.exp(spread * torch.randn(n // 2, generator=generator, dtype=torch.float64))

    def group(self, n: int, m: int) -> str:
        return f"(R₊)^{n // 2}"


@pytest.fixture(name="symmetry")
def squeezed() -> Symmetry:
    return Symmetry(block="", family="squeezed", kind=Squeeze(), legs=(Leg(View.of("q", (4, 3))),))


def test_the_formula_shows_each_row_with_its_sign(symmetry: Symmetry) -> None:
    assert symmetry.formula == "(‖q⁽ʲ⁾[0]‖² − ‖q⁽ʲ⁾[1]‖²)"
    assert symmetry.latex.count("lVert") == 2


def test_the_baseline_is_not_the_law(symmetry: Symmetry) -> None:
    theta = {"q": torch.randn(4, 3, dtype=torch.float64)}
    (baseline,) = spoil([symmetry])
    law, spoiled = symmetry.law(theta), baseline.law(theta)
    squares = theta["q"].square().sum(1)
    assert torch.allclose(law, squares[0::2] - squares[1::2])
    assert not torch.allclose(spoiled.reshape(-1), law)
    assert not torch.allclose(spoiled.reshape(-1), -law)
