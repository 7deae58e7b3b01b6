"""One test of gradients: what was held against what, how close it came, and where it failed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from conserved.inference.probing.noise import by_row, wide
from conserved.laws.identities import status
from conserved.plain_data import record_of
from conserved.tolerances import NOISE, ROUNDING
from conserved.verdict import Status


class Method(StrEnum):
    """The four methods that test a gradient, in the order in which they run."""

    PRESENCE = "presence"
    IDENTITY = "identity"
    RELATION = "relation"
    DERIVATIVE = "derivative"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTest:
    """One test of one or more gradients, with its result.

    Attributes:
        gradients: names of the inputs whose gradient takes part.
        method: the line of defence it belongs to.
        what: the statement that was tested.
        residual: how far it is from holding, relative to the gradients' size.
        limit: the residual that noise and rounding explain, on the same scale.
        worst: the largest ratio of a single entry's residual to its limit; a test fails above one.
        sees_factor: whether a gradient that is off by a constant factor would have failed.
        smallest: the relative error of a gradient, spread over its entries, that would have failed; infinite if
            the test compares a gradient with itself.
        entry: the largest error of a single entry, relative to the size of its row and of a typical one.
        where: which entries failed, in words; empty if none.
        meaning: the usual cause of such a failure.
    """

    gradients: tuple[str, ...]
    method: Method
    what: str
    residual: float
    limit: float
    worst: float
    sees_factor: bool = False
    smallest: float = float("inf")
    entry: float = float("inf")
    where: str = ""
    meaning: str = ""

    @property
    def ok(self) -> bool:
        """Whether every entry is within its limit."""
        return status(self.worst, 1.0, tested=True, nearly=False) is Status.VERIFIED

    def record(self) -> dict[str, Any]:
        """Return plain data."""
        fields = record_of(self, "gradients method what ok residual limit worst sees_factor smallest where meaning")
        return fields | {name: None for name in ("worst", "smallest") if not getattr(self, name) < float("inf")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Two tensors that should be equal entry by entry: their difference and the limit that noise explains."""

    actual: Tensor
    expected: Tensor
    limit: Tensor

    @property
    def difference(self) -> Tensor:
        return self.actual - self.expected

    @property
    def ratio(self) -> Tensor:
        """The difference over its limit; infinite where something is not a number."""
        ratios = self.difference.abs() / self.limit.clamp_min(1e-300)
        return torch.where(torch.isfinite(ratios), ratios, torch.full_like(ratios, float("inf")))

    @property
    def worst(self) -> float:
        return float(self.ratio.max()) if self.actual.numel() else 0.0

    @property
    def entry(self) -> float:
        """The largest difference of an entry over the size of its row and that of all entries."""
        size = by_row(self.expected.square()).sqrt() + self.expected.square().mean().sqrt()
        largest = float((self.difference.abs() / size.clamp_min(1e-300)).max()) if self.actual.numel() else 0.0
        return largest if largest == largest else float("inf")

    @property
    def residual(self) -> float:
        """The difference over the size of what was expected."""
        size = float(self.expected.norm()) or float(self.actual.norm()) or 1.0
        relative = float(self.difference.norm()) / size
        return relative if relative == relative else float("inf")

    @property
    def allowed(self) -> float:
        """The limit relative to the size of the expected tensor, as `residual` is."""
        size = float(self.expected.norm()) or float(self.actual.norm()) or 1.0
        return float(self.limit.expand_as(self.actual).norm()) / size


def gap_between(actual: Tensor, expected: Tensor, deviation: Tensor, unit: float, floor: float = 0.0) -> Gap:
    """Return the gap between a gradient and what it should be, against the noise of its rows and the rounding of its
    size.
    """
    right = wide(expected)
    size = by_row(right.square()).sqrt()
    limit = NOISE * deviation + ROUNDING * unit * (size + right.abs()) + floor
    return Gap(actual=wide(actual), expected=right, limit=limit)
