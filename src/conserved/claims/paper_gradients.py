"""Claims of the paper: the gradients its proofs are made of, held against automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor

from conserved.claims.judging import held, judged, refuted
from conserved.claims.ledger import claim
from conserved.claims.polynomials import Matrix, fractions
from conserved.verdict import Evidence, Verdict, Witness

Tensors = Mapping[str, Tensor]
Function = Callable[[Tensors, Tensor], Tensor]
"""A scalar function of parameters and input."""
Formula = Callable[[Tensors, Tensor], dict[str, Tensor]]
"""The gradients that a source prints, by parameter."""

SAMPLES = 10


def agreement(
    function: Function, formula: Formula, shapes: Mapping[str, Sequence[int]], inputs: Sequence[int]
) -> Verdict:
    """The largest relative difference between printed and automatic gradients, over random parameters and inputs."""
    worst = 0.0
    for _ in range(SAMPLES):
        theta = {name: torch.randn(*shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}
        x = torch.randn(*inputs, dtype=torch.float64)
        automatic = torch.autograd.grad(function(theta, x), list(theta.values()))
        with torch.no_grad():
            printed = formula({name: value.detach() for name, value in theta.items()}, x)
        for (name, _), exact in zip(theta.items(), automatic, strict=True):
            if name in printed:
                size = float(exact.norm() + printed[name].norm())
                worst = max(worst, float((printed[name] - exact).norm()) / size if size else 0.0)
    return judged(
        worst < 1e-13,
        "Printed and automatic gradients agree to 13 digits.",
        "Printed and automatic gradients differ.",
        Evidence(what="largest relative difference", value=worst, limit=1e-13, samples=SAMPLES),
    )


def gelu_slope(z: Tensor) -> Tensor:
    """Φ(z) + z φ(z)."""
    density = torch.exp(-z * z / 2) / (2 * torch.pi) ** 0.5
    return 0.5 * (1 + torch.erf(z / 2**0.5)) + z * density


def silu_slope(z: Tensor) -> Tensor:
    """σ(z)(1 + z(1 − σ(z)))."""
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


@claim(
    "paper.eq14",
    "The gradients of a GELU network",
    statement="For f = A·GELU(Bx) with one output, ∇_A f = GELU(Bx)ᵀ and ∇_B f = (Aᵀ ⊙ GELU′(Bx))xᵀ.",
    place="Equation (14)",
    latex=[
        r"\nabla_A f=\operatorname{GELU}(Bx)^{\top},\quad\nabla_B f=(A^{\top}\odot\operatorname{GELU}'(Bx))x^{\top}"
    ],
)
def gelu_gradients(*, slope: Callable[[Tensor], Tensor] = gelu_slope) -> Verdict:
    return agreement(
        lambda t, x: (t["A"] @ F.gelu(t["B"] @ x)).squeeze(),
        lambda t, x: {"A": F.gelu(t["B"] @ x).mT, "B": (t["A"].mT * slope(t["B"] @ x)) @ x.mT},
        {"A": (1, 4), "B": (4, 3)},
        (3, 1),
    )


@claim(
    "paper.eq40",
    "The gradients of a SwiGLU network",
    statement="For f = A(SiLU(Bx) ⊙ Cx) the gradients in A, B and C are (SiLU(Bx) ⊙ Cx)ᵀ, (Aᵀ ⊙ Cx ⊙ SiLU′(Bx))xᵀ and "
    "(Aᵀ ⊙ SiLU(Bx))xᵀ.",
    place="Equation (40)",
    latex=[r"\nabla_B f=(A^{\top}\odot(Cx)\odot\operatorname{SiLU}'(Bx))x^{\top}"],
)
def swiglu_gradients(*, slope: Callable[[Tensor], Tensor] = silu_slope) -> Verdict:
    def formula(t: Tensors, x: Tensor) -> dict[str, Tensor]:
        b, c = t["B"] @ x, t["C"] @ x
        return {
            "A": (F.silu(b) * c).mT,
            "B": (t["A"].mT * c * slope(b)) @ x.mT,
            "C": (t["A"].mT * F.silu(b)) @ x.mT,
        }

    return agreement(
        lambda t, x: (t["A"] @ (F.silu(t["B"] @ x) * (t["C"] @ x))).squeeze(),
        formula,
        {"A": (1, 4), "B": (4, 3), "C": (4, 3)},
        (3, 1),
    )


def head_output(t: Tensors, x: Tensor) -> Tensor:
    """Feature 0 of the first token's output of one head."""
    weights = ((x @ t["Q"]) @ (x @ t["K"]).mT).softmax(-1)
    return (weights @ x @ t["V"] @ t["O"].mT)[0, 0]


