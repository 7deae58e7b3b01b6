"""(R^m, +), adding a row to every row."""

from __future__ import annotations

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
    shared = "columns"
    linear = True

    def act(self, g: Element, a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return a + degree * g

    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Element:
        return spread * torch.randn(m, generator=generator, dtype=torch.float64)

    def group(self, n: int, m: int) -> str:
        return f"(R^{m}, +)"
