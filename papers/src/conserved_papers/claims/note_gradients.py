"""Claims of the note on natural attention: its Fisher matrix, and how fast steps in that metric converge."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from conserved.attention import NaturalAttention, NaturalDescent
from conserved.verdict import Evidence, Verdict, Witness
from conserved_papers.claims.judging import by_steps, confirm, decide, refute
from conserved_papers.claims.matrix_words import Words, matrices
from conserved_papers.claims.note import lagrange_identity
from conserved_papers.claims.note_information import stochastic_matrices
from conserved_papers.claims.polynomials import (
    Letters,
    Matrix,
    exact_determinant,
    format_matrix,
    fractions,
    identical,
    positive_semidefinite,
)
from conserved_papers.claims.registry import claim

CONVEX = """\
theta, eta, mu = 1.0, 1.0, 1.0    # one token: A = (1), F = A A^T = 1
curvature = 3.0                   # the loss 3/2 theta^2 is 1-strongly convex
after = theta - eta * curvature * theta
print("|theta_1|^2 =", after ** 2, "bound", (1 - eta * mu) * theta ** 2)
assert after ** 2 > (1 - eta * mu) * theta ** 2"""


@claim("note.C5")
def natural_convergence(*, allowed: Callable[[Fraction, Fraction], bool] = lambda eta, curvature: True) -> Verdict:
    """L(θ) = ½ c θ² with c ≥ μ = 1 is strongly convex; a step multiplies θ² by (1 − ηc)² exactly."""
    cases = [(Fraction(c), Fraction(1, n)) for c in (1, 2, 3, 8) for n in (1, 2, 8)]
    for curvature, step in cases:
        factor, limit = (1 - step * curvature) ** 2, 1 - step
        if allowed(step, curvature) and factor > limit and curvature == 3:
            data = {"F": 1, "loss": f"½·{curvature}·θ²", "μ": 1, "η": step, "θ_0": 1}
            return refute(
                "Strong convexity alone does not bound how far a step overshoots; with η ≤ 1/curvature it holds.",
                Evidence(what="‖θ_1 − θ*‖²/‖θ_0 − θ*‖²", value=str(factor), limit=str(limit), proof=True),
                witness=Witness(data=data, claimed=f"≤ {limit}", found=f"{factor}", numpy=CONVEX),
            )
    return confirm("No step exceeds it.", Evidence(what="curvatures and steps", value="below", samples=len(cases)))


@claim("note.C5.corrected")
def bounded_step_convergence(*, rate: Callable[[Any, Any], Any] = lambda eta, mu: 1 - eta * mu) -> Verdict:
    eta, mu, c = Letters(n=(), m=(), c=())
    u = eta * c
    return by_steps(
        "A quadratic contracts by (1 − ηc)² ≤ 1 − ηc ≤ 1 − ημ in every direction.",
        "The contraction does not follow.",
        ("in an eigenvector of F⁻¹∇²L of eigenvalue c a step multiplies the error by 1 − u, u = ηc ∈ [0, 1], and "
         "(1 − u) − (1 − u)² = u(1 − u) ≥ 0", identical((1 - u) - (1 - u) ** 2, u * (1 - u))),
        ("the stated rate minus (1 − ηc) is η(c − μ) ≥ 0", identical(rate(eta, mu) - (1 - u), eta * (c - mu))),
    )  # fmt: skip


@claim("note.R6")
def needed_conditions(*, rate: Callable[[Fraction], Fraction] = lambda eta: 1 - eta) -> Verdict:
    uniform = fractions(np.full((2, 2), Fraction(1, 2), dtype=object))
    return by_steps(
        "Uniform attention has no F⁻¹, a flat loss stands still, a steep one overshoots.",
        "The rate survives without one of the conditions.",
        ("F = AAᵀ of uniform attention of two tokens is singular", exact_determinant(uniform @ uniform.T) == 0),
        ("a flat loss keeps the factor 1, above the rate at η = 1/2", rate(Fraction(1, 2)) < 1),
        ("curvature 3 with η = 1 gives the factor 4, above the rate", (1 - Fraction(3)) ** 2 > rate(Fraction(1))),
        scope="by an example for each",
    )


DEFINITE = """\
import numpy as np
L = 2
A = np.full((L, L), 1 / L)                 # uniform attention: all logits equal
F = A @ A.T
print(F, np.linalg.eigvalsh(F))
assert np.linalg.eigvalsh(F)[0] < 1 / L and np.linalg.matrix_rank(F) == 1"""


@claim("note.L10")
def positive_definite(*, gram: Callable[[Matrix], Matrix] = lambda a: a @ a.T) -> Verdict:
    count = 0
    for matrix in stochastic_matrices():
        result = gram(matrix)
        rest = result - fractions(np.eye(len(matrix), dtype=int)) / len(matrix)
        count += 1
        if not positive_semidefinite(rest):
            data = {"L": len(matrix), "A": format_matrix(matrix), "AAᵀ": format_matrix(result)}
            says = (f"λ_min ≥ 1/{len(matrix)}", "λ_min = 0, with the eigenvector (1, −1)")
            return refute(
                "Uniform attention, which all-zero weights give at every length, has rank one: AAᵀ is singular.",
                Evidence(what="det AAᵀ", value=str(exact_determinant(result)), limit="> 0", proof=True),
                witness=Witness(data=data, claimed=says[0], found=says[1], numpy=DEFINITE),
            )
    return confirm("AAᵀ − 1/L has no negative eigenvalue.", Evidence(what="matrices", value="definite", samples=count))


@claim("note.L10.corrected")
def diagonal(*, least: Callable[[int], Fraction] = lambda length: Fraction(1, length)) -> Verdict:
    return by_steps(
        "Cauchy–Schwarz, as an identity.",
        "The diagonal can be smaller.",
        ("L Σa² − (Σa)² = Σ_{j<k}(a_j − a_k)²: Lagrange's identity with b = (1, …, 1)", lagrange_identity()),
        (
            "with Σa = 1 it says Σa² − 1/L ≥ 0, and uniform rows attain it: the bound cannot be larger",
            all(least(n) == sum(Fraction(1, n) ** 2 for _ in range(n)) for n in range(1, 20)),
        ),
    )


LIPSCHITZ = """\
import numpy as np
x = np.array([1.0, 2.0])                          # two tokens, d = 1, target 0, w_q = 0, so that A is uniform
def slope(k, v, h=1e-6):                          # d/dw_q of |softmax(w_q k x x^T) x v|^2 / 2 at w_q = 0
    def loss(q):
        A = np.exp(q * k * np.outer(x, x)); A /= A.sum(1, keepdims=True)
        return ((A @ x * v) ** 2).sum() / 2
    return (loss(h) - loss(-h)) / (2 * h)
