"""Real numbers as balls, whose comparisons are proofs, and softmax attention on tokens of one number."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import flint
import numpy as np

from conserved_papers.claims.polynomials import Matrix

BallMatrix = Matrix
"""Arrays of real balls: comparisons of them are proofs."""


def balls(rows: Any) -> BallMatrix:
    """Exact numbers as balls."""
    convert = np.frompyfunc(lambda e: flint.arb(flint.fmpq(Fraction(e).numerator, Fraction(e).denominator)), 1, 1)
    return np.asarray(convert(np.array(rows, dtype=object)), dtype=object)


def ball(value: Fraction | int) -> Any:
    """Return one exact number as a ball."""
    return balls(value)[()]


def softmax_rows(logits: BallMatrix) -> BallMatrix:
    """Return softmax of each row."""
    powers = np.exp(logits)
    return np.asarray(powers / powers.sum(-1, keepdims=True), dtype=object)


def scalar_attention(x: Sequence[Fraction | int], w: Fraction | int = 1, v: Fraction | int = 1) -> BallMatrix:
    """Definition 1 for tokens of one number, W_Q W_Kᵀ = w and W_V = v."""
    column = balls(x)[:, None]
    return (softmax_rows(column * balls(w) @ column.T) @ column * balls(v))[:, 0]


def surely_differs(a: BallMatrix, b: BallMatrix) -> bool:
    """Return whether some entries are proved to be different."""
    return any(not bool((p - q).contains(0)) for p, q in zip(a.ravel(), b.ravel(), strict=True))


def number(ball: Any) -> float:
    """Return the middle of a ball."""
    return float(ball.mid())
