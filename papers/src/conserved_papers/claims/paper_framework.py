"""Claims of the paper: what a law is, when the criterion applies, the toy example, and what is left open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flint
import numpy as np
import torch
from scipy.special import erf
from torch import Tensor, nn

from conserved.inference import recognize
from conserved.verdict import Evidence, Verdict, Witness
from conserved_papers.blocks import Attention, FeedForward, TransformerBlock
from conserved_papers.claims.certified import Build, Parameters, Quantities, all_laws
from conserved_papers.claims.judging import answer, by_steps, decide
from conserved_papers.claims.matrix_words import matrices
from conserved_papers.claims.paper_blocks import gram_differences
from conserved_papers.claims.polynomials import Letters, Matrix, arranged, determinant, identical
from conserved_papers.claims.registry import claim

QuantityFunction = Callable[[Tensor], Tensor]

PRODUCT: Build = partial(FeedForward, 1, 1, "linear")
"""f(x) = a b x, the toy example."""
HEAD: Build = partial(nn.Linear, 2, 3, bias=False)
"""A classifier's last layer."""


@claim("paper.eq2")
def orthogonality(*, outputs: Sequence[int] = (0, 1)) -> Verdict:
    cases: list[tuple[nn.Module, QuantityFunction]] = [
        (nn.Linear(2, 2, bias=False), lambda t: t[3]),
        (nn.Linear(2, 2, bias=False), lambda t: t[0] * t[3] - t[1] * t[2]),
        (FeedForward(2, 1, "linear"), lambda t: t[:2].square().sum() - t[2:].square().sum()),
        (FeedForward(2, 1, "linear"), lambda t: t[:2].square().sum() + t[2:].square().sum()),
    ]
    wrong, samples = 0, 0
    for model, quantity in cases:
        model = model.double()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        up = torch.func.grad(quantity)(flat)
        inner, rate = 0.0, 0.0
        for _ in range(8):
            x, y = (torch.randn(2, dtype=torch.float64) for _ in range(2))
            output = model(x)
            rows = [_gradient(model, output[i]) for i in outputs]
            inner = max([inner, *(abs(float(up @ row)) for row in rows)])
            rate = max(rate, abs(float(up @ _gradient(model, (output - y).square().sum() / 2))))
            samples += 1
        wrong += (inner < 1e-12) is not (rate < 1e-12)
    return decide(
        wrong == 0,
        "The criterion says of every function what one sample does to it.",
        "The criterion calls something conserved that one sample changes.",
        Evidence(what="functions on which the two disagree, of four", value=wrong, limit=0, samples=samples),
    )


def _gradient(model: nn.Module, output: Tensor) -> Tensor:
    result = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in result])


@claim("paper.toy")
def toy(*, quantity: Callable[[Tensor, Tensor], Tensor] = lambda a, b: a * a - b * b) -> Verdict:
    def quantities(theta: Parameters) -> Tensor:
        return quantity(theta["down.weight"], theta["up.weight"])

    return all_laws(PRODUCT, (3, 1), quantities, size="two parameters")


@claim("paper.R3.1")
def level_sets(*, power: int = 2) -> Verdict:
    letters = Letters(a=(), b=())
    a, b = letters
    base = a * a - b * b
    h = base**power
    grads = [letters.gradient(h, name)[()] for name in "ab"]
    return by_steps(
        "The example is C¹, conserved, and takes the values 9 and −9 where a² − b² = 3.",
        "The example is no C¹ law.",
        ("b ∂_a h + a ∂_b h = 0, as a polynomial", identical(b * grads[0] + a * grads[1], 0 * a)),
        (
            "h and ∇h are multiples of a² − b², so the pieces meet smoothly",
            all(divmod(part, base)[1] == 0 for part in (h, *grads)),
        ),
        ("h(2, 1) = −h(−2, 1) ≠ 0", (2**2 - 1**2) ** power != 0),
        scope="two parameters",
    )


DECAY = """\
import numpy as np
a, b, lam = 0.7, -0.4, 0.1                    # f(x) = a exp(b) x; coordinates (t, a, b)
gradient = np.array([0.0, 1.0, a])            # of f, up to a factor; a^2/2 - b is constant along it
decay = np.array([1.0, -lam * a, -lam * b])   # the flow of the decay, with time
bracket = np.array([0.0, lam, 0.0])           # [decay, gradient]
assert abs(gradient @ [0.0, a, -1.0]) < 1e-15
print("rank", np.linalg.matrix_rank([gradient, decay, bracket]), "of 3: nothing is conserved")
assert np.linalg.matrix_rank([gradient, decay, bracket]) == 3"""


