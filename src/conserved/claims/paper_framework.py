"""Claims of the paper: what a law is, when the criterion applies, the toy example, and what is left open."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor, nn

from conserved.blocks import Attention, FeedForward, TransformerBlock
from conserved.claims.certified import Build, Parameters, Quantities, all_laws
from conserved.claims.judging import held, judged, refuted
from conserved.claims.ledger import claim
from conserved.claims.polynomials import Letters, Matrix, arranged, determinant, identical, rank, times
from conserved.inference import recognize
from conserved.verdict import Evidence, Verdict, Witness

Quantity = Callable[[Tensor], Tensor]


class LinearMap(nn.Module):
    """f(x) = W x with two outputs; nothing of W is conserved."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.w @ x


@claim(
    "paper.eq2",
    "The orthogonality criterion",
    statement="h is constant on gradient flow for every data set exactly if ∇h is orthogonal to ∇f_i(x) for all "
    "inputs x "
    "and all outputs i.",
    place="Equation (2)",
    hypotheses="V_ℓ is the whole space; squared error on one sample is data set enough.",
    latex=[r"\langle\nabla_\theta h(\theta),\nabla_\theta f_i(x;\theta)\rangle=0"],
)
def orthogonality(*, outputs: Sequence[int] = (0, 1)) -> Verdict:
    """Laws and other functions of two models: where the criterion and the change of h on one sample disagree."""
    cases: list[tuple[nn.Module, Quantity, tuple[int, ...]]] = [
        (LinearMap(), lambda t: t[3], (2,)),
        (LinearMap(), lambda t: t[0] * t[3] - t[1] * t[2], (2,)),
        (FeedForward(2, 1, "linear"), lambda t: t[:2].square().sum() - t[2:].square().sum(), (2,)),
        (FeedForward(2, 1, "linear"), lambda t: t[:2].square().sum() + t[2:].square().sum(), (2,)),
    ]
    wrong, samples = 0, 0
    for model, quantity, shape in cases:
        model = model.double()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        up = torch.func.grad(quantity)(flat)
        inner, rate = 0.0, 0.0
        for _ in range(8):
            x, y = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
            output = model(x)
            rows = [_gradient(model, output[i]) for i in outputs]
            inner = max([inner, *(abs(float(up @ row)) for row in rows)])
            rate = max(rate, abs(float(up @ _gradient(model, (output - y).square().sum() / 2))))
            samples += 1
        wrong += (inner < 1e-12) is not (rate < 1e-12)
    return judged(
        wrong == 0,
        "The criterion says of every function what one sample does to it.",
        "The criterion calls something conserved that one sample changes.",
        Evidence(what="functions on which the two disagree", value=wrong, limit=0, samples=samples),
    )


def _gradient(model: nn.Module, output: Tensor) -> Tensor:
    found = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in found])


