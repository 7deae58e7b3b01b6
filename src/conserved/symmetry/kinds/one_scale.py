"""R₊, acting on all entries by powers of one scale."""

from __future__ import annotations

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
    shared = "nothing"

    def act(self, g: Element, a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return g**degree * a

    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Element:
        return torch.exp(spread * torch.randn((), generator=generator, dtype=torch.float64))

    def group(self, n: int, m: int) -> str:
        return "R₊"
