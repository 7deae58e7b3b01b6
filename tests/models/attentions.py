"""Attention in the ways people write it: stacked heads, grouped with query/key norm, latent, biased by distance."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotary(x, base=10000.0):
    n, d = x.shape[-2:]
    inv_freq = 1.0 / (base ** (torch.arange(0, d, 2, dtype=x.dtype) / d))
    freqs = torch.outer(torch.arange(n, dtype=x.dtype), inv_freq)
    emb = torch.cat((freqs, freqs), dim=-1)
    return x * emb.cos() + rotate_half(x) * emb.sin()


class StackedHeads(nn.Module):
    """Projections stored as (heads, d, d_h), as in TransformerLens and in JAX-like code."""

    def __init__(self, d_model, n_heads, d_head):
        super().__init__()
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d_head))
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d_head))
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d_head))
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model))
        self.b_Q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))
        self.d_head = d_head
        self.register_buffer("IGNORE", torch.tensor(-1e5))

    def forward(self, x):
        q = torch.einsum("bpd,hde->bphe", x, self.W_Q) + self.b_Q
        k = torch.einsum("bpd,hde->bphe", x, self.W_K) + self.b_K
        v = torch.einsum("bpd,hde->bphe", x, self.W_V) + self.b_V
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / math.sqrt(self.d_head)
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1]), diagonal=1).bool()
        pattern = scores.masked_fill(mask, self.IGNORE.item()).softmax(-1)
        z = torch.einsum("bkhe,bhqk->bqhe", v, pattern)
        return torch.einsum("bqhe,hed->bqd", z, self.W_O) + self.b_O


class GroupedNormed(nn.Module):
    """Grouped queries, RMS norm of queries and keys, half-split rotary positions."""

    def __init__(self, dim, heads, kv_heads, head_dim):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=False)
        self.kv_proj = nn.Linear(dim, 2 * kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=False)
        self.q_norm, self.k_norm = RMSNorm(head_dim), RMSNorm(head_dim)

    def forward(self, x):
        b, n, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, n, self.heads, self.head_dim)).transpose(1, 2)
        k, v = self.kv_proj(x).view(b, n, 2, self.kv_heads, self.head_dim).unbind(2)
        k, v = self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        q, k = rotary(q), rotary(k)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, n, -1))


class Alibi(nn.Module):
    """Linear distance biases, one slope per head; multi-query keys and values."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * self.head_dim)
        self.o = nn.Linear(dim, dim)
        self.register_buffer("slopes", torch.tensor([2 ** (-8 * (i + 1) / heads) for i in range(heads)]))

    def forward(self, x):
        b, n, d = x.shape
        q = self.q(x).view(b, n, self.heads, self.head_dim).permute(0, 2, 1, 3)
        k, v = self.kv(x).chunk(2, -1)
        distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
        scores = torch.einsum("bhid,bjd->bhij", q, k) / math.sqrt(self.head_dim)
        scores = scores + self.slopes[:, None, None] * distance
        scores = scores.masked_fill(distance > 0, float("-inf"))
        y = torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v)
        return self.o(y.permute(0, 2, 1, 3).reshape(b, n, d))


