"""What computes moment maps, as a symmetry asks for it: mathematics says what is computed, `conserved.moment` how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from conserved.on_demand import provided
from conserved.symmetry.kind import Degree, Kind

SERVICE = "moment maps of legs"
"""The name under which the package provides an `Evaluator`."""


@runtime_checkable
class Evaluated(Protocol):
    """Moment maps for some pairs of sources."""

    def signed(self) -> Float[Tensor, "pairs ..."]:
        """μ, for every pair."""

    def value(self) -> Float[Tensor, "..."]:
        """μ of the first pair."""


@runtime_checkable
class Evaluator(Protocol):
    """Computes moment maps of legs that are given as matrices."""

    def __call__(
        self,
        kind: Kind,
        degrees: Sequence[Degree],
        legs: Sequence[Sequence[Float[Tensor, "..."]]],
        *,
        points: Sequence[bool],
        pairs: tuple[tuple[int, int], ...] = ((0, 1),),
    ) -> Evaluated:
        """μ of pairs of sources, given for every leg a matrix of each source; `points` says which are points."""


def evaluator() -> Evaluator:
    """The one that the package provides."""
    found: Evaluator = provided(SERVICE)
    return found
