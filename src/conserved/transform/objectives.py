"""What a point of the orbit can be chosen for, and the element that brings one symmetry there.

An objective looks at one symmetry at a time, with the weights as they are, and returns the element that is best for
it. `equalize` goes round all symmetries until nothing moves any more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import singledispatch

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.moment import row_dots
from conserved.symmetry import GeneralLinear, Kind, Leg, Symmetry, Tensors, Translation
from conserved.transform.elements import by_unit, is_registered, scales_units, scaling_element

RANK = 1e-12
"""Gram matrices whose smallest eigenvalue is below this share of the largest have no balanced point."""


class Impossible(Exception):
    """The objective has no best point on this symmetry's orbit; the message says why."""


class Objective(ABC):
    """Chooses the best group element for one symmetry at a time; subclass it for an objective of your own."""

    sweeps: int = 50
    """How often to go round at the most."""
    settled: float = 1e-9
    """Elements that differ from the identity by less than this move nothing any more."""
    precision: torch.dtype = torch.float64
    """The least precision that elements are looked for in; they are applied in float64 whatever it is."""

    def applies(self, symmetry: Symmetry) -> bool:
        """Whether the objective has something to say about a symmetry.

        Args:
            symmetry: a symmetry of the model.

        Returns:
            False leaves the symmetry alone, and its weights are not read.
        """
        return True

    @abstractmethod
    def element(self, symmetry: Symmetry, work: Tensors) -> Tensor | None:
        """The best element for one symmetry.

        Args:
            symmetry: the symmetry.
            work: the weights as they are now, by name.

        Returns:
            The element to move by, or None where the objective has nothing to say.

        Raises:
            Impossible: there is no best point on the orbit of this symmetry.
        """

    @abstractmethod
    def value(self, symmetry: Symmetry, work: Tensors) -> float:
        """The number that is made small.

        Args:
            symmetry: the symmetry.
            work: the weights as they are now, by name.

        Returns:
            The objective at these weights, for reports.
        """

    def rank(self, symmetry: Symmetry) -> int:
        """The place of a symmetry in the order of moves.

        Args:
            symmetry: the symmetry.

        Returns:
            A number; symmetries of lower rank are moved first.
        """
        return 0

    def applied(self, symmetry: Symmetry, element: Tensor) -> None:  # noqa: B027
        """Called after every element that was applied, for objectives that keep more than the weights.

        Args:
            symmetry: the symmetry that was moved.
            element: the element.
        """


class Balanced(Objective):
    r"""All laws zero: the point of the orbit with the smallest norm, which weight decay drives at.

    The squared norm is geodesically convex along the orbit (Kempf and Ness), so going round finds its minimum. For
    GL(n) with Gram matrices A = Σ₊ ℓℓᵀ and B = Σ₋ ℓℓᵀ, the minimum of tr(gAgᵀ) + tr(g^{-T}Bg^{-1}) has P = gᵀg with
    PAP = B: the geometric mean of A⁻¹ and B.
    """

    sweeps = 1000

    def element(self, symmetry: Symmetry, work: Tensors) -> Tensor | None:
        return balancing(symmetry.kind, symmetry, symmetry.matrices(work))

    def value(self, symmetry: Symmetry, work: Tensors) -> float:
        """The size of the law against the terms it is made of."""
        law = symmetry.law(work)
        size = sum(float(row_dots(matrix, matrix).sum()) for matrix in symmetry.matrices(work))
        return float(torch.linalg.vector_norm(law)) / size if size else 0.0


@singledispatch
def balancing(kind: Kind, symmetry: Symmetry, legs: list[Tensor]) -> Tensor:
    """The element that makes a law zero or, of a kind that is not registered here, those of its units' scales."""
    if not is_registered(scaling_element, kind):
        raise Impossible("its group is not known to scale anything, which balancing does")
    squares = [by_unit(kind, row_dots(matrix, matrix), "sum") for matrix in legs]
    return scaling_element(kind, _least_norm(symmetry, squares))


@balancing.register(Translation)
def _centred(kind: Kind, symmetry: Symmetry, legs: list[Tensor]) -> Tensor:
    total = sum(leg.degree * matrix.sum(0) for leg, matrix in zip(symmetry.legs, legs, strict=True))
    assert isinstance(total, Tensor)
    return -total / sum(leg.degree**2 * leg.view.n for leg in symmetry.legs)


@balancing.register(GeneralLinear)
def _geometric_mean(kind: Kind, symmetry: Symmetry, legs: list[Tensor]) -> Tensor:
    n = symmetry.n
    grams = [torch.zeros(n, n, dtype=torch.float64, device=legs[0].device) for _ in range(2)]
    for leg, matrix in zip(symmetry.legs, legs, strict=True):
        grams[leg.degree < 0] += matrix @ matrix.mT
    plus, minus = grams
    if not bool(torch.isfinite(plus + minus).all()):
        raise Impossible("some of its weights, or their squares, are not finite")
    if not float(plus.trace()) or not float(minus.trace()):
        raise Impossible("one side is zero, and would shrink the other for ever")
    values, vectors = torch.linalg.eigh(plus)
    lowest = [float(v[0] / v[-1]) for v in (values, torch.linalg.eigvalsh(minus))]
    if min(lowest) < RANK:
        # Some combination of rows is zero on one side only: the infimum lies outside the orbit. One scale is left.
        return torch.eye(n, dtype=torch.float64, device=plus.device) * (minus.trace() / plus.trace()) ** 0.25
    root, inverse_root = ((vectors * values**power) @ vectors.mT for power in (0.5, -0.5))
    product = inverse_root @ _power(root @ minus @ root, 0.5) @ inverse_root
    return _power((product + product.mT) / 2, 0.5)


