"""Objectives by which a point of the orbit is chosen, and the element that leads one symmetry there.

An objective looks at one symmetry at a time, with the weights as they are, and returns the element that is best for
it. `equalize` goes round all symmetries until nothing moves any more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.moment import row_dots
from conserved.symmetry import Leg, Symmetry, Tensors


class Objective(ABC):
    """Chooses the best group element for one symmetry at a time; subclass it for an objective of your own."""

    sweeps: int = 50
    """How often to go round at the most."""
    tolerance: float = 1e-9
    """Elements that differ from the identity by less than this count as the identity."""
    precision: torch.dtype = torch.float64
    """The least precision that elements are looked for in; they are applied in float64 whatever it is."""

    def applies(self, symmetry: Symmetry) -> bool:
        """Return whether the objective has something to say about a symmetry.

        Args:
            symmetry: a symmetry of the model.

        Returns:
            False leaves the symmetry alone, and its weights are not read.
        """
        return True

    @abstractmethod
    def element(self, symmetry: Symmetry, work: Tensors) -> Tensor | None:
        """Return the best element for one symmetry.

        Args:
            symmetry: the symmetry.
            work: the weights as they are now, by name.

        Returns:
            The element to move by, or None where the objective has nothing to say.

        Raises:
            NoBestPointError: there is no best point on the orbit of this symmetry.
        """

    @abstractmethod
    def value(self, symmetry: Symmetry, work: Tensors) -> float:
        """Return the number that is made small.

        Args:
            symmetry: the symmetry.
            work: the weights as they are now, by name.

        Returns:
            The objective at these weights, for reports.
        """

    def rank(self, symmetry: Symmetry) -> int:
        """Return the place of a symmetry in the order of moves.

        Args:
            symmetry: the symmetry.

        Returns:
            A number; symmetries of lower rank are moved first.
        """
        return 0

    def applied(self, symmetry: Symmetry, element: Tensor) -> None:  # noqa: B027
        """Update the objective after an element was applied, if it keeps more than the weights.

        Args:
            symmetry: the symmetry that was moved.
            element: the element.
        """


class BalancedObjective(Objective):
    r"""All laws zero: the point of the orbit with the smallest norm, which weight decay drives at.

    The squared norm is geodesically convex along the orbit (Kempf and Ness), so going round finds its minimum. For
    GL(n) with Gram matrices A = Σ₊ ℓℓᵀ and B = Σ₋ ℓℓᵀ, the minimum of tr(gAgᵀ) + tr(g^{-T}Bg^{-1}) has P = gᵀg with
    PAP = B: the geometric mean of A⁻¹ and B.
    """

    sweeps = 1000

    def element(self, symmetry: Symmetry, work: Tensors) -> Tensor | None:
        return symmetry.kind.least_norm_element(symmetry.matrices(work), symmetry.degrees)

    def value(self, symmetry: Symmetry, work: Tensors) -> float:
        """Return the size of the law against the terms it is made of."""
        law = symmetry.law(work)
        size = sum(float(row_dots(matrix, matrix).sum()) for matrix in symmetry.matrices(work))
        return float(torch.linalg.vector_norm(law)) / size if size else 0.0


def is_matrix(leg: Leg) -> bool:
    """Return whether the leg lies in a parameter that quantisers store in few bits.

    Gains and biases stay as they are.
    """
    return sum(size > 1 for size in leg.view.shape) > 1


def ranges(symmetry: Symmetry, work: Tensors, legs: Sequence[Leg]) -> Float[Tensor, " units"]:
    """Return the largest absolute value in every unit, over legs."""
    ranges_by_leg = [symmetry.kind.by_unit(row_ranges(leg, work), "amax") for leg in legs]
    return torch.stack(ranges_by_leg).amax(0).to(torch.float64)


def row_ranges(leg: Leg, work: Tensors) -> Float[Tensor, " n"]:
    """Return the largest absolute value in every row of a leg, without a copy of it."""
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
    tolerance = 1e-2
    precision = torch.float32

    def applies(self, symmetry: Symmetry) -> bool:
        return any(map(is_matrix, symmetry.legs)) and symmetry.kind.scales_units

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
            return symmetry.kind.scaling_element(next(roots) / next(roots))
        (legs,) = filter(None, sides)
        relative = [
            range_ / range_.max().clamp_min(1e-300) for range_ in (ranges(symmetry, work, [leg]) for leg in legs)
        ]
        share = torch.stack(relative).amax(0)
        share = torch.where(share > 0, share, 1.0)
        share = share / share.log().mean().exp()
        return symmetry.kind.scaling_element(share ** ((1.0 if not sides[0] else -1.0) / degree))

    def value(self, symmetry: Symmetry, work: Tensors) -> float:
        """Spread of the units' ranges: the largest mean of squared logarithms over the matrices."""
        values = [0.0]
        for leg in filter(is_matrix, symmetry.legs):
            rows = row_ranges(leg, work).to(torch.float64)
            rows = rows[rows > 0]
            if rows.numel() > 1:
                values.append(float(rows.log().var(correction=0)))
        return max(values)
