"""Find a bug in the backward pass of a custom attention function, without a second implementation to compare with.

The function below saves memory by sharing one key and value head among all query heads. Its forward pass is right, and
so is the shape of every gradient; training with it runs and the loss goes down.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import conserved


class SharedKeyAttention(torch.autograd.Function):
    """softmax(q kᵀ/√d) v for heads of queries and one shared head of keys and values, with its own backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: (heads, tokens, d); k, v: (1, tokens, d)."""
        p = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""
        q, k, v, p = ctx.saved_tensors
        scale = 1 / math.sqrt(q.shape[-1])
        dp = grad[0] @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        dk = scale * ds.mT @ q
        dv = p.mT @ grad[0]
        return scale * ds @ k, dk.mean(0, keepdim=True), dv.sum(0, keepdim=True)


class Attention(nn.Module):
    """Projections around the kernel."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.q, self.o = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.k, self.v = nn.Linear(dim, self.width), nn.Linear(dim, self.width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens in, tokens out."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.width)).transpose(0, 1) for layer in (self.q, self.k, self.v))
        attended: Tensor = SharedKeyAttention.apply(q, k, v)
        return self.o(attended.transpose(0, 1).flatten(1))


def main() -> None:
    """One backward pass, one audit; then the same with the defect mended."""
    torch.manual_seed(0)
    model = Attention(dim=64, heads=4)
    x, target = torch.randn(2, 32, 64)
    nn.functional.mse_loss(model(x), target).backward()
    # Which identities the gradients must satisfy is read off the forward pass, whatever the module is.
    laws = conserved.recognize(model, x)
    print(conserved.audit(model, laws).summary())

    # One key head serves four query heads: their gradients add up, they are not averaged.
    for parameter in model.k.parameters():
        assert parameter.grad is not None
        parameter.grad *= 4
    print("\nwith dK summed over the heads that share it:")
    print(conserved.audit(model, laws).verdict)


if __name__ == "__main__":
    main()
