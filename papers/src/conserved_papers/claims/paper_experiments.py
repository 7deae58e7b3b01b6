"""Claims of the paper: what its experiments track, on which architecture, and what Figures 2(d), 4 and 5 show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor, nn

from conserved.certificates.proof import departure, random_fields
from conserved.inference import recognize
from conserved.laws import LawSet
from conserved.verdict import Evidence, Verdict, Witness
from conserved_papers.blocks import Attention, MixtureOfExperts, SwiGLU
from conserved_papers.claims import full_size
from conserved_papers.claims import paper_blocks as block
from conserved_papers.claims.certified import Build, Parameters, Quantities, all_laws, certificate, forms_of, laws_hold
from conserved_papers.claims.descents import Watch, constant, drifts, exponent, scattered
from conserved_papers.claims.judging import by_steps, decide, refute
from conserved_papers.claims.paper_blocks import EXPERTS, FFN, TWO_HEADS, TWO_PLANES
from conserved_papers.claims.paper_laws import mixture_argument
from conserved_papers.claims.polynomials import Letters, identical
from conserved_papers.claims.registry import claim
from conserved_papers.lab.order import descend, drift_orders


def normed_rotary_attention() -> nn.Module:
    """Queries and keys normalised before they are rotated, as in Qwen-3; ε = 0 so that its laws are exact."""
    return Attention(4, 1, rotary=True, qk_norm=True, eps=0.0)


def query_key_planes(theta: Parameters) -> Tensor:
    """Return ‖Q^(j)‖² − ‖K^(j)‖² for both planes, the laws of Theorem 4.4 for queries and keys."""
    q, k = (theta[f"{name}.weight"].unflatten(0, (-1, 2)).square().sum((1, 2)) for name in "qk")
    return q - k


def normed_invariants(theta: Parameters) -> Tensor:
    """Return ‖Q‖², ‖K‖², the gains' ‖γ_q^(j)‖² − ‖γ_k^(j)‖², and VᵀV − OᵀO."""
    q, k = theta["q.weight"].square().sum(), theta["k.weight"].square().sum()
    gains = [theta[f"{name}_norm.weight"].unflatten(0, (-1, 2)).square().sum(1) for name in "qk"]
    v, o = theta["v.weight"], theta["o.weight"]
    return torch.cat([torch.stack((q, k)), gains[0] - gains[1], block.upper(v @ v.mT - o.mT @ o)])


@claim("paper.S6.qwen3")
def qwen_law(*, build: Build = normed_rotary_attention) -> Verdict:
    result = laws_hold(build, (5, 4), query_key_planes, size=TWO_PLANES)
    says, otherwise = "Some of the differences change: balls exclude zero.", "The differences are conserved."
    return decide(result == Verdict.REFUTED, says, otherwise, *result.evidence, scope=f"at {TWO_PLANES}")


@claim("paper.S6.qwen3.complete")
def qwen_complete(*, quantities: Quantities = normed_invariants) -> Verdict:
    return all_laws(normed_rotary_attention, (5, 4), quantities, size=TWO_PLANES)


def router_sum(theta: Parameters) -> Tensor:
    """Return Σ_i W_i."""
    return theta["router.weight"].sum(0)


SIZES = (0.0002, 0.0004, 0.0008)

STILL = """\
import numpy as np
g, E = np.array([2.0, 1.0]) / 3, np.array([1.0, 0.0])     # softmax weights and expert outputs at x = 1
y = g @ E
slope = g * (E - y)                    # the gradient of y in W_1 and W_2: 2/9 and -2/9
print("gradient", slope)
for tau in (0.01, 1.0, 100.0):
    print("step", tau, "moves W_1 + W_2 by", -tau * slope.sum())
    assert abs(tau * slope.sum()) < 1e-12"""


def gating_drift(*, watch: Watch = router_sum, stochastic: bool = True) -> Verdict:
    """Return how a quantity of a softmax mixture drifts after 60 steps of three sizes."""
    result = [drifts(block.mixture, (5, 3), watch, constant(s), (60,), stochastic=stochastic)[0] for s in SIZES]
    if max(result) < 1e-13:
        return refute(
            "A linear law does not drift under gradient descent, at any step size; what is seen is rounding or "
            "another quantity (see paper.E2.rowsums).",
            Evidence(what="largest relative drift over three step sizes", value=max(result), limit=1e-13, samples=3),
            full_size.drifted("wikitext" if stochastic else "penn", "shift"),
            witness=Witness(
                data={"g": "(2/3, 1/3)", "expert outputs": "(1, 0)", "x": 1},
                claimed="W_1 + W_2 moves by an amount of order τ²",
                found="∂y/∂W_1 + ∂y/∂W_2 = 2/9 − 2/9 = 0, so it does not move, for every τ",
                numpy=STILL,
            )
            if stochastic
            else None,
        )
    order = exponent(SIZES, result)
    evidence = Evidence(what="exponent in the step size, within 0.4 of", value=order, limit=2.0, samples=3)
    return decide(abs(order - 2) < 0.4, "It grows as τ².", "It grows otherwise.", evidence)


