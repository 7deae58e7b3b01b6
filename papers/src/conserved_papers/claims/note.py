"""Claims of the note on natural attention: the layer, its energy and its scale."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from conserved.attention import NaturalAttention
from conserved.verdict import Evidence, Verdict, Witness
from conserved_papers.claims.balls import BallMatrix, number, scalar_attention, surely_differs
from conserved_papers.claims.judging import by_steps, confirm, decide, refute
from conserved_papers.claims.matrix_words import Words, matrices
from conserved_papers.claims.polynomials import Letters, format_matrix, fractions, identical
from conserved_papers.claims.registry import claim, claims


@claim("note.D1")
def stochastic(*, weights: Callable[[Tensor], Tensor] = lambda logits: logits.softmax(-1)) -> Verdict:
    worst, least, shaped = 0.0, math.inf, True
    cases = list(itertools.product((1, 2, 5, 9), (1, 3, 8)))
    for length, dim in cases:
        layer, x = NaturalAttention(dim).double(), torch.randn(length, dim, dtype=torch.float64)
        with torch.no_grad():
            matrix = weights(layer.energy(x))
            shaped &= layer(x).shape == x.shape
        worst = max(worst, float((matrix.sum(-1) - 1).abs().max()))
        least = min(least, float(matrix.min()))
    return decide(
        worst < 1e-14 and least > 0 and shaped,
        "Rows are positive and sum to one.",
        "Rows are not probability distributions.",
        Evidence(what="largest |Σ_j A_ij − 1|", value=worst, limit=1e-14, samples=len(cases)),
        Evidence(what="smallest entry, which must be positive", value=least, limit=0.0, samples=len(cases)),
    )


COLUMNS = """\
import numpy as np
A = np.array([[0.25, 0.75], [0.25, 0.75]])      # rows sum to one, as softmax makes them
print("sums over the first index", A.sum(0), "over the second", A.sum(1))
assert not np.allclose(A.sum(0), 1) and np.allclose(A.sum(1), 1)"""


@claim("note.L10.index")
def column_sums(*, axis: int = 0) -> Verdict:
    weights = fractions([[Fraction(1, 4), Fraction(3, 4)]] * 2)
    result = weights.sum(axis=axis)
    good = all(value == 1 for value in result)
    what = "sums of the rows (1/4, 3/4), (1/4, 3/4) over that index"
    witness = Witness(data={"A": format_matrix(weights)}, claimed="(1, 1)", found=format_matrix(result), numpy=COLUMNS)
    evidence = Evidence(what=what, value=format_matrix(result), limit="(1, 1)", proof=True)
    return decide(
        good,
        "The columns sum to one.",
        "Rows sum to one, so the sum runs over the second index.",
        evidence,
        scope="at L = 2",
        witness=witness,
    )


@claim("note.L2")
def energy_form(*, form: Callable[[Words, Words, Words], Words] = lambda x, q, k: x @ q @ k.T @ x.T) -> Verdict:
    x, q, k = matrices("XQK")
    same = (x @ q) @ (x @ k).T == form(x, q, k)
    return by_steps("Both are the same product.", "They differ.", ("(XW_Q)(XW_K)ᵀ = XW_Q W_KᵀXᵀ, word by word", same))


INITIALISED = """\
import numpy as np
d, rng = 64, np.random.default_rng(0)
W = rng.uniform(-1, 1, (d, d)) / np.sqrt(d)     # the default of torch.nn.Linear: variance 1/(3 d)
print("|W|^2 / d =", (W ** 2).sum() / d)
assert abs((W ** 2).sum() / d - 1 / 3) < 0.05    # not 1"""


@claim("note.T3.start")
def initial_norm(*, variance: Callable[[int], Fraction] = lambda d: Fraction(1, 3 * d)) -> Verdict:
    """The mean of ‖W‖_F² over independent entries is d² times their variance."""
    means = {d: d * d * variance(d) for d in (4, 64)}
    return decide(
        all(mean == d for d, mean in means.items()),
        "The mean of ‖W‖² is d.",
        "Normalised is meant. Entries of variance 1/d have ‖W‖_F² = d on average; those of torch.nn.Linear have the "
        "variance 1/(3d), and d/3.",
        Evidence(
            what="mean of ‖W‖_F² for entries uniform on ±1/√d, d = 4 and 64",
            value=" and ".join(str(mean) for mean in means.values()),
            limit="4 and 64",
            proof=True,
        ),
        witness=Witness(
            data={"entries": "uniform on ±1/√d", "d": 64}, claimed="‖W‖² = 64", found="about 64/3", numpy=INITIALISED
        ),
        scope="at d = 4, 64",
    )


