"""Claims of the paper: the bound (9) and the rate τ²k are two statements, for Section 6 and for Figures 2 and 3.

Within the bound: the drift of a run is at most C_h C_L/2 Σ τ_i², at every recorded step, small and at full size.
At the rate: the drift grows as Σ τ_i² does, with exponent one, from the first step to the last. Where gradients are
constant the two coincide, and every smooth function of k is linear early. So a rate is judged over a whole run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from conserved.inference import recognize
from conserved.laws import LawSet
from conserved.verdict import Evidence, Verdict, Witness
from conserved_papers.blocks import Attention, FeedForward, SwiGLU
from conserved_papers.blocks.feedforward import ActivationName
from conserved_papers.claims import full_size
from conserved_papers.claims import paper_blocks as block
from conserved_papers.claims.certified import Build, certificate
from conserved_papers.claims.descents import Watch, constant, drifts, exponent, monitored, scattered
from conserved_papers.claims.judging import by_steps, confirm, decide, refute
from conserved_papers.claims.paper_experiments import router_sum
from conserved_papers.claims.polynomials import Letters, identical
from conserved_papers.claims.registry import claim

RATE_TOLERANCE = 0.2
"""How far an exponent may be from that of a rate. The narrowest windows of the stored runs are a factor of two long;
a drift that doubles its gradients there has an exponent of 1 ± 0.5."""


@claim("paper.S6.constant")
def constant_bound(*, power: int = 2) -> Verdict:
    tau, k = Letters(t=(), k=())
    # Σ_{i<k} τ² = kτ²: the sum grows by τ² with every step and starts at zero.
    grows = identical((k + 1) * tau**2 - k * tau**2, tau**power)
    return by_steps(
        "The bound is (C_h C_L/2)·τ²k.",
        "The sum is another one.",
        ("Σ_{i<k} τ² = kτ²: zero for k = 0, and one more step adds τ², as polynomials", grows),
    )


SETTLES = """\
import numpy as np
rng = np.random.default_rng(0)
a, b, tau, h, moved = 2.0, 0.3, 0.05, 3.91, {}     # h = a^2 - b^2
for k in range(1, 4001):
    x = rng.normal(size=8)                          # mini-batches; the target 2x can be met
    slope = np.mean((a * b * x - 2 * x) * x)
    a, b = a - tau * slope * b, b - tau * slope * a
    moved[k] = abs(a * a - b * b - h)
print("deviation after 400 and 4,000 steps:", moved[400], moved[4000])
assert moved[4000] < 1.001 * moved[400]             # ten times the steps, the same deviation"""


@claim("paper.S6.constant.rate")
def constant_rate(*, counts: Sequence[int] = (100, 200, 400), size: float = 0.05) -> Verdict:
    result = drifts(block.attention, (5, 4), block.gram_differences, constant(size), counts, stochastic=False)
    growth = exponent(counts, result)
    witness = Witness(
        data={"f": "abx", "target": "2x", "τ": 0.05, "k": "400 and 4,000"},
        claimed="ten times the steps, ten times the deviation",
        found="the same deviation: gradients vanish where the target is met",
        numpy=SETTLES,
    )
    return decide(
        abs(growth - 1) < RATE_TOLERANCE,
        "The deviation grows linearly.",
        "The deviation does not grow linearly: (9) is a bound, and where gradients settle the deviation stops.",
        Evidence(what="exponent in the number of steps, to be within 0.2 of 1", value=growth, samples=len(counts)),
        witness=witness,
    )


