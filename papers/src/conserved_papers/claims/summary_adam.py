"""A claim of ours that answers the summary on adaptive optimizers: no law of a SwiGLU network survives Adam.

Adam's first step, with bias correction, moves θ_i by −τ g_i/(|g_i| + ε). Multiplying the loss by c > 0 multiplies g by
c, so a C¹ function h that the step conserves to first order in τ, for every loss, has

    Σ_i ∂_i h · g_i c/(|g_i| c + ε) = 0        for all c > 0.

The fractions 1/(|g_i| c + ε) are independent for distinct |g_i|: their matrix at distinct c is one of Cauchy. So
∂_i h · g_i = 0 for every i, if some data gives gradients whose entries differ in size and are not zero. Where entries
agree in size for all data, as those of two softmax experts do, only their signed sum is forced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from conserved.verdict import Verdict
from conserved_papers.claims.balls import balls
from conserved_papers.claims.judging import InWords, by_steps
from conserved_papers.claims.paper_lemmas import product_of
from conserved_papers.claims.polynomials import Letters, Matrix, arranged, determinant
from conserved_papers.claims.registry import claim

Gradients = Callable[[Matrix, Matrix, Matrix, Matrix, Matrix], list[Any]]


def cauchy_independent(most: int = 3) -> bool:
    """Return whether det(Π_{k≠j}(a_k c_i + 1)) vanishes only for equal a or equal c, as polynomials, up to three
    entries.
    """
    good = True
    for size in range(2, most + 1):
        a, c = Letters(a=(size,), c=(size,))
        one = a[0] * 0 + 1
        rows = []
        for i in range(size):
            row = []
            for j in range(size):
                entry = one
                for k in range(size):
                    entry = entry * (a[k] * c[i] + 1) if k != j else entry
                row.append(entry)
            rows.append(row)
        gaps = [x[i] - x[j] for x in (a, c) for i in range(size) for j in range(i + 1, size)]
        good &= product_of(determinant(arranged(rows)), gaps)
    return good


def swiglu_entries(a: Matrix, b: Matrix, c: Matrix, x: Matrix, v: Matrix) -> list[Any]:
    """Return the gradient of ⟨v, A(SiLU(Bx) ⊙ Cx)⟩ in all entries of A, B and C, in balls: equation (40)."""
    z, linear, pulled = b @ x, c @ x, a.T @ v
    gates = [1 / (1 + (-value).exp()) for value in z]
    values = [value * gate for value, gate in zip(z, gates, strict=True)]
    grads = [gate * (1 + value * (1 - gate)) for value, gate in zip(z, gates, strict=True)]
    neurons = range(len(z))
    return [
        *(v[k] * values[i] * linear[i] for k in range(len(v)) for i in neurons),
        *(pulled[i] * linear[i] * grads[i] * entry for i in neurons for entry in x),
        *(pulled[i] * values[i] * entry for i in neurons for entry in x),
    ]


def softmax_pair_entries(a: Matrix, b: Matrix, c: Matrix, x: Matrix, v: Matrix) -> list[Any]:
    """Return the gradients of a softmax over two experts, which are opposite numbers."""
    gate = 1 / (1 + (-(b @ x)[0]).exp())
    return [gate * (1 - gate), -gate * (1 - gate)]


def sizes_differ(entries: Sequence[Any]) -> bool:
    """Return whether all entries are proved to differ in size and not to be zero."""
    squares = sorted((entry * entry for entry in entries), key=lambda value: float(value.mid()))
    apart = all(bool(low < high) for low, high in itertools.pairwise(squares))
    return apart and bool(squares[0] > 0)


def rational(rng: np.random.Generator, *shape: int) -> Matrix:
    """Random fractions of small denominator, as balls."""
    drawn = rng.integers(-40, 41, shape)
    entries = np.array([Fraction(2 * int(value) + 1, 32) for value in drawn.ravel()], dtype=object)
    return balls(entries.reshape(shape))


@claim("summary.adam")
def nothing_survives(*, entries: Gradients = swiglu_entries) -> Verdict:
    rng = np.random.default_rng(0)
    a, b, c = rational(rng, 3, 4), rational(rng, 4, 3), rational(rng, 4, 3)
    result = entries(a, b, c, rational(rng, 3), rational(rng, 3))
    return by_steps(
        "No function of the parameters but a constant is conserved by Adam's first step for all data.",
        "Some entries of the gradient agree in size.",
        InWords("the first step moves θ_i by −τ g_i/(|g_i| + ε), and a loss multiplied by c has the gradient cg"),
        ("the functions c ↦ 1/(|g_i|c + ε) are independent for distinct |g_i|: Cauchy determinants, as polynomials",
         cauchy_independent()),
        ("at a rational point and for one input and one output direction all 36 entries of the gradient differ in size "
         "and none is zero, in balls", sizes_differ(result)),
        InWords("both are open conditions on analytic functions, so they hold on an open dense set of parameters; "
                "there ∇h = 0, and h is C¹"),
        scope="at d = 3 and 4 neurons",
    )  # fmt: skip
