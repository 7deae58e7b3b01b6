"""Claims of the paper: Theorems 4.1 to 4.7, each as laws, as a complete list, and as the PDE behind it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import numpy as np
import torch
from torch import Tensor

from conserved.verdict import Evidence, Verdict, Witness
from conserved_papers.claims import paper_blocks as block
from conserved_papers.claims.certified import (
    Build,
    Constraints,
    Parameters,
    Quantities,
    all_laws,
    certificate,
    constraints_characterise,
    laws_hold,
    named,
)
from conserved_papers.claims.judging import by_steps, decide, together
from conserved_papers.claims.matrix_words import matrices
from conserved_papers.claims.paper_blocks import EXPERTS, FFN, TWO_HEADS, TWO_PLANES, TWO_ROTARY_HEADS
from conserved_papers.claims.polynomials import Letters, identical, rank, times
from conserved_papers.claims.registry import claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A block at one size: how it is built, its laws and its equations as the paper writes them."""

    build: Build
    shape: tuple[int, ...]
    size: str
    quantities: Quantities | None = None
    constraints: Constraints | None = None


GELU = Case(build=block.gelu_network, shape=(5, 3), size=FFN)
SILU = Case(build=block.silu_network, shape=(5, 3), size=FFN)
SWIGLU = Case(
    build=block.swiglu_network,
    shape=(5, 3),
    size=FFN,
    quantities=block.neuron_differences,
    constraints=block.swiglu_constraints,
)
ATTENTION = Case(
    build=block.attention,
    shape=(5, 4),
    size=TWO_HEADS,
    quantities=block.gram_differences,
    constraints=block.attention_constraints,
)
SINUSOIDAL = Case(
    build=block.sinusoidal_attention,
    shape=(5, 4),
    size=TWO_HEADS,
    quantities=partial(block.gram_differences, prefix="1."),
)
ROTARY = (
    Case(
        build=block.two_rotary_heads,
        shape=(5, 4),
        size=TWO_ROTARY_HEADS,
        quantities=partial(block.plane_differences, count=2),
        constraints=partial(block.rotary_constraints, count=2),
    ),
    Case(
        build=block.rotary_attention,
        shape=(5, 4),
        size=TWO_PLANES,
        quantities=block.plane_differences,
        constraints=block.rotary_constraints,
    ),
)
MIXTURE = Case(
    build=block.mixture,
    shape=(4, 3),
    size=EXPERTS,
    quantities=block.mixture_invariants,
    constraints=block.mixture_constraints,
)
SPARSE = replace(MIXTURE, build=block.sparse_mixture, size=f"{EXPERTS}, k = 2")
SWITCH = replace(
    MIXTURE, build=block.switch_mixture, size=f"{EXPERTS}, k = 1", quantities=block.still_router_invariants
)
SIGMOID_AS_STATED = replace(MIXTURE, build=block.sigmoid_mixture)
SIGMOID = replace(SIGMOID_AS_STATED, quantities=block.expert_differences, constraints=block.still_router_constraints)
SPARSE_SIGMOID = replace(SIGMOID, build=block.sparse_sigmoid_mixture, size=f"{EXPERTS}, k = 2")

Steps = Callable[[], list[tuple[str, bool]]]


def conserved_for_all_sizes(*cases: Case, why: Steps | None = None, witness: Witness | None = None) -> Verdict:
    """Return whether the quantities are laws: at these sizes by certificate, and for all by the argument, if there is
    one.
    """
    result = together(
        *(laws_hold(c.build, c.shape, c.quantities or _none, size=c.size, witness=witness) for c in cases)
    )
    if why is None or not result.holds:
        return result
    return by_steps("The listed quantities are laws.", "The argument fails.", *why(), beside=result.evidence)


def _none(theta: Parameters) -> Tensor:
    return torch.zeros(0, dtype=torch.float64)


