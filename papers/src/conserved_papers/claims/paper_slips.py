"""Claims of the paper: slips of its text that change what a sentence says, each with a small example."""

from __future__ import annotations

from fractions import Fraction

from conserved_papers.claims.paper_gradients import Slip, misprint
from conserved_papers.claims.polynomials import Letters, fractions, rank
from conserved_papers.claims.registry import claim


def solvable(rows: list[list[int]]) -> Fraction:
    """Return 1 if e_1 = Wx has a solution for the given rows of W, else 0."""
    system = fractions(rows)
    extended = fractions([[*row, int(i == 0)] for i, row in enumerate(rows)])
    return Fraction(int(rank(system) == rank(extended)))


def accepted_laws(with_gate: bool) -> Fraction:
    """Return 1 if h = B satisfies the constraints on an expert with one neuron, d = 1, else 0; (171) leaves out ∇_B h
    = 0.
    """
    letters = Letters(A=(), B=(), C=())
    a, b, c = letters
    grad = {name: letters.gradient(b, name)[()] for name in "ABC"}
    conserved = c * grad["A"] + a * grad["C"] == 0
    return Fraction(int(conserved and (not with_gate or grad["B"] == 0)))


def scaled_gate(weight: int, token: int, factor: int, *, linear: bool) -> Fraction:
    """Wx with both W and x multiplied by a factor: what a linear map would give, or what it is."""
    return Fraction(factor * weight * token) if linear else Fraction(factor * weight) * factor * token


