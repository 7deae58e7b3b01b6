"""(R₊)^n, acting on every row by a power of its own scale."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.grams import row_dots, row_dots_and_spread
from conserved.kind.kind import Degree, Kind, norm_squared
from conserved.sheaf import Layout, Legs, RowProduct
from conserved.view import View


class Scaling(Kind):
    """(R₊)^n: row i of a leg of degree p is multiplied by s_i^p. Degrees other than ±1 come from homogeneity."""

    __slots__ = ()
    code = "scaling"
    title = "positive scaling"
    weighted = True

    def row_products(self, layout: Layout) -> tuple[RowProduct, ...]:
        return (RowProduct(layout, layout),)

    def contract(self, a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch n l"]) -> Float[Tensor, "*out"]:
        return row_dots(a, b)

    def weighed(self, a: Legs, b: Legs) -> tuple[Float[Tensor, "*out"], Float[Tensor, "*batch"]]:
        return row_dots_and_spread(a, b)

    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return g[:, None] ** degree * a

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        return torch.exp(spread * torch.randn(n, generator=generator, dtype=torch.float64))

    def units(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "laws size"]:
        return law.unsqueeze(-1)

    def numbers(self, n: int, m: int) -> int:
        return n

    def identities(self, n: int, m: int) -> int:
        return n

    def group(self, n: int, m: int) -> str:
        return f"(R₊)^{n}"

    def term(self, view: View, *, latex: bool) -> str:
        return norm_squared(view.row("i", latex=latex), latex)
