"""Claims of the reader's summary that the paper does not make itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved.discovery import discover
from conserved.verdict import Evidence, Verdict, Witness
from conserved_papers.blocks import Attention, FeedForward, SwiGLU
from conserved_papers.claims import paper_blocks as block
from conserved_papers.claims.certified import Build, Parameters, Quantities, all_laws, certificate, laws_hold
from conserved_papers.claims.descents import drifts, exponent, monitored
from conserved_papers.claims.judging import answer, confirm, decide, refute, together
from conserved_papers.claims.paper_blocks import EXPERTS, FFN
from conserved_papers.claims.registry import claim


@claim("summary.gating")
def gate_makes_laws(*, gated: Build = block.swiglu_network) -> Verdict:
    without = all_laws(block.silu_network, (5, 3), None, size=FFN)
    return together(without, all_laws(gated, (5, 3), block.neuron_differences, size=FFN))


@claim("summary.gating.other")
def relu_has_laws(*, activation: str = "relu") -> Verdict:
    result = all_laws(lambda: FeedForward(3, 4, activation), (5, 3), block.neuron_differences, size=FFN)  # type: ignore[arg-type]
    return result


class Gated(nn.Module):
    """A(act(Bx) ⊙ Cx): gated by any activation."""

    def __init__(self, activation: Callable[[Tensor], Tensor], dim: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 4, bias=False)
        self.up = nn.Linear(dim, 4, bias=False)
        self.down = nn.Linear(4, dim, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


gelu_gated: Build = partial(Gated, F.gelu)
sigmoid_gated: Build = partial(Gated, torch.sigmoid)
relu_gated: Build = partial(Gated, torch.relu)
square_gated: Build = partial(Gated, torch.square)


@claim("summary.gating.corrected")
def gated_complete(*, builds: tuple[Build, ...] = (gelu_gated, sigmoid_gated)) -> Verdict:
    return together(*(all_laws(build, (5, 3), block.neuron_differences, size=FFN) for build in builds))


def homogeneous_laws(degree: int) -> Quantities:
    """Return the laws of the linear branch, and degree·‖A_:,i‖² − ‖B_i,:‖² for a gate of that degree."""

    def quantities(theta: Parameters) -> Tensor:
        gate = degree * theta["down.weight"].square().sum(0) - theta["gate.weight"].square().sum(1)
        return torch.cat([block.neuron_differences(theta), gate])

    return quantities


@claim("summary.gating.homogeneous")
def homogeneous_complete(*, degrees: tuple[int, int] = (1, 2)) -> Verdict:
    builds = (relu_gated, square_gated)
    return together(*(all_laws(b, (5, 3), homogeneous_laws(k), size=FFN) for b, k in zip(builds, degrees, strict=True)))


def step_gate(z: Tensor) -> Tensor:
    """Return 1 where z > 0, homogeneous of degree 0."""
    return (z > 0).to(z.dtype)


MORE_LAWS: dict[str, tuple[Build, int, int]] = {
    "a step, d = 3": (partial(Gated, step_gate), 3, 16),
    "ReLU, d = 1": (partial(Gated, torch.relu, 1), 1, 10),
    "a square, d = 1": (partial(Gated, torch.square, 1), 1, 11),
}
"""Gates that are homogeneous and have more than two laws per neuron: the block, its width and its number of laws."""


@claim("summary.gating.more")
def more_laws(*, counts: Sequence[int] = tuple(count for _, _, count in MORE_LAWS.values())) -> Verdict:
    evidence, good = [], True
    for (name, (build, dim, _)), count in zip(MORE_LAWS.items(), counts, strict=True):
        at_most = certificate(build, (5, dim)).at_most
        measured = discover(build().double(), torch.zeros(5, dim, dtype=torch.float64), forms=False).count
        good &= at_most == measured == count
        evidence.append(Evidence(what=f"laws at most, certified, and counted: {name}", value=f"{at_most}, {measured}"))
    return decide(
        good,
        "Each of these networks has more than the 8 laws that two a neuron would be.",
        "The numbers of laws are others.",
        *evidence,
    )


@claim("summary.moe")
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
    standing = sum(verdict.holds for verdict in verdicts)
    result = together(
        *verdicts,
        says="All four conserve these laws.",
        otherwise="The softmax gates conserve these laws, the sigmoid gates do not.",
    )
    if result.holds:
        return result
    count = Evidence(what="mixtures whose laws hold", value=f"{standing} of {len(builds)}", proof=True)
    return refute(result.message, count, *result.evidence)


def deep(activation: Callable[[], nn.Module] = nn.GELU) -> nn.Module:
    """Two hidden layers: W₃ act(W₂ act(W₁ x))."""
    first, second, third = (nn.Linear(a, b, bias=False) for a, b in ((2, 3), (3, 3), (3, 2)))
    return nn.Sequential(first, activation(), second, activation(), third)


@claim("summary.deep")
def deep_complete(*, build: Build = deep) -> Verdict:
    result = all_laws(build, (4, 2), None, size="two hidden layers of 3")
    return answer("It is empty: two hidden layers conserve nothing, as one does.", result)


one_plane: Build = partial(Attention, 3, 1, head_dim=2, rotary=True)


@claim("summary.rope")
def rotary_degrades(*, laws_of: Callable[[int], int] = lambda planes: planes) -> Verdict:
    evidence, good = [], True
    for planes, build, shape, outputs in ((1, one_plane, (5, 3), 3), (2, block.rotary_attention, (5, 4), 10)):
        result = certificate(build, shape)
        numbers = result.at_most - outputs
        good &= result.verdict == Verdict.PROVED and result.complete and numbers == laws_of(planes)
        what = f"numbers of queries and keys with {planes} plane{'s' * (planes > 1)}, of {planes * (2 * planes + 1)}"
        evidence.append(
            Evidence(what=what, value=numbers, limit=laws_of(planes), proof=result.verdict == Verdict.PROVED)
        )
    says, otherwise = "One number is left for every plane.", "Another number is left."
    return decide(good, says, otherwise, *evidence, scope="at one and two planes")


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


@claim("summary.discrete")
def only_approximate(*, build: Build = block.mixture) -> Verdict:
    drift = drifts(build, (5, 3), lambda t: t["router.weight"].sum(0), lambda _: 0.5, (100,), stochastic=True)[0]
    if drift < 1e-12:
        data = {"router": "3 experts of 4 inputs", "step": 10, "steps": 100}
        return refute(
            "Quadratic laws do; linear laws are conserved exactly at any step size.",
            Evidence(what="relative drift of Σ_i W_i after 100 steps of size 0.5", value=drift, limit=1e-12),
            witness=Witness(data=data, claimed="Σ_i W_i deviates", found="it stays, to rounding", numpy=LINEAR),
        )
    return confirm("It deviates.", Evidence(what="relative drift after 100 steps", value=drift, limit=1e-12))


TRAINED = """\
stated = {"new models trained": 0}                             # "Loss & Training"
described = {"seeds for each configuration": 10, "data sets": 4}    # "Main Results"
print(stated, described)
assert stated["new models trained"] < described["seeds for each configuration"]"""


@claim("summary.untrained")
def untrained(*, seeds: int = 10) -> Verdict:
    return decide(
        seeds == 0,
        "None are.",
        "Ten for each configuration, by its own account; no new kind of model is meant.",
        Evidence(what="models trained for each configuration", value=seeds, limit=0, proof=True),
        witness=Witness(data={"seeds": seeds}, claimed="0 models", found=f"{seeds} a configuration", numpy=TRAINED),
        scope="as reported",
    )


STEP_SIZES = (0.0002, 0.0004)

OptimizerOf = Callable[..., torch.optim.Optimizer]
"""Makes an optimizer from parameters and a step size."""


def toy_drift(optimizer_of: OptimizerOf, step: float, count: int) -> float:
    """Return |Δ(a² − b²)| after so many steps of the model abx at x = 1 with the target 2, from (2, 0.3)."""
    a, b = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (2.0, 0.3))
    optimizer = optimizer_of([a, b], lr=step)
    start = (a * a - b * b).item()
    for _ in range(count):
        error = (a * b).item() - 2
        a.grad, b.grad = error * b.detach(), error * a.detach()
        optimizer.step()
    return abs((a * a - b * b).item() - start)


def toy_orders(optimizer_of: OptimizerOf) -> tuple[float, float]:
    """Return the exponents of the toy model's drift in the step: after 20 steps, and at equal flow time."""
    fixed = [toy_drift(optimizer_of, step, 20) for step in STEP_SIZES]
    timed = [toy_drift(optimizer_of, step, round(0.2 / step)) for step in STEP_SIZES]
    return exponent(STEP_SIZES, fixed), exponent(STEP_SIZES, timed)


