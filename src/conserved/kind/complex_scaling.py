"""(C*)^{n/2}, acting on pairs of rows as on complex rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.grams import halves, row_dots, row_dots_and_spread, row_grams
from conserved.kind.kind import Degree, Kind, norm_squared
from conserved.sheaf import Layout, Legs, RowProduct
from conserved.view import View


class ComplexScaling(Kind):
    r"""(C*)^{n/2}: rows (2j, 2j+1) of a leg are the real and imaginary part of one complex row.

    Rotary position encoding multiplies such a row by a phase, so only complex numbers commute with it. A leg of
    degree −1 moves by g^{-T}, which is c / |c|²: the same phase, the inverse length. Hence a conserved length
    and, for each pair, two identities: the trace of its 2 × 2 block of A Bᵀ and the part along J.
    """

    __slots__ = ()
    code = "complex_scaling"
    title = "complex scaling"

    def row_products(self, layout: Layout) -> tuple[RowProduct, ...]:
        real, imaginary = layout.halves()
        return (
            RowProduct(real, real, start=0, step=2),
            RowProduct(imaginary, imaginary, start=0, step=2),
            RowProduct(real, imaginary, start=1, step=2),
            RowProduct(imaginary, real, start=1, step=2, sign=-1),
        )

    def contract(self, a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch n l"]) -> Float[Tensor, "*out"]:
        same = a is b
        a, b = a.unflatten(-2, (-1, 2)), b.unflatten(-2, (-1, 2))
        a0, a1, b0, b1 = a[..., 0, :], a[..., 1, :], b[..., 0, :], b[..., 1, :]
        real = row_dots(a0, b0) + row_dots(a1, b1)
        # The part along J is antisymmetric: of a leg with itself it is zero.
        imaginary = torch.zeros_like(real) if same else row_dots(a0, b1) - row_dots(a1, b0)
        return torch.stack((real, imaginary), -1)

    def bound(self, a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch n l"]) -> Float[Tensor, "*out"]:
        a, b = a.abs().unflatten(-2, (-1, 2)), b.abs().unflatten(-2, (-1, 2))
        real = row_dots(a[..., 0, :], b[..., 0, :]) + row_dots(a[..., 1, :], b[..., 1, :])
        imaginary = row_dots(a[..., 0, :], b[..., 1, :]) + row_dots(a[..., 1, :], b[..., 0, :])
        return torch.stack((real, imaginary), -1)

    def weighed(self, a: Legs, b: Legs) -> tuple[Float[Tensor, "*out"], Float[Tensor, "*batch"]]:
        x, y = halves(a), halves(b)
        found = [row_dots_and_spread(x[i], y[j]) for i, j in ((0, 0), (1, 1), (0, 1), (1, 0))]
        (aa, bb, ab, ba), squares = [dots for dots, _ in found], [spread for _, spread in found]
        return torch.stack((aa + bb, ab - ba), -1), squares[0] + squares[1] + squares[2] + squares[3]

    def conserved(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*law"]:
        return mu[..., 0]

    def rotation(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*part"] | None:
        return mu[..., 1]

    def pairings(
        self, sources: Sequence[Legs], pairs: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> Float[Tensor, " pairs *law"]:
        return row_grams(sources, pairs, dtype).unflatten(-1, (-1, 2)).sum(-1)

    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        pairs = a.unflatten(0, (-1, 2))
        factor = g if degree > 0 else 1 / g.conj()
        moved = factor[:, None] * torch.complex(pairs[:, 0], pairs[:, 1])
        return torch.stack((moved.real, moved.imag), 1).flatten(0, 1)

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        logarithm = spread * torch.randn(n // 2, 2, generator=generator, dtype=torch.float64)
        return torch.exp(torch.complex(logarithm[:, 0], logarithm[:, 1]))

    def units(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "laws size"]:
        return law.unsqueeze(-1)

    def numbers(self, n: int, m: int) -> int:
        return n // 2

    def terms(self, n: int, m: int) -> int:
        return 2 * m

    def identities(self, n: int, m: int) -> int:
        return n

    def group(self, n: int, m: int) -> str:
        return f"(C*)^{n // 2}"

    def term(self, view: View, *, latex: bool) -> str:
        return norm_squared(view.text(latex=latex) + ("^{(j)}" if latex else "⁽ʲ⁾"), latex)