def complete(*cases: Case) -> Verdict:
    """Return whether the quantities are all laws there are, at each of the sizes."""
    return together(*(all_laws(c.build, c.shape, c.quantities, size=c.size) for c in cases))


def equations(*cases: Case, witness: Witness | None = None) -> Verdict:
    """Return whether the PDE has the gradients of laws as its solutions, at each of the sizes."""
    assert all(c.constraints for c in cases)
    result = (constraints_characterise(c.build, c.shape, c.constraints or _no, size=c.size) for c in cases)
    verdict = together(*result)
    return replace(verdict, witness=witness) if verdict == Verdict.REFUTED else verdict


def _no(theta: Parameters, gradient: Parameters) -> Tensor:
    return torch.zeros(0, dtype=torch.float64)


def through_a_product() -> list[tuple[str, bool]]:
    """Return a model that sees A and B through ABᵀ alone: with M the gradient in ABᵀ, ∇A = MB and ∇B = MᵀA."""
    a, b, m = matrices("ABM")
    ga, gb = m @ b, m.T @ a
    rate = ga.T @ a + a.T @ ga - gb.T @ b - b.T @ gb
    return [("d/dt (AᵀA − BᵀB) = −(GᵀA + AᵀG) + (HᵀB + BᵀH) = 0 for G = MB, H = MᵀA, word by word", not rate)]


def swiglu_argument() -> list[tuple[str, bool]]:
    step = "f = Σ_i SiLU(B_i x) A_:,i C_i,: x sees the column A_:,i and the row C_i,: through their product alone"
    a, c, s, x = Letters(A=(2, 3), C=(3, 2), s=(3,), x=(2,))
    terms = [[a[o, i] * c[i, p] * s[i] * x[p] for i in range(3) for p in range(2)] for o in range(2)]
    same = all(identical(sum(a[o, i] * (s[i] * (c[i] @ x)) for i in range(3)), sum(terms[o])) for o in range(2))
    return [(f"{step} (as polynomials, d = 2, three neurons)", same), *through_a_product()]


def attention_argument() -> list[tuple[str, bool]]:
    x, q, k, v, o, p = matrices("XQKVOP")
    seen = (x @ q) @ (x @ k).T == x @ (q @ k.T) @ x.T and p @ x @ v @ o.T == p @ x @ (v @ o.T)
    return [("equation (5) sees Q, K through QKᵀ and V, O through VOᵀ, word by word", seen), *through_a_product()]


def rotary_argument() -> list[tuple[str, bool]]:
    q, k, m, r = matrices("QKMR")
    same = (q.T @ (m @ k @ r.T)).trace() == (k.T @ (m.T @ q @ r)).trace()
    step = "a plane enters through QRKᵀ for rotations R: ∇Q = ΣMKRᵀ and ∇K = ΣMᵀQR have tr QᵀMKRᵀ = tr KᵀMᵀQR"
    values = "values and outputs enter through VOᵀ as before"
    return [(f"{step}, word by word", same), (values, attention_argument()[0][1]), *through_a_product()]


def mixture_argument() -> list[tuple[str, bool]]:
    weights, factor = Letters(p=(4,), c=())
    total, moved = sum(weights), sum(times(factor, weights))
    same = all(identical(factor * weights[i] * total, weights[i] * moved) for i in range(4))
    step = "e^c cancels in softmax(z + c·1), so ΣW_i moves nothing: Σ_i ∇_{W_i}L = 0 (four experts, as polynomials)"
    return [(step, same), *swiglu_argument()]


def laws_of(*cases: Case, why: Steps) -> Callable[..., Verdict]:
    """Return a check whose subject is the cases."""
    return lambda *, cases=cases: conserved_for_all_sizes(*cases, why=why)


def sigmoid_as_stated(*, cases: Sequence[Case] = (SIGMOID_AS_STATED,)) -> Verdict:
    verdict = conserved_for_all_sizes(*cases, witness=SIGMOID_WITNESS)
    if verdict != Verdict.REFUTED:
        return verdict
    necessary = "The equations of Theorem 4.5 are necessary for a sigmoid law, not sufficient."
    return replace(verdict, message=f"{verdict.message} {necessary}")


