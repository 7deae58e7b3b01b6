r"""Claims about sigmoid gates: where the proof of Theorem 4.7 leaves that of Theorem 4.5, and what holds for all sizes.

Let g_i = σ_i/Σ_p σ_p with σ_i = σ(W_i x), and let h be a C¹ law of the mixture. Take one output, which is enough
(paper.scalar), and inputs x = t e_j. Write ∂_i h for the derivative in W_ij.

*The relation.* Equation (173) says Σ_i g_i((1 − σ_i)(E_i − MoE)∂_i h + Σ_k A_k C_kj ∂_{B_kj}h t SiLU′(B_kj t) +
Σ_k (C_kj ∂_{A_k}h + A_k ∂_{C_kj}h) SiLU(B_kj t)) = 0 for all t. All functions in it are meromorphic.

*Poles.* The gates and the σ_i do not depend on B. They have countably many poles and, unlike softmax gates, zeros: g_i
vanishes at a pole of another σ_p. By Lemma C.1 and paper.eq155.corrected there is a dense set of B for which the poles
of every SiLU(B_kj z) avoid these poles and zeros and those of all other slopes. At such a pole the term of ∂_{B_kj}h
is the only one of order two, and its factor g_i A_k C_kj z is not zero where A_k C_kj ≠ 0. So ∂_{B_kj}h = 0 on a
dense set, and everywhere, since h is C¹.

*Simple poles.* Now h does not depend on B. The coefficient of SiLU(B_kj z) is
g_i (C_kj ∂_{A_k}h + A_k ∂_{C_kj}h + A_k C_kj z ((1 − σ_i)∂_i h − Σ_p g_p(1 − σ_p)∂_p h)), which does not depend on B
either. If it were not zero identically, a B whose poles avoid its zeros would leave a simple pole. So it is zero.

*The gate.* At z = 0 this gives the equation of the neuron. What is left says that (1 − σ(W_ij z))∂_i h is one function
of z for all i. Its value at z = 0 is ∂_i h/2, so all ∂_i h are one number c; its slope there is −W_ij c/4. Two rows
with W_ij ≠ W_pj make c = 0. That is a dense set of W if n ≥ 2, so ∇_W h = 0 everywhere.

*Active experts.* With k ≥ 2 of n active experts fix x ≠ 0. Let P(m) say: wherever S, |S| = m, holds the m largest
scores at x, the experts of S satisfy their equations and ∇_{W_i}h = 0 for i in S. P(k) is the above for the mixture of
S: it is active on an open set of inputs around x, and the relation continues from there to all t. If P(m) holds, lower
one row of S along x until its score meets that of the next expert. Until then h does not change, for any values of the
other parameters, so neither does its gradient in them. Beyond the wall P(m) holds for the other set, and ∇h is
continuous, so P(m + 1) holds at the start. P(n) is the statement where scores at x are distinct, hence everywhere.

*Experts that are never active.* For d = 1 the inputs x > 0 activate the k largest W_i and x < 0 the k smallest. If
n > 2k the experts between are never active near θ, so there every function of their parameters is a local law: at
d = d_1 = 1, n = 5 and k = 2 the 4 parameters of the middle expert and the 4 laws of the others, 8 in all. The argument
above covers these experts too, because it fixes x and moves W: on its path the middle expert becomes active, and ∇h,
which is continuous on the whole space, brings its equations back to θ. So a law that is C¹ on the whole space does not
depend on the parameters of the middle expert but through the law of that expert. A local law need not extend so far.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import flint
import torch

from conserved.discovery import discover
from conserved.verdict import Evidence, Verdict, Witness
from conserved_papers.blocks import MixtureOfExperts
from conserved_papers.claims.judging import InWords, by_steps, decide
from conserved_papers.claims.paper_global import cite, first_wall_is_the_next_expert
from conserved_papers.claims.polynomials import Letters, arranged, determinant, identical
from conserved_papers.claims.registry import claim

ZEROS = """\
import numpy as np
z = 1j * np.pi * (1 + 1e-9)                     # next to the pole z = i pi of sigma(W_1 z), W_1 = 1, W_2 = 1/2
s = [1 / (1 + np.exp(-w * z)) for w in (1.0, 0.5)]
softmax = np.exp([1.0 * z, 0.5 * z]) / np.exp([1.0 * z, 0.5 * z]).sum()
print("|g_2|: normalised sigmoid", abs(s[1] / sum(s)), "softmax", abs(softmax[1]))
assert abs(s[1] / sum(s)) < 1e-8 < 0.1 < abs(softmax[1])"""


def sigmoid_gate(z: flint.acb) -> flint.acb:
    """Return g_2 for W_1 = 1 and W_2 = 1/2, multiplied through by both denominators 1 + e^{−W z}."""
    first, second = 1 + (-z).exp(), 1 + (-z / 2).exp()
    return first / (first + second)


def softmax_gate(z: flint.acb) -> flint.acb:
    """Return g_2 for the same rows."""
    return (z / 2).exp() / (z.exp() + (z / 2).exp())


@claim("paper.eq173.zeros")
def gate_without_zeros(*, gate: Callable[[flint.acb], flint.acb] = sigmoid_gate) -> Verdict:
    value = gate(flint.acb(0, flint.arb.pi()))
    vanishes = bool(value.contains(0))
    return decide(
        not vanishes,
        "The gate is not zero there.",
        "g_i is zero at the poles of every other σ(W_p z). The step on double poles holds for B that avoid these zeros "
        "too, which Lemma C.1 allows; Theorem 4.7 fails for another reason.",
        Evidence(what="ball around g_2 at the pole iπ of σ(W_1 z)", value=str(value), proof=True),
        witness=Witness(data={"W": "(1, 1/2)", "z": "iπ"}, claimed="g_2 ≠ 0", found="g_2 = 0", numpy=ZEROS),
        scope="at two experts",
    )


def sigmoid_series(grad: Fraction) -> tuple[Fraction, Fraction]:
    """Return the value and the slope at t = 0 of 1 − σ(wt) = 1/(1 + e^{wt}), from (1 + e^{wt})·(a + bt) = 1."""
    # (2 + wt + …)(a + bt + …) = 1: 2a = 1 and 2b + wa = 0.
    value = Fraction(1, 2)
    return value, -grad * value / 2


def coefficients_vanish(second: Callable[[Any], Any]) -> bool:
    """Check that c_1/2 = c_2/2 and the slopes of both rows equal force c_1 = c_2 = 0 where w_1 ≠ w_2."""
    first, other = Letters(w=(), v=())
    one = first**0
    system = arranged([[one / 2, -one / 2], [second(first), -second(other)]])
    return identical(8 * determinant(system), other - first)


def never_active() -> Evidence:
    """Count the local laws where the middle one of five experts is never active."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mixture = MixtureOfExperts(1, 1, 5, "sigmoid", top_k=2).double()
        count = discover(mixture, torch.zeros(5, 1, dtype=torch.float64), forms=False).count
    return Evidence(what="laws near θ at d = d_1 = 1, n = 5, k = 2, counted; 4 are the middle expert's parameters",
                    value=count)  # fmt: skip


