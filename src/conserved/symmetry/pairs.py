"""The points and directions that a moment map pairs: parameters, gradients, updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

Tensors = Mapping[str, Tensor]
"""A parameter-shaped collection: the parameters themselves, their gradients, an optimizer's update."""


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """Parameters, by name: the 1 by which a translation acts and the 1 of a view of 1 + γ are those of points alone."""

    tensors: Tensors
    constant: ClassVar[float] = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Direction:
    """A gradient or an update, by parameter name: the difference of two points."""

    tensors: Tensors
    constant: ClassVar[float] = 0.0


Pair = tuple[int, int]
"""Two sources, by number: A and B of μ(A, B)."""


class LawPairs(tuple[Pair, ...]):
    """Request only the symmetric part of μ, which is what laws use."""

    __slots__ = ()