def list_of(*cases: Case) -> Callable[..., Verdict]:
    return lambda *, cases=cases: complete(*cases)


def pde_of(*cases: Case, witness: Witness | None = None) -> Callable[..., Verdict]:
    return lambda *, cases=cases: equations(*cases, witness=witness)


NARROW = """\
import numpy as np
W = np.array([3.0, 2.0, 1.0, 0.0])                 # d = 1 < n = 4, k = 2: e_T = W x has no solution
rng = np.random.default_rng(0)
for trial in range(100):                           # nor has it near this W
    V = W + rng.uniform(-0.3, 0.3, 4)
    active = {tuple(sorted(np.argsort(-V * x)[:2])) for x in (-2.0, -1.0, 1.0, 2.0)}
    assert active == {(0, 1), (2, 3)}              # T = {1, 3} occurs for no input: Theta(T) is not dense
print("pairs that are ever active:", active)"""


@claim("paper.S5.assumptions")
def assumptions(*, dim: int = 1, experts: int = 4, active: int = 2) -> Verdict:
    """Whether e_T = W x can be solved for a generic W and every T; for d = 1 which T occur near W = (n − 1, …, 0)."""
    router = np.array([[Fraction(experts - 1 - i) ** j if dim > 1 else Fraction(experts - 1 - i) for j in range(dim)]
                       for i in range(experts)], dtype=object)  # fmt: skip
    independent = rank(router)
    sets = list(itertools.combinations(range(experts), active))
    ever = {tuple(sorted(sorted(range(experts), key=lambda i: -s * router[i, 0])[:active])) for s in (1, -1)}
    data = {"d": dim, "n": experts, "k": active, "W": "within 0.3 of (3, 2, 1, 0)"}
    result = f"only {len(ever)} of {len(sets)} pairs are ever active, for all W near it"
    return decide(
        independent == experts,
        "The rows of a generic W are independent, so every set of experts is active somewhere.",
        "The proof of Theorem 4.6 uses d > n.",
        Evidence(what=f"independent rows of W, d = {dim}", value=independent, limit=experts, proof=True),
        witness=Witness(data=data, claimed="Θ(T) is dense for every T", found=result, numpy=NARROW),
        scope=f"at d = {dim}, n = {experts}",
    )


@claim("paper.T4.6.narrow")
def narrow(*, after: Sequence[tuple[int, int]] = ((0, 2), (1, 3))) -> Verdict:
    build, shape = block.narrow_sparse_mixture, (6, 1)
    contents = certificate(build, shape).contents
    here = named(torch.tensor(contents.theta, dtype=torch.float64), contents.parameters)
    pair = here["router.weight"][:, 0].topk(2).indices

    def local(theta: Parameters) -> Tensor:
        return torch.cat([block.mixture_invariants(theta, count=4), theta["router.weight"][pair].sum(0)])

    list_found = all_laws(build, shape, local, size="d = 1, four experts, k = 2")
    # Slopes F_s, F_t before the tie w_2 = w_3 and F'_s, F'_t after; ∂h/∂w_i must be the same on both sides.
    before = ((0, 1), (2, 3))
    rows = [[0] * 4 for _ in range(4)]
    for expert, row in enumerate(rows):
        row[next(i for i, block_ in enumerate(before) if expert in block_)] += 1
        row[2 + next(i for i, block_ in enumerate(after) if expert in block_)] -= 1
    forced = rank(np.array(rows, dtype=object)) == 3
    s, t = Letters(s=(), t=())
    c = (s + t) / 4
    reached = identical((s - c) - c, (s - t) / 2) and identical(c - (t - c), (s - t) / 2)
    return by_steps(
        "Across the tie of the second and third expert the gradient is continuous only if both slopes agree.",
        "The slopes may differ.",
        ("near θ the laws are those of the experts, Σ_i W_i and w_1 + w_2, and no others (certificate)",
         list_found == Verdict.PROVED),
        ("continuity of the four ∂h/∂w_i at w_2 = w_3 makes F_s = F_t = F'_s = F'_t: three equations", forced),
        ("every (s, t) with s > t is met on such a tie: w_2 = w_3 = (s + t)/4 lies between w_1 and w_4", reached),
        scope="at d = 1, n = 4, k = 2",
        beside=list_found.evidence,
    )  # fmt: skip