quotients = [slope(1.0, v) - slope(0.0, v) for v in (1.0, 10.0, 100.0)]    # over |theta_1 - theta_2| = 1
print("difference quotients at v = 1, 10, 100:", quotients)
assert quotients[2] > 90 * quotients[1] > 8000 * quotients[0]"""


def query_slope(k: Fraction, v: Fraction) -> Fraction:
    """Return ∂/∂w_q of ½‖softmax(w_q k xxᵀ)xv‖² at w_q = 0, for tokens 1 and 2: exact, since the weights are 1/2 there.

    Row i has the output v·m with m the mean of the tokens, and ∂A_ij = A_ij k x_i (x_j − m), so the slope is
    Σ_i v m · v k x_i Var(x).
    """
    tokens = (Fraction(1), Fraction(2))
    mean = sum(tokens) / 2
    variance = sum((x - mean) ** 2 for x in tokens) / 2
    return sum((Fraction(v * mean * v * k * x * variance) for x in tokens), Fraction(0))


@claim("note.L11")
def lipschitz(*, values: Sequence[int] = (1, 10, 100, 1000)) -> Verdict:
    """The difference quotient between w_k = 0 and 1 at w_q = 0 is at least that of the component w_q."""
    quotients = [query_slope(Fraction(1), Fraction(v)) - query_slope(Fraction(0), Fraction(v)) for v in values]
    shown = ", ".join(f"{float(value):g}" for value in quotients)
    growing = quotients[-1] > 100 * quotients[0]
    return decide(
        not growing,
        "The quotients stay bounded.",
        "No Lipschitz constant exists for (W_Q, W_K, W_V): the difference quotient grows as the square of W_V.",
        Evidence(what="difference quotient at v = " + ", ".join(map(str, values)), value=shown, proof=True),
        witness=Witness(
            data={"tokens": "(1, 2)", "d": 1, "target": 0, "w_q": 0, "w_k": "0 and 1"},
            claimed="≤ L = 2 for every v",
            found=f"{shown} at v = {', '.join(map(str, values))}",
            numpy=LIPSCHITZ,
        ),
        scope="at L = 2, d = 1",
    )


COMBINED = """\
import numpy as np
A = np.array([[0.75, 0.25], [0.25, 0.75]])
F, g = A @ A.T, np.array([1.0, -1.0])            # F has the eigenvalues 1 and 1/4
print("|g|^2 =", g @ g, "and in F^-1:", g @ np.linalg.solve(F, g))
assert g @ np.linalg.solve(F, g) > g @ g"""

SHARP_ROWS = fractions([[3, 1], [1, 3]]) / 4
"""Attention weights of two tokens; AAᵀ has the eigenvalue 1/4 for (1, −1)."""


def squared_norms(weights: Matrix) -> tuple[Fraction, Fraction]:
    """Return ‖g‖² and ‖g‖² in F⁻¹ for g = (1, −1), an eigenvector of F = AAᵀ for weights with equal corners."""
    gram = weights @ weights.T
    eigenvalue = Fraction(gram[0, 0] - gram[0, 1])
    return Fraction(2), 2 / eigenvalue


@claim("note.L11.combined")
def combined_bounds(*, weights: Matrix = SHARP_ROWS) -> Verdict:
    plain, natural = squared_norms(weights)
    return decide(
        natural <= plain,
        "The norm in F⁻¹ is no larger.",
        "The norm in F⁻¹ can be larger than the plain one. The step needs that AAᵀ has no eigenvalue below 1. Its "
        "trace is at most L, so A has to be a permutation.",
        Evidence(what="‖g‖² and ‖g‖² in F⁻¹, g = (1, −1)", value=f"{plain} and {natural}", proof=True),
        witness=Witness(
            data={"A": format_matrix(weights), "g": "(1, −1)"}, claimed="≤ 2", found=str(natural), numpy=COMBINED
        ),
        scope="at L = 2",
    )


TYPED = """\
import numpy as np
L, d = 3, 2
A = np.full((L, L), 1 / L)
F, theta = A @ A.T, np.zeros(3 * d * d)         # theta = (W_Q, W_K, W_V)
print("F is", F.shape, "theta has", theta.size, "numbers")
assert F.shape[0] != theta.size                 # theta^T F theta is not defined"""


@claim("note.metric")
def metric_on_parameters(*, length: int = 3, dim: int = 2) -> Verdict:
    numbers = 3 * dim * dim
    return decide(
        length == numbers,
        "F_NA acts on the parameters.",
        "AAᵀ is an L × L matrix and acts on tokens; θ = (W_Q, W_K, W_V) has 3d² numbers, and no product of the two is "
        "defined. Conjecture 5, Lemma 11 and Theorem 12 rest on that norm.",
        Evidence(what="side of AAᵀ, and numbers in θ", value=f"{length}, {numbers}", proof=True),
        witness=Witness(
            data={"L": length, "d": dim}, claimed="‖θ‖²_F = θᵀFθ", found=f"{length} against {numbers}", numpy=TYPED
        ),
        scope=f"at L = {length}, d = {dim}",
    )


@claim("note.L11.corrected")
def value_gradient(*, metric: Callable[[Words, Words], Words] = lambda x, a: x.T @ a.T @ a @ x) -> Verdict:
    x, a, first, second, y = matrices("XAVWY")

    def slope(v: Words) -> Words:
        """Return ∇ ½‖AXV − Y‖² = (AX)ᵀ(AXV − Y)."""
        return (a @ x).T @ (a @ x @ v - y)

    same = slope(first) - slope(second) == metric(x, a) @ (first - second)
    return by_steps(
        "The gradient is linear with that matrix.",
        "The gradient has another matrix.",
        ("(AX)ᵀ(AXV_1 − Y) − (AX)ᵀ(AXV_2 − Y) = M(V_1 − V_2), word by word", same),
    )