def _power(matrix: Float[Tensor, "n n"], exponent: float) -> Float[Tensor, "n n"]:
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return (vectors * values.clamp_min(torch.finfo(values.dtype).tiny) ** exponent) @ vectors.mT


def _least_norm(symmetry: Symmetry, squares: list[Float[Tensor, " units"]]) -> Float[Tensor, " units"]:
    """s_i that minimise Σ_ℓ s_i^{2d_ℓ}·squares_ℓ; one where a unit is zero on one side."""
    signs = [leg.degree > 0 for leg in symmetry.legs]
    if len(set(signs)) == 1:
        raise Impossible("all legs move the same way, and would shrink for ever")
    plus, minus = (
        torch.stack([one for one, sign in zip(squares, signs, strict=True) if sign == side]).sum(0)
        for side in (True, False)
    )
    if not bool(torch.isfinite(plus + minus).all()):
        raise Impossible("some of its weights, or their squares, are not finite")
    alive = (plus > 0) & (minus > 0)
    if not bool(alive.any()):
        raise Impossible("one side is zero, and would shrink the other for ever")
    logarithm = torch.where(alive, (minus / plus.clamp_min(1e-300)).clamp_min(1e-300).log() / 4, 0.0)
    if {abs(leg.degree) for leg in symmetry.legs} != {1}:
        logarithm = torch.zeros_like(plus)
        degrees = torch.tensor([float(leg.degree) for leg in symmetry.legs], dtype=torch.float64)[:, None]
        degrees = degrees.to(plus.device)
        terms = torch.stack(squares)
        for _ in range(200):
            # Newton's method in log s on a convex function, with steps that cannot overshoot.
            now = terms * torch.exp(2 * degrees * logarithm)
            slope, curve = (degrees * now).sum(0), (2 * degrees**2 * now).sum(0)
            step = torch.where(alive, slope / curve.clamp_min(1e-300), 0.0).clamp(-0.5, 0.5)
            logarithm = logarithm - step
            if float(step.abs().max()) < 1e-14:
                break
    return logarithm.exp()


def is_matrix(leg: Leg) -> bool:
    """Whether the leg lies in a parameter that quantisers store in few bits; gains and biases stay as they are."""
    return sum(size > 1 for size in leg.view.shape) > 1


def ranges(symmetry: Symmetry, work: Tensors, legs: Sequence[Leg]) -> Float[Tensor, " units"]:
    """The largest absolute value in every unit, over legs."""
    found = [by_unit(symmetry.kind, row_ranges(leg, work), "amax") for leg in legs]
    return torch.stack(found).amax(0).to(torch.float64)


def row_ranges(leg: Leg, work: Tensors) -> Float[Tensor, " n"]:
    """The largest absolute value in every row of a leg, without a copy of it."""
    view = leg.view
    faced = view.face(work[view.parameter])
    columns = tuple(range(len(view.axes), faced.ndim))
    highest, lowest = (faced.amax(columns), faced.amin(columns)) if columns else (faced, faced)
    rows = torch.maximum(highest + view.offset, -(lowest + view.offset)).reshape(-1)
    return rows if view.rows is None else rows[list(view.rows)]


class Range(Objective):
    """Equal ranges of the units of a matrix, so that one step of a quantiser serves all of them; no data needed.

    Between two matrices the ranges of unit i become √(r₊r₋) on both sides (cross-layer equalisation). Where one side
    is only a gain or a bias, which no quantiser rounds, the matrices get equal ranges in all units.
    """

    sweeps = 20
    settled = 1e-2
    precision = torch.float32

    def applies(self, symmetry: Symmetry) -> bool:
        return any(map(is_matrix, symmetry.legs)) and scales_units(symmetry.kind)

    def element(self, symmetry: Symmetry, work: Tensors) -> Tensor | None:
        sides = [
            [leg for leg in symmetry.legs if is_matrix(leg) and (leg.degree > 0) == side] for side in (True, False)
        ]
        degree = float(max(abs(leg.degree) for leg in symmetry.legs))
        if all(sides):
            plus, minus = (ranges(symmetry, work, side) for side in sides)
            alive = (plus > 0) & (minus > 0)
            # Roots before the quotient, which may leave the range where its root does not.
            roots = (torch.where(alive, side, 1.0) ** (0.5 / degree) for side in (minus, plus))
            return scaling_element(symmetry.kind, next(roots) / next(roots))
        (legs,) = filter(None, sides)
        relative = [one / one.max().clamp_min(1e-300) for one in (ranges(symmetry, work, [leg]) for leg in legs)]
        share = torch.stack(relative).amax(0)
        share = torch.where(share > 0, share, 1.0)
        share = share / share.log().mean().exp()
        return scaling_element(symmetry.kind, share ** ((1.0 if not sides[0] else -1.0) / degree))

    def value(self, symmetry: Symmetry, work: Tensors) -> float:
        """Spread of the units' ranges: the largest mean of squared logarithms over the matrices."""
        found = [0.0]
        for leg in filter(is_matrix, symmetry.legs):
            rows = row_ranges(leg, work).to(torch.float64)
            rows = rows[rows > 0]
            if rows.numel() > 1:
                found.append(float(rows.log().var(correction=0)))
        return max(found)