BLOCKS: tuple[Build, ...] = (partial(Attention, 4, 2), partial(SwiGLU, 4, 5))


def block_orders(optimizer_of: OptimizerOf) -> list[float]:
    """Return the exponents of the drift of attention and of SwiGLU in the step, after 20 steps."""
    orders = []
    for build in BLOCKS:
        drift = []
        for step in STEP_SIZES:
            torch.manual_seed(0)
            rows = monitored(build, partial(optimizer_of, lr=step)).ledger()
            moved = dict.fromkeys((row.law for row in rows), 0.0)
            for row in rows:
                moved[row.law] += row.observed
            drift.append(max(map(abs, moved.values())))
        orders.append(exponent(STEP_SIZES, drift))
    return orders


def account_residual(optimizer_of: OptimizerOf) -> tuple[float, int]:
    """Return the largest part of a change that the account of 20 steps of 0.01 leaves out, and its number of rows."""
    residual, count = 0.0, 0
    for build in BLOCKS:
        rows = monitored(build, partial(optimizer_of, lr=0.01)).ledger()
        residual = max(residual, max(abs(row.residual) for row in rows) / max(abs(row.observed) for row in rows))
        count += len(rows)
    return residual, count


HEAVY_BALL: OptimizerOf = partial(torch.optim.SGD, momentum=0.9)


