"""Mixtures of SwiGLU experts (paper, equation 8): dense or top-k, with a softmax or a normalised-sigmoid gate."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from conserved_papers.blocks.feedforward import SwiGLU

Gate = Literal["softmax", "sigmoid"]


class MixtureOfExperts(nn.Module):
    """Σ_i g_i(x) E_i(x), with g the gate's scores renormalised over the experts of highest score.

    Ties go to the expert of lower index, as in the paper.

    Args:
        dim: width of the tokens.
        hidden: hidden units of each expert, a SwiGLU.
        experts: number of experts.
        gate: "softmax", or "sigmoid" normalised to sum one.
        top_k: number of active experts; by default all.

    Raises:
        ValueError: the gate is another word, or the numbers do not fit.
    """

    def __init__(self, dim: int, hidden: int, experts: int, gate: Gate = "softmax", top_k: int | None = None) -> None:
        super().__init__()
        if gate not in ("softmax", "sigmoid"):
            raise ValueError(f'Expected gate to be "softmax" or "sigmoid", got {gate!r}. Pass one of them.')
        if experts < 1 or (top_k is not None and not 1 <= top_k <= experts):
            raise ValueError(
                f"Expected experts ≥ top_k ≥ 1, got experts {experts} and top_k {top_k}. Pass other numbers."
            )
        self.gate = gate
        self.active = experts if top_k is None else top_k
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(dim, hidden) for _ in range(experts))

    def weights(self, x: Float[Tensor, "*tokens dim"]) -> Float[Tensor, "*tokens experts"]:
        """Return g(x): zero for the experts that are not active, and summing to one."""
        logits = self.router(x)
        if self.active < len(self.experts):
            order = logits.sort(dim=-1, descending=True, stable=True).indices
            inactive = torch.ones_like(logits, dtype=torch.bool).scatter(-1, order[..., : self.active], False)
        else:
            inactive = torch.zeros_like(logits, dtype=torch.bool)
        if self.gate == "softmax":
            return logits.masked_fill(inactive, float("-inf")).softmax(-1)
        scores = logits.sigmoid().masked_fill(inactive, 0.0)
        return scores / scores.sum(-1, keepdim=True)

    def forward(self, x: Float[Tensor, "*tokens dim"]) -> Float[Tensor, "*tokens dim"]:
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return (self.weights(x).unsqueeze(-1) * outputs).sum(-2)
