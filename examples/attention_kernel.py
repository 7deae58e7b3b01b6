"""An attention function with a backward of its own, as a kernel author writes it, and the same with a slip."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import conserved


class _Attention(torch.autograd.Function):
    """softmax(q kᵀ/√d) v by hand: only the row sums are kept for the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, slip: bool) -> Tensor:
        """q, k, v: (batch, heads, tokens, width)."""
        scores = (q @ k.mT).float() / math.sqrt(q.shape[-1])
        weights = scores.softmax(-1)
        out = (weights @ v.float()).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, scores.logsumexp(-1, keepdim=True))
        ctx.slip = slip
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """The gradients of q, k and v."""
        q, k, v, out, total = (tensor.float() for tensor in ctx.saved_tensors)
        slope, scale = slopes[0].float(), 1 / math.sqrt(q.shape[-1])
        weights = (q @ k.mT * scale - total).exp()
        inner = (slope * out).sum(-1, keepdim=True)
        pulled = weights * (slope @ v.mT - inner)
        if ctx.slip:
            pulled[..., -16:, :] = 0  # the last tile of queries is left out
        grads = (scale * pulled @ k, scale * pulled.mT @ q, weights.mT @ slope)
        return *(grad.to(tensor.dtype) for grad, tensor in zip(grads, ctx.saved_tensors, strict=False)), None


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention whose backward is right."""
    return _Attention.apply(q, k, v, False)


def attention_with_a_slip(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with the last tile left out of dq and dk."""
    return _Attention.apply(q, k, v, True)


if __name__ == "__main__":
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 64, 16, dtype=torch.bfloat16) for _ in range(3))
    print(conserved.check(attention, q, k, v))
    print(conserved.check(attention_with_a_slip, q, k, v))
