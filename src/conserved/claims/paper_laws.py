"""Claims of the paper: Theorems 4.1 to 4.7, each as laws, as a complete list, and as the PDE behind it."""

from __future__ import annotations

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
from conserved.claims.judging import judged
from conserved.claims.ledger import claim
from conserved.claims.paper_blocks import EXPERTS, FFN, TWO_HEADS, TWO_PLANES
from conserved.verdict import Verdict, Witness


@claim(
    "paper.T4.1.gelu",
    "GELU networks conserve nothing",
    statement="Every conservation law of x ↦ A·GELU(Bx) is constant: the gradients of the outputs span all of ∇h.",
    place="Theorem 4.1, GELU",
    latex=[r"f(x;A,B)=A\cdot\operatorname{GELU}(Bx)", r"\nabla_A h=0,\quad\nabla_B h=0"],
)
def gelu_conserves_nothing(*, build: Build = block.gelu_network) -> Verdict:
    return all_laws(build, (5, 3), None, size=FFN)


@claim(
    "paper.T4.1.silu",
    "SiLU networks conserve nothing",
    statement="Every conservation law of x ↦ A·SiLU(Bx) is constant.",
    place="Theorem 4.1, SiLU",
    latex=[r"f(x;A,B)=A\cdot\operatorname{SiLU}(Bx)"],
)
def silu_conserves_nothing(*, build: Build = block.silu_network) -> Verdict:
    return all_laws(build, (5, 3), None, size=FFN)


@claim(
    "paper.T4.2",
    "What SwiGLU conserves",
    statement="For x ↦ A(SiLU(Bx) ⊙ Cx) every ‖A_:,i‖² − ‖C_i,:‖² is conserved.",
    place="Theorem 4.2, its invariants",
    latex=[r"\|A_{:,i}\|^2-\|C_{i,:}\|^2"],
)
def swiglu_laws(*, quantities: Quantities = block.neuron_differences) -> Verdict:
    return laws_hold(block.swiglu_network, (5, 3), quantities, size=FFN)


@claim(
    "paper.T4.2.complete",
    "SwiGLU conserves nothing else",
    statement="Every conservation law of a SwiGLU network is, near a generic point, a function of those differences.",
    place="Theorem 4.2, consequently",
)
def swiglu_complete(
    *, build: Build = block.swiglu_network, quantities: Quantities = block.neuron_differences
) -> Verdict:
    return all_laws(build, (5, 3), quantities, size=FFN)


@claim(
    "paper.T4.2.pde",
    "The equations of SwiGLU",
    statement="h is conserved by a SwiGLU network exactly if ∇_B h = 0 and "
    "∇_{A_:,i}h C_i,: + A_:,i ∇_{C_i,:}h = 0 for all i.",
    place="Theorem 4.2, its constraints",
    latex=[r"\nabla_B h=0,\quad\nabla_{A_{:,i}}h\cdot C_{i,:}+A_{:,i}\cdot\nabla_{C_{i,:}}h=0"],
)
def swiglu_pde(*, constraints: Constraints = block.swiglu_constraints) -> Verdict:
    return constraints_characterise(block.swiglu_network, (5, 3), constraints, size=FFN)


@claim(
    "paper.T4.3",
    "What attention conserves",
    statement="Every head of multi-head attention conserves QᵀQ − KᵀK and VᵀV − OᵀO.",
    place="Theorem 4.3, its invariants",
    latex=[r"Q_i^{\top}Q_i-K_i^{\top}K_i,\quad V_i^{\top}V_i-O_i^{\top}O_i"],
)
def attention_laws(*, quantities: Quantities = block.gram_differences) -> Verdict:
    return laws_hold(block.attention, (5, 4), quantities, size=TWO_HEADS)


@claim(
    "paper.T4.3.complete",
    "Attention conserves nothing else",
    statement="QᵀQ − KᵀK and VᵀV − OᵀO of all heads are all laws of multi-head attention.",
    place="Theorem 4.3, consequently",
    hypotheses="The open problem of several heads; proved again at this size, without complex analysis.",
)
def attention_complete(*, build: Build = block.attention, quantities: Quantities = block.gram_differences) -> Verdict:
    return all_laws(build, (5, 4), quantities, size=TWO_HEADS)


