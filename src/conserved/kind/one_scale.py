"""R₊, acting on all entries by powers of one scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.grams import dots, row_dots_and_spread
from conserved.kind.kind import Degree, Kind, norm_squared
from conserved.sheaf import Layout, Legs, RowProduct
from conserved.view import View


class OneScale(Kind):
    """R₊: every entry of a leg of degree p is multiplied by s^p; legs of any shapes."""

    __slots__ = ()
    code = "one_scale"
    title = "one scale"
    weighted = True
    shared = "nothing"

    def row_products(self, layout: Layout) -> tuple[RowProduct, ...]:
        return (RowProduct(layout, layout, step=0),)

    def contract(self, a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch n l"]) -> Float[Tensor, "*out"]:
        if b.stride(-2) < b.stride(-1):
            a, b = a.mT, b.mT
        x, y = a.flatten(-2), b.flatten(-2)
        return x @ y if x.ndim == 1 else (x.unsqueeze(-2) @ y.unsqueeze(-1))[..., 0, 0]

    def pairings(
        self, sources: Sequence[Legs], pairs: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> Float[Tensor, " pairs *law"]:
        return dots(sources, pairs, dtype)

    def coordinates(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch numbers"]:
        return law.unsqueeze(-1)

    def sizes(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch rows"]:
        return law.unsqueeze(-1)

    def weighed(self, a: Legs, b: Legs) -> tuple[Float[Tensor, "*out"], Float[Tensor, "*batch"]]:
        dots, spread = row_dots_and_spread(a, b)
        return dots.sum(-1), spread

    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return g**degree * a

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        return torch.exp(spread * torch.randn((), generator=generator, dtype=torch.float64))

    def units(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "laws size"]:
        return law[None, None]

    def numbers(self, n: int, m: int) -> int:
        return 1

    def terms(self, n: int, m: int) -> int:
        return n * m

    def identities(self, n: int, m: int) -> int:
        return 1

    def group(self, n: int, m: int) -> str:
        return "R₊"

    def term(self, view: View, *, latex: bool) -> str:
        return norm_squared(view.text(latex=latex), latex)