claim("paper.Fig2d")(gating_drift)
claim("paper.Fig3d")(partial(gating_drift, stochastic=False))


@claim("paper.Fig2d.corrected")
def gating_still(*, build: Build = block.mixture) -> Verdict:
    exact = laws_hold(build, (4, 3), router_sum, size=EXPERTS)
    result = [drifts(build, (5, 3), router_sum, constant(s), (60,), stochastic=True)[0] for s in SIZES]
    return by_steps(
        "The law is linear, so that is all: no step along a multiple of gradients moves it.",
        "It moves.",
        mixture_argument()[0],
        (
            f"the output of the block does not move along Σ_i W_i (symbolic argument, {EXPERTS})",
            exact == Verdict.PROVED,
        ),
        beside=[Evidence(what="largest relative drift, three step sizes", value=max(result), limit=1e-13, samples=3)],
    )


DRIFTING = """\
import numpy as np
def gate(W):
    return 1 / (1 + np.exp(-W)) / (1 / (1 + np.exp(-W))).sum()
W, E, h = np.log([1.0, 1 / 3]), np.array([1.0, 0.0]), 1e-6     # loss y = g . E at x = 1
slope = np.array([(gate(W + d) @ E - gate(W - d) @ E) / (2 * h) for d in h * np.eye(2)])
for tau in (0.4, 0.2, 0.1):
    print("step", tau, "moves W_1 + W_2 by", -tau * slope.sum())
assert abs(-slope.sum() - 1 / 18) < 1e-6       # tau/18: of first order, not tau^2"""


def _router_law(model: nn.Module) -> LawSet:
    """Return Σ_i W_i as a law set, whether or not the model has it as a law."""
    pattern = recognize(MixtureOfExperts(3, 2, 3)).select(lambda symmetry: "router" in symmetry.name)
    return LawSet(symmetries=pattern.symmetries, parameters=dict(model.named_parameters()))


