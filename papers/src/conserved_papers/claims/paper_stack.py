r"""A claim of ours on what the paper leaves open: attention stacked on a residual stream, at every depth and size.

Let u_0 be the tokens and u_ℓ = u_{ℓ−1} + Σ_h softmax(u W_h uᵀ) u M_h with u = u_{ℓ−1}, W_h = Q_hK_hᵀ and M_h = V_hO_hᵀ
over the heads h of layer ℓ; no norms, no positions. The network is the last u_ℓ. Let M_ℓ be the sum of M_h in layer ℓ.

*Many zero tokens separate the layers.* Take tokens x, y and N zeros, and let ε = 1/N. All quotients of the softmax,
divided by N above and below, are analytic in ε and θ near ε = 0, where every layer adds nothing. To first order in ε
a zero token becomes εc_ℓ with c_0 = 0 and c_ℓ = c_{ℓ−1} + (x + y + c_{ℓ−1})M_ℓ: its query is of order ε, so it takes
the mean of all tokens. The N zero tokens together count as c_{ℓ−1} for the others. So the coefficient of ε in the
first token of the output is Σ_ℓ Σ_h (e^{xW_hxᵀ} x + e^{xW_hyᵀ} y + c_{ℓ−1})M_h, and x + y + c_ℓ is
(x + y)(1 + M_1)…(1 + M_ℓ). N times the gradient in θ tends to the gradient of that coefficient. It lies in the span of
the gradients, because a span of finite dimension is closed. No exponential of one layer stands inside another one.

*The criterion.* For a law h let D F = ⟨∇h, ∇F⟩, which obeys the rules of a derivative. D of the coefficient vanishes
for all x and y. Let θ be generic: all W_h of all layers differ, and no W_h and no M_h is zero. For almost every x the
rows xW_h differ and none is zero, so as functions of y the e^{xW_hyᵀ} have different frequencies, and the rest is a
polynomial in y. Hence each coefficient (xNyᵀ) yM_h + yD[M_h] with N = D[W_h] is zero. The first term is linear in x,
the second does not contain it, so both vanish: D[M_h] = 0, and the product of xNyᵀ and every entry of yM_h is zero. If
N ≠ 0 and M_h ≠ 0, neither factor is the zero polynomial, nor then is the product. So N = D[W_h] = 0.

*Every θ.* Where θ is not generic a W_h = W_g, W_h = 0 or M_h = 0: finitely many sets of polynomial equations, none of
which holds everywhere, because every head has at least one column. So generic θ are dense. D[W_h] and D[M_h] are
continuous in θ, since h is C¹; where they vanish is closed and contains a dense set, so they vanish at every θ.

*The laws.* D[W_h] = ∇_Q h Kᵀ + Q (∇_K h)ᵀ and D[M_h] = ∇_V h Oᵀ + V (∇_O h)ᵀ, transposed, are the equations of Theorem
4.3 for the head: h is constant on the orbits of the connected group of O(d, d), which acts on X = (Q; K) and on (V; O)
of each head apart (paper.global). Let G = XᵀηX = QᵀQ − KᵀK. If G is degenerate, the column space S of X has a radical
R = S ∩ S^⊥ ≠ 0. Boosts scale R by e^{−t}, a dual of R by e^{t}, and keep the rest of S; as t → ∞ they move X to an X_∞
with the same G and the kernel of G, and h(X_∞) = h(X) by continuity. All such X_∞ are isometric embeddings of
R^r/ker G, one orbit of O(d, d) by Witt's theorem. O(d, d) has four components, so h has at most four values in each X
on a level set, finitely many in all, and a continuous function with finitely many values is constant on components.
QᵀQ − KᵀK and VᵀV − OᵀO are laws, because the network sees Q_hK_hᵀ and V_hO_hᵀ alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conserved.verdict import Evidence, Verdict
from conserved_papers.claims.judging import InWords, by_steps, refute
from conserved_papers.claims.matrix_words import matrices
from conserved_papers.claims.paper_global import cite
from conserved_papers.claims.polynomials import Letters, Matrix, identical
from conserved_papers.claims.registry import claim

ZEROS = 1e6
"""How many zero tokens stand in for infinitely many."""


@dataclass(frozen=True, slots=True)
class Head:
    """A head as its two products: W = QKᵀ and M = VOᵀ."""

    scores: Matrix
    values: Matrix


HeadsByLayer = Sequence[Sequence[Head]]
"""The heads of each layer."""


def random_stack(dim: int, heads: Sequence[int], seed: int = 0) -> HeadsByLayer:
    """Layers with so many heads each, of random products."""
    rng = np.random.default_rng(seed)
    return [[Head(*rng.normal(size=(2, dim, dim)) / dim) for _ in range(count)] for count in heads]


def first_token(stack: HeadsByLayer, x: Matrix, y: Matrix, zeros: float) -> Matrix:
    """Return the first token of the output for tokens x, y and so many zeros, which stay equal to each other."""
    tokens, counts = np.stack([x, y, 0 * x]), np.array([1.0, 1.0, zeros])
    for layer in stack:
        added = np.zeros_like(tokens)
        for head in layer:
            weights = counts * np.exp(tokens @ head.scores @ tokens.T)
            added += weights / weights.sum(1, keepdims=True) @ tokens @ head.values
        tokens = tokens + added
    result: Matrix = tokens[0]
    return result


def first_order(stack: HeadsByLayer, x: Matrix, y: Matrix, *, carried: bool) -> Matrix:
    """Return the coefficient of ε; `carried` says whether what zero tokens have taken up counts in later layers."""
    total, taken = np.zeros_like(x), np.zeros_like(x)
    for layer in stack:
        seen = taken if carried else 0 * taken
        for head in layer:
            alone, other = np.exp(x @ head.scores @ x), np.exp(x @ head.scores @ y)
            total = total + (alone * x + other * y + seen) @ head.values
        taken = taken + (x + y + taken) @ np.sum([head.values for head in layer], axis=0)
    return total


def distance_from_limit(dim: int, heads: Sequence[int], *, carried: bool) -> float:
    """Return the relative difference of N(u − x) at many zeros from the coefficient of ε."""
    stack, rng = random_stack(dim, heads), np.random.default_rng(1)
    x, y = rng.normal(size=(2, dim))
    limit = first_order(stack, x, y, carried=carried)
    return float(np.linalg.norm(ZEROS * (first_token(stack, x, y, ZEROS) - x) - limit) / np.linalg.norm(limit))


def zero_tokens_multiply() -> bool:
    """Check that s + c_ℓ = (s + c_{ℓ−1})(1 + M) follows from c_ℓ = c_{ℓ−1} + (s + c_{ℓ−1})M, word by word."""
    s, c, m = matrices(["S", "C", "M"])
    return s + (c + (s + c) @ m) == (s + c) + (s + c) @ m


def degrees_separate() -> bool:
    """Check that the coefficient (xAyᵀ)yM + yB of e^{xWyᵀ} is yB at x = 0, and its slope in x_a (Ay)_a yM (d = 2)."""
    letters = Letters(x=(2,), y=(2,), A=(2, 2), M=(2, 2), B=(2, 2))
    x, y, a, m, b = letters
    coefficient = [(x @ a @ y) * (y @ m)[k] + (y @ b)[k] for k in range(2)]
    grads = [[letters.gradient(coefficient[k], "x")[i] for i in range(2)] for k in range(2)]
    without = [coefficient[k] - sum(grads[k][i] * x[i] for i in range(2)) for k in range(2)]
    constant = all(identical(without[k], (y @ b)[k]) for k in range(2))
    return constant and all(identical(grads[k][i], (a @ y)[i] * (y @ m)[k]) for k in range(2) for i in range(2))


@claim("paper.open.stack.all")
def stacked_attention(*, carried: bool = True) -> Verdict:
    cases = ((2, (1, 1)), (3, (2, 1, 2)), (4, (1, 1, 1, 1)))
    worst = max(distance_from_limit(dim, heads, carried=carried) for dim, heads in cases)
    what = "largest relative distance of N(u − x) from the coefficient of ε, N = 1e6, depths 2, 3 and 4"
    beside = [Evidence(what=what, value=worst, limit=1e-3, samples=len(cases))]
    if worst > 1e-3:
        return refute("The coefficient of ε is another one.", *beside)
    return by_steps(
        "The laws of every head, for every depth and size; no others.",
        "A part fails.",
        InWords("tokens x, y and N zeros: all softmax weights are analytic in ε = 1/N and θ, and at ε = 0 every layer "
                "adds nothing; N times the gradient tends to that of the coefficient of ε, and spans are closed"),
        ("the zero tokens take up (x + y)((1 + M_1)…(1 + M_ℓ) − 1) to first order, word by word",
         zero_tokens_multiply()),
        InWords("so the coefficient is a sum over all heads of all layers of (e^{xWxᵀ}x + e^{xWyᵀ}y)M, and a term "
                "that is linear in x + y: no exponential stands inside another one"),
        InWords("let θ be generic: all W differ, and no W and no M is zero; then the rows xW differ and none is zero "
                "for almost every x: the e^{xWyᵀ} have different frequencies in y, and the rest is a polynomial in y"),
        ("the coefficient (x D[W] yᵀ)yM + yD[M] of e^{xWyᵀ} vanishes only if D[M] = 0 and (D[W]yᵀ)yM = 0, by degree "
         "in x", degrees_separate()),
        InWords("let N = D[W]: if N ≠ 0 and M ≠ 0, the polynomials xNyᵀ and yM are not zero, nor is their product; so "
                "N = 0"),
        InWords("where D[W] and D[M] vanish is closed, since h is C¹, and contains the generic θ, which are dense: "
                "both vanish at every θ"),
        InWords("D[W] = 0 and D[M] = 0 are the equations of Theorem 4.3 for every head; where the Gram matrix "
                "QᵀQ − KᵀK is degenerate, boosts take its radical to 0, and the rest is one orbit of O(d, d) by Witt's "
                "theorem, with at most 4 components"),
        *cite(("paper.T4.3", "paper.global")),
        beside=beside,
    )  # fmt: skip
