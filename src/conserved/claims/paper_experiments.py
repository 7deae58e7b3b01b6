"""Claims of the paper: what its experiments track, on which architecture, and what Figures 2(d), 4 and 5 show."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from conserved.blocks import Attention, MixtureOfExperts, SwiGLU
from conserved.certify.proof import departure, random_fields
from conserved.claims import paper_blocks as block
from conserved.claims.certified import Build, Parameters, Quantities, all_laws, certificate, forms_of, laws_hold
from conserved.claims.descents import Watch, constant, drifts, exponent, scattered
from conserved.claims.judging import judged, refuted
from conserved.claims.ledger import claim
from conserved.claims.paper_blocks import EXPERTS, FFN, TWO_HEADS, TWO_PLANES
from conserved.impostors import impostors
from conserved.lab.order import descend, slopes
from conserved.laws import LawSet
from conserved.recognize import recognize
from conserved.verdict import Evidence, Verdict, Witness


def normed_rotary_attention() -> nn.Module:
    """Queries and keys normalised before they are rotated, as in Qwen-3; ε = 0 so that its laws are exact."""
    return Attention(4, 1, rotary=True, qk_norm=True, eps=0.0)


def query_key_planes(theta: Parameters) -> Tensor:
    """‖Q^(j)‖² − ‖K^(j)‖² for both planes, the laws of Theorem 4.4 for queries and keys."""
    q, k = (theta[f"{name}.weight"].unflatten(0, (-1, 2)).square().sum((1, 2)) for name in "qk")
    return q - k


def normed_invariants(theta: Parameters) -> Tensor:
    """‖Q‖², ‖K‖², the gains' ‖γ_q^(j)‖² − ‖γ_k^(j)‖², and VᵀV − OᵀO."""
    q, k = theta["q.weight"].square().sum(), theta["k.weight"].square().sum()
    gains = [theta[f"{name}_norm.weight"].unflatten(0, (-1, 2)).square().sum(1) for name in "qk"]
    v, o = theta["v.weight"], theta["o.weight"]
    return torch.cat([torch.stack((q, k)), gains[0] - gains[1], block.upper(v @ v.mT - o.mT @ o)])


QWEN = """\
import numpy as np
q, k = np.array([3.0, 0.0, 4.0, 0.0]), np.array([4.0, 0.0, 3.0, 0.0])    # two planes; d = 1, x = 1
def score(q, k):                       # RMS norm of both, same position, so no rotation
    return (q / np.linalg.norm(q)) @ (k / np.linalg.norm(k)) * 2
h, e = 1e-6, np.eye(4)
dq = np.array([(score(q + h * d, k) - score(q - h * d, k)) / (2 * h) for d in e])
dk = np.array([(score(q, k + h * d) - score(q, k - h * d)) / (2 * h) for d in e])
rate = 2 * (q[:2] @ dq[:2] - k[:2] @ dk[:2])    # of |Q(1)|^2 - |K(1)|^2 along the score's gradient
print("rate", rate, "exactly", 672 / 625)
assert abs(rate - 672 / 625) < 1e-6"""


@claim(
    "paper.S6.qwen3",
    "The rotary law on a Qwen-3 architecture",
    statement="The law of Theorem 4.4 for queries and keys is what the Qwen-3 models of Section 6 conserve.",
    place="Section 6, datasets and models; Figure 2(c)",
    hypotheses="Qwen-3 normalises queries and keys before it rotates them. Heads of more than one plane.",
    latex=[r"\|Q^{(j)}\|_F^2-\|K^{(j)}\|_F^2=\text{const}"],
    corrected_by="paper.S6.qwen3.corrected",
    slow=True,
)
def qwen_law(*, build: Build = normed_rotary_attention) -> Verdict:
    witness = Witness(
        data={"d": 1, "x": 1, "Q": "(3, 0, 4, 0)", "K": "(4, 0, 3, 0)", "planes": "(1, 2) and (3, 4)"},
        claimed="a change along the gradient of the score leaves ‖Q^(1)‖² − ‖K^(1)‖² alone",
        found="it changes at the rate 2·2·24/25·(16/25 − 9/25) = 672/625",
        numpy=QWEN,
    )
    return laws_hold(build, (5, 4), query_key_planes, size=TWO_PLANES, witness=witness)


