"""Claims of the note on natural attention: its Fisher matrix, and how fast steps in that metric converge."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conserved.attention import NaturalAttention, NaturalDescent, value_metric
from conserved.claims.judging import held, judged, refuted
from conserved.claims.ledger import claim
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
from conserved.verdict import Evidence, Verdict, Witness

CONVEX = """\
theta, eta, mu = 1.0, 1.0, 1.0    # one token: A = (1), F = A A^T = 1
curvature = {curvature}.0                   # the loss {curvature}/2 theta^2 is 1-strongly convex
after = theta - eta * curvature * theta
print("|theta_1|^2 =", after ** 2, "bound", (1 - eta * mu) * theta ** 2)
assert after ** 2 > (1 - eta * mu) * theta ** 2"""


def contraction(
    code: str, *, allowed: Callable[[Fraction, Fraction], bool], rate: Callable[[Fraction, Fraction], Fraction]
) -> Verdict:
    """L(θ) = ½ c θ² with c ≥ μ is μ-strongly convex; a step multiplies θ² by (1 − ηc)² exactly."""
    steps = (Fraction(1, 8), Fraction(1, 2), Fraction(1))
    cases = itertools.product(map(Fraction, (1, 2)), map(Fraction, (1, 2, 3, 8)), steps)
    count, tightest = 0, Fraction(0)
    for mu, curvature, step in cases:
        if curvature < mu or step * mu > 1 or not allowed(step, curvature):
            continue
        factor, limit = (1 - step * curvature) ** 2, rate(step, mu)
        count += 1
        if factor > limit:
            return refuted(
                "Strong convexity alone does not bound how far a step overshoots.",
                Evidence(what="‖θ_1 − θ*‖²/‖θ_0 − θ*‖²", value=str(factor), limit=str(limit)),
                witness=Witness(
                    data={"F": 1, "loss": f"½·{curvature}·θ²", "μ": mu, "η": step, "θ_0": 1},
                    claimed=f"≤ {limit}",
                    found=f"{factor}",
                    numpy=code.format(curvature=curvature),
                ),
            )
        tightest = max(tightest, factor / limit if limit else Fraction(0))
    letters = Letters(u=())
    u = letters.scalar("u")
    # (1 − u) − (1 − u)² = u (1 − u) ≥ 0 for u = ηc in [0, 1], and 1 − ηc ≤ 1 − ημ.
    identity = identical((1 - u) - (1 - u) ** 2, u * (1 - u))
    return judged(
        identity,
        "A quadratic contracts by (1 − ηc)² ≤ 1 − ηc ≤ 1 − ημ in every direction.",
        "The contraction does not follow.",
        Evidence(what="(1 − u) − (1 − u)² = u(1 − u) ≥ 0 on [0, 1]", proof=identity),
        Evidence(what="largest factor over bound", value=float(tightest), limit=1.0, samples=count),
    )


@claim(
    "note.C5",
    "Natural gradient convergence",
    statement="If the loss is μ-strongly convex in the metric F, steps θ − ηF⁻¹∇L contract ‖θ − θ*‖_F² by 1 − ημ.",
    place="Conjecture 5",
    hypotheses="0 < ημ ≤ 1; nothing else is asked of the step.",
    latex=[r"\|\theta_t-\theta^*\|_F^2\le(1-\eta\mu)^t\,\|\theta_0-\theta^*\|_F^2"],
    corrected_by="note.C5.corrected",
)
def natural_convergence(*, allowed: Callable[[Fraction, Fraction], bool] = lambda eta, curvature: True) -> Verdict:
    return contraction(CONVEX, allowed=allowed, rate=lambda eta, mu: 1 - eta * mu)


@claim(
    "note.C5.corrected",
    "Natural gradient convergence with a bounded step",
    statement="In a fixed positive definite metric a quadratic loss with curvature between μ and M contracts by 1 − ημ "
    "for every step η ≤ 1/M.",
    place="replaces Conjecture 5",
    hypotheses="Quadratic loss, fixed F.",
    latex=[r"\|\theta_{t+1}-\theta^*\|_F^2\le(1-\eta\mu)\,\|\theta_t-\theta^*\|_F^2\quad\text{for }\eta\le 1/M"],
    corrects="note.C5",
)
def bounded_step_convergence(
    *, rate: Callable[[Fraction, Fraction], Fraction] = lambda eta, mu: 1 - eta * mu
) -> Verdict:
    return contraction(CONVEX, allowed=lambda eta, curvature: eta * curvature <= 1, rate=rate)


@claim(
    "note.R6",
    "What the convergence needs",
    statement="Positive definiteness, strong convexity and a Lipschitz gradient are each needed for that rate: without "
    "any one of them it fails.",
    place="Remark 6",
    hypotheses="μ = 1; the three examples have one parameter or two tokens and are exact.",
    latex=[r"\|\theta_1-\theta^*\|_F^2\le(1-\eta\mu)\,\|\theta_0-\theta^*\|_F^2"],
)
def needed_conditions(*, rate: Callable[[Fraction], Fraction] = lambda eta: 1 - eta) -> Verdict:
    uniform = fractions(np.full((2, 2), Fraction(1, 2), dtype=object))
    singular = exact_determinant(uniform @ uniform.T) == 0
    # A flat loss is not strongly convex and does not move; curvature 3 with η = 1 overshoots.
    flat = rate(Fraction(1, 2)) < 1
    steep = (1 - Fraction(1) * 3) ** 2 > rate(Fraction(1))
    return judged(
        singular and flat and steep,
        "Uniform attention has no F⁻¹, a flat loss stands still, a steep one overshoots.",
        "The rate survives without one of the conditions.",
        Evidence(
            what="det AAᵀ of uniform attention", value=str(exact_determinant(uniform @ uniform.T)), proof=singular
        ),
        Evidence(what="flat loss, η = 1/2: factor 1 against", value=str(rate(Fraction(1, 2))), proof=flat),
        Evidence(what="curvature 3, η = 1: factor 4 against", value=str(rate(Fraction(1))), proof=steep),
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
    latex=[r"\lambda_{\min}(AA^{\top})\ge\frac{1}{L}"],
    corrected_by="note.L10.corrected",
)
def positive_definite(*, gram: Callable[[Matrix], Matrix] = lambda a: a @ a.T) -> Verdict:
    count = 0
    for matrix in stochastic_matrices():
        found = gram(matrix)
        rest = found - fractions(np.eye(len(matrix), dtype=int)) / len(matrix)
        count += 1
        if not positive_semidefinite(rest):
            return refuted(
                "Uniform attention has rank one, so AAᵀ is singular.",
                Evidence(what="det AAᵀ", value=str(exact_determinant(found)), limit="> 0", proof=True),
                witness=Witness(
                    data={"L": len(matrix), "A": written(matrix), "AAᵀ": written(found)},
                    claimed=f"λ_min ≥ 1/{len(matrix)}",
                    found="λ_min = 0, with the eigenvector (1, −1)",
                    numpy=DEFINITE,
                ),
            )
    return held("AAᵀ − 1/L has no negative eigenvalue.", Evidence(what="matrices", value="definite", samples=count))


@claim(
    "note.L10.corrected",
    "The diagonal of AAᵀ",
    statement="Every diagonal entry of AAᵀ is at least 1/L, with equality for uniform rows only.",
    place="replaces Lemma 10",
    hypotheses="Rows of A sum to one.",
    latex=[r"(AA^{\top})_{ii}\ge\frac{1}{L}", r"L\sum_j a_j^2-\Big(\sum_j a_j\Big)^2=\sum_{j<k}(a_j-a_k)^2"],
    corrects="note.L10",
)
def diagonal(*, least: Callable[[int], Fraction] = lambda length: Fraction(1, length)) -> Verdict:
    good = True
    for length in range(1, 6):
        a = Letters(a=(length,))["a"]
        total, squared = a.sum(), (a * a).sum()
        gaps = sum((a[j] - a[k]) ** 2 for j in range(length) for k in range(j + 1, length))
        # With Σ a = 1 the identity says Σ a² − 1/L = Σ (a_j − a_k)²/L ≥ 0.
        good &= identical(length * squared - total * total, gaps) and least(length) <= Fraction(1, length)
    evidence = Evidence(what="L Σa² − (Σa)² is a sum of squares, as polynomials for L = 1, …, 5", proof=good)
    return judged(good, "Cauchy–Schwarz, as an identity.", "The diagonal can be smaller.", evidence)


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
    hypotheses="Squared error of the value map; one token, where F = 1 and shapes agree.",
    latex=[r"\|\nabla\mathcal{L}(\theta_1)-\nabla\mathcal{L}(\theta_2)\|_{F^{-1}}\le L\,\|\theta_1-\theta_2\|_{F}"],
    corrected_by="note.L11.corrected",
)
def lipschitz(*, constant: Callable[[int, Fraction], Fraction] = lambda length, x: Fraction(length)) -> Verdict:
    for x in map(Fraction, (1, 2, 3)):
        rise, limit = x * x, constant(1, x)
        if rise > limit:
            return refuted(
                "The constant is the curvature of the loss, which has nothing to do with the length.",
                Evidence(what="‖∇L(1) − ∇L(0)‖", value=str(rise), limit=str(limit)),
                witness=Witness(
                    data={"L": 1, "d": 1, "X": x, "W_V": "0 and 1", "target": 0},
                    claimed=f"≤ {limit}",
                    found=f"{rise}",
                    numpy=LIPSCHITZ,
                ),
            )
    return held("No input exceeds the constant.", Evidence(what="inputs", value="below", samples=3))


@claim(
    "note.L11.corrected",
    "The gradient of the value map",
    statement="For squared error and fixed weights A the gradient in W_V is linear with matrix M = XᵀAᵀAX: its "
    "Lipschitz constant is the largest eigenvalue of M, and one in the metric M itself.",
    place="replaces Lemma 11",
    latex=[r"\nabla\mathcal{L}(V_1)-\nabla\mathcal{L}(V_2)=X^{\top}A^{\top}AX\,(V_1-V_2)"],
    corrects="note.L11",
)
def value_gradient(*, metric: Callable[[Tensor, Tensor], Tensor] = value_metric) -> Verdict:
    worst, samples = 0.0, 0
    for length, dim in itertools.product((1, 3, 8), (1, 2, 5)):
        layer, x = NaturalAttention(dim).double(), torch.randn(length, dim, dtype=torch.float64)
        with torch.no_grad():
            weights = layer.weights(x)
        target = torch.randn(length, dim, dtype=torch.float64)

        def slope(v: Tensor, x: Tensor = x, weights: Tensor = weights, target: Tensor = target) -> Tensor:
            return torch.func.grad(lambda v: (weights @ x @ v - target).square().sum() / 2)(v)

        first, second = (torch.randn(dim, dim, dtype=torch.float64) for _ in range(2))
        rise = slope(first) - slope(second)
        expected = metric(x, weights) @ (first - second)
        worst = max(worst, float((rise - expected).norm() / rise.norm()))
        samples += 1
    return judged(
        worst < 1e-12,
        "The gradient is linear with that matrix, to 12 digits.",
        "The gradient has another matrix.",
        Evidence(what="relative error of the difference of gradients", value=worst, limit=1e-12, samples=samples),
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
    hypotheses="Squared error of the value map; one token, where F = 1 and shapes agree.",
    latex=[r"\|\theta_t-\theta^*\|_F^2\le\Big(1-\frac{\eta}{L}\Big)^t\,\|\theta_0-\theta^*\|_F^2"],
    corrected_by="note.T12.corrected",
)
def convergence(*, metric: Callable[[Fraction], Fraction] = lambda x: Fraction(1)) -> Verdict:
    """One token x: the gradient is x² v, so a step multiplies v by 1 − η x²/F."""
    count = 0
    for x, eta in itertools.product((Fraction(1), Fraction(2), Fraction(1, 2)), (Fraction(1), Fraction(1, 2))):
        factor, limit = (1 - eta * x * x / metric(x)) ** 2, 1 - eta
        count += 1
        if factor > limit:
            return refuted(
                "AAᵀ does not see the size of the tokens: large ones overshoot, small ones hardly move.",
                Evidence(what="‖θ_1 − θ*‖²/‖θ_0 − θ*‖²", value=str(factor), limit=str(limit)),
                witness=Witness(
                    data={"L": 1, "d": 1, "X": x, "η": eta, "W_V": 1, "target": 0},
                    claimed=f"≤ {limit}",
                    found=f"{factor}",
                    numpy=CONVERGENCE,
                ),
            )
    return held("Every step contracts as stated.", Evidence(what="pairs (x, η)", value="contract", samples=count))


@claim(
    "note.T12.corrected",
    "Convergence in the Gauss–Newton metric",
    statement="Steps in W_V with the metric M = XᵀAᵀAX + δ multiply the error by 1 − ηλ/(λ + δ) in every eigenvector "
    "of M of eigenvalue λ: by 1 − η, whatever the length, as δ goes to zero.",
    place="replaces Theorem 12",
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
        "One step multiplies the error by 1 − η, to 6 digits with damping 1e-12.",
        "The error is not multiplied by 1 − η.",
        Evidence(what="relative distance from (1 − η)(W − W*)", value=worst, limit=1e-6, samples=samples),
    )
