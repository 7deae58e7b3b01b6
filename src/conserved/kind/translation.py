"""(R^m, +), adding a row to every row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.grams import row_grams
from conserved.kind.kind import Degree, Kind
from conserved.sheaf import Layout, Legs, RowProduct
from conserved.view import View


class Translation(Kind):
    r"""(R^m, +): a leg of degree p gets p·c added to each of its rows. Its law is linear: p times the sum of the rows.

    In homogeneous coordinates a point carries a 1 and a direction (a gradient, an update) a 0, and the generator
    is linear in that coordinate: ξ·A = 1 ξᵀ at a point, 0 at a direction. With this `lift` the formulas for the
    law, the identity and the drift are the ones of every other kind.
    """

    __slots__ = ()
    code = "translation"
    title = "translation"
    together = True
    weighted = True
    shared = "columns"
    linear = True

    def in_sheaves(self, n: int) -> bool:
        return False

    def row_products(self, layout: Layout) -> tuple[RowProduct, ...]:
        return (RowProduct(layout.turned(), layout.turned(), lifted=True),)

    def lift(self, a: Float[Tensor, "*batch n m"], *, point: bool) -> Float[Tensor, "*batch n k"]:
        return a.new_full((1,) * a.ndim, float(point)).expand(*a.shape[:-1], 1)

    def contract(self, a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch n l"]) -> Float[Tensor, "*out"]:
        return (a.mT @ b).flatten(-2)

    def pairings(
        self, sources: Sequence[Legs], pairs: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> Float[Tensor, " pairs *law"]:
        """A direction's lift is zero, and so is every pairing of directions."""
        *batch, _, m = sources[0].shape
        return torch.zeros((len(pairs), *batch, m), dtype=dtype, device=sources[0].device)

    def column_sizes(
        self, sources: Sequence[Float[Tensor, "*batch n m"]], dtype: torch.dtype
    ) -> Float[Tensor, "sources *batch m"]:
        """Upper bounds of the sums of absolute values of every column: Σ|a_i| ≤ (n Σ a_i²)^½."""
        squares = row_grams([source.mT for source in sources], [(k, k) for k in range(len(sources))], dtype)
        return (sources[0].shape[-2] * squares).sqrt()

    def weighed(self, a: Legs, b: Legs) -> tuple[Float[Tensor, "*out"], Float[Tensor, "*batch"]]:
        # One of the two is the lifted column of ones, or of zeros, which no parameter is.
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        sizes = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
        return self.contract(a, b), sizes.square().sum(-1)

    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return a + degree * g

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        return spread * torch.randn(m, generator=generator, dtype=torch.float64)

    def units(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "laws size"]:
        return law[None]

    def numbers(self, n: int, m: int) -> int:
        return m

    def terms(self, n: int, m: int) -> int:
        return n

    def identities(self, n: int, m: int) -> int:
        return m

    def group(self, n: int, m: int) -> str:
        return f"(R^{m}, +)"

    def term(self, view: View, *, latex: bool) -> str:
        if view.n == 1:
            return view.text(latex=latex)
        return (r"\sum_{i} " if latex else "Σᵢ ") + view.row("i", latex=latex)