@claim(
    "paper.T4.3.pde",
    "The equations of attention",
    statement="h is conserved by multi-head attention exactly if K_i(∇_{Q_i}h)ᵀ + (∇_{K_i}h)Q_iᵀ = 0 and "
    "O_i(∇_{V_i}h)ᵀ + (∇_{O_i}h)V_iᵀ = 0 for every head.",
    place="Theorem 4.3, its constraints",
    latex=[
        r"K_i(\nabla_{Q_i}h)^{\top}+(\nabla_{K_i}h)Q_i^{\top}=0",
        r"O_i(\nabla_{V_i}h)^{\top}+(\nabla_{O_i}h)V_i^{\top}=0",
    ],
)
def attention_pde(*, constraints: Constraints = block.attention_constraints) -> Verdict:
    return constraints_characterise(block.attention, (5, 4), constraints, size=TWO_HEADS)


@claim(
    "paper.PE",
    "Sinusoidal positions change nothing",
    statement="Attention behind an added fixed position code has the laws of attention without, and no others.",
    place="Section 4.2, sinusoidal encoding",
    latex=[r"\mathbf{x}\mapsto\mathbf{x}+\mathbf{p}"],
)
def sinusoidal_complete(
    *, build: Build = block.sinusoidal_attention, quantities: Quantities = block.sinusoidal_gram_differences
) -> Verdict:
    return all_laws(build, (5, 4), quantities, size=TWO_HEADS)


@claim(
    "paper.T4.4",
    "What rotary attention conserves",
    statement="With rotary positions every plane j of a head conserves ‖Q^(j)‖² − ‖K^(j)‖², and the head VᵀV − OᵀO.",
    place="Theorem 4.4, its invariants",
    latex=[r"\|Q_i^{(j)}\|_F^2-\|K_i^{(j)}\|_F^2,\quad V_i^{\top}V_i-O_i^{\top}O_i"],
)
def rotary_laws(*, quantities: Quantities = block.plane_differences) -> Verdict:
    return laws_hold(block.rotary_attention, (5, 4), quantities, size=TWO_PLANES)


@claim(
    "paper.T4.4.complete",
    "Rotary attention conserves nothing else",
    statement="The differences of the planes and VᵀV − OᵀO are all laws of rotary attention.",
    place="Theorem 4.4, consequently",
)
def rotary_complete(
    *, build: Build = block.rotary_attention, quantities: Quantities = block.plane_differences
) -> Verdict:
    return all_laws(build, (5, 4), quantities, size=TWO_PLANES)


@claim(
    "paper.T4.4.pde",
    "The equations of rotary attention",
    statement="h is conserved by rotary attention exactly if every plane satisfies the equation of Theorem 4.3 with "
    "and "
    "without J between the factors, and every head that of values and outputs.",
    place="Theorem 4.4, its constraints",
    latex=[
        r"K_i^{(j)}(\nabla_{Q_i^{(j)}}h)^{\top}+\nabla_{K_i^{(j)}}h\,(Q_i^{(j)})^{\top}=0",
        r"K_i^{(j)}J(\nabla_{Q_i^{(j)}}h)^{\top}+\nabla_{K_i^{(j)}}h\,J(Q_i^{(j)})^{\top}=0",
    ],
)
def rotary_pde(*, constraints: Constraints = block.rotary_constraints) -> Verdict:
    return constraints_characterise(block.rotary_attention, (5, 4), constraints, size=TWO_PLANES)


@claim(
    "paper.T4.4.change",
    "Rotary positions change the laws",
    statement="With rotary positions the whole matrix QᵀQ − KᵀK is no longer conserved: some of its entries change.",
    place="Section 4.2, rotary encoding; Remark 5.1",
)
def rotary_changes(*, quantities: Quantities = block.rotary_gram_differences) -> Verdict:
    verdict = laws_hold(block.rotary_attention, (5, 4), quantities, size=TWO_PLANES)
    changed = verdict == Verdict.REFUTED
    return judged(
        changed, "Some entries change: balls exclude zero.", "The whole matrix is conserved.", *verdict.evidence
    )


@claim(
    "paper.T4.5",
    "What a dense mixture conserves",
    statement="A mixture of SwiGLU experts under a softmax gate conserves the laws of every expert, and Σ_i W_i.",
    place="Theorem 4.5, its invariants",
    latex=[r"\|A^{(i)}_{:,j}\|^2-\|C^{(i)}_{j,:}\|^2,\quad\sum_{i=1}^{n}W_i"],
)
def mixture_laws(*, build: Build = block.mixture, quantities: Quantities = block.mixture_invariants) -> Verdict:
    return laws_hold(build, (4, 3), quantities, size=EXPERTS)


