"""Claims of the blog post: its theorem, its gradients, and what it concludes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from conserved.blocks import ReluAttention
from conserved.claims.certified import Build, Parameters, Quantities, all_laws, laws_hold
from conserved.claims.descents import flow
from conserved.claims.judging import held, judged, refuted
from conserved.claims.ledger import claim
from conserved.claims.polynomials import Letters, Matrix, fractions, identical
from conserved.verdict import Evidence, Verdict, Witness


def relu_attention() -> nn.Module:
    return ReluAttention(3)


def wide_relu_attention() -> nn.Module:
    return ReluAttention(3, out=2)


SIZE = "d = 3 and sequences of five"


def norm_difference(theta: Parameters, *, sign: float = -1.0) -> Tensor:
    """½‖W_QK‖² − ½‖W_V‖²."""
    return (theta["qk"].square().sum() + sign * theta["v"].square().sum())[None] / 2


@claim(
    "blog.T1",
    "The conservation law of ReLU attention",
    statement="Gradient flow of relu(X W_QK Xᵀ) X W_V conserves ½‖W_QK‖_F² − ½‖W_V‖_F².",
    place="Theorem",
    hypotheses="Gradient flow. One of the four norms in the statement is mistyped (a subscript V for F).",
    latex=[
        r"A_W(X)=\operatorname{relu}(XW_{QK}X^{\top})XW_V",
        r"\tfrac12\|W_{QK}(t)\|_F^2-\tfrac12\|W_{QK}(0)\|_F^2=\tfrac12\|W_V(t)\|_F^2-\tfrac12\|W_V(0)\|_F^2",
    ],
    corrects="blog.T1.descent",
)
def norm_law(*, quantities: Quantities = norm_difference) -> Verdict:
    return laws_hold(relu_attention, (5, 3), quantities, size=SIZE)


@claim(
    "blog.T1.only",
    "ReLU attention conserves nothing else",
    statement="The difference of the squared norms is the only law of ReLU attention with one matrix W_QK.",
    place="completes the theorem",
    hypotheses="Near θ, for inputs that activate what the samples activate.",
)
def norm_law_complete(*, build: Build = relu_attention, quantities: Quantities = norm_difference) -> Verdict:
    return all_laws(build, (5, 3), quantities, size=SIZE)


@claim(
    "blog.T1.wide",
    "Any loss, any width",
    statement="The law holds for every differentiable loss and for values of any width, not for squared error and "
    "one output alone.",
    place="Limitations, simplified setting",
    hypotheses="Two outputs a token. The argument is about the function, so the loss does not enter.",
)
def wide_law(*, build: Build = wide_relu_attention, quantities: Quantities = norm_difference) -> Verdict:
    return all_laws(build, (5, 3), quantities, size="d = 3 and two outputs")


DESCENT = """\
w, v, x, y = 1.0, 2.0, 1.0, 0.0            # one token of one number
before = w ** 2 / 2 - v ** 2 / 2
delta = max(w * x * x, 0) * x * v - y      # 2
gw, gv = delta * x * x * x * v, delta * max(w * x * x, 0) * x      # 4 and 2
w, v = w - 0.5 * gw, v - 0.5 * gv          # one step of size 1/2
print("before", before, "after", w ** 2 / 2 - v ** 2 / 2)          # -3/2 and 0
assert abs(w ** 2 / 2 - v ** 2 / 2 - before) > 1"""


def descent_step(w: Fraction, v: Fraction) -> tuple[Fraction, Fraction]:
    """One step of size ½ for one token x = 1, target 0, while w > 0."""
    return w - w * v * v / 2, v - w * w * v / 2


@claim(
    "blog.T1.descent",
    "The law under gradient descent",
    statement="The law holds exactly under gradient descent.",
    place="Theorem, as worded",
    hypotheses="The proof is about the flow; steps of finite size are not mentioned.",
    corrected_by="blog.T1",
)
def norm_law_in_steps(*, advance: Callable[[Fraction, Fraction], tuple[Fraction, Fraction]] = descent_step) -> Verdict:
    for w, v in ((Fraction(1), Fraction(2)), (Fraction(2), Fraction(1))):
        after = advance(w, v)
        before, now = (w * w - v * v) / 2, (after[0] ** 2 - after[1] ** 2) / 2
        if before != now:
            return refuted(
                "A step of size τ changes it by τ²/2 (‖∇_QK‖² − ‖∇_V‖²); only the flow conserves it.",
                Evidence(what="½w² − ½v² before and after one step", value=f"{before} and {now}", proof=True),
                witness=Witness(
                    data={"X": 1, "W_QK": w, "W_V": v, "y": 0, "step": "1/2"},
                    claimed=f"{before}",
                    found=f"{now}",
                    numpy=DESCENT,
                ),
            )
    return held("It is unchanged.", Evidence(what="starts", value="equal", samples=2))


def activations() -> Iterator[tuple[Letters, Matrix, Matrix, Any]]:
    """For two tokens and d = 2, every pattern of active scores: letters, the pattern, relu(S) and the loss."""
    for pattern in itertools.product((0, 1), repeat=4):
        letters = Letters(X=(2, 2), W=(2, 2), V=(2, 1), y=(2, 1))
        x, w, v, y = (letters[name] for name in "XWVy")
        mask = np.array(pattern, dtype=object).reshape(2, 2)
        active = mask * (x @ w @ x.T)
        error = active @ x @ v - y
        yield letters, mask, active, error


def _loss(error: Matrix) -> Any:
    return sum(e * e for e in error.ravel().tolist()) / 2


def pattern_gradient(x: Matrix, v: Matrix, error: Matrix, mask: Matrix) -> Matrix:
    """Xᵀ diag(δ) relu(sign S) diag(X W_V) X."""
    found: Matrix = x.T @ (error * mask * (x @ v).T) @ x
    return found


@claim(
    "blog.gradQK",
    "The gradient in W_QK",
    statement="∇L in W_QK is Xᵀ diag(δ) relu(sign(X W_QK Xᵀ)) diag(X W_V) X.",
    place="The proof, first gradient",
    hypotheses="Two tokens, d = 2, all sixteen patterns of active scores.",
    latex=[
        r"\nabla_{W_{QK}}\mathcal{L}=X^{\top}\operatorname{diag}(\delta)\,\mathbf{1}[XW_{QK}X^{\top}>0]\,\operatorname{diag}(XW_V)\,X"
    ],
)
def gradient_of_pattern(*, formula: Callable[[Matrix, Matrix, Matrix, Matrix], Matrix] = pattern_gradient) -> Verdict:
    same = all(
        identical(letters.gradient(_loss(error), "W"), formula(letters["X"], letters["V"], error, mask))
        for letters, mask, _, error in activations()
    )
    evidence = Evidence(what="derivative and formula compared as polynomials, 16 patterns", proof=same)
    return judged(same, "The formula is the derivative.", "The formula is not the derivative.", evidence)


TRANSPOSED = """\
import numpy as np
X, W, V, y = np.eye(2), np.array([[0.0, 1.0], [0.0, 0.0]]), np.array([0.0, 1.0]), np.array([0.0, -1.0])
R = np.maximum(X @ W @ X.T, 0)
def loss(V):
    return ((R @ X @ V - y) ** 2).sum() / 2