@claim("paper.T4.7.all")
def sigmoid_theorem(*, second: Callable[[Any], Any] = lambda w: -w / 4) -> Verdict:
    series = all(
        sigmoid_series(w) == (Fraction(1, 2), Fraction(second(w))) for w in (Fraction(1), Fraction(-3), Fraction(2, 7))
    )
    return by_steps(
        "A law that is C¹ on the whole space satisfies the equations of every expert, and does not depend on W.",
        "The slopes do not tell the rows of W apart.",
        *cite(("paper.eq173", "paper.scalar", "paper.LC.1", "paper.eq155.corrected")),
        InWords("for a dense set of B the poles of SiLU(Bz) avoid the poles and zeros of the gates and of each other: "
                "double poles give ∇_B h = 0, and simple poles make every coefficient of a SiLU vanish"),
        InWords("at z = 0 the coefficients are the equations of the neurons; what is left is that (1 − σ(W_ij z))∂_i h "
                "is the same for all i"),
        ("1 − σ(wt) = 1/2 − wt/4 + …, from its reciprocal 1 + e^{wt}", series),
        ("equal values and equal slopes leave ∂_i h = 0 where the W_ij differ: the determinant is (w_2 − w_1)/8",
         coefficients_vanish(second)),
        ("with k ≥ 2 active experts: lower a row of the active set, and the set stays on top until the next expert is "
         "met (50 exact examples)", first_wall_is_the_next_expert(2)),
        InWords("until then h does not change, so its gradient in the other parameters does not either; at the wall ∇h "
                "is continuous, and the equations hold for one expert more; induct up to n"),
        InWords("experts that no input activates near θ are met by this move as well, since x is fixed and W moves; "
                "near θ their parameters are free, so h must be C¹ on the whole space (d = 1 included)"),
        beside=[never_active()],
    )  # fmt: skip
