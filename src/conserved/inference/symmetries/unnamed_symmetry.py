"""A symmetry before it has a name: the kind of group, its legs, and the parts of parameters they are made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from conserved.inference.types.engine import Region
from conserved.symmetry import Kind, Leg


@dataclass(slots=True)
class LegPart:
    """A leg before it is a view: indices along some axes of a region that move together with a degree."""

    region: Region
    factor: int
    """Which factor of the region's type it is; −1 for all of the region."""
    degree: int | float
    indices: np.ndarray
    """Positions along the factor's axes, a row for every row of the leg."""
    shift: bool = False
    """Whether `factor` counts the shifts of the region's type, as of a leg that moves by the logarithm of a scale."""


@dataclass(slots=True)
class UnnamedSymmetry:
    """A symmetry without a name."""

    kind: Kind
    legs: tuple[Leg, ...]
    parts: list[LegPart]
    epsilon: int | float = 0.0
    batch: bool = False
    """Whether it is one of several heads."""
    family: str = ""
    """Its name, if that is known already."""

    def signed(self) -> UnnamedSymmetry:
        """Make the degree of the first leg positive."""
        if self.legs[0].degree < 0:
            self.legs = tuple(leg.turned() for leg in self.legs)
            for part in self.parts:
                part.degree = -part.degree
        return self


def simple(value: int | float) -> int | float:
    """Return a degree as an integer where it is one."""
    rounded = round(value)
    return rounded if abs(value - rounded) < 1e-9 else float(value)