def lagrange_identity(most: int = 5) -> bool:
    """Check that Σa² Σb² − (Σab)² = Σ_{k<l}(a_k b_l − a_l b_k)², as polynomials for vectors of up to five entries."""
    good = True
    for size in range(1, most + 1):
        a, b = Letters(a=(size,), b=(size,))
        squares = sum(((a[k] * b[m] - a[m] * b[k]) ** 2 for k in range(size) for m in range(k + 1, size)), 0 * a[0])
        good &= identical((a * a).sum() * (b * b).sum() - (a * b).sum() ** 2, squares)
    return good


@claim("note.T3")
def energy_bound(*, bound: Callable[[Any, Any], Any] = lambda d, size: d * size**2) -> Verdict:
    d, s = Letters(d=(), s=())
    return by_steps(
        "The bound follows from ‖AB‖_F ≤ ‖A‖_F ‖B‖_F, applied three times to each head and added up.",
        "The bound does not follow from submultiplicativity.",
        (
            "‖AB‖_F² = Σ_ij ⟨a_i, b_j⟩² ≤ Σ_ij ‖a_i‖²‖b_j‖² = ‖A‖_F²‖B‖_F², since Σa²Σb² − (Σab)² is the sum of the "
            "squares (a_k b_l − a_l b_k)², k < l (as polynomials up to five entries; the terms of any size pair up so)",
            lagrange_identity(),
        ),
        ("with ‖W‖² = d and s = ‖X‖²: d·tr(EEᵀ) ≤ s·d·d·s, and the stated bound times d is that, as polynomials in "
         "d and s", identical(d * bound(d, s), s * d * d * s)),
    )  # fmt: skip


@claim("note.T3.sharper")
def sharper_energy_bound(
    *, bound: Callable[[NaturalAttention, Tensor], Tensor] = lambda layer, x: layer.energy_bound(x)
) -> Verdict:
    over, above, samples = 0.0, 0.0, 0
    with torch.no_grad():
        for length, dim, size in itertools.product((1, 2, 7), (1, 2, 5), (0.1, 1.0, 10.0)):
            layer, x = NaturalAttention(dim).double(), size * torch.randn(length, dim, dtype=torch.float64)
            over = max(over, float(layer.energy(x).square().sum() / bound(layer, x)))
            above = max(above, float(bound(layer, x) / layer.note_bound(x)))
            samples += 1
        layer, x = NaturalAttention(3).double(), torch.eye(3, dtype=torch.float64)
        attained = float(layer.energy(x).square().sum() / bound(layer, x))
    return decide(
        over <= 1 + 1e-12 and above <= 1 + 1e-12 and abs(attained - 1) < 1e-12,
        "It holds in every case, is below the note's, and is an equality for X = 1.",
        "The bound fails, exceeds the note's, or is not attained.",
        Evidence(what="largest energy over bound", value=over, limit=1.0, samples=samples),
        Evidence(what="largest bound over the note's", value=above, limit=1.0, samples=samples),
        Evidence(what="energy over bound for X = 1", value=attained, limit=1.0),
    )


@claim("note.T3.title")
def energy_moves(*, quantity: Callable[[Any, Any], Any] = lambda q, k: (q * k) ** 2) -> Verdict:
    letters = Letters(q=(), k=(), s=())
    q, k, s = letters
    value = quantity(q, k)
    rate = letters.gradient(value, "q")[()] * (-s * k) + letters.gradient(value, "k")[()] * (-s * q)
    return by_steps(
        "It moves wherever the loss has a slope and q, k are not zero.",
        "Its rate is zero.",
        ("the rate, with dq = −s k dt and dk = −s q dt, is not the zero polynomial", rate != 0),
        scope="at d = 1",
    )


SCALED = """\
import numpy as np
def A(X, W_V=1.0):             # one token: softmax over one key is 1
    return np.ones((1, 1)) @ X * W_V
X = np.array([[1.0]])
print("A(X) =", A(X), "A(2X) =", A(2 * X))
assert not np.allclose(A(2 * X), A(X))"""


