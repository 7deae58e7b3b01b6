"""Claims of the reader's summary that the paper does not make itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved.blocks import Attention, FeedForward, SwiGLU
from conserved.claims import paper_blocks as block
from conserved.claims.certified import Build, all_laws, certificate, laws_hold
from conserved.claims.descents import drifts, scattered
from conserved.claims.judging import held, judged, refuted
from conserved.claims.ledger import claim
from conserved.claims.paper_blocks import EXPERTS, FFN
from conserved.claims.paper_laws import SIGMOID_WITNESS
from conserved.track import Monitor
from conserved.verdict import Evidence, Verdict, Witness


def relu_network() -> nn.Module:
    return FeedForward(3, 4, "relu")


RELU = """\
import numpy as np
def f(a, b, x):
    return a * np.maximum(b * x, 0)           # one ReLU neuron, no gate
a, b, s = 3.0, 2.0, 5.0
x = np.linspace(-2, 2, 9)
print(f(a, b, x), f(a * s, b / s, x))         # the same: a^2 - b^2 is conserved
slope = np.array([np.maximum(b * x, 0), a * x * (b * x > 0)])
assert np.allclose(f(a, b, x), f(a * s, b / s, x)) and np.allclose(a * slope[0] - b * slope[1], 0)"""


@claim(
    "summary.gating",
    "Gating is where the laws of networks come from",
    statement="Nontrivial laws of a feed-forward network need a multiplicative gate: without one there is none, as "
    "for GELU "
    "and SiLU.",
    place="Highlights, the second",
    corrected_by="summary.gating.corrected",
)
def gating_only(*, ungated: Build = relu_network) -> Verdict:
    found = certificate(ungated, (5, 3))
    if found.at_most == 0 and found.verdict == Verdict.PROVED:
        return held("The network without a gate has no law.", Evidence(what="laws at most", value=0, proof=True))
    return refuted(
        "A ReLU neuron has no gate and conserves ‖out column‖² − ‖in row‖².",
        Evidence(what=f"laws of a ReLU network, {FFN}", value=found.found, limit=0),
        witness=Witness(
            data={"f": "a·relu(bx)", "a": 3, "b": 2},
            claimed="no law",
            found="a ∂f/∂a − b ∂f/∂b = 0 for all x, so a² − b² is conserved",
            numpy=RELU,
        ),
    )


class Gated(nn.Module):
    """A(act(Bx) ⊙ Cx): gated by any activation."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 4, bias=False)
        self.up = nn.Linear(3, 4, bias=False)
        self.down = nn.Linear(4, 3, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


def gelu_gated() -> nn.Module:
    return Gated(F.gelu)


def sigmoid_gated() -> nn.Module:
    return Gated(torch.sigmoid)


@claim(
    "summary.gating.corrected",
    "Every linear branch gives one law a neuron",
    statement="A gated network that is linear in one branch has exactly the laws ‖A_:,i‖² − ‖C_i,:‖², whatever "
    "activates the gate.",
    place="replaces the second highlight",
    hypotheses="Gates by GELU and by a sigmoid; SiLU is Theorem 4.2. What makes a law is that the output does not "
    "change when a "
    "neuron's two sides are scaled against each other.",
    corrects="summary.gating",
)
def gated_complete(*, builds: tuple[Build, ...] = (gelu_gated, sigmoid_gated)) -> Verdict:
    verdicts = [all_laws(build, (5, 3), block.neuron_differences, size=FFN) for build in builds]
    bad = [verdict for verdict in verdicts if verdict != Verdict.PROVED]
    return bad[0] if bad else held(verdicts[0].message, *(item for verdict in verdicts for item in verdict.evidence))


@claim(
    "summary.moe",
    "All four kinds of mixture share their laws",
    statement="Dense and sparse mixtures, under softmax and under normalised-sigmoid gates, all conserve Σ_i W_i.",
    place="Key designs, the third; the table of invariants",
    corrected_by="paper.T4.7.corrected",
    slow=True,
)
def four_mixtures(
    *,
    builds: tuple[Build, ...] = (
        block.mixture,
        block.sparse_mixture,
        block.sigmoid_mixture,
        block.sparse_sigmoid_mixture,
    ),
) -> Verdict:
    verdicts = [laws_hold(build, (4, 3), block.mixture_invariants, size=EXPERTS) for build in builds]
    broken = [verdict for verdict in verdicts if verdict == Verdict.REFUTED]
    if broken:
        return refuted(
            "The softmax gates do, the sigmoid gates do not.",
            Evidence(what="mixtures whose laws hold", value=f"{len(builds) - len(broken)} of {len(builds)}"),
            *broken[0].evidence,
            witness=SIGMOID_WITNESS,
        )
    return held("All do.", *(item for verdict in verdicts for item in verdict.evidence))


class Deep(nn.Module):
    """Two hidden layers: W₃ act(W₂ act(W₁ x))."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(2, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2, bias=False)]
        )
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.layers
        return third(self.activation(second(self.activation(first(x)))))


def deep_gelu() -> nn.Module:
    return Deep(F.gelu)


@claim(
    "summary.deep",
    "Deeper networks are open",
    statement="Networks with more hidden layers have a complete list too: with two GELU layers it is empty.",
    place="Limitations, the third",
    hypotheses="The summary calls it unsolved; at this size it is settled. 2 inputs, 3 and 3 neurons, 2 outputs.",
    latex=[r"f=W_3\operatorname{GELU}(W_2\operatorname{GELU}(W_1x))"],
)
def deep_complete(*, build: Build = deep_gelu) -> Verdict:
    return all_laws(build, (4, 2), None, size="two hidden layers of 3")


def one_plane() -> nn.Module:
    return Attention(3, 1, head_dim=2, rotary=True)


def two_planes() -> nn.Module:
    return block.rotary_attention()


@claim(
    "summary.rope",
    "Rotary positions leave one number a plane",
    statement="Of the m(2m + 1) numbers of QᵀQ − KᵀK of a head of m planes, rotary positions leave m: one for each "
    "plane, not a "
    "2 × 2 block each.",
    place="Highlights, the third",
    hypotheses="m = 1 and m = 2.",
)
def rotary_degrades(*, kept: Callable[[int], int] = lambda planes: planes) -> Verdict:
    evidence, good = [], True
    for planes, build, shape, outputs in ((1, one_plane, (5, 3), 3), (2, two_planes, (5, 4), 10)):
        found = certificate(build, shape)
        numbers = found.at_most - outputs
        good &= found.verdict == Verdict.PROVED and found.complete and numbers == kept(planes)
        what = f"numbers of queries and keys with {planes} plane{'s' * (planes > 1)}, of {planes * (2 * planes + 1)}"
        evidence.append(Evidence(what=what, value=numbers, limit=kept(planes), proof=found.verdict == Verdict.PROVED))
    return judged(good, "One number is left for every plane.", "Another number is left.", *evidence)


LINEAR = """\
import numpy as np
rng = np.random.default_rng(0)
W, E, x = rng.normal(size=(3, 4)), rng.normal(size=3), rng.normal(size=4)
start = W.sum(0)
for step in range(100):                      # huge steps, loss y^2 / 2 with y = softmax(W x) . E
    g = np.exp(W @ x - (W @ x).max()); g /= g.sum()
    W = W - 10.0 * (g @ E) * np.outer(g * (E - g @ E), x)
print("sum of rows moved by", np.abs(W.sum(0) - start).max(), "W itself by", np.abs(W).max())
assert np.abs(W.sum(0) - start).max() < 1e-9"""


@claim(
    "summary.discrete",
    "Discrete training conserves only approximately",
    statement="Under discrete gradient descent the laws are conserved only approximately, with an error that "
    "accumulates.",
    place="Limitations, the second",
    corrected_by="paper.Fig2d.corrected",
)
def only_approximate(*, build: Build = block.mixture) -> Verdict:
    drift = drifts(build, (5, 3), lambda theta: theta["router.weight"].sum(0), lambda _: 0.5, (100,), stochastic=True)[
        0
    ]
    if drift < 1e-12:
        return refuted(
            "Linear laws are conserved exactly at any step size; only quadratic ones accumulate an error.",
            Evidence(what="relative drift of Σ_i W_i after 100 steps of size 0.5", value=drift, limit=1e-12),
            witness=Witness(
                data={"router": "3 experts of 4 inputs", "step": 10, "steps": 100},
                claimed="Σ_i W_i deviates",
                found="it stays, to rounding",
                numpy=LINEAR,
            ),
        )
    return held("It deviates.", Evidence(what="relative drift after 100 steps", value=drift))


@claim(
    "summary.optimizers",
    "Momentum and adaptive optimizers",
    statement="Under momentum and Adam the drift has a part of first order, which the bound of equation (9) leaves "
    "out, and an exact "
    "account of every step remains: observed = first order + second order, to rounding.",
    place="Limitations, the second, asks for it",
    hypotheses="Twenty steps on attention and SwiGLU; the account is Δh = −μ(θ,U) − μ(U,θ) + μ(U,U).",
    latex=[r"h(\theta-U)-h(\theta)=-\mu(\theta,U)-\mu(U,\theta)+\mu(U,U)"],
)
def optimizers(
    *,
    make: tuple[Callable[[list[Tensor]], torch.optim.Optimizer], ...] = (
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.01),
    ),
) -> Verdict:
    residual, share, count = 0.0, float("inf"), 0
    for build in (lambda: Attention(4, 2), lambda: SwiGLU(4, 5)):
        for optimizer_of in make:
            model = scattered(build)
            optimizer = optimizer_of(list(model.parameters()))
            monitor = Monitor(model, optimizer)
            for _ in range(20):
                optimizer.zero_grad()
                x, y = (torch.randn(6, 5, 4, dtype=torch.float64) for _ in range(2))
                (model(x) - y).square().mean().backward()
                optimizer.step()
                monitor.step()
            rows = monitor.ledger()
            count += len(rows)
            size = max(abs(row.observed) for row in rows)
            residual = max(residual, max(abs(row.residual) for row in rows) / size)
            share = min(share, max(abs(row.first_order) for row in rows) / size)
    return judged(
        residual < 1e-10 and share > 0.01,
        "There is a first-order part, and the account adds up.",
        "There is no first-order part, or the account does not add up.",
        Evidence(what="largest residual of the account, relative", value=residual, limit=1e-10, samples=count),
        Evidence(what="least share of the first order", value=share, limit=0.01, samples=count),
    )
