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
from conserved.claims.balls import Balls, number, scalar_attention, surely_differs
from conserved.claims.judging import argued, held, judged, refuted
from conserved.claims.ledger import claim, claims
from conserved.claims.polynomials import Letters, fractions, identical, written
from conserved.claims.words import Words, matrices
from conserved.verdict import Evidence, Verdict, Witness


@claim(
    "note.D1",
    "The attention weights are stochastic",
    statement="softmax(X W_Q W_Kᵀ Xᵀ/√d) has positive entries and rows that sum to one, and A(X) has the shape of X.",
    place="Definition 1 and the proof of Lemma 10",
    lines="13-17, 132",
    conditions=["square weights"],
    latex=[r"A(X)=\operatorname{softmax}\left(\frac{XW_QW_K^{\top}X^{\top}}{\sqrt{d}}\right)XW_V"],
)
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
    return judged(
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


@claim(
    "note.L10.index",
    "Columns of the weights sum to one",
    statement="Summed over the first index, the entries of the attention weights give one.",
    place="proof of Lemma 10, its first formula",
    lines="134",
    hypotheses="The printed sum runs over the index that is then called free; the row sums are meant.",
    latex=[r"\sum_{i}A_{ij}=1\quad\forall i"],
    severity="slip",
    corrected_by="note.D1",
)
def column_sums(*, axis: int = 0) -> Verdict:
    weights = fractions([[Fraction(1, 4), Fraction(3, 4)]] * 2)
    found = weights.sum(axis=axis)
    good = all(value == 1 for value in found)
    what = "sums of the rows (1/4, 3/4), (1/4, 3/4) over that index"
    witness = Witness(data={"A": written(weights)}, claimed="(1, 1)", found=written(found), numpy=COLUMNS)
    evidence = Evidence(what=what, value=written(found), limit="(1, 1)", proof=True)
    return judged(good, "They do.", "The index is the other one.", evidence, scope="at L = 2", witness=witness)


@claim(
    "note.L2",
    "The energy form",
    statement="With Q = X W_Q and K = X W_K the logits are Q Kᵀ/√d = X W_Q W_Kᵀ Xᵀ/√d.",
    place="Lemma 2",
    lines="19-23",
    latex=[r"E=\frac{QK^{\top}}{\sqrt{d}}=\frac{XW_QW_K^{\top}X^{\top}}{\sqrt{d}}"],
)
def energy_form(*, form: Callable[[Words, Words, Words], Words] = lambda x, q, k: x @ q @ k.T @ x.T) -> Verdict:
    x, q, k = matrices("XQK")
    same = (x @ q) @ (x @ k).T == form(x, q, k)
    return argued("Both are one product.", "They differ.", ("(XW_Q)(XW_K)ᵀ = XW_QW_KᵀXᵀ, word by word", same))


def lagrange_identity(most: int = 5) -> bool:
    """Σa² Σb² − (Σab)² = Σ_{k<l}(a_k b_l − a_l b_k)², as polynomials for vectors of up to five entries."""
    good = True
    for size in range(1, most + 1):
        letters = Letters(a=(size,), b=(size,))
        a, b = letters["a"], letters["b"]
        squares = sum(((a[k] * b[m] - a[m] * b[k]) ** 2 for k in range(size) for m in range(k + 1, size)), 0 * a[0])
        good &= identical((a * a).sum() * (b * b).sum() - (a * b).sum() ** 2, squares)
    return good


@claim(
    "note.T3",
    "The energy bound",
    statement="If every W_Q and W_K has ‖W‖_F² = d, the squared logits of H heads add up to at most d H ‖X‖_F⁴.",
    place="Theorem 3",
    lines="27-53",
    conditions=["H heads of dimension d", "normalised weights: ‖W_Q‖_F² = ‖W_K‖_F² = d"],
    latex=[r"\sum_{h=1}^{H}\operatorname{tr}(E_hE_h^{\top})\le d\cdot H\cdot\|X\|_F^4"],
)
def energy_bound(*, bound: Callable[[Any, Any], Any] = lambda d, size: d * size**2) -> Verdict:
    letters = Letters(d=(), s=())
    d, s = letters.scalar("d"), letters.scalar("s")
    return argued(
        "The bound follows from ‖AB‖_F ≤ ‖A‖_F ‖B‖_F, applied three times to each head and added up.",
        "The bound does not follow from submultiplicativity.",
        (
            "‖AB‖_F² = Σ_ij ⟨a_i, b_j⟩² ≤ Σ_ij ‖a_i‖²‖b_j‖² = ‖A‖_F²‖B‖_F², since Σa²Σb² − (Σab)² is the sum of the "
            "squares (a_k b_l − a_l b_k)², k < l (as polynomials up to five entries; the terms of any size pair up so)",
            lagrange_identity(),
        ),
        ("with ‖W‖² = d and s = ‖X‖²: d·tr(EEᵀ) ≤ s·d·d·s, and the stated bound times d is just that, as polynomials in "
         "d and s", identical(d * bound(d, s), s * d * d * s)),
    )  # fmt: skip


@claim(
    "note.T3.sharper",
    "A sharper energy bound",
    statement="‖E‖_F² ≤ ‖X‖⁴ ‖W_Q W_Kᵀ‖_F²/d with the operator norm of X; it is never above the bound of Theorem 3, "
    "and it is attained.",
    place="sharpens Theorem 3",
    lines="27-29",
    whose="ours",
    latex=[r"\|E\|_F^2\le\frac{\|X\|_{2}^4\,\|W_QW_K^{\top}\|_F^2}{d}\le\frac{\|X\|_F^4\|W_Q\|_F^2\|W_K\|_F^2}{d}"],
)
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
    return judged(
        over <= 1 + 1e-12 and above <= 1 + 1e-12 and abs(attained - 1) < 1e-12,
        "It holds in every case, is below the note's, and is an equality for X = 1.",
        "The bound fails, exceeds the note's, or is not attained.",
        Evidence(what="largest energy over bound", value=over, limit=1.0, samples=samples),
        Evidence(what="largest bound over the note's", value=above, limit=1.0, samples=samples),
        Evidence(what="energy over bound for X = 1", value=attained, limit=1.0),
    )


@claim(
    "note.T3.title",
    "Theorem 3 bounds the energy; training does not conserve it",
    statement="Under gradient flow the energy (q k)² of one head of one number changes at the rate −2s qk(q² + k²), "
    "with s the slope of the loss in the logit; q² − k² is what stays.",
    place="a remark on the title of Theorem 3",
    lines="9, 25-27",
    whose="ours",
    hypotheses="The note proves a bound and calls it conservation; it does not state a rate.",
    latex=[r"\frac{d}{dt}(qk)^2=-2s\,qk\,(q^2+k^2)"],
)
def energy_moves(*, quantity: Callable[[Any, Any], Any] = lambda q, k: (q * k) ** 2) -> Verdict:
    letters = Letters(q=(), k=(), s=())
    q, k, s = (letters.scalar(name) for name in "qks")
    value = quantity(q, k)
    rate = letters.gradient(value, "q")[()] * (-s * k) + letters.gradient(value, "k")[()] * (-s * q)
    return argued(
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


@claim(
    "note.T4",
    "Scale invariance",
    statement="A(αX) = A(X) for every α > 0.",
    place="Theorem 4",
    lines="57-59, 69-71",
    latex=[r"A(\alpha X)=A(X)\quad\forall\alpha\in\mathbb{R}^{+}"],
    severity="false",
    corrected_by="note.T4.corrected",
)
def scale_invariance(*, attention: Callable[[Sequence[Fraction]], Balls] = scalar_attention) -> Verdict:
    cases = [tuple(map(Fraction, x)) for x in ((1,), (1, 0), (2, 1))]
    shown, witness = [], None
    for x, alpha in itertools.product(cases, map(Fraction, (2, 3))):
        before, after = attention(x), attention([alpha * e for e in x])
        if surely_differs(before, after):
            found = f"A(αX) = {number(after[0]):g}, A(X) = {number(before[0]):g}"
            shown.append(f"X = {written(fractions(x))}, α = {alpha}: {found}")
            data = {"X": written(fractions(x)), "W": 1, "α": alpha}
            witness = witness or Witness(data=data, claimed="A(αX) = A(X)", found=found, numpy=SCALED)
    if witness:
        return refuted(
            "softmax does not see a shift of its logits. It sees a factor, and so do the values.",
            Evidence(what="inputs whose outputs lie in disjoint balls", value=f"{len(shown)} of 6", proof=True),
            Evidence(what="the last of them, first output", value=shown[-1]),
            witness=witness,
        )
    return held("No scaling changes the output.", Evidence(what="pairs (X, α)", samples=2 * len(cases), value="equal"))


SHARPENED = """\
import numpy as np
def softmax(z):
    return np.exp(z) / np.exp(z).sum()
z = np.log([1.0, 2.0])
print(softmax(z), softmax(2 * z))    # (1/3, 2/3) and (1/5, 4/5)
assert not np.allclose(softmax(2 * z), softmax(z))"""


@claim(
    "note.T4.softmax",
    "softmax ignores a positive factor",
    statement="softmax(α² Z) = softmax(Z).",
    place="proof of Theorem 4",
    lines="65-67",
    latex=[r"\operatorname{softmax}(\alpha^2 Z)=\operatorname{softmax}(Z)"],
    severity="false",
    under="note.T4",
    corrected_by="note.T4.corrected",
)
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
    return judged(good, says, otherwise, evidence, witness=witness, scope="for two logits")


@claim(
    "note.T4.corrected",
    "Scale covariance",
    statement="Scaling X by α and W_Q W_Kᵀ by α⁻² leaves the logits alone and scales the output by α.",
    place="replaces Theorem 4",
    lines="57-59",
    whose="ours",
    latex=[r"A_{\alpha^{-2}W}(\alpha X)=\alpha A_W(X)"],
    corrects="note.T4",
)
def scale_covariance(*, power: int = 2) -> Verdict:
    x, w, v, p = matrices("XWVP")
    factors = [Fraction(n) for n in (2, 3, 5)]
    return argued(
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


@claim(
    "note.rigorous",
    "The proofs are complete and rigorous",
    statement="What the note calls theorems and lemmas is proved by it, the two conjectures it calls completed included.",
    place="Abstract, and the last sentence",
    lines="9, 229-231",
    conditions=["conjectures are marked as such; those in Sections 7 and 8 are said to be completed"],
    hypotheses="A statement that a witness contradicts has no proof.",
    severity="false",
    under="note.T12",
)
def rigorous(*, results: Sequence[str] = RESULTS) -> Verdict:
    standing = [code for code in results if claims(code)[0].check().holds]
    data = {"A": "uniform, L = 2", "token": 2, "η": 1}
    found = "Lemma 10 and Theorem 12, among others, have counterexamples"
    return judged(
        len(standing) == len(results),
        "All of them stand.",
        "Most of them have counterexamples.",
        Evidence(what="results that stand", value=", ".join(standing) or "none", limit=len(results)),
        witness=Witness(data=data, claimed="proved", found=found, numpy=RIGOROUS),
    )
