r"""A claim of ours on what the paper leaves open: pre-norm networks of any depth and size.

Let f(x) = x + Σ_ℓ B_ℓ(γ_ℓ ⊙ n(u_ℓ)), where u_ℓ is the stream before layer ℓ, n(u) = u/rms(u) and B_ℓ is multi-head
attention or a SiLU network.

*Layers separate by scale.* n(cz) = n(z) for c > 0, up to the ε of the norm, which vanishes as c → ∞. So
u_ℓ = cz + O(1) gives n(u_ℓ) = n(z) + O(1/c), and ∇_θ f(cz) tends to ∇_θ Σ_ℓ B_ℓ(γ_ℓ ⊙ n(z)). The span of gradients is
a finite-dimensional space, hence closed, and it contains these limits. Every law is a law of the *parallel* network,
whose layers all read n(z).

*Attention separates from the rest.* The heads of all layers are one attention with gains. For tokens (x, y, …, y) the
criterion is the paper's rational function of the length, and networks add to its constant, which Lemma B.1 keeps apart
from the poles. Points of a sphere and their differences span R^d if d ≥ 2, so x M (x − y)ᵀ = 0 on the sphere gives
M = 0. The equations are those of Theorem 4.3 with γ_k ∂_{Q_k}h + Q_k ∂_{γ_k}h in place of ∂_{Q_k}h, and so for K, V.

*Counting with gains.* Let w_k be the row k of all Q, K, V behind one norm, and w'_k = γ_k w_k. The fields of these
equations keep c_k = γ_k² − ‖w_k‖², and on w' they are gradients in the metric γ_k² + w'_k w'_kᵀ/γ_k². For w = εω,
O = εΩ and ε → 0 this tends to γ_k² times the identity: for equal gains the fields of Theorem 4.3 itself. The rank of a
Lie closure does not fall at generic points near a limit, and it is generic by analyticity. So there are at most the
laws of Theorem 4.3, for every size, and the c_k; these are laws.

*SiLU networks on a sphere.* Suppose Σ_j p_j SiLU(β_j·n) + (q_j·n) SiLU′(β_j·n) = 0 for all n on the sphere, so on the
complex quadric. At β_j·n = iπ(2m + 1), away from the poles of the others, the double pole gives q_j·n = 0. These points
span C^d, so q_j = 0, and the simple pole gives p_j = 0. With β_jk = B_jk γ_k these are ∇_A h = 0 and
γ_k ∂_{B_jk}h + B_jk ∂_{γ_k}h = 0: boosts of (γ_k, B_:k), whose one invariant is γ_k² − ‖B_:k‖².
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from conserved.discovery import discover
from conserved.verdict import Evidence, Verdict
from conserved_papers.blocks import Attention, FeedForward
from conserved_papers.claims.judging import InWords, by_steps, refuted
from conserved_papers.claims.paper_global import cited
from conserved_papers.claims.registry import claim

EPSILON = 1e-6


class PreNorm(nn.Module):
    """Layers on a residual stream, each behind an RMS norm with gains; or all reading the normalised input."""

    def __init__(self, dim: int, layers: Sequence[Attention | FeedForward], *, gains: bool = True) -> None:
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
    """A network as the letters of its layers: a number for attention of so many heads, a name for an activation."""

    dim: int
    layers: tuple[int | Literal["silu"], ...]
    hidden: int = 2

    def build(self, *, gains: bool = True) -> PreNorm:
        made = [
            Attention(self.dim, layer, scale=1.0)
            if isinstance(layer, int)
            else FeedForward(self.dim, self.hidden, layer)
            for layer in self.layers
        ]
        return PreNorm(self.dim, made, gains=gains).double()

    @property
    def laws(self) -> int:
        """The count that the argument gives: two Gram differences a head, and one number a channel of every norm."""
        heads = [layer for layer in self.layers if isinstance(layer, int)]
        widths = [self.dim // count for count in heads]
        grams = sum(count * width * (width + 1) for count, width in zip(heads, widths, strict=True))
        return grams + self.dim * len(self.layers)


NETWORKS = (
    Layers(2, (1,)),
    Layers(2, (1, "silu")),
    Layers(2, (2, 2, 2)),
    Layers(3, (1, "silu"), hidden=3),
    Layers(2, (2, "silu", 2, "silu")),
)


def distance_from_parallel(scale: float) -> float:
    """Return how far ∇_θ f(cz) is from that of the parallel network, relatively, at inputs of one scale c."""
    model = Layers(3, (1, "silu", 3, "silu")).build()
    x = scale * torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for model.parallel in (False, True):
        gradients = torch.autograd.grad(model(x)[0, 0], list(model.parameters()))
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return float((found[0] - found[1]).norm() / found[1].norm())


@claim("paper.open.depth")
def any_depth(*, networks: Sequence[Layers] = NETWORKS, gains: bool = True) -> Verdict:
    torch.manual_seed(0)
    counts = []
    for network in networks:
        model = network.build(gains=gains)
        found = discover(model, torch.zeros(3, network.dim, dtype=torch.float64), forms=False)
        counts.append((network, found.count))
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
        return refuted("A network has another number of laws, or layers do not separate.", *beside)
    return by_steps(
        "The laws of every head and the gains of every norm against the columns that read it, for every depth and "
        "size; no others.",
        "A part fails.",
        *cited(("paper.T4.3.all", "paper.LB.1", "paper.LC.1", "paper.C1")),
        InWords("inputs of growing scale: the layers read the same normalised input, so every law is one of the "
                "parallel network"),
        InWords("attention: the criterion of Theorem 4.3 on a sphere, with γ ∂_Q h + Q ∂_γ h in place of ∂_Q h; "
                "as weights shrink against the gains its fields become those of Theorem 4.3, and rank does not fall"),
        InWords("SiLU networks on a sphere: poles on the complex quadric give ∇_A h = 0 and boosts of gains against "
                "columns"),
        beside=beside,
    )  # fmt: skip
