"""Exponents of power laws by least squares in logarithms, and intervals for a mean over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""97.5 % quantiles of Student's t for 1 to 20 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class FittedInterval:
    """A mean and where it lies with 95 % confidence; without bounds if there is a single value."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """p of y ∝ x^p, by least squares; not a number where fewer than two points are positive and finite."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if a > 0 and b > 0 and math.isfinite(a) and math.isfinite(b)]
    if len({a for a, _ in points}) < 2:
        return math.nan
    logs = torch.tensor(points, dtype=torch.float64).log()
    across, up = (logs - logs.mean(0)).unbind(1)
    return float((across * up).sum() / across.square().sum())


def slope(x: Sequence[float], y: Sequence[float]) -> FittedInterval:
    """p of y ∝ x^p with Student's 95 % interval of the fit, as if what it leaves were independent.

    Points of one run are not quite, so the interval says how straight the curve is and not where another seed lies.
    """
    points = [(math.log(a), math.log(b)) for a, b in zip(x, y, strict=True) if a > 0 and b > 0 and math.isfinite(b)]
    value = exponent(x, y)
    freedom = len(points) - 2
    if freedom < 1 or not math.isfinite(value):
        return FittedInterval(value, None, None)
    across, up = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((a - across) ** 2 for a, _ in points)
    left = sum((b - up - value * (a - across)) ** 2 for a, b in points)
    reach = (_STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 2.0) * math.sqrt(left / freedom / spread)
    return FittedInterval(value, value - reach, value + reach)


def interval(values: Sequence[float]) -> FittedInterval:
    """The mean of the finite values with Student's 95 % interval; they are independent, such as those of seeds."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return FittedInterval(math.nan, None, None)
    mean = sum(known) / len(known)
    if len(known) == 1:
        return FittedInterval(mean, None, None)
    spread = math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1))
    freedom = len(known) - 1
    reach = (_STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 2.0) * spread / math.sqrt(len(known))
    return FittedInterval(mean, mean - reach, mean + reach)
