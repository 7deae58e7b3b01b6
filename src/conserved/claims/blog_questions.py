"""Claims of the blog post: its four open questions, answered by experiment."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved.blocks import DecoderLM, ReluAttention
from conserved.claims.blog import SIZE, norm_difference
from conserved.claims.certified import Parameters, Quantities, all_laws
from conserved.claims.descents import exponent
from conserved.claims.judging import judged, refuted
from conserved.claims.ledger import claim
from conserved.lab.data.embedded import VOCABULARY, sequences
from conserved.verdict import Evidence, Verdict, Witness


class SoftmaxAttention(nn.Module):
    """softmax(X W_QK Xᵀ) X W_V, with one matrix W_QK as in the post."""

    def __init__(self, dim: int = 3, out: int = 1) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.randn(dim, dim) * dim**-0.5)
        self.v = nn.Parameter(torch.randn(dim, out) * dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.qk @ x.mT).softmax(-1) @ x @ self.v


SOFTMAX = """\
import numpy as np
w, v, y = 0.0, 1.0, 0.0                 # tokens X = (1, 0), d = 1; the first output is sigmoid(w) v
s = 1 / (1 + np.exp(-w))
delta = s * v - y                       # 1/2
dw, dv = -delta * v * s * (1 - s), -delta * s
print("change of w^2/2 - v^2/2:", w * dw - v * dv)      # 1/4
assert abs(w * dw - v * dv - 0.25) < 1e-12"""

SOFTMAX_WITNESS = Witness(
    data={"X": "(1, 0)", "W_QK": 0, "W_V": 1, "target of the first token": 0},
    claimed="½W_QK² − ½W_V² does not change",
    found="it changes at the rate 1/4",
    numpy=SOFTMAX,
)


@claim(
    "blog.Q1",
    "Real transformers show the coupling",
    statement="Training a transformer keeps ‖W_Q W_Kᵀ‖² − ‖W_V‖² of every head.",
    place="Open questions, the first",
    hypotheses="A decoder with softmax attention on text, gradient descent to the same flow time with three step "
    "sizes: a law's drift "
    "would vanish with the step.",
    corrected_by="paper.T4.3",
)
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
    return judged(
        order > 0.7,
        "The drift vanishes with the step.",
        "The drift does not depend on the step: the flow itself changes the difference.",
        Evidence(what="order of the drift in the step", value=order, limit=1.0, samples=len(sizes)),
        Evidence(what="drift at the smallest step", value=drift[-1]),
        witness=None if order > 0.7 else SOFTMAX_WITNESS,
    )


@claim(
    "blog.Q2",
    "Softmax attention has such a law",
    statement="With softmax in place of ReLU some law still couples W_QK and W_V.",
    place="Open questions, the second",
    hypotheses="One matrix W_QK, as in the post: then nothing at all is conserved. Factored into W_Q W_Kᵀ, and with "
    "an output "
    "projection, each product has its own law and none couples the two.",
    corrected_by="paper.T4.3.complete",
)
def softmax_law(*, build: Callable[[], nn.Module] = SoftmaxAttention) -> Verdict:
    found = all_laws(build, (5, 3), norm_difference, size=SIZE, witness=SOFTMAX_WITNESS)
    nothing = found == Verdict.REFUTED and found.evidence[0].value == 0
    return refuted("Nothing is conserved.", *found.evidence, witness=found.witness) if nothing else found


class ReluHeads(nn.Module):
    """Σ_h relu(X W_h Xᵀ) X V_h."""

    def __init__(self, heads: int = 2, dim: int = 3) -> None:
        super().__init__()
        self.heads = nn.ModuleList(ReluAttention(dim) for _ in range(heads))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads]).sum(0)


def head_norm_differences(theta: Parameters) -> Tensor:
    """½‖W_h‖² − ½‖V_h‖² for two heads."""
    return torch.cat([norm_difference({name: theta[f"heads.{h}.{name}"] for name in ("qk", "v")}) for h in (0, 1)])


@claim(
    "blog.Q3",
    "Several heads do not interact through the law",
    statement="With several ReLU heads each keeps its own ‖W_h‖² − ‖V_h‖², and there is no further law: no head "
    "constrains another.",
    place="Open questions, the third",
    hypotheses="Two heads, d = 3.",
)
def heads_complete(*, quantities: Quantities = head_norm_differences) -> Verdict:
    return all_laws(ReluHeads, (5, 3), quantities, size="two heads of d = 3")


FUNCTIONAL = """\
import numpy as np
rng = np.random.default_rng(0)
X, W, V = rng.normal(size=(5, 3)), rng.normal(size=(3, 3)), rng.normal(size=(3, 1))
def A(W, V):
    return np.maximum(X @ W @ X.T, 0) @ X @ V
print("outputs differ by", np.abs(A(2 * W, V / 2) - A(W, V)).max())
print("norms", (W ** 2).sum(), (V ** 2).sum(), "and", (4 * W ** 2).sum(), (V ** 2 / 4).sum())
assert np.allclose(A(2 * W, V / 2), A(W, V))"""


def scalar_relu(w: Fraction, v: Fraction, x: Fraction) -> Fraction:
    """relu(x w x) x v."""
    return max(x * w * x, Fraction(0)) * x * v


@claim(
    "blog.Q4",
    "The coupled norms are functional",
    statement="The coupling of the norms is one of functions: what the pattern and the values compute determines "
    "their norms.",
    place="Open questions, the fourth",
    hypotheses="The law is there because of a symmetry: the same function is computed with any ratio of the two norms.",
)
def functional_coupling(*, attention: Callable[[Fraction, Fraction, Fraction], Any] = scalar_relu) -> Verdict:
    inputs = [Fraction(n, 2) for n in range(-4, 5)]
    w, v = Fraction(1), Fraction(6)
    other = (2 * w, v / 2)
    same = all(attention(w, v, x) == attention(*other, x) for x in inputs)
    witness = Witness(
        data={"(W_QK, W_V)": "(1, 6) and (2, 3)", "X": "any"},
        claimed="different norms, different functions",
        found="norms 1, 6 and 2, 3, and one function: relu(W_QK x²) x W_V = 6 relu(x²) x",
        numpy=FUNCTIONAL,
    )
    return judged(
        not same,
        "Different norms belong to different functions.",
        "The same function has every ratio of norms; the law says where on that curve training stays, not what is "
        "computed.",
        Evidence(what="inputs on which both compute the same", value=len(inputs) if same else 0, samples=len(inputs)),
        witness=witness if same else None,
    )