true = np.array([(loss(V + d) - loss(V - d)) / 2 for d in np.eye(2)])       # exact: the loss is quadratic
delta = R @ X @ V - y                                                       # (1, 1)
print("true", true, "printed", X.T @ R @ delta, "transposed", X.T @ R.T @ delta)
assert not np.allclose(true, X.T @ R @ delta) and np.allclose(true, X.T @ R.T @ delta)"""

ValueFormula = Callable[[Matrix, Matrix, Matrix], Matrix]


@claim(
    "blog.gradV",
    "The gradient in W_V as printed",
    statement="∇L in W_V is Xᵀ relu(X W_QK Xᵀ) δ.",
    place="The proof, second gradient",
    hypotheses="The law is not touched: the next lines of the proof use the right expression.",
    latex=[r"\nabla_{W_V}\mathcal{L}=X^{\top}\operatorname{relu}(XW_{QK}X^{\top})\,\delta"],
    corrected_by="blog.gradV.corrected",
)
def gradient_of_values(*, formula: ValueFormula = lambda x, active, error: x.T @ active @ error) -> Verdict:
    x, w = fractions([[1, 0], [0, 1]]), fractions([[0, 1], [0, 0]])
    v, y = fractions([[0], [1]]), fractions([[0], [-1]])
    active = x @ w @ x.T
    error = active @ x @ v - y
    true, printed = (active @ x).T @ error, formula(x, active, error)
    same = _value_formula_holds(formula)
    shown = [f"({', '.join(str(e) for e in m.ravel())})" for m in (true, printed)]
    witness = Witness(
        data={"X": "1", "W_QK": "((0, 1), (0, 0))", "W_V": "(0, 1)", "y": "(0, −1)", "δ": "(1, 1)"},
        claimed=shown[1],
        found=shown[0],
        numpy=TRANSPOSED,
    )
    return judged(
        same,
        "The formula is the derivative.",
        "The scores have to be transposed.",
        Evidence(what="derivative and formula compared as polynomials, 16 patterns", value=str(same), proof=same),
        witness=None if same else witness,
    )


def _value_formula_holds(formula: ValueFormula) -> bool:
    return all(
        identical(letters.gradient(_loss(error), "V"), formula(letters["X"], active, error))
        for letters, _, active, error in activations()
    )


@claim(
    "blog.gradV.corrected",
    "The gradient in W_V",
    statement="∇L in W_V is Xᵀ relu(X W_QK Xᵀ)ᵀ δ.",
    place="replaces the second gradient",
    hypotheses="Two tokens, d = 2, all sixteen patterns of active scores.",
    latex=[r"\nabla_{W_V}\mathcal{L}=X^{\top}\operatorname{relu}(XW_{QK}X^{\top})^{\top}\delta"],
    corrects="blog.gradV",
)
def true_gradient_of_values(*, formula: ValueFormula = lambda x, active, error: x.T @ active.T @ error) -> Verdict:
    same = _value_formula_holds(formula)
    evidence = Evidence(what="derivative and formula compared as polynomials, 16 patterns", proof=same)
    return judged(same, "The formula is the derivative.", "The formula is not the derivative.", evidence)


@claim(
    "blog.inner",
    "The two inner products are equal",
    statement="⟨∇L in W_QK, W_QK⟩ = ⟨∇L in W_V, W_V⟩ for every input and target.",
    place="The proof, the key insight",
    hypotheses="Two tokens, d = 2, all sixteen patterns of active scores.",
    latex=[r"\langle\dot W_{QK},W_{QK}\rangle=\langle\dot W_V,W_V\rangle"],
)
def inner_products(*, factor: int = 1) -> Verdict:
    same = True
    for letters, _, _, error in activations():
        loss = _loss(error)
        left = (letters.gradient(loss, "W") * letters["W"]).sum()
        right = (letters.gradient(loss, "V") * letters["V"]).sum()
        same &= identical(left, factor * right)
    evidence = Evidence(what="both sides compared as polynomials, 16 patterns", proof=same)
    return judged(same, "They are one polynomial.", "They differ.", evidence)


@claim(
    "blog.init",
    "Initialisation fixes the balance",
    statement="The relative size of W_QK and W_V at the start constrains them throughout: if ‖W_QK‖² exceeds ‖W_V‖² "
    "by c at first, "
    "it is never smaller than c.",
    place="Implications, initialisation constraints",
    hypotheses="Gradient flow, by a Runge–Kutta method, from three starts with different c.",
    latex=[r"\|W_{QK}(t)\|_F^2\ge\|W_{QK}(0)\|_F^2-\|W_V(0)\|_F^2"],
)
def initialisation(*, build: Callable[[], nn.Module] = relu_attention) -> Verdict:
    worst, slack = 0.0, float("inf")
    generator = torch.Generator().manual_seed(3)
    x = 0.5 * torch.randn(6, 5, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(6, 5, 1, generator=generator, dtype=torch.float64)
    for size in (0.3, 1.0, 2.0):
        torch.manual_seed(1)
        model = build().double()
        with torch.no_grad():
            dict(model.named_parameters())["qk"].mul_(size)
        seen = torch.stack(
            flow(
                model,
                lambda net: (net(x) - y).square().mean(),
                lambda theta: torch.stack((theta["qk"].square().sum(), theta["v"].square().sum())),
                time=2.0,
                steps=100,
            )
        )
        difference = seen[:, 0] - seen[:, 1]
        worst = max(worst, float((difference - difference[0]).abs().max() / seen[0].sum()))
        slack = min(slack, float((seen[:, 0] - difference[0]).min()))
    return judged(
        worst < 1e-4 and slack > -1e-4,
        "The difference stays where it starts, and the bound holds.",
        "The difference moves.",
        Evidence(what="largest relative change of ‖W_QK‖² − ‖W_V‖²", value=worst, limit=1e-4, samples=300),
        Evidence(what="least ‖W_QK‖² − c", value=slack, limit=0.0, samples=300),
    )


PENALTY = """\
w, v, x, y, lam = 1.0, 1.0, 1.0, 1.0, 1.0   # fitted: relu(w) v = y
delta = max(w, 0) * v - y                   # 0
dw = -delta * v - lam * w                   # flow with the penalty lam/2 w^2
dv = -delta * max(w, 0)
print("dw", dw, "dv", dv, "change of w^2/2 - v^2/2:", w * dw - v * dv)
assert dv == 0 and w * dw - v * dv == -1"""


@claim(
    "blog.regularisation",
    "Regularising the pattern acts on the values",
    statement="A penalty on W_QK alone acts on W_V as well, because the law keeps their norms moving together.",
    place="Implications, training dynamics",
    latex=[r"\mathcal{L}+\tfrac{\lambda}{2}\|W_{QK}\|_F^2"],
    corrected_by="paper.R2.1",
)
def regularisation(*, penalty: tuple[int, int] = (1, 0)) -> Verdict:
    """One token x = 1 that is fitted, w = v = y = 1: only the penalties move anything."""
    w, v = Fraction(1), Fraction(1)
    dw, dv = -penalty[0] * w, -penalty[1] * v
    rate = w * dw - v * dv
    witness = Witness(
        data={"X": 1, "W_QK": 1, "W_V": 1, "y": 1, "λ": 1},
        claimed="½W_QK² − ½W_V² is kept, so both move",
        found="W_QK decays at the rate 1, W_V does not move, and the law changes at the rate −1",
        numpy=PENALTY,
    )
    evidence = Evidence(what="rate of ½W_QK² − ½W_V²", value=str(rate), limit="0", proof=rate == 0)
    return judged(
        rate == 0,
        "The norms keep moving together.",
        "The penalty breaks the law it is said to act through. If both are penalised alike, the law decays "
        "(paper.R2.1).",
        evidence,
        witness=witness if rate else None,
    )
