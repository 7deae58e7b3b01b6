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
from conserved_papers.claims.descents import drifts, monitored
from conserved_papers.claims.judging import answer, confirm, decide, refute, together
from conserved_papers.claims.paper_blocks import EXPERTS, FFN
from conserved_papers.claims.registry import claim


@claim("summary.gating")
def gate_makes_laws(*, gated: Build = block.swiglu_network) -> Verdict:
    without = all_laws(block.silu_network, (5, 3), None, size=FFN)
    return together(without, all_laws(gated, (5, 3), block.neuron_differences, size=FFN))


@claim("summary.gating.other")
def relu_has_laws(*, activation: str = "relu") -> Verdict:
    found = all_laws(lambda: FeedForward(3, 4, activation), (5, 3), block.neuron_differences, size=FFN)  # type: ignore[arg-type]
    return found


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
    """The laws of the linear branch, and degree·‖A_:,i‖² − ‖B_i,:‖² for a gate of that degree."""

    def quantities(theta: Parameters) -> Tensor:
        gate = degree * theta["down.weight"].square().sum(0) - theta["gate.weight"].square().sum(1)
        return torch.cat([block.neuron_differences(theta), gate])

    return quantities


@claim("summary.gating.homogeneous")
def homogeneous_complete(*, degrees: tuple[int, int] = (1, 2)) -> Verdict:
    builds = (relu_gated, square_gated)
    return together(*(all_laws(b, (5, 3), homogeneous_laws(k), size=FFN) for b, k in zip(builds, degrees, strict=True)))


def step_gate(z: Tensor) -> Tensor:
    """1 where z > 0, homogeneous of degree 0."""
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
    found = together(*verdicts, says="All do.", otherwise="The softmax gates do, the sigmoid gates do not.")
    if found.holds:
        return found
    count = Evidence(what="mixtures whose laws hold", value=f"{standing} of {len(builds)}", proof=True)
    return refute(found.message, count, *found.evidence)


def deep(activation: Callable[[], nn.Module] = nn.GELU) -> nn.Module:
    """Two hidden layers: W₃ act(W₂ act(W₁ x))."""
    first, second, third = (nn.Linear(a, b, bias=False) for a, b in ((2, 3), (3, 3), (3, 2)))
    return nn.Sequential(first, activation(), second, activation(), third)


@claim("summary.deep")
def deep_complete(*, build: Build = deep) -> Verdict:
    found = all_laws(build, (4, 2), None, size="two hidden layers of 3")
    return answer("It is empty: two hidden layers conserve nothing, as one does.", found)


one_plane: Build = partial(Attention, 3, 1, head_dim=2, rotary=True)


@claim("summary.rope")
def rotary_degrades(*, kept: Callable[[int], int] = lambda planes: planes) -> Verdict:
    evidence, good = [], True
    for planes, build, shape, outputs in ((1, one_plane, (5, 3), 3), (2, block.rotary_attention, (5, 4), 10)):
        found = certificate(build, shape)
        numbers = found.at_most - outputs
        good &= found.verdict == Verdict.PROVED and found.complete and numbers == kept(planes)
        what = f"numbers of queries and keys with {planes} plane{'s' * (planes > 1)}, of {planes * (2 * planes + 1)}"
        evidence.append(Evidence(what=what, value=numbers, limit=kept(planes), proof=found.verdict == Verdict.PROVED))
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


@claim("summary.optimizers")
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
            rows = monitored(build, optimizer_of).ledger()
            count += len(rows)
            size = max(abs(row.observed) for row in rows)
            residual = max(residual, max(abs(row.residual) for row in rows) / size)
            share = min(share, max(abs(row.first_order) for row in rows) / size)
    found = decide(
        residual < 1e-10 and share > 0.01,
        "There is a first-order part, and the account adds up.",
        "There is no first-order part, or the account does not add up.",
        Evidence(what="largest residual of the account, relative", value=residual, limit=1e-10, samples=count),
        Evidence(what="least share of the first order, above 0.01", value=share, limit=0.01, samples=count),
    )
    text = "They drift to first order in the step, which the bound of (9) leaves out; an exact account remains."
    return answer(text, found)
