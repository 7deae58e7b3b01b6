"""A law as an explicit polynomial of degree two: h(θ) = ½ Σ a_ij θ_i θ_j + Σ b_i θ_i, what a certificate carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One conserved number; its gradient is A θ + b with A symmetric and sparse."""

    name: str
    formula: str
    quadratic: tuple[tuple[int, int, float], ...]
    """(i, j, a_ij), both (i, j) and (j, i)."""
    linear: tuple[tuple[int, float], ...]

    def gradient(self, theta: Sequence[Fraction]) -> list[Fraction]:
        """∇h(θ), exactly."""
        found = [Fraction(0)] * len(theta)
        for i, j, a in self.quadratic:
            found[i] += Fraction(a) * theta[j]
        for i, b in self.linear:
            found[i] += Fraction(b)
        return found
