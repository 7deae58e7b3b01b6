"""Exponents of a long run window by window, and its drift against what the ledger predicts.

A run is cut at a tenth and at half of its planned steps into an early, a middle and a late window. In each, drift ∝ k^p
and drift ∝ (Σ τ_i²)^p are fitted by least squares in logarithms. Equation (9) says p = 1 for both at a constant step;
under a falling step only the second can be 1, and where gradients shrink neither is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conserved_papers.lab.fits import FittedInterval, fitted_exponent
from conserved_papers.lab.trajectory import Quantity, Trajectory

WINDOWS: Mapping[str, tuple[float, float]] = {"early": (0.0, 0.1), "middle": (0.1, 0.5), "late": (0.5, 1.0)}
"""Shares of the planned steps."""

_FIRST = 2
"""Steps before this are not fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The exponents fitted in one window: p in k and in Σ τ_i², of the measured drift and of the predicted one."""

    name: str
    first: int
    last: int
    in_k: FittedInterval
    in_squares: FittedInterval
    predicted_in_squares: FittedInterval | None

    def record(self) -> dict[str, Any]:
        """Plain data, for JSON."""

        def listed(result: FittedInterval | None) -> list[float | None] | None:
            return None if result is None else [result.value, result.low, result.high]

        return {
            "window": self.name,
            "from": self.first,
            "to": self.last,
            "in_k": listed(self.in_k),
            "in_squares": listed(self.in_squares),
            "predicted_in_squares": listed(self.predicted_in_squares),
        }


def windows(run: Trajectory, family: str) -> list[Window]:
    """Early, middle and late, as far as the run went; windows with fewer than three recorded steps are left out."""
    quantity = run.quantity(family)
    result = []
    for name, (begin, end) in WINDOWS.items():
        low, high = max(_FIRST, begin * run.planned), end * run.planned
        indices = [index for index, step in enumerate(run.at) if low <= step <= high and quantity.drift[index] > 0]
        if len(indices) < 3:
            continue
        steps, squares = [float(run.at[p]) for p in indices], [run.squares[p] for p in indices]
        drift = [quantity.drift[p] for p in indices]
        predicted = None
        if quantity.ledger is not None and not quantity.linear:
            predicted = fitted_exponent(squares, [quantity.ledger["predicted"][p] for p in indices])
        result.append(
            Window(
                name=name,
                first=run.at[indices[0]],
                last=run.at[indices[-1]],
                in_k=fitted_exponent(steps, drift),
                in_squares=fitted_exponent(squares, drift),
                predicted_in_squares=predicted,
            )
        )
    return result


def in_step_size_at(
    runs: Sequence[Trajectory], family: str, share: float, *, predicted: bool = False
) -> FittedInterval:
    """Return p of drift ∝ τ^p over runs of several step sizes, at the recorded step nearest to a share of the planned
    ones.

    With `predicted`, of Σ τ_i² μ(G_i, G_i) instead of the drift. One run per step size; the interval is the fit's.
    """
    rates, values = [], []
    for run in runs:
        index = min(range(len(run.at)), key=lambda index: abs(run.at[index] - share * run.planned))
        quantity = run.quantity(family)
        rates.append(run.step)
        values.append(_curve(quantity, predicted=predicted)[index])
    return fitted_exponent(rates, values)


def _curve(quantity: Quantity, *, predicted: bool) -> tuple[float, ...]:
    if not predicted:
        return quantity.drift
    if quantity.ledger is None:
        raise ValueError(f"There is no ledger of {quantity.family}: the run kept none.")
    return quantity.ledger["predicted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowComparison:
    """Measured against predicted drift over a whole run, as shares of the measured one."""

    apart: float
    """‖change − predicted‖ at the end."""
    worst: float
    """The same at the recorded step where it is largest."""
    residual: float
    """‖change − predicted − leak‖ at the end: what the ledger does not explain."""
    leak: float
    """‖leak‖ over ‖predicted‖ at the end."""
    shrunk: float
    """Σ τ_i² μ(G_i, G_i) over Σ τ_i² at the end, relative to the first step: what gradients lost."""


def comparison(run: Trajectory, family: str) -> WindowComparison:
    """Return the comparison of a quadratic law that has a ledger."""
    quantity = run.quantity(family)
    if quantity.ledger is None or quantity.linear:
        raise ValueError(f"{family} of {run.name} has no predicted drift to compare with.")
    ledger = quantity.ledger
    indices = [index for index, drift in enumerate(quantity.drift) if drift > 0]
    first, last = indices[0], indices[-1]
    per_square = [ledger["predicted"][index] / run.squares[index] for index in (first, last)]
    return WindowComparison(
        apart=ledger["apart"][last] / quantity.drift[last],
        worst=max(ledger["apart"][index] / quantity.drift[index] for index in indices),
        residual=ledger["residual"][last] / quantity.drift[last],
        leak=ledger["leak"][last] / ledger["predicted"][last],
        shrunk=per_square[1] / per_square[0],
    )
