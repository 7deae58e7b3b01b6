"""Step sizes over a run: constant, falling linearly, or as 1/(k+1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """τ_k from τ_0: itself, τ_0 (1 − (1 − final) k/planned), or τ_0/(k+1).

    Under a constant step Σ τ_i² grows without bound and with it what equation (9) allows; Σ (τ_0/(k+1))² ≤ τ_0² π²/6.
    """

    kind: Literal["constant", "linear", "inverse"] = "constant"
    final: float = 0.0
    """The share of the step at the end of a linear schedule."""

    def rate(self, initial: float, step: int, planned: int) -> float:
        """Return τ_k of step k out of those planned."""
        if self.kind == "linear":
            return initial * (1 - (1 - self.final) * step / planned)
        return initial / (step + 1) if self.kind == "inverse" else initial
