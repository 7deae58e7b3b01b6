"""A GPT as people type it: one fused projection for queries, keys and values, a tied head, functional layer norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    """A layer norm with or without a bias, through the functional form."""

    def __init__(self, width: int, bias: bool, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class CausalSelfAttention(nn.Module):
    """Heads side by side in one projection."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in self.c_attn(x).split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        return out


class Block(nn.Module):
    """Pre-norm attention and a GELU network."""

    def __init__(self, width: int, heads: int, hidden: int, bias: bool, eps: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = Norm(width, bias, eps), Norm(width, bias, eps)
        self.attn = CausalSelfAttention(width, heads, bias)
        self.c_fc, self.c_proj = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """Embedding to logits; the head is the embedding."""

    def __init__(
        self,
        *,
        vocab: int = 5,
        length: int = 4,
        width: int = 4,
        heads: int = 2,
        hidden: int = 16,
        depth: int = 1,
        bias: bool = True,
        eps: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.h = nn.ModuleList([Block(width, heads, hidden, bias, eps) for _ in range(depth)])
        self.ln_f = Norm(width, bias, eps)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits
