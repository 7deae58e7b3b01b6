"""Claims of the note on natural attention: its Fisher matrix, and how fast steps in that metric converge."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from conserved.attention import NaturalAttention, NaturalDescent
from conserved.claims.judging import argued, held, judged, refuted
from conserved.claims.ledger import claim
from conserved.claims.note import lagrange_identity
from conserved.claims.note_information import stochastic_matrices
from conserved.claims.polynomials import (
    Letters,
    Matrix,
    exact_determinant,
    fractions,
    identical,
    positive_semidefinite,
    written,
)
from conserved.claims.words import Words, matrices
from conserved.verdict import Evidence, Verdict, Witness

CONVEX = """\
theta, eta, mu = 1.0, 1.0, 1.0    # one token: A = (1), F = A A^T = 1
curvature = 3.0                   # the loss 3/2 theta^2 is 1-strongly convex
after = theta - eta * curvature * theta
print("|theta_1|^2 =", after ** 2, "bound", (1 - eta * mu) * theta ** 2)
assert after ** 2 > (1 - eta * mu) * theta ** 2"""


@claim(
    "note.C5",
    "Natural gradient convergence",
    statement="If the loss is μ-strongly convex in the metric F, steps θ − ηF⁻¹∇L contract ‖θ − θ*‖_F² by 1 − ημ.",
    place="Conjecture 5",
    lines="75-77",
    conditions=["a conjecture", "μ-strongly convex in the natural metric", "Remark 6 asks for Lipschitz gradients too"],
    hypotheses="0 < ημ ≤ 1; the conjecture does not bound the step otherwise.",
    latex=[r"\|\theta_t-\theta^*\|_{F_{NA}}^2\le(1-\eta\mu)^t\,\|\theta_0-\theta^*\|_{F_{NA}}^2"],
    severity="overclaim",
    corrected_by="note.C5.corrected",
)
def natural_convergence(*, allowed: Callable[[Fraction, Fraction], bool] = lambda eta, curvature: True) -> Verdict:
    """L(θ) = ½ c θ² with c ≥ μ = 1 is strongly convex; a step multiplies θ² by (1 − ηc)² exactly."""
    cases = [(Fraction(c), Fraction(1, n)) for c in (1, 2, 3, 8) for n in (1, 2, 8)]
    for curvature, step in cases:
        factor, limit = (1 - step * curvature) ** 2, 1 - step
        if allowed(step, curvature) and factor > limit and curvature == 3:
            data = {"F": 1, "loss": f"½·{curvature}·θ²", "μ": 1, "η": step, "θ_0": 1}
            return refuted(
                "Strong convexity alone does not bound how far a step overshoots; with η ≤ 1/curvature it holds.",
                Evidence(what="‖θ_1 − θ*‖²/‖θ_0 − θ*‖²", value=str(factor), limit=str(limit), proof=True),
                witness=Witness(data=data, claimed=f"≤ {limit}", found=f"{factor}", numpy=CONVEX),
            )
    return held("No step exceeds it.", Evidence(what="curvatures and steps", value="below", samples=len(cases)))


@claim(
    "note.C5.corrected",
    "Natural gradient convergence with a bounded step",
    statement="In a fixed positive definite metric a quadratic loss with curvature between μ and M contracts by 1 − ημ "
    "for every step η ≤ 1/M.",
    place="replaces Conjecture 5",
    lines="75-77",
    whose="ours",
    latex=[r"\|\theta_{t+1}-\theta^*\|_F^2\le(1-\eta\mu)\,\|\theta_t-\theta^*\|_F^2\quad\text{for }\eta\le 1/M"],
    corrects="note.C5",
)
def bounded_step_convergence(*, rate: Callable[[Any, Any], Any] = lambda eta, mu: 1 - eta * mu) -> Verdict:
    letters = Letters(n=(), m=(), c=())
    eta, mu, c = (letters.scalar(name) for name in "nmc")
    u = eta * c
    return argued(
        "A quadratic contracts by (1 − ηc)² ≤ 1 − ηc ≤ 1 − ημ in every direction.",
        "The contraction does not follow.",
        ("in an eigenvector of F⁻¹∇²L of eigenvalue c a step multiplies the error by 1 − u, u = ηc ∈ [0, 1], and "
         "(1 − u) − (1 − u)² = u(1 − u) ≥ 0", identical((1 - u) - (1 - u) ** 2, u * (1 - u))),
        ("the stated rate minus (1 − ηc) is η(c − μ) ≥ 0", identical(rate(eta, mu) - (1 - u), eta * (c - mu))),
    )  # fmt: skip


@claim(
    "note.R6",
    "What the convergence needs",
    statement="Positive definiteness, strong convexity and a Lipschitz gradient are each needed for that rate: without "
    "any one of them it fails.",
    place="Remark 6",
    lines="79-83",
    hypotheses="μ = 1; three examples with one parameter or two tokens.",
)
def needed_conditions(*, rate: Callable[[Fraction], Fraction] = lambda eta: 1 - eta) -> Verdict:
    uniform = fractions(np.full((2, 2), Fraction(1, 2), dtype=object))
    return argued(
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


@claim(
    "note.L10",
    "Positive definiteness of AAᵀ",
    statement="AAᵀ is positive definite with smallest eigenvalue at least 1/L.",
    place="Lemma 10",
    lines="130-142",
    conditions=["A is a stochastic matrix, as softmax makes it"],
    latex=[r"\lambda_{\min}(AA^{\top})\ge\frac{1}{L}"],
    severity="false",
    corrected_by="note.L10.corrected",
)
def positive_definite(*, gram: Callable[[Matrix], Matrix] = lambda a: a @ a.T) -> Verdict:
    count = 0
    for matrix in stochastic_matrices():
        found = gram(matrix)
        rest = found - fractions(np.eye(len(matrix), dtype=int)) / len(matrix)
        count += 1
        if not positive_semidefinite(rest):
            data = {"L": len(matrix), "A": written(matrix), "AAᵀ": written(found)}
            says = (f"λ_min ≥ 1/{len(matrix)}", "λ_min = 0, with the eigenvector (1, −1)")
            return refuted(
                "Uniform attention, which all-zero weights give at every length, has rank one: AAᵀ is singular.",
                Evidence(what="det AAᵀ", value=str(exact_determinant(found)), limit="> 0", proof=True),
                witness=Witness(data=data, claimed=says[0], found=says[1], numpy=DEFINITE),
            )
    return held("AAᵀ − 1/L has no negative eigenvalue.", Evidence(what="matrices", value="definite", samples=count))


@claim(
    "note.L10.corrected",
    "The diagonal of AAᵀ",
    statement="Every diagonal entry of AAᵀ is at least 1/L, with equality for uniform rows only.",
    place="replaces Lemma 10",
    lines="130",
    whose="ours",
    hypotheses="Rows of A sum to one.",
    latex=[r"(AA^{\top})_{ii}\ge\frac{1}{L}", r"L\sum_j a_j^2-\Big(\sum_j a_j\Big)^2=\sum_{j<k}(a_j-a_k)^2"],
    corrects="note.L10",
)
def diagonal(*, least: Callable[[int], Fraction] = lambda length: Fraction(1, length)) -> Verdict:
    return argued(
        "Cauchy–Schwarz, as an identity.",
        "The diagonal can be smaller.",
        ("L Σa² − (Σa)² = Σ_{j<k}(a_j − a_k)²: Lagrange's identity with b = (1, …, 1)", lagrange_identity()),
        (
            "with Σa = 1 it says Σa² − 1/L ≥ 0, and uniform rows attain it: the bound cannot be larger",
            all(least(n) == sum(Fraction(1, n) ** 2 for _ in range(n)) for n in range(1, 20)),
        ),
    )


LIPSCHITZ = """\
X, L = 2.0, 1                     # one token: A = (1), F = 1
def gradient(v):                  # of (X v)^2 / 2
    return X * (X * v)
print(abs(gradient(1.0) - gradient(0.0)), "against L |v_1 - v_0| =", L * 1.0)
assert abs(gradient(1.0) - gradient(0.0)) > L * 1.0"""


@claim(
    "note.L11",
    "Lipschitz gradient with the sequence length",
    statement="‖∇L(θ_1) − ∇L(θ_2)‖ in the metric F⁻¹ is at most L ‖θ_1 − θ_2‖ in F, with L the sequence length.",
    place="Lemma 11",
    lines="144-156",
    conditions=["L is the sequence length, as Lemma 10 and Theorem 12 say and this lemma does not take back"],
    hypotheses="Squared error of the value map; one token, where F = 1 and shapes agree.",
    latex=[r"\|\nabla\mathcal{L}(\theta_1)-\nabla\mathcal{L}(\theta_2)\|_{F^{-1}}\le L\,\|\theta_1-\theta_2\|_{F}"],
    severity="overclaim",
    corrected_by="note.L11.corrected",
)
def lipschitz(*, constant: Callable[[int, Fraction], Fraction] = lambda length, x: Fraction(length)) -> Verdict:
    for x in map(Fraction, (1, 2, 3)):
        rise, limit = x * x, constant(1, x)
        if rise > limit:
            data = {"L": 1, "d": 1, "X": x, "W_V": "0 and 1", "target": 0}
            return refuted(
                "Some constant does it, the curvature of the loss; the length has nothing to do with it.",
                Evidence(what="‖∇L(1) − ∇L(0)‖", value=str(rise), limit=str(limit), proof=True),
                witness=Witness(data=data, claimed=f"≤ {limit}", found=f"{rise}", numpy=LIPSCHITZ),
            )
    return held("No input exceeds the constant.", Evidence(what="inputs", value="below", samples=3))


@claim(
    "note.L11.corrected",
    "The gradient of the value map",
    statement="For squared error and fixed weights A the gradient in W_V is linear with matrix M = XᵀAᵀAX: its "
    "Lipschitz constant is the largest eigenvalue of M, and one in the metric M itself.",
    place="replaces Lemma 11",
    lines="144-146",
    whose="ours",
    latex=[r"\nabla\mathcal{L}(V_1)-\nabla\mathcal{L}(V_2)=X^{\top}A^{\top}AX\,(V_1-V_2)"],
    corrects="note.L11",
)
def value_gradient(*, metric: Callable[[Words, Words], Words] = lambda x, a: x.T @ a.T @ a @ x) -> Verdict:
    x, a, first, second, y = matrices("XAVWY")

    def slope(v: Words) -> Words:
        """∇ ½‖AXV − Y‖² = (AX)ᵀ(AXV − Y)."""
        return (a @ x).T @ (a @ x @ v - y)

    same = slope(first) - slope(second) == metric(x, a) @ (first - second)
    return argued(
        "The gradient is linear with that matrix.",
        "The gradient has another matrix.",
        ("(AX)ᵀ(AXV_1 − Y) − (AX)ᵀ(AXV_2 − Y) = M(V_1 − V_2), word by word", same),
    )


CONVERGENCE = """\
X, L, eta, v = 2.0, 1, 1.0, 1.0   # one token: A = (1), F = 1, optimum v = 0
after = v - eta * X * (X * v)
print("|v_1|^2 =", after ** 2, "bound", (1 - eta / L) * v ** 2)
assert after ** 2 > (1 - eta / L) * v ** 2"""


@claim(
    "note.T12",
    "Natural gradient convergence at rate 1/L",
    statement="Steps θ − ηF⁻¹∇L with F = AAᵀ contract ‖θ − θ*‖_F² by 1 − η/L for every η ≤ 1.",
    place="Theorem 12",
    lines="158-162, 181-189",
    conditions=["η is the learning rate, at most 1", "L is the sequence length"],
    hypotheses="Squared error of the value map; one token, where F = 1 and shapes agree.",
    latex=[r"\|\theta_t-\theta^*\|_F^2\le\Big(1-\frac{\eta}{L}\Big)^t\,\|\theta_0-\theta^*\|_F^2"],
    severity="false",
    corrected_by="note.T12.corrected",
)
def convergence(*, metric: Callable[[Fraction], Fraction] = lambda x: Fraction(1)) -> Verdict:
    """One token x: the gradient is x² v, so a step multiplies v by 1 − η x²/F."""
    count = 0
    for x, eta in itertools.product((Fraction(1), Fraction(2), Fraction(1, 2)), (Fraction(1), Fraction(1, 2))):
        factor, limit = (1 - eta * x * x / metric(x)) ** 2, 1 - eta
        count += 1
        if factor > limit:
            data = {"L": 1, "d": 1, "X": x, "η": eta, "W_V": 1, "target": 0}
            return refuted(
                "AAᵀ does not see the size of the tokens: large ones overshoot, small ones hardly move.",
                Evidence(what="‖θ_1 − θ*‖²/‖θ_0 − θ*‖²", value=str(factor), limit=str(limit), proof=True),
                witness=Witness(data=data, claimed=f"≤ {limit}", found=f"{factor}", numpy=CONVERGENCE),
            )
    return held("Every step contracts as stated.", Evidence(what="pairs (x, η)", value="contract", samples=count))


FLAT = """\
X, L, v = 0.5, 1, 1.0             # one token: A = (1), F = 1, optimum v = 0
inner = (X * X * v) * v           # <gradient, v - 0>
print("inner product", inner, "claimed at least", v ** 2 / L)
assert inner < v ** 2 / L"""


@claim(
    "note.T12.convexity",
    "The loss is strongly convex because AAᵀ is definite",
    statement="⟨∇L(θ), θ − θ*⟩ ≥ ‖θ − θ*‖_F²/L, from the smallest eigenvalue of F.",
    place="proof of Theorem 12, strong convexity",
    lines="173-175",
    hypotheses="An eigenvalue of the metric says nothing of the loss. One token, where F = 1.",
    latex=[r"\langle\nabla\mathcal{L}(\theta_t),\theta_t-\theta^*\rangle\ge\frac1L\|\theta_t-\theta^*\|_{F}^2"],
    severity="false",
    under="note.T12",
)
def convexity_step(*, curvature: Callable[[Fraction], Fraction] = lambda x: x * x) -> Verdict:
    inner = curvature(Fraction(1, 2))
    evidence = Evidence(what="⟨∇L(1), 1⟩ for one token 1/2", value=str(inner), limit="≥ 1", proof=True)
    witness = Witness(
        data={"L": 1, "d": 1, "X": "1/2", "W_V": 1, "target": 0}, claimed="≥ 1", found=str(inner), numpy=FLAT
    )
    says, otherwise = "It holds.", "Small tokens make a flat loss, whatever F is."
    return judged(inner >= 1, says, otherwise, evidence, witness=witness, scope="for one token")


SQUARE = """\
L, eta = 4, 1.0
printed, squared = 1 - 2 * eta / L + eta ** 2 / L, 1 - 2 * eta / L + eta ** 2 * L ** 2
print("printed factor", printed, "with the square of Lemma 11", squared, "claimed at most", 1 - eta / L)
assert printed <= 1 - eta / L < squared"""


@claim(
    "note.T12.square",
    "Lemma 11 bounds the squared gradient by L",
    statement="‖∇L(θ)‖² in F⁻¹ is at most L ‖θ − θ*‖_F², from Lemma 11.",
    place="proof of Theorem 12, the Lipschitz step",
    lines="170-171, 177-183",
    hypotheses="Squared, the lemma gives L²; then the last step fails for η = 1 and every L > 1. The term is printed "
    "with the norm of F for that of F⁻¹ one line earlier.",
    latex=[r"\|\nabla\mathcal{L}(\theta_t)\|_{F^{-1}}^2\le L\,\|\theta_t-\theta^*\|_{F}^2"],
    severity="false",
    under="note.T12",
)
def lipschitz_step(*, power: int = 2) -> Verdict:
    lengths = (2, 4, 8)
    bad = [n for n in lengths if 1 - Fraction(2, n) + Fraction(n) ** power > 1 - Fraction(1, n)]
    witness = Witness(data={"L": 4, "η": 1}, claimed="1 − 2/4 + 1/4 ≤ 3/4", found="1 − 2/4 + 16 > 3/4", numpy=SQUARE)
    evidence = Evidence(what="lengths where the last step fails with the lemma's constant", value=str(bad), proof=True)
    return judged(
        not bad, "The step follows.", "A square is lost.", evidence, witness=witness, scope="at L = 2, 4, 8, η = 1"
    )


@claim(
    "note.T12.last",
    "The last step of the rate",
    statement="1 − 2η/L + η²/L ≤ 1 − η/L for 0 ≤ η ≤ 1.",
    place="proof of Theorem 12, for η ≤ 1",
    lines="185-187",
    conditions=["η ≤ 1"],
    latex=[r"1-\frac{2\eta}{L}+\frac{\eta^2}{L}\le1-\frac{\eta}{L}"],
)
def last_step(*, power: int = 2) -> Verdict:
    letters = Letters(n=())
    eta = letters.scalar("n")
    same = identical((2 * eta - eta**power) - eta, eta * (1 - eta))
    return argued("It is η(1 − η) ≥ 0.", "It does not follow.", ("L times the gap is η(1 − η) ≥ 0 on [0, 1]", same))


@claim(
    "note.T12.corrected",
    "Convergence in the Gauss–Newton metric",
    statement="Steps in W_V with the metric M = XᵀAᵀAX + δ multiply the error by 1 − ηλ/(λ + δ) in every eigenvector "
    "of M of eigenvalue λ: by 1 − η, whatever the length, as δ goes to zero.",
    place="replaces Theorem 12",
    lines="158-160",
    whose="ours",
    hypotheses="Squared error, weights A fixed, M of full rank.",
    latex=[r"W_V-W^*\ \mapsto\ \Big(1-\frac{\eta\lambda}{\lambda+\delta}\Big)(W_V-W^*)"],
    corrects="note.T12",
)
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
    return judged(
        worst < 1e-6,
        "One step multiplies the error by 1 − η.",
        "The error is not multiplied by 1 − η.",
        Evidence(
            what="relative distance from (1 − η)(W − W*), damping 1e-12", value=worst, limit=1e-6, samples=samples
        ),
    )