class RelativeBias(nn.Module):
    """T5's attention: no scaling, no biases, a learned table of bucketed distances shared by all heads' rows."""

    def __init__(self, dim, heads, buckets=4):
        super().__init__()
        self.heads, self.head_dim, self.buckets = heads, dim // heads, buckets
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.relative_attention_bias = nn.Embedding(buckets, heads)
        self.layer_norm = RMSNorm(dim)
        self.wi, self.wo = nn.Linear(dim, dim + 1, bias=False), nn.Linear(dim + 1, dim, bias=False)

    def forward(self, x):
        b, n, d = x.shape
        h = self.layer_norm(x)
        q, k, v = (f(h).view(b, n, self.heads, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        bucket = (torch.arange(n)[:, None] - torch.arange(n)[None, :]).abs().clamp(max=self.buckets - 1)
        bias = self.relative_attention_bias(bucket).permute(2, 0, 1).unsqueeze(0)
        scores = torch.matmul(q, k.transpose(3, 2)) + bias
        y = torch.matmul(scores.softmax(-1), v).transpose(1, 2).contiguous().view(b, n, d)
        x = x + self.o(y)
        return x + self.wo(F.relu(self.wi(x)))


class Latent(nn.Module):
    """Multi-head latent attention: queries and keys through low-rank factors with norms, one shared rotary key."""

    def __init__(self, dim, heads, q_rank, kv_rank, nope, rope, v_dim):
        super().__init__()
        self.heads, self.nope, self.rope, self.v_dim, self.kv_rank = heads, nope, rope, v_dim, kv_rank
        self.wq_a = nn.Linear(dim, q_rank, bias=False)
        self.q_norm = RMSNorm(q_rank)
        self.wq_b = nn.Linear(q_rank, heads * (nope + rope), bias=False)
        self.wkv_a = nn.Linear(dim, kv_rank + rope, bias=False)
        self.kv_norm = RMSNorm(kv_rank)
        self.wkv_b = nn.Linear(kv_rank, heads * (nope + v_dim), bias=False)
        self.wo = nn.Linear(heads * v_dim, dim, bias=False)

    def forward(self, x):
        b, n, _ = x.shape
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(b, n, self.heads, self.nope + self.rope)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], dim=-1)
        kv, k_pe = torch.split(self.wkv_a(x), [self.kv_rank, self.rope], dim=-1)
        kv = self.wkv_b(self.kv_norm(kv)).view(b, n, self.heads, self.nope + self.v_dim)
        k_nope, v = torch.split(kv, [self.nope, self.v_dim], dim=-1)
        q_pe = rotary(q_pe.transpose(1, 2)).transpose(1, 2)
        k_pe = rotary(k_pe.unsqueeze(1)).transpose(1, 2)
        q = torch.cat([q_nope, q_pe], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, -1, self.heads, -1)], dim=-1)
        scores = torch.einsum("bshd,bthd->bsht", q, k) * (self.nope + self.rope) ** -0.5
        y = torch.einsum("bsht,bthd->bshd", scores.softmax(dim=-1), v)
        return self.wo(y.flatten(2))


class Perceiver(nn.Module):
    """Learned latents read an input by cross-attention, and a learned query reads the latents."""

    def __init__(self, inputs, dim, latents, outputs):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, dim))
        self.norm_latents, self.norm_context = nn.LayerNorm(dim), nn.LayerNorm(inputs)
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(inputs, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, outputs))

    def forward(self, data):
        x = self.latents.unsqueeze(0).expand(data.shape[0], -1, -1)
        q = self.to_q(self.norm_latents(x))
        k, v = self.to_kv(self.norm_context(data)).chunk(2, dim=-1)
        sim = torch.einsum("bid,bjd->bij", q, k) * q.shape[-1] ** -0.5
        x = x + self.to_out(torch.einsum("bij,bjd->bid", sim.softmax(dim=-1), v))
        return self.head(x.mean(dim=1))


class Sinks(nn.Module):
    """Learned sink logits in the softmax, and a soft cap of the scores."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.sinks = nn.Parameter(torch.randn(heads))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(self.head_dim)
        sink = self.sinks.reshape(1, -1, 1, 1).expand(b, -1, n, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, d))


class SoftCap(Sinks):
    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        scores = torch.tanh(q @ k.mT / 5.0) * 5.0 + self.sinks[:, None, None]
        return self.out((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, d))


def _tokens(width):
    return (torch.randn(2, 4, width),)


def build(width=4):
    return StackedHeads(width, 2, 2), _tokens(width), {}


def build_grouped(width=4):
    return GroupedNormed(width, 2, 1, 4), _tokens(width), {}


def build_alibi(width=4):
    return Alibi(width, 2), _tokens(width), {}


def build_relative(width=4):
    return RelativeBias(width, 2), _tokens(width), {}


def build_latent(width=4):
    return Latent(width, 2, 3, 3, 2, 2, 2), _tokens(width), {}


def build_perceiver(width=4):
    return Perceiver(3, width, 3, 2), (torch.randn(2, 5, 3),), {}


def build_sinks(width=4):
    return Sinks(width, 2), _tokens(width), {}


def build_softcap(width=4):
    return SoftCap(width, 2), _tokens(width), {}
