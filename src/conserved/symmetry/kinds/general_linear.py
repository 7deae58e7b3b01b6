"""GL(n), acting on legs by matrices."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.symmetry.kind import Degree, Element, Kind
from conserved.symmetry.products import OuterProduct


class GeneralLinear(Kind):
    """GL(n): a query and its key, a value and its output projection, two linear maps in a row."""

    __slots__ = ()
    code = "general_linear"
    title = "general linear"
    products = OuterProduct()
    together = True

    def act(self, g: Element, a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return g @ a if degree > 0 else torch.linalg.solve(g.mT, a)

    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Element:
        noise = torch.randn(n, n, generator=generator, dtype=torch.float64)
        return torch.linalg.matrix_exp(spread * noise / max(n, 1) ** 0.5)

    def group(self, n: int, m: int) -> str:
        return f"GL({n})"
