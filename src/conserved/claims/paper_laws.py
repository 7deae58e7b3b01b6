"""Claims of the paper: Theorems 4.1 to 4.7, each as laws, as a complete list, and as the PDE behind it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conserved.claims import paper_blocks as block
from conserved.claims.certified import (
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
from conserved.claims.judging import argued, judged, together
from conserved.claims.ledger import claim
from conserved.claims.paper_blocks import EXPERTS, FFN, TWO_HEADS, TWO_PLANES, TWO_ROTARY_HEADS
from conserved.claims.polynomials import Letters, identical, rank, times
from conserved.claims.words import matrices
from conserved.verdict import Evidence, Verdict, Witness

DEFINITION = ("laws are C¹ functions on the whole parameter space", "for every data set; V_ℓ is all of R^out")
"""What Sections 2 and 3 ask of a law; the lists below are about all of them near a generic point."""


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
    """Whether the quantities are laws: at these sizes by certificate, and for all by the argument, if there is one."""
    found = together(*(laws_hold(c.build, c.shape, c.quantities or _none, size=c.size, witness=witness) for c in cases))
    if why is None or not found.holds:
        return found
    return argued("All are laws.", "The argument fails.", *why(), beside=found.evidence)


def _none(theta: Parameters) -> Tensor:
    return torch.zeros(0, dtype=torch.float64)


def complete(*cases: Case) -> Verdict:
    """Whether the quantities are all laws there are, at each of the sizes."""
    return together(*(all_laws(c.build, c.shape, c.quantities, size=c.size) for c in cases))


def equations(*cases: Case, witness: Witness | None = None) -> Verdict:
    """Whether the PDE has the gradients of laws as its solutions, at each of the sizes."""
    assert all(c.constraints for c in cases)
    found = (constraints_characterise(c.build, c.shape, c.constraints or _no, size=c.size) for c in cases)
    verdict = together(*found)
    return replace(verdict, witness=witness) if verdict == Verdict.REFUTED else verdict


def _no(theta: Parameters, gradient: Parameters) -> Tensor:
    return torch.zeros(0, dtype=torch.float64)


def through_a_product() -> list[tuple[str, bool]]:
    """A model that sees A and B through ABᵀ alone: with M the gradient in ABᵀ, ∇A = MB and ∇B = MᵀA."""
    a, b, m = matrices("ABM")
    ga, gb = m @ b, m.T @ a
    rate = ga.T @ a + a.T @ ga - gb.T @ b - b.T @ gb
    return [("d/dt (AᵀA − BᵀB) = −(GᵀA + AᵀG) + (HᵀB + BᵀH) = 0 for G = MB, H = MᵀA, word by word", not rate)]


def swiglu_argument() -> list[tuple[str, bool]]:
    step = "f = Σ_i SiLU(B_i x) A_:,i C_i,: x sees the column A_:,i and the row C_i,: through their product alone"
    letters = Letters(A=(2, 3), C=(3, 2), s=(3,), x=(2,))
    a, c, s, x = (letters[name] for name in "ACsx")
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
    p = Letters(p=(4,), c=())
    weights, factor = p["p"], p.scalar("c")
    total, moved = sum(weights), sum(times(factor, weights))
    same = all(identical(factor * weights[i] * total, weights[i] * moved) for i in range(4))
    step = "e^c cancels in softmax(z + c·1), so ΣW_i moves nothing: Σ_i ∇_{W_i}L = 0 (four experts, as polynomials)"
    return [(step, same), *swiglu_argument()]


def state(
    code: str, title: str, place: str, lines: str, statement: str, check: Callable[..., Verdict], **more: Any
) -> None:
    """Register one row: a statement of a theorem and the runner that decides it."""
    conditions = more.pop("conditions", DEFINITION)
    claim(code, title, statement=statement, place=place, lines=lines, conditions=conditions, **more)(check)


def laws_of(*cases: Case, why: Steps | None = None, witness: Witness | None = None) -> Callable[..., Verdict]:
    """A check whose subject is the cases."""
    return lambda *, cases=cases: conserved_for_all_sizes(*cases, why=why, witness=witness)


def list_of(*cases: Case) -> Callable[..., Verdict]:
    return lambda *, cases=cases: complete(*cases)


def pde_of(*cases: Case, witness: Witness | None = None) -> Callable[..., Verdict]:
    return lambda *, cases=cases: equations(*cases, witness=witness)


state("paper.T4.1.gelu", "GELU networks conserve nothing", "Theorem 4.1, GELU", "146-152, 164-166",
      "Every conservation law of x ↦ A·GELU(Bx) is constant.", list_of(GELU),
      latex=[r"f(x;A,B)=A\cdot\operatorname{GELU}(Bx)"])  # fmt: skip
state("paper.T4.1.silu", "SiLU networks conserve nothing", "Theorem 4.1, SiLU", "154-156, 164-166",
      "Every conservation law of x ↦ A·SiLU(Bx) is constant.", list_of(SILU),
      latex=[r"f(x;A,B)=A\cdot\operatorname{SiLU}(Bx)"])  # fmt: skip
state("paper.T4.2", "What SwiGLU conserves", "Theorem 4.2, its invariants", "176, 184, 671",
      "For x ↦ A(SiLU(Bx) ⊙ Cx) every ‖A_:,i‖² − ‖C_i,:‖² is conserved.", laws_of(SWIGLU, why=swiglu_argument),
      latex=[r"\|A_{:,i}\|^2-\|C_{i,:}\|^2,\ i\in[d_1]"])  # fmt: skip
state("paper.T4.2.complete", "SwiGLU conserves nothing else", "Theorem 4.2, consequently", "184",
      "Every conservation law of a SwiGLU network is, near a generic point, a function of those differences.",
      list_of(SWIGLU))  # fmt: skip
state("paper.T4.2.pde", "The equations of SwiGLU", "Theorem 4.2, its constraints", "180-182",
      "h is conserved by a SwiGLU network exactly if ∇_B h = 0 and ∇_{A_:,i}h C_i,: + A_:,i ∇_{C_i,:}h = 0 for all i.",
      pde_of(SWIGLU), latex=[r"\nabla_B h=0,\quad\nabla_{A_{:,i}}h\cdot C_{i,:}+A_{:,i}\cdot\nabla_{C_{i,:}}h=0"])  # fmt: skip
state("paper.T4.3", "What attention conserves", "Theorem 4.3, its invariants", "194-203, 212",
      "Every head of multi-head attention conserves QᵀQ − KᵀK and VᵀV − OᵀO.",
      laws_of(ATTENTION, why=attention_argument),
      latex=[r"Q_i^{\top}Q_i-K_i^{\top}K_i,\quad V_i^{\top}V_i-O_i^{\top}O_i"])  # fmt: skip
state("paper.T4.3.complete", "Attention conserves nothing else", "Theorem 4.3, consequently", "190, 203-212",
      "QᵀQ − KᵀK and VᵀV − OᵀO of all heads are, near a generic point, all laws of multi-head attention.",
      list_of(ATTENTION), hypotheses="Several heads, the open problem; proved again at this size, without complex "
      "analysis.")  # fmt: skip
state("paper.T4.3.pde", "The equations of attention", "Theorem 4.3, its constraints", "207-210, 823-827",
      "h is conserved by multi-head attention exactly if K_i(∇_{Q_i}h)ᵀ + (∇_{K_i}h)Q_iᵀ = 0 and "
      "O_i(∇_{V_i}h)ᵀ + (∇_{O_i}h)V_iᵀ = 0 for every head.", pde_of(ATTENTION),
      latex=[r"0=K_i(\nabla_{Q_i}h)^{\top}+(\nabla_{K_i}h)Q_i^{\top}",
             r"0=O_i(\nabla_{V_i}h)^{\top}+(\nabla_{O_i}h)V_i^{\top}"])  # fmt: skip
state("paper.PE", "Sinusoidal positions change nothing", "Section 4.2, sinusoidal encoding", "190, 218-222",
      "Attention behind an added fixed position code has the laws of attention without, and no others.",
      list_of(SINUSOIDAL), hypotheses="x ↦ x + p is a bijection, so the same gradients occur, for every size; the list "
      "is certified at one.", latex=[r"\mathbf{x}\mapsto\mathbf{x}+\mathbf{p}"])  # fmt: skip
state("paper.T4.4", "What rotary attention conserves", "Theorem 4.4, its invariants", "224-239, 252, 1044",
      "With rotary positions every plane j of every head conserves ‖Q^(j)‖² − ‖K^(j)‖², and every head VᵀV − OᵀO.",
      laws_of(*ROTARY, why=rotary_argument), latex=[r"\|Q_i^{(j)}\|_F^2-\|K_i^{(j)}\|_F^2"])  # fmt: skip
state("paper.T4.4.complete", "Rotary attention conserves nothing else", "Theorem 4.4, consequently", "252",
      "The differences of the planes and VᵀV − OᵀO are, near a generic point, all laws of rotary attention.",
      list_of(*ROTARY))  # fmt: skip
state("paper.T4.4.pde", "The equations of rotary attention", "Theorem 4.4, its constraints", "243-250, 1042-1044",
      "h is conserved by rotary attention exactly if every plane satisfies the equation of Theorem 4.3 with and without "
      "J between the factors, and every head that of values and outputs.", pde_of(*ROTARY),
      latex=[r"0=K_i^{(j)}(\nabla_{Q_i^{(j)}}h)^{\top}+\nabla_{K_i^{(j)}}h\,(Q_i^{(j)})^{\top}",
             r"0=K_i^{(j)}J(\nabla_{Q_i^{(j)}}h)^{\top}+\nabla_{K_i^{(j)}}h\,J(Q_i^{(j)})^{\top}"])  # fmt: skip
state("paper.T4.5", "What a dense mixture conserves", "Theorem 4.5, its invariants", "266-274, 278, 290",
      "A mixture of SwiGLU experts under a softmax gate conserves the laws of every expert, and Σ_i W_i.",
      laws_of(MIXTURE, why=mixture_argument),
      latex=[r"\|A^{(i)}_{:,j}\|^2-\|C^{(i)}_{j,:}\|^2,\quad\sum_{i=1}^{n}W_i"])  # fmt: skip
state("paper.T4.5.complete", "A dense mixture conserves nothing else", "Theorem 4.5, consequently", "278, 290",
      "The laws of the experts and Σ_i W_i are, near a generic point, all laws of a softmax mixture.",
      list_of(MIXTURE))  # fmt: skip
state("paper.T4.5.pde", "The equations of a dense mixture", "Theorem 4.5, its constraints", "282-288, 1205-1209",
      "h is conserved by a softmax mixture exactly if the experts satisfy the equations of SwiGLU and "
      "∇_{W_1}h = … = ∇_{W_n}h.", pde_of(MIXTURE),
      latex=[r"\nabla_{W_1}h=\nabla_{W_2}h=\dots=\nabla_{W_n}h"])  # fmt: skip
state("paper.T4.6", "A sparse mixture has the laws of the dense one", "Theorem 4.6", "294-306, 308-310",
      "With k > 1 active experts, renormalised, a softmax mixture has exactly the laws of the dense mixture.",
      list_of(SPARSE), conditions=["k > 1", *DEFINITION],
      hypotheses="d ≥ n, as in the proof; near θ, for inputs that activate every pair of experts. For d < n see "
      "paper.T4.6.narrow.")  # fmt: skip
state("paper.T4.6.pde", "The equations of a sparse mixture", "Theorem 4.6, the same constraints", "310, 1257-1265",
      "h is conserved by a sparse softmax mixture exactly if it satisfies the equations of the dense one.",
      pde_of(SPARSE), conditions=["k > 1", *DEFINITION], hypotheses="d ≥ n, as in the proof.")  # fmt: skip
state("paper.T4.6.k", "Without k > 1 there are more laws", "sharpens Remark 5.2", "354-360",
      "With one active expert of weight one the router gets no gradient: all of W is conserved, not only Σ_i W_i.",
      list_of(SWITCH), whose="ours", latex=[r"\bar g_i=g_i/g_i=1"])  # fmt: skip

NARROW = """\
import numpy as np
W = np.array([3.0, 2.0, 1.0, 0.0])                 # d = 1 < n = 4, k = 2: e_T = W x has no solution
rng = np.random.default_rng(0)
for trial in range(100):                           # nor has it near this W
    V = W + rng.uniform(-0.3, 0.3, 4)
    active = {tuple(sorted(np.argsort(-V * x)[:2])) for x in (-2.0, -1.0, 1.0, 2.0)}
    assert active == {(0, 1), (2, 3)}              # T = {1, 3} occurs for no input: Theta(T) is not dense
