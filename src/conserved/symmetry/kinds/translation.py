"""(R^m, +), adding a row to every row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.symmetry.kind import Degree, Element, Kind
from conserved.symmetry.products import RowProducts


class Translation(Kind):
    r"""(R^m, +): a leg of degree p gets p·c added to each of its rows. Its law is linear: p times the sum of the rows.

    In homogeneous coordinates a point carries a 1 and a direction (a gradient, an update) a 0, and the generator
    is linear in that coordinate: ξ·A = 1 ξᵀ at a point, 0 at a direction. With A so lifted the formulas for the
    law, the identity and the drift are the ones of every other kind.
    """

    __slots__ = ()
    code = "translation"
    title = "translation"
    products = RowProducts(faces="columns", lifted=True)
    together = True
    weighted = True
    rotates = False
    shared = "columns"
    linear = True

    def act(self, g: Element, a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return a + degree * g

    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Element:
        return spread * torch.randn(m, generator=generator, dtype=torch.float64)

    def group(self, n: int, m: int) -> str:
        return f"(R^{m}, +)"

    def inverse(self, g: Element) -> Element:
        return -g

    def compose(self, later: Element, earlier: Element) -> Element:
        return later + earlier

    def canonical_element(self, legs: Sequence[Tensor], degrees: Sequence[Degree]) -> Element | None:
        return None

    def least_norm_element(self, legs: Sequence[Tensor], degrees: Sequence[Degree]) -> Element:
        """Return minus the weighted mean of the rows: the law p·Σ rows is zero there."""
        total = torch.stack([degree * leg.sum(0) for leg, degree in zip(legs, degrees, strict=True)]).sum(0)
        return -total / sum(degree**2 * len(leg) for leg, degree in zip(legs, degrees, strict=True))

    def nearest_element(
        self, wanted: Sequence[Tensor], legs: Sequence[Tensor], degrees: Sequence[Degree]
    ) -> Element | None:
        total = torch.stack([d * (a - b).sum(0) for d, a, b in zip(degrees, wanted, legs, strict=True)]).sum(0)
        return total / sum(d**2 * len(a) for d, a in zip(degrees, wanted, strict=True))