@claim("paper.S6.early")
def early_rate(*, watch: Watch = block.gram_differences) -> Verdict:
    sizes, counts = (0.0001, 0.0002, 0.0004), (10, 20, 40, 80)
    runs = [
        [
            sum(pair) / 2
            for pair in zip(
                *(drifts(block.attention, (5, 4), watch, constant(s), counts, stochastic=True, seed=n) for n in (0, 1)),
                strict=True,
            )
        ]
        for s in sizes
    ]
    in_steps, in_size = exponent(counts, runs[1]), exponent(sizes, [run[-1] for run in runs])
    return decide(
        abs(in_steps - 1) < RATE_TOLERANCE and abs(in_size - 2) < RATE_TOLERANCE,
        "The fitted exponents are 1 in k and 2 in τ.",
        "The fitted exponents are others.",
        Evidence(what="exponent in the number of steps, to be within 0.2 of 1", value=in_steps, samples=8),
        Evidence(what="exponent in the step size, to be within 0.2 of 2", value=in_size, samples=6),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FigurePanel:
    """A panel of Figure 2 or 3: the block at a small size, the batches, the stored run at full size and its laws."""

    build: Build
    fresh: bool
    recipe: str
    laws: tuple[str, ...]
    measured: bool = True
    """Whether rounding is small against the drift in the stored run."""


ATTENTION: Build = partial(Attention, 4, 2)
GATED: Build = partial(SwiGLU, 4, 5)
ROTARY: Build = partial(Attention, 4, 1, rotary=True)
HEADS = ("query_key", "value_output")

PANELS = {
    "paper.Fig2a": FigurePanel(build=ATTENTION, fresh=True, recipe="imagenet", laws=HEADS),
    "paper.Fig2b": FigurePanel(build=GATED, fresh=True, recipe="imagenet", laws=("gated_neurons",)),
    "paper.Fig2c": FigurePanel(build=ROTARY, fresh=True, recipe="wikitext", laws=HEADS),
    "paper.Fig3a": FigurePanel(build=ATTENTION, fresh=False, recipe="cifar", laws=HEADS),
    "paper.Fig3b": FigurePanel(build=GATED, fresh=False, recipe="cifar", laws=("gated_neurons",)),
    "paper.Fig3c": FigurePanel(build=ROTARY, fresh=False, recipe="penn", laws=HEADS, measured=False),
}


def bound_of(panel: FigurePanel) -> Callable[..., Verdict]:
    """Return a check that the laws of a panel stay within the bound (9), at a small size and in the stored run."""

    def check(*, laws_of: Callable[[nn.Module], LawSet] = recognize) -> Verdict:
        worst, count = 0.0, 0
        for step in (0.05, 0.001):
            optimizer_of = partial(torch.optim.SGD, lr=step)
            for row in monitored(panel.build, optimizer_of, steps=100, fresh=panel.fresh, laws_of=laws_of).bounds():
                worst, count = max(worst, row.observed / row.bound), count + 1
        small = Evidence(
            what="largest drift over the bound, 100 steps of 0.05 and 0.001", value=worst, limit=1.0, samples=count
        )
        stored = (full_size.share_of_bound if panel.measured else full_size.rounding)(panel.recipe, panel.laws)
        good = worst <= 1 and (not panel.measured or full_size.within_bound(panel.recipe, panel.laws))
        return decide(
            good, "No law drifts further than the bound.", "Some law drifts further than the bound.", small, stored
        )

    return check


def rate_of(panel: FigurePanel) -> Callable[..., Verdict]:
    """Return a check that the drift of a panel's laws grows as Σ τ_i² through the stored run at full size."""

    def check(*, exponents: Callable[[str, str], Sequence[float]] = full_size.in_squares) -> Verdict:
        result = {law: list(exponents(panel.recipe, law)) for law in panel.laws}
        evidence = [
            Evidence(
                what=f"exponent of the drift of exact steps in Σ τ_i², {law}, early, in the middle and late, "
                f"each to be within {RATE_TOLERANCE} of 1, {full_size.run_name(panel.recipe)}",
                value=", ".join(f"{value:.2f}" for value in values),
            )
            for law, values in result.items()
        ]
        if all(abs(value - 1) <= RATE_TOLERANCE for values in result.values() for value in values):
            return confirm("The drift of exact steps grows as Σ τ_i² to the last step of that run.", *evidence)
        return refute("The drift leaves the rate as gradients shrink or grow; the bound holds.", *evidence)

    return check


for _code, _panel in PANELS.items():
    claim(_code)(bound_of(_panel))
    claim(f"{_code}.rate")(rate_of(_panel))


PROPORTIONAL = """\
rates = [1e-3, 2e-3, 3e-3]                           # ImageNet-1K, Appendix D
bounds = [rate ** 2 for rate in rates]               # (9) at a fixed number of steps, up to a constant
print("rates times", rates[2] / rates[0], "bounds times", bounds[2] / bounds[0])
assert abs(bounds[2] / bounds[0] - 9) < 1e-9         # not 3"""


@claim("paper.S6.proportional")
def proportional_bounds(*, power: int = 2) -> Verdict:
    tau, factor = Letters(t=(), c=())
    linear = identical((factor * tau) ** power, factor * tau**power)
    return decide(
        linear,
        "The bound is proportional to the learning rate.",
        "(9) makes the bound quadratic in the learning rate: three times the rate, nine times the bound.",
        Evidence(what="(cτ)² against c·τ², as polynomials", value="equal" if linear else "different", proof=True),
        witness=Witness(data={"rates": "1e-3, 3e-3"}, claimed="bound × 3", found="bound × 9", numpy=PROPORTIONAL),
        scope="all sizes",
    )


@claim("paper.E1.proportional")
def first_order_signature(*, build: Build = block.sigmoid_mixture) -> Verdict:
    sizes = (0.0005, 0.001, 0.002)

    def order(model: Build, watch: Watch) -> float:
        result = [drifts(model, (5, 3), watch, constant(s), (40,), stochastic=False)[0] for s in sizes]
        return exponent(sizes, result)

    gate, experts = order(build, router_sum), order(build, block.expert_differences)
    return decide(
        abs(gate - 1) < RATE_TOLERANCE and abs(experts - 2) < RATE_TOLERANCE,
        "At a fixed number of steps Σ_i W_i moves in proportion to the step size, and the experts' laws to its square.",
        "The exponents are others.",
        Evidence(what="exponent of the drift of Σ_i W_i in τ, to be within 0.2 of 1", value=gate, samples=3),
        Evidence(what="exponent of the drift of the experts' laws in τ, to be within 0.2 of 2", value=experts,
                 samples=3),
    )  # fmt: skip


BOUNDED = """\
import numpy as np
a, b, tau, bound = 1.0, 0.5, 0.1, 0.0
start = a * a + b * b                                # not conserved
for k in range(200):                                 # L = (ab - 2)^2 / 2
    g = (a * b - 2) * np.array([b, a])
    bound += tau * 2 * np.hypot(a, b) * np.linalg.norm(g) + tau ** 2 * g @ g
    a, b = a - tau * g[0], b - tau * g[1]
    assert abs(a * a + b * b - start) <= bound + 1e-12
print("moved", a * a + b * b - start, "bound", bound)"""


@claim("paper.S6.unbounded")
def bounded_others(*, factor: float = 1.0) -> Verdict:
    """Hold ‖θ‖², which is not conserved and has Hessian 2, against Σ τ‖∇h‖‖G‖ + (C_h/2) Σ τ²‖G‖²."""
    worst = 0.0
    for step in (0.05, 0.01):
        model = scattered(block.attention)
        x, y = (torch.randn(4, 5, 4, dtype=torch.float64) for _ in range(2))
        weights = list(model.parameters())
        start, limit = _squares(weights), 0.0
        for _ in range(60):
            gradients = torch.autograd.grad((model(x) - y).square().mean(), weights)
            size = _squares(gradients) ** 0.5
            limit += factor * (step * 2 * _squares(weights) ** 0.5 * size + step**2 * size**2)
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.sub_(step * gradient)
            worst = max(worst, abs(_squares(weights) - start) / limit)
    return decide(
        worst > 1,
        "They leave every such bound.",
        "Every smooth quantity has a bound of first order, |Δh| ≤ Σ τ‖∇h‖‖G‖ + (C_h/2) Σ τ²‖G‖². What it lacks is one "
        "of second order.",
        Evidence(what="largest |Δ‖θ‖²| over Σ τ‖∇h‖‖G‖ + Σ τ²‖G‖²", value=worst, limit=1.0, samples=120),
        witness=Witness(
            data={"f": "abx", "h": "a² + b²", "τ": 0.1, "steps": 200},
            claimed="no bound on its deviation",
            found="it stays below Σ τ‖∇h‖‖G‖ + Σ τ²‖G‖² at every step",
            numpy=BOUNDED,
        ),
    )


def _squares(tensors: Sequence[Tensor]) -> float:
    return float(sum(tensor.detach().square().sum() for tensor in tensors))


DIVERGES = """\
a, b, tau = 3.0, 3.0, 1.0
for k in range(6):                     # f = abx at x = 1, target 0; steps tau / (k + 1)
    a, b = a - tau / (k + 1) * a * b * b, b - tau / (k + 1) * a * a * b
print("a and b after six steps:", a, b)
assert min(abs(a), abs(b)) > 1e100"""


def softplus_descent(count: int) -> float:
    """Return θ after so many steps 1/(k + 1) on log(1 + e^{−θ}) from 0: it grows without limit, because Σ 1/(k + 1)
    does.
    """
    theta = 0.0
    for k in range(count):
        theta += 1 / (1 + math.exp(theta)) / (k + 1)
    return theta


@claim("paper.S6.ensures")
def ensures_convergence(*, grad: Callable[[float], float] = lambda theta: theta**3) -> Verdict:
    """The toy example f = abx at x = 1 with the target 0: where a = b = θ, both slopes are θ³."""
    theta = 3.0
    for k in range(6):
        theta -= grad(theta) / (k + 1)
    return decide(
        abs(theta) < 3.0,
        "The iterates come closer to the minimum.",
        "The steps do not ensure it: gradients of the paper's networks grow faster than linearly, and from a large "
        "start the toy example diverges. Bounded gradients, which (9) assumes, bound the drift; convergence needs "
        "more: the gradient of log(1 + e^{−θ}) is bounded, and θ_k → ∞.",
        Evidence(what="|a| = |b| after six steps from 3, f = abx, τ_0 = 1", value=abs(theta), limit=3.0),
        Evidence(what="θ_k of the loss log(1 + e^{−θ}) from 0, τ_0 = 1, after 10, 1,000 and 100,000 steps",
                 value=", ".join(f"{softplus_descent(count):.2f}" for count in (10, 1_000, 100_000))),
        witness=Witness(
            data={"f": "abx", "x": 1, "target": 0, "a = b": 3, "τ_0": 1},
            claimed="a_k, b_k converge",
            found="beyond 1e100 after six steps",
            numpy=DIVERGES,
        ),
    )  # fmt: skip


SATURATES = """\
import numpy as np
k = 1000
squares = (1 - np.arange(k) / k) ** 2                # "linear", as common schedulers have it: down to zero
print("share of the bound that the last half adds:", squares[k // 2:].sum() / squares.sum())
assert squares[k // 2:].sum() / squares.sum() < 0.13 # an eighth: the bound saturates"""


@claim("paper.S6.linear")
def linear_schedule(*, end: float = 0.0) -> Verdict:
    k = 1000
    squares = [(1 - (1 - end) * i / k) ** 2 for i in range(k)]
    share = sum(squares[k // 2 :]) / sum(squares)
    return decide(
        share > 0.3,
        "The second half of a run adds a good part of the bound.",
        "A linear schedule that ends at zero is one that decays to zero: its second half adds an eighth of Σ τ². The "
        "paper does not say where its schedule ends.",
        Evidence(what="share of Σ τ_i² in the second half of a run, above 0.3", value=share, limit=0.3),
        witness=Witness(data={"k": k, "end": end}, claimed="no saturation", found="1/8 of Σ τ²", numpy=SATURATES),
    )


FULL_BATCH = """\
cifar, penn = 5_000 * 10, 192 * 18 * 256             # batch x accumulation (x tokens)
print("CIFAR-10:", cifar, "of 50000 images; Penn Treebank:", penn, "of 887521 words")
assert cifar == 50_000 and penn < 887_521"""


@claim("paper.D.fullbatch")
def full_batches(*, words: int = 887_521) -> Verdict:
    penn = 192 * 18 * 256
    return decide(
        penn >= words,
        "Both batches are full.",
        f"CIFAR-10's batch is full: 5,000 · 10 = 50,000 images. Penn Treebank's has 192 · 18 · 256 = {penn:,} tokens, "
        "and the training text has 887,521 words, 929,589 tokens with line ends: 0.3 to 5 % are left out.",
        Evidence(what="tokens of a Penn Treebank batch", value=penn, limit=words, proof=True),
        witness=Witness(
            data={"batch": 192, "accumulation": 18, "length": 256},
            claimed="all of the training text",
            found=f"{penn:,} of {words:,} words",
            numpy=FULL_BATCH,
        ),
        scope="the printed figures",
    )


COUNTS = """\
import numpy as np
rng, s = np.random.default_rng(0), lambda z: 1 / (1 + np.exp(-z))
def laws(act, slope, d=3, n=4):                      # D minus the rank of the gradients of A act(B x)
    A, B, rows = rng.normal(size=(d, n)), rng.normal(size=(n, d)), []
    for x, v in ((x, v) for x in rng.normal(size=(60, d)) for v in np.eye(d)):
        rows.append(np.r_[np.outer(v, act(B @ x)).ravel(), np.outer((A.T @ v) * slope(B @ x), x).ravel()])
    return 2 * d * n - np.linalg.matrix_rank(np.array(rows))
relu, silu = laws(lambda z: z * (z > 0), lambda z: z > 0), laws(lambda z: z * s(z), lambda z: s(z) * (1 + z * s(-z)))
print("laws with ReLU and with SiLU:", relu, silu)
assert (relu, silu) == (4, 0)"""


@claim("paper.E1.activation")
def activation_matters(*, activations: Sequence[ActivationName] = ("relu", "gelu", "silu")) -> Verdict:
    counts = [certificate(partial(FeedForward, 3, 4, name), (5, 3)).at_most for name in activations]
    return decide(
        len(set(counts)) == 1,
        "The activations leave equally many laws.",
        "The same network has 4 laws with ReLU and none with GELU or SiLU: activations decide.",
        Evidence(what=f"laws with {', '.join(activations)}, certified", value=str(counts), proof=True),
        witness=Witness(
            data={"network": "A act(Bx), d = 3, 4 neurons"},
            claimed="laws do not depend on the activation",
            found="4 with ReLU, 0 with SiLU",
            numpy=COUNTS,
        ),
        scope="at d = 3 and 4 neurons",
    )
