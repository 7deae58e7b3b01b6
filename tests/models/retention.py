"""Linear-attention mixers in plain torch: retention with a decay mask and group norm, and gated linear attention."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Retention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.g_proj = nn.Linear(dim, dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.group_norm = nn.GroupNorm(heads, dim)
        self.register_buffer("decay", torch.log(1 - 2 ** (-5 - torch.arange(heads, dtype=torch.float))))

    def forward(self, x):
        b, n, d = x.shape
        q = self.q_proj(x).view(b, n, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, n, self.heads, self.head_dim).transpose(1, 2) * self.head_dim**-0.5
        v = self.v_proj(x).view(b, n, self.heads, self.head_dim).transpose(1, 2)
        index = torch.arange(n)
        mask = (index[:, None] >= index[None, :]).to(x.dtype)
        decay = torch.exp((index[:, None] - index[None, :]) * self.decay[:, None, None]) * mask
        o = ((q @ k.transpose(-1, -2)) * decay) @ v
        o = o.transpose(1, 2).reshape(b * n, d)
        o = self.group_norm(o).reshape(b, n, d)
        return self.out_proj(F.silu(self.g_proj(x)) * o)


class GatedLinearAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.gk = nn.Sequential(nn.Linear(dim, 2, bias=False), nn.Linear(2, dim, bias=True))
        self.gate = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, self.heads, self.head_dim) for f in (self.q, self.k, self.v))
        alpha = torch.sigmoid(self.gk(x)).view(b, n, self.heads, self.head_dim)
        state = x.new_zeros(b, self.heads, self.head_dim, self.head_dim)
        out = []
        for t in range(n):
            state = state * alpha[:, t].unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        o = torch.stack(out, 1).reshape(b, n, -1)
        return self.o(o * torch.sigmoid(self.gate(x)))


class LinearAttention(nn.Module):
    """Kernel features elu(x) + 1, with the running normaliser."""

    def __init__(self, dim):
        super().__init__()
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        context = torch.einsum("bnd,bne->bde", k, v)
        z = 1.0 / torch.einsum("bnd,bd->bn", q, k.sum(dim=1))
        return self.to_out(torch.einsum("bnd,bde,bn->bne", q, context, z))


def build(width=4):
    return Retention(width, 2), (torch.randn(2, 4, width),), {}


def build_gated(width=4):
    return GatedLinearAttention(width, 2), (torch.randn(2, 4, width),), {}


def build_linear(width=4):
    return LinearAttention(width), (torch.randn(2, 4, width),), {}
