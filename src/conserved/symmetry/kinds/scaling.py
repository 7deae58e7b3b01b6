"""(R₊)^n, acting on every row by a power of its own scale."""

from __future__ import annotations

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

    def act(self, g: Element, a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return g[:, None] ** degree * a

    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Element:
        return torch.exp(spread * torch.randn(n, generator=generator, dtype=torch.float64))

    def group(self, n: int, m: int) -> str:
        return f"(R₊)^{n}"
