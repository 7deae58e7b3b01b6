"""Multi-head softmax attention (paper, equations 5 and 7) with its options, and the blog's ReLU attention."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

Pairing = Literal["interleaved", "half"]


def rotation_angles(length: int, pairs: int, like: Float[Tensor, "..."]) -> Float[Tensor, "length pairs"]:
    """Return p·φ_j with φ_j = 10000^(−j/pairs): the angle of position p in plane j."""
    precision = torch.promote_types(like.dtype, torch.float32)
    exponent = torch.arange(pairs, dtype=precision, device=like.device) / pairs
    position = torch.arange(length, dtype=precision, device=like.device)
    return position[:, None] * 10000.0**-exponent


def rotate(x: Float[Tensor, "*heads length width"], pairing: Pairing) -> Float[Tensor, "*heads length width"]:
    """Return x_p R_p for every position p, so that ⟨q_p R_p, k_q R_q⟩ = q_p R_{p−q} k_qᵀ.

    The planes are the columns (2j, 2j+1) when interleaved, as in the paper, or (j, j + width/2) when half-split.
    """
    pairs = x.shape[-1] // 2
    angles = rotation_angles(x.shape[-2], pairs, x)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    planes = x.unflatten(-1, (pairs, 2) if pairing == "interleaved" else (2, pairs))
    axis = -1 if pairing == "interleaved" else -2
    first, second = planes.unbind(axis)
    return torch.stack((first * cos + second * sin, second * cos - first * sin), axis).flatten(-2)


class Attention(nn.Module):
    """Σ_i softmax(scale · x Q_i (x K_i)ᵀ) x V_i O_iᵀ over heads i.

    Args:
        dim: width of the tokens.
        heads: number of query heads.
        head_dim: width of a head; by default dim / heads.
        kv_heads: number of key heads; fewer than `heads` share keys and values between consecutive query heads.
        rotary: False, True or "interleaved" (the paper's pairing), or "half".
        causal: whether a token sees no later one.
        bias: whether the linear maps have biases.
        qk_norm: whether queries and keys are normalised per head (RMS, with gains shared by all heads) before rotary.
        scale: factor of the logits; by default 1/√head_dim. Equation (5) as printed has scale 1.
        eps: ε of the norms.

    Raises:
        ValueError: sizes do not fit each other.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        rotary: bool | Pairing = False,
        causal: bool = False,
        bias: bool = False,
        qk_norm: bool = False,
        scale: float | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if heads < 1 or dim < 1:
            raise ValueError(
                f"Expected dim and heads of at least 1, got dim {dim} and heads {heads}. Pass larger ones."
            )
        if head_dim is None and dim % heads:
            raise ValueError(f"Expected dim to be a multiple of heads, got dim {dim} and heads {heads}. Pass head_dim.")
        self.dim = dim
        self.heads = heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        if self.kv_heads < 1 or heads % self.kv_heads:
            raise ValueError(
                f"Expected heads to be a multiple of kv_heads, got {heads} and {self.kv_heads}. Pass other ones."
            )
        if rotary not in (False, True, "interleaved", "half"):
            raise ValueError(
                f'Expected rotary to be a bool, "interleaved" or "half", got {rotary!r}. Pass one of them.'
            )
        self.rotary: Pairing | None = "interleaved" if rotary is True else rotary or None
        if self.rotary and self.head_dim % 2:
            raise ValueError(f"Expected an even head_dim for rotary positions, got {self.head_dim}. Pass an even one.")
        self.causal = causal
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.q = nn.Linear(dim, heads * self.head_dim, bias=bias)
        self.k = nn.Linear(dim, self.kv_heads * self.head_dim, bias=bias)
        self.v = nn.Linear(dim, self.kv_heads * self.head_dim, bias=bias)
        self.o = nn.Linear(heads * self.head_dim, dim, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=eps) if qk_norm else None
        # Keys pass through here on their way to the scores, so that hooks can see them.
        self.keys = nn.Identity()

    def forward(self, x: Float[Tensor, "*batch length dim"]) -> Float[Tensor, "*batch length dim"]:
        q, k = self.queries_and_keys(x)
        v = self.v(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(-2, -3)
        k = self.keys(k)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, -3) for t in (k, v))
        logits = self.scale * q @ k.mT
        if self.causal:
            future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            logits = logits.masked_fill(future, float("-inf"))
        return self.o((logits.softmax(-1) @ v).transpose(-2, -3).flatten(-2))

    def queries_and_keys(
        self, x: Float[Tensor, "*batch length dim"]
    ) -> tuple[Float[Tensor, "*batch heads length width"], Float[Tensor, "*batch kv_heads length width"]]:
        """Queries and keys as the scores use them: after norms and rotary positions."""
        q = self._split(self.q(x), self.q_norm)
        k = self._split(self.k(x), self.k_norm)
        return (rotate(q, self.rotary), rotate(k, self.rotary)) if self.rotary else (q, k)

    def _split(
        self, x: Float[Tensor, "*batch length wide"], norm: nn.Module | None
    ) -> Float[Tensor, "*batch heads length width"]:
        heads = x.unflatten(-1, (-1, self.head_dim)).transpose(-2, -3)
        return heads if norm is None else norm(heads)


class ReluAttention(nn.Module):
    """relu(x W_QK xᵀ) x W_V, the layer of the blog post; W_QK is one matrix and not a product.

    Args:
        dim: width of the tokens.
        out: width of the outputs.

    Raises:
        ValueError: a size is less than one.
    """

    def __init__(self, dim: int, out: int = 1) -> None:
        super().__init__()
        if dim < 1 or out < 1:
            raise ValueError(f"Expected dim and out of at least 1, got dim {dim} and out {out}. Pass larger ones.")
        self.qk = nn.Parameter(torch.randn(dim, dim) * dim**-0.5)
        self.v = nn.Parameter(torch.randn(dim, out) * dim**-0.5)

    def forward(self, x: Float[Tensor, "*batch length dim"]) -> Float[Tensor, "*batch length out"]:
        return torch.relu(x @ self.qk @ x.mT) @ x @ self.v