@claim(
    "paper.S6.qwen3.corrected",
    "What a Qwen-3 head conserves",
    statement="With query and key norms before rotary positions a head conserves ‖Q‖², ‖K‖², the difference of the "
    "gains on every "
    "plane, and VᵀV − OᵀO, and nothing else.",
    place="replaces Theorem 4.4 for Qwen-3",
    hypotheses="ε = 0 in the norms; with ε > 0 the first two hold up to ε.",
    latex=[r"\|Q\|_F^2,\quad\|K\|_F^2,\quad\|\gamma_q^{(j)}\|^2-\|\gamma_k^{(j)}\|^2,\quad V^{\top}V-O^{\top}O"],
    corrects="paper.S6.qwen3",
)
def qwen_complete(*, quantities: Quantities = normed_invariants) -> Verdict:
    return all_laws(normed_rotary_attention, (5, 4), quantities, size=TWO_PLANES)


def router_sum(theta: Parameters) -> Tensor:
    """Σ_i W_i."""
    return theta["router.weight"].sum(0)


SIZES = (0.002, 0.004, 0.008)

STILL = """\
import numpy as np
g, E = np.array([2.0, 1.0]) / 3, np.array([1.0, 0.0])     # softmax weights and expert outputs at x = 1
y = g @ E
slope = g * (E - y)                    # the gradient of y in W_1 and W_2: 2/9 and -2/9
print("gradient", slope)
for tau in (0.01, 1.0, 100.0):
    print("step", tau, "moves W_1 + W_2 by", -tau * slope.sum())
    assert abs(tau * slope.sum()) < 1e-12"""


@claim(
    "paper.Fig2d",
    "The softmax gating law drifts with the step size",
    statement="The deviation of the softmax gating law grows with the learning rate, as τ²k does, like that of the "
    "other laws.",
    place="Section 6 and Figure 2(d)",
    hypotheses="The law of Theorem 4.5, Σ_i W_i. Double precision, so that rounding is not taken for drift.",
    latex=[r"\left\|\sum_i W_i(k)-\sum_i W_i(0)\right\|\propto\tau^2k"],
    corrected_by="paper.Fig2d.corrected",
)
def gating_drift(*, watch: Watch = router_sum) -> Verdict:
    found = [drifts(block.mixture, (5, 3), watch, constant(size), (60,), stochastic=True)[0] for size in SIZES]
    if max(found) < 1e-13:
        return refuted(
            "A linear law does not drift under gradient descent, at any step size; what is seen is rounding or "
            "another quantity.",
            Evidence(what="largest relative drift over three step sizes", value=max(found), limit=1e-13, samples=3),
            witness=Witness(
                data={"g": "(2/3, 1/3)", "expert outputs": "(1, 0)", "x": 1},
                claimed="W_1 + W_2 moves by an amount of order τ²",
                found="∂y/∂W_1 + ∂y/∂W_2 = 2/9 − 2/9 = 0, so it does not move, for every τ",
                numpy=STILL,
            ),
        )
    order = exponent(SIZES, found)
    evidence = Evidence(what="exponent in the step size", value=order, limit=2.0, samples=3)
    return judged(abs(order - 2) < 0.4, "It grows as τ².", "It grows otherwise.", evidence)