def head_gradients(t: Tensors, x: Tensor, *, mean: float = 1.0) -> dict[str, Tensor]:
    """Equations (58) to (62) for the first token and feature 0."""
    a = ((x @ t["Q"]) @ (x @ t["K"]).mT).softmax(-1)[0]
    first, average = x[:1], mean * (a @ x)[None]
    values = x @ (t["V"] @ t["O"].mT)[:, 0]
    rows = sum(a[p] * values[p] * (x[p : p + 1] - average) for p in range(len(x)))
    assert isinstance(rows, Tensor)
    unit = torch.zeros(x.shape[1], 1, dtype=x.dtype)
    unit[0] = 1
    return {
        "Q": first.mT @ rows @ t["K"],
        "K": rows.mT @ first @ t["Q"],
        "V": (a @ x)[:, None] @ unit.mT @ t["O"],
        "O": unit @ (a @ x)[None] @ t["V"],
    }


@claim(
    "paper.eq58",
    "The gradients of attention",
    statement="The gradients of one output of attention in Q, K, V and O are those printed, with the softmax "
    "derivative "
    "a_kp(δ_pq − a_kq) in the first two.",
    place="Equations (54) to (62)",
    latex=[r"\nabla_Q f=\sum_p a_{kp}\,x_k^{\top}\Big(x_p-\sum_q a_{kq}x_q\Big)K\cdot x_p(VO^{\top})_{:,\kappa}"],
)
def attention_gradients(*, formula: Formula = head_gradients) -> Verdict:
    shapes = dict.fromkeys("QKVO", (3, 2))
    return agreement(head_output, formula, shapes, (4, 3))


def two_value_formula(t: Tensors, x: Tensor) -> dict[str, Tensor]:
    """Equations (64) and (65): ∇ of a_11 when all tokens but the first are equal."""
    first, other = x[:1], x[1:2]
    tokens = torch.cat((first, other.expand(3, -1)))
    a = ((tokens @ t["Q"]) @ (tokens @ t["K"]).mT).softmax(-1)[0, 0]
    gap = first - other
    return {"Q": a * (1 - a) * first.mT @ gap @ t["K"], "K": a * (1 - a) * gap.mT @ first @ t["Q"]}


@claim(
    "paper.eq64",
    "Attention to one token among equals",
    statement="With tokens (x, y, …, y) the weight of the first token has ∇_Q a_11 = a_11(1 − a_11)xᵀ(x − y)K and "
    "∇_K a_11 = a_11(1 − a_11)(x − y)ᵀxQ.",
    place="Equations (64) and (65)",
    latex=[r"\nabla_Q a_{11}=a_{11}(1-a_{11})\,x^{\top}(x-y)K"],
)
def two_value_gradients(*, formula: Formula = two_value_formula) -> Verdict:
    def weight(t: Tensors, x: Tensor) -> Tensor:
        tokens = torch.cat((x[:1], x[1:2].expand(3, -1)))
        return ((tokens @ t["Q"]) @ (tokens @ t["K"]).mT).softmax(-1)[0, 0]

    return agreement(weight, formula, {"Q": (3, 2), "K": (3, 2)}, (2, 3))


OUTPUT_GRADIENT = """\
import numpy as np
x, V, O = np.array([[0.0, 1.0]]), np.array([[0.0], [1.0]]), np.array([[3.0], [4.0]])
e = np.array([[1.0], [0.0]])                    # feature 1; one token, so its weight is 1
def f(O):
    return (x @ V @ O.T @ e).item()
true = np.array([[f(O + d) - f(O)] for d in ([[1.0], [0.0]], [[0.0], [1.0]])])
printed = (x @ e) * V
print("true", true.ravel(), "printed", printed.ravel())
assert not np.allclose(true, printed) and np.allclose(true, e @ x @ V)"""


