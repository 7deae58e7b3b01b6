"""Claims of the blog post: its theorem, its gradients, what it concludes, and its four open questions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved.verdict import Evidence, Verdict, Witness
from conserved_papers.blocks import DecoderLM, ReluAttention
from conserved_papers.claims.certified import Build, Parameters, Quantities, all_laws, laws_hold
from conserved_papers.claims.descents import exponent, flow
from conserved_papers.claims.judging import answer, by_steps, confirm, decide, refute
from conserved_papers.claims.polynomials import Letters, Matrix, fractions, identical
from conserved_papers.claims.registry import claim
from conserved_papers.lab.data.embedded import VOCABULARY, sequences

relu_attention: Build = partial(ReluAttention, 3)
wide_relu_attention: Build = partial(ReluAttention, 3, out=2)
SIZE = "d = 3 and sequences of five"


def norm_difference(theta: Parameters, *, sign: float = -1.0) -> Tensor:
    """Return ½‖W_QK‖² − ½‖W_V‖²."""
    return (theta["qk"].square().sum() + sign * theta["v"].square().sum())[None] / 2


def euler(relu: Callable[[Fraction], Fraction] = lambda z: max(z, Fraction(0))) -> list[tuple[str, bool]]:
    """Return the two lines that prove the law for every size, width and loss."""
    points = [Fraction(n, 3) for n in range(-6, 7)]
    scales = all(relu(s * z) == s * relu(z) for z in points for s in (Fraction(1, 2), Fraction(2), Fraction(7)))
    s, r, v = Letters(s=(), r=(), v=())
    return [
        ("relu(sz) = s relu(z) for s > 0, so f(sW, V) = relu(XsWXᵀ)XV = f(W, sV)", scales),
        ("d/ds at s = 1 of L(f(sW, V)) = L(f(W, sV)) is ⟨∇_W L, W⟩ = ⟨∇_V L, V⟩, for every loss (polynomials, entry by "
         "entry of relu(S)XV)", identical((s * r) * v, r * (s * v))),
    ]  # fmt: skip


@claim("blog.T1")
def norm_law(*, quantities: Quantities = norm_difference) -> Verdict:
    result = laws_hold(relu_attention, (5, 3), quantities, size=SIZE)
    return (
        by_steps("Both squared norms change by the same amount.", "", *euler(), beside=result.evidence)
        if result.holds
        else result
    )


@claim("blog.T1.only")
def norm_law_complete(*, build: Build = relu_attention, quantities: Quantities = norm_difference) -> Verdict:
    return all_laws(build, (5, 3), quantities, size=SIZE)


@claim("blog.T1.wide")
def wide_law(*, build: Build = wide_relu_attention, quantities: Quantities = norm_difference) -> Verdict:
    result = laws_hold(build, (5, 3), quantities, size="d = 3 and two outputs")
    return by_steps("Neither enters the argument.", "", *euler(), beside=result.evidence) if result.holds else result


DESCENT = """\
w, v, x, y = 1.0, 2.0, 1.0, 0.0            # one token of one number
before = w ** 2 / 2 - v ** 2 / 2
delta = max(w * x * x, 0) * x * v - y      # 2
gw, gv = delta * x * x * x * v, delta * max(w * x * x, 0) * x      # 4 and 2
w, v = w - 0.5 * gw, v - 0.5 * gv          # one step of size 1/2
print("before", before, "after", w ** 2 / 2 - v ** 2 / 2)          # -3/2 and 0
assert abs(w ** 2 / 2 - v ** 2 / 2 - before) > 1"""


def descent_step(w: Fraction, v: Fraction) -> tuple[Fraction, Fraction]:
    """Return one step of size ½ for one token x = 1, target 0, while w > 0."""
    return w - w * v * v / 2, v - w * w * v / 2


@claim("blog.T1.wording")
def norm_law_in_steps(*, advance: Callable[[Fraction, Fraction], tuple[Fraction, Fraction]] = descent_step) -> Verdict:
    for w, v in ((Fraction(1), Fraction(2)), (Fraction(2), Fraction(1))):
        after = advance(w, v)
        before, now = (w * w - v * v) / 2, (after[0] ** 2 - after[1] ** 2) / 2
        if before != now:
            data = {"X": 1, "W_QK": w, "W_V": v, "y": 0, "step": "1/2"}
            return refute(
                "Gradient flow is meant: a step of size τ changes the difference by τ²/2 (‖∇_QK‖² − ‖∇_V‖²). And "
                "‖W_V(t)‖_V in line 26 is ‖W_V(t)‖_F.",
                Evidence(what="½w² − ½v² before and after one step", value=f"{before} and {now}", proof=True),
                witness=Witness(data=data, claimed=f"{before}", found=f"{now}", numpy=DESCENT),
            )
    return confirm("It is unchanged.", Evidence(what="starts", value="equal", samples=2))


def activations() -> Iterator[tuple[Letters, Matrix, Matrix, Any]]:
    """For two tokens and d = 2, every pattern of active scores: letters, the pattern, relu(S) and the error."""
    for pattern in itertools.product((0, 1), repeat=4):
        letters = Letters(X=(2, 2), W=(2, 2), V=(2, 1), y=(2, 1))
        x, w, v, y = letters
        mask = np.array(pattern, dtype=object).reshape(2, 2)
        active = mask * (x @ w @ x.T)
        yield letters, mask, active, active @ x @ v - y


def _loss(error: Matrix) -> Any:
    return sum(e * e for e in error.ravel().tolist()) / 2


def pattern_gradient(x: Matrix, v: Matrix, error: Matrix, mask: Matrix) -> Matrix:
    """Return Xᵀ diag(δ) relu(sign S) diag(X W_V) X."""
    matrix: Matrix = x.T @ (error * mask * (x @ v).T) @ x
    return matrix


PATTERNS = "at two tokens and d = 2, all 16 patterns of active scores"


@claim("blog.gradQK")
def gradient_of_pattern(*, formula: Callable[[Matrix, Matrix, Matrix, Matrix], Matrix] = pattern_gradient) -> Verdict:
    same = all(
        identical(letters.gradient(_loss(error), "W"), formula(letters["X"], letters["V"], error, mask))
        for letters, mask, _, error in activations()
    )
    what = "derivative and formula, as polynomials"
    return by_steps("The formula is the derivative.", "It is not.", (what, same), scope=PATTERNS)


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


def value_gradient(formula: ValueFormula, witness: Witness | None = None) -> Verdict:
    """Return whether a formula of X, relu(S) and δ is the gradient in W_V."""
    same = all(
        identical(letters.gradient(_loss(error), "V"), formula(letters["X"], active, error))
        for letters, _, active, error in activations()
    )
    what = "derivative and formula, as polynomials"
    otherwise = "The scores have to be transposed; the last line of the proof, which sums over i and j, has it right."
    return by_steps("The formula is the derivative.", otherwise, (what, same), scope=PATTERNS, witness=witness)


@claim("blog.gradV")
def gradient_of_values(*, formula: ValueFormula = lambda x, active, error: x.T @ active @ error) -> Verdict:
    x, w = fractions([[1, 0], [0, 1]]), fractions([[0, 1], [0, 0]])
    v, y = fractions([[0], [1]]), fractions([[0], [-1]])
    error = x @ w @ x.T @ x @ v - y
    shown = [f"({', '.join(str(e) for e in m.ravel())})" for m in (formula(x, w, error), (w @ x).T @ error)]
    data = {"X": "1", "W_QK": "((0, 1), (0, 0))", "W_V": "(0, 1)", "y": "(0, −1)", "δ": "(1, 1)"}
    return value_gradient(formula, Witness(data=data, claimed=shown[0], found=shown[1], numpy=TRANSPOSED))


@claim("blog.gradV.corrected")
def true_gradient_of_values(*, formula: ValueFormula = lambda x, active, error: x.T @ active.T @ error) -> Verdict:
    return value_gradient(formula)


@claim("blog.inner")
def inner_products(*, factor: int = 1) -> Verdict:
    same = True
    for letters, _, _, error in activations():
        loss = _loss(error)
        left = (letters.gradient(loss, "W") * letters["W"]).sum()
        right = (letters.gradient(loss, "V") * letters["V"]).sum()
        same &= identical(left, factor * right)
    return by_steps(
        "Both inner products are the same number.",
        "They differ.",
        *euler(),
        (f"both sides as polynomials, {PATTERNS[3:]}", same),
    )


@claim("blog.coupling")
def coupling(*, relu: Callable[[Fraction], Fraction] = lambda z: max(z, Fraction(0))) -> Verdict:
    return by_steps("Both norms change at the same rate.", "Their rates differ.", *euler(relu))


@claim("blog.init")
def initialisation(*, build: Callable[[], nn.Module] = relu_attention) -> Verdict:
    worst, slack = 0.0, float("inf")
    generator = torch.Generator().manual_seed(3)
    x = 0.5 * torch.randn(6, 5, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(6, 5, 1, generator=generator, dtype=torch.float64)

    def norms(theta: dict[str, Tensor]) -> Tensor:
        return torch.stack((theta["qk"].square().sum(), theta["v"].square().sum()))

    for size in (0.3, 1.0, 2.0):
        torch.manual_seed(1)
        model = build().double()
        with torch.no_grad():
            dict(model.named_parameters())["qk"].mul_(size)
        seen = torch.stack(flow(model, lambda net: (net(x) - y).square().mean(), norms, time=2.0, steps=60))
        difference = seen[:, 0] - seen[:, 1]
        worst = max(worst, float((difference - difference[0]).abs().max() / seen[0].sum()))
        slack = min(slack, float((seen[:, 0] - difference[0]).min()))
    return decide(
        worst < 1e-4 and slack > -1e-4,
        "The difference stays where it starts, and the bound holds.",
        "The difference moves.",
        Evidence(what="largest relative change of ‖W_QK‖² − ‖W_V‖²", value=worst, limit=1e-4, samples=180),
        Evidence(what="least ‖W_QK‖² − c, which must not be negative", value=slack, limit=0.0, samples=180),
    )


@claim("blog.regularisation")
def regularisation(*, penalty: float = 1.0) -> Verdict:
    x = y = torch.ones(1, 1, dtype=torch.float64)
    least, shown = float("inf"), []
    for w in (0.5, 1.0, 2.0):
        model = ReluAttention(1).double()
        with torch.no_grad():
            model.qk.fill_(w)
            model.v.fill_(1 / w)
        seen = flow(
            model,
            lambda net: (net(x) - y).square().sum() / 2 + penalty / 2 * net.qk.square().sum(),  # type: ignore[operator]
            lambda theta: theta["v"],
            time=10.0,
            steps=200,
        )
        first, middle, last = float(seen[0]), float(seen[20]), float(seen[-1])
        shown.append(f"{first:.2f} → {middle:.2f} → {last:.2f}")
        least = min(least, abs(last / first - 1))
    return decide(
        least > 0.05,
        "A penalty on W_QK moves W_V, from every start that was tried.",
        "W_V does not move.",
        Evidence(what="least relative change of W_V by t = 10, above 0.05", value=least, limit=0.05, samples=3),
        Evidence(what="W_V at t = 0, 1, 10 from W_QK = 1/2, 1, 2", value="; ".join(shown)),
    )


@claim("blog.regularisation.mechanism")
def penalty_breaks(*, both: bool = False) -> Verdict:
    w, v, g, rate = Letters(w=(2,), v=(2,), g=(), l=())
    # ⟨∇_W L, W⟩ = ⟨∇_V L, V⟩ = g by the law's own identity; the penalty adds λ‖W‖² (and λ‖V‖²).
    change = -(g + rate * (w @ w)) + (g + (rate * (v @ v) if both else 0 * g))
    return by_steps(
        "The penalty breaks the law.",
        "The rate is another.",
        *euler(),
        ("the two inner products cancel and the penalty's is left, as polynomials", identical(change, -rate * (w @ w))),
    )


class FactoredRelu(nn.Module):
    """relu(X W_Q W_Kᵀ Xᵀ) X W_V, with both factors trained."""

    def __init__(self, dim: int = 3, head: int = 2) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(dim, head))
        self.k = nn.Parameter(torch.randn(dim, head))
        self.v = nn.Parameter(torch.randn(dim, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.q @ self.k.mT @ x.mT) @ x @ self.v


def factored_law(theta: Parameters, *, sign: float = -1.0) -> Tensor:
    """Return ‖W_Q‖² − ‖W_V‖²."""
    return (theta["q"].square().sum() + sign * theta["v"].square().sum())[None]


@claim("blog.factored")
def factored(*, quantities: Quantities = factored_law) -> Verdict:
    law = laws_hold(FactoredRelu, (5, 3), quantities, size="d = 3 and heads of two")
    if not law.holds:
        return law
    letters = Letters(q=(), k=(), v=(), d=())
    q, k, v, d = letters
    value = (q * k) ** 2 - v * v
    moves = {"q": -d * k * v, "k": -d * q * v, "v": -d * q * k}
    rate = sum(letters.gradient(value, name)[()] * move for name, move in moves.items())
    return by_steps(
        "The factors carry the law, their product does not.",
        "The product carries it too.",
        euler()[0],
        ("so f(sW_Q, W_K, V) = f(W_Q, W_K, sV), and W_Q takes the place of W (symbolically at d = 3, heads of two)",
         law.holds),
        ("for one token of one number the rate of q²k² − v² is −2δvqk(q² + k² − 1), not zero, as a polynomial",
         identical(rate, -2 * d * v * q * k * (q * q + k * k - 1))),
        scope="the law for all sizes, its failure by an example",
    )  # fmt: skip


class SoftmaxAttention(nn.Module):
    """softmax(X W_QK Xᵀ) X W_V, with one matrix W_QK as in the post."""

    def __init__(self, dim: int = 3, out: int = 1) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.randn(dim, dim) * dim**-0.5)
        self.v = nn.Parameter(torch.randn(dim, out) * dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.qk @ x.mT).softmax(-1) @ x @ self.v


@claim("blog.Q1")
def transformer_coupling(*, plus: tuple[str, str] = ("qk", "v")) -> Verdict:
    text = sequences(4, 24, seed=0)

    def watch(theta: dict[str, Tensor]) -> Tensor:
        parts = {name: theta[f"layers.0.attention.{name}.weight"].unflatten(0, (2, -1)) for name in "qkv"}
        parts["qk"] = parts["q"].mT @ parts["k"]
        parts["o"] = theta["layers.0.attention.o.weight"].unflatten(1, (2, -1)).transpose(0, 1)
        first, second = (parts[name].square().sum((-1, -2)) for name in plus)
        return first - second

    sizes, drift = (0.04, 0.02, 0.01), []
    for size in sizes:
        torch.manual_seed(0)
        model = DecoderLM(VOCABULARY, 8, 1, 2, 12, max_length=24, positions="none").double()
        optimizer = torch.optim.SGD(model.parameters(), lr=size)
        start = watch(dict(model.named_parameters())).detach()
        for _ in range(round(1.2 / size)):
            optimizer.zero_grad()
            F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
            optimizer.step()
        drift.append(float((watch(dict(model.named_parameters())).detach() - start).norm()))
    order = exponent(sizes, drift)
    result = decide(
        order < 0.3,
        "The drift does not depend on the step: the flow itself changes the difference.",
        "The drift vanishes with the step.",
        Evidence(what="order of the drift in the step, below 0.3 (a law has 1)", value=order, limit=0.3, samples=3),
        Evidence(what="drift at the smallest step", value=drift[-1]),
    )
    return answer("Not this one: with softmax each of Q, K and V, O has a law of its own (paper.T4.3).", result)


@claim("blog.Q2")
def softmax_law(*, build: Callable[[], nn.Module] = SoftmaxAttention) -> Verdict:
    return answer("None: nothing is conserved.", all_laws(build, (5, 3), None, size=SIZE))


SHARED = """\
import numpy as np
x, w, v = np.array([1.0, 2.0]), 0.0, 1.0          # two tokens, d = 1, target 0
A = np.exp(w * np.outer(x, x)); A /= A.sum(1, keepdims=True)
y = A @ x * v                                     # both gradients use the pattern A
slope_w = sum(y[i] * v * A[i, j] * x[i] * x[j] * (x[j] - A[i] @ x) for i in range(2) for j in range(2))
slope_v = y @ (A @ x)
print("rates of W^2/2 and V^2/2:", -slope_w * w, -slope_v * v)
assert slope_w * w == 0 and slope_v * v == 4.5"""


def uniform_pattern(logits: Matrix) -> Matrix:
    """Softmax of logits that are all zero."""
    return fractions([[Fraction(1, len(logits))] * len(logits)] * len(logits))


def inactive_pattern(logits: Matrix) -> Matrix:
    """Return ReLU of logits that are all zero."""
    return 0 * logits


@claim("blog.shared")
def shared_pattern(*, pattern: Callable[[Matrix], Matrix] = uniform_pattern) -> Verdict:
    """At W_QK = 0 the rate of ½‖W_QK‖² is zero; that of ½‖W_V‖² is −‖A X W_V‖² for the target 0."""
    x, v = fractions([[1], [2]]), Fraction(1)
    output = pattern(fractions([[0, 0], [0, 0]])) @ x * v
    rate = -sum((entry * entry for entry in output.ravel().tolist()), Fraction(0))
    return decide(
        rate == 0,
        "Both norms stand still.",
        "Softmax shares its pattern between both gradients too, and there W_V shrinks while W_QK stands still. What "
        "couples the norms is that ReLU is homogeneous: f(sW_QK, W_V) = f(W_QK, sW_V).",
        Evidence(what="rates of ½‖W_QK‖² and ½‖W_V‖², softmax at W_QK = 0", value=f"0 and {rate}", proof=True),
        witness=Witness(
            data={"X": "(1, 2)", "W_QK": 0, "W_V": 1, "y": 0},
            claimed="equal rates",
            found=f"0 and {rate}",
            numpy=SHARED,
        ),
        scope="at two tokens and d = 1",
    )


class ReluHeads(nn.Module):
    """Σ_h relu(X W_h Xᵀ) X V_h."""

    def __init__(self, heads: int = 2, dim: int = 3) -> None:
        super().__init__()
        self.heads = nn.ModuleList(ReluAttention(dim) for _ in range(heads))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads]).sum(0)


def head_norm_differences(theta: Parameters) -> Tensor:
    """Return ½‖W_h‖² − ½‖V_h‖² for two heads."""
    return torch.cat([norm_difference({name: theta[f"heads.{h}.{name}"] for name in ("qk", "v")}) for h in (0, 1)])


@claim("blog.Q3")
def heads_complete(*, quantities: Quantities = head_norm_differences) -> Verdict:
    result = all_laws(ReluHeads, (5, 3), quantities, size="two heads of d = 3")
    return answer("Not at all: each head keeps its own ‖W_h‖² − ‖V_h‖², and there is no further law.", result)


def scalar_relu(w: Fraction, v: Fraction, x: Fraction) -> Fraction:
    """Return relu(x w x) x v."""
    return max(x * w * x, Fraction(0)) * x * v


@claim("blog.Q4")
def functional_coupling(*, attention: Callable[[Fraction, Fraction, Fraction], Any] = scalar_relu) -> Verdict:
    inputs = [Fraction(n, 2) for n in range(-4, 5)]
    same = all(attention(Fraction(1), Fraction(6), x) == attention(Fraction(2), Fraction(3), x) for x in inputs)
    result = by_steps(
        "Norms 1, 6 and 2, 3 belong to one function.",
        "Different norms belong to different functions.",
        ("relu(W_QK x²) x W_V is 6 relu(x²) x for (W_QK, W_V) = (1, 6) and (2, 3), nine inputs as fractions", same),
        scope="by an example",
    )
    return answer("No: one function has every ratio of norms; the law says where on that curve training stays.", result)
