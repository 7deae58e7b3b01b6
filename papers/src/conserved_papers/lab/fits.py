"""Exponents of power laws by least squares in logarithms, and intervals for a mean over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from jaxtyping import Float
from scipy.special import stdtrit
from torch import Tensor

from conserved.output.figure import Finding


@dataclass(frozen=True, slots=True)
class FittedInterval:
    """A mean and where it lies with 95 % confidence; without bounds if there is a single value."""

    value: float
    low: float | None
    high: float | None

    @staticmethod
    def around(value: float, error: float, freedom: int) -> FittedInterval:
        """Return Student's interval of a value with a standard error that so many degrees of freedom are known of."""
        reach = float(stdtrit(freedom, 0.975)) * error
        return FittedInterval(value, value - reach, value + reach)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def exponent(x: Sequence[float | int], y: Sequence[float]) -> float:
    """Return p of y ∝ x^p, by least squares; not a number where fewer than two points are positive and finite."""
    logs = _logarithms(x, y)
    if len(logs[:, 0].unique()) < 2:
        return math.nan
    across, up = (logs - logs.mean(0)).unbind(1)
    return float((across * up).sum() / across.square().sum())


def _logarithms(x: Sequence[float | int], y: Sequence[float]) -> Float[Tensor, "points 2"]:
    """Return logarithms of the points that are positive and finite."""
    points = torch.tensor([x, y], dtype=torch.float64).T
    return points[((points > 0) & points.isfinite()).all(1)].log()


def fitted_exponent(x: Sequence[float | int], y: Sequence[float]) -> FittedInterval:
    """Return p of y ∝ x^p with Student's 95 % interval of the fit, as if what it leaves were independent.

    Points of one run are not quite, so the interval says how straight the curve is and not where another seed lies.
    """
    value, logs = exponent(x, y), _logarithms(x, y)
    freedom = len(logs) - 2
    if freedom < 1 or not math.isfinite(value):
        return FittedInterval(value, None, None)
    across, up = (logs - logs.mean(0)).unbind(1)
    left = (up - value * across).square().sum() / across.square().sum()
    return FittedInterval.around(value, math.sqrt(left / freedom), freedom)


def interval(values: Sequence[float]) -> FittedInterval:
    """Return the mean of the finite values with Student's 95 % interval; they are independent, as those of seeds."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return FittedInterval(math.nan, None, None)
    if len(known) == 1:
        return FittedInterval(known[0], None, None)
    return FittedInterval.around(fmean(known), stdev(known) / math.sqrt(len(known)), len(known) - 1)


def fitted_finding(
    what: str, fitted_interval: FittedInterval, expected: float, tolerance: float, *, note: str = ""
) -> Finding:
    """Compare a fitted number with a prediction.

    Args:
        what: the name of the number.
        found: the fit.
        expected: the prediction.
        tolerance: how far the number may be from it.
        note: a remark on the prediction.

    Returns:
        The finding, which holds if the number is within the tolerance.
    """
    prediction = f"{expected:g} ± {tolerance:g}{note and f' ({note})'}"
    close = abs(fitted_interval.value - expected) <= tolerance
    return Finding(
        what=what,
        value=fitted_interval.value,
        low=fitted_interval.low,
        high=fitted_interval.high,
        expected=prediction,
        holds=close,
    )