CONVERGENCE = """\
X, L, eta, v = 2.0, 1, 1.0, 1.0   # one token: A = (1), F = 1, optimum v = 0
after = v - eta * X * (X * v)
print("|v_1|^2 =", after ** 2, "bound", (1 - eta / L) * v ** 2)
assert after ** 2 > (1 - eta / L) * v ** 2"""


@claim("note.T12")
def convergence(*, metric: Callable[[Fraction], Fraction] = lambda x: Fraction(1)) -> Verdict:
    """One token x: the gradient is x² v, so a step multiplies v by 1 − η x²/F."""
    count = 0
    for x, eta in itertools.product((Fraction(1), Fraction(2), Fraction(1, 2)), (Fraction(1), Fraction(1, 2))):
        factor, limit = (1 - eta * x * x / metric(x)) ** 2, 1 - eta
        count += 1
        if factor > limit:
            data = {"L": 1, "d": 1, "X": x, "η": eta, "W_V": 1, "target": 0}
            return refute(
                "AAᵀ does not see the size of the tokens: large ones overshoot, small ones hardly move.",
                Evidence(what="‖θ_1 − θ*‖²/‖θ_0 − θ*‖²", value=str(factor), limit=str(limit), proof=True),
                witness=Witness(data=data, claimed=f"≤ {limit}", found=f"{factor}", numpy=CONVERGENCE),
            )
    return confirm("Every step contracts as stated.", Evidence(what="pairs (x, η)", value="contract", samples=count))


FLAT = """\
X, L, v = 0.5, 1, 1.0             # one token: A = (1), F = 1, optimum v = 0
inner = (X * X * v) * v           # <gradient, v - 0>
print("inner product", inner, "claimed at least", v ** 2 / L)
assert inner < v ** 2 / L"""


@claim("note.T12.convexity")
def convexity_step(*, curvature: Callable[[Fraction], Fraction] = lambda x: x * x) -> Verdict:
    inner = curvature(Fraction(1, 2))
    evidence = Evidence(what="⟨∇L(1), 1⟩ for one token 1/2", value=str(inner), limit="≥ 1", proof=True)
    witness = Witness(
        data={"L": 1, "d": 1, "X": "1/2", "W_V": 1, "target": 0}, claimed="≥ 1", found=str(inner), numpy=FLAT
    )
    says, otherwise = "It holds.", "Small tokens make a flat loss, whatever F is."
    return decide(inner >= 1, says, otherwise, evidence, witness=witness, scope="for one token")


SQUARE = """\
L, eta = 4, 1.0
printed, squared = 1 - 2 * eta / L + eta ** 2 / L, 1 - 2 * eta / L + eta ** 2 * L ** 2
print("printed factor", printed, "with the square of Lemma 11", squared, "claimed at most", 1 - eta / L)
assert printed <= 1 - eta / L < squared"""


@claim("note.T12.square")
def lipschitz_step(*, power: int = 2) -> Verdict:
    lengths = (2, 4, 8)
    bad = [n for n in lengths if 1 - Fraction(2, n) + Fraction(n) ** power > 1 - Fraction(1, n)]
    witness = Witness(data={"L": 4, "η": 1}, claimed="1 − 2/4 + 1/4 ≤ 3/4", found="1 − 2/4 + 16 > 3/4", numpy=SQUARE)
    evidence = Evidence(what="lengths where the last step fails with the lemma's constant", value=str(bad), proof=True)
    return decide(
        not bad,
        "The step follows.",
        "Lemma 11 bounds the gradient by L, so its square by L²; the step uses L.",
        evidence,
        witness=witness,
        scope="at L = 2, 4, 8, η = 1",
    )


EXPANDED = """\
import numpy as np
A = np.array([[0.75, 0.25], [0.25, 0.75]])
F, g = A @ A.T, np.array([1.0, -1.0])
step = np.linalg.solve(F, g)                     # F^-1 g
print("|F^-1 g|^2 in F:", step @ F @ step, "printed |g|^2 in F:", g @ F @ g, "in F^-1:", g @ step)
assert np.isclose(step @ F @ step, g @ step) and not np.isclose(g @ step, g @ F @ g)"""