@claim("summary.optimizers")
def optimizers(*, adaptive: OptimizerOf = torch.optim.Adam) -> Verdict:
    (slow, slow_timed), (fast, fast_timed) = toy_orders(HEAVY_BALL), toy_orders(adaptive)
    constant = toy_drift(HEAVY_BALL, STEP_SIZES[0], 20) / toy_drift(torch.optim.SGD, STEP_SIZES[0], 20)
    away = (
        max(abs(order - 2) for order in (slow, *block_orders(HEAVY_BALL))),
        max(abs(order - 1) for order in (fast, *block_orders(adaptive))),
    )
    timed = max(abs(slow_timed - 1), abs(fast_timed))
    (first, rows), (second, more) = account_residual(HEAVY_BALL), account_residual(adaptive)
    residual, count = max(first, second), rows + more
    verdict = decide(
        max(*away, timed) < 0.2 and constant > 1 and residual < 1e-10,
        "The exponents in the step are 2 and 1, and the account adds up.",
        "The exponents are others, or the account does not add up.",
        Evidence(what="momentum, 20 steps of abx, attention and SwiGLU: largest distance of the exponent in τ from 2",
                 value=away[0], limit=0.2, samples=3),
        Evidence(what="Adam, the same: largest distance of the exponent in τ from 1", value=away[1], limit=0.2,
                 samples=3),
        Evidence(what="abx at equal flow time: largest distance from τ¹ under momentum and from τ⁰ under Adam",
                 value=timed, limit=0.2, samples=2),
        Evidence(what="abx, 20 steps of 0.0002: drift under momentum over that under SGD, above 1", value=constant,
                 limit=1.0),
        Evidence(what="largest residual of the account, relative", value=residual, limit=1e-10, samples=count),
    )  # fmt: skip
    return answer(
        "Under Adam the laws drift to first order in the step, outside (9); under momentum to second order, as under "
        "SGD, with a larger constant; an exact account remains.",
        verdict,
    )
