"""(R₊)^n, acting on every row by a power of its own scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.symmetry.kind import Degree, Element, Kind
from conserved.symmetry.products import RowProducts


class Scaling(Kind):
    """(R₊)^n: row i of a leg of degree p is multiplied by s_i^p. Degrees other than ±1 come from homogeneity."""

    __slots__ = ()
    code = "scaling"
    title = "positive scaling"
    products = RowProducts()
    weighted = True
    rotates = False
    positive = True

    def act(self, g: Element, a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return g[:, None] ** degree * a

    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Element:
        return torch.exp(spread * torch.randn(n, generator=generator, dtype=torch.float64))

    def group(self, n: int, m: int) -> str:
        return f"(R₊)^{n}"

    def inverse(self, g: Element) -> Element:
        return 1 / g

    def compose(self, later: Element, earlier: Element) -> Element:
        return later * earlier

    def element_problem(self, g: Element, name: str) -> str:
        return "" if bool((g > 0).all()) else f"{name} scales by positive numbers; got {float(g.min()):g}."

    def scaling_element(self, factors: Float[Tensor, " units"]) -> Element:
        return factors

    def row_scales(self, g: Element) -> Float[Tensor, "*n"] | None:
        return g

    def canonical_element(self, legs: Sequence[Tensor], degrees: Sequence[Degree]) -> Element | None:
        return None