print("pairs that are ever active:", active)"""


@claim(
    "paper.S5.assumptions",
    "The proofs need no additional assumption",
    statement="The proofs, that of Theorem 4.6 included, assume nothing beyond Sections 2 and 3.",
    place="Section 5, against Appendix C.3",
    lines="338, 1235-1239",
    hypotheses="C.3 takes d > n, which no theorem and neither section states; d ≥ n is enough. Without it W has no n "
    "independent rows, the set S_1 is empty, and the set of θ at which a given pair is ever active is not dense. "
    "Theorem 4.6 itself, for C¹ laws, stands where it was tried without (paper.T4.6.narrow).",
    latex=[r"\mathbf{S}_1=\{\theta:\{W^{(i)}\}_{i\in[n]}\ \text{linearly independent in}\ \mathbb{R}^d\},\quad d>n"],
    severity="overclaim",
    corrected_by="paper.T4.6",
)
def assumptions(*, dim: int = 1, experts: int = 4, active: int = 2) -> Verdict:
    """Whether e_T = W x can be solved for a generic W and every T; for d = 1 which T occur near W = (n − 1, …, 0)."""
    router = np.array([[Fraction(experts - 1 - i) ** j if dim > 1 else Fraction(experts - 1 - i) for j in range(dim)]
                       for i in range(experts)], dtype=object)  # fmt: skip
    independent = rank(router)
    sets = list(itertools.combinations(range(experts), active))
    ever = {tuple(sorted(sorted(range(experts), key=lambda i: -s * router[i, 0])[:active])) for s in (1, -1)}
    data = {"d": dim, "n": experts, "k": active, "W": "within 0.3 of (3, 2, 1, 0)"}
    found = f"only {len(ever)} of {len(sets)} pairs are ever active, for all W near it"
    return judged(
        independent == experts,
        "The rows of a generic W are independent, so every set of experts is active somewhere.",
        "The proof of Theorem 4.6 uses d > n.",
        Evidence(what=f"independent rows of W, d = {dim}", value=independent, limit=experts, proof=True),
        witness=Witness(data=data, claimed="Θ(T) is dense for every T", found=found, numpy=NARROW),
        scope=f"at d = {dim}, n = {experts}",
    )


@claim(
    "paper.T4.6.narrow",
    "Theorem 4.6 at d = 1, four experts, two active",
    statement="Near a generic θ there is one law more than for the dense mixture, the sum of the two largest W_i; but "
    "a law that is C¹ on the whole space depends on the W_i through Σ_i W_i alone, as the theorem says.",
    place="a remark on Theorem 4.6 where its proof does not apply",
    lines="308-310, 1239",
    whose="ours",
    latex=[r"h=F(w_1+w_2,\,w_3+w_4),\qquad\partial_1F=\partial_2F\ \text{on}\ w_2=w_3"],
    slow=True,
)
def narrow(*, after: Sequence[tuple[int, int]] = ((0, 2), (1, 3))) -> Verdict:
    build, shape = block.narrow_sparse_mixture, (6, 1)
    contents = certificate(build, shape).contents
    here = named(torch.tensor(contents.theta, dtype=torch.float64), contents.parameters)
    pair = here["router.weight"][:, 0].topk(2).indices

    def local(theta: Parameters) -> Tensor:
        return torch.cat([block.narrow_invariants(theta), theta["router.weight"][pair].sum(0)])

    list_found = all_laws(build, shape, local, size="d = 1, four experts, k = 2")
    # Slopes F_s, F_t before the tie w_2 = w_3 and F'_s, F'_t after; ∂h/∂w_i must be the same on both sides.
    before = ((0, 1), (2, 3))
    rows = [[0] * 4 for _ in range(4)]
    for expert, row in enumerate(rows):
        row[next(i for i, block_ in enumerate(before) if expert in block_)] += 1
        row[2 + next(i for i, block_ in enumerate(after) if expert in block_)] -= 1
    forced = rank(np.array(rows, dtype=object)) == 3
    letters = Letters(s=(), t=())
    s, t = letters.scalar("s"), letters.scalar("t")
    c = (s + t) / 4
    reached = identical((s - c) - c, (s - t) / 2) and identical(c - (t - c), (s - t) / 2)
    return argued(
        "Across the tie of the second and third expert the gradient is continuous only if both slopes agree.",
        "The slopes may differ.",
        ("near θ the laws are those of the experts, Σ_i W_i and w_1 + w_2, and no others (certificate)",
         list_found == Verdict.PROVED),
        ("continuity of the four ∂h/∂w_i at w_2 = w_3 makes F_s = F_t = F'_s = F'_t: three independent equations", forced),
        ("every (s, t) with s > t is met on such a tie: w_2 = w_3 = (s + t)/4 lies between w_1 and w_4", reached),
        scope="at d = 1, n = 4, k = 2",
        beside=list_found.evidence,
    )  # fmt: skip


@claim(
    "paper.T4.4.change",
    "Rotary positions change the laws",
    statement="With rotary positions the whole matrix QᵀQ − KᵀK is no longer conserved: some of its entries change.",
    place="Section 4.2, rotary encoding",
    lines="190, 233",
    conditions=DEFINITION,
)
def rotary_changes(*, quantities: Quantities = partial(block.gram_differences, count=1)) -> Verdict:
    verdict = laws_hold(block.rotary_attention, (5, 4), quantities, size=TWO_PLANES)
    says, otherwise = "Some entries change: balls exclude zero.", "The whole matrix is conserved."
    return judged(verdict == Verdict.REFUTED, says, otherwise, *verdict.evidence, scope=f"at {TWO_PLANES}")


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

state("paper.T4.7", "Sigmoid gates conserve what softmax gates do", "Theorem 4.7", "314-318, 320-322, 1267-1274",
      "A mixture under a normalised-sigmoid gate has the laws of the softmax mixture, Σ_i W_i among them.",
      laws_of(SIGMOID_AS_STATED, witness=SIGMOID_WITNESS), severity="false", corrected_by="paper.T4.7.corrected",
      latex=[r"g_i(x;W)=\sigma(W^{(i)}x)\Big/\sum_{p=1}^{n}\sigma(W^{(p)}x)"])  # fmt: skip
state("paper.T4.7.pde", "Sigmoid gates have the equations of softmax gates", "Theorem 4.7, the same constraints", "322",
      "h is conserved by a sigmoid mixture exactly if it satisfies the equations of Theorem 4.5.",
      pde_of(SIGMOID_AS_STATED), severity="false", under="paper.T4.7",
      corrected_by="paper.T4.7.pde.corrected")  # fmt: skip
state("paper.T4.7.corrected", "What a sigmoid mixture conserves", "replaces Theorem 4.7, dense", "320-322",
      "A mixture under a normalised-sigmoid gate conserves the laws of its experts and nothing else; nothing of W.",
      list_of(SIGMOID), whose="ours", corrects="paper.T4.7")  # fmt: skip
state("paper.T4.7.pde.corrected", "The equations of a sigmoid mixture", "replaces Theorem 4.7, its constraints",
      "322, 1271-1274", "h is conserved by a sigmoid mixture exactly if the experts satisfy the equations of SwiGLU and "
      "∇_W h = 0.", pde_of(SIGMOID), whose="ours", corrects="paper.T4.7.pde",
      hypotheses="In equation (173) the factors 1 − σ(W_i x) depend on the input, so all ∇_{W_i}h vanish and not only "
      "their differences.", latex=[r"\nabla_W h=0"])  # fmt: skip
state("paper.T4.7.sparse", "What a sparse sigmoid mixture conserves", "replaces Theorem 4.7, sparse", "318-322, 1274",
      "With k = 2 active experts, too, a normalised-sigmoid gate leaves the laws of the experts and nothing else.",
      list_of(SPARSE_SIGMOID), whose="ours", hypotheses="d ≥ n, near θ.")  # fmt: skip