@claim("note.T12.norm")
def last_term(*, power: int = 1) -> Verdict:
    """‖F⁻¹g‖² in F is gᵀF⁻¹g. For g = (1, −1) it is 2/λ, and gᵀFg is 2λ, with λ = 1/4."""
    eigenvalue = Fraction(1, 4)
    printed, meant = 2 * eigenvalue**power, 2 / eigenvalue
    return decide(
        printed == meant,
        "The last term is the one printed.",
        "The norm of F⁻¹ is meant, as in the line that bounds it.",
        Evidence(what="last term as printed and as it is, g = (1, −1)", value=f"{printed} and {meant}", proof=True),
        witness=Witness(
            data={"A": "((3/4, 1/4), (1/4, 3/4))", "∇L": "(1, −1)", "η": 1},
            claimed=str(printed),
            found=str(meant),
            numpy=EXPANDED,
        ),
        scope="at L = 2",
    )


CITED = """\
lemmas = {2: "energy form", 10: "definiteness", 11: "Lipschitz gradient", 13: "entropy"}
cited = {1: "definiteness", 2: "Lipschitz gradient"}     # lines 173 and 177
print("cited lemmas that say so:", [n for n in cited if lemmas.get(n) == cited[n]])
assert all(lemmas.get(n) != cited[n] for n in cited)"""

LEMMAS = {2: "energy form", 10: "definiteness", 11: "Lipschitz gradient", 13: "entropy"}
"""The lemmas of the note, by number."""


@claim("note.T12.lemmas")
def cited_lemmas(*, cited: tuple[int, int] = (1, 2)) -> Verdict:
    wanted = dict(zip(cited, ("definiteness", "Lipschitz gradient"), strict=True))
    wrong = [number for number, subject in wanted.items() if LEMMAS.get(number) != subject]
    return decide(
        not wrong,
        "Both lemmas say what they are cited for.",
        "Lemmas 10 and 11 are meant. There is no Lemma 1, and Lemma 2 is the energy form.",
        Evidence(what="cited lemmas that say something else", value=str(wrong), proof=True),
        witness=Witness(data={"cited": "Lemma 1, Lemma 2"}, claimed="their subject", found="another", numpy=CITED),
        scope="the printed numbers",
    )


@claim("note.T12.last")
def last_step(*, power: int = 2) -> Verdict:
    (eta,) = Letters(n=())
    same = identical((2 * eta - eta**power) - eta, eta * (1 - eta))
    return by_steps(
        "The difference is η(1 − η)/L, which is at least zero.",
        "It does not follow.",
        ("L times the gap is η(1 − η) ≥ 0 on [0, 1]", same),
    )


@claim("note.T12.corrected")
def gauss_newton_convergence(*, metric: Any = "gauss-newton") -> Verdict:
    worst, samples = 0.0, 0
    for rate, seed in itertools.product((0.1, 0.5, 1.0), (0, 1)):
        torch.manual_seed(seed)
        layer, x = NaturalAttention(4).double(), torch.randn(3, 7, 4, dtype=torch.float64)
        x = x * torch.tensor([1.0, 0.5, 0.3, 0.1], dtype=torch.float64)
        layer.q.requires_grad_(False)
        layer.k.requires_grad_(False)
        goal = torch.randn(4, 4, dtype=torch.float64)
        with torch.no_grad():
            target = layer.weights(x) @ x @ goal
        optimizer = NaturalDescent(layer, lr=rate, damping=1e-12, metric=metric)
        before = layer.v.detach() - goal
        ((layer(x) - target).square().sum() / (2 * x.shape[:-1].numel())).backward()
        optimizer.step()
        after = layer.v.detach() - goal
        worst = max(worst, float((after - (1 - rate) * before).norm() / before.norm()))
        samples += 1
    return decide(
        worst < 1e-6,
        "One step multiplies the error by 1 − η.",
        "The error is not multiplied by 1 − η.",
        Evidence(
            what="relative distance from (1 − η)(W − W*), damping 1e-12", value=worst, limit=1e-6, samples=samples
        ),
    )
