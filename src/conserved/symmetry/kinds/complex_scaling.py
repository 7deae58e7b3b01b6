"""(C*)^{n/2}, acting on pairs of rows as on complex rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.symmetry.kind import Degree, Element, Kind
from conserved.symmetry.products import RowProducts, Term


class ComplexScaling(Kind):
    r"""(C*)^{n/2}: rows (2j, 2j+1) of a leg are the real and imaginary part of one complex row.

    Rotary position encoding multiplies such a row by a phase, so only complex numbers commute with it. A leg of
    degree −1 moves by g^{-T}, which is c / |c|²: the same phase, the inverse length. Hence a conserved length
    and, for each pair, two identities: the trace of its 2 × 2 block of A Bᵀ and the part along J.
    """

    __slots__ = ()
    code = "complex_scaling"
    title = "complex scaling"
    products = RowProducts((Term(0, 0), Term(1, 1), Term(0, 1, number=1), Term(1, 0, number=1, sign=-1)), unit=2)

    def act(self, g: Element, a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        pairs = a.unflatten(0, (-1, 2))
        factor = g if degree > 0 else 1 / g.conj()
        moved = factor[:, None] * torch.complex(pairs[:, 0], pairs[:, 1])
        return torch.stack((moved.real, moved.imag), 1).flatten(0, 1)

    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Element:
        logarithm = spread * torch.randn(n // 2, 2, generator=generator, dtype=torch.float64)
        return torch.exp(torch.complex(logarithm[:, 0], logarithm[:, 1]))

    def group(self, n: int, m: int) -> str:
        return f"(C*)^{n // 2}"

    def inverse(self, g: Element) -> Element:
        return 1 / g

    def compose(self, later: Element, earlier: Element) -> Element:
        return later * earlier

    def element_problem(self, g: Element, name: str) -> str:
        return "" if bool((g != 0).all()) else f"{name} scales by complex numbers other than zero; got zero."

    def scaling_element(self, factors: Float[Tensor, " units"]) -> Element:
        return factors.to(torch.complex128)

    def row_scales(self, g: Element) -> Float[Tensor, "*n"] | None:
        return g.real.repeat_interleave(2) if bool((g.imag == 0).all()) else None

    def canonical_element(self, legs: Sequence[Tensor], degrees: Sequence[Degree]) -> Element | None:
        """Return the phases at which sums of z|z|² over the first leg are real and positive."""
        pairs = legs[0].unflatten(0, (-1, 2))
        numbers = torch.complex(pairs[:, 0], pairs[:, 1])
        total = (numbers * numbers.abs().square()).sum(1)
        return torch.where(total.abs() > 0, total.conj() / total.abs().clamp_min(1e-300), torch.ones_like(total))
