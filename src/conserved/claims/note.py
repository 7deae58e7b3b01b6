"""Claims of the note on natural attention: the layer, its energy and its scale."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conserved.attention import NaturalAttention
from conserved.claims.balls import Balls, number, scalar_attention, surely_differs
from conserved.claims.judging import held, judged, refuted
from conserved.claims.ledger import claim
from conserved.claims.polynomials import Letters, Matrix, fractions, identical, squares, times, written
from conserved.verdict import Evidence, Verdict, Witness


@claim(
    "note.D1",
    "The attention matrix is stochastic",
    statement="softmax(X W_Q W_Kᵀ Xᵀ/√d) has positive entries and rows that sum to one, and A(X) has the shape of X.",
    place="Definition 1",
    hypotheses="Square weights. It is the rows that sum to one; the note's proofs write the sum over the other index.",
    latex=[
        r"A(X)=\operatorname{softmax}\left(\frac{XW_QW_K^{\top}X^{\top}}{\sqrt{d}}\right)XW_V",
        r"\sum_j A_{ij}=1",
    ],
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
        "Rows are positive and sum to one, to 15 digits.",
        "Rows are not probability distributions.",
        Evidence(what="largest |Σ_j A_ij − 1|", value=worst, limit=1e-14, samples=len(cases)),
        Evidence(what="smallest entry", value=least, limit=0.0, samples=len(cases)),
    )


OUTPUT = """\
import numpy as np
X, W_V = np.array([[2.0]]), np.array([[1.0]])
A = np.ones((1, 1))            # softmax over one token, whatever the logits
print("A(X) =", A @ X @ W_V, "row sum", (A @ X @ W_V).sum())
assert (A @ X @ W_V).sum() != 1"""


@claim(
    "note.D1.output",
    "The output A(X) is a stochastic matrix",
    statement="A(X) itself is a stochastic matrix, because softmax is.",
    place="proof of Theorem 7",
    latex=[r"\sum_j A(X)_{ij}=1"],
    corrected_by="note.D1",
)
def stochastic_output(*, output: Callable[[Fraction], Fraction] = lambda x: x) -> Verdict:
    for x in map(Fraction, (1, 2, 3)):
        total = output(x)
        if total != 1:
            return refuted(
                "The weights are stochastic; the output, which multiplies them by X W_V, is not.",
                Evidence(what="row sum of the output of one token", value=str(total), limit="1"),
                witness=Witness(
                    data={"L": 1, "d": 1, "X": x, "W_V": 1}, claimed="row sum 1", found=f"{total}", numpy=OUTPUT
                ),
            )
    return held("Rows of the output sum to one.", Evidence(what="row sums of one token", value="1", samples=3))


@claim(
    "note.L2",
    "The energy form",
    statement="With Q = X W_Q and K = X W_K the logits are Q Kᵀ/√d = X W_Q W_Kᵀ Xᵀ/√d.",
    place="Lemma 2",
    latex=[r"E=\frac{QK^{\top}}{\sqrt{d}}=\frac{XW_QW_K^{\top}X^{\top}}{\sqrt{d}}"],
)
def energy_form(*, form: Callable[[Matrix, Matrix, Matrix], Matrix] = lambda x, q, k: x @ q @ k.T @ x.T) -> Verdict:
    letters = Letters(X=(3, 2), Q=(2, 2), K=(2, 2))
    x, q, k = (letters[name] for name in "XQK")
    same = identical((x @ q) @ (x @ k).T, form(x, q, k))
    evidence = Evidence(what="both sides compared as polynomials, L = 3 and d = 2", proof=same)
    return judged(same, "The two expressions are one polynomial.", "The two expressions differ.", evidence)


def normalised_weights() -> Iterator[Matrix]:
    """All 2 × 2 matrices with entries 0, 1, −1 and ‖W‖_F² = 2 = d."""
    for entries in itertools.product((-1, 0, 1), repeat=4):
        if sum(map(abs, entries)) == 2:
            yield fractions(np.array(entries).reshape(2, 2))


def lagrange(a: Matrix, b: Matrix) -> Any:
    """‖A‖_F² ‖B‖_F² − ‖A B‖_F² as the sum of squares Σ (a_ik b_lj − a_il b_kj)² over i, j and k < l."""
    inner = range(a.shape[1])
    return sum(
        (a[i, k] * b[m, j] - a[i, m] * b[k, j]) ** 2
        for i in range(a.shape[0])
        for j in range(b.shape[1])
        for k in inner
        for m in inner
        if k < m
    )


@claim(
    "note.T3",
    "The energy bound",
    statement="If every W_Q and W_K has ‖W‖_F² = d, the squared logits of H heads add up to at most d H ‖X‖_F⁴.",
    place="Theorem 3",
    hypotheses="‖W_Q‖_F² = ‖W_K‖_F² = d. It is a bound; nothing in it is conserved (note.T3.conserved).",
    latex=[
        r"\sum_{h=1}^{H}\operatorname{tr}(E_hE_h^{\top})\le d\,H\,\|X\|_F^4",
        r"\|A\|_F^2\|B\|_F^2-\|AB\|_F^2=\sum_{i,j}\sum_{k<l}(a_{ik}b_{lj}-a_{il}b_{kj})^2",
    ],
)
def energy_bound(*, bound: Callable[[int, Fraction], Fraction] = lambda d, size: d * size**2) -> Verdict:
    """Three times submultiplicativity, which Lagrange's identity proves; then small cases against the bound itself."""
    letters = Letters(A=(2, 2), B=(2, 2))
    a, b = letters["A"], letters["B"]
    identity = identical(squares(a) * squares(b) - squares(a @ b), lagrange(a, b))
    weights = list(normalised_weights())
    inputs = [fractions([[1, 1], [0, 2]]), fractions([[1, 0], [0, 0]]), fractions([[1, -1], [2, 1]])]
    tightest, cases = Fraction(0), 0
    for x, q, k in itertools.product(inputs, weights, weights):
        energy, limit = squares(x @ q @ k.T @ x.T) / 2, bound(2, squares(x))
        cases += 1
        if energy > limit:
            return refuted(
                "Some weights exceed the bound.",
                Evidence(what="energy", value=str(energy), limit=str(limit)),
                witness=Witness(
                    data={"X": written(x), "W_Q": written(q), "W_K": written(k)},
                    claimed=f"≤ {limit}",
                    found=f"{energy}",
                ),
            )
        tightest = max(tightest, energy / limit)
    # ‖E‖² ≤ ‖X‖² ‖W_Q‖² ‖W_K‖² ‖X‖² / d, which is what the bound says for one head when ‖W‖² = d.
    follows = all(bound(d, s) >= s * d * d * s / d for d in (1, 2, 3, 5) for s in map(Fraction, (1, 2, 7)))
    return judged(
        identity and follows,
        "The bound follows from ‖AB‖_F ≤ ‖A‖_F ‖B‖_F, applied three times to each head and added up.",
        "The bound does not follow from submultiplicativity.",
        Evidence(what="‖A‖²‖B‖² − ‖AB‖² is a sum of squares, as polynomials of 2 × 2 matrices", proof=identity),
        Evidence(what="largest energy over bound", value=float(tightest), limit=1.0, samples=cases),
    )


