"""Claims of the paper: the gradients its proofs are made of, held against automatic differentiation, and its slips."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import flint
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from conserved.verdict import Evidence, Verdict, Witness
from conserved_papers.claims.judging import decide
from conserved_papers.claims.polynomials import Letters, Matrix, fractions
from conserved_papers.claims.registry import claim

Tensors = Mapping[str, Tensor]
Function = Callable[[Tensors, Tensor], Tensor]
"""A scalar function of parameters and input."""
PrintedGradients = Callable[[Tensors, Tensor], dict[str, Tensor]]
"""The gradients that a source prints, by parameter."""

SAMPLES = 10


def agreement(
    function: Function, formula: PrintedGradients, shapes: Mapping[str, Sequence[int]], inputs: Sequence[int]
) -> Verdict:
    """Return the largest relative difference between printed and automatic gradients, over random parameters and
    inputs.
    """
    worst = 0.0
    for _ in range(SAMPLES):
        theta = {name: torch.randn(*shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}
        x = torch.randn(*inputs, dtype=torch.float64)
        automatic = torch.autograd.grad(function(theta, x), list(theta.values()), allow_unused=True)
        with torch.no_grad():
            printed = formula({name: value.detach() for name, value in theta.items()}, x)
        for (name, _), exact in zip(theta.items(), automatic, strict=True):
            if name in printed:
                size = float(exact.norm() + printed[name].norm())
                worst = max(worst, float((printed[name] - exact).norm()) / size if size else 0.0)
    return decide(
        worst < 1e-13,
        "Printed and automatic gradients agree.",
        "Printed and automatic gradients differ.",
        Evidence(what="largest relative difference", value=worst, limit=1e-13, samples=SAMPLES),
    )


def gelu_slope(z: Tensor) -> Tensor:
    """Return Φ(z) + z φ(z)."""
    density = torch.exp(-z * z / 2) / (2 * torch.pi) ** 0.5
    return 0.5 * (1 + torch.erf(z / 2**0.5)) + z * density


def silu_slope(z: Tensor) -> Tensor:
    """Return σ(z)(1 + z(1 − σ(z)))."""
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def gelu_gradients(t: Tensors, x: Tensor, *, grad: Callable[[Tensor], Tensor] = gelu_slope) -> dict[str, Tensor]:
    return {"A": F.gelu(t["B"] @ x).mT, "B": (t["A"].mT * grad(t["B"] @ x)) @ x.mT}


def swiglu_gradients(t: Tensors, x: Tensor, *, grad: Callable[[Tensor], Tensor] = silu_slope) -> dict[str, Tensor]:
    b, c = t["B"] @ x, t["C"] @ x
    return {"A": (F.silu(b) * c).mT, "B": (t["A"].mT * c * grad(b)) @ x.mT, "C": (t["A"].mT * F.silu(b)) @ x.mT}


def head_output(t: Tensors, x: Tensor) -> Tensor:
    """Feature 0 of the first token's output of one head."""
    weights = ((x @ t["Q"]) @ (x @ t["K"]).mT).softmax(-1)
    return (weights @ x @ t["V"] @ t["O"].mT)[0, 0]


def head_gradients(t: Tensors, x: Tensor, *, mean: float = 1.0) -> dict[str, Tensor]:
    """Equations (58) to (62) for the first token and feature 0."""
    a = ((x @ t["Q"]) @ (x @ t["K"]).mT).softmax(-1)[0]
    first, average = x[:1], mean * (a @ x)[None]
    values = x @ (t["V"] @ t["O"].mT)[:, 0]
    rows = torch.stack([a[p] * values[p] * (x[p : p + 1] - average) for p in range(len(x))]).sum(0)
    unit = torch.eye(x.shape[1], 1, dtype=x.dtype)
    return {
        "Q": first.mT @ rows @ t["K"],
        "K": rows.mT @ first @ t["Q"],
        "V": (a @ x)[:, None] @ unit.mT @ t["O"],
        "O": unit @ (a @ x)[None] @ t["V"],
    }


def equal_tokens(x: Tensor) -> Tensor:
    """Return (x, y, y, y)."""
    return torch.cat((x[:1], x[1:2].expand(3, -1)))


