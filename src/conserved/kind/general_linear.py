"""GL(n), acting on legs by matrices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.fused import LARGEST
from conserved.grams import outer_and_spread, outer_products
from conserved.kind.kind import Degree, Kind
from conserved.sheaf import Legs
from conserved.view import View


@cache
def _upper(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    row, column = torch.triu_indices(n, n, device=device)
    return row, column


class GeneralLinear(Kind):
    """GL(n): a query and its key, a value and its output projection, two linear maps in a row."""

    __slots__ = ()
    code = "general_linear"
    title = "general linear"
    together = True

    def in_sheaves(self, n: int) -> bool:
        return n <= LARGEST

    def contract(self, a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch n l"]) -> Float[Tensor, "*out"]:
        return a @ b.mT

    def weighed(self, a: Legs, b: Legs) -> tuple[Float[Tensor, "*out"], Float[Tensor, "*batch"]]:
        return outer_and_spread(a, b)

    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return g @ a if degree > 0 else torch.linalg.solve(g.mT, a)

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        noise = torch.randn(n, n, generator=generator, dtype=torch.float64)
        return torch.linalg.matrix_exp(spread * noise / max(n, 1) ** 0.5)

    def rotation(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*part"] | None:
        return mu - mu.mT

    def pairings(
        self, sources: Sequence[Legs], pairs: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> Float[Tensor, " pairs *law"]:
        return outer_products(sources, pairs, dtype)

    def polar(self, pairing: Float[Tensor, "*law"]) -> Float[Tensor, "*law"]:
        return (pairing + pairing.mT) / 2

    def coordinates(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch numbers"]:
        row, column = _upper(law.shape[-1], law.device)
        return law[..., row, column]

    def multiplicities(self, n: int, m: int) -> Float[Tensor, " numbers"]:
        row, column = torch.triu_indices(n, n)
        return torch.where(row == column, 1.0, 2.0)

    def sizes(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch rows"]:
        return law.diagonal(dim1=-2, dim2=-1)

    def reach(self, sizes: Float[Tensor, "*batch rows"]) -> Float[Tensor, "*batch numbers"]:
        # |Σ_k a_ik a_jk| ≤ ‖a_i‖ ‖a_j‖.
        root = sizes.sqrt()
        return self.coordinates(root.unsqueeze(-1) * root.unsqueeze(-2))

    def units(self, law: Float[Tensor, "n n"]) -> Float[Tensor, "1 size"]:
        return law.reshape(1, -1)

    def numbers(self, n: int, m: int) -> int:
        return n * (n + 1) // 2

    def identities(self, n: int, m: int) -> int:
        return n * n

    def group(self, n: int, m: int) -> str:
        return f"GL({n})"

    def term(self, view: View, *, latex: bool) -> str:
        face, t, dot = view.text(latex=latex), r"^{\top}" if latex else "ᵀ", " " if latex else "·"
        return f"{face}{t}{dot}{face}" if view.transposed else f"{face}{dot}{face}{t}"
