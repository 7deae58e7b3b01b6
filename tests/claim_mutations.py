"""For every claim, its subject changed on purpose so that the verdict must change: a wrong formula, another model."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch

from conserved.claims.balls import scalar_attention

MUTATIONS: dict[str, dict[str, Any]] = {}
"""By code, the keyword arguments of the check that make it come out the other way."""


def _normalised(x: Any) -> Any:
    """Attention that divides its tokens by the first one: scale does not matter to it."""
    return scalar_attention([Fraction(e) / Fraction(x[0]) for e in x])


def _hard(n: Any) -> list[Fraction]:
    """All weight on the largest."""
    return [Fraction(int(e == max(n))) for e in n]


NOTE: dict[str, dict[str, Any]] = {
    "note.D1": {"weights": torch.sigmoid},
    "note.D1.output": {"output": lambda x: Fraction(1)},
    "note.L2": {"form": lambda x, q, k: x @ q @ k @ x.T},
    "note.T3": {"bound": lambda d, size: Fraction(d, 4) * size**2},
    "note.T3.sharper": {"bound": lambda layer, x: 0.5 * layer.energy_bound(x)},
    "note.T3.conserved": {"quantity": lambda q, k: q**2 - k**2},
    "note.T4": {"attention": _normalised},
    "note.T4.softmax": {"weights": _hard},
    "note.T4.corrected": {"power": 1},
    "note.T7": {"bound": lambda channel: channel.information},
    "note.T7.corrected": {"bound": lambda channel: channel.information / 2},
    "note.C8": {"bound": lambda channel: 4 * channel.frobenius},
    "note.T14": {"bound": lambda channel: 4 * channel.frobenius},
    "note.L13": {"bound": lambda a: sum(1 for _ in a) * 2},
    "note.L13.corrected": {"least": lambda row: 5},
    "note.R9": {"measure": lambda a: -sum(e * e for e in a.ravel())},
    "note.C5": {"allowed": lambda eta, curvature: eta * curvature <= 1},
    "note.C5.corrected": {"rate": lambda eta, mu: 1 - 2 * eta * mu},
    "note.R6": {"rate": lambda eta: Fraction(9)},
    "note.L10": {"gram": lambda a: a @ a.T + 1 * _identity(len(a))},
    "note.L10.corrected": {"least": lambda length: Fraction(2, length)},
    "note.L11": {"constant": lambda length, x: x * x},
    "note.L11.corrected": {"metric": lambda x, weights: x.mT @ x},
    "note.T12": {"metric": lambda x: x * x},
    "note.T12.corrected": {"metric": "tokens"},
}


def _identity(size: int) -> Any:
    from conserved.claims.polynomials import fractions

    return fractions([[int(i == j) for j in range(size)] for i in range(size)])


MUTATIONS |= NOTE