@claim(
    "paper.T4.5.complete",
    "A dense mixture conserves nothing else",
    statement="The laws of the experts and Σ_i W_i are all laws of a softmax mixture.",
    place="Theorem 4.5, consequently",
)
def mixture_complete(*, build: Build = block.mixture, quantities: Quantities = block.mixture_invariants) -> Verdict:
    return all_laws(build, (4, 3), quantities, size=EXPERTS)


@claim(
    "paper.T4.5.pde",
    "The equations of a dense mixture",
    statement="h is conserved by a softmax mixture exactly if the experts satisfy the equations of SwiGLU and "
    "∇_{W_1}h = … = ∇_{W_n}h.",
    place="Theorem 4.5, its constraints",
    latex=[r"\nabla_{W_1}h=\nabla_{W_2}h=\dots=\nabla_{W_n}h"],
)
def mixture_pde(*, build: Build = block.mixture, constraints: Constraints = block.mixture_constraints) -> Verdict:
    return constraints_characterise(build, (4, 3), constraints, size=EXPERTS)


@claim(
    "paper.T4.6",
    "A sparse mixture has the laws of the dense one",
    statement="With k > 1 active experts, renormalised, a softmax mixture has exactly the laws of the dense mixture.",
    place="Theorem 4.6",
    hypotheses="d ≥ n, which the proof uses and the theorem does not say (paper.T4.6.width). Near θ, for inputs that "
    "activate every pair of experts.",
    corrects="paper.T4.6.width",
)
def sparse_complete(
    *, build: Build = block.sparse_mixture, quantities: Quantities = block.mixture_invariants
) -> Verdict:
    return all_laws(build, (4, 3), quantities, size=f"{EXPERTS}, k = 2")


@claim(
    "paper.T4.6.pde",
    "The equations of a sparse mixture",
    statement="h is conserved by a sparse softmax mixture exactly if it satisfies the equations of the dense one.",
    place="Theorem 4.6, the same constraints",
    hypotheses="k > 1 and d ≥ n.",
)
def sparse_pde(*, build: Build = block.sparse_mixture) -> Verdict:
    return constraints_characterise(build, (4, 3), block.mixture_constraints, size=f"{EXPERTS}, k = 2")


@claim(
    "paper.T4.6.k",
    "The condition k > 1 is needed",
    statement="With one active expert of weight one the router gets no gradient: all of W is conserved, not only Σ_i "
    "W_i.",
    place="Remark 5.2",
    latex=[r"\bar g_i=g_i/g_i=1"],
)
def single_expert(
    *, build: Build = block.switch_mixture, quantities: Quantities = block.still_router_invariants
) -> Verdict:
    return all_laws(build, (4, 3), quantities, size=f"{EXPERTS}, k = 1")


NARROW = """\
import numpy as np
W = np.array([3.0, 2.0, 1.0, 0.0])                 # d = 1, four experts, k = 2
def output(W, x, E=np.array([1.0, -2.0, 5.0, 3.0])):
    active = np.argsort(-W * x, kind="stable")[:2]
    g = np.exp(W[active] * x)
    return g @ E[active] / g.sum()
moved = W + [0.5, 0.5, 0.0, 0.0]                   # along W_1 + W_2 alone
gaps = [output(moved, x) - output(W, x) for x in np.linspace(-3, 3, 61) if x != 0]
print("largest change of any output:", np.abs(gaps).max())
assert np.abs(gaps).max() < 1e-12                  # so W_1 + W_2 and W_3 + W_4 are laws, not only their sum"""


