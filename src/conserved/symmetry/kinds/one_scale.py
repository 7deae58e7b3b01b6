"""R₊, acting on all entries by powers of one scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.symmetry.kind import Degree, Element, Kind
from conserved.symmetry.products import RowProducts


class OneScale(Kind):
    """R₊: every entry of a leg of degree p is multiplied by s^p; legs of any shapes."""

    __slots__ = ()
    code = "one_scale"
    title = "one scale"
    products = RowProducts(faces="entries")
    weighted = True
    rotates = False
    shared = "nothing"
    positive = True

    def act(self, g: Element, a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return g**degree * a

    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Element:
        return torch.exp(spread * torch.randn((), generator=generator, dtype=torch.float64))

    def group(self, n: int, m: int) -> str:
        return "R₊"

    def inverse(self, g: Element) -> Element:
        return 1 / g

    def compose(self, later: Element, earlier: Element) -> Element:
        return later * earlier

    def element_problem(self, g: Element, name: str) -> str:
        return "" if bool((g > 0).all()) else f"{name} scales by positive numbers; got {float(g.min()):g}."

    def scaling_element(self, factors: Float[Tensor, " units"]) -> Element:
        return factors.reshape(())

    def row_scales(self, g: Element) -> Float[Tensor, "*n"] | None:
        return g

    def canonical_element(self, legs: Sequence[Tensor], degrees: Sequence[Degree]) -> Element | None:
        return None