class Product(nn.Module):
    """f(x) = a b x, the toy example."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * self.b * x


@claim(
    "paper.toy",
    "The toy example",
    statement="For f = abx the conserved functions are those that are constant along (ȧ, ḃ) = (b, a), and a² − b² is "
    "the one "
    "independent of them.",
    place="Section 3, a toy example",
    latex=[r"b\,\partial_a h+a\,\partial_b h=0", r"h=a^2-b^2"],
)
def toy(*, quantity: Callable[[Tensor, Tensor], Tensor] = lambda a, b: a * a - b * b) -> Verdict:
    return all_laws(Product, (3, 1), lambda theta: quantity(theta["a"], theta["b"]), size="two parameters")


@claim(
    "paper.R3.1",
    "A law need not be a function of a² − b²",
    statement="A C¹ function can be constant on the components of the level sets of a² − b² and still not be a "
    "function of it.",
    place="Remark 3.1 and Figure 1",
    hypotheses="The example: h = ±(a² − b²)² where a² > b², with the sign of a, and 0 elsewhere.",
    latex=[r"h=\operatorname{sgn}(a)\,(a^2-b^2)^2\ \text{for}\ a^2>b^2,\quad h=0\ \text{otherwise}"],
)
def level_sets(*, power: int = 2) -> Verdict:
    letters = Letters(a=(), b=())
    a, b = letters.scalar("a"), letters.scalar("b")
    base = a * a - b * b
    h = base**power
    slopes = [letters.gradient(h, name)[()] for name in "ab"]
    conserved = identical(b * slopes[0] + a * slopes[1], 0 * a)
    # The pieces meet on a² = b², where value and gradient of both must vanish.
    smooth = all(divmod(part, base)[1] == 0 for part in (h, *slopes))
    here, there = (2**2 - 1**2) ** power, -((2**2 - 1**2) ** power)
    return judged(
        conserved and smooth and here != there,
        "The example is C¹, conserved, and takes two values where a² − b² = 3.",
        "The example is no C¹ law.",
        Evidence(what="b ∂_a h + a ∂_b h = 0, as a polynomial", proof=conserved),
        Evidence(what="h and ∇h are multiples of a² − b²", value=str(smooth), proof=smooth),
        Evidence(what="h at (2, 1) and at (−2, 1)", value=f"{here} and {there}"),
    )


@claim(
    "paper.R2.1",
    "Weight decay",
    statement="With weight decay λ every quadratic law h becomes the law e^{2λt}h: laws with and without decay "
    "correspond.",
    place="Remark 2.1",
    hypotheses="Both factors decay alike. Shown for a model that sees A and B through AB (queries and keys, values and "
    "outputs, linear pairs), for any gradient M of the product.",
    latex=[r"\dot\theta=-\nabla L-\lambda\theta\ \Rightarrow\ h(t)=e^{-2\lambda t}h(0)"],
)
def weight_decay(*, factor: int = 2) -> Verdict:
    letters = Letters(A=(2, 2), B=(2, 2), M=(2, 2), l=())
    a, b, m = (letters[name] for name in "ABM")
    rate = letters.scalar("l")
    da, db = -(m @ b.T) - times(rate, a), -(a.T @ m) - times(rate, b)
    change = da.T @ a + a.T @ da - db @ b.T - b @ db.T
    same = identical(change, times(-factor * rate, a.T @ a - b @ b.T))
    evidence = Evidence(what="d/dt (AᵀA − BBᵀ) = −2λ(AᵀA − BBᵀ), as polynomials of 2 × 2 matrices", proof=same)
    return judged(same, "The law decays at twice the rate of the weights.", "It decays at another rate.", evidence)


Slope = Callable[[Sequence[Fraction], int], list[Fraction]]
"""∇_z ℓ(z, y) for outputs z and target number y."""


def squared_error(z: Sequence[Fraction], y: int) -> list[Fraction]:
    """z − e_y."""
    return [value - int(i == y) for i, value in enumerate(z)]


def cross_entropy(z: Sequence[Fraction], y: int) -> list[Fraction]:
    """softmax − e_y for logits log z, which are fractions when z are."""
    size = sum(abs(value) + 1 for value in z)
    return [(abs(value) + 1) / size - int(i == y) for i, value in enumerate(z)]


def span_dimensions(slope: Slope, outputs: int) -> set[int]:
    """dim V_ℓ(z) at some z: how many independent gradients the targets give."""
    points = [[Fraction(k * (i + 1) ** 2, 3) for i in range(outputs)] for k in (1, 2, 5)]
    return {rank(np.array([slope(z, y) for y in range(outputs)], dtype=object)) for z in points}


@claim(
    "paper.loss",
    "Squared error meets the loss assumption",
    statement="For squared error the gradients in the output span all of R^out, whatever the output is.",
    place="Sections 2 and 3, the assumption on the loss",
    hypotheses="The targets z − e_i are enough, for every z.",
    latex=[r"\mathcal{V}_\ell(z)=\operatorname{span}_y\nabla_z\ell(z,y)=\mathbb{R}^{d_{\text{out}}}"],
)
def squared_error_spans(*, gradient: Callable[[Matrix, Matrix], Matrix] = lambda z, y: z - y) -> Verdict:
    good = True
    for outputs in (1, 2, 3, 5):
        z = Letters(z=(outputs,))["z"]
        found = determinant(
            arranged([list(gradient(z, z - unit)) for unit in np.eye(outputs, dtype=int).astype(object)])
        )
        good &= bool(found != 0) and found.total_degree() == 0
    evidence = Evidence(what="det of ∇_z ℓ(z, z − e_i) is a constant, as a polynomial; 1, 2, 3, 5 outputs", proof=good)
    return judged(good, "The span is everything.", "The span is smaller, or depends on the output.", evidence)


SPAN = """\
import numpy as np
for z in (np.zeros(2), np.log([1.0, 3.0])):
    p = np.exp(z) / np.exp(z).sum()
    slopes = p - np.eye(2)                  # one row for each target class
    print(slopes, "rank", np.linalg.matrix_rank(slopes))
    assert np.linalg.matrix_rank(slopes) < 2 and np.allclose(slopes.sum(1), 0)"""


@claim(
    "paper.loss.experiments",
    "The losses of the experiments meet the assumption",
    statement="The loss that the language and image models of Section 6 are trained with has V_ℓ = R^out too.",
    place="Section 3 against Section 6",
    hypotheses="Those models are trained with cross-entropy. The paper's theorems are about regression.",
    corrected_by="paper.loss.corrected",
)
def cross_entropy_spans(*, slope: Slope = cross_entropy) -> Verdict:
    for outputs in (2, 3, 5):
        dimensions = span_dimensions(slope, outputs)
        if dimensions != {outputs}:
            return refuted(
                "The gradients of cross-entropy sum to zero: their span is 1^⊥, so there are more laws than the "
                "theorems list.",
                Evidence(what=f"exact rank with {outputs} classes", value=str(sorted(dimensions)), limit=str(outputs)),
                witness=Witness(
                    data={"classes": 2, "z": "(0, 0)"},
                    claimed="gradients span R²",
                    found="they are (−1/2, 1/2) and (1/2, −1/2)",
                    numpy=SPAN,
                ),
            )
    return held("The span is everything.", Evidence(what="classes 2, 3, 5", value="full rank", samples=3))


def head() -> nn.Module:
    """A classifier's last layer: three classes of two features."""
    return nn.Linear(2, 3, bias=False)