def first_weight(t: Tensors, x: Tensor) -> Tensor:
    tokens = equal_tokens(x)
    return ((tokens @ t["Q"]) @ (tokens @ t["K"]).mT).softmax(-1)[0, 0]


def first_weight_gradients(t: Tensors, x: Tensor) -> dict[str, Tensor]:
    """Equations (64) and (65): ∇ of a_11 when all tokens but the first are equal."""
    a, first, gap = first_weight(t, x), x[:1], x[:1] - x[1:2]
    return {"Q": a * (1 - a) * first.mT @ gap @ t["K"], "K": a * (1 - a) * gap.mT @ first @ t["Q"]}


def rotation(steps: int) -> Tensor:
    """Return R^steps of one plane with φ = 1."""
    angle = torch.tensor(float(steps), dtype=torch.float64)
    return torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos())).reshape(2, 2)


LAST = 3
"""The position of y among the tokens (x, 0, 0, y, 0), counted from 0."""


def rotary_weights(t: Tensors, x: Tensor) -> Tensor:
    """Return the weights of the first token for tokens (x, 0, 0, y, 0)."""
    tokens = torch.zeros(5, x.shape[1], dtype=x.dtype)
    tokens = tokens.index_copy(0, torch.tensor([0, LAST]), x)
    scores = [x[0] @ t["Q"] @ rotation(-q) @ t["K"].mT @ tokens[q] for q in range(5)]
    return torch.stack(scores).softmax(0)


def rotary_weight_gradients(t: Tensors, x: Tensor, *, turn: int = LAST) -> dict[str, Tensor]:
    """Equations (106) and (108): ∇ of the weight of y."""
    weights = rotary_weights(t, x)
    a, b, first, last = weights[0], weights[LAST], x[:1], x[1:]
    return {
        "Q": -a * b * first.mT @ first @ t["K"] + b * (1 - b) * first.mT @ last @ t["K"] @ rotation(turn),
        "K": -a * b * first.mT @ first @ t["Q"] + b * (1 - b) * last.mT @ first @ t["Q"] @ rotation(-turn),
    }


def gated_output(gate: Callable[[Tensor], Tensor]) -> Function:
    """Return Σ_i g_i(Wx) E_i with given expert outputs E."""
    return lambda t, x: (gate((t["W"] @ x).squeeze(-1)) * t["E"]).sum()


def normalised_sigmoid(z: Tensor) -> Tensor:
    """Return σ(z)/Σσ(z)."""
    return torch.sigmoid(z) / torch.sigmoid(z).sum()


def softmax_gate_formula(t: Tensors, x: Tensor) -> dict[str, Tensor]:
    """Return g_i (E_i − MoE) xᵀ."""
    g = (t["W"] @ x).squeeze(-1).softmax(-1)
    return {"W": (g * (t["E"] - (g * t["E"]).sum()))[:, None] @ x.mT}