@claim(
    "paper.T4.6.width",
    "k > 1 is enough",
    statement="For every k > 1, whatever d and n, the laws of a sparse mixture near a point are those of the dense "
    "one.",
    place="Theorem 4.6 as stated; Section 5 says that the proofs assume no more",
    hypotheses="Near a generic θ. For d = 1 and n = 4 the further law is the sum of the two largest W_i, which is "
    "constant "
    "on every trajectory; it has kinks at ties, so it is no C¹ function on the whole space. The proof (C.3) has d > n.",
    latex=[r"\{W_i\}_{i\le n}\ \text{linearly independent}\ \Rightarrow\ d\ge n"],
    corrected_by="paper.T4.6",
    slow=True,
)
def narrow_complete(
    *,
    build: Build = block.narrow_sparse_mixture,
    shape: tuple[int, ...] = (6, 1),
    quantities: Quantities = block.narrow_invariants,
) -> Verdict:
    witness = Witness(
        data={"d": 1, "n": 4, "k": 2, "W": "(3, 2, 1, 0)"},
        claimed="only W_1 + W_2 + W_3 + W_4 is conserved of W",
        found="x > 0 activates {1, 2} and x < 0 activates {3, 4}: W_1 + W_2 and W_3 + W_4 are both conserved",
        numpy=NARROW,
    )

    def largest_two(theta: Parameters) -> Tensor:
        return theta["router.weight"][pair].sum(0)

    contents = certificate(build, shape).contents
    here = named(torch.tensor(contents.theta, dtype=torch.float64), contents.parameters)
    pair = here["router.weight"][:, 0].topk(2).indices
    return all_laws(build, shape, quantities, size="four experts, k = 2", further=largest_two, witness=witness)


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


@claim(
    "paper.T4.7",
    "Sigmoid gates conserve what softmax gates do",
    statement="A mixture under a normalised-sigmoid gate has the laws of the softmax mixture, Σ_i W_i among them.",
    place="Theorem 4.7",
    latex=[r"g_i=\sigma(W_ix)\Big/\sum_p\sigma(W_px)", r"\sum_i W_i=\text{const}"],
    corrected_by="paper.T4.7.corrected",
)
def sigmoid_laws(*, build: Build = block.sigmoid_mixture) -> Verdict:
    return laws_hold(build, (4, 3), block.mixture_invariants, size=EXPERTS, witness=SIGMOID_WITNESS)


@claim(
    "paper.T4.7.pde",
    "Sigmoid gates have the equations of softmax gates",
    statement="h is conserved by a sigmoid mixture exactly if it satisfies the equations of Theorem 4.5.",
    place="Theorem 4.7, the same constraints",
    corrected_by="paper.T4.7.pde.corrected",
)
def sigmoid_pde(*, build: Build = block.sigmoid_mixture) -> Verdict:
    return constraints_characterise(build, (4, 3), block.mixture_constraints, size=EXPERTS, witness=SIGMOID_WITNESS)


@claim(
    "paper.T4.7.corrected",
    "What a sigmoid mixture conserves",
    statement="A mixture under a normalised-sigmoid gate conserves the laws of its experts and nothing else; nothing "
    "of W.",
    place="replaces Theorem 4.7, dense",
    corrects="paper.T4.7",
)
def sigmoid_complete(
    *, build: Build = block.sigmoid_mixture, quantities: Quantities = block.expert_differences
) -> Verdict:
    return all_laws(build, (4, 3), quantities, size=EXPERTS)


@claim(
    "paper.T4.7.pde.corrected",
    "The equations of a sigmoid mixture",
    statement="h is conserved by a sigmoid mixture exactly if the experts satisfy the equations of SwiGLU and ∇_W h "
    "= 0.",
    place="replaces Theorem 4.7, its constraints",
    hypotheses="In equation (173) the factors 1 − σ(W_i x) depend on the input, so all ∇_{W_i}h vanish and not only "
    "their "
    "differences.",
    latex=[r"\nabla_W h=0"],
    corrects="paper.T4.7.pde",
)
def sigmoid_true_pde(*, constraints: Constraints = block.still_router_constraints) -> Verdict:
    return constraints_characterise(block.sigmoid_mixture, (4, 3), constraints, size=EXPERTS)


@claim(
    "paper.T4.7.sparse",
    "What a sparse sigmoid mixture conserves",
    statement="With k = 2 active experts, too, a normalised-sigmoid gate leaves the laws of the experts and nothing "
    "else.",
    place="replaces Theorem 4.7, sparse",
    hypotheses="d ≥ n, near θ.",
)
def sparse_sigmoid_complete(
    *, build: Build = block.sparse_sigmoid_mixture, quantities: Quantities = block.expert_differences
) -> Verdict:
    return all_laws(build, (4, 3), quantities, size=f"{EXPERTS}, k = 2")
