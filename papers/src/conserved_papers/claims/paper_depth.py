r"""A claim of ours on what the paper leaves open: pre-norm networks of any depth and size.

Let f(x) = x + Σ_ℓ B_ℓ(γ_ℓ ⊙ n(u_ℓ)), where u_ℓ is the stream before layer ℓ, n(u) = u/rms(u) for each token, and B_ℓ
is multi-head attention, a SiLU network or a SwiGLU network. Let d ≥ 2. *No other law* means: near a generic point
every C¹ law is a function of the listed ones.

*Layers separate by scale.* B_ℓ is bounded on the sphere of n, so u_ℓ = cz + O(1) as the input cz grows, for tokens
z_t ≠ 0. Then n(u_ℓ) = n(z) + O(1/c), the derivative of n is O(1/c), and the ε of the norm vanishes. So ∇_θ f(cz)
tends to ∇_θ Σ_ℓ B_ℓ(γ_ℓ ⊙ n(z)). The span of gradients is a finite-dimensional space, hence closed, and it contains
these limits. Every law is a law of the *parallel* network, whose layers all read n(z).

*Gains.* Write w_k for all weights that read channel k of one norm. The criterion for the weights w'_k = γ_k w_k of a
layer without gains holds with D_k h = γ_k ∂_{w_k}h + w_k ∂_{γ_k}h in place of ∂h, by the chain rule.

*Attention separates from networks.* The heads of all layers are one attention that reads n(z). For tokens (x, y, …,
y) the criterion is the paper's rational function of the length, and networks add to its constant, which Lemma B.1
keeps apart from the poles. For x on the sphere the differences x − y span R^d if d ≥ 2, so x M (x − y)ᵀ = 0 on the
sphere gives M = 0. Hence the scores of different heads differ for almost all x, y and weights, and the equations are
those of Theorem 4.3 with D in place of ∂ for Q, K and V. What is left is the criterion of the networks alone.

*Networks on a sphere.* It reads Σ_j (s_j·n + p_j) SiLU(β_j·n) + (c_j·n)(q_j·n) SiLU′(β_j·n) = 0 for all real n with
n·n = d. A SiLU neuron has s_j = 0 and 1 in place of c_j·n; a SwiGLU neuron has p_j = 0. The complex quadric n·n = d
is connected for d ≥ 2, and its real points determine a meromorphic function, so the identity holds on it. Outside
countably many hypersurfaces of (β, c), which leave a dense set, the points with β_j·n = iπ(2m + 1) are poles of no
other neuron and have c_j·n ≠ 0. The double pole gives q_j·n = 0 there. These points span C^d, so q_j = 0. The simple
pole gives p_j = 0 and s_j = 0. With β_j = γ ⊙ B_j and c_j = γ ⊙ C_j these are, where A_j ≠ 0 and by continuity
everywhere, D_B h = 0; ∇_A h = 0 for SiLU; and c_jk ∂_{A_j}h + A_j D_{C_jk}h = 0 for SwiGLU.

*Counting with gains.* The fields of all these equations keep g_k = γ_k² − ‖w_k‖², and on w' they are gradients in the
metric γ_k² + w'_k w'_kᵀ/γ_k². Multiply w, the O of heads and the A of SwiGLU neurons by ε. As ε → 0 at equal gains,
the metric tends to γ² times the identity: the fields become those of Theorems 4.3 and 4.2, with translations of B, up
to constant factors. Rank does not fall near a limit, and the fields are polynomials on the whole parameter space, so
their Lie closure has at least that rank at almost every point. By Theorems 4.2 and 4.3 there are at most their laws
and the g_k (paper.C1), and all of these are laws of f. For a SiLU network D_B h = 0 is a boost of (γ_k, B_:k) for
each entry, whose one invariant is g_k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from conserved.discovery import discover
from conserved.verdict import Evidence, Verdict
from conserved_papers.blocks import Attention, FeedForward, SwiGLU
from conserved_papers.claims.judging import InWords, by_steps, refute
from conserved_papers.claims.paper_global import cite
from conserved_papers.claims.registry import claim

EPSILON = 1e-6


class PreNorm(nn.Module):
    """Layers on a residual stream, each behind an RMS norm with gains; or all reading the normalised input."""

    def __init__(self, dim: int, layers: Sequence[Attention | FeedForward | SwiGLU], *, gains: bool = True) -> None:
        super().__init__()
        self.gains = nn.ParameterList(nn.Parameter(torch.rand(dim) + 0.5, requires_grad=gains) for _ in layers)
        self.layers = nn.ModuleList(layers)
        self.parallel = False

    def forward(self, x: Tensor) -> Tensor:
        start = x
        for gain, layer in zip(self.gains, self.layers, strict=True):
            read = start if self.parallel else x
            x = x + layer(read * torch.rsqrt(read.square().mean(-1, keepdim=True) + EPSILON) * gain)
        return x


@dataclass(frozen=True, slots=True)
class Layers:
    """A network as the names of its layers: a number for attention of so many heads, or the kind of a network."""

    dim: int
    layers: tuple[int | Literal["silu", "swiglu"], ...]
    hidden: int = 2

    def build(self, *, gains: bool = True) -> PreNorm:
        return PreNorm(self.dim, [self._layer(kind) for kind in self.layers], gains=gains).double()

    def _layer(self, kind: int | Literal["silu", "swiglu"]) -> Attention | FeedForward | SwiGLU:
        if isinstance(kind, int):
            return Attention(self.dim, kind, scale=1.0)
        return SwiGLU(self.dim, self.hidden) if kind == "swiglu" else FeedForward(self.dim, self.hidden, kind)

    @property
    def laws(self) -> int:
        """The count that the argument gives.

        Each head has two Gram differences, each SwiGLU neuron one number, and each norm one number per channel.
        """
        heads = [layer for layer in self.layers if isinstance(layer, int)]
        widths = [self.dim // count for count in heads]
        grams = sum(count * width * (width + 1) for count, width in zip(heads, widths, strict=True))
        return grams + self.hidden * self.layers.count("swiglu") + self.dim * len(self.layers)


NETWORKS = (
    Layers(2, (1,)),
    Layers(2, ("swiglu",)),
    Layers(2, (2, 2, 2)),
    Layers(3, (1, "silu"), hidden=3),
    Layers(2, (2, "swiglu", 2, "silu")),
)


def distance_from_parallel(scale: float) -> float:
    """Return how far ∇_θ f(cz) is from that of the parallel network, relatively, at inputs of one scale c."""
    model = Layers(3, (1, "silu", 3, "swiglu")).build()
    x = scale * torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    result = []
    for model.parallel in (False, True):
        gradients = torch.autograd.grad(model(x)[0, 0], list(model.parameters()))
        result.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return float((result[0] - result[1]).norm() / result[1].norm())


@claim("paper.open.depth")
def any_depth(*, networks: Sequence[Layers] = NETWORKS, gains: bool = True) -> Verdict:
    torch.manual_seed(0)
    counts = []
    for network in networks:
        model = network.build(gains=gains)
        result = discover(model, torch.zeros(3, network.dim, dtype=torch.float64), forms=False)
        counts.append((network, result.count))
    torch.manual_seed(0)
    far = distance_from_parallel(1e3)
    torch.manual_seed(0)
    farther = distance_from_parallel(1e4)
    beside = [
        Evidence(what=f"laws counted numerically, d = {n.dim}, layers {n.layers}; argued: {n.laws}", value=count)
        for n, count in counts
    ]
    beside.append(Evidence(what="distance from the parallel network at inputs of scale 1,000 over that at 10,000",
                           value=far / farther, limit="10 expected"))  # fmt: skip
    if any(count != network.laws for network, count in counts) or not 8 < far / farther < 12:
        return refute("A network has another number of laws, or layers do not separate.", *beside)
    return by_steps(
        "The laws of every head and SwiGLU neuron, and the gains of every norm against the columns that read it, for "
        "every depth and size; no others.",
        "A part fails.",
        *cite(("paper.T4.2.all", "paper.T4.3.all", "paper.LB.1", "paper.C1")),
        InWords("inputs cz of growing scale: the stream is cz + O(1) before every layer, so all layers read n(z) in "
                "the limit; spans of gradients are closed, so every law is one of this parallel network"),
        InWords("attention: the criterion of Theorem 4.3 on a sphere of dimension d − 1 ≥ 1, where x and x − y "
                "still span; with gains γ ∂_w h + w ∂_γ h takes the place of ∂_w h; networks add to the constant "
                "term alone"),
        InWords("networks: on the complex quadric n·n = d the double poles of SiLU′ give γ ∂_B h + B ∂_γ h = 0, and "
                "the simple poles ∇_A h = 0 (SiLU) or the equation of Theorem 4.2 (SwiGLU), on a dense set and so "
                "everywhere"),
        InWords("the fields keep γ_k² − ‖w_k‖²; as weights shrink against equal gains they become those of Theorems "
                "4.2 and 4.3, the rank of a Lie closure does not fall near a limit, and polynomial fields have it "
                "almost everywhere"),
        beside=beside,
    )  # fmt: skip
