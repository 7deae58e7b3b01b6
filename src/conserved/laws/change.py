"""How far laws are from their values at an earlier moment, as equation (10) measures it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from conserved.output.lines import counted

_BALANCED = 1e-6
"""A law this small against its own terms has no meaningful value to be relative to."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Values of the laws at one moment, and the size of their terms; later values are compared with them."""

    values: Mapping[str, Tensor]
    scales: Mapping[str, Tensor]

    def __repr__(self) -> str:
        return f"<Reference: {counted(len(self.values), 'law')}>"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """For every h_i that a symmetry adds to equation (10): ‖h_i − h_i(θ_0)‖, ‖h_i(θ_0)‖ and the size of its terms."""

    distance: Tensor
    size: Tensor
    terms: Tensor

    def relative(self, *, to: Literal["value", "scale"] = "value") -> Tensor:
        """Return the distance of each h_i over its `unit`."""
        return self.distance / self.unit(to=to)

    def unit(self, *, to: Literal["value", "scale"] = "value") -> Tensor:
        """Return the size that `LawSet.errors` divides the distance of each h_i by; never zero.

        Args:
            to: "value" for ‖h_i(θ_0)‖, or its terms where that is below 1e-6 of them; "scale" always for its terms.
        """
        size = self.terms if to == "scale" else self.size
        size = torch.where(size > _BALANCED * self.terms, size, self.terms)
        return torch.where(size > 0, size, torch.ones_like(size))