@claim(
    "paper.Fig2d.corrected",
    "The softmax gating law does not drift",
    statement="Σ_i W_i of a softmax router is unchanged by every step of (stochastic) gradient descent, whatever its "
    "size.",
    place="replaces Figure 2(d)",
    hypotheses="The symbolic argument shows Σ_i ∂f/∂W_i = 0 for all parameters and inputs; the law is linear, so "
    "that is all.",
    latex=[r"\sum_i\nabla_{W_i}L=0"],
    corrects="paper.Fig2d",
)
def gating_still(*, build: Build = block.mixture) -> Verdict:
    exact = laws_hold(build, (4, 3), router_sum, size=EXPERTS)
    found = [drifts(build, (5, 3), router_sum, constant(s), (60,), stochastic=True)[0] for s in SIZES]
    return judged(
        exact == Verdict.PROVED and max(found) < 1e-13,
        "Its gradient identity has no terms, and runs show rounding only.",
        "It moves.",
        *exact.evidence,
        Evidence(what="largest relative drift over three step sizes", value=max(found), limit=1e-13, samples=3),
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
    """Σ_i W_i as a law set, whether or not the model has it as a law."""
    pattern = recognize(MixtureOfExperts(3, 2, 3)).select(lambda symmetry: "router" in symmetry.name)
    return LawSet(symmetries=pattern.symmetries, parameters=dict(model.named_parameters()))


@claim(
    "paper.E1",
    "Sigmoid gating drifts like softmax gating",
    statement="Under a normalised-sigmoid gate Σ_i W_i deviates as τ²k, as a law does: at equal flow time τk the "
    "deviation "
    "vanishes with the step.",
    place="Appendix E.1 and Figure 4",
    hypotheses="Full-batch gradient descent to the same flow time with four step sizes.",
    latex=[r"\left\|\sum_i W_i(k)-\sum_i W_i(0)\right\|=\mathcal{O}(\tau^2k)"],
    corrected_by="paper.T4.7.corrected",
)
def sigmoid_drift(*, build: Build = block.sigmoid_mixture) -> Verdict:
    model = scattered(build)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(16, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    steps = (0.04, 0.02, 0.01, 0.005)
    runs = [descend(model, lambda net: (net(x) - y).square().mean(), _router_law, step=s, time=4.0) for s in steps]
    ((_, order),) = slopes(runs).items()
    drift = next(iter(runs[-1].drift.values()))
    witness = Witness(
        data={"n": 2, "x": 1, "W": "(log 1, log 1/3)", "expert outputs": "(1, 0)", "loss": "the output"},
        claimed="one step moves W_1 + W_2 by an amount of order τ²",
        found="it moves by τ/18",
        numpy=DRIFTING,
    )
    good = drift < 1e-13 or order > 0.7
    return judged(
        good,
        "The deviation vanishes with the step.",
        "The deviation is the same at every step size: gradient flow itself changes the sum.",
        Evidence(what="order of the drift in the step, at equal flow time", value=order, limit=1.0, samples=len(steps)),
        Evidence(what="relative drift at the smallest step", value=drift),
        witness=None if good else witness,
    )


def not_conserved(build: Build, shape: tuple[int, ...], quantities: Quantities, size: str) -> Verdict:
    """Whether every single quantity is changed by some field, which balls that exclude zero prove."""
    contents = certificate(build, shape).contents
    forms = forms_of(quantities, contents.parameters)
    sampled = random_fields(contents.program, contents.theta, contents.inputs, seed=1)
    least = min(departure(form, sampled) for form in forms)
    return judged(
        least > 0,
        f"None of the {len(forms)} quantities is a law, for {size}.",
        "Some of them may be laws.",
        Evidence(
            what=f"least relative change of {len(forms)} quantities, in balls", value=least, limit=0.0, proof=least > 0
        ),
    )


def gram_sums(theta: Parameters) -> Tensor:
    """QᵀQ + KᵀK and VᵀV + OᵀO."""
    return block.gram_differences(theta, sign=1.0)


@claim(
    "paper.E2.attention",
    "Gram sums are not conserved",
    statement="QᵀQ + KᵀK and VᵀV + OᵀO are not conserved by attention, in none of their entries.",
    place="Appendix E.2, multi-head attention",
    latex=[r"Q_i^{\top}Q_i+K_i^{\top}K_i,\quad V_i^{\top}V_i+O_i^{\top}O_i"],
)
def sums_not_conserved(*, quantities: Quantities = gram_sums) -> Verdict:
    return not_conserved(block.attention, (5, 4), quantities, TWO_HEADS)


def plane_imbalance(theta: Parameters) -> Tensor:
    """‖Q_:,0‖² + ‖K_:,0‖² − ‖Q_:,1‖² − ‖K_:,1‖² of every plane."""
    q, k = (theta[f"{name}.weight"].square().sum(1).unflatten(0, (-1, 2)) for name in "qk")
    return (q + k)[:, 0] - (q + k)[:, 1]


@claim(
    "paper.E2.rotary",
    "Column differences of a plane are not conserved",
    statement="‖Q_:,0‖² + ‖K_:,0‖² − ‖Q_:,1‖² − ‖K_:,1‖² of a rotary plane is not conserved.",
    place="Appendix E.2, attention with RoPE",
)
def imbalance_not_conserved(*, quantities: Quantities = plane_imbalance) -> Verdict:
    return not_conserved(block.rotary_attention, (5, 4), quantities, TWO_PLANES)


def entry_differences(theta: Parameters) -> Tensor:
    """A_ij² − C_ij² where both exist."""
    a, c = theta["down.weight"], theta["up.weight"]
    return (a[:3, :3].square() - c[:3, :3].square()).flatten()


@claim(
    "paper.E2.swiglu",
    "Entry-wise differences are not conserved",
    statement="A_ij² − C_ij² of a SwiGLU network is not conserved, for no pair of indices.",
    place="Appendix E.2, SwiGLU",
)
def entries_not_conserved(*, quantities: Quantities = entry_differences) -> Verdict:
    return not_conserved(block.swiglu_network, (5, 3), quantities, FFN)


@claim(
    "paper.E2.gating",
    "The first row of a router is not conserved",
    statement="W_0,: of a softmax router is not conserved, in none of its entries.",
    place="Appendix E.2, MoE gating",
)
def row_not_conserved(*, quantities: Quantities = lambda theta: theta["router.weight"][0]) -> Verdict:
    return not_conserved(block.mixture, (4, 3), quantities, EXPERTS)


ROWS = """\
import numpy as np
g, E = np.array([2.0, 1.0]) / 3, np.array([1.0, 0.0])     # two experts, d = 1, x = 1, loss y = g . E
slope = g * (E - g @ E)                # gradients of y in W_1 and W_2, which are the row sums for d = 1
print("row sums move by", -slope, "their sum by", -slope.sum())
assert abs(slope[0]) > 0.2 and abs(slope.sum()) < 1e-12"""


@claim(
    "paper.E2.rowsums",
    "Row sums of the router are conserved",
    statement="Σ_j W_ij, the sum over input dimensions for each expert, is conserved; it is the quantity tracked.",
    place="Appendix E.2, MoE gating",
    hypotheses="Theorem 4.5 sums over experts instead.",
    latex=[r"\sum_{j=1}^{d}W_{ij}=\text{const}"],
    corrected_by="paper.T4.5",
)
def row_sums(*, quantities: Quantities = lambda theta: theta["router.weight"].sum(1)) -> Verdict:
    witness = Witness(
        data={"n": 2, "d": 1, "x": 1, "g": "(2/3, 1/3)", "expert outputs": "(1, 0)", "loss": "the output"},
        claimed="W_11 does not move",
        found="∂y/∂W_11 = g_1(1 − g_1) = 2/9",
        numpy=ROWS,
    )
    return laws_hold(block.mixture, (4, 3), quantities, size=EXPERTS, witness=witness)


@claim(
    "paper.Fig5",
    "Laws and other quantities differ in kind",
    statement="Under the same gradient descent the laws drift less and less as the step is made smaller at equal "
    "flow time, and the "
    "quantities of Appendix E.2 drift by an amount that does not depend on it.",
    place="Appendix E.2, results, and Figure 5",
    hypotheses="Attention, rotary attention and SwiGLU; three step sizes.",
)
def contrast(*, expected: float = 0.0) -> Verdict:
    lawful: list[float] = []
    spoiled: list[float] = []
    builds = ((lambda: Attention(4, 2)), (lambda: Attention(4, 1, rotary=True)), (lambda: SwiGLU(4, 4)))
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(4, 5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    for build in builds:

        def watched(model: nn.Module) -> LawSet:
            laws = recognize(model)
            return LawSet(symmetries=(*laws, *impostors(laws)), parameters=laws.parameters)

        runs = [
            descend(scattered(build), lambda net: (net(x) - y).square().mean(), watched, step=s, time=0.4)
            for s in (0.02, 0.01, 0.005)
        ]
        for family, order in slopes(runs).items():
            (spoiled if family.startswith("not_") else lawful).append(order)
    worst = max(abs(order - 1) for order in lawful)
    other = max(abs(order - expected) for order in spoiled)
    return judged(
        worst < 0.2 and other < 0.2 and not math.isnan(worst + other),
        "Every law drifts to first order in the step, every other quantity to order zero.",
        "The orders are others.",
        Evidence(what="largest distance of a law's order from 1", value=worst, limit=0.2, samples=len(lawful)),
        Evidence(what="largest distance of another order from 0", value=other, limit=0.2, samples=len(spoiled)),
    )