@claim(
    "paper.eq94",
    "The gradient in O as printed for rotary attention",
    statement="∇_O MHA = a_11·x e_κ V for tokens (x, 0, …, 0).",
    place="Equation (94)",
    hypotheses="x is a row and e_κ a column, so x e_κ is one number. Equation (62) has e_κ x, and the proof needs "
    "that.",
    latex=[r"\nabla_O\mathrm{MHA}^{\mathrm{RoPE}}_{1,\kappa}=a_{11}\cdot x e_\kappa V"],
    corrected_by="paper.eq58",
)
def output_gradient(
    *, formula: Callable[[Matrix, Matrix, Matrix], Matrix] = lambda x, e, v: (x @ e)[0, 0] * v
) -> Verdict:
    """One token has weight one: f = x V Oᵀ e is linear in O, with gradient e x V."""
    e = fractions([[1], [0]])
    v = fractions([[0], [1]])
    for x in (fractions([[0, 1]]), fractions([[1, 1]])):
        true, printed = e @ x @ v, formula(x, e, v)
        if not (true == printed).all():
            shown = [", ".join(str(Fraction(entry)) for entry in m.ravel()) for m in (true, printed)]
            return refuted(
                "The factors are in the wrong order.",
                Evidence(what="∇_O f, true and printed", value=f"({shown[0]}) and ({shown[1]})", proof=True),
                witness=Witness(
                    data={"x": "(0, 1)", "V": "(0, 1)ᵀ", "e_κ": "(1, 0)ᵀ", "L": 1},
                    claimed=f"({shown[1]})ᵀ",
                    found=f"({shown[0]})ᵀ",
                    numpy=OUTPUT_GRADIENT,
                ),
            )
    return held("The formula is right.", Evidence(what="inputs", value="equal", samples=2))


def gated_output(gate: Callable[[Tensor], Tensor]) -> Function:
    """Σ_i g_i(Wx) E_i with given expert outputs E."""
    return lambda t, x: (gate((t["W"] @ x).squeeze(-1)) * t["E"]).sum()


def normalised_sigmoid(z: Tensor) -> Tensor:
    """σ(z)/Σσ(z)."""
    return torch.sigmoid(z) / torch.sigmoid(z).sum()


def softmax_gate_formula(t: Tensors, x: Tensor) -> dict[str, Tensor]:
    """g_i (E_i − MoE) xᵀ."""
    g = (t["W"] @ x).squeeze(-1).softmax(-1)
    return {"W": (g * (t["E"] - (g * t["E"]).sum()))[:, None] @ x.mT}


def sigmoid_gate_formula(t: Tensors, x: Tensor) -> dict[str, Tensor]:
    """g_i (1 − σ(W_i x)) (E_i − MoE) xᵀ."""
    z = (t["W"] @ x).squeeze(-1)
    g = normalised_sigmoid(z)
    return {"W": (g * (1 - torch.sigmoid(z)) * (t["E"] - (g * t["E"]).sum()))[:, None] @ x.mT}


@claim(
    "paper.eq142",
    "The gradient of a softmax router",
    statement="∇_{W_i} MoE = g_i(E_i − MoE)xᵀ under a softmax gate.",
    place="Equation (142)",
    latex=[r"\nabla_{W_i}\mathrm{MoE}=g_i\,(E_i-\mathrm{MoE})\,x^{\top}"],
)
def softmax_router_gradient(*, formula: Formula = softmax_gate_formula) -> Verdict:
    return agreement(gated_output(lambda z: z.softmax(-1)), formula, {"W": (4, 3), "E": (4,)}, (3, 1))


@claim(
    "paper.eq173",
    "The gradient of a sigmoid router",
    statement="Under a normalised-sigmoid gate the router's gradient has the further factor 1 − σ(W_i x). The "
    "relation is right; "
    "that it leads to the same laws is not (paper.T4.7).",
    place="Equation (173)",
    latex=[r"\nabla_{W_i}\mathrm{MoE}=g_i\,(1-\sigma(W_ix))\,(E_i-\mathrm{MoE})\,x^{\top}"],
)
def sigmoid_router_gradient(*, formula: Formula = sigmoid_gate_formula) -> Verdict:
    return agreement(gated_output(normalised_sigmoid), formula, {"W": (4, 3), "E": (4,)}, (3, 1))
