"""The interface between a symmetry and the evaluation of its moment map, which `conserved.moment` implements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from conserved.symmetry.kind import Degree, Kind
from conserved.symmetry.pairs import Direction, Pair, Point


@runtime_checkable
class EvaluatedMoments(Protocol):
    """Moment maps of some symmetries, for pairs of sources."""

    def values(self, pair: int = 0) -> list[Tensor]:
        """Return μ of one pair, for every symmetry in order."""


@runtime_checkable
class Evaluation(Protocol):
    """How moment maps of some symmetries are computed."""

    @property
    def needs(self) -> Mapping[str, str]:
        """The parameters that are read, in order."""

    def evaluate(
        self, read: Sequence[Point | Direction], pairs: Sequence[Pair], *, dtype: torch.dtype | None = None
    ) -> EvaluatedMoments:
        """Return μ for pairs of sources."""


@runtime_checkable
class Evaluator(Protocol):
    """Plans how moment maps are computed."""

    def of(self, symmetries: Sequence[Any], *, kernels: bool) -> Evaluation:
        """Return an evaluation of symmetries; `kernels` are for many layers."""

    def of_matrices(self, kind: Kind, degrees: Sequence[Degree], shapes: Sequence[Sequence[int]]) -> Evaluation:
        """Return an evaluation of legs given as matrices, with a symmetry for every index along their leading axes."""


def evaluator() -> Evaluator:
    """Return the evaluator of `conserved.moment`, a layer above, which is loaded when a symmetry is evaluated alone."""
    result: Evaluator = import_module("conserved.moment").Plan
    return result