@claim("paper.T4.4.change")
def rotary_changes(*, quantities: Quantities = lambda theta: block.gram_differences(theta, count=1)) -> Verdict:
    verdict = laws_hold(block.rotary_attention, (5, 4), quantities, size=TWO_PLANES)
    says, otherwise = "Some entries change: balls exclude zero.", "The whole matrix is conserved."
    return decide(verdict == Verdict.REFUTED, says, otherwise, *verdict.evidence, scope=f"at {TWO_PLANES}")


SHIFTED = """\
import numpy as np
def sigmoid(z):
    return 1 / (1 + np.exp(-z))
W, c = np.log([1.0, 1 / 3]), np.log(3.0)           # two experts with outputs 1 and 0 at x = 1
def gate(W):
    return sigmoid(W)[0] / sigmoid(W).sum()
rate = (gate(W + 1e-6) - gate(W - 1e-6)) / 2e-6    # of the output along W_1 + W_2
print("output", gate(W), "moved", gate(W + c), "rate", rate)    # 2/3, 3/5, -1/18
assert abs(gate(W + c) - gate(W)) > 0.06 and abs(rate + 1 / 18) < 1e-6"""

SIGMOID_WITNESS = Witness(
    data={"d": 1, "n": 2, "x": 1, "W": "(log 1, log 1/3)", "σ(Wx)": "(1/2, 1/4)", "expert outputs": "(1, 0)"},
    claimed="the output, g_1, does not move along W_1 + W_2",
    found="its rate is g_1 g_2 (σ_2 − σ_1) = 2/3·1/3·(−1/4) = −1/18; at W + log 3 the output is 3/5 instead of 2/3",
    numpy=SHIFTED,
)

THEOREMS: dict[str, Callable[..., Verdict]] = {
    "paper.T4.1.gelu": list_of(GELU),
    "paper.T4.1.silu": list_of(SILU),
    "paper.T4.2": laws_of(SWIGLU, why=swiglu_argument),
    "paper.T4.2.complete": list_of(SWIGLU),
    "paper.T4.2.pde": pde_of(SWIGLU),
    "paper.T4.3": laws_of(ATTENTION, why=attention_argument),
    "paper.T4.3.complete": list_of(ATTENTION),
    "paper.T4.3.pde": pde_of(ATTENTION),
    "paper.PE": list_of(SINUSOIDAL),
    "paper.T4.4": laws_of(*ROTARY, why=rotary_argument),
    "paper.T4.4.complete": list_of(*ROTARY),
    "paper.T4.4.pde": pde_of(*ROTARY),
    "paper.T4.5": laws_of(MIXTURE, why=mixture_argument),
    "paper.T4.5.complete": list_of(MIXTURE),
    "paper.T4.5.pde": pde_of(MIXTURE),
    "paper.T4.6": list_of(SPARSE),
    "paper.T4.6.pde": pde_of(SPARSE),
    "paper.T4.6.k": list_of(SWITCH),
    "paper.T4.7": sigmoid_as_stated,
    "paper.T4.7.pde": pde_of(SIGMOID_AS_STATED),
    "paper.T4.7.corrected": list_of(SIGMOID),
    "paper.T4.7.pde.corrected": pde_of(SIGMOID),
    "paper.T4.7.sparse": list_of(SPARSE_SIGMOID),
}
"""One runner for the laws, one for the complete list and one for the equations of every theorem."""

for _code, _check in THEOREMS.items():
    claim(_code)(_check)