def _bracket(letters: Letters, x: Sequence[Any], y: Sequence[Any]) -> list[Any]:
    """Return the bracket [X, Y] = DY·X − DX·Y of fields in the coordinates t, a, b."""

    def along(field: Sequence[Any], value: Any) -> Any:
        return sum(part * letters.gradient(value, name)[()] for part, name in zip(field, "tab", strict=True))

    return [along(x, there) - along(y, here) for here, there in zip(x, y, strict=True)]


@claim("paper.R2.1")
def weight_decay(*, exponential: bool = True) -> Verdict:
    """f = a·eᵇ·x, whose law a²/2 − b has no degree; or f = a·b·x, whose law a² − b² has degree two."""
    letters = Letters(t=(), a=(), b=(), l=())
    _, a, b, rate = letters
    one, zero = a * 0 + 1, a * 0
    gradient = [zero, one, a] if exponential else [zero, b, a]
    law_slope = [zero, a, -one] if exponential else [zero, 2 * a, -2 * b]
    decay = [one, -rate * a, -rate * b]
    fields = arranged([gradient, decay, _bracket(letters, decay, gradient)])
    conserved_without = identical(sum(x * y for x, y in zip(gradient, law_slope, strict=True)), zero)
    nothing_left = determinant(fields) != 0
    return decide(
        not (conserved_without and nothing_left),
        "A time-dependent law is left.",
        "f = a·eᵇ·x conserves a²/2 − b, and with weight decay it conserves nothing, not even a function of time and "
        "parameters. Laws that are homogeneous do correspond.",
        Evidence(
            what="determinant of ∇f, the decay and their bracket in (t, a, b): a polynomial other than zero",
            proof=True,
        ),
        witness=Witness(
            data={"f": "a·eᵇ·x", "law without decay": "a²/2 − b"},
            claimed="a law with decay that corresponds to it",
            found="three independent fields in (t, a, b): no law",
            numpy=DECAY,
        ),
        scope="three coordinates",
    )


@claim("paper.R2.1.corrected")
def homogeneous_decay(*, factor: int = 2) -> Verdict:
    a, b, m = matrices("ABM")
    good = True
    for rate in (1, 3):
        da, db = -(m @ b) - rate * a, -(m.T @ a) - rate * b
        change = da.T @ a + a.T @ da - db.T @ b - b.T @ db
        good &= change == -factor * rate * (a.T @ a - b.T @ b)
    letters = Letters(W=(3,))
    weights = letters["W"]
    euler = identical(letters.gradient(sum(weights), "W") @ weights, sum(weights))
    return by_steps(
        "A law of degree p decays as e^{−pλt}: p = 2 for Gram differences and p = 1 for ΣW_i.",
        "It decays at another rate.",
        ("d/dt (AᵀA − BᵀB) = −2λ(AᵀA − BᵀB), word by word at two λ, which is enough for what is linear in λ", good),
        ("for a linear law ⟨∇h, λθ⟩ = λh, as polynomials, and ⟨∇h, G⟩ = 0 since it is a law", euler),
    )


@claim("paper.loss")
def squared_error_spans(*, gradient: Callable[[Matrix, Matrix], Matrix] = lambda z, y: z - y) -> Verdict:
    good = True
    for outputs in (1, 2, 3, 5):
        z = Letters(z=(outputs,))["z"]
        units = np.eye(outputs, dtype=int).astype(object)
        result = determinant(arranged([list(gradient(z, z - unit)) for unit in units]))
        good &= bool(result == 1)
    what = "the target z − e_i has the gradient e_i, for every z and i (determinant 1 as a polynomial; 1 to 5 outputs)"
    return by_steps("The gradients span all of R^out.", "The span is smaller, or depends on the output.", (what, good))


@claim("paper.loss.crossentropy")
def cross_entropy_head(*, loss: str = "cross_entropy") -> Verdict:
    return all_laws(HEAD, (4, 2), lambda theta: theta["weight"].sum(0), size="three classes of two features", loss=loss)


ComplexFunction = Callable[[Matrix], Matrix]
"""A function of complex numbers, entry by entry."""


def complex_gelu(z: Matrix) -> Matrix:
    """Return z Φ(z) for complex z."""
    result: Matrix = z * (1 + erf(z / np.sqrt(2))) / 2
    return result