def sigmoid_gate_formula(t: Tensors, x: Tensor) -> dict[str, Tensor]:
    """Return g_i (1 − σ(W_i x)) (E_i − MoE) xᵀ."""
    z = (t["W"] @ x).squeeze(-1)
    g = normalised_sigmoid(z)
    return {"W": (g * (1 - torch.sigmoid(z)) * (t["E"] - (g * t["E"]).sum()))[:, None] @ x.mT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """Gradients as printed, with the function they are of and the shapes to try them on."""

    function: Function
    formula: PrintedGradients
    shapes: Mapping[str, Sequence[int]]
    inputs: Sequence[int]


GRADIENTS: dict[str, Printed] = {
    "paper.eq14": Printed(
        function=lambda t, x: (t["A"] @ F.gelu(t["B"] @ x)).squeeze(),
        formula=gelu_gradients,
        shapes={"A": (1, 4), "B": (4, 3)},
        inputs=(3, 1),
    ),
    "paper.eq40": Printed(
        function=lambda t, x: (t["A"] @ (F.silu(t["B"] @ x) * (t["C"] @ x))).squeeze(),
        formula=swiglu_gradients,
        shapes={"A": (1, 4), "B": (4, 3), "C": (4, 3)},
        inputs=(3, 1),
    ),
    "paper.eq58": Printed(
        function=head_output, formula=head_gradients, shapes=dict.fromkeys("QKVO", (3, 2)), inputs=(4, 3)
    ),
    "paper.eq64": Printed(
        function=first_weight, formula=first_weight_gradients, shapes={"Q": (3, 2), "K": (3, 2)}, inputs=(2, 3)
    ),
    "paper.eq105": Printed(
        function=lambda t, x: rotary_weights(t, x)[LAST],
        formula=rotary_weight_gradients,
        shapes={"Q": (3, 2), "K": (3, 2)},
        inputs=(2, 3),
    ),
    "paper.eq142": Printed(
        function=gated_output(lambda z: z.softmax(-1)),
        formula=softmax_gate_formula,
        shapes={"W": (4, 3), "E": (4,)},
        inputs=(3, 1),
    ),
    "paper.eq173": Printed(
        function=gated_output(normalised_sigmoid),
        formula=sigmoid_gate_formula,
        shapes={"W": (4, 3), "E": (4,)},
        inputs=(3, 1),
    ),
}


def _compared(printed: Printed) -> Callable[..., Verdict]:
    return lambda *, formula=printed.formula: agreement(printed.function, formula, printed.shapes, printed.inputs)


for _code, _printed in GRADIENTS.items():
    claim(_code)(_compared(_printed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slip:
    """A misprint: the formula as printed and as the proof needs it, on an example small enough for fractions."""

    repair: str
    data: Mapping[str, object]
    printed: Callable[[], Fraction]
    meant: Callable[[], Fraction]
    """Both work out the example."""
    numpy: str


def two_heads(x: int, y: int, heads: Sequence[int] = (0, 1)) -> Fraction:
    """Return Σ_i Σ_p a_p x_p V_iO_i over some heads, for tokens x, y of one number, equal weights, V_iO_i = 1 and 2."""
    return sum((Fraction(1, 2) * (x + y) * (1 + i) for i in heads), Fraction(0))


def law_pairing(value_slot: str) -> Fraction:
    """Return ⟨∇f, ∇h⟩ at Q = V = O = x = 1 for f = xVO and h = V² − O², with ∇_V f paired with ∇h in some parameter."""
    letters = Letters(Q=(), V=(), O=())
    v, o = letters.scalar("V"), letters.scalar("O")
    f, h = v * o, v * v - o * o
    pairs = (("V", value_slot), ("O", "O"))
    result: Any = sum(letters.gradient(f, a)[()] * letters.gradient(h, b)[()] for a, b in pairs)
    return Fraction(str(result(1, 1, 1)))


def output_slope(order: Callable[[Matrix, Matrix, Matrix], Matrix] | None) -> Fraction:
    """Entry (1, 1) of ∇_O xVOᵀe for one token, by derivative or by a formula of x, e and V."""
    x, e, v = (np.array(rows, dtype=object) for rows in ([[0, 1]], [[1], [0]], [[0], [1]]))
    if order is not None:
        return Fraction(order(x, e, v)[0, 0])
    letters = Letters(O=(2, 1))
    return Fraction(str(letters.gradient((x @ v @ letters["O"].T @ e)[0, 0], "O")[0, 0]))


def score(steps: int) -> Fraction:
    """Return Q R^steps Kᵀ for Q = (1, 0), K = (0, 1) and the rotation R of the 3-4-5 triangle, steps ±1."""
    turn = fractions([[3, -4], [4, 3]]) / 5
    return Fraction((turn if steps > 0 else turn.T)[0, 1])


def rational_form(sign: int | None) -> Fraction:
    """Return (115) from the weights, or (118) with a sign for 𝔠, at α = 1, β = 2, one further token, 𝔠 = 𝔡 = 1."""
    alpha, beta, rest = Fraction(1), Fraction(2), Fraction(1)
    total = alpha + beta + rest
    if sign is not None:
        return (sign * alpha * beta + beta * (alpha + rest)) / total**2
    first, last = alpha / total, beta / total
    return -last * first + last * (1 - last)


def stacked_rows(transposed: bool) -> Fraction:
    """Rows of Q made of two 3 × 2 blocks side by side, transposed or not."""
    side = np.hstack([np.zeros((3, 2)), np.zeros((3, 2))])
    return Fraction((side.T if transposed else side).shape[0])


def entries_named(exchanged: bool) -> Fraction:
    """Return for how many k in [d_1] the entry C_jk, or C_kj, exists, j = 1, in a matrix of d_1 = 2 rows and d = 1
    column.
    """
    rows, columns = 2, 1
    return Fraction(sum((k < columns) if exchanged else (k < rows) for k in range(rows)))


def gate_points(of: str) -> Fraction:
    """Return how many of z = ±iπ, ±3iπ are zeros, or poles, of e^z/(e^z + 1), in balls."""
    points = [flint.acb(0, n * flint.arb.pi()).exp() for n in (-3, -1, 1, 3)]
    return Fraction(sum(bool((p if of == "zeros" else p + 1).contains(0)) for p in points))


SLIPS = {
    "paper.eq63": Slip(
        repair="A sum over the heads is missing; the gradients that follow have it.",
        data={"d": 1, "heads": 2, "V_1O_1": 1, "V_2O_2": 2, "x": 3, "y": 1, "weights": "1/2"},
        printed=lambda: two_heads(3, 1, heads=(0,)),
        meant=lambda: two_heads(3, 1),
        numpy="import numpy as np\n"
        "VO, x, y, a = np.array([1.0, 2.0]), 3.0, 1.0, 0.5      # tokens (x, y), Q = K = 0\n"
        "terms = y * VO + a * (x - y) * VO\n"
        "print('all heads', terms.sum(), 'printed', terms[0])\n"
        "assert terms.sum() == a * (x + y) * VO.sum() != terms[0]",
    ),
    "paper.eq70": Slip(
        repair="∇_V h is meant, as in the next lines; sums up to h are up to n.",
        data={"h": "V² − O²", "x": 1, "V": 1, "O": 1},
        printed=lambda: law_pairing("Q"),
        meant=lambda: law_pairing("V"),
        numpy="x, V, O = 1.0, 1.0, 1.0                   # f = x V O, h = V^2 - O^2\nfV, fO = x * O, x * V\n"
        "hQ, hV, hO = 0.0, 2 * V, -2 * O\nprint('meant', fV * hV + fO * hO, 'printed', fV * hQ + fO * hO)\n"
        "assert fV * hV + fO * hO == 0 != fV * hQ + fO * hO",
    ),
    "paper.eq90": Slip(
        repair="A sum over the heads is missing, as in (63).",
        data={"d": 1, "heads": 2, "V_1O_1": 1, "V_2O_2": 2, "x": 1, "L": 2, "weights": "1/2"},
        printed=lambda: two_heads(1, 0, heads=(0,)),
        meant=lambda: two_heads(1, 0),
        numpy="import numpy as np\nVO, x, a = np.array([1.0, 2.0]), 1.0, 0.5              # tokens (x, 0), Q = K = 0\n"
        "print('all heads', (a * x * VO).sum(), 'printed', a * x * VO[0])\nassert (a * x * VO).sum() != a * x * VO[0]",
    ),
    "paper.eq94": Slip(
        repair="x is a row and e_κ a column, so e_κ x V is meant, as in (62).",
        data={"x": "(0, 1)", "V": "(0, 1)ᵀ", "e_κ": "(1, 0)ᵀ", "entry": "(1, 1)", "L": 1},
        printed=lambda: output_slope(lambda x, e, v: (x @ e)[0, 0] * v),
        meant=lambda: output_slope(None),
        numpy="import numpy as np\n"
        "x, V, O = np.array([[0.0, 1.0]]), np.array([[0.0], [1.0]]), np.array([[3.0], [4.0]])\n"
        "e = np.array([[1.0], [0.0]])              # feature 1; one token, so its weight is 1\n"
        "true = (x @ V @ (O + [[1.0], [0.0]]).T @ e - x @ V @ O.T @ e).item()\n"
        "print('entry (1, 1): true', true, 'printed', ((x @ e) * V)[0, 0], 'repaired', (e @ x @ V)[0, 0])\n"
        "assert true != ((x @ e) * V)[0, 0] and true == (e @ x @ V)[0, 0]",
    ),
    "paper.eq116": Slip(
        repair="By (88) the score has R_{1−L}. Both senses span the same space (Lemma B.3), so nothing rests on it.",
        data={"cos φ": "3/5", "sin φ": "4/5", "Q": "(1, 0)", "K": "(0, 1)", "x = y": 1, "L": 2},
        printed=lambda: score(+1),
        meant=lambda: score(-1),
        numpy="import numpy as np\n"
        "R = np.array([[3.0, -4.0], [4.0, 3.0]]) / 5\n"
        "Q, K = np.array([1.0, 0.0]), np.array([0.0, 1.0])\n"
        "print('R_(1-L):', Q @ R.T @ K, 'printed R_(L-1):', Q @ R @ K)\n"
        "assert Q @ R.T @ K == 0.8 and Q @ R @ K == -0.8",
    ),
    "paper.eq118": Slip(
        repair="The term of 𝔠 has a minus in (115). All 𝔠 vanish by Lemma B.2 with either sign.",
        data={"α": 1, "β": 2, "further tokens": 1, "𝔠": 1, "𝔡": 1},
        printed=lambda: rational_form(+1),
        meant=lambda: rational_form(None),
        numpy="alpha, beta, rest, c, d = 1.0, 2.0, 1.0, 1.0, 1.0\n"
        "total = alpha + beta + rest\n"
        "a11, a1L = alpha / total, beta / total\n"
        "fifteen = -a1L * a11 * c + a1L * (1 - a1L) * d\n"
        "eighteen = (alpha * beta * c + beta * (alpha + rest) * d) / total ** 2\n"
        "print('(115)', fifteen, '(118)', eighteen)\n"
        "assert fifteen != eighteen",
    ),
    "paper.eq132": Slip(
        repair="Q and K are their blocks without the transpose, as in Section 4.2; and (131) is equivalent, not (132).",
        data={"d": 3, "m": 2, "rows of Q": 3},
        printed=lambda: stacked_rows(transposed=True),
        meant=lambda: stacked_rows(transposed=False),
        numpy="import numpy as np\nblocks = [np.zeros((3, 2)), np.ones((3, 2))]      # d = 3, two planes\n"
        "print('printed', np.hstack(blocks).T.shape, 'meant', np.hstack(blocks).shape)\n"
        "assert np.hstack(blocks).T.shape != (3, 4) == np.hstack(blocks).shape",
    ),
    "paper.eq153": Slip(
        repair="C has d_1 rows, so C_kj is meant.",
        data={"d": 1, "d_1": 2, "rows that the index asks for": 1},
        printed=lambda: entries_named(exchanged=True),
        meant=lambda: entries_named(exchanged=False),
        numpy="import numpy as np\nC = np.array([[5.0], [7.0]])              # d_1 = 2 rows, d = 1 column\n"
        "inside = [k for k in range(2) if 0 < C.shape[0] and k < C.shape[1]]      # C[j, k] with j = 0\n"
        "print('C[j, k] exists for k in', inside, 'C[k, j] for k in', list(range(C.shape[0])))\n"
        "assert len(inside) != C.shape[0]",
    ),
    "paper.C2.zeros": Slip(
        repair="The poles are meant, as in (152) and Step 2; a softmax gate has no zeros.",
        data={"W": "(1, 0)", "z": "±iπ, ±3iπ"},
        printed=lambda: gate_points("zeros"),
        meant=lambda: gate_points("poles"),
        numpy="import numpy as np\nz = 1j * np.pi                            # W = (1, 0): g_1 = e^z / (e^z + 1)\n"
        "print('numerator', np.exp(z), 'denominator', np.exp(z) + 1)      # a pole; e^z is never zero\n"
        "assert abs(np.exp(z) + 1) < 1e-12 and abs(np.exp(z)) > 0.9",
    ),
}


def misprint(slip: Slip) -> Callable[..., Verdict]:
    """Return a check whose subject is the printed formula."""

    def check(*, printed: Callable[[], Fraction] = slip.printed) -> Verdict:
        result, meant = printed(), slip.meant()
        return decide(
            result == meant,
            "The formula is right.",
            slip.repair,
            Evidence(what="on the example, as printed and as meant", value=f"{result} and {meant}", proof=True),
            witness=Witness(data=slip.data, claimed=str(result), found=str(meant), numpy=slip.numpy),
            scope="on the example",
        )

    return check


for _code, _slip in SLIPS.items():
    claim(_code)(misprint(_slip))