@claim(
    "note.T3.sharper",
    "A sharper energy bound",
    statement="‖E‖_F² ≤ ‖X‖⁴ ‖W_Q W_Kᵀ‖_F²/d with the operator norm of X; it is never above the bound of Theorem 3, "
    "and it is attained.",
    place="sharpens Theorem 3",
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


CONSERVED = """\
import numpy as np
def loss(q, k, v=1.0):         # tokens X = (1, 0), d = 1, target 0 for the first token
    return 0.5 * (v / (1 + np.exp(-q * k))) ** 2
q, k, h = np.log(3.0), 1.0, 1e-5
dq = -(loss(q + h, k) - loss(q - h, k)) / (2 * h)      # gradient flow
dk = -(loss(q, k + h) - loss(q, k - h)) / (2 * h)
rate = 2 * q * k * (k * dq + q * dk)                   # of the energy (q k)^2
print("the energy changes at the rate", rate)
assert abs(rate) > 0.1"""


@claim(
    "note.T3.conserved",
    "The energy is conserved",
    statement="The total attention energy is a conserved quantity of training, as the theorem's name says.",
    place="Theorem 3, its title",
    latex=[r"\frac{d}{dt}\sum_h\operatorname{tr}(E_hE_h^{\top})=0"],
    corrected_by="note.T3",
)
def energy_conserved(*, quantity: Callable[[Tensor, Tensor], Tensor] = lambda q, k: (q * k) ** 2) -> Verdict:
    q, k = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (math.log(3), 1.0))
    loss = torch.sigmoid(q * k).square() / 2
    down = [-g for g in torch.autograd.grad(loss, (q, k))]
    up = torch.autograd.grad(quantity(q, k), (q, k))
    rate = float(sum(a * b for a, b in zip(up, down, strict=True)))
    evidence = Evidence(what="its rate of change under gradient flow", value=rate, limit=0.0)
    witness = Witness(
        data={"X": "(1, 0)", "d": 1, "W_Q": "log 3", "W_K": 1, "W_V": 1, "target": 0},
        claimed="rate 0",
        found=f"{rate:.4f}",
        numpy=CONSERVED,
    )
    return judged(
        abs(rate) < 1e-12, "It does not change.", "The energy changes in training.", evidence, witness=witness
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
    latex=[r"A(\alpha X)=A(X)\quad\text{for all }\alpha>0"],
    corrected_by="note.T4.corrected",
)
def scale_invariance(*, attention: Callable[[Sequence[Fraction]], Balls] = scalar_attention) -> Verdict:
    cases = [tuple(map(Fraction, x)) for x in ((1,), (1, 0), (2, 1))]
    for x, alpha in itertools.product(cases, map(Fraction, (2, 3))):
        before, after = attention(x), attention([alpha * e for e in x])
        if surely_differs(before, after):
            found = f"A(αX) = {number(after[0]):g}, A(X) = {number(before[0]):g}"
            return refuted(
                "softmax does not see a shift of its logits. It sees a factor, and so do the values.",
                Evidence(what="entries of A(X) and A(αX) in disjoint balls", value=found),
                witness=Witness(
                    data={"X": written(fractions(x)), "W": 1, "α": alpha},
                    claimed="A(αX) = A(X)",
                    found=found,
                    numpy=SCALED,
                ),
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
    latex=[r"\operatorname{softmax}(\alpha^2 Z)=\operatorname{softmax}(Z)"],
    corrected_by="note.T4.corrected",
)
def softmax_scale(
    *, weights: Callable[[Sequence[int]], list[Fraction]] = lambda n: [Fraction(e, sum(n)) for e in n]
) -> Verdict:
    """Logits log n for whole n: doubling them squares n, and everything is a fraction."""
    for n in ((1, 2), (1, 3)):
        once, twice = weights(n), weights([e**2 for e in n])
        if once != twice:
            shown = [", ".join(map(str, values)) for values in (once, twice)]
            return refuted(
                "A factor sharpens or flattens the weights.",
                Evidence(what="softmax of logits and of twice the logits", value=f"({shown[0]}) and ({shown[1]})"),
                witness=Witness(
                    data={"Z": "(log 1, log 2)", "α²": 2},
                    claimed=f"({shown[0]})",
                    found=f"({shown[1]})",
                    numpy=SHARPENED,
                ),
            )
    return held("Doubling the logits changes nothing.", Evidence(what="pairs of logits", value="equal", samples=2))


@claim(
    "note.T4.corrected",
    "Scale covariance",
    statement="Scaling X by α and W_Q W_Kᵀ by α⁻² leaves the logits alone and scales the output by α.",
    place="replaces Theorem 4",
    latex=[r"A_{\alpha^{-2}W}(\alpha X)=\alpha A_W(X)"],
    corrects="note.T4",
)
def scale_covariance(*, power: int = 2) -> Verdict:
    letters = Letters(X=(2, 2), W=(2, 2), V=(2, 2), P=(2, 2), a=())
    x, w, v, p = (letters[name] for name in "XWVP")
    alpha = letters.scalar("a")
    # Logits of (αX, W) are α² those of (X, W), so W/α² gives them back; P stands for the weights they make.
    logits = identical(times(alpha, x) @ w @ times(alpha, x).T, times(alpha**power, x @ w @ x.T))
    output = identical(p @ times(alpha, x) @ v, times(alpha, p @ x @ v))
    evidence = Evidence(what="logits and output compared as polynomials in α, X, W, L = d = 2", proof=logits and output)
    return judged(logits and output, "Both are identities of polynomials.", "The powers of α do not fit.", evidence)