def complex_models(gelu: ComplexFunction) -> list[Callable[[complex], complex]]:
    """Return one output of each model of Section 4 along a line of complex inputs, with random weights."""
    rng = np.random.default_rng(0)

    def silu(z: Matrix) -> Matrix:
        return z / (1 + np.exp(-z))

    def soft(z: Matrix) -> Matrix:
        powers = np.exp(z)
        result: Matrix = powers / powers.sum(-1, keepdims=True)
        return result

    a, start, along = rng.normal(size=4), rng.normal(size=3), rng.normal(size=3)
    b, c, q, k, w = (rng.normal(size=shape) for shape in ((4, 3), (4, 3), (3, 2), (3, 2), (2, 3)))
    other, value = rng.normal(size=3), rng.normal(size=3)

    def point(t: complex) -> Matrix:
        result: Matrix = start + t * along
        return result

    def attention(t: complex) -> complex:
        tokens = np.stack([point(t), other + 0j])
        return complex((soft((tokens @ q) @ (tokens @ k).T) @ tokens @ value)[0])

    def mixture(t: complex) -> complex:
        x = point(t)
        experts = np.stack([a @ (silu(b @ x) * (c @ x)), a @ (silu(c @ x) * (b @ x))])
        return complex(soft(w @ x) @ experts)

    return [
        lambda t: complex(a @ gelu(b @ point(t))),
        lambda t: complex(a @ silu(b @ point(t))),
        lambda t: complex(a @ (silu(b @ point(t)) * (c @ point(t)))),
        attention,
        mixture,
    ]


@claim("paper.S5.meromorphic")
def meromorphic_models(*, gelu: ComplexFunction = complex_gelu) -> Verdict:
    """A complex derivative does not depend on the direction: compare the real and the imaginary one."""
    worst, count, h = 0.0, 0, 1e-5
    for f in complex_models(gelu):
        for t in (0.3 + 0.2j, -0.4 + 0.5j, 0.1 - 0.7j):
            real, imaginary = ((f(t + h * unit) - f(t - h * unit)) / (2 * h * unit) for unit in (1, 1j))
            worst, count = max(worst, abs(real - imaginary) / abs(real)), count + 1
    return decide(
        worst < 1e-6,
        "All are quotients of entire functions, and their complex derivatives do not depend on the direction.",
        "A complex derivative depends on the direction.",
        Evidence(what="largest relative difference of two directions", value=worst, limit=1e-6, samples=count),
    )


@claim("paper.S5.singular")
def singular(*, root: int = 2) -> Verdict:
    """A branch: continued once round zero, z^{1/n} comes back with the factor e^{2πi/n}. Essential: no limit at 0."""
    turn = flint.acb(0, 2 * flint.arb.pi() / root).exp()
    right, left = (flint.arb(s * 50).exp() for s in (1, -1))
    return by_steps(
        "One has a branch point at zero, the other an essential singularity.",
        "The function comes back to itself.",
        ("continued once round zero, √z comes back with the factor e^{2πi/2} ≠ 1 (balls)", not (turn - 1).contains(0)),
        ("e^{1/x} grows beyond every bound as x → 0+ and vanishes as x → 0−, so zero is no pole and is not removable "
         "(e^{50} and e^{−50} at x = ±1/50)", bool(right > 10**20) and bool(left < flint.arb("1e-20"))),
        scope="both functions",
    )  # fmt: skip


def recognised(build: Build) -> Quantities:
    """Return the exact laws that the recognisers read off a module, as one list of numbers."""
    laws = recognize(build().double()).select(lambda symmetry: symmetry.exact)

    def quantities(theta: Parameters) -> Tensor:
        result = [symmetry.kind.coordinates(symmetry.law(theta)).flatten() for symmetry in laws]
        return torch.cat(result) if result else torch.zeros(0, dtype=torch.float64)

    return quantities


def norm_block() -> nn.Module:
    return TransformerBlock(Attention(4, 2), FeedForward(4, 3), bias=False)


@claim("paper.open.norm")
def norm_complete(*, build: Build = norm_block) -> Verdict:
    result = all_laws(build, (5, 4), recognised(norm_block), size="a pre-norm block of d = 4")
    return answer(
        "The laws of its attention and, for every channel, the gain of each norm against the columns that read it; no "
        "others.", result
    )  # fmt: skip


class Stack(nn.Module):
    """Two attention layers on a residual stream, without norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Attention(2, 1)
        self.second = Attention(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(x)


def stack_invariants(theta: Parameters) -> Tensor:
    """Return QᵀQ − KᵀK and VᵀV − OᵀO of both layers."""
    return torch.cat([gram_differences(theta, count=1, prefix=f"{layer}.") for layer in ("first", "second")])


@claim("paper.open.stack")
def stack_complete(*, quantities: Quantities = stack_invariants) -> Verdict:
    result = all_laws(Stack, (4, 2), quantities, size="two layers of d = 2")
    return answer("The laws of the first layer and those of the second; no others.", result)