@claim("paper.E1")
def sigmoid_drift(*, build: Build = block.sigmoid_mixture) -> Verdict:
    model = scattered(build)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(16, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    steps = (0.04, 0.02, 0.01, 0.005)
    runs = [descend(model, lambda net: (net(x) - y).square().mean(), _router_law, step=s, time=4.0) for s in steps]
    ((_, order),) = drift_orders(runs).items()
    drift = next(iter(runs[-1].drift.values()))
    witness = Witness(
        data={"n": 2, "x": 1, "W": "(log 1, log 1/3)", "expert outputs": "(1, 0)", "loss": "the output"},
        claimed="one step moves W_1 + W_2 by an amount of order τ²",
        found="it moves by τ/18",
        numpy=DRIFTING,
    )
    good = drift < 1e-13 or order > 0.7
    return decide(
        good,
        "The deviation vanishes with the step.",
        "The deviation is the same at every step size: gradient flow itself changes the sum.",
        Evidence(what="order of the drift in the step, at equal flow time", value=order, limit=1.0, samples=len(steps)),
        Evidence(what="relative drift at the smallest step", value=drift),
        witness=None if good else witness,
    )


RATES = {"Penn Treebank": ("5e-6", "1e-5", "5e-5"), "WikiText-103": ("2e-6", "5e-6", "1e-5")}


@claim("paper.E1.rates")
def learning_rates(*, sigmoid: Sequence[str] = ("0.01", "0.02", "0.05")) -> Verdict:
    ratios = [Fraction(high) / Fraction(low) for high in sigmoid for rates in RATES.values() for low in rates]
    return by_steps(
        "The smallest of the one is 200 times the largest of the other.",
        "They overlap.",
        (f"ratios of the printed rates, {float(min(ratios)):g} to {float(max(ratios)):g}",
         min(ratios) == 200 and max(ratios) == 25000),
        scope="the printed figures",
    )  # fmt: skip


def not_conserved(build: Build, shape: tuple[int, ...], quantities: Quantities, size: str) -> Verdict:
    """Return whether every single quantity is changed by some field, which balls that exclude zero prove."""
    contents = certificate(build, shape).contents
    forms = forms_of(quantities, contents.parameters)
    sampled = random_fields(contents.program, contents.theta, contents.inputs, seed=1)
    least = min(departure(form, sampled) for form in forms)
    return decide(
        least > 0,
        f"None of the {len(forms)} quantities is a law.",
        "Some of them may be laws.",
        Evidence(
            what=f"least relative change of {len(forms)} quantities, in balls", value=least, limit=0.0, proof=least > 0
        ),
        scope=f"at {size}",
    )


def plane_imbalance(theta: Parameters) -> Tensor:
    """Return ‖Q_:,0‖² + ‖K_:,0‖² − ‖Q_:,1‖² − ‖K_:,1‖² of every plane."""
    q, k = (theta[f"{name}.weight"].square().sum(1).unflatten(0, (-1, 2)) for name in "qk")
    return (q + k)[:, 0] - (q + k)[:, 1]


def entry_differences(theta: Parameters) -> Tensor:
    """Return A_ij² − C_ij² where both exist."""
    a, c = theta["down.weight"], theta["up.weight"]
    return (a[:3, :3].square() - c[:3, :3].square()).flatten()


OTHERS: dict[str, tuple[Build, tuple[int, ...], Quantities, str]] = {
    "paper.E2.attention": (block.attention, (5, 4), lambda theta: block.gram_differences(theta, sign=1.0), TWO_HEADS),
    "paper.E2.rotary": (block.rotary_attention, (5, 4), plane_imbalance, TWO_PLANES),
    "paper.E2.swiglu": (block.swiglu_network, (5, 3), entry_differences, FFN),
    "paper.E2.gating": (block.mixture, (4, 3), lambda theta: theta["router.weight"][0], EXPERTS),
}
"""Block, input shape, quantities, size."""


def _changes(build: Build, shape: tuple[int, ...], quantities: Quantities, size: str) -> Callable[..., Verdict]:
    return lambda *, quantities=quantities: not_conserved(build, shape, quantities, size)


for _code, _other in OTHERS.items():
    claim(_code)(_changes(*_other))


@claim("paper.E2.linear")
def combinations(*, sign: int = 1) -> Verdict:
    a, b, g, h, f = Letters(a=(), b=(), g=(3,), h=(3,), f=(3,))
    left = sum((a * x + b * y) * z for x, y, z in zip(g, h, f, strict=True))
    right = a * sum(g * f) + sign * b * sum(h * f)
    what = "⟨a∇g + b∇h, ∇f⟩ = a⟨∇g, ∇f⟩ + b⟨∇h, ∇f⟩, as polynomials, so it vanishes where both do"
    return by_steps("The criterion (2) is linear in ∇h.", "It is not.", (what, identical(left, right)))


ROWS = """\
import numpy as np
g, E = np.array([2.0, 1.0]) / 3, np.array([1.0, 0.0])     # two experts, d = 1, x = 1, loss y = g . E
slope = g * (E - g @ E)                # gradients of y in W_1 and W_2, which are the row sums for d = 1
print("row sums move by", -slope, "their sum by", -slope.sum())
assert abs(slope[0]) > 0.2 and abs(slope.sum()) < 1e-12"""


@claim("paper.E2.rowsums")
def row_sums(*, quantities: Quantities = lambda theta: theta["router.weight"].sum(1)) -> Verdict:
    witness = Witness(
        data={"n": 2, "d": 1, "x": 1, "g": "(2/3, 1/3)", "expert outputs": "(1, 0)", "loss": "the output"},
        claimed="W_11 does not move",
        found="∂y/∂W_11 = g_1(1 − g_1) = 2/9",
        numpy=ROWS,
    )
    return laws_hold(block.mixture, (4, 3), quantities, size=EXPERTS, witness=witness)


@claim("paper.Fig5")
def contrast(*, expected: float = 0.0) -> Verdict:
    lawful: list[float] = []
    spoiled: list[float] = []
    builds = ((lambda: Attention(4, 2)), (lambda: Attention(4, 1, rotary=True)), (lambda: SwiGLU(4, 4)))
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(4, 5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    for build in builds:

        def watched(model: nn.Module) -> LawSet:
            laws = recognize(model)
            return LawSet(symmetries=(*laws, *laws.baselines()), parameters=laws.parameters)

        runs = [
            descend(scattered(build), lambda net: (net(x) - y).square().mean(), watched, step=s, time=0.4)
            for s in (0.02, 0.01, 0.005)
        ]
        for family, order in drift_orders(runs).items():
            (spoiled if family.startswith("not_") else lawful).append(order)
    worst = max(abs(order - 1) for order in lawful)
    other = max(abs(order - expected) for order in spoiled)
    return decide(
        worst < 0.2 and other < 0.2 and not math.isnan(worst + other),
        "Every law drifts to first order in the step, every other quantity to order zero.",
        "The orders are others.",
        Evidence(what="largest distance of a law's order from 1", value=worst, limit=0.2, samples=len(lawful)),
        Evidence(what="largest distance of another order from 0", value=other, limit=0.2, samples=len(spoiled)),
    )


@claim("paper.Fig5d")
def gating_contrast(*, law: Watch = router_sum) -> Verdict:
    still, moved = (
        drifts(block.mixture, (5, 3), watch, constant(0.01), (60,), stochastic=True)[0]
        for watch in (law, lambda theta: theta["router.weight"][0])
    )
    return decide(
        still < 1e-12 < 1e-6 < moved,
        "One stays at rounding, the other moves.",
        "Both move.",
        Evidence(what="relative drift of Σ_i W_i", value=still, limit=1e-12),
        Evidence(what="relative drift of W_0, above 1e-6", value=moved, limit=1e-6),
    )