TEXT_SLIPS = {
    "paper.grad.shape": Slip(
        repair="Section 2 sets ∇_A F as outputs × inputs and then uses ∇_θ f as inputs × outputs; the second is meant.",
        data={"outputs": 2, "parameters": 3, "rows of ∇f": "2 and 3"},
        printed=lambda: Fraction(2),
        meant=lambda: Fraction(3),
        numpy="import numpy as np\nW, v = np.zeros(3), np.ones(2)               # three parameters, two outputs\n"
        "first, second = np.zeros((2, 3)), np.zeros((3, 2))\nprint('line 51', first.shape, 'line 72', second.shape)\n"
        "assert (second @ v).shape == W.shape and first.shape != second.shape",
    ),
    "paper.eq48": Slip(
        repair="S_2 is a set of θ = (A, B, C): its condition is on A and C.",
        data={"matrices of θ as printed": 2, "matrices of a SwiGLU network": 3},
        printed=lambda: Fraction(len(("A", "B"))),
        meant=lambda: Fraction(len(("A", "B", "C"))),
        numpy="printed, used = {'A', 'B'}, {'A', 'C'}            # theta = (A, B); A_i and C_ij are nonzero\n"
        "print('used and not in theta:', used - printed)\nassert not used <= printed",
    ),
    "paper.eq77": Slip(
        repair="For all t outside the poles t = −e^{−xQKᵀ(y−x)ᵀ}; one is enough for the lemma to leave out.",
        data={"n": 1, "xQKᵀ(y − x)ᵀ": 0, "t": -1, "denominator": 0},
        printed=lambda: Fraction(1),
        meant=lambda: Fraction(1 + -1),
        numpy="t, alpha = -1.0, 1.0                              # one head with equal scores\n"
        "print('denominator at t = -1:', 1 + t * alpha)\nassert 1 + t * alpha == 0",
    ),
    "paper.eq101.size": Slip(
        repair="The matrices QKᵀ + KQᵀ are d × d; n is the number of heads.",
        data={"d": 3, "heads": 2},
        printed=lambda: Fraction(2),
        meant=lambda: Fraction(3),
        numpy="import numpy as np\nd, n, d_h = 3, 2, 1\nQ, K = np.ones((d, d_h)), np.ones((d, d_h))\n"
        "print('side', (Q @ K.T).shape[0], 'printed', n)\nassert (Q @ K.T).shape[0] != n",
    ),
    "paper.B2.steps": Slip(
        repair="Appendix B.2 has Steps 1, 3 and 4 and refers to Step 2, which is the second half of Step 1.",
        data={"steps": "1, 3, 4", "referred to": 2},
        printed=lambda: Fraction(2),
        meant=lambda: Fraction(1),
        numpy="steps, cited = [1, 3, 4], 2                        # headings of B.2; lines 947 and 984 cite Step 2\n"
        "print('cited step exists:', cited in steps)\nassert cited not in steps",
    ),
    "paper.eq113": Slip(
        repair="𝔠 and 𝔡 depend on x, y, L and θ; they do not depend on N, which is what the argument uses.",
        data={"d": 1, "x": 1, "K ∂_Q h": 1, "Q ∂_K h": 0, "y": "1 and 2"},
        printed=lambda: Fraction(0),
        meant=lambda: Fraction(2 - 1),
        numpy="c = lambda x, y: x * (x * y)                      # x V O = x, and <x y K, grad h> = x y\n"
        "print('c at y = 1 and 2:', c(1.0, 1.0), c(1.0, 2.0))\nassert c(1.0, 1.0) != c(1.0, 2.0)",
    ),
    "paper.eq130": Slip(
        repair="There are m numbers λ_i; the 2m that must be distinct are λ_i and 1/λ_i, which they are.",
        data={"m": 1, "λ_1": "e^i", "numbers printed": 2},
        printed=lambda: Fraction(2),
        meant=lambda: Fraction(1),
        numpy="import numpy as np\nlam = [np.exp(1j)]                                # m = 1, phi_1 = 1\n"
        "both = lam + [1 / z for z in lam]\nprint('defined', len(lam), 'needed', len(both))\n"
        "assert len(lam) == 1 and len(both) == 2 and abs(both[0] - both[1]) > 1",
    ),
    "paper.eq146": Slip(
        repair="i runs over the n experts, not over the d inputs.",
        data={"d": 3, "experts": 4},
        printed=lambda: Fraction(3),
        meant=lambda: Fraction(4),
        numpy="d, experts = 3, ['E_1', 'E_2', 'E_3', 'E_4']\nprint('named', experts[:d], 'of', experts)\n"
        "assert experts[:d] != experts",
    ),
    "paper.C3.bilinear": Slip(
        repair="(x, θ) ↦ Wx is bilinear, not linear; what is used is that it is continuous.",
        data={"W": 1, "x": 1, "factor": 2},
        printed=lambda: scaled_gate(1, 1, 2, linear=True),
        meant=lambda: scaled_gate(1, 1, 2, linear=False),
        numpy="W, x = 1.0, 1.0\nprint('(2W)(2x) =', (2 * W) * (2 * x), 'linear would be', 2 * (W * x))\n"
        "assert (2 * W) * (2 * x) != 2 * (W * x)",
    ),
    "paper.C3.independence": Slip(
        repair="Linear independence of the rows is meant: with dependent rows Wx = e_T has no solution.",
        data={"W": "(1), (1)", "T": "{1}"},
        printed=lambda: solvable([[1, 0], [0, 1]]),
        meant=lambda: solvable([[1], [1]]),
        numpy="import numpy as np\nW, e = np.array([[1.0], [1.0]]), np.array([1.0, 0.0])\n"
        "left = np.linalg.lstsq(W, e, rcond=None)[1]\nprint('residual of W x = e_T:', left)\nassert left[0] > 0.4",
    ),
    "paper.eq171": Slip(
        repair="(171) and (172) leave out ∇_B h = 0, which Theorem 4.5 has; and the last row is W^(n), not W^(j).",
        data={"h": "B of one expert", "(171)": "satisfied", "conserved": "no"},
        printed=lambda: accepted_laws(with_gate=False),
        meant=lambda: accepted_laws(with_gate=True),
        numpy="import numpy as np\nA, B, C, x = 1.0, 0.5, 2.0, 1.0              # h = B: grad_A h = grad_C h = 0\n"
        "s = 1 / (1 + np.exp(-B * x)); slope = A * C * x * x * s * (1 + B * x * (1 - s))\n"
        "print('(171):', C * 0 + A * 0, 'rate of h under the output as loss:', -slope)\nassert abs(slope) > 0.1",
    ),
}
"""Slips of the text, by code."""

for _code, _slip in TEXT_SLIPS.items():
    claim(_code)(misprint(_slip))
