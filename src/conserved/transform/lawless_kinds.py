"""Two kinds of group that move parameters and conserve nothing: exchanges of equal units, and rotations."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.symmetry import Degree, Kind, RowProducts


class _WithoutLaw(Kind):
    """A group without symmetric generators: it moves parameters and leaves no law behind."""

    __slots__ = ()
    products = RowProducts(())


class Exchange(_WithoutLaw):
    """S_n: equal units change places, along all legs at once. The element lists, for every row, the row it was."""

    __slots__ = ()
    code = "exchange"
    title = "exchange of units"

    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return a[g.to(a.device, torch.long)]

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        return torch.randperm(n, generator=generator)

    def group(self, n: int, m: int) -> str:
        return f"S_{n}"


class Orthogonal(_WithoutLaw):
    """O(n): a space that only its length is seen of, as a residual stream whose norms have no gains."""

    __slots__ = ()
    code = "orthogonal"
    title = "orthogonal"

    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return g @ a

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        noise = torch.randn(n, n, generator=generator, dtype=torch.float64)
        return torch.linalg.matrix_exp(spread * (noise - noise.mT) / max(n, 1) ** 0.5)

    def group(self, n: int, m: int) -> str:
        return f"O({n})"