@claim("note.T4")
def scale_invariance(*, attention: Callable[[Sequence[Fraction]], BallMatrix] = scalar_attention) -> Verdict:
    cases = [tuple(map(Fraction, x)) for x in ((1,), (1, 0), (2, 1))]
    shown, witness = [], None
    for x, alpha in itertools.product(cases, map(Fraction, (2, 3))):
        before, after = attention(x), attention([alpha * e for e in x])
        if surely_differs(before, after):
            result = f"A(αX) = {number(after[0]):g}, A(X) = {number(before[0]):g}"
            shown.append(f"X = {format_matrix(fractions(x))}, α = {alpha}: {result}")
            data = {"X": format_matrix(fractions(x)), "W": 1, "α": alpha}
            witness = witness or Witness(data=data, claimed="A(αX) = A(X)", found=result, numpy=SCALED)
    if witness:
        return refute(
            "softmax does not see a shift of its logits. It sees a factor, and so do the values.",
            Evidence(what="inputs whose outputs lie in disjoint balls", value=f"{len(shown)} of 6", proof=True),
            Evidence(what="the last of them, first output", value=shown[-1]),
            witness=witness,
        )
    return confirm(
        "No scaling changes the output.", Evidence(what="pairs (X, α)", samples=2 * len(cases), value="equal")
    )


SHARPENED = """\
import numpy as np
def softmax(z):
    return np.exp(z) / np.exp(z).sum()
z = np.log([1.0, 2.0])
print(softmax(z), softmax(2 * z))    # (1/3, 2/3) and (1/5, 4/5)
assert not np.allclose(softmax(2 * z), softmax(z))"""


@claim("note.T4.softmax")
def softmax_scale(
    *, weights: Callable[[Sequence[int]], list[Fraction]] = lambda n: [Fraction(e, sum(n)) for e in n]
) -> Verdict:
    """Logits log n for whole n: doubling them squares n, and everything is a fraction."""
    once, twice = weights((1, 2)), weights((1, 4))
    shown = [f"({', '.join(map(str, values))})" for values in (once, twice)]
    witness = Witness(data={"Z": "(log 1, log 2)", "α²": 2}, claimed=shown[0], found=shown[1], numpy=SHARPENED)
    what = "softmax of (log 1, log 2) and of twice that"
    evidence = Evidence(what=what, value=" and ".join(shown), proof=True)
    good = once == twice
    says, otherwise = "Doubling the logits changes nothing.", "A factor sharpens or flattens the weights."
    return decide(good, says, otherwise, evidence, witness=witness, scope="for two logits")


@claim("note.T4.corrected")
def scale_covariance(*, power: int = 2) -> Verdict:
    x, w, v, p = matrices("XWVP")
    factors = [Fraction(n) for n in (2, 3, 5)]
    return by_steps(
        "The weights see the same logits, and the values carry the factor.",
        "The powers of α do not fit.",
        (
            "(αX)W(αX)ᵀ = α²XWXᵀ, word by word at three α, which is enough for powers up to two; so W/α² restores the "
            "logits",
            all((a * x) @ w @ (a * x).T == a**power * (x @ w @ x.T) for a in factors),
        ),
        ("P(αX)W_V = αPXW_V for the weights P", all(p @ (a * x) @ v == a * (p @ x @ v) for a in factors)),
    )


RESULTS = ("note.T3", "note.T4", "note.T7", "note.L10", "note.L11", "note.T12", "note.L13", "note.T14")

RIGOROUS = """\
import numpy as np
A = np.full((2, 2), 0.5)                     # uniform attention, as zero weights give
print("Lemma 10: least eigenvalue of A A^T", np.linalg.eigvalsh(A @ A.T)[0], "claimed at least 1/2")
x, v = 2.0, 1.0                              # one token: Theorem 12 with eta = 1, L = 1
print("Theorem 12: |v_1|^2 =", (v - x * x * v) ** 2, "claimed at most 0")
assert np.linalg.eigvalsh(A @ A.T)[0] < 0.5 and (v - x * x * v) ** 2 > 0"""


@claim("note.rigorous")
def rigorous(*, results: Sequence[str] = RESULTS) -> Verdict:
    standing = [code for code in results if claims(code)[0].check().holds]
    data = {"A": "uniform, L = 2", "token": 2, "η": 1}
    result = "Lemma 10 and Theorem 12, among others, have counterexamples"
    return decide(
        len(standing) == len(results),
        "All of them stand.",
        "Most of them have counterexamples.",
        Evidence(what="results that stand", value=", ".join(standing) or "none", limit=len(results)),
        witness=Witness(data=data, claimed="proved", found=result, numpy=RIGOROUS),
    )