@claim(
    "paper.loss.corrected",
    "What cross-entropy adds",
    statement="Under cross-entropy a linear head conserves Σ_v W_v over the classes, and nothing else; under "
    "regression nothing.",
    place="completes Section 3",
    latex=[r"\mathcal{V}_\ell=\mathbf{1}^{\perp}\ \Rightarrow\ \sum_v W_v=\text{const}"],
    corrects="paper.loss.experiments",
)
def cross_entropy_head(*, loss: str = "cross_entropy") -> Verdict:
    return all_laws(head, (4, 2), lambda theta: theta["weight"].sum(0), size="three classes of two features", loss=loss)


def recognised(build: Build) -> Quantities:
    """The exact laws that the recognisers read off a module, as one list of numbers."""
    laws = recognize(build().double()).select(lambda symmetry: symmetry.exact)

    def quantities(theta: Parameters) -> Tensor:
        found = [symmetry.kind.coordinates(symmetry.law(theta)).flatten() for symmetry in laws]
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)

    return quantities


def norm_block() -> nn.Module:
    return TransformerBlock(Attention(4, 2), FeedForward(4, 3), bias=False)


@claim(
    "paper.open.norm",
    "Layer norms have a complete list too",
    statement="A pre-norm block with layer norms, attention, a GELU network and residual connections has exactly the "
    "laws of "
    "its attention and, for every channel, the gain of each norm against the columns that read it.",
    place="left open in Section 5",
    hypotheses="Where the paper's complex analysis stops (square roots); d = 4, two heads, three neurons, no biases.",
    latex=[r"\gamma_j^2-\sum_{R}\|R_{:,j}\|^2"],
    slow=True,
)
def norm_complete(*, build: Build = norm_block) -> Verdict:
    return all_laws(build, (5, 4), recognised(norm_block), size="a pre-norm block of d = 4")


class Stack(nn.Module):
    """Two attention layers on a residual stream, without norms."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.first = Attention(2, 1)
        self.second = self.first if shared else Attention(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(x)


def stack_invariants(theta: Parameters) -> Tensor:
    """QᵀQ − KᵀK and VᵀV − OᵀO of both layers."""
    parts = []
    for layer, (plus, minus) in itertools.product(("first", "second"), (("q", "k"), ("v", "o"))):
        a, b = theta[f"{layer}.{plus}.weight"], theta[f"{layer}.{minus}.weight"]
        difference = a @ a.mT - (b @ b.mT if minus == "k" else b.mT @ b)
        rows, columns = torch.triu_indices(2, 2)
        parts.append(difference[rows, columns])
    return torch.cat(parts)


@claim(
    "paper.open.stack",
    "Stacked attention has a complete list too",
    statement="Two attention layers on a residual stream have exactly the laws of the first and those of the second.",
    place="left open in Section 5",
    hypotheses="Where the paper's complex analysis stops (essential singularities); d = 2, one head a layer.",
)
def stack_complete(*, quantities: Quantities = stack_invariants) -> Verdict:
    return all_laws(Stack, (4, 2), quantities, size="two layers of d = 2")
