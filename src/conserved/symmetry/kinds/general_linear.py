"""GL(n), acting on legs by matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.symmetry.kind import Degree, Element, Kind, NoBestPointError
from conserved.symmetry.products import OuterProduct
from conserved.symmetry.rotations import nearest_rotation, principal_axes

CONDITION = 1e12
"""Matrices worse conditioned than this are refused: their inverse would lose the weights in rounding."""

RANK = 1e-12
"""Gram matrices whose smallest eigenvalue is below this share of the largest have no balanced point."""


class GeneralLinear(Kind):
    """GL(n): a query and its key, a value and its output projection, two linear maps in a row."""

    __slots__ = ()
    code = "general_linear"
    title = "general linear"
    products = OuterProduct()
    together = True
    separates = "two linear maps in a row: any invertible matrix may stand between them"

    def act(self, g: Element, a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        # The same inverse moves forth and back: g^{-T} of a diagonal or orthogonal matrix is then exact.
        return (g if degree > 0 else torch.linalg.inv(g).mT) @ a

    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Element:
        noise = torch.randn(n, n, generator=generator, dtype=torch.float64)
        return torch.linalg.matrix_exp(spread * noise / max(n, 1) ** 0.5)

    def group(self, n: int, m: int) -> str:
        return f"GL({n})"

    def identity(self, n: int, m: int) -> Element:
        return torch.eye(n, dtype=torch.float64)

    def inverse(self, g: Element) -> Element:
        return torch.linalg.inv(g)

    def compose(self, later: Element, earlier: Element) -> Element:
        return later @ earlier

    def element_problem(self, g: Element, name: str) -> str:
        condition = float(torch.linalg.cond(g))
        if condition < CONDITION:
            return ""
        return (
            f"Expected a matrix for {name} with condition up to {CONDITION:.0e}, which can be inverted; "
            f"got condition {condition:.1e}."
        )

    def scaling_element(self, factors: Float[Tensor, " units"]) -> Element:
        return torch.diag(factors)

    def row_scales(self, g: Element) -> Float[Tensor, "*n"] | None:
        return g.diagonal() if torch.equal(g, torch.diag(g.diagonal())) else None

    def rotation_element(self, matrix: Float[Tensor, "n n"]) -> Element:
        return matrix

    def canonical_element(self, legs: Sequence[Tensor], degrees: Sequence[Degree]) -> Element | None:
        return principal_axes(legs, degrees)

    def least_norm_element(self, legs: Sequence[Tensor], degrees: Sequence[Degree]) -> Element:
        """Return the root of the geometric mean of A⁻¹ and B, with A = Σ₊ ℓℓᵀ and B = Σ₋ ℓℓᵀ.

        The minimum of tr(gAgᵀ) + tr(g^{-T}Bg^{-1}) has P = gᵀg with PAP = B. Where A or B is singular the infimum lies
        outside the orbit, and only one common scale is chosen.
        """
        n = legs[0].shape[0]
        grams = [torch.zeros(n, n, dtype=torch.float64, device=legs[0].device) for _ in range(2)]
        for leg, degree in zip(legs, degrees, strict=True):
            grams[degree < 0] += leg @ leg.mT
        plus, minus = grams
        if not bool(torch.isfinite(plus + minus).all()):
            raise NoBestPointError("some of its weights, or their squares, are not finite")
        if not float(plus.trace()) or not float(minus.trace()):
            raise NoBestPointError("one side is zero, and would shrink the other for ever")
        values, vectors = torch.linalg.eigh(plus)
        lowest = [float(v[0] / v[-1]) for v in (values, torch.linalg.eigvalsh(minus))]
        if min(lowest) < RANK:
            return torch.eye(n, dtype=torch.float64, device=plus.device) * (minus.trace() / plus.trace()) ** 0.25
        root, inverse_root = ((vectors * values**power) @ vectors.mT for power in (0.5, -0.5))
        product = inverse_root @ _power(root @ minus @ root, 0.5) @ inverse_root
        return _power((product + product.mT) / 2, 0.5)

    def nearest_element(
        self, wanted: Sequence[Tensor], legs: Sequence[Tensor], degrees: Sequence[Degree]
    ) -> Element | None:
        """Return a g that brings g·(+ legs) and g^{-T}·(− legs) near: the best rotation, then Gauss–Newton steps.

        With g = exp(X) to first order, + legs move by X·A and − legs by −Xᵀ·B, and the best X solves linear equations
        X P + Q X = R with P = Σ₊AAᵀ, Q = Σ₋BBᵀ, both of which eigenvectors make diagonal.
        """
        n = legs[0].shape[0]
        zero = torch.zeros(n, n, dtype=torch.float64)

        def moved(g: Tensor) -> list[Tensor]:
            inverted = torch.linalg.inv(g).mT
            return [(g if degree > 0 else inverted) @ leg for leg, degree in zip(legs, degrees, strict=True)]

        def cost(g: Tensor) -> float:
            if int(torch.linalg.inv_ex(g).info):
                return float("inf")
            return sum(float((a - b).square().sum()) for a, b in zip(wanted, moved(g), strict=True))

        g = min((torch.eye(n, dtype=torch.float64), nearest_rotation(wanted, legs)), key=cost)
        for _ in range(30):
            p, q, r = zero.clone(), zero.clone(), zero.clone()
            for a, b, degree in zip(wanted, moved(g), degrees, strict=True):
                if degree > 0:
                    p += b @ b.mT
                    r += (a - b) @ b.mT
                else:
                    q += b @ b.mT
                    r -= b @ (a - b).mT
            values_p, vectors_p = torch.linalg.eigh(p)
            values_q, vectors_q = torch.linalg.eigh(q)
            sums = values_q[:, None] + values_p[None, :]
            step = vectors_q @ ((vectors_q.mT @ r @ vectors_p) / (sums + 1e-12 * sums.max() + 1e-300)) @ vectors_p.mT
            size, current = 1.0, cost(g)
            while size > 1e-6 and not cost(torch.linalg.matrix_exp(size * step) @ g) < current:
                size /= 2
            if size <= 1e-6 or float(step.abs().max()) < 1e-12:
                break
            g = torch.linalg.matrix_exp(size * step) @ g
        return g


def _power(matrix: Float[Tensor, "n n"], exponent: float) -> Float[Tensor, "n n"]:
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return (vectors * values.clamp_min(torch.finfo(values.dtype).tiny) ** exponent) @ vectors.mT
