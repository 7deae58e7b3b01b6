"""Exponents of power laws by least squares in logarithms, and intervals for a mean over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.special import stdtrit


@dataclass(frozen=True, slots=True)
class FittedInterval:
    """A mean and where it lies with 95 % confidence; without bounds if there is a single value."""

    value: float
    low: float | None
    high: float | None

    @staticmethod
    def around(value: float, error: float, freedom: int) -> FittedInterval:
        """Student's interval of a value with a standard error that so many degrees of freedom are known of."""
        reach = float(stdtrit(freedom, 0.975)) * error
        return FittedInterval(value, value - reach, value + reach)

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
    return FittedInterval.around(value, math.sqrt(left / freedom / spread), freedom)


def interval(values: Sequence[float]) -> FittedInterval:
    """The mean of the finite values with Student's 95 % interval; they are independent, such as those of seeds."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return FittedInterval(math.nan, None, None)
    mean = sum(known) / len(known)
    if len(known) == 1:
        return FittedInterval(mean, None, None)
    freedom = len(known) - 1
    spread = math.sqrt(sum((value - mean) ** 2 for value in known) / freedom)
    return FittedInterval.around(mean, spread / math.sqrt(len(known)), freedom)
